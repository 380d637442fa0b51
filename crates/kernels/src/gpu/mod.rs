//! GPUs: device code from `crates/kernels/gpu`, compiled at run time through OpenCL or CUDA. One host file per op.
//!
//! Commands run in the order they were given. The first failure of the device is kept, nothing is launched after it, and it
//! comes out at the next `download`, `digest` or `sum_squares`.

mod absent;
mod adamw;
mod attention;
mod attention_mma;
mod balance;
mod bias;
mod cast;
mod column_copy;
mod combine;
mod conv1d;
mod cuda;
mod decay;
mod delta_rule;
mod device;
mod devices;
mod digest;
mod dropout;
mod elementary;
mod embedding;
mod gate;
mod gated_norm;
mod head_loss;
mod hopper;
mod l2_norm;
mod library;
mod linear;
mod memory;
mod opencl;
mod probe;
mod product;
mod product4;
mod program;
mod residual;
mod rms_norm;
mod rope;
mod router;
mod runtime;
mod slices;
mod sum_squares;
mod swiglu;
mod thin;

pub use device::Gpu;
pub use devices::{Api, Listing, Selector, list};
pub use memory::GpuBuffer;
pub use product4::QuantizedWeight;
pub use slices::{SlicedRows, SlicedWeight};

use crate::backend::{Backend, BegunDigest, DeviceFailure, Matrix, StoredMatrix};
use crate::buffer::Element;
use crate::op::{
    AsQuantized, Attention, Columns, Combine, Conv1d, Decay, DeltaRule, Dropout, Gate, GatedNorm, HeadLoss, L2Norm,
    Product, QuantizedShape, RmsNorm, Rope, Router, SliceShape, Thin,
};
use half::{bf16, f16};
use hopper::Epilogue;
use isobit_numerics::adamw::Coefficients;
use isobit_numerics::digest::Digest;
use isobit_numerics::elementary::Function;

impl Backend for Gpu {
    type Buffer<T: Element> = GpuBuffer<T>;
    type Rows = SlicedRows;
    type Weight = SlicedWeight;
    type QuantizedWeight = QuantizedWeight;

    fn name(&self) -> String {
        self.device.runtime.name().to_string()
    }

    fn zeros<T: Element>(&self, length: usize) -> GpuBuffer<T> {
        let buffer = GpuBuffer::new(self, length);
        if let Some(handle) = buffer.handle().filter(|_| length > 0) {
            self.device.attempt(|runtime| runtime.zero(handle, buffer.bytes()));
        }
        buffer
    }

    fn upload<T: Element>(&self, host: &[T]) -> GpuBuffer<T> {
        let buffer = GpuBuffer::new(self, host.len());
        if let Some(handle) = buffer.handle().filter(|_| !host.is_empty()) {
            // SAFETY: elements are plain bytes without padding.
            let bytes = unsafe { std::slice::from_raw_parts(host.as_ptr().cast::<u8>(), size_of_val(host)) };
            self.device.attempt(|runtime| runtime.write(handle, bytes));
        }
        buffer
    }

    fn download<T: Element>(&self, device: &GpuBuffer<T>) -> Result<Vec<T>, DeviceFailure> {
        self.read(device)
    }

    fn rows(&self, shape: SliceShape) -> Self::Rows {
        slices::rows(self, shape)
    }

    fn slice_rows(&self, out: &mut Self::Rows, x: &GpuBuffer<f32>) {
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
        y: &mut GpuBuffer<f32>,
        x: &Self::Rows,
        w: Matrix<Self>,
        p: &Product,
        workspace: &mut GpuBuffer<u8>,
    ) {
        product::forward(self, y, x, w, p, Epilogue::default(), workspace);
    }

    fn product_grad_input(
        &self,
        dx: &mut GpuBuffer<f32>,
        dy: &GpuBuffer<f32>,
        w: Matrix<Self>,
        p: &Product,
        workspace: &mut GpuBuffer<u8>,
    ) {
        product::grad_input(self, dx, dy, w, p, Epilogue::default(), workspace);
    }

    fn linear_forward(
        &self,
        y: &mut GpuBuffer<f32>,
        x: &Self::Rows,
        w: Matrix<Self>,
        p: &Product,
        bias: Option<&GpuBuffer<f32>>,
        low: Option<(&GpuBuffer<f32>, &GpuBuffer<f32>, &Thin)>,
        workspace: &mut GpuBuffer<u8>,
    ) {
        linear::forward(self, y, x, w, p, bias, low, workspace);
    }

    fn linear_grad_input(
        &self,
        dx: &mut GpuBuffer<f32>,
        dy: &GpuBuffer<f32>,
        w: Matrix<Self>,
        p: &Product,
        low: Option<(&GpuBuffer<f32>, &GpuBuffer<f32>, &Thin)>,
        workspace: &mut GpuBuffer<u8>,
    ) {
        linear::grad_input(self, dx, dy, w, p, low, workspace);
    }

    fn product_grad_weight(
        &self,
        dw: &mut GpuBuffer<f32>,
        dy: &GpuBuffer<f32>,
        x: &GpuBuffer<f32>,
        p: &Product,
        row_starts: &[usize],
        workspace: &mut GpuBuffer<u8>,
    ) {
        product::grad_weight(self, dw, dy, x, p, row_starts, workspace);
    }

    fn quantized_weight<Q: AsQuantized, E>(
        &self,
        shape: QuantizedShape,
        make: impl FnMut(usize) -> Result<Q, E>,
    ) -> Result<Self::QuantizedWeight, E> {
        product4::quantized_weight(self, shape, make)
    }

    fn product4_rows(&self, out: &mut Self::Rows, x: &GpuBuffer<f32>, w: &Self::QuantizedWeight, p: &Product) {
        product4::rows(self, out, x, w, p);
    }

    fn product4_workspace(&self, w: QuantizedShape, p: &Product) -> usize {
        product4::workspace(self, w, p)
    }

    fn product4_forward(
        &self,
        y: &mut GpuBuffer<f32>,
        x: &Self::Rows,
        w: &Self::QuantizedWeight,
        p: &Product,
        workspace: &mut GpuBuffer<u8>,
    ) {
        product4::forward(self, y, x, w, p, workspace);
    }

    fn product4_grad_input(
        &self,
        dx: &mut GpuBuffer<f32>,
        dy: &GpuBuffer<f32>,
        w: &Self::QuantizedWeight,
        p: &Product,
        workspace: &mut GpuBuffer<u8>,
    ) {
        product4::grad_input(self, dx, dy, w, p, workspace);
    }

    fn thin_workspace(&self, p: &Thin) -> usize {
        thin::workspace(self, p)
    }

    fn thin_contract(
        &self,
        u: &mut GpuBuffer<f32>,
        x: &GpuBuffer<f32>,
        factor: &GpuBuffer<f32>,
        p: &Thin,
        workspace: &mut GpuBuffer<u8>,
    ) {
        thin::contract(self, u, x, factor, p, workspace);
    }

    fn thin_expand(
        &self,
        y: &mut GpuBuffer<f32>,
        u: &GpuBuffer<f32>,
        factor: &GpuBuffer<f32>,
        p: &Thin,
        workspace: &mut GpuBuffer<u8>,
    ) {
        thin::expand(self, y, u, factor, p, workspace);
    }

    fn thin_outer(
        &self,
        dfactor: &mut GpuBuffer<f32>,
        u: &GpuBuffer<f32>,
        x: &GpuBuffer<f32>,
        p: &Thin,
        row_starts: &[usize],
        workspace: &mut GpuBuffer<u8>,
    ) {
        thin::outer(self, dfactor, u, x, p, row_starts, workspace);
    }

    fn bias_forward(&self, y: &mut GpuBuffer<f32>, bias: &GpuBuffer<f32>) {
        bias::forward(self, y, bias);
    }

    fn bias_backward(&self, dbias: &mut GpuBuffer<f32>, dy: &GpuBuffer<f32>, row_starts: &[usize]) {
        bias::backward(self, dbias, dy, row_starts);
    }

    fn add(&self, y: &mut GpuBuffer<f32>, a: &GpuBuffer<f32>, b: &GpuBuffer<f32>) {
        residual::add(self, y, a, b);
    }

    fn scale(&self, x: &mut GpuBuffer<f32>, factor: f32) {
        residual::scale(self, x, factor);
    }

    fn swiglu_forward(&self, h: &mut GpuBuffer<f32>, gate: &GpuBuffer<f32>, up: &GpuBuffer<f32>) {
        swiglu::forward(self, h, gate, up);
    }

    fn swiglu_pairs_forward(&self, h: &mut GpuBuffer<f32>, both: &GpuBuffer<f32>, width: usize) {
        swiglu::pairs_forward(self, h, both, width);
    }

    fn swiglu_pairs_backward(
        &self,
        dboth: &mut GpuBuffer<f32>,
        dh: &GpuBuffer<f32>,
        both: &GpuBuffer<f32>,
        width: usize,
    ) {
        swiglu::pairs_backward(self, dboth, dh, both, width);
    }

    fn swiglu_backward(
        &self,
        dgate: &mut GpuBuffer<f32>,
        dup: &mut GpuBuffer<f32>,
        dh: &GpuBuffer<f32>,
        gate: &GpuBuffer<f32>,
        up: &GpuBuffer<f32>,
    ) {
        swiglu::backward(self, dgate, dup, dh, gate, up);
    }

    fn dropout(&self, y: &mut GpuBuffer<f32>, x: &GpuBuffer<f32>, p: &Dropout) {
        dropout::apply(self, y, x, p);
    }

    fn elementary(&self, y: &mut GpuBuffer<f32>, x: &GpuBuffer<f32>, function: Function) {
        elementary::apply(self, y, x, function);
    }

    fn rms_norm_forward(
        &self,
        y: &mut GpuBuffer<f32>,
        inverse: &mut GpuBuffer<f32>,
        x: &GpuBuffer<f32>,
        weight: &GpuBuffer<f32>,
        p: &RmsNorm,
    ) {
        rms_norm::forward(self, y, inverse, x, weight, p);
    }

    fn rms_norm_backward(
        &self,
        dx: &mut GpuBuffer<f32>,
        dweight: Option<&mut GpuBuffer<f32>>,
        dy: &GpuBuffer<f32>,
        x: &GpuBuffer<f32>,
        inverse: &GpuBuffer<f32>,
        weight: &GpuBuffer<f32>,
        p: &RmsNorm,
        row_starts: &[usize],
    ) {
        rms_norm::backward(self, dx, dweight, dy, x, inverse, weight, p, row_starts);
    }

    fn rope_forward(
        &self,
        x: &mut GpuBuffer<f32>,
        cos: &GpuBuffer<f32>,
        sin: &GpuBuffer<f32>,
        positions: &GpuBuffer<u32>,
        p: &Rope,
    ) {
        rope::forward(self, x, cos, sin, positions, p);
    }

    fn rope_backward(
        &self,
        dx: &mut GpuBuffer<f32>,
        cos: &GpuBuffer<f32>,
        sin: &GpuBuffer<f32>,
        positions: &GpuBuffer<u32>,
        p: &Rope,
    ) {
        rope::backward(self, dx, cos, sin, positions, p);
    }

    fn columns(&self, y: &mut GpuBuffer<f32>, x: &GpuBuffer<f32>, p: &Columns) {
        column_copy::apply(self, y, x, p);
    }

    fn gate_forward(&self, y: &mut GpuBuffer<f32>, x: &GpuBuffer<f32>, g: &GpuBuffer<f32>, p: &Gate) {
        gate::forward(self, y, x, g, p);
    }

    fn gate_backward(
        &self,
        dx: &mut GpuBuffer<f32>,
        dg: &mut GpuBuffer<f32>,
        dy: &GpuBuffer<f32>,
        x: &GpuBuffer<f32>,
        g: &GpuBuffer<f32>,
        p: &Gate,
    ) {
        gate::backward(self, dx, dg, dy, x, g, p);
    }

    fn conv1d_forward(
        &self,
        y: &mut GpuBuffer<f32>,
        x: &GpuBuffer<f32>,
        weight: &GpuBuffer<f32>,
        history: Option<&GpuBuffer<f32>>,
        p: &Conv1d,
    ) {
        conv1d::forward(self, y, x, weight, history, p);
    }

    fn conv1d_backward(
        &self,
        dx: &mut GpuBuffer<f32>,
        dweight: Option<&mut GpuBuffer<f32>>,
        dy: &GpuBuffer<f32>,
        x: &GpuBuffer<f32>,
        weight: &GpuBuffer<f32>,
        p: &Conv1d,
        row_starts: &[usize],
    ) {
        conv1d::backward(self, dx, dweight, dy, x, weight, p, row_starts);
    }

    fn l2_norm_forward(&self, y: &mut GpuBuffer<f32>, inverse: &mut GpuBuffer<f32>, x: &GpuBuffer<f32>, p: &L2Norm) {
        l2_norm::forward(self, y, inverse, x, p);
    }

    fn l2_norm_backward(
        &self,
        dx: &mut GpuBuffer<f32>,
        dy: &GpuBuffer<f32>,
        x: &GpuBuffer<f32>,
        inverse: &GpuBuffer<f32>,
        p: &L2Norm,
    ) {
        l2_norm::backward(self, dx, dy, x, inverse, p);
    }

    fn decay_forward(
        &self,
        g: &mut GpuBuffer<f32>,
        beta: &mut GpuBuffer<f32>,
        ab: (&GpuBuffer<f32>, &GpuBuffer<f32>),
        a_log: &GpuBuffer<f32>,
        dt_bias: &GpuBuffer<f32>,
        p: &Decay,
    ) {
        decay::forward(self, g, beta, ab, a_log, dt_bias, p);
    }

    fn decay_backward(
        &self,
        grads: (&mut GpuBuffer<f32>, &mut GpuBuffer<f32>),
        parameters: Option<(&mut GpuBuffer<f32>, &mut GpuBuffer<f32>)>,
        d: (&GpuBuffer<f32>, &GpuBuffer<f32>),
        ab: (&GpuBuffer<f32>, &GpuBuffer<f32>),
        a_log: &GpuBuffer<f32>,
        dt_bias: &GpuBuffer<f32>,
        p: &Decay,
        row_starts: &[usize],
    ) {
        decay::backward(self, grads, parameters, d, ab, a_log, dt_bias, p, row_starts);
    }

    fn gated_norm_forward(
        &self,
        y: &mut GpuBuffer<f32>,
        inverse: &mut GpuBuffer<f32>,
        h: &GpuBuffer<f32>,
        z: &GpuBuffer<f32>,
        weight: &GpuBuffer<f32>,
        p: &GatedNorm,
    ) {
        gated_norm::forward(self, y, inverse, h, z, weight, p);
    }

    fn gated_norm_backward(
        &self,
        dh: &mut GpuBuffer<f32>,
        dz: &mut GpuBuffer<f32>,
        dweight: Option<&mut GpuBuffer<f32>>,
        dy: &GpuBuffer<f32>,
        hz: (&GpuBuffer<f32>, &GpuBuffer<f32>),
        inverse: &GpuBuffer<f32>,
        weight: &GpuBuffer<f32>,
        p: &GatedNorm,
        row_starts: &[usize],
    ) {
        gated_norm::backward(self, dh, dz, dweight, dy, hz, inverse, weight, p, row_starts);
    }

    fn attention_workspace(&self, p: &Attention) -> usize {
        attention::workspace(self, p)
    }

    fn attention_forward(
        &self,
        o: &mut GpuBuffer<f32>,
        lse: &mut GpuBuffer<f32>,
        q: &GpuBuffer<f32>,
        k: &GpuBuffer<f32>,
        v: &GpuBuffer<f32>,
        p: &Attention,
        workspace: &mut GpuBuffer<u8>,
    ) {
        attention::forward(self, o, lse, q, k, v, p, workspace);
    }

    fn attention_backward(
        &self,
        grads: (&mut GpuBuffer<f32>, &mut GpuBuffer<f32>, &mut GpuBuffer<f32>),
        d_o: &GpuBuffer<f32>,
        qkv: (&GpuBuffer<f32>, &GpuBuffer<f32>, &GpuBuffer<f32>),
        o: &GpuBuffer<f32>,
        lse: &GpuBuffer<f32>,
        p: &Attention,
        workspace: &mut GpuBuffer<u8>,
    ) {
        attention::backward(self, grads, d_o, qkv, o, lse, p, workspace);
    }

    fn delta_rule_workspace(&self, p: &DeltaRule) -> usize {
        delta_rule::workspace(self, p)
    }

    fn delta_rule_forward(
        &self,
        o: &mut GpuBuffer<f32>,
        final_state: Option<&mut GpuBuffer<f32>>,
        q: &GpuBuffer<f32>,
        k: &GpuBuffer<f32>,
        v: &GpuBuffer<f32>,
        g: &GpuBuffer<f32>,
        beta: &GpuBuffer<f32>,
        initial_state: Option<&GpuBuffer<f32>>,
        p: &DeltaRule,
        workspace: &mut GpuBuffer<u8>,
    ) {
        delta_rule::forward(self, o, final_state, [q, k, v, g, beta], initial_state, p, workspace);
    }

    fn delta_rule_backward(
        &self,
        grads: [&mut GpuBuffer<f32>; 5],
        d_o: &GpuBuffer<f32>,
        inputs: [&GpuBuffer<f32>; 5],
        p: &DeltaRule,
        workspace: &mut GpuBuffer<u8>,
    ) {
        delta_rule::backward(self, grads, d_o, inputs, p, workspace);
    }

    fn embedding_forward(&self, y: &mut GpuBuffer<f32>, table: StoredMatrix<Self>, ids: &GpuBuffer<u32>, width: usize) {
        embedding::forward(self, y, table, ids, width);
    }

    fn embedding_workspace(&self, tokens: usize) -> usize {
        embedding::workspace(self, tokens)
    }

    fn embedding_backward(
        &self,
        dtable: &mut GpuBuffer<f32>,
        dy: &GpuBuffer<f32>,
        ids: &GpuBuffer<u32>,
        width: usize,
        workspace: &mut GpuBuffer<u8>,
    ) {
        embedding::backward(self, dtable, dy, ids, width, workspace);
    }

    fn head_loss_workspace(&self, p: &HeadLoss) -> usize {
        head_loss::workspace(self, p)
    }

    fn head_loss_forward(
        &self,
        loss: &mut GpuBuffer<f32>,
        lse: &mut GpuBuffer<f32>,
        best: &mut GpuBuffer<u32>,
        h: &Self::Rows,
        head: Matrix<Self>,
        labels: &GpuBuffer<i32>,
        p: &HeadLoss,
        workspace: &mut GpuBuffer<u8>,
    ) {
        head_loss::forward(self, loss, lse, best, h, head, labels, p, workspace);
    }

    fn head_loss_backward(
        &self,
        dh: &mut GpuBuffer<f32>,
        dhead: Option<&mut GpuBuffer<f32>>,
        h: (&Self::Rows, &GpuBuffer<f32>),
        head: Matrix<Self>,
        labels: &GpuBuffer<i32>,
        lse: &GpuBuffer<f32>,
        weight: &GpuBuffer<f32>,
        p: &HeadLoss,
        workspace: &mut GpuBuffer<u8>,
    ) {
        head_loss::backward(self, dh, dhead, h, head, labels, lse, weight, p, workspace);
    }

    fn router_choose(
        &self,
        choices: &mut GpuBuffer<u32>,
        logits: &GpuBuffer<f32>,
        bias: Option<&GpuBuffer<f32>>,
        p: &Router,
    ) {
        router::choose(self, choices, logits, bias, p);
    }

    fn router_weights(
        &self,
        weights: &mut GpuBuffer<f32>,
        logits: &GpuBuffer<f32>,
        choices: &GpuBuffer<u32>,
        p: &Router,
    ) {
        router::weights(self, weights, logits, choices, p);
    }

    fn router_backward(
        &self,
        dlogits: &mut GpuBuffer<f32>,
        dweights: &GpuBuffer<f32>,
        logits: &GpuBuffer<f32>,
        choices: &GpuBuffer<u32>,
        p: &Router,
    ) {
        router::backward(self, dlogits, dweights, logits, choices, p);
    }

    fn balance_workspace(&self, row_starts: &[usize], experts: usize) -> usize {
        balance::workspace(self, row_starts, experts)
    }

    fn balance_forward(
        &self,
        sums: &mut GpuBuffer<f32>,
        logits: &GpuBuffer<f32>,
        row_starts: &[usize],
        experts: usize,
        workspace: &mut GpuBuffer<u8>,
    ) {
        balance::forward(self, sums, logits, row_starts, experts, workspace);
    }

    fn balance_backward(
        &self,
        dlogits: &mut GpuBuffer<f32>,
        share: &GpuBuffer<f32>,
        logits: &GpuBuffer<f32>,
        row_starts: &[usize],
        experts: usize,
    ) {
        balance::backward(self, dlogits, share, logits, row_starts, experts);
    }

    fn combine_forward(
        &self,
        y: &mut GpuBuffer<f32>,
        rows: &GpuBuffer<f32>,
        weights: Option<&GpuBuffer<f32>>,
        places: &GpuBuffer<u32>,
        p: &Combine,
    ) {
        combine::forward(self, y, rows, weights, places, p);
    }

    fn combine_backward(
        &self,
        drows: &mut GpuBuffer<f32>,
        dweights: &mut GpuBuffer<f32>,
        dy: &GpuBuffer<f32>,
        rows: &GpuBuffer<f32>,
        weights: &GpuBuffer<f32>,
        places: &GpuBuffer<u32>,
        p: &Combine,
    ) {
        combine::backward(self, drows, dweights, dy, rows, weights, places, p);
    }

    fn adamw(
        &self,
        parameter: &mut GpuBuffer<f32>,
        m: &mut GpuBuffer<f32>,
        v: &mut GpuBuffer<f32>,
        gradient: &GpuBuffer<f32>,
        c: &Coefficients,
    ) {
        adamw::update(self, parameter, m, v, gradient, c);
    }

    fn sum_squares(&self, x: &GpuBuffer<f32>) -> Result<f32, DeviceFailure> {
        Ok(sum_squares::apply(self, &[x])?[0])
    }

    fn sums_of_squares(&self, tensors: &[&GpuBuffer<f32>]) -> Result<Vec<f32>, DeviceFailure> {
        sum_squares::apply(self, tensors)
    }

    fn to_bf16(&self, y: &mut GpuBuffer<bf16>, x: &GpuBuffer<f32>) {
        cast::to_bf16(self, y, x);
    }

    fn to_f16(&self, y: &mut GpuBuffer<f16>, x: &GpuBuffer<f32>) {
        cast::to_f16(self, y, x);
    }

    fn to_f32(&self, y: &mut GpuBuffer<f32>, x: StoredMatrix<Self>) {
        cast::to_f32(self, y, x);
    }

    fn digest<T: Element>(&self, x: &GpuBuffer<T>) -> Result<Digest, DeviceFailure> {
        self.finish_digest(&digest::begin(self, x))
    }

    fn begin_digest(&self, x: &GpuBuffer<f32>) -> Result<BegunDigest<Self>, DeviceFailure> {
        Ok(digest::begin(self, x))
    }
}
