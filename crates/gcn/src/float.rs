//! Float32 of a lane on the host's IEEE arithmetic, and what hardware leaves open: the last bit of
//! approximations and the bits of a NaN, which a seed chooses.

use crate::instruction::LANES;
use crate::random::mix;

pub(crate) const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7f80_0000;
const QUIET: u32 = 0x0040_0000;
const NORMAL_MIN: u32 = 0x0080_0000;

pub(crate) fn is_nan(bits: u32) -> bool {
    bits & !SIGN > INFINITY
}

fn is_signalling(bits: u32) -> bool {
    is_nan(bits) && bits & QUIET == 0
}

pub(crate) fn quiet(bits: u32) -> u32 {
    bits | QUIET
}

/// Denormals become zero, the sign stays.
#[inline(always)]
pub(crate) fn flushed(bits: u32) -> u32 {
    if bits & !SIGN < NORMAL_MIN { bits & SIGN } else { bits }
}

/// The larger or the smaller one: NaN loses, a signalling NaN comes back quiet, -0 is below +0.
fn extremum(a: u32, b: u32, larger: bool) -> u32 {
    if is_signalling(a) {
        return quiet(a);
    }
    if is_signalling(b) {
        return quiet(b);
    }
    if is_nan(a) {
        return b;
    }
    if is_nan(b) {
        return a;
    }
    // Ordered like the numbers, zeros by sign.
    let key = |x: u32| if x & SIGN == 0 { x as i64 } else { -1 - (x & !SIGN) as i64 };
    if (key(a) > key(b)) == larger { a } else { b }
}

pub(crate) fn max(a: u32, b: u32) -> u32 {
    extremum(a, b, true)
}

pub(crate) fn min(a: u32, b: u32) -> u32 {
    extremum(a, b, false)
}

pub(crate) fn median(a: u32, b: u32, c: u32) -> u32 {
    if is_nan(a) || is_nan(b) || is_nan(c) {
        return min(min(a, b), c);
    }
    max(min(a, b), min(max(a, b), c))
}

/// Product and sum rounded one after the other, without denormals.
#[inline(always)]
pub(crate) fn multiply_then_add(a: u32, b: u32, c: u32) -> u32 {
    let [a, b, c] = [a, b, c].map(|x| f32::from_bits(flushed(x)));
    let product = flushed((a * b).to_bits());
    flushed((f32::from_bits(product) + c).to_bits())
}

/// `x * 2^power`, rounded once.
pub(crate) fn scale(x: u32, power: u32) -> u32 {
    // Float64 holds the product exactly as far as float32 reaches.
    let power = (power as i32).clamp(-300, 300);
    let factor = f64::from_bits(((1023 + power) as u64) << 52);
    ((f32::from_bits(x) as f64 * factor) as f32).to_bits()
}

/// Bit `n` of the mask that belongs to the class of `x`.
pub(crate) fn class(x: u32) -> u32 {
    let (magnitude, negative) = (x & !SIGN, x & SIGN != 0);
    let of_sign = |if_negative, if_positive| if negative { if_negative } else { if_positive };
    match magnitude {
        0 => of_sign(5, 6),
        1..NORMAL_MIN => of_sign(4, 7),
        NORMAL_MIN..INFINITY => of_sign(3, 8),
        INFINITY => of_sign(2, 9),
        _ if is_signalling(x) => 0,
        _ => 1,
    }
}

/// The correctly rounded value of an approximate function, moved by up to one unit in the last
/// place.
fn moved(seed: u64, function: u64, x: u32, exact: u32) -> u32 {
    let magnitude = exact & !SIGN;
    if seed == 0 || !(NORMAL_MIN + 1..INFINITY - 1).contains(&magnitude) {
        return exact;
    }
    match mix(seed ^ function << 56, x as u64) % 3 {
        0 => exact - 1,
        1 => exact,
        _ => exact + 1,
    }
}

pub(crate) fn reciprocal(seed: u64, x: u32) -> u32 {
    moved(seed, 1, x, flushed((1.0 / f32::from_bits(flushed(x))).to_bits()))
}

pub(crate) fn square_root(seed: u64, x: u32) -> u32 {
    moved(seed, 2, x, f32::from_bits(flushed(x)).sqrt().to_bits())
}

pub(crate) fn reciprocal_root(seed: u64, x: u32) -> u32 {
    let root = (f32::from_bits(flushed(x)) as f64).sqrt();
    moved(seed, 3, x, ((1.0 / root) as f32).to_bits())
}

/// Payload and sign of NaNs are the hardware's choice: the seed's, if it is not 0.
#[inline(always)]
pub(crate) fn choose_nans(seed: u64, lanes: &mut [u32; LANES]) {
    if seed == 0 || !lanes.iter().fold(false, |any, bits| any | is_nan(*bits)) {
        return;
    }
    for (lane, bits) in lanes.iter_mut().enumerate() {
        if is_nan(*bits) {
            let random = mix(seed, u64::from(*bits) << 8 | lane as u64) as u32;
            *bits = INFINITY | QUIET | random & (SIGN | (QUIET - 1));
        }
    }
}
