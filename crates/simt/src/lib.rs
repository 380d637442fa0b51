//! Runs the CUDA source of the kernels on a CPU, for tests without a card. It is not part of the
//! program.
//!
//! clang compiles a program for the host, behind `device/prelude.h`, which gives CUDA's words and
//! tensor-core instructions their meaning. `device/engine.cpp` runs the threads of a block as
//! fibers and checks every access to memory. A [`Card`] is a runtime of the kernels crate with the
//! tensor cores of sm_80, so all ops run on it as on any device. What it shows is that the source
//! is right by the language's rules; machine code and speed are for a real card to show.

mod card;
mod compiler;
mod engine;

pub use card::{Card, Settings};
pub use compiler::objection;
