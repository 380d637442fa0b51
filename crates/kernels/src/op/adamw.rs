//! AdamW (`docs/numerics.md`, "AdamW"): `isobit_numerics::adamw::update` for every element, in place.
//!
//! No element depends on another, so any partition of the tensor gives the same bits.
