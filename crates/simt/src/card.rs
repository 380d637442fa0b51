//! A card made of source, as a runtime of the kernels crate.

use crate::compiler::{Program, compile};
use crate::engine::{self, Buffer, Shape};
use isobit_kernels::backend::DeviceFailure;
use isobit_kernels::gpu::runtime::{Answer, Argument, Compiled, Handle, Kernel, Language, Lifetime, Runtime};
use isobit_kernels::gpu::{Api, Gpu, Selector};
use std::alloc::{Layout, alloc, dealloc};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// Of memory, as CUDA's driver aligns it.
const ALIGNMENT: usize = 256;

/// How to run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// 0 runs threads and blocks in order; others mix them, and what memory holds at first.
    pub seed: u64,
    /// Compiler options after the usual ones, for negative controls.
    pub options: Vec<String>,
}

#[derive(Default)]
struct Programs {
    loaded: Vec<Arc<Program>>,
    /// Program and index of the kernel in it.
    kernels: Vec<(usize, usize)>,
}

/// The card. Commands run at once.
pub struct Card {
    name: String,
    settings: Settings,
    /// Sizes by address.
    memory: RefCell<BTreeMap<usize, usize>>,
    programs: RefCell<Programs>,
    switches: Cell<u64>,
}

impl Card {
    pub fn new(settings: Settings) -> Self {
        let name = format!("sm_80 (source on the CPU, seed {})", settings.seed);
        Self { name, settings, memory: RefCell::default(), programs: RefCell::default(), switches: Cell::new(0) }
    }

    /// As a device whose arithmetic is checked like any other's.
    pub fn open(settings: Settings) -> Result<Gpu, DeviceFailure> {
        Self::new(settings).into_gpu().map(|(gpu, _)| gpu)
    }

    /// The same, with the card itself, which counts its work.
    pub fn into_gpu(self) -> Result<(Gpu, Rc<Self>), DeviceFailure> {
        let card = Rc::new(self);
        let selector = Selector { api: Api::Cuda, index: 0 };
        let gpu = Gpu::with_runtime(Rc::clone(&card) as Rc<dyn Runtime>, selector)?;
        Ok((gpu, card))
    }

    /// How often a thread was continued so far.
    pub fn switches(&self) -> u64 {
        self.switches.get()
    }

    /// Checks that `bytes` bytes from an address on are one buffer's.
    fn check(&self, memory: Handle, bytes: usize) -> Answer<*mut u8> {
        let address = memory.0 as usize;
        match self.memory.borrow().get(&address) {
            Some(&size) if bytes <= size => Ok(address as *mut u8),
            Some(size) => Err(format!("{bytes} bytes of a buffer of {size}")),
            None => Err("no such buffer".to_string()),
        }
    }
}

fn layout(bytes: usize) -> Answer<Layout> {
    Layout::from_size_align(bytes.max(1), ALIGNMENT).map_err(|error| error.to_string())
}

impl Runtime for Card {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        ALIGNMENT
    }

    fn architecture(&self) -> Option<(u32, u32)> {
        Some((8, 0))
    }

    fn multiprocessors(&self) -> usize {
        // Few, so that persistent kernels walk over several tiles.
        3
    }

    fn allocate(&self, bytes: usize, _: Lifetime) -> Answer<Handle> {
        // SAFETY: not of size zero.
        let place = unsafe { alloc(layout(bytes)?) };
        if place.is_null() {
            return Err(format!("no memory for {bytes} bytes"));
        }
        let garbage = if self.settings.seed == 0 { 0xff } else { (self.settings.seed * 37) as u8 };
        // SAFETY: just allocated, with at least this size.
        unsafe { place.write_bytes(garbage, bytes) };
        self.memory.borrow_mut().insert(place as usize, bytes);
        Ok(Handle(place as u64))
    }

    fn release(&self, memory: Handle) {
        let address = memory.0 as usize;
        let bytes = self.memory.borrow_mut().remove(&address);
        if let Some(Ok(layout)) = bytes.map(layout) {
            // SAFETY: allocated with this layout, and forgotten just now.
            unsafe { dealloc(address as *mut u8, layout) };
        }
    }

    fn zero(&self, memory: Handle, bytes: usize) -> Answer<()> {
        let place = self.check(memory, bytes)?;
        // SAFETY: a buffer of at least this size.
        unsafe { place.write_bytes(0, bytes) };
        Ok(())
    }

    fn write(&self, memory: Handle, bytes: &[u8]) -> Answer<()> {
        let place = self.check(memory, bytes.len())?;
        // SAFETY: a buffer of at least this size, which no slice of Rust's overlaps.
        unsafe { place.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn read(&self, bytes: &mut [u8], memory: Handle) -> Answer<()> {
        let place = self.check(memory, bytes.len())?;
        // SAFETY: as in `write`; every byte was initialised when it was allocated.
        unsafe { place.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn finish(&self) -> Answer<()> {
        Ok(())
    }

    fn compile(&self, source: &str, language: Language, options: &[String]) -> Answer<Compiled> {
        if language == Language::Native {
            return Err("programs for Hopper alone do not run here".to_string());
        }
        let options = options.iter().chain(&self.settings.options).cloned().collect();
        let program = compile(&(source.to_string(), options))?;
        let loaded = &mut self.programs.borrow_mut().loaded;
        loaded.push(program);
        Ok(Compiled(loaded.len() as u64 - 1))
    }

    fn kernel(&self, program: Compiled, name: &str) -> Answer<Kernel> {
        let programs = &mut *self.programs.borrow_mut();
        let index = program.0 as usize;
        let loaded = programs.loaded.get(index).ok_or("no such program")?;
        let found = loaded.kernels.iter().position(|kernel| kernel.name == name);
        programs.kernels.push((index, found.ok_or_else(|| format!("no kernel `{name}` in the program"))?));
        Ok(Kernel(programs.kernels.len() as u64 - 1))
    }

    fn launch(&self, kernel: Kernel, groups: usize, size: usize, dynamic: usize, arguments: &[Argument]) -> Answer<()> {
        let programs = self.programs.borrow();
        let &(program, entry) = programs.kernels.get(kernel.0 as usize).ok_or("no such kernel")?;
        let program = &programs.loaded[program];
        let memory = self.memory.borrow();
        let buffers: Vec<Buffer> = memory.iter().map(|(&start, bytes)| Buffer { start, end: start + bytes }).collect();
        let shape = Shape { groups, size, dynamic };
        let kernel = &program.kernels[entry];
        let switches = engine::launch(program, kernel, shape, self.settings.seed, &buffers, arguments)?;
        self.switches.set(self.switches.get() + switches);
        Ok(())
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        let left: Vec<usize> = self.memory.borrow().keys().copied().collect();
        for address in left {
            self.release(Handle(address as u64));
        }
    }
}
