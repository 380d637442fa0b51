//! Bias on every CPU path and every device.

use isobit_conformance::data::{Distribution, Random};
use isobit_conformance::{Output, assert_same, fastest};
use isobit_kernels::op::BiasBackward;
use isobit_kernels::{Backend, Reference};

#[test]
fn bias() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::bias::visit);
}

/// Rows of data in one call equal the same rows in two calls: which micro-batch a row sits in does
/// not show.
#[test]
fn rows_may_be_split_over_calls() {
    split(&Reference);
    split(&fastest());
}

fn split<B: Backend>(b: &B) {
    let (width, random) = (37, &mut Random::new(3));
    let row_starts = [0, 130, 130, 171, 304];
    let (first, dy) = (random.f32s(Distribution::Plain, width), random.f32s(Distribution::Outliers, 304 * width));
    let mut whole = b.upload(&first);
    b.run(BiasBackward { dbias: &mut whole, dy: &b.upload(&dy), row_starts: &row_starts });
    let mut parts = b.upload(&first);
    b.run(BiasBackward { dbias: &mut parts, dy: &b.upload(&dy[..130 * width]), row_starts: &[0, 130] });
    b.run(BiasBackward { dbias: &mut parts, dy: &b.upload(&dy[130 * width..]), row_starts: &[0, 0, 41, 174] });
    assert_same(&[Output::download(b, "dbias", &whole), Output::download(b, "dbias", &parts)]);
}
