//! GeGLU, forward and backward, elementwise.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{GegluBackward, GegluForward};

#[derive(Debug)]
struct GegluCase {
    length: usize,
    kind: Distribution,
}

impl Case for GegluCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let mut random = Random::new(self.length as u64);
        let [gate, up, dh] = [(); 3].map(|()| b.upload(&random.f32s(self.kind, self.length)));
        let [mut h, mut dgate, mut dup] = [(); 3].map(|()| poisoned(b, self.length));
        b.run(GegluForward { h: &mut h, gate: &gate, up: &up });
        b.run(GegluBackward { dgate: &mut dgate, dup: &mut dup, dh: &dh, gate: &gate, up: &up });
        vec![Output::download(b, "h", &h), Output::download(b, "dgate", &dgate), Output::download(b, "dup", &dup)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for length in [0, 1, 33, 1025, 7919] {
            visitor.case(&GegluCase { length, kind });
        }
    }
}
