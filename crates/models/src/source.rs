//! Where weights come from: files on disk, synthetic numbers for a benchmark, or only shapes
//! for a plan.
//!
//! A `WeightSource` returns tensors by their names in the text model (`model.layers.0.…`).
//! `weights.rs` is the source for model folders: it handles other prefixes and quantised matrices.
//! A plain `TensorFiles` is also a source, for files that have neither. `experts.rs` reads the
//! experts of a layer from a source.

use crate::ModelError;
use crate::gptq::{GptqForm, GptqWeight};
use half::bf16;
use isobit_numerics::philox::{Key, Purpose, block};
use isobit_proof::safetensors::{Dtype, SafeTensors, Tensor, TensorFiles};
use std::borrow::Cow;

/// How a tensor's numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatFormat {
    F32,
    Bf16,
    F16,
}

impl FloatFormat {
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// A tensor as stored in its file, little-endian.
#[derive(Clone, Debug)]
pub struct StoredTensor<'a> {
    pub format: FloatFormat,
    pub shape: Vec<usize>,
    pub bytes: Cow<'a, [u8]>,
}

impl StoredTensor<'_> {
    pub fn length(&self) -> usize {
        self.shape.iter().product()
    }

    /// Converts to float32, exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.format {
            FloatFormat::F32 => self.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
            FloatFormat::Bf16 => self.bits().map(isobit_numerics::cast::bf16_to_f32).collect(),
            FloatFormat::F16 => self.bits().map(isobit_numerics::cast::f16_to_f32).collect(),
        }
    }

    /// The bits of 16-bit numbers.
    pub fn bits(&self) -> impl Iterator<Item = u16> + '_ {
        self.bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes))
    }
}

/// The matrix of a linear layer.
#[derive(Clone, Debug)]
pub enum Weight<'a> {
    /// `[outputs, inputs]`; float8 is expanded to float32.
    Stored(StoredTensor<'a>),
    Gptq(GptqWeight),
}

/// Weights by their names in the text model.
pub trait WeightSource {
    fn contains(&self, name: &str) -> bool;

    /// The tensor, which must have the given shape.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>, ModelError>;

    /// The format in which `tensor` returns it.
    fn format(&self, name: &str) -> Result<FloatFormat, ModelError>;

    /// The file's name for our `name`.
    fn name_in_file<'n>(&self, name: &'n str) -> Cow<'n, str> {
        Cow::Borrowed(name)
    }

    /// The tensor will not be requested again: its memory may be freed.
    fn release(&self, _name: &str) {}

    /// Nothing requested so far is still in use: memory that came with it may be freed too.
    fn release_all(&self) {}

    /// Its shape in the file; none if there is no such tensor, or if the source accepts any shape.
    fn shape(&self, _name: &str) -> Option<Vec<usize>> {
        None
    }

    /// Names with this prefix, sorted; none if the source accepts any name.
    fn names_under(&self, _start: &str) -> Option<Vec<String>> {
        None
    }

    /// The bytes of a part of an MXFP4 tensor, which must have the given shape; none if the source
    /// knows only shapes.
    fn mxfp4_part(&self, name: &str, _shape: &[usize]) -> Result<Cow<'_, [u8]>, ModelError> {
        Err(ModelError::tensor(name, "this source does not read MXFP4"))
    }

    /// The matrix of the linear layer at `path`.
    fn weight(&self, path: &str, outputs: usize, inputs: usize) -> Result<Weight<'_>, ModelError> {
        Ok(Weight::Stored(self.tensor(&format!("{path}.weight"), &[outputs, inputs])?))
    }

    /// How that matrix is quantised, if it is; reads none of its integers.
    fn quantised(&self, _path: &str, _outputs: usize, _inputs: usize) -> Result<Option<GptqForm>, ModelError> {
        Ok(None)
    }

    /// Whether matrices that are not quantised become so while they are loaded (`int4.rs`).
    fn loads_in_4bit(&self) -> bool {
        false
    }

    /// That matrix will not be requested again.
    fn release_weight(&self, path: &str) {
        self.release(&format!("{path}.weight"));
    }

    /// The bias of the linear layer at `path`. If the config has none the file may still hold one,
    /// as quantisers write them: then it must be zero.
    fn bias(&self, path: &str, outputs: usize, wanted: bool) -> Result<Option<StoredTensor<'_>>, ModelError> {
        let name = format!("{path}.bias");
        if !wanted && self.shape(&name).is_none() {
            return Ok(None);
        }
        let bias = self.tensor(&name, &[outputs])?;
        if wanted {
            return Ok(Some(bias));
        }
        match bias.to_f32().iter().position(|value| *value != 0.0) {
            None => Ok(None),
            Some(at) => {
                let what = format!("element {at} is not zero, but the config says that there is no bias");
                Err(ModelError::Tensor { name, what })
            }
        }
    }
}

impl WeightSource for TensorFiles {
    fn contains(&self, name: &str) -> bool {
        TensorFiles::contains(self, name)
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>, ModelError> {
        stored(self.get(name)?, shape)
    }

    fn format(&self, name: &str) -> Result<FloatFormat, ModelError> {
        format_of(&self.get(name)?)
    }

    fn release(&self, name: &str) {
        if let Ok(tensor) = self.get(name) {
            tensor.release();
        }
    }

    fn release_all(&self) {
        self.files().iter().for_each(SafeTensors::release);
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        Some(self.get(name).ok()?.shape.to_vec())
    }

    fn mxfp4_part(&self, name: &str, shape: &[usize]) -> Result<Cow<'_, [u8]>, ModelError> {
        stored_bytes(self.get(name)?, shape)
    }

    fn names_under(&self, start: &str) -> Option<Vec<String>> {
        Some(self.names().filter(|name| name.starts_with(start)).map(str::to_string).collect())
    }
}

/// A tensor of a file that holds bytes.
pub(crate) fn stored_bytes<'a>(tensor: Tensor<'a>, shape: &[usize]) -> Result<Cow<'a, [u8]>, ModelError> {
    check_shape(&tensor, shape)?;
    if tensor.dtype != Dtype::U8 {
        let what = format!("it holds {}, not U8", tensor.dtype.name());
        return Err(ModelError::tensor(tensor.name, what));
    }
    Ok(Cow::Borrowed(tensor.bytes))
}

/// A tensor of a file, as stored.
pub(crate) fn stored<'a>(tensor: Tensor<'a>, shape: &[usize]) -> Result<StoredTensor<'a>, ModelError> {
    let format = format_of(&tensor)?;
    check_shape(&tensor, shape)?;
    Ok(StoredTensor { format, shape: shape.to_vec(), bytes: Cow::Borrowed(tensor.bytes) })
}

pub(crate) fn format_of(tensor: &Tensor) -> Result<FloatFormat, ModelError> {
    Ok(match tensor.dtype {
        Dtype::F32 => FloatFormat::F32,
        Dtype::Bf16 => FloatFormat::Bf16,
        Dtype::F16 => FloatFormat::F16,
        other => {
            let what = format!("it holds {}, not F32, BF16 or F16", other.name());
            return Err(ModelError::tensor(tensor.name, what));
        }
    })
}

pub(crate) fn check_shape(tensor: &Tensor, shape: &[usize]) -> Result<(), ModelError> {
    if tensor.shape == shape {
        return Ok(());
    }
    let what = format!("its shape is {:?}, but the config says {shape:?}", tensor.shape);
    Err(ModelError::tensor(tensor.name, what))
}

/// Normal-like weights generated on the fly: for benchmarks at sizes without a file.
#[derive(Clone, Copy, Debug)]
pub struct RandomSource {
    pub seed: u64,
}

impl WeightSource for RandomSource {
    fn contains(&self, _name: &str) -> bool {
        true
    }

    fn format(&self, _name: &str) -> Result<FloatFormat, ModelError> {
        Ok(FloatFormat::Bf16)
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
                // Sum of four bytes: bell-shaped, standard deviation 0.02 as models are
                // initialised.
                let sum: u32 = word.to_le_bytes().into_iter().map(u32::from).sum();
                let value = (sum as f32 - 510.0) * (0.02 / 147.8);
                let value = if norm { 1.0 + value } else { value };
                bytes.extend(bf16::from_f32(value).to_le_bytes());
            }
        }
        bytes.truncate(2 * length);
        Ok(StoredTensor { format: FloatFormat::Bf16, shape: shape.to_vec(), bytes: Cow::Owned(bytes) })
    }
}

/// Weights without data, for a backend that only counts: shapes and formats of another source, or
/// one format for all.
#[derive(Clone, Copy)]
pub enum Shapes<'a> {
    All(FloatFormat),
    Of(&'a dyn WeightSource),
}

impl WeightSource for Shapes<'_> {
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

    fn format(&self, name: &str) -> Result<FloatFormat, ModelError> {
        match self {
            Self::All(format) => Ok(*format),
            Self::Of(source) => source.format(name),
        }
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        match self {
            Self::All(_) => None,
            Self::Of(source) => source.shape(name),
        }
    }

    fn names_under(&self, start: &str) -> Option<Vec<String>> {
        match self {
            Self::All(_) => None,
            Self::Of(source) => source.names_under(start),
        }
    }

    fn mxfp4_part(&self, name: &str, shape: &[usize]) -> Result<Cow<'_, [u8]>, ModelError> {
        match self {
            Self::All(_) => Ok(Cow::Borrowed(&[])),
            Self::Of(source) => source.mxfp4_part(name, shape),
        }
    }

    fn weight(&self, path: &str, outputs: usize, inputs: usize) -> Result<Weight<'_>, ModelError> {
        match self {
            Self::Of(source) if !source.contains(&format!("{path}.weight")) => source.weight(path, outputs, inputs),
            _ => Ok(Weight::Stored(self.tensor(&format!("{path}.weight"), &[outputs, inputs])?)),
        }
    }

    fn quantised(&self, path: &str, outputs: usize, inputs: usize) -> Result<Option<GptqForm>, ModelError> {
        match self {
            Self::All(_) => Ok(None),
            Self::Of(source) => source.quantised(path, outputs, inputs),
        }
    }

    fn loads_in_4bit(&self) -> bool {
        match self {
            Self::All(_) => false,
            Self::Of(source) => source.loads_in_4bit(),
        }
    }

    fn name_in_file<'n>(&self, name: &'n str) -> Cow<'n, str> {
        match self {
            Self::All(_) => Cow::Borrowed(name),
            Self::Of(source) => source.name_in_file(name),
        }
    }
}
