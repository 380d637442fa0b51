//! SwiGLU, both directions, element by element.

use crate::data::{Kind, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;

#[derive(Debug)]
struct SwigluCase {
    length: usize,
    kind: Kind,
}

impl Case for SwigluCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let mut random = Random::new(self.length as u64);
        let [gate, up, dh] = [(); 3].map(|()| b.upload(&random.f32s(self.kind, self.length)));
        let [mut h, mut dgate, mut dup] = [(); 3].map(|()| poisoned(b, self.length));
        b.swiglu_forward(&mut h, &gate, &up);
        b.swiglu_backward(&mut dgate, &mut dup, &dh, &gate, &up);
        vec![Output::download(b, "h", &h), Output::download(b, "dgate", &dgate), Output::download(b, "dup", &dup)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Kind::ALL {
        for length in [0, 1, 33, 1025, 7919] {
            visitor.case(&SwigluCase { length, kind });
        }
    }
}
