//! SwiGLU, forward and backward, elementwise.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, downloaded, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{SwigluBackward, SwigluForward, SwigluPairsBackward, SwigluPairsForward};

#[derive(Debug)]
struct SwigluCase {
    length: usize,
    kind: Distribution,
}

impl Case for SwigluCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let mut random = Random::new(self.length as u64);
        let host = [(); 3].map(|()| random.f32s(self.kind, self.length));
        let [gate, up, dh] = host.each_ref().map(|x| b.upload(x));
        let [mut h, mut dgate, mut dup] = [(); 3].map(|()| poisoned(b, self.length));
        b.run(SwigluForward { h: &mut h, gate: &gate, up: &up });
        b.run(SwigluBackward { dgate: &mut dgate, dup: &mut dup, dh: &dh, gate: &gate, up: &up });
        let outputs =
            vec![Output::download(b, "h", &h), Output::download(b, "dgate", &dgate), Output::download(b, "dup", &dup)];
        assert_eq!(self.pairs(b, &host), outputs, "pairs side by side equal gate and up apart");
        outputs
    }
}

impl SwigluCase {
    /// The same with gate and up side by side in a few rows.
    fn pairs<B: Backend>(&self, b: &B, [gate, up, dh]: &[Vec<f32>; 3]) -> Vec<Output> {
        let rows = [5, 3, 1].into_iter().find(|rows| self.length.is_multiple_of(*rows)).expect("one row always does");
        let width = self.length / rows;
        let joined: Vec<f32> =
            (0..rows).flat_map(|row| [gate, up].map(|x| &x[row * width..][..width])).flatten().copied().collect();
        let (both, dh) = (b.upload(&joined), b.upload(dh));
        let (mut h, mut dboth) = (poisoned(b, self.length), poisoned(b, 2 * self.length));
        b.run(SwigluPairsForward { h: &mut h, both: &both, width });
        b.run(SwigluPairsBackward { dboth: &mut dboth, dh: &dh, both: &both, width });
        let dboth = downloaded(b, &dboth);
        let half = |offset: usize| -> Vec<f32> {
            (0..rows).flat_map(|row| &dboth[(2 * row + offset) * width..][..width]).copied().collect()
        };
        vec![Output::download(b, "h", &h), Output::new("dgate", &half(0)), Output::new("dup", &half(1))]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for length in [0, 1, 33, 1025, 7919] {
            visitor.case(&SwigluCase { length, kind });
        }
    }
}
