//! Ops that stream over memory: the rate counts the bytes they must touch.

use super::{Prepared, Work, forever, noise};
use isobit_kernels::Backend;
use isobit_kernels::op::digest::SUM_WORDS;
use isobit_kernels::op::{
    AdamWTensor, AdamWUpdate, Add, AnyBuffer, ApplyDropout, BiasBackward, DigestSums, Dropout, EmbeddingBackward,
    RmsNorm, RmsNormBackward, RmsNormForward, Rope, RopeForward, SumSquares, SwigluBackward, SwigluForward, ToBf16,
};
use isobit_numerics::adamw::AdamW;
use isobit_numerics::philox::{Key, Purpose};
use std::rc::Rc;

pub(super) fn rope<B: Backend + 'static>(b: Rc<B>, tokens: usize, heads: usize, width: usize) -> Prepared {
    let p = Rope { tokens, heads, head_width: width, rotary_width: width, offset: 0, interleaved: false };
    let mut x = b.upload(&noise(tokens * heads * width, 1));
    let (cos, sin) = (b.upload(&noise(tokens * width / 2, 2)), b.upload(&noise(tokens * width / 2, 3)));
    let positions = b.upload(&(0..tokens as u32).collect::<Vec<_>>());
    let bytes = 8.0 * (tokens * heads * width) as f64;
    Prepared {
        work: Work { flops: 0.0, bytes, workspace: 0 },
        run: Box::new(move || b.run(RopeForward { x: &mut x, cos: &cos, sin: &sin, positions: &positions, p })),
    }
}

/// Ops over `tokens x width` numbers.
pub(super) fn flat<B: Backend + 'static>(b: Rc<B>, op: &str, tokens: usize, width: usize) -> Option<Prepared> {
    let length = tokens * width;
    let tensor = |seed: u32| b.upload(&noise(length, seed));
    let (a, other, c) = (tensor(1), tensor(2), tensor(3));
    let (mut y, mut z) = (tensor(4), tensor(5));
    let mut second = b.upload(&noise(length, 6).iter().map(|v| v.abs()).collect::<Vec<_>>());
    let mut row = b.upload(&noise(width, 7));
    let mut inverse = b.upload(&vec![1.0; tokens]);
    let row_starts = forever([0, tokens]);
    let norm = RmsNorm { tokens, width, eps: 1e-6, zero_centred: false, accumulate: false };
    let (bytes_each, run): (usize, Box<dyn FnMut()>) = match op {
        "rms_norm_forward" => {
            let run = move || b.run(RmsNormForward { y: &mut y, inverse: &mut inverse, x: &a, weight: &row, p: norm });
            (8, Box::new(run))
        }
        "rms_norm_backward" => {
            let run = move || {
                let (dx, inverse, weight) = (&mut y, &inverse, &row);
                b.run(RmsNormBackward { dx, dweight: None, dy: &a, x: &other, inverse, weight, p: norm, row_starts });
            };
            (12, Box::new(run))
        }
        "swiglu_forward" => (12, Box::new(move || b.run(SwigluForward { h: &mut y, gate: &a, up: &other }))),
        "swiglu_backward" => {
            let run = move || b.run(SwigluBackward { dgate: &mut y, dup: &mut z, dh: &a, gate: &other, up: &c });
            (20, Box::new(run))
        }
        "bias_backward" => (4, Box::new(move || b.run(BiasBackward { dbias: &mut row, dy: &a, row_starts }))),
        "add" => (12, Box::new(move || b.run(Add { y: &mut y, a: &a, b: &other }))),
        "dropout" => {
            let key = Key::new(1, Purpose::Dropout);
            let (threshold, keep_scale) = (1 << 30, 4.0 / 3.0);
            let p = Dropout { key, step: 1, tensor: 1, first_row: 0, row_starts, width, threshold, keep_scale };
            (8, Box::new(move || b.run(ApplyDropout { y: &mut y, x: &a, p })))
        }
        "embedding_backward" => {
            let ids = b.upload(&(0..tokens as u32).map(|t| t * 7919 % tokens as u32).collect::<Vec<_>>());
            (12, Box::new(move || b.run(EmbeddingBackward { dtable: &mut y, dy: &a, ids: &ids, width })))
        }
        "adamw" => {
            let coefficients =
                AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }.coefficients(10);
            let run = move || {
                let (parameter, m, v, gradient) = (&mut y, &mut z, &mut second, &a);
                b.run(AdamWUpdate { tensors: vec![AdamWTensor { parameter, m, v, gradient, coefficients }] });
            };
            (28, Box::new(run))
        }
        "sum_squares" => {
            let mut sums = b.zeros(1);
            (4, Box::new(move || b.run(SumSquares { sums: &mut sums, tensors: &[&a] })))
        }
        "to_bf16" => {
            let mut narrow = b.zeros(length);
            (6, Box::new(move || b.run(ToBf16 { y: &mut narrow, x: &a })))
        }
        "digest" => {
            let mut sums = b.zeros(SUM_WORDS);
            (4, Box::new(move || b.run(DigestSums { sums: &mut sums, tensors: &[AnyBuffer::F32(&a)] })))
        }
        _ => return None,
    };
    Some(Prepared { work: Work { flops: 0.0, bytes: (bytes_each * length) as f64, workspace: 0 }, run })
}
