//! Combine (`op/combine.rs`). Forward is parallel over tokens. Backward is parallel over rows of
//! the grouped matrix, so every row has one owner whatever `places` holds: each thread scans all
//! pairs for those in its range.

use super::CpuMemory;
use super::path::multiversion;
use super::pool::SharedMut;
use crate::backend::{Checked, Run};
use crate::op::{Combine, CombineBackward, CombineForward};
use crate::{Buffer, Cpu};
use isobit_numerics::lanes;

/// Elements of a row kept in registers while all slots are added.
const PIECE: usize = 128;

impl Run<CombineForward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut CombineForward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let CombineForward { y, rows, weights, places, p } = op;
        self.pool.run_rows(y, p.width, |tokens, y| {
            let pairs = tokens.start * p.slots..tokens.end * p.slots;
            forward_rows(self.path, y, rows, weights.map(|weights| &weights[pairs.clone()]), &places[pairs], p);
        });
    }
}

impl Run<CombineBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut CombineBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let CombineBackward { drows, dweights, dy, rows, weights, places, p } = op;
        let dweights = SharedMut::new(dweights);
        self.pool.run_rows(drows, p.width, |owned, drows| {
            for (pair, &place) in places.iter().enumerate() {
                let place = place as usize;
                if owned.contains(&place) {
                    let dy = &dy[pair / p.slots * p.width..][..p.width];
                    // SAFETY: a pair has one place, and that place one owner: this thread.
                    let dweight = unsafe { dweights.slice(pair..pair + 1) };
                    let drow = &mut drows[(place - owned.start) * p.width..][..p.width];
                    dweight[0] = backward_row(self.path, drow, dy, &rows[place * p.width..][..p.width], weights[pair]);
                }
            }
        });
    }
}

multiversion! {
    fn forward_rows<F>(y: &mut [f32], rows: &[f32], weights: Option<&[f32]>, places: &[u32], p: &Combine) {
        for (token, y) in y.chunks_exact_mut(p.width).enumerate() {
            let pairs = token * p.slots..(token + 1) * p.slots;
            for (piece, y) in y.chunks_mut(PIECE).enumerate() {
                let mut acc = [0.0; PIECE];
                let acc = &mut acc[..y.len()];
                if p.accumulate {
                    acc.copy_from_slice(y);
                }
                // ORDER: ascending slots.
                for pair in pairs.clone() {
                    let row = &rows[places[pair] as usize * p.width + piece * PIECE..][..acc.len()];
                    if let Some(weights) = weights {
                        let weight = weights[pair];
                        acc.iter_mut().zip(row).for_each(|(acc, x)| *acc = F::fma(weight, *x, *acc));
                    } else {
                        acc.iter_mut().zip(row).for_each(|(acc, x)| *acc += x);
                    }
                }
                y.copy_from_slice(acc);
            }
        }
    }
}

multiversion! {
    fn backward_row<F>(drow: &mut [f32], dy: &[f32], row: &[f32], weight: f32) -> f32 {
        for (drow, dy) in drow.iter_mut().zip(dy) {
            *drow = weight * dy;
        }
        lanes::dot::<F>(dy, row)
    }
}
