//! The storage of the counting backend: lengths and shapes, each with its claim in the ledger.

use super::ledger::Claim;
use crate::backend::{Length, Shaped, Workspaces};
use crate::buffer::Element;
use crate::op::{QuantizedShape, SliceShape};
use std::marker::PhantomData;

/// A device's memory layout: all that is needed to count its memory without the device.
pub trait MemoryLayout: Workspaces {
    fn name(&self) -> String;
    /// Bytes allocated for a buffer with `bytes` bytes of elements.
    fn buffer_bytes(&self, bytes: usize) -> usize {
        bytes
    }
    /// Whether its memory is that of the host.
    fn is_host(&self) -> bool {
        false
    }
    /// Whether buffers lie in ranges that only grow, as `heap.rs` places them.
    fn has_heap(&self) -> bool {
        false
    }
    /// Bytes of sliced activations.
    fn rows_bytes(&self, shape: SliceShape) -> usize;
    /// Bytes of `count` sliced weights.
    fn weight_bytes(&self, count: usize, shape: SliceShape) -> usize;
    /// Bytes of 4-bit weights.
    fn quantized_bytes(&self, shape: QuantizedShape) -> usize;
    /// Bytes of 4-bit weights in host memory.
    fn host_quantized_bytes(&self, shape: QuantizedShape) -> usize {
        self.quantized_bytes(shape)
    }
}

/// A number of elements.
pub struct CountedBuffer<T: Element> {
    pub(super) length: usize,
    pub(super) _claim: Claim,
    pub(super) element: PhantomData<T>,
}

impl<T: Element> Length for CountedBuffer<T> {
    fn len(&self) -> usize {
        self.length
    }
}

/// The shape of sliced activations.
pub struct CountedRows {
    pub(super) shape: SliceShape,
    pub(super) _claim: Claim,
}

/// The shape of sliced weights.
pub struct CountedWeight {
    pub(super) shape: SliceShape,
    pub(super) count: usize,
    pub(super) _claim: Claim,
}

/// The shape of 4-bit weights.
pub struct CountedQuantizedWeight {
    pub(super) shape: QuantizedShape,
    pub(super) _claim: Claim,
}

impl Shaped<SliceShape> for CountedRows {
    fn shape(&self) -> SliceShape {
        self.shape
    }
}

impl Shaped<(usize, SliceShape)> for CountedWeight {
    fn shape(&self) -> (usize, SliceShape) {
        (self.count, self.shape)
    }
}

impl Shaped<QuantizedShape> for CountedQuantizedWeight {
    fn shape(&self) -> QuantizedShape {
        self.shape
    }
}
