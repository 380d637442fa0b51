//! RMS norm: both variants, with and without accumulation and weight gradient, widths around the 32
//! lanes.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{RmsNorm, RmsNormBackward, RmsNormForward};

#[derive(Debug)]
pub struct RmsNormCase {
    pub row_starts: Vec<usize>,
    pub width: usize,
    pub zero_centred: bool,
    pub kind: Distribution,
}

impl Case for RmsNormCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let (tokens, width) = (self.row_starts[self.row_starts.len() - 1], self.width);
        let p = RmsNorm { tokens, width, eps: 1e-6, zero_centred: self.zero_centred, accumulate: false };
        let mut random = Random::new(tokens as u64);
        let x = b.upload(&random.f32s(self.kind, tokens * width));
        let dy = b.upload(&random.f32s(self.kind, tokens * width));
        let weight = b.upload(&random.f32s(self.kind, width));
        let (mut y, mut inverse) = (poisoned(b, tokens * width), poisoned(b, tokens));
        b.run(RmsNormForward { y: &mut y, inverse: &mut inverse, x: &x, weight: &weight, p });
        let mut dx = poisoned(b, tokens * width);
        let (x, dy, inverse, weight, row_starts) = (&x, &dy, &inverse, &weight, &self.row_starts[..]);
        b.run(RmsNormBackward { dx: &mut dx, dweight: None, dy, x, inverse, weight, p, row_starts });
        let mut outputs =
            vec![Output::download(b, "y", &y), Output::download(b, "inverse", inverse), Output::download(b, "dx", &dx)];
        let mut dx = b.upload(&random.f32s(Distribution::Plain, tokens * width));
        let mut dweight = b.upload(&random.f32s(Distribution::Plain, width));
        let p = RmsNorm { accumulate: true, ..p };
        b.run(RmsNormBackward { dx: &mut dx, dweight: Some(&mut dweight), dy, x, inverse, weight, p, row_starts });
        outputs.push(Output::download(b, "dx accumulated", &dx));
        outputs.push(Output::download(b, "dweight", &dweight));
        outputs
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for zero_centred in [false, true] {
        let case = |row_starts: &[usize], width, kind| RmsNormCase {
            row_starts: row_starts.to_vec(),
            width,
            zero_centred,
            kind,
        };
        for kind in Distribution::ALL {
            visitor.case(&case(&[0, 1], 1, kind));
            visitor.case(&case(&[0, 0, 5, 5, 11], 31, kind));
            visitor.case(&case(&[0, 3, 8], 64, kind));
            visitor.case(&case(&[0, 129, 130], 33, kind));
            visitor.case(&case(&[0, 2, 3], 1031, kind));
        }
    }
}
