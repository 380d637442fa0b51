//! Names that come from files: which of them may be opened, and how they are displayed.
//!
//! A name inside a manifest or an index may only refer to a file in the same folder, and a name
//! shown on a terminal must not contain control sequences.

/// Longest file name that common file systems support.
const LENGTH_MAX: usize = 255;
/// Characters of untrusted text that a message repeats.
const SHOWN_MAX: usize = 160;
/// Characters of a parser's message.
const TOLD_MAX: usize = 600;

/// Whether a name is a file directly in its folder: no separators, no parent, no drive, no control
/// characters.
pub fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= LENGTH_MAX
        && name != "."
        && name != ".."
        && !name.chars().any(|c| matches!(c, '/' | '\\' | ':') || c.is_control())
}

/// A number with its noun: "1 update", "2 updates".
pub fn counted(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Untrusted text in backquotes, shortened, with control characters escaped.
pub fn quoted(text: &str) -> String {
    format!("`{}`", harmless(text, SHOWN_MAX))
}

/// A parser's message, which may repeat what it read.
pub(crate) fn told(error: &impl std::fmt::Display) -> String {
    harmless(&error.to_string(), TOLD_MAX)
}

/// Untrusted text, at most `most` characters, with control characters escaped.
pub fn harmless(text: &str, most: usize) -> String {
    let mut shown = String::new();
    for (count, c) in text.chars().enumerate() {
        if count == most {
            shown.push('…');
            break;
        }
        if c.is_control() || is_direction(c) {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Characters that reorder the text around them.
fn is_direction(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_beside_the_file_are_plain() {
        for good in ["model.safetensors", "model-00001-of-00002.safetensors", "a b", "..a", ".hidden", "ü"] {
            assert!(is_plain(good), "{good}");
        }
        let long = "a".repeat(256);
        for bad in ["", ".", "..", "/etc/passwd", "a/b", "../a", "a\\b", "C:a", "a\0", "a\n", long.as_str()] {
            assert!(!is_plain(bad), "{bad:?}");
        }
    }

    #[test]
    fn shown_text_is_short_and_harmless() {
        assert_eq!(quoted("lm_head.weight"), "`lm_head.weight`");
        assert_eq!(quoted("a\u{1b}[31m\u{202e}"), "`a\\u{1b}[31m\\u{202e}`");
        assert_eq!(quoted(&"ü".repeat(5000)).chars().count(), SHOWN_MAX + 3);
    }
}
