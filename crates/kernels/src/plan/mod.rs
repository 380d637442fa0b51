//! A backend that computes nothing and counts every byte: what `plan` runs on.
//!
//! [`Counting`] stands for another backend: it allocates as that one would (its layout of slices, its own workspace functions) and
//! notes every call and its arithmetic, so a real training step run on it tells what the step needs and cannot disagree with it.
//! Results are zeros, which keeps a step going. Not counted: tables of a few kilobytes that GPU ops make for a launch.

mod ledger;
mod memory;

pub use ledger::{Holder, Holdings, Kind, Work};
pub use memory::{CountedBuffer, CountedQuantizedWeight, CountedRows, CountedWeight, Layout};

use crate::backend::{Backend, DeviceFailure, Matrix, StoredMatrix};
use crate::buffer::Element;
use crate::op::{
    AsQuantized, Attention, Columns, Combine, Conv1d, Decay, DeltaRule, Dropout, Gate, GatedNorm, HeadLoss, L2Norm,
    Product, QuantizedShape, RmsNorm, Rope, Router, SliceShape, Thin,
};
use half::{bf16, f16};
use isobit_numerics::adamw::Coefficients;
use isobit_numerics::digest::Digest;
use isobit_numerics::elementary::Function;
use ledger::{Claim, Ledger};
use memory::stored_length;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::panic::Location;
use std::rc::Rc;

/// Counts what `L` would hold and do. Clones share the books.
pub struct Counting<L: Layout> {
    like: Rc<L>,
    ledger: Ledger,
}

impl<L: Layout> Clone for Counting<L> {
    fn clone(&self) -> Self {
        Self { like: Rc::clone(&self.like), ledger: self.ledger.clone() }
    }
}

impl<L: Layout> Counting<L> {
    pub fn new(like: L) -> Self {
        Self { like: Rc::new(like), ledger: Ledger::default() }
    }

    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        self.ledger.bytes()
    }

    /// The most bytes that were held at once.
    pub fn bytes_peak(&self) -> usize {
        self.ledger.bytes_peak()
    }

    pub fn held(&self) -> Holdings {
        self.ledger.held()
    }

    /// Who held what at the peak.
    pub fn held_at_peak(&self) -> Holdings {
        self.ledger.held_at_peak()
    }

    /// What each op was asked for.
    pub fn work(&self) -> BTreeMap<&'static str, Work> {
        self.ledger.work()
    }

    /// The peak starts again from what is held, the work from nothing.
    pub fn forget(&self) {
        self.ledger.forget();
    }

    fn buffer<T: Element>(&self, length: usize, at: &'static Location<'static>) -> CountedBuffer<T> {
        let bytes = length.checked_mul(size_of::<T>()).expect("a buffer's byte length fits the address space");
        let claim = self.claim(Kind::Buffer(T::NAME), self.like.buffer_bytes(bytes), at);
        CountedBuffer { length, _claim: claim, element: PhantomData }
    }

    fn claim(&self, kind: Kind, bytes: usize, at: &'static Location<'static>) -> Claim {
        self.ledger.claim(kind, bytes, at)
    }

    fn product(&self, op: &'static str, p: &Product, outputs: usize) {
        self.ledger.did(op, p.rows() * p.n * p.k, outputs);
    }

    fn thin(&self, op: &'static str, p: &Thin, outputs: usize) {
        self.ledger.did(op, p.tokens() * p.rank * p.width, outputs);
    }

    /// An op that works on one element after another.
    fn elements(&self, op: &'static str, outputs: usize) {
        self.ledger.did(op, 0, outputs);
    }

    fn check_weight(w: Matrix<Self>, p: &Product) {
        let shape = SliceShape { rows: p.n, width: p.k, profile: p.profile };
        match w {
            Matrix::Sliced(w) => assert_eq!((w.shape, w.count), (shape, p.weights()), "sliced weight"),
            Matrix::Stored(w) => assert_eq!(stored_length(w), p.weights() * p.n * p.k, "stored weight"),
        }
    }
}

/// Pairs of a query and a key that it sees, of one head.
fn attention_pairs(p: &Attention) -> usize {
    let positions = p.spans.iter().flat_map(|span| span.first_position()..span.keys.len());
    positions.map(|position| p.visible(position).len()).sum()
}

type F32 = CountedBuffer<f32>;
type U32 = CountedBuffer<u32>;
type I32 = CountedBuffer<i32>;
type Bytes = CountedBuffer<u8>;

impl<L: Layout> Backend for Counting<L> {
    type Buffer<T: Element> = CountedBuffer<T>;
    type Rows = CountedRows;
    type Weight = CountedWeight;
    type QuantizedWeight = CountedQuantizedWeight;

    fn name(&self) -> String {
        format!("plan for {}", self.like.name())
    }

    #[track_caller]
    fn zeros<T: Element>(&self, length: usize) -> CountedBuffer<T> {
        self.buffer(length, Location::caller())
    }

    #[track_caller]
    fn upload<T: Element>(&self, host: &[T]) -> CountedBuffer<T> {
        self.buffer(host.len(), Location::caller())
    }

    #[track_caller]
    fn upload_made<T: Element, H: AsRef<[T]>, E>(
        &self,
        length: usize,
        _host: impl FnOnce() -> Result<H, E>,
    ) -> Result<CountedBuffer<T>, E> {
        Ok(self.buffer(length, Location::caller()))
    }

    fn download<T: Element>(&self, device: &CountedBuffer<T>) -> Result<Vec<T>, DeviceFailure> {
        Ok(vec![T::default(); device.len()])
    }

    #[track_caller]
    fn rows(&self, shape: SliceShape) -> CountedRows {
        let claim = self.claim(Kind::Rows, self.like.rows_bytes(shape), Location::caller());
        CountedRows { shape, _claim: claim }
    }

    fn slice_rows(&self, out: &mut CountedRows, x: &F32) {
        assert_eq!(x.len(), out.shape.rows * out.shape.width, "rows to slice");
        self.elements("slice_rows", x.len());
    }

    #[track_caller]
    fn slice_weight(&self, w: StoredMatrix<Self>, count: usize, shape: SliceShape) -> CountedWeight {
        assert_eq!(stored_length(w), count * shape.rows * shape.width, "weights to slice");
        self.elements("slice_weight", stored_length(w));
        let claim = self.claim(Kind::Weight, self.like.weight_bytes(count, shape), Location::caller());
        CountedWeight { shape, count, _claim: claim }
    }

    fn product_workspace(&self, p: &Product) -> usize {
        self.like.product_workspace(p)
    }

    fn linear_workspace(&self, p: &Product, low: Option<&Thin>) -> usize {
        self.like.linear_workspace(p, low)
    }

    fn product_forward(&self, y: &mut F32, x: &CountedRows, w: Matrix<Self>, p: &Product, _: &mut Bytes) {
        assert_eq!(x.shape, SliceShape { rows: p.rows(), width: p.k, profile: p.profile }, "left operand");
        assert_eq!(y.len(), p.rows() * p.n, "output");
        Self::check_weight(w, p);
        self.product("product_forward", p, y.len());
    }

    fn product_grad_input(&self, dx: &mut F32, dy: &F32, w: Matrix<Self>, p: &Product, _: &mut Bytes) {
        assert_eq!((dx.len(), dy.len()), (p.rows() * p.k, p.rows() * p.n), "gradients");
        Self::check_weight(w, p);
        self.product("product_grad_input", p, dx.len());
    }

    fn product_grad_weight(&self, dw: &mut F32, dy: &F32, x: &F32, p: &Product, _: &[usize], _: &mut Bytes) {
        assert_eq!(dw.len(), p.weights() * p.n * p.k, "weight gradient");
        assert_eq!((dy.len(), x.len()), (p.rows() * p.n, p.rows() * p.k), "activations and their gradient");
        self.product("product_grad_weight", p, dw.len());
    }

    #[track_caller]
    fn quantized_weight<Q: AsQuantized, E>(
        &self,
        shape: QuantizedShape,
        _make: impl FnMut(usize) -> Result<Q, E>,
    ) -> Result<CountedQuantizedWeight, E> {
        self.elements("quantized_weight", shape.count * shape.n * shape.k);
        let claim = self.claim(Kind::Weight, self.like.quantized_bytes(shape), Location::caller());
        Ok(CountedQuantizedWeight { shape, _claim: claim })
    }

    fn product4_rows(&self, out: &mut CountedRows, x: &F32, w: &CountedQuantizedWeight, p: &Product) {
        w.shape.check(p);
        assert_eq!(out.shape, SliceShape { rows: p.rows(), width: p.k, profile: p.profile }, "rows of the product");
        assert_eq!(x.len(), p.rows() * p.k, "rows to slice");
        self.elements("product4_rows", x.len());
    }

    fn product4_workspace(&self, w: QuantizedShape, p: &Product) -> usize {
        self.like.product4_workspace(w, p)
    }

    fn product4_forward(&self, y: &mut F32, x: &CountedRows, w: &CountedQuantizedWeight, p: &Product, _: &mut Bytes) {
        w.shape.check(p);
        assert_eq!(x.shape, SliceShape { rows: p.rows(), width: p.k, profile: p.profile }, "left operand");
        assert_eq!(y.len(), p.rows() * p.n, "output");
        self.product("product4_forward", p, y.len());
    }

    fn product4_grad_input(&self, dx: &mut F32, dy: &F32, w: &CountedQuantizedWeight, p: &Product, _: &mut Bytes) {
        w.shape.check(p);
        assert_eq!((dx.len(), dy.len()), (p.rows() * p.k, p.rows() * p.n), "gradients");
        self.product("product4_grad_input", p, dx.len());
    }

    fn thin_workspace(&self, p: &Thin) -> usize {
        self.like.thin_workspace(p)
    }

    fn thin_contract(&self, u: &mut F32, x: &F32, factor: &F32, p: &Thin, _: &mut Bytes) {
        check_thin(u, x, factor, p);
        self.thin("thin_contract", p, u.len());
    }

    fn thin_expand(&self, y: &mut F32, u: &F32, factor: &F32, p: &Thin, _: &mut Bytes) {
        check_thin(u, y, factor, p);
        self.thin("thin_expand", p, y.len());
    }

    fn thin_outer(&self, dfactor: &mut F32, u: &F32, x: &F32, p: &Thin, _: &[usize], _: &mut Bytes) {
        check_thin(u, x, dfactor, p);
        self.thin("thin_outer", p, dfactor.len());
    }

    fn bias_forward(&self, y: &mut F32, _bias: &F32) {
        self.elements("bias_forward", y.len());
    }

    fn bias_backward(&self, dbias: &mut F32, _dy: &F32, _: &[usize]) {
        self.elements("bias_backward", dbias.len());
    }

    fn add(&self, y: &mut F32, a: &F32, b: &F32) {
        assert_eq!([a.len(), b.len()], [y.len(); 2], "terms of a sum");
        self.elements("add", y.len());
    }

    fn scale(&self, x: &mut F32, _factor: f32) {
        self.elements("scale", x.len());
    }

    fn swiglu_forward(&self, h: &mut F32, gate: &F32, up: &F32) {
        assert_eq!([gate.len(), up.len()], [h.len(); 2], "gate and up");
        self.elements("swiglu_forward", h.len());
    }

    fn swiglu_pairs_forward(&self, h: &mut F32, both: &F32, _width: usize) {
        assert_eq!(2 * h.len(), both.len(), "pairs");
        self.elements("swiglu_pairs_forward", h.len());
    }

    fn swiglu_pairs_backward(&self, dboth: &mut F32, _dh: &F32, _both: &F32, _width: usize) {
        self.elements("swiglu_pairs_backward", dboth.len());
    }

    fn swiglu_backward(&self, dgate: &mut F32, dup: &mut F32, _dh: &F32, _gate: &F32, _up: &F32) {
        self.elements("swiglu_backward", dgate.len() + dup.len());
    }

    fn dropout(&self, y: &mut F32, x: &F32, _: &Dropout) {
        assert_eq!(y.len(), x.len(), "elements to drop");
        self.elements("dropout", y.len());
    }

    fn elementary(&self, y: &mut F32, _x: &F32, _: Function) {
        self.elements("elementary", y.len());
    }

    fn rms_norm_forward(&self, y: &mut F32, inverse: &mut F32, x: &F32, weight: &F32, p: &RmsNorm) {
        assert_eq!([y.len(), x.len()], [p.tokens * p.width; 2], "rows to normalise");
        assert_eq!((inverse.len(), weight.len()), (p.tokens, p.width), "norms and weights");
        self.elements("rms_norm_forward", y.len());
    }

    fn rms_norm_backward(
        &self,
        dx: &mut F32,
        _dweight: Option<&mut F32>,
        _dy: &F32,
        _x: &F32,
        _inverse: &F32,
        _weight: &F32,
        _: &RmsNorm,
        _: &[usize],
    ) {
        self.elements("rms_norm_backward", dx.len());
    }

    fn rope_forward(&self, x: &mut F32, _cos: &F32, _sin: &F32, _positions: &U32, _: &Rope) {
        self.elements("rope_forward", x.len());
    }

    fn rope_backward(&self, dx: &mut F32, _cos: &F32, _sin: &F32, _positions: &U32, _: &Rope) {
        self.elements("rope_backward", dx.len());
    }

    fn attention_workspace(&self, p: &Attention) -> usize {
        self.like.attention_workspace(p)
    }

    fn attention_forward(
        &self,
        o: &mut F32,
        _lse: &mut F32,
        _q: &F32,
        _k: &F32,
        _v: &F32,
        p: &Attention,
        _: &mut Bytes,
    ) {
        p.check();
        let widths = p.key_width + p.value_width;
        self.ledger.did("attention_forward", attention_pairs(p) * p.heads * widths, o.len());
    }

    fn attention_backward(
        &self,
        (dq, dk, dv): (&mut F32, &mut F32, &mut F32),
        _d_o: &F32,
        _qkv: (&F32, &F32, &F32),
        _o: &F32,
        _lse: &F32,
        p: &Attention,
        _: &mut Bytes,
    ) {
        p.check();
        p.check_backward();
        // The scores again, dP and dV, dQ and dK.
        let widths = 3 * p.key_width + 2 * p.value_width;
        let outputs = dq.len() + dk.len() + dv.len();
        self.ledger.did("attention_backward", attention_pairs(p) * p.heads * widths, outputs);
    }

    fn embedding_forward(&self, y: &mut F32, _table: StoredMatrix<Self>, ids: &U32, width: usize) {
        assert_eq!(y.len(), ids.len() * width, "one row per token");
        self.elements("embedding_forward", y.len());
    }

    fn embedding_workspace(&self, tokens: usize) -> usize {
        self.like.embedding_workspace(tokens)
    }

    fn embedding_backward(&self, _dtable: &mut F32, dy: &F32, ids: &U32, width: usize, _: &mut Bytes) {
        assert_eq!(dy.len(), ids.len() * width, "one row per token");
        self.elements("embedding_backward", dy.len());
    }

    fn head_loss_workspace(&self, p: &HeadLoss) -> usize {
        self.like.head_loss_workspace(p)
    }

    fn head_loss_step_workspace(&self, p: &HeadLoss) -> usize {
        self.like.head_loss_step_workspace(p)
    }

    fn head_loss_forward(
        &self,
        loss: &mut F32,
        _lse: &mut F32,
        _best: &mut U32,
        _h: &CountedRows,
        _head: Matrix<Self>,
        _labels: &I32,
        p: &HeadLoss,
        _: &mut Bytes,
    ) {
        self.ledger.did("head_loss_forward", p.tokens() * p.hidden * p.vocabulary, loss.len());
    }

    fn head_loss_backward(
        &self,
        dh: &mut F32,
        dhead: Option<&mut F32>,
        _h: (&CountedRows, &F32),
        _head: Matrix<Self>,
        _labels: &I32,
        _lse: &F32,
        _weight: &F32,
        p: &HeadLoss,
        _: &mut Bytes,
    ) {
        // The logits again, the gradient of the hidden states, that of the head.
        let products = if dhead.is_some() { 3 } else { 2 };
        let outputs = dh.len() + dhead.map_or(0, |dhead| dhead.len());
        self.ledger.did("head_loss_backward", products * p.tokens() * p.hidden * p.vocabulary, outputs);
    }

    fn columns(&self, y: &mut F32, _x: &F32, _: &Columns) {
        self.elements("columns", y.len());
    }

    fn gate_forward(&self, y: &mut F32, _x: &F32, _g: &F32, _: &Gate) {
        self.elements("gate_forward", y.len());
    }

    fn gate_backward(&self, dx: &mut F32, _dg: &mut F32, _dy: &F32, _x: &F32, _g: &F32, _: &Gate) {
        self.elements("gate_backward", dx.len());
    }

    fn conv1d_forward(&self, y: &mut F32, _x: &F32, _weight: &F32, _history: Option<&F32>, _: &Conv1d) {
        self.elements("conv1d_forward", y.len());
    }

    fn conv1d_backward(
        &self,
        dx: &mut F32,
        _dweight: Option<&mut F32>,
        _dy: &F32,
        _x: &F32,
        _weight: &F32,
        _: &Conv1d,
        _: &[usize],
    ) {
        self.elements("conv1d_backward", dx.len());
    }

    fn l2_norm_forward(&self, y: &mut F32, _inverse: &mut F32, _x: &F32, _: &L2Norm) {
        self.elements("l2_norm_forward", y.len());
    }

    fn l2_norm_backward(&self, dx: &mut F32, _dy: &F32, _x: &F32, _inverse: &F32, _: &L2Norm) {
        self.elements("l2_norm_backward", dx.len());
    }

    fn decay_forward(&self, g: &mut F32, _beta: &mut F32, _ab: (&F32, &F32), _a_log: &F32, _dt_bias: &F32, _: &Decay) {
        self.elements("decay_forward", g.len());
    }

    fn decay_backward(
        &self,
        grads: (&mut F32, &mut F32),
        _parameters: Option<(&mut F32, &mut F32)>,
        _d: (&F32, &F32),
        _ab: (&F32, &F32),
        _a_log: &F32,
        _dt_bias: &F32,
        _: &Decay,
        _: &[usize],
    ) {
        self.elements("decay_backward", grads.0.len());
    }

    fn gated_norm_forward(&self, y: &mut F32, _inverse: &mut F32, _h: &F32, _z: &F32, _weight: &F32, _: &GatedNorm) {
        self.elements("gated_norm_forward", y.len());
    }

    fn gated_norm_backward(
        &self,
        dh: &mut F32,
        _dz: &mut F32,
        _dweight: Option<&mut F32>,
        _dy: &F32,
        _hz: (&F32, &F32),
        _inverse: &F32,
        _weight: &F32,
        _: &GatedNorm,
        _: &[usize],
    ) {
        self.elements("gated_norm_backward", dh.len());
    }

    fn router_choose(&self, choices: &mut U32, _logits: &F32, _bias: Option<&F32>, _: &Router) {
        self.elements("router_choose", choices.len());
    }

    fn router_weights(&self, weights: &mut F32, _logits: &F32, _choices: &U32, _: &Router) {
        self.elements("router_weights", weights.len());
    }

    fn router_backward(&self, dlogits: &mut F32, _dweights: &F32, _logits: &F32, _choices: &U32, _: &Router) {
        self.elements("router_backward", dlogits.len());
    }

    fn balance_workspace(&self, row_starts: &[usize], experts: usize) -> usize {
        self.like.balance_workspace(row_starts, experts)
    }

    fn balance_forward(&self, sums: &mut F32, _logits: &F32, _: &[usize], _experts: usize, _: &mut Bytes) {
        self.elements("balance_forward", sums.len());
    }

    fn balance_backward(&self, dlogits: &mut F32, _share: &F32, _logits: &F32, _: &[usize], _experts: usize) {
        self.elements("balance_backward", dlogits.len());
    }

    fn combine_forward(&self, y: &mut F32, _rows: &F32, _weights: Option<&F32>, _places: &U32, _: &Combine) {
        self.elements("combine_forward", y.len());
    }

    fn combine_backward(
        &self,
        drows: &mut F32,
        _dweights: &mut F32,
        _dy: &F32,
        _rows: &F32,
        _weights: &F32,
        _places: &U32,
        _: &Combine,
    ) {
        self.elements("combine_backward", drows.len());
    }

    fn delta_rule_workspace(&self, p: &DeltaRule) -> usize {
        self.like.delta_rule_workspace(p)
    }

    fn delta_rule_forward(
        &self,
        o: &mut F32,
        _final_state: Option<&mut F32>,
        _q: &F32,
        _k: &F32,
        _v: &F32,
        _g: &F32,
        _beta: &F32,
        _initial_state: Option<&F32>,
        _: &DeltaRule,
        _: &mut Bytes,
    ) {
        self.elements("delta_rule_forward", o.len());
    }

    fn delta_rule_backward(&self, grads: [&mut F32; 5], _d_o: &F32, _inputs: [&F32; 5], _: &DeltaRule, _: &mut Bytes) {
        self.elements("delta_rule_backward", grads[0].len());
    }

    fn adamw(&self, parameter: &mut F32, m: &mut F32, v: &mut F32, gradient: &F32, _: &Coefficients) {
        assert_eq!([m.len(), v.len(), gradient.len()], [parameter.len(); 3], "moments and gradient");
        self.elements("adamw", parameter.len());
    }

    fn sum_squares(&self, x: &F32) -> Result<f32, DeviceFailure> {
        self.elements("sum_squares", x.len());
        Ok(0.0)
    }

    fn to_bf16(&self, y: &mut CountedBuffer<bf16>, _x: &F32) {
        self.elements("to_bf16", y.len());
    }

    fn to_f16(&self, y: &mut CountedBuffer<f16>, _x: &F32) {
        self.elements("to_f16", y.len());
    }

    fn to_f32(&self, y: &mut F32, x: StoredMatrix<Self>) {
        assert_eq!(y.len(), stored_length(x), "numbers to convert");
        self.elements("to_f32", y.len());
    }

    /// The same for all buffers of a length.
    fn digest<T: Element>(&self, x: &CountedBuffer<T>) -> Result<Digest, DeviceFailure> {
        self.elements("digest", x.len());
        Ok(Digest([x.len() as u64, 0]))
    }
}

fn check_thin(u: &F32, x: &F32, factor: &F32, p: &Thin) {
    let want = [p.tokens() * p.rank, p.tokens() * p.width, p.factors() * p.rank * p.width];
    assert_eq!([u.len(), x.len(), factor.len()], want, "thin product");
}
