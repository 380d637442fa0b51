//! Matrices of bitsandbytes' 4-bit checkpoints (`nf4` and `fp4`), expanded when they are loaded.
//!
//! Two numbers share a byte, the first in the upper four bits: a code stands for a number of the
//! table `quant_map`, times the largest magnitude of its block. With double quantisation these
//! magnitudes are codes too, of 8 bits, with a table, a scale per block and an offset of their own.
//! All products and the one sum are float32, each rounded once, as bitsandbytes computes them.

use crate::ModelError;
use isobit_proof::safetensors::{Dtype, Tensor, TensorFiles};
use serde_json::Value;

/// Endings of the tensors beside a `weight`.
const PARTS: [&str; 6] = [
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".quant_state.bitsandbytes__nf4",
    ".quant_state.bitsandbytes__fp4",
];
/// BOUND: numbers of a block, and of a block of magnitudes.
const BLOCK_MAX: u64 = 1 << 16;
/// BOUND: bytes of the JSON that describes a matrix.
const STATE_BYTES_MAX: usize = 1 << 16;

/// The weight that a tensor belongs to, if its name is that of a part.
pub(crate) fn part_of(name: &str) -> Option<&str> {
    PARTS.iter().find_map(|part| name.strip_suffix(part)).filter(|weight| weight.ends_with(".weight"))
}

/// Names that tensors beside a `weight` may have.
pub(crate) fn part_names(weight: &str) -> Vec<String> {
    PARTS.iter().map(|part| format!("{weight}{part}")).collect()
}

/// A packed matrix in a file, with what describes it.
pub(crate) struct Nf4Matrix<'a> {
    files: &'a TensorFiles,
    name: &'a str,
    codes: &'a [u8],
    pub(crate) shape: Vec<usize>,
    block: usize,
    nested: Option<Nested>,
}

/// How magnitudes are quantised.
struct Nested {
    block: usize,
    offset: f32,
}

/// The packed matrix that a tensor is; `None` for tensors of another kind.
pub(crate) fn find<'a>(files: &'a TensorFiles, tensor: &Tensor<'a>) -> Result<Option<Nf4Matrix<'a>>, ModelError> {
    let name = tensor.name;
    if tensor.dtype != Dtype::U8 || !name.ends_with(".weight") || !files.contains(&format!("{name}.absmax")) {
        return Ok(None);
    }
    let state = PARTS[4..].iter().map(|part| format!("{name}{part}")).find(|state| files.contains(state));
    let state = state.ok_or_else(|| ModelError::tensor(name, "its `quant_state` of nf4 or fp4 is missing"))?;
    let bytes = files.get(&state)?.bytes;
    if bytes.len() > STATE_BYTES_MAX {
        return Err(ModelError::tensor(&state, format!("{} bytes, {STATE_BYTES_MAX} at most", bytes.len())));
    }
    let state: Value =
        serde_json::from_slice(bytes).map_err(|error| ModelError::tensor(&state, format!("not JSON: {error}")))?;
    let size = |key: &str| {
        let found = state.get(key).and_then(Value::as_u64).filter(|size| (1..=BLOCK_MAX).contains(size));
        found
            .map(|size| size as usize)
            .ok_or_else(|| ModelError::tensor(name, format!("its `{key}` is missing or out of range")))
    };
    let shape = state.get("shape").and_then(Value::as_array);
    let shape = shape.and_then(|shape| shape.iter().map(|size| usize::try_from(size.as_u64()?).ok()).collect());
    let shape: Vec<usize> = shape.ok_or_else(|| ModelError::tensor(name, "its `shape` is missing"))?;
    let count = shape.iter().try_fold(1_usize, |count, size| count.checked_mul(*size));
    if count.is_none_or(|count| count.div_ceil(2) != tensor.bytes.len()) {
        return Err(ModelError::tensor(
            name,
            format!("{} bytes do not hold a matrix {shape:?} in 4 bits", tensor.bytes.len()),
        ));
    }
    let nested = if files.contains(&format!("{name}.nested_absmax")) {
        let offset = state.get("nested_offset").and_then(Value::as_f64).map(|offset| offset as f32);
        let offset = offset.filter(|offset| offset.is_finite());
        let offset = offset.ok_or_else(|| ModelError::tensor(name, "its `nested_offset` is missing"))?;
        Some(Nested { block: size("nested_blocksize")?, offset })
    } else {
        None
    };
    Ok(Some(Nf4Matrix { files, name, codes: tensor.bytes, shape, block: size("blocksize")?, nested }))
}

impl Nf4Matrix<'_> {
    /// The numbers of the matrix, in order.
    #[expect(clippy::float_arithmetic, reason = "the one product that defines the weight")]
    pub(crate) fn dequantise(&self) -> Result<Vec<f32>, ModelError> {
        let count: usize = self.shape.iter().product();
        let magnitudes = self.magnitudes(count.div_ceil(self.block))?;
        let table = self.floats("quant_map", 16)?;
        let code = |at: usize| self.codes[at / 2] >> (4 * (1 - at % 2)) & 15;
        let values = (0..count).map(|at| table[usize::from(code(at))] * magnitudes[at / self.block]);
        let values: Vec<f32> = values.collect();
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(at) => Err(ModelError::tensor(self.name, format!("element {at} is {}", values[at]))),
        }
    }

    /// The largest magnitude of each block.
    #[expect(clippy::float_arithmetic, reason = "the product and the sum that define a magnitude")]
    fn magnitudes(&self, blocks: usize) -> Result<Vec<f32>, ModelError> {
        let Some(nested) = &self.nested else { return self.floats("absmax", blocks) };
        let name = format!("{}.absmax", self.name);
        let codes = self.files.get(&name)?;
        if codes.dtype != Dtype::U8 || codes.bytes.len() != blocks {
            return Err(ModelError::tensor(
                &name,
                format!("it holds {} {}, not {blocks} bytes", codes.bytes.len(), codes.dtype),
            ));
        }
        let table = self.floats("nested_quant_map", 256)?;
        let scales = self.floats("nested_absmax", blocks.div_ceil(nested.block))?;
        let magnitude =
            |(at, code): (usize, &u8)| table[usize::from(*code)] * scales[at / nested.block] + nested.offset;
        Ok(codes.bytes.iter().enumerate().map(magnitude).collect())
    }

    /// The float32 numbers of a part.
    fn floats(&self, part: &str, count: usize) -> Result<Vec<f32>, ModelError> {
        let name = format!("{}.{part}", self.name);
        let tensor = self.files.get(&name)?;
        let values = tensor.to_f32()?;
        if tensor.dtype != Dtype::F32 || values.len() != count {
            return Err(ModelError::tensor(
                &name,
                format!("it holds {} numbers of {}, not {count} of F32", values.len(), tensor.dtype),
            ));
        }
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(at) => Err(ModelError::tensor(&name, format!("element {at} is {}", values[at]))),
        }
    }
}
