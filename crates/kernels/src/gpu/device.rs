//! An open device: its compiled programs, kernel launches, and the first failure, which is kept.

use super::absent::Absent;
use super::devices::{Api, Selector};
use super::memory::{GpuBuffer, MemoryLimit, Tables, Usage, part_bytes};
use super::program::{Build, Program};
use super::runtime::{Answer, Argument, Compiled, Handle, Kernel, Runtime, Source, failure};
use super::{GpuMemory, cuda, hip, opencl, probe};
use crate::backend::{DeviceFailure, Scratch};
use crate::buffer::{self, Element};
use crate::float_state;
use crate::op::{TOKEN_BLOCK, token_blocks};
use isobit_numerics::slices::Profile;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// Work items per group, unless a kernel specifies otherwise: `GROUP` in `gpu/lanes.h`.
pub(super) const GROUP: usize = 256;

/// The number of groups and of work items per group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Groups {
    pub(super) count: usize,
    pub(super) size: usize,
}

impl Groups {
    /// One work item per element.
    pub(super) fn over(length: usize) -> Self {
        Self { count: length.div_ceil(GROUP), size: GROUP }
    }

    /// One group of the usual size per item.
    pub(super) fn each(count: usize) -> Self {
        Self { count, size: GROUP }
    }

    pub(super) fn of(count: usize, size: usize) -> Self {
        Self { count, size }
    }
}

/// A dimension in the type that kernels take.
pub(super) fn dimension(size: usize) -> u32 {
    u32::try_from(size).expect("dimensions are below 2³²")
}

/// The arguments of a launch, in the kernel's order.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => {
        &[$(crate::gpu::runtime::Argument::from($argument)),*]
    };
}
pub(super) use arguments;

/// A compiled program and its source.
type WithSource = (Compiled, &'static str);

/// Which of a device's matrix units are used; fewer than there are for comparisons.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatrixUnits {
    #[default]
    All,
    /// No kernels for Hopper alone: what other NVIDIA devices run, from compute capability 8.0 on.
    MmaSync,
    /// None: the portable kernels.
    Portable,
}

/// An open device with its compiled programs.
pub(super) struct Device {
    pub(super) runtime: Rc<dyn Runtime>,
    selector: Selector,
    units: MatrixUnits,
    /// With their sources, by name.
    programs: RefCell<BTreeMap<(&'static str, Build), WithSource>>,
    /// By program and name.
    kernels: RefCell<BTreeMap<(&'static str, &'static str, Build), Kernel>>,
    failure: RefCell<Option<DeviceFailure>>,
    tables: RefCell<Tables>,
    pub(super) scratch: Scratch<GpuMemory>,
    pub(super) usage: Rc<Usage>,
}

impl Device {
    /// Calls the runtime, unless the device has already failed. A failure is kept.
    pub(super) fn attempt<T>(&self, ask: impl FnOnce(&dyn Runtime) -> Answer<T>) -> Option<T> {
        if self.failure.borrow().is_some() {
            return None;
        }
        let answer = ask(&*self.runtime);
        // The driver runs on this thread and may change its floating-point state, which the next op
        // on the host must not see.
        float_state::restore();
        match answer {
            Ok(answer) => Some(answer),
            Err(what) => {
                *self.failure.borrow_mut() = Some(failure(self.runtime.name(), what));
                None
            }
        }
    }

    /// The result of everything so far.
    pub(super) fn check(&self) -> Result<(), DeviceFailure> {
        self.failure.borrow().clone().map_or(Ok(()), Err)
    }

    fn kernel(&self, program: &Program, name: &'static str, build: Build) -> Answer<Kernel> {
        let key = (program.name, name, build);
        if let Some(kernel) = self.kernels.borrow().get(&key) {
            return Ok(*kernel);
        }
        let known = self.programs.borrow().get(&(program.name, build)).copied();
        let compiled = if let Some((compiled, text)) = known {
            assert!(text == program.text, "two programs are called `{}`", program.name);
            compiled
        } else {
            let compiled = self.compile(program, build)?;
            self.programs.borrow_mut().insert((program.name, build), (compiled, program.text));
            compiled
        };
        let kernel = self.runtime.kernel(compiled, name)?;
        self.kernels.borrow_mut().insert(key, kernel);
        Ok(kernel)
    }

    fn compile(&self, program: &Program, build: Build) -> Answer<Compiled> {
        let Source { text, language, options } = self.source(program, build);
        self.runtime
            .compile(&text, language, &options)
            .map_err(|error| format!("{} does not compile: {error}", program.name))
    }

    fn source(&self, program: &Program, build: Build) -> Source {
        let mut options = build.options();
        if self.runtime.soft_division() {
            options.push("-DSOFT_DIVISION".to_string());
        }
        Source { text: program.source(self.selector.api != Api::OpenCl), language: program.language, options }
    }
}

/// A GPU, or any other device its driver offers. Clones share the device.
#[derive(Clone)]
pub struct Gpu {
    pub(super) device: Rc<Device>,
}

impl Gpu {
    /// Opens a device and checks its arithmetic.
    pub fn open(selector: Selector) -> Result<Self, DeviceFailure> {
        Self::open_with(selector, MatrixUnits::All)
    }

    /// As [`Gpu::open`], with some of the matrix units only. For comparisons.
    pub fn open_with(selector: Selector, units: MatrixUnits) -> Result<Self, DeviceFailure> {
        Self::opened(selector, false, units)
    }

    /// As [`Gpu::open`], dividing in software as on devices without correctly rounded division. For
    /// tests.
    pub fn open_with_soft_division(selector: Selector) -> Result<Self, DeviceFailure> {
        Self::opened(selector, true, MatrixUnits::All)
    }

    fn opened(selector: Selector, soft_division: bool, units: MatrixUnits) -> Result<Self, DeviceFailure> {
        let runtime: Result<Rc<dyn Runtime>, String> = match selector.api {
            Api::OpenCl => opencl::OpenCl::open(selector.index, soft_division).map(|runtime| Rc::new(runtime) as _),
            Api::Cuda => cuda::Cuda::open(selector.index).map(|runtime| Rc::new(runtime) as _),
            Api::Hip => hip::Hip::open(selector.index).map(|runtime| Rc::new(runtime) as _),
        };
        float_state::restore();
        let runtime = runtime.map_err(|what| failure(&selector.to_string(), what))?;
        let gpu = Self::from_parts(runtime, selector, units);
        probe::check(&gpu)?;
        Ok(gpu)
    }

    /// A device with a runtime of the caller's, whose arithmetic is checked like any other's. The
    /// selector's interface decides the dialect of the sources. For tests.
    pub fn with_runtime(runtime: Rc<dyn Runtime>, selector: Selector) -> Result<Self, DeviceFailure> {
        let gpu = Self::from_parts(runtime, selector, MatrixUnits::All);
        probe::check(&gpu)?;
        Ok(gpu)
    }

    /// An absent device: it reports the sizes of buffers and workspaces and computes nothing.
    /// `architecture` is the compute capability of an NVIDIA device, if a plan should include
    /// memory for its tensor cores.
    pub fn absent(selector: Selector, architecture: Option<(u32, u32)>) -> Self {
        Self::from_parts(Rc::new(Absent::new(selector, architecture)), selector, MatrixUnits::All)
    }

    pub(super) fn from_parts(runtime: Rc<dyn Runtime>, selector: Selector, units: MatrixUnits) -> Self {
        let device = Device {
            runtime,
            selector,
            units,
            programs: RefCell::default(),
            kernels: RefCell::default(),
            failure: RefCell::default(),
            tables: RefCell::default(),
            scratch: Scratch::default(),
            usage: Rc::default(),
        };
        Self { device: Rc::new(device) }
    }

    /// Lets the runtime begin to compile programs that are not compiled yet.
    pub(super) fn compile_ahead(&self, programs: &[(&'static Program, Build)]) {
        let known = |program: &Program, build| self.device.programs.borrow().contains_key(&(program.name, build));
        let new = programs.iter().filter(|(program, build)| !known(program, *build));
        let sources = new.map(|(program, build)| self.device.source(program, *build)).collect();
        self.device.runtime.compile_ahead(sources);
    }

    /// Every program that was compiled: its name and what the runtime calls it.
    pub(super) fn programs(&self) -> Vec<(&'static str, Compiled)> {
        self.device.programs.borrow().iter().map(|(&(name, _), &(compiled, _))| (name, compiled)).collect()
    }

    /// Fills a buffer with zeros.
    pub(super) fn zero<T: Element>(&self, buffer: &mut GpuBuffer<T>) {
        if let Some(handle) = buffer.handle().filter(|_| !buffer.is_empty()) {
            self.device.attempt(|runtime| runtime.zero(handle, buffer.bytes()));
        }
    }

    /// Limits the memory of all buffers together, also those of other devices with the same limit.
    /// A buffer that would exceed it panics with [`OverLimit`](super::OverLimit).
    pub fn limit_memory(&self, limit: &Arc<MemoryLimit>) {
        self.device.usage.set_limit(limit);
    }

    pub fn selector(&self) -> Selector {
        self.device.selector
    }

    /// Compute capability of a device whose matrix units may be used. None if there are none.
    pub(super) fn architecture(&self) -> Option<(u32, u32)> {
        self.device.runtime.architecture().filter(|_| self.device.units != MatrixUnits::Portable)
    }

    /// Whether kernels for Hopper alone are left out.
    pub(super) fn only_mma_sync(&self) -> bool {
        self.device.units == MatrixUnits::MmaSync
    }

    /// Whether AMD's matrix cores may be used.
    pub(super) fn has_mfma(&self) -> bool {
        self.device.runtime.has_mfma() && self.device.units != MatrixUnits::Portable
    }

    /// Waits until all work is done.
    pub fn finish(&self) -> Result<(), DeviceFailure> {
        self.device.attempt(|runtime| runtime.finish());
        self.device.check()
    }

    /// Enqueues a kernel of a program that does not depend on the profile.
    pub(super) fn launch(&self, program: &Program, kernel: &'static str, groups: Groups, arguments: &[Argument]) {
        self.launch_sliced(program, kernel, Profile::X2, groups, arguments);
    }

    /// Enqueues a kernel of a program compiled for a profile.
    pub(super) fn launch_sliced(
        &self,
        program: &Program,
        kernel: &'static str,
        profile: Profile,
        groups: Groups,
        arguments: &[Argument],
    ) {
        self.launch_with(program, kernel, profile, groups, 0, arguments);
    }

    /// As [`Gpu::launch_sliced`], with `shared` bytes in addition to what the kernel declares.
    /// Enqueues nothing if there is no work.
    pub(super) fn launch_with(
        &self,
        program: &Program,
        kernel: &'static str,
        build: impl Into<Build>,
        groups: Groups,
        shared: usize,
        arguments: &[Argument],
    ) {
        if groups.count == 0 {
            return;
        }
        let (device, build) = (&self.device, build.into());
        device.attempt(|runtime| {
            let found = device.kernel(program, kernel, build)?;
            runtime
                .launch(found, groups.count, groups.size, shared, arguments)
                .map_err(|error| format!("{kernel}: {error}"))
        });
    }

    pub(super) fn alignment(&self) -> usize {
        self.device.runtime.alignment().max(256)
    }

    /// Bytes of a workspace part with `length` elements.
    pub(super) fn part<T>(&self, length: usize) -> usize {
        part_bytes::<T>(length, self.alignment())
    }

    /// Offsets of rows or segments in the kernels' format. Nothing may write to them: the table may
    /// be shared.
    pub(super) fn offsets(&self, offsets: &[usize]) -> GpuBuffer<u32> {
        let narrow = |&offset: &usize| u32::try_from(offset).expect("fewer than 2³² tokens in a call");
        let content: Vec<u32> = offsets.iter().map(narrow).collect();
        let known = self.device.tables.borrow().find(&content);
        known.unwrap_or_else(|| {
            let mut table = GpuBuffer::table(self, content.len());
            self.write(&mut table, &content);
            self.device.tables.borrow_mut().keep(content, &table);
            table
        })
    }

    /// The first block of every row of data, in a sum over tokens, ending with their number.
    pub(super) fn row_blocks(row_starts: &[usize]) -> Vec<usize> {
        let mut firsts = vec![0];
        for row in row_starts.windows(2) {
            firsts.push(firsts[firsts.len() - 1] + token_blocks(row, TOKEN_BLOCK).count());
        }
        firsts
    }

    /// Start and end token of every block of a sum over tokens.
    pub(super) fn token_blocks(&self, row_starts: &[usize]) -> GpuBuffer<u32> {
        let ends = token_blocks(row_starts, TOKEN_BLOCK).flat_map(|block| [block.start, block.end]);
        self.offsets(&ends.collect::<Vec<_>>())
    }

    pub(super) fn read<T: Element>(&self, buffer: &GpuBuffer<T>) -> Result<Vec<T>, DeviceFailure> {
        let mut host = buffer::room(buffer.len());
        host.resize(buffer.len(), T::default());
        self.read_into(&mut host, buffer).map(|()| host)
    }

    /// Overwrites a buffer.
    pub(super) fn write<T: Element>(&self, buffer: &mut GpuBuffer<T>, host: &[T]) {
        assert_eq!(buffer.len(), host.len(), "as many numbers as the buffer has");
        if let Some(handle) = buffer.handle().filter(|_| !host.is_empty()) {
            self.device.attempt(|runtime| runtime.write(handle, buffer::bytes_of(host)));
        }
    }

    /// Copies a buffer to the host.
    pub(super) fn read_into<T: Element>(&self, host: &mut [T], buffer: &GpuBuffer<T>) -> Result<(), DeviceFailure> {
        self.read_by(host, buffer, |runtime, bytes, handle| runtime.read(bytes, handle))
    }

    /// Copies a buffer to the host, as `copy` does it.
    pub(super) fn read_by<T: Element>(
        &self,
        host: &mut [T],
        buffer: &GpuBuffer<T>,
        copy: impl FnOnce(&dyn Runtime, &mut [u8], Handle) -> Answer<()>,
    ) -> Result<(), DeviceFailure> {
        assert_eq!(buffer.len(), host.len(), "as many numbers as the buffer has");
        if let Some(handle) = buffer.handle().filter(|_| !buffer.is_empty()) {
            // SAFETY: the slice has `buffer.len()` elements, borrowed exclusively; elements have no
            // padding and any bytes are valid ones (`Element`).
            let bytes = unsafe { std::slice::from_raw_parts_mut(host.as_mut_ptr().cast::<u8>(), buffer.bytes()) };
            self.device.attempt(|runtime| copy(runtime, bytes, handle));
        }
        self.device.check()
    }
}
