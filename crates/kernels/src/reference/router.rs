//! Router of a mixture of experts, the definition (`docs/numerics.md`, "Router").

use super::balance::softmax;
use super::{Reference, ReferenceMemory};
use crate::Buffer;
use crate::backend::{Checked, Run};
use crate::op::router::SUM_FLOOR;
use crate::op::{Router, RouterBackward, RouterChoose, RouterWeights, Scoring};
use isobit_numerics::elementary::{exp, sigmoid};
use isobit_numerics::fma::fma;
use isobit_numerics::{SoftFma, lanes};

/// Whether score `a` ranks before `b`: larger first, NaN last; ties keep their order.
fn before(a: f32, b: f32) -> bool {
    a > b || (!a.is_nan() && b.is_nan())
}

/// The best `count` candidates by score; ties go to the smaller index.
fn best(scores: &[f32], candidates: impl Iterator<Item = usize>, count: usize) -> Vec<usize> {
    let mut found: Vec<usize> = Vec::new();
    for candidate in candidates {
        let place = found.iter().position(|&other| before(scores[candidate], scores[other])).unwrap_or(found.len());
        found.insert(place, candidate);
    }
    found.truncate(count);
    found
}

/// Larger plus smaller of the group's two best scores; a group of one uses its only score.
fn group_score(scores: &[f32]) -> f32 {
    match best(scores, 0..scores.len(), 2)[..] {
        [first, second] => scores[first] + scores[second],
        _ => scores[0],
    }
}

impl Run<RouterChoose<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut RouterChoose<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let RouterChoose { indices, logits, bias, p } = op;
        for t in 0..p.tokens {
            let z = &logits[t * p.experts..][..p.experts];
            let score = |e: usize| match (p.scoring, &bias) {
                (Scoring::Softmax, _) => z[e],
                (Scoring::Sigmoid, None) => sigmoid::<SoftFma>(z[e]),
                (Scoring::Sigmoid, Some(bias)) => sigmoid::<SoftFma>(z[e]) + bias[e],
            };
            let scores: Vec<f32> = (0..p.experts).map(score).collect();
            let of_groups: Vec<f32> = scores.chunks_exact(p.group_size()).map(group_score).collect();
            let kept = best(&of_groups, 0..p.groups, p.kept_groups);
            let candidates = (0..p.experts).filter(|e| kept.contains(&(e / p.group_size())));
            for (j, e) in best(&scores, candidates, p.chosen).into_iter().enumerate() {
                indices[t * p.chosen + j] = e as u32;
            }
        }
    }
}

/// One token's weight per slot, before scaling.
fn unscaled(z: &[f32], indices: &[u32], p: &Router) -> Vec<f32> {
    let chosen = indices.iter().map(|&e| z[e as usize]);
    // ORDER: a chain over slots.
    let chain = |x: &[f32]| x.iter().fold(0.0f32, |sum, x| sum + x);
    match (p.scoring, p.renormalise) {
        (Scoring::Softmax, true) => {
            let most = chosen.clone().fold(f32::NEG_INFINITY, |most, z| lanes::max(z, most));
            let powers: Vec<f32> = chosen.map(|z| exp::<SoftFma>(z - most)).collect();
            let sum = chain(&powers);
            powers.iter().map(|power| power / sum).collect()
        }
        (Scoring::Softmax, false) => {
            let probabilities = softmax(z);
            indices.iter().map(|&e| probabilities[e as usize]).collect()
        }
        (Scoring::Sigmoid, renormalise) => {
            let scores: Vec<f32> = chosen.map(sigmoid::<SoftFma>).collect();
            let sum = chain(&scores) + SUM_FLOOR;
            scores.iter().map(|score| if renormalise { score / sum } else { *score }).collect()
        }
    }
}

impl Run<RouterWeights<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut RouterWeights<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let RouterWeights { weights, logits, indices, p } = op;
        for t in 0..p.tokens {
            let slots = t * p.chosen..(t + 1) * p.chosen;
            let z = &logits[t * p.experts..][..p.experts];
            for (weight, unscaled) in weights[slots.clone()].iter_mut().zip(unscaled(z, &indices[slots], p)) {
                *weight = unscaled * p.scale;
            }
        }
    }
}

impl Run<RouterBackward<'_, ReferenceMemory>> for Reference {
    fn execute(&self, op: &mut RouterBackward<'_, ReferenceMemory>, _: &mut Buffer<u8>, _: Checked) {
        let RouterBackward { dlogits, dweights, logits, indices, p } = op;
        for t in 0..p.tokens {
            let slots = t * p.chosen..(t + 1) * p.chosen;
            let z = &logits[t * p.experts..][..p.experts];
            let indices = &indices[slots.clone()];
            let q = unscaled(z, indices, p);
            let g: Vec<f32> = dweights[slots].iter().map(|d| d * p.scale).collect();
            // ORDER: a chain over slots.
            let mean = g.iter().zip(&q).fold(0.0, |sum, (g, q)| fma(*g, *q, sum));
            let dz = &mut dlogits[t * p.experts..][..p.experts];
            dz.fill(0.0);
            if (p.scoring, p.renormalise) == (Scoring::Softmax, false) {
                for (dz, probability) in dz.iter_mut().zip(softmax(z)) {
                    *dz = probability * (0.0 - mean);
                }
            }
            for (j, &e) in indices.iter().enumerate() {
                let complement = sigmoid::<SoftFma>(-z[e as usize]);
                dz[e as usize] = match (p.scoring, p.renormalise) {
                    (Scoring::Softmax, _) => q[j] * (g[j] - mean),
                    (Scoring::Sigmoid, true) => (q[j] * complement) * (g[j] - mean),
                    (Scoring::Sigmoid, false) => (q[j] * complement) * g[j],
                };
            }
        }
    }
}
