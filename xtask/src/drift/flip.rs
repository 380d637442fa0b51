//! One bit of one result goes wrong: in one call of an op, or in every call from then on.

use isobit_kernels::backend::Bytes;
use isobit_kernels::observe::{Call, Observer};
use isobit_kernels::op::Output;
use isobit_kernels::reference::ReferenceMemory;
use isobit_kernels::{Buffer, Element, Pass, Place, Reference};
use std::cell::{Cell, RefCell};

/// Which bit of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bit {
    Low,
    /// Of a float the highest bit of its exponent.
    High,
    Sign,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Position {
    First,
    Middle,
    Last,
}

impl Position {
    fn of(self, length: usize) -> usize {
        match self {
            Self::First => 0,
            Self::Middle => length / 2,
            Self::Last => length - 1,
        }
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// A call by its number, or all calls of an op.
    pub(crate) when: When,
    /// Which of the arrays that the op writes.
    pub(crate) array: usize,
    pub(crate) element: Position,
    pub(crate) bit: Bit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    Once(usize),
    Always(&'static str),
}

/// A call as it was seen: its op, where it stands, and the lengths of the arrays that it wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) op: &'static str,
    place: Place,
    pub(crate) lengths: Vec<usize>,
}

impl Seen {
    /// The pass that it belongs to; none for what comes after the micro-batches: clipping, the
    /// optimizer, and the digests of the record.
    pub(crate) fn pass(&self) -> Option<Pass> {
        match self.place {
            Place::MicroBatch { .. } | Place::Evaluation { .. } => Some(Pass::Forward),
            Place::Embedding(pass) | Place::Layer(_, pass) | Place::Head(pass) => Some(pass),
            Place::Update => None,
        }
    }
}

/// Notes all calls, and spoils what it is told to.
pub(crate) struct Flip {
    pub(crate) fault: Cell<Option<Fault>>,
    pub(crate) seen: RefCell<Vec<Seen>>,
    /// Where the calls that follow stand.
    place: Cell<Place>,
}

impl Default for Flip {
    fn default() -> Self {
        Self { fault: Cell::new(None), seen: RefCell::default(), place: Cell::new(Place::Update) }
    }
}

impl Observer<Reference> for Flip {
    fn enter(&self, place: Place) {
        self.place.set(place);
    }

    fn before(&self, _: &Reference, _: Call, _: &mut Bytes<ReferenceMemory>) {}

    fn after(&self, _: &Reference, call: Call, outputs: Vec<Output<'_, ReferenceMemory>>) {
        let mut arrays: Vec<Array<'_>> = outputs.into_iter().flat_map(arrays).collect();
        let mut seen = self.seen.borrow_mut();
        let lengths = arrays.iter().map(Array::length).collect();
        seen.push(Seen { op: call.op, place: self.place.get(), lengths });
        let Some(fault) = self.fault.get() else { return };
        let hit = match fault.when {
            When::Once(number) => number == seen.len() - 1,
            When::Always(op) => op == call.op,
        };
        if let Some(array) = arrays.get_mut(fault.array).filter(|array| hit && array.length() > 0) {
            array.flip(fault.element.of(array.length()), fault.bit);
        }
    }
}

/// Elements that an op wrote.
enum Array<'a> {
    F32(&'a mut [f32]),
    U32(&'a mut [u32]),
    Bf16(&'a mut [half::bf16]),
    F16(&'a mut [half::f16]),
    /// Integers of slices.
    Slices(&'a mut [i32]),
}

fn arrays(output: Output<'_, ReferenceMemory>) -> Vec<Array<'_>> {
    fn plain<T: Element>(buffer: &mut Buffer<T>) -> &mut [T] {
        buffer
    }
    match output {
        Output::F32(x) | Output::Kept(x) => vec![Array::F32(plain(x))],
        Output::Bf16(x) => vec![Array::Bf16(plain(x))],
        Output::F16(x) => vec![Array::F16(plain(x))],
        Output::U32(x) => vec![Array::U32(plain(x))],
        Output::Rows(rows) => vec![Array::Slices(&mut rows.integers), Array::F32(&mut rows.scales)],
        Output::Weight(weight) => vec![Array::Slices(&mut weight.integers), Array::F32(&mut weight.scales)],
    }
}

impl Array<'_> {
    fn length(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::U32(x) => x.len(),
            Self::Bf16(x) => x.len(),
            Self::F16(x) => x.len(),
            Self::Slices(x) => x.len(),
        }
    }

    fn flip(&mut self, at: usize, bit: Bit) {
        let mask = |bits: u32| match bit {
            Bit::Low => 1,
            Bit::High => 1 << (bits - 2),
            Bit::Sign => 1 << (bits - 1),
        };
        match self {
            Self::F32(x) => x[at] = f32::from_bits(x[at].to_bits() ^ mask(32)),
            Self::U32(x) => x[at] ^= mask(32),
            Self::Bf16(x) => x[at] = half::bf16::from_bits(x[at].to_bits() ^ mask(16) as u16),
            Self::F16(x) => x[at] = half::f16::from_bits(x[at].to_bits() ^ mask(16) as u16),
            // Two bytes of two's complement; x3 has a third below them.
            Self::Slices(x) if bit == Bit::Sign => x[at] = -x[at],
            Self::Slices(x) => x[at] ^= mask(15) as i32,
        }
    }
}
