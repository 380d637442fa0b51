//! Sums and maxima of fixed shape: 32 logical lanes and a halving tree, regardless of the machine's
//! vector width.

use crate::Fma;

/// Logical lanes of every reduction. A constant of the arithmetic, not of the hardware.
pub const LANES: usize = 32;

/// One block of lanes.
pub type Lanes = [f32; LANES];

/// Adds the lanes by halves: 16 pairs `(l, l+16)`, then 8, 4, 2, 1.
#[inline(always)]
pub fn tree_sum(mut lanes: Lanes) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Calls `step(lane_accumulator, element_index)` for every index in lane order, blocks of 32 first,
/// then the tail. Lane `l` receives `l, l+32, …` in ascending order; a tail shorter than 32 touches
/// only its own lanes.
#[inline(always)]
pub fn for_lanes(acc: &mut Lanes, length: usize, step: impl Fn(f32, usize) -> f32) {
    let whole = length / LANES * LANES;
    let mut base = 0;
    while base < whole {
        for lane in 0..LANES {
            acc[lane] = step(acc[lane], base + lane);
        }
        base += LANES;
    }
    for lane in 0..length - whole {
        acc[lane] = step(acc[lane], whole + lane);
    }
}

/// `Σ x` over lanes.
#[inline(always)]
pub fn sum(x: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    // The order of `for_lanes`, over arrays, so that no bounds check prevents vectorisation.
    let (blocks, tail) = x.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            acc[lane] += block[lane];
        }
    }
    for (acc, x) in acc.iter_mut().zip(tail) {
        *acc += x;
    }
    tree_sum(acc)
}

/// `Σ x·y` over lanes, one rounding per element.
#[inline(always)]
pub fn dot<F: Fma>(x: &[f32], y: &[f32]) -> f32 {
    let mut acc = [0.0; LANES];
    let (x_blocks, x_tail) = x.as_chunks::<LANES>();
    let (y_blocks, y_tail) = y[..x.len()].as_chunks::<LANES>();
    for (x, y) in x_blocks.iter().zip(y_blocks) {
        for lane in 0..LANES {
            acc[lane] = F::fma(x[lane], y[lane], acc[lane]);
        }
    }
    for ((acc, x), y) in acc.iter_mut().zip(x_tail).zip(y_tail) {
        *acc = F::fma(*x, *y, *acc);
    }
    tree_sum(acc)
}

/// The larger of two numbers, as the contract defines it: `a > b ? a : b`. Callers ensure that
/// neither is NaN.
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SoftFma;

    #[test]
    fn shape_is_the_documented_one() {
        // Lane 0 holds 1e8 + 1, lane 16 holds -1e8: the tree adds them first, so the 1 is lost in
        // lane 0 (1e8 + 1 rounds to 1e8) but a left-to-right sum over lanes 0..32 would keep lane
        // 1's contribution differently.
        let mut x = [0.0f32; 64];
        x[0] = 1e8;
        x[32] = 1.0;
        x[16] = -1e8;
        x[1] = 0.25;
        assert_eq!(sum(&x), 0.25);
        assert_eq!(dot::<SoftFma>(&x, &[1.0; 64]), 0.25);
    }

    /// Products that underflow to −0 stay −0: a tail padded with zeros would turn them into +0.
    #[test]
    fn tails_are_not_padded() {
        assert_eq!(dot::<SoftFma>(&[1e-30; 33], &[-1e-30; 33]).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn empty_is_zero() {
        assert_eq!(sum(&[]).to_bits(), 0.0f32.to_bits());
    }
}
