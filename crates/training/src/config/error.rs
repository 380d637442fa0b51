//! What can be wrong with a config. The message gives the place and the reason; `hint` is one thing
//! to try.

use super::value::Origin;
use isobit_proof::FileError;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the config: {source}")]
    Read { source: FileError },

    #[error("{place}: the config is larger than {limit} bytes")]
    TooLarge { place: Origin, limit: usize },

    #[error("{place}: the config is not UTF-8 text")]
    NotText { place: Origin },

    #[error("{place}: not valid TOML: {message}")]
    Syntax { place: Origin, message: String },

    #[error("{place}: unknown key `{key}`{section}")]
    UnknownKey { place: Origin, key: String, section: String, hint: String },

    #[error("{place}: `{key}` must be {expected}, found {found}")]
    WrongType { place: Origin, key: String, expected: &'static str, found: String, hint: String },

    #[error("{place}: `{key}` repeats `{earlier_key}` from {earlier}")]
    Twice { place: Origin, key: String, earlier: Origin, earlier_key: String },

    #[error("{place}: `{key}` = {value}: {why}")]
    Invalid { place: Origin, key: String, value: String, why: String, hint: String },

    #[error("{place}: `{key}` is missing")]
    Missing { place: Origin, key: &'static str, hint: &'static str },

    #[error("--set {argument}: {why}")]
    Override { argument: String, why: String, hint: &'static str },
}

impl Error {
    /// The program's exit code: 7 for a disk error, else 2.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Read { source: FileError::NotRegular { .. } } => 2,
            Self::Read { source } => source.exit_code(),
            _ => 2,
        }
    }

    /// One thing to try.
    pub fn hint(&self) -> &str {
        match self {
            Self::Read { source: FileError::NotRegular { .. } } => "name a TOML file; `isobit init` writes one",
            Self::Read { .. } => "check the path; `isobit init` writes a new config",
            Self::TooLarge { .. } | Self::NotText { .. } => "a config is a short TOML file; was a data file given?",
            Self::Syntax { .. } => "strings need quotes, and a section begins with [name]",
            Self::Twice { .. } => "keep one of them",
            Self::Missing { hint, .. } | Self::Override { hint, .. } => hint,
            Self::UnknownKey { hint, .. } | Self::WrongType { hint, .. } | Self::Invalid { hint, .. } => hint,
        }
    }
}
