//! Experts of a layer: grouped products over the rows of each expert, and the sum over each token's
//! experts.
//!
//! A token's row is copied to each of its experts ("Grouped rows"), passes through gate and up as
//! one matrix (gate rows, then up rows, or in turns), SwiGLU and down, and the results are weighted
//! and summed in slot order ("Combine"). Adapters have one pair of factors per expert, and a bias
//! is a low-rank product of rank 1 with ones.

use crate::TapeError;
use crate::arena::Lease;
use crate::gradients::Gradients;
use crate::op::Node;
use crate::op::product4::takes_plain_rows;
use crate::op::router::{Grouping, Routes};
use crate::parameters::{Matrix, ParameterId, Vector};
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::op::{
    self, ClampedSwigluBackward, ClampedSwigluForward, ColumnMode, Columns, Combine, CombineBackward, CombineForward,
    CopyColumns, EmbeddingForward, GroupSizes, LowRank, LowRankContract, LowRankExpand, Place, Product, ProductForward,
    ProductGradInput, ProductGradWeight, SliceShape, SwigluPairsBackward, SwigluPairsForward,
};
use isobit_kernels::tensor::F32;
use isobit_kernels::{Backend, Matrix as Operand, StoredMatrix};
use isobit_numerics::elementary::ClampedSwiglu;
use std::rc::Rc;

/// One matrix `[outputs, inputs]` per expert, with an adapter.
pub struct ExpertMatrix<B: Backend> {
    pub experts: usize,
    pub outputs: usize,
    pub inputs: usize,
    /// All experts stacked; for 4-bit weights each part, gate and up, stacks all experts.
    pub weight: Matrix<B>,
    /// `[experts, outputs]`
    pub bias: Option<Vector<B>>,
    pub adapter: Option<ExpertAdapter>,
}

/// What is between the products of an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ExpertActivation {
    /// Gate rows, then up rows.
    Swiglu,
    /// Gate and up rows alternate.
    Clamped(ClampedSwiglu),
}

/// Low-rank adapters of all experts: A `[experts, rank, inputs]`, B `[experts, outputs, rank]`.
#[derive(Clone, Copy, Debug)]
pub struct ExpertAdapter {
    pub a: ParameterId,
    pub b: ParameterId,
    pub rank: usize,
    pub scale: f32,
    /// Gate and up have separate adapters, with half of the ranks each. The other halves of B's
    /// rows stay zero.
    pub halves: bool,
}

/// The experts of a layer.
pub struct Experts<B: Backend> {
    /// `[2·width, hidden]` each: gate and up rows, in the order that the activation has.
    pub gate_up: ExpertMatrix<B>,
    pub activation: ExpertActivation,
    /// `[hidden, width]` each.
    pub down: ExpertMatrix<B>,
}

impl<B: Backend> ExpertMatrix<B> {
    /// Whether a trained tensor's gradient needs the input.
    fn needs_input(&self) -> bool {
        self.adapter.is_some() || matches!(self.weight, Matrix::Trained(_))
    }

    /// The biases as factors of low-rank products.
    fn bias_factors<'s>(&self, segments: &'s [usize]) -> LowRank<'s> {
        LowRank { segments, rank: 1, width: self.outputs, layout: op::FactorLayout::RankMajor, alpha: 1.0 }
    }

    fn factors<'s>(&self, adapter: &ExpertAdapter, segments: &'s [usize]) -> [LowRank<'s>; 2] {
        let (rank, alpha) = (adapter.rank, adapter.scale);
        let a = LowRank { segments, rank, width: self.inputs, layout: op::FactorLayout::RankMajor, alpha };
        [a, LowRank { width: self.outputs, layout: op::FactorLayout::WidthMajor, ..a }]
    }
}

/// What the gate and up products need in the backward pass.
pub(crate) struct SavedUp<'a, B: Backend> {
    experts: &'a Experts<B>,
    grouping: Rc<Grouping<B>>,
    slots: usize,
    input: usize,
    length: usize,
    needs_gradient: bool,
    /// Tokens, not grouped rows: those are gathered again. Only if a trained tensor's gradient
    /// needs them.
    x: Option<Rc<Lease<B>>>,
    /// Gate and up, side by side.
    both: Rc<Lease<B>>,
    /// `A x` of the adapter.
    low: Option<Rc<Lease<B>>>,
    output: usize,
}

/// What the down products and the sum over slots need.
pub(crate) struct SavedDown<'a, B: Backend> {
    experts: &'a Experts<B>,
    grouping: Rc<Grouping<B>>,
    weights: Variable<B>,
    active: Variable<B>,
    /// Only if a trained tensor's gradient needs it.
    input: Option<Rc<Lease<B>>>,
    /// The experts' output rows, for the gradient of the weights.
    rows: Option<Rc<Lease<B>>>,
    low: Option<Rc<Lease<B>>>,
    output: usize,
}

/// The rows of a grouped product, and `A x` of its adapter.
type RowsAndLow<B> = (Lease<B>, Option<Rc<Lease<B>>>);

impl<'a, B: Backend> Tape<'a, B> {
    /// The activation of gate and up of every pair of a token and one of its experts: a value with
    /// `tokens · slots` rows.
    pub fn experts_up(
        &mut self,
        x: &Variable<B>,
        routes: &Routes<B>,
        experts: &'a Experts<B>,
    ) -> Result<Variable<B>, TapeError> {
        let matrix = &experts.gate_up;
        assert_eq!(matrix.inputs, x.width, "inputs of experts");
        let (grouping, width) = (Rc::clone(&routes.grouping), matrix.outputs / 2);
        let rows = self.gathered(&x.data, &grouping, x.width);
        let (both, low) = self.grouped_product(&rows, matrix, &grouping, true)?;
        drop(rows);
        // Rows per expert: they determine the sizes of the experts' products.
        self.trace.note("router", &grouping.known().sizes.counts());
        let mut data = self.take(both.length() / 2);
        match experts.activation {
            ExpertActivation::Swiglu => {
                self.backend.run(SwigluPairsForward { h: data.buffer_mut(), both: both.buffer(), width });
            }
            ExpertActivation::Clamped(p) => {
                self.backend.run(ClampedSwigluForward { h: data.buffer_mut(), both: both.buffer(), p });
            }
        }
        let y = self.variable(Rc::new(data), width, x.needs_gradient || matrix.needs_input());
        if y.needs_gradient {
            // The products round away low bits of what the gradients of parameters read.
            low.iter().chain(matrix.needs_input().then_some(&x.data)).for_each(|read| self.keep_aside(read));
            let saved = SavedUp {
                experts,
                grouping,
                slots: routes.slots(),
                input: x.id,
                length: x.data.length(),
                needs_gradient: x.needs_gradient,
                x: matrix.needs_input().then(|| Rc::clone(&x.data)),
                both: Rc::new(both),
                low,
                output: y.id,
            };
            let lengths: Vec<usize> = saved.tensors().iter().map(|tensor| tensor.length()).collect();
            self.record("experts_up", &lengths, || Node::ExpertsUp(saved));
        }
        Ok(y)
    }

    /// The sum over each token's experts. Unless `wanted`, computes only what the backward pass
    /// needs. The rows that it needs are among the ends of the block.
    pub(crate) fn experts_down(
        &mut self,
        active: &Variable<B>,
        routes: &Routes<B>,
        experts: &'a Experts<B>,
        wanted: bool,
    ) -> Result<Variable<B>, TapeError> {
        let matrix = &experts.down;
        let (grouping, weights) = (Rc::clone(&routes.grouping), routes.weights.clone());
        let keeps_rows = weights.needs_gradient;
        let (rows, low) = self.grouped_product(&active.data, matrix, &grouping, wanted || keeps_rows)?;
        let rows = Rc::new(rows);
        let mut y = self.take(self.layout.tokens * matrix.outputs);
        if wanted {
            let p = self.combine(routes.slots(), matrix.outputs);
            self.backend.run(CombineForward {
                y: y.buffer_mut(),
                rows: rows.buffer(),
                weights: Some(weights.buffer()),
                places: &grouping.places,
                p,
            });
        }
        let needs_gradient = active.needs_gradient || keeps_rows || matrix.needs_input();
        let y = self.variable(Rc::new(y), matrix.outputs, needs_gradient);
        if needs_gradient {
            let rows = keeps_rows.then_some(rows);
            rows.iter().chain(&low).for_each(|saved| self.end(saved));
            let input = matrix.needs_input().then(|| Rc::clone(&active.data));
            let (active, output) = (active.clone(), y.id);
            let saved = SavedDown { experts, grouping, weights, active, input, rows, low, output };
            let lengths: Vec<usize> = saved.tensors().iter().map(|tensor| tensor.length()).collect();
            self.record("experts_down", &lengths, || Node::ExpertsDown(saved));
        }
        Ok(y)
    }

    fn combine(&self, slots: usize, width: usize) -> Combine {
        Combine { tokens: self.layout.tokens, slots, width, accumulate: false }
    }

    /// A copy of a token's row for each of its experts.
    fn gathered(&self, x: &Lease<B>, grouping: &Grouping<B>, width: usize) -> Lease<B> {
        let mut rows = self.take(grouping.rows() * width);
        let (table, ids) = (StoredMatrix::F32(x.buffer()), &grouping.tokens);
        self.backend.run(EmbeddingForward { y: rows.buffer_mut(), table, ids, width });
        rows
    }

    /// Each expert's rows times its matrix, and the adapter's `A x`. Unless `wanted`, only the
    /// latter.
    fn grouped_product(
        &self,
        x: &Lease<B>,
        matrix: &ExpertMatrix<B>,
        grouping: &Grouping<B>,
        wanted: bool,
    ) -> Result<RowsAndLow<B>, TapeError> {
        let count = grouping.rows();
        let mut y = self.take(count * matrix.outputs);
        // Before the host waits for the sizes of the groups: the device slices in the meantime.
        let sliced = match &matrix.weight {
            Matrix::Quantized(parts) => parts.iter().filter(|part| takes_plain_rows(part)).count() > 1,
            _ => true,
        };
        let sliced = (wanted && sliced).then(|| self.slice_in(self.profile, count, x, matrix.inputs));
        let segments = &grouping.wait(self)?.sizes.segments;
        if let (true, Matrix::Quantized(parts)) = (wanted, &matrix.weight) {
            self.quantized_forward(&mut y, x, sliced.as_ref(), parts, segments);
        } else if let Some(sliced) = sliced {
            let p = self.expert_product(segments, matrix);
            self.with_experts(matrix, |operand| {
                self.backend.run(ProductForward { y: y.buffer_mut(), x: sliced.slices(), w: operand, p });
            });
        }
        if let (true, Some(bias)) = (wanted, &matrix.bias) {
            let (u, factor, p) = (grouping.ones(self), bias.value(self.parameters), matrix.bias_factors(segments));
            self.backend.run(LowRankExpand { y: y.buffer_mut(), u, factor, p });
        }
        let low = matrix.adapter.as_ref().map(|adapter| {
            let [a, b] = matrix.factors(adapter, segments);
            let mut low = self.take(count * adapter.rank);
            let [factor_a, factor_b] = [adapter.a, adapter.b].map(|id| self.parameters.value(id));
            self.backend.run(LowRankContract::one(low.buffer_mut(), x.buffer(), factor_a, a));
            if wanted {
                self.backend.run(LowRankExpand { y: y.buffer_mut(), u: low.buffer(), factor: factor_b, p: b });
            }
            Rc::new(low)
        });
        Ok((y, low))
    }

    fn expert_product<'s>(&self, segments: &'s [usize], matrix: &ExpertMatrix<B>) -> Product<'s> {
        Product { segments, n: matrix.outputs, k: matrix.inputs, profile: self.profile, accumulate: false }
    }

    fn with_experts<R>(&self, matrix: &ExpertMatrix<B>, use_it: impl FnOnce(Operand<B::Memory>) -> R) -> R {
        let shape = SliceShape { rows: matrix.outputs, width: matrix.inputs, profile: self.profile };
        matrix.weight.with_slices(self.backend, self.parameters, matrix.experts, shape, use_it)
    }
}

/// Adds to the gradients of a matrix and its adapter; returns the gradient of its input on request.
struct MatrixGradient<'s, B: Backend> {
    matrix: &'s ExpertMatrix<B>,
    grouping: &'s Grouping<B>,
    dy: &'s Lease<B>,
    low: Option<&'s Rc<Lease<B>>>,
}

impl<B: Backend> MatrixGradient<'_, B> {
    fn compute(
        &self,
        tape: &Tape<B>,
        input: Option<&Lease<B>>,
        gradients: &mut Gradients<B>,
        wanted: bool,
    ) -> Option<Lease<B>> {
        let Self { matrix, grouping, dy, .. } = *self;
        let GroupSizes { segments, row_starts } = &grouping.known().sizes;
        let p = tape.expert_product(segments, matrix);
        if let Matrix::Trained(id) = matrix.weight {
            let x = input.expect("the input of trained experts is saved");
            tape.backend.run(ProductGradWeight {
                dw: gradients.reach(tape.backend, id),
                dy: dy.buffer(),
                x: x.buffer(),
                p,
                row_starts,
            });
        }
        if let Some(id) = matrix.bias.as_ref().and_then(Vector::id) {
            let (dbias, p) = (gradients.reach(tape.backend, id), matrix.bias_factors(segments));
            tape.outer(dbias, grouping.ones(tape), dy, &p, row_starts);
        }
        let grad_low = matrix.adapter.as_ref().map(|adapter| self.adapter(tape, adapter, input, gradients));
        if !wanted {
            return None;
        }
        let mut dx = tape.take(p.rows() * matrix.inputs);
        if let Matrix::Quantized(parts) = &matrix.weight {
            tape.quantized_grad_input(&mut dx, dy, parts, segments, false);
        } else {
            tape.with_experts(matrix, |operand| {
                tape.backend.run(ProductGradInput { dx: dx.buffer_mut(), dy: dy.buffer(), w: operand, p });
            });
        }
        if let Some((adapter, grad_low)) = matrix.adapter.as_ref().zip(grad_low) {
            let [a, _] = matrix.factors(adapter, segments);
            let factor = tape.parameters.value(adapter.a);
            tape.backend.run(LowRankExpand { y: dx.buffer_mut(), u: grad_low.buffer(), factor, p: a });
        }
        Some(dx)
    }

    /// Adds to the gradients of B and A; returns `dy·B`.
    fn adapter(
        &self,
        tape: &Tape<B>,
        adapter: &ExpertAdapter,
        input: Option<&Lease<B>>,
        gradients: &mut Gradients<B>,
    ) -> Lease<B> {
        let GroupSizes { segments, row_starts } = &self.grouping.known().sizes;
        let [a, b] = self.matrix.factors(adapter, segments);
        let mut grad_low = tape.take(b.tokens() * adapter.rank);
        let factor = tape.parameters.value(adapter.b);
        tape.backend.run(LowRankContract::one(grad_low.buffer_mut(), self.dy.buffer(), factor, b));
        let low = self.low.expect("an adapter saves its low-rank value");
        let x = input.expect("an adapter's input is saved");
        tape.outer(gradients.reach(tape.backend, adapter.b), low, self.dy, &b, row_starts);
        if adapter.halves {
            self.clear_other_halves(tape, adapter.rank, gradients.reach(tape.backend, adapter.b));
        }
        tape.outer(gradients.reach(tape.backend, adapter.a), &grad_low, x, &a, row_starts);
        grad_low
    }
}

impl<B: Backend> MatrixGradient<'_, B> {
    /// Clears, in the gradient of B, the later ranks of gate rows and the earlier ranks of up rows.
    fn clear_other_halves(&self, tape: &Tape<B>, rank: usize, db: &mut F32<B>) {
        let (experts, rows, half) = (self.matrix.experts, self.matrix.outputs / 2, rank / 2);
        let zeros: F32<B> = tape.backend.zeros(experts * half);
        let from = Place { row: half, offset: 0, stride: 0 };
        for offset in [half, rows * rank] {
            let to = Place { row: 2 * rows * rank, offset, stride: rank };
            let p = Columns { tokens: experts, groups: rows, width: half, from, to, mode: ColumnMode::Overwrite };
            tape.backend.run(CopyColumns { y: db, x: &zeros, p });
        }
    }
}

impl<B: Backend> SavedUp<'_, B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>], gradients: &mut Gradients<B>) {
        let Some(gradient) = values[self.output].take() else { return };
        let matrix = &self.experts.gate_up;
        let mut dy = tape.take(self.both.length());
        let (dh, both) = (gradient.buffer(), self.both.buffer());
        match self.experts.activation {
            ExpertActivation::Swiglu => {
                let width = matrix.outputs / 2;
                tape.backend.run(SwigluPairsBackward { dboth: dy.buffer_mut(), dh, both, width });
            }
            ExpertActivation::Clamped(p) => {
                tape.backend.run(ClampedSwigluBackward { dboth: dy.buffer_mut(), dh, both, p });
            }
        }
        drop(gradient);
        let rows = self.x.as_ref().map(|x| tape.gathered(x, &self.grouping, matrix.inputs));
        let part = MatrixGradient { matrix, grouping: &self.grouping, dy: &dy, low: self.low.as_ref() };
        let Some(drows) = part.compute(tape, rows.as_ref(), gradients, self.needs_gradient) else { return };
        drop(rows);
        // Accumulates onto an existing gradient.
        let before = values[self.input].take().map(|before| tape.owned(before));
        let p = Combine { accumulate: before.is_some(), ..tape.combine(self.slots, matrix.inputs) };
        let mut dx = before.unwrap_or_else(|| tape.take(self.length));
        tape.backend.run(CombineForward {
            y: dx.buffer_mut(),
            rows: drows.buffer(),
            weights: None,
            places: &self.grouping.places,
            p,
        });
        values[self.input] = Some(Rc::new(dx));
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        std::iter::once(&*self.both).chain(self.x.iter().chain(&self.low).map(|tensor| &**tensor)).collect()
    }

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        std::iter::once(&mut self.both).chain(self.x.iter_mut()).chain(&mut self.low).collect()
    }
}

impl<B: Backend> SavedDown<'_, B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>], gradients: &mut Gradients<B>) {
        let Some(dy) = values[self.output].take() else { return };
        let matrix = &self.experts.down;
        let p = tape.combine(self.weights.width, matrix.outputs);
        let mut drows = tape.take(p.rows() * matrix.outputs);
        let mut dweights = tape.take(p.rows());
        // If the rows were not kept, the gradient of the weights is unused, so any rows do.
        let rows = self.rows.unwrap_or_else(|| Rc::new(tape.take(p.rows() * matrix.outputs)));
        tape.backend.run(CombineBackward {
            drows: drows.buffer_mut(),
            dweights: dweights.buffer_mut(),
            dy: dy.buffer(),
            rows: rows.buffer(),
            weights: self.weights.buffer(),
            places: &self.grouping.places,
            p,
        });
        drop(rows);
        drop(dy);
        let part = MatrixGradient { matrix, grouping: &self.grouping, dy: &drows, low: self.low.as_ref() };
        let dactive = part.compute(tape, self.input.as_deref(), gradients, self.active.needs_gradient);
        if let Some(dactive) = dactive {
            tape.contribute(values, self.active.id, Rc::new(dactive));
        }
        if self.weights.needs_gradient {
            tape.contribute(values, self.weights.id, Rc::new(dweights));
        }
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        let saved = self.input.iter().chain(&self.rows).chain(&self.low);
        saved.chain([&self.weights.data]).map(|tensor| &**tensor).collect()
    }

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        let saved = self.input.iter_mut().chain(&mut self.rows).chain(&mut self.low);
        saved.chain([&mut self.weights.data, &mut self.active.data]).collect()
    }
}
