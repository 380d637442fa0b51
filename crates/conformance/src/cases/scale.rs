//! In-place multiplication by a number: lengths around the vector widths, special values.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor};
use isobit_kernels::Backend;
use isobit_kernels::op::Scale;

#[derive(Debug)]
struct ScaleCase {
    length: usize,
    factor: f32,
    kind: Distribution,
}

impl Case for ScaleCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let numbers = Random::new(self.length as u64).f32s(self.kind, self.length);
        let (mut x, mut nothing, mut other) = (b.upload(&numbers), b.upload(&[]), b.upload(&numbers));
        b.run(Scale { tensors: vec![&mut x, &mut nothing, &mut other], factor: self.factor });
        let x = Output::download(b, "x", &x);
        assert_eq!(x.bits, Output::download(b, "other", &other).bits, "tensors of one call");
        vec![x]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for (length, factor) in [(0, 2.0), (1, -0.0), (33, 0.37), (4099, 1e-40)] {
            visitor.case(&ScaleCase { length, factor, kind });
        }
    }
}
