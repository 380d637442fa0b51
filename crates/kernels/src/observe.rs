//! A backend that wraps another: every op passes through unchanged, and an observer sees it begin
//! and end.
//!
//! Benchmarks use it to time the ops of a step, `replay` to find the op in which two devices
//! differ; tests use it to corrupt a result, as faulty hardware would, and check that it is
//! detected.

use crate::HostOps;
use crate::backend::{
    Arriving, BegunDownload, Bytes, Checked, Device, DeviceFailure, Expected, F32, HostBuffer, Memory, Run, Scratch,
    Workspaces,
};
use crate::buffer::Element;
use crate::op::{AsQuantized, Op, Output, QuantizedShape, SliceShape};
use crate::parcel::Parcel;
use crate::place::Place;
use std::rc::Rc;

/// One call of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Call {
    pub op: &'static str,
    /// Rows, outputs and inputs of a product; zero for other ops.
    pub size: [usize; 3],
}

pub trait Observer<D: Device> {
    /// The calls that follow stand here.
    fn enter(&self, _place: Place) {}
    /// `workspace` is at least as large as the op needs.
    fn before(&self, device: &D, call: Call, workspace: &mut Bytes<D::Memory>);
    /// `outputs` is everything the op wrote.
    fn after(&self, device: &D, call: Call, outputs: Vec<Output<'_, D::Memory>>);
}

/// `inner`, watched by `observer`.
pub struct Observed<D, O> {
    pub inner: D,
    pub observer: O,
}

impl<D: Device, O: Observer<D>, P: Op<D::Memory>> Run<P> for Observed<D, O>
where
    D: Run<P>,
{
    fn execute(&self, op: &mut P, workspace: &mut Bytes<D::Memory>, checked: Checked) {
        let call = Call { op: P::NAME, size: op.size() };
        self.observer.before(&self.inner, call, workspace);
        self.inner.execute(op, workspace, checked);
        self.observer.after(&self.inner, call, op.outputs());
    }
}

impl<D: Device, O: Observer<D>> Device for Observed<D, O> {
    type Memory = D::Memory;

    fn name(&self) -> String {
        self.inner.name()
    }

    fn has_ranges(&self) -> bool {
        self.inner.has_ranges()
    }

    fn device_peak_bytes(&self) -> Option<u64> {
        self.inner.device_peak_bytes()
    }

    fn prepare(&self, work: &Expected) {
        self.inner.prepare(work);
    }

    fn enter(&self, place: Place) {
        self.observer.enter(place);
        self.inner.enter(place);
    }

    fn zeros<T: Element>(&self, length: usize) -> <D::Memory as Memory>::Buffer<T> {
        self.inner.zeros(length)
    }

    fn lasting_zeros<T: Element>(&self, length: usize) -> <D::Memory as Memory>::Buffer<T> {
        self.inner.lasting_zeros(length)
    }

    fn unwritten<T: Element>(&self, length: usize) -> <D::Memory as Memory>::Buffer<T> {
        self.inner.unwritten(length)
    }

    fn upload<T: Element>(&self, host: &[T]) -> <D::Memory as Memory>::Buffer<T> {
        self.inner.upload(host)
    }

    fn overwrite<T: Element>(&self, device: &mut <D::Memory as Memory>::Buffer<T>, host: &[T]) {
        self.inner.overwrite(device, host);
    }

    fn download<T: Element>(&self, device: &<D::Memory as Memory>::Buffer<T>) -> Result<Vec<T>, DeviceFailure> {
        self.inner.download(device)
    }

    fn begin_download<T: Element>(&self, device: &<D::Memory as Memory>::Buffer<T>) -> BegunDownload {
        self.inner.begin_download(device)
    }

    fn finish_download<T: Element>(
        &self,
        begun: &BegunDownload,
        device: &<D::Memory as Memory>::Buffer<T>,
    ) -> Result<Vec<T>, DeviceFailure> {
        self.inner.finish_download(begun, device)
    }

    fn pack(&self, parcel: &mut Parcel, device: &F32<D::Memory>) -> Result<(), DeviceFailure> {
        self.inner.pack(parcel, device)
    }

    fn unpack(&self, device: &mut F32<D::Memory>, parcel: &mut Parcel) -> Result<(), DeviceFailure> {
        self.inner.unpack(device, parcel)
    }

    fn host_zeros<T: Element>(&self, length: usize) -> HostBuffer<D::Memory, T> {
        self.inner.host_zeros(length)
    }

    fn host_made<T: Element, H: AsRef<[T]>, E>(
        &self,
        length: usize,
        make: impl FnOnce() -> Result<H, E>,
    ) -> Result<HostBuffer<D::Memory, T>, E> {
        self.inner.host_made(length, make)
    }

    fn save<T: Element>(
        &self,
        host: &mut HostBuffer<D::Memory, T>,
        device: &<D::Memory as Memory>::Buffer<T>,
    ) -> Result<(), DeviceFailure> {
        self.inner.save(host, device)
    }

    fn load<T: Element>(&self, device: &mut <D::Memory as Memory>::Buffer<T>, host: &HostBuffer<D::Memory, T>) {
        self.inner.load(device, host);
    }

    fn begin_load<T: Element>(&self, host: &HostBuffer<D::Memory, T>) -> Arriving<<D::Memory as Memory>::Buffer<T>> {
        self.inner.begin_load(host)
    }

    fn finish_load<T: Element>(
        &self,
        arriving: Arriving<<D::Memory as Memory>::Buffer<T>>,
    ) -> <D::Memory as Memory>::Buffer<T> {
        self.inner.finish_load(arriving)
    }

    fn finish_saves(&self) -> Result<(), DeviceFailure> {
        self.inner.finish_saves()
    }

    fn save_quantized(
        &self,
        weight: <D::Memory as Memory>::QuantizedWeight,
    ) -> <D::Memory as Memory>::HostQuantizedWeight {
        self.inner.save_quantized(weight)
    }

    fn begin_load_quantized(
        &self,
        host: &<D::Memory as Memory>::HostQuantizedWeight,
    ) -> Arriving<<D::Memory as Memory>::QuantizedWeight> {
        self.inner.begin_load_quantized(host)
    }

    fn finish_load_quantized(
        &self,
        arriving: Arriving<<D::Memory as Memory>::QuantizedWeight>,
    ) -> <D::Memory as Memory>::QuantizedWeight {
        self.inner.finish_load_quantized(arriving)
    }

    fn host(&self, threads: usize) -> Result<Rc<dyn HostOps<<D::Memory as Memory>::Host>>, DeviceFailure> {
        self.inner.host(threads)
    }

    fn rows(&self, shape: SliceShape) -> <D::Memory as Memory>::Rows {
        self.inner.rows(shape)
    }

    fn weight(&self, count: usize, shape: SliceShape) -> <D::Memory as Memory>::Weight {
        self.inner.weight(count, shape)
    }

    fn quantized_weight<Q: AsQuantized, E>(
        &self,
        shape: QuantizedShape,
        make: impl FnMut(usize) -> Result<Q, E>,
    ) -> Result<<D::Memory as Memory>::QuantizedWeight, E> {
        self.inner.quantized_weight(shape, make)
    }

    fn workspaces(&self) -> &dyn Workspaces {
        self.inner.workspaces()
    }

    fn scratch(&self) -> &Scratch<D::Memory> {
        self.inner.scratch()
    }
}
