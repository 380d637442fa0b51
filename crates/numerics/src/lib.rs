//! Isobit's arithmetic (`docs/numerics.md`): every rule that decides a bit and fits in a scalar
//! function.
//!
//! Nothing here touches files, clocks, threads or the environment. The scalar functions are
//! branch-free, so a loop over 32 lanes compiles to vector code on every instruction set with the
//! same bits.
#![expect(clippy::float_arithmetic, reason = "this crate is where float arithmetic is defined")]

pub mod adamw;
pub mod cast;
pub mod digest;
pub mod e2m1;
pub mod elementary;
pub mod fma;
pub mod gguf_blocks;
pub mod int4;
pub mod lanes;
pub mod philox;
pub mod rope;
pub mod slices;

pub use fma::{Fma, HardFma, SoftFma};

/// Version of the bit contract in `docs/numerics.md`. It increases whenever any result may change.
pub const VERSION: &str = "isobit-1";
