//! Thin products on every CPU path and every device.

use isobit_conformance::data::{Kind, Random};
use isobit_conformance::{Output, assert_same, fastest};
use isobit_kernels::op::{Layout, Thin};
use isobit_kernels::{Backend, Reference};

#[test]
fn thin() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::thin::visit);
}

/// Rows of data in one call equal the same rows in two calls.
#[test]
fn rows_may_be_split_over_calls() {
    split(&Reference);
    split(&fastest());
}

fn split<B: Backend>(b: &B) {
    let (rank, width, random) = (5, 33, &mut Random::new(3));
    let p = Thin { segments: &[0, 190], rank, width, layout: Layout::WidthMajor, alpha: 0.7 };
    let first = random.f32s(Kind::Plain, rank * width);
    let (u, x) = (random.f32s(Kind::Plain, 190 * rank), random.f32s(Kind::Outliers, 190 * width));
    let mut room = b.zeros(b.thin_workspace(&p));
    let mut whole = b.upload(&first);
    b.thin_outer(&mut whole, &b.upload(&u), &b.upload(&x), &p, &[0, 131, 190], &mut room);
    let mut parts = b.upload(&first);
    let (u0, u1) = u.split_at(131 * rank);
    let (x0, x1) = x.split_at(131 * width);
    let part = Thin { segments: &[0, 131], ..p };
    b.thin_outer(&mut parts, &b.upload(u0), &b.upload(x0), &part, &[0, 131], &mut room);
    let part = Thin { segments: &[0, 59], ..p };
    b.thin_outer(&mut parts, &b.upload(u1), &b.upload(x1), &part, &[0, 59], &mut room);
    assert_same(&[Output::download(b, "dfactor", &whole), Output::download(b, "dfactor", &parts)]);
}
