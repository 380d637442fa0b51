//! The op contract and every implementation of it.
//!
//! `op/` says what each op computes and what its bits are, `backend.rs` is all ops on one page,
//! `reference/` is the definition in plain loops, `cpu/` the same bits faster, `gpu/` the same bits
//! on other devices, `plan/` counts what they would need. Nothing here touches files, clocks,
//! environment or network.
#![expect(clippy::float_arithmetic, reason = "kernels are arithmetic")]

pub mod backend;
pub mod buffer;
pub mod cpu;
pub mod float_state;
pub mod gpu;
pub mod observe;
pub mod op;
pub mod plan;
pub mod reference;
pub mod tensor;

pub use backend::{Backend, Device, DeviceFailure, Matrix, Memory, StoredMatrix};
pub use buffer::{Buffer, Element};
pub use cpu::{Cpu, CpuError, Path};
pub use gpu::Gpu;
pub use plan::Counting;
pub use reference::Reference;
