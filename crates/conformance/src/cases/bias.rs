//! Bias: in-place addition, and its gradient over rows of data with empty ones and rows longer than
//! a token block.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor};
use isobit_kernels::Backend;
use isobit_kernels::op::{BiasBackward, BiasForward};

#[derive(Debug)]
struct BiasCase {
    row_starts: Vec<usize>,
    width: usize,
    kind: Distribution,
}

impl Case for BiasCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let tokens = self.row_starts[self.row_starts.len() - 1];
        let mut random = Random::new(tokens as u64);
        let mut y = b.upload(&random.f32s(self.kind, tokens * self.width));
        b.run(BiasForward { y: &mut y, bias: &b.upload(&random.f32s(self.kind, self.width)) });
        let mut dbias = b.upload(&random.f32s(Distribution::Plain, self.width));
        b.run(BiasBackward {
            dbias: &mut dbias,
            dy: &b.upload(&random.f32s(self.kind, tokens * self.width)),
            row_starts: &self.row_starts,
        });
        vec![Output::download(b, "y", &y), Output::download(b, "dbias", &dbias)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for row_starts in [&[0, 1][..], &[0, 0, 5, 5, 11], &[0, 128, 257], &[0, 129], &[0, 300, 301, 301], &[0, 0]] {
            for width in [1, 33, 71] {
                visitor.case(&BiasCase { row_starts: row_starts.to_vec(), width, kind });
            }
        }
    }
    visitor.case(&BiasCase { row_starts: vec![0, 6, 19], width: 1543, kind: Distribution::Outliers });
}
