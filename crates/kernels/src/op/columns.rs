//! Column copies (`docs/numerics.md`, "Column copies"): they split and join activation matrices.
//!
//! For every token `t`, group `g`, column `j < width`, the element
//! `x[t·from.row + from.offset + g·from.stride + j]` goes to
//! `y[t·to.row + to.offset + g·to.stride + j]`, overwriting or adding. `from.stride = 0` broadcasts
//! one block of columns to all groups. `to.stride = 0` gathers: the groups are added up in
//! ascending order, from the first one's value or, when adding, from what `y` holds; this is the
//! gradient of the broadcast. All other elements of `y` are unchanged.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output};

/// Layout of the columns within a token of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Elements per token.
    pub row: usize,
    /// The first group's first element.
    pub offset: usize,
    /// Distance between groups; 0 means the same columns for all groups.
    pub stride: usize,
}

impl Place {
    /// Columns `offset ..` of a matrix, with consecutive groups.
    pub fn dense(row: usize, offset: usize, width: usize) -> Self {
        Self { row, offset, stride: width }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnMode {
    Overwrite,
    Add,
}

/// Which columns go where. Rows of a buffer may also be moved as the groups of a single token whose
/// `row` is the whole buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns {
    pub tokens: usize,
    pub groups: usize,
    pub width: usize,
    pub from: Place,
    pub to: Place,
    pub mode: ColumnMode,
}

impl Columns {
    /// Whether several groups are added into the same columns.
    pub fn gathers(&self) -> bool {
        self.to.stride == 0 && self.groups > 1
    }

    /// Panics on unsupported parameters.
    pub fn check(&self, y: usize, x: usize) {
        assert_eq!([y, x], [self.tokens * self.to.row, self.tokens * self.from.row], "elements of all tokens");
        if self.groups == 0 || self.width == 0 {
            return;
        }
        for place in [self.from, self.to] {
            let end = place.offset + (self.groups - 1) * place.stride + self.width;
            assert!(end <= place.row, "columns up to {end} of a token of {}", place.row);
        }
        let apart = self.groups == 1 || self.to.stride == 0 || self.to.stride >= self.width;
        assert!(apart, "groups of {} columns, {} apart, overlap", self.width, self.to.stride);
    }
}

/// Copies or adds columns; other elements of `y` are unchanged.
pub struct CopyColumns<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub x: &'a F32<M>,
    pub p: Columns,
}

impl<M: Memory> Op<M> for CopyColumns<'_, M> {
    const NAME: &'static str = "columns";

    fn check(&self) {
        self.p.check(self.y.len(), self.x.len());
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}
