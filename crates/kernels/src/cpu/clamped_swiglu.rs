//! Clamped SwiGLU (`op/clamped_swiglu.rs`). The function is branch-free, so loops over lanes are
//! vectorized.

use super::CpuMemory;
use super::elements::{self, GRAIN};
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::{ClampedSwigluBackward, ClampedSwigluForward};
use crate::{Buffer, Cpu};
use isobit_numerics::elementary::ClampedSwiglu;
use isobit_numerics::lanes::LANES;

/// Gates and ups of a block of lanes.
const PAIRS: usize = 2 * LANES;

impl Run<ClampedSwigluForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut ClampedSwigluForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let ClampedSwigluForward { h, both, p } = op;
        elements::split(self, h, |range, h| forward_part(self.path, h, &both[2 * range.start..2 * range.end], *p));
    }
}

impl Run<ClampedSwigluBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut ClampedSwigluBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let ClampedSwigluBackward { dboth, dh, both, p } = op;
        let length = dh.len();
        let dboth = SharedMut::new(dboth);
        self.pool.run_ranges(length, GRAIN, |range| {
            let pairs = 2 * range.start..2 * range.end;
            // SAFETY: ranges of different threads do not overlap.
            let dboth = unsafe { dboth.slice(pairs.clone()) };
            backward_part(self.path, dboth, &dh[range], &both[pairs], *p);
        });
    }
}

multiversion! {
    fn forward_part<F>(h: &mut [f32], both: &[f32], p: ClampedSwiglu) {
        let whole = h.len() / LANES * LANES;
        let blocks = h[..whole].as_chunks_mut::<LANES>().0.iter_mut().zip(both.as_chunks::<PAIRS>().0);
        for (h, both) in blocks {
            let (gate, up) = parted(both);
            let mut block = [0.0; LANES];
            for lane in 0..LANES {
                block[lane] = p.apply::<F>(gate[lane], up[lane]);
            }
            *h = block;
        }
        for index in whole..h.len() {
            h[index] = p.apply::<F>(both[2 * index], both[2 * index + 1]);
        }
    }
}

multiversion! {
    fn backward_part<F>(dboth: &mut [f32], dh: &[f32], both: &[f32], p: ClampedSwiglu) {
        let whole = dh.len() / LANES * LANES;
        let inputs = dh.as_chunks::<LANES>().0.iter().zip(both.as_chunks::<PAIRS>().0);
        for (dboth, (dh, both)) in dboth.as_chunks_mut::<PAIRS>().0.iter_mut().zip(inputs) {
            let (gate, up) = parted(both);
            let (mut gates, mut ups) = ([0.0; LANES], [0.0; LANES]);
            for lane in 0..LANES {
                (gates[lane], ups[lane]) = p.gradients::<F>(dh[lane], gate[lane], up[lane]);
            }
            for lane in 0..LANES {
                (dboth[2 * lane], dboth[2 * lane + 1]) = (gates[lane], ups[lane]);
            }
        }
        for index in whole..dh.len() {
            let (dgate, dup) = p.gradients::<F>(dh[index], both[2 * index], both[2 * index + 1]);
            (dboth[2 * index], dboth[2 * index + 1]) = (dgate, dup);
        }
    }
}

/// Gates and ups of a block, in local arrays: the loop after it works on whole vectors.
#[inline(always)]
fn parted(both: &[f32; PAIRS]) -> ([f32; LANES], [f32; LANES]) {
    (std::array::from_fn(|lane| both[2 * lane]), std::array::from_fn(|lane| both[2 * lane + 1]))
}
