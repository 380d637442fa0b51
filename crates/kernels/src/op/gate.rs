//! Sigmoid gates (`docs/numerics.md`, "Gates"): of attention outputs, element by element, and of a shared expert, one per token.
//!
//! Forward: `y = x·s` with `s = sigmoid(g)`. Backward: `dx = dy·s` and `dg = (dy·x)·(s·(1 − s))`; with one gate per token
//! `dg = D·(s·(1 − s))`, where `D` is the lane sum over the width of `fma(dy, x, ·)`. Every operation is rounded; `s` is
//! computed anew in the backward pass.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gate {
    pub tokens: usize,
    pub width: usize,
    /// `g` is `[tokens]` instead of `[tokens, width]`.
    pub per_token: bool,
}

impl Gate {
    /// Elements of `g`.
    pub fn gates(&self) -> usize {
        if self.per_token { self.tokens } else { self.tokens * self.width }
    }
}
