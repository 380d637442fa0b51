//! An emulated card as a runtime of the kernels crate.

use crate::compiler::{Architecture, Dialect, Request, Toolchain, compile};
use crate::launch::{Launch, Machine};
use crate::memory::ALIGNMENT;
use crate::program::{Kernel as Entry, Program};
use isobit_kernels::backend::DeviceFailure;
use isobit_kernels::gpu::runtime::{Answer, Argument, Compiled, Handle, Kernel, Language, Lifetime, Runtime};
use isobit_kernels::gpu::{Api, Gpu, Selector, source_line};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// What to emulate, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub architecture: Architecture,
    pub dialect: Dialect,
    pub toolchain: Toolchain,
    /// 0 is plain; others move what hardware leaves open.
    pub seed: u64,
    /// Only kernels that need no matrix cores.
    pub portable: bool,
    /// Compiler options after the usual ones, for negative controls.
    pub options: Vec<String>,
}

impl Settings {
    pub fn new(architecture: Architecture) -> Self {
        let (dialect, toolchain) = (Dialect::Hip, Toolchain::Assembly);
        Self { architecture, dialect, toolchain, seed: 0, portable: false, options: Vec::new() }
    }
}

/// A program that was compiled for the card.
struct Loaded {
    program: Arc<Program>,
    image: u64,
    source: String,
}

#[derive(Default)]
struct Programs {
    loaded: Vec<Loaded>,
    /// Program and index of the kernel in it.
    kernels: Vec<(usize, usize)>,
    /// How often each instruction of a program was executed, by program and index of the kernel.
    executed: BTreeMap<(usize, usize), Vec<u64>>,
}

/// An emulated card. Commands run at once.
pub struct Card {
    name: String,
    settings: Settings,
    machine: RefCell<Machine>,
    programs: RefCell<Programs>,
}

impl Card {
    pub fn new(settings: Settings) -> Self {
        let Settings { architecture, dialect, toolchain, seed, .. } = &settings;
        let name = format!("{architecture} (emulated, {dialect} by {}, seed {seed})", toolchain.name());
        let machine = RefCell::new(Machine::new(*seed));
        Self { name, machine, settings, programs: RefCell::default() }
    }

    /// The card as a device whose arithmetic is checked like any other's.
    pub fn open(settings: Settings) -> Result<Gpu, DeviceFailure> {
        Self::new(settings).into_gpu().map(|(gpu, _)| gpu)
    }

    /// The same, with the card itself, which counts its work.
    pub fn into_gpu(self) -> Result<(Gpu, Rc<Self>), DeviceFailure> {
        // The interface decides the dialect of the sources.
        let api = match self.settings.dialect {
            Dialect::Hip => Api::Hip,
            Dialect::OpenCl => Api::OpenCl,
        };
        let card = Rc::new(self);
        let gpu = Gpu::with_runtime(Rc::clone(&card) as Rc<dyn Runtime>, Selector { api, index: 0 })?;
        Ok((gpu, card))
    }

    /// Instructions that its waves have executed so far.
    pub fn steps(&self) -> u64 {
        self.machine.borrow().steps
    }

    /// How often the waves of a kernel have executed each instruction so far, by its name, in all
    /// programs that have such a kernel.
    pub fn executed(&self, kernel: &str) -> BTreeMap<String, u64> {
        let programs = self.programs.borrow();
        let mut counts = BTreeMap::new();
        for (&(program, entry), executed) in &programs.executed {
            let program = &programs.loaded[program].program;
            if program.kernels[entry].name != kernel {
                continue;
            }
            for (origin, times) in program.origins.iter().zip(executed).filter(|(_, times)| **times > 0) {
                let name = origin.text.split_whitespace().next().unwrap_or_default();
                *counts.entry(name.to_string()).or_insert(0) += times;
            }
        }
        counts
    }
}

/// The argument segment of a launch.
fn segment(kernel: &Entry, arguments: &[Argument]) -> Answer<Vec<u8>> {
    if kernel.parameters.len() != arguments.len() {
        return Err(format!("{} arguments; the kernel takes {}", arguments.len(), kernel.parameters.len()));
    }
    let mut bytes = vec![0; kernel.argument_bytes];
    for (index, (argument, parameter)) in arguments.iter().zip(&kernel.parameters).enumerate() {
        let (value, width, is_pointer) = match argument {
            Argument::Memory(memory, offset) => (memory.0 + *offset as u64, 8, true),
            Argument::U32(x) => (u64::from(*x), 4, false),
            Argument::U64(x) => (*x, 8, false),
            Argument::F32(x) => (u64::from(x.to_bits()), 4, false),
            Argument::Descriptor(_) => return Err("this card has no bulk copies".to_string()),
        };
        if (width, is_pointer) != (parameter.bytes, parameter.is_pointer) {
            return Err(format!("argument {index} has {width} bytes; the kernel wants {}", parameter.bytes));
        }
        let place = bytes.get_mut(parameter.offset..parameter.offset + width);
        place.ok_or("an argument outside its segment")?.copy_from_slice(&value.to_le_bytes()[..width]);
    }
    Ok(bytes)
}

impl Runtime for Card {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        ALIGNMENT
    }

    fn allocate(&self, bytes: usize, _: Lifetime) -> Answer<Handle> {
        self.machine.borrow_mut().memory.allocate(bytes).map(Handle)
    }

    fn release(&self, memory: Handle) {
        self.machine.borrow_mut().memory.release(memory.0);
    }

    fn zero(&self, memory: Handle, bytes: usize) -> Answer<()> {
        self.write(memory, &vec![0; bytes])
    }

    fn write(&self, memory: Handle, bytes: &[u8]) -> Answer<()> {
        self.machine.borrow_mut().memory.write(memory.0, bytes)
    }

    fn read(&self, bytes: &mut [u8], memory: Handle) -> Answer<()> {
        self.machine.borrow_mut().memory.read(bytes, memory.0)
    }

    fn finish(&self) -> Answer<()> {
        Ok(())
    }

    fn compile(&self, source: &str, language: Language, options: &[String]) -> Answer<Compiled> {
        if language == Language::Native {
            return Err("programs in CUDA's native language do not run on AMD's devices".to_string());
        }
        let program = compile(&Request {
            source: source.to_string(),
            options: options.iter().chain(&self.settings.options).cloned().collect(),
            architecture: self.settings.architecture,
            dialect: self.settings.dialect,
            toolchain: self.settings.toolchain,
        })?;
        let memory = &mut self.machine.borrow_mut().memory;
        let image = memory.allocate(program.image.len().max(1))?;
        for range in &program.data {
            memory.write(image + range.start as u64, &program.image[range.clone()])?;
        }
        memory.protect(image);
        let loaded = &mut self.programs.borrow_mut().loaded;
        loaded.push(Loaded { program, image, source: source.to_string() });
        Ok(Compiled(loaded.len() as u64 - 1))
    }

    fn kernel(&self, program: Compiled, name: &str) -> Answer<Kernel> {
        let programs = &mut *self.programs.borrow_mut();
        let index = program.0 as usize;
        let loaded = programs.loaded.get(index).ok_or("no such program")?;
        let found = loaded.program.kernels.iter().position(|kernel| kernel.name == name);
        programs.kernels.push((index, found.ok_or_else(|| format!("no kernel `{name}` in the program"))?));
        Ok(Kernel(programs.kernels.len() as u64 - 1))
    }

    fn launch(&self, kernel: Kernel, groups: usize, size: usize, dynamic: usize, arguments: &[Argument]) -> Answer<()> {
        let programs = &mut *self.programs.borrow_mut();
        let &(program, entry) = programs.kernels.get(kernel.0 as usize).ok_or("no such kernel")?;
        let loaded = &programs.loaded[program];
        let kernel = &loaded.program.kernels[entry];
        let launch = Launch {
            program: &loaded.program,
            image: loaded.image,
            kernel,
            groups,
            group_size: size,
            dynamic_bytes: dynamic,
            arguments: &segment(kernel, arguments)?,
        };
        let mut machine = self.machine.borrow_mut();
        machine.launch(&launch).map_err(|fault| {
            let place = fault.origin.as_ref().and_then(|origin| origin.place.as_ref());
            let line = place.and_then(|place| source_line(&loaded.source, &place.file, place.line as usize));
            let quoted = line.map(|line| format!(" `{}`", line.trim())).unwrap_or_default();
            format!("{fault}{quoted}")
        })?;
        let executed = programs.executed.entry((program, entry)).or_default();
        executed.resize(machine.executed.len(), 0);
        executed.iter_mut().zip(&machine.executed).for_each(|(all, last)| *all += last);
        Ok(())
    }

    fn has_mfma(&self) -> bool {
        self.settings.architecture.has_mfma() && !self.settings.portable
    }

    fn multiprocessors(&self) -> usize {
        match self.settings.architecture {
            Architecture::Gfx906 => 60,
            Architecture::Gfx908 => 120,
            Architecture::Gfx90a => 110,
            Architecture::Gfx942 => 304,
        }
    }
}
