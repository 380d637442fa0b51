//! Code objects on disk: hipRTC takes half a second and more for a program. An entry is named by
//! what went into it and carries a digest of itself; one that is wrong in any way counts as absent.
//! Nothing here fails a run.

use super::compiler::Request;
use isobit_numerics::digest::Digest;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The first word of an entry; changes with its layout.
const LAYOUT: &str = "isobit-hip-1";
/// The magic number of an ELF file.
const ELF: &[u8] = b"\x7fELF";
const ENTRY_BYTES_MAX: u64 = 64 << 20;
/// When the folder exceeds this, the oldest entries go until it is half full.
const FOLDER_BYTES_MAX: u64 = 256 << 20;

pub(super) struct Cache {
    folder: PathBuf,
}

impl Cache {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    pub(super) fn get(&self, request: &Request, version: &str) -> Option<Vec<u8>> {
        let key = key(request, version);
        let path = self.path(key);
        if fs::metadata(&path).ok()?.len() > ENTRY_BYTES_MAX {
            return None;
        }
        let entry = fs::read(path).ok()?;
        let line_end = entry.iter().position(|byte| *byte == b'\n')?;
        let (line, code) = (&entry[..line_end], &entry[line_end + 1..]);
        let whole = line == header(key, code).as_bytes() && code.starts_with(ELF);
        whole.then(|| code.to_vec())
    }

    pub(super) fn put(&self, request: &Request, version: &str, code: &[u8]) {
        if !code.starts_with(ELF) || code.len() as u64 > ENTRY_BYTES_MAX / 2 {
            return;
        }
        let key = key(request, version);
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

/// Of everything that decides what the compiler gives.
fn key(request: &Request, version: &str) -> Digest {
    let parts = [request.line().join(" "), version.to_string(), request.source.to_string()];
    let mut text = Vec::new();
    for part in parts {
        text.extend((part.len() as u64).to_le_bytes());
        text.extend(part.as_bytes());
    }
    Digest::of_bytes(&text)
}

fn header(key: Digest, code: &[u8]) -> String {
    format!("{LAYOUT} {key} {} {}", code.len(), Digest::of_bytes(code))
}

/// Removes the oldest files of a folder that has grown too large.
fn trim(folder: &Path, bytes_max: u64) {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut files: Vec<_> = entries
        .filter_map(|entry| {
            let about = entry.metadata().ok().filter(fs::Metadata::is_file)?;
            Some((about.modified().ok()?, entry.path(), about.len()))
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

    fn request<'a>(architecture: &'a str, source: &'a str) -> Request<'a> {
        Request { architecture, source, options: &[] }
    }

    fn in_folder(name: &str, body: impl FnOnce(&Cache)) {
        let folder = std::env::temp_dir().join(format!("isobit-hip-cache-{name}-{}", std::process::id()));
        body(&Cache::new(folder.join("hip")));
        let _ = fs::remove_dir_all(folder);
    }

    fn entry(cache: &Cache) -> PathBuf {
        let entries: Vec<_> = fs::read_dir(&cache.folder).expect("the cache").collect();
        assert_eq!(entries.len(), 1, "one entry, no temporary file");
        entries[0].as_ref().expect("an entry").path()
    }

    #[test]
    fn what_went_in_names_an_entry() {
        in_folder("names", |cache| {
            let first = request("gfx906", "source");
            assert_eq!(cache.get(&first, "1"), None);
            cache.put(&first, "1", CODE);
            assert_eq!(cache.get(&first, "1").as_deref(), Some(CODE));
            assert_eq!(cache.get(&first, "2"), None, "another compiler");
            assert_eq!(cache.get(&request("gfx908", "source"), "1"), None, "another architecture");
            assert_eq!(cache.get(&request("gfx906", "Source"), "1"), None, "another source");
            let options = ["-DSLICES=3".to_string()];
            assert_eq!(cache.get(&Request { options: &options, ..first }, "1"), None, "other options");
        });
    }

    #[test]
    fn an_entry_that_is_wrong_is_absent_and_replaced() {
        in_folder("wrong", |cache| {
            let request = request("gfx906", "source");
            cache.put(&request, "1", CODE);
            let path = entry(cache);
            let good = fs::read(&path).expect("an entry");
            for length in 0..good.len() {
                fs::write(&path, &good[..length]).expect("cut");
                assert_eq!(cache.get(&request, "1"), None, "cut to {length}");
            }
            for at in 0..good.len() {
                let mut bad = good.clone();
                bad[at] ^= 1;
                fs::write(&path, bad).expect("changed");
                assert_eq!(cache.get(&request, "1"), None, "byte {at}");
            }
            cache.put(&request, "1", CODE);
            assert_eq!(cache.get(&request, "1").as_deref(), Some(CODE));
        });
    }

    #[test]
    fn what_cannot_be_written_fails_nothing() {
        in_folder("refused", |cache| {
            fs::create_dir_all(cache.folder.parent().expect("a folder")).expect("a folder");
            fs::write(&cache.folder, "a file where the folder should be").expect("a file");
            cache.put(&request("gfx906", "source"), "1", CODE);
            assert_eq!(cache.get(&request("gfx906", "source"), "1"), None);
        });
        in_folder("empty", |cache| {
            cache.put(&request("gfx906", "source"), "1", b"not a code object");
            assert!(!cache.folder.exists());
        });
    }

    #[test]
    fn the_folder_has_a_limit() {
        in_folder("limit", |cache| {
            for source in ["a", "b", "c", "d"] {
                cache.put(&request("gfx906", source), "1", CODE);
            }
            let count = || fs::read_dir(&cache.folder).expect("the cache").count();
            let length = fs::metadata(cache.path(key(&request("gfx906", "a"), "1"))).expect("an entry").len();
            trim(&cache.folder, 4 * length);
            assert_eq!(count(), 4, "not above the limit");
            trim(&cache.folder, 4 * length - 1);
            assert_eq!(count(), 1, "half of it");
        });
    }
}
