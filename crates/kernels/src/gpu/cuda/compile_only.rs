//! A CUDA card that compiles and launches nothing, for machines that have NVRTC but no card.
//!
//! The host code of every op runs on it as on a card: it asks for its programs, looks up its
//! kernels by name and passes their arguments. Each is checked against the machine code; what does
//! not fit is kept as a problem, and the next op runs. There is no memory: results are zeros.

use super::cubin::{Entry, entries};
use super::{Compiler, command_line};
use crate::gpu::device::{Gpu, MatrixUnits};
use crate::gpu::devices::{Api, Selector};
use crate::gpu::probe;
use crate::gpu::runtime::{Answer, Argument, ByteMatrix, Compiled, Handle, Kernel, Language, Runtime};
use crate::heap::Lifetime;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// A program as compiled for one architecture with one set of options.
#[derive(Clone, Debug)]
pub struct CompiledProgram {
    pub name: String,
    /// As the compiler names it: `sm_90a`.
    pub architecture: String,
    /// What the host defined for it: `-DSLICES=2`.
    pub options: Vec<String>,
    pub kernels: Vec<CompiledKernel>,
    /// What is wrong with it, in one or more lines each.
    pub problems: Vec<String>,
}

/// A kernel and what it takes of a multiprocessor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompiledKernel {
    pub name: String,
    pub launched: bool,
    pub registers: usize,
    /// Bytes that did not fit in registers, stored and loaded.
    pub spilled: usize,
    /// Bytes of shared memory that it declares, and the most that a launch added.
    pub shared: usize,
    pub dynamic: usize,
}

/// What became of one compilation.
struct Program {
    key: (String, Vec<String>),
    architecture: String,
    options: Vec<String>,
    /// None if it does not compile.
    entries: Option<Vec<Entry>>,
    resources: Vec<CompiledKernel>,
    problems: BTreeSet<String>,
}

impl Program {
    /// The index of a kernel that the host looks up.
    fn find(&mut self, kernel: &str) -> Option<usize> {
        let entries = self.entries.as_ref()?;
        let index = entries.iter().position(|entry| entry.name == kernel);
        if index.is_none() {
            self.problems.insert(format!("has no kernel `{kernel}`, which the host launches"));
        }
        index
    }

    /// Checks a launch with blocks of `size` threads and `dynamic` bytes of shared memory, of which
    /// a block may have `limit` in all.
    fn launch(&mut self, kernel: usize, size: usize, dynamic: usize, limit: usize, arguments: &[Argument]) {
        let entry = self.entries.as_ref().and_then(|entries| entries.get(kernel));
        let (Some(entry), Some(resources)) = (entry, self.resources.get_mut(kernel)) else { return };
        let name = &entry.name;
        resources.launched = true;
        resources.dynamic = resources.dynamic.max(dynamic);
        let shared = resources.shared + dynamic;
        let problems = &mut self.problems;
        problems.extend(mismatch(entry, arguments));
        if entry.threads.is_some_and(|threads| threads < size) {
            problems.insert(format!("`{name}` is launched with {size} threads per block, which is too many"));
        }
        if shared > limit {
            problems.insert(format!("`{name}` needs {shared} bytes of shared memory, but a block has {limit}"));
        }
    }
}

struct Card {
    name: String,
    architecture: (u32, u32),
    compiler: Compiler,
    /// Builds of one program that are compiled; the others are checked against the first.
    builds_max: usize,
    left_out: Cell<usize>,
    programs: RefCell<Vec<Program>>,
    /// The next free address.
    free: Cell<u64>,
}

/// The card, and devices on it: one uses all its tensor cores, one the portable kernels only, one
/// the tensor-core kernels of devices that have none of their own.
pub struct CompileOnly {
    card: Rc<Card>,
    devices: [Gpu; 3],
}

impl CompileOnly {
    /// Compiles `builds_max` builds of a program, the first that ops ask for. An error says that
    /// there is no compiler.
    pub fn open(architecture: (u32, u32), builds_max: usize) -> Result<Self, String> {
        let card = Rc::new(Card {
            name: format!("sm_{}{} (compiles only)", architecture.0, architecture.1),
            architecture,
            compiler: Compiler::open()?,
            builds_max,
            left_out: Cell::new(0),
            programs: RefCell::default(),
            free: Cell::new(ALIGNMENT as u64),
        });
        let selector = Selector { api: Api::Cuda, index: 0 };
        let units = [MatrixUnits::All, MatrixUnits::Portable, MatrixUnits::MmaSync];
        let devices = units.map(|units| Gpu::from_parts(Rc::clone(&card) as _, selector, units));
        // Nothing is computed, so the probe fails; its kernel is compiled and looked up anyway.
        if probe::check(&devices[0]).is_ok() {
            return Err("a card that computes nothing passed the probe".to_string());
        }
        Ok(Self { card, devices })
    }

    /// The devices whose ops are to be run.
    pub fn devices(&self) -> &[Gpu; 3] {
        &self.devices
    }

    /// Builds that were not compiled.
    pub fn left_out(&self) -> usize {
        self.card.left_out.get()
    }

    /// All programs that the ops asked for.
    pub fn programs(&self) -> Vec<CompiledProgram> {
        let names: BTreeMap<usize, &str> =
            self.devices.iter().flat_map(Gpu::programs).map(|(name, program)| (program.0 as usize, name)).collect();
        let programs = self.card.programs.borrow();
        let named = programs.iter().enumerate();
        named
            .map(|(index, program)| CompiledProgram {
                name: names.get(&index).copied().unwrap_or("a program").to_string(),
                architecture: program.architecture.clone(),
                options: program.options.clone(),
                kernels: program.resources.clone(),
                problems: program.problems.iter().cloned().collect(),
            })
            .collect()
    }
}

/// Of memory, as the driver aligns it.
const ALIGNMENT: usize = 256;

/// Bytes of shared memory that a block may have.
fn shared_limit(architecture: (u32, u32)) -> usize {
    if architecture == (8, 0) { 163 << 10 } else { 227 << 10 }
}

impl Card {
    /// Compiles, and keeps a failure as a problem of the program.
    fn build(&self, source: &str, line: &[String], options: &[String]) -> Program {
        let verbose = [line, &["--ptxas-options=-v".to_string()]].concat();
        let architecture = line[0].rsplit('=').next().unwrap_or_default().to_string();
        let mut program = Program {
            key: (source.to_string(), line.to_vec()),
            architecture,
            options: options.to_vec(),
            entries: None,
            resources: Vec::new(),
            problems: BTreeSet::new(),
        };
        match self.compiler.machine_code(source, &verbose) {
            Err(error) => {
                program.problems.insert(format!("does not compile: {error}"));
            }
            Ok((code, log)) => match entries(&code) {
                None => {
                    program.problems.insert("its machine code is not a cubin".to_string());
                }
                Some(entries) => {
                    program.resources = entries.iter().map(|entry| resources(&entry.name, &log)).collect();
                    program.entries = Some(entries);
                }
            },
        }
        program
    }
}

/// Registers, spills and shared memory of a kernel, from what the assembler said.
fn resources(kernel: &str, log: &str) -> CompiledKernel {
    let mark = format!("Compiling entry function '{kernel}'");
    let own = log.split_once(&mark).map_or("", |(_, rest)| rest);
    let own = own.split("Compiling entry function").next().unwrap_or_default();
    // The number in front of some words.
    let number = |words: &str| {
        let before = own.split_once(words).map_or("", |(before, _)| before);
        before.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
    };
    CompiledKernel {
        name: kernel.to_string(),
        launched: false,
        registers: number(" registers"),
        spilled: number(" bytes spill stores") + number(" bytes spill loads"),
        shared: number(" bytes smem"),
        dynamic: 0,
    }
}

/// Why these arguments are not those of the kernel.
fn mismatch(entry: &Entry, arguments: &[Argument]) -> Option<String> {
    if entry.parameters.len() != arguments.len() {
        let (takes, given) = (entry.parameters.len(), arguments.len());
        return Some(format!("`{}` takes {takes} parameters, but the host passes {given}", entry.name));
    }
    let fits = |(&bytes, argument): (&usize, &Argument)| match argument {
        Argument::Memory(..) | Argument::U64(_) => bytes == 8,
        Argument::U32(_) | Argument::F32(_) => bytes == 4,
        Argument::Descriptor(words) => bytes > 8 && bytes <= size_of_val(words),
    };
    let wrong = entry.parameters.iter().zip(arguments).position(|pair| !fits(pair))?;
    let (bytes, given) = (entry.parameters[wrong], &arguments[wrong]);
    Some(format!("parameter {wrong} of `{}` has {bytes} bytes, but the host passes {given:?}", entry.name))
}

impl Runtime for Card {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        ALIGNMENT
    }

    fn architecture(&self) -> Option<(u32, u32)> {
        Some(self.architecture)
    }

    fn multiprocessors(&self) -> usize {
        132
    }

    fn allocate(&self, bytes: usize, _: Lifetime) -> Answer<Handle> {
        let address = self.free.get();
        self.free.set(address + bytes.next_multiple_of(ALIGNMENT) as u64);
        Ok(Handle(address))
    }

    fn release(&self, _memory: Handle) {}

    fn zero(&self, _memory: Handle, _bytes: usize) -> Answer<()> {
        Ok(())
    }

    fn write(&self, _memory: Handle, _bytes: &[u8]) -> Answer<()> {
        Ok(())
    }

    fn read(&self, bytes: &mut [u8], _memory: Handle) -> Answer<()> {
        bytes.fill(0);
        Ok(())
    }

    fn finish(&self) -> Answer<()> {
        Ok(())
    }

    fn compile(&self, source: &str, language: Language, options: &[String]) -> Answer<Compiled> {
        let line = command_line(self.architecture, language, options);
        let of_source = |program: &&Program| program.key.0 == source;
        let known = self.programs.borrow().iter().position(|program| of_source(&program) && program.key.1 == line);
        let builds = self.programs.borrow().iter().filter(of_source).count();
        if known.is_none() && builds >= self.builds_max {
            self.left_out.set(self.left_out.get() + 1);
            let first = self.programs.borrow().iter().position(|program| of_source(&program));
            return first.map(|index| Compiled(index as u64)).ok_or("no build of a program is compiled".to_string());
        }
        let index = known.unwrap_or_else(|| {
            let program = self.build(source, &line, options);
            let mut programs = self.programs.borrow_mut();
            programs.push(program);
            programs.len() - 1
        });
        Ok(Compiled(index as u64))
    }

    /// The program and the kernel in it, as 32 bits each.
    fn kernel(&self, program: Compiled, name: &str) -> Answer<Kernel> {
        let index = self.programs.borrow_mut()[program.0 as usize].find(name);
        Ok(Kernel(program.0 << 32 | index.map_or(u64::from(u32::MAX), |index| index as u64)))
    }

    fn launch(&self, kernel: Kernel, _groups: usize, size: usize, dynamic: usize, args: &[Argument]) -> Answer<()> {
        let (program, index) = ((kernel.0 >> 32) as usize, kernel.0 as u32 as usize);
        let limit = shared_limit(self.architecture);
        self.programs.borrow_mut()[program].launch(index, size, dynamic, limit, args);
        Ok(())
    }

    /// Of no address: no copy is made.
    fn matrix_descriptor(&self, _memory: Handle, _offset: usize, _matrix: &ByteMatrix) -> Answer<[u64; 16]> {
        Ok([0; 16])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compiling entry function 'run' for 'sm_80'
ptxas         .     64 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 2048 bytes smem, 380 bytes cmem[0]
";

    fn program() -> Program {
        let entry = Entry { name: "run".to_string(), parameters: vec![8, 4, 72], threads: Some(256) };
        Program {
            key: (String::new(), Vec::new()),
            architecture: "sm_80".to_string(),
            options: Vec::new(),
            entries: Some(vec![entry]),
            resources: vec![resources("run", LOG)],
            problems: BTreeSet::new(),
        }
    }

    const RIGHT: [Argument; 3] = [Argument::Memory(Handle(256), 0), Argument::F32(1.0), Argument::Descriptor([0; 16])];

    #[test]
    fn resources_are_those_of_the_kernel() {
        let run = resources("run", LOG);
        assert_eq!((run.registers, run.spilled, run.shared), (255, 64, 2048));
        assert_eq!(resources("other", LOG).registers, 8);
    }

    #[test]
    fn a_launch_that_fits_is_no_problem() {
        let mut program = program();
        assert_eq!(program.find("run"), Some(0));
        program.launch(0, 256, 1024, 4096, &RIGHT);
        assert!(program.problems.is_empty() && program.resources[0].launched, "{:?}", program.problems);
        assert_eq!(program.resources[0].dynamic, 1024);
    }

    #[test]
    fn what_does_not_fit_is_a_problem() {
        let said = |act: &dyn Fn(&mut Program)| {
            let mut program = program();
            act(&mut program);
            assert_eq!(program.problems.len(), 1, "{:?}", program.problems);
            program.problems.pop_first().unwrap_or_default()
        };
        assert!(said(&|program| assert_eq!(program.find("walk"), None)).contains("no kernel `walk`"));
        assert!(said(&|program| program.launch(0, 256, 0, 4096, &RIGHT[..2])).contains("passes 2"));
        let wrong = [RIGHT[0], Argument::U64(1), RIGHT[2]];
        assert!(said(&|program| program.launch(0, 256, 0, 4096, &wrong)).contains("parameter 1 of `run`"));
        assert!(said(&|program| program.launch(0, 512, 0, 4096, &RIGHT)).contains("512 threads"));
        assert!(said(&|program| program.launch(0, 256, 2049, 4096, &RIGHT)).contains("4097 bytes"));
    }
}
