//! Recomputation, also called activation or gradient checkpointing: a block's activations are
//! dropped after its forward pass and recomputed in the backward pass.
//!
//! Both passes are pure functions of the block's input, so they give the same bits; that is
//! checked, not assumed. A recomputation must save the same tensors, by number and size, and its
//! ends must have the digests of the forward pass, or the step stops; a third computation then
//! locates where the first two differ. The *ends* are the inputs of the block's last products
//! ([`Tape::finish`], [`Tape::finish_experts`]) and any other saved value that leads to none of
//! them: everything the gradients use lies before the ends, so nothing after them is recomputed.
//! A product sees only slices of its inputs; those that a gradient reads have digests of their own.
//! Expert indices are data, not results: every policy keeps them.

use crate::arena::Lease;
use crate::gradients::Gradients;
use crate::op::Node;
use crate::op::balance::Collected;
use crate::op::router::Grouping;
use crate::stream::Direction;
use crate::tape::{Gradient, Tape, Variable};
use crate::{Finding, TapeError};
use isobit_kernels::backend::BegunDigests;
use isobit_kernels::op::AnyBuffer;
use isobit_kernels::{Backend, Pass, Place};
use isobit_numerics::digest::Digest;
use std::collections::VecDeque;
use std::rc::Rc;

/// Which activations are kept from the forward to the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// All of them.
    None,
    /// The input of every block, the outputs of its attention or delta rule, and the expert indices
    /// of its router; the rest is recomputed.
    Selective,
    /// The input of every block and the expert indices of its router.
    #[default]
    Full,
}

impl Policy {
    pub const ALL: [Self; 3] = [Self::None, Self::Selective, Self::Full];

    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Full => "full",
        }
    }
}

/// The checks on a recomputation. Only tests relax them, to see what they prevent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contract {
    /// Routers reuse the expert indices of the forward pass.
    pub(crate) cached_indices: bool,
    /// Differing digests stop the step.
    pub(crate) checks_digests: bool,
}

impl Default for Contract {
    fn default() -> Self {
        Self { cached_indices: true, checks_digests: true }
    }
}

/// What the ops of a block saved: one entry per op, with the lengths.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Trace(Vec<(&'static str, Vec<usize>)>);

impl Trace {
    pub(crate) fn note(&mut self, op: &'static str, saved: &[usize]) {
        self.0.push((op, saved.to_vec()));
    }

    /// The first op that saved something different, with both versions as text.
    fn first_difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let describe = |entry: Option<&(&'static str, Vec<usize>)>| {
            entry.map_or("nothing".to_string(), |(op, lengths)| {
                format!("{} tensors of {lengths:?} elements ({op})", lengths.len())
            })
        };
        let at = (0..self.0.len().max(other.0.len())).find(|&at| self.0.get(at) != other.0.get(at))?;
        let op = self.0.get(at).or(other.0.get(at)).map_or("nothing", |(op, _)| *op);
        Some((op, describe(self.0.get(at)), describe(other.0.get(at))))
    }
}

/// The results of one op.
pub(crate) type Results<B> = Vec<Rc<Lease<B>>>;

/// Results that the selective policy keeps, first in, first out.
pub(crate) struct Kept<B: Backend> {
    pub(crate) mode: KeptMode,
    pub(crate) queue: VecDeque<Results<B>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeptMode {
    Off,
    /// Forward pass: results are stored.
    Store,
    /// Recomputation: results are taken from here instead of computed.
    Use,
}

impl<B: Backend> Default for Kept<B> {
    fn default() -> Self {
        Self { mode: KeptMode::Off, queue: VecDeque::new() }
    }
}

/// A block as a function of its input.
pub(crate) type Block<'a, B> = Rc<dyn Fn(&mut Tape<'a, B>, Variable<B>) -> Result<Variable<B>, TapeError> + 'a>;

/// A block whose activations were dropped.
pub(crate) struct Recomputation<'a, B: Backend> {
    layer: usize,
    block: Block<'a, B>,
    input: Variable<B>,
    output: usize,
    digests: BegunDigests<B::Memory>,
    trace: Trace,
    kept: VecDeque<Results<B>>,
    /// Expert indices of its routers.
    groupings: Vec<Rc<Grouping<B>>>,
}

impl<'a, B: Backend> Tape<'a, B> {
    /// Continues even if the digests of a recomputation differ: for tests that show the
    /// consequences.
    #[doc(hidden)]
    #[must_use]
    pub fn without_digest_check(self) -> Self {
        let contract = Contract { checks_digests: false, ..self.contract };
        Self { contract, ..self }
    }

    /// Runs one block of the model under the tape's policy. The backward pass begins with the last
    /// block, which would be recomputed right after its activations were dropped; so the last block
    /// keeps them under every policy.
    pub fn block(
        &mut self,
        layer: usize,
        is_last: bool,
        x: Variable<B>,
        block: impl Fn(&mut Self, Variable<B>) -> Result<Variable<B>, TapeError> + 'a,
    ) -> Result<Variable<B>, TapeError> {
        self.enter_layer(layer, Direction::Forward);
        self.backend.enter(Place::Layer(layer, Pass::Forward));
        if self.policy == Policy::None || !self.recording || is_last {
            if self.recording {
                self.nodes.push(Node::BlockStart);
            }
            let start = self.nodes.len();
            let output = block(self, x)?;
            self.ends.clear();
            self.aside.clear();
            if self.recording {
                self.end_block(layer, start, is_last)?;
            }
            return Ok(output);
        }
        self.recording = false;
        self.trace = Trace::default();
        if self.policy == Policy::Selective {
            self.kept = Kept { mode: KeptMode::Store, queue: VecDeque::new() };
        }
        let input = x.clone();
        let routers = self.groupings.len();
        let output = block(self, x)?;
        self.recording = true;
        let digests = self.begin_end_digests(&output);
        let (trace, kept) = (std::mem::take(&mut self.trace), std::mem::take(&mut self.kept));
        if output.needs_gradient {
            let (block, output) = (Rc::new(block) as Block<'a, B>, output.id);
            let groupings = self.groupings[routers..].to_vec();
            let mut recomputation =
                Recomputation { layer, block, input, output, digests, trace, kept: kept.queue, groupings };
            self.offload(recomputation.tensors_mut())?;
            self.nodes.push(Node::Recomputation(recomputation));
        }
        Ok(output)
    }

    /// An op's results: computed, or taken from the kept ones.
    pub(crate) fn kept_or<const I: usize, const N: usize>(
        &mut self,
        inputs: [&Variable<B>; I],
        compute: impl FnOnce(&Self) -> [Rc<Lease<B>>; N],
    ) -> [Rc<Lease<B>>; N] {
        // A kept result does not depend on its recomputed inputs, and one that is computed again
        // only on their slices.
        for input in inputs {
            self.keep_aside(&input.data);
        }
        if self.kept.mode == KeptMode::Use
            && let Some(results) = self.kept.queue.pop_front()
        {
            return results.try_into().unwrap_or_else(|_| unreachable!("ops come in the order of the forward pass"));
        }
        let results = compute(self);
        if self.kept.mode == KeptMode::Store {
            self.kept.queue.push_back(results.to_vec());
        }
        results
    }

    /// Digests of the block's ends, or of its output if it has none, and of the values it keeps
    /// aside.
    fn begin_end_digests(&mut self, output: &Variable<B>) -> BegunDigests<B::Memory> {
        let mut ends = std::mem::take(&mut self.ends);
        if ends.is_empty() {
            ends.push(Rc::clone(&output.data));
        }
        ends.append(&mut self.aside);
        let ends: Vec<_> = ends.iter().map(|end| AnyBuffer::F32(&***end)).collect();
        BegunDigests::new(self.backend, &ends)
    }

    fn end_digests(&mut self, output: &Variable<B>) -> Result<Vec<Digest>, TapeError> {
        Ok(self.begin_end_digests(output).finish(self.backend)?)
    }
}

impl<'a, B: Backend> Recomputation<'a, B> {
    /// Recomputes the block, compares, and plays that tape backward.
    pub(crate) fn backward(
        mut self,
        tape: &mut Tape<'a, B>,
        values: &mut [Gradient<B>],
        gradients: &mut Gradients<B>,
    ) -> Result<(), TapeError> {
        let Some(gradient) = values[self.output].take() else { return Ok(()) };
        tape.enter_layer(self.layer, Direction::Backward);
        tape.restore(self.tensors_mut());
        tape.backend.enter(Place::Layer(self.layer, Pass::Recomputation));
        let (mut inner, output) = self.compute(tape)?;
        if let Some((op, forward, recomputed)) = self.trace.first_difference(&inner.trace) {
            return Err(TapeError::Recompute { layer: self.layer, op, forward, recomputed });
        }
        let digests = inner.end_digests(&output)?;
        let forward = self.digests.finish(tape.backend)?;
        if digests != forward && tape.contract.checks_digests {
            let [forward, recomputed] = [&forward, &digests].map(|digests| text(digests));
            let finding = self.finding(tape, &inner, &digests)?;
            return Err(TapeError::Digest { layer: self.layer, forward, recomputed, finding });
        }
        let mut inner_values: Vec<Gradient<B>> = (0..inner.next).map(|_| None).collect();
        inner_values[output.id] = Some(gradient);
        drop(output);
        tape.backend.enter(Place::Layer(self.layer, Pass::Backward));
        inner.play(&mut inner_values, gradients)?;
        if let Some(gradient) = inner_values[0].take() {
            tape.contribute(values, self.input.id, gradient);
        }
        drop(inner);
        tape.leave_block(gradients)
    }

    /// What is kept of the forward pass.
    fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Rc<Lease<B>>> {
        std::iter::once(&mut self.input.data).chain(self.kept.iter_mut().flatten())
    }

    /// Computes the block again, recorded on its own tape.
    fn compute(&self, tape: &Tape<'a, B>) -> Result<(Tape<'a, B>, Variable<B>), TapeError> {
        let mut inner = Tape::new(tape.backend, tape.parameters, tape.layout, tape.profile, Policy::None);
        inner.arena = Rc::clone(&tape.arena);
        inner.training = tape.training;
        inner.recomputing = true;
        if tape.policy == Policy::Selective {
            inner.kept = Kept { mode: KeptMode::Use, queue: self.kept.clone() };
        }
        if tape.contract.cached_indices {
            inner.replayed = self.groupings.iter().cloned().collect();
        }
        inner.collected = tape.collected.as_ref().map(Collected::of_backward);
        let start = Variable { id: 0, ..self.input.clone() };
        inner.next = 1;
        let output = (self.block)(&mut inner, start)?;
        Ok((inner, output))
    }

    /// Computes the block a third time and looks for the first op whose saved tensors differ from
    /// those of the second.
    fn finding(&self, tape: &Tape<'a, B>, second: &Tape<'a, B>, digests: &[Digest]) -> Result<Finding, TapeError> {
        let (mut third, output) = self.compute(tape)?;
        for (second, third) in second.nodes.iter().zip(&third.nodes) {
            let ((op, second), (_, third)) = (second.saved(), third.saved());
            for (tensor, (second, third)) in second.into_iter().zip(third).enumerate() {
                let both = [second, third].map(|tensor| AnyBuffer::F32(&**tensor));
                let digests = BegunDigests::new(tape.backend, &both).finish(tape.backend)?;
                if digests[0] != digests[1] {
                    return Ok(Finding::Op { op, tensor });
                }
            }
        }
        let agrees = third.end_digests(&output)? == digests;
        Ok(if agrees { Finding::Agrees } else { Finding::Ends })
    }
}

fn text(digests: &[Digest]) -> String {
    digests.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}
