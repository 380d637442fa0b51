//! Compares every op on every backend with the reference, bit for bit.
//!
//! A [`Case`] is one op with one set of inputs, written once for any backend. `cases/` holds a file
//! per op that visits its cases; a visitor decides what to run them on. The tests use
//! [`EveryBackend`]: every CPU path of this machine with 1, 2 and 7 threads, and every OpenCL and
//! CUDA device, each twice, with outputs filled with NaN beforehand.
#![expect(clippy::float_arithmetic, reason = "test data is made of numbers")]

pub mod cases;
pub mod data;
pub mod digests;
#[cfg(feature = "emulated")]
pub mod emulated;
mod nearest;
mod own_process;
mod required;
pub mod table;
pub mod vectors;
mod work;

pub use nearest::nearest;
pub use own_process::in_own_process;
pub use required::{devices_or_skips, is_required, named_devices_or_skips, report, skip};
pub use work::{SMALL_WORK_MAX, work_of};

use isobit_kernels::backend::{BegunDigests, Bytes, Length};
use isobit_kernels::gpu::{self, Api, Gpu, MatrixUnits, Selector};
use isobit_kernels::observe::{Call, Observed, Observer};
use isobit_kernels::op::{AnyBuffer, Output as Written};
use isobit_kernels::tensor::Buffer;
use isobit_kernels::{Backend, Cpu, Device, Element, Path, Reference};
use isobit_numerics::digest::Digest;

/// A named result, as bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    pub name: &'static str,
    pub element: &'static str,
    pub bits: Vec<u64>,
}

impl Output {
    pub fn new<T: Element>(name: &'static str, values: &[T]) -> Self {
        Self { name, element: T::NAME, bits: values.iter().map(|x| x.bits()).collect() }
    }

    pub fn download<B: Backend, T: Element>(backend: &B, name: &'static str, buffer: &Buffer<B, T>) -> Self {
        Self::new(name, &downloaded(backend, buffer))
    }
}

/// One op with its inputs.
pub trait Case {
    /// Op and shape, for messages.
    fn name(&self) -> String;
    fn run<B: Backend>(&self, backend: &B) -> Vec<Output>;

    /// Whether all results are finite. NaN payloads of some ops are not part of the contract, so
    /// their cases may not produce NaN.
    fn is_finite(&self) -> bool {
        false
    }
}

/// What to do with each case.
pub trait Visitor {
    fn case<C: Case>(&mut self, case: &C);
    /// The cases that follow belong to `name`.
    fn op(&mut self, _name: &'static str) {}
}

/// The first difference between two results, if any.
pub fn first_difference(want: &[Output], got: &[Output]) -> Option<String> {
    if want.len() != got.len() {
        return Some(format!("{} outputs wanted, {} given", want.len(), got.len()));
    }
    for (want, got) in want.iter().zip(got) {
        if want.bits.len() != got.bits.len() {
            return Some(format!("{}: {} elements wanted, {} given", want.name, want.bits.len(), got.bits.len()));
        }
        let differing = want.bits.iter().zip(&got.bits).filter(|(a, b)| a != b).count();
        if let Some(index) = want.bits.iter().zip(&got.bits).position(|(a, b)| a != b) {
            let show = |bits: u64| match want.element {
                "f32" => format!("{:e} (0x{bits:08x})", f32::from_bits(bits as u32)),
                _ => format!("{bits} (0x{bits:x})"),
            };
            return Some(format!(
                "{}[{index}]: {} wanted, {} given; {differing} of {} differ",
                want.name,
                show(want.bits[index]),
                show(got.bits[index]),
                want.bits.len()
            ));
        }
    }
    None
}

/// Thread counts that every path is tested with.
pub const THREADS: [usize; 3] = [1, 2, 7];

/// Compares every CPU path and every device of this machine with the reference.
pub struct EveryBackend {
    paths: Vec<Observed<Cpu, DirtyWorkspace>>,
    devices: Vec<Observed<Gpu, DirtyWorkspace>>,
    pub compared: usize,
    pub differences: Vec<String>,
}

impl EveryBackend {
    pub fn new() -> Self {
        let paths = Path::available()
            .into_iter()
            .flat_map(|path| THREADS.map(|threads| Cpu::new(threads, path).expect("an available path")))
            .collect();
        Self::of(paths, devices().into_iter().filter_map(|(_, device)| device.ok()).collect())
    }

    /// Backends whose name contains `name`.
    pub fn on(name: &str) -> Self {
        let mut named = Self::new();
        named.paths.retain(|cpu| cpu.name().contains(name));
        named.devices.retain(|gpu| gpu.name().contains(name));
        named
    }

    /// Devices whose name contains `name`, with the portable kernels only.
    pub fn portable(name: &str) -> Self {
        Self::reopened(name, MatrixUnits::Portable)
    }

    /// The same with the `mma.sync` kernels of every NVIDIA device instead of Hopper's own.
    pub fn mma_sync(name: &str) -> Self {
        Self::reopened(name, MatrixUnits::MmaSync)
    }

    fn reopened(name: &str, units: MatrixUnits) -> Self {
        let devices = Self::on(name).devices.into_iter();
        Self::of(Vec::new(), devices.filter_map(|gpu| Gpu::open_with(gpu.inner.selector(), units).ok()).collect())
    }

    pub fn of(paths: Vec<Cpu>, devices: Vec<Gpu>) -> Self {
        let paths = paths.into_iter().map(|inner| Observed { inner, observer: DirtyWorkspace }).collect();
        let devices = devices.into_iter().map(|inner| Observed { inner, observer: DirtyWorkspace }).collect();
        Self { paths, devices, compared: 0, differences: Vec::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.paths.is_empty() && self.devices.is_empty()
    }

    /// Fails on any difference, or if nothing was compared.
    pub fn finish(self) {
        assert!(self.compared > 0, "no case was compared");
        assert!(self.differences.is_empty(), "{}\n{}", self.differences.join("\n"), skipped().join("\n"));
    }
}

/// Why a device is not compared.
#[derive(Clone, Debug)]
pub enum Absent {
    /// There is no driver or no device, or the driver reports that it cannot do the arithmetic: a
    /// skip.
    Missing(String),
    /// The device exists but fails: an error.
    Broken(String),
}

/// Every device that a driver offers, opened, or why it is not; just `opencl` or `cuda` if there is
/// no driver.
pub fn devices() -> Vec<(String, Result<Gpu, Absent>)> {
    let mut found = Vec::new();
    for api in Api::ALL {
        let listings = gpu::list(api).and_then(|listings| match listings.len() {
            0 => Err("no device".to_string()),
            _ => Ok(listings),
        });
        match listings {
            Err(why) => found.push((api.name().to_string(), Err(Absent::Missing(why)))),
            Ok(listings) => found.extend(listings.into_iter().enumerate().map(|(index, listing)| {
                let selector = Selector { api, index };
                let device = match listing.objection {
                    Some(objection) => Err(Absent::Missing(objection)),
                    None => Gpu::open(selector).map_err(|failure| Absent::Broken(failure.what)),
                };
                (selector.to_string(), device)
            })),
        }
    }
    found
}

/// What this machine cannot compare: each is reported as a skip, never as a pass.
pub fn skipped() -> Vec<String> {
    let paths = Path::ALL.into_iter().filter(|path| !path.is_available());
    let paths = paths.map(|path| format!("skipped: no {path} on this machine"));
    let devices = devices().into_iter().filter_map(|(name, device)| match device {
        Ok(_) => None,
        Err(Absent::Missing(why)) => Some(format!("skipped: {name}: {why}")),
        Err(Absent::Broken(why)) => Some(format!("BROKEN: {name}: {why}")),
    });
    paths.chain(devices).collect()
}

/// Visits the cases of an op with every path and device of this machine; fails on any difference.
pub fn on_every_backend(visit: impl Fn(&mut EveryBackend)) {
    let mut backends = EveryBackend::new();
    visit(&mut backends);
    backends.finish();
}

impl Default for EveryBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl Visitor for EveryBackend {
    fn case<C: Case>(&mut self, case: &C) {
        fn compare<B: Backend>(all: &mut EveryBackend, want: &[Output], case: &impl Case, backend: &B) {
            for attempt in ["first", "second"] {
                all.compared += 1;
                backend.scratch().clear();
                if let Some(difference) = first_difference(want, &case.run(backend)) {
                    let message = format!("{} on {}, {attempt} run: {difference}", case.name(), backend.name());
                    all.differences.push(message);
                }
            }
        }
        let want = case.run(&Reference);
        for backend in std::mem::take(&mut self.paths) {
            compare(self, &want, case, &backend);
            self.paths.push(backend);
        }
        for backend in std::mem::take(&mut self.devices) {
            compare(self, &want, case, &backend);
            self.devices.push(backend);
        }
    }
}

/// The fastest path of this machine with two threads: for properties that need no matrix of
/// backends.
pub fn fastest() -> Cpu {
    Cpu::new(2, Path::best()).expect("an available path")
}

/// Fails if two ways to compute one result differ.
pub fn assert_same(ways: &[Output; 2]) {
    assert_eq!(first_difference(&ways[..1], &ways[1..]), None);
}

/// A buffer filled with NaN: an op that overwrites it must leave none.
pub fn poisoned<B: Backend>(backend: &B, length: usize) -> Buffer<B, f32> {
    backend.upload(&vec![f32::NAN; length])
}

/// The contents of a device buffer; a device error fails the test.
pub fn downloaded<B: Backend, T: Element>(backend: &B, buffer: &Buffer<B, T>) -> Vec<T> {
    backend.download(buffer).unwrap_or_else(|failure| panic!("{failure}"))
}

/// The digests of buffers, computed by the device; a device error fails the test.
pub fn digests<B: Backend>(backend: &B, tensors: &[AnyBuffer<B::Memory>]) -> Vec<Digest> {
    BegunDigests::new(backend, tensors).finish(backend).unwrap_or_else(|failure| panic!("{failure}"))
}

/// Fills every workspace with ones before an op uses it: an op must not rely on zeros.
pub struct DirtyWorkspace;

impl<D: Device> Observer<D> for DirtyWorkspace {
    fn before(&self, device: &D, _: Call, workspace: &mut Bytes<D::Memory>) {
        device.overwrite(workspace, &vec![0xff; workspace.len()]);
    }

    fn after(&self, _: &D, _: Call, _: Vec<Written<'_, D::Memory>>) {}
}
