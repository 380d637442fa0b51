//! Casts (`docs/numerics.md`, "Casts"): nearest, ties to even, on the way down; exact on the way up.
//!
//! A NaN becomes the canonical one of the target format, except from float32 to float32, which is a copy of the bits.
