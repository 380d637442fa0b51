//! Weights: trained ones, with names and gradients, and frozen ones, in the form their op needs.

use crate::TapeError;
use half::{bf16, f16};
use isobit_kernels::backend::Length;
use isobit_kernels::op::slices::sliced_weight;
use isobit_kernels::op::{Add, QuantizedShape, SliceShape};
use isobit_kernels::tensor::{Buffer, F32, QuantizedWeight, Weight};
use isobit_kernels::{Backend, Matrix as Operand, StoredMatrix};
use std::cell::RefCell;
use std::rc::Rc;

/// A trained tensor of a model, by its index in [`Parameters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ParameterId(usize);

/// A trained tensor.
pub struct Parameter<B: Backend> {
    /// The name in its file.
    pub name: String,
    pub shape: Vec<usize>,
    pub value: F32<B>,
    /// Whether weight decay applies.
    pub decays: bool,
    /// Slices of the current value, made on first use.
    sliced: RefCell<Option<Rc<Weight<B>>>>,
}

impl<B: Backend> Parameter<B> {
    pub fn length(&self) -> usize {
        self.shape.iter().product()
    }
}

/// All trained tensors, in model order.
pub struct Parameters<B: Backend> {
    all: Vec<Parameter<B>>,
}

impl<B: Backend> Default for Parameters<B> {
    fn default() -> Self {
        Self { all: Vec::new() }
    }
}

impl<B: Backend> Parameters<B> {
    pub fn add(&mut self, name: impl Into<String>, shape: Vec<usize>, value: F32<B>, decays: bool) -> ParameterId {
        self.all.push(Parameter { name: name.into(), shape, value, decays, sliced: RefCell::new(None) });
        ParameterId(self.all.len() - 1)
    }

    pub fn iter(&self) -> impl Iterator<Item = (ParameterId, &Parameter<B>)> {
        self.all.iter().enumerate().map(|(index, parameter)| (ParameterId(index), parameter))
    }

    pub fn get(&self, id: ParameterId) -> &Parameter<B> {
        &self.all[id.0]
    }

    /// For changing the value: drops its slices.
    pub fn get_mut(&mut self, id: ParameterId) -> &mut Parameter<B> {
        let parameter = &mut self.all[id.0];
        parameter.sliced.replace(None);
        parameter
    }

    /// For changing all values: drops their slices.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Parameter<B>> {
        self.all.iter_mut().inspect(|parameter| drop(parameter.sliced.replace(None)))
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
        let make = || Rc::new(sliced_weight(backend, StoredMatrix::F32(&parameter.value), count, shape));
        Rc::clone(parameter.sliced.borrow_mut().get_or_insert_with(make))
    }
}

/// Gradients of the trained tensors in float32, summed over a step.
pub struct Gradients<B: Backend> {
    all: Vec<F32<B>>,
    reached: Vec<bool>,
    /// Whether deferred parts are still to come.
    awaited: Vec<bool>,
    /// The embedding's part of a tied table, separate from the head's: each is a sum over the rows
    /// of the step on its own; otherwise the order would depend on the micro-batches.
    tied: Option<(ParameterId, F32<B>)>,
}

impl<B: Backend> Gradients<B> {
    pub fn zeros(backend: &B, parameters: &Parameters<B>) -> Self {
        let all = parameters.all.iter().map(|parameter| backend.zeros(parameter.length())).collect();
        let [reached, awaited] = [(); 2].map(|()| vec![false; parameters.len()]);
        Self { all, reached, awaited, tied: None }
    }

    /// Gradients made elsewhere: a part per parameter, and possibly the embedding's part of a tied
    /// table, which is the first parameter.
    pub fn from_parts(mut all: Vec<F32<B>>, parameters: &Parameters<B>) -> Self {
        let mut rest = all.split_off(parameters.len());
        let tied = rest.pop().map(|part| (ParameterId(0), part));
        let [reached, awaited] = [true, false].map(|value| vec![value; parameters.len()]);
        Self { all, reached, awaited, tied }
    }

    /// The embedding's part of a tied table, until [`Gradients::combine`] adds it.
    pub fn tied_part(&self) -> Option<&F32<B>> {
        self.tied.as_ref().map(|(_, part)| part)
    }

    pub fn get(&self, id: ParameterId) -> &F32<B> {
        &self.all[id.0]
    }

    pub fn get_mut(&mut self, id: ParameterId) -> &mut F32<B> {
        &mut self.all[id.0]
    }

    /// For the update, in parameter order.
    pub fn iter(&self) -> impl Iterator<Item = &F32<B>> {
        self.all.iter()
    }

    /// For clipping, in parameter order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut F32<B>> {
        self.all.iter_mut()
    }

    /// For an op's contribution.
    pub(crate) fn reach(&mut self, id: ParameterId) -> &mut F32<B> {
        assert!(!self.awaited[id.0], "an op that does not wait overtakes deferred parts of the same gradient");
        self.reached[id.0] = true;
        &mut self.all[id.0]
    }

    /// For an op that contributes to two parameters at once.
    pub(crate) fn reach_both(&mut self, a: ParameterId, b: ParameterId) -> (&mut F32<B>, &mut F32<B>) {
        for id in [a, b] {
            self.reach(id);
        }
        let [a, b] = self.all.get_disjoint_mut([a.0, b.0]).expect("two tensors");
        (a, b)
    }

    /// A part of this gradient is deferred; until it arrives no other op may add to it, or the
    /// order of its parts would change.
    pub(crate) fn await_deferred(&mut self, id: ParameterId) {
        self.awaited[id.0] = true;
    }

    /// The deferred parts arrive now.
    pub(crate) fn end_deferral(&mut self) {
        self.awaited.fill(false);
    }

    /// For the embedding's contribution to a table that is also the head.
    pub(crate) fn reach_tied(&mut self, backend: &B, id: ParameterId, length: usize) -> &mut F32<B> {
        self.reached[id.0] = true;
        &mut self.tied.get_or_insert_with(|| (id, backend.zeros(length))).1
    }

    /// The sum of the gradients of two groups of rows, tensor by tensor.
    #[must_use]
    pub fn plus(mut self, backend: &B, right: Self) -> Self {
        let add = |left: &mut F32<B>, right: &F32<B>| {
            let mut sum = backend.zeros(left.len());
            backend.run(Add { y: &mut sum, a: left, b: right });
            *left = sum;
        };
        self.all.iter_mut().zip(right.all).for_each(|(left, right)| add(left, &right));
        // Every group uses the table, or none does: the tape is the same for all rows.
        if let (Some((_, left)), Some((_, right))) = (&mut self.tied, &right.tied) {
            add(left, right);
        }
        self
    }

    /// Adds the parts of a tied table: the head's, then the embedding's. Called once, after the
    /// last group.
    pub fn combine(&mut self, backend: &B, parameters: &Parameters<B>) {
        if let Some((id, embedding)) = self.tied.take() {
            let mut sum = backend.zeros(parameters.get(id).length());
            backend.run(Add { y: &mut sum, a: &self.all[id.0], b: &embedding });
            self.all[id.0] = sum;
        }
    }

    /// The same where the head's part was formed on another device: `self` has the embedding's.
    pub fn combine_with(&mut self, backend: &B, id: ParameterId, head: &F32<B>) {
        let mut sum = backend.zeros(head.len());
        backend.run(Add { y: &mut sum, a: head, b: &self.all[id.0] });
        self.all[id.0] = sum;
    }

    /// Fails if a trained tensor received no gradient.
    pub fn check_reached(&self, parameters: &Parameters<B>) -> Result<(), TapeError> {
        match self.reached.iter().position(|reached| !reached) {
            None => Ok(()),
            Some(index) => Err(TapeError::NoGradient { name: parameters.all[index].name.clone() }),
        }
    }
}

/// Frozen 4-bit weights.
pub struct Quantized<B: Backend> {
    pub weight: QuantizedWeight<B>,
    pub shape: QuantizedShape,
}

/// A weight matrix of a linear layer.
pub enum Matrix<B: Backend> {
    /// Stored only as slices.
    Frozen(Weight<B>),
    /// Stored only as 4-bit integers: parts stacked by rows. For linear layers and experts; head
    /// and router take slices.
    Quantized(Vec<Quantized<B>>),
    Trained(ParameterId),
}

impl<B: Backend> Matrix<B> {
    pub(crate) fn id(&self) -> Option<ParameterId> {
        match self {
            Self::Frozen(_) | Self::Quantized(_) => None,
            Self::Trained(id) => Some(*id),
        }
    }

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
            Self::Trained(id) => &parameters.get(*id).value,
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
