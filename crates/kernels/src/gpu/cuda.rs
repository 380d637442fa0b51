//! CUDA: the driver for memory and launches, NVRTC for compiling. Both are loaded at run time, and
//! compiled programs are kept on disk (`cuda/programs.rs`).
//!
//! Driver calls apply to the context that is current on the calling thread, so a card makes its own
//! current before every call (`cuda/context.rs`): two open cards do not interfere.

mod compile_only;
mod compiler;
mod context;
mod cubin;
mod free_memory;
mod mark;
mod pages;
mod programs;
mod ranges;
mod reads;

pub use compile_only::{CompileOnly, CompiledKernel, CompiledProgram};

use super::devices::Listing;
use super::library::{functions, open};
use super::runtime::{
    Answer, Argument, ByteMatrix, Compiled, Handle, Kernel, Language, LockedCopy, Mark, PageLock, Runtime, Source,
};
use crate::heap::Lifetime;
use compiler::{Compiler, command_line};
use context::Context;
use pages::Ahead;
use programs::{Programs, Request};
use ranges::{Access, Properties, Ranges};
use reads::{Reads, Slot};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;

type Status = c_int;
type Object = *mut c_void;

functions!(Driver {
    init = c"cuInit" (u32) -> Status;
    version = c"cuDriverGetVersion" (*mut c_int) -> Status;
    count = c"cuDeviceGetCount" (*mut c_int) -> Status;
    device = c"cuDeviceGet" (*mut c_int, c_int) -> Status;
    device_name = c"cuDeviceGetName" (*mut c_char, c_int, c_int) -> Status;
    attribute = c"cuDeviceGetAttribute" (*mut c_int, c_int, c_int) -> Status;
    memory = c"cuDeviceTotalMem_v2" (*mut usize, c_int) -> Status;
    bus_address = c"cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int) -> Status;
    retain = c"cuDevicePrimaryCtxRetain" (*mut Object, c_int) -> Status;
    release = c"cuDevicePrimaryCtxRelease_v2" (c_int) -> Status;
    set_context = c"cuCtxSetCurrent" (Object) -> Status;
    synchronize = c"cuCtxSynchronize" () -> Status;
    granularity = c"cuMemGetAllocationGranularity" (*mut usize, *const Properties, c_int) -> Status;
    reserve = c"cuMemAddressReserve" (*mut u64, usize, usize, u64, u64) -> Status;
    unreserve = c"cuMemAddressFree" (u64, usize) -> Status;
    create_memory = c"cuMemCreate" (*mut u64, usize, *const Properties, u64) -> Status;
    release_memory = c"cuMemRelease" (u64) -> Status;
    map_memory = c"cuMemMap" (u64, usize, usize, u64, u64) -> Status;
    unmap_memory = c"cuMemUnmap" (u64, usize) -> Status;
    set_access = c"cuMemSetAccess" (u64, usize, *const Access, usize) -> Status;
    fill = c"cuMemsetD8Async" (u64, u8, usize, Object) -> Status;
    to_device = c"cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Object) -> Status;
    to_host = c"cuMemcpyDtoH_v2" (*mut c_void, u64, usize) -> Status;
    to_host_later = c"cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, Object) -> Status;
    allocate_host = c"cuMemAllocHost_v2" (*mut *mut c_void, usize) -> Status;
    free_host = c"cuMemFreeHost" (*mut c_void) -> Status;
    create_event = c"cuEventCreate" (*mut Object, u32) -> Status;
    destroy_event = c"cuEventDestroy_v2" (Object) -> Status;
    record_event = c"cuEventRecord" (Object, Object) -> Status;
    wait_for_event = c"cuEventSynchronize" (Object) -> Status;
    create_stream = c"cuStreamCreate" (*mut Object, u32) -> Status;
    destroy_stream = c"cuStreamDestroy_v2" (Object) -> Status;
    wait_in_stream = c"cuStreamWaitEvent" (Object, Object, u32) -> Status;
    lock_pages = c"cuMemHostRegister_v2" (*mut c_void, usize, u32) -> Status;
    unlock_pages = c"cuMemHostUnregister" (*mut c_void) -> Status;
    load_module = c"cuModuleLoadData" (*mut Object, *const c_void) -> Status;
    unload_module = c"cuModuleUnload" (Object) -> Status;
    function = c"cuModuleGetFunction" (*mut Object, Object, *const c_char) -> Status;
    function_attribute = c"cuFuncSetAttribute" (Object, c_int, c_int) -> Status;
    launch = c"cuLaunchKernel" (Object, u32, u32, u32, u32, u32, u32, u32, Object, *mut *mut c_void, *mut *mut c_void) -> Status;
    error_text = c"cuGetErrorString" (Status, *mut *const c_char) -> Status;
    tensor_map = c"cuTensorMapEncodeTiled" (*mut c_void, c_int, u32, u64, *const u64, *const u64, *const u32, *const u32, c_int, c_int, c_int, c_int) -> Status;
});

/// The default stream: commands run in order.
const STREAM: Object = null_mut();

mod attribute {
    pub(super) const MULTIPROCESSORS: i32 = 16;
    pub(super) const MAJOR: i32 = 75;
    pub(super) const MINOR: i32 = 76;
    pub(super) const VIRTUAL_MEMORY: i32 = 102;
    /// Function attribute: bytes of dynamic shared memory it may request.
    pub(super) const DYNAMIC_MEMORY: i32 = 8;
}

impl Driver {
    fn open() -> Result<Self, String> {
        let library = open(&["libcuda.so.1", "libcuda.so", "nvcuda.dll"]).ok_or("no CUDA driver found")?;
        let driver = Self::load(library)?;
        // SAFETY: the one argument is flags, of which none exist; the call may be repeated.
        driver.check("cuInit", unsafe { (driver.init)(0) })?;
        Ok(driver)
    }

    fn check(&self, what: &str, status: Status) -> Answer<()> {
        if status == 0 {
            return Ok(());
        }
        let mut text = null();
        // SAFETY: `text` has room for the pointer; the driver points it at a constant, or leaves it
        // null.
        unsafe { (self.error_text)(status, &raw mut text) };
        let text = if text.is_null() {
            "unknown error".into()
        } else {
            // SAFETY: not null, so a constant string of the driver's, which ends with a zero.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(format!("{what} failed: {text} ({status})"))
    }

    fn devices(&self) -> Answer<Vec<c_int>> {
        let mut count = 0;
        // SAFETY: `count` has room for the number.
        self.check("cuDeviceGetCount", unsafe { (self.count)(&raw mut count) })?;
        (0..count)
            .map(|index| {
                let mut device = 0;
                // SAFETY: `device` has room for the number; the driver refuses an index that is not
                // there.
                self.check("cuDeviceGet", unsafe { (self.device)(&raw mut device, index) }).map(|()| device)
            })
            .collect()
    }

    fn attribute(&self, device: c_int, which: i32) -> Answer<usize> {
        let mut value = 0;
        // SAFETY: `value` has room for the number; the driver refuses attributes that it does not
        // know.
        self.check("cuDeviceGetAttribute", unsafe { (self.attribute)(&raw mut value, which, device) })?;
        Ok(usize::try_from(value).unwrap_or(0))
    }

    fn name(&self, device: c_int) -> String {
        let mut bytes = [0u8; 128];
        // SAFETY: the size is less than that of the array; the driver ends the name with a zero.
        let status = unsafe { (self.device_name)(bytes.as_mut_ptr().cast(), 127, device) };
        let text = if status == 0 { CStr::from_bytes_until_nul(&bytes).ok() } else { None };
        text.map_or("unknown".to_string(), |text| text.to_string_lossy().into_owned())
    }

    /// `0000:1b:00.0`
    fn bus_address(&self, device: c_int) -> Option<CString> {
        let mut bytes = [0u8; 32];
        // SAFETY: the size is less than that of the array; the driver ends the text with a zero.
        let status = unsafe { (self.bus_address)(bytes.as_mut_ptr().cast(), 31, device) };
        CStr::from_bytes_until_nul(&bytes).ok().filter(|_| status == 0).map(CStr::to_owned)
    }

    /// An event of the current context.
    fn event(&self) -> Answer<Object> {
        const NO_TIMING: u32 = 2;
        let mut event = null_mut();
        // SAFETY: `event` has room for the handle.
        self.check("cuEventCreate", unsafe { (self.create_event)(&raw mut event, NO_TIMING) })?;
        Ok(event)
    }

    fn architecture(&self, device: c_int) -> Answer<(u32, u32)> {
        let [major, minor] = [attribute::MAJOR, attribute::MINOR].map(|which| self.attribute(device, which));
        Ok((major? as u32, minor? as u32))
    }
}

pub(super) fn list() -> Result<Vec<Listing>, String> {
    let driver = Driver::open()?;
    let mut version = 0;
    // SAFETY: `version` has room for the number.
    unsafe { (driver.version)(&raw mut version) };
    let compiler = Compiler::open().map(|compiler| compiler.version());
    let mut listings = Vec::new();
    for (index, device) in driver.devices()?.into_iter().enumerate() {
        let (major, minor) = driver.architecture(device)?;
        let mut memory = 0;
        // SAFETY: `memory` has room for the number, and the device exists.
        unsafe { (driver.memory)(&raw mut memory, device) };
        listings.push(Listing {
            selector: format!("cuda:{index}"),
            name: driver.name(device),
            runtime: format!(
                "CUDA {}.{}, sm_{major}{minor}, {}",
                version / 1000,
                version % 1000 / 10,
                compiler.as_deref().unwrap_or("no NVRTC")
            ),
            memory: memory as u64,
            memory_free: driver.bus_address(device).and_then(|address| free_memory::of(&address)),
            units: driver.attribute(device, attribute::MULTIPROCESSORS)? as u32,
            architecture: Some((major, minor)),
            objection: compiler.as_ref().err().cloned(),
        });
    }
    Ok(listings)
}

/// An open card. Its handles are pointers, so it stays on the thread that opened it.
pub(super) struct Cuda {
    /// Used only through [`Cuda::driver`], which makes the context current.
    functions: Arc<Driver>,
    context: Arc<Context>,
    programs: Programs,
    name: String,
    architecture: (u32, u32),
    multiprocessors: usize,
    modules: RefCell<Vec<Object>>,
    reads: RefCell<Reads>,
    ahead: RefCell<Ahead>,
    /// Taken when the card is closed.
    ranges: RefCell<Option<Ranges>>,
}

impl Cuda {
    pub(super) fn open(index: usize) -> Result<Self, String> {
        let driver = Driver::open()?;
        let devices = driver.devices()?;
        let Some(&device) = devices.get(index) else {
            return Err(super::devices::no_such("CUDA", index, devices.len()));
        };
        let compiler = Compiler::open()?;
        if driver.attribute(device, attribute::VIRTUAL_MEMORY)? == 0 {
            return Err(format!("{} has no virtual memory: its driver is too old", driver.name(device)));
        }
        let mut handle = null_mut();
        // SAFETY: `handle` has room for the primary context of an existing device.
        driver.check("cuDevicePrimaryCtxRetain", unsafe { (driver.retain)(&raw mut handle, device) })?;
        // SAFETY: retained just now, and released by `Context` alone; the functions are those of
        // the driver, whose library is never closed.
        let context = unsafe { Context::new(handle, device, driver.set_context, driver.release) };
        driver.check("cuCtxSetCurrent", context.make_current())?;
        // SAFETY: the context was made current just now.
        let ranges = unsafe { Ranges::reserve(&driver, device)? };
        Ok(Self {
            name: format!("cuda:{index} ({})", driver.name(device)),
            architecture: driver.architecture(device)?,
            multiprocessors: driver.attribute(device, attribute::MULTIPROCESSORS)?,
            modules: RefCell::default(),
            reads: RefCell::default(),
            ahead: RefCell::default(),
            ranges: RefCell::new(Some(ranges)),
            functions: Arc::new(driver),
            context: Arc::new(context),
            programs: Programs::new(compiler),
        })
    }

    /// The number of a slot for a read of so many bytes: one that is free, or a new one.
    fn read_slot(&self, bytes: usize) -> Answer<usize> {
        let bytes = reads::rounded(bytes);
        if let Some(number) = self.reads.borrow_mut().take(bytes) {
            return Ok(number);
        }
        let (driver, mut host) = (self.driver()?, null_mut());
        let event = driver.event()?;
        // SAFETY: `host` has room for the address.
        let status = unsafe { (driver.allocate_host)(&raw mut host, bytes) };
        driver.check(&format!("cuMemAllocHost of {bytes} bytes"), status)?;
        Ok(self.reads.borrow_mut().add(Slot { host, event, bytes }))
    }

    fn load(&self, code: &[u8]) -> Answer<Object> {
        let (driver, mut module) = (self.driver()?, null_mut());
        // SAFETY: `module` has room for the handle; the code is the compiler's, whole, and carries
        // its own length.
        let status = unsafe { (driver.load_module)(&raw mut module, code.as_ptr().cast()) };
        driver.check("cuModuleLoadData", status)?;
        self.modules.borrow_mut().push(module);
        Ok(module)
    }

    /// The driver's functions, with this card's context current on this thread.
    fn driver(&self) -> Answer<&Driver> {
        let status = self.context.make_current();
        self.functions.check("cuCtxSetCurrent", status)?;
        Ok(&self.functions)
    }
}

impl Runtime for Cuda {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        256
    }

    fn architecture(&self) -> Option<(u32, u32)> {
        Some(self.architecture)
    }

    fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    fn allocate(&self, bytes: usize, lifetime: Lifetime) -> Answer<Handle> {
        let (driver, mut ranges) = (self.driver()?, self.ranges.borrow_mut());
        let ranges = ranges.as_mut().ok_or("the card is closed")?;
        // SAFETY: the context was made current just now.
        Ok(Handle(unsafe { ranges.take(driver, bytes, lifetime)? }))
    }

    fn release(&self, memory: Handle) {
        // Without its context the card is gone, along with its memory.
        let Ok(driver) = self.driver() else { return };
        // SAFETY: the context was made current just now. If it has failed, nothing is copied.
        let _ = unsafe { self.ahead.borrow_mut().arrive(driver, memory) };
        if let Some(ranges) = &mut *self.ranges.borrow_mut() {
            ranges.give(memory.0);
        }
    }

    fn zero(&self, memory: Handle, bytes: usize) -> Answer<()> {
        let driver = self.driver()?;
        // SAFETY: the caller's memory of this context has as many bytes.
        driver.check("cuMemsetD8Async", unsafe { (driver.fill)(memory.0, 0, bytes, STREAM) })
    }

    fn write(&self, memory: Handle, bytes: &[u8]) -> Answer<()> {
        let driver = self.driver()?;
        // SAFETY: the caller's memory of this context has as many bytes. The host bytes are not
        // locked: the driver has copied them when the call returns, and the device writes them in
        // the order of the stream.
        let status = unsafe { (driver.to_device)(memory.0, bytes.as_ptr().cast(), bytes.len(), STREAM) };
        driver.check("cuMemcpyHtoDAsync", status)
    }

    fn read(&self, bytes: &mut [u8], memory: Handle) -> Answer<()> {
        let driver = self.driver()?;
        // SAFETY: the caller's memory of this context has as many bytes; the call waits until they
        // are in `bytes`, which is borrowed exclusively.
        let status = unsafe { (driver.to_host)(bytes.as_mut_ptr().cast(), memory.0, bytes.len()) };
        driver.check("cuMemcpyDtoH", status)
    }

    fn begin_read(&self, memory: Handle, bytes: usize) -> Answer<Option<usize>> {
        if bytes > reads::BYTES_MAX {
            return Ok(None);
        }
        let number = self.read_slot(bytes)?;
        let (driver, slot) = (self.driver()?, self.reads.borrow().slot(number));
        // SAFETY: the caller's memory of this context has as many bytes, and the slot's host memory
        // at least as many; it is pinned and stays until the card is closed. Only the holder of the
        // number reads it, after the event.
        let status = unsafe { (driver.to_host_later)(slot.host, memory.0, bytes, STREAM) };
        driver.check("cuMemcpyDtoHAsync", status)?;
        // SAFETY: an event of this context, which stays until the card is closed.
        driver.check("cuEventRecord", unsafe { (driver.record_event)(slot.event, STREAM) })?;
        Ok(Some(number))
    }

    fn finish_read(&self, number: usize, bytes: &mut [u8]) -> Answer<()> {
        let (driver, slot) = (self.driver()?, self.reads.borrow().slot(number));
        assert!(bytes.len() <= slot.bytes, "as many bytes as were announced");
        // SAFETY: an event of this context, recorded after the copy into the slot.
        driver.check("cuEventSynchronize", unsafe { (driver.wait_for_event)(slot.event) })?;
        // SAFETY: the slot has as many bytes, which the device has written, and no copy into it is
        // under way: that would need its number, which the caller holds.
        bytes.copy_from_slice(unsafe { std::slice::from_raw_parts(slot.host.cast::<u8>(), bytes.len()) });
        Ok(())
    }

    fn release_read(&self, number: usize) {
        self.reads.borrow_mut().give(number);
    }

    unsafe fn lock_pages(&self, host: *mut u8, bytes: usize) -> Option<Box<dyn PageLock>> {
        self.driver().ok()?;
        // SAFETY: the context was made current just now; the pages stay (the caller's promise).
        unsafe { pages::lock(&self.functions, &self.context, host, bytes) }
    }

    unsafe fn copy_locked(&self, copy: LockedCopy, bytes: usize) -> Answer<()> {
        let driver = self.driver()?;
        // SAFETY: the context was made current just now; memory of this context and locked pages
        // with as many bytes, which nobody uses until the copy is done (the caller's promise).
        unsafe {
            match copy {
                LockedCopy::ToDevice(host, memory) => {
                    driver.check("cuMemcpyHtoDAsync", (driver.to_device)(memory.0, host.cast(), bytes, STREAM))
                }
                LockedCopy::Ahead(host, memory) => self.ahead.borrow_mut().copy(driver, host, memory, bytes),
                LockedCopy::ToHost(host, memory) => {
                    driver.check("cuMemcpyDtoHAsync", (driver.to_host_later)(host.cast(), memory.0, bytes, STREAM))
                }
            }
        }
    }

    fn arrive(&self, memory: Handle) -> Answer<()> {
        let driver = self.driver()?;
        // SAFETY: the context was made current just now.
        unsafe { self.ahead.borrow_mut().arrive(driver, memory) }
    }

    fn mark(&self) -> Answer<Option<Box<dyn Mark>>> {
        let event = self.driver()?.event()?;
        // SAFETY: an event of this context, made for the mark alone.
        let mark = unsafe { mark::Recorded::new(&self.functions, &self.context, event) };
        // SAFETY: an event of this context, which is current.
        self.functions.check("cuEventRecord", unsafe { (self.functions.record_event)(event, STREAM) })?;
        Ok(Some(Box::new(mark)))
    }

    fn finish(&self) -> Answer<()> {
        let driver = self.driver()?;
        // SAFETY: takes nothing; waits for the commands of this context.
        driver.check("cuCtxSynchronize", unsafe { (driver.synchronize)() })
    }

    fn compile(&self, source: &str, language: Language, options: &[String]) -> Answer<Compiled> {
        let line = command_line(self.architecture, language, options);
        let request = Request { source: source.to_string(), line };
        let made = self.programs.code(&request)?;
        let module = match self.load(&made.code) {
            // Machine code from the disk that the driver refuses is compiled again.
            Err(_) if made.from_cache => self.load(&self.programs.code_again(&request)?)?,
            loaded => loaded?,
        };
        Ok(Compiled(module as usize as u64))
    }

    fn compile_ahead(&self, programs: Vec<Source>) {
        let request = |source: Source| {
            let line = command_line(self.architecture, source.language, &source.options);
            Request { source: source.text, line }
        };
        self.programs.ahead(programs.into_iter().map(request).collect());
    }

    fn kernel(&self, program: Compiled, name: &str) -> Answer<Kernel> {
        let text = CString::new(name).map_err(|error| error.to_string())?;
        let (driver, mut function) = (self.driver()?, null_mut());
        // SAFETY: `function` has room for the handle; `compile` loaded the module into this
        // context, and it stays until the card is closed; the name ends with a zero.
        let status = unsafe { (driver.function)(&raw mut function, program.0 as usize as Object, text.as_ptr()) };
        driver.check(&format!("cuModuleGetFunction of {name}"), status)?;
        Ok(Kernel(function as usize as u64))
    }

    fn launch(&self, kernel: Kernel, groups: usize, size: usize, dynamic: usize, arguments: &[Argument]) -> Answer<()> {
        /// One slot per argument, aligned for the largest.
        #[repr(C, align(64))]
        struct ArgumentSlot([u64; 16]);
        let (driver, function) = (self.driver()?, kernel.0 as usize as Object);
        let groups = i32::try_from(groups).map_err(|_| "too many groups")? as u32;
        if dynamic > 0 {
            // SAFETY: a function of a module that this context has loaded; the driver refuses more
            // memory than the device has.
            let status = unsafe { (driver.function_attribute)(function, attribute::DYNAMIC_MEMORY, dynamic as c_int) };
            driver.check("cuFuncSetAttribute", status)?;
        }
        let mut slots: Vec<ArgumentSlot> = arguments
            .iter()
            .map(|argument| {
                let mut slot = ArgumentSlot([0; 16]);
                match argument {
                    Argument::Memory(memory, offset) => slot.0[0] = memory.0 + *offset as u64,
                    Argument::U32(x) => slot.0[0] = u64::from_le_bytes(padded(x.to_le_bytes())),
                    Argument::U64(x) => slot.0[0] = *x,
                    Argument::F32(x) => slot.0[0] = u64::from_le_bytes(padded(x.to_le_bytes())),
                    Argument::Descriptor(words) => slot.0 = *words,
                }
                slot
            })
            .collect();
        let mut pointers: Vec<*mut c_void> = slots.iter_mut().map(|slot| (&raw mut *slot).cast()).collect();
        // SAFETY: a function of a module that this context has loaded. One pointer per argument in
        // the kernel's order, each to a slot of 128 bytes, aligned for all and larger than any;
        // the driver copies them before it returns. What the kernel does with its memory is its
        // op's to keep inside.
        let status = unsafe {
            let (size, dynamic) = (size as u32, dynamic as u32);
            (driver.launch)(function, groups, 1, 1, size, 1, 1, dynamic, STREAM, pointers.as_mut_ptr(), null_mut())
        };
        driver.check("cuLaunchKernel", status)
    }

    fn matrix_descriptor(&self, memory: Handle, offset: usize, matrix: &ByteMatrix) -> Answer<[u64; 16]> {
        const BYTES: c_int = 0;
        const NO_INTERLEAVE: c_int = 0;
        const SWIZZLE_128: c_int = 3;
        const L2_PROMOTION_256: c_int = 3;
        const ZERO_FILL: c_int = 0;
        #[repr(C, align(64))]
        struct Map([u64; 16]);
        let mut map = Map([0; 16]);
        let sizes = [matrix.width as u64, matrix.rows as u64];
        let strides = [matrix.stride as u64];
        let boxes = [matrix.box_width as u32, matrix.box_rows as u32];
        let steps = [1u32, 1];
        let driver = self.driver()?;
        // SAFETY: `map` has the 128 bytes of a descriptor, aligned to 64. Two dimensions, and
        // arrays of two sizes, one stride, two boxes and two steps; the driver checks their values,
        // and a copy with the descriptor reads zeros outside of the matrix.
        let status = unsafe {
            (driver.tensor_map)(
                (&raw mut map).cast(),
                BYTES,
                2,
                memory.0 + offset as u64,
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                NO_INTERLEAVE,
                SWIZZLE_128,
                L2_PROMOTION_256,
                ZERO_FILL,
            )
        };
        driver.check("cuTensorMapEncodeTiled", status)?;
        Ok(map.0)
    }
}

fn padded(bytes: [u8; 4]) -> [u8; 8] {
    let mut whole = [0; 8];
    whole[..4].copy_from_slice(&bytes);
    whole
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Without its context the card is gone, along with its modules.
        let Ok(driver) = self.driver() else { return };
        // SAFETY: this context, which is current, loaded the modules and made the slots; each is
        // unloaded or freed once, after the device has finished. The context itself is released
        // after this, by its own drop.
        unsafe {
            (driver.synchronize)();
            self.ahead.take().destroy(driver);
            for slot in self.reads.take().into_slots() {
                (driver.destroy_event)(slot.event);
                (driver.free_host)(slot.host);
            }
            for module in self.modules.take() {
                (driver.unload_module)(module);
            }
            if let Some(ranges) = self.ranges.take() {
                ranges.free(driver);
            }
        }
    }
}
