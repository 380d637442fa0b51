//! The whole contract of a backend on one page. What each op's bits are stands in `op/` and `docs/numerics.md`.
//!
//! Ops are enqueued in order and cannot fail for a reason of arithmetic; a device's own failure surfaces where a result comes
//! back to the host: `download`, `sum_squares`, `digest`. After it the device does nothing more.
//! Outputs come first, then inputs, parameters, workspace. Nothing allocates except the functions that return buffers.

use crate::buffer::Element;
use crate::op::{Attention, Dropout, HeadLoss, Product, Quantized, RmsNorm, Rope, SliceShape, Thin};
use half::{bf16, f16};
use isobit_numerics::adamw::Coefficients;
use isobit_numerics::digest::Digest;
use isobit_numerics::elementary::Function;

/// A device failed: it is lost, out of memory, or refused a program. Arithmetic never fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{device}: {what}")]
pub struct DeviceFailure {
    pub device: String,
    pub what: String,
}

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

/// Buffers by what they hold.
pub type F32<B> = <B as Backend>::Buffer<f32>;
pub type U32<B> = <B as Backend>::Buffer<u32>;
pub type I32<B> = <B as Backend>::Buffer<i32>;
/// A workspace.
pub type Bytes<B> = <B as Backend>::Buffer<u8>;

pub trait Backend {
    /// Memory of the device.
    type Buffer<T: Element>;
    /// Activations, sliced: the left operand of a product.
    type Rows;
    /// Weights, sliced: the right operand of a product.
    type Weight;
    /// Frozen weights of four bits: the right operand of a product.
    type QuantizedWeight;

    fn name(&self) -> String;
    fn zeros<T: Element>(&self, length: usize) -> Self::Buffer<T>;
    fn upload<T: Element>(&self, host: &[T]) -> Self::Buffer<T>;
    fn download<T: Element>(&self, device: &Self::Buffer<T>) -> Result<Vec<T>, DeviceFailure>;

    // Slices
    fn rows(&self, shape: SliceShape) -> Self::Rows;
    fn slice_rows(&self, out: &mut Self::Rows, x: &F32<Self>);
    /// `count` weights of `shape` each, one after another.
    fn slice_weight(&self, w: StoredMatrix<Self>, count: usize, shape: SliceShape) -> Self::Weight;

    // Slice product
    fn product_workspace(&self, p: &Product) -> usize;
    fn product_forward(
        &self,
        y: &mut F32<Self>,
        x: &Self::Rows,
        w: Matrix<Self>,
        p: &Product,
        workspace: &mut Bytes<Self>,
    );
    fn product_grad_input(
        &self,
        dx: &mut F32<Self>,
        dy: &F32<Self>,
        w: Matrix<Self>,
        p: &Product,
        workspace: &mut Bytes<Self>,
    );
    /// `row_starts` has its ends at segment borders too: a row of data inside a segment is a chunk's limit.
    fn product_grad_weight(
        &self,
        dw: &mut F32<Self>,
        dy: &F32<Self>,
        x: &F32<Self>,
        p: &Product,
        row_starts: &[usize],
        workspace: &mut Bytes<Self>,
    );

    // Product with 4-bit weights
    /// Weights of one shape, one after another; each has passed its `check`.
    fn quantized_weight(&self, weights: &[Quantized]) -> Self::QuantizedWeight;
    /// Slices the rows of `x`, each with its channels in the order of the weight that it meets.
    fn product4_rows(&self, out: &mut Self::Rows, x: &F32<Self>, w: &Self::QuantizedWeight, p: &Product);
    fn product4_workspace(&self, w: &Self::QuantizedWeight, p: &Product) -> usize;
    fn product4_forward(
        &self,
        y: &mut F32<Self>,
        x: &Self::Rows,
        w: &Self::QuantizedWeight,
        p: &Product,
        workspace: &mut Bytes<Self>,
    );
    fn product4_grad_input(
        &self,
        dx: &mut F32<Self>,
        dy: &F32<Self>,
        w: &Self::QuantizedWeight,
        p: &Product,
        workspace: &mut Bytes<Self>,
    );

    // Thin product
    fn thin_workspace(&self, p: &Thin) -> usize;
    fn thin_contract(
        &self,
        u: &mut F32<Self>,
        x: &F32<Self>,
        factor: &F32<Self>,
        p: &Thin,
        workspace: &mut Bytes<Self>,
    );
    fn thin_expand(&self, y: &mut F32<Self>, u: &F32<Self>, factor: &F32<Self>, p: &Thin, workspace: &mut Bytes<Self>);
    fn thin_outer(&self, dfactor: &mut F32<Self>, u: &F32<Self>, x: &F32<Self>, p: &Thin, row_starts: &[usize]);

    // Bias, residual, activation
    fn bias_forward(&self, y: &mut F32<Self>, bias: &F32<Self>);
    fn bias_backward(&self, dbias: &mut F32<Self>, dy: &F32<Self>, row_starts: &[usize]);
    /// `y = a + b`; the gradient of both is `dy`.
    fn add(&self, y: &mut F32<Self>, a: &F32<Self>, b: &F32<Self>);
    /// `x = x·factor`.
    fn scale(&self, x: &mut F32<Self>, factor: f32);
    fn swiglu_forward(&self, h: &mut F32<Self>, gate: &F32<Self>, up: &F32<Self>);
    fn swiglu_backward(
        &self,
        dgate: &mut F32<Self>,
        dup: &mut F32<Self>,
        dh: &F32<Self>,
        gate: &F32<Self>,
        up: &F32<Self>,
    );
    fn dropout(&self, y: &mut F32<Self>, x: &F32<Self>, p: &Dropout);
    fn elementary(&self, y: &mut F32<Self>, x: &F32<Self>, function: Function);

    // Norm, rotation
    fn rms_norm_forward(
        &self,
        y: &mut F32<Self>,
        inverse: &mut F32<Self>,
        x: &F32<Self>,
        weight: &F32<Self>,
        p: &RmsNorm,
    );
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
    );
    fn rope_forward(&self, x: &mut F32<Self>, cos: &F32<Self>, sin: &F32<Self>, positions: &U32<Self>, p: &Rope);
    fn rope_backward(&self, dx: &mut F32<Self>, cos: &F32<Self>, sin: &F32<Self>, positions: &U32<Self>, p: &Rope);

    // Attention
    fn attention_workspace(&self, p: &Attention) -> usize;
    fn attention_forward(
        &self,
        o: &mut F32<Self>,
        lse: &mut F32<Self>,
        q: &F32<Self>,
        k: &F32<Self>,
        v: &F32<Self>,
        p: &Attention,
        workspace: &mut Bytes<Self>,
    );
    fn attention_backward(
        &self,
        grads: (&mut F32<Self>, &mut F32<Self>, &mut F32<Self>),
        d_o: &F32<Self>,
        qkv: (&F32<Self>, &F32<Self>, &F32<Self>),
        o: &F32<Self>,
        lse: &F32<Self>,
        p: &Attention,
        workspace: &mut Bytes<Self>,
    );

    // Embedding, head and loss
    fn embedding_forward(&self, y: &mut F32<Self>, table: StoredMatrix<Self>, ids: &U32<Self>, width: usize);
    fn embedding_workspace(&self, tokens: usize) -> usize;
    fn embedding_backward(
        &self,
        dtable: &mut F32<Self>,
        dy: &F32<Self>,
        ids: &U32<Self>,
        width: usize,
        workspace: &mut Bytes<Self>,
    );
    fn head_loss_workspace(&self, p: &HeadLoss) -> usize;
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
    );
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
    );

    // Optimizer
    fn adamw(
        &self,
        parameter: &mut F32<Self>,
        m: &mut F32<Self>,
        v: &mut F32<Self>,
        gradient: &F32<Self>,
        c: &Coefficients,
    );
    /// `Σ x²`, fixed blocks of 4,096 elements summed level by level.
    fn sum_squares(&self, x: &F32<Self>) -> Result<f32, DeviceFailure>;

    // Casts and digests
    fn to_bf16(&self, y: &mut Self::Buffer<bf16>, x: &F32<Self>);
    fn to_f16(&self, y: &mut Self::Buffer<f16>, x: &F32<Self>);
    fn to_f32(&self, y: &mut F32<Self>, x: StoredMatrix<Self>);
    fn digest<T: Element>(&self, x: &Self::Buffer<T>) -> Result<Digest, DeviceFailure>;
}
