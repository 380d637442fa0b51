//! Weights of layers that are kept in host memory: frozen ones in the format of their file or in 4
//! bits, trained ones in float32. While a layer is computed, the weights of the layer after it come
//! to the device, and all others have left: the device holds two layers. They come beside the
//! computation where the device can.
//!
//! Slices are made on the device when their layer is entered. They are a function of the numbers,
//! so the bits are those of slices that stay.

use crate::parameters::{ParameterId, Parameters};
use half::{bf16, f16};
use isobit_kernels::op::SliceShape;
use isobit_kernels::op::slices::sliced_weight;
use isobit_kernels::tensor::{Buffer, HostBuffer, HostF32, HostQuantizedWeight, QuantizedWeight, Weight};
use isobit_kernels::{Arriving, Backend, StoredMatrix};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Frozen numbers in host memory, in their file's format.
pub enum HostNumbers<B: Backend> {
    F32(HostF32<B>),
    Bf16(HostBuffer<B, bf16>),
    F16(HostBuffer<B, f16>),
}

/// A weight that comes to the device and leaves it: `A` while it arrives.
struct Passing<A, W> {
    arriving: RefCell<Option<A>>,
    arrived: RefCell<Option<Rc<W>>>,
}

impl<A, W> Passing<A, W> {
    const fn new() -> Self {
        Self { arriving: RefCell::new(None), arrived: RefCell::new(None) }
    }

    /// Begins to load, unless the weight is on the device or on its way.
    fn load_ahead(&self, begin: impl FnOnce() -> A) {
        if self.arrived.borrow().is_none() {
            self.arriving.borrow_mut().get_or_insert_with(begin);
        }
    }

    fn weight(&self, begin: impl FnOnce() -> A, finish: impl FnOnce(A) -> W) -> Rc<W> {
        let make = || Rc::new(finish(self.arriving.take().unwrap_or_else(begin)));
        Rc::clone(self.arrived.borrow_mut().get_or_insert_with(make))
    }

    fn unload(&self) {
        self.arriving.replace(None);
        self.arrived.replace(None);
    }
}

/// A frozen matrix, or several stacked ones.
pub struct StreamedMatrix<B: Backend> {
    numbers: HostNumbers<B>,
    count: usize,
    shape: SliceShape,
    passing: Passing<ArrivingNumbers<B>, Weight<B>>,
}

/// Numbers on their way to the device, in their file's format.
enum ArrivingNumbers<B: Backend> {
    F32(Arriving<Buffer<B, f32>>),
    Bf16(Arriving<Buffer<B, bf16>>),
    F16(Arriving<Buffer<B, f16>>),
}

impl<B: Backend> StreamedMatrix<B> {
    pub fn new(numbers: HostNumbers<B>, count: usize, shape: SliceShape) -> Rc<Self> {
        Rc::new(Self { numbers, count, shape, passing: Passing::new() })
    }

    fn begin_load(&self, backend: &B) -> ArrivingNumbers<B> {
        match &self.numbers {
            HostNumbers::F32(host) => ArrivingNumbers::F32(backend.begin_load(host)),
            HostNumbers::Bf16(host) => ArrivingNumbers::Bf16(backend.begin_load(host)),
            HostNumbers::F16(host) => ArrivingNumbers::F16(backend.begin_load(host)),
        }
    }

    pub(crate) fn weight(&self, backend: &B) -> Rc<Weight<B>> {
        let slice = |stored: StoredMatrix<'_, B::Memory>| sliced_weight(backend, stored, self.count, self.shape);
        let finish = |arriving| match arriving {
            ArrivingNumbers::F32(numbers) => slice(StoredMatrix::F32(&backend.finish_load(numbers))),
            ArrivingNumbers::Bf16(numbers) => slice(StoredMatrix::Bf16(&backend.finish_load(numbers))),
            ArrivingNumbers::F16(numbers) => slice(StoredMatrix::F16(&backend.finish_load(numbers))),
        };
        self.passing.weight(|| self.begin_load(backend), finish)
    }
}

/// Frozen 4-bit weights.
pub struct StreamedQuantized<B: Backend> {
    host: HostQuantizedWeight<B>,
    passing: Passing<Arriving<QuantizedWeight<B>>, QuantizedWeight<B>>,
}

impl<B: Backend> StreamedQuantized<B> {
    pub fn new(host: HostQuantizedWeight<B>) -> Rc<Self> {
        Rc::new(Self { host, passing: Passing::new() })
    }

    pub(crate) fn weight(&self, backend: &B) -> Rc<QuantizedWeight<B>> {
        let finish = |arriving| backend.finish_load_quantized(arriving);
        self.passing.weight(|| backend.begin_load_quantized(&self.host), finish)
    }
}

/// A weight of a layer.
pub enum Streamed<B: Backend> {
    Matrix(Rc<StreamedMatrix<B>>),
    Quantized(Rc<StreamedQuantized<B>>),
    /// The matrix `id`, or `count` stacked ones.
    Trained {
        id: ParameterId,
        count: usize,
        shape: SliceShape,
    },
}

impl<B: Backend> Streamed<B> {
    /// Begins to load, if it is not on the device.
    fn load_ahead(&self, backend: &B, parameters: &Parameters<B>) {
        match self {
            Self::Matrix(matrix) => matrix.passing.load_ahead(|| matrix.begin_load(backend)),
            Self::Quantized(quantized) => {
                quantized.passing.load_ahead(|| backend.begin_load_quantized(&quantized.host));
            }
            Self::Trained { id, .. } => parameters.load_ahead(backend, *id),
        }
    }

    fn load(&self, backend: &B, parameters: &Parameters<B>) {
        match self {
            Self::Matrix(matrix) => drop(matrix.weight(backend)),
            Self::Quantized(quantized) => drop(quantized.weight(backend)),
            Self::Trained { id, count, shape } => drop(parameters.sliced(backend, *id, *count, *shape)),
        }
    }

    fn unload(&self, parameters: &Parameters<B>) {
        match self {
            Self::Matrix(matrix) => matrix.passing.unload(),
            Self::Quantized(quantized) => quantized.passing.unload(),
            Self::Trained { id, .. } => parameters.drop_slices(*id),
        }
    }
}

/// Which layer comes after one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

/// The weights in host memory, by layer.
pub(crate) struct Streams<B: Backend>(BTreeMap<usize, Vec<Streamed<B>>>);

impl<B: Backend> Default for Streams<B> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<B: Backend> Streams<B> {
    pub(crate) fn add(&mut self, layer: usize, weight: Streamed<B>) {
        self.0.entry(layer).or_default().push(weight);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn enter(&self, backend: &B, parameters: &Parameters<B>, layer: usize, direction: Direction) {
        let next = match direction {
            Direction::Forward => self.0.range(layer + 1..).next(),
            Direction::Backward => self.0.range(..layer).next_back(),
        };
        let next = next.map(|(at, _)| *at);
        for (at, weights) in &self.0 {
            if *at != layer && Some(*at) != next {
                for weight in weights {
                    weight.unload(parameters);
                }
            }
        }
        let of = |at: usize| self.0.get(&at).into_iter().flatten();
        of(layer).for_each(|weight| weight.load(backend, parameters));
        next.into_iter().flat_map(of).for_each(|weight| weight.load_ahead(backend, parameters));
    }
}
