//! Soft-capping (`docs/numerics.md`, "Soft-capping"): a number goes through `limit·tanh(·/limit)`,
//! so that it stays between `±limit`.

use super::tanh;
use crate::Fma;

/// A limit and its inverse.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftCap {
    pub limit: f32,
    pub inverse: f32,
}

impl SoftCap {
    /// Both rounded once.
    pub fn new(limit: f64) -> Self {
        Self { limit: limit as f32, inverse: (1.0 / limit) as f32 }
    }

    #[inline(always)]
    pub fn apply<F: Fma>(self, x: f32) -> f32 {
        tanh::<F>(x * self.inverse) * self.limit
    }

    /// The derivative, from the result of `apply`.
    #[inline(always)]
    pub fn slope<F: Fma>(self, capped: f32) -> f32 {
        let t = capped * self.inverse;
        F::fma(-t, t, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SoftFma;

    #[test]
    fn close_to_float64() {
        let cap = SoftCap::new(30.0);
        for step in -400..400 {
            let x = f64::from(step) * 0.5;
            let want = 30.0 * libm::tanh(x / 30.0);
            let got = cap.apply::<SoftFma>(x as f32);
            assert!((want - f64::from(got)).abs() <= 1e-6 * want.abs(), "{x}: {got}, not {want}");
            let slope = 1.0 - (want / 30.0) * (want / 30.0);
            assert!((slope - f64::from(cap.slope::<SoftFma>(got))).abs() < 5e-7, "{x}");
        }
        assert_eq!(cap.apply::<SoftFma>(f32::INFINITY), 30.0);
        assert!(cap.apply::<SoftFma>(f32::NAN).is_nan());
    }
}
