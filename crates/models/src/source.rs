//! Where weights come from: a checkpoint on disk, numbers made up for a benchmark, or shapes alone for a plan.

use crate::ModelError;
use half::bf16;
use isobit_numerics::philox::{Key, Purpose, block};
use isobit_proof::safetensors::{Checkpoint, Dtype};
use std::borrow::Cow;

/// How a tensor's numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    F32,
    Bf16,
    F16,
}

impl Format {
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// A tensor as its file has it, little-endian.
#[derive(Clone, Debug)]
pub struct StoredTensor<'a> {
    pub format: Format,
    pub shape: Vec<usize>,
    pub bytes: Cow<'a, [u8]>,
}

impl StoredTensor<'_> {
    pub fn length(&self) -> usize {
        self.shape.iter().product()
    }

    /// As float32, exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.format {
            Format::F32 => self.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
            Format::Bf16 => self.bits().map(isobit_numerics::cast::bf16_to_f32).collect(),
            Format::F16 => self.bits().map(isobit_numerics::cast::f16_to_f32).collect(),
        }
    }

    /// The bits of 16-bit numbers.
    pub fn bits(&self) -> impl Iterator<Item = u16> + '_ {
        self.bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes))
    }
}

/// Weights by their names in the file.
pub trait Source {
    fn contains(&self, name: &str) -> bool;
    /// The tensor, whose shape must be the one given.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>, ModelError>;
    /// The tensor will not be asked for again: its memory may go.
    fn release(&self, _name: &str) {}
}

impl Source for Checkpoint {
    fn contains(&self, name: &str) -> bool {
        Checkpoint::contains(self, name)
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>, ModelError> {
        let tensor = self.get(name)?;
        let wrong = |what: String| ModelError::Tensor { name: name.to_string(), what };
        let format = match tensor.dtype {
            Dtype::F32 => Format::F32,
            Dtype::Bf16 => Format::Bf16,
            Dtype::F16 => Format::F16,
            other => return Err(wrong(format!("it holds {}, not F32, BF16 or F16", other.name()))),
        };
        if tensor.shape != shape {
            return Err(wrong(format!("its shape is {:?}, the config says {shape:?}", tensor.shape)));
        }
        Ok(StoredTensor { format, shape: shape.to_vec(), bytes: Cow::Borrowed(tensor.bytes) })
    }

    fn release(&self, name: &str) {
        if let Ok(tensor) = self.get(name) {
            tensor.release();
        }
    }
}

/// Normal-like weights made on the fly: for benchmarks at sizes for which there is no file.
#[derive(Clone, Copy, Debug)]
pub struct RandomSource {
    pub seed: u64,
}

impl Source for RandomSource {
    fn contains(&self, _name: &str) -> bool {
        true
    }

    #[expect(clippy::float_arithmetic, reason = "numbers that look like weights")]
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>, ModelError> {
        let length: usize = shape.iter().product();
        let key = Key::new(self.seed, Purpose::TestData);
        let tensor = name.bytes().fold(0u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(u32::from(byte)));
        let norm = name.contains("norm");
        let mut bytes = Vec::with_capacity(2 * length);
        for group in 0..length.div_ceil(4) {
            for word in block(key, 0, 0, tensor, group as u32) {
                // Four bytes added: bell-shaped, standard deviation 0.02 as models are initialised.
                let sum: u32 = word.to_le_bytes().into_iter().map(u32::from).sum();
                let value = (sum as f32 - 510.0) * (0.02 / 147.8);
                let value = if norm { 1.0 + value } else { value };
                bytes.extend(bf16::from_f32(value).to_le_bytes());
            }
        }
        bytes.truncate(2 * length);
        Ok(StoredTensor { format: Format::Bf16, shape: shape.to_vec(), bytes: Cow::Owned(bytes) })
    }
}

/// Weights without numbers, for a backend that counts: shapes and formats of another source, or one format for all.
#[derive(Clone, Copy)]
pub enum Shapes<'a> {
    All(Format),
    Of(&'a dyn Source),
}

impl Source for Shapes<'_> {
    fn contains(&self, name: &str) -> bool {
        match self {
            Self::All(_) => true,
            Self::Of(source) => source.contains(name),
        }
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>, ModelError> {
        let format = match self {
            Self::All(format) => *format,
            Self::Of(source) => source.tensor(name, shape)?.format,
        };
        Ok(StoredTensor { format, shape: shape.to_vec(), bytes: Cow::Borrowed(&[]) })
    }
}
