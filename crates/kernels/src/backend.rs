//! The whole contract of a backend on one page. What each op's bits are stands in `op/` and `docs/numerics.md`.
//!
//! Ops are enqueued in order and cannot fail for a reason of arithmetic; a device's own failure surfaces at `download`.
//! Outputs come first, then inputs, parameters, workspace. Nothing allocates except the functions that return buffers.

use crate::buffer::Element;
use crate::op::{Attention, Dropout, HeadLoss, Product, RmsNorm, Rope, SliceShape, Thin};
use half::{bf16, f16};
use isobit_numerics::adamw::Coefficients;
use isobit_numerics::digest::Digest;
use isobit_numerics::elementary::Function;

/// A weight matrix as one of the stored number formats.
pub enum StoredMatrix<'a, B: Backend + ?Sized> {
    F32(&'a B::Buffer<f32>),
    Bf16(&'a B::Buffer<bf16>),
    F16(&'a B::Buffer<f16>),
}

/// A weight as a product takes it: stored numbers, sliced on the fly, or kept sliced. The bits do not differ.
pub enum Matrix<'a, B: Backend + ?Sized> {
    Stored(StoredMatrix<'a, B>),
    Sliced(&'a B::Weight),
}

impl<B: Backend + ?Sized> Clone for StoredMatrix<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend + ?Sized> Copy for StoredMatrix<'_, B> {}
impl<B: Backend + ?Sized> Clone for Matrix<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Backend + ?Sized> Copy for Matrix<'_, B> {}

pub trait Backend {
    /// Memory of the device.
    type Buffer<T: Element>;
    /// Activations, sliced: the left operand of a product.
    type Rows;
    /// Weights, sliced: the right operand of a product.
    type Weight;

    fn name(&self) -> String;
    fn zeros<T: Element>(&self, length: usize) -> Self::Buffer<T>;
    fn upload<T: Element>(&self, host: &[T]) -> Self::Buffer<T>;
    fn download<T: Element>(&self, device: &Self::Buffer<T>) -> Vec<T>;

    // Slices
    fn rows(&self, shape: SliceShape) -> Self::Rows;
    fn slice_rows(&self, out: &mut Self::Rows, x: &Self::Buffer<f32>);
    /// `count` weights of `shape` each, one after another.
    fn slice_weight(&self, w: StoredMatrix<Self>, count: usize, shape: SliceShape) -> Self::Weight;

    // Slice product
    fn product_workspace(&self, p: &Product) -> usize;
    fn product_forward(
        &self,
        y: &mut Self::Buffer<f32>,
        x: &Self::Rows,
        w: Matrix<Self>,
        p: &Product,
        workspace: &mut Self::Buffer<u8>,
    );
    fn product_grad_input(
        &self,
        dx: &mut Self::Buffer<f32>,
        dy: &Self::Buffer<f32>,
        w: Matrix<Self>,
        p: &Product,
        workspace: &mut Self::Buffer<u8>,
    );
    /// `row_starts` has its ends at segment borders too: a row of data inside a segment is a chunk's limit.
    fn product_grad_weight(
        &self,
        dw: &mut Self::Buffer<f32>,
        dy: &Self::Buffer<f32>,
        x: &Self::Buffer<f32>,
        p: &Product,
        row_starts: &[usize],
        workspace: &mut Self::Buffer<u8>,
    );

    // Thin product
    fn thin_workspace(&self, p: &Thin) -> usize;
    fn thin_contract(
        &self,
        u: &mut Self::Buffer<f32>,
        x: &Self::Buffer<f32>,
        factor: &Self::Buffer<f32>,
        p: &Thin,
        workspace: &mut Self::Buffer<u8>,
    );
    fn thin_expand(
        &self,
        y: &mut Self::Buffer<f32>,
        u: &Self::Buffer<f32>,
        factor: &Self::Buffer<f32>,
        p: &Thin,
        workspace: &mut Self::Buffer<u8>,
    );
    fn thin_outer(
        &self,
        dfactor: &mut Self::Buffer<f32>,
        u: &Self::Buffer<f32>,
        x: &Self::Buffer<f32>,
        p: &Thin,
        row_starts: &[usize],
    );

    // Bias, residual, activation
    fn bias_forward(&self, y: &mut Self::Buffer<f32>, bias: &Self::Buffer<f32>);
    fn bias_backward(&self, dbias: &mut Self::Buffer<f32>, dy: &Self::Buffer<f32>, row_starts: &[usize]);
    /// `y = a + b`; the gradient of both is `dy`.
    fn add(&self, y: &mut Self::Buffer<f32>, a: &Self::Buffer<f32>, b: &Self::Buffer<f32>);
    /// `x = x·factor`.
    fn scale(&self, x: &mut Self::Buffer<f32>, factor: f32);
    fn swiglu_forward(&self, h: &mut Self::Buffer<f32>, gate: &Self::Buffer<f32>, up: &Self::Buffer<f32>);
    fn swiglu_backward(
        &self,
        dgate: &mut Self::Buffer<f32>,
        dup: &mut Self::Buffer<f32>,
        dh: &Self::Buffer<f32>,
        gate: &Self::Buffer<f32>,
        up: &Self::Buffer<f32>,
    );
    fn dropout(&self, y: &mut Self::Buffer<f32>, x: &Self::Buffer<f32>, p: &Dropout);
    fn elementary(&self, y: &mut Self::Buffer<f32>, x: &Self::Buffer<f32>, function: Function);

    // Norm, rotation
    fn rms_norm_forward(
        &self,
        y: &mut Self::Buffer<f32>,
        inverse: &mut Self::Buffer<f32>,
        x: &Self::Buffer<f32>,
        weight: &Self::Buffer<f32>,
        p: &RmsNorm,
    );
    fn rms_norm_backward(
        &self,
        dx: &mut Self::Buffer<f32>,
        dweight: Option<&mut Self::Buffer<f32>>,
        dy: &Self::Buffer<f32>,
        x: &Self::Buffer<f32>,
        inverse: &Self::Buffer<f32>,
        weight: &Self::Buffer<f32>,
        p: &RmsNorm,
        row_starts: &[usize],
    );
    fn rope_forward(
        &self,
        x: &mut Self::Buffer<f32>,
        cos: &Self::Buffer<f32>,
        sin: &Self::Buffer<f32>,
        positions: &Self::Buffer<u32>,
        p: &Rope,
    );
    fn rope_backward(
        &self,
        dx: &mut Self::Buffer<f32>,
        cos: &Self::Buffer<f32>,
        sin: &Self::Buffer<f32>,
        positions: &Self::Buffer<u32>,
        p: &Rope,
    );

    // Attention
    fn attention_workspace(&self, p: &Attention) -> usize;
    fn attention_forward(
        &self,
        o: &mut Self::Buffer<f32>,
        lse: &mut Self::Buffer<f32>,
        q: &Self::Buffer<f32>,
        k: &Self::Buffer<f32>,
        v: &Self::Buffer<f32>,
        p: &Attention,
        workspace: &mut Self::Buffer<u8>,
    );
    fn attention_backward(
        &self,
        grads: (&mut Self::Buffer<f32>, &mut Self::Buffer<f32>, &mut Self::Buffer<f32>),
        d_o: &Self::Buffer<f32>,
        qkv: (&Self::Buffer<f32>, &Self::Buffer<f32>, &Self::Buffer<f32>),
        o: &Self::Buffer<f32>,
        lse: &Self::Buffer<f32>,
        p: &Attention,
        workspace: &mut Self::Buffer<u8>,
    );

    // Embedding, head and loss
    fn embedding_forward(
        &self,
        y: &mut Self::Buffer<f32>,
        table: StoredMatrix<Self>,
        ids: &Self::Buffer<u32>,
        width: usize,
    );
    fn embedding_workspace(&self, tokens: usize) -> usize;
    fn embedding_backward(
        &self,
        dtable: &mut Self::Buffer<f32>,
        dy: &Self::Buffer<f32>,
        ids: &Self::Buffer<u32>,
        width: usize,
        workspace: &mut Self::Buffer<u8>,
    );
    fn head_loss_workspace(&self, p: &HeadLoss) -> usize;
    fn head_loss_forward(
        &self,
        loss: &mut Self::Buffer<f32>,
        lse: &mut Self::Buffer<f32>,
        best: &mut Self::Buffer<u32>,
        h: &Self::Rows,
        head: Matrix<Self>,
        labels: &Self::Buffer<i32>,
        p: &HeadLoss,
        workspace: &mut Self::Buffer<u8>,
    );
    fn head_loss_backward(
        &self,
        dh: &mut Self::Buffer<f32>,
        dhead: Option<&mut Self::Buffer<f32>>,
        h: (&Self::Rows, &Self::Buffer<f32>),
        head: Matrix<Self>,
        labels: &Self::Buffer<i32>,
        lse: &Self::Buffer<f32>,
        weight: &Self::Buffer<f32>,
        p: &HeadLoss,
        workspace: &mut Self::Buffer<u8>,
    );

    // Optimizer
    fn adamw(
        &self,
        parameter: &mut Self::Buffer<f32>,
        m: &mut Self::Buffer<f32>,
        v: &mut Self::Buffer<f32>,
        gradient: &Self::Buffer<f32>,
        c: &Coefficients,
    );
    /// `Σ x²`, fixed blocks of 4,096 elements summed level by level.
    fn sum_squares(&self, x: &Self::Buffer<f32>) -> f32;

    // Casts and digests
    fn to_bf16(&self, y: &mut Self::Buffer<bf16>, x: &Self::Buffer<f32>);
    fn to_f16(&self, y: &mut Self::Buffer<f16>, x: &Self::Buffer<f32>);
    fn to_f32(&self, y: &mut Self::Buffer<f32>, x: StoredMatrix<Self>);
    fn digest<T: Element>(&self, x: &Self::Buffer<T>) -> Digest;
}
