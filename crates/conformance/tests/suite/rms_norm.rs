//! RMS norm on every CPU path and every device.

use isobit_conformance::data::{Distribution, Random};
use isobit_conformance::{Output, assert_same, downloaded, fastest, poisoned};
use isobit_kernels::op::{RmsNorm, RmsNormBackward, RmsNormForward};
use isobit_kernels::{Backend, Reference};

#[test]
fn rms_norm() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::rms_norm::visit);
}

/// Rows of data in one call equal the same rows in two calls, and a token's norm does not depend on
/// its neighbours.
#[test]
fn rows_may_be_split_over_calls() {
    split(&Reference);
    split(&fastest());
}

fn split<B: Backend>(b: &B) {
    let (width, random) = (67, &mut Random::new(3));
    let whole = RmsNorm { tokens: 150, width, eps: 1e-5, zero_centred: true, accumulate: false };
    let x = random.f32s(Distribution::Outliers, 150 * width);
    let dy = random.f32s(Distribution::Plain, 150 * width);
    let (weight, first) = (random.f32s(Distribution::Plain, width), random.f32s(Distribution::Plain, width));
    let w = b.upload(&weight);
    let run = |cuts: &[usize]| {
        let mut dweight = b.upload(&first);
        let (mut ys, mut dxs) = (Vec::new(), Vec::new());
        for cut in cuts.windows(2) {
            let p = RmsNorm { tokens: cut[1] - cut[0], ..whole };
            let part = |x: &[f32]| b.upload(&x[cut[0] * width..cut[1] * width]);
            let (x, dy) = (part(&x), part(&dy));
            let [mut y, mut dx] = [(); 2].map(|()| poisoned(b, p.tokens * width));
            let mut inverse = poisoned(b, p.tokens);
            b.run(RmsNormForward { y: &mut y, inverse: &mut inverse, x: &x, weight: &w, p });
            // The rows of data: 0..140 and 140..150, whichever call they are in.
            let ends: Vec<usize> = [0, 140, 150].iter().map(|&end| end.clamp(cut[0], cut[1]) - cut[0]).collect();
            b.run(RmsNormBackward {
                dx: &mut dx,
                dweight: Some(&mut dweight),
                dy: &dy,
                x: &x,
                inverse: &inverse,
                weight: &w,
                p,
                row_starts: &ends,
            });
            ys.extend(downloaded(b, &y));
            dxs.extend(downloaded(b, &dx));
        }
        Output::new("y, dx and dweight", &[ys, dxs, downloaded(b, &dweight)].concat())
    };
    assert_same(&[run(&[0, 150]), run(&[0, 140, 150])]);
}
