//! AdamW: first and later steps, with and without decay.

use crate::data::{Kind, Random};
use crate::{Case, Output, Visitor};
use isobit_kernels::Backend;
use isobit_kernels::op::AdamWUpdate;
use isobit_numerics::adamw::AdamW;

#[derive(Debug)]
struct AdamWCase {
    length: usize,
    step: u64,
    settings: AdamW,
    kind: Kind,
}

impl Case for AdamWCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let mut random = Random::new(self.length as u64);
        let mut parameter = b.upload(&random.f32s(self.kind, self.length));
        let mut m = b.upload(&random.f32s(self.kind, self.length));
        let second: Vec<f32> = random.f32s(self.kind, self.length).iter().map(|x| x.abs()).collect();
        let mut v = b.upload(&second);
        let gradient = b.upload(&random.f32s(self.kind, self.length));
        b.run(AdamWUpdate {
            parameter: &mut parameter,
            m: &mut m,
            v: &mut v,
            gradient: &gradient,
            c: self.settings.coefficients(self.step),
        });
        vec![Output::download(b, "parameter", &parameter), Output::download(b, "m", &m), Output::download(b, "v", &v)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Kind::ALL {
        for (length, step, weight_decay) in [(0, 1, 0.0), (1, 1, 0.1), (33, 7, 0.0), (4099, 1000, 0.01)] {
            let settings = AdamW { lr: 3e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay };
            visitor.case(&AdamWCase { length, step, settings, kind });
        }
    }
}
