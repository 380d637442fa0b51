//! Router of a mixture of experts (`op/router.rs`), token by token. Experts are ranked by integer
//! keys: in the high bits the score's bits, mapped to ascend with the score; below them the
//! complement of the index, so smaller indices rank higher.

use super::CpuMemory;
use super::path::multiversion;
use crate::backend::{Checked, Run};
use crate::op::router::{CHOSEN_MAX, EXPERTS_MAX, GROUPS_MAX, SUM_FLOOR};
use crate::op::{Router, RouterBackward, RouterChoose, RouterWeights, Scoring};
use crate::{Buffer, Cpu};
use isobit_numerics::Fma;
use isobit_numerics::elementary::{exp, sigmoid};
use isobit_numerics::lanes::{self, LANES, tree_sum};

impl Run<RouterChoose<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut RouterChoose<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let RouterChoose { indices, logits, bias, p } = op;
        let bias = bias.map(|bias| &bias[..]);
        self.pool.run_rows(indices, p.chosen, |tokens, indices| {
            let logits = &logits[tokens.start * p.experts..tokens.end * p.experts];
            choose_rows(self.path, indices, logits, bias, p);
        });
    }
}

impl Run<RouterWeights<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut RouterWeights<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let RouterWeights { weights, logits, indices, p } = op;
        self.pool.run_rows(weights, p.chosen, |tokens, weights| {
            let logits = &logits[tokens.start * p.experts..tokens.end * p.experts];
            weights_rows(self.path, weights, logits, &indices[tokens.start * p.chosen..tokens.end * p.chosen], p);
        });
    }
}

impl Run<RouterBackward<'_, CpuMemory>> for Cpu {
    fn execute(&self, op: &mut RouterBackward<'_, CpuMemory>, _: &mut Buffer<u8>, _: Checked) {
        let RouterBackward { dlogits, dweights, logits, indices, p } = op;
        self.pool.run_rows(dlogits, p.experts, |tokens, dlogits| {
            let logits = &logits[tokens.start * p.experts..tokens.end * p.experts];
            let slots = tokens.start * p.chosen..tokens.end * p.chosen;
            backward_rows(self.path, dlogits, &dweights[slots.clone()], logits, &indices[slots], p);
        });
    }
}

/// Ascends with the score; both zeros are equal, and every NaN is below everything.
#[inline(always)]
fn ordinal(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    let flipped = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    if score.is_nan() { 0 } else { flipped }
}

/// Larger for experts ranked earlier; no two are equal.
#[inline(always)]
fn key(score: f32, index: usize) -> u64 {
    u64::from(ordinal(score)) << 32 | u64::from(u32::MAX - index as u32)
}

#[inline(always)]
fn index_of(key: u64) -> usize {
    (u32::MAX - key as u32) as usize
}

/// Keeps the largest keys seen, descending: `best` is filled from the front.
#[inline(always)]
fn keep(best: &mut [u64], filled: &mut usize, key: u64) {
    if *filled < best.len() {
        *filled += 1;
    } else if key < best[*filled - 1] {
        return;
    }
    let mut at = *filled - 1;
    while at > 0 && best[at - 1] < key {
        best[at] = best[at - 1];
        at -= 1;
    }
    best[at] = key;
}

/// Bit mask of the groups that a token keeps.
#[inline(always)]
fn kept_groups(scores: &[f32], p: &Router) -> u32 {
    if p.groups == 1 {
        return 1;
    }
    let (mut best, mut filled) = ([0; GROUPS_MAX], 0);
    for (group, scores) in scores.chunks_exact(p.group_size()).enumerate() {
        let (mut two, mut found) = ([0; 2], 0);
        for (index, score) in scores.iter().enumerate() {
            keep(&mut two, &mut found, key(*score, index));
        }
        let [first, second] = two.map(|key| scores.get(index_of(key)).copied());
        let score = match (first, second) {
            (Some(first), Some(second)) if found == 2 => first + second,
            _ => scores[0],
        };
        keep(&mut best[..p.kept_groups], &mut filled, key(score, group));
    }
    best[..filled].iter().fold(0, |kept, key| kept | 1 << index_of(*key))
}

multiversion! {
    fn choose_rows<F>(indices: &mut [u32], logits: &[f32], bias: Option<&[f32]>, p: &Router) {
        let mut scratch = [0.0; EXPERTS_MAX];
        for (indices, z) in indices.chunks_exact_mut(p.chosen).zip(logits.chunks_exact(p.experts)) {
            let scores = &mut scratch[..p.experts];
            match (p.scoring, bias) {
                (Scoring::Softmax, _) => scores.copy_from_slice(z),
                (Scoring::Sigmoid, None) => {
                    scores.iter_mut().zip(z).for_each(|(score, z)| *score = sigmoid::<F>(*z));
                }
                (Scoring::Sigmoid, Some(bias)) => {
                    let each = scores.iter_mut().zip(z).zip(bias);
                    each.for_each(|((score, z), bias)| *score = sigmoid::<F>(*z) + bias);
                }
            }
            let kept = kept_groups(scores, p);
            let (mut best, mut filled) = ([0; CHOSEN_MAX], 0);
            for (group, scores) in scores.chunks_exact(p.group_size()).enumerate() {
                if kept >> group & 1 == 1 {
                    for (index, score) in scores.iter().enumerate() {
                        keep(&mut best[..p.chosen], &mut filled, key(*score, group * p.group_size() + index));
                    }
                }
            }
            for (expert, key) in indices.iter_mut().zip(&best) {
                *expert = index_of(*key) as u32;
            }
        }
    }
}

/// Maximum of the logits, and the lane sum of their exponentials below it.
#[inline(always)]
pub(super) fn softmax_scale<F: Fma>(z: &[f32]) -> (f32, f32) {
    let (blocks, tail) = z.as_chunks::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    for block in blocks {
        for lane in 0..LANES {
            most[lane] = lanes::max(block[lane], most[lane]);
        }
    }
    let most = most.iter().chain(tail).fold(f32::NEG_INFINITY, |most, &z| lanes::max(z, most));
    let mut sums = [0.0; LANES];
    for block in blocks {
        for lane in 0..LANES {
            sums[lane] += exp::<F>(block[lane] - most);
        }
    }
    for (sum, z) in sums.iter_mut().zip(tail) {
        *sum += exp::<F>(z - most);
    }
    (most, tree_sum(sums))
}

/// Weights of a token's slots, before scaling.
#[inline(always)]
fn unscaled<F: Fma>(q: &mut [f32], z: &[f32], indices: &[u32], p: &Router) {
    for (q, &expert) in q.iter_mut().zip(indices) {
        *q = z[expert as usize];
    }
    // ORDER: a chain over slots.
    let chain = |x: &[f32]| x.iter().fold(0.0f32, |sum, x| sum + x);
    let sum = match (p.scoring, p.renormalise) {
        (Scoring::Softmax, true) => {
            let most = q.iter().fold(f32::NEG_INFINITY, |most, &z| lanes::max(z, most));
            for q in q.iter_mut() {
                *q = exp::<F>(*q - most);
            }
            chain(q)
        }
        (Scoring::Softmax, false) => {
            let (most, sum) = softmax_scale::<F>(z);
            for q in q.iter_mut() {
                *q = exp::<F>(*q - most);
            }
            sum
        }
        (Scoring::Sigmoid, renormalise) => {
            for q in q.iter_mut() {
                *q = sigmoid::<F>(*q);
            }
            if !renormalise {
                return;
            }
            chain(q) + SUM_FLOOR
        }
    };
    for q in q.iter_mut() {
        *q /= sum;
    }
}

multiversion! {
    fn weights_rows<F>(weights: &mut [f32], logits: &[f32], indices: &[u32], p: &Router) {
        let rows = weights.chunks_exact_mut(p.chosen).zip(logits.chunks_exact(p.experts));
        for ((weights, z), indices) in rows.zip(indices.chunks_exact(p.chosen)) {
            unscaled::<F>(weights, z, indices, p);
            for weight in weights {
                *weight *= p.scale;
            }
        }
    }
}

multiversion! {
    fn backward_rows<F>(dlogits: &mut [f32], dweights: &[f32], logits: &[f32], indices: &[u32], p: &Router) {
        let mut scratch = [0.0; CHOSEN_MAX];
        let rows = dlogits.chunks_exact_mut(p.experts).zip(logits.chunks_exact(p.experts));
        let slots = dweights.chunks_exact(p.chosen).zip(indices.chunks_exact(p.chosen));
        for ((dz, z), (dweights, indices)) in rows.zip(slots) {
            let q = &mut scratch[..p.chosen];
            unscaled::<F>(q, z, indices, p);
            // ORDER: a chain over slots.
            let mean = dweights.iter().zip(&*q).fold(0.0, |sum, (d, q)| F::fma(d * p.scale, *q, sum));
            if (p.scoring, p.renormalise) == (Scoring::Softmax, false) {
                let (most, sum) = softmax_scale::<F>(z);
                for (dz, z) in dz.iter_mut().zip(z) {
                    *dz = (exp::<F>(z - most) / sum) * (0.0 - mean);
                }
            } else {
                dz.fill(0.0);
            }
            for ((q, d), &expert) in q.iter().zip(dweights).zip(indices) {
                let (g, z) = (d * p.scale, z[expert as usize]);
                dz[expert as usize] = match (p.scoring, p.renormalise) {
                    (Scoring::Softmax, _) => q * (g - mean),
                    (Scoring::Sigmoid, true) => (q * sigmoid::<F>(-z)) * (g - mean),
                    (Scoring::Sigmoid, false) => (q * sigmoid::<F>(-z)) * g,
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_descend_in_the_order_of_experts() {
        let scores =
            [f32::INFINITY, 3.0, 3.0, 1e-45, 0.0, -0.0, 0.0, -1e-45, -2.0, f32::NEG_INFINITY, f32::NAN, -f32::NAN];
        let keys: Vec<u64> = scores.iter().enumerate().map(|(index, score)| key(*score, index)).collect();
        assert!(keys.is_sorted_by(|a, b| a > b), "{keys:x?}");
        assert_eq!(keys.iter().map(|key| index_of(*key)).collect::<Vec<_>>(), (0..scores.len()).collect::<Vec<_>>());
    }
}
