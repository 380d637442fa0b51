//! The tests of the program, in one binary: one module per subject. Each test runs the program as a
//! user does, in a folder of its own (`model_folder`), so nothing depends on which tests run beside
//! it.

mod bench;
mod chat;
mod continued;
mod data;
mod decoys;
mod demo;
mod descent;
mod device_lists;
mod devices;
mod diff;
mod doctor;
mod document;
mod evaluate;
mod experts;
mod export;
mod final_folder;
mod first_steps;
mod forged_files;
mod forgery;
mod generate;
mod gguf;
mod hints;
#[cfg(target_os = "linux")]
mod hip;
mod hip_broken;
mod init;
mod interrupt;
mod json_errors;
mod load_in_4bit;
mod machine;
mod model_files;
mod model_folder;
mod models;
mod modules_to_save;
mod offload;
mod opencl_broken;
mod pipes;
mod plan;
mod quantized;
mod ranks;
mod receipt;
mod refusals;
mod report;
mod resume;
mod snapshots;
mod statement;
mod talk;
mod targets;
mod templates;
#[cfg(unix)]
mod terminal;
mod tokenizers;
mod train;
