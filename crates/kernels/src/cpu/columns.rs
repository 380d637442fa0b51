//! Column copies (`op/columns.rs`); parallel over tokens.

use super::CpuMemory;
use super::path::multiversion;
use crate::backend::{Checked, Run};
use crate::op::{ColumnMode, Columns, CopyColumns};
use crate::{Buffer, Cpu};

impl Run<CopyColumns<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut CopyColumns<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let CopyColumns { y, x, p } = op;
        if p.groups == 0 || p.width == 0 {
            return;
        }
        self.pool.run_rows(y, p.to.row, |tokens, y| {
            let x = &x[tokens.start * p.from.row..tokens.end * p.from.row];
            if p.mode == ColumnMode::Overwrite && !p.gathers() { copy(y, x, p) } else { add(self.path, y, x, p) }
        });
    }
}

fn copy(y: &mut [f32], x: &[f32], p: &Columns) {
    for (y, x) in y.chunks_exact_mut(p.to.row).zip(x.chunks_exact(p.from.row)) {
        for g in 0..p.groups {
            let from = &x[p.from.offset + g * p.from.stride..][..p.width];
            y[p.to.offset + g * p.to.stride..][..p.width].copy_from_slice(from);
        }
    }
}

multiversion! {
    fn add<_F>(y: &mut [f32], x: &[f32], p: &Columns) {
        for (y, x) in y.chunks_exact_mut(p.to.row).zip(x.chunks_exact(p.from.row)) {
            for g in 0..p.groups {
                let from = &x[p.from.offset + g * p.from.stride..][..p.width];
                let to = &mut y[p.to.offset + g * p.to.stride..][..p.width];
                if g == 0 && p.mode == ColumnMode::Overwrite {
                    to.copy_from_slice(from);
                    continue;
                }
                for (to, from) in to.iter_mut().zip(from) {
                    *to += from;
                }
            }
        }
    }
}
