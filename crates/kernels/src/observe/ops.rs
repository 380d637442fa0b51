//! Every op of an observed backend: told to the observer, done by the backend inside.

use super::{Call, Observed, Observer, matrix, stored};
use crate::backend::{BegunDigest, Bytes, F32, I32, U32};
use crate::buffer::Element;
use crate::op::{
    AsQuantized, Attention, Columns, Combine, Conv1d, Decay, DeltaRule, Dropout, Gate, GatedNorm, HeadLoss, L2Norm,
    Product, QuantizedShape, RmsNorm, Rope, Router, SliceShape, Thin,
};
use crate::{Backend, DeviceFailure, Matrix, StoredMatrix};
use half::{bf16, f16};
use isobit_numerics::adamw::Coefficients;
use isobit_numerics::digest::Digest;
use isobit_numerics::elementary::Function;

impl<B: Backend, O: Observer<B>> Backend for Observed<B, O> {
    type Buffer<T: Element> = B::Buffer<T>;
    type Rows = B::Rows;
    type Weight = B::Weight;
    type QuantizedWeight = B::QuantizedWeight;

    fn name(&self) -> String {
        self.inner.name()
    }

    fn zeros<T: Element>(&self, length: usize) -> Self::Buffer<T> {
        self.inner.zeros(length)
    }

    fn upload<T: Element>(&self, host: &[T]) -> Self::Buffer<T> {
        self.inner.upload(host)
    }

    fn download<T: Element>(&self, device: &Self::Buffer<T>) -> Result<Vec<T>, DeviceFailure> {
        self.inner.download(device)
    }

    fn rows(&self, shape: SliceShape) -> Self::Rows {
        self.inner.rows(shape)
    }

    fn slice_rows(&self, out: &mut Self::Rows, x: &F32<Self>) {
        self.watch(Call::new("slice_rows"), || self.inner.slice_rows(out, x));
    }

    fn slice_weight(&self, w: StoredMatrix<Self>, count: usize, shape: SliceShape) -> Self::Weight {
        self.watch(Call::new("slice_weight"), || self.inner.slice_weight(stored(w), count, shape))
    }

    fn product_workspace(&self, p: &Product) -> usize {
        self.inner.product_workspace(p)
    }

    fn product_forward(
        &self,
        y: &mut F32<Self>,
        x: &Self::Rows,
        w: Matrix<Self>,
        p: &Product,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::product("product_forward", p);
        self.observer.before(&self.inner, call);
        self.inner.product_forward(y, x, matrix(w), p, workspace);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn product_grad_input(
        &self,
        dx: &mut F32<Self>,
        dy: &F32<Self>,
        w: Matrix<Self>,
        p: &Product,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::product("product_grad_input", p);
        self.observer.before(&self.inner, call);
        self.inner.product_grad_input(dx, dy, matrix(w), p, workspace);
        self.observer.after(&self.inner, call, Some(dx));
    }

    fn product_grad_weight(
        &self,
        dw: &mut F32<Self>,
        dy: &F32<Self>,
        x: &F32<Self>,
        p: &Product,
        row_starts: &[usize],
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::product("product_grad_weight", p);
        self.observer.before(&self.inner, call);
        self.inner.product_grad_weight(dw, dy, x, p, row_starts, workspace);
        self.observer.after(&self.inner, call, Some(dw));
    }

    fn linear_workspace(&self, p: &Product, low: Option<&Thin>) -> usize {
        self.inner.linear_workspace(p, low)
    }

    fn linear_forward(
        &self,
        y: &mut F32<Self>,
        x: &Self::Rows,
        w: Matrix<Self>,
        p: &Product,
        bias: Option<&F32<Self>>,
        low: Option<(&F32<Self>, &F32<Self>, &Thin)>,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::product("linear_forward", p);
        self.observer.before(&self.inner, call);
        self.inner.linear_forward(y, x, matrix(w), p, bias, low, workspace);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn linear_grad_input(
        &self,
        dx: &mut F32<Self>,
        dy: &F32<Self>,
        w: Matrix<Self>,
        p: &Product,
        low: Option<(&F32<Self>, &F32<Self>, &Thin)>,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::product("linear_grad_input", p);
        self.observer.before(&self.inner, call);
        self.inner.linear_grad_input(dx, dy, matrix(w), p, low, workspace);
        self.observer.after(&self.inner, call, Some(dx));
    }

    fn quantized_weight<Q: AsQuantized, E>(
        &self,
        shape: QuantizedShape,
        make: impl FnMut(usize) -> Result<Q, E>,
    ) -> Result<Self::QuantizedWeight, E> {
        self.watch(Call::new("quantized_weight"), || self.inner.quantized_weight(shape, make))
    }

    fn product4_rows(&self, out: &mut Self::Rows, x: &F32<Self>, w: &Self::QuantizedWeight, p: &Product) {
        self.watch(Call::product("product4_rows", p), || self.inner.product4_rows(out, x, w, p));
    }

    fn product4_workspace(&self, w: QuantizedShape, p: &Product) -> usize {
        self.inner.product4_workspace(w, p)
    }

    fn product4_forward(
        &self,
        y: &mut F32<Self>,
        x: &Self::Rows,
        w: &Self::QuantizedWeight,
        p: &Product,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::product("product4_forward", p);
        self.observer.before(&self.inner, call);
        self.inner.product4_forward(y, x, w, p, workspace);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn product4_grad_input(
        &self,
        dx: &mut F32<Self>,
        dy: &F32<Self>,
        w: &Self::QuantizedWeight,
        p: &Product,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::product("product4_grad_input", p);
        self.observer.before(&self.inner, call);
        self.inner.product4_grad_input(dx, dy, w, p, workspace);
        self.observer.after(&self.inner, call, Some(dx));
    }

    fn thin_workspace(&self, p: &Thin) -> usize {
        self.inner.thin_workspace(p)
    }

    fn thin_contract(
        &self,
        u: &mut F32<Self>,
        x: &F32<Self>,
        factor: &F32<Self>,
        p: &Thin,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::new("thin_contract");
        self.observer.before(&self.inner, call);
        self.inner.thin_contract(u, x, factor, p, workspace);
        self.observer.after(&self.inner, call, Some(u));
    }

    fn thin_expand(&self, y: &mut F32<Self>, u: &F32<Self>, factor: &F32<Self>, p: &Thin, workspace: &mut Bytes<Self>) {
        let call = Call::new("thin_expand");
        self.observer.before(&self.inner, call);
        self.inner.thin_expand(y, u, factor, p, workspace);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn thin_outer(
        &self,
        dfactor: &mut F32<Self>,
        u: &F32<Self>,
        x: &F32<Self>,
        p: &Thin,
        row_starts: &[usize],
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::new("thin_outer");
        self.observer.before(&self.inner, call);
        self.inner.thin_outer(dfactor, u, x, p, row_starts, workspace);
        self.observer.after(&self.inner, call, Some(dfactor));
    }

    fn bias_forward(&self, y: &mut F32<Self>, bias: &F32<Self>) {
        let call = Call::new("bias_forward");
        self.observer.before(&self.inner, call);
        self.inner.bias_forward(y, bias);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn bias_backward(&self, dbias: &mut F32<Self>, dy: &F32<Self>, row_starts: &[usize]) {
        let call = Call::new("bias_backward");
        self.observer.before(&self.inner, call);
        self.inner.bias_backward(dbias, dy, row_starts);
        self.observer.after(&self.inner, call, Some(dbias));
    }

    fn add(&self, y: &mut F32<Self>, a: &F32<Self>, b: &F32<Self>) {
        let call = Call::new("add");
        self.observer.before(&self.inner, call);
        self.inner.add(y, a, b);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn scale(&self, x: &mut F32<Self>, factor: f32) {
        let call = Call::new("scale");
        self.observer.before(&self.inner, call);
        self.inner.scale(x, factor);
        self.observer.after(&self.inner, call, Some(x));
    }

    fn swiglu_forward(&self, h: &mut F32<Self>, gate: &F32<Self>, up: &F32<Self>) {
        let call = Call::new("swiglu_forward");
        self.observer.before(&self.inner, call);
        self.inner.swiglu_forward(h, gate, up);
        self.observer.after(&self.inner, call, Some(h));
    }

    fn swiglu_pairs_forward(&self, h: &mut F32<Self>, both: &F32<Self>, width: usize) {
        let call = Call::new("swiglu_pairs_forward");
        self.observer.before(&self.inner, call);
        self.inner.swiglu_pairs_forward(h, both, width);
        self.observer.after(&self.inner, call, Some(h));
    }

    fn swiglu_pairs_backward(&self, dboth: &mut F32<Self>, dh: &F32<Self>, both: &F32<Self>, width: usize) {
        let call = Call::new("swiglu_pairs_backward");
        self.observer.before(&self.inner, call);
        self.inner.swiglu_pairs_backward(dboth, dh, both, width);
        self.observer.after(&self.inner, call, Some(dboth));
    }

    fn swiglu_backward(
        &self,
        dgate: &mut F32<Self>,
        dup: &mut F32<Self>,
        dh: &F32<Self>,
        gate: &F32<Self>,
        up: &F32<Self>,
    ) {
        let call = Call::new("swiglu_backward");
        self.observer.before(&self.inner, call);
        self.inner.swiglu_backward(dgate, dup, dh, gate, up);
        self.observer.after(&self.inner, call, Some(dgate));
    }

    fn dropout(&self, y: &mut F32<Self>, x: &F32<Self>, p: &Dropout) {
        let call = Call::new("dropout");
        self.observer.before(&self.inner, call);
        self.inner.dropout(y, x, p);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn elementary(&self, y: &mut F32<Self>, x: &F32<Self>, function: Function) {
        let call = Call::new("elementary");
        self.observer.before(&self.inner, call);
        self.inner.elementary(y, x, function);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn rms_norm_forward(
        &self,
        y: &mut F32<Self>,
        inverse: &mut F32<Self>,
        x: &F32<Self>,
        weight: &F32<Self>,
        p: &RmsNorm,
    ) {
        let call = Call::new("rms_norm_forward");
        self.observer.before(&self.inner, call);
        self.inner.rms_norm_forward(y, inverse, x, weight, p);
        self.observer.after(&self.inner, call, Some(y));
        self.observer.aside(&self.inner, call, inverse);
    }

    fn rms_norm_backward(
        &self,
        dx: &mut F32<Self>,
        dweight: Option<&mut F32<Self>>,
        dy: &F32<Self>,
        x: &F32<Self>,
        inverse: &F32<Self>,
        weight: &F32<Self>,
        p: &RmsNorm,
        row_starts: &[usize],
    ) {
        let call = Call::new("rms_norm_backward");
        self.observer.before(&self.inner, call);
        self.inner.rms_norm_backward(dx, dweight, dy, x, inverse, weight, p, row_starts);
        self.observer.after(&self.inner, call, Some(dx));
    }

    fn rope_forward(&self, x: &mut F32<Self>, cos: &F32<Self>, sin: &F32<Self>, positions: &U32<Self>, p: &Rope) {
        let call = Call::new("rope_forward");
        self.observer.before(&self.inner, call);
        self.inner.rope_forward(x, cos, sin, positions, p);
        self.observer.after(&self.inner, call, Some(x));
    }

    fn rope_backward(&self, dx: &mut F32<Self>, cos: &F32<Self>, sin: &F32<Self>, positions: &U32<Self>, p: &Rope) {
        let call = Call::new("rope_backward");
        self.observer.before(&self.inner, call);
        self.inner.rope_backward(dx, cos, sin, positions, p);
        self.observer.after(&self.inner, call, Some(dx));
    }

    fn columns(&self, y: &mut F32<Self>, x: &F32<Self>, p: &Columns) {
        let call = Call::new("columns");
        self.observer.before(&self.inner, call);
        self.inner.columns(y, x, p);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn gate_forward(&self, y: &mut F32<Self>, x: &F32<Self>, g: &F32<Self>, p: &Gate) {
        let call = Call::new("gate_forward");
        self.observer.before(&self.inner, call);
        self.inner.gate_forward(y, x, g, p);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn gate_backward(
        &self,
        dx: &mut F32<Self>,
        dg: &mut F32<Self>,
        dy: &F32<Self>,
        x: &F32<Self>,
        g: &F32<Self>,
        p: &Gate,
    ) {
        let call = Call::new("gate_backward");
        self.observer.before(&self.inner, call);
        self.inner.gate_backward(dx, dg, dy, x, g, p);
        self.observer.after(&self.inner, call, Some(dx));
    }

    fn conv1d_forward(
        &self,
        y: &mut F32<Self>,
        x: &F32<Self>,
        weight: &F32<Self>,
        history: Option<&F32<Self>>,
        p: &Conv1d,
    ) {
        let call = Call::new("conv1d_forward");
        self.observer.before(&self.inner, call);
        self.inner.conv1d_forward(y, x, weight, history, p);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn conv1d_backward(
        &self,
        dx: &mut F32<Self>,
        dweight: Option<&mut F32<Self>>,
        dy: &F32<Self>,
        x: &F32<Self>,
        weight: &F32<Self>,
        p: &Conv1d,
        row_starts: &[usize],
    ) {
        let call = Call::new("conv1d_backward");
        self.observer.before(&self.inner, call);
        self.inner.conv1d_backward(dx, dweight, dy, x, weight, p, row_starts);
        self.observer.after(&self.inner, call, Some(dx));
    }

    fn l2_norm_forward(&self, y: &mut F32<Self>, inverse: &mut F32<Self>, x: &F32<Self>, p: &L2Norm) {
        let call = Call::new("l2_norm_forward");
        self.observer.before(&self.inner, call);
        self.inner.l2_norm_forward(y, inverse, x, p);
        self.observer.after(&self.inner, call, Some(y));
        self.observer.aside(&self.inner, call, inverse);
    }

    fn l2_norm_backward(&self, dx: &mut F32<Self>, dy: &F32<Self>, x: &F32<Self>, inverse: &F32<Self>, p: &L2Norm) {
        let call = Call::new("l2_norm_backward");
        self.observer.before(&self.inner, call);
        self.inner.l2_norm_backward(dx, dy, x, inverse, p);
        self.observer.after(&self.inner, call, Some(dx));
    }

    fn decay_forward(
        &self,
        g: &mut F32<Self>,
        beta: &mut F32<Self>,
        ab: (&F32<Self>, &F32<Self>),
        a_log: &F32<Self>,
        dt_bias: &F32<Self>,
        p: &Decay,
    ) {
        let call = Call::new("decay_forward");
        self.observer.before(&self.inner, call);
        self.inner.decay_forward(g, beta, ab, a_log, dt_bias, p);
        self.observer.after(&self.inner, call, Some(g));
    }

    fn decay_backward(
        &self,
        grads: (&mut F32<Self>, &mut F32<Self>),
        parameters: Option<(&mut F32<Self>, &mut F32<Self>)>,
        d: (&F32<Self>, &F32<Self>),
        ab: (&F32<Self>, &F32<Self>),
        a_log: &F32<Self>,
        dt_bias: &F32<Self>,
        p: &Decay,
        row_starts: &[usize],
    ) {
        let call = Call::new("decay_backward");
        self.observer.before(&self.inner, call);
        self.inner.decay_backward((&mut *grads.0, grads.1), parameters, d, ab, a_log, dt_bias, p, row_starts);
        self.observer.after(&self.inner, call, Some(grads.0));
    }

    fn gated_norm_forward(
        &self,
        y: &mut F32<Self>,
        inverse: &mut F32<Self>,
        h: &F32<Self>,
        z: &F32<Self>,
        weight: &F32<Self>,
        p: &GatedNorm,
    ) {
        let call = Call::new("gated_norm_forward");
        self.observer.before(&self.inner, call);
        self.inner.gated_norm_forward(y, inverse, h, z, weight, p);
        self.observer.after(&self.inner, call, Some(y));
        self.observer.aside(&self.inner, call, inverse);
    }

    fn gated_norm_backward(
        &self,
        dh: &mut F32<Self>,
        dz: &mut F32<Self>,
        dweight: Option<&mut F32<Self>>,
        dy: &F32<Self>,
        hz: (&F32<Self>, &F32<Self>),
        inverse: &F32<Self>,
        weight: &F32<Self>,
        p: &GatedNorm,
        row_starts: &[usize],
    ) {
        let call = Call::new("gated_norm_backward");
        self.observer.before(&self.inner, call);
        self.inner.gated_norm_backward(dh, dz, dweight, dy, hz, inverse, weight, p, row_starts);
        self.observer.after(&self.inner, call, Some(dh));
    }

    fn attention_workspace(&self, p: &Attention) -> usize {
        self.inner.attention_workspace(p)
    }

    fn attention_forward(
        &self,
        o: &mut F32<Self>,
        lse: &mut F32<Self>,
        q: &F32<Self>,
        k: &F32<Self>,
        v: &F32<Self>,
        p: &Attention,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::new("attention_forward");
        self.observer.before(&self.inner, call);
        self.inner.attention_forward(o, lse, q, k, v, p, workspace);
        self.observer.after(&self.inner, call, Some(o));
        self.observer.aside(&self.inner, call, lse);
    }

    fn attention_backward(
        &self,
        grads: (&mut F32<Self>, &mut F32<Self>, &mut F32<Self>),
        d_o: &F32<Self>,
        qkv: (&F32<Self>, &F32<Self>, &F32<Self>),
        o: &F32<Self>,
        lse: &F32<Self>,
        p: &Attention,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::new("attention_backward");
        self.observer.before(&self.inner, call);
        self.inner.attention_backward((&mut *grads.0, grads.1, grads.2), d_o, qkv, o, lse, p, workspace);
        self.observer.after(&self.inner, call, Some(grads.0));
    }

    fn delta_rule_workspace(&self, p: &DeltaRule) -> usize {
        self.inner.delta_rule_workspace(p)
    }

    fn delta_rule_forward(
        &self,
        o: &mut F32<Self>,
        final_state: Option<&mut F32<Self>>,
        q: &F32<Self>,
        k: &F32<Self>,
        v: &F32<Self>,
        g: &F32<Self>,
        beta: &F32<Self>,
        initial_state: Option<&F32<Self>>,
        p: &DeltaRule,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::new("delta_rule_forward");
        self.observer.before(&self.inner, call);
        self.inner.delta_rule_forward(o, final_state, q, k, v, g, beta, initial_state, p, workspace);
        self.observer.after(&self.inner, call, Some(o));
    }

    fn delta_rule_backward(
        &self,
        grads: [&mut F32<Self>; 5],
        d_o: &F32<Self>,
        inputs: [&F32<Self>; 5],
        p: &DeltaRule,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::new("delta_rule_backward");
        let [dq, dk, dv, dg, dbeta] = grads;
        self.observer.before(&self.inner, call);
        self.inner.delta_rule_backward([&mut *dq, dk, dv, dg, dbeta], d_o, inputs, p, workspace);
        self.observer.after(&self.inner, call, Some(dq));
    }

    fn embedding_forward(&self, y: &mut F32<Self>, table: StoredMatrix<Self>, ids: &U32<Self>, width: usize) {
        let call = Call::new("embedding_forward");
        self.observer.before(&self.inner, call);
        self.inner.embedding_forward(y, stored(table), ids, width);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn embedding_workspace(&self, tokens: usize) -> usize {
        self.inner.embedding_workspace(tokens)
    }

    fn embedding_backward(
        &self,
        dtable: &mut F32<Self>,
        dy: &F32<Self>,
        ids: &U32<Self>,
        width: usize,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::new("embedding_backward");
        self.observer.before(&self.inner, call);
        self.inner.embedding_backward(dtable, dy, ids, width, workspace);
        self.observer.after(&self.inner, call, Some(dtable));
    }

    fn head_loss_workspace(&self, p: &HeadLoss) -> usize {
        self.inner.head_loss_workspace(p)
    }

    fn head_loss_step_workspace(&self, p: &HeadLoss) -> usize {
        self.inner.head_loss_step_workspace(p)
    }

    fn head_loss_step(
        &self,
        results: (&mut F32<Self>, &mut F32<Self>, &mut U32<Self>),
        dh: &mut F32<Self>,
        h: (&Self::Rows, &F32<Self>),
        head: Matrix<Self>,
        labels: &I32<Self>,
        weight: &F32<Self>,
        p: &HeadLoss,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::new("head_loss_step");
        self.observer.before(&self.inner, call);
        self.inner.head_loss_step(results, dh, h, matrix(head), labels, weight, p, workspace);
        self.observer.after(&self.inner, call, Some(dh));
    }

    fn head_loss_forward(
        &self,
        loss: &mut F32<Self>,
        lse: &mut F32<Self>,
        best: &mut U32<Self>,
        h: &Self::Rows,
        head: Matrix<Self>,
        labels: &I32<Self>,
        p: &HeadLoss,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::new("head_loss_forward");
        self.observer.before(&self.inner, call);
        self.inner.head_loss_forward(loss, lse, best, h, matrix(head), labels, p, workspace);
        self.observer.after(&self.inner, call, Some(loss));
    }

    fn head_loss_backward(
        &self,
        dh: &mut F32<Self>,
        dhead: Option<&mut F32<Self>>,
        h: (&Self::Rows, &F32<Self>),
        head: Matrix<Self>,
        labels: &I32<Self>,
        lse: &F32<Self>,
        weight: &F32<Self>,
        p: &HeadLoss,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::new("head_loss_backward");
        self.observer.before(&self.inner, call);
        self.inner.head_loss_backward(dh, dhead, h, matrix(head), labels, lse, weight, p, workspace);
        self.observer.after(&self.inner, call, Some(dh));
    }

    fn router_choose(&self, choices: &mut U32<Self>, logits: &F32<Self>, bias: Option<&F32<Self>>, p: &Router) {
        self.watch(Call::new("router_choose"), || self.inner.router_choose(choices, logits, bias, p));
    }

    fn router_weights(&self, weights: &mut F32<Self>, logits: &F32<Self>, choices: &U32<Self>, p: &Router) {
        let call = Call::new("router_weights");
        self.observer.before(&self.inner, call);
        self.inner.router_weights(weights, logits, choices, p);
        self.observer.after(&self.inner, call, Some(weights));
    }

    fn router_backward(
        &self,
        dlogits: &mut F32<Self>,
        dweights: &F32<Self>,
        logits: &F32<Self>,
        choices: &U32<Self>,
        p: &Router,
    ) {
        let call = Call::new("router_backward");
        self.observer.before(&self.inner, call);
        self.inner.router_backward(dlogits, dweights, logits, choices, p);
        self.observer.after(&self.inner, call, Some(dlogits));
    }

    fn balance_workspace(&self, row_starts: &[usize], experts: usize) -> usize {
        self.inner.balance_workspace(row_starts, experts)
    }

    fn balance_forward(
        &self,
        sums: &mut F32<Self>,
        logits: &F32<Self>,
        row_starts: &[usize],
        experts: usize,
        workspace: &mut Bytes<Self>,
    ) {
        let call = Call::new("balance_forward");
        self.observer.before(&self.inner, call);
        self.inner.balance_forward(sums, logits, row_starts, experts, workspace);
        self.observer.after(&self.inner, call, Some(sums));
    }

    fn balance_backward(
        &self,
        dlogits: &mut F32<Self>,
        share: &F32<Self>,
        logits: &F32<Self>,
        row_starts: &[usize],
        experts: usize,
    ) {
        let call = Call::new("balance_backward");
        self.observer.before(&self.inner, call);
        self.inner.balance_backward(dlogits, share, logits, row_starts, experts);
        self.observer.after(&self.inner, call, Some(dlogits));
    }

    fn combine_forward(
        &self,
        y: &mut F32<Self>,
        rows: &F32<Self>,
        weights: Option<&F32<Self>>,
        places: &U32<Self>,
        p: &Combine,
    ) {
        let call = Call::new("combine_forward");
        self.observer.before(&self.inner, call);
        self.inner.combine_forward(y, rows, weights, places, p);
        self.observer.after(&self.inner, call, Some(y));
    }

    fn combine_backward(
        &self,
        drows: &mut F32<Self>,
        dweights: &mut F32<Self>,
        dy: &F32<Self>,
        rows: &F32<Self>,
        weights: &F32<Self>,
        places: &U32<Self>,
        p: &Combine,
    ) {
        let call = Call::new("combine_backward");
        self.observer.before(&self.inner, call);
        self.inner.combine_backward(drows, dweights, dy, rows, weights, places, p);
        self.observer.after(&self.inner, call, Some(drows));
    }

    fn adamw(
        &self,
        parameter: &mut F32<Self>,
        m: &mut F32<Self>,
        v: &mut F32<Self>,
        gradient: &F32<Self>,
        c: &Coefficients,
    ) {
        let call = Call::new("adamw");
        self.observer.before(&self.inner, call);
        self.inner.adamw(parameter, m, v, gradient, c);
        self.observer.after(&self.inner, call, Some(parameter));
    }

    fn sum_squares(&self, x: &F32<Self>) -> Result<f32, DeviceFailure> {
        self.watch(Call::new("sum_squares"), || self.inner.sum_squares(x))
    }

    fn sums_of_squares(&self, tensors: &[&F32<Self>]) -> Result<Vec<f32>, DeviceFailure> {
        self.watch(Call::new("sum_squares"), || self.inner.sums_of_squares(tensors))
    }

    fn to_bf16(&self, y: &mut Self::Buffer<bf16>, x: &F32<Self>) {
        self.watch(Call::new("to_bf16"), || self.inner.to_bf16(y, x));
    }

    fn to_f16(&self, y: &mut Self::Buffer<f16>, x: &F32<Self>) {
        self.watch(Call::new("to_f16"), || self.inner.to_f16(y, x));
    }

    fn to_f32(&self, y: &mut F32<Self>, x: StoredMatrix<Self>) {
        let call = Call::new("to_f32");
        self.observer.before(&self.inner, call);
        self.inner.to_f32(y, stored(x));
        self.observer.after(&self.inner, call, Some(y));
    }

    fn digest<T: Element>(&self, x: &Self::Buffer<T>) -> Result<Digest, DeviceFailure> {
        self.watch(Call::new("digest"), || self.inner.digest(x))
    }

    fn begin_digest(&self, x: &F32<Self>) -> Result<BegunDigest<Self>, DeviceFailure> {
        Ok(match self.watch(Call::new("digest"), || self.inner.begin_digest(x))? {
            BegunDigest::Ready(digest) => BegunDigest::Ready(digest),
            BegunDigest::Sums { sums, bytes } => BegunDigest::Sums { sums, bytes },
        })
    }
}
