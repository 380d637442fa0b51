//! Products: slicing, the slice product in its three forms, the product with 4-bit weights,
//! low-rank products.

use super::{Prepared, Work, forever, noise};
use isobit_kernels::op::product4::CHANNELS_PER_WORD;
use isobit_kernels::op::slices::sliced_weight;
use isobit_kernels::op::{
    FactorLayout, LowRank, LowRankContract, LowRankExpand, LowRankOuter, Product, Product4Forward, Product4GradInput,
    Product4Rows, ProductForward, ProductGradInput, ProductGradWeight, Quantized, QuantizedShape, Scales, SliceRows,
    SliceShape,
};
use isobit_kernels::{Backend, Matrix, StoredMatrix};
use isobit_numerics::slices::Profile;
use std::convert::Infallible;
use std::rc::Rc;

pub(super) fn slice_rows<B: Backend + 'static>(b: Rc<B>, m: usize, k: usize, profile: Profile) -> Prepared {
    let x = b.upload(&noise(m * k, 1));
    let mut rows = b.rows(SliceShape { rows: m, width: k, profile });
    let bytes = (m * k * (4 + profile.slice_count())) as f64;
    Prepared {
        work: Work { flops: 0.0, bytes, workspace: 0 },
        run: Box::new(move || b.run(SliceRows { rows: &mut rows, x: &x })),
    }
}

/// Rows spread evenly over `experts` weights.
pub(super) fn product<B: Backend + 'static>(
    b: Rc<B>,
    op: &str,
    (m, experts): (usize, usize),
    n: usize,
    k: usize,
    profile: Profile,
) -> Prepared {
    let (x, dy) = (b.upload(&noise(m * k, 1)), b.upload(&noise(m * n, 2)));
    let stored: Vec<_> = noise(experts * n * k, 3).iter().map(|x| half::bf16::from_f32(x * 0.05)).collect();
    let stored = b.upload(&stored);
    let w = sliced_weight(&*b, StoredMatrix::Bf16(&stored), experts, SliceShape { rows: n, width: k, profile });
    let segments = (0..=experts).map(|expert| expert * m / experts).collect::<Vec<_>>();
    let p = Product { segments: forever(segments), n, k, profile, accumulate: false };
    let workspace = b.workspaces().product(&p);
    let mut rows = b.rows(SliceShape { rows: m, width: k, profile });
    let work = Work { flops: 2.0 * m as f64 * n as f64 * k as f64, bytes: 0.0, workspace };
    b.run(SliceRows { rows: &mut rows, x: &x });
    let op = op.to_string();
    let mut y = b.zeros(m * n);
    let mut dx = b.zeros(m * k);
    let mut dw = b.zeros(if op == "product_grad_weight" { experts * n * k } else { 0 });
    let run = move || match &op[..] {
        "product_forward" => {
            b.run(SliceRows { rows: &mut rows, x: &x });
            b.run(ProductForward { y: &mut y, x: &rows, w: Matrix::Sliced(&w), p });
        }
        "product_forward_sliced" => b.run(ProductForward { y: &mut y, x: &rows, w: Matrix::Sliced(&w), p }),
        "product_forward_bf16" => {
            b.run(SliceRows { rows: &mut rows, x: &x });
            b.run(ProductForward { y: &mut y, x: &rows, w: Matrix::Stored(StoredMatrix::Bf16(&stored)), p });
        }
        "product_grad_input" => b.run(ProductGradInput { dx: &mut dx, dy: &dy, w: Matrix::Sliced(&w), p }),
        _ => b.run(ProductGradWeight { dw: &mut dw, dy: &dy, x: &x, p, row_starts: p.segments }),
    };
    Prepared { work, run: Box::new(run) }
}

/// Slicing and product, as in a model's layer.
pub(super) fn product4<B: Backend + 'static>(
    b: Rc<B>,
    op: &str,
    m: usize,
    n: usize,
    k: usize,
    group: usize,
    profile: Profile,
) -> Prepared {
    let (x, dy) = (b.upload(&noise(m * k, 1)), b.upload(&noise(m * n, 2)));
    let groups = k.div_ceil(group);
    let words: Vec<i32> =
        noise(k / CHANNELS_PER_WORD * n, 3).iter().map(|x| x.to_bits().wrapping_mul(2654435769) as i32).collect();
    let scales: Vec<_> = noise(groups * n, 4).iter().map(|x| half::f16::from_f32(0.01 + 0.002 * x)).collect();
    let group_of: Vec<u32> = (0..k).map(|channel| (channel / group) as u32).collect();
    let zeros = vec![8; groups * n];
    let (words, zeros, scales, group_of) = (&words[..], &zeros[..], Scales::F16(&scales), &group_of[..]);
    let weight = Quantized { n, k, group_size: group, words, zeros, scales, group_of };
    let shape = QuantizedShape::of(&[weight]);
    let w = b.quantized_weight(shape, |_| Ok::<_, Infallible>(weight)).unwrap_or_else(|never| match never {});
    let p = Product { segments: forever([0, m]), n, k, profile, accumulate: false };
    let workspace = b.workspaces().product4(shape, &p);
    let work = Work { flops: 2.0 * m as f64 * n as f64 * k as f64, bytes: 0.0, workspace };
    let mut rows = b.rows(SliceShape { rows: m, width: k, profile });
    let (mut y, mut dx) = (b.zeros(m * n), b.zeros(m * k));
    let is_forward = op == "product4_forward";
    let run = move || {
        if is_forward {
            b.run(Product4Rows { rows: &mut rows, x: &x, w: &w, p });
            b.run(Product4Forward { y: &mut y, x: &rows, w: &w, p });
        } else {
            b.run(Product4GradInput { dx: &mut dx, dy: &dy, w: &w, p });
        }
    };
    Prepared { work, run: Box::new(run) }
}

/// LoRA factors: A `[rank, width]` contracts, B `[width, rank]` expands.
pub(super) fn low_rank<B: Backend + 'static>(b: Rc<B>, op: &str, tokens: usize, width: usize, rank: usize) -> Prepared {
    let layout = if op == "low_rank_contract" { FactorLayout::RankMajor } else { FactorLayout::WidthMajor };
    let p = LowRank { segments: forever([0, tokens]), rank, width, layout, alpha: 2.0 };
    let (mut x, mut u) = (b.upload(&noise(tokens * width, 1)), b.upload(&noise(tokens * rank, 2)));
    let mut factor = b.upload(&noise(width * rank, 3));
    let workspace = b.workspaces().low_rank(&p).max(b.workspaces().low_rank_outer(&[p]));
    let work = Work { flops: 2.0 * (tokens * width * rank) as f64, bytes: 0.0, workspace };
    let op = op.to_string();
    let run = move || match &op[..] {
        "low_rank_contract" => b.run(LowRankContract::one(&mut u, &x, &factor, p)),
        "low_rank_expand" => b.run(LowRankExpand { y: &mut x, u: &u, factor: &factor, p }),
        _ => b.run(LowRankOuter::one(&mut factor, &u, &x, p, &[0, tokens])),
    };
    Prepared { work, run: Box::new(run) }
}
