//! OpenCL 1.2 and later, of any vendor, through the system's loader. Every call names its context
//! or queue, so several open devices cannot interfere.

use super::devices::Listing;
use super::hip;
use super::host_copies::{LockedPages, Pages};
use super::library::{functions, open};
use super::opencl_probe;
use super::runtime::{Answer, Argument, Compiled, Handle, Kernel, Language, LockedCopy, PageLock, Runtime};
use crate::heap::Lifetime;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_void};
use std::ptr::{null, null_mut};
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

type Object = *mut c_void;
type Status = i32;

functions!(Functions {
    platforms = c"clGetPlatformIDs" (u32, *mut Object, *mut u32) -> Status;
    devices = c"clGetDeviceIDs" (Object, u64, u32, *mut Object, *mut u32) -> Status;
    device_info = c"clGetDeviceInfo" (Object, u32, usize, *mut c_void, *mut usize) -> Status;
    create_context = c"clCreateContext" (*const isize, u32, *const Object, *const c_void, *mut c_void, *mut Status) -> Object;
    create_queue = c"clCreateCommandQueue" (Object, Object, u64, *mut Status) -> Object;
    create_buffer = c"clCreateBuffer" (Object, u64, usize, *mut c_void, *mut Status) -> Object;
    create_part = c"clCreateSubBuffer" (Object, u64, u32, *const c_void, *mut Status) -> Object;
    memory_info = c"clGetMemObjectInfo" (Object, u32, usize, *mut c_void, *mut usize) -> Status;
    release_buffer = c"clReleaseMemObject" (Object) -> Status;
    fill = c"clEnqueueFillBuffer" (Object, Object, *const c_void, usize, usize, usize, u32, *const Object, *mut Object) -> Status;
    write = c"clEnqueueWriteBuffer" (Object, Object, u32, usize, usize, *const c_void, u32, *const Object, *mut Object) -> Status;
    read = c"clEnqueueReadBuffer" (Object, Object, u32, usize, usize, *mut c_void, u32, *const Object, *mut Object) -> Status;
    finish = c"clFinish" (Object) -> Status;
    create_program = c"clCreateProgramWithSource" (Object, u32, *const *const c_char, *const usize, *mut Status) -> Object;
    build = c"clBuildProgram" (Object, u32, *const Object, *const c_char, *const c_void, *mut c_void) -> Status;
    build_info = c"clGetProgramBuildInfo" (Object, Object, u32, usize, *mut c_void, *mut usize) -> Status;
    release_program = c"clReleaseProgram" (Object) -> Status;
    create_kernel = c"clCreateKernel" (Object, *const c_char, *mut Status) -> Object;
    release_kernel = c"clReleaseKernel" (Object) -> Status;
    set_argument = c"clSetKernelArg" (Object, u32, usize, *const c_void) -> Status;
    launch = c"clEnqueueNDRangeKernel" (Object, Object, u32, *const usize, *const usize, *const usize, u32, *const Object, *mut Object) -> Status;
    retain_queue = c"clRetainCommandQueue" (Object) -> Status;
    release_queue = c"clReleaseCommandQueue" (Object) -> Status;
    release_context = c"clReleaseContext" (Object) -> Status;
});

/// What a driver's compiler is told for every program. The pragma of `opencl.h` forbids
/// contraction.
pub const OPTIONS: [&str; 1] = ["-cl-std=CL1.2"];
/// The same where the driver promises correct rounding.
pub const EXACT_DIVISION_OPTION: &str = "-cl-fp32-correctly-rounded-divide-sqrt";

const ANY_DEVICE: u64 = 0xffff_ffff;
const READ_WRITE: u64 = 1;
const REGION: u32 = 0x1220;
const BUFFER_SIZE: u32 = 0x1102;
const BUILD_LOG: u32 = 0x1183;
const WAIT: u32 = 1;
const GO_ON: u32 = 0;
/// Local memory that a device must have: the largest kernel (attention's gradients of keys with
/// three slices) needs 48,448 bytes per group, and devices have 32, 48 or 64 KiB.
const LOCAL_MEMORY_MIN: u64 = 48 << 10;
/// Maximum number of devices: any beyond it are not listed.
const DEVICES_MAX: u32 = 64;

/// Device queries.
mod ask {
    pub(super) const TYPE: u32 = 0x1000;
    pub(super) const COMPUTE_UNITS: u32 = 0x1002;
    pub(super) const BASE_ALIGNMENT_BITS: u32 = 0x1019;
    pub(super) const SINGLE_PRECISION: u32 = 0x101b;
    pub(super) const MEMORY: u32 = 0x101f;
    pub(super) const LOCAL_MEMORY: u32 = 0x1023;
    pub(super) const LITTLE_ENDIAN: u32 = 0x1026;
    pub(super) const NAME: u32 = 0x102b;
    pub(super) const DRIVER: u32 = 0x102d;
    pub(super) const VERSION: u32 = 0x102f;
}

/// The type of a device that is a GPU, as a bit.
const TYPE_GPU: u64 = 4;

/// Float32 capabilities that a device reports.
mod precision {
    pub(super) const SUBNORMALS: u64 = 1;
    pub(super) const INFINITIES: u64 = 2;
    pub(super) const NEAREST: u64 = 4;
    pub(super) const FMA: u64 = 0x20;
    pub(super) const EXACT_DIVISION: u64 = 0x80;
}

fn check(what: &str, status: Status) -> Answer<()> {
    let known = match status {
        0 => return Ok(()),
        -2 => " (device not available)",
        -4 => " (out of device memory)",
        -5 => " (out of resources)",
        -6 => " (out of host memory)",
        -11 => " (the program does not compile)",
        -54 => " (work group too large)",
        -61 => " (buffer too large)",
        -1001 => " (no driver is installed)",
        _ => "",
    };
    Err(format!("{what} failed with status {status}{known}"))
}

impl Functions {
    fn open() -> Result<Rc<Self>, String> {
        const NAMES: [&str; 4] =
            ["libOpenCL.so.1", "libOpenCL.so", "OpenCL.dll", "/System/Library/Frameworks/OpenCL.framework/OpenCL"];
        opencl_probe::check()?;
        Self::load(open(&NAMES).ok_or("no OpenCL library found")?).map(Rc::new)
    }

    /// Every device of every platform, in the loader's order.
    ///
    /// One thread at a time: drivers discover their devices in the first call, and one of them
    /// hands half-initialised devices to a second thread meanwhile, which crashes there.
    fn all(&self) -> Result<Vec<Object>, String> {
        static DISCOVERY: Mutex<()> = Mutex::new(());
        let _alone = DISCOVERY.lock().unwrap_or_else(PoisonError::into_inner);
        let mut platforms = [null_mut(); DEVICES_MAX as usize];
        let mut count = 0;
        // SAFETY: `platforms` has room for DEVICES_MAX objects, as stated, and `count` for the
        // number.
        check("clGetPlatformIDs", unsafe { (self.platforms)(DEVICES_MAX, platforms.as_mut_ptr(), &raw mut count) })?;
        let mut all = Vec::new();
        for platform in &platforms[..count.min(DEVICES_MAX) as usize] {
            let mut devices = [null_mut(); DEVICES_MAX as usize];
            let mut count = 0;
            // SAFETY: a platform of the loader's; `devices` has room for DEVICES_MAX objects, as
            // stated, and `count` for the number. A platform without devices answers with an error,
            // which is no reason to give up.
            let status =
                unsafe { (self.devices)(*platform, ANY_DEVICE, DEVICES_MAX, devices.as_mut_ptr(), &raw mut count) };
            if status == 0 {
                all.extend_from_slice(&devices[..count.min(DEVICES_MAX) as usize]);
            }
        }
        Ok(all)
    }

    fn text(&self, device: Object, what: u32) -> String {
        let mut bytes = [0u8; 256];
        let mut length = 0;
        // SAFETY: a device of the loader's; the size is that of the array, and `length` has room
        // for the number.
        let status =
            unsafe { (self.device_info)(device, what, bytes.len(), bytes.as_mut_ptr().cast(), &raw mut length) };
        let text = if status == 0 { &bytes[..length.min(bytes.len())] } else { b"unknown" };
        String::from_utf8_lossy(text).trim_end_matches('\0').trim().to_string()
    }

    /// A number of up to eight bytes.
    fn number(&self, device: Object, what: u32) -> Answer<u64> {
        let mut bytes = [0u8; 8];
        let mut length = 0;
        // SAFETY: a device of the loader's; numbers have at most the eight bytes of the array,
        // whose size is stated, and `length` has room for one.
        let status =
            unsafe { (self.device_info)(device, what, bytes.len(), bytes.as_mut_ptr().cast(), &raw mut length) };
        check("clGetDeviceInfo", status)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Why a device is not used: a missing capability, or a known driver defect.
    fn objection(&self, device: Object) -> Answer<Option<&'static str>> {
        let can = self.number(device, ask::SINGLE_PRECISION)?;
        let lacks = |bit: u64| can & bit == 0;
        Ok(if lacks(precision::SUBNORMALS) {
            Some("it does not keep subnormal numbers")
        } else if lacks(precision::INFINITIES) || lacks(precision::NEAREST) {
            Some("its float32 is not IEEE-754")
        } else if lacks(precision::FMA) {
            Some("it has no fused multiply-add")
        } else if self.number(device, ask::LITTLE_ENDIAN)? as u8 == 0 {
            Some("it is big-endian")
        } else if self.number(device, ask::LOCAL_MEMORY)? < LOCAL_MEMORY_MIN {
            Some("it has less than the 48 KiB of local memory that kernels need")
        } else if self.text(device, ask::NAME).contains("NVIDIA") {
            // Version 580.159.04, even when waiting for every kernel. Every such driver includes
            // CUDA.
            Some("NVIDIA's OpenCL driver crashes in the fused head; name the card as `cuda:N`")
        } else {
            None
        })
    }
}

pub(super) fn list() -> Result<Vec<Listing>, String> {
    let cl = Functions::open()?;
    let describe = |(index, device): (usize, Object)| Listing {
        selector: format!("opencl:{index}"),
        name: cl.text(device, ask::NAME),
        runtime: format!("{}, driver {}", cl.text(device, ask::VERSION), cl.text(device, ask::DRIVER)),
        memory: cl.number(device, ask::MEMORY).unwrap_or(0),
        memory_free: None,
        units: cl.number(device, ask::COMPUTE_UNITS).unwrap_or(0) as u32,
        architecture: None,
        objection: cl.objection(device).unwrap_or(Some("it does not answer")).map(str::to_string),
    };
    Ok(cl.all()?.into_iter().enumerate().map(describe).collect())
}

/// Whether the device is a GPU: some drivers offer the processor.
pub(super) fn is_gpu(index: usize) -> bool {
    let of_type = |cl: &Functions, device: Object| cl.number(device, ask::TYPE).unwrap_or(0) & TYPE_GPU != 0;
    Functions::open()
        .is_ok_and(|cl| cl.all().is_ok_and(|all| all.get(index).is_some_and(|device| of_type(&cl, *device))))
}

/// Maximum number of buffers and parts that wait for the queue to be empty.
const PENDING_FREES_MAX: usize = 4096;

pub(super) struct OpenCl {
    cl: Rc<Functions>,
    device: Object,
    context: Object,
    queue: Object,
    name: String,
    alignment: usize,
    units: usize,
    has_mfma: bool,
    soft_division: bool,
    /// Memory that commands may still use: released when the queue is known to be empty. Drivers
    /// should track that themselves, but one of them crashes when a buffer is released while a
    /// kernel that uses part of it is queued.
    pending_frees: RefCell<Vec<Object>>,
    /// Parts of buffers that were passed to kernels, by buffer and offset.
    parts: RefCell<BTreeMap<(u64, usize), Object>>,
    /// Released at the end.
    programs: RefCell<Vec<Object>>,
    kernels: RefCell<Vec<Object>>,
}

impl OpenCl {
    /// `soft_division` forces software division, for testing it.
    pub(super) fn open(index: usize, soft_division: bool) -> Result<Self, String> {
        let cl = Functions::open()?;
        let devices = cl.all()?;
        let Some(&device) = devices.get(index) else {
            return Err(super::devices::no_such("OpenCL", index, devices.len()));
        };
        if let Some(objection) = cl.objection(device)? {
            return Err(format!("{} is not used: {objection}", cl.text(device, ask::NAME)));
        }
        let exact = cl.number(device, ask::SINGLE_PRECISION)? & precision::EXACT_DIVISION != 0;
        let alignment = (cl.number(device, ask::BASE_ALIGNMENT_BITS)? as u32 as usize / 8).max(64);
        let units = cl.number(device, ask::COMPUTE_UNITS)? as u32 as usize;
        let mut status = 0;
        // SAFETY: one device, as stated; no properties, no callback; `status` has room for the
        // number.
        let context = unsafe { (cl.create_context)(null(), 1, &raw const device, null(), null_mut(), &raw mut status) };
        check("clCreateContext", status)?;
        // SAFETY: the context was made for this device; no flags, so that the queue is in order.
        let queue = unsafe { (cl.create_queue)(context, device, 0, &raw mut status) };
        check("clCreateCommandQueue", status).inspect_err(|_| {
            // SAFETY: made above, and nobody else has it.
            unsafe { (cl.release_context)(context) };
        })?;
        let name = cl.text(device, ask::NAME);
        Ok(Self {
            // AMD's driver names a device by its architecture: `gfx908:sramecc+:xnack-`.
            has_mfma: name.split(':').next().is_some_and(hip::has_mfma),
            name: format!("opencl:{index} ({name})"),
            alignment,
            units,
            soft_division: soft_division || !exact,
            pending_frees: RefCell::default(),
            parts: RefCell::default(),
            programs: RefCell::default(),
            kernels: RefCell::default(),
            cl,
            device,
            context,
            queue,
        })
    }

    fn build_log(&self, program: Object) -> String {
        const LOG_BYTES_MAX: usize = 1 << 16;
        let mut log = vec![0u8; LOG_BYTES_MAX];
        let mut length = 0;
        // SAFETY: a program that was built for this device; the size is that of the vector, and
        // `length` has room for the number.
        unsafe {
            (self.cl.build_info)(program, self.device, BUILD_LOG, log.len(), log.as_mut_ptr().cast(), &raw mut length)
        };
        String::from_utf8_lossy(&log[..length.min(LOG_BYTES_MAX)]).trim_end_matches('\0').trim().to_string()
    }

    /// Releases memory that no command uses any more: the queue is empty.
    fn sweep(&self) {
        for memory in self.pending_frees.take() {
            // SAFETY: a buffer or part that was made here and given up once, so that nobody has it
            // any more; the queue is empty, so every command that used it is done.
            unsafe { (self.cl.release_buffer)(memory) };
        }
    }

    /// Queues memory for release once no command uses it.
    fn give_up(&self, memory: impl IntoIterator<Item = Object>) {
        self.pending_frees.borrow_mut().extend(memory);
        if self.pending_frees.borrow().len() > PENDING_FREES_MAX {
            // The next command reports a device failure.
            let _ = self.finish();
        }
    }

    fn set_argument(&self, kernel: Object, index: u32, bytes: &[u8]) -> Answer<()> {
        // SAFETY: a kernel that was made here; the driver copies as many bytes as stated, and
        // refuses a size that is not the argument's.
        let status = unsafe { (self.cl.set_argument)(kernel, index, bytes.len(), bytes.as_ptr().cast()) };
        check("clSetKernelArg", status)
    }

    /// A memory argument as an object. Parts live as long as their buffer.
    fn part(&self, memory: Handle, offset: usize) -> Answer<Object> {
        let whole = object(memory.0);
        if offset == 0 {
            return Ok(whole);
        }
        if let Some(part) = self.parts.borrow().get(&(memory.0, offset)) {
            return Ok(*part);
        }
        let mut size = 0usize;
        // SAFETY: a buffer that its owner has not released; a size is asked for, and `size` is one.
        check("clGetMemObjectInfo", unsafe {
            (self.cl.memory_info)(whole, BUFFER_SIZE, size_of::<usize>(), (&raw mut size).cast(), null_mut())
        })?;
        let region = [offset, size.checked_sub(offset).ok_or("a part outside its buffer")?];
        let mut status = 0;
        // SAFETY: a buffer that its owner has not released; the region is the two sizes that the
        // call reads, origin and length, inside the buffer; `status` has room for the number.
        let part = unsafe { (self.cl.create_part)(whole, READ_WRITE, REGION, region.as_ptr().cast(), &raw mut status) };
        check("clCreateSubBuffer", status)?;
        self.parts.borrow_mut().insert((memory.0, offset), part);
        Ok(part)
    }
}

fn object(handle: u64) -> Object {
    handle as usize as Object
}

/// Memory of the host that commands of a queue copy from or to; OpenCL locks pages by itself.
struct QueuedPages {
    queue: Object,
    finish: unsafe extern "system" fn(Object) -> Status,
    release: unsafe extern "system" fn(Object) -> Status,
}

// SAFETY: the queue is only passed to functions that may be called from any thread.
unsafe impl Send for QueuedPages {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for QueuedPages {}

impl Pages for QueuedPages {
    fn finish_copies(&self) {
        // SAFETY: retained until it is dropped. A failure shows at the device's next call.
        unsafe { (self.finish)(self.queue) };
    }
}

impl Drop for QueuedPages {
    fn drop(&mut self) {
        // SAFETY: retained once for `self`, and released here alone.
        unsafe { (self.release)(self.queue) };
    }
}

impl Runtime for OpenCl {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn soft_division(&self) -> bool {
        self.soft_division
    }

    fn multiprocessors(&self) -> usize {
        self.units
    }

    fn has_mfma(&self) -> bool {
        self.has_mfma
    }

    fn allocate(&self, bytes: usize, _: Lifetime) -> Answer<Handle> {
        let mut status = 0;
        // SAFETY: our context; no host memory is given, and `status` has room for the number.
        let buffer = unsafe { (self.cl.create_buffer)(self.context, READ_WRITE, bytes, null_mut(), &raw mut status) };
        check(&format!("clCreateBuffer of {bytes} bytes"), status)?;
        Ok(Handle(buffer as usize as u64))
    }

    fn release(&self, memory: Handle) {
        let of_it = (memory.0, 0)..=(memory.0, usize::MAX);
        let parts: Vec<_> = self.parts.borrow_mut().extract_if(of_it, |_, _| true).map(|(_, part)| part).collect();
        self.give_up(parts.into_iter().chain([object(memory.0)]));
    }

    fn zero(&self, memory: Handle, bytes: usize) -> Answer<()> {
        let pattern = [0u8; 1];
        // SAFETY: the caller's buffer has as many bytes; the driver copies the pattern's one byte
        // before it returns; no events.
        check("clEnqueueFillBuffer", unsafe {
            let pattern = pattern.as_ptr().cast();
            (self.cl.fill)(self.queue, object(memory.0), pattern, 1, 0, bytes, 0, null(), null_mut())
        })
    }

    fn write(&self, memory: Handle, bytes: &[u8]) -> Answer<()> {
        // SAFETY: the caller's buffer has as many bytes; the call waits until they are copied; no
        // events.
        check("clEnqueueWriteBuffer", unsafe {
            let from = bytes.as_ptr().cast();
            (self.cl.write)(self.queue, object(memory.0), WAIT, 0, bytes.len(), from, 0, null(), null_mut())
        })
    }

    fn read(&self, bytes: &mut [u8], memory: Handle) -> Answer<()> {
        // SAFETY: the caller's buffer has as many bytes; the call waits until they are in `bytes`,
        // which is borrowed exclusively; no events.
        check("clEnqueueReadBuffer", unsafe {
            let to = bytes.as_mut_ptr().cast();
            (self.cl.read)(self.queue, object(memory.0), WAIT, 0, bytes.len(), to, 0, null(), null_mut())
        })?;
        self.sweep();
        Ok(())
    }

    unsafe fn lock_pages(&self, _host: *mut u8, _bytes: usize) -> Option<Box<dyn PageLock>> {
        // SAFETY: our queue, which lives; the retained one is released once, with the result.
        (unsafe { (self.cl.retain_queue)(self.queue) } == 0).then(|| {
            let (finish, release) = (self.cl.finish, self.cl.release_queue);
            LockedPages::boxed(QueuedPages { queue: self.queue, finish, release })
        })
    }

    unsafe fn copy_locked(&self, copy: LockedCopy, bytes: usize) -> Answer<()> {
        let (cl, queue) = (&self.cl, self.queue);
        // SAFETY: the caller's buffer has as many bytes, and so has the host's memory, which nobody
        // uses until the queue is finished (the caller's promise); no events.
        unsafe {
            match copy {
                LockedCopy::ToDevice(host, memory) | LockedCopy::Ahead(host, memory) => {
                    let memory = object(memory.0);
                    let status = (cl.write)(queue, memory, GO_ON, 0, bytes, host.cast(), 0, null(), null_mut());
                    check("clEnqueueWriteBuffer", status)
                }
                LockedCopy::ToHost(host, memory) => {
                    let memory = object(memory.0);
                    let status = (cl.read)(queue, memory, GO_ON, 0, bytes, host.cast(), 0, null(), null_mut());
                    check("clEnqueueReadBuffer", status)
                }
            }
        }
    }

    fn finish(&self) -> Answer<()> {
        // SAFETY: our queue, which lives until `self` is dropped.
        check("clFinish", unsafe { (self.cl.finish)(self.queue) })?;
        self.sweep();
        Ok(())
    }

    fn compile(&self, source: &str, language: Language, options: &[String]) -> Answer<Compiled> {
        if language == Language::Native {
            return Err("OpenCL compiles only the portable kernels".to_string());
        }
        let exact = (!self.soft_division).then_some(EXACT_DIVISION_OPTION);
        let line: Vec<&str> = OPTIONS.into_iter().chain(exact).chain(options.iter().map(String::as_str)).collect();
        let line = CString::new(line.join(" ")).map_err(|error| error.to_string())?;
        let mut status = 0;
        let (text, length) = (source.as_ptr().cast::<c_char>(), source.len());
        // SAFETY: one string with its length, both read before the call returns; `status` has room
        // for the number.
        let program =
            unsafe { (self.cl.create_program)(self.context, 1, &raw const text, &raw const length, &raw mut status) };
        check("clCreateProgramWithSource", status)?;
        self.programs.borrow_mut().push(program);
        let build = || {
            // SAFETY: the program made above, for one device, ours; options end with a zero; no
            // callback, so that the call returns when it is built.
            let status =
                unsafe { (self.cl.build)(program, 1, &raw const self.device, line.as_ptr(), null(), null_mut()) };
            check("clBuildProgram", status).map_err(|error| format!("{error}\n{}", self.build_log(program)))
        };
        // A second attempt: drivers built on LLVM remove their temporary files when the process
        // gets a signal, which here may only ask for a clean stop.
        build().or_else(|_| build())?;
        Ok(Compiled(program as usize as u64))
    }

    fn kernel(&self, program: Compiled, name: &str) -> Answer<Kernel> {
        let text = CString::new(name).map_err(|error| error.to_string())?;
        let mut status = 0;
        // SAFETY: `compile` built the program, and it stays until `self` is dropped; the name ends
        // with a zero; `status` has room for the number.
        let kernel = unsafe { (self.cl.create_kernel)(object(program.0), text.as_ptr(), &raw mut status) };
        check(&format!("clCreateKernel of {name}"), status)?;
        self.kernels.borrow_mut().push(kernel);
        Ok(Kernel(kernel as usize as u64))
    }

    fn launch(&self, kernel: Kernel, groups: usize, size: usize, dynamic: usize, arguments: &[Argument]) -> Answer<()> {
        if dynamic > 0 {
            return Err("OpenCL kernels declare their local memory".to_string());
        }
        let kernel = object(kernel.0);
        for (index, argument) in (0u32..).zip(arguments) {
            match argument {
                Argument::Memory(memory, offset) => {
                    let memory = self.part(*memory, *offset)?;
                    self.set_argument(kernel, index, &(memory as usize).to_ne_bytes())?;
                }
                Argument::U32(x) => self.set_argument(kernel, index, &x.to_ne_bytes())?,
                Argument::U64(x) => self.set_argument(kernel, index, &x.to_ne_bytes())?,
                Argument::F32(x) => self.set_argument(kernel, index, &x.to_ne_bytes())?,
                Argument::Descriptor(_) => return Err("OpenCL has no bulk copies".to_string()),
            }
        }
        let global = groups.checked_mul(size).ok_or("too many work items")?;
        // SAFETY: a kernel that was made here, with every argument set; one dimension, and one size
        // each of the whole and of a group. What the kernel does with its memory is its op's to
        // keep inside.
        check("clEnqueueNDRangeKernel", unsafe {
            let (global, local) = (&raw const global, &raw const size);
            (self.cl.launch)(self.queue, kernel, 1, null(), global, local, 0, null(), null_mut())
        })
    }
}

impl Drop for OpenCl {
    fn drop(&mut self) {
        // SAFETY: every object was made here and is released once: parts before what they are parts
        // of have gone, kernels before programs, all after the queue ran dry; queue and context
        // last.
        unsafe {
            (self.cl.finish)(self.queue);
            for memory in self.parts.take().into_values().chain(self.pending_frees.take()) {
                (self.cl.release_buffer)(memory);
            }
            for kernel in self.kernels.take() {
                (self.cl.release_kernel)(kernel);
            }
            for program in self.programs.take() {
                (self.cl.release_program)(program);
            }
            (self.cl.release_queue)(self.queue);
            (self.cl.release_context)(self.context);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::LOCAL_MEMORY_MIN;
    use std::{collections::BTreeMap, iter::Peekable, str::Chars};

    type Defines<'a> = BTreeMap<&'a str, &'a str>;

    fn sum(text: &mut Peekable<Chars>, defines: &Defines) -> u64 {
        let mut value = product(text, defines);
        while text.next_if_eq(&'+').is_some() {
            value += product(text, defines);
        }
        value
    }

    fn product(text: &mut Peekable<Chars>, defines: &Defines) -> u64 {
        let mut value = factor(text, defines);
        while let Some(operator) = text.next_if(|c| "*/".contains(*c)) {
            let next = factor(text, defines);
            value = if operator == '*' { value * next } else { value / next };
        }
        value
    }

    /// A number, a macro or a sum in parentheses.
    fn factor(text: &mut Peekable<Chars>, defines: &Defines) -> u64 {
        if text.next_if_eq(&'(').is_some() {
            let value = sum(text, defines);
            assert_eq!(text.next(), Some(')'), "a closing parenthesis");
            return value;
        }
        let mut word = String::new();
        while let Some(c) = text.next_if(|c| c.is_alphanumeric() || *c == '_') {
            word.push(c);
        }
        word.trim_end_matches('u').parse().unwrap_or_else(|_| evaluate(defines[word.as_str()], defines))
    }

    fn evaluate(text: &str, defines: &Defines) -> u64 {
        let text: String = text.split_whitespace().collect();
        sum(&mut text.chars().peekable(), defines)
    }

    /// Bytes of a line `LOCAL type name[size];`.
    fn local_bytes(line: &str, defines: &Defines) -> Option<u64> {
        let line = line.trim().strip_prefix("LOCAL ")?.trim_start_matches("ALIGNED ");
        let (element, line) = line.split_once(' ')?;
        let size = line.split_once('[')?.1.split_once("];")?.0;
        Some(if element == "ulong" { 8 } else { 4 } * evaluate(size, defines))
    }

    /// Device code that uses much local memory, after the headers that it may cite.
    const PROGRAMS: [&str; 6] = [
        include_str!("../../gpu/attention.cl"),
        include_str!("../../gpu/delta_rule.cl"),
        include_str!("../../gpu/delta_rule_gradients.cl"),
        include_str!("../../gpu/low_rank.cl"),
        include_str!("../../gpu/product.cl"),
        include_str!("../../gpu/product4.cl"),
    ];
    const HEADERS: [&str; 3] =
        [include_str!("../../gpu/exact.h"), include_str!("../../gpu/lanes.h"), include_str!("../../gpu/slices.h")];

    #[test]
    fn kernels_fit_the_local_memory_that_a_device_must_have() {
        let mut largest = (0, "");
        for program in PROGRAMS {
            let lines = HEADERS.iter().chain([&program]).flat_map(|text| text.lines());
            let define = |line: &'static str| line.strip_prefix("#define ")?.split_once(' ');
            let mut defines: Defines = lines.filter_map(define).collect();
            defines.insert("SLICES", "3");
            for kernel in program.split("KERNEL(").skip(1) {
                let bytes = kernel.lines().filter_map(|line| local_bytes(line, &defines)).sum();
                let name =
                    kernel.split_once(") ").and_then(|(_, rest)| rest.split_once('(')).map_or("", |(name, _)| name);
                largest = largest.max((bytes, name));
            }
        }
        assert_eq!(largest, (48_448, "attention_grad_key"));
        assert!(largest.0 <= LOCAL_MEMORY_MIN);
    }
}
