//! `{% generation %}` for an engine that does not know it. The source is rewritten before it is parsed: the tag becomes a
//! `call` block of a function that puts marks around what the block prints, and the marks are taken out of the text again.
//! As in Jinja2 the block is a call with a scope of its own, and white space around the tags is treated alike.

use minijinja::value::Kwargs;
use minijinja::{Error, State, Value};

/// The function the block calls.
pub(super) const FUNCTION: &str = "isobit_generation";
/// Noncharacters of Unicode, never meant for text. Rows that contain them are refused.
pub(super) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// The source with its generation tags rewritten, and whether there were any.
pub(super) fn rewrite(source: &str) -> (String, bool) {
    let mut rewritten = String::with_capacity(source.len());
    let mut marked = false;
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (before, tag) = rest.split_at(at);
        rewritten.push_str(before);
        let length = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map_or(tag.len(), |end| end + 2),
            Some(b'{') => tag_end(tag, "}}"),
            Some(b'%') => {
                let length = tag_end(tag, "%}");
                let inside = tag.get(2..length.saturating_sub(2)).unwrap_or_default();
                let word = inside.trim_matches(['-', '+']).trim();
                if let Some(call) = replacement(word) {
                    rewritten.push_str(&tag[..length].replacen(word, &call, 1));
                    marked |= word == "generation";
                    rest = &tag[length..];
                    continue;
                }
                if word == "raw" { length + raw_length(&tag[length..]) } else { length }
            }
            _ => 1,
        };
        rewritten.push_str(&tag[..length]);
        rest = &tag[length..];
    }
    rewritten.push_str(rest);
    (rewritten, marked)
}

fn replacement(word: &str) -> Option<String> {
    match word {
        "generation" => Some(format!("call {FUNCTION}()")),
        "endgeneration" => Some("endcall".to_owned()),
        _ => None,
    }
}

/// Length of a tag up to and with its end, which does not count inside a string.
fn tag_end(tag: &str, end: &str) -> usize {
    let bytes = tag.as_bytes();
    let mut quote = None;
    let mut at = 2;
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(mark), byte) if byte == mark => quote = None,
            (None, byte @ (b'"' | b'\'')) => quote = Some(byte),
            (None, _) if bytes[at..].starts_with(end.as_bytes()) => return at + 2,
            _ => {}
        }
        at += 1;
    }
    tag.len()
}

/// Length of what follows a raw tag, up to the tag that ends it.
fn raw_length(text: &str) -> usize {
    let mut from = 0;
    while let Some(at) = text[from..].find("{%") {
        let start = from + at;
        let length = tag_end(&text[start..], "%}");
        let inside = text[start..].get(2..length.saturating_sub(2)).unwrap_or_default();
        if inside.trim_matches(['-', '+']).trim() == "endraw" {
            return start;
        }
        from = start + 2;
    }
    text.len()
}

/// What the `call` block calls: the block's text between marks.
pub(super) fn function(state: &State, options: &Kwargs) -> Result<Value, Error> {
    let caller: Value = options.get("caller")?;
    let text = caller.call(state, &[])?;
    Ok(Value::from(format!("{}{text}{}", MARKS[0], MARKS[1])))
}

/// Takes the marks out of a text: what is left, and the byte spans that were marked.
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
    fn tags_are_rewritten_with_their_white_space_control() {
        let cases = [
            ("{% generation %}", "{% call isobit_generation() %}"),
            ("{%- generation -%}a{%-endgeneration%}", "{%- call isobit_generation() -%}a{%-endcall%}"),
            ("{%+ generation +%}", "{%+ call isobit_generation() +%}"),
            ("{%generation%}", "{%call isobit_generation()%}"),
        ];
        for (source, want) in cases {
            assert_eq!(rewrite(source), (want.to_owned(), true));
        }
    }

    #[test]
    fn what_only_looks_like_a_tag_stays() {
        for source in [
            "{# {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{{ \"a\\\"{% generation %}\" }}",
            "{% raw %}{% generation %}{% endraw %}",
            "{% set x = '{% generation %}' %}",
            "{% if generation %}{% generation",
            "{",
            "{%",
            "{% raw %}",
            "a } b {x} ü {% set ü %}",
        ] {
            assert_eq!(rewrite(source), (source.to_owned(), false));
        }
    }

    #[test]
    fn marks_become_spans() {
        let [a, b] = MARKS;
        assert_eq!(unmark(&format!("x{a}yz{b}w{a}{b}{a}q{b}")), ("xyzwq".into(), vec![(1, 3), (4, 5)]));
        assert_eq!(unmark(&format!("{a}1{a}2{b}3{b}")), ("123".into(), vec![(0, 3)]));
        assert_eq!(unmark(""), (String::new(), vec![]));
    }
}
