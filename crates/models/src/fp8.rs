//! Float8 matrices (e4m3, finite only) with a float32 scale per block, as published by DeepSeek-V3.
//!
//! A weight is its 8-bit value times the scale of its block, one float32 product rounded once;
//! nothing else is rounded, so every reader gets these numbers. The format has no infinities;
//! either of its two NaN codes in a weight means a malformed file.

use crate::ModelError;

/// The value of a code, exactly.
#[expect(clippy::float_arithmetic, reason = "a power of two: exact")]
pub const fn value(code: u8) -> f32 {
    let magnitude = code as u32 & 0x7f;
    if magnitude == 0x7f {
        return f32::NAN;
    }
    // Puts the seven bits at a float32's exponent and mantissa, then corrects by the difference of
    // the biases, 127 − 7.
    let value = f32::from_bits(magnitude << 20) * f32::from_bits((127 + 120) << 23);
    f32::from_bits(value.to_bits() | (code as u32 & 0x80) << 24)
}

const VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = value(code as u8);
        code += 1;
    }
    values
};

/// Blocks along both dimensions of a matrix: the shape of its scales.
pub fn scale_shape(rows: usize, columns: usize, block: [usize; 2]) -> [usize; 2] {
    [rows.div_ceil(block[0]), columns.div_ceil(block[1])]
}

/// The numbers of a matrix `[rows, columns]` of codes; `name` is for errors.
#[expect(clippy::float_arithmetic, reason = "the one product that defines the weight")]
pub fn dequantise(
    name: &str,
    codes: &[u8],
    columns: usize,
    scales: &[f32],
    block: [usize; 2],
) -> Result<Vec<f32>, ModelError> {
    let wrong = |what: String| ModelError::Tensor { name: name.to_string(), what };
    let across = columns.div_ceil(block[1]);
    if let Some(at) = scales.iter().position(|scale| !scale.is_finite()) {
        return Err(wrong(format!("scale {at} of its blocks is {}", scales[at])));
    }
    let mut values = Vec::with_capacity(codes.len());
    for (row, codes) in codes.chunks(columns.max(1)).enumerate() {
        let scales = &scales[row / block[0] * across..][..across];
        for (codes, scale) in codes.chunks(block[1]).zip(scales) {
            values.extend(codes.iter().map(|code| VALUES[usize::from(*code)] * scale));
        }
    }
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) if values[at].is_nan() => {
            Err(wrong(format!("element {at} is not a number (code {:#04x})", codes[at])))
        }
        Some(at) => Err(wrong(format!("element {at} times its scale is beyond float32"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_value() {
        for code in 0..=u8::MAX {
            let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
            let magnitude = match exponent {
                0 => mantissa / 8.0 * libm::pow(2.0, -6.0),
                _ => (1.0 + mantissa / 8.0) * libm::pow(2.0, f64::from(exponent - 7)),
            };
            let wanted = if code & 0x80 == 0 { magnitude } else { -magnitude };
            if code & 0x7f == 0x7f {
                assert!(value(code).is_nan());
            } else {
                assert_eq!(f64::from(value(code)).to_bits(), wanted.to_bits(), "{code:#04x}");
            }
        }
        assert_eq!((value(0x7e), value(0x01), value(0x80).to_bits()), (448.0, 1.0 / 512.0, 1 << 31));
    }

    #[test]
    fn blocks_at_the_edges_are_shorter() {
        // 3 rows, 5 columns, blocks of 2 by 3: four blocks.
        assert_eq!(scale_shape(3, 5, [2, 3]), [2, 2]);
        let codes = vec![0x38; 15];
        let values = dequantise("w", &codes, 5, &[1.0, 2.0, 3.0, 4.0], [2, 3]).expect("numbers");
        assert_eq!(values, [1., 1., 1., 2., 2., 1., 1., 1., 2., 2., 3., 3., 3., 4., 4.]);
        // One rounding of the product in float32.
        let scale = 0.1f32;
        assert_eq!(dequantise("w", &[0x39], 1, &[scale], [128, 128]).expect("a number"), [1.125 * scale]);
    }

    #[test]
    fn what_is_no_number_is_an_error() {
        for (code, scale, wanted) in [
            (0x7f, 1.0, "element 1"),
            (0xff, 1.0, "0xff"),
            (0x7e, 3e38, "beyond"),
            (0, f32::NAN, "scale 0"),
            (0, f32::INFINITY, "inf"),
        ] {
            let error = dequantise("w", &[0, code], 2, &[scale], [4, 4]).expect_err(wanted).to_string();
            assert!(error.contains(wanted) && error.contains("tensor w"), "{error}");
        }
        assert!(dequantise("w", &[], 0, &[], [4, 4]).expect("nothing").is_empty());
    }
}
