//! `v_div_scale_f32`, `v_div_fmas_f32` and `v_div_fixup_f32`: the steps of the compiler's division.
//!
//! The published pseudo-code gives wrong quotients in three places; these are the corrected rules,
//! with which the sequence is exact for a correctly rounded reciprocal.

use crate::float::{SIGN, is_nan, quiet};

const INFINITY: u32 = 0x7f80_0000;
const INVALID: u32 = 0xffc0_0000;

/// Biased exponent.
fn exponent(bits: u32) -> i32 {
    (bits >> 23 & 0xff) as i32
}

fn is_zero(bits: u32) -> bool {
    bits & !SIGN == 0
}

/// 2^64 or 2^-64 times the value, rounded once.
fn shifted(bits: u32, up: bool) -> u32 {
    let factor = if up { 18446744073709551616.0 } else { 1.0 / 18446744073709551616.0f64 };
    ((f32::from_bits(bits) as f64 * factor) as f32).to_bits()
}

/// The scaled denominator or numerator (whichever `a` is), and the mask bit.
pub(crate) fn scale(a: u32, denominator: u32, numerator: u32) -> (u32, bool) {
    let is_denominator = a == denominator;
    let (d, n) = (exponent(denominator), exponent(numerator));
    // What happens to the denominator and to the numerator: Some(up) or nothing.
    let (scaled_d, scaled_n, mask) = if is_zero(denominator) || is_zero(numerator) {
        return (quiet(INFINITY), false);
    } else if n - d >= 96 {
        (Some(true), None, true)
    } else if d == 0 {
        (Some(true), Some(true), false)
    } else if d >= 253 && n - d <= -126 {
        (Some(false), None, true)
    } else if d >= 253 {
        (Some(false), Some(false), false)
    } else if n - d <= -126 {
        (None, Some(true), true)
    } else if n <= 23 {
        (Some(true), Some(true), false)
    } else {
        (None, None, false)
    };
    let scaling = if is_denominator { scaled_d } else { scaled_n };
    (scaling.map_or(a, |up| shifted(a, up)), mask)
}

/// `a * b + c`, times 2^64 or 2^-64 if the mask says so, rounded once.
pub(crate) fn fmas(a: u32, b: u32, c: u32, mask: bool) -> Option<u32> {
    if !mask {
        return None;
    }
    let (x, y, z) = (f32::from_bits(a) as f64, f32::from_bits(b) as f64, f32::from_bits(c) as f64);
    let factor = if exponent(c) > 127 { 18446744073709551616.0 } else { 1.0 / 18446744073709551616.0f64 };
    Some(((odd_sum(x * y, z) * factor) as f32).to_bits())
}

/// `a + b` rounded to odd: rounding the result again, to fewer bits, gives the right answer.
fn odd_sum(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let part = sum - a;
    let lost = (a - (sum - part)) + (b - part);
    if !sum.is_finite() || lost == 0.0 || sum.to_bits() & 1 == 1 {
        return sum;
    }
    // The exact sum lies between `sum` and its neighbour on the side of what was lost.
    let away = (lost > 0.0) == (sum > 0.0);
    f64::from_bits(if away { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

/// The quotient, or what the operands demand instead.
pub(crate) fn fixup(quotient: u32, denominator: u32, numerator: u32) -> u32 {
    let sign = (denominator ^ numerator) & SIGN;
    let (d, n) = (denominator & !SIGN, numerator & !SIGN);
    if is_nan(numerator) {
        quiet(numerator)
    } else if is_nan(denominator) {
        quiet(denominator)
    } else if (d == 0 && n == 0) || (d == INFINITY && n == INFINITY) {
        INVALID
    } else if d == 0 || n == INFINITY {
        sign | INFINITY
    } else if d == INFINITY || n == 0 || exponent(n) - exponent(d) < -150 {
        sign
    } else if is_nan(quotient) {
        // An overflow on the way.
        sign | INFINITY
    } else {
        sign | quotient & !SIGN
    }
}
