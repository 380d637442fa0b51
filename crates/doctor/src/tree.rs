//! Files below a root. What is read is bounded, only regular files are opened (a pipe would wait
//! for a writer), and whatever fails is just not there.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// BOUND: bytes read of a file; the largest that matter have a few thousand.
const BYTES_MAX: u64 = 1 << 16;
/// BOUND: entries of a folder.
const ENTRIES_MAX: usize = 16_384;

#[derive(Clone, Debug)]
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// A path of the machine, as it is found here.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The beginning of a file, without control characters but for line ends and tabs.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let path = self.path(path);
        if !path.metadata().ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        File::open(path).ok()?.take(BYTES_MAX).read_to_end(&mut bytes).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        Some(text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect())
    }

    /// The first line of a file that has one.
    pub fn line(&self, path: impl AsRef<Path>) -> Option<String> {
        let text = self.text(path)?;
        let line = text.lines().next().map(str::trim).unwrap_or_default();
        let short: String = line.chars().take(LINE_MAX).collect();
        (!short.is_empty()).then_some(short)
    }

    pub fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.line(path)?.parse().ok()
    }

    /// Names in a folder, 2 before 10.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(path)).into_iter().flatten().take(ENTRIES_MAX);
        let mut names: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        names.sort_by_key(|name| natural(name));
        names
    }

    pub fn has_folder(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).is_dir()
    }
}

/// BOUND: characters of a line that is shown.
const LINE_MAX: usize = 200;

/// Orders names by the number at their end, then by their text.
fn natural(name: &str) -> (String, u64, String) {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (stem.to_string(), name[stem.len()..].parse().unwrap_or(u64::MAX), name.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_bounded_and_harmless() {
        let folder = tempfile::tempdir().expect("a folder");
        let tree = Tree::new(folder.path());
        let put = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).expect("written");
        put("huge", &vec![b'7'; 1 << 22]);
        put("binary", b"\xff\xfe\x00\x1b[31mred\n42");
        put("empty", b"");
        std::fs::create_dir(folder.path().join("folder")).expect("a folder");
        assert_eq!(tree.text("/huge").map(|text| text.len()), Some(1 << 16));
        assert_eq!(tree.line("huge").map(|text| text.len()), Some(200));
        assert_eq!(tree.number("huge"), None);
        assert_eq!(tree.line("binary").as_deref(), Some("\u{fffd}\u{fffd}[31mred"));
        assert_eq!((tree.line("empty"), tree.text("folder"), tree.text("missing")), (None, None, None));
        assert!(tree.names("missing").is_empty() && tree.names("huge").is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn loops_and_pipes_are_not_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let tree = Tree::new(folder.path());
        std::os::unix::fs::symlink("loop", folder.path().join("loop")).expect("a link");
        std::os::unix::fs::symlink(".", folder.path().join("again")).expect("a link");
        std::os::unix::fs::symlink("/dev/zero", folder.path().join("endless")).expect("a link");
        let made = std::process::Command::new("mkfifo").arg(folder.path().join("pipe")).status();
        assert!(made.is_ok_and(|status| status.success()));
        for name in ["loop", "again", "endless", "pipe"] {
            assert_eq!(tree.text(name), None, "{name}");
        }
    }

    #[test]
    fn numbers_in_names_count() {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["card10", "card2", "card1-HDMI", "version"] {
            std::fs::write(folder.path().join(name), "").expect("written");
        }
        assert_eq!(Tree::new(folder.path()).names("/"), ["card2", "card10", "card1-HDMI", "version"]);
    }
}
