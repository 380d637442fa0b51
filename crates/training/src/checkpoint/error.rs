//! What can be wrong with a checkpoint: the file system or a file (`File`), its contents, or that
//! it belongs to a different run.

use isobit_proof::FileError;
use std::fmt;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    File(#[from] FileError),

    /// Every file is as recorded, but together they are inconsistent.
    #[error("{} cannot be resumed: {what}", path.display())]
    Inconsistent { path: PathBuf, what: String },

    /// A valid checkpoint that belongs to a different run.
    #[error("{} belongs to a different run: {}", folder.display(), listed(differences))]
    Different { folder: PathBuf, differences: Vec<IdentityDifference> },

    /// Something has the name of a file or folder of a run, but this run did not make it.
    #[error("{} {what}", path.display())]
    Foreign { path: PathBuf, what: &'static str },

    /// The folder holds a run, and resuming was not requested.
    #[error("{} already holds a run", folder.display())]
    Holds { folder: PathBuf },

    /// There are checkpoints, but nothing records which of them to resume from.
    #[error("{} holds {newest}, but no latest.json that says where to resume", folder.display())]
    NoPointer { folder: PathBuf, newest: String },

    #[error("{} has no {name}{}", folder.display(), present(there))]
    NoSuch { folder: PathBuf, name: String, there: Vec<String> },

    /// A number that the requested format cannot hold.
    #[error("{tensor} holds {value:e}, which does not fit in {format}")]
    Beyond { tensor: String, value: f32, format: &'static str },

    /// The same step was saved before with different bits.
    #[error("{} already exists, and its {file} has different bytes", folder.display())]
    Exists { folder: PathBuf, file: String },
}

/// One respect in which a checkpoint and a run differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityDifference {
    pub what: &'static str,
    pub saved: String,
    pub wanted: String,
}

impl fmt::Display for IdentityDifference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "its {} is {}, this run's is {}", self.what, self.saved, self.wanted)
    }
}

fn present(there: &[String]) -> String {
    if there.is_empty() { "; it has no checkpoint".to_string() } else { format!("; it has {}", there.join(", ")) }
}

fn listed(differences: &[IdentityDifference]) -> String {
    differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl Error {
    /// The program's exit code for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::File(error) => error.exit_code(),
            Self::Inconsistent { .. } | Self::Exists { .. } | Self::NoPointer { .. } => 8,
            Self::Different { .. } | Self::Foreign { .. } | Self::Holds { .. } | Self::NoSuch { .. } => 2,
            Self::Beyond { .. } => 5,
        }
    }

    /// One thing to try, if there is one.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::File(error) => error.hint(),
            Self::Inconsistent { .. } => Some("go back to an earlier checkpoint"),
            Self::Different { .. } => {
                Some("resume with the config, data and model it was made with, or choose another output_dir")
            }
            Self::Foreign { .. } => Some("move it away, or choose another `output_dir`"),
            Self::Holds { .. } => Some("add `--resume` to continue it, or choose another `output_dir`"),
            Self::NoPointer { .. } => {
                Some("`--resume-from checkpoint-N` resumes from one that is there; or choose another `output_dir`")
            }
            Self::NoSuch { there, .. } if there.is_empty() => Some("leave out `--resume-from` to begin a new run"),
            Self::NoSuch { .. } => Some("name one of these, or use `--resume` for the latest"),
            Self::Beyond { .. } => {
                Some("nothing is lost: `--resume` with `--set training.save_dtype=float32` writes `final` again")
            }
            Self::Exists { .. } => Some("choose another output_dir; `isobit diff` shows how the two runs differ"),
        }
    }
}
