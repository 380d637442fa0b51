//! Combine (`docs/numerics.md`, "Combine"): the rows that a token's experts made become the token's output.
//!
//! `places[t, j]` is the row of the grouped matrix that belongs to slot `j` of token `t`; each row belongs to one pair. Forward: a chain over
//! slots, `acc = fma(weight[t, j], row, acc)`, or `acc = acc + row` without weights, which is also the backward pass of gathering
//! tokens into grouped rows. Backward: `drow = weight·dy`, and `dweight` is the lane sum of `fma(dy, row, ·)`.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Combine {
    pub tokens: usize,
    pub slots: usize,
    pub width: usize,
    /// Forward only: start from what the output holds.
    pub accumulate: bool,
}

impl Combine {
    /// Rows of the grouped matrix.
    pub fn rows(&self) -> usize {
        self.tokens * self.slots
    }
}
