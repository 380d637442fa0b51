//! Atomic file writes: a file is written under a temporary name in the same folder, synced and
//! renamed, then the folder is synced.
//!
//! A crash leaves at most a file named `.isobit-PROCESS-NUMBER.partial`, which nothing ever reads;
//! `remove_partials` deletes them. `prove` writes the final folder once more, into a folder of such
//! a name.

use crate::disk::{self, File};
use crate::error::FileError;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Distinguishes the temporary files of one process.
static NUMBER: AtomicU64 = AtomicU64::new(0);
/// Temporary names tried before giving up: each name already taken was left by a dead process with
/// our id.
const ATTEMPTS: usize = 1000;
const BUFFER_BYTES: usize = 1 << 20;
const PREFIX: &str = ".isobit-";
const SUFFIX: &str = ".partial";

/// Writes a whole file, or leaves the old one.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let mut file = AtomicFile::create(path)?;
    file.write(bytes)?;
    file.commit()
}

/// The same, unless there is a file of that name, also one that appears at this moment.
pub fn write_new(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let mut file = AtomicFile::create(path)?;
    file.write(bytes)?;
    file.commit_new()
}

/// A file being written. Dropped without `commit`, it is removed.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    folder: PathBuf,
    partial: PathBuf,
    /// None once committed.
    writer: Option<BufWriter<File>>,
}

impl AtomicFile {
    pub fn create(path: &Path) -> Result<Self, FileError> {
        let Some(name) = path.file_name() else {
            return Err(FileError::unwritable(path, "this is not a file name"));
        };
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        let (partial, file) = create_partial(&folder).map_err(|error| FileError::from_io("write", path, error))?;
        let writer = Some(BufWriter::with_capacity(BUFFER_BYTES, file));
        Ok(Self { path: folder.join(name), folder, partial, writer })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        let writer = self.writer.as_mut().expect("a committed file is consumed");
        writer.write_all(bytes).map_err(|error| FileError::from_io("write", &self.path, error))
    }

    /// Makes the file appear under its name. Once this returns, it survives a power cut.
    pub fn commit(self) -> Result<(), FileError> {
        self.commit_by(disk::rename)
    }

    /// The same, unless there is a file of that name.
    pub fn commit_new(self) -> Result<(), FileError> {
        self.commit_by(disk::rename_new)
    }

    fn commit_by(mut self, rename: fn(&Path, &Path) -> io::Result<()>) -> Result<(), FileError> {
        let writer = self.writer.take().expect("a committed file is consumed");
        let result = self.finish(writer, rename);
        if result.is_err() {
            remove_best_effort(&self.partial);
        }
        result.map_err(|error| FileError::from_io("write", &self.path, error))
    }

    fn finish(&self, mut writer: BufWriter<File>, rename: fn(&Path, &Path) -> io::Result<()>) -> io::Result<()> {
        if let Err(error) = writer.flush() {
            // Disassembled, so that dropping it does not write again.
            drop(writer.into_parts());
            return Err(error);
        }
        writer.get_ref().sync_all()?;
        drop(writer);
        rename(&self.partial, &self.path)?;
        disk::sync_folder(&self.folder)
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take() {
            drop(writer.into_parts());
            remove_best_effort(&self.partial);
        }
    }
}

/// Makes creations, renames and removals in a folder survive a power cut.
pub fn sync_folder(folder: &Path) -> Result<(), FileError> {
    disk::sync_folder(folder).map_err(|error| FileError::from_io("write", folder, error))
}

/// Whether a file name is one of our temporary ones.
pub fn is_partial(name: &str) -> bool {
    let Some(middle) = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_suffix(SUFFIX)) else { return false };
    middle.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-')
}

/// Creates an empty folder under a temporary name.
pub fn create_partial_folder(parent: &Path) -> Result<PathBuf, FileError> {
    let created = with_partial_name(parent, disk::create_folder);
    created.map(|(path, ())| path).map_err(|error| FileError::from_io("write", parent, error))
}

/// Removes files left by crashed runs; folders stay. Only for a folder whose lock is held.
pub fn remove_partials(folder: &Path) -> Result<(), FileError> {
    let failed = |error| FileError::from_io("clean", folder, error);
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_folder = entry.file_type().map_err(failed)?.is_dir();
        if !is_folder && entry.file_name().to_str().is_some_and(is_partial) {
            disk::remove_file(&entry.path()).map_err(failed)?;
        }
    }
    Ok(())
}

fn create_partial(folder: &Path) -> io::Result<(PathBuf, File)> {
    with_partial_name(folder, File::create_new)
}

/// Creates something under a temporary name that nothing has yet.
fn with_partial_name<T>(folder: &Path, create: impl Fn(&Path) -> io::Result<T>) -> io::Result<(PathBuf, T)> {
    let mut last = None;
    for _ in 0..ATTEMPTS {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let partial = folder.join(format!("{PREFIX}{}-{number}{SUFFIX}", std::process::id()));
        match create(&partial) {
            Ok(created) => return Ok((partial, created)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => last = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(last.expect("ATTEMPTS is not zero"))
}

/// Ignores errors: the original error is the one to report.
fn remove_best_effort(path: &Path) {
    let _ = disk::remove_file(path);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .expect("folder")
            .map(|entry| entry.expect("entry").file_name().into_string().expect("UTF-8"))
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_whole() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a.json");
        write_atomically(&path, b"one").expect("written");
        write_atomically(&path, &vec![7; 3 << 20]).expect("written");
        assert_eq!(fs::read(&path).expect("read"), vec![7; 3 << 20]);
        assert_eq!(names(folder.path()), ["a.json"]);
    }

    #[test]
    fn a_dropped_file_leaves_nothing_and_what_was_there_stays() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a");
        write_atomically(&path, b"kept").expect("written");
        let mut file = AtomicFile::create(&path).expect("created");
        file.write(b"lost").expect("written");
        assert_eq!(names(folder.path()).len(), 2);
        drop(file);
        assert_eq!(names(folder.path()), ["a"]);
        assert_eq!(fs::read(&path).expect("read"), b"kept");
    }

    #[test]
    fn a_folder_in_the_way_is_an_error_and_leaves_nothing() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a");
        fs::create_dir_all(path.join("b")).expect("folder");
        assert_eq!(write_atomically(&path, b"x").expect_err("refused").exit_code(), 7);
        assert_eq!(names(folder.path()), ["a"]);
        let missing = folder.path().join("none").join("a");
        assert_eq!(write_atomically(&missing, b"x").expect_err("refused").exit_code(), 7);
        assert!(matches!(write_atomically(Path::new("/"), b"x"), Err(FileError::Unwritable { .. })));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_named_and_the_temporary_file_removed() {
        let folder = tempfile::tempdir().expect("folder");
        for early in [false, true] {
            let mut file = AtomicFile::create(&folder.path().join("a")).expect("created");
            let full = File::append(Path::new("/dev/full")).expect("the device that is always full");
            file.writer = Some(BufWriter::with_capacity(BUFFER_BYTES, full));
            // A long write fails at once, a short one in the flush of `commit`.
            let bytes = vec![0; if early { 2 * BUFFER_BYTES } else { 10 }];
            let result = file.write(&bytes).and_then(|()| file.commit());
            assert!(matches!(result, Err(FileError::DiskFull { .. })), "{result:?}");
            assert!(names(folder.path()).is_empty());
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_read_only_folder_is_named() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("folder");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).expect("permissions");
        // The superuser can write anywhere; the kernel's read-only tree is used instead.
        let target = match fs::File::create(folder.path().join("probe")) {
            Ok(_) => PathBuf::from("/proc"),
            Err(_) => folder.path().to_path_buf(),
        };
        let error = write_atomically(&target.join("a"), b"x").expect_err("refused");
        assert_eq!(error.exit_code(), 7, "{error}");
        assert!(folder.path().is_dir());
    }

    #[test]
    fn a_name_that_was_taken_in_the_meantime_is_left_alone() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a");
        let mut file = AtomicFile::create(&path).expect("created");
        file.write(b"ours").expect("written");
        fs::write(&path, b"theirs").expect("written");
        assert!(file.commit_new().is_err());
        assert_eq!(fs::read(&path).expect("read"), b"theirs");
        assert_eq!(names(folder.path()), ["a"]);
        fs::remove_file(&path).expect("removed");
        let mut file = AtomicFile::create(&path).expect("created");
        file.write(b"ours").expect("written");
        file.commit_new().expect("a free name");
        assert_eq!((fs::read(&path).expect("read"), names(folder.path())), (b"ours".to_vec(), vec!["a".to_string()]));
    }

    #[test]
    fn leftovers_are_recognised_and_swept() {
        let folder = tempfile::tempdir().expect("folder");
        for name in [".isobit-12-3.partial", ".isobit-x.partial", "a.partial"] {
            fs::write(folder.path().join(name), b"").expect("written");
        }
        let kept = create_partial_folder(folder.path()).expect("created");
        let kept = kept.file_name().and_then(|name| name.to_str()).expect("a name").to_string();
        assert!(is_partial(&kept), "{kept}");
        remove_partials(folder.path()).expect("swept");
        assert_eq!(names(folder.path()), [kept.as_str(), ".isobit-x.partial", "a.partial"]);
    }
}
