//! AdamW: first and later steps, with and without decay.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor};
use isobit_kernels::Backend;
use isobit_kernels::op::{AdamWTensor, AdamWUpdate};
use isobit_numerics::adamw::AdamW;

#[derive(Debug)]
struct AdamWCase {
    length: usize,
    step: u64,
    settings: AdamW,
    kind: Distribution,
}

impl Case for AdamWCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let mut random = Random::new(self.length as u64);
        let [parameter, m, mut v, gradient] = [(); 4].map(|()| random.f32s(self.kind, self.length));
        for v in &mut v {
            *v = v.abs();
        }
        let (gradient, nothing) = (b.upload(&gradient), b.upload(&[]));
        let coefficients = self.settings.coefficients(self.step);
        // The same tensor twice, with an empty tensor between.
        let hosts = [[&parameter, &m, &v].map(Vec::as_slice), [&[][..]; 3], [&parameter, &m, &v].map(Vec::as_slice)];
        let mut tensors = hosts.map(|host| host.map(|host| b.upload(host)));
        let gradients = [&gradient, &nothing, &gradient];
        let updated = tensors.iter_mut().zip(gradients);
        let updated =
            updated.map(|([parameter, m, v], gradient)| AdamWTensor { parameter, m, v, gradient, coefficients });
        b.run(AdamWUpdate { tensors: updated.collect() });
        let [first, _, last] = tensors.map(|[parameter, m, v]| {
            [("parameter", parameter), ("m", m), ("v", v)].map(|(name, of)| Output::download(b, name, &of))
        });
        assert_eq!(first, last, "tensors of one call");
        first.into()
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for (length, step, weight_decay) in [(0, 1, 0.0), (1, 1, 0.1), (33, 7, 0.0), (4099, 1000, 0.01)] {
            let settings = AdamW { lr: 3e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay };
            visitor.case(&AdamWCase { length, step, settings, kind });
        }
    }
}
