//! Decay and write strength: heads around the 32 lanes, rows longer than a token block, empty rows.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{Decay, DecayBackward, DecayForward};

#[derive(Debug)]
struct DecayCase {
    row_starts: Vec<usize>,
    heads: usize,
    kind: Distribution,
}

impl Case for DecayCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let (tokens, heads) = (self.row_starts[self.row_starts.len() - 1], self.heads);
        let (p, length) = (Decay { tokens, heads }, tokens * heads);
        let mut random = Random::new(length as u64);
        let [a, strength, dg, dbeta] = [(); 4].map(|()| b.upload(&random.f32s(self.kind, length)));
        // Its exponential must stay finite: infinity times zero is NaN, whose bits are not defined.
        let a_log = b.upload(&random.f32s(Distribution::Plain, heads));
        let dt_bias = b.upload(&random.f32s(self.kind, heads));
        let [mut da_log, mut ddt_bias] = [(); 2].map(|()| b.upload(&random.f32s(Distribution::Plain, heads)));
        let [mut g, mut beta] = [(); 2].map(|()| poisoned(b, length));
        let (a, strength, dg, dbeta, a_log, dt_bias) = (&a, &strength, &dg, &dbeta, &a_log, &dt_bias);
        b.run(DecayForward { g: &mut g, beta: &mut beta, a, b: strength, a_log, dt_bias, p });
        let mut outputs = vec![Output::download(b, "g", &g), Output::download(b, "beta", &beta)];
        for with_parameters in [false, true] {
            let [mut da, mut db] = [(); 2].map(|()| poisoned(b, length));
            b.run(DecayBackward {
                da: &mut da,
                db: &mut db,
                dparameters: with_parameters.then_some((&mut da_log, &mut ddt_bias)),
                dg,
                dbeta,
                a,
                b: strength,
                a_log,
                dt_bias,
                p,
                row_starts: &self.row_starts,
            });
            let names = if with_parameters { ["da again", "db again"] } else { ["da", "db"] };
            outputs.extend([Output::download(b, names[0], &da), Output::download(b, names[1], &db)]);
        }
        outputs.extend([Output::download(b, "da_log", &da_log), Output::download(b, "ddt_bias", &ddt_bias)]);
        outputs
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for (row_starts, heads) in [
            (&[0, 1][..], 1),
            (&[0, 0, 5, 5, 11], 32),
            (&[0, 129, 130], 33),
            (&[0, 128, 257], 4),
            (&[0, 1500], 3),
            (&[0, 3], 701),
            (&[0, 0], 4),
        ] {
            visitor.case(&DecayCase { row_starts: row_starts.to_vec(), heads, kind });
        }
    }
}
