//! Four-bit integers made from floating-point weights (`docs/numerics.md`, "Weights quantised at
//! load"): what `load_in_4bit` does to a group of a row, the scale found by trying twelve.
//!
//! It runs on the host, once per weight, so the sums have 32 lanes like any other and the inner
//! loop has no branch.

use crate::cast::{f16_to_f32, f32_to_f16};
use crate::lanes::{LANES, Lanes, tree_sum};

/// Name of the rule: part of the identity of a run that uses it. Another rule gets another name.
pub const RULE: &str = "int4-1";
/// Inputs of a group; the last group of a row may have fewer.
pub const GROUP: usize = 64;
/// Scales that are tried.
const TRIED: usize = 12;
/// The largest integer.
const LARGEST: f32 = 15.0;
/// Added and subtracted again, it rounds numbers below 2²² to integers, ties to even.
const ROUNDING: f32 = 12_582_912.0;

/// The scale and the zero point of a group; its integers are where the caller wanted them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupForm {
    /// Bits of a float16.
    pub scale: u16,
    /// 0 to 15.
    pub zero: u8,
}

/// A scale to try: the number, and what weights are multiplied with.
#[derive(Clone, Copy)]
struct Candidate {
    scale: f32,
    inverse: f32,
}

impl Candidate {
    fn of(scale: f32) -> Self {
        Self { scale, inverse: if scale == 0.0 { 0.0 } else { 1.0 / scale } }
    }

    /// Steps from the zero point, between the bounds.
    #[inline(always)]
    fn steps(self, x: f32, [low, high]: [f32; 2]) -> f32 {
        let nearest = (x * self.inverse + ROUNDING) - ROUNDING;
        let above = if nearest < low { low } else { nearest };
        if above > high { high } else { above }
    }

    /// The fourth power of the error of one number.
    #[inline(always)]
    fn fourth_power(self, x: f32, bounds: [f32; 2]) -> f32 {
        let error = x - self.steps(x, bounds) * self.scale;
        let square = error * error;
        square * square
    }

    /// The lane sum of the fourth powers of the errors.
    fn error(self, x: &[f32], bounds: [f32; 2]) -> f32 {
        let mut acc: Lanes = [0.0; LANES];
        let (blocks, tail) = x.as_chunks::<LANES>();
        for block in blocks {
            for lane in 0..LANES {
                acc[lane] += self.fourth_power(block[lane], bounds);
            }
        }
        for (acc, x) in acc.iter_mut().zip(tail) {
            *acc += self.fourth_power(*x, bounds);
        }
        tree_sum(acc)
    }
}

/// Quantises a group of finite numbers into `integers`, 0 to 15 each. None if its range is beyond
/// what a float16 scale can hold.
pub fn quantise_group(x: &[f32], integers: &mut [u8]) -> Option<GroupForm> {
    assert_eq!(x.len(), integers.len(), "an integer for every number");
    let low = x.iter().fold(0.0, |low: f32, x| if *x < low { *x } else { low });
    let high = x.iter().fold(0.0, |high: f32, x| if *x > high { *x } else { high });
    let range = high - low;
    if range == 0.0 {
        integers.fill(0);
        return Some(GroupForm { scale: 0, zero: 0 });
    }
    let scale_of = |tried: usize| f32_to_f16(range / (14.0 + 0.5 * tried as f32));
    if !f16_to_f32(scale_of(0)).is_finite() {
        return None;
    }
    let zero = ((LARGEST * -low) / range + ROUNDING) - ROUNDING;
    let bounds = [-zero, LARGEST - zero];
    let mut best = (scale_of(0), f32::INFINITY);
    for bits in (0..TRIED).map(scale_of) {
        let error = Candidate::of(f16_to_f32(bits)).error(x, bounds);
        // The first of equal errors stays.
        if error < best.1 {
            best = (bits, error);
        }
    }
    let chosen = Candidate::of(f16_to_f32(best.0));
    for (integer, x) in integers.iter_mut().zip(x) {
        *integer = (chosen.steps(*x, bounds) + zero) as u8;
    }
    Some(GroupForm { scale: best.0, zero: zero as u8 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;
    use crate::philox::mix64;

    /// The numbers of `docs/numerics.md`: sums of four bytes, times a scale of the group's own.
    fn numbers(group: u64, length: usize) -> Vec<f32> {
        let number = |at: u64| {
            let bytes = mix64(1 + group * GROUP as u64 + at).to_le_bytes();
            let sum: i32 = bytes[..4].iter().map(|byte| i32::from(*byte)).sum();
            (sum - 510 + 16 * (group % 5) as i32) as f32 * (0.001 * (1 + group % 7) as f32)
        };
        (0..length as u64).map(number).collect()
    }

    fn quantised(x: &[f32]) -> (GroupForm, Vec<u8>) {
        let mut integers = vec![0xff; x.len()];
        (quantise_group(x, &mut integers).expect("within range"), integers)
    }

    #[test]
    fn a_second_implementation_gives_this_digest() {
        let mut bytes = Vec::new();
        for group in 0..100 {
            let length = if group % 10 == 9 { 24 } else { GROUP };
            let (form, integers) = quantised(&numbers(group, length));
            bytes.extend(form.scale.to_le_bytes());
            bytes.push(form.zero);
            bytes.extend(integers);
        }
        assert_eq!(Digest::of_bytes(&bytes).to_string(), GOLDEN);
    }

    /// Numbers that are a float16 scale times integers are met exactly: the error of 15 steps is
    /// zero, and nothing is smaller.
    #[test]
    fn what_has_sixteen_steps_stays() {
        for (zero, scale) in [(0u8, 0.5f32), (15, 2.0), (8, 0.25), (3, 0.0625)] {
            let x: Vec<f32> = (0..GROUP).map(|at| ((at % 16) as f32 - f32::from(zero)) * scale).collect();
            let (form, integers) = quantised(&x);
            assert_eq!((f16_to_f32(form.scale), form.zero), (scale, zero));
            assert!(integers.iter().enumerate().all(|(at, integer)| usize::from(*integer) == at % 16));
        }
    }

    #[test]
    fn the_first_of_equal_errors_stays() {
        // One number and zeros: 14 to 15 steps all meet it with an error of rounding only, and the
        // first whose product is exact is taken.
        let mut x = vec![0.0; GROUP];
        x[5] = 14.0;
        let (form, integers) = quantised(&x);
        assert_eq!((f16_to_f32(form.scale), form.zero, integers[5], integers[6]), (1.0, 0, 14, 0));
    }

    #[test]
    fn edges() {
        assert_eq!(quantised(&[0.0, -0.0, 0.0]), (GroupForm { scale: 0, zero: 0 }, vec![0; 3]));
        assert_eq!(quantised(&[]), (GroupForm { scale: 0, zero: 0 }, vec![]));
        // Below half the smallest float16 the scale is zero, and so is every weight.
        let (form, _) = quantised(&[1e-9, -1e-9]);
        assert_eq!(form.scale, 0);
        // One sign only: the zero point is at an end.
        assert_eq!(quantised(&[1.0, 2.0, 3.0]).0.zero, 0);
        assert_eq!(quantised(&[-1.0, -2.0, -3.0]).0.zero, 15);
        let mut one = [0];
        assert!(quantise_group(&[900_000.0], &mut one).is_some());
        assert_eq!(quantise_group(&[1e6], &mut one), None);
        assert_eq!(quantise_group(&[f32::MAX, f32::MIN], &mut [0; 2]), None);
    }

    /// Every integer is the nearest step within the bounds, and no scale that was tried is better.
    #[test]
    fn the_result_is_the_best_of_those_tried() {
        for group in 0..50 {
            let x = numbers(group, GROUP);
            let (form, integers) = quantised(&x);
            let value = |integer: u8, scale: f32| (f32::from(integer) - f32::from(form.zero)) * scale;
            let scale = f16_to_f32(form.scale);
            let fourth = |error: f32| f64::from(error) * f64::from(error) * f64::from(error) * f64::from(error);
            let error = |integers: &[u8], scale: f32| -> f64 {
                x.iter().zip(integers).map(|(x, q)| fourth(x - value(*q, scale))).sum()
            };
            let best = error(&integers, scale);
            let range = x.iter().fold(0.0f32, |m, x| m.max(*x)) - x.iter().fold(0.0f32, |m, x| m.min(*x));
            for tried in 0..TRIED {
                let scale = f16_to_f32(f32_to_f16(range / (14.0 + tried as f32 / 2.0)));
                let nearest: Vec<u8> = x
                    .iter()
                    .map(|x| {
                        (0..16)
                            .min_by(|a, b| {
                                let far = |q: u8| f64::from(x - value(q, scale)).abs();
                                far(*a).total_cmp(&far(*b))
                            })
                            .expect("sixteen")
                    })
                    .collect();
                assert!(best <= error(&nearest, scale) * (1.0 + 1e-6), "group {group}, scale {tried}");
            }
        }
    }

    const GOLDEN: &str = "37bfeea16e53ad8334dd49a23b43138d";
}
