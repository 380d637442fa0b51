//! Dropout: rows whose ends fall inside a Philox block, empty rows, every element kept, almost none
//! kept.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{ApplyDropout, Dropout};
use isobit_numerics::philox::{Key, Purpose, dropout_threshold};

#[derive(Debug)]
struct DropoutCase {
    row_starts: Vec<usize>,
    width: usize,
    probability: f64,
    kind: Distribution,
}

impl Case for DropoutCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let length = self.row_starts[self.row_starts.len() - 1] * self.width;
        let x = b.upload(&Random::new(length as u64).f32s(self.kind, length));
        let mut y = poisoned(b, length);
        let p = Dropout {
            key: Key::new(11, Purpose::Dropout),
            step: 3,
            tensor: 5,
            first_row: 7,
            row_starts: &self.row_starts,
            width: self.width,
            threshold: dropout_threshold(self.probability),
            keep_scale: (1.0 / (1.0 - self.probability)) as f32,
        };
        b.run(ApplyDropout { y: &mut y, x: &x, p });
        vec![Output::download(b, "y", &y)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for row_starts in [&[0, 1][..], &[0, 3, 3, 4, 50], &[0, 0, 129], &[0, 0]] {
            for (width, probability) in [(1, 0.5), (7, 0.1), (33, 0.0), (129, 0.99)] {
                visitor.case(&DropoutCase { row_starts: row_starts.to_vec(), width, probability, kind });
            }
        }
    }
}
