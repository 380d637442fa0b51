//! Storage types named by device, for code above the ops. Ops themselves are generic over the
//! memory only.

use crate::backend::{Device, Memory};

pub type Buffer<D, T> = <<D as Device>::Memory as Memory>::Buffer<T>;
pub type F32<D> = Buffer<D, f32>;
pub type U32<D> = Buffer<D, u32>;
pub type I32<D> = Buffer<D, i32>;
pub type Rows<D> = <<D as Device>::Memory as Memory>::Rows;
pub type Weight<D> = <<D as Device>::Memory as Memory>::Weight;
pub type QuantizedWeight<D> = <<D as Device>::Memory as Memory>::QuantizedWeight;
/// Host memory beside a device's.
pub type HostF32<D> = crate::backend::HostBuffer<<D as Device>::Memory, f32>;
pub type HostBuffer<D, T> = crate::backend::HostBuffer<<D as Device>::Memory, T>;
pub type HostMemory<D> = <<D as Device>::Memory as Memory>::Host;
pub type HostQuantizedWeight<D> = <<D as Device>::Memory as Memory>::HostQuantizedWeight;
