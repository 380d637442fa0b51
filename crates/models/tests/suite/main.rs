//! The tests of the models, in one binary: one module per subject.

mod config;
mod loading;
