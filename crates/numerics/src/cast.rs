//! Conversions between float32 and the 16-bit formats, on bits: nearest, ties to even, subnormals
//! kept, overflow to infinity. Every NaN becomes the canonical quiet NaN of the target, without
//! sign or payload.

pub const BF16_NAN: u16 = 0x7fc0;
pub const F16_NAN: u16 = 0x7e00;

const F32_NAN: u32 = 0x7fc0_0000;
const F32_INFINITY: u32 = 0x7f80_0000;
/// Difference of the exponent biases, 127 − 15, as a float32 exponent field.
const F16_REBIAS: u32 = (127 - 15) << 23;
/// Bits of 2⁻¹⁴, the smallest normal float16.
const F16_NORMAL: u32 = (127 - 14) << 23;

/// float32 to bfloat16.
#[inline(always)]
pub const fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if bits & 0x7fff_ffff > F32_INFINITY { BF16_NAN } else { rounded as u16 }
}

/// bfloat16 to float32, exact.
#[inline(always)]
pub const fn bf16_to_f32(x: u16) -> f32 {
    let bits = (x as u32) << 16;
    f32::from_bits(if bits & 0x7fff_ffff > F32_INFINITY { F32_NAN } else { bits })
}

/// float32 to float16.
#[inline(always)]
pub const fn f32_to_f16(x: f32) -> u16 {
    let sign = (x.to_bits() >> 16) & 0x8000;
    let bits = x.to_bits() & 0x7fff_ffff;
    let normal = bits.wrapping_sub(F16_REBIAS).wrapping_add(0x0fff + ((bits >> 13) & 1)) >> 13;
    // Rounding may carry into infinity; anything larger is infinity too.
    let normal = if normal < 0x7c00 { normal } else { 0x7c00 };
    // The last place of 1/2 is 2⁻²⁴, one unit of a subnormal float16: the addition rounds, and the
    // low bits are the result.
    let subnormal = (f32::from_bits(bits) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let finite = if bits < F16_NORMAL { subnormal } else { normal };
    if bits > F32_INFINITY { F16_NAN } else { (sign | finite) as u16 }
}

/// float16 to float32, exact.
#[inline(always)]
pub const fn f16_to_f32(x: u16) -> f32 {
    let sign = (x as u32 & 0x8000) << 16;
    let bits = (x as u32 & 0x7fff) << 13;
    // Infinity needs the rebias twice; a subnormal is the difference of two normal numbers.
    let normal = bits + F16_REBIAS;
    let infinite = normal + F16_REBIAS;
    let subnormal = (f32::from_bits(bits + F16_NORMAL) - f32::from_bits(F16_NORMAL)).to_bits();
    let finite = if bits < 0x0080_0000 { subnormal } else { normal };
    let value = if bits < 0x0f80_0000 { finite } else { infinite };
    f32::from_bits(if bits > 0x0f80_0000 { F32_NAN } else { sign | value })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_16_bit_value_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let wide = bf16_to_f32(bits);
            let reference = half::bf16::from_bits(bits);
            if reference.is_nan() {
                assert_eq!((wide.to_bits(), f32_to_bf16(wide)), (F32_NAN, BF16_NAN));
            } else {
                assert_eq!((wide.to_bits(), f32_to_bf16(wide)), (reference.to_f32().to_bits(), bits), "{bits:#06x}");
            }
            let wide = f16_to_f32(bits);
            let reference = half::f16::from_bits(bits);
            if reference.is_nan() {
                assert_eq!((wide.to_bits(), f32_to_f16(wide)), (F32_NAN, F16_NAN));
            } else {
                assert_eq!((wide.to_bits(), f32_to_f16(wide)), (reference.to_f32().to_bits(), bits), "{bits:#06x}");
            }
        }
    }

    #[test]
    fn narrowing_agrees_with_the_half_crate() {
        // A sample of all patterns, and the neighbourhood of every boundary between two 16-bit
        // values.
        let sample = (0..=u32::MAX).step_by(997);
        let ties = (0..=u16::MAX).flat_map(|bits| {
            let bf16 = (u32::from(bits) << 16) | 0x8000;
            let f16 = f16_to_f32(bits).to_bits() | 0x1000;
            let subnormal = (f16_to_f32(bits) * 0.5).to_bits();
            [bf16, f16, subnormal].into_iter().flat_map(|b| [b.wrapping_sub(1), b, b.wrapping_add(1)])
        });
        for bits in sample.chain(ties) {
            let x = f32::from_bits(bits);
            if x.is_nan() {
                assert_eq!((f32_to_bf16(x), f32_to_f16(x)), (BF16_NAN, F16_NAN), "{bits:#010x}");
            } else {
                assert_eq!(f32_to_bf16(x), half::bf16::from_f32(x).to_bits(), "bf16 of {bits:#010x}");
                assert_eq!(f32_to_f16(x), half::f16::from_f32(x).to_bits(), "f16 of {bits:#010x}");
            }
        }
    }
}
