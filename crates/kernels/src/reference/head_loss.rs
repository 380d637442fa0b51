//! Fused LM head and cross-entropy, the definition (`docs/numerics.md`, "Head and loss").
//!
//! Here the logits do exist as a whole; both directions compute them afresh, as every backend does.

use super::slices::SlicedRows;
use super::{ReferenceMemory, product};
use crate::backend::Run;
use crate::op::head_loss::{VOCABULARY_BLOCK, canonical};
use crate::op::{HeadLoss, HeadLossBackward, HeadLossForward, HeadLossStep, IGNORED, Product, SliceShape};
use crate::{Buffer, Matrix, Reference};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::{exp, ln};
use isobit_numerics::lanes::{LANES, for_lanes, max, tree_sum};

impl Run<HeadLossForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut HeadLossForward<'_, ReferenceMemory>, _: &mut Buffer<u8>) {
        forward(op.loss, op.lse, op.best, op.h, op.head, op.labels, &op.p);
    }
}

impl Run<HeadLossBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut HeadLossBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>) {
        backward(
            op.dh,
            op.dhead.as_deref_mut().map(|b| &mut b[..]),
            (op.rows, op.h),
            op.head,
            op.labels,
            op.lse,
            op.weight,
            &op.p,
        );
    }
}

impl Run<HeadLossStep<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut HeadLossStep<'_, ReferenceMemory>, workspace: &mut Buffer<u8>) {
        let (rows, h, head, labels, weight, p) = (op.rows, op.h, op.head, op.labels, op.weight, op.p);
        let (loss, lse, best) = (&mut *op.loss, &mut *op.lse, &mut *op.best);
        self.execute(&mut HeadLossForward { loss, lse, best, h: rows, head, labels, p }, workspace);
        let (dh, dhead, lse) = (&mut *op.dh, None, &*op.lse);
        self.execute(&mut HeadLossBackward { dh, dhead, rows, h, head, labels, lse, weight, p }, workspace);
    }
}

/// `[tokens, vocabulary]`
fn logits(h: &SlicedRows, head: Matrix<ReferenceMemory>, p: &HeadLoss) -> Vec<f32> {
    let (tokens, profile) = (p.tokens(), p.profile);
    assert_eq!(h.shape, SliceShape { rows: tokens, width: p.hidden, profile }, "hidden states");
    let mut z = vec![0.0; tokens * p.vocabulary];
    let segments = [0, tokens];
    let product = Product { segments: &segments, n: p.vocabulary, k: p.hidden, profile, accumulate: false };
    product::forward(&mut z, h, head, &product);
    z
}

pub(super) fn forward(
    loss: &mut [f32],
    lse: &mut [f32],
    best: &mut [u32],
    h: &SlicedRows,
    head: Matrix<ReferenceMemory>,
    labels: &[i32],
    p: &HeadLoss,
) {
    p.check_labels(labels);
    assert!(p.vocabulary > 0, "a vocabulary");
    assert_eq!((loss.len(), lse.len(), best.len()), (p.tokens(), p.tokens(), p.tokens()), "one result per token");
    let z = logits(h, head, p);
    for (t, z) in z.chunks_exact(p.vocabulary).enumerate() {
        let (mut maxima, mut sums) = (Vec::new(), Vec::new());
        for block in z.chunks(VOCABULARY_BLOCK) {
            let m = block.iter().fold(f32::NEG_INFINITY, |m, &z| max(z, m));
            let mut s = [0.0; LANES];
            for_lanes(&mut s, block.len(), |s, v| s + exp::<SoftFma>(block[v] - m));
            maxima.push(m);
            sums.push(tree_sum(s));
        }
        let m = maxima.iter().fold(f32::NEG_INFINITY, |m, &m_b| max(m_b, m));
        let mut s = [0.0; LANES];
        for_lanes(&mut s, sums.len(), |s, b| s + sums[b] * exp::<SoftFma>(maxima[b] - m));
        lse[t] = canonical(m + ln::<SoftFma>(tree_sum(s)));
        loss[t] = if labels[t] == IGNORED { 0.0 } else { canonical(lse[t] - z[labels[t] as usize]) };
        best[t] = z.iter().position(|&z| z == m).unwrap_or(0) as u32;
    }
}

pub(super) fn backward(
    dh: &mut [f32],
    dhead: Option<&mut [f32]>,
    h: (&SlicedRows, &[f32]),
    head: Matrix<ReferenceMemory>,
    labels: &[i32],
    lse: &[f32],
    weight: &[f32],
    p: &HeadLoss,
) {
    p.check_labels(labels);
    assert_eq!((lse.len(), weight.len()), (p.tokens(), p.tokens()), "one number per token");
    let mut dz = logits(h.0, head, p);
    for (t, row) in dz.chunks_exact_mut(p.vocabulary).enumerate() {
        for (v, z) in row.iter_mut().enumerate() {
            let target = if v as i32 == labels[t] { 1.0 } else { 0.0 };
            *z = if labels[t] == IGNORED { 0.0 } else { (exp::<SoftFma>(*z - lse[t]) - target) * weight[t] };
        }
    }
    let segments = [0, p.tokens()];
    let product = Product { segments: &segments, n: p.vocabulary, k: p.hidden, profile: p.profile, accumulate: false };
    product::grad_input(dh, &dz, head, &product);
    for (dh, _) in dh.chunks_exact_mut(p.hidden).zip(labels).filter(|(_, label)| **label == IGNORED) {
        dh.fill(0.0);
    }
    if let Some(dhead) = dhead {
        product::grad_weight(dhead, &dz, h.1, &product, p.row_starts);
    }
}
