//! Causal convolution, the definition (`docs/numerics.md`, "Causal convolution").

use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::{Conv1d, Conv1dBackward, Conv1dForward, TOKEN_BLOCK, token_blocks};
use isobit_numerics::SoftFma;
use isobit_numerics::elementary::{silu, silu_grad};
use isobit_numerics::fma::fma;

impl Run<Conv1dForward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut Conv1dForward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let Conv1dForward { y, x, weight, history, p } = op;
        let before = (p.kernel - 1) * p.channels;
        for (document, ends) in p.starts.windows(2).enumerate() {
            let history = history.map(|history| &history[document * before..][..before]);
            for t in ends[0]..ends[1] {
                for channel in 0..p.channels {
                    y[t * p.channels + channel] = silu::<SoftFma>(window(x, weight, history, ends[0], t, channel, p));
                }
            }
        }
    }
}

/// The sum over the taps of token `t`, whose document begins at `start`.
fn window(
    x: &[f32],
    weight: &[f32],
    history: Option<&[f32]>,
    start: usize,
    t: usize,
    channel: usize,
    p: &Conv1d,
) -> f32 {
    let mut acc = 0.0;
    for j in 0..p.kernel {
        let tap = if t + j + 1 >= start + p.kernel {
            x[(t + j + 1 - p.kernel) * p.channels + channel]
        } else if let Some(history) = history {
            history[(t + j - start) * p.channels + channel]
        } else {
            continue;
        };
        acc = fma(weight[channel * p.kernel + j], tap, acc);
    }
    acc
}

impl Run<Conv1dBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut Conv1dBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let Conv1dBackward { dx, dweight, dy, x, weight, p, row_starts } = op;
        // The gradient of the sums, and the first token of each token's document.
        let mut dc = vec![0.0; dy.len()];
        let mut start_of = vec![0; p.tokens()];
        for ends in p.starts.windows(2) {
            for t in ends[0]..ends[1] {
                start_of[t] = ends[0];
                for channel in 0..p.channels {
                    let c = window(x, weight, None, ends[0], t, channel, p);
                    dc[t * p.channels + channel] = dy[t * p.channels + channel] * silu_grad::<SoftFma>(c);
                }
            }
        }
        for ends in p.starts.windows(2) {
            for t in ends[0]..ends[1] {
                for channel in 0..p.channels {
                    let mut acc = 0.0;
                    for later in t..(t + p.kernel).min(ends[1]) {
                        let j = p.kernel - 1 - (later - t);
                        acc = fma(weight[channel * p.kernel + j], dc[later * p.channels + channel], acc);
                    }
                    dx[t * p.channels + channel] = acc;
                }
            }
        }
        let Some(dweight) = dweight else { return };
        for block in token_blocks(row_starts, TOKEN_BLOCK) {
            for channel in 0..p.channels {
                for j in 0..p.kernel {
                    let mut acc = 0.0;
                    for t in block.clone().filter(|t| t + j + 1 >= start_of[*t] + p.kernel) {
                        acc = fma(dc[t * p.channels + channel], x[(t + j + 1 - p.kernel) * p.channels + channel], acc);
                    }
                    dweight[channel * p.kernel + j] += acc;
                }
            }
        }
    }
}
