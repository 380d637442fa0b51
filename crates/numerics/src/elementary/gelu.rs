//! GELU in the form with `tanh` (`docs/numerics.md`, "GeGLU"). `½(1 + tanh u)` is `sigmoid(2u)`, so
//! both functions are written with `sigmoid` and keep their relative error where it is small.

use super::{canonical_if_nan, clamp, sigmoid};
use crate::Fma;

/// 2·√(2/π)
const SLOPE: f32 = f32::from_bits(0x3fcc_422a);
const CUBIC: f32 = f32::from_bits(0x3d37_2713);
/// Three times `CUBIC`.
const CUBIC_GRAD: f32 = f32::from_bits(0x3e09_5d4f);
/// Beyond ±16 the function is the identity or zero, and its derivative one or zero.
const LIMIT: f32 = 16.0;

/// `2u` for `|x| ≤ LIMIT`, with `u = √(2/π)·(x + 0.044715·x³)`.
#[inline(always)]
fn twice_inner<F: Fma>(x: f32) -> f32 {
    (SLOPE * x) * F::fma(CUBIC, x * x, 1.0)
}

/// `½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`.
#[inline(always)]
pub fn gelu<F: Fma>(x: f32) -> f32 {
    let bounded = clamp(x, LIMIT);
    let y = bounded * sigmoid::<F>(twice_inner::<F>(bounded));
    canonical_if_nan(x, if x > LIMIT { x } else { y })
}

/// Derivative of [`gelu`]: `s + (x·(s·(1 − s)))·(2u)'`, where `s` and `1 − s` are each formed
/// without cancellation.
#[inline(always)]
pub fn gelu_grad<F: Fma>(x: f32) -> f32 {
    let bounded = clamp(x, LIMIT);
    let inner = twice_inner::<F>(bounded);
    let (s, complement) = (sigmoid::<F>(inner), sigmoid::<F>(-inner));
    let slope = SLOPE * F::fma(CUBIC_GRAD, bounded * bounded, 1.0);
    canonical_if_nan(x, F::fma(bounded * (s * complement), slope, s))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SoftFma;

    fn exact(x: f64) -> f64 {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
        x / (1.0 + libm::exp(-2.0 * inner))
    }

    /// Six roundings lead to the argument of `sigmoid`, whose relative error grows with its size;
    /// where the function is not tiny that size is below 8.
    #[test]
    fn close_to_float64() {
        for step in -4000..4000 {
            let x = step as f32 / 500.0;
            let (want, got) = (exact(f64::from(x)), f64::from(gelu::<SoftFma>(x)));
            // A relative error of the exponent counts as often as the exponent is large.
            let exponent = 1.595_769 * f64::from(x.abs()) * (1.0 + 0.044_715 * f64::from(x * x));
            let bound = f64::from(f32::EPSILON) * (4.0 + 2.0 * exponent) * want.abs() + 1e-30;
            assert!((want - got).abs() <= bound.max(1e-9 * want.abs().min(1e-3)), "gelu({x}) = {got}, not {want}");
            let (h, x) = (1e-5, f64::from(x));
            let slope = (exact(x + h) - exact(x - h)) / (2.0 * h);
            let got = f64::from(gelu_grad::<SoftFma>(x as f32));
            assert!((slope - got).abs() < 2e-6, "gelu'({x}) = {got}, not {slope}");
        }
    }

    #[test]
    fn ends() {
        let bits = |x: f32| gelu::<SoftFma>(x).to_bits();
        assert_eq!(bits(f32::INFINITY), f32::INFINITY.to_bits());
        assert_eq!(bits(f32::NEG_INFINITY), (-0.0f32).to_bits());
        assert_eq!(bits(17.5), 17.5f32.to_bits());
        assert_eq!(bits(f32::NAN), 0x7fc0_0000);
        assert_eq!([-0.0f32, 0.0].map(bits), [-0.0f32, 0.0].map(f32::to_bits));
        let slope = |x: f32| gelu_grad::<SoftFma>(x);
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY, 0.0].map(slope), [1.0, 0.0, 0.5]);
        assert_eq!(slope(f32::NAN).to_bits(), 0x7fc0_0000);
    }
}
