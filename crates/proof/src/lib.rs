//! Files that can be believed: safetensors read and written with care, hashes, differences.
//!
//! Everything here treats a file as a stranger's: limits before allocation, checked sums, and a
//! typed error naming the file for whatever does not hold. Nothing prints and nothing panics on
//! what a file says.

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
