//! The definition of the correct bits: plain loops, one file per op, in the order the contract
//! states.

mod adamw;
mod add;
mod attention;
mod balance;
mod bias;
mod cast;
mod clamped_swiglu;
mod columns;
mod combine;
mod conv1d;
mod decay;
mod delta_rule;
mod digest;
mod dropout;
mod elementary;
mod embedding;
mod gate;
mod gated_norm;
mod geglu;
mod grouping;
mod head_loss;
mod l2_norm;
mod linear;
mod low_rank;
mod product;
mod product4;
mod rms_norm;
mod rope;
mod router;
mod scale;
mod sink;
mod slices;
mod sum_squares;
mod swiglu;

use crate::HostOps;
use crate::backend::{Arriving, Device, DeviceFailure, Memory, Scratch, Workspaces};
use crate::buffer::{self, Buffer, Element};
use crate::op::{AsQuantized, QuantizedShape, SliceShape};
use std::rc::Rc;

/// The backend that is correct by definition.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

/// No reference op uses a workspace, so all share an empty one.
static SCRATCH: Scratch<ReferenceMemory> = Scratch::new();

/// Host memory, with slices as plain integers.
pub struct ReferenceMemory;

impl Memory for ReferenceMemory {
    type Buffer<T: Element> = Buffer<T>;
    type Rows = slices::SlicedRows;
    type Weight = slices::SlicedWeight;
    type QuantizedWeight = product4::QuantizedWeight;
    type Host = Self;
    type HostQuantizedWeight = product4::QuantizedWeight;
}

impl Device for Reference {
    type Memory = ReferenceMemory;

    fn name(&self) -> String {
        "reference".to_string()
    }

    fn zeros<T: Element>(&self, length: usize) -> Buffer<T> {
        Buffer::zeros(length)
    }

    fn upload<T: Element>(&self, host: &[T]) -> Buffer<T> {
        Buffer::from_slice(host)
    }

    fn download<T: Element>(&self, device: &Buffer<T>) -> Result<Vec<T>, DeviceFailure> {
        Ok(buffer::copied(device))
    }

    fn host_zeros<T: Element>(&self, length: usize) -> Buffer<T> {
        Buffer::zeros(length)
    }

    fn host_made<T: Element, H: AsRef<[T]>, E>(
        &self,
        length: usize,
        make: impl FnOnce() -> Result<H, E>,
    ) -> Result<Buffer<T>, E> {
        buffer::made(Buffer::zeros(length), make)
    }

    fn save<T: Element>(&self, host: &mut Buffer<T>, device: &Buffer<T>) -> Result<(), DeviceFailure> {
        host.copy_from_slice(device);
        Ok(())
    }

    fn load<T: Element>(&self, device: &mut Buffer<T>, host: &Buffer<T>) {
        device.copy_from_slice(host);
    }

    fn save_quantized(&self, weight: product4::QuantizedWeight) -> product4::QuantizedWeight {
        weight
    }

    fn begin_load_quantized(&self, host: &product4::QuantizedWeight) -> Arriving<product4::QuantizedWeight> {
        Arriving::new(host.clone())
    }

    fn host(&self, _threads: usize) -> Result<Rc<dyn HostOps<ReferenceMemory>>, DeviceFailure> {
        Ok(Rc::new(*self))
    }

    fn rows(&self, shape: SliceShape) -> slices::SlicedRows {
        slices::rows(shape)
    }

    fn weight(&self, count: usize, shape: SliceShape) -> slices::SlicedWeight {
        slices::weight(count, shape)
    }

    fn quantized_weight<Q: AsQuantized, E>(
        &self,
        shape: QuantizedShape,
        make: impl FnMut(usize) -> Result<Q, E>,
    ) -> Result<product4::QuantizedWeight, E> {
        product4::quantized_weight(shape, make)
    }

    fn workspaces(&self) -> &dyn Workspaces {
        self
    }

    fn scratch(&self) -> &Scratch<ReferenceMemory> {
        &SCRATCH
    }
}

impl Workspaces for Reference {}
