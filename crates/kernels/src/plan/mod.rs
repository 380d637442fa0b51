//! A backend that computes nothing and counts every byte; `plan` runs on it.
//!
//! [`Counting`] stands in for another backend: it uses that backend's slice layout and workspace
//! sizes and records every call and its arithmetic. A real training step run on it therefore
//! measures exactly what the step needs. Results are zeros, which is enough for a step to run. Not
//! counted, here or by a GPU: the small tables of its launches (`Tables` in `gpu/memory.rs`).

mod ledger;
mod memory;

pub use ledger::{Holder, Holdings, MemoryKind, Work};
pub use memory::{CountedBuffer, CountedQuantizedWeight, CountedRows, CountedWeight, MemoryLayout};

use crate::HostOps;
use crate::backend::{Arriving, Bytes, Checked, Device, DeviceFailure, Length, Memory, Run, Scratch, Workspaces};
use crate::buffer::Element;
use crate::heap::Lifetime;
pub use crate::heap::{SMALL_MAX, SMALL_STEP_BYTES};
use crate::op::{AsQuantized, Op, Output, QuantizedShape, SliceShape};
use crate::parcel::Parcel;
use ledger::{Claim, Ledger};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::panic::Location;
use std::rc::Rc;

/// Counts the memory and work of `L`. Clones share the ledger.
pub struct Counting<L: MemoryLayout> {
    like: Rc<L>,
    ledger: Ledger,
    /// Host memory beside the device's.
    host: Ledger,
    scratch: Rc<Scratch<CountedMemory>>,
}

/// Host memory, for arithmetic without slices and workspaces.
struct HostLayout;

impl Workspaces for HostLayout {}

impl MemoryLayout for HostLayout {
    fn name(&self) -> String {
        "the host".to_string()
    }

    fn rows_bytes(&self, _: SliceShape) -> usize {
        unreachable!("nothing is sliced in host memory")
    }

    fn weight_bytes(&self, _: usize, _: SliceShape) -> usize {
        unreachable!("nothing is sliced in host memory")
    }

    fn quantized_bytes(&self, _: QuantizedShape) -> usize {
        unreachable!("4-bit weights in host memory are stored as the device stores them")
    }
}

impl<L: MemoryLayout> Clone for Counting<L> {
    fn clone(&self) -> Self {
        let (ledger, host) = (self.ledger.clone(), self.host.clone());
        Self { like: Rc::clone(&self.like), ledger, host, scratch: Rc::clone(&self.scratch) }
    }
}

impl<L: MemoryLayout> Counting<L> {
    pub fn new(like: L) -> Self {
        let ledger = if like.has_heap() { Ledger::with_heap() } else { Ledger::default() };
        Self { like: Rc::new(like), ledger, host: Ledger::default(), scratch: Rc::default() }
    }

    /// The same device with nothing in its memory.
    #[must_use]
    pub fn emptied(&self) -> Self {
        let ledger = if self.like.has_heap() { Ledger::with_heap() } else { Ledger::default() };
        Self { like: Rc::clone(&self.like), ledger, host: Ledger::default(), scratch: Rc::default() }
    }

    /// Whether its memory is that of the host.
    pub fn is_host(&self) -> bool {
        self.like.is_host()
    }

    /// Bytes that the device's buffers take with the gaps between them, at their peak; None if the
    /// device places buffers in its own way.
    pub fn heap_bytes(&self) -> Option<usize> {
        self.ledger.heap_bytes()
    }

    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        self.ledger.bytes()
    }

    /// Peak bytes held.
    pub fn bytes_peak(&self) -> usize {
        self.ledger.bytes_peak()
    }

    /// Bytes by holder at the peak.
    pub fn held_at_peak(&self) -> Holdings {
        self.ledger.held_at_peak()
    }

    /// Bytes held now in host memory beside the device's.
    pub fn host_bytes(&self) -> usize {
        self.host.bytes()
    }

    /// Peak bytes held there.
    pub fn host_bytes_peak(&self) -> usize {
        self.host.bytes_peak()
    }

    /// Bytes held there by holder, at their peak.
    pub fn host_held_at_peak(&self) -> Holdings {
        self.host.held_at_peak()
    }

    /// The work of each op.
    pub fn work(&self) -> BTreeMap<&'static str, Work> {
        self.ledger.work()
    }

    /// Resets the peak to the bytes held now, and the work to zero.
    pub fn forget(&self) {
        self.ledger.forget();
        self.host.forget();
    }

    /// Bytes of host memory that are no buffer of a device: the device's own memory if that is the
    /// host's.
    #[track_caller]
    pub fn beside(&self, bytes: usize) -> CountedBuffer<u8> {
        let ledger = if self.is_host() { &self.ledger } else { &self.host };
        let claim = ledger.claim(MemoryKind::Buffer(u8::NAME), bytes, Lifetime::Other, Location::caller());
        CountedBuffer { length: bytes, _claim: claim, element: PhantomData }
    }

    fn buffer<T: Element>(&self, length: usize, at: &'static Location<'static>) -> CountedBuffer<T> {
        self.buffer_for(Lifetime::Other, length, at)
    }

    fn buffer_for<T: Element>(
        &self,
        lifetime: Lifetime,
        length: usize,
        at: &'static Location<'static>,
    ) -> CountedBuffer<T> {
        let bytes = length.checked_mul(size_of::<T>()).expect("a buffer's byte length fits the address space");
        let claim = self.ledger.claim(MemoryKind::Buffer(T::NAME), self.like.buffer_bytes(bytes), lifetime, at);
        CountedBuffer { length, _claim: claim, element: PhantomData }
    }

    fn host_buffer<T: Element>(&self, length: usize, at: &'static Location<'static>) -> CountedBuffer<T> {
        let bytes = length.checked_mul(size_of::<T>()).expect("a buffer's byte length fits the address space");
        let claim = self.host.claim(MemoryKind::Buffer(T::NAME), bytes, Lifetime::Other, at);
        CountedBuffer { length, _claim: claim, element: PhantomData }
    }

    fn claim(&self, kind: MemoryKind, bytes: usize, at: &'static Location<'static>) -> Claim {
        self.ledger.claim(kind, bytes, Lifetime::Other, at)
    }
}

/// Lengths and shapes, each with its claim in the ledger.
pub struct CountedMemory;

impl Memory for CountedMemory {
    type Buffer<T: Element> = CountedBuffer<T>;
    type Rows = CountedRows;
    type Weight = CountedWeight;
    type QuantizedWeight = CountedQuantizedWeight;
    type Host = Self;
    type HostQuantizedWeight = CountedQuantizedWeight;
}

impl<L: MemoryLayout, P: Op<CountedMemory>> Run<P> for Counting<L> {
    fn execute(&self, op: &mut P, _: &mut Bytes<CountedMemory>, _: Checked) {
        let outputs = op.outputs().into_iter().map(elements).sum();
        self.ledger.did(P::NAME, op.multiply_adds(), outputs);
    }
}

/// Numbers that an op writes; slices count as the numbers they represent.
fn elements(output: Output<'_, CountedMemory>) -> usize {
    match output {
        Output::F32(x) | Output::Kept(x) => x.len(),
        Output::Bf16(x) => x.len(),
        Output::F16(x) => x.len(),
        Output::U32(x) => x.len(),
        Output::Rows(rows) => rows.shape.rows * rows.shape.width,
        Output::Weight(weight) => weight.count * weight.shape.rows * weight.shape.width,
    }
}

impl<L: MemoryLayout> Device for Counting<L> {
    type Memory = CountedMemory;

    fn name(&self) -> String {
        format!("plan for {}", self.like.name())
    }

    fn has_ranges(&self) -> bool {
        self.like.has_heap()
    }

    #[track_caller]
    fn zeros<T: Element>(&self, length: usize) -> CountedBuffer<T> {
        self.buffer(length, Location::caller())
    }

    #[track_caller]
    fn lasting_zeros<T: Element>(&self, length: usize) -> CountedBuffer<T> {
        self.buffer_for(Lifetime::Update, length, Location::caller())
    }

    #[track_caller]
    fn unwritten<T: Element>(&self, length: usize) -> CountedBuffer<T> {
        self.buffer(length, Location::caller())
    }

    #[track_caller]
    fn upload<T: Element>(&self, host: &[T]) -> CountedBuffer<T> {
        self.buffer(host.len(), Location::caller())
    }

    #[track_caller]
    fn upload_made<T: Element, H: AsRef<[T]>, E>(
        &self,
        length: usize,
        _host: impl FnOnce() -> Result<H, E>,
    ) -> Result<CountedBuffer<T>, E> {
        Ok(self.buffer(length, Location::caller()))
    }

    fn overwrite<T: Element>(&self, _: &mut CountedBuffer<T>, _: &[T]) {}

    fn download<T: Element>(&self, device: &CountedBuffer<T>) -> Result<Vec<T>, DeviceFailure> {
        Ok(vec![T::default(); device.len()])
    }

    fn pack(&self, _: &mut Parcel, _: &CountedBuffer<f32>) -> Result<(), DeviceFailure> {
        Ok(())
    }

    fn unpack(&self, _: &mut CountedBuffer<f32>, _: &mut Parcel) -> Result<(), DeviceFailure> {
        Ok(())
    }

    #[track_caller]
    fn host_zeros<T: Element>(&self, length: usize) -> CountedBuffer<T> {
        self.host_buffer(length, Location::caller())
    }

    #[track_caller]
    fn host_made<T: Element, H: AsRef<[T]>, E>(
        &self,
        length: usize,
        _make: impl FnOnce() -> Result<H, E>,
    ) -> Result<CountedBuffer<T>, E> {
        Ok(self.host_buffer(length, Location::caller()))
    }

    fn save<T: Element>(&self, _: &mut CountedBuffer<T>, _: &CountedBuffer<T>) -> Result<(), DeviceFailure> {
        Ok(())
    }

    fn load<T: Element>(&self, _: &mut CountedBuffer<T>, _: &CountedBuffer<T>) {}

    #[track_caller]
    fn save_quantized(&self, weight: CountedQuantizedWeight) -> CountedQuantizedWeight {
        let (shape, bytes) = (weight.shape, self.like.host_quantized_bytes(weight.shape));
        let claim = self.host.claim(MemoryKind::Weight, bytes, Lifetime::Other, Location::caller());
        CountedQuantizedWeight { shape, _claim: claim }
    }

    #[track_caller]
    fn begin_load_quantized(&self, host: &CountedQuantizedWeight) -> Arriving<CountedQuantizedWeight> {
        let (shape, bytes) = (host.shape, self.like.quantized_bytes(host.shape));
        let claim = self.claim(MemoryKind::Weight, bytes, Location::caller());
        Arriving::new(CountedQuantizedWeight { shape, _claim: claim })
    }

    fn host(&self, _threads: usize) -> Result<Rc<dyn HostOps<CountedMemory>>, DeviceFailure> {
        let (ledger, host) = (self.host.clone(), self.host.clone());
        Ok(Rc::new(Counting { like: Rc::new(HostLayout), ledger, host, scratch: Rc::default() }))
    }

    #[track_caller]
    fn rows(&self, shape: SliceShape) -> CountedRows {
        let claim = self.claim(MemoryKind::Rows, self.like.rows_bytes(shape), Location::caller());
        CountedRows { shape, _claim: claim }
    }

    #[track_caller]
    fn weight(&self, count: usize, shape: SliceShape) -> CountedWeight {
        let (bytes, at) = (self.like.weight_bytes(count, shape), Location::caller());
        let claim = self.ledger.claim(MemoryKind::Weight, bytes, Lifetime::Update, at);
        CountedWeight { shape, count, _claim: claim }
    }

    #[track_caller]
    fn quantized_weight<Q: AsQuantized, E>(
        &self,
        shape: QuantizedShape,
        _make: impl FnMut(usize) -> Result<Q, E>,
    ) -> Result<CountedQuantizedWeight, E> {
        let claim = self.claim(MemoryKind::Weight, self.like.quantized_bytes(shape), Location::caller());
        Ok(CountedQuantizedWeight { shape, _claim: claim })
    }

    fn workspaces(&self) -> &dyn Workspaces {
        &*self.like
    }

    fn scratch(&self) -> &Scratch<CountedMemory> {
        &self.scratch
    }
}
