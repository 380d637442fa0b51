//! Config: TOML as typed (`low.rs`, by the table of `key.rs`) becomes a complete `Run`
//! (`resolve.rs`), once.
//!
//! Below `Run` no defaults are left to choose. `Run::to_toml` prints it under canonical names and
//! parses back to the same `Run`; `Run::digest` covers exactly what can influence the weights. A
//! value keeps its file and line until it is resolved, so that every error can name its place.

mod error;
mod foreign;
mod key;
mod low;
mod print;
mod resolve;
mod resolve_adapter;
mod resolve_training;
mod run;
mod settle;
mod suggest;
mod table;
mod value;

pub use error::Error;
pub use key::{Fallback, KEYS, Key, RANK_TIMEOUT_DEFAULT, Section, ValueKind};
pub use low::{BYTES_MAX, Low};
pub use print::{KeyOfRuns, RunKey};
pub use run::{
    Adapter, Device, Eval, EvalRows, Every, Fields, Length, Lora, Metric, Run, SaveDtype, Scheduler, Steps, Training,
    Warmup,
};
pub use suggest::nearest;
pub use value::{Origin, Value};

use crate::hub_cache;
use isobit_kernels::float_state;
use std::path::Path;

/// A run, and notes on the lines of the file that arguments overrode.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    pub run: Run,
    /// For the user who typed the arguments.
    pub notes: Vec<String>,
}

/// Reads a config file, applies `--set` overrides in order and resolves the whole. A cached model
/// becomes its current revision; a cache without one is reported when its config is read.
pub fn read(path: &Path, overrides: &[String]) -> Result<Settled, Error> {
    let mut settled = settled(Low::read(path)?, overrides)?;
    if let Ok(folder) = hub_cache::resolved(&settled.run.base_model) {
        settled.run.base_model = folder;
    }
    Ok(settled)
}

/// The same for text already in memory; `name` stands for the file in messages.
pub fn parse(name: &str, text: &str, overrides: &[String]) -> Result<Settled, Error> {
    settled(Low::parse(name, text)?, overrides)
}

fn settled(mut low: Low, overrides: &[String]) -> Result<Settled, Error> {
    // Parsing a decimal number computes: a library may have changed the rounding mode since the
    // start.
    float_state::restore();
    for argument in overrides {
        low.set(argument)?;
    }
    let notes = settle::settle(&mut low);
    Ok(Settled { run: resolve::resolve(&low)?, notes })
}
