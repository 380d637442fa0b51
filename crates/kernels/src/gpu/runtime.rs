//! The interface to a vendor's runtime: memory, copies, programs and launches, in call order.
//! Public so that a test can bring a device of its own, such as an emulated one.

use crate::backend::DeviceFailure;
pub use crate::buffer::PageLock;
pub use crate::heap::Lifetime;

/// The result of a runtime call; the error text names the call.
pub type Answer<T> = Result<T, String>;

/// A block of device memory as its runtime identifies it: an address or an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle(pub u64);

/// A compiled program.
#[derive(Clone, Copy, Debug)]
pub struct Compiled(pub u64);

/// A kernel of a compiled program.
#[derive(Clone, Copy, Debug)]
pub struct Kernel(pub u64);

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub enum Argument {
    /// Memory, starting at a byte offset.
    Memory(Handle, usize),
    U32(u32),
    U64(u64),
    F32(f32),
    /// A descriptor that the kernel takes by value, 64-byte aligned.
    Descriptor([u64; 16]),
}

/// How a program is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Language {
    /// The dialect of `gpu/opencl.h`.
    Portable,
    /// CUDA C++ with the definitions of `gpu/cuda.h` and the headers of portable programs.
    Cuda,
    /// CUDA C++ for one architecture, with its native instructions.
    Native,
}

/// What [`Runtime::compile`] takes.
#[derive(Clone, Debug)]
pub struct Source {
    pub text: String,
    pub language: Language,
    pub options: Vec<String>,
}

/// A copy between locked pages of the host and memory.
#[derive(Clone, Copy, Debug)]
pub enum LockedCopy {
    ToDevice(*const u8, Handle),
    /// To the device, beside the commands that follow, until [`Runtime::arrive`].
    Ahead(*const u8, Handle),
    ToHost(*mut u8, Handle),
}

/// A point in the commands of a device for which any thread can wait, also one that has not opened
/// the device.
pub trait Mark: Send + Sync {
    /// Waits for the commands before it, and for none after it.
    fn wait(&self) -> Answer<()>;
}

/// Commands are executed in call order. The caller has checked the sizes.
pub trait Runtime {
    /// For messages: `opencl:0 (name)`.
    fn name(&self) -> &str;
    /// Bytes to which the offset of [`Argument::Memory`] must be aligned.
    fn alignment(&self) -> usize;
    /// Uninitialised; at least one byte. A runtime that knows where its buffers lie places those
    /// of an update apart.
    fn allocate(&self, bytes: usize, lifetime: Lifetime) -> Answer<Handle>;
    fn release(&self, memory: Handle);
    fn zero(&self, memory: Handle, bytes: usize) -> Answer<()>;
    fn write(&self, memory: Handle, bytes: &[u8]) -> Answer<()>;
    /// Waits for all earlier commands.
    fn read(&self, bytes: &mut [u8], memory: Handle) -> Answer<()>;
    /// Begins a `read` without waiting; its number, or none if only `read` can do this.
    fn begin_read(&self, _memory: Handle, _bytes: usize) -> Answer<Option<usize>> {
        Ok(None)
    }
    /// Waits for a read that was begun, and for no command after it.
    fn finish_read(&self, _number: usize, _bytes: &mut [u8]) -> Answer<()> {
        Err("this runtime begins no reads".to_string())
    }
    /// A read that was begun is of no more use, finished or not.
    fn release_read(&self, _number: usize) {}
    /// Locks pages of the host for copies that it does not wait for, of all devices of this
    /// runtime. None if the runtime cannot.
    ///
    /// # Safety
    /// The pages stay where they are until the lock is dropped.
    unsafe fn lock_pages(&self, _host: *mut u8, _bytes: usize) -> Option<Box<dyn PageLock>> {
        None
    }
    /// Begins one of these copies.
    ///
    /// # Safety
    /// The host's bytes are in pages that this runtime has locked. Until the lock's `wait` nobody
    /// writes to them, and if they are written nobody reads them.
    unsafe fn copy_locked(&self, _copy: LockedCopy, _bytes: usize) -> Answer<()> {
        Err("this runtime locks no pages".to_string())
    }
    /// Later commands wait for the [`LockedCopy::Ahead`] to this memory.
    fn arrive(&self, _memory: Handle) -> Answer<()> {
        Ok(())
    }
    /// Marks the end of the commands so far. None if only `finish` can wait for them.
    fn mark(&self) -> Answer<Option<Box<dyn Mark>>> {
        Ok(None)
    }
    fn finish(&self) -> Answer<()>;
    fn compile(&self, source: &str, language: Language, options: &[String]) -> Answer<Compiled>;
    /// These programs will be compiled soon: a runtime may begin now, in threads of its own.
    fn compile_ahead(&self, _programs: Vec<Source>) {}
    fn kernel(&self, program: Compiled, name: &str) -> Answer<Kernel>;
    /// Launches `groups` groups of `size` work items, with `dynamic` bytes of shared memory in
    /// addition to what the kernel declares.
    fn launch(&self, kernel: Kernel, groups: usize, size: usize, dynamic: usize, arguments: &[Argument]) -> Answer<()>;
    /// Tensor-core generation, for kernels in a device's native language: (9, 0) on Hopper. None if
    /// there is none.
    fn architecture(&self) -> Option<(u32, u32)> {
        None
    }
    /// Whether programs must not trust the device's `/` and `sqrt`, and are compiled with
    /// `SOFT_DIVISION`. On AMD's devices kernels never do (`gpu/exact.h`).
    fn soft_division(&self) -> bool {
        false
    }
    /// Whether the device has AMD's matrix cores for bytes, which programs named `*_mfma` use.
    fn has_mfma(&self) -> bool {
        false
    }
    fn multiprocessors(&self) -> usize;
    /// A descriptor of a row-major matrix of bytes for the bulk copy engine.
    fn matrix_descriptor(&self, _memory: Handle, _offset: usize, _matrix: &ByteMatrix) -> Answer<[u64; 16]> {
        Err("this runtime has no bulk copies".to_string())
    }
}

/// A byte matrix and the box that one bulk copy transfers, in the 128-byte swizzle.
#[derive(Clone, Copy, Debug)]
pub struct ByteMatrix {
    pub rows: usize,
    pub width: usize,
    /// Row stride in bytes.
    pub stride: usize,
    pub box_rows: usize,
    pub box_width: usize,
}

pub(super) fn failure(device: &str, what: impl Into<String>) -> DeviceFailure {
    DeviceFailure { device: device.to_string(), what: what.into() }
}
