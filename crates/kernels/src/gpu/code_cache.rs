//! Compiled programs on disk: a compiler takes half a second and more for a program. An entry is
//! named by what went into it and carries a digest of itself; one that is wrong in any way counts
//! as absent. Nothing here fails a run.

use isobit_numerics::digest::Digest;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The first word of an entry; changes with its layout.
const LAYOUT: &str = "isobit-code-1";
/// The magic number of an ELF file, which code objects and cubins are.
const ELF: &[u8] = b"\x7fELF";
const ENTRY_BYTES_MAX: u64 = 64 << 20;
/// When the folder exceeds this, the oldest entries go until it is half full.
const FOLDER_BYTES_MAX: u64 = 256 << 20;

/// The folder of all caches. Without a program that sets it, nothing is kept.
static ROOT: OnceLock<Option<PathBuf>> = OnceLock::new();

/// The first call of a process counts.
pub(super) fn set_root(root: Option<PathBuf>) {
    let _ = ROOT.set(root);
}

/// `ISOBIT_CACHE` is a folder or `off`; otherwise the user's cache folder. `variable` gives the
/// value of an environment variable.
pub(super) fn root_from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    match set("ISOBIT_CACHE") {
        Some(value) if value == "off" => None,
        Some(value) => Some(PathBuf::from(value)),
        None => {
            let user = set("XDG_CACHE_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
            let user = user.or_else(|| set("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
            Some(user.join("isobit"))
        }
    }
}

/// Names an entry: a digest of everything that decides what the compiler gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key(Digest);

impl Key {
    /// What the compiler is told, which compiler it is, and the source.
    pub(super) fn new(line: &[String], version: &str, source: &str) -> Self {
        let mut text = Vec::new();
        for part in [&line.join(" "), version, source] {
            text.extend((part.len() as u64).to_le_bytes());
            text.extend(part.as_bytes());
        }
        Self(Digest::of_bytes(&text))
    }
}

#[derive(Clone, Debug)]
pub(super) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// The cache of an interface, such as `hip`, unless the program keeps nothing.
    pub(super) fn of(interface: &str) -> Option<Self> {
        let root = ROOT.get()?.as_ref()?;
        Some(Self { folder: root.join(interface) })
    }

    pub(super) fn get(&self, Key(key): Key) -> Option<Vec<u8>> {
        let path = self.path(key);
        // A pipe or a device has no end.
        fs::metadata(&path).ok().filter(|about| about.is_file() && about.len() <= ENTRY_BYTES_MAX)?;
        let mut entry = Vec::new();
        fs::File::open(path).ok()?.take(ENTRY_BYTES_MAX).read_to_end(&mut entry).ok()?;
        let line_end = entry.iter().position(|byte| *byte == b'\n')?;
        let (line, code) = (&entry[..line_end], &entry[line_end + 1..]);
        let whole = line == header(key, code).as_bytes() && code.starts_with(ELF);
        whole.then(|| code.to_vec())
    }

    pub(super) fn put(&self, Key(key): Key, code: &[u8]) {
        if !code.starts_with(ELF) || code.len() as u64 > ENTRY_BYTES_MAX / 2 {
            return;
        }
        // Without the cache the next run compiles again; a warning would help nobody.
        if self.write(key, code).is_ok() {
            trim(&self.folder, FOLDER_BYTES_MAX);
        }
    }

    /// Under a name of its own first, so that no other process reads half an entry.
    fn write(&self, key: Digest, code: &[u8]) -> std::io::Result<()> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(&self.folder)?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let temporary = self.folder.join(format!("{key}.{}.{count}.tmp", std::process::id()));
        let written = fs::File::create_new(&temporary).and_then(|mut file| {
            file.write_all(header(key, code).as_bytes())?;
            file.write_all(b"\n")?;
            file.write_all(code)
        });
        let renamed = written.and_then(|()| fs::rename(&temporary, self.path(key)));
        renamed.inspect_err(|_| {
            let _ = fs::remove_file(&temporary);
        })
    }

    fn path(&self, key: Digest) -> PathBuf {
        self.folder.join(format!("{key}.co"))
    }
}

fn header(key: Digest, code: &[u8]) -> String {
    format!("{LAYOUT} {key} {} {}", code.len(), Digest::of_bytes(code))
}

/// Distinguishes the installed compilers: a digest of names, sizes and times of the libraries
/// beside the loaded one whose names start with one of `stems`.
pub(super) fn library_files(loaded: &str, stems: &[&str]) -> String {
    let Some(folder) = folder_of(loaded) else { return "unknown files".to_string() };
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut files: Vec<String> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let ours = stems.iter().any(|stem| name.starts_with(*stem));
            let about = fs::metadata(entry.path()).ok().filter(|_| ours)?;
            let time = about.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
            let mut line = name;
            let _ = write!(line, " {} {}", about.len(), time.as_nanos());
            Some(line)
        })
        .collect();
    files.sort();
    format!("files {}", Digest::of_bytes(files.join("\n").as_bytes()))
}

/// The folder that the loader found a library in.
fn folder_of(loaded: &str) -> Option<PathBuf> {
    let name = Path::new(loaded).file_name()?.to_str()?;
    let stem = name.split(".so").next()?;
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps.lines().find_map(|line| line.find('/').map(|at| &line[at..]).filter(|path| path.contains(stem)))?;
    Some(Path::new(path).parent()?.to_path_buf())
}

/// Whether a name is one that `write` gives: the digest of a key, and `.co` or what a temporary
/// file has in its place.
fn is_ours(name: &str) -> bool {
    let (key, rest) = name.split_once('.').unwrap_or((name, ""));
    let is_key = key.len() == 2 * size_of::<Digest>() && key.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_key && (rest == "co" || rest.split('.').count() == 3 && rest.rsplit('.').next() == Some("tmp"))
}

/// Removes the oldest entries of a folder in which they have grown too large. Files of others stay.
fn trim(folder: &Path, bytes_max: u64) {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut files: Vec<_> = entries
        .filter_map(|entry| {
            let about = entry.metadata().ok().filter(fs::Metadata::is_file)?;
            let ours = entry.file_name().to_str().is_some_and(is_ours);
            ours.then_some((about.modified().ok()?, entry.path(), about.len()))
        })
        .collect();
    let mut bytes: u64 = files.iter().map(|(_, _, length)| length).sum();
    if bytes <= bytes_max {
        return;
    }
    files.sort();
    for (_, path, length) in files {
        if bytes <= bytes_max / 2 {
            break;
        }
        if fs::remove_file(path).is_ok() {
            bytes -= length;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &[u8] = b"\x7fELF and the rest of a code object";

    fn key(architecture: &str, source: &str) -> Key {
        Key::new(&[format!("--gpu-architecture={architecture}")], "1", source)
    }

    fn in_folder(name: &str, body: impl FnOnce(&Cache)) {
        let folder = std::env::temp_dir().join(format!("isobit-code-cache-{name}-{}", std::process::id()));
        body(&Cache { folder: folder.join("cuda") });
        let _ = fs::remove_dir_all(folder);
    }

    fn entry(cache: &Cache) -> PathBuf {
        let entries: Vec<_> = fs::read_dir(&cache.folder).expect("the cache").collect();
        assert_eq!(entries.len(), 1, "one entry, no temporary file");
        entries[0].as_ref().expect("an entry").path()
    }

    #[test]
    fn where_the_caches_are() {
        let root = |variables: &[(&str, &str)]| {
            let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
            root_from_environment(value).map(|folder| folder.display().to_string())
        };
        assert_eq!(root(&[]), None);
        assert_eq!(root(&[("HOME", "/h")]).as_deref(), Some("/h/.cache/isobit"));
        assert_eq!(root(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")]).as_deref(), Some("/c/isobit"));
        assert_eq!(root(&[("HOME", "/h"), ("XDG_CACHE_HOME", "c")]).as_deref(), Some("/h/.cache/isobit"));
        assert_eq!(root(&[("HOME", "/h"), ("ISOBIT_CACHE", "/e")]).as_deref(), Some("/e"));
        assert_eq!(root(&[("HOME", "/h"), ("ISOBIT_CACHE", "off")]), None);
        assert_eq!(root(&[("HOME", "/h"), ("ISOBIT_CACHE", "")]).as_deref(), Some("/h/.cache/isobit"));
    }

    #[test]
    fn what_went_in_names_an_entry() {
        in_folder("names", |cache| {
            let first = key("sm_90", "source");
            assert_eq!(cache.get(first), None);
            cache.put(first, CODE);
            assert_eq!(cache.get(first).as_deref(), Some(CODE));
            let line = ["--gpu-architecture=sm_90".to_string(), "-DSLICES=3".to_string()];
            assert_eq!(Key::new(&line[..1], "1", "source"), first);
            assert_eq!(cache.get(Key::new(&line[..1], "2", "source")), None, "another compiler");
            assert_eq!(cache.get(key("sm_80", "source")), None, "another architecture");
            assert_eq!(cache.get(key("sm_90", "Source")), None, "another source");
            assert_eq!(cache.get(Key::new(&line, "1", "source")), None, "other options");
        });
    }

    #[test]
    fn an_entry_that_is_wrong_is_absent_and_replaced() {
        in_folder("wrong", |cache| {
            let key = key("sm_90", "source");
            cache.put(key, CODE);
            let path = entry(cache);
            let good = fs::read(&path).expect("an entry");
            for length in 0..good.len() {
                fs::write(&path, &good[..length]).expect("cut");
                assert_eq!(cache.get(key), None, "cut to {length}");
            }
            for at in 0..good.len() {
                let mut bad = good.clone();
                bad[at] ^= 1;
                fs::write(&path, bad).expect("changed");
                assert_eq!(cache.get(key), None, "byte {at}");
            }
            cache.put(key, CODE);
            assert_eq!(cache.get(key).as_deref(), Some(CODE));
        });
    }

    #[test]
    fn what_cannot_be_written_fails_nothing() {
        in_folder("refused", |cache| {
            fs::create_dir_all(cache.folder.parent().expect("a folder")).expect("a folder");
            fs::write(&cache.folder, "a file where the folder should be").expect("a file");
            cache.put(key("sm_90", "source"), CODE);
            assert_eq!(cache.get(key("sm_90", "source")), None);
        });
        in_folder("empty", |cache| {
            cache.put(key("sm_90", "source"), b"not a code object");
            assert!(!cache.folder.exists());
        });
    }

    #[test]
    fn the_folder_has_a_limit() {
        in_folder("limit", |cache| {
            for source in ["a", "b", "c", "d"] {
                cache.put(key("sm_90", source), CODE);
            }
            let count = || fs::read_dir(&cache.folder).expect("the cache").count();
            let length = fs::metadata(cache.path(key("sm_90", "a").0)).expect("an entry").len();
            trim(&cache.folder, 4 * length);
            assert_eq!(count(), 4, "not above the limit");
            trim(&cache.folder, 4 * length - 1);
            assert_eq!(count(), 1, "half of it");
        });
    }

    #[test]
    fn files_of_others_stay() {
        in_folder("others", |cache| {
            cache.put(key("sm_90", "source"), CODE);
            let temporary = cache.folder.join(format!("{}.17.0.tmp", key("sm_90", "killed").0));
            let others = ["holiday.mp4", "notes.co", "0123456789abcdef0123456789abcdef.tmp"];
            for path in others.map(|name| cache.folder.join(name)).iter().chain([&temporary]) {
                fs::write(path, CODE).expect("a file");
            }
            trim(&cache.folder, 0);
            let left = fs::read_dir(&cache.folder).expect("the cache");
            let mut left: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
            left.sort();
            assert_eq!(left, [others[2], others[0], others[1]]);
        });
    }

    #[cfg(unix)]
    #[test]
    fn what_has_no_end_is_no_entry() {
        in_folder("endless", |cache| {
            let key = key("sm_90", "source");
            fs::create_dir_all(&cache.folder).expect("a folder");
            std::os::unix::fs::symlink("/dev/zero", cache.path(key.0)).expect("a link");
            assert_eq!(cache.get(key), None);
            fs::remove_file(cache.path(key.0)).expect("a link");
            let made = std::process::Command::new("mkfifo").arg(cache.path(key.0)).status().expect("mkfifo");
            assert!(made.success() && cache.get(key).is_none());
            cache.put(key, CODE);
            assert_eq!(cache.get(key).as_deref(), Some(CODE));
        });
    }
}
