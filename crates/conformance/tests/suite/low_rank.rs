//! Low-rank products on every CPU path and every device.

use isobit_conformance::data::{Distribution, Random};
use isobit_conformance::{Output, assert_same, fastest};
use isobit_kernels::op::{FactorLayout, LowRank, LowRankOuter};
use isobit_kernels::{Backend, Reference};

#[test]
fn low_rank() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::low_rank::visit);
}

/// Rows of data in one call equal the same rows in two calls.
#[test]
fn rows_may_be_split_over_calls() {
    split(&Reference);
    split(&fastest());
}

fn split<B: Backend>(b: &B) {
    let (rank, width, random) = (5, 33, &mut Random::new(3));
    let p = LowRank { segments: &[0, 190], rank, width, layout: FactorLayout::WidthMajor, alpha: 0.7 };
    let first = random.f32s(Distribution::Plain, rank * width);
    let (u, x) = (random.f32s(Distribution::Plain, 190 * rank), random.f32s(Distribution::Outliers, 190 * width));
    let mut whole = b.upload(&first);
    b.run(LowRankOuter::one(&mut whole, &b.upload(&u), &b.upload(&x), p, &[0, 131, 190]));
    let mut parts = b.upload(&first);
    let (u0, u1) = u.split_at(131 * rank);
    let (x0, x1) = x.split_at(131 * width);
    let part = LowRank { segments: &[0, 131], ..p };
    b.run(LowRankOuter::one(&mut parts, &b.upload(u0), &b.upload(x0), part, &[0, 131]));
    let part = LowRank { segments: &[0, 59], ..p };
    b.run(LowRankOuter::one(&mut parts, &b.upload(u1), &b.upload(x1), part, &[0, 59]));
    assert_same(&[Output::download(b, "dfactor", &whole), Output::download(b, "dfactor", &parts)]);
}
