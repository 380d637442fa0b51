//! The error type of this crate. Each variant is a kind of failure, and the program's exit code
//! follows the kind: a missing file (2), not enough memory (4), a disk error (7), a file whose
//! contents are wrong (8).

use crate::name::quoted;
use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{} does not exist", path.display())]
    Missing { path: PathBuf },
    #[error("cannot write {}: the disk is full ({source})", path.display())]
    DiskFull { path: PathBuf, source: io::Error },
    #[error("cannot {action} {}: not allowed ({source})", path.display())]
    NotAllowed { action: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    /// The folder is locked by another run.
    #[error("{} is in use by {}", folder.display(), process.map_or("another process".to_string(), |id| format!("process {id}")))]
    InUse { folder: PathBuf, process: Option<u32> },
    #[error("{} is {found}, not a regular file", path.display())]
    NotRegular { path: PathBuf, found: &'static str },
    #[error("{} has {bytes} bytes or more; the limit is {limit}", path.display())]
    TooLarge { path: PathBuf, bytes: u64, limit: u64 },
    /// The file breaks the rules of its format.
    #[error("{} is malformed: {what}", path.display())]
    Malformed { path: PathBuf, what: String },
    /// The file is well formed but is not the recorded one.
    #[error("{} does not match its record: {what}", path.display())]
    Altered { path: PathBuf, what: String },
    #[error("{} holds no safetensors file", folder.display())]
    NoTensors { folder: PathBuf },
    #[error("{} has no tensor {}", path.display(), quoted(name))]
    NoTensor { path: PathBuf, name: String },
    /// A tensor was requested in a form it does not have.
    #[error("tensor {} holds {found}, not {wanted}", quoted(name))]
    WrongType { name: String, found: &'static str, wanted: &'static str },
    /// The data to write breaks the rules of the format: a caller's mistake, found before a byte is
    /// written.
    #[error("cannot write {}: {what}", path.display())]
    Unwritable { path: PathBuf, what: String },
}

impl FileError {
    /// Classifies an error of the operating system.
    pub fn from_io(action: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_path_buf();
        match source.kind() {
            // A file in place of a folder hides what would be below it.
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory if action != "write" => Self::Missing { path },
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { path, source },
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                Self::NotAllowed { action, path, source }
            }
            _ => Self::Io { action, path, source },
        }
    }

    pub(crate) fn malformed(path: &Path, what: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_path_buf(), what: what.into() }
    }

    pub(crate) fn unwritable(path: &Path, what: impl Into<String>) -> Self {
        Self::Unwritable { path: path.to_path_buf(), what: what.into() }
    }

    /// Whether what is in the file is wrong, not how it was reached.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::NotRegular { .. }
            | Self::TooLarge { .. }
            | Self::Malformed { .. }
            | Self::Altered { .. }
            | Self::NoTensor { .. }
            | Self::WrongType { .. } => true,
            Self::Missing { .. }
            | Self::InUse { .. }
            | Self::NoTensors { .. }
            | Self::DiskFull { .. }
            | Self::NotAllowed { .. }
            | Self::Io { .. }
            | Self::Unwritable { .. } => false,
        }
    }

    /// The program's exit code for this kind.
    pub fn exit_code(&self) -> u8 {
        match self {
            _ if self.is_damage() => 8,
            Self::Missing { .. } | Self::InUse { .. } | Self::NoTensors { .. } => 2,
            Self::Io { source, .. } if source.kind() == io::ErrorKind::OutOfMemory => 4,
            _ => 7,
        }
    }

    /// One thing to try, if any.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::Missing { .. } => "check the path; paths are relative to the current folder",
            Self::DiskFull { .. } => "free some space, then run the command again; `train` with `--resume`",
            Self::NotAllowed { .. } => "check owner and permissions, or choose another folder",
            Self::InUse { .. } => "wait for that run, or choose another folder",
            Self::NotRegular { .. } => "put a regular file, or a link to one, in its place",
            Self::TooLarge { .. } => "check that this is the file you meant",
            Self::Malformed { .. } => "copy or download the file again; `isobit verify` looks at all files of a run",
            Self::Altered { .. } => {
                "restore the file; `train --resume` writes a final folder or a receipt again, and `--resume-from` goes back to an earlier checkpoint"
            }
            Self::NoTensors { .. } => "name a safetensors file, or a folder with an adapter, a model or a finished run",
            Self::NoTensor { .. } | Self::WrongType { .. } => "check that the file belongs to this model",
            Self::Io { .. } | Self::Unwritable { .. } => return None,
        })
    }
}
