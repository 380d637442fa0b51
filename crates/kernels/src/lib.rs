//! The op contract and all its implementations.
//!
//! `op/` specifies what each op computes, to the bit; `backend.rs` lists all ops on one page;
//! `reference/` is the definition in plain loops; `cpu/` gives the same bits faster, `gpu/` on
//! other devices; `plan/` counts the memory and work they would need. Only `gpu/hip` touches the
//! system: device nodes, a child process that compiles, cached code. It decides no bit.
#![expect(clippy::float_arithmetic, reason = "kernels are arithmetic")]

pub mod backend;
pub mod buffer;
pub mod cpu;
pub mod float_state;
pub mod gpu;
mod heap;
mod host;
pub mod observe;
pub mod op;
mod parcel;
mod place;
pub mod plan;
pub mod reference;
pub mod tensor;

pub use backend::{Arriving, Backend, Device, DeviceFailure, Matrix, Memory, StoredMatrix};
pub use buffer::{Buffer, Element};
pub use cpu::{Cpu, CpuError, Path};
pub use gpu::Gpu;
pub use host::HostOps;
pub use parcel::Parcel;
pub use place::{Pass, Place};
pub use plan::Counting;
pub use reference::Reference;
