//! The router of a mixture of experts on every CPU path and every device, and what it promises
//! beyond bits.

use isobit_conformance::data::{Distribution, Random};
use isobit_conformance::{Output, assert_same, fastest};
use isobit_kernels::op::{
    EmbeddingForward, LowRank, LowRankOuter, Product, ProductGradWeight, Router, RouterChoose, Scoring, router,
};
use isobit_kernels::tensor::F32;
use isobit_kernels::{Backend, Reference, StoredMatrix};
use isobit_numerics::slices::Profile;

#[test]
fn router() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::router::visit);
}

/// Gradients of experts from all rows of data in one call equal those from the rows in two calls.
#[test]
fn rows_may_be_split_over_calls() {
    split(&Reference);
    split(&fastest());
}

const EXPERTS: usize = 6;
const SLOTS: usize = 2;
const N: usize = 9;
const K: usize = 20;

fn split<B: Backend>(b: &B) {
    let (row_starts, random) = ([0, 150, 190, 190, 430], &mut Random::new(3));
    let logits = random.f32s(Distribution::Plain, 430 * EXPERTS);
    let (x, dy) = (random.f32s(Distribution::Outliers, 430 * K), random.f32s(Distribution::Plain, 430 * N));
    let gradients = |calls: &[[usize; 2]]| {
        let (mut dw, mut dfactor) = (b.zeros(EXPERTS * N * K), b.zeros(EXPERTS * N * K));
        for &[first, end] in calls {
            let starts: Vec<usize> = row_starts[first..=end].iter().map(|s| s - row_starts[first]).collect();
            let tokens = row_starts[first]..row_starts[end];
            let [logits, x, dy] = [(&logits, EXPERTS), (&x, K), (&dy, N)]
                .map(|(host, width)| b.upload(&host[tokens.start * width..tokens.end * width]));
            experts(b, (&mut dw, &mut dfactor), &logits, &x, &dy, &starts);
        }
        [Output::download(b, "dw", &dw), Output::download(b, "dfactor", &dfactor)]
    };
    let ([dw, dfactor], [dw_parts, dfactor_parts]) = (gradients(&[[0, 4]]), gradients(&[[0, 1], [1, 4]]));
    assert_same(&[dw, dw_parts]);
    assert_same(&[dfactor, dfactor_parts]);
}

/// Routes the tokens of some rows, gathers them by expert and adds to the experts' gradients.
fn experts<B: Backend>(
    b: &B,
    (dw, dfactor): (&mut F32<B>, &mut F32<B>),
    logits: &F32<B>,
    x: &F32<B>,
    dy: &F32<B>,
    row_starts: &[usize],
) {
    let tokens = row_starts[row_starts.len() - 1];
    let (scoring, renormalise) = (Scoring::Softmax, true);
    let (chosen, experts) = (SLOTS, EXPERTS);
    let p = Router { tokens, experts, chosen, scoring, renormalise, scale: 1.0, groups: 1, kept_groups: 1 };
    let mut expert_indices = b.zeros(tokens * SLOTS);
    b.run(RouterChoose { indices: &mut expert_indices, logits, bias: None, p });
    let grouped = router::grouped(&isobit_conformance::downloaded(b, &expert_indices), SLOTS, EXPERTS);
    let index = b.upload(&grouped.tokens);
    let (mut rows, mut drows) = (b.zeros(tokens * SLOTS * K), b.zeros(tokens * SLOTS * N));
    b.run(EmbeddingForward { y: &mut rows, table: StoredMatrix::F32(x), ids: &index, width: K });
    b.run(EmbeddingForward { y: &mut drows, table: StoredMatrix::F32(dy), ids: &index, width: N });
    let starts = grouped.row_starts(row_starts);
    let product = Product { segments: &grouped.segments, n: N, k: K, profile: Profile::X2, accumulate: false };
    b.run(ProductGradWeight { dw, dy: &drows, x: &rows, p: product, row_starts: &starts });
    let layout = isobit_kernels::op::FactorLayout::RankMajor;
    let low_rank = LowRank { segments: &grouped.segments, rank: N, width: K, layout, alpha: 0.5 };
    b.run(LowRankOuter::one(dfactor, &drows, &rows, low_rank, &starts));
}
