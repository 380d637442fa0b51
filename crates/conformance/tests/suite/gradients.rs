//! Every backward op of the reference against central differences of its forward pass, transcribed
//! to float64 here.
//!
//! The loss is `Σ weight·output`, so the incoming gradient is `weight`. This says that the formulas
//! are right; what their bits are is the business of the other tests.
#![expect(clippy::float_arithmetic, reason = "float64 is the yardstick here")]

use crate::central_differences::{check, dot, largest, wide};
use isobit_conformance::data::{Distribution, Random};
use isobit_conformance::poisoned;
use isobit_kernels::op::{
    BalanceBackward, BalanceForward, BiasBackward, ClampedSwigluBackward, Combine, CombineBackward, CombineForward,
    EmbeddingBackward, FactorLayout, GegluBackward, LowRank, LowRankContract, LowRankExpand, LowRankOuter, RmsNorm,
    RmsNormBackward, RmsNormForward, Rope, RopeBackward, Router, RouterBackward, RouterChoose, RouterWeights, Scoring,
    SwigluBackward, router,
};
use isobit_kernels::{Device, Reference};
use isobit_numerics::elementary::{ClampedSwiglu, Function};

#[test]
fn rms_norm() {
    for zero_centred in [false, true] {
        let (tokens, width, eps) = (5, 41, 1e-5f32);
        let p = RmsNorm { tokens, width, eps, zero_centred, accumulate: false };
        let mut random = Random::new(1);
        let [x, dy] = [(); 2].map(|()| random.f32s(Distribution::Plain, tokens * width));
        let weight = random.f32s(Distribution::Plain, width);
        let forward = |x: &[f64], weight: &[f64]| {
            let mut y = Vec::new();
            for row in x.chunks_exact(width) {
                let mean = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
                let inverse = 1.0 / (mean + f64::from(eps)).sqrt();
                let factor = |weight: f64| if zero_centred { 1.0 + weight } else { weight };
                y.extend(row.iter().zip(weight).map(|(x, &weight)| x * inverse * factor(weight)));
            }
            y
        };
        let b = &Reference;
        let (mut y, mut inverse) = (poisoned(b, x.len()), poisoned(b, tokens));
        let [x_, dy_, w_] = [&x, &dy, &weight].map(|host| b.upload(host));
        b.run(RmsNormForward { y: &mut y, inverse: &mut inverse, x: &x_, weight: &w_, p });
        let (mut dx, mut dweight) = (poisoned(b, x.len()), b.zeros(width));
        b.run(RmsNormBackward {
            dx: &mut dx,
            dweight: Some(&mut dweight),
            dy: &dy_,
            x: &x_,
            inverse: &inverse,
            weight: &w_,
            p,
            row_starts: &[0, 2, tokens],
        });
        // dx = (g − n·mean(g·n))·inv, with |g| ≤ |dy|·(1 + |w|): two lane steps and five levels of
        // the tree for each mean, and a dozen operations around them.
        let (n, inv) = (largest(&x) * largest(&inverse), largest(&inverse));
        let g = largest(&dy) * (1.0 + largest(&weight));
        check("dx", &dx, &x, 30, inv * (g + n * n * g), |x| dot(&dy, forward(x, &wide(&weight))));
        // A term per token, two roundings each and those of n.
        let magnitude = tokens as f64 * largest(&dy) * n;
        check("dweight", &dweight, &weight, 2 * tokens + 15, magnitude, |weight| dot(&dy, forward(&wide(&x), weight)));
    }
}

#[test]
fn swiglu() {
    let (length, b) = (151, &Reference);
    let mut random = Random::new(2);
    let [gate, up, dh] = [(); 3].map(|()| random.f32s(Distribution::Plain, length));
    let forward = |gate: &[f64], up: &[f64]| -> Vec<f64> {
        gate.iter().zip(up).map(|(&gate, up)| Function::Silu.reference_f64(gate) * up).collect()
    };
    let [mut dgate, mut dup] = [(); 2].map(|()| poisoned(b, length));
    b.run(SwigluBackward {
        dgate: &mut dgate,
        dup: &mut dup,
        dh: &b.upload(&dh),
        gate: &b.upload(&gate),
        up: &b.upload(&up),
    });
    // An elementary function is good to five units in the last place (ten halves), around it two
    // products; the derivative of silu stays below 1.1.
    let magnitude = 1.1 * largest(&dh) * largest(&up);
    check("dgate", &dgate, &gate, 12, magnitude, |gate| dot(&dh, forward(gate, &wide(&up))));
    let magnitude = largest(&dh) * largest(&gate);
    check("dup", &dup, &up, 12, magnitude, |up| dot(&dh, forward(&wide(&gate), up)));
}

#[test]
fn geglu() {
    let (length, b) = (151, &Reference);
    let mut random = Random::new(2);
    let [gate, up, dh] = [(); 3].map(|()| random.f32s(Distribution::Plain, length));
    let gelu = |x: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
        0.5 * x * (1.0 + Function::Tanh.reference_f64(inner))
    };
    let forward = |gate: &[f64], up: &[f64]| -> Vec<f64> { gate.iter().zip(up).map(|(&x, up)| gelu(x) * up).collect() };
    let [mut dgate, mut dup] = [(); 2].map(|()| poisoned(b, length));
    b.run(GegluBackward {
        dgate: &mut dgate,
        dup: &mut dup,
        dh: &b.upload(&dh),
        gate: &b.upload(&gate),
        up: &b.upload(&up),
    });
    // As SwiGLU; five roundings more lead to the argument of the sigmoid, which is below 8 where
    // the result is not tiny. The derivative stays below 1.2.
    let magnitude = 1.2 * largest(&dh) * largest(&up);
    check("dgate", &dgate, &gate, 60, magnitude, |gate| dot(&dh, forward(gate, &wide(&up))));
    let magnitude = largest(&dh) * largest(&gate);
    check("dup", &dup, &up, 60, magnitude, |up| dot(&dh, forward(&wide(&gate), up)));
}

/// Beyond a limit the function is flat on that side, and so are the differences.
#[test]
fn clamped_swiglu() {
    let (length, b) = (151, &Reference);
    let p = ClampedSwiglu { alpha: 1.702, limit: 1.25 };
    let mut random = Random::new(2);
    let both = random.f32s(Distribution::Plain, 2 * length);
    let dh = random.f32s(Distribution::Plain, length);
    assert!(both.iter().any(|x| x.abs() > 1.25) && both.iter().all(|x| (x.abs() - 1.25).abs() > 1e-3));
    let forward = |both: &[f64]| -> Vec<f64> {
        let h = |pair: &[f64; 2]| {
            let (gate, up) = (pair[0].min(1.25), pair[1].clamp(-1.25, 1.25));
            (up + 1.0) * gate * Function::Sigmoid.reference_f64(f64::from(p.alpha) * gate)
        };
        both.as_chunks().0.iter().map(h).collect()
    };
    let mut dboth = poisoned(b, both.len());
    let (both_, dh_) = (b.upload(&both), b.upload(&dh));
    b.run(ClampedSwigluBackward { dboth: &mut dboth, dh: &dh_, both: &both_, p });
    // As SwiGLU, with a sum and a product more; up + 1 is at most 2.25, the slope of the gate below
    // 1.1 and gate·sigmoid at most the largest gate.
    let magnitude = largest(&dh) * (2.25 * 1.1f64).max(largest(&both));
    check("dboth", &dboth, &both, 20, magnitude, |both| dot(&dh, forward(both)));
}

#[test]
fn rope() {
    let p = Rope { tokens: 4, heads: 2, head_width: 12, rotary_width: 8, offset: 0, interleaved: false };
    let (half, b) = (p.rotary_width / 2, &Reference);
    let mut random = Random::new(3);
    let [x, dy] = [(); 2].map(|()| random.f32s(Distribution::Plain, p.tokens * p.heads * p.head_width));
    // Any table will do: backward is the transposed map, whether or not it is a rotation.
    let [cos, sin] = [(); 2].map(|()| random.f32s(Distribution::Plain, 6 * half));
    let positions = [5u32, 0, 3, 3];
    let forward = |x: &[f64]| {
        let mut y = x.to_vec();
        for (index, head) in y.chunks_exact_mut(p.head_width).enumerate() {
            let position = positions[index / p.heads] as usize;
            for i in 0..half {
                let (c, s) = (f64::from(cos[position * half + i]), f64::from(sin[position * half + i]));
                let (a, b) = (head[i], head[i + half]);
                (head[i], head[i + half]) = (a * c - b * s, b * c + a * s);
            }
        }
        y
    };
    let mut dx = b.upload(&dy);
    b.run(RopeBackward {
        dx: &mut dx,
        cos: &b.upload(&cos),
        sin: &b.upload(&sin),
        positions: &b.upload(&positions),
        p,
    });
    // Two terms, two roundings.
    check("dx", &dx, &x, 2, largest(&dy) * (largest(&cos) + largest(&sin)), |x| dot(&dy, forward(x)));
}

#[test]
fn bias() {
    let (tokens, width, b) = (9, 17, &Reference);
    let mut random = Random::new(4);
    let [y, dy] = [(); 2].map(|()| random.f32s(Distribution::Plain, tokens * width));
    let bias = random.f32s(Distribution::Plain, width);
    let mut dbias = b.zeros(width);
    b.run(BiasBackward { dbias: &mut dbias, dy: &b.upload(&dy), row_starts: &[0, 4, 4, tokens] });
    let forward =
        |bias: &[f64]| -> Vec<f64> { wide(&y).iter().enumerate().map(|(index, y)| y + bias[index % width]).collect() };
    // One addition per token and one per block.
    check("dbias", &dbias, &bias, tokens + 2, tokens as f64 * largest(&dy), |bias| dot(&dy, forward(bias)));
}

/// `y = alpha·(u Mᵀ)` for `u[t, rank]`, in float64.
fn expand(u: &[f64], factor: &[f64], p: &LowRank) -> Vec<f64> {
    let mut y = Vec::new();
    for u in u.chunks_exact(p.rank) {
        y.extend(
            (0..p.width).map(|l| f64::from(p.alpha) * (0..p.rank).map(|j| u[j] * factor[p.at(j, l)]).sum::<f64>()),
        );
    }
    y
}

#[test]
fn low_rank() {
    for layout in [FactorLayout::RankMajor, FactorLayout::WidthMajor] {
        let (tokens, rank, width, b) = (6, 3, 37, &Reference);
        let one = LowRank { segments: &[0, tokens], rank, width, layout, alpha: 1.0 };
        let mut random = Random::new(5);
        let [x, dy] = [(); 2].map(|()| random.f32s(Distribution::Plain, tokens * width));
        let [u, du] = [(); 2].map(|()| random.f32s(Distribution::Plain, tokens * rank));
        let factor = random.f32s(Distribution::Plain, rank * width);
        let (m, d) = (largest(&factor), largest(&dy));

        // `contract` is the gradient of `expand` by `u`: a lane sum over the width.
        let mut gradient = poisoned(b, u.len());
        b.run(LowRankContract::one(&mut gradient, &b.upload(&dy), &b.upload(&factor), one));
        check("contract", &gradient, &u, width / 32 + 6, width as f64 * d * m, |u| {
            dot(&dy, expand(u, &wide(&factor), &one))
        });

        // `expand` is the gradient of `contract` by `x`: a chain over the rank.
        let mut gradient = b.zeros(x.len());
        b.run(LowRankExpand { y: &mut gradient, u: &b.upload(&du), factor: &b.upload(&factor), p: one });
        check("expand", &gradient, &x, rank + 1, rank as f64 * largest(&du) * m, |x| {
            let token =
                |t: usize, j: usize| (0..width).map(|l| x[t * width + l] * f64::from(factor[one.at(j, l)])).sum();
            dot(&du, (0..tokens).flat_map(|t| (0..rank).map(move |j| (t, j))).map(|(t, j)| token(t, j)))
        });

        // `outer` is the gradient of `expand` by the factor: a sum over tokens.
        let scaled = LowRank { alpha: 0.75, ..one };
        let mut gradient = b.zeros(factor.len());
        b.run(LowRankOuter::one(&mut gradient, &b.upload(&u), &b.upload(&dy), scaled, &[0, 4, tokens]));
        check("outer", &gradient, &factor, tokens + 3, tokens as f64 * largest(&u) * d, |factor| {
            dot(&dy, expand(&wide(&u), factor, &scaled))
        });
    }
}

#[test]
fn embedding() {
    let (width, b) = (5, &Reference);
    let ids = [3u32, 0, 3, 1, 3, 3, 0];
    let mut random = Random::new(6);
    let table = random.f32s(Distribution::Plain, 5 * width);
    let dy = random.f32s(Distribution::Plain, ids.len() * width);
    let mut dtable = b.zeros(table.len());
    b.run(EmbeddingBackward { dtable: &mut dtable, dy: &b.upload(&dy), ids: &b.upload(&ids), width });
    // At most one addition per token.
    check("dtable", &dtable, &table, ids.len(), ids.len() as f64 * largest(&dy), |table| {
        dot(&dy, ids.iter().flat_map(|&id| table[id as usize * width..][..width].to_vec()))
    });
}

/// Probabilities of one token.
fn softmax(z: &[f64]) -> Vec<f64> {
    let powers: Vec<f64> = z.iter().map(|&z| libm::exp(z)).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

/// Weights of one token's experts.
fn weights(z: &[f64], expert_indices: &[u32], p: &Router) -> Vec<f64> {
    let scores = match p.scoring {
        Scoring::Softmax => softmax(z),
        Scoring::Sigmoid => z.iter().map(|&z| Function::Sigmoid.reference_f64(z)).collect(),
    };
    let chosen: Vec<f64> = expert_indices.iter().map(|&e| scores[e as usize]).collect();
    let sum = if p.renormalise { chosen.iter().sum() } else { 1.0 };
    chosen.iter().map(|score| score / sum * f64::from(p.scale)).collect()
}

#[test]
fn router() {
    for (scoring, renormalise) in [Scoring::Softmax, Scoring::Sigmoid].into_iter().flat_map(|s| [(s, true), (s, false)])
    {
        let (tokens, experts, chosen, b) = (7, 24, 5, &Reference);
        let p = Router { tokens, experts, chosen, scoring, renormalise, scale: 2.5, groups: 4, kept_groups: 2 };
        let mut random = Random::new(7);
        let logits = random.f32s(Distribution::Plain, tokens * experts);
        let dweights = random.f32s(Distribution::Plain, tokens * chosen);
        let logits_ = b.upload(&logits);
        let mut expert_indices = b.zeros(tokens * chosen);
        b.run(RouterChoose { indices: &mut expert_indices, logits: &logits_, bias: None, p });
        let forward = |z: &[f64]| -> Vec<f64> {
            z.chunks_exact(experts)
                .zip(expert_indices.chunks_exact(chosen))
                .flat_map(|(z, c)| weights(z, c, &p))
                .collect()
        };
        let mut given = poisoned(b, tokens * chosen);
        b.run(RouterWeights { weights: &mut given, logits: &logits_, indices: &expert_indices, p });
        for (given, want) in given.iter().zip(forward(&wide(&logits))) {
            // Two elementary functions, a sum over the slots or the lanes, a quotient and a
            // product.
            let allowed = 40.0 * f64::from(f32::EPSILON) * want;
            assert!((f64::from(*given) - want).abs() <= allowed, "{given} given, {want} wanted");
        }
        let mut dlogits = poisoned(b, logits.len());
        b.run(RouterBackward {
            dlogits: &mut dlogits,
            dweights: &b.upload(&dweights),
            logits: &logits_,
            indices: &expert_indices,
            p,
        });
        // q·(g − M): q is at most 1 and good to forty roundings, M a chain over the slots of terms
        // whose weights add up to `chosen`.
        let magnitude = (1.0 + chosen as f64) * 2.5 * largest(&dweights);
        check("dlogits", &dlogits, &logits, 60, magnitude, |z| dot(&dweights, forward(z)));
    }
}

#[test]
fn balance() {
    let (row_starts, experts, b) = ([0, 4, 4, 11], 37, &Reference);
    let mut random = Random::new(8);
    let logits = random.f32s(Distribution::Plain, 11 * experts);
    let share = random.f32s(Distribution::Plain, 3 * experts);
    let forward = |z: &[f64]| {
        let mut sums = vec![0.0; 3 * experts];
        for (t, z) in z.chunks_exact(experts).enumerate() {
            let row = if t < 4 { 0 } else { 2 };
            sums[row * experts..].iter_mut().zip(softmax(z)).for_each(|(sum, p)| *sum += p);
        }
        sums
    };
    let mut sums = poisoned(b, share.len());
    b.run(BalanceForward { sums: &mut sums, logits: &b.upload(&logits), row_starts: &row_starts, experts });
    for (given, want) in sums.iter().zip(forward(&wide(&logits))) {
        // At most 1 for each of seven tokens, each good to thirty roundings.
        assert!(
            (f64::from(*given) - want).abs() <= 7.0 * 40.0 * f64::from(f32::EPSILON),
            "{given} given, {want} wanted"
        );
    }
    let mut dlogits = b.zeros(logits.len());
    b.run(BalanceBackward {
        dlogits: &mut dlogits,
        share: &b.upload(&share),
        logits: &b.upload(&logits),
        row_starts: &row_starts,
        experts,
    });
    // P·(share − A): P is at most 1 and good to thirty roundings, A a mean of shares.
    check("dlogits", &dlogits, &logits, 50, 2.0 * largest(&share), |z| dot(&share, forward(z)));
}

#[test]
fn combine() {
    let (tokens, slots, width, experts, b) = (9, 3, 35, 4, &Reference);
    let p = Combine { tokens, slots, width, accumulate: false };
    let mut random = Random::new(9);
    let expert_indices: Vec<u32> = (0..p.rows()).map(|_| random.below(experts) as u32).collect();
    let router::Grouped { tokens: of_rows, places, .. } = router::grouped(&expert_indices, slots, experts);
    let (rows, weights) =
        (random.f32s(Distribution::Plain, p.rows() * width), random.f32s(Distribution::Plain, p.rows()));
    let [x, dy] = [(); 2].map(|()| random.f32s(Distribution::Plain, tokens * width));
    let forward = |rows: &[f64], weights: &[f64]| {
        let mut y = vec![0.0; tokens * width];
        for (pair, &place) in places.iter().enumerate() {
            for c in 0..width {
                y[pair / slots * width + c] += weights[pair] * rows[place as usize * width + c];
            }
        }
        y
    };
    let (mut drows, mut dweights) = (poisoned(b, rows.len()), poisoned(b, weights.len()));
    let [dy_, rows_, weights_] = [&dy, &rows, &weights].map(|host| b.upload(host));
    b.run(CombineBackward {
        drows: &mut drows,
        dweights: &mut dweights,
        dy: &dy_,
        rows: &rows_,
        weights: &weights_,
        places: &b.upload(&places),
        p,
    });
    // One product; a lane sum over the width.
    check("drows", &drows, &rows, 1, largest(&weights) * largest(&dy), |rows| dot(&dy, forward(rows, &wide(&weights))));
    let magnitude = width as f64 * largest(&dy) * largest(&rows);
    check("dweights", &dweights, &weights, width / 32 + 6, magnitude, |w| dot(&dy, forward(&wide(&rows), w)));
    // Without weights it is the gradient of gathering tokens into rows: one addition for each slot.
    let mut dx = poisoned(b, x.len());
    b.run(CombineForward { y: &mut dx, rows: &rows_, weights: None, places: &b.upload(&places), p });
    check("dx", &dx, &x, slots, slots as f64 * largest(&rows), |x| {
        dot(&rows, of_rows.iter().flat_map(|&t| x[t as usize * width..][..width].to_vec()))
    });
}
