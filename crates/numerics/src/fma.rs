//! Explicit fused multiply-add. Two implementations with the same bits: the instruction, and
//! integer-exact software for machines without it. The platform's `fmaf` is never called.

/// How `a * b + c` with one rounding is computed. A type, not a value, so that a body is compiled
/// once per choice.
pub trait Fma: Copy + Send + Sync + 'static {
    /// `a * b + c`, rounded once.
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

/// The fused multiply-add instruction. Use it only inside a function compiled with the `fma` target
/// feature; elsewhere it would fall back to the platform's library.
#[derive(Clone, Copy, Debug)]
pub struct HardFma;

impl Fma for HardFma {
    #[inline(always)]
    #[expect(clippy::disallowed_methods, reason = "the one place that names the instruction")]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// Fused multiply-add from float64 arithmetic, for every machine.
#[derive(Clone, Copy, Debug)]
pub struct SoftFma;

impl Fma for SoftFma {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        fma(a, b, c)
    }
}

/// `a * b + c`, rounded once, without the instruction.
///
/// The product of two float32 is exact in float64. Its sum with `c` is rounded to odd in float64
/// (53 bits, more than 24 + 2), so that only the final rounding to float32 has an effect.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
        return HardFma::fma(a, b, c);
    }
    let product = f64::from(a) * f64::from(b);
    let addend = f64::from(c);
    let sum = product + addend;
    // Two-sum: `error` is exactly what the addition lost.
    let virtual_addend = sum - product;
    let error = (product - (sum - virtual_addend)) + (addend - virtual_addend);
    // Round to odd: an inexact sum with an even last bit moves one step towards the lost part.
    // Without branches, so that loops over lanes vectorise; infinities and NaN give a NaN error,
    // which compares false.
    let bits = sum.to_bits();
    let inexact = error.abs() > 0.0;
    let away_from_zero = (error > 0.0) == (sum > 0.0);
    let step = if away_from_zero { 1 } else { u64::MAX };
    let moves = inexact && bits & 1 == 0;
    f64::from_bits(bits.wrapping_add(if moves { step } else { 0 })) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exact value of `a*b+c` as a pair compared in i128 fixed point, for operands with small
    /// exponents.
    #[test]
    fn agrees_with_the_instruction_where_there_is_one() {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("fma") {
            #[target_feature(enable = "fma")]
            fn hard(a: f32, b: f32, c: f32) -> f32 {
                HardFma::fma(a, b, c)
            }
            let edges = [
                0.0f32,
                -0.0,
                1.0,
                -1.0,
                1.5,
                f32::MIN_POSITIVE,
                -f32::MIN_POSITIVE,
                1e-45,
                -1e-45,
                f32::MAX,
                f32::MIN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::NAN,
                16777217.0,
                1.0 + f32::EPSILON,
                1.0 - f32::EPSILON / 2.0,
                3e-39,
            ];
            let check = |a: f32, b: f32, c: f32| {
                // SAFETY: the feature was detected above.
                let want = unsafe { hard(a, b, c) };
                let got = fma(a, b, c);
                assert!(
                    want.to_bits() == got.to_bits() || (want.is_nan() && got.is_nan()),
                    "fma({a:e}, {b:e}, {c:e}): instruction {want:e}, software {got:e}"
                );
            };
            for a in edges {
                for b in edges {
                    for c in edges {
                        check(a, b, c);
                    }
                }
            }
            let mut state = 0x9E37_79B9_7F4A_7C15u64;
            let mut next = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state
            };
            for _ in 0..2_000_000 {
                let (x, y) = (next(), next());
                let (a, b) = (f32::from_bits(x as u32), f32::from_bits((x >> 32) as u32));
                let c = f32::from_bits(y as u32);
                check(a, b, c);
                // Near-cancellation, where a second rounding would show.
                let near = -(a * b);
                check(a, b, f32::from_bits(near.to_bits().wrapping_add((y >> 60) as u32).wrapping_sub(8)));
            }
        }
    }
}
