//! AdamW for one element: the schedule's numbers in float64 on the host, the update in float32 in
//! one fixed order.

use crate::Fma;

/// The optimizer's settings for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
}

/// Coefficients common to all elements of a step. Each is computed in float64 and rounded once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coefficients {
    /// `1 − lr·weight_decay`.
    pub decay: f32,
    pub one_minus_beta1: f32,
    pub beta2: f32,
    pub one_minus_beta2: f32,
    /// `lr / (1 − beta1^step)`.
    pub step_size: f32,
    /// `1 / √(1 − beta2^step)`.
    pub inv_sqrt_c2: f32,
    pub eps: f32,
}

impl AdamW {
    /// Coefficients of update number `step`, counted from one.
    pub fn coefficients(&self, step: u64) -> Coefficients {
        debug_assert!(step > 0, "updates are counted from one");
        let c1 = 1.0 - libm::pow(self.beta1, step as f64);
        let c2 = 1.0 - libm::pow(self.beta2, step as f64);
        Coefficients {
            decay: (1.0 - self.lr * self.weight_decay) as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            step_size: (self.lr / c1) as f32,
            inv_sqrt_c2: (1.0 / libm::sqrt(c2)) as f32,
            eps: self.eps as f32,
        }
    }
}

/// New parameter and moments from the old ones and the gradient.
#[inline(always)]
pub fn update<F: Fma>(parameter: f32, moment1: f32, moment2: f32, gradient: f32, c: &Coefficients) -> (f32, f32, f32) {
    // ORDER: decay first, then the moments, then the step; one rounding per line's operation.
    let decayed = parameter * c.decay;
    let moment1 = F::fma(c.one_minus_beta1, gradient - moment1, moment1);
    let moment2 = F::fma(c.one_minus_beta2, gradient * gradient, c.beta2 * moment2);
    let denominator = F::fma(moment2.sqrt(), c.inv_sqrt_c2, c.eps);
    let parameter = F::fma(-c.step_size, moment1 / denominator, decayed);
    (parameter, moment1, moment2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SoftFma;

    #[test]
    fn follows_float64_for_ten_steps() {
        let settings = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
        let gradients: [[f64; 10]; 4] = [
            [0.3, -0.2, 0.7, 0.1, -0.9, 0.4, 0.05, -0.3, 0.2, 0.6],
            [0.0; 10],
            [1e-12; 10],
            [0.5, 0.0, 1e-12, 0.0, -1e3, 1e-6, 0.0, 0.25, -0.25, 1e-12],
        ];
        for row in gradients {
            let (mut p, mut m, mut v) = (0.75f32, 0.0f32, 0.0f32);
            let (mut p64, mut m64, mut v64) = (0.75f64, 0.0f64, 0.0f64);
            for (index, gradient) in row.into_iter().enumerate() {
                let step = index as u64 + 1;
                (p, m, v) = update::<SoftFma>(p, m, v, gradient as f32, &settings.coefficients(step));
                p64 *= 1.0 - 1e-3 * 0.01;
                m64 = 0.9 * m64 + (1.0 - 0.9) * gradient;
                v64 = 0.999 * v64 + (1.0 - 0.999) * gradient * gradient;
                let m_hat = m64 / (1.0 - libm::pow(0.9, step as f64));
                let v_hat = v64 / (1.0 - libm::pow(0.999, step as f64));
                p64 -= 1e-3 * m_hat / (libm::sqrt(v_hat) + 1e-8);
                // A few roundings of 2⁻²⁴ per step, relative to the largest value each quantity has
                // held.
                let tolerance = f64::from(f32::EPSILON) * 4.0 * step as f64;
                let largest = row[..=index].iter().fold(0.0f64, |a, g| a.max(g.abs()));
                assert!((f64::from(p) - p64).abs() <= tolerance, "step {step}: {p} and {p64}");
                assert!((f64::from(m) - m64).abs() <= tolerance * largest, "step {step}: {m:e} and {m64:e}");
                assert!(
                    (f64::from(v) - v64).abs() <= tolerance * largest * largest + 1e-45,
                    "step {step}: {v:e} and {v64:e}"
                );
            }
        }
    }

    #[test]
    fn without_gradient_and_decay_nothing_moves() {
        let settings = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
        let c = settings.coefficients(1);
        assert_eq!(c.decay, 1.0);
        assert_eq!(update::<SoftFma>(0.3, 0.0, 0.0, 0.0, &c), (0.3, 0.0, 0.0));
    }

    /// The bias corrections stay float64 until the coefficient is formed; rounding them first gives
    /// the bits in `rounded_first`.
    #[test]
    fn bias_corrections_are_not_rounded() {
        let settings = AdamW { lr: 2e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
        for (step, want, rounded_first) in [(1, 0x3b03_126f, 0x3b03_126e), (4, 0x3a18_7420, 0x3a18_7421)] {
            let got = settings.coefficients(step).step_size.to_bits();
            assert_eq!(got, want, "step {step}: {got:08x}, not {rounded_first:08x}");
        }
        assert_eq!(settings.coefficients(5).inv_sqrt_c2.to_bits(), 0x4162_8025, "not 41628024");
    }

    #[test]
    fn first_step_has_known_bits() {
        let settings = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };
        let (p, m, v) = update::<SoftFma>(0.5, 0.0, 0.0, -0.25, &settings.coefficients(1));
        assert_eq!([p, m, v].map(f32::to_bits), [0x3f00_3e42, 0xbccc_cccd, 0x3883_126f]);
    }
}
