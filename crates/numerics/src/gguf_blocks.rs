//! Blocks of 32 numbers in a few bits each, as GGUF files hold them (`docs/numerics.md`, "Blocks of
//! GGUF files"): `q8_0` and `q4_0`, byte for byte those of the format's own package.

use crate::cast::f32_to_f16;

/// Numbers of a block.
pub const BLOCK: usize = 32;
/// Bytes of a block of `q8_0`.
pub const Q8_0_BYTES: usize = 2 + BLOCK;
/// Bytes of a block of `q4_0`.
pub const Q4_0_BYTES: usize = 2 + BLOCK / 2;

/// `1 / d`; zero if that is no number to multiply with.
fn inverse(d: f32) -> f32 {
    let inverse = 1.0 / d;
    if d != 0.0 && inverse.is_finite() { inverse } else { 0.0 }
}

/// `x` to the nearest integer, ties away from zero. `|x|` is at most 2²².
fn round(x: f32) -> f32 {
    let magnitude = x.abs();
    let whole = magnitude as u32 as f32;
    let rounded = if magnitude - whole >= 0.5 { whole + 1.0 } else { whole };
    rounded.copysign(x)
}

/// A block of `q8_0`.
pub fn q8_0(x: &[f32; BLOCK]) -> [u8; Q8_0_BYTES] {
    let d = x.iter().fold(0.0, |most: f32, value| if value.abs() > most { value.abs() } else { most }) / 127.0;
    let e = inverse(d);
    let mut bytes = [0; Q8_0_BYTES];
    bytes[..2].copy_from_slice(&f32_to_f16(d).to_le_bytes());
    for (byte, value) in bytes[2..].iter_mut().zip(x) {
        *byte = (round(value * e) as i8) as u8;
    }
    bytes
}

/// A block of `q4_0`.
pub fn q4_0(x: &[f32; BLOCK]) -> [u8; Q4_0_BYTES] {
    let most = x.iter().fold(0.0f32, |most, value| if value.abs() > most.abs() { *value } else { most });
    let d = most / -8.0;
    let e = inverse(d);
    let code = |value: f32| ((value * e + 8.5) as u8).min(15);
    let mut bytes = [0; Q4_0_BYTES];
    bytes[..2].copy_from_slice(&f32_to_f16(d).to_le_bytes());
    for (at, byte) in bytes[2..].iter_mut().enumerate() {
        *byte = code(x[at]) | code(x[at + BLOCK / 2]) << 4;
    }
    bytes
}

/// The scale that a block of either format begins with.
pub fn scale_bits<const N: usize>(block: &[u8; N]) -> u16 {
    u16::from_le_bytes([block[0], block[1]])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that the `gguf` package of PyPI (0.19) makes of the same numbers.
    #[test]
    fn bytes_of_the_package() {
        let ramp: [f32; BLOCK] = core::array::from_fn(|at| (at as f32 - 11.0) * 0.37);
        assert_eq!(hex(&q8_0(&ramp)), RAMP_Q8_0);
        assert_eq!(hex(&q4_0(&ramp)), RAMP_Q4_0);
        // Ties of the rounding, and the first of two largest numbers.
        let ties: [f32; BLOCK] = core::array::from_fn(|at| [-127.0, 127.0, 0.5, -0.5, 2.5, -2.5, 63.5, -0.0][at % 8]);
        assert_eq!(hex(&q8_0(&ties)), TIES_Q8_0);
        assert_eq!(hex(&q4_0(&ties)), TIES_Q4_0);
    }

    #[test]
    fn nothing_becomes_nothing() {
        for tiny in [0.0, -0.0, 1e-45, -1e-40] {
            let x = [tiny; BLOCK];
            let (q8, q4) = (q8_0(&x), q4_0(&x));
            assert_eq!((scale_bits(&q8) & 0x7fff, scale_bits(&q4) & 0x7fff), (0, 0), "{tiny:e}");
            if tiny == 0.0 {
                assert_eq!((q8[2], q4[2]), (0, 0x88), "{tiny:e}");
            }
        }
    }

    fn hex(bytes: &[u8]) -> String {
        let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        digits.map(|digit| char::from_digit(u32::from(digit), 16).expect("below 16")).collect()
    }

    const RAMP_Q8_0: &str = "752bbac0c7cdd4dae0e7edf3fa00060d131920262c333940464c53595f666c72797f";
    const RAMP_Q4_0: &str = "66bb6c6c5c5b4b4a4a3a3929282818170706";
    const TIES_Q8_0: &str = "003c817f01ff03fd4000817f01ff03fd4000817f01ff03fd4000817f01ff03fd4000";
    const TIES_Q4_0: &str = "f04b00ff88888888cc8800ff88888888cc88";
}
