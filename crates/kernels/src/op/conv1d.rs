//! Causal depthwise convolution with SiLU (`docs/numerics.md`, "Causal convolution").
//!
//! `x`, `y` are `[tokens, channels]`, `weight` is `[channels, kernel]`. Documents are given by
//! `starts`, ascending offsets into the tokens, ending with the total; the window never crosses a
//! document's start. With `K = kernel`:
//!
//! Forward: `c[t] = +0`, then `c = fma(w[j], x[t − (K−1) + j], c)` for `j` ascending over the taps
//! inside the document; `y = silu(c)`. `history[documents, K−1, channels]`, if given, holds the
//! inputs before each document's first token, the latest last, and all taps are used. Leading rows
//! of zeros change nothing, so a partial history is padded with them.
//!
//! Backward, without history: `dc[t] = dy[t]·silu_grad(c[t])`, `c` recomputed; `dx[t] = +0`, then
//! `dx = fma(w[K−1−(t'−t)], dc[t'], dx)` for `t' = t, t+1, …` up to `t+K−1` or the document's end;
//! `dweight[j]` accumulates the sum over tokens with the step
//! `s = fma(dc[t], x[t − (K−1) + j], s)`, skipped for taps outside the document.

use crate::backend::{F32, Length, Memory};
use crate::op::{Op, Output, end, lengths};

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

    /// Panics on unsupported parameters.
    pub fn check(&self) {
        assert!((1..=KERNEL_MAX).contains(&self.kernel), "kernel {} is outside 1..={KERNEL_MAX}", self.kernel);
        assert!(self.starts.first() == Some(&0) && self.starts.is_sorted(), "starts of documents ascend from 0");
    }
}

/// `y = silu(conv(x))`.
pub struct Conv1dForward<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub x: &'a F32<M>,
    pub weight: &'a F32<M>,
    /// `kernel − 1` inputs before each document, for decoding.
    pub history: Option<&'a F32<M>>,
    pub p: Conv1d<'a>,
}

impl<M: Memory> Op<M> for Conv1dForward<'_, M> {
    const NAME: &'static str = "conv1d_forward";

    fn check(&self) {
        let p = &self.p;
        p.check();
        let length = p.tokens() * p.channels;
        lengths(
            Self::NAME,
            &[
                ("y", self.y.len(), length),
                ("x", self.x.len(), length),
                ("weight", self.weight.len(), p.channels * p.kernel),
            ],
        );
        if let Some(history) = self.history {
            lengths(Self::NAME, &[("history", history.len(), p.history())]);
        }
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}

/// `dx`, and `dweight` if requested.
pub struct Conv1dBackward<'a, M: Memory> {
    pub dx: &'a mut F32<M>,
    pub dweight: Option<&'a mut F32<M>>,
    pub dy: &'a F32<M>,
    pub x: &'a F32<M>,
    pub weight: &'a F32<M>,
    pub p: Conv1d<'a>,
    pub row_starts: &'a [usize],
}

impl<M: Memory> Op<M> for Conv1dBackward<'_, M> {
    const NAME: &'static str = "conv1d_backward";

    fn check(&self) {
        let p = &self.p;
        p.check();
        let length = p.tokens() * p.channels;
        lengths(
            Self::NAME,
            &[
                ("dx", self.dx.len(), length),
                ("dy", self.dy.len(), length),
                ("x", self.x.len(), length),
                ("weight", self.weight.len(), p.channels * p.kernel),
            ],
        );
        if let Some(dweight) = &self.dweight {
            lengths(
                Self::NAME,
                &[("dweight", dweight.len(), self.weight.len()), ("row_starts", end(self.row_starts), p.tokens())],
            );
        }
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        let mut outputs = vec![Output::F32(self.dx)];
        outputs.extend(self.dweight.as_deref_mut().map(Output::F32));
        outputs
    }
}
