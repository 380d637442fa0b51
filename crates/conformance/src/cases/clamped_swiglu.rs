//! Clamped SwiGLU, forward and backward: limits that some numbers exceed and some meet exactly.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{ClampedSwigluBackward, ClampedSwigluForward};
use isobit_numerics::elementary::ClampedSwiglu;

#[derive(Debug)]
struct ClampedSwigluCase {
    length: usize,
    limit: f32,
    kind: Distribution,
}

impl Case for ClampedSwigluCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let length = self.length;
        let mut random = Random::new(length as u64);
        let mut both = random.f32s(self.kind, 2 * length);
        for (at, x) in both.iter_mut().enumerate() {
            match at % 13 {
                0 => *x = self.limit,
                1 => *x = -self.limit,
                _ => {}
            }
        }
        let (both, dh) = (b.upload(&both), b.upload(&random.f32s(self.kind, length)));
        let (mut h, mut dboth) = (poisoned(b, length), poisoned(b, 2 * length));
        let p = ClampedSwiglu { alpha: 1.702, limit: self.limit };
        b.run(ClampedSwigluForward { h: &mut h, both: &both, p });
        b.run(ClampedSwigluBackward { dboth: &mut dboth, dh: &dh, both: &both, p });
        vec![Output::download(b, "h", &h), Output::download(b, "dboth", &dboth)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for (length, limit) in [(0, 7.0), (1, 7.0), (33, 0.25), (1025, 1.5), (7919, 7.0)] {
            visitor.case(&ClampedSwigluCase { length, limit, kind });
        }
    }
}
