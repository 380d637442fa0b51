//! The whole contract of a backend on one page. What each op's bits are stands in `op/` and `docs/numerics.md`.
//!
//! Ops are enqueued in order and cannot fail for a reason of arithmetic; a device's own failure surfaces where a result comes
//! back to the host: `download`, `sum_squares`, `digest`. After it the device does nothing more.
//! Outputs come first, then inputs, parameters, workspace. Nothing allocates except the functions that return buffers.

use crate::buffer::Element;
use crate::op::{
    AsQuantized, Attention, Columns, Combine, Conv1d, Decay, DeltaRule, Dropout, Gate, GatedNorm, HeadLoss, L2Norm,
    Product, QuantizedShape, RmsNorm, Rope, Router, SliceShape, Thin,
};
use half::{bf16, f16};
use isobit_numerics::adamw::Coefficients;
use isobit_numerics::digest::{self, Digest};
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

/// A digest that was asked for; a device may still be at work on it.
pub enum BegunDigest<B: Backend + ?Sized> {
    Ready(Digest),
    /// Pairs of 64-bit sums, low word first, of a tensor of so many bytes.
    Sums {
        sums: B::Buffer<u32>,
        bytes: u64,
    },
}

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
    /// `upload` into a buffer that is there, of the same length: in place where the backend can.
    fn overwrite<T: Element>(&self, device: &mut Self::Buffer<T>, host: &[T]) {
        *device = self.upload(host);
    }
    /// `upload` of the `length` numbers that `host` makes. A backend that holds no numbers does not ask for them.
    fn upload_made<T: Element, H: AsRef<[T]>, E>(
        &self,
        length: usize,
        host: impl FnOnce() -> Result<H, E>,
    ) -> Result<Self::Buffer<T>, E> {
        let host = host()?;
        assert_eq!(host.as_ref().len(), length, "as many numbers as were announced");
        Ok(self.upload(host.as_ref()))
    }
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

    // Linear layer: a product and what follows it at once. Defined by the ops it is made of; a backend may do it in one pass.
    fn linear_workspace(&self, p: &Product, low: Option<&Thin>) -> usize {
        self.product_workspace(p).max(low.map_or(0, |low| self.thin_workspace(low)))
    }
    /// `product_forward`, then `bias_forward`, then `thin_expand` of `low`: its short side, its factor, its shape.
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
        self.product_forward(y, x, w, p, workspace);
        if let Some(bias) = bias {
            self.bias_forward(y, bias);
        }
        if let Some((u, factor, thin)) = low {
            self.thin_expand(y, u, factor, thin, workspace);
        }
    }
    /// `product_grad_input`, then `thin_expand` of `low`.
    fn linear_grad_input(
        &self,
        dx: &mut F32<Self>,
        dy: &F32<Self>,
        w: Matrix<Self>,
        p: &Product,
        low: Option<(&F32<Self>, &F32<Self>, &Thin)>,
        workspace: &mut Bytes<Self>,
    ) {
        self.product_grad_input(dx, dy, w, p, workspace);
        if let Some((u, factor, thin)) = low {
            self.thin_expand(dx, u, factor, thin, workspace);
        }
    }

    // Product with 4-bit weights
    /// Weights of one shape, one after another; each has passed its `check`. `make` is asked for one at a time, in order; a backend that
    /// holds no numbers does not ask.
    fn quantized_weight<Q: AsQuantized, E>(
        &self,
        shape: QuantizedShape,
        make: impl FnMut(usize) -> Result<Q, E>,
    ) -> Result<Self::QuantizedWeight, E>;
    /// Slices the rows of `x`, each with its channels in the order of the weight that it meets.
    fn product4_rows(&self, out: &mut Self::Rows, x: &F32<Self>, w: &Self::QuantizedWeight, p: &Product);
    fn product4_workspace(&self, w: QuantizedShape, p: &Product) -> usize;
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
    /// `row_starts` as in `product_grad_weight`.
    fn thin_outer(
        &self,
        dfactor: &mut F32<Self>,
        u: &F32<Self>,
        x: &F32<Self>,
        p: &Thin,
        row_starts: &[usize],
        workspace: &mut Bytes<Self>,
    );

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
    /// `swiglu_forward` of pairs that lie side by side: `both` is `[rows, 2·width]`, gate before up.
    fn swiglu_pairs_forward(&self, h: &mut F32<Self>, both: &F32<Self>, width: usize);
    fn swiglu_pairs_backward(&self, dboth: &mut F32<Self>, dh: &F32<Self>, both: &F32<Self>, width: usize);
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

    // Around attention and the gated delta rule
    /// Copies or adds columns; elements of `y` outside of them stay.
    fn columns(&self, y: &mut F32<Self>, x: &F32<Self>, p: &Columns);
    fn gate_forward(&self, y: &mut F32<Self>, x: &F32<Self>, g: &F32<Self>, p: &Gate);
    fn gate_backward(
        &self,
        dx: &mut F32<Self>,
        dg: &mut F32<Self>,
        dy: &F32<Self>,
        x: &F32<Self>,
        g: &F32<Self>,
        p: &Gate,
    );
    /// `history` holds `kernel − 1` inputs before each document, for decoding.
    fn conv1d_forward(
        &self,
        y: &mut F32<Self>,
        x: &F32<Self>,
        weight: &F32<Self>,
        history: Option<&F32<Self>>,
        p: &Conv1d,
    );
    fn conv1d_backward(
        &self,
        dx: &mut F32<Self>,
        dweight: Option<&mut F32<Self>>,
        dy: &F32<Self>,
        x: &F32<Self>,
        weight: &F32<Self>,
        p: &Conv1d,
        row_starts: &[usize],
    );
    fn l2_norm_forward(&self, y: &mut F32<Self>, inverse: &mut F32<Self>, x: &F32<Self>, p: &L2Norm);
    fn l2_norm_backward(&self, dx: &mut F32<Self>, dy: &F32<Self>, x: &F32<Self>, inverse: &F32<Self>, p: &L2Norm);
    fn decay_forward(
        &self,
        g: &mut F32<Self>,
        beta: &mut F32<Self>,
        ab: (&F32<Self>, &F32<Self>),
        a_log: &F32<Self>,
        dt_bias: &F32<Self>,
        p: &Decay,
    );
    /// `grads` are `da` and `db`, `parameters` the accumulating gradients of `a_log` and `dt_bias`, `d` is `dg` and `dbeta`.
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
    );
    fn gated_norm_forward(
        &self,
        y: &mut F32<Self>,
        inverse: &mut F32<Self>,
        h: &F32<Self>,
        z: &F32<Self>,
        weight: &F32<Self>,
        p: &GatedNorm,
    );
    /// `row_starts` count heads, as `p.tokens` does.
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
    );

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

    // Gated delta rule
    fn delta_rule_workspace(&self, p: &DeltaRule) -> usize;
    /// States are `[documents, value_heads, key_width, value_width]`; without an initial one every document starts from zero.
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
    );
    /// Inputs and gradients are those of `q, k, v, g, beta`. Every document starts from zero; the states are computed again.
    fn delta_rule_backward(
        &self,
        grads: [&mut F32<Self>; 5],
        d_o: &F32<Self>,
        inputs: [&F32<Self>; 5],
        p: &DeltaRule,
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
    fn head_loss_step_workspace(&self, p: &HeadLoss) -> usize {
        self.head_loss_workspace(p)
    }
    /// `head_loss_forward`, then `head_loss_backward` without a gradient of the head. A backend may do them in one pass.
    fn head_loss_step(
        &self,
        (loss, lse, best): (&mut F32<Self>, &mut F32<Self>, &mut U32<Self>),
        dh: &mut F32<Self>,
        h: (&Self::Rows, &F32<Self>),
        head: Matrix<Self>,
        labels: &I32<Self>,
        weight: &F32<Self>,
        p: &HeadLoss,
        workspace: &mut Bytes<Self>,
    ) {
        self.head_loss_forward(loss, lse, best, h.0, head, labels, p, workspace);
        self.head_loss_backward(dh, None, h, head, labels, lse, weight, p, workspace);
    }

    // Mixture of experts
    fn router_choose(&self, choices: &mut U32<Self>, logits: &F32<Self>, bias: Option<&F32<Self>>, p: &Router);
    fn router_weights(&self, weights: &mut F32<Self>, logits: &F32<Self>, choices: &U32<Self>, p: &Router);
    fn router_backward(
        &self,
        dlogits: &mut F32<Self>,
        dweights: &F32<Self>,
        logits: &F32<Self>,
        choices: &U32<Self>,
        p: &Router,
    );
    fn balance_workspace(&self, row_starts: &[usize], experts: usize) -> usize;
    fn balance_forward(
        &self,
        sums: &mut F32<Self>,
        logits: &F32<Self>,
        row_starts: &[usize],
        experts: usize,
        workspace: &mut Bytes<Self>,
    );
    /// Adds to `dlogits`.
    fn balance_backward(
        &self,
        dlogits: &mut F32<Self>,
        share: &F32<Self>,
        logits: &F32<Self>,
        row_starts: &[usize],
        experts: usize,
    );
    /// `y[i] = x[index[i]]`, whole rows: an embedding's forward pass over any matrix. Backward is `combine_forward` without weights.
    fn gather_rows(&self, y: &mut F32<Self>, x: &F32<Self>, index: &U32<Self>, width: usize) {
        self.embedding_forward(y, StoredMatrix::F32(x), index, width);
    }
    fn combine_forward(
        &self,
        y: &mut F32<Self>,
        rows: &F32<Self>,
        weights: Option<&F32<Self>>,
        places: &U32<Self>,
        p: &Combine,
    );
    fn combine_backward(
        &self,
        drows: &mut F32<Self>,
        dweights: &mut F32<Self>,
        dy: &F32<Self>,
        rows: &F32<Self>,
        weights: &F32<Self>,
        places: &U32<Self>,
        p: &Combine,
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
    /// `sum_squares` of several tensors; a device is waited for once.
    fn sums_of_squares(&self, tensors: &[&F32<Self>]) -> Result<Vec<f32>, DeviceFailure> {
        tensors.iter().map(|x| self.sum_squares(x)).collect()
    }

    // Casts and digests
    fn to_bf16(&self, y: &mut Self::Buffer<bf16>, x: &F32<Self>);
    fn to_f16(&self, y: &mut Self::Buffer<f16>, x: &F32<Self>);
    fn to_f32(&self, y: &mut F32<Self>, x: StoredMatrix<Self>);
    fn digest<T: Element>(&self, x: &Self::Buffer<T>) -> Result<Digest, DeviceFailure>;
    /// The digest of what `x` holds now, without waiting for it where a device computes it.
    fn begin_digest(&self, x: &F32<Self>) -> Result<BegunDigest<Self>, DeviceFailure> {
        self.digest(x).map(BegunDigest::Ready)
    }
    fn finish_digest(&self, begun: &BegunDigest<Self>) -> Result<Digest, DeviceFailure> {
        let (sums, bytes) = match begun {
            BegunDigest::Ready(digest) => return Ok(*digest),
            BegunDigest::Sums { sums, bytes } => (self.download(sums)?, *bytes),
        };
        let number = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let pairs = sums.as_chunks::<4>().0.iter().map(|&[a, b, c, d]| [number(a, b), number(c, d)]);
        Ok(digest::finish(pairs.fold([0; 2], digest::combine), bytes))
    }
}
