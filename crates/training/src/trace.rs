//! Traces: the digests of all that the ops of an update wrote, in order, and the tensors of one op.
//!
//! A [`Tracer`] observes a backend and knows no op by name. Slices have another layout on every
//! backend, so ops that only slice are not compared; what is computed from them is.

use isobit_kernels::backend::Bytes;
use isobit_kernels::observe::{Call, Observer};
use isobit_kernels::op::Output;
use isobit_kernels::{Device, Pass, Place};
use isobit_numerics::cast::{bf16_to_f32, f16_to_f32};
use isobit_numerics::digest::Digest;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;

/// Where a call stands: the rows it works on, and the part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct At {
    /// A micro-batch, an evaluation, or what comes after the micro-batches.
    pub batch: Place,
    pub part: Place,
}

impl At {
    const START: Self = Self { batch: Place::Update, part: Place::Update };

    fn enter(&mut self, place: Place) {
        *self = match place {
            Place::MicroBatch { .. } | Place::Evaluation { .. } => {
                Self { batch: place, part: Place::Embedding(Pass::Forward) }
            }
            Place::Update => Self::START,
            part => Self { part, ..*self },
        };
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.batch {
            Place::Update => self.batch.fmt(f),
            batch => write!(f, "{batch}, {}", self.part),
        }
    }
}

/// What the ops of an update wrote, as digests.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    calls: Vec<Called>,
    /// Calls that differ in nothing but what they wrote share an entry.
    kinds: Vec<(Call, At)>,
    known: BTreeMap<(Call, At), u32>,
}

/// 24 bytes a call: an update of a large model has a million calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Called {
    written: Digest,
    kind: u32,
    /// Something was sliced between the call before and this one.
    after_slices: bool,
}

/// A call of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TracedCall {
    /// Its number in the trace, from 0.
    pub number: usize,
    pub call: Call,
    pub at: At,
    /// Which call of this op it is there, from 1.
    pub nth: usize,
    pub after_slices: bool,
    pub written: Digest,
}

/// Where two traces part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parting {
    /// The same call wrote something else.
    Written(TracedCall),
    /// From here on the calls are not the same ones; what each has, if it goes on.
    Calls([Option<TracedCall>; 2]),
}

impl Trace {
    /// Number of calls.
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// One digest of all of it.
    pub fn digest(&self) -> Digest {
        let written = self.calls.iter().flat_map(|called| called.written.0).flat_map(u64::to_le_bytes);
        Digest::of_bytes(&written.collect::<Vec<u8>>())
    }

    pub fn call(&self, number: usize) -> Option<TracedCall> {
        let Called { written, kind, after_slices } = *self.calls.get(number)?;
        let (call, at) = self.kinds[kind as usize];
        let same = |called: &&Called| {
            let (other, there) = self.kinds[called.kind as usize];
            other.op == call.op && there == at
        };
        let nth = self.calls[..=number].iter().filter(same).count();
        Some(TracedCall { number, call, at, nth, after_slices, written })
    }

    /// The first call in which they differ.
    pub fn parting(&self, other: &Self) -> Option<Parting> {
        let kind =
            |trace: &Self, number: usize| trace.calls.get(number).map(|called| trace.kinds[called.kind as usize]);
        for number in 0..self.len().max(other.len()) {
            let (ours, theirs) = (kind(self, number), kind(other, number));
            if ours != theirs || ours.is_none() {
                return Some(Parting::Calls([self.call(number), other.call(number)]));
            }
            if self.calls[number].written != other.calls[number].written {
                return self.call(number).map(Parting::Written);
            }
        }
        None
    }

    fn push(&mut self, call: Call, at: At, written: Digest, after_slices: bool) {
        let next = self.kinds.len() as u32;
        let kind = *self.known.entry((call, at)).or_insert(next);
        if kind == next {
            self.kinds.push((call, at));
        }
        self.calls.push(Called { written, kind, after_slices });
    }
}

/// A tensor that an op wrote, as its bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    pub format: Format,
    pub bits: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    F32,
    Bf16,
    F16,
    U32,
}

impl Format {
    /// In decimal and in hexadecimal.
    pub fn text(self, bits: u32) -> String {
        match self {
            Self::F32 => format!("{:?} (0x{bits:08x})", f32::from_bits(bits)),
            Self::Bf16 => format!("{:?} (0x{bits:04x})", bf16_to_f32(bits as u16)),
            Self::F16 => format!("{:?} (0x{bits:04x})", f16_to_f32(bits as u16)),
            Self::U32 => format!("{bits} (0x{bits:08x})"),
        }
    }
}

/// Observes the ops of a backend; clones share what was observed.
#[derive(Clone, Default)]
pub struct Tracer(Rc<RefCell<Observation>>);

struct Observation {
    doing: Doing,
    at: At,
    trace: Trace,
    sliced: bool,
    /// What the call that is kept wrote.
    kept: Option<Vec<Written>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Doing {
    Nothing,
    Tracing,
    /// Tracing, and keeping what the call of this number writes.
    Keeping(usize),
}

impl Default for Observation {
    fn default() -> Self {
        Self { doing: Doing::Nothing, at: At::START, trace: Trace::default(), sliced: false, kept: None }
    }
}

impl Tracer {
    /// Begins a new trace; with a number, the tensors of that call are kept.
    pub fn start(&self, keep: Option<usize>) {
        let doing = keep.map_or(Doing::Tracing, Doing::Keeping);
        *self.0.borrow_mut() = Observation { doing, ..Observation::default() };
    }

    /// The trace since [`Tracer::start`], and what was kept. Observes no more.
    pub fn stop(&self) -> (Trace, Option<Vec<Written>>) {
        let Observation { trace, kept, .. } = std::mem::take(&mut *self.0.borrow_mut());
        (trace, kept)
    }
}

impl<D: Device> Observer<D> for Tracer {
    fn enter(&self, place: Place) {
        self.0.borrow_mut().at.enter(place);
    }

    fn before(&self, _device: &D, _call: Call, _workspace: &mut Bytes<D::Memory>) {}

    fn after(&self, device: &D, call: Call, outputs: Vec<Output<'_, D::Memory>>) {
        let mut observation = self.0.borrow_mut();
        let Observation { doing, at, trace, sliced, kept } = &mut *observation;
        if *doing == Doing::Nothing {
            return;
        }
        let keeps = *doing == Doing::Keeping(trace.len());
        let (mut digests, mut tensors) = (Vec::new(), Vec::new());
        for output in outputs {
            // A device that has failed says so at the next download of the update.
            let Some(written) = written(device, output) else { continue };
            digests.push(written.digest());
            if keeps {
                tensors.push(written);
            }
        }
        if digests.is_empty() {
            *sliced = true;
            return;
        }
        if keeps {
            *kept = Some(tensors);
        }
        let bytes: Vec<u8> = digests.iter().flat_map(|digest| digest.0).flat_map(u64::to_le_bytes).collect();
        trace.push(call, *at, Digest::of_bytes(&bytes), std::mem::take(sliced));
    }
}

impl Written {
    fn digest(&self) -> Digest {
        let bytes: Vec<u8> = self.bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        Digest::of_bytes(&bytes)
    }
}

/// What an op wrote, on the host. None for slices.
fn written<D: Device>(device: &D, output: Output<'_, D::Memory>) -> Option<Written> {
    let (format, bits) = match output {
        Output::F32(tensor) | Output::Kept(tensor) => {
            (Format::F32, device.download(tensor).ok()?.into_iter().map(f32::to_bits).collect())
        }
        Output::Bf16(tensor) => {
            (Format::Bf16, device.download(tensor).ok()?.into_iter().map(|x| x.to_bits().into()).collect())
        }
        Output::F16(tensor) => {
            (Format::F16, device.download(tensor).ok()?.into_iter().map(|x| x.to_bits().into()).collect())
        }
        Output::U32(tensor) => (Format::U32, device.download(tensor).ok()?),
        Output::Rows(_) | Output::Weight(_) => return None,
    };
    Some(Written { format, bits })
}
