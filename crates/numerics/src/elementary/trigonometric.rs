//! `sin` and `cos` for every finite argument: exact reduction by π/2 in integers (Payne and Hanek),
//! then a polynomial on [−π/4, π/4] that takes the reduced argument as a pair.

use super::{CANONICAL_NAN_BITS, INFINITY_BITS, SIGN_BIT};
use crate::Fma;

/// 32 zero bits, then the first 224 bits of 2/π. An argument `m·2^(e−150)` needs the 96 bits from
/// bit `e − 120`: the bits before them contribute multiples of four quadrants, those after them
/// less than 2⁻⁶⁹ of one.
const TWO_OVER_PI: [u32; 8] =
    [0x0000_0000, 0xa2f9_836e, 0x4e44_1529, 0xfc27_57d1, 0xf534_ddc0, 0xdb62_9599, 0x3c43_9041, 0xfe51_63ab];

/// π/2 as a pair.
const PI_HALF_HIGH: f32 = f32::from_bits(0x3fc9_0fdb);
const PI_HALF_LOW: f32 = f32::from_bits(0xb33b_bd2e);
/// Largest float32 below π/4: up to here the argument needs no reduction.
const PI_QUARTER_BITS: u32 = 0x3f49_0fda;

/// sin r = r + r³·(S0 + S1·r² + …), relative error 2⁻³².
const S: [f32; 4] = [
    f32::from_bits(0xbe2a_aaab),
    f32::from_bits(0x3c08_88ba),
    f32::from_bits(0xb950_2cac),
    f32::from_bits(0x363e_17a6),
];

/// cos r = 1 − r²/2 + r⁴·(C0 + C1·r² + …), relative error 2⁻³³.
const C: [f32; 3] = [f32::from_bits(0x3d2a_aaa5), f32::from_bits(0xbab6_0615), f32::from_bits(0x37cc_f482)];

/// `|x| = quadrant·π/2 + high + low`, quadrant modulo 4.
struct Reduced {
    quadrant: u32,
    high: f32,
    low: f32,
}

#[inline(always)]
fn reduce<F: Fma>(bits: u32) -> Reduced {
    let exponent = bits >> 23;
    // BOUND: exponents are at most 255, so `first` is at most 4 and `first + 3` stays inside the
    // table.
    let position = exponent.saturating_sub(120);
    let first = (position >> 5) as usize;
    let shift = position & 31;
    let window = |i: usize| (TWO_OVER_PI[first + i] << shift) | ((TWO_OVER_PI[first + i + 1] >> 1) >> (31 - shift));
    let mantissa = u64::from((bits & 0x007f_ffff) | 0x0080_0000);
    // x·2/π modulo 4 in units of 2⁻⁶².
    let top = (mantissa * u64::from(window(0))) << 32;
    let product =
        top.wrapping_add(mantissa * u64::from(window(1))).wrapping_add((mantissa * u64::from(window(2))) >> 32);
    let rounded = product.wrapping_add(1 << 61);
    let quadrant = (rounded >> 62) as u32;
    // The signed remainder in [−2⁶¹, 2⁶¹), cut into 22 + 22 + 18 bits that are exact in float32.
    let rest = product.wrapping_sub(u64::from(quadrant) << 62);
    let upper = ((rest >> 32) as u32 as i32) >> 8;
    let middle = ((rest >> 18) as u32) & 0x003f_ffff;
    let lower = (rest as u32) & 0x0003_ffff;
    let upper = upper as f32 * f32::from_bits((127 - 22) << 23);
    let middle = middle as i32 as f32 * f32::from_bits((127 - 44) << 23);
    let lower = lower as i32 as f32 * f32::from_bits((127 - 62) << 23);
    // ORDER: |upper| is zero or at least `middle`, so `lost` is what the addition dropped.
    let turn = upper + middle;
    let lost = (middle - (turn - upper)) + lower;
    // Times π/2.
    let product = turn * PI_HALF_HIGH;
    let tail = F::fma(turn, PI_HALF_HIGH, -product);
    let tail = F::fma(turn, PI_HALF_LOW, tail);
    let tail = F::fma(lost, PI_HALF_HIGH, tail);
    let high = product + tail;
    let low = tail - (high - product);
    let own = bits <= PI_QUARTER_BITS;
    Reduced {
        quadrant: if own { 0 } else { quadrant },
        high: if own { f32::from_bits(bits) } else { high },
        low: if own { 0.0 } else { low },
    }
}

/// Sine of `quadrant·π/2 + high + low` as bits, without the canonical NaN.
#[inline(always)]
fn sine_bits<F: Fma>(reduced: &Reduced, quarter_turns: u32) -> u32 {
    let (r, low) = (reduced.high, reduced.low);
    let quadrant = reduced.quadrant.wrapping_add(quarter_turns);
    let z = r * r;
    let mut s = S[3];
    s = F::fma(s, z, S[2]);
    s = F::fma(s, z, S[1]);
    s = F::fma(s, z, S[0]);
    let sine = r + F::fma(r * z, s, low);
    let mut c = C[2];
    c = F::fma(c, z, C[1]);
    c = F::fma(c, z, C[0]);
    // ORDER: 1 − z/2 loses bits that are added back; `z` itself was rounded, which `error` undoes.
    let error = F::fma(r, r, -z);
    let half = 0.5 * z;
    let top = 1.0 - half;
    let lost = (1.0 - top) - half;
    let slope = F::fma(r, low, 0.5 * error);
    let cosine = top + (F::fma(z * z, c, lost) - slope);
    let value = if quadrant & 1 == 0 { sine } else { cosine };
    value.to_bits() ^ ((quadrant & 2) << 30)
}

/// Sine; NaN at ±∞.
#[inline(always)]
pub fn sin<F: Fma>(x: f32) -> f32 {
    let bits = x.to_bits() & !SIGN_BIT;
    let sine = sine_bits::<F>(&reduce::<F>(bits), 0) ^ (x.to_bits() & SIGN_BIT);
    f32::from_bits(if bits >= INFINITY_BITS { CANONICAL_NAN_BITS } else { sine })
}

/// Cosine; NaN at ±∞.
#[inline(always)]
pub fn cos<F: Fma>(x: f32) -> f32 {
    let bits = x.to_bits() & !SIGN_BIT;
    let cosine = sine_bits::<F>(&reduce::<F>(bits), 1);
    f32::from_bits(if bits >= INFINITY_BITS { CANONICAL_NAN_BITS } else { cosine })
}
