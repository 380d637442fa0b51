//! Clamped SwiGLU (`docs/numerics.md`, "Clamped SwiGLU"): gate and up are limited before they are
//! multiplied, and one is added to up.

use super::{clamp, sigmoid};
use crate::Fma;

/// Its two constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClampedSwiglu {
    /// Factor inside the sigmoid.
    pub alpha: f32,
    /// Gate is at most this, up between plus and minus this.
    pub limit: f32,
}

impl ClampedSwiglu {
    /// `(up + 1)·(gate·sigmoid(alpha·gate))` of the limited numbers.
    #[inline(always)]
    pub fn apply<F: Fma>(self, gate: f32, up: f32) -> f32 {
        let g = self.limited(gate);
        (self.bounded(up) + 1.0) * (g * sigmoid::<F>(self.alpha * g))
    }

    /// The gradients of gate and up, given that of the result.
    #[inline(always)]
    pub fn gradients<F: Fma>(self, dh: f32, gate: f32, up: f32) -> (f32, f32) {
        let g = self.limited(gate);
        let inner = self.alpha * g;
        let (s, complement) = (sigmoid::<F>(inner), sigmoid::<F>(-inner));
        let dup = dh * (g * s);
        let dgate = (dh * (self.bounded(up) + 1.0)) * F::fma(inner, s * complement, s);
        let outside = up > self.limit || up < -self.limit;
        (if gate > self.limit { 0.0 } else { dgate }, if outside { 0.0 } else { dup })
    }

    #[inline(always)]
    fn limited(self, gate: f32) -> f32 {
        if gate > self.limit { self.limit } else { gate }
    }

    /// NaN stays NaN.
    #[inline(always)]
    fn bounded(self, up: f32) -> f32 {
        if up.is_nan() { up } else { clamp(up, self.limit) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SoftFma;

    const OP: ClampedSwiglu = ClampedSwiglu { alpha: 1.702, limit: 7.0 };

    fn exact(gate: f64, up: f64) -> f64 {
        let (g, u) = (gate.min(7.0), up.clamp(-7.0, 7.0));
        (u + 1.0) * (g / (1.0 + libm::exp(-f64::from(OP.alpha) * g)))
    }

    /// The relative error of `alpha·gate` counts as often as it is large; eight more roundings.
    #[test]
    fn close_to_float64() {
        for step in -900..900 {
            let (gate, up) = (step as f32 / 90.0, (step * 7 % 1000) as f32 / 90.0);
            let (want, got) = (exact(f64::from(gate), f64::from(up)), f64::from(OP.apply::<SoftFma>(gate, up)));
            let bound = f64::from(f32::EPSILON) * (6.0 + 2.0 * f64::from(gate.abs()));
            // Where `up + 1` cancels, the error is that of a difference of numbers near one.
            let slack = bound * f64::from(gate.abs());
            assert!((want - got).abs() <= bound * want.abs() + slack, "({gate}, {up}): {got}, not {want}");
            let (dgate, dup) = OP.gradients::<SoftFma>(1.0, gate, up);
            let (h, gate, up) = (1e-6, f64::from(gate), f64::from(up));
            let slope = (exact(gate + h, up) - exact(gate - h, up)) / (2.0 * h);
            // One side of the kink only.
            if (gate - 7.0).abs() > 1e-3 {
                assert!((slope - f64::from(dgate)).abs() < 1e-5, "d gate ({gate}, {up}): {dgate}, not {slope}");
            }
            let slope = (exact(gate, up + h) - exact(gate, up - h)) / (2.0 * h);
            if (up.abs() - 7.0).abs() > 1e-3 {
                assert!((slope - f64::from(dup)).abs() < 1e-5, "d up ({gate}, {up}): {dup}, not {slope}");
            }
        }
    }

    #[test]
    fn ends() {
        let at_limit = OP.apply::<SoftFma>(7.0, 7.0);
        for (gate, up) in [(f32::INFINITY, f32::INFINITY), (7.5, 8.0), (1e30, 7.0)] {
            assert_eq!(OP.apply::<SoftFma>(gate, up), at_limit);
        }
        // At the limits a gradient passes, beyond them none does.
        let (dgate, dup) = OP.gradients::<SoftFma>(1.0, 7.0, -7.0);
        assert!(dgate != 0.0 && dup != 0.0);
        assert_eq!(OP.gradients::<SoftFma>(1.0, 7.000_001, -7.000_001), (0.0, 0.0));
        assert_eq!(OP.apply::<SoftFma>(-0.0, 0.5).to_bits(), (-0.0f32).to_bits());
        for (gate, up) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            assert!(OP.apply::<SoftFma>(gate, up).is_nan());
            let (dgate, dup) = OP.gradients::<SoftFma>(1.0, gate, up);
            assert!(dgate.is_nan() || dup.is_nan());
        }
    }
}
