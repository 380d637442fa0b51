//! An emulator of AMD's gfx906 (MI50), gfx908 (MI100), gfx90a (MI200) and gfx942 (MI300) at the
//! level of machine code, for tests without a card. It is not part of the program.
//!
//! A [`Program`] is read from the compiler's assembly or from a code object. A [`Card`] runs it:
//! waves of 64 lanes, with every access checked. It is a runtime of the kernels crate, so all ops
//! run on it as on any device. A non-zero seed varies whatever the hardware leaves unspecified.
#![expect(clippy::float_arithmetic, reason = "it emulates float arithmetic")]

mod access;
mod assembly;
mod card;
mod code_object;
mod compiler;
mod decode;
mod divide;
mod execute;
mod float;
mod instruction;
mod integer;
mod launch;
mod matrix;
mod memory;
mod message_pack;
mod metadata;
mod operand;
mod program;
mod race;
mod random;
mod scalar;
mod shared;
#[cfg(test)]
mod tests;
mod vector;
mod wave;

pub use card::{Card, Settings};
pub use compiler::{Architecture, COMPILERS, Dialect, LINES, Toolchain, compiler};
pub use decode::without_encoding;
