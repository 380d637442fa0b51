//! Product with 4-bit weights, the definition (`docs/numerics.md`, "Product with 4-bit weights").

use super::slices;
use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run, Shaped};
use crate::op::product4::{AsQuantized, GroupChunk, Quantized, QuantizedShape, group_chunks, sigma_factor};
use crate::op::{Product4Forward, Product4GradInput, Product4Rows, SliceShape};
use isobit_numerics::fma::fma;
use isobit_numerics::slices::{CHUNK, Profile, split2, split3};

/// Weights as integers and group scales.
#[derive(Clone, Debug)]
pub struct QuantizedWeight {
    shape: QuantizedShape,
    starts: Vec<usize>,
    group_chunks: Vec<GroupChunk>,
    weights: Vec<One>,
}

impl Shaped<QuantizedShape> for QuantizedWeight {
    fn shape(&self) -> QuantizedShape {
        self.shape
    }
}

#[derive(Clone, Debug)]
struct One {
    /// The channel at each position of the order.
    order: Vec<u32>,
    /// `d[n, place]`
    numbers: Vec<i32>,
    /// `[groups, n]`
    group_scales: Vec<f32>,
}

pub(super) fn quantized_weight<Q: AsQuantized, E>(
    shape: QuantizedShape,
    mut make: impl FnMut(usize) -> Result<Q, E>,
) -> Result<QuantizedWeight, E> {
    let mut one = |e: usize| {
        let made = make(e)?;
        shape.expect(&made.quantized());
        Ok(One::of(&made.quantized()))
    };
    let weights = (0..shape.count).map(&mut one).collect::<Result<_, _>>()?;
    let starts = shape.starts();
    Ok(QuantizedWeight { shape, group_chunks: group_chunks(&starts), starts, weights })
}

impl One {
    fn of(w: &Quantized) -> Self {
        let (n, k) = (w.n, w.k);
        let order = w.order().unwrap_or_else(|| (0u32..).take(k).collect());
        let number = |place: usize, n: usize| w.number(order[place] as usize, n);
        let numbers =
            (0..n).flat_map(|n| (0..k).map(move |place| (place, n))).map(|(place, n)| number(place, n)).collect();
        let group_scales = (0..w.scales.len()).map(|at| w.scales.get(at)).collect();
        Self { order, numbers, group_scales }
    }
}

/// The value of exact sums of products of the left operand's slices and integers.
fn value(profile: Profile, pairs: impl Iterator<Item = (i32, i32)>) -> f32 {
    let mut sums = [0i64; 3];
    for (a, d) in pairs {
        let slices = match profile {
            Profile::X2 => {
                let [high, low] = split2(a);
                [high, low, 0]
            }
            Profile::X3 => split3(a),
        };
        for (sum, slice) in sums.iter_mut().zip(slices) {
            *sum += i64::from(slice) * i64::from(d);
        }
    }
    match profile {
        Profile::X2 => (256 * sums[0] + sums[1]) as f32,
        Profile::X3 => fma(sums[0] as f32, 65536.0, fma(sums[1] as f32, 256.0, sums[2] as f32)),
    }
}

impl Run<Product4Rows<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut Product4Rows<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let Product4Rows { rows, x, w, p } = op;
        let mut ordered = x.to_vec();
        for (e, weight) in w.weights.iter().enumerate() {
            for m in p.segments[e]..p.segments[e + 1] {
                for (place, &channel) in weight.order.iter().enumerate() {
                    ordered[m * p.k + place] = x[m * p.k + channel as usize];
                }
            }
        }
        slices::slice_rows(rows, &ordered);
    }
}

impl Run<Product4Forward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut Product4Forward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let Product4Forward { y, x, w, p } = op;
        let chunks = p.k.div_ceil(CHUNK);
        for (e, weight) in w.weights.iter().enumerate() {
            for m in p.segments[e]..p.segments[e + 1] {
                for n in 0..p.n {
                    let (xm, d) = (&x.integers[m * p.k..], &weight.numbers[n * p.k..]);
                    let mut acc = 0.0;
                    for part in &w.group_chunks {
                        let v = value(p.profile, part.channels.clone().map(|place| (xm[place], d[place])));
                        let sigma = weight.group_scales[part.group * p.n + n] * sigma_factor(p.profile);
                        acc = fma(v, x.scales[m * chunks + part.chunk()] * sigma, acc);
                    }
                    y[m * p.n + n] = acc;
                }
            }
        }
    }
}

impl Run<Product4GradInput<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut Product4GradInput<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let Product4GradInput { dx, dy, w, p } = op;
        for (e, weight) in w.weights.iter().enumerate() {
            for m in p.segments[e]..p.segments[e + 1] {
                for (group, ends) in w.starts.windows(2).enumerate() {
                    let sigma = |n: usize| weight.group_scales[group * p.n + n] * sigma_factor(p.profile);
                    let folded: Vec<f32> = (0..p.n).map(|n| dy[m * p.n + n] * sigma(n)).collect();
                    let mut row = slices::rows(SliceShape { rows: 1, width: p.n, profile: p.profile });
                    slices::slice_rows(&mut row, &folded);
                    for place in ends[0]..ends[1] {
                        let dx = &mut dx[m * p.k + weight.order[place] as usize];
                        let mut acc = if p.accumulate { *dx } else { 0.0 };
                        for (c, scale) in row.scales.iter().enumerate() {
                            let at = c * CHUNK..((c + 1) * CHUNK).min(p.n);
                            let v = value(p.profile, at.map(|n| (row.integers[n], weight.numbers[n * p.k + place])));
                            acc = fma(v, *scale, acc);
                        }
                        *dx = acc;
                    }
                }
            }
        }
    }
}
