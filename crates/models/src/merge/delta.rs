//! `W + alpha·B A` for one matrix, a panel of rows at a time (`docs/numerics.md`, "Merge"): the op
//! that expands a low-rank product, with rows of the matrix as tokens.

use super::PutBoth;
use crate::source::StoredTensor;
use isobit_kernels::op::{FactorLayout, LowRank, LowRankExpand};
use isobit_kernels::{Backend, DeviceFailure};

/// Elements of a panel.
const PANEL: usize = 1 << 22;

/// How a matrix lies in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Orientation {
    /// `[outputs, inputs]`
    Rows,
    /// `[inputs, outputs]`: embedding tables, and experts of some files.
    Columns,
}

/// The factors of an adapter, or of the adapters of all experts of a layer.
pub(crate) struct Factors {
    pub(crate) experts: usize,
    pub(crate) rank: usize,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    pub(crate) scale: f32,
    /// `[experts, rank, inputs]`
    pub(crate) a: Vec<f32>,
    /// `[experts, outputs, rank]`
    pub(crate) b: Vec<f32>,
}

/// The factors of an adapter as other formats hold them.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRankFactors {
    pub experts: usize,
    pub rank: usize,
    pub outputs: usize,
    pub inputs: usize,
    pub scale: f32,
    /// `[experts, rank, inputs]`
    pub a: Vec<f32>,
    /// `[experts, outputs, rank]`
    pub b: Vec<f32>,
}

impl LowRankFactors {
    pub(crate) fn whole(of: &Factors) -> Self {
        let &Factors { experts, rank, outputs, inputs, scale, .. } = of;
        Self { experts, rank, outputs, inputs, scale, a: of.a.clone(), b: of.b.clone() }
    }
}

/// Which rows of B: those of gate, of up, or all. Gate and up are halves, or take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    First,
    Second,
    Even,
    Odd,
    Both,
}

/// The factors of one matrix.
pub(crate) struct FactorsAt<'f> {
    of: &'f Factors,
    a: &'f [f32],
    /// From the matrix's first row on.
    b: &'f [f32],
}

impl Factors {
    /// Those of the matrix that begins at this row of B of an expert.
    pub(crate) fn at(&self, expert: usize, first_row: usize) -> FactorsAt<'_> {
        let (a, b) = (self.rank * self.inputs, self.rank * self.outputs);
        FactorsAt {
            of: self,
            a: &self.a[expert * a..(expert + 1) * a],
            b: &self.b[expert * b + first_row * self.rank..(expert + 1) * b],
        }
    }
}

impl Factors {
    /// The factors of some rows of every expert. In `blocks`, gate and up have halves of the rank
    /// each.
    pub(crate) fn part(&self, half: Half, rows: usize, blocks: bool) -> LowRankFactors {
        if half == Half::Both {
            return LowRankFactors::whole(self);
        }
        let rank = if blocks { self.rank / 2 } else { self.rank };
        let (first_row, first_rank) = match half {
            Half::Second => (rows, if blocks { rank } else { 0 }),
            _ => (0, 0),
        };
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for expert in 0..self.experts {
            let start = (expert * self.rank + first_rank) * self.inputs;
            a.extend_from_slice(&self.a[start..start + rank * self.inputs]);
            for row in 0..rows {
                let row = match half {
                    Half::Even => 2 * row,
                    Half::Odd => 2 * row + 1,
                    _ => first_row + row,
                };
                let start = (expert * self.outputs + row) * self.rank + first_rank;
                b.extend_from_slice(&self.b[start..start + rank]);
            }
        }
        LowRankFactors { experts: self.experts, rank, outputs: rows, inputs: self.inputs, scale: self.scale, a, b }
    }
}

impl FactorsAt<'_> {
    /// Adds the product to a matrix and passes it on, with the matrix as it was.
    pub(crate) fn add<B: Backend, E: From<DeviceFailure>>(
        &self,
        backend: &B,
        orientation: Orientation,
        matrix: &StoredTensor<'_>,
        put: PutBoth<'_, E>,
    ) -> Result<(), E> {
        let &Factors { rank, inputs, scale, .. } = self.of;
        let rows_of = |width: usize| matrix.length() / width.max(1);
        let (width, layout) = match orientation {
            Orientation::Rows => (inputs, FactorLayout::RankMajor),
            Orientation::Columns => (self.b.len() / rank, FactorLayout::WidthMajor),
        };
        let (rows, size) = (rows_of(width), matrix.format.bytes());
        let factor = match orientation {
            Orientation::Rows => backend.upload(self.a),
            Orientation::Columns => backend.upload(self.b),
        };
        let panel = (PANEL / width.max(1)).max(1);
        let mut begin = 0;
        while begin < rows {
            let count = panel.min(rows - begin);
            let bytes = &matrix.bytes[begin * width * size..(begin + count) * width * size];
            let part = StoredTensor { format: matrix.format, shape: vec![count, width], bytes: bytes.into() };
            let u = match orientation {
                Orientation::Rows => self.b[begin * rank..(begin + count) * rank].to_vec(),
                Orientation::Columns => columns(self.a, inputs, begin..begin + count),
            };
            let before = part.to_f32();
            let mut y = backend.upload(&before);
            let segments = [0, count];
            let p = LowRank { segments: &segments, rank, width, layout, alpha: scale };
            backend.run(LowRankExpand { y: &mut y, u: &backend.upload(&u), factor: &factor, p });
            put(&backend.download(&y)?, Some(&before))?;
            begin += count;
        }
        Ok(())
    }
}

/// Some columns of `[rank, width]`, as rows.
fn columns(a: &[f32], width: usize, range: std::ops::Range<usize>) -> Vec<f32> {
    range.flat_map(|column| a.chunks(width).map(move |row| row[column])).collect()
}

/// The numbers of a tensor, some at a time.
pub(crate) fn unchanged<E>(stored: &StoredTensor<'_>, put: &mut dyn FnMut(&[f32]) -> Result<(), E>) -> Result<(), E> {
    stored.bytes.chunks(PANEL * stored.format.bytes()).try_for_each(|bytes| {
        let shape = vec![bytes.len() / stored.format.bytes()];
        put(&StoredTensor { format: stored.format, shape, bytes: bytes.into() }.to_f32())
    })
}
