//! The tests of training, in one binary: one module per subject.
//!
//! Tests run as threads of one process. One that counts memory or handles signals starts itself
//! again in a process of its own (`isobit_conformance::in_own_process`).

mod checkpoint;
mod config;
mod data;
mod data_parquet;
mod data_templates;
mod data_turns;
mod descent;
mod drift;
mod emulated;
mod experts;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod free_pages;
mod going_back;
mod hard_to_route;
mod laws;
mod offload;
mod plan;
mod plan_rows;
mod ranks;
mod ranks_ground;
mod reference;
mod replay;
mod resume_memory;
mod short_runs;
#[cfg(unix)]
mod signal;
mod stages;
