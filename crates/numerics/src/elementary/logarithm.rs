//! `ln`, and the common final step of `ln` and `softplus`: `k·ln 2 + ln(1 + f) + c` with the large
//! parts added exactly.

use super::exponential::{LN2_HIGH, LN2_LOW};
use super::{CANONICAL_NAN_BITS, INFINITY_BITS, canonical};
use crate::Fma;

/// Bits of 2/3: mantissas are taken from [2/3, 4/3), so that `f = m − 1` is exact and small on both
/// sides.
const MANTISSA_START: u32 = 0x3f2a_aaab;

/// ln(1 + f) = f + f²·(−1/2 + f·(L0 + L1·f + …)), |f| ≤ 1/3, relative error 2⁻³⁰.
const L: [f32; 9] = [
    f32::from_bits(0x3eaa_aaab),
    f32::from_bits(0xbe7f_ff8c),
    f32::from_bits(0x3e4c_cbf7),
    f32::from_bits(0xbe2a_cbc6),
    f32::from_bits(0x3e12_75b7),
    f32::from_bits(0xbdf9_d816),
    f32::from_bits(0x3ddc_8f7d),
    f32::from_bits(0xbe03_615d),
    f32::from_bits(0x3df4_e8c5),
];

/// `ln(x · 2^exponent) + tail` for a positive normal `x`; `tail` is small relative to the result.
#[inline(always)]
pub(super) fn ln_normal<F: Fma>(x: f32, exponent: i32, tail: f32) -> f32 {
    let offset = x.to_bits().wrapping_sub(MANTISSA_START);
    let k = ((offset as i32 >> 23) + exponent) as f32;
    let f = f32::from_bits((offset & 0x007f_ffff) + MANTISSA_START) - 1.0;
    let mut p = L[8];
    p = F::fma(p, f, L[7]);
    p = F::fma(p, f, L[6]);
    p = F::fma(p, f, L[5]);
    p = F::fma(p, f, L[4]);
    p = F::fma(p, f, L[3]);
    p = F::fma(p, f, L[2]);
    p = F::fma(p, f, L[1]);
    p = F::fma(p, f, L[0]);
    let curve = (f * f) * F::fma(p, f, -0.5);
    // ORDER: `k·LN2_HIGH` is exact, and |k·LN2_HIGH| is zero or above |f|, so `lost` is what the
    // addition dropped.
    let base = k * LN2_HIGH;
    let sum = base + f;
    let lost = f - (sum - base);
    sum + (F::fma(k, LN2_LOW, curve) + (lost + tail))
}

/// Natural logarithm: −∞ at ±0, NaN below zero.
#[inline(always)]
pub fn ln<F: Fma>(x: f32) -> f32 {
    let subnormal = x < f32::MIN_POSITIVE;
    let scaled = if subnormal { x * 8388608.0 } else { x };
    let y = ln_normal::<F>(scaled, if subnormal { -23 } else { 0 }, 0.0);
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x == 0.0 { -f32::from_bits(INFINITY_BITS) } else { y };
    // Negative arguments and NaN.
    canonical(if x >= 0.0 { y } else { f32::from_bits(CANONICAL_NAN_BITS) })
}
