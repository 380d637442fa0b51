//! Rotary embedding: whole and partial rotation, halves and neighbours, positions out of order.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor};
use isobit_kernels::Backend;
use isobit_kernels::op::{Rope, RopeBackward, RopeForward};

#[derive(Debug)]
struct RopeCase {
    shape: Rope,
    kind: Distribution,
}

impl Case for RopeCase {
    fn name(&self) -> String {
        let Rope { tokens, heads, head_width, rotary_width, offset, interleaved } = self.shape;
        if offset > 0 || interleaved {
            return format!("{self:?}");
        }
        // Their names in the golden file are older than the two parameters.
        let widths = format!("head_width: {head_width}, rotary_width: {rotary_width}");
        format!("RopeCase {{ shape: Rope {{ tokens: {tokens}, heads: {heads}, {widths} }}, kind: {:?} }}", self.kind)
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        const POSITIONS: usize = 19;
        let p = self.shape;
        let length = p.tokens * p.heads * p.head_width;
        let mut random = Random::new(length as u64);
        // The op does not require cosine and sine to belong to one angle.
        let [cos, sin] = [(); 2].map(|()| b.upload(&random.f32s(self.kind, POSITIONS * p.rotary_width / 2)));
        let positions: Vec<u32> = (0..p.tokens).map(|_| random.below(POSITIONS) as u32).collect();
        let positions = b.upload(&positions);
        let [mut x, mut dx] = [(); 2].map(|()| b.upload(&random.f32s(self.kind, length)));
        b.run(RopeForward { x: &mut x, cos: &cos, sin: &sin, positions: &positions, p });
        b.run(RopeBackward { dx: &mut dx, cos: &cos, sin: &sin, positions: &positions, p });
        vec![Output::download(b, "x", &x), Output::download(b, "dx", &dx)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for (tokens, heads, head_width, rotary_width) in
            [(1, 1, 2, 2), (5, 3, 64, 64), (17, 2, 66, 66), (9, 2, 80, 32), (3, 7, 5, 4), (4, 1, 3, 0), (129, 1, 6, 6)]
        {
            let shape = Rope { tokens, heads, head_width, rotary_width, offset: 0, interleaved: false };
            visitor.case(&RopeCase { shape, kind });
        }
        for (tokens, heads, head_width, rotary_width, offset, interleaved) in [
            (1, 1, 2, 2, 0, true),
            (5, 3, 24, 8, 16, true),
            (4, 2, 192, 64, 128, true),
            (3, 7, 11, 6, 5, true),
            (17, 1, 70, 66, 3, true),
            (5, 3, 24, 8, 16, false),
            (129, 2, 9, 6, 2, false),
            (4, 1, 3, 0, 3, false),
        ] {
            let shape = Rope { tokens, heads, head_width, rotary_width, offset, interleaved };
            visitor.case(&RopeCase { shape, kind });
        }
    }
}
