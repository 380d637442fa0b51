//! Combine and gather: tokens routed to experts and back, with and without weights, overwriting and
//! accumulating.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::op::{Combine, CombineBackward, CombineForward, EmbeddingForward, router};
use isobit_kernels::{Backend, StoredMatrix};

#[derive(Debug)]
struct CombineCase {
    tokens: usize,
    slots: usize,
    width: usize,
    /// Each pair goes to one of this many experts.
    experts: usize,
    kind: Distribution,
}

impl Case for CombineCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let Self { tokens, slots, width, experts, kind } = *self;
        let p = Combine { tokens, slots, width, accumulate: false };
        let mut random = Random::new((tokens + width) as u64);
        let expert_indices: Vec<u32> = (0..p.rows()).map(|_| random.below(experts) as u32).collect();
        let grouped = router::grouped(&expert_indices, slots, experts);
        let places = b.upload(&grouped.places);
        let x = b.upload(&random.f32s(kind, tokens * width));
        let mut gathered = poisoned(b, p.rows() * width);
        let (table, ids) = (StoredMatrix::F32(&x), b.upload(&grouped.tokens));
        b.run(EmbeddingForward { y: &mut gathered, table, ids: &ids, width });
        let mut outputs = vec![Output::download(b, "gathered", &gathered)];
        let rows = b.upload(&random.f32s(kind, p.rows() * width));
        let weights = b.upload(&random.f32s(kind, p.rows()));
        let old = random.f32s(Distribution::Plain, tokens * width);
        for (name, weights) in [("y", Some(&weights)), ("y without weights", None)] {
            for accumulate in [false, true] {
                let mut y = if accumulate { b.upload(&old) } else { poisoned(b, tokens * width) };
                b.run(CombineForward {
                    y: &mut y,
                    rows: &rows,
                    weights,
                    places: &places,
                    p: Combine { accumulate, ..p },
                });
                outputs.push(Output::download(b, name, &y));
            }
        }
        let (mut drows, mut dweights) = (poisoned(b, p.rows() * width), poisoned(b, p.rows()));
        b.run(CombineBackward {
            drows: &mut drows,
            dweights: &mut dweights,
            dy: &x,
            rows: &rows,
            weights: &weights,
            places: &places,
            p,
        });
        outputs.extend([Output::download(b, "drows", &drows), Output::download(b, "dweights", &dweights)]);
        outputs
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    let case = |tokens, slots, width, experts, kind| CombineCase { tokens, slots, width, experts, kind };
    visitor.case(&case(0, 2, 3, 4, Distribution::Plain));
    visitor.case(&case(1, 1, 1, 1, Distribution::Plain));
    visitor.case(&case(37, 8, 129, 16, Distribution::Outliers));
    visitor.case(&case(5, 3, 1030, 2, Distribution::Plain));
    visitor.case(&case(130, 2, 31, 60, Distribution::Outliers));
    for kind in Distribution::ALL {
        visitor.case(&case(23, 4, 65, 7, kind));
    }
}
