//! The tests of the models, in one binary: one module per subject.

mod config;
mod config_shapes;
mod gaps;
mod loading;
