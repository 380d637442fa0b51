//! Linear layers that share an input: slice product, bias, low-rank adapter. The input is sliced
//! once for all of them.

use crate::arena::{Lease, RowsLease};
use crate::gradients::Gradients;
use crate::op::Node;
use crate::op::product4::takes_plain_rows;
use crate::op::rms_norm::Norm;
use crate::parameters::{Matrix, ParameterId, Vector};
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::op::{
    self, Add, ApplyDropout, BiasBackward, BiasForward, Contraction, LinearForward, LinearGradInput, LinearInput,
    LowRank, LowRankContract, LowRankExpand, LowRankGradient, LowRankOuter, LowRankTerm, OuterProduct, Product,
    ProductGradWeight, SliceShape, ToF32,
};
use isobit_kernels::tensor::F32;
use isobit_kernels::{Backend, Matrix as Operand, StoredMatrix};
use isobit_numerics::philox::dropout_threshold;
use std::rc::Rc;

/// `y = W x + b + scale·B A dropout(x)`.
pub struct Linear<B: Backend> {
    pub outputs: usize,
    pub inputs: usize,
    pub weight: Matrix<B>,
    pub bias: Option<Vector<B>>,
    pub adapter: Option<Adapter>,
}

impl<B: Backend> Linear<B> {
    /// Whether a trained tensor's gradient needs the layer's input.
    fn needs_input(&self) -> bool {
        self.adapter.is_some() || matches!(self.weight, Matrix::Trained(_))
    }

    /// Whether the layer uses the input's shared slices. 4-bit weights with reordered channels need
    /// their own.
    fn takes_plain_rows(&self) -> bool {
        match &self.weight {
            Matrix::Frozen(_) | Matrix::Streamed(_) | Matrix::Trained(_) => true,
            Matrix::Quantized(parts) => parts.iter().any(takes_plain_rows),
        }
    }
}

/// A low-rank adapter: A `[rank, inputs]`, B `[outputs, rank]`.
#[derive(Clone, Copy, Debug)]
pub struct Adapter {
    pub a: ParameterId,
    pub b: ParameterId,
    pub rank: usize,
    pub scale: f32,
    /// Dropout probability of an input element.
    pub dropout: f64,
    /// Module number, which keys its random numbers.
    pub tensor: u32,
}

impl Adapter {
    fn factor_a<'s>(&self, segments: &'s [usize], inputs: usize) -> LowRank<'s> {
        LowRank { segments, rank: self.rank, width: inputs, layout: op::FactorLayout::RankMajor, alpha: self.scale }
    }

    fn factor_b<'s>(&self, segments: &'s [usize], outputs: usize) -> LowRank<'s> {
        LowRank { segments, rank: self.rank, width: outputs, layout: op::FactorLayout::WidthMajor, alpha: self.scale }
    }
}

/// What an adapter saves from the forward pass.
struct SavedAdapter<B: Backend> {
    /// The input after dropout, if there is dropout.
    dropped: Option<Rc<Lease<B>>>,
    /// `A x`.
    low: Rc<Lease<B>>,
}

/// Slices of a shared input, and what each layer's adapter saves.
type LinearInputs<B> = (Option<RowsLease<B>>, Vec<Option<SavedAdapter<B>>>);

/// A layer, its output, and what its adapter saved.
struct SavedLayer<'a, B: Backend> {
    layer: &'a Linear<B>,
    output: usize,
    adapter: Option<SavedAdapter<B>>,
}

pub(crate) struct Saved<'a, B: Backend> {
    input: usize,
    length: usize,
    needs_gradient: bool,
    /// Only if a trained tensor's gradient needs it.
    x: Option<Rc<Lease<B>>>,
    layers: Vec<SavedLayer<'a, B>>,
}

impl<'a, B: Backend> Tape<'a, B> {
    pub fn linear(&mut self, x: &Variable<B>, layer: &'a Linear<B>) -> Variable<B> {
        let mut outputs = self.linears(x, &[layer]);
        outputs.pop().expect("one output for one layer")
    }

    /// Several layers on one input, with a fixed count.
    pub fn linears_of<const N: usize>(&mut self, x: &Variable<B>, layers: [&'a Linear<B>; N]) -> [Variable<B>; N] {
        self.linears(x, &layers).try_into().unwrap_or_else(|_| unreachable!("an output for every layer"))
    }

    /// `residual + layer(x)`, the end of a block: no op of the block saves anything after this, so
    /// a recomputation skips the sum.
    pub fn finish(&mut self, residual: &Variable<B>, x: &Variable<B>, layer: &'a Linear<B>) -> Variable<B> {
        self.end(&x.data);
        let y = self.linear_where(x, layer, !self.recomputing);
        self.add_where(residual, &y, !self.recomputing)
    }

    /// `residual + layer(x)·factor`, the end of a block.
    pub fn finish_scaled(
        &mut self,
        residual: &Variable<B>,
        x: &Variable<B>,
        layer: &'a Linear<B>,
        factor: f32,
    ) -> Variable<B> {
        self.end(&x.data);
        let y = self.linear_where(x, layer, !self.recomputing);
        let y = self.scale_where(y, factor, !self.recomputing);
        self.add_where(residual, &y, !self.recomputing)
    }

    /// `residual + norm(layer(x))·factor`, the end of a block. The norm saves the layer's output,
    /// so a recomputation computes it: it is the end.
    pub fn finish_normalised(
        &mut self,
        residual: &Variable<B>,
        x: &Variable<B>,
        layer: &'a Linear<B>,
        norm: &'a Norm<B>,
        factor: Option<f32>,
    ) -> Variable<B> {
        let y = self.linear(x, layer);
        self.end(&y.data);
        let mut y = self.rms_norm(&y, norm);
        if let Some(factor) = factor {
            y = self.scale_where(y, factor, !self.recomputing);
        }
        self.add_where(residual, &y, !self.recomputing)
    }

    /// A layer at the end of a block. The output is computed only if `wanted`; what the backward
    /// pass needs is always computed.
    pub(crate) fn linear_where(&mut self, x: &Variable<B>, layer: &'a Linear<B>, wanted: bool) -> Variable<B> {
        self.linears_with(x, &[layer], wanted).pop().expect("one output for one layer")
    }

    /// Several layers on one input.
    pub fn linears(&mut self, x: &Variable<B>, layers: &[&'a Linear<B>]) -> Vec<Variable<B>> {
        self.linears_with(x, layers, true)
    }

    /// Unless `wanted`, computes only what the backward pass needs, not the outputs. What parameter
    /// gradients read has its own digest: the outputs round its low bits away.
    fn linears_with(&mut self, x: &Variable<B>, layers: &[&'a Linear<B>], wanted: bool) -> Vec<Variable<B>> {
        let shared = wanted && layers.iter().any(|layer| layer.takes_plain_rows());
        let (rows, adapters) = self.linear_input(x, layers, shared);
        let (mut outputs, mut saved, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        for (&layer, adapter) in layers.iter().zip(adapters) {
            assert_eq!(layer.inputs, x.width, "inputs of a linear layer");
            let mut y = self.take(self.layout.tokens * layer.outputs);
            if wanted {
                self.output(&mut y, &x.data, rows.as_ref(), layer, adapter.as_ref());
            }
            let read = adapter.iter().flat_map(|adapter| adapter.dropped.iter().chain([&adapter.low]));
            read.for_each(|saved| self.keep_aside(saved));
            if layer.needs_input() && adapter.as_ref().is_none_or(|adapter| adapter.dropped.is_none()) {
                self.keep_aside(&x.data);
            }
            let trained = layer.needs_input() || layer.bias.as_ref().is_some_and(|bias| bias.id().is_some());
            let y = self.variable(Rc::new(y), layer.outputs, x.needs_gradient || trained);
            if y.needs_gradient {
                lengths.extend(adapter.iter().map(|adapter| adapter.low.length()));
                lengths.extend(adapter.iter().filter_map(|adapter| Some(adapter.dropped.as_ref()?.length())));
                saved.push(SavedLayer { layer, output: y.id, adapter });
            }
            outputs.push(y);
        }
        if !saved.is_empty() {
            let (input, length, needs_gradient) = (x.id, x.data.length(), x.needs_gradient);
            let x = layers.iter().any(|layer| layer.needs_input()).then(|| Rc::clone(&x.data));
            lengths.extend(x.iter().map(|x| x.length()));
            let saved = Saved { input, length, needs_gradient, x, layers: saved };
            self.record("linear", &lengths, || Node::Linears(saved));
        }
        outputs
    }

    /// Product, bias and the adapter's term.
    fn output(
        &self,
        y: &mut Lease<B>,
        x: &Lease<B>,
        rows: Option<&RowsLease<B>>,
        layer: &Linear<B>,
        adapter: Option<&SavedAdapter<B>>,
    ) {
        let segments = [0, self.layout.tokens];
        let p = self.product(&segments, layer);
        let expand = layer.adapter.as_ref().map(|adapter| adapter.factor_b(&segments, layer.outputs));
        let b = layer.adapter.as_ref().map(|adapter| self.parameters.value(adapter.b));
        let term =
            adapter.zip(b).zip(expand).map(|((saved, factor), p)| LowRankTerm { u: saved.low.buffer(), factor, p });
        let bias = layer.bias.as_ref().map(|bias| bias.value(self.parameters));
        if let Matrix::Quantized(parts) = &layer.weight {
            self.quantized_forward(y, x, rows, parts, &segments);
            if let Some(bias) = bias {
                self.backend.run(BiasForward { y: y.buffer_mut(), bias });
            }
            return self.expand(y, term);
        }
        let rows = rows.expect("rows are sliced where a layer takes them");
        self.with_weight(layer, |operand| {
            self.backend.run(LinearForward { y: y.buffer_mut(), x: rows.slices(), w: operand, p, bias, adapter: term });
        });
    }

    /// Adds the adapter's term, if any.
    fn expand(&self, y: &mut F32<B>, term: Option<LowRankTerm<B::Memory>>) {
        if let Some(LowRankTerm { u, factor, p }) = term {
            self.backend.run(LowRankExpand { y, u, factor, p });
        }
    }

    /// Adds an outer product to the gradient of a factor.
    pub(crate) fn outer(&self, dfactor: &mut F32<B>, u: &F32<B>, x: &F32<B>, p: &LowRank, row_starts: &[usize]) {
        self.backend.run(LowRankOuter::one(dfactor, u, x, *p, row_starts));
    }

    fn product<'s>(&self, segments: &'s [usize], layer: &Linear<B>) -> Product<'s> {
        Product { segments, n: layer.outputs, k: layer.inputs, profile: self.profile, accumulate: false }
    }

    fn with_weight<R>(&self, layer: &Linear<B>, use_it: impl FnOnce(Operand<B::Memory>) -> R) -> R {
        let shape = SliceShape { rows: layer.outputs, width: layer.inputs, profile: self.profile };
        layer.weight.with_slices(self.backend, self.parameters, 1, shape, use_it)
    }

    /// The input's slices if they are `wanted`, and `A x` for every layer's adapter. Those without
    /// dropout share one pass over the input with the slicing.
    fn linear_input(&self, x: &Variable<B>, layers: &[&Linear<B>], wanted: bool) -> LinearInputs<B> {
        let segments = [0, self.layout.tokens];
        let mut lows: Vec<_> =
            layers.iter().map(|layer| Some(self.take(self.layout.tokens * layer.adapter.as_ref()?.rank))).collect();
        let (mut dropped, mut parts) = (Vec::new(), Vec::new());
        for (layer, low) in layers.iter().zip(&mut lows) {
            let (Some(adapter), Some(low)) = (layer.adapter.as_ref(), low) else {
                dropped.push(None);
                continue;
            };
            let (factor, p) = (self.parameters.value(adapter.a), adapter.factor_a(&segments, layer.inputs));
            let part = Contraction { u: low.buffer_mut(), factor, p };
            dropped.push(self.drops(adapter).then(|| {
                let mut dropped = self.take(x.data.length());
                self.drop_out(&mut dropped, &x.data, layer.inputs, adapter);
                Rc::new(dropped)
            }));
            match dropped.last().and_then(Option::as_ref) {
                Some(input) => self.backend.run(LowRankContract { parts: vec![part], x: input.buffer() }),
                None => parts.push(part),
            }
        }
        let mut rows = wanted.then(|| self.rows(x.width));
        match &mut rows {
            Some(rows) => self.backend.run(LinearInput { rows: rows.slices_mut(), x: x.buffer(), parts }),
            None if parts.is_empty() => {}
            None => self.backend.run(LowRankContract { parts, x: x.buffer() }),
        }
        let saved = lows.into_iter().zip(dropped);
        (rows, saved.map(|(low, dropped)| Some(SavedAdapter { dropped, low: Rc::new(low?) })).collect())
    }

    /// Whether an adapter's input is dropped out here.
    fn drops(&self, adapter: &Adapter) -> bool {
        self.training && adapter.dropout > 0.0
    }

    fn drop_out(&self, y: &mut Lease<B>, x: &Lease<B>, width: usize, adapter: &Adapter) {
        let p = op::Dropout {
            key: self.layout.key,
            step: self.layout.step,
            tensor: adapter.tensor,
            first_row: self.layout.first_row,
            row_starts: &self.layout.row_starts,
            width,
            threshold: dropout_threshold(adapter.dropout),
            keep_scale: keep_scale(adapter.dropout),
        };
        self.backend.run(ApplyDropout { y: y.buffer_mut(), x: x.buffer(), p });
    }
}

/// `1 / (1 − p)` in float64, rounded once.
#[expect(clippy::float_arithmetic, reason = "a parameter of the op, host arithmetic")]
fn keep_scale(probability: f64) -> f32 {
    (1.0 / (1.0 - probability)) as f32
}

/// What the gradients of an adapter are computed from.
struct AdapterGradients<'a, B: Backend> {
    layer: &'a Linear<B>,
    adapter: Adapter,
    saved: SavedAdapter<B>,
    dy: Rc<Lease<B>>,
    /// `dy·B`, the gradient of the low-rank value before its scale.
    grad_low: Lease<B>,
}

impl<'a, B: Backend> Saved<'a, B> {
    /// Layers in forward order; the input's gradient accumulates onto its existing value.
    pub(crate) fn backward(self, tape: &mut Tape<'a, B>, values: &mut [Gradient<B>], gradients: &mut Gradients<B>) {
        let mut dx = values[self.input].take().map(|before| tape.owned(before));
        let mut adapters = Vec::new();
        for SavedLayer { layer, output, adapter } in self.layers {
            let Some(dy) = values[output].take() else { continue };
            let mut low = layer.adapter.map(|adapter| (adapter, tape.take(tape.layout.tokens * adapter.rank)));
            if self.needs_gradient {
                let started = dx.is_some();
                let mut sum = dx.take().unwrap_or_else(|| tape.take(self.length));
                input_gradient(tape, &mut sum, layer, &dy, started, low.as_mut());
                if let Some((adapter, low)) = low.as_ref().filter(|(adapter, _)| tape.drops(adapter)) {
                    sum = dropped_input_gradient(tape, &sum, layer, adapter, low);
                }
                dx = Some(sum);
            } else if let Some((adapter, low)) = &mut low {
                low_gradient(tape, layer, adapter, &dy, low);
            }
            layer_gradients(tape, layer, self.x.as_ref(), &dy, gradients);
            if let Some(((adapter, grad_low), saved)) = low.zip(adapter) {
                adapters.push(AdapterGradients { layer, adapter, saved, dy, grad_low });
            }
        }
        adapter_gradients(tape, &adapters, self.x.as_ref(), gradients);
        values[self.input] = dx.map(Rc::new);
    }

    pub(crate) fn tensors(&self) -> Vec<&Lease<B>> {
        let adapters = self.layers.iter().filter_map(|layer| layer.adapter.as_ref());
        let adapters = adapters.flat_map(|adapter| adapter.dropped.iter().chain([&adapter.low]));
        self.x.iter().chain(adapters).map(|tensor| &**tensor).collect()
    }

    /// The same, to be replaced.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Rc<Lease<B>>> {
        let adapters = self.layers.iter_mut().filter_map(|layer| layer.adapter.as_mut());
        let adapters = adapters.flat_map(|adapter| adapter.dropped.iter_mut().chain([&mut adapter.low]));
        self.x.iter_mut().chain(adapters).collect()
    }
}

/// Adds to the gradients of the bias and the weight, if trained.
fn layer_gradients<B: Backend>(
    tape: &Tape<B>,
    layer: &Linear<B>,
    x: Option<&Rc<Lease<B>>>,
    dy: &Lease<B>,
    gradients: &mut Gradients<B>,
) {
    let (segments, row_starts) = ([0, tape.layout.tokens], &tape.layout.row_starts);
    if let Some(id) = layer.bias.as_ref().and_then(Vector::id) {
        tape.backend.run(BiasBackward { dbias: gradients.reach(tape.backend, id), dy: dy.buffer(), row_starts });
    }
    if let Matrix::Trained(id) = layer.weight {
        let p = tape.product(&segments, layer);
        let x = x.expect("a trained layer's input is saved").buffer();
        let dw = gradients.reach(tape.backend, id);
        tape.backend.run(ProductGradWeight { dw, dy: dy.buffer(), x, p, row_starts });
    }
}

/// Adds to the gradients of all adapters on one input, in one op.
fn adapter_gradients<B: Backend>(
    tape: &Tape<B>,
    adapters: &[AdapterGradients<B>],
    x: Option<&Rc<Lease<B>>>,
    gradients: &mut Gradients<B>,
) {
    let segments = [0, tape.layout.tokens];
    let ids: Vec<_> = adapters.iter().flat_map(|of| [of.adapter.b, of.adapter.a]).collect();
    let mut sums = gradients.reach_all(tape.backend, &ids).into_iter();
    let mut parts = Vec::new();
    for AdapterGradients { layer, adapter, saved, dy, grad_low } in adapters {
        let input = saved.dropped.as_ref().or(x).expect("an adapter's input is saved");
        let (a, b) = (adapter.factor_a(&segments, layer.inputs), adapter.factor_b(&segments, layer.outputs));
        for (u, x, p) in [(&*saved.low, dy, b), (grad_low, input, a)] {
            let dfactor = sums.next().expect("a gradient for every factor");
            parts.push(OuterProduct { dfactor, u: u.buffer(), x: x.buffer(), p });
        }
    }
    if !parts.is_empty() {
        tape.backend.run(LowRankOuter { parts, row_starts: &tape.layout.row_starts });
    }
}

/// `dy·B`, the gradient of the low-rank value before its scale.
fn low_gradient<B: Backend>(tape: &Tape<B>, layer: &Linear<B>, adapter: &Adapter, dy: &Lease<B>, low: &mut Lease<B>) {
    let segments = [0, tape.layout.tokens];
    let (factor, p) = (tape.parameters.value(adapter.b), adapter.factor_b(&segments, layer.outputs));
    tape.backend.run(LowRankContract::one(low.buffer_mut(), dy.buffer(), factor, p));
}

/// Through the weight, and through an adapter without dropout; computes the adapter's `low`
/// gradient.
fn input_gradient<B: Backend>(
    tape: &Tape<B>,
    dx: &mut Lease<B>,
    layer: &Linear<B>,
    dy: &Lease<B>,
    started: bool,
    low: Option<&mut (Adapter, Lease<B>)>,
) {
    let segments = [0, tape.layout.tokens];
    let p = Product { accumulate: started, ..tape.product(&segments, layer) };
    let mut low = low;
    if let Some((adapter, low)) = low.as_deref_mut()
        && (tape.drops(adapter) || matches!(layer.weight, Matrix::Quantized(_)))
    {
        low_gradient(tape, layer, adapter, dy, low);
    }
    let low = low.filter(|(adapter, _)| !tape.drops(adapter));
    if let Matrix::Quantized(parts) = &layer.weight {
        tape.quantized_grad_input(dx, dy, parts, &segments, started);
        let term = low.as_deref().map(|(adapter, low)| LowRankTerm {
            u: low.buffer(),
            factor: tape.parameters.value(adapter.a),
            p: adapter.factor_a(&segments, layer.inputs),
        });
        return tape.expand(dx, term);
    }
    let adapter = low.map(|(adapter, low)| LowRankGradient {
        low: low.buffer_mut(),
        contract: (tape.parameters.value(adapter.b), adapter.factor_b(&segments, layer.outputs)),
        expand: (tape.parameters.value(adapter.a), adapter.factor_a(&segments, layer.inputs)),
    });
    tape.with_weight(layer, |operand| {
        tape.backend.run(LinearGradInput { dx: dx.buffer_mut(), dy: dy.buffer(), w: operand, p, adapter });
    });
}

/// Adds `scale·low·A` through the dropout mask.
fn dropped_input_gradient<B: Backend>(
    tape: &Tape<B>,
    dx: &Lease<B>,
    layer: &Linear<B>,
    adapter: &Adapter,
    low: &Lease<B>,
) -> Lease<B> {
    let segments = [0, tape.layout.tokens];
    let p = adapter.factor_a(&segments, layer.inputs);
    let a = tape.parameters.value(adapter.a);
    let mut part = tape.take(dx.length());
    let zeros = tape.backend.zeros(dx.length());
    tape.backend.run(ToF32 { y: part.buffer_mut(), x: StoredMatrix::F32(&zeros) });
    tape.backend.run(LowRankExpand { y: part.buffer_mut(), u: low.buffer(), factor: a, p });
    let (mut masked, mut sum) = (tape.take(dx.length()), tape.take(dx.length()));
    tape.drop_out(&mut masked, &part, layer.inputs, adapter);
    tape.backend.run(Add { y: sum.buffer_mut(), a: dx.buffer(), b: masked.buffer() });
    sum
}
