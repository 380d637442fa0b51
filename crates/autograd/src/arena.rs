//! Reusable buffers: every step needs the same sizes again, and fresh memory costs page faults.
//!
//! A buffer is handed out with stale contents; every op overwrites its outputs. Buffers that the
//! current tape has not used are freed before new ones are allocated, so memory is that of the
//! largest micro-batch, not of all shapes seen.

use isobit_kernels::op::SliceShape;
use isobit_kernels::tensor::{F32, HostF32, Rows};
use isobit_kernels::{Backend, DeviceFailure};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

/// Free buffers by length, free slices by shape, and the amount on loan.
pub(crate) struct Arena<B: Backend> {
    free: RefCell<BTreeMap<usize, Free<F32<B>>>>,
    /// The same in host memory.
    host: RefCell<BTreeMap<usize, Free<HostF32<B>>>>,
    rows: RefCell<Vec<FreeRows<B>>>,
    /// Number of the current tape.
    tape: Cell<u64>,
    /// Where its rows and documents start.
    starts: RefCell<Vec<usize>>,
    live_bytes: Cell<usize>,
    peak_bytes: Cell<usize>,
}

/// Free buffers of one length, and the last tape that used this length.
struct Free<T> {
    buffers: Vec<T>,
    tape: u64,
}

/// Free slices, and the last tape that used them.
struct FreeRows<B: Backend> {
    shape: SliceShape,
    rows: Rows<B>,
    tape: u64,
}

/// A buffer on loan; dropping it returns it.
pub(crate) struct Lease<B: Backend> {
    /// None if it is in host memory.
    buffer: Option<F32<B>>,
    host: Option<HostF32<B>>,
    length: usize,
    arena: Rc<Arena<B>>,
}

/// Slices on loan.
pub(crate) struct RowsLease<B: Backend> {
    rows: Option<Rows<B>>,
    shape: SliceShape,
    arena: Rc<Arena<B>>,
}

impl<B: Backend> Arena<B> {
    pub(crate) fn new() -> Rc<Self> {
        Rc::new(Self {
            free: RefCell::default(),
            host: RefCell::default(),
            rows: RefCell::default(),
            tape: Cell::new(0),
            starts: RefCell::default(),
            live_bytes: Cell::new(0),
            peak_bytes: Cell::new(0),
        })
    }

    pub(crate) fn take(self: &Rc<Self>, backend: &B, length: usize) -> Lease<B> {
        let old = reuse(&mut self.free.borrow_mut(), self.tape.get(), length);
        let live = self.live_bytes.get() + length * size_of::<f32>();
        self.live_bytes.set(live);
        self.peak_bytes.set(self.peak_bytes.get().max(live));
        let buffer = old.unwrap_or_else(|| backend.unwritten(length));
        Lease { buffer: Some(buffer), host: None, length, arena: Rc::clone(self) }
    }

    /// A copy in host memory.
    pub(crate) fn to_host(self: &Rc<Self>, backend: &B, lease: &Lease<B>) -> Result<Lease<B>, DeviceFailure> {
        let length = lease.length;
        let old = reuse(&mut self.host.borrow_mut(), self.tape.get(), length);
        let mut host = old.unwrap_or_else(|| backend.host_zeros(length));
        backend.save(&mut host, lease)?;
        Ok(Lease { buffer: None, host: Some(host), length, arena: Rc::clone(self) })
    }

    /// A copy on the device of what is in host memory.
    pub(crate) fn to_device(self: &Rc<Self>, backend: &B, lease: &Lease<B>) -> Lease<B> {
        let mut device = self.take(backend, lease.length);
        backend.load(device.buffer_mut(), lease.host.as_ref().expect("it is in host memory"));
        device
    }

    /// Starts a new tape over rows and documents that start here; buffers it does not use may be
    /// freed. Where buffers lie in ranges, all are freed if the last tape had other lengths: among
    /// buffers of its sizes those of this tape would lie scattered, and rows of many lengths took a
    /// quarter more memory than the longest alone, which is what a plan counts.
    pub(crate) fn begin_tape(&self, backend: &B, starts: Vec<usize>) {
        self.tape.set(self.tape.get() + 1);
        if backend.has_ranges() && *self.starts.borrow() != starts {
            self.free.borrow_mut().clear();
            self.rows.borrow_mut().clear();
            backend.scratch().clear();
            self.starts.replace(starts);
        }
    }

    pub(crate) fn rows(self: &Rc<Self>, backend: &B, shape: SliceShape) -> RowsLease<B> {
        let mut free = self.rows.borrow_mut();
        let old = free.iter().position(|free| free.shape == shape).map(|at| free.swap_remove(at).rows);
        if old.is_none() {
            free.retain(|free| free.tape == self.tape.get());
        }
        RowsLease { rows: Some(old.unwrap_or_else(|| backend.rows(shape))), shape, arena: Rc::clone(self) }
    }

    /// Peak bytes of float32 buffers on loan.
    pub(crate) fn peak_bytes(&self) -> usize {
        self.peak_bytes.get()
    }
}

/// A free buffer of this length. If there is none, frees as many elements from buffers that this
/// tape has not used.
fn reuse<T>(free: &mut BTreeMap<usize, Free<T>>, tape: u64, length: usize) -> Option<T> {
    if let Some(known) = free.get_mut(&length) {
        known.tape = tape;
        if let Some(buffer) = known.buffers.pop() {
            return Some(buffer);
        }
    }
    let mut wanted = length;
    for (&length, stale) in free.iter_mut().filter(|(_, free)| free.tape < tape) {
        while wanted > 0 && stale.buffers.pop().is_some() {
            wanted = wanted.saturating_sub(length);
        }
    }
    None
}

/// Takes a buffer back.
fn give_back<T>(free: &mut BTreeMap<usize, Free<T>>, tape: u64, length: usize, buffer: T) {
    let known = free.entry(length).or_insert(Free { buffers: Vec::new(), tape });
    known.tape = tape;
    known.buffers.push(buffer);
}

impl<B: Backend> Lease<B> {
    pub(crate) fn is_on_host(&self) -> bool {
        self.host.is_some()
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// For ops to read.
    pub(crate) fn buffer(&self) -> &F32<B> {
        self
    }

    /// For ops to write.
    pub(crate) fn buffer_mut(&mut self) -> &mut F32<B> {
        self
    }
}

impl<B: Backend> RowsLease<B> {
    pub(crate) fn slices(&self) -> &Rows<B> {
        self
    }

    pub(crate) fn slices_mut(&mut self) -> &mut Rows<B> {
        self
    }
}

impl<B: Backend> Deref for Lease<B> {
    type Target = F32<B>;
    fn deref(&self) -> &F32<B> {
        self.buffer.as_ref().expect("on loan until dropped, and on the device while it is used")
    }
}

impl<B: Backend> DerefMut for Lease<B> {
    fn deref_mut(&mut self) -> &mut F32<B> {
        self.buffer.as_mut().expect("on loan until dropped, and on the device while it is used")
    }
}

impl<B: Backend> Drop for Lease<B> {
    fn drop(&mut self) {
        let (arena, length) = (&self.arena, self.length);
        if let Some(buffer) = self.buffer.take() {
            arena.live_bytes.set(arena.live_bytes.get() - length * size_of::<f32>());
            give_back(&mut arena.free.borrow_mut(), arena.tape.get(), length, buffer);
        }
        if let Some(host) = self.host.take() {
            give_back(&mut arena.host.borrow_mut(), arena.tape.get(), length, host);
        }
    }
}

impl<B: Backend> Deref for RowsLease<B> {
    type Target = Rows<B>;
    fn deref(&self) -> &Rows<B> {
        self.rows.as_ref().expect("on loan until dropped")
    }
}

impl<B: Backend> DerefMut for RowsLease<B> {
    fn deref_mut(&mut self) -> &mut Rows<B> {
        self.rows.as_mut().expect("on loan until dropped")
    }
}

impl<B: Backend> Drop for RowsLease<B> {
    fn drop(&mut self) {
        if let Some(rows) = self.rows.take() {
            let tape = self.arena.tape.get();
            self.arena.rows.borrow_mut().push(FreeRows { shape: self.shape, rows, tape });
        }
    }
}
