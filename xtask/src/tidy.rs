//! `cargo xtask tidy`: hygiene of the repository. It is also a test, so `cargo test` reports its
//! findings.

use crate::arguments::Arguments;
use crate::dependencies;
use crate::docs;
use crate::prose::wide_lines;
use crate::repository::{read, root, text_files};
use isobit_kernels::backend::OPS;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Longest file allowed without a reason, not counting tests and tables.
const LINES_MAX: usize = 800;

/// Names without meaning.
const EMPTY_NAMES: [&str; 5] = ["utils", "common", "misc", "helpers", "manager"];

/// Folders where every op has a file of its stem, and the file's ending there.
const OP_HOMES: [(&str, &str); 6] = [
    ("crates/kernels/src/op", "rs"),
    ("crates/kernels/src/reference", "rs"),
    ("crates/kernels/src/cpu", "rs"),
    ("crates/kernels/src/gpu", "rs"),
    ("crates/kernels/gpu", "cl"),
    ("crates/conformance/src/cases", "rs"),
];

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    arguments.finish()?;
    let findings = findings()?;
    for finding in &findings {
        println!("{finding}");
    }
    if findings.is_empty() { Ok(()) } else { Err(format!("{} untidy places", findings.len())) }
}

pub(crate) fn findings() -> Result<Vec<String>, String> {
    let files = text_files()?;
    let mut findings = Vec::new();
    for path in &files {
        let text = read(path)?;
        let mut found = spacing(&text);
        found.extend(machine_paths(&text));
        found
            .extend(wide_lines(path, &text).into_iter().map(|line| (line, "prose wider than 100 columns".to_string())));
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        if ending == "rs" {
            found.extend(opening(path, &text));
            found.extend(left_behind(&text));
        }
        if is_code(ending) {
            found.extend(length(&text));
        }
        found.extend(quoted_paths(path, &text, |target| files.iter().any(|file| file.ends_with(target))));
        if ending == "md" {
            found.extend(links(path, &text, |target| root().join(target).exists()));
        }
        found.extend(name(path));
        findings.extend(found.into_iter().map(|(line, what)| format!("{}:{line}: {what}", path.display())));
    }
    findings.extend(ops(&OPS.iter().map(|(stem, _)| *stem).collect(), &files));
    findings.extend(dependencies::unused(&files, &read)?);
    findings.extend(docs::stale()?);
    for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
        if !root().join(licence).is_file() {
            findings.push(format!("{licence}: is missing"));
        }
    }
    Ok(findings)
}

/// A line number, counted from 1, and what is wrong there.
type Finding = (usize, String);

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.split('\n').enumerate().map(|(index, line)| (index + 1, line))
}

fn spacing(text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for (number, line) in numbered(text) {
        if line.contains('\t') {
            found.push((number, "a tab".to_string()));
        }
        if line.ends_with([' ', '\r']) {
            found.push((number, "a trailing space".to_string()));
        }
    }
    if !text.is_empty() && !text.ends_with('\n') {
        found.push((text.lines().count(), "no newline at the end".to_string()));
    }
    found
}

fn opening(path: &Path, text: &str) -> Vec<Finding> {
    let build_script = path.file_name().is_some_and(|name| name == "build.rs");
    let opens = text.starts_with("//!") || (build_script && text.starts_with("//"));
    if opens { vec![] } else { vec![(1, "the file does not open with `//!` and what it is".to_string())] }
}

/// Whether files with this ending are code, on the host or on a device.
fn is_code(ending: &str) -> bool {
    ["rs", "cl", "cu", "cuh", "h"].contains(&ending)
}

fn length(text: &str) -> Vec<Finding> {
    let counted = code_lines(text);
    let reason =
        text.lines().any(|line| line.trim_start().strip_prefix("// tidy: ").is_some_and(|why| !why.is_empty()));
    if counted <= LINES_MAX || reason {
        return vec![];
    }
    vec![(1, format!("{counted} lines without tests and tables, {LINES_MAX} at most, or say why: `// tidy: <reason>`"))]
}

/// Lines outside test modules that are not rows of a table.
fn code_lines(text: &str) -> usize {
    let mut count = 0;
    let mut in_tests = false;
    for line in text.lines() {
        in_tests |= line == "#[cfg(test)]";
        let row = line.trim();
        let table_row =
            row.ends_with(',') && row.starts_with(|first: char| first.is_ascii_digit() || "([\"-".contains(first));
        count += usize::from(!in_tests && !table_row);
        in_tests &= line != "}";
    }
    count
}

fn left_behind(text: &str) -> Vec<Finding> {
    // Assembled here, so that this file does not match itself.
    let macros = ["todo", "unimplemented", "dbg"].map(|name| format!("{name}!("));
    let ignored = ["#[", "ignore"].concat();
    let mut found = Vec::new();
    for (number, line) in numbered(text) {
        found.extend(
            macros
                .iter()
                .chain([&ignored])
                .filter(|what| line.contains(*what))
                .map(|what| (number, format!("`{what}`"))),
        );
    }
    found
}

fn machine_paths(text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for (number, line) in numbered(text) {
        for folder in ["work", "root", "home"].map(|name| format!("/{name}/")) {
            let absolute = line.match_indices(&folder).any(|(at, _)| {
                let before = line[..at].chars().next_back();
                before.is_none_or(|before| !before.is_alphanumeric() && !"._-*}".contains(before))
            });
            if absolute {
                found.push((number, format!("a path of one machine: {folder}")));
            }
        }
    }
    found
}

fn name(path: &Path) -> Vec<Finding> {
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let empty = EMPTY_NAMES.contains(&stem);
    if empty { vec![(1, format!("`{stem}` names nothing"))] } else { vec![] }
}

/// Broken links of a document. `exists` checks paths relative to the root.
fn links(path: &Path, text: &str, exists: impl Fn(&Path) -> bool) -> Vec<Finding> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut found = Vec::new();
    for (number, line) in numbered(text) {
        for (at, _) in line.match_indices("](") {
            let target = line[at + 2..].split([')', '#', ' ']).next().unwrap_or_default();
            let elsewhere = target.is_empty() || target.contains("://") || target.starts_with("mailto:");
            if !elsewhere && !exists(&folder.join(target)) {
                found.push((number, format!("a link to `{target}`, which does not exist")));
            }
        }
    }
    found
}

/// Paths in backticks, in documents and comments, that end no file's path: files get new names and
/// the prose keeps the old ones. `exists` takes the end of a path.
fn quoted_paths(path: &Path, text: &str, exists: impl Fn(&Path) -> bool) -> Vec<Finding> {
    let is_document = path.extension().is_some_and(|ending| ending == "md");
    let is_prose = |line: &str| is_document || line.trim_start().starts_with("//");
    let mut found = Vec::new();
    for (number, line) in numbered(text).filter(|(_, line)| is_prose(line)) {
        for quoted in line.split('`').skip(1).step_by(2).filter(|quoted| is_source_path(quoted)) {
            if !exists(Path::new(quoted)) {
                found.push((number, format!("names `{quoted}`, which does not exist")));
            }
        }
    }
    found
}

/// Whether this reads as the path of a source file or document: `op/add.rs`.
fn is_source_path(quoted: &str) -> bool {
    const ENDINGS: [&str; 7] = ["rs", "md", "py", "cl", "cu", "cuh", "h"];
    let is_plain = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
    };
    quoted.contains('/')
        && quoted.split('/').all(is_plain)
        && quoted.rsplit_once('.').is_some_and(|(_, ending)| ENDINGS.contains(&ending))
}

/// Homes that a stem may lack, and why.
const OP_EXCEPTIONS: [(&str, &str, &str); 2] = [
    ("linear", "crates/kernels/gpu", "a device runs it as the ops it is made of, or in a product's epilogue"),
    ("slices", "crates/conformance/src/cases", "slices are seen through the products that take them"),
];

/// Checks that the list of all ops and the files by stem agree in every home.
fn ops(listed: &BTreeSet<&str>, files: &[PathBuf]) -> Vec<String> {
    let stems = files.iter().filter_map(|path| path.strip_prefix("crates/kernels/src/op").ok()?.file_stem()?.to_str());
    let mut found = Vec::new();
    for stem in stems.filter(|stem| *stem != "mod" && !listed.contains(stem)) {
        found.push(format!("crates/kernels/src/op/{stem}.rs:1: is not in the list of all ops (backend.rs)"));
    }
    for op in listed {
        for (home, ending) in OP_HOMES {
            let wanted = PathBuf::from(format!("{home}/{op}.{ending}"));
            // A long one is a folder.
            let folder = PathBuf::from(format!("{home}/{op}/mod.rs"));
            let excepted = OP_EXCEPTIONS.iter().any(|(stem, at, _)| stem == op && *at == home);
            if !excepted && !files.contains(&wanted) && !files.contains(&folder) {
                found.push(format!("crates/kernels/src/op/{op}.rs:1: has no {}", wanted.display()));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_is_tidy() {
        let findings = findings().expect("a readable repository");
        assert!(findings.is_empty(), "{}", findings.join("\n"));
    }

    #[test]
    fn spaces_tabs_and_last_lines() {
        assert_eq!(spacing("//! a\n\nb\n"), []);
        assert_eq!(spacing(""), []);
        let lines = |text| spacing(text).into_iter().map(|(line, _)| line).collect::<Vec<_>>();
        assert_eq!(lines("a \n\tb\nc\r\n"), [1, 2, 3]);
        assert_eq!(lines("a\nb"), [2]);
    }

    #[test]
    fn length_leaves_out_tests_and_tables() {
        let text = "//! x\nconst T: [u8; 2] = [\n    1,\n    (2),\n];\n#[cfg(test)]\nmod tests {\n    fn a() {}\n}\nfn b() {}\n";
        assert_eq!(code_lines(text), 4);
        let long = "x\n".repeat(LINES_MAX + 1);
        assert_eq!(length(&long).len(), 1);
        assert_eq!(length(&format!("{long}// tidy: one table of cases\n")), []);
        assert_eq!(length(&format!("{long}// tidy: \n")).len(), 1);
        assert!(["rs", "cl", "cuh"].into_iter().all(is_code) && !["md", "json"].into_iter().any(is_code));
    }

    #[test]
    fn left_behind_and_machine_paths() {
        assert_eq!(left_behind(&["    to", "do!()\n"].concat()).len(), 1);
        assert_eq!(left_behind("// a todo in words\n"), []);
        assert_eq!(machine_paths(&["see /ho", "me/me/x"].concat()).len(), 1);
        assert_eq!(machine_paths(&["docs/ho", "me/x"].concat()), []);
    }

    #[test]
    fn openings_names_and_links() {
        assert_eq!(opening(Path::new("a/b.rs"), "// x\n").len(), 1);
        assert_eq!(opening(Path::new("a/build.rs"), "// x\n"), []);
        assert_eq!(name(Path::new("a/utils.rs")).len(), 1);
        assert_eq!(name(Path::new("a/commonly.rs")), []);
        let text = "[a](b.md#c) [d](https://e.f) [g](#h) [i](../j.md)\n";
        let found = links(Path::new("docs/x.md"), text, |path| path == Path::new("docs/b.md"));
        assert_eq!(found.len(), 1, "{found:?}");
    }

    #[test]
    fn quoted_paths_must_exist() {
        let exists = |path: &Path| Path::new("crates/a/src/op/b.rs").ends_with(path);
        let of = |path: &str, text: &str| quoted_paths(Path::new(path), text, exists);
        assert_eq!(of("x.md", "`op/b.rs`, `op/*.rs`, `b/op.md/x`, `cargo c/d.rs`, `out/run.toml`, `d.rs`\n"), []);
        assert_eq!(of("x.md", "`a`\nthe file `op/c.rs`\n"), [(2, "names `op/c.rs`, which does not exist".to_string())]);
        assert_eq!(of("x.rs", "    /// `p/b.rs`\nlet text = \"`op/c.rs`\";\n").len(), 1);
    }

    #[test]
    fn an_op_without_its_files_is_found() {
        let files = ["op/mod", "op/add", "op/stray", "reference/add", "cpu/add", "gpu/add"]
            .map(|x| PathBuf::from(format!("crates/kernels/src/{x}.rs")));
        let found = ops(&BTreeSet::from(["add"]), &files);
        assert!(found[0].contains("op/stray.rs:1: is not in the list"), "{found:?}");
        assert!(found[1].ends_with("has no crates/kernels/gpu/add.cl"), "{found:?}");
        assert!(found[2].ends_with("has no crates/conformance/src/cases/add.rs"), "{found:?}");
        assert_eq!(found.len(), 3);
    }
}
