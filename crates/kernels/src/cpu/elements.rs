//! Parallel elementwise ops: contiguous ranges of elements, in whole cache lines.

use super::pool::SharedMut;
use crate::Cpu;
use isobit_numerics::lanes::LANES;
use std::ops::Range;

/// Below this many elements a second thread is not worth waking.
pub(super) const GRAIN: usize = 1024;

/// Passes each thread a range of `y` and its elements.
pub(super) fn split<T: Send>(cpu: &Cpu, y: &mut [T], job: impl Fn(Range<usize>, &mut [T]) + Sync) {
    let length = y.len();
    let y = SharedMut::new(y);
    cpu.pool.run_ranges(length, GRAIN, |range| {
        // SAFETY: ranges of different threads do not overlap.
        let part = unsafe { y.slice(range.clone()) };
        job(range, part);
    });
}

/// `y[i] = f(inputs at i)`. Lane blocks go through local arrays, so inputs and outputs cannot alias
/// and the compiler vectorizes without runtime checks.
#[inline(always)]
pub(super) fn map<const N: usize>(y: &mut [f32], inputs: [&[f32]; N], f: impl Fn([f32; N]) -> f32) {
    let inputs = inputs.map(|input| &input[..y.len()]);
    let whole = y.len() / LANES * LANES;
    for (index, y) in y[..whole].as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let blocks = inputs.map(|input| input.as_chunks::<LANES>().0[index]);
        let mut out = [0.0; LANES];
        for lane in 0..LANES {
            out[lane] = f(std::array::from_fn(|input| blocks[input][lane]));
        }
        *y = out;
    }
    for index in whole..y.len() {
        y[index] = f(std::array::from_fn(|input| inputs[input][index]));
    }
}
