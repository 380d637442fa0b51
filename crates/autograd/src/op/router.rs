//! Router of a mixture of experts: logits, expert indices, and their weights (`docs/numerics.md`,
//! "Router").
//!
//! Expert indices are data of the tape, computed in the forward pass and kept by every policy: a
//! recomputation weighs the same experts again, whatever its logits are. Both passes compute the
//! product, always in profile x3: near ties need the accuracy, and a router is small.

use crate::TapeError;
use crate::arena::{Lease, RowsLease};
use crate::gradients::Gradients;
use crate::op::Node;
use crate::parameters::{Matrix, Vector};
use crate::recompute::Contract;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::backend::{BegunDownload, Length};
use isobit_kernels::op::{
    BalanceBackward, BiasBackward, BiasForward, GroupRows, GroupSizes, Product, ProductForward, ProductGradInput,
    ProductGradWeight, Router as Shape, RouterBackward, RouterChoose, RouterWeights, Scoring, SliceRows, SliceShape,
};
use isobit_kernels::tensor::{F32, U32};
use isobit_kernels::{Backend, Matrix as Operand};
use isobit_numerics::slices::Profile;
use std::cell::OnceCell;
use std::convert::Infallible;
use std::rc::Rc;

/// The profile of every router, regardless of the model's.
pub const ROUTER_PROFILE: Profile = Profile::X3;

/// A router: its weight `[experts, hidden]`, and how logits become expert indices and weights.
pub struct Router<B: Backend> {
    /// Sliced in [`ROUTER_PROFILE`].
    pub weight: Matrix<B>,
    /// Part of the logits.
    pub logit_bias: Option<Vector<B>>,
    /// Added to sigmoid scores, only for choosing.
    pub bias: Option<F32<B>>,
    pub hidden: usize,
    pub experts: usize,
    /// Experts per token.
    pub chosen: usize,
    pub scoring: Scoring,
    pub renormalise: bool,
    pub scale: f32,
    pub groups: usize,
    pub kept_groups: usize,
}

impl<B: Backend> Router<B> {
    fn shape(&self, tokens: usize) -> Shape {
        let &Self { experts, chosen, scoring, renormalise, scale, groups, kept_groups, .. } = self;
        Shape { tokens, experts, chosen, scoring, renormalise, scale, groups, kept_groups }
    }
}

/// Which experts the tokens of a layer go to, on the device. The host reads only how many each
/// expert gets, and only when a product of experts is about to be enqueued: copies of the tokens
/// and their slices do not wait for it.
pub(crate) struct Grouping<B: Backend> {
    pub(crate) indices: U32<B>,
    /// The token of each grouped row.
    pub(crate) tokens: U32<B>,
    /// The grouped row of each pair of a token and a slot.
    pub(crate) places: U32<B>,
    /// `[rows of data, experts]`
    counts: U32<B>,
    begun: BegunDownload,
    known: OnceCell<Known>,
    /// A one for each grouped row, made on first use.
    ones: OnceCell<F32<B>>,
}

/// What the host knows of a grouping.
pub(crate) struct Known {
    /// `[rows of data, experts]`: how often each expert was chosen.
    pub(crate) counts: Vec<u32>,
    pub(crate) sizes: GroupSizes,
}

impl<B: Backend> Grouping<B> {
    /// Number of grouped rows.
    pub(crate) fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Waits for the counts, once.
    pub(crate) fn wait(&self, tape: &Tape<B>) -> Result<&Known, TapeError> {
        if self.known.get().is_none() {
            let mut counts = tape.backend.finish_download(&self.begun, &self.counts)?;
            let row_starts = &tape.layout.row_starts;
            let experts = counts.len() / (row_starts.len() - 1).max(1);
            if self.rows() > 0 && counts.iter().all(|count| *count == 0) {
                // A backend that computes nothing: all rows go to the first expert.
                let slots = self.rows() / tape.layout.tokens;
                for (counts, row) in counts.chunks_exact_mut(experts).zip(row_starts.windows(2)) {
                    counts[0] = ((row[1] - row[0]) * slots) as u32;
                }
            }
            let sizes = GroupSizes::new(&counts, experts);
            let _ = self.known.set(Known { counts, sizes });
        }
        Ok(self.known())
    }

    /// What biases of experts are multiplied by.
    pub(crate) fn ones(&self, tape: &Tape<B>) -> &F32<B> {
        let made = || tape.backend.upload_made(self.rows(), || Ok::<_, Infallible>(vec![1.0_f32; self.rows()]));
        self.ones.get_or_init(|| made().unwrap_or_else(|never| match never {}))
    }

    /// What the host knows, after [`Grouping::wait`].
    pub(crate) fn known(&self) -> &Known {
        self.known.get().expect("the forward pass of the experts has waited")
    }
}

/// A layer's expert indices, and their weights as a value of the tape.
pub struct Routes<B: Backend> {
    pub(crate) grouping: Rc<Grouping<B>>,
    pub(crate) weights: Variable<B>,
}

impl<B: Backend> Routes<B> {
    /// Experts per token.
    pub(crate) fn slots(&self) -> usize {
        self.weights.width
    }
}

pub(crate) struct Saved<'a, B: Backend> {
    router: &'a Router<B>,
    input: usize,
    length: usize,
    needs_gradient: bool,
    /// Only if the router is trained.
    x: Option<Rc<Lease<B>>>,
    logits: Rc<Lease<B>>,
    grouping: Rc<Grouping<B>>,
    output: usize,
}

impl<'a, B: Backend> Tape<'a, B> {
    /// Chooses the experts of every token, or reuses the expert indices of the forward pass, and
    /// computes their weights.
    pub fn route(&mut self, x: &Variable<B>, router: &'a Router<B>) -> Routes<B> {
        let shape = router.shape(self.layout.tokens);
        let logits = Rc::new(self.router_logits(x, router));
        // The weights cover only the chosen experts, so the logits are an end too.
        self.end(&logits);
        let grouping = self.grouping(&logits, router, &shape);
        if !self.recomputing {
            self.note_balance(&logits, &grouping, router);
        }
        let mut weights = self.take(shape.tokens * shape.chosen);
        self.backend.run(RouterWeights {
            weights: weights.buffer_mut(),
            logits: logits.buffer(),
            indices: &grouping.indices,
            p: shape,
        });
        let trained = matches!(router.weight, Matrix::Trained(_));
        let weights = self.variable(Rc::new(weights), shape.chosen, x.needs_gradient || trained);
        if weights.needs_gradient {
            if trained {
                self.keep_aside(&x.data);
            }
            let saved = Saved {
                router,
                input: x.id,
                length: x.data.length(),
                needs_gradient: x.needs_gradient,
                x: trained.then(|| Rc::clone(&x.data)),
                logits,
                grouping: Rc::clone(&grouping),
                output: weights.id,
            };
            self.record("router", &[saved.logits.length()], || Node::Router(saved));
        }
        Routes { grouping, weights }
    }

    /// The experts of every token so far, strongest first, layer by layer.
    pub fn expert_indices(&self) -> Result<Vec<Vec<u32>>, TapeError> {
        self.groupings.iter().map(|grouping| Ok(self.backend.download(&grouping.indices)?)).collect()
    }

    /// Whether a recomputation reuses the expert indices of the forward pass; otherwise it chooses
    /// again, which only tests want.
    #[doc(hidden)]
    #[must_use]
    pub fn with_cached_indices(self, cached_indices: bool) -> Self {
        let contract = Contract { cached_indices, ..self.contract };
        Self { contract, ..self }
    }

    fn router_logits(&self, x: &Variable<B>, router: &Router<B>) -> Lease<B> {
        assert_eq!(router.hidden, x.width, "inputs of a router");
        let rows = self.slice_in(ROUTER_PROFILE, self.layout.tokens, &x.data, x.width);
        let mut logits = self.take(self.layout.tokens * router.experts);
        let segments = [0, self.layout.tokens];
        let p = router_product(router, &segments);
        self.with_router(router, |operand| {
            self.backend.run(ProductForward { y: logits.buffer_mut(), x: rows.slices(), w: operand, p });
        });
        if let Some(bias) = &router.logit_bias {
            self.backend.run(BiasForward { y: logits.buffer_mut(), bias: bias.value(self.parameters) });
        }
        logits
    }

    fn grouping(&mut self, logits: &F32<B>, router: &Router<B>, shape: &Shape) -> Rc<Grouping<B>> {
        if let Some(kept) = self.replayed.pop_front() {
            return kept;
        }
        let (backend, row_starts) = (self.backend, &self.layout.row_starts);
        let [mut indices, mut tokens, mut places] = [(); 3].map(|()| backend.unwritten(shape.tokens * shape.chosen));
        let mut counts = backend.unwritten((row_starts.len() - 1) * shape.experts);
        backend.run(RouterChoose { indices: &mut indices, logits, bias: router.bias.as_ref(), p: *shape });
        backend.run(GroupRows {
            tokens: &mut tokens,
            places: &mut places,
            counts: &mut counts,
            indices: &indices,
            row_starts,
            slots: shape.chosen,
            experts: shape.experts,
        });
        let begun = backend.begin_download(&counts);
        let grouping =
            Rc::new(Grouping { indices, tokens, places, counts, begun, known: OnceCell::new(), ones: OnceCell::new() });
        self.groupings.push(Rc::clone(&grouping));
        grouping
    }

    fn with_router<R>(&self, router: &Router<B>, use_it: impl FnOnce(Operand<B::Memory>) -> R) -> R {
        let shape = SliceShape { rows: router.experts, width: router.hidden, profile: ROUTER_PROFILE };
        router.weight.with_slices(self.backend, self.parameters, 1, shape, use_it)
    }

    /// Rows of a matrix, sliced in the given profile.
    pub(crate) fn slice_in(&self, profile: Profile, count: usize, x: &Lease<B>, width: usize) -> RowsLease<B> {
        let mut rows = self.arena.rows(self.backend, SliceShape { rows: count, width, profile });
        self.backend.run(SliceRows { rows: rows.slices_mut(), x: x.buffer() });
        rows
    }
}

fn router_product<'s, B: Backend>(router: &Router<B>, segments: &'s [usize]) -> Product<'s> {
    Product { segments, n: router.experts, k: router.hidden, profile: ROUTER_PROFILE, accumulate: false }
}

impl<B: Backend> Saved<'_, B> {
    /// Flows through the weights of the chosen experts and the load balance into the logits, then
    /// as in any product.
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>], gradients: &mut Gradients<B>) {
        let Some(dweights) = values[self.output].take() else { return };
        let Self { router, logits, .. } = &self;
        let mut dlogits = tape.take(logits.length());
        tape.backend.run(RouterBackward {
            dlogits: dlogits.buffer_mut(),
            dweights: dweights.buffer(),
            logits: logits.buffer(),
            indices: &self.grouping.indices,
            p: router.shape(tape.layout.tokens),
        });
        if let Some(share) = tape.balance_share() {
            tape.backend.run(BalanceBackward {
                dlogits: dlogits.buffer_mut(),
                share,
                logits: logits.buffer(),
                row_starts: &tape.layout.row_starts,
                experts: router.experts,
            });
        }
        let segments = [0, tape.layout.tokens];
        let p = router_product(router, &segments);
        if let Matrix::Trained(id) = router.weight {
            let x = self.x.as_ref().expect("a trained router's input is saved");
            let row_starts = &tape.layout.row_starts;
            let (dw, dy, x) = (gradients.reach(tape.backend, id), dlogits.buffer(), x.buffer());
            tape.backend.run(ProductGradWeight { dw, dy, x, p, row_starts });
        }
        if let Some(id) = router.logit_bias.as_ref().and_then(Vector::id) {
            let dbias = gradients.reach(tape.backend, id);
            tape.backend.run(BiasBackward { dbias, dy: dlogits.buffer(), row_starts: &tape.layout.row_starts });
        }
        if self.needs_gradient {
            let before = values[self.input].take().map(|before| tape.owned(before));
            let p = Product { accumulate: before.is_some(), ..p };
            let mut dx = before.unwrap_or_else(|| tape.take(self.length));
            tape.with_router(router, |operand| {
                tape.backend.run(ProductGradInput { dx: dx.buffer_mut(), dy: dlogits.buffer(), w: operand, p });
            });
            values[self.input] = Some(Rc::new(dx));
        }
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        self.x.iter().map(|x| &**x).chain([&*self.logits]).collect()
    }

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        self.x.iter_mut().chain([&mut self.logits]).collect()
    }
}
