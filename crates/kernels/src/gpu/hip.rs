//! HIP: AMD's runtime for memory and launches, hipRTC for compiling. Both are loaded at run time
//! and compiled programs are kept on disk (`gpu/code_cache.rs`).
//!
//! Calls apply to the device that is current on the calling thread, so a card makes itself current
//! before every call. Everything is queued on the null stream, in call order.

pub(super) mod child;
mod compiler;
mod library;
mod listing;
mod mark;
mod memory;
mod pages;
pub(super) mod process;
pub(super) mod settings;
mod system;
mod target;

pub(super) use child::{configure, serve_as_compiler};
pub use compiler::{OPTIONS, Request, compile, has_compiler};
pub use listing::expect_device;
pub(super) use listing::{failure, list, serve_as_lister};
pub use process::stop_children_when;
pub use settings::{APPENDING_VARIABLES, HIDING_VARIABLES};
pub use system::{AccessProblem, access_problem};
pub use target::{architecture_of_version, architectures, has_mfma};

use super::devices::{Listing, no_such};
use super::runtime::{Answer, Argument, Compiled, Handle, Kernel, Language, LockedCopy, Mark, PageLock, Runtime};
use crate::heap::Lifetime;
use compiler::Program;
use library::{Functions, Object};
use memory::Freed;
use std::cell::RefCell;
use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;
use target::Target;

/// The default stream: commands run in order.
const STREAM: Object = null_mut();

/// Why a device is not used.
fn objection(functions: &Functions, device: c_int, target: &Target) -> Option<String> {
    let settings = settings::current();
    let kfd = functions.pci_address(device).and_then(|address| system::architecture(system::NODES, address));
    target
        .objection(functions.major())
        .or_else(|| settings.override_objection(target, kfd.as_deref()))
        .or_else(|| settings.option_objection())
        .or_else(|| has_compiler().err())
}

/// The cards, listed in this process.
fn list_here() -> Result<Vec<Listing>, String> {
    let functions = Functions::open()?;
    let version = functions.versions();
    let mut listings = Vec::new();
    for device in 0..functions.device_count()? {
        let target = functions.target(device)?;
        listings.push(Listing {
            selector: format!("hip:{device}"),
            name: functions.name(device),
            runtime: format!("{version}, {target}"),
            memory: functions.total_memory(device)?,
            memory_free: functions.pci_address(device).and_then(|address| system::free_memory(system::PCI, address)),
            units: functions.compute_units(device)? as u32,
            architecture: None,
            objection: objection(&functions, device, &target),
        });
    }
    Ok(listings)
}

/// An open card. Its handles are pointers, so it stays on the thread that opened it.
pub(super) struct Hip {
    functions: Functions,
    device: c_int,
    name: String,
    target: Target,
    units: usize,
    /// With their code, which the runtime reads for as long as a module lives.
    modules: RefCell<Vec<(Object, Vec<u8>)>>,
    freed: RefCell<Freed>,
}

impl Hip {
    pub(super) fn open(index: usize) -> Result<Self, String> {
        listing::check()?;
        let functions = Functions::open()?;
        let count = functions.device_count()?;
        let device = c_int::try_from(index).ok().filter(|device| *device < count);
        let device = device.ok_or_else(|| no_such("HIP", index, count.unsigned_abs() as usize))?;
        let target = functions.target(device)?;
        let name = functions.name(device);
        if let Some(objection) = objection(&functions, device, &target) {
            return Err(format!("{name} is not used: {objection}"));
        }
        Ok(Self {
            name: format!("hip:{index} ({name}, {target})"),
            units: functions.compute_units(device)?,
            functions,
            device,
            target,
            modules: RefCell::default(),
            freed: RefCell::default(),
        })
    }

    /// The runtime's functions, with this card current on this thread.
    fn functions(&self) -> Answer<&Functions> {
        // SAFETY: the device exists; the call takes its number.
        self.functions.check("hipSetDevice", unsafe { (self.functions.set_device)(self.device) })?;
        Ok(&self.functions)
    }

    fn load(&self, code: Vec<u8>) -> Answer<Object> {
        let (functions, mut module) = (self.functions()?, null_mut());
        // SAFETY: `module` has room for the handle; the code is a whole code object, which carries
        // its own length, and is kept until the module is unloaded.
        let status = unsafe { (functions.load_module)(&raw mut module, code.as_ptr().cast()) };
        functions.check("hipModuleLoadData", status)?;
        self.modules.borrow_mut().push((module, code));
        Ok(module)
    }

    /// Returns unused memory to the driver.
    fn return_freed(&self) {
        let Ok(functions) = self.functions() else { return };
        for pointer in self.freed.borrow_mut().take_all() {
            // SAFETY: `allocate` gave the address on this device and its owner has released it; the
            // call waits for the commands that still use it.
            unsafe { (functions.free)(pointer as usize as *mut c_void) };
        }
    }
}

impl Runtime for Hip {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        256
    }

    fn multiprocessors(&self) -> usize {
        self.units
    }

    fn has_mfma(&self) -> bool {
        has_mfma(self.target.architecture())
    }

    fn allocate(&self, bytes: usize, _: Lifetime) -> Answer<Handle> {
        let bytes = memory::rounded(bytes);
        // Commands run in order: whatever still uses the block comes before its next user.
        if let Some(pointer) = self.freed.borrow_mut().take(bytes) {
            return Ok(Handle(pointer));
        }
        let (functions, mut pointer) = (self.functions()?, null_mut());
        // SAFETY: `pointer` has room for the address.
        let mut status = unsafe { (functions.allocate)(&raw mut pointer, bytes) };
        if status == library::OUT_OF_MEMORY {
            self.return_freed();
            // SAFETY: `pointer` has room for the address.
            status = unsafe { (functions.allocate)(&raw mut pointer, bytes) };
        }
        functions.check(&format!("hipMalloc of {bytes} bytes"), status)?;
        if pointer.is_null() {
            return Err(format!("hipMalloc of {bytes} bytes gave no memory and no error"));
        }
        let pointer = pointer as usize as u64;
        self.freed.borrow_mut().register(pointer, bytes);
        Ok(Handle(pointer))
    }

    fn release(&self, memory: Handle) {
        self.freed.borrow_mut().give(memory.0);
    }

    fn zero(&self, memory: Handle, bytes: usize) -> Answer<()> {
        let functions = self.functions()?;
        // SAFETY: the caller's memory on this device has as many bytes.
        functions
            .check("hipMemsetAsync", unsafe { (functions.fill)(memory.0 as usize as *mut c_void, 0, bytes, STREAM) })
    }

    fn write(&self, memory: Handle, bytes: &[u8]) -> Answer<()> {
        let functions = self.functions()?;
        let (to, from) = (memory.0 as usize as *mut c_void, bytes.as_ptr().cast());
        // SAFETY: the caller's memory on this device has as many bytes; the call waits until they
        // are there, so that the host's may change afterwards.
        let status = unsafe { (functions.copy)(to, from, bytes.len(), library::TO_DEVICE) };
        functions.check("hipMemcpy to the device", status)
    }

    fn read(&self, bytes: &mut [u8], memory: Handle) -> Answer<()> {
        let functions = self.functions()?;
        let (to, from) = (bytes.as_mut_ptr().cast(), memory.0 as usize as *const c_void);
        // SAFETY: the caller's memory on this device has as many bytes; the call waits until they
        // are in `bytes`, which is borrowed exclusively.
        let status = unsafe { (functions.copy)(to, from, bytes.len(), library::TO_HOST) };
        functions.check("hipMemcpy to the host", status)
    }

    unsafe fn lock_pages(&self, host: *mut u8, bytes: usize) -> Option<Box<dyn PageLock>> {
        let functions = self.functions().ok()?;
        // SAFETY: the device was made current just now; the pages stay (the caller's promise).
        unsafe { pages::lock(functions, self.device, host, bytes) }
    }

    unsafe fn copy_locked(&self, copy: LockedCopy, bytes: usize) -> Answer<()> {
        let functions = self.functions()?;
        let (to, from, kind) = match copy {
            LockedCopy::ToDevice(host, memory) | LockedCopy::Ahead(host, memory) => {
                (memory.0 as usize as *mut c_void, host.cast::<c_void>(), library::TO_DEVICE)
            }
            LockedCopy::ToHost(host, memory) => {
                (host.cast::<c_void>(), memory.0 as usize as *const c_void, library::TO_HOST)
            }
        };
        // SAFETY: memory on this device and locked pages with as many bytes, which nobody uses
        // until the copy is done (the caller's promise).
        functions.check("hipMemcpyAsync", unsafe { (functions.copy_later)(to, from, bytes, kind, STREAM) })
    }

    fn mark(&self) -> Answer<Option<Box<dyn Mark>>> {
        // SAFETY: the device is made current here.
        let mark = unsafe { mark::Recorded::new(self.functions()?, self.device)? };
        Ok(Some(Box::new(mark)))
    }

    fn finish(&self) -> Answer<()> {
        let functions = self.functions()?;
        // SAFETY: takes nothing; waits for the commands of this device.
        functions.check("hipDeviceSynchronize", unsafe { (functions.synchronize)() })
    }

    fn compile(&self, source: &str, language: Language, options: &[String]) -> Answer<Compiled> {
        if language == Language::Native {
            return Err("HIP compiles only the portable kernels".to_string());
        }
        let request = Request { architecture: self.target.architecture(), source, options };
        let version = self.functions.compiler_version();
        let module = match compiler::compiled(&request, &version)? {
            Program { code, from_cache: false } => self.load(code)?,
            // A code object that the driver refuses is compiled again.
            Program { code, from_cache: true } => {
                self.load(code).or_else(|_| self.load(compiler::compiled_again(&request, &version)?))?
            }
        };
        Ok(Compiled(module as usize as u64))
    }

    fn kernel(&self, program: Compiled, name: &str) -> Answer<Kernel> {
        let text = CString::new(name).map_err(|error| error.to_string())?;
        let (functions, mut function) = (self.functions()?, null_mut());
        // SAFETY: `function` has room for the handle; `compile` loaded the module on this device,
        // and it stays until the card is closed; the name ends with a zero.
        let status = unsafe { (functions.function)(&raw mut function, program.0 as usize as Object, text.as_ptr()) };
        functions.check(&format!("hipModuleGetFunction of {name}"), status)?;
        Ok(Kernel(function as usize as u64))
    }

    fn launch(&self, kernel: Kernel, groups: usize, size: usize, dynamic: usize, arguments: &[Argument]) -> Answer<()> {
        let functions = self.functions()?;
        // The runtime counts the work items of a launch in 32 bits.
        let items = groups.checked_mul(size).filter(|items| u32::try_from(*items).is_ok());
        items.ok_or_else(|| format!("{groups} groups of {size} are more work items than HIP can start"))?;
        let mut places = Vec::with_capacity(arguments.len());
        for argument in arguments {
            // Little-endian: a kernel reads the first four or all eight bytes.
            places.push(match argument {
                Argument::Memory(memory, offset) => memory.0 + *offset as u64,
                Argument::U32(x) => u64::from(*x),
                Argument::U64(x) => *x,
                Argument::F32(x) => u64::from(x.to_bits()),
                Argument::Descriptor(_) => return Err("HIP has no bulk copies".to_string()),
            });
        }
        let mut pointers: Vec<*mut c_void> = places.iter_mut().map(|place| (&raw mut *place).cast()).collect();
        let function = kernel.0 as usize as Object;
        // SAFETY: a function of a module that this device has loaded. One pointer per argument in
        // the kernel's order, each to eight bytes, more than any argument has; the runtime copies
        // them before it returns. What the kernel does with its memory is its op's to keep inside.
        let status = unsafe {
            let (groups, size, dynamic) = (groups as u32, size as u32, dynamic as u32);
            let pointers = pointers.as_mut_ptr();
            (functions.launch)(function, groups, 1, 1, size, 1, 1, dynamic, STREAM, pointers, null_mut())
        };
        functions.check("hipModuleLaunchKernel", status)
    }
}

impl Drop for Hip {
    fn drop(&mut self) {
        // Without its device the card is gone, along with its modules.
        let Ok(functions) = self.functions() else { return };
        // SAFETY: this device loaded the modules; each is unloaded once, after the device has
        // finished, and its code is dropped after that.
        unsafe {
            (functions.synchronize)();
            for (module, code) in self.modules.take() {
                (functions.unload_module)(module);
                drop(code);
            }
        }
        self.return_freed();
    }
}
