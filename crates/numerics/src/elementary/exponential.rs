//! `exp` and `exp2`: nearest integer by a magic addition, a degree-6 polynomial, and 2ⁿ in two
//! exact factors so that overflow and gradual underflow round once, at the very end.

use super::{canonical_if_nan, clamp};
use crate::Fma;

/// 1.5·2²³ + 254. Adding it rounds to an integer `n`, ties to even, and leaves `n + 254` in the low
/// bits of the sum: twice the exponent bias, so that halving those bits gives two biased exponents
/// whose factors multiply to 2ⁿ.
const SHIFT: f32 = 12583166.0;

const LOG2_E: f32 = f32::from_bits(0x3fb8_aa3b);
/// ln 2 to 15 bits: its product with any integer below 2⁹ is exact.
pub(super) const LN2_HIGH: f32 = f32::from_bits(0x3f31_7200);
/// ln 2 − [`LN2_HIGH`].
pub(super) const LN2_LOW: f32 = f32::from_bits(0x35bf_be8e);

/// eʳ = 1 + r + r²·(E0 + E1·r + …), |r| ≤ ln 2 / 2, relative error 2⁻²⁸·².
const E: [f32; 5] = [
    f32::from_bits(0x3eff_fffe),
    f32::from_bits(0x3e2a_aa49),
    f32::from_bits(0x3d2a_ac58),
    f32::from_bits(0x3c09_1cc7),
    f32::from_bits(0x3ab5_26b0),
];

/// 2ᶠ = 1 + f·(T0 + T1·f + …), |f| ≤ 1/2, relative error 2⁻²⁸·³.
const T: [f32; 6] = [
    f32::from_bits(0x3f31_7218),
    f32::from_bits(0x3e75_fdee),
    f32::from_bits(0x3d63_57be),
    f32::from_bits(0x3c1d_96f0),
    f32::from_bits(0x3aaf_8417),
    f32::from_bits(0x3920_b5a9),
];

/// Beyond ±150 the result is infinite or zero, even after multiplication by the argument itself
/// (`silu`).
const EXP_LIMIT: f32 = 150.0;
const EXP2_LIMIT: f32 = 200.0;

/// A number `near · far`: `near` carries the digits, `far` is a power of two, and the product may
/// overflow or underflow.
#[derive(Clone, Copy)]
pub(super) struct Scaled {
    pub(super) near: f32,
    pub(super) far: f32,
}

impl Scaled {
    /// `p · 2ⁿ` from `n + SHIFT`. The shifts drop the bits of the magic constant.
    #[inline(always)]
    fn new(p: f32, shifted: f32) -> Self {
        let bits = shifted.to_bits();
        let half = bits >> 1;
        let rest = bits.wrapping_sub(half);
        Self { near: p * f32::from_bits(half << 23), far: f32::from_bits(rest << 23) }
    }

    #[inline(always)]
    pub(super) fn value(self) -> f32 {
        self.near * self.far
    }
}

/// eˣ, not yet collapsed. NaN gives the value at the lower limit: the caller selects.
#[inline(always)]
pub(super) fn exp_scaled<F: Fma>(x: f32) -> Scaled {
    exp_within_limit::<F>(clamp(x, EXP_LIMIT))
}

/// As [`exp_scaled`], for a number that is already within ±[`EXP_LIMIT`].
#[inline(always)]
pub(super) fn exp_within_limit<F: Fma>(x: f32) -> Scaled {
    let shifted = F::fma(x, LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let r = F::fma(n, -LN2_LOW, F::fma(n, -LN2_HIGH, x));
    let mut p = E[4];
    p = F::fma(p, r, E[3]);
    p = F::fma(p, r, E[2]);
    p = F::fma(p, r, E[1]);
    p = F::fma(p, r, E[0]);
    p = F::fma(p, r, 1.0);
    p = F::fma(p, r, 1.0);
    Scaled::new(p, shifted)
}

/// eˣ.
#[inline(always)]
pub fn exp<F: Fma>(x: f32) -> f32 {
    canonical_if_nan(x, exp_scaled::<F>(x).value())
}

/// 2ˣ.
#[inline(always)]
pub fn exp2<F: Fma>(x: f32) -> f32 {
    let clamped = clamp(x, EXP2_LIMIT);
    let shifted = clamped + SHIFT;
    let f = clamped - (shifted - SHIFT);
    let mut p = T[5];
    p = F::fma(p, f, T[4]);
    p = F::fma(p, f, T[3]);
    p = F::fma(p, f, T[2]);
    p = F::fma(p, f, T[1]);
    p = F::fma(p, f, T[0]);
    p = F::fma(p, f, 1.0);
    canonical_if_nan(x, Scaled::new(p, shifted).value())
}
