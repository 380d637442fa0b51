//! The tape itself: what was computed, in order, and how gradients flow back through it.

use crate::TapeError;
use crate::arena::{Arena, Lease, RowsLease};
use crate::gradients::Gradients;
use crate::op::Node;
use crate::op::balance::Collected;
use crate::op::router::Grouping;
use crate::parameters::Parameters;
use crate::recompute::{Contract, Kept, Policy, Trace};
use isobit_kernels::op::{EmbeddingForward, SliceRows, SliceShape, Span, ToF32};
use isobit_kernels::tensor::U32;
use isobit_kernels::{Backend, DeviceFailure, Pass, Place, StoredMatrix};
use isobit_numerics::philox::Key;
use isobit_numerics::slices::Profile;
use std::collections::VecDeque;
use std::rc::Rc;

/// How the tokens of a micro-batch are laid out: rows of the step, documents inside rows,
/// positions.
pub struct BatchLayout<B: Backend> {
    pub tokens: usize,
    /// Offsets of the rows, ending with the total.
    pub row_starts: Vec<usize>,
    /// One per document.
    pub spans: Vec<Span>,
    /// Position of every token within its document.
    pub positions: U32<B>,
    /// The dropout key, the step, and the index of the first row within the step.
    pub key: Key,
    pub step: u32,
    pub first_row: u32,
}

impl<B: Backend> BatchLayout<B> {
    /// Offsets of the documents, ending with the total. Documents are contiguous and cover every
    /// token.
    pub(crate) fn document_starts(&self) -> Vec<usize> {
        let mut starts = vec![0];
        for span in &self.spans {
            assert_eq!(starts.last(), Some(&span.queries.start), "documents follow one another");
            starts.push(span.queries.end);
        }
        assert_eq!(starts.last(), Some(&self.tokens), "every token belongs to a document");
        starts
    }
}

/// A value on the tape: `[tokens, width]`.
pub struct Variable<B: Backend> {
    pub(crate) id: usize,
    pub(crate) data: Rc<Lease<B>>,
    pub(crate) width: usize,
    /// Whether anything upstream is trained.
    pub(crate) needs_gradient: bool,
}

impl<B: Backend> Variable<B> {
    pub fn width(&self) -> usize {
        self.width
    }

    pub fn buffer(&self) -> &isobit_kernels::tensor::F32<B> {
        &self.data
    }
}

impl<B: Backend> Clone for Variable<B> {
    fn clone(&self) -> Self {
        Self { data: Rc::clone(&self.data), ..*self }
    }
}

/// The gradient of a value, shared by the values that have the same one.
pub(crate) type Gradient<B> = Option<Rc<Lease<B>>>;

/// Records a forward pass over one micro-batch and plays it backward.
#[expect(clippy::struct_excessive_bools, reason = "each is a state of the tape of its own")]
pub struct Tape<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) arena: Rc<Arena<B>>,
    pub(crate) parameters: &'a Parameters<B>,
    pub(crate) layout: &'a BatchLayout<B>,
    pub(crate) profile: Profile,
    pub(crate) policy: Policy,
    /// Whether dropout is active.
    pub(crate) training: bool,
    pub(crate) nodes: Vec<Node<'a, B>>,
    pub(crate) next: usize,
    /// Off in the forward pass of a block that will be recomputed, and in evaluation.
    pub(crate) recording: bool,
    /// What a block saves, or would save.
    pub(crate) trace: Trace,
    /// What the selective policy keeps from a block.
    pub(crate) kept: Kept<B>,
    /// On while a block is recomputed: work that only its output needs is skipped.
    pub(crate) recomputing: bool,
    /// Values at the ends of the running block; its digest covers them.
    pub(crate) ends: Vec<Rc<Lease<B>>>,
    /// Values that the gradients of the running block use. Nothing later derives from them, or not
    /// from all of their bits, so they have their own digests.
    pub(crate) aside: Vec<Rc<Lease<B>>>,
    /// Whether activations wait in host memory for the backward pass of their block.
    pub(crate) activations_on_host: bool,
    /// Expert indices of all routers so far.
    pub(crate) groupings: Vec<Rc<Grouping<B>>>,
    /// Expert indices of the forward pass, reused by the routers of a recomputation.
    pub(crate) replayed: VecDeque<Rc<Grouping<B>>>,
    /// For the load-balancing loss, if enabled.
    pub(crate) collected: Option<Collected<B>>,
    pub(crate) contract: Contract,
    /// The values that enter and leave a part of a model, by their ids.
    pub(crate) input: Option<usize>,
    pub(crate) output: Option<usize>,
}

impl<'a, B: Backend> Tape<'a, B> {
    pub fn new(
        backend: &'a B,
        parameters: &'a Parameters<B>,
        layout: &'a BatchLayout<B>,
        profile: Profile,
        policy: Policy,
    ) -> Self {
        Self {
            arena: Arena::new(),
            backend,
            parameters,
            layout,
            profile,
            policy,
            training: true,
            nodes: Vec::new(),
            next: 0,
            recording: true,
            trace: Trace::default(),
            kept: Kept::default(),
            recomputing: false,
            ends: Vec::new(),
            aside: Vec::new(),
            activations_on_host: false,
            groupings: Vec::new(),
            replayed: VecDeque::new(),
            collected: None,
            contract: Contract::default(),
            input: None,
            output: None,
        }
    }

    /// A tape without recording or dropout, for evaluation and generation.
    pub fn inference(
        backend: &'a B,
        parameters: &'a Parameters<B>,
        layout: &'a BatchLayout<B>,
        profile: Profile,
    ) -> Self {
        let tape = Self::new(backend, parameters, layout, profile, Policy::None);
        Self { recording: false, training: false, ..tape }
    }

    /// Reuses the buffers of an earlier tape.
    #[must_use]
    pub fn with_buffers_of(self, memory: &Memory<B>) -> Self {
        let documents = self.layout.spans.iter().map(|span| span.queries.start);
        let lengths = self.layout.row_starts.iter().copied().chain(documents).collect();
        memory.0.begin_tape(self.backend, lengths);
        Self { arena: Rc::clone(&memory.0), ..self }
    }

    pub fn layout(&self) -> &'a BatchLayout<B> {
        self.layout
    }

    pub fn backend(&self) -> &'a B {
        self.backend
    }

    pub(crate) fn take(&self, length: usize) -> Lease<B> {
        self.arena.take(self.backend, length)
    }

    /// A value from host numbers: `[tokens, width]`, without a gradient.
    pub fn constant(&mut self, numbers: &[f32], width: usize) -> Variable<B> {
        let data = self.lease_of(numbers);
        self.variable(Rc::new(data), width, false)
    }

    /// The row of the last token, on the host.
    pub fn last_row(&self, x: &Variable<B>) -> Result<Vec<f32>, DeviceFailure> {
        let last = self.backend.upload(&[self.layout.tokens as u32 - 1]);
        let mut row = self.take(x.width);
        let table = StoredMatrix::F32(x.buffer());
        self.backend.run(EmbeddingForward { y: row.buffer_mut(), table, ids: &last, width: x.width });
        self.backend.download(row.buffer())
    }

    /// Host numbers in a buffer of the arena.
    pub(crate) fn lease_of(&self, numbers: &[f32]) -> Lease<B> {
        let mut data = self.take(numbers.len());
        self.backend.run(ToF32 { y: &mut *data, x: StoredMatrix::F32(&self.backend.upload(numbers)) });
        data
    }

    pub(crate) fn variable(&mut self, data: Rc<Lease<B>>, width: usize, needs_gradient: bool) -> Variable<B> {
        self.next += 1;
        Variable { id: self.next - 1, data, width, needs_gradient }
    }

    /// The value, sliced along its width.
    pub(crate) fn slice(&self, x: &Lease<B>, width: usize) -> RowsLease<B> {
        let mut rows = self.rows(width);
        self.backend.run(SliceRows { rows: &mut *rows, x: &**x });
        rows
    }

    /// Place for the slices of a value.
    pub(crate) fn rows(&self, width: usize) -> RowsLease<B> {
        let shape = SliceShape { rows: self.layout.tokens, width, profile: self.profile };
        self.arena.rows(self.backend, shape)
    }

    /// Notes what an op saves; stores the node if the tape records.
    pub(crate) fn record(&mut self, op: &'static str, saved: &[usize], node: impl FnOnce() -> Node<'a, B>) {
        self.trace.note(op, saved);
        if self.recording {
            let node = node();
            self.nodes.push(node);
        }
    }

    /// Plays the tape backward from its last op, adding every op's contribution to `gradients`.
    pub fn backward(mut self, gradients: &mut Gradients<B>) -> Result<(), TapeError> {
        self.backend.enter(Place::Head(Pass::Backward));
        let mut values: Vec<Gradient<B>> = (0..self.next).map(|_| None).collect();
        self.play(&mut values, gradients)?;
        gradients.check_reached(self.parameters)
    }

    /// From the last node to the first; each node is dropped, with what it saved, once it is done.
    pub(crate) fn play(&mut self, values: &mut [Gradient<B>], gradients: &mut Gradients<B>) -> Result<(), TapeError> {
        while let Some(node) = self.nodes.pop() {
            node.backward(self, values, gradients)?;
        }
        Ok(())
    }
}

/// The buffers of one device, reused from tape to tape.
pub struct Memory<B: Backend>(pub(crate) Rc<Arena<B>>);

impl<B: Backend> Default for Memory<B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B: Backend> Memory<B> {
    pub fn new() -> Self {
        Self(Arena::new())
    }

    /// Peak bytes in use.
    pub fn peak_bytes(&self) -> usize {
        self.0.peak_bytes()
    }
}
