//! Where `isobit prove` writes its statement: found to be writable before anything is replayed. It
//! overwrites only an earlier statement of `isobit prove`, and a signed one only with a signed one.

use crate::Failure;
use crate::output_path::{check_parent, is_foreign_in};
use isobit_proof::FileError;
use isobit_proof::atomic::{AtomicFile, create_partial_folder};
use isobit_proof::lock::Lock;
use isobit_proof::statement::{self, Envelope};
use std::path::{Path, PathBuf};

pub(crate) struct Output {
    path: PathBuf,
    /// False for a pipe or a device, which is written as it is.
    is_file: bool,
}

impl Output {
    /// `named`, or the statement of the run folder.
    pub(crate) fn open(run: &Path, named: Option<&Path>, signed: bool) -> Result<Self, Failure> {
        let path = named.map_or_else(|| run.join(statement::NAME), Path::to_path_buf);
        // Links are followed: what they name is written, not replaced.
        let target = path.canonicalize().unwrap_or_else(|_| path.clone());
        let hint = "name another file with `-o`";
        let refused = |what: &str| Failure::usage(format!("{} {what}", path.display()), hint);
        if path.is_symlink() && !path.exists() {
            return Err(refused("is a link to nothing"));
        }
        match std::fs::metadata(&target) {
            Ok(found) if found.is_dir() => return Err(refused("is a folder")),
            Ok(found) if found.is_file() => match Envelope::read(&target) {
                Ok(earlier) if earlier.is_signed() && !signed => {
                    return Err(refused("is a signed statement; this one would not be signed"));
                }
                Ok(earlier) if statement::is_of_training(&earlier) => (),
                _ => return Err(refused("exists, and is not a statement of `isobit prove`")),
            },
            Ok(_) => return Ok(Self { path: target, is_file: false }),
            Err(_) if is_foreign_in(run, &path, statement::NAME) => {
                return Err(refused("is inside the run, which has no such file"));
            }
            Err(_) => check_parent(&path)?,
        }
        // Can be written; a signal during the replay leaves nothing.
        drop(AtomicFile::create(&target)?);
        Ok(Self { path, is_file: true })
    }

    /// An empty folder beside the statement, removed when it is dropped.
    pub(crate) fn temporary(&self) -> Result<Temporary, Failure> {
        let beside = self.path.parent().filter(|parent| !parent.as_os_str().is_empty()).map(Path::to_path_buf);
        let place = if self.is_file { beside.unwrap_or_else(|| PathBuf::from(".")) } else { std::env::temp_dir() };
        let path = create_partial_folder(&place)?;
        let lock = Lock::acquire(&path);
        // Dropped, and with it the folder, if it cannot be locked.
        let mut temporary = Temporary { path, lock: None };
        temporary.lock = Some(lock?);
        Ok(temporary)
    }

    /// Writes the statement; returns where it is.
    pub(crate) fn write(self, envelope: &Envelope) -> Result<PathBuf, Failure> {
        if self.is_file {
            envelope.write(&self.path.canonicalize().unwrap_or_else(|_| self.path.clone()))?;
        } else {
            let write = std::fs::OpenOptions::new().write(true).open(&self.path);
            let write = write.and_then(|mut file| std::io::Write::write_all(&mut file, envelope.to_text().as_bytes()));
            write.map_err(|error| FileError::from_io("write", &self.path, error))?;
        }
        Ok(self.path)
    }
}

/// A folder that exists as long as this does. Its lock tells a run that resumes beside it that it
/// is not the leftover of a proof that was killed.
pub(crate) struct Temporary {
    path: PathBuf,
    lock: Option<Lock>,
}

impl Temporary {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Before its file is removed.
        self.lock = None;
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
