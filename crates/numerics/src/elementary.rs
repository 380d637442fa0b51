//! Elementary functions from named operations only (`docs/numerics.md`, "Elementary functions").
//!
//! Every function is straight-line code of `+ - * /`, `sqrt`, `fma` and 32-bit integer operations
//! with selects instead of branches, so a loop over lanes becomes vector code and the device header
//! mirrors it line by line. Every NaN result is the canonical one, `0x7fc00000`: payloads differ
//! between devices, results may not.

mod activation;
mod cap;
mod clamped;
mod exponential;
mod function;
mod gelu;
mod logarithm;
mod trigonometric;

pub use activation::{rsqrt, sigmoid, silu, silu_grad, softplus, tanh};
pub use cap::SoftCap;
pub use clamped::ClampedSwiglu;
pub use exponential::{exp, exp2};
pub use function::{Function, check_range, error_ulp};
pub use gelu::{gelu, gelu_grad};
pub use logarithm::ln;
pub use trigonometric::{cos, sin};

/// The one NaN that elementary functions return.
pub const CANONICAL_NAN_BITS: u32 = 0x7fc0_0000;

const INFINITY_BITS: u32 = 0x7f80_0000;
const SIGN_BIT: u32 = 0x8000_0000;

/// `x`, with every NaN replaced by the canonical one. The comparison is on bits, so no compiler can
/// optimise it away.
#[inline(always)]
fn canonical(x: f32) -> f32 {
    let bits = x.to_bits();
    let nan = bits & !SIGN_BIT > INFINITY_BITS;
    f32::from_bits(if nan { CANONICAL_NAN_BITS } else { bits })
}

/// `result`, or the canonical NaN if the argument was NaN: for bodies whose clamps lose a NaN.
#[inline(always)]
fn canonical_if_nan(x: f32, result: f32) -> f32 {
    if x.is_nan() { f32::from_bits(CANONICAL_NAN_BITS) } else { result }
}

#[inline(always)]
fn magnitude(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & !SIGN_BIT)
}

/// `x` clamped to `±limit`; NaN becomes `-limit`. Written to compile to one `max` and one `min`
/// instruction.
#[inline(always)]
fn clamp(x: f32, limit: f32) -> f32 {
    let raised = if x > -limit { x } else { -limit };
    if raised < limit { raised } else { limit }
}
