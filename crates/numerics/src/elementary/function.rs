//! The list of elementary functions with their error bounds, and the check of those bounds.

use super::*;
use crate::Fma;
use crate::lanes::{LANES, Lanes};

/// Every elementary function, for tests, conformance vectors and sweeps over all 2³² arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Function {
    Exp,
    Exp2,
    Ln,
    Sin,
    Cos,
    Tanh,
    Sigmoid,
    Silu,
    SiluGrad,
    Softplus,
    Rsqrt,
}

impl Function {
    pub const ALL: [Self; 11] = [
        Self::Exp,
        Self::Exp2,
        Self::Ln,
        Self::Sin,
        Self::Cos,
        Self::Tanh,
        Self::Sigmoid,
        Self::Silu,
        Self::SiluGrad,
        Self::Softplus,
        Self::Rsqrt,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Exp => "exp",
            Self::Exp2 => "exp2",
            Self::Ln => "ln",
            Self::Sin => "sin",
            Self::Cos => "cos",
            Self::Tanh => "tanh",
            Self::Sigmoid => "sigmoid",
            Self::Silu => "silu",
            Self::SiluGrad => "silu_grad",
            Self::Softplus => "softplus",
            Self::Rsqrt => "rsqrt",
        }
    }

    /// The function's value.
    #[inline(always)]
    pub fn apply<F: Fma>(self, x: f32) -> f32 {
        match self {
            Self::Exp => exp::<F>(x),
            Self::Exp2 => exp2::<F>(x),
            Self::Ln => ln::<F>(x),
            Self::Sin => sin::<F>(x),
            Self::Cos => cos::<F>(x),
            Self::Tanh => tanh::<F>(x),
            Self::Sigmoid => sigmoid::<F>(x),
            Self::Silu => silu::<F>(x),
            Self::SiluGrad => silu_grad::<F>(x),
            Self::Softplus => softplus::<F>(x),
            Self::Rsqrt => rsqrt(x),
        }
    }

    /// The function's values over a block of lanes; the function is selected outside the loop.
    #[inline(always)]
    pub fn apply_lanes<F: Fma>(self, x: &Lanes) -> Lanes {
        match self {
            Self::Exp => each(x, exp::<F>),
            Self::Exp2 => each(x, exp2::<F>),
            Self::Ln => each(x, ln::<F>),
            Self::Sin => each(x, sin::<F>),
            Self::Cos => each(x, cos::<F>),
            Self::Tanh => each(x, tanh::<F>),
            Self::Sigmoid => each(x, sigmoid::<F>),
            Self::Silu => each(x, silu::<F>),
            Self::SiluGrad => each(x, silu_grad::<F>),
            Self::Softplus => each(x, softplus::<F>),
            Self::Rsqrt => each(x, rsqrt),
        }
    }

    /// Largest error over all arguments as defined by [`error_ulp`], measured over all 2³² and
    /// rounded up.
    pub const fn bound_ulp(self) -> f32 {
        match self {
            Self::Exp => 0.90,
            Self::Exp2 => 0.88,
            Self::Ln => 0.89,
            Self::Sin | Self::Cos => 0.85,
            Self::Tanh => 1.37,
            Self::Sigmoid | Self::Rsqrt => 1.50,
            Self::Silu => 1.68,
            Self::SiluGrad => 3.32,
            Self::Softplus => 1.75,
        }
    }

    /// Magnitude below which an error is measured against this floor instead of the value. Zero
    /// except around the root of `silu_grad` near −1.278, where the result is the difference of two
    /// rounded numbers.
    fn floor(self, x: f64) -> f64 {
        let around_root = matches!(self, Self::SiluGrad) && (-2.0..=-1.0).contains(&x);
        if around_root { 0.0625 } else { 0.0 }
    }

    /// The function in float64 through the `libm` crate, far more accurate than any float32 result.
    pub fn reference_f64(self, x: f64) -> f64 {
        match self {
            Self::Exp => libm::exp(x),
            Self::Exp2 => libm::exp2(x),
            Self::Ln => libm::log(x),
            Self::Sin => libm::sin(x),
            Self::Cos => libm::cos(x),
            Self::Tanh => libm::tanh(x),
            Self::Sigmoid => {
                let (e, negative) = (libm::exp(-x.abs()), x < 0.0);
                if negative { e / (1.0 + e) } else { 1.0 / (1.0 + e) }
            }
            Self::Silu => {
                // Beyond this the value is below the smallest float32; infinity times zero would be
                // NaN.
                let x = if x < -700.0 { -700.0 } else { x };
                x * Self::Sigmoid.reference_f64(x)
            }
            Self::SiluGrad => {
                let x = if x.is_nan() { x } else { x.clamp(-700.0, 700.0) };
                let e = libm::exp(-x.abs());
                let d = 1.0 + e;
                let numerator = if x < 0.0 { e * (d + x) } else { d + x * e };
                numerator / (d * d)
            }
            Self::Softplus => (if x > 0.0 { x } else { 0.0 }) + libm::log1p(libm::exp(-x.abs())),
            Self::Rsqrt => 1.0 / libm::sqrt(x),
        }
    }
}

#[inline(always)]
fn each(x: &Lanes, f: impl Fn(f32) -> f32) -> Lanes {
    let mut y = [0.0; LANES];
    for lane in 0..LANES {
        y[lane] = f(x[lane]);
    }
    y
}

/// Error of `function(x) = y` in units in the last place of the true value (2⁻¹⁴⁹ in the subnormal
/// range). Infinite if a NaN is missing, misplaced or not canonical, or if a zero has the wrong
/// sign. An infinite `y` counts as 2¹²⁸, as does a true value beyond it.
pub fn error_ulp(function: Function, x: f32, y: f32) -> f32 {
    const TOP: f64 = 340282366920938463463374607431768211456.0;
    let want = function.reference_f64(f64::from(x));
    if want.is_nan() || y.is_nan() {
        let both = want.is_nan() && y.to_bits() == CANONICAL_NAN_BITS;
        return if both { 0.0 } else { f32::INFINITY };
    }
    let got = f64::from(y).clamp(-TOP, TOP);
    let wrong_zero = (want == 0.0 || y == 0.0) && (want.is_sign_negative() != y.is_sign_negative());
    if wrong_zero {
        return f32::INFINITY;
    }
    let want = want.clamp(-TOP, TOP);
    let scale = want.abs().max(function.floor(f64::from(x)));
    // Exponent field of the true value, clamped to the range of float32.
    let exponent = ((scale.to_bits() >> 52) as i64 - 1023).clamp(-126, 127);
    let ulp = f64::from_bits(((exponent + 1023 - 23) as u64) << 52);
    ((got - want).abs() / ulp) as f32
}

/// Largest [`error_ulp`] over the arguments with bits `start..=end`, and the bits of its first
/// occurrence.
pub fn check_range(function: Function, start_bits: u32, end_bits: u32) -> (f32, u32) {
    let mut worst = (0.0, start_bits);
    let mut base = u64::from(start_bits);
    let end = u64::from(end_bits);
    while base <= end {
        let mut x = [0.0; LANES];
        for lane in 0..LANES {
            x[lane] = f32::from_bits((base + lane as u64).min(end) as u32);
        }
        let y = evaluate(function, &x);
        for lane in 0..LANES {
            let error = error_ulp(function, x[lane], y[lane]);
            if error > worst.0 {
                worst = (error, x[lane].to_bits());
            }
        }
        base += LANES as u64;
    }
    worst
}

/// One block, on the fastest path for a sweep; the bits are the same on every path.
fn evaluate(function: Function, x: &Lanes) -> Lanes {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        #[target_feature(enable = "avx2,fma")]
        fn hard(function: Function, x: &Lanes) -> Lanes {
            function.apply_lanes::<crate::HardFma>(x)
        }
        // SAFETY: both features were detected above.
        return unsafe { hard(function, x) };
    }
    function.apply_lanes::<crate::SoftFma>(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SoftFma;

    /// Every 4099th pattern, all patterns around powers of two, and the edges of the functions'
    /// ranges.
    fn arguments() -> impl Iterator<Item = u32> {
        let powers = (0u32..512).flat_map(|top| {
            let bits = top << 23;
            [bits.wrapping_sub(1), bits, bits.wrapping_add(1), bits.wrapping_add(0x0040_0000)]
        });
        let edges = [
            0.625,
            88.72283,
            88.72284,
            103.97207,
            103.97208,
            104.0,
            128.0,
            149.0,
            150.0,
            87.33654,
            core::f32::consts::FRAC_PI_4,
            1.278_464_5,
            0.6666667,
            1.3333334,
            core::f32::consts::PI,
            core::f32::consts::FRAC_PI_2,
            // The float32 nearest to a multiple of π/2.
            f32::from_bits(0x6f79_be45),
        ];
        let edges = edges.into_iter().flat_map(|x: f32| (-3i32..=3).map(move |d| x.to_bits().wrapping_add_signed(d)));
        let edges = edges.flat_map(|bits| [bits, bits | 0x8000_0000]);
        (0..=u32::MAX).step_by(4099).chain(powers).chain(edges).chain([u32::MAX, 0x7fa0_0000, 0xffc0_0000])
    }

    #[test]
    fn paths_agree_and_errors_stay_within_their_bounds() {
        let arguments: Vec<u32> = arguments().collect();
        for function in Function::ALL {
            for block in arguments.chunks(LANES) {
                let mut x = [1.0; LANES];
                for (lane, bits) in block.iter().enumerate() {
                    x[lane] = f32::from_bits(*bits);
                }
                let fast = evaluate(function, &x);
                for lane in 0..LANES {
                    let (x, fast) = (x[lane], fast[lane]);
                    let soft = function.apply::<SoftFma>(x);
                    let name = function.name();
                    let (x_bits, y_bits) = (x.to_bits(), soft.to_bits());
                    assert_eq!(y_bits, fast.to_bits(), "{name}({x:e} = {x_bits:#010x}): {soft:e} and {fast:e}");
                    let error = error_ulp(function, x, soft);
                    assert!(
                        error <= function.bound_ulp(),
                        "{name}({x:e} = {x_bits:#010x}) = {soft:e} = {y_bits:#010x}: error {error} ulp"
                    );
                }
            }
        }
    }

    #[test]
    fn limits_are_exact() {
        let inf = f32::INFINITY;
        let cases = [
            (Function::Exp, -inf, 0.0),
            (Function::Exp, inf, inf),
            (Function::Exp, 0.0, 1.0),
            (Function::Exp, 89.0, inf),
            (Function::Exp, -104.0, 0.0),
            (Function::Exp2, -149.0, 1e-45),
            (Function::Exp2, -150.0, 0.0),
            (Function::Exp2, 127.0, 1.7014118e38),
            (Function::Exp2, 128.0, inf),
            (Function::Exp2, -126.5, 8.312001e-39),
            (Function::Ln, 0.0, -inf),
            (Function::Ln, -0.0, -inf),
            (Function::Ln, 1.0, 0.0),
            (Function::Ln, inf, inf),
            (Function::Ln, -1.0, f32::NAN),
            (Function::Ln, -inf, f32::NAN),
            (Function::Ln, 1e-45, -103.27893),
            (Function::Sin, -0.0, -0.0),
            (Function::Sin, inf, f32::NAN),
            (Function::Cos, -0.0, 1.0),
            (Function::Cos, -inf, f32::NAN),
            (Function::Tanh, -0.0, -0.0),
            (Function::Tanh, inf, 1.0),
            (Function::Tanh, -inf, -1.0),
            (Function::Tanh, 1e-45, 1e-45),
            (Function::Sigmoid, -inf, 0.0),
            (Function::Sigmoid, inf, 1.0),
            (Function::Sigmoid, -0.0, 0.5),
            (Function::Silu, -inf, -0.0),
            (Function::Silu, inf, inf),
            (Function::Silu, -0.0, -0.0),
            (Function::SiluGrad, -inf, -0.0),
            (Function::SiluGrad, inf, 1.0),
            (Function::SiluGrad, 0.0, 0.5),
            (Function::Softplus, -inf, 0.0),
            (Function::Softplus, inf, inf),
            (Function::Softplus, -1e30, 0.0),
            (Function::Rsqrt, 0.0, inf),
            (Function::Rsqrt, -0.0, -inf),
            (Function::Rsqrt, inf, 0.0),
            (Function::Rsqrt, -1.0, f32::NAN),
            (Function::Rsqrt, 4.0, 0.5),
        ];
        for (function, x, want) in cases {
            let got = function.apply::<SoftFma>(x);
            assert_eq!(got.to_bits(), want.to_bits(), "{}({x}) = {got}, not {want}", function.name());
        }
        for function in Function::ALL {
            for nan in [0x7fc0_0000, 0xffc0_0000, 0x7f80_0001, 0xffff_ffff] {
                let got = function.apply::<SoftFma>(f32::from_bits(nan)).to_bits();
                assert_eq!(got, CANONICAL_NAN_BITS, "{} of NaN {nan:#010x} = {got:#010x}", function.name());
            }
        }
    }

    /// Digests of the values at the 65,536 arguments with bits `i·65537`, quoted in
    /// `docs/numerics.md`.
    #[test]
    fn known_digests() {
        let golden = [
            "bcef4fd41a7fbac82ea3f4cb62b8457c",
            "46d3a00457bc92a353bbf3881a960c32",
            "5551b7d8038a006a9c7ba3a7aedd85e2",
            "572478eca8d44a972a2ed16097ed2a0b",
            "a8cddb4b6dcb119cac740b512bbe803a",
            "2951fe01f67679bb1f61ee3c4b94ffa3",
            "e941f3e2796b498ab7588bb86a922396",
            "5abd424c22010d71025be4ec91b19846",
            "13091d5cd71d7ea453dad65a6decdeb3",
            "f09da8e1de9058f6643a9ec9958c047b",
            "41ce771aa9681e3bae0236b49d37a569",
        ];
        let got = Function::ALL.map(|function| {
            let argument = |i: u32| f32::from_bits(i.wrapping_mul(65537));
            let values: Vec<f32> = (0..65536).map(|i| function.apply::<SoftFma>(argument(i))).collect();
            crate::digest::Digest::of_f32(&values).to_string()
        });
        assert_eq!(got, golden);
    }
}
