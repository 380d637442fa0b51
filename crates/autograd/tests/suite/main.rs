//! The tests of the tape, in one binary: one module per subject.

mod experts;
mod gradients;
