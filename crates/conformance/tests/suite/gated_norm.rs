//! Gated norm on every CPU path and every device.

use isobit_conformance::data::{Distribution, Random};
use isobit_conformance::{Output, assert_same, downloaded, fastest, poisoned};
use isobit_kernels::op::{GatedNorm, GatedNormBackward, GatedNormForward};
use isobit_kernels::{Backend, Reference};

#[test]
fn gated_norm() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::gated_norm::visit);
}

/// Rows of data in one call equal the same rows in two calls, and a head's norm does not depend on
/// its neighbours.
#[test]
fn rows_may_be_split_over_calls() {
    split(&Reference);
    split(&fastest());
}

fn split<B: Backend>(b: &B) {
    let (width, random) = (67, &mut Random::new(3));
    let [h, z, dy] = [(); 3].map(|()| random.f32s(Distribution::Plain, 150 * width));
    let weight = b.upload(&random.f32s(Distribution::Plain, width));
    let run = |cuts: &[usize]| {
        let mut dweight = b.zeros(width);
        let mut all = Vec::new();
        for cut in cuts.windows(2) {
            let [h, z, dy] = [&h, &z, &dy].map(|x| b.upload(&x[cut[0] * width..cut[1] * width]));
            let p = GatedNorm { tokens: cut[1] - cut[0], width, eps: 1e-6 };
            let [mut y, mut dh, mut dz] = [(); 3].map(|()| poisoned(b, p.tokens * width));
            let mut inverse = poisoned(b, p.tokens);
            b.run(GatedNormForward { y: &mut y, inverse: &mut inverse, h: &h, z: &z, weight: &weight, p });
            // The rows of data: 0..140 and 140..150, whichever call they are in.
            let ends: Vec<usize> = [0, 140, 150].iter().map(|&end| end.clamp(cut[0], cut[1]) - cut[0]).collect();
            let dweight = Some(&mut dweight);
            b.run(GatedNormBackward {
                dh: &mut dh,
                dz: &mut dz,
                dweight,
                dy: &dy,
                h: &h,
                z: &z,
                inverse: &inverse,
                weight: &weight,
                p,
                row_starts: &ends,
            });
            all.push([downloaded(b, &y), downloaded(b, &dh), downloaded(b, &dz)]);
        }
        let order = (0..3).flat_map(|output| all.iter().map(move |call| &call[output]));
        let mut values: Vec<f32> = order.flatten().copied().collect();
        values.extend(downloaded(b, &dweight));
        Output::new("y, dh, dz and dweight", &values)
    };
    assert_same(&[run(&[0, 150]), run(&[0, 140, 150])]);
}
