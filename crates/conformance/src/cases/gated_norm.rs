//! Gated norm: with and without weight gradient, widths around the 32 lanes, many heads in a row of
//! data.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{GatedNorm, GatedNormBackward, GatedNormForward};

#[derive(Debug)]
struct GatedNormCase {
    row_starts: Vec<usize>,
    width: usize,
    kind: Distribution,
}

impl Case for GatedNormCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let (tokens, width) = (self.row_starts[self.row_starts.len() - 1], self.width);
        let (p, length) = (GatedNorm { tokens, width, eps: 1e-6 }, tokens * width);
        let mut random = Random::new(length as u64);
        let [h, z, dy] = [(); 3].map(|()| b.upload(&random.f32s(self.kind, length)));
        // The gradient is a product of three factors: only two may reach 1e15.
        let weight = b.upload(&random.f32s(Distribution::Plain, width));
        let mut dweight = b.upload(&random.f32s(Distribution::Plain, width));
        let (mut y, mut inverse) = (poisoned(b, length), poisoned(b, tokens));
        b.run(GatedNormForward { y: &mut y, inverse: &mut inverse, h: &h, z: &z, weight: &weight, p });
        let mut outputs = vec![Output::download(b, "y", &y), Output::download(b, "inverse", &inverse)];
        for with_weight in [false, true] {
            let [mut dh, mut dz] = [(); 2].map(|()| poisoned(b, length));
            let dweight = with_weight.then_some(&mut dweight);
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
                row_starts: &self.row_starts,
            });
            outputs.extend([Output::download(b, "dh", &dh), Output::download(b, "dz", &dz)]);
        }
        outputs.push(Output::download(b, "dweight", &dweight));
        outputs
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for (row_starts, width) in [
            (&[0, 1][..], 1),
            (&[0, 0, 5, 5, 11], 31),
            (&[0, 3, 8], 128),
            (&[0, 129, 130], 33),
            (&[0, 1300], 5),
            (&[0, 2, 3], 1031),
            (&[0, 0], 7),
        ] {
            visitor.case(&GatedNormCase { row_starts: row_starts.to_vec(), width, kind });
        }
    }
}
