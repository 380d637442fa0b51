//! Causal depthwise convolution with SiLU (`docs/numerics.md`, "Causal convolution").
//!
//! `x`, `y` are `[tokens, channels]`, `weight` is `[channels, kernel]`. Documents are given by `starts`, ascending offsets into the tokens with
//! the end as last; the window never reaches over a document's start. With `K = kernel`:
//!
//! Forward: `c[t] = +0`, then `c = fma(w[j], x[t − (K−1) + j], c)` for `j` ascending over the taps inside the document; `y = silu(c)`.
//! `history[documents, K−1, channels]`, if given, holds the inputs before each document's first token, the latest last, and all taps are there.
//! Rows of zeros at its front change nothing, so a history that is not full yet is filled up with them.
//!
//! Backward, without history: `dc[t] = dy[t]·silu_grad(c[t])`, `c` computed anew; `dx[t] = +0`, then
//! `dx = fma(w[K−1−(t'−t)], dc[t'], dx)` for `t' = t, t+1, …` up to `t+K−1` or the document's end; `dweight[j]` gets the sum over tokens
//! with the step `s = fma(dc[t], x[t − (K−1) + j], s)`, left out where the tap is.

/// Longest window.
pub const KERNEL_MAX: usize = 8;

#[derive(Clone, Copy, Debug)]
pub struct Conv1d<'a> {
    pub channels: usize,
    pub kernel: usize,
    pub starts: &'a [usize],
}

impl Conv1d<'_> {
    pub fn tokens(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    pub fn documents(&self) -> usize {
        self.starts.len() - 1
    }

    /// Elements of a history.
    pub fn history(&self) -> usize {
        self.documents() * (self.kernel - 1) * self.channels
    }

    /// Panics on parameters that no implementation takes.
    pub fn check(&self) {
        assert!((1..=KERNEL_MAX).contains(&self.kernel), "kernel {} is outside 1..={KERNEL_MAX}", self.kernel);
        assert!(self.starts.first() == Some(&0) && self.starts.is_sorted(), "starts of documents ascend from 0");
    }
}
