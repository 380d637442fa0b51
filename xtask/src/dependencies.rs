//! Finds unused dependencies: each one in a `Cargo.toml` must be named in a source of its crate,
//! and each one of the workspace by a crate.

use std::path::{Path, PathBuf};

/// `read` returns the text of a file of the repository.
pub(crate) fn unused(
    files: &[PathBuf],
    read: &impl Fn(&Path) -> Result<String, String>,
) -> Result<Vec<String>, String> {
    let manifests = files.iter().filter(|path| path.file_name().is_some_and(|name| name == "Cargo.toml"));
    let mut found = Vec::new();
    let mut taken = Vec::new();
    let mut offered = Vec::new();
    for manifest in manifests {
        let folder = manifest.parent().unwrap_or(Path::new(""));
        let text = read(manifest)?;
        if text.contains("[workspace]") {
            offered = listed(&text, "workspace.dependencies");
            continue;
        }
        let of_crate =
            |path: &&PathBuf| path.starts_with(folder) && path.extension().is_some_and(|ending| ending == "rs");
        let mut sources = String::new();
        for path in files.iter().filter(of_crate) {
            sources.push_str(&read(path)?);
        }
        for table in ["dependencies", "dev-dependencies"] {
            for (line, name) in listed(&text, table) {
                if !names(&sources, &name.replace('-', "_")) {
                    found.push(format!("{}:{line}: no source uses `{name}`", manifest.display()));
                }
                taken.push(name);
            }
        }
    }
    let left = offered.iter().filter(|(_, name)| !taken.contains(name));
    found.extend(left.map(|(line, name)| format!("Cargo.toml:{line}: no crate uses `{name}`")));
    Ok(found)
}

/// Lines, counted from 1, and names of a dependency table.
fn listed(manifest: &str, table: &str) -> Vec<(usize, String)> {
    let mut inside = false;
    let mut found = Vec::new();
    for (index, line) in manifest.lines().enumerate() {
        if line.starts_with('[') {
            inside = line.trim() == format!("[{table}]");
        } else if inside && line.contains('=') && !line.starts_with([' ', '#']) {
            let name = line.split(['.', '=', ' ']).next().unwrap_or_default();
            found.push((index + 1, name.to_string()));
        }
    }
    found
}

/// Whether code, not comments, uses the name as a crate: `name::` or `use name`.
fn names(sources: &str, name: &str) -> bool {
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let code = sources.lines().map(str::trim_start).filter(|line| !line.starts_with("//"));
    code.into_iter().any(|line| {
        line.match_indices(name).any(|(at, _)| {
            let (before, after) = (&line[..at], &line[at + name.len()..]);
            let whole = !before.ends_with(is_word) && !after.starts_with(is_word);
            whole && (after.starts_with("::") || before.ends_with("use "))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dependency_that_no_source_names_is_found() {
        let files =
            ["Cargo.toml", "crates/a/Cargo.toml", "crates/a/src/lib.rs", "crates/b/src/lib.rs"].map(PathBuf::from);
        let read = |path: &Path| {
            Ok(match path.to_str() {
                Some("Cargo.toml") => "[workspace]\n[workspace.dependencies]\nx-y = \"1\"\nz = \"1\"\nw = \"1\"\n",
                Some("crates/a/Cargo.toml") => {
                    "[dependencies]\nx-y.workspace = true\nz = { workspace = true }\n[lints]\nl = 1\n"
                }
                Some("crates/a/src/lib.rs") => "// z::a\nuse x_y::A;\nlet z = zz::b;\n",
                _ => "use z;\n",
            }
            .to_string())
        };
        let found = unused(&files, &read).expect("readable files");
        assert_eq!(found, ["crates/a/Cargo.toml:3: no source uses `z`", "Cargo.toml:5: no crate uses `w`"]);
    }
}
