//! What can be wrong with a checkpoint: the file system or a file (`File`), its contents, or that
//! it is another run's.

use isobit_proof::FileError;
use std::fmt;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    File(#[from] FileError),

    /// Every file is as recorded, and together they make no sense.
    #[error("{} cannot be continued: {what}", path.display())]
    Inconsistent { path: PathBuf, what: String },

    /// A good checkpoint that belongs to something else.
    #[error("{} belongs to a different run: {}", folder.display(), listed(differences))]
    Different { folder: PathBuf, differences: Vec<Difference> },

    /// Something has the name of a file or folder of a run, and this run has not made it.
    #[error("{} {what}", path.display())]
    Foreign { path: PathBuf, what: &'static str },

    /// A run that was not asked to go on.
    #[error("{} already holds a run", folder.display())]
    Holds { folder: PathBuf },

    /// Checkpoints, and nothing that says which of them to go on from.
    #[error("{} holds {newest} and no latest.json that says where to go on", folder.display())]
    NoPointer { folder: PathBuf, newest: String },

    #[error("{} has no {name}", folder.display())]
    NoSuch { folder: PathBuf, name: String },

    /// A number that the format asked for cannot hold.
    #[error("{tensor} holds {value:e}, which is beyond {format}")]
    Beyond { tensor: String, value: f32, format: &'static str },

    /// The same step was saved before, and its bits were others.
    #[error("{} exists already and its {file} holds other bytes", folder.display())]
    Exists { folder: PathBuf, file: String },
}

/// One thing that a checkpoint and a run do not share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub what: &'static str,
    pub saved: String,
    pub wanted: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "its {} is {}, this run's is {}", self.what, self.saved, self.wanted)
    }
}

fn listed(differences: &[Difference]) -> String {
    differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl Error {
    /// The program's exit code for this kind.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::File(error) => error.exit_code(),
            Self::Inconsistent { .. } | Self::Exists { .. } | Self::NoPointer { .. } => 8,
            Self::Different { .. } | Self::Foreign { .. } | Self::Holds { .. } | Self::NoSuch { .. } => 2,
            Self::Beyond { .. } => 5,
        }
    }

    /// One thing to try, where there is one.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::File(error) => error.hint(),
            Self::Inconsistent { .. } => Some("go back to an earlier checkpoint"),
            Self::Different { .. } => {
                Some("resume with the config, data and model it was made with, or choose another output_dir")
            }
            Self::Foreign { .. } => Some("move it away, or choose another `output_dir`"),
            Self::Holds { .. } => Some("add `--resume` to go on with it, or choose another `output_dir`"),
            Self::NoPointer { .. } => {
                Some("`--resume-from checkpoint-N` goes on from one that is there; else choose another `output_dir`")
            }
            Self::NoSuch { .. } => Some("name one of the `checkpoint-N` folders there; `ls` shows them"),
            Self::Beyond { .. } => {
                Some("nothing is lost: `--resume` with `--set training.save_dtype=float32` writes `final` again")
            }
            Self::Exists { .. } => Some("choose another output_dir; `isobit diff` shows how the two runs differ"),
        }
    }
}
