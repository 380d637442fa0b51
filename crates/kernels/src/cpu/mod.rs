//! The same bits as `reference/`, faster: threads with static partition and the instruction sets of x86-64.
//!
//! Only slice products are written per instruction set; all other ops are one source compiled per target feature.

mod adamw;
mod amx;
mod attention;
mod balance;
mod bias;
mod block;
mod cast;
mod column_copy;
mod columns;
mod combine;
mod conv1d;
mod decay;
mod delta_rule;
mod digest;
mod dropout;
mod elementary;
mod elements;
mod embedding;
mod fold;
mod gate;
mod gated_norm;
mod head_loss;
mod l2_norm;
mod nest;
mod nibbles;
mod overlap;
mod panels;
mod path;
pub mod pool;
mod product;
mod product4;
mod residual;
mod rms_norm;
mod roof;
mod rope;
mod router;
mod single;
#[cfg(target_arch = "x86_64")]
mod slice_tiles;
mod slices;
mod sum_squares;
mod swiglu;
mod thin;
#[cfg(target_arch = "x86_64")]
mod thin_tiles;

pub use path::Path;

use crate::backend::{Backend, DeviceFailure, Matrix, StoredMatrix};
use crate::buffer::{Buffer, Element};
use crate::op::{
    AsQuantized, Attention, Columns, Combine, Conv1d, Decay, DeltaRule, Dropout, Gate, GatedNorm, HeadLoss, L2Norm,
    Product, QuantizedShape, RmsNorm, Rope, Router, SliceShape, Thin,
};
use half::{bf16, f16};
use isobit_numerics::adamw::Coefficients;
use isobit_numerics::digest::Digest;
use isobit_numerics::elementary::Function;
use pool::{Pool, THREADS_MOST, TooFewThreads};

/// Threads and a path, chosen once.
pub struct Cpu {
    pool: Pool,
    path: Path,
}

/// Why this machine cannot compute as it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    #[error("this machine does not have the {0} path")]
    PathMissing(Path),
    #[error("{0} threads are asked for: 1 to {THREADS_MOST} are possible")]
    Threads(usize),
    #[error(transparent)]
    TooFewThreads(#[from] TooFewThreads),
}

impl Cpu {
    pub fn new(threads: usize, path: Path) -> Result<Self, CpuError> {
        if !path.is_available() {
            return Err(CpuError::PathMissing(path));
        }
        if !(1..=THREADS_MOST).contains(&threads) {
            return Err(CpuError::Threads(threads));
        }
        Ok(Self { pool: Pool::new(threads)?, path })
    }

    pub fn path(&self) -> Path {
        self.path
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Runs the path's int8 unit flat out and says how many multiply-adds that was; none where there is no such unit.
    pub fn int8_roof(&self, iterations: usize) -> Option<f64> {
        roof::run(self, iterations)
    }
}

impl Backend for Cpu {
    type Buffer<T: Element> = Buffer<T>;
    type Rows = slices::SlicedRows;
    type Weight = slices::SlicedWeight;
    type QuantizedWeight = nibbles::QuantizedWeight;

    fn name(&self) -> String {
        format!("cpu/{} x{}", self.path, self.pool.threads())
    }

    fn zeros<T: Element>(&self, length: usize) -> Buffer<T> {
        Buffer::zeros(length)
    }

    fn upload<T: Element>(&self, host: &[T]) -> Buffer<T> {
        Buffer::from_slice(host)
    }

    fn overwrite<T: Element>(&self, device: &mut Buffer<T>, host: &[T]) {
        device.copy_from_slice(host);
    }

    fn download<T: Element>(&self, device: &Buffer<T>) -> Result<Vec<T>, DeviceFailure> {
        Ok(device.to_vec())
    }

    fn rows(&self, shape: SliceShape) -> Self::Rows {
        slices::rows(self, shape)
    }

    fn slice_rows(&self, out: &mut Self::Rows, x: &Buffer<f32>) {
        slices::slice_rows(self, out, x);
    }

    fn slice_weight(&self, w: StoredMatrix<Self>, count: usize, shape: SliceShape) -> Self::Weight {
        slices::slice_weight(self, w, count, shape)
    }

    fn product_workspace(&self, p: &Product) -> usize {
        product::workspace(self, p)
    }

    fn product_forward(
        &self,
        y: &mut Buffer<f32>,
        x: &Self::Rows,
        w: Matrix<Self>,
        p: &Product,
        workspace: &mut Buffer<u8>,
    ) {
        product::forward(self, y, x, w, p, workspace);
    }

    fn product_grad_input(
        &self,
        dx: &mut Buffer<f32>,
        dy: &Buffer<f32>,
        w: Matrix<Self>,
        p: &Product,
        workspace: &mut Buffer<u8>,
    ) {
        product::grad_input(self, dx, dy, w, p, workspace);
    }

    fn product_grad_weight(
        &self,
        dw: &mut Buffer<f32>,
        dy: &Buffer<f32>,
        x: &Buffer<f32>,
        p: &Product,
        row_starts: &[usize],
        workspace: &mut Buffer<u8>,
    ) {
        product::grad_weight(self, dw, dy, x, p, row_starts, workspace);
    }

    fn linear_workspace(&self, p: &Product, low: Option<&Thin>) -> usize {
        product::linear_workspace(self, p, low)
    }

    fn linear_forward(
        &self,
        y: &mut Buffer<f32>,
        x: &Self::Rows,
        w: Matrix<Self>,
        p: &Product,
        bias: Option<&Buffer<f32>>,
        low: Option<(&Buffer<f32>, &Buffer<f32>, &Thin)>,
        workspace: &mut Buffer<u8>,
    ) {
        let low = low.map(|(u, factor, thin)| product::Low { u, factor, thin });
        product::linear_forward(self, y, x, w, p, bias.map(|bias| &**bias), low, workspace);
    }

    fn linear_grad_input(
        &self,
        dx: &mut Buffer<f32>,
        dy: &Buffer<f32>,
        w: Matrix<Self>,
        p: &Product,
        low: Option<(&Buffer<f32>, &Buffer<f32>, &Thin)>,
        workspace: &mut Buffer<u8>,
    ) {
        let low = low.map(|(u, factor, thin)| product::Low { u, factor, thin });
        product::linear_grad_input(self, dx, dy, w, p, low, workspace);
    }

    fn quantized_weight<Q: AsQuantized, E>(
        &self,
        shape: QuantizedShape,
        make: impl FnMut(usize) -> Result<Q, E>,
    ) -> Result<Self::QuantizedWeight, E> {
        product4::quantized_weight(self, shape, make)
    }

    fn product4_rows(&self, out: &mut Self::Rows, x: &Buffer<f32>, w: &Self::QuantizedWeight, p: &Product) {
        product4::rows(self, out, x, w, p);
    }

    fn product4_workspace(&self, w: QuantizedShape, p: &Product) -> usize {
        product4::workspace(self, w, p)
    }

    fn product4_forward(
        &self,
        y: &mut Buffer<f32>,
        x: &Self::Rows,
        w: &Self::QuantizedWeight,
        p: &Product,
        workspace: &mut Buffer<u8>,
    ) {
        product4::forward(self, y, x, w, p, workspace);
    }

    fn product4_grad_input(
        &self,
        dx: &mut Buffer<f32>,
        dy: &Buffer<f32>,
        w: &Self::QuantizedWeight,
        p: &Product,
        workspace: &mut Buffer<u8>,
    ) {
        product4::grad_input(self, dx, dy, w, p, workspace);
    }

    fn thin_workspace(&self, p: &Thin) -> usize {
        thin::workspace(self, p)
    }

    fn thin_contract(
        &self,
        u: &mut Buffer<f32>,
        x: &Buffer<f32>,
        factor: &Buffer<f32>,
        p: &Thin,
        workspace: &mut Buffer<u8>,
    ) {
        thin::contract(self, u, x, factor, p, workspace);
    }

    fn thin_expand(
        &self,
        y: &mut Buffer<f32>,
        u: &Buffer<f32>,
        factor: &Buffer<f32>,
        p: &Thin,
        workspace: &mut Buffer<u8>,
    ) {
        thin::expand(self, y, u, factor, p, workspace);
    }

    fn thin_outer(
        &self,
        dfactor: &mut Buffer<f32>,
        u: &Buffer<f32>,
        x: &Buffer<f32>,
        p: &Thin,
        row_starts: &[usize],
        _workspace: &mut Buffer<u8>,
    ) {
        thin::outer(self, dfactor, u, x, p, row_starts);
    }

    fn bias_forward(&self, y: &mut Buffer<f32>, bias: &Buffer<f32>) {
        bias::forward(self, y, bias);
    }

    fn bias_backward(&self, dbias: &mut Buffer<f32>, dy: &Buffer<f32>, row_starts: &[usize]) {
        bias::backward(self, dbias, dy, row_starts);
    }

    fn add(&self, y: &mut Buffer<f32>, a: &Buffer<f32>, b: &Buffer<f32>) {
        residual::add(self, y, a, b);
    }

    fn scale(&self, x: &mut Buffer<f32>, factor: f32) {
        residual::scale(self, x, factor);
    }

    fn swiglu_forward(&self, h: &mut Buffer<f32>, gate: &Buffer<f32>, up: &Buffer<f32>) {
        swiglu::forward(self, h, gate, up);
    }

    fn swiglu_pairs_forward(&self, h: &mut Buffer<f32>, both: &Buffer<f32>, width: usize) {
        swiglu::pairs_forward(self, h, both, width);
    }

    fn swiglu_pairs_backward(&self, dboth: &mut Buffer<f32>, dh: &Buffer<f32>, both: &Buffer<f32>, width: usize) {
        swiglu::pairs_backward(self, dboth, dh, both, width);
    }

    fn swiglu_backward(
        &self,
        dgate: &mut Buffer<f32>,
        dup: &mut Buffer<f32>,
        dh: &Buffer<f32>,
        gate: &Buffer<f32>,
        up: &Buffer<f32>,
    ) {
        swiglu::backward(self, dgate, dup, dh, gate, up);
    }

    fn dropout(&self, y: &mut Buffer<f32>, x: &Buffer<f32>, p: &Dropout) {
        dropout::apply(self, y, x, p);
    }

    fn elementary(&self, y: &mut Buffer<f32>, x: &Buffer<f32>, function: Function) {
        elementary::apply(self, y, x, function);
    }

    fn rms_norm_forward(
        &self,
        y: &mut Buffer<f32>,
        inverse: &mut Buffer<f32>,
        x: &Buffer<f32>,
        weight: &Buffer<f32>,
        p: &RmsNorm,
    ) {
        rms_norm::forward(self, y, inverse, x, weight, p);
    }

    fn rms_norm_backward(
        &self,
        dx: &mut Buffer<f32>,
        dweight: Option<&mut Buffer<f32>>,
        dy: &Buffer<f32>,
        x: &Buffer<f32>,
        inverse: &Buffer<f32>,
        weight: &Buffer<f32>,
        p: &RmsNorm,
        row_starts: &[usize],
    ) {
        rms_norm::backward(self, dx, dweight.map(|b| &mut b[..]), dy, x, inverse, weight, p, row_starts);
    }

    fn rope_forward(
        &self,
        x: &mut Buffer<f32>,
        cos: &Buffer<f32>,
        sin: &Buffer<f32>,
        positions: &Buffer<u32>,
        p: &Rope,
    ) {
        rope::forward(self, x, cos, sin, positions, p);
    }

    fn rope_backward(
        &self,
        dx: &mut Buffer<f32>,
        cos: &Buffer<f32>,
        sin: &Buffer<f32>,
        positions: &Buffer<u32>,
        p: &Rope,
    ) {
        rope::backward(self, dx, cos, sin, positions, p);
    }

    fn columns(&self, y: &mut Buffer<f32>, x: &Buffer<f32>, p: &Columns) {
        column_copy::apply(self, y, x, p);
    }

    fn gate_forward(&self, y: &mut Buffer<f32>, x: &Buffer<f32>, g: &Buffer<f32>, p: &Gate) {
        gate::forward(self, y, x, g, p);
    }

    fn gate_backward(
        &self,
        dx: &mut Buffer<f32>,
        dg: &mut Buffer<f32>,
        dy: &Buffer<f32>,
        x: &Buffer<f32>,
        g: &Buffer<f32>,
        p: &Gate,
    ) {
        gate::backward(self, dx, dg, dy, x, g, p);
    }

    fn conv1d_forward(
        &self,
        y: &mut Buffer<f32>,
        x: &Buffer<f32>,
        weight: &Buffer<f32>,
        history: Option<&Buffer<f32>>,
        p: &Conv1d,
    ) {
        conv1d::forward(self, y, x, weight, history.map(|b| &b[..]), p);
    }

    fn conv1d_backward(
        &self,
        dx: &mut Buffer<f32>,
        dweight: Option<&mut Buffer<f32>>,
        dy: &Buffer<f32>,
        x: &Buffer<f32>,
        weight: &Buffer<f32>,
        p: &Conv1d,
        row_starts: &[usize],
    ) {
        conv1d::backward(self, dx, dweight.map(|b| &mut b[..]), dy, x, weight, p, row_starts);
    }

    fn l2_norm_forward(&self, y: &mut Buffer<f32>, inverse: &mut Buffer<f32>, x: &Buffer<f32>, p: &L2Norm) {
        l2_norm::forward(self, y, inverse, x, p);
    }

    fn l2_norm_backward(
        &self,
        dx: &mut Buffer<f32>,
        dy: &Buffer<f32>,
        x: &Buffer<f32>,
        inverse: &Buffer<f32>,
        p: &L2Norm,
    ) {
        l2_norm::backward(self, dx, dy, x, inverse, p);
    }

    fn decay_forward(
        &self,
        g: &mut Buffer<f32>,
        beta: &mut Buffer<f32>,
        ab: (&Buffer<f32>, &Buffer<f32>),
        a_log: &Buffer<f32>,
        dt_bias: &Buffer<f32>,
        p: &Decay,
    ) {
        decay::forward(self, g, beta, (ab.0, ab.1), a_log, dt_bias, p);
    }

    fn decay_backward(
        &self,
        grads: (&mut Buffer<f32>, &mut Buffer<f32>),
        parameters: Option<(&mut Buffer<f32>, &mut Buffer<f32>)>,
        d: (&Buffer<f32>, &Buffer<f32>),
        ab: (&Buffer<f32>, &Buffer<f32>),
        a_log: &Buffer<f32>,
        dt_bias: &Buffer<f32>,
        p: &Decay,
        row_starts: &[usize],
    ) {
        decay::backward(
            self,
            (grads.0, grads.1),
            parameters.map(|(a, b)| (&mut a[..], &mut b[..])),
            (d.0, d.1),
            (ab.0, ab.1),
            a_log,
            dt_bias,
            p,
            row_starts,
        );
    }

    fn gated_norm_forward(
        &self,
        y: &mut Buffer<f32>,
        inverse: &mut Buffer<f32>,
        h: &Buffer<f32>,
        z: &Buffer<f32>,
        weight: &Buffer<f32>,
        p: &GatedNorm,
    ) {
        gated_norm::forward(self, y, inverse, h, z, weight, p);
    }

    fn gated_norm_backward(
        &self,
        dh: &mut Buffer<f32>,
        dz: &mut Buffer<f32>,
        dweight: Option<&mut Buffer<f32>>,
        dy: &Buffer<f32>,
        hz: (&Buffer<f32>, &Buffer<f32>),
        inverse: &Buffer<f32>,
        weight: &Buffer<f32>,
        p: &GatedNorm,
        row_starts: &[usize],
    ) {
        gated_norm::backward(
            self,
            dh,
            dz,
            dweight.map(|b| &mut b[..]),
            dy,
            (hz.0, hz.1),
            inverse,
            weight,
            p,
            row_starts,
        );
    }

    fn attention_workspace(&self, p: &Attention) -> usize {
        attention::workspace(self, p)
    }

    fn attention_forward(
        &self,
        o: &mut Buffer<f32>,
        lse: &mut Buffer<f32>,
        q: &Buffer<f32>,
        k: &Buffer<f32>,
        v: &Buffer<f32>,
        p: &Attention,
        workspace: &mut Buffer<u8>,
    ) {
        attention::forward(self, o, lse, q, k, v, p, workspace);
    }

    fn attention_backward(
        &self,
        grads: (&mut Buffer<f32>, &mut Buffer<f32>, &mut Buffer<f32>),
        d_o: &Buffer<f32>,
        qkv: (&Buffer<f32>, &Buffer<f32>, &Buffer<f32>),
        o: &Buffer<f32>,
        lse: &Buffer<f32>,
        p: &Attention,
        workspace: &mut Buffer<u8>,
    ) {
        attention::backward(self, (grads.0, grads.1, grads.2), d_o, (qkv.0, qkv.1, qkv.2), o, lse, p, workspace);
    }

    fn delta_rule_workspace(&self, p: &DeltaRule) -> usize {
        delta_rule::workspace(self, p)
    }

    fn delta_rule_forward(
        &self,
        o: &mut Buffer<f32>,
        final_state: Option<&mut Buffer<f32>>,
        q: &Buffer<f32>,
        k: &Buffer<f32>,
        v: &Buffer<f32>,
        g: &Buffer<f32>,
        beta: &Buffer<f32>,
        initial_state: Option<&Buffer<f32>>,
        p: &DeltaRule,
        workspace: &mut Buffer<u8>,
    ) {
        let final_state = final_state.map(|state| &mut state[..]);
        let initial_state = initial_state.map(|state| &state[..]);
        delta_rule::forward(self, o, final_state, [q, k, v, g, beta], initial_state, p, workspace);
    }

    fn delta_rule_backward(
        &self,
        grads: [&mut Buffer<f32>; 5],
        d_o: &Buffer<f32>,
        inputs: [&Buffer<f32>; 5],
        p: &DeltaRule,
        workspace: &mut Buffer<u8>,
    ) {
        let (grads, inputs) = (grads.map(|x| &mut x[..]), inputs.map(|x| &x[..]));
        delta_rule::backward(self, grads, d_o, inputs, p, workspace);
    }

    fn embedding_forward(&self, y: &mut Buffer<f32>, table: StoredMatrix<Self>, ids: &Buffer<u32>, width: usize) {
        embedding::forward(self, y, table, ids, width);
    }

    fn embedding_workspace(&self, tokens: usize) -> usize {
        embedding::workspace(self, tokens)
    }

    fn embedding_backward(
        &self,
        dtable: &mut Buffer<f32>,
        dy: &Buffer<f32>,
        ids: &Buffer<u32>,
        width: usize,
        workspace: &mut Buffer<u8>,
    ) {
        embedding::backward(self, dtable, dy, ids, width, workspace);
    }

    fn head_loss_workspace(&self, p: &HeadLoss) -> usize {
        head_loss::workspace(self, p)
    }

    fn head_loss_step_workspace(&self, p: &HeadLoss) -> usize {
        head_loss::step_workspace(self, p)
    }

    fn head_loss_step(
        &self,
        (loss, lse, best): (&mut Buffer<f32>, &mut Buffer<f32>, &mut Buffer<u32>),
        dh: &mut Buffer<f32>,
        (rows, h): (&Self::Rows, &Buffer<f32>),
        head: Matrix<Self>,
        labels: &Buffer<i32>,
        weight: &Buffer<f32>,
        p: &HeadLoss,
        workspace: &mut Buffer<u8>,
    ) {
        head_loss::step(self, (loss, lse, best), dh, (rows, h), head, labels, weight, p, workspace);
    }

    fn head_loss_forward(
        &self,
        loss: &mut Buffer<f32>,
        lse: &mut Buffer<f32>,
        best: &mut Buffer<u32>,
        h: &Self::Rows,
        head: Matrix<Self>,
        labels: &Buffer<i32>,
        p: &HeadLoss,
        workspace: &mut Buffer<u8>,
    ) {
        head_loss::forward(self, loss, lse, best, h, head, labels, p, workspace);
    }

    fn head_loss_backward(
        &self,
        dh: &mut Buffer<f32>,
        dhead: Option<&mut Buffer<f32>>,
        h: (&Self::Rows, &Buffer<f32>),
        head: Matrix<Self>,
        labels: &Buffer<i32>,
        lse: &Buffer<f32>,
        weight: &Buffer<f32>,
        p: &HeadLoss,
        workspace: &mut Buffer<u8>,
    ) {
        head_loss::backward(self, dh, dhead.map(|b| &mut b[..]), (h.0, h.1), head, labels, lse, weight, p, workspace);
    }

    fn router_choose(&self, choices: &mut Buffer<u32>, logits: &Buffer<f32>, bias: Option<&Buffer<f32>>, p: &Router) {
        router::choose(self, choices, logits, bias.map(|b| &b[..]), p);
    }

    fn router_weights(&self, weights: &mut Buffer<f32>, logits: &Buffer<f32>, choices: &Buffer<u32>, p: &Router) {
        router::weights(self, weights, logits, choices, p);
    }

    fn router_backward(
        &self,
        dlogits: &mut Buffer<f32>,
        dweights: &Buffer<f32>,
        logits: &Buffer<f32>,
        choices: &Buffer<u32>,
        p: &Router,
    ) {
        router::backward(self, dlogits, dweights, logits, choices, p);
    }

    fn balance_workspace(&self, row_starts: &[usize], experts: usize) -> usize {
        balance::workspace(row_starts, experts)
    }

    fn balance_forward(
        &self,
        sums: &mut Buffer<f32>,
        logits: &Buffer<f32>,
        row_starts: &[usize],
        experts: usize,
        workspace: &mut Buffer<u8>,
    ) {
        balance::forward(self, sums, logits, row_starts, experts, workspace);
    }

    fn balance_backward(
        &self,
        dlogits: &mut Buffer<f32>,
        share: &Buffer<f32>,
        logits: &Buffer<f32>,
        row_starts: &[usize],
        experts: usize,
    ) {
        balance::backward(self, dlogits, share, logits, row_starts, experts);
    }

    fn combine_forward(
        &self,
        y: &mut Buffer<f32>,
        rows: &Buffer<f32>,
        weights: Option<&Buffer<f32>>,
        places: &Buffer<u32>,
        p: &Combine,
    ) {
        combine::forward(self, y, rows, weights.map(|b| &b[..]), places, p);
    }

    fn combine_backward(
        &self,
        drows: &mut Buffer<f32>,
        dweights: &mut Buffer<f32>,
        dy: &Buffer<f32>,
        rows: &Buffer<f32>,
        weights: &Buffer<f32>,
        places: &Buffer<u32>,
        p: &Combine,
    ) {
        combine::backward(self, drows, dweights, dy, rows, weights, places, p);
    }

    fn adamw(
        &self,
        parameter: &mut Buffer<f32>,
        m: &mut Buffer<f32>,
        v: &mut Buffer<f32>,
        gradient: &Buffer<f32>,
        c: &Coefficients,
    ) {
        adamw::update(self, parameter, m, v, gradient, c);
    }

    fn sum_squares(&self, x: &Buffer<f32>) -> Result<f32, DeviceFailure> {
        Ok(sum_squares::apply(self, x))
    }

    fn to_bf16(&self, y: &mut Buffer<bf16>, x: &Buffer<f32>) {
        cast::to_bf16(self, y, x);
    }

    fn to_f16(&self, y: &mut Buffer<f16>, x: &Buffer<f32>) {
        cast::to_f16(self, y, x);
    }

    fn to_f32(&self, y: &mut Buffer<f32>, x: StoredMatrix<Self>) {
        cast::to_f32(self, y, x);
    }

    fn digest<T: Element>(&self, x: &Buffer<T>) -> Result<Digest, DeviceFailure> {
        Ok(digest::apply(self, x))
    }
}
