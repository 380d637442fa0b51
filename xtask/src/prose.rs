//! Width of prose: Markdown and comments wrap at 100 columns. Code, tables, headings and words that
//! cannot be broken (a link, a path) are exempt.

use std::path::Path;

/// Columns of a line of prose.
const COLUMNS_MAX: usize = 100;

/// Lines, counted from 1, whose prose is too wide.
pub(crate) fn wide_lines(path: &Path, text: &str) -> Vec<usize> {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("md") => wide(text, Some),
        Some("rs" | "cl" | "cu" | "cuh" | "h") => wide(text, comment),
        _ => Vec::new(),
    }
}

/// The text of a comment line; None for code, even with a trailing comment.
fn comment(line: &str) -> Option<&str> {
    let line = line.trim_start();
    ["//!", "///", "//"].iter().find_map(|mark| line.strip_prefix(mark))
}

fn wide<'a>(text: &'a str, prose: impl Fn(&'a str) -> Option<&'a str>) -> Vec<usize> {
    let mut found = Vec::new();
    let mut in_fence = false;
    for (index, line) in text.lines().enumerate() {
        let Some(said) = prose(line) else {
            in_fence = false;
            continue;
        };
        let said = said.strip_prefix(' ').filter(|_| said.len() != line.len()).unwrap_or(said);
        if said.trim_start().starts_with("```") {
            in_fence = !in_fence;
        }
        let exempt = in_fence || said.starts_with("    ") || said.trim_start().starts_with(['|', '#']);
        if !exempt && line.chars().count() > COLUMNS_MAX && is_breakable(line) {
            found.push(index + 1);
        }
    }
    found
}

/// Whether there is a space to break at within the limit, after the line's prefix.
fn is_breakable(line: &str) -> bool {
    let opening = line.trim_start_matches([' ', '/', '!', '-', '*', '>']).len();
    let kept: String = line.chars().take(COLUMNS_MAX + 1).collect();
    kept.get(line.len() - opening..).is_some_and(|kept| kept.contains(' '))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<usize> {
        wide_lines(Path::new(path), text)
    }

    #[test]
    fn wide_prose_is_found_in_documents_and_comments() {
        let wide = "word ".repeat(25);
        assert_eq!(lines("docs/a.md", &format!("short\n{wide}\n- {wide}\n")), [2, 3]);
        assert_eq!(lines("xtask/src/a.rs", &format!("//! {wide}\n    /// {wide}\nfn a() {{}} // {wide}\n")), [1, 2]);
        assert_eq!(lines("tools/a.cl", &format!("// {wide}\n")), [1]);
        assert!(lines("tools/a.py", &format!("# {wide}\n")).is_empty());
        let hundred = "é".repeat(50) + " " + &"é".repeat(49);
        assert!(lines("README.md", &hundred).is_empty());
        assert_eq!(lines("README.md", &format!("{hundred}é")), [1]);
    }

    #[test]
    fn tables_headings_code_and_long_words_are_exempt() {
        let wide = "word ".repeat(25);
        let text = format!("| {wide} |\n# {wide}\n\n```sh\n{wide}\n```\n\n    {wide}\n- {}\n", "x".repeat(120));
        assert!(lines("docs/a.md", &text).is_empty());
        let text = format!("/// ```\n/// {wide}\n/// ```\n/// | {wide} |\n/// {wide}\n");
        assert_eq!(lines("xtask/src/a.rs", &text), [5]);
    }
}
