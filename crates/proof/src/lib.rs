//! Trustworthy files: careful reading and writing of safetensors, hashes, differences.
//!
//! Every file is treated as untrusted: limits before allocation, checked arithmetic, and a typed
//! error naming the file for any violation. Nothing prints, and no file content causes a panic.

pub mod atomic;
pub mod difference;
pub mod error;
pub mod hash;
mod json;
pub mod lock;
pub mod name;
pub mod regular;
pub mod safetensors;

pub use error::FileError;
pub use hash::{Hash, Manifest};
pub use lock::Lock;
