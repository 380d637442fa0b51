//! Sigmoid gates, one per element and one per token, forward and backward.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{Gate, GateBackward, GateForward};

#[derive(Debug)]
struct GateCase {
    shape: Gate,
    kind: Distribution,
}

impl Case for GateCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let p = self.shape;
        let length = p.tokens * p.width;
        let mut random = Random::new(length as u64);
        let [x, dy] = [(); 2].map(|()| b.upload(&random.f32s(self.kind, length)));
        let g = b.upload(&random.f32s(self.kind, p.gates()));
        let ([mut y, mut dx], mut dg) = ([(); 2].map(|()| poisoned(b, length)), poisoned(b, p.gates()));
        b.run(GateForward { y: &mut y, x: &x, g: &g, p });
        b.run(GateBackward { dx: &mut dx, dg: &mut dg, dy: &dy, x: &x, g: &g, p });
        vec![Output::download(b, "y", &y), Output::download(b, "dx", &dx), Output::download(b, "dg", &dg)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for per_token in [false, true] {
            for (tokens, width) in [(0, 5), (1, 1), (3, 31), (17, 64), (9, 121), (2, 1031), (300, 3)] {
                visitor.case(&GateCase { shape: Gate { tokens, width, per_token }, kind });
            }
        }
    }
}
