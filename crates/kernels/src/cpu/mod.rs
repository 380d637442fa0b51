//! The same bits as `reference/`, faster: work-stealing threads and the instruction sets of x86-64.
//!
//! Only slice products are written per instruction set; every other op is one source compiled per
//! target feature.

mod adamw;
mod add;
mod amx;
mod attention;
mod balance;
mod bias;
mod block;
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
mod elements;
mod embedding;
mod epilogue;
mod gate;
mod gated_norm;
mod geglu;
mod grouping;
mod head_loss;
mod int4;
mod int4_block;
mod l2_norm;
mod linear;
mod low_rank;
#[cfg(target_arch = "x86_64")]
mod low_rank_tiles;
mod nest;
mod overlap;
mod panels;
mod path;
pub mod pool;
mod product;
mod product4;
mod rms_norm;
mod roof;
mod rope;
mod router;
mod scale;
#[cfg(target_arch = "x86_64")]
mod sink;
mod slice_tiles;
mod slices;
mod sum_squares;
mod swiglu;
mod token_slices;

pub use path::Path;

use crate::HostOps;
use crate::backend::{Arriving, Device, DeviceFailure, Memory, Scratch, Workspaces};
use crate::buffer::{self, Buffer, Element};
use crate::op::{AsQuantized, Attention, DeltaRule, HeadLoss, LowRank, Product, QuantizedShape, SliceShape};
use crate::parcel::Parcel;
use pool::{Pool, THREADS_MAX, TooFewThreads};
use std::rc::Rc;

/// The thread pool and instruction path, chosen once.
pub struct Cpu {
    pool: Pool,
    path: Path,
    scratch: Scratch<CpuMemory>,
}

/// Host memory, with slices in tile order.
pub struct CpuMemory;

impl Memory for CpuMemory {
    type Buffer<T: Element> = Buffer<T>;
    type Rows = slices::SlicedRows;
    type Weight = slices::SlicedWeight;
    type QuantizedWeight = int4::QuantizedWeight;
    type Host = Self;
    type HostQuantizedWeight = int4::QuantizedWeight;
}

/// Why this machine cannot run the requested configuration.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    #[error("this machine does not have the {0} path")]
    PathMissing(Path),
    #[error("{0} threads are requested; 1 to {THREADS_MAX} are possible")]
    Threads(usize),
    #[error(transparent)]
    TooFewThreads(#[from] TooFewThreads),
}

impl Cpu {
    pub fn new(threads: usize, path: Path) -> Result<Self, CpuError> {
        if !path.is_available() {
            return Err(CpuError::PathMissing(path));
        }
        if !(1..=THREADS_MAX).contains(&threads) {
            return Err(CpuError::Threads(threads));
        }
        Ok(Self { pool: Pool::new(threads)?, path, scratch: Scratch::default() })
    }

    /// The host beside `device`.
    pub(crate) fn as_host(
        threads: usize,
        path: Path,
        device: &impl Device,
    ) -> Result<Rc<dyn HostOps<CpuMemory>>, DeviceFailure> {
        let failed = |error: CpuError| DeviceFailure { device: device.name(), what: error.to_string() };
        Ok(Rc::new(Self::new(threads, path).map_err(failed)?))
    }

    pub fn path(&self) -> Path {
        self.path
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Runs the path's int8 unit at full rate and returns the number of multiply-adds; None if it
    /// has no such unit.
    pub fn int8_roof(&self, iterations: usize) -> Option<f64> {
        roof::run(self, iterations)
    }
}

impl Device for Cpu {
    type Memory = CpuMemory;

    fn name(&self) -> String {
        format!("cpu/{} x{}", self.path, self.pool.threads())
    }

    fn zeros<T: Element>(&self, length: usize) -> Buffer<T> {
        Buffer::zeros(length)
    }

    fn upload<T: Element>(&self, host: &[T]) -> Buffer<T> {
        Buffer::from_slice(host)
    }

    fn overwrite<T: Element>(&self, device: &mut Buffer<T>, host: &[T]) {
        device.copy_from_slice(host);
    }

    fn download<T: Element>(&self, device: &Buffer<T>) -> Result<Vec<T>, DeviceFailure> {
        Ok(buffer::copied(device))
    }

    fn pack(&self, parcel: &mut Parcel, device: &Buffer<f32>) -> Result<(), DeviceFailure> {
        parcel.numbers_mut()?.copy_from_slice(device);
        Ok(())
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

    fn save_quantized(&self, weight: int4::QuantizedWeight) -> int4::QuantizedWeight {
        weight
    }

    fn begin_load_quantized(&self, host: &int4::QuantizedWeight) -> Arriving<int4::QuantizedWeight> {
        Arriving::new(host.clone())
    }

    fn host(&self, threads: usize) -> Result<Rc<dyn HostOps<CpuMemory>>, DeviceFailure> {
        Self::as_host(threads, self.path, self)
    }

    fn rows(&self, shape: SliceShape) -> slices::SlicedRows {
        slices::rows(self, shape)
    }

    fn weight(&self, count: usize, shape: SliceShape) -> slices::SlicedWeight {
        slices::weight(count, shape)
    }

    fn quantized_weight<Q: AsQuantized, E>(
        &self,
        shape: QuantizedShape,
        make: impl FnMut(usize) -> Result<Q, E>,
    ) -> Result<int4::QuantizedWeight, E> {
        product4::quantized_weight(self, shape, make)
    }

    fn workspaces(&self) -> &dyn Workspaces {
        self
    }

    fn scratch(&self) -> &Scratch<CpuMemory> {
        &self.scratch
    }
}

impl Workspaces for Cpu {
    fn product(&self, p: &Product) -> usize {
        product::workspace(self, p)
    }

    fn linear(&self, p: &Product, adapter: Option<&LowRank>) -> usize {
        product::linear_workspace(self, p, adapter)
    }

    fn product4(&self, w: QuantizedShape, p: &Product) -> usize {
        product4::workspace(self, w, p)
    }

    fn low_rank(&self, p: &LowRank) -> usize {
        low_rank::workspace(self, p)
    }

    fn attention(&self, p: &Attention) -> usize {
        attention::workspace(self, p)
    }

    fn delta_rule(&self, p: &DeltaRule) -> usize {
        delta_rule::workspace(self, p)
    }

    fn embedding(&self, tokens: usize) -> usize {
        embedding::workspace(self, tokens)
    }

    fn head_loss(&self, p: &HeadLoss) -> usize {
        head_loss::workspace(self, p)
    }

    fn head_loss_step(&self, p: &HeadLoss) -> usize {
        head_loss::step_workspace(self, p)
    }

    fn balance(&self, row_starts: &[usize], experts: usize) -> usize {
        balance::workspace(row_starts, experts)
    }

    fn grouping(&self, _row_starts: &[usize], experts: usize) -> usize {
        grouping::workspace(experts)
    }
}
