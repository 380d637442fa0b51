//! Trustworthy files: careful reading and writing of safetensors, hashes, receipts, differences.
//!
//! Every file is treated as untrusted: limits before allocation, checked arithmetic, and a typed
//! error naming the file for any violation. Nothing prints, and no file content causes a panic.

pub mod atomic;
pub mod chain;
pub mod difference;
pub mod disk;
pub mod error;
pub mod hash;
mod json;
pub mod layout;
pub mod line;
pub mod lock;
pub mod metrics_line;
pub mod name;
pub mod receipt;
pub mod regular;
pub mod safetensors;
pub mod statement;
pub mod verify;

pub use error::FileError;
pub use hash::{Hash, Manifest};
pub use lock::Lock;
