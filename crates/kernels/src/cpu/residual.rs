//! Residual addition and scaling (`op/residual.rs`): one pass over memory.

use super::elements;
use super::path::multiversion;
use crate::Cpu;

pub(super) fn add(cpu: &Cpu, y: &mut [f32], a: &[f32], b: &[f32]) {
    assert_eq!((a.len(), b.len()), (y.len(), y.len()), "summands");
    elements::split(cpu, y, |range, y| add_part(cpu.path, y, &a[range.clone()], &b[range]));
}

pub(super) fn scale(cpu: &Cpu, x: &mut [f32], factor: f32) {
    elements::split(cpu, x, |_, x| scale_part(cpu.path, x, factor));
}

multiversion! {
    fn add_part<_F>(y: &mut [f32], a: &[f32], b: &[f32]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = a + b;
        }
    }
}

multiversion! {
    fn scale_part<_F>(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }
}
