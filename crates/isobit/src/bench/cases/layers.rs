//! Attention, the gated delta rule, and the head with its loss.

use super::{Prepared, Work, forever, noise};
use isobit_kernels::op::delta_rule::CHUNK;
use isobit_kernels::op::slices::sliced_weight;
use isobit_kernels::op::{
    Attention, AttentionBackward, AttentionForward, DeltaRule, DeltaRuleBackward, DeltaRuleForward, HeadLoss,
    HeadLossBackward, HeadLossForward, SliceRows, SliceShape, Span,
};
use isobit_kernels::{Backend, Matrix, StoredMatrix};
use isobit_numerics::slices::Profile;
use std::rc::Rc;

/// Forward, backward or both, over causal documents of equal length.
pub(super) fn attention<B: Backend + 'static>(
    b: Rc<B>,
    op: &str,
    spans: Vec<Span>,
    heads: usize,
    kv_heads: usize,
    width: usize,
    profile: Profile,
) -> Prepared {
    let (documents, length) = (spans.len(), spans[0].keys.len());
    let tokens = documents * length;
    let scale = 1.0 / (width as f32).sqrt();
    let spans = &forever(spans)[..];
    let p = Attention {
        spans,
        heads,
        kv_heads,
        key_width: width,
        value_width: width,
        softmax_scale: scale,
        window: None,
        cap: None,
        profile,
    };
    let (large, small) = (tokens * heads * width, tokens * kv_heads * width);
    let tensor = |length: usize, seed: u32| b.upload(&noise(length, seed));
    let (q, k, v, d_o) = (tensor(large, 1), tensor(small, 2), tensor(small, 3), tensor(large, 4));
    let (mut o, mut lse) = (b.zeros(large), b.zeros(tokens * heads));
    let (mut dq, mut dk, mut dv) = (b.zeros(large), b.zeros(small), b.zeros(small));
    let workspace = b.workspaces().attention(&p);
    let (forward, backward) = (op != "attention_backward", op != "attention_forward");
    if !forward {
        b.run(AttentionForward { o: &mut o, lse: &mut lse, q: &q, k: &k, v: &v, p });
    }
    // Two products forward, five backward, over the visible half of the square.
    let products = 2.0 * f64::from(u8::from(forward)) + 5.0 * f64::from(u8::from(backward));
    let flops = products * (documents * length * (length + 1) * heads * width) as f64;
    let run = move || {
        let (q, k, v) = (&q, &k, &v);
        if forward {
            b.run(AttentionForward { o: &mut o, lse: &mut lse, q, k, v, p });
        }
        if backward {
            let (dq, dk, dv) = (&mut dq, &mut dk, &mut dv);
            b.run(AttentionBackward { dq, dk, dv, d_o: &d_o, q, k, v, o: &o, lse: &lse, p });
        }
    };
    Prepared { work: Work { flops, bytes: 0.0, workspace }, run: Box::new(run) }
}

/// Forward, and backward if requested. Counts the work of the chunked form without recomputation.
pub(super) fn delta_rule<B: Backend + 'static>(
    b: Rc<B>,
    backward: bool,
    tokens: usize,
    key_heads: usize,
    value_heads: usize,
    width: usize,
) -> Prepared {
    let row_starts = forever([0, tokens]);
    let p = DeltaRule { row_starts, key_heads, value_heads, key_width: width, value_width: width };
    let [keys, values, scalars, _] = p.lengths();
    // Rows of norm one, as produced by the layer, and decays between exp(-1) and 1.
    let unit = 2.0 / (width as f32).sqrt();
    let unit_rows = |seed: u32| b.upload(&noise(keys, seed).iter().map(|x| x * unit).collect::<Vec<_>>());
    let (q, k, v, d_o) = (unit_rows(1), unit_rows(2), b.upload(&noise(values, 3)), b.upload(&noise(values, 4)));
    let fraction = |seed: u32| noise(scalars, seed).iter().map(|x| (x.abs() / 1.5).min(1.0)).collect::<Vec<_>>();
    let (g, beta) = (b.upload(&fraction(5).iter().map(|x| -x).collect::<Vec<_>>()), b.upload(&fraction(6)));
    let mut o = b.zeros(values);
    let [mut dq, mut dk, mut dv, mut dg, mut dbeta] =
        [keys, keys, values, scalars, scalars].map(|length| b.zeros(length));
    let workspace = b.workspaces().delta_rule(&p);
    // Per token and head: products with the state (3 forward, 7 backward), triangles of a chunk (4
    // and 10).
    let (states, triangles) = if backward { (10.0, 14.0) } else { (3.0, 4.0) };
    let per_token = states * (width * width) as f64 + triangles * (width * CHUNK / 2) as f64;
    let flops = 2.0 * (tokens * value_heads) as f64 * per_token;
    let run = move || {
        let (q, k, v, g, beta) = (&q, &k, &v, &g, &beta);
        b.run(DeltaRuleForward { o: &mut o, final_state: None, q, k, v, g, beta, initial_state: None, p });
        if backward {
            let (dq, dk, dv, dg, dbeta) = (&mut dq, &mut dk, &mut dv, &mut dg, &mut dbeta);
            b.run(DeltaRuleBackward { dq, dk, dv, dg, dbeta, d_o: &d_o, q, k, v, g, beta, p });
        }
    };
    Prepared { work: Work { flops, bytes: 0.0, workspace }, run: Box::new(run) }
}

/// Loss, and the gradient of the hidden states; the head is frozen and kept sliced.
pub(super) fn head_loss<B: Backend + 'static>(
    b: Rc<B>,
    tokens: usize,
    hidden: usize,
    vocabulary: usize,
    profile: Profile,
) -> Prepared {
    let p = HeadLoss { row_starts: forever([0, tokens]), hidden, vocabulary, cap: None, profile };
    let head = {
        let stored: Vec<_> = noise(vocabulary * hidden, 3).iter().map(|x| half::bf16::from_f32(x * 0.05)).collect();
        let shape = SliceShape { rows: vocabulary, width: hidden, profile };
        sliced_weight(&*b, StoredMatrix::Bf16(&b.upload(&stored)), 1, shape)
    };
    let h = b.upload(&noise(tokens * hidden, 1));
    let mut rows = b.rows(SliceShape { rows: tokens, width: hidden, profile });
    let labels = b.upload(&(0..tokens).map(|t| (t * 7919 % vocabulary) as i32).collect::<Vec<_>>());
    let weight = b.upload(&vec![1.0 / tokens as f32; tokens]);
    let (mut loss, mut lse, mut best) = (b.zeros(tokens), b.zeros(tokens), b.zeros(tokens));
    let mut dh = b.zeros(tokens * hidden);
    let workspace = b.workspaces().head_loss(&p);
    // Mathematically there are two products; the third, which recomputes the logits, is our choice.
    let flops = 4.0 * tokens as f64 * hidden as f64 * vocabulary as f64;
    let run = move || {
        b.run(SliceRows { rows: &mut rows, x: &h });
        let (head, labels) = (Matrix::Sliced(&head), &labels);
        b.run(HeadLossForward { loss: &mut loss, lse: &mut lse, best: &mut best, h: &rows, head, labels, p });
        let (rows, h, lse, weight) = (&rows, &h, &lse, &weight);
        b.run(HeadLossBackward { dh: &mut dh, dhead: None, rows, h, head, labels, lse, weight, p });
    };
    Prepared { work: Work { flops, bytes: 0.0, workspace }, run: Box::new(run) }
}
