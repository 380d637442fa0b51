//! Thin products: contract, expand and outer, both layouts, ranks around the tile sizes, rows of data with empty ones.

use crate::data::{Kind, Random};
use crate::{Case, Output, Visitor, poisoned, workspace};
use isobit_kernels::Backend;
use isobit_kernels::op::{Layout, Thin};

#[derive(Debug)]
struct ThinCase {
    row_starts: Vec<usize>,
    rank: usize,
    width: usize,
    layout: Layout,
    alpha: f32,
    kind: Kind,
}

impl Case for ThinCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let (rank, width) = (self.rank, self.width);
        let tokens = self.row_starts[self.row_starts.len() - 1];
        let p = Thin { segments: &[0, tokens], rank, width, layout: self.layout, alpha: self.alpha };
        let mut random = Random::new(tokens as u64);
        let x = b.upload(&random.f32s(self.kind, tokens * width));
        let u = b.upload(&random.f32s(self.kind, tokens * rank));
        let factor = b.upload(&random.f32s(self.kind, rank * width));
        let mut contracted = poisoned(b, tokens * rank);
        let mut room = workspace(b, b.thin_workspace(&p));
        b.thin_contract(&mut contracted, &x, &factor, &p, &mut room);
        let mut y = b.upload(&random.f32s(Kind::Plain, tokens * width));
        b.thin_expand(&mut y, &u, &factor, &p, &mut room);
        let mut dfactor = b.upload(&random.f32s(Kind::Plain, rank * width));
        b.thin_outer(&mut dfactor, &u, &x, &p, &self.row_starts);
        vec![
            Output::download(b, "u", &contracted),
            Output::download(b, "y", &y),
            Output::download(b, "dfactor", &dfactor),
        ]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for layout in [Layout::RankMajor, Layout::WidthMajor] {
        let case = |row_starts: &[usize], rank, width, kind| ThinCase {
            row_starts: row_starts.to_vec(),
            rank,
            width,
            layout,
            alpha: 0.37,
            kind,
        };
        visitor.case(&case(&[0, 1], 1, 1, Kind::Plain));
        visitor.case(&case(&[0, 7], 3, 33, Kind::Plain));
        visitor.case(&case(&[0, 0, 2, 2, 29], 8, 65, Kind::Outliers));
        visitor.case(&case(&[0, 13], 16, 128, Kind::Plain));
        visitor.case(&case(&[0, 5, 5], 17, 131, Kind::Outliers));
        visitor.case(&case(&[0, 3], 64, 193, Kind::Plain));
        visitor.case(&case(&[0, 129, 387], 5, 37, Kind::Outliers));
        for kind in Kind::ALL {
            visitor.case(&case(&[0, 4, 11], 9, 71, kind));
        }
    }
}
