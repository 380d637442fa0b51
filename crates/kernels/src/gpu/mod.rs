//! GPUs: device code from `crates/kernels/gpu`, compiled at run time through OpenCL, CUDA or HIP.
//! One host file per op.
//!
//! Commands run in the order they were issued. The first failure of the device is kept, nothing is
//! launched after it, and the next `download`, `digest` or `sum_squares` reports it.

mod absent;
mod adamw;
mod add;
mod ahead;
mod attention;
mod attention_mma;
mod balance;
mod bias;
mod cast;
mod clamped_swiglu;
mod code_cache;
mod columns;
mod combine;
mod conv1d;
mod cuda;
mod decay;
mod delta_rule;
mod device;
mod devices;
mod digest;
mod dropout;
mod elementary;
mod embedding;
pub mod exit_guard;
mod gate;
mod gated_norm;
mod geglu;
mod grouping;
mod groups_hopper;
mod head_loss;
pub mod hip;
mod hopper;
mod host_copies;
mod l2_norm;
#[cfg(test)]
mod late;
mod library;
mod linear;
mod low_rank;
mod low_rank_contract;
mod low_rank_outer;
mod memory;
mod multi_tensor;
mod opencl;
mod opencl_probe;
mod probe;
mod product;
mod product4;
mod product4_mma;
mod product_mma;
mod product_weight;
mod program;
mod rms_norm;
mod rope;
mod router;
pub mod runtime;
mod scale;
mod sink;
mod slice_tiles;
mod slices;
mod sum_squares;
mod swiglu;
mod token_sums;
mod weight_hopper;

pub use cuda::{CompileOnly, CompiledKernel, CompiledProgram};
pub use device::{Gpu, MatrixUnits};
pub use devices::{Api, Listing, Selector, driver_failure, is_gpu, list};
pub(crate) use memory::PendingRead;
pub use memory::{GpuBuffer, MemoryLimit, OverLimit};
pub use opencl::{EXACT_DIVISION_OPTION, OPTIONS as OPENCL_OPTIONS};
pub use product4::{HostQuantizedWeight, QuantizedWeight};
pub use program::{HEADER_NAMES, source_line};
pub use runtime::Mark;
pub use slices::{SlicedRows, SlicedWeight};

use crate::HostOps;
use crate::backend::{Arriving, BegunDownload, Device, DeviceFailure, Expected, Memory, Scratch, Workspaces};
use crate::buffer::{self, Buffer, Element};
use crate::cpu::{Cpu, CpuMemory, Path};
use crate::op::{AsQuantized, Attention, DeltaRule, HeadLoss, LowRank, Product, QuantizedShape, SliceShape};
use crate::parcel::Parcel;
use std::ffi::OsString;
use std::process::ExitCode;
use std::rc::Rc;

/// Every program that uses GPUs calls this first in `main`, and ends with the exit code if there is
/// one: the process was started to compile a program or to list cards. `variable` gives the value
/// of an environment variable. Without this call HIP compiles in the process itself, and no
/// interface keeps compiled programs on disk.
pub fn start(variable: impl Fn(&str) -> Option<OsString>) -> Option<ExitCode> {
    let served = hip::serve_as_compiler();
    if served.is_some() {
        return served;
    }
    code_cache::set_root(code_cache::root_from_environment(&variable));
    hip::configure(variable);
    hip::serve_as_lister().or_else(opencl_probe::serve)
}

/// Device memory; slices are stored as planes.
pub struct GpuMemory;

impl Memory for GpuMemory {
    type Buffer<T: Element> = GpuBuffer<T>;
    type Rows = SlicedRows;
    type Weight = SlicedWeight;
    type QuantizedWeight = QuantizedWeight;
    type Host = CpuMemory;
    type HostQuantizedWeight = HostQuantizedWeight;
}

impl Device for Gpu {
    type Memory = GpuMemory;

    fn name(&self) -> String {
        self.device.runtime.name().to_string()
    }

    fn has_ranges(&self) -> bool {
        crate::plan::MemoryLayout::has_heap(self)
    }

    fn device_peak_bytes(&self) -> Option<u64> {
        Some(self.device.usage.peak_bytes() as u64)
    }

    fn prepare(&self, work: &Expected) {
        self.compile_ahead(&ahead::programs(self, work));
    }

    fn zeros<T: Element>(&self, length: usize) -> GpuBuffer<T> {
        let mut buffer = GpuBuffer::new(self, length);
        self.zero(&mut buffer);
        buffer
    }

    fn lasting_zeros<T: Element>(&self, length: usize) -> GpuBuffer<T> {
        let mut buffer = GpuBuffer::lasting(self, length);
        self.zero(&mut buffer);
        buffer
    }

    fn unwritten<T: Element>(&self, length: usize) -> GpuBuffer<T> {
        GpuBuffer::new(self, length)
    }

    fn upload<T: Element>(&self, host: &[T]) -> GpuBuffer<T> {
        let mut buffer = GpuBuffer::new(self, host.len());
        self.write(&mut buffer, host);
        buffer
    }

    fn download<T: Element>(&self, device: &GpuBuffer<T>) -> Result<Vec<T>, DeviceFailure> {
        self.read(device)
    }

    fn begin_download<T: Element>(&self, device: &GpuBuffer<T>) -> BegunDownload {
        let handle = device.handle().filter(|_| !device.is_empty());
        let begun = handle.and_then(|handle| self.device.attempt(|runtime| runtime.begin_read(handle, device.bytes())));
        BegunDownload(begun.flatten().map(|number| PendingRead::new(&self.device.runtime, number)))
    }

    fn finish_download<T: Element>(
        &self,
        begun: &BegunDownload,
        device: &GpuBuffer<T>,
    ) -> Result<Vec<T>, DeviceFailure> {
        let mut host = vec![T::default(); device.len()];
        self.read_by(&mut host, device, |runtime, bytes, handle| match &begun.0 {
            Some(read) => runtime.finish_read(read.number(), bytes),
            None => runtime.read(bytes, handle),
        })?;
        Ok(host)
    }

    fn overwrite<T: Element>(&self, device: &mut GpuBuffer<T>, host: &[T]) {
        self.write(device, host);
    }

    fn pack(&self, parcel: &mut Parcel, device: &GpuBuffer<f32>) -> Result<(), DeviceFailure> {
        self.copy_to_parcel(parcel, device)
    }

    fn unpack(&self, device: &mut GpuBuffer<f32>, parcel: &mut Parcel) -> Result<(), DeviceFailure> {
        self.copy_from_parcel(device, parcel)
    }

    fn host_zeros<T: Element>(&self, length: usize) -> Buffer<T> {
        Buffer::paged(length)
    }

    fn host_made<T: Element, H: AsRef<[T]>, E>(
        &self,
        length: usize,
        make: impl FnOnce() -> Result<H, E>,
    ) -> Result<Buffer<T>, E> {
        buffer::made(Buffer::paged(length), make)
    }

    fn save<T: Element>(&self, host: &mut Buffer<T>, device: &GpuBuffer<T>) -> Result<(), DeviceFailure> {
        self.save_to(host, device)
    }

    fn load<T: Element>(&self, device: &mut GpuBuffer<T>, host: &Buffer<T>) {
        self.load_from(device, host);
    }

    fn begin_load<T: Element>(&self, host: &Buffer<T>) -> Arriving<GpuBuffer<T>> {
        self.load_ahead(host)
    }

    fn finish_load<T: Element>(&self, arriving: Arriving<GpuBuffer<T>>) -> GpuBuffer<T> {
        self.wait_for(arriving)
    }

    fn finish_saves(&self) -> Result<(), DeviceFailure> {
        self.finish()
    }

    fn save_quantized(&self, weight: QuantizedWeight) -> HostQuantizedWeight {
        product4::save(self, &weight)
    }

    fn begin_load_quantized(&self, host: &HostQuantizedWeight) -> Arriving<QuantizedWeight> {
        product4::load_ahead(self, host)
    }

    fn finish_load_quantized(&self, arriving: Arriving<QuantizedWeight>) -> QuantizedWeight {
        product4::wait_for(self, arriving)
    }

    fn host(&self, threads: usize) -> Result<Rc<dyn HostOps<CpuMemory>>, DeviceFailure> {
        Cpu::as_host(threads, Path::best(), self)
    }

    fn rows(&self, shape: SliceShape) -> SlicedRows {
        slices::rows(self, shape)
    }

    fn weight(&self, count: usize, shape: SliceShape) -> SlicedWeight {
        slices::weight(self, count, shape)
    }

    fn quantized_weight<Q: AsQuantized, E>(
        &self,
        shape: QuantizedShape,
        make: impl FnMut(usize) -> Result<Q, E>,
    ) -> Result<QuantizedWeight, E> {
        product4::quantized_weight(self, shape, make)
    }

    fn workspaces(&self) -> &dyn Workspaces {
        self
    }

    fn scratch(&self) -> &Scratch<GpuMemory> {
        &self.device.scratch
    }
}

impl Workspaces for Gpu {
    fn product(&self, p: &Product) -> usize {
        product::workspace(self, p)
    }

    fn product4(&self, _w: QuantizedShape, p: &Product) -> usize {
        product4::workspace(self, p)
    }

    fn low_rank_outer(&self, parts: &[LowRank]) -> usize {
        low_rank::outer_workspace(self, parts)
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
        balance::workspace(self, row_starts, experts)
    }

    fn grouping(&self, row_starts: &[usize], experts: usize) -> usize {
        grouping::workspace(self, row_starts, experts)
    }

    fn token_sums(&self, row_starts: &[usize], width: usize) -> usize {
        token_sums::workspace(self, row_starts, width)
    }
}
