//! Dropout on every CPU path and every device.

use isobit_conformance::data::{Distribution, Random};
use isobit_conformance::{Output, assert_same, downloaded, fastest, poisoned};
use isobit_kernels::op::{ApplyDropout, Dropout};
use isobit_kernels::{Backend, Device, Reference};
use isobit_numerics::philox::{Key, Purpose, dropout_threshold};

#[test]
fn dropout() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::dropout::visit);
}

/// A row is dropped alike whichever rows come with it: the key names the row, not its place in the
/// micro-batch.
#[test]
fn rows_may_be_split_over_calls() {
    split(&Reference);
    split(&fastest());
}

fn split<B: Backend>(b: &B) {
    let (width, random) = (13, &mut Random::new(3));
    let x = random.f32s(Distribution::Plain, 30 * width);
    let base = Dropout {
        key: Key::new(1, Purpose::Dropout),
        step: 2,
        tensor: 3,
        first_row: 4,
        row_starts: &[0, 7, 7, 30],
        width,
        threshold: dropout_threshold(0.4),
        keep_scale: 1.6666666,
    };
    let mut whole = poisoned(b, 30 * width);
    b.run(ApplyDropout { y: &mut whole, x: &b.upload(&x), p: base });
    let (x0, x1) = x.split_at(7 * width);
    let (mut y0, mut y1) = (poisoned(b, x0.len()), poisoned(b, x1.len()));
    b.run(ApplyDropout { y: &mut y0, x: &b.upload(x0), p: Dropout { row_starts: &[0, 7], ..base } });
    b.run(ApplyDropout { y: &mut y1, x: &b.upload(x1), p: Dropout { row_starts: &[0, 0, 23], first_row: 5, ..base } });
    let parts: Vec<f32> = downloaded(b, &y0).into_iter().chain(downloaded(b, &y1)).collect();
    assert_same(&[Output::download(b, "y", &whole), Output::new("y", &parts)]);
}

/// The share of kept elements is what was asked for, and a kept element is scaled.
#[test]
fn keeps_the_share_asked_for() {
    let count = 100_000;
    let p = Dropout {
        key: Key::new(5, Purpose::Dropout),
        step: 0,
        tensor: 0,
        first_row: 0,
        row_starts: &[0, count],
        width: 1,
        threshold: dropout_threshold(0.25),
        keep_scale: 1.3333334,
    };
    let mut y = Reference.zeros(count);
    Reference.run(ApplyDropout { y: &mut y, x: &Reference.upload(&vec![3.0; count]), p });
    assert!(y.iter().all(|&y| y == 0.0 || y == 4.0));
    let kept = y.iter().filter(|&&y| y != 0.0).count();
    // Five standard deviations of a binomial of 100,000 at 3/4: 685.
    assert!(kept.abs_diff(75_000) < 685, "{kept} kept");
}
