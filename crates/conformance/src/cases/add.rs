//! Elementwise sum of two tensors, and scaling.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{Add, Scale};

#[derive(Debug)]
struct ResidualCase {
    length: usize,
    factor: f32,
    kind: Distribution,
}

impl Case for ResidualCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let mut random = Random::new(self.length as u64);
        let mut first = b.upload(&random.f32s(self.kind, self.length));
        let second = b.upload(&random.f32s(self.kind, self.length));
        let mut y = poisoned(b, self.length);
        b.run(Add { y: &mut y, a: &first, b: &second });
        b.run(Scale { tensors: vec![&mut first], factor: self.factor });
        vec![Output::download(b, "sum", &y), Output::download(b, "scaled", &first)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for (length, factor) in [(0, 1.0), (1, 0.3), (31, -0.0), (33, 1.0), (4097, 1e-30), (10007, 0.7)] {
            visitor.case(&ResidualCase { length, factor, kind });
        }
    }
}
