//! The repository as the chores see it: its root, its text files, and commands run inside it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of the workspace's `Cargo.toml`; the current folder where this program was brought
/// to another machine than it was built on.
pub(crate) fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    if xtask.is_dir() { xtask.parent().unwrap_or(xtask).to_path_buf() } else { PathBuf::from(".") }
}

/// Every text file, relative to the root and in order, without build outputs and git's own files.
pub(crate) fn text_files() -> Result<Vec<PathBuf>, String> {
    const ENDINGS: [&str; 12] = ["rs", "md", "toml", "txt", "cl", "cu", "cuh", "h", "yml", "yaml", "json", "py"];
    let root = root();
    let mut files = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        for entry in entries {
            let path = entry.map_err(|error| format!("{}: {error}", folder.display()))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let ours = !name.starts_with('.') || [".cargo", ".github"].contains(&name);
            if path.is_dir() && ours && !name.starts_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ENDINGS.iter().any(|known| ending == *known)) {
                files.push(path.strip_prefix(&root).unwrap_or(&path).to_path_buf());
            }
        }
    }
    files.sort();
    Ok(files)
}

pub(crate) fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(root().join(path)).map_err(|error| format!("{}: {error}", path.display()))
}

/// A command that starts in `folder`.
pub(crate) fn command(folder: &Path, program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder);
    command
}

/// Runs a command and returns what it printed on stdout; anything but success is an error.
pub(crate) fn output(folder: &Path, program: &str, arguments: &[&str]) -> Result<String, String> {
    let line = format!("{program} {}", arguments.join(" "));
    let output = command(folder, program, arguments)
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(|error| format!("`{line}`: {error}"))?;
    if !output.status.success() {
        return Err(format!("`{line}` failed: {}", output.status));
    }
    String::from_utf8(output.stdout).map_err(|error| format!("`{line}`: {error}"))
}

/// A clock for the times that chores report.
#[expect(clippy::disallowed_types, reason = "chores report how long they took")]
pub(crate) fn now() -> std::time::Instant {
    std::time::Instant::now()
}
