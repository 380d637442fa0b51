//! Text that becomes part of a page.

use isobit_proof::name::harmless;

/// Characters of one name or value on the page.
const TEXT_MAX: usize = 2000;

/// Formats into a string, which cannot fail.
macro_rules! put {
    ($out:expr, $($what:tt)*) => {{
        use std::fmt::Write as _;
        let _ = write!($out, $($what)*);
    }};
}
pub(super) use put;

/// Untrusted text, shortened, without control characters and without meaning to a browser.
pub(super) fn escaped(text: &str) -> String {
    markup_free(&harmless(text, TEXT_MAX))
}

/// The same for text of several lines and any length.
pub(super) fn escaped_lines(text: &str) -> String {
    text.lines().map(|line| escaped(line) + "\n").collect()
}

fn markup_free(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_a_name_is_markup() {
        assert_eq!(escaped("<b a='1' b=\"2\">&amp;"), "&lt;b a=&#39;1&#39; b=&quot;2&quot;&gt;&amp;amp;");
        assert_eq!(escaped("a\u{1b}[31m\u{202e}\0"), "a\\u{1b}[31m\\u{202e}\\u{0}");
        assert!(escaped(&"x".repeat(5000)).chars().count() <= TEXT_MAX + 1);
        assert_eq!(escaped_lines("a<\nb"), "a&lt;\nb\n");
    }
}
