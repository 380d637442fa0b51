//! Column copies: the splits and joins of model layers, sums over groups, copies inside wider rows.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor};
use isobit_kernels::Backend;
use isobit_kernels::op::{ColumnMode, Columns, CopyColumns, Place};

#[derive(Debug)]
struct ColumnCopyCase {
    shape: Columns,
    kind: Distribution,
}

impl Case for ColumnCopyCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let p = self.shape;
        let mut random = Random::new((p.tokens * p.from.row) as u64);
        let x = b.upload(&random.f32s(self.kind, p.tokens * p.from.row));
        // Values outside the columns must not change.
        let mut y = b.upload(&random.f32s(self.kind, p.tokens * p.to.row));
        b.run(CopyColumns { y: &mut y, x: &x, p });
        vec![Output::download(b, "y", &y)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    let place = |row, offset, stride| Place { row, offset, stride };
    // Tokens, groups, width, from, to.
    let shapes = [
        // The gate of each head: heads of query and gate.
        (5, 3, 7, place(42, 7, 14), place(21, 0, 7)),
        // One block of columns out of several, and into several.
        (9, 1, 33, place(71, 21, 0), place(33, 0, 0)),
        (9, 1, 33, place(33, 0, 0), place(71, 38, 0)),
        // One head broadcast to all, and the sum over heads that is its gradient.
        (6, 4, 8, place(24, 16, 0), place(96, 16, 24)),
        (6, 4, 8, place(96, 16, 24), place(24, 16, 0)),
        (3, 5, 300, place(1501, 1, 300), place(301, 0, 0)),
        // From a sum to a sum over the same columns.
        (2, 3, 5, place(5, 0, 0), place(6, 1, 0)),
        // Single numbers, and 1 000 groups of them.
        (4, 3, 1, place(12, 2, 4), place(3, 0, 1)),
        (2, 1000, 1, place(2001, 1, 2), place(1000, 0, 1)),
        // Rows of a buffer as groups of one token.
        (1, 3, 40, place(200, 80, 40), place(160, 40, 40)),
        // Groups that overlap in the source.
        (3, 4, 6, place(12, 0, 2), place(24, 0, 6)),
        (0, 2, 3, place(6, 0, 3), place(6, 0, 3)),
        (2, 0, 3, place(6, 0, 3), place(6, 0, 3)),
        (2, 2, 0, place(6, 6, 0), place(6, 6, 0)),
    ];
    for kind in Distribution::ALL {
        for mode in [ColumnMode::Overwrite, ColumnMode::Add] {
            for (tokens, groups, width, from, to) in shapes {
                visitor.case(&ColumnCopyCase { shape: Columns { tokens, groups, width, from, to, mode }, kind });
            }
        }
    }
}
