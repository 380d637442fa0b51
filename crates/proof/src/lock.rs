//! One run per folder: the file `LOCK`, held by an advisory lock of the operating system for as
//! long as the run lives.
//!
//! The lock ends with the process, however it ends, so a killed run leaves nothing to clean up: the
//! file stays, the lock does not. The process id inside is only for the message. A link in its
//! place is refused: writing the id would truncate its target.

use crate::disk::File;
use crate::error::FileError;
use std::fs::{self, TryLockError};
use std::io::{Read, Write};
use std::path::Path;

/// A folder held exclusively until this is dropped.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// The lock's file name.
    pub const NAME: &str = "LOCK";

    /// Locks the folder, or returns an error that names the holder.
    pub fn acquire(folder: &Path) -> Result<Self, FileError> {
        let path = folder.join(Self::NAME);
        let failed = |error| FileError::from_io("write", &path, error);
        check_plain(&path)?;
        // Not truncated: the file may belong to a run that is still alive.
        let mut file = File::open_or_create(&path).map_err(failed)?;
        // Checked again, in case a link was created in between: nothing has been written yet.
        check_plain(&path)?;
        match file.inner().try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(FileError::InUse { folder: folder.to_path_buf(), process: holder(file.inner()) });
            }
            Err(TryLockError::Error(error)) => return Err(FileError::from_io("lock", &path, error)),
        }
        file.truncate().map_err(failed)?;
        writeln!(file, "{}", std::process::id()).map_err(failed)?;
        Ok(Self { file })
    }

    /// The error that names the folder's holder, without locking or writing anything; none if it is
    /// free.
    pub fn in_use(folder: &Path) -> Option<FileError> {
        let path = folder.join(Self::NAME);
        check_plain(&path).ok()?;
        let file = fs::File::open(&path).ok()?;
        let held = matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock));
        held.then(|| FileError::InUse { folder: folder.to_path_buf(), process: holder(&file) })
    }
}

/// An error if something other than a regular file has the lock's name; links are not followed.
fn check_plain(path: &Path) -> Result<(), FileError> {
    match path.symlink_metadata() {
        Ok(found) if !found.is_file() => {
            Err(FileError::malformed(path, "a lock is a regular file, not a link or folder"))
        }
        _ => Ok(()),
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // The file itself stays: removing it would break the lock of a process that has just opened
        // it.
        let _ = self.file.truncate();
        let _ = self.file.inner().unlock();
    }
}

/// The process that wrote its id into the file; None if it has not yet done so.
fn holder(file: &fs::File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_held_once_and_free_after() {
        let folder = tempfile::tempdir().expect("folder");
        let lock = Lock::acquire(folder.path()).expect("free");
        let error = Lock::acquire(folder.path()).expect_err("held");
        let expected = format!("is in use by process {}", std::process::id());
        assert!(error.to_string().ends_with(&expected), "{error}");
        assert_eq!(error.exit_code(), 2);
        drop(lock);
        drop(Lock::acquire(folder.path()).expect("free again"));
    }

    #[test]
    fn the_file_of_a_dead_process_is_taken_over() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join(Lock::NAME);
        std::fs::write(&path, "4294967295 and more than a number would need\n").expect("written");
        let _lock = Lock::acquire(folder.path()).expect("nobody holds it");
        assert_eq!(std::fs::read_to_string(&path).expect("read"), format!("{}\n", std::process::id()));
        assert!(Lock::acquire(&folder.path().join("none")).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn what_a_link_leads_to_is_left_alone() {
        let folder = tempfile::tempdir().expect("folder");
        let target = folder.path().join("thesis.txt");
        std::fs::write(&target, "years of work").expect("written");
        std::os::unix::fs::symlink(&target, folder.path().join(Lock::NAME)).expect("linked");
        let error = Lock::acquire(folder.path()).expect_err("a link");
        assert_eq!(error.exit_code(), 8, "{error}");
        assert!(Lock::in_use(folder.path()).is_none());
        assert_eq!(std::fs::read_to_string(&target).expect("read"), "years of work");
    }

    #[test]
    fn who_holds_a_folder_can_be_asked() {
        let folder = tempfile::tempdir().expect("folder");
        assert!(Lock::in_use(folder.path()).is_none());
        let lock = Lock::acquire(folder.path()).expect("free");
        let error = Lock::in_use(folder.path()).expect("held");
        assert!(error.to_string().ends_with(&format!("process {}", std::process::id())), "{error}");
        drop(lock);
        assert!(Lock::in_use(folder.path()).is_none());
    }
}
