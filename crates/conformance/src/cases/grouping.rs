//! Grouping: rows of data with empty ones, longer than a block, experts that nobody chose, one
//! expert for all, more pairs and experts than a group takes at once.

use crate::data::Random;
use crate::{Case, Output, Visitor};
use isobit_kernels::Backend;
use isobit_kernels::op::GroupRows;

#[derive(Debug)]
struct GroupingCase {
    row_starts: Vec<usize>,
    slots: usize,
    experts: usize,
    /// Experts that are chosen, the last ones.
    chosen: usize,
}

impl Case for GroupingCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let Self { row_starts, slots, experts, chosen } = self;
        let (slots, experts, rows) = (*slots, *experts, row_starts.len() - 1);
        let pairs = row_starts[rows] * slots;
        let mut random = Random::new((pairs + experts) as u64);
        let index = |_| (experts - chosen) as u32 + random.below(*chosen) as u32;
        let indices: Vec<u32> = (0..pairs).map(index).collect();
        let [mut tokens, mut places] = [(); 2].map(|()| b.upload(&vec![u32::MAX; pairs]));
        let mut counts = b.upload(&vec![u32::MAX; rows * experts]);
        b.run(GroupRows {
            tokens: &mut tokens,
            places: &mut places,
            counts: &mut counts,
            indices: &b.upload(&indices),
            row_starts,
            slots,
            experts,
        });
        [("tokens", &tokens), ("places", &places), ("counts", &counts)]
            .map(|(name, buffer)| Output::download(b, name, buffer))
            .into()
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    let case = |row_starts: &[usize], slots, experts, chosen| GroupingCase {
        row_starts: row_starts.to_vec(),
        slots,
        experts,
        chosen,
    };
    visitor.case(&case(&[0, 1], 1, 1, 1));
    visitor.case(&case(&[0, 0], 4, 5, 5));
    visitor.case(&case(&[0, 300], 8, 33, 20));
    visitor.case(&case(&[0, 9, 9, 138, 138], 2, 128, 128));
    visitor.case(&case(&[0, 1500], 1, 6, 1));
    visitor.case(&case(&[0, 5, 70], 64, 1024, 1024));
    visitor.case(&case(&[0, 3, 4, 7, 11, 12, 20, 21], 3, 300, 7));
}
