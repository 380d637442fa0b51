//! Training: config, data, schedule, optimizer, checkpoints, and the run that ties them together.
//!
//! `run.rs` is the table of contents, in the order things happen.

pub mod allocator;
pub mod audit;
pub mod batch;
pub mod checkpoint;
pub mod config;
pub mod course;
pub mod data;
pub mod data_record;
#[cfg(unix)]
mod decimal;
pub mod descent;
pub mod engine;
pub mod export;
mod final_folder;
pub mod free_memory;
pub mod groups;
mod host_optimizer;
pub mod hub_cache;
mod log;
pub mod metrics;
pub mod model_folder;
pub mod plan;
pub mod prepare;
mod quiet;
pub mod ranks;
pub mod record;
pub mod replay;
pub mod row;
pub mod run;
pub mod schedule;
pub mod sealed;
pub mod signal;
pub mod stages;
mod starting_adapter;
mod state;
pub mod step;
pub mod summary;
pub mod targets;
pub mod tensorboard;
pub mod trace;
pub mod trainer;
