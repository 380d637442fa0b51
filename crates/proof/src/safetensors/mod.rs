//! The safetensors container: an eight-byte length, a JSON header, and the data.
//!
//! `header` parses the JSON into entries and checks every rule of the format; `file` maps a file
//! and provides its tensors; `tensor_files` is one or many such files of a folder; `write` creates
//! them. All reading borrows from the map: nothing is copied until needed, and `Tensor::release`
//! drops pages, so a model may be larger than memory.

mod dtype;
mod file;
mod header;
mod named;
mod tensor_files;
mod write;

pub use dtype::Dtype;
pub use file::{SafeTensors, Tensor};
pub use named::NamedTensor;
pub use tensor_files::TensorFiles;
pub use write::{Declared, Entry, Sink, write, write_streamed};

/// BOUND: bytes of a header, the limit of the format.
pub const HEADER_BYTES_MAX: usize = 100_000_000;
/// BOUND: tensors in a file.
pub const TENSORS_MAX: usize = 1_000_000;
/// BOUND: dimensions of a tensor.
pub const DIMENSIONS_MAX: usize = 8;
/// BOUND: bytes of a tensor's name.
pub const NAME_BYTES_MAX: usize = 4096;
/// The key of a header that is not a tensor.
const METADATA: &str = "__metadata__";
