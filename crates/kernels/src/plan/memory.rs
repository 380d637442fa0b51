//! What the counting backend hands out: lengths and shapes, each with its claim in the books.

use super::ledger::Claim;
use crate::backend::{Length, Shaped, Workspaces};
use crate::buffer::Element;
use crate::op::{QuantizedShape, SliceShape};
use std::marker::PhantomData;

/// How a device lays out what it keeps: all that must be known to count its memory without it.
pub trait MemoryLayout: Workspaces {
    fn name(&self) -> String;
    /// Bytes that a buffer with so many bytes of elements takes.
    fn buffer_bytes(&self, bytes: usize) -> usize {
        bytes
    }
    /// Bytes of activations, sliced.
    fn rows_bytes(&self, shape: SliceShape) -> usize;
    /// Bytes of `count` weights, sliced.
    fn weight_bytes(&self, count: usize, shape: SliceShape) -> usize;
    /// Bytes of weights of four bits.
    fn quantized_bytes(&self, shape: QuantizedShape) -> usize;
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

/// The shape of weights of four bits.
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
