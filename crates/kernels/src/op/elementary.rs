//! Elementary functions as an op (`docs/numerics.md`, "Elementary functions"): `y = f(x)`, element by element.
//!
//! The op exists so that `doctor` and the conformance suite can sweep a device's functions; models use the fused ops.
