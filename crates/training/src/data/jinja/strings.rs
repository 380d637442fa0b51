//! Building blocks of Python's string methods: white space, stripping, splitting, case.

/// White space in Python: Rust's, and the four ASCII separators.
pub(super) fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// The sides to strip.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Side {
    Left,
    Right,
    Both,
}

pub(super) fn strip<'a>(text: &'a str, characters: Option<&str>, side: Side) -> &'a str {
    let strips = |character: char| characters.map_or_else(|| is_space(character), |set| set.contains(character));
    let text = if side == Side::Right { text } else { text.trim_start_matches(strips) };
    if side == Side::Left { text } else { text.trim_end_matches(strips) }
}

/// At most `limit` splits, from the left or the right. `None` for an empty separator.
pub(super) fn split<'a>(
    text: &'a str,
    separator: Option<&str>,
    limit: usize,
    from_right: bool,
) -> Option<Vec<&'a str>> {
    Some(match separator {
        Some("") => return None,
        Some(separator) if from_right => {
            let mut pieces: Vec<&str> = text.rsplitn(limit.saturating_add(1), separator).collect();
            pieces.reverse();
            pieces
        }
        Some(separator) => text.splitn(limit.saturating_add(1), separator).collect(),
        None => split_at_space(text, limit, from_right),
    })
}

/// Splits at runs of white space; the rest past `limit` splits stays whole.
fn split_at_space(text: &str, limit: usize, from_right: bool) -> Vec<&str> {
    // The unsplit rest keeps its white space on the far side.
    let mut rest = strip(text, None, if from_right { Side::Right } else { Side::Left });
    let mut pieces = Vec::new();
    while !rest.is_empty() {
        let cut = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = cut.filter(|_| pieces.len() < limit) else {
            pieces.push(rest);
            break;
        };
        if from_right {
            pieces.push(strip(&rest[at..], None, Side::Left));
            rest = strip(&rest[..at], None, Side::Right);
        } else {
            pieces.push(&rest[..at]);
            rest = strip(&rest[at..], None, Side::Left);
        }
    }
    if from_right {
        pieces.reverse();
    }
    pieces
}

/// Lines as split by Python's `splitlines`.
pub(super) fn lines(text: &str, keep: bool) -> Vec<&str> {
    let breaks =
        |c: char| matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some((at, found)) = rest.char_indices().find(|(_, c)| breaks(*c)) else {
            lines.push(rest);
            break;
        };
        let pair = rest[at..].starts_with("\r\n");
        let end = at + if pair { 2 } else { found.len_utf8() };
        lines.push(&rest[..if keep { end } else { at }]);
        rest = &rest[end..];
    }
    lines
}

fn upper_first(word: &str, text: &mut String) {
    let mut characters = word.chars();
    text.extend(characters.next().into_iter().flat_map(char::to_uppercase));
    text.push_str(&characters.as_str().to_lowercase());
}

/// The first character in upper case, the others in lower case.
pub(super) fn capitalize(text: &str) -> String {
    let mut capitalized = String::with_capacity(text.len());
    upper_first(text, &mut capitalized);
    capitalized
}

/// The method `title`: a word begins after any character without case.
pub(super) fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut inside = false;
    for character in text.chars() {
        if inside {
            titled.extend(character.to_lowercase());
        } else {
            titled.extend(character.to_uppercase());
        }
        inside = is_cased(character);
    }
    titled
}

/// The filter `title`: a word begins after white space, a hyphen or an opening bracket.
pub(super) fn title_filter(text: &str) -> String {
    let splits = |c: char| is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
    let mut titled = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let separators = splits(first);
        let end = rest.find(|c| splits(c) != separators).unwrap_or(rest.len());
        upper_first(&rest[..end], &mut titled);
        rest = &rest[end..];
    }
    titled
}

/// HTML escaping.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&#34;"),
            '\'' => escaped.push_str("&#39;"),
            _ => escaped.push(character),
        }
    }
    escaped
}

pub(super) fn is_cased(character: char) -> bool {
    character.is_lowercase() || character.is_uppercase()
}

/// `islower` and `isupper`: at least one cased character, and none of the other case.
pub(super) fn has_case(text: &str, wanted: fn(char) -> bool, other: fn(char) -> bool) -> bool {
    text.chars().any(wanted) && !text.chars().any(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_split_as_in_python() {
        let cases = [
            ("  a b\t c ", None, usize::MAX, false, vec!["a", "b", "c"]),
            ("  a b c ", None, 1, false, vec!["a", "b c "]),
            ("  a b c ", None, 1, true, vec!["  a b", "c"]),
            ("", None, usize::MAX, false, vec![]),
            ("", Some(","), usize::MAX, false, vec![""]),
            ("a,b,c", Some(","), 1, false, vec!["a", "b,c"]),
            ("a,b,c", Some(","), 1, true, vec!["a,b", "c"]),
            ("a,b", Some(","), 0, false, vec!["a,b"]),
        ];
        for (text, separator, limit, right, want) in cases {
            assert_eq!(split(text, separator, limit, right).expect("splits"), want, "{text:?}");
        }
        assert!(split("a", Some(""), 1, false).is_none());
        assert_eq!(strip("\x1c x\u{a0}", None, Side::Both), "x");
        assert_eq!(strip("xyax", Some("xy"), Side::Left), "ax");
        assert_eq!(lines("a\r\nb\n\nc", false), ["a", "b", "", "c"]);
        assert_eq!(lines("a\r\nb\n", true), ["a\r\n", "b\n"]);
    }

    #[test]
    fn case_changes_as_in_python() {
        assert_eq!(capitalize("hELLO wORLD"), "Hello world");
        assert_eq!(title("they're bill's 3rd"), "They'Re Bill'S 3Rd");
        assert_eq!(title_filter("they're a-b (cd 3rd"), "They're A-B (Cd 3rd");
    }
}
