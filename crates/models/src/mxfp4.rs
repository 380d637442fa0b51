//! MXFP4 tensors, as published with gpt-oss: 4-bit floats (e2m1), of which 32 along a row share a
//! scale that is a power of two (e8m0).
//!
//! A tensor `[count, rows, columns]` is stored as `_blocks` `[count, rows, columns / 32, 16]`, two
//! codes in a byte, the lower four bits first, and `_scales` `[count, rows, columns / 32]`, the
//! exponent plus 127; 255 is not a number. Products take the codes as they are; for a merged model
//! they are expanded to bfloat16, in which every number is exact.

use crate::ModelError;
use crate::gptq::{GptqScales, GptqWeight};
use crate::source::{FloatFormat, StoredTensor, WeightSource};
use half::f16;
use isobit_kernels::op::QuantizedShape;
use isobit_kernels::op::product4::{CHANNELS_PER_WORD, E2M1};
use isobit_numerics::cast::{f32_to_bf16, f32_to_f16};
use isobit_numerics::e2m1::TWICE;
use isobit_proof::safetensors::TensorFiles;
use std::borrow::Cow;
use std::ops::{Range, RangeInclusive};

/// Ends of the names of a tensor's parts.
pub(crate) const PARTS: [&str; 2] = ["_blocks", "_scales"];
/// Numbers that share a scale.
pub(crate) const GROUP: usize = 32;
/// Bytes of a block: two codes each.
const BLOCK: usize = GROUP / 2;
const NEGATIVE_ZERO: usize = 8;
/// Largest scale with which every number is finite.
const SCALE_MAX: u8 = 252;
/// Scales whose halves, by which products multiply twice the codes, are exact in float16.
const HALF_SCALES: RangeInclusive<u8> = 104..=143;

/// Shapes of the parts of `count` matrices.
pub(crate) fn shapes(name: &str, count: usize, rows: usize, columns: usize) -> Result<[Vec<usize>; 2], ModelError> {
    if columns == 0 || !columns.is_multiple_of(GROUP) {
        return Err(ModelError::tensor(
            name,
            format!("{columns} columns are not a multiple of the {GROUP} that share a scale"),
        ));
    }
    let groups = columns / GROUP;
    Ok([vec![count, rows, groups, BLOCK], vec![count, rows, groups]])
}

/// The parts of a tensor.
pub(crate) struct Packed<'a> {
    name: String,
    blocks: Cow<'a, [u8]>,
    scales: Cow<'a, [u8]>,
    count: usize,
    rows: usize,
    /// Groups of a row.
    groups: usize,
}

impl<'a> Packed<'a> {
    /// `count` matrices of this size.
    pub(crate) fn read(
        source: &'a dyn WeightSource,
        name: &str,
        count: usize,
        rows: usize,
        columns: usize,
    ) -> Result<Self, ModelError> {
        let [blocks, scales] = shapes(name, count, rows, columns)?;
        Ok(Self {
            name: name.to_string(),
            blocks: source.mxfp4_part(&format!("{name}{}", PARTS[0]), &blocks)?,
            scales: source.mxfp4_part(&format!("{name}{}", PARTS[1]), &scales)?,
            count,
            rows,
            groups: columns / GROUP,
        })
    }

    /// What the products need to know of the matrices. A source without numbers has the scales of
    /// published models.
    pub(crate) fn shape(&self) -> Result<QuantizedShape, ModelError> {
        if let Some(at) = self.scales.iter().position(|scale| *scale > SCALE_MAX) {
            let scale = self.scales[at];
            return Err(ModelError::tensor(
                &self.name,
                format!("its scale {at} is {scale}: its numbers would not be finite"),
            ));
        }
        let half_scales = self.scales.iter().all(|scale| HALF_SCALES.contains(scale));
        let (n, k) = (self.rows, self.groups * GROUP);
        Ok(QuantizedShape { count: self.count, n, k, group_size: GROUP, half_scales, ordered: 0, zero: Some(E2M1) })
    }

    /// One matrix `[rows, columns]` as the products take it: its codes, and scales of twice their
    /// values, in float16 if [`Self::shape`] says so.
    pub(crate) fn matrix(&self, matrix: usize, half_scales: bool) -> GptqWeight {
        let (n, k) = (self.rows, self.groups * GROUP);
        let groups = matrix * n * self.groups..(matrix + 1) * n * self.groups;
        // A word of the file holds eight codes of a row already in their order.
        let words = self.blocks[groups.start * BLOCK..groups.end * BLOCK].as_chunks::<4>().0;
        let units: Vec<f32> = columns(&self.scales[groups], self.groups).map(unit).collect();
        GptqWeight {
            outputs: n,
            inputs: k,
            group_size: GROUP,
            qweight: columns(words, k / CHANNELS_PER_WORD).map(i32::from_le_bytes).collect(),
            zeros: vec![E2M1; units.len()],
            scales: if half_scales {
                GptqScales::F16(units.into_iter().map(|unit| f16::from_bits(f32_to_f16(unit))).collect())
            } else {
                GptqScales::F32(units)
            },
            group_of_input: (0..k).map(|input| (input / GROUP) as u32).collect(),
        }
    }

    /// Some rows, counted over all matrices, as blocks of a GGUF file: the scale, then the codes.
    pub(crate) fn gguf_blocks(&self, rows: &[usize]) -> Result<Vec<u8>, ModelError> {
        let mut bytes = Vec::with_capacity(rows.len() * self.groups * (1 + BLOCK));
        for row in rows {
            let groups = row * self.groups..(row + 1) * self.groups;
            let blocks = self.blocks[groups.start * BLOCK..groups.end * BLOCK].as_chunks::<BLOCK>().0;
            for (scale, block) in self.scales[groups].iter().zip(blocks) {
                if *scale > SCALE_MAX {
                    return Err(ModelError::tensor(
                        &self.name,
                        format!("a scale of row {row} is {scale}: its numbers would not be finite"),
                    ));
                }
                bytes.push(*scale);
                bytes.extend(halves(*block));
            }
        }
        Ok(bytes)
    }

    /// Some rows, counted over all matrices, as bfloat16 in little-endian bytes.
    pub(crate) fn expanded(&self, rows: Range<usize>) -> Result<Vec<u8>, ModelError> {
        let groups = rows.start * self.groups..rows.end * self.groups;
        let mut bytes = Vec::with_capacity(2 * GROUP * groups.len());
        let blocks = self.blocks[groups.start * BLOCK..groups.end * BLOCK].as_chunks::<BLOCK>().0;
        for (at, (block, scale)) in groups.clone().zip(blocks.iter().zip(&self.scales[groups])) {
            let values = values(*scale);
            for byte in block {
                for code in [byte & 15, byte >> 4] {
                    let bits = values[usize::from(code)];
                    if bits & 0x7f80 == 0x7f80 {
                        return Err(ModelError::tensor(
                            &self.name,
                            format!("its scale {at} is {scale}: a number is not finite"),
                        ));
                    }
                    bytes.extend(bits.to_le_bytes());
                }
            }
        }
        Ok(bytes)
    }
}

/// The order of codes in GGUF files: two halves of a block share bytes instead of neighbours.
fn halves(block: [u8; BLOCK]) -> [u8; BLOCK] {
    let code = |at: usize| block[at / 2] >> (4 * (at % 2)) & 15;
    std::array::from_fn(|at| code(at) | code(at + BLOCK) << 4)
}

/// The elements of rows of this width, column after column.
fn columns<T: Copy>(rows: &[T], width: usize) -> impl Iterator<Item = T> {
    (0..width).flat_map(move |column| rows.iter().skip(column).step_by(width).copied())
}

/// The tensor that one of the file's belongs to as a part, and the shape that it is expanded to, in
/// the layout of files with numbers: `[count, columns, rows]`. No shape for its scales, and nothing
/// for other tensors.
pub(crate) fn whole<'n>(files: &TensorFiles, name: &'n str) -> Option<(&'n str, Option<[usize; 3]>)> {
    let [blocks, scales] = PARTS;
    let has = |whole: &str, part: &str| files.contains(&format!("{whole}{part}"));
    if let Some(whole) = name.strip_suffix(scales) {
        return has(whole, blocks).then_some((whole, None));
    }
    let whole = name.strip_suffix(blocks).filter(|whole| has(whole, scales))?;
    match files.shape(name)?[..] {
        [count, rows, groups, BLOCK] => Some((whole, Some([count, groups.checked_mul(GROUP)?, rows]))),
        _ => None,
    }
}

/// The numbers of a tensor, in the layout of [`whole`].
pub(crate) fn transposed<'t>(
    source: &dyn WeightSource,
    name: &str,
    [count, columns, rows]: [usize; 3],
) -> Result<StoredTensor<'t>, ModelError> {
    let packed = Packed::read(source, name, count, rows, columns)?;
    let mut bytes = Vec::with_capacity(2 * count * rows * columns);
    for matrix in 0..count {
        let numbers = packed.expanded(matrix * rows..(matrix + 1) * rows)?;
        let numbers = numbers.as_chunks::<2>().0;
        for column in 0..columns {
            bytes.extend((0..rows).flat_map(|row| numbers[row * columns + column]));
        }
    }
    Ok(StoredTensor { format: FloatFormat::Bf16, shape: vec![count, columns, rows], bytes: Cow::Owned(bytes) })
}

/// Half of the power of two that a scale stands for: twice a code times this is the number.
fn unit(scale: u8) -> f32 {
    match scale {
        255 => f32::NAN,
        // Subnormal numbers.
        0 | 1 => f32::from_bits(1 << (21 + u32::from(scale))),
        scale => f32::from_bits((u32::from(scale) - 1) << 23),
    }
}

/// The bits of all 16 numbers of a group, in bfloat16.
#[expect(clippy::float_arithmetic, reason = "products with a power of two: exact")]
fn values(scale: u8) -> [u16; 16] {
    let unit = unit(scale);
    let mut values = TWICE.map(|twice| f32_to_bf16(f32::from(twice) * unit));
    if scale != 255 {
        values[NEGATIVE_ZERO] = 0x8000;
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobit_kernels::op::AsQuantized;

    #[test]
    fn every_code_has_its_value_under_every_scale() {
        for scale in 0..=254_u8 {
            for (code, bits) in values(scale).into_iter().enumerate() {
                let (exponent, mantissa) = (code >> 1 & 3, code & 1);
                let magnitude = match exponent {
                    0 => 0.5 * mantissa as f64,
                    _ => (1.0 + 0.5 * mantissa as f64) * libm::pow(2.0, exponent as f64 - 1.0),
                };
                let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
                let want = sign * magnitude * libm::pow(2.0, f64::from(scale) - 127.0);
                let got = f64::from(isobit_numerics::cast::bf16_to_f32(bits));
                if want.abs() < libm::pow(2.0, 128.0) {
                    assert_eq!(got.to_bits(), want.to_bits(), "code {code}, scale {scale}");
                } else {
                    assert!(got.is_infinite(), "code {code}, scale {scale}");
                }
            }
        }
        assert!(values(255).iter().all(|bits| bits & 0x7f80 == 0x7f80));
    }

    #[test]
    fn blocks_of_gguf_files_pair_halves() {
        let code = |at: usize| (5 * at + at / 16) % 16;
        let block = std::array::from_fn(|at| (code(2 * at) | code(2 * at + 1) << 4) as u8);
        let halves = halves(block);
        for at in 0..BLOCK {
            assert_eq!((usize::from(halves[at] & 15), usize::from(halves[at] >> 4)), (code(at), code(at + BLOCK)));
        }
    }

    #[test]
    fn rows_are_found_and_what_is_not_finite_is_refused() {
        let packed = |scales: &[u8]| Packed {
            name: "w".to_string(),
            blocks: Cow::Owned((0..3 * 16).map(|at| if at < 32 { 0x21 } else { 0xf7 }).collect()),
            scales: Cow::Owned(scales.to_vec()),
            count: 1,
            rows: 3,
            groups: 1,
        };
        let numbers = |bytes: &[u8]| -> Vec<f32> {
            bytes.as_chunks().0.iter().map(|b| isobit_numerics::cast::bf16_to_f32(u16::from_le_bytes(*b))).collect()
        };
        let rows = numbers(&packed(&[127, 128, 126]).expanded(1..3).expect("numbers"));
        assert_eq!((rows.len(), &rows[..2], &rows[32..34]), (64, &[1.0, 2.0][..], &[3.0, -3.0][..]));
        for (scales, wanted) in [([127, 255, 0], "scale 1 is 255"), ([127, 127, 254], "scale 2 is 254")] {
            for error in [packed(&scales).expanded(0..3).err(), packed(&scales).shape().err()] {
                let error = error.expect(wanted).to_string();
                assert!(error.contains(wanted) && error.contains("tensor w"), "{error}");
            }
        }
        // What the products take stands for the same numbers, with scales of either format.
        for (scales, half) in [([127, 128, 126], true), ([127, 0, 252], false)] {
            let packed = packed(&scales);
            let shape = packed.shape().expect("a shape");
            let matrix = packed.matrix(0, shape.half_scales);
            let numbers = numbers(&packed.expanded(0..3).expect("numbers"));
            assert_eq!((shape.half_scales, shape.is_e2m1()), (half, true));
            assert_eq!(matrix.quantized().check(), Ok(()));
            assert_eq!(QuantizedShape::of(&[matrix.quantized()]), shape);
            let same = |(got, want): (f32, f32)| assert_eq!(got, want);
            matrix.dequantise().into_iter().zip(numbers).for_each(same);
        }
        assert!(shapes("w", 1, 4, 48).is_err());
    }
}
