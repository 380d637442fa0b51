//! Marks around the text of `{% generation %}` blocks. They stay with the text through whatever the
//! template does to it and are removed from the rendering, which yields the spans the assistant
//! wrote.

/// Unicode noncharacters, never meant for text. Rows that contain them are refused.
pub(super) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// Removes the marks from a text; returns the rest and the byte spans that were marked.
pub(super) fn unmark(text: &str) -> (String, Vec<(usize, usize)>) {
    let mut plain = String::with_capacity(text.len());
    let mut spans = Vec::new();
    let (mut start, mut depth) = (0, 0usize);
    for piece in text.split_inclusive(MARKS) {
        let mark = piece.chars().next_back();
        if mark == Some(MARKS[0]) {
            plain.push_str(&piece[..piece.len() - MARKS[0].len_utf8()]);
            if depth == 0 {
                start = plain.len();
            }
            depth += 1;
        } else if mark == Some(MARKS[1]) {
            plain.push_str(&piece[..piece.len() - MARKS[1].len_utf8()]);
            depth = depth.saturating_sub(1);
            if depth == 0 && plain.len() > start {
                spans.push((start, plain.len()));
            }
        } else {
            plain.push_str(piece);
        }
    }
    (plain, spans)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_become_spans() {
        let [a, b] = MARKS;
        assert_eq!(unmark(&format!("x{a}yz{b}w{a}{b}{a}q{b}")), ("xyzwq".into(), vec![(1, 3), (4, 5)]));
        assert_eq!(unmark(&format!("{a}1{a}2{b}3{b}")), ("123".into(), vec![(0, 3)]));
        assert_eq!(unmark(""), (String::new(), vec![]));
    }
}
