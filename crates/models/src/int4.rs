//! Matrices quantised while they are loaded (`load_in_4bit`): from the numbers of the file into the
//! 4-bit form that GPTQ bases have, so that the same products read them.
//!
//! The rule is in `docs/numerics.md`, "Weights quantised at load". A row is quantised by itself, so
//! stacked matrices are quantised as one.

use crate::ModelError;
use crate::config::Quantization;
use crate::gptq::{GptqForm, GptqScales, GptqWeight};
use crate::source::{FloatFormat, StoredTensor};
use half::f16;
use isobit_kernels::op::product4::CHANNELS_PER_WORD;
use isobit_numerics::cast::f16_to_f32;
use isobit_numerics::int4::{GROUP, quantise_group};
use std::borrow::Cow;

pub use isobit_numerics::int4::RULE;

/// Outputs below which a layer stays as it is: the gate of a shared expert has one.
const OUTPUTS_MIN: usize = 8;

/// Whether a linear layer of these sizes is quantised.
pub fn takes(outputs: usize, inputs: usize) -> bool {
    outputs >= OUTPUTS_MIN && inputs > 0 && inputs.is_multiple_of(CHANNELS_PER_WORD)
}

/// The form of every matrix that is quantised.
pub const FORM: GptqForm = GptqForm { group_size: GROUP, half_scales: true, permuted: false, zero: None };

/// Only numbers can be quantised.
pub(crate) fn check(of_file: &Quantization) -> Result<(), ModelError> {
    match of_file {
        Quantization::None | Quantization::Fp8(_) | Quantization::Bitsandbytes => Ok(()),
        Quantization::Gptq(_) => {
            let what = "`load_in_4bit` quantises a base of 16 or 32 bits, and this one is stored in 4 bits already: \
                        leave the setting out, and its integers are used as they are";
            Err(ModelError::Adapter(what.to_string()))
        }
        Quantization::Mxfp4 => {
            let what = "`load_in_4bit` quantises a base of 16 or 32 bits, and the experts of this one are stored in 4 \
                        bits already: leave the setting out";
            Err(ModelError::Adapter(what.to_string()))
        }
    }
}

/// One row: 4-bit integers in words, and the scales and zero points of its groups.
struct QuantisedRow {
    words: Vec<i32>,
    scales: Vec<f16>,
    zeros: Vec<u8>,
}

impl QuantisedRow {
    fn of(name: &str, row: &[f32]) -> Result<Self, ModelError> {
        let mut integers = vec![0; row.len()];
        let (mut scales, mut zeros) = (Vec::new(), Vec::new());
        for (group, integers) in row.chunks(GROUP).zip(integers.chunks_mut(GROUP)) {
            let form = quantise_group(group, integers).ok_or_else(|| beyond(name, group))?;
            scales.push(f16::from_bits(form.scale));
            zeros.push(form.zero);
        }
        let word =
            |integers: &[u8; CHANNELS_PER_WORD]| integers.iter().rev().fold(0, |word, q| word << 4 | i32::from(*q));
        Ok(Self { words: integers.as_chunks().0.iter().map(word).collect(), scales, zeros })
    }

    /// The numbers that the integers stand for: a difference times the scale, rounded once.
    #[expect(clippy::float_arithmetic, reason = "the one product that defines the weight")]
    fn values(&self) -> impl Iterator<Item = f32> {
        let value = |input: usize| {
            let integer = self.words[input / CHANNELS_PER_WORD] >> (4 * (input % CHANNELS_PER_WORD)) & 15;
            let (zero, scale) = (self.zeros[input / GROUP], self.scales[input / GROUP]);
            (integer - i32::from(zero)) as f32 * f16_to_f32(scale.to_bits())
        };
        (0..self.words.len() * CHANNELS_PER_WORD).map(value)
    }
}

/// A range that no float16 scale covers.
fn beyond(name: &str, group: &[f32]) -> ModelError {
    let largest = group.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap_or_default();
    let what = format!("it holds {largest}, which is beyond what `load_in_4bit` can quantise: leave that setting out");
    ModelError::tensor(name, what)
}

/// The rows of a matrix that has `inputs` columns, as float32.
fn rows<'t>(stored: &'t StoredTensor<'_>, inputs: usize) -> impl Iterator<Item = Vec<f32>> + 't {
    let row = move |bytes: &'t [u8]| {
        StoredTensor { format: stored.format, shape: vec![inputs], bytes: Cow::Borrowed(bytes) }.to_f32()
    };
    stored.bytes.chunks(inputs * stored.format.bytes()).map(row)
}

/// Quantises a matrix `[outputs, inputs]` of finite numbers.
pub fn quantise(
    name: &str,
    stored: &StoredTensor<'_>,
    outputs: usize,
    inputs: usize,
) -> Result<GptqWeight, ModelError> {
    let (lines, groups) = (inputs / CHANNELS_PER_WORD, inputs.div_ceil(GROUP));
    let mut qweight = vec![0; lines * outputs];
    let mut zeros = vec![0; groups * outputs];
    let mut scales = vec![f16::ZERO; groups * outputs];
    for (output, row) in rows(stored, inputs).enumerate() {
        let row = QuantisedRow::of(name, &row)?;
        let place = |at: usize| at * outputs + output;
        row.words.iter().enumerate().for_each(|(line, word)| qweight[place(line)] = *word);
        row.zeros.iter().enumerate().for_each(|(group, zero)| zeros[place(group)] = *zero);
        row.scales.iter().enumerate().for_each(|(group, scale)| scales[place(group)] = *scale);
    }
    let group_of_input = (0..inputs).map(|input| (input / GROUP) as u32).collect();
    let scales = GptqScales::F16(scales);
    Ok(GptqWeight { outputs, inputs, group_size: GROUP, qweight, zeros, scales, group_of_input })
}

/// The numbers that a matrix, or a stack of them, stands for once it is quantised.
pub fn requantised<'t>(name: &str, stored: &StoredTensor<'_>, inputs: usize) -> Result<StoredTensor<'t>, ModelError> {
    let mut bytes = Vec::with_capacity(4 * stored.length());
    for row in rows(stored, inputs) {
        bytes.extend(QuantisedRow::of(name, &row)?.values().flat_map(f32::to_le_bytes));
    }
    Ok(StoredTensor { format: FloatFormat::F32, shape: stored.shape.clone(), bytes: Cow::Owned(bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{RandomSource, WeightSource};

    /// Both ways to the numbers agree, with a last group that is shorter.
    #[test]
    fn a_matrix_and_its_rows_stand_for_the_same_numbers() {
        let (outputs, inputs) = (24, 3 * GROUP + 40);
        let source = RandomSource { seed: 3 };
        let stored = source.tensor("a.weight", &[outputs, inputs]).expect("random");
        let weight = quantise("a.weight", &stored, outputs, inputs).expect("quantised");
        let values = requantised("a.weight", &stored, inputs).expect("quantised").to_f32();
        assert_eq!(weight.dequantise(), values);
        assert_ne!(values, stored.to_f32());
        let shape = isobit_kernels::op::QuantizedShape::of(&[isobit_kernels::op::AsQuantized::quantized(&weight)]);
        assert_eq!(shape, isobit_kernels::op::QuantizedShape { zero: None, ..FORM.shape(outputs, inputs) });
    }

    #[test]
    fn what_is_too_large_is_refused_by_name() {
        let bytes = [3e6f32; 8].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let stored = StoredTensor { format: FloatFormat::F32, shape: vec![1, 8], bytes: Cow::Owned(bytes) };
        let error = quantise("q_proj.weight", &stored, 1, 8).expect_err("too large").to_string();
        assert!(
            error.contains("q_proj.weight") && error.contains("3000000") && error.contains("load_in_4bit"),
            "{error}"
        );
    }

    #[test]
    fn small_and_uneven_layers_stay() {
        assert!(takes(8, 8) && takes(1000, 64));
        assert!(!takes(1, 64) && !takes(64, 47) && !takes(64, 0));
    }
}
