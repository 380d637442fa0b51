//! Load balance: rows of data with empty ones, rows longer than a block, few and many experts.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{BalanceBackward, BalanceForward};

#[derive(Debug)]
struct BalanceCase {
    row_starts: Vec<usize>,
    experts: usize,
    kind: Distribution,
}

impl Case for BalanceCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let (rows, experts) = (self.row_starts.len() - 1, self.experts);
        let tokens = self.row_starts[rows];
        let mut random = Random::new((tokens + experts) as u64);
        let logits = b.upload(&random.f32s(self.kind, tokens * experts));
        let share = b.upload(&random.f32s(self.kind, rows * experts));
        let mut sums = poisoned(b, rows * experts);
        b.run(BalanceForward { sums: &mut sums, logits: &logits, row_starts: &self.row_starts, experts });
        let mut dlogits = b.upload(&random.f32s(Distribution::Plain, tokens * experts));
        b.run(BalanceBackward {
            dlogits: &mut dlogits,
            share: &share,
            logits: &logits,
            row_starts: &self.row_starts,
            experts,
        });
        vec![Output::download(b, "sums", &sums), Output::download(b, "dlogits", &dlogits)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    let case = |row_starts: &[usize], experts, kind| BalanceCase { row_starts: row_starts.to_vec(), experts, kind };
    visitor.case(&case(&[0, 1], 1, Distribution::Plain));
    visitor.case(&case(&[0, 0], 5, Distribution::Plain));
    visitor.case(&case(&[0, 300], 33, Distribution::Plain));
    visitor.case(&case(&[0, 9, 9, 138, 138], 128, Distribution::Plain));
    visitor.case(&case(&[0, 5], 1024, Distribution::Outliers));
    visitor.case(&case(&[0, 3, 4, 7, 11, 12, 20, 21], 300, Distribution::Outliers));
    for kind in Distribution::ALL {
        visitor.case(&case(&[0, 128, 257], 37, kind));
    }
}
