//! Fused LM head and cross-entropy, the definition (`docs/numerics.md`, "Head and loss").
//!
//! Here the logits are materialized; both passes recompute them, as every backend does.

use super::ReferenceMemory;
use crate::backend::{Checked, Device, Run};
use crate::op::head_loss::{VOCABULARY_BLOCK, canonical};
use crate::op::{
    HeadLoss, HeadLossBackward, HeadLossForward, HeadLossStep, IGNORED, Product, ProductForward, ProductGradInput,
    ProductGradWeight,
};
use crate::{Buffer, Reference};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::{exp, ln};
use isobit_numerics::lanes::{LANES, for_lanes, max, tree_sum};

impl Run<HeadLossForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut HeadLossForward<'_, ReferenceMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        op.p.check_labels(op.labels);
        let z = &mut Buffer::zeros(op.p.tokens() * op.p.vocabulary);
        let segments = [0, op.p.tokens()];
        let product = product(&segments, &op.p);
        self.run_in(workspace, ProductForward { y: z, x: op.h, w: op.head, p: product });
        cap_all(z, &op.p);
        let HeadLossForward { loss, lse, best, labels, p, .. } = op;
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
}

impl Run<HeadLossBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut HeadLossBackward<'_, ReferenceMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        op.p.check_labels(op.labels);
        let dz = &mut Buffer::zeros(op.p.tokens() * op.p.vocabulary);
        let segments = [0, op.p.tokens()];
        let (product, row_starts) = (product(&segments, &op.p), op.p.row_starts);
        self.run_in(workspace, ProductForward { y: dz, x: op.rows, w: op.head, p: product });
        cap_all(dz, &op.p);
        let HeadLossBackward { labels, lse, weight, p, .. } = op;
        for (t, row) in dz.chunks_exact_mut(p.vocabulary).enumerate() {
            for (v, z) in row.iter_mut().enumerate() {
                let target = if v as i32 == labels[t] { 1.0 } else { 0.0 };
                let grad = (exp::<SoftFma>(*z - lse[t]) - target) * weight[t];
                let grad = p.soft_cap().map_or(grad, |cap| grad * cap.slope::<SoftFma>(*z));
                *z = if labels[t] == IGNORED { 0.0 } else { grad };
            }
        }
        self.run_in(workspace, ProductGradInput { dx: op.dh, dy: dz, w: op.head, p: product });
        for (dh, label) in op.dh.chunks_exact_mut(op.p.hidden).zip(op.labels.iter()) {
            if *label == IGNORED {
                dh.fill(0.0);
            }
        }
        if let Some(dw) = op.dhead.as_deref_mut() {
            self.run_in(workspace, ProductGradWeight { dw, dy: dz, x: op.h, p: product, row_starts });
        }
    }
}

impl Run<HeadLossStep<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut HeadLossStep<'_, ReferenceMemory>, workspace: &mut Buffer<u8>, _: Checked) {
        self.run_in(workspace, op.forward());
        self.run_in(workspace, op.backward());
    }
}

fn cap_all(z: &mut [f32], p: &HeadLoss) {
    if let Some(cap) = p.soft_cap() {
        for z in z {
            *z = cap.apply::<SoftFma>(*z);
        }
    }
}

/// The product of all tokens with the head.
fn product<'a>(segments: &'a [usize; 2], p: &HeadLoss) -> Product<'a> {
    Product { segments, n: p.vocabulary, k: p.hidden, profile: p.profile, accumulate: false }
}
