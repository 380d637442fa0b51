//! L2 norm of heads, scaled and unscaled, widths around the 32 lanes.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{L2Norm, L2NormBackward, L2NormForward};

#[derive(Debug)]
struct L2NormCase {
    tokens: usize,
    width: usize,
    scaled: bool,
    kind: Distribution,
}

impl Case for L2NormCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let (tokens, width) = (self.tokens, self.width);
        let factor = if self.scaled { 1.0 / (width as f32).sqrt() } else { 1.0 };
        let p = L2Norm { tokens, width, eps: 1e-6, factor };
        let mut random = Random::new((tokens * width) as u64);
        let [x, dy] = [(); 2].map(|()| b.upload(&random.f32s(self.kind, tokens * width)));
        let ([mut y, mut dx], mut inverse) = ([(); 2].map(|()| poisoned(b, tokens * width)), poisoned(b, tokens));
        b.run(L2NormForward { y: &mut y, inverse: &mut inverse, x: &x, p });
        b.run(L2NormBackward { dx: &mut dx, dy: &dy, x: &x, inverse: &inverse, p });
        vec![Output::download(b, "y", &y), Output::download(b, "inverse", &inverse), Output::download(b, "dx", &dx)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for scaled in [false, true] {
            for (tokens, width) in [(0, 4), (1, 1), (5, 31), (17, 128), (9, 33), (3, 517)] {
                visitor.case(&L2NormCase { tokens, width, scaled, kind });
            }
        }
    }
}
