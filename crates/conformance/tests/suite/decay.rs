//! Decay on every CPU path and every device.

use isobit_conformance::data::{Distribution, Random};
use isobit_conformance::{Output, assert_same, downloaded, fastest, poisoned};
use isobit_kernels::op::{Decay, DecayBackward};
use isobit_kernels::{Backend, Reference};

#[test]
fn decay() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::decay::visit);
}

/// Rows of data in one call equal the same rows in two calls.
#[test]
fn rows_may_be_split_over_calls() {
    split(&Reference);
    split(&fastest());
}

fn split<B: Backend>(b: &B) {
    let (heads, random) = (9, &mut Random::new(3));
    let [a, strength, dg, dbeta] = [(); 4].map(|()| random.f32s(Distribution::Plain, 170 * heads));
    let [a_log, dt_bias] = [(); 2].map(|()| b.upload(&random.f32s(Distribution::Plain, heads)));
    let run = |cuts: &[usize]| {
        let [mut da_log, mut ddt_bias] = [(); 2].map(|()| b.zeros(heads));
        for cut in cuts.windows(2) {
            let [a, strength, dg, dbeta] =
                [&a, &strength, &dg, &dbeta].map(|x| b.upload(&x[cut[0] * heads..cut[1] * heads]));
            let p = Decay { tokens: cut[1] - cut[0], heads };
            let [mut da, mut db] = [(); 2].map(|()| poisoned(b, p.tokens * heads));
            // The rows of data: 0..140 and 140..170, whichever call they are in.
            let ends: Vec<usize> = [0, 140, 170].iter().map(|&end| end.clamp(cut[0], cut[1]) - cut[0]).collect();
            let parameters = Some((&mut da_log, &mut ddt_bias));
            let (d, ab) = ((&dg, &dbeta), (&a, &strength));
            b.run(DecayBackward {
                da: &mut da,
                db: &mut db,
                dparameters: parameters,
                dg: d.0,
                dbeta: d.1,
                a: ab.0,
                b: ab.1,
                a_log: &a_log,
                dt_bias: &dt_bias,
                p,
                row_starts: &ends,
            });
        }
        Output::new("parameters", &[downloaded(b, &da_log), downloaded(b, &ddt_bias)].concat())
    };
    assert_same(&[run(&[0, 170]), run(&[0, 140, 170])]);
}
