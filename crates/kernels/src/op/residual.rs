//! Residual (`docs/numerics.md`, "Residual"): `y = a + b` and `x = x·factor`, element by element, one rounding each.
//!
//! The gradient of both summands is `dy` itself, so there is no backward op. `scale` also serves gradient clipping.
