//! Weights: trained ones, with names and gradients, and frozen ones, in the form their op needs.

use crate::stream::{Direction, Streamed, StreamedMatrix, StreamedQuantized, Streams};
use half::{bf16, f16};
use isobit_kernels::op::slices::sliced_weight;
use isobit_kernels::op::{QuantizedShape, SliceShape};
use isobit_kernels::tensor::{Buffer, F32, HostF32, QuantizedWeight, Weight};
use isobit_kernels::{Arriving, Backend, Matrix as Operand, StoredMatrix};
use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

/// A trained tensor of a model, by its index in [`Parameters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ParameterId(pub(crate) usize);

/// A trained tensor.
pub struct Parameter<B: Backend> {
    /// The name in its file.
    pub name: String,
    pub shape: Vec<usize>,
    pub value: Value<B>,
    /// Whether weight decay applies.
    pub decays: bool,
    /// The current value on its way from host memory.
    arriving: RefCell<Option<Arriving<F32<B>>>>,
    /// Slices of the current value, made on first use.
    sliced: RefCell<Option<Rc<Weight<B>>>>,
}

/// Where the numbers of a trained tensor are.
pub enum Value<B: Backend> {
    Device(F32<B>),
    /// In host memory; its layer makes slices of them when it needs them.
    Host(HostF32<B>),
}

/// The numbers on the device. Only matrices of layers are elsewhere, and ops take their slices.
impl<B: Backend> Deref for Value<B> {
    type Target = F32<B>;
    fn deref(&self) -> &F32<B> {
        match self {
            Self::Device(value) => value,
            Self::Host(_) => unreachable!("ops take the slices of a tensor in host memory"),
        }
    }
}

impl<B: Backend> DerefMut for Value<B> {
    fn deref_mut(&mut self) -> &mut F32<B> {
        match self {
            Self::Device(value) => value,
            Self::Host(_) => unreachable!("ops take the slices of a tensor in host memory"),
        }
    }
}

impl<B: Backend> Parameter<B> {
    pub fn length(&self) -> usize {
        self.shape.iter().product()
    }

    /// Drops what was made of the value on the device.
    fn drop_slices(&self) {
        self.arriving.replace(None);
        self.sliced.replace(None);
    }
}

/// All trained tensors, in model order.
pub struct Parameters<B: Backend> {
    pub(crate) all: Vec<Parameter<B>>,
    /// Weights of layers in host memory, trained and frozen.
    streams: Streams<B>,
}

impl<B: Backend> Default for Parameters<B> {
    fn default() -> Self {
        Self { all: Vec::new(), streams: Streams::default() }
    }
}

impl<B: Backend> Parameters<B> {
    pub fn add(&mut self, name: impl Into<String>, shape: Vec<usize>, value: F32<B>, decays: bool) -> ParameterId {
        self.add_value(name, shape, Value::Device(value), decays)
    }

    pub fn add_value(
        &mut self,
        name: impl Into<String>,
        shape: Vec<usize>,
        value: Value<B>,
        decays: bool,
    ) -> ParameterId {
        let (arriving, sliced) = (RefCell::new(None), RefCell::new(None));
        self.all.push(Parameter { name: name.into(), shape, value, decays, arriving, sliced });
        ParameterId(self.all.len() - 1)
    }

    pub fn iter(&self) -> impl Iterator<Item = (ParameterId, &Parameter<B>)> {
        self.all.iter().enumerate().map(|(index, parameter)| (ParameterId(index), parameter))
    }

    pub fn get(&self, id: ParameterId) -> &Parameter<B> {
        &self.all[id.0]
    }

    /// The numbers of a tensor that is on the device.
    pub fn value(&self, id: ParameterId) -> &F32<B> {
        &self.all[id.0].value
    }

    /// For changing the value: drops its slices.
    pub fn get_mut(&mut self, id: ParameterId) -> &mut Parameter<B> {
        let parameter = &mut self.all[id.0];
        parameter.drop_slices();
        parameter
    }

    /// For changing all values: drops their slices.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Parameter<B>> {
        self.all.iter_mut().inspect(|parameter| parameter.drop_slices())
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The matrix `id`, or `count` stacked matrices, as slices.
    pub(crate) fn sliced(&self, backend: &B, id: ParameterId, count: usize, shape: SliceShape) -> Rc<Weight<B>> {
        let parameter = &self.all[id.0];
        let make = || match &parameter.value {
            Value::Device(value) => Rc::new(sliced_weight(backend, StoredMatrix::F32(value), count, shape)),
            Value::Host(host) => {
                let arriving = parameter.arriving.take().unwrap_or_else(|| backend.begin_load(host));
                let value = backend.finish_load(arriving);
                Rc::new(sliced_weight(backend, StoredMatrix::F32(&value), count, shape))
            }
        };
        Rc::clone(parameter.sliced.borrow_mut().get_or_insert_with(make))
    }

    /// Drops the slices of a value; they are made again when they are needed.
    pub(crate) fn drop_slices(&self, id: ParameterId) {
        self.all[id.0].drop_slices();
    }

    /// Begins to load a value from host memory, unless its slices are on the device.
    pub(crate) fn load_ahead(&self, backend: &B, id: ParameterId) {
        let parameter = &self.all[id.0];
        if let (Value::Host(host), true) = (&parameter.value, parameter.sliced.borrow().is_none()) {
            parameter.arriving.borrow_mut().get_or_insert_with(|| backend.begin_load(host));
        }
    }

    /// A weight of `layer` that is in host memory.
    pub fn stream(&mut self, layer: usize, weight: Streamed<B>) {
        self.streams.add(layer, weight);
    }

    /// Whether weights are in host memory.
    pub(crate) fn has_streams(&self) -> bool {
        !self.streams.is_empty()
    }

    /// A layer is about to be computed: brings its weights to the device, begins to bring those of
    /// the next one in this direction, and drops all others there.
    pub(crate) fn enter_layer(&self, backend: &B, layer: usize, direction: Direction) {
        self.streams.enter(backend, self, layer, direction);
    }
}

/// Frozen 4-bit weights.
pub struct Quantized<B: Backend> {
    weight: QuantizedPlace<B>,
    pub shape: QuantizedShape,
}

enum QuantizedPlace<B: Backend> {
    Device(QuantizedWeight<B>),
    Streamed(Rc<StreamedQuantized<B>>),
}

impl<B: Backend> Quantized<B> {
    pub fn new(weight: QuantizedWeight<B>, shape: QuantizedShape) -> Self {
        Self { weight: QuantizedPlace::Device(weight), shape }
    }

    pub fn streamed(weight: Rc<StreamedQuantized<B>>, shape: QuantizedShape) -> Self {
        Self { weight: QuantizedPlace::Streamed(weight), shape }
    }

    /// Passes the weights on the device to `use_it`.
    pub(crate) fn with_weight<R>(&self, backend: &B, use_it: impl FnOnce(&QuantizedWeight<B>) -> R) -> R {
        match &self.weight {
            QuantizedPlace::Device(weight) => use_it(weight),
            QuantizedPlace::Streamed(streamed) => use_it(&streamed.weight(backend)),
        }
    }
}

/// A weight matrix of a linear layer.
pub enum Matrix<B: Backend> {
    /// Stored only as slices.
    Frozen(Weight<B>),
    /// Stored in host memory; slices are made while its layer is computed.
    Streamed(Rc<StreamedMatrix<B>>),
    /// Stored only as 4-bit integers: parts stacked by rows. For linear layers and experts; head
    /// and router take slices.
    Quantized(Vec<Quantized<B>>),
    Trained(ParameterId),
}

impl<B: Backend> Matrix<B> {
    /// Passes the slices of the matrix, or of `count` stacked matrices, to `use_it`.
    pub(crate) fn with_slices<R>(
        &self,
        backend: &B,
        parameters: &Parameters<B>,
        count: usize,
        shape: SliceShape,
        use_it: impl FnOnce(Operand<B::Memory>) -> R,
    ) -> R {
        match self {
            Self::Frozen(weight) => use_it(Operand::Sliced(weight)),
            Self::Streamed(streamed) => use_it(Operand::Sliced(&*streamed.weight(backend))),
            Self::Quantized(_) => unreachable!("four bits have products of their own, and head and router have slices"),
            Self::Trained(id) => use_it(Operand::Sliced(&*parameters.sliced(backend, *id, count, shape))),
        }
    }
}

/// A vector: a norm's weight or a bias.
pub enum Vector<B: Backend> {
    Frozen(F32<B>),
    Trained(ParameterId),
}

impl<B: Backend> Vector<B> {
    pub(crate) fn value<'a>(&'a self, parameters: &'a Parameters<B>) -> &'a F32<B> {
        match self {
            Self::Frozen(value) => value,
            Self::Trained(id) => parameters.value(*id),
        }
    }

    pub(crate) fn id(&self) -> Option<ParameterId> {
        match self {
            Self::Frozen(_) => None,
            Self::Trained(id) => Some(*id),
        }
    }
}

/// Frozen numbers in their file's format.
pub enum Frozen<B: Backend> {
    F32(F32<B>),
    Bf16(Buffer<B, bf16>),
    F16(Buffer<B, f16>),
}

impl<B: Backend> Frozen<B> {
    pub fn stored(&self) -> StoredMatrix<'_, B::Memory> {
        match self {
            Self::F32(buffer) => StoredMatrix::F32(buffer),
            Self::Bf16(buffer) => StoredMatrix::Bf16(buffer),
            Self::F16(buffer) => StoredMatrix::F16(buffer),
        }
    }
}

/// An embedding table.
pub enum Table<B: Backend> {
    Frozen(Frozen<B>),
    Trained(ParameterId),
    /// Trained, and also the LM head.
    Tied(ParameterId),
}
