//! Activation functions, built on `exp` and `ln`. They keep their relative error into the subnormal
//! tails, so they use the exponential before its two factors are multiplied out.

use super::exponential::{exp_scaled, exp_within_limit};
use super::logarithm::ln_normal;
use super::{SIGN_BIT, canonical, canonical_if_nan, clamp, magnitude};
use crate::Fma;

/// Below this magnitude `tanh` is a polynomial; above, it is computed from `exp`.
const TANH_SPLIT: f32 = 0.625;

/// tanh x = x + x³·(H0 + H1·x² + …), |x| < 5/8, relative error 2⁻³².
const H: [f32; 6] = [
    f32::from_bits(0xbeaa_aaaa),
    f32::from_bits(0x3e08_883d),
    f32::from_bits(0xbd5c_f8c4),
    f32::from_bits(0x3cb1_d2a8),
    f32::from_bits(0xbc06_2f68),
    f32::from_bits(0x3b0d_140b),
];

/// Beyond ±128 `silu` and its derivative are zero, the identity or one; within it `exp` needs no
/// separate limit.
const SILU_LIMIT: f32 = 128.0;

/// 3/4 + 1/√2: the line `RECIPROCAL_START − d/2` is the best one for `1/d` on 1..=2.
const RECIPROCAL_START: f32 = f32::from_bits(0x3fba_827a);

/// Hyperbolic tangent.
#[inline(always)]
pub fn tanh<F: Fma>(x: f32) -> f32 {
    let a = magnitude(x);
    let z = a * a;
    let mut p = H[5];
    p = F::fma(p, z, H[4]);
    p = F::fma(p, z, H[3]);
    p = F::fma(p, z, H[2]);
    p = F::fma(p, z, H[1]);
    p = F::fma(p, z, H[0]);
    let small = F::fma(a * z, p, a);
    let large = 1.0 - 2.0 / (exp_scaled::<F>(a + a).value() + 1.0);
    let t = if a < TANH_SPLIT { small } else { large };
    let signed = f32::from_bits(t.to_bits() | (x.to_bits() & SIGN_BIT));
    canonical_if_nan(x, signed)
}

/// `(high + low) / (1 + e)` for `e` in 0..=1. The quotient is corrected by its remainder, which
/// also recovers what `1 + e` dropped; the correction is small, so a line within 9 % of `1/d` on
/// 1..=2 serves as the reciprocal.
#[inline(always)]
fn over_one_plus<F: Fma>(high: f32, low: f32, e: f32) -> f32 {
    let d = 1.0 + e;
    let dropped = e - (d - 1.0);
    let q = high / d;
    let remainder = F::fma(-q, dropped, F::fma(-q, d, high) + low);
    F::fma(remainder, F::fma(d, -0.5, RECIPROCAL_START), q)
}

/// 1 / (1 + e⁻ˣ).
#[inline(always)]
pub fn sigmoid<F: Fma>(x: f32) -> f32 {
    let e = exp_scaled::<F>(-magnitude(x));
    let negative = x < 0.0;
    let near = if negative { e.near } else { 1.0 };
    let far = if negative { e.far } else { 1.0 };
    canonical_if_nan(x, over_one_plus::<F>(near, 0.0, e.value()) * far)
}

/// x · sigmoid(x).
#[inline(always)]
pub fn silu<F: Fma>(x: f32) -> f32 {
    // Infinity times zero would be NaN.
    let bounded = clamp(x, SILU_LIMIT);
    let e = exp_within_limit::<F>(-magnitude(bounded));
    let negative = x < 0.0;
    let near = if negative { e.near } else { 1.0 };
    let far = if negative { e.far } else { 1.0 };
    let high = bounded * near;
    let low = F::fma(bounded, near, -high);
    let y = over_one_plus::<F>(high, low, e.value()) * far;
    let y = if x > SILU_LIMIT { x } else { y };
    // The result has the sign of `x`; the correction turns −0 into +0.
    let signed = f32::from_bits(y.to_bits() | (x.to_bits() & SIGN_BIT));
    canonical_if_nan(x, signed)
}

/// Derivative of [`silu`]: `s·(1 + x·(1 − s))`, where `s` and `1 − s` are each formed without
/// cancellation.
#[inline(always)]
pub fn silu_grad<F: Fma>(x: f32) -> f32 {
    let bounded = clamp(x, SILU_LIMIT);
    let e = exp_within_limit::<F>(-magnitude(bounded));
    let value = e.value();
    let negative = x < 0.0;
    let near = if negative { e.near } else { 1.0 };
    let far = if negative { e.far } else { 1.0 };
    let sigmoid = over_one_plus::<F>(near, 0.0, value);
    let complement = over_one_plus::<F>(if negative { 1.0 } else { value }, 0.0, value);
    let slope = F::fma(bounded, complement, 1.0);
    canonical_if_nan(x, (sigmoid * slope) * far)
}

/// ln(1 + eˣ) = max(x, 0) + ln(1 + e^−|x|).
#[inline(always)]
pub fn softplus<F: Fma>(x: f32) -> f32 {
    let e = exp_scaled::<F>(-magnitude(x)).value();
    let d = 1.0 + e;
    // What the addition dropped is recovered through the derivative of the logarithm; for tiny `e`
    // it is the whole result.
    let lost = e - (d - 1.0);
    let log = ln_normal::<F>(d, 0, lost / d);
    let positive = if x > 0.0 { x } else { 0.0 };
    canonical_if_nan(x, positive + log)
}

/// 1 / √x, two correctly rounded operations: ±∞ at ±0, NaN below zero.
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    canonical(1.0 / x.sqrt())
}
