//! The backward ops of hybrid layers against central differences of their forward pass, transcribed
//! to float64 here.
//!
//! As in `gradients.rs`: the loss is `Σ weight·output`, so the incoming gradient is `weight`.
#![expect(clippy::float_arithmetic, reason = "float64 is the yardstick here")]

use crate::central_differences::{check, dot, largest, wide};
use isobit_conformance::data::{Distribution, Random};
use isobit_conformance::{downloaded, poisoned};
use isobit_kernels::op::{
    ColumnMode, Columns, Conv1d, Conv1dBackward, Conv1dForward, CopyColumns, Decay, DecayBackward, DecayForward, Gate,
    GateBackward, GateForward, GatedNorm, GatedNormBackward, GatedNormForward, L2Norm, L2NormBackward, L2NormForward,
    Place, Rope, RopeBackward, RopeForward,
};
use isobit_kernels::{Device, Reference};
use isobit_numerics::elementary::Function;

/// The forward pass is the function that the differences are taken of.
fn check_forward(name: &str, y: &[f32], want: &[f64], relative: f64) {
    assert_eq!(y.len(), want.len(), "{name}");
    let scale = want.iter().fold(0.0f64, |scale, y| scale.max(y.abs()));
    for (index, (y, want)) in y.iter().zip(want).enumerate() {
        assert!((f64::from(*y) - want).abs() <= relative * scale, "{name}[{index}]: {want} wanted, {y} given");
    }
}

fn sigmoid(x: f64) -> f64 {
    Function::Sigmoid.reference_f64(x)
}

fn silu(x: f64) -> f64 {
    Function::Silu.reference_f64(x)
}

/// One head for all groups, and its gradient, the sum over them; a split, and its gradient, the way
/// back.
#[test]
fn columns() {
    let b = &Reference;
    for (one, many) in [
        (Place { row: 11, offset: 3, stride: 0 }, Place { row: 40, offset: 4, stride: 9 }),
        (Place { row: 33, offset: 1, stride: 8 }, Place { row: 40, offset: 4, stride: 9 }),
    ] {
        let p = Columns { tokens: 3, groups: 4, width: 8, from: one, to: many, mode: ColumnMode::Overwrite };
        let mut random = Random::new(1);
        let (x, dy) = (random.f32s(Distribution::Plain, 3 * one.row), random.f32s(Distribution::Plain, 3 * many.row));
        let forward = |x: &[f64]| {
            let mut y = vec![0.0; 3 * many.row];
            for (t, g, j) in (0..3).flat_map(|t| (0..4).flat_map(move |g| (0..8).map(move |j| (t, g, j)))) {
                y[t * many.row + many.offset + g * many.stride + j] = x[t * one.row + one.offset + g * one.stride + j];
            }
            y
        };
        let mut y = b.zeros(dy.len());
        b.run(CopyColumns { y: &mut y, x: &b.upload(&x), p });
        check_forward("y", &y, &forward(&wide(&x)), 0.0);
        let mut dx = b.zeros(x.len());
        b.run(CopyColumns { y: &mut dx, x: &b.upload(&dy), p: Columns { from: many, to: one, ..p } });
        check("dx", &dx, &x, 4, 4.0 * largest(&dy), |x| dot(&dy, forward(x)));
    }
}

#[test]
fn rope_inside_a_head() {
    for interleaved in [false, true] {
        let p = Rope { tokens: 4, heads: 2, head_width: 14, rotary_width: 8, offset: 5, interleaved };
        let (half, b) = (p.rotary_width / 2, &Reference);
        let mut random = Random::new(3);
        let [x, dy] = [(); 2].map(|()| random.f32s(Distribution::Plain, p.tokens * p.heads * p.head_width));
        let [cos, sin] = [(); 2].map(|()| random.f32s(Distribution::Plain, 6 * half));
        let positions = [5u32, 0, 3, 3];
        let forward = |x: &[f64]| {
            let mut y = x.to_vec();
            for (index, head) in y.chunks_exact_mut(p.head_width).enumerate() {
                let position = positions[index / p.heads] as usize;
                for i in 0..half {
                    let (c, s) = (f64::from(cos[position * half + i]), f64::from(sin[position * half + i]));
                    let (first, second) = if interleaved { (5 + 2 * i, 6 + 2 * i) } else { (5 + i, 9 + i) };
                    let (a, b) = (head[first], head[second]);
                    (head[first], head[second]) = (a * c - b * s, b * c + a * s);
                }
            }
            y
        };
        let (cos_, sin_, positions_) = (b.upload(&cos), b.upload(&sin), b.upload(&positions));
        let mut y = b.upload(&x);
        b.run(RopeForward { x: &mut y, cos: &cos_, sin: &sin_, positions: &positions_, p });
        check_forward("y", &y, &forward(&wide(&x)), 4.0 * f64::from(f32::EPSILON));
        let mut dx = b.upload(&dy);
        b.run(RopeBackward { dx: &mut dx, cos: &cos_, sin: &sin_, positions: &positions_, p });
        // Two terms, two roundings.
        check("dx", &dx, &x, 2, largest(&dy) * (largest(&cos) + largest(&sin)), |x| dot(&dy, forward(x)));
    }
}

#[test]
fn gate() {
    for per_token in [false, true] {
        let (p, b) = (Gate { tokens: 5, width: 37, per_token }, &Reference);
        let mut random = Random::new(2);
        let [x, dy] = [(); 2].map(|()| random.f32s(Distribution::Plain, p.tokens * p.width));
        let g = random.f32s(Distribution::Plain, p.gates());
        let forward = |x: &[f64], g: &[f64]| -> Vec<f64> {
            let gate = |index: usize| if per_token { g[index / p.width] } else { g[index] };
            x.iter().enumerate().map(|(index, x)| x * sigmoid(gate(index))).collect()
        };
        let [x_, dy_, g_] = [&x, &dy, &g].map(|host| b.upload(host));
        let ([mut y, mut dx], mut dg) = ([(); 2].map(|()| poisoned(b, x.len())), poisoned(b, g.len()));
        b.run(GateForward { y: &mut y, x: &x_, g: &g_, p });
        check_forward("y", &y, &forward(&wide(&x), &wide(&g)), 4.0 * f64::from(f32::EPSILON));
        b.run(GateBackward { dx: &mut dx, dg: &mut dg, dy: &dy_, x: &x_, g: &g_, p });
        // The sigmoid is good to three halves of a unit, and the product around it is rounded.
        check("dx", &dx, &x, 4, largest(&dy), |x| dot(&dy, forward(x, &wide(&g))));
        // Per token: two lane steps, five levels of the tree; then the derivative of the sigmoid,
        // below a quarter, whose parts are off by a few units of one.
        let terms = if per_token { p.width as f64 } else { 1.0 };
        let magnitude = terms * largest(&dy) * largest(&x);
        check("dg", &dg, &g, 16, magnitude, |g| dot(&dy, forward(&wide(&x), g)));
    }
}

#[test]
fn conv1d() {
    let (channels, kernel, starts) = (5, 4, [0, 2, 2, 9, 10, 14]);
    let (p, b) = (Conv1d { channels, kernel, starts: &starts }, &Reference);
    let mut random = Random::new(3);
    let [x, dy] = [(); 2].map(|()| random.f32s(Distribution::Plain, p.tokens() * channels));
    let weight = random.f32s(Distribution::Plain, channels * kernel);
    let forward = |x: &[f64], weight: &[f64]| {
        let mut y = Vec::new();
        for ends in starts.windows(2) {
            for (t, channel) in (ends[0]..ends[1]).flat_map(|t| (0..channels).map(move |channel| (t, channel))) {
                let first = ends[0].max((t + 1).saturating_sub(kernel));
                let tap = |s: usize| weight[channel * kernel + kernel - 1 - (t - s)] * x[s * channels + channel];
                y.push(silu((first..=t).map(tap).sum()));
            }
        }
        y
    };
    let [x_, dy_, w_] = [&x, &dy, &weight].map(|host| b.upload(host));
    let [mut y, mut dx] = [(); 2].map(|()| poisoned(b, x.len()));
    let mut dweight = b.zeros(weight.len());
    b.run(Conv1dForward { y: &mut y, x: &x_, weight: &w_, history: None, p });
    // Four steps of a sum and the elementary function.
    let (x64, w64) = (wide(&x), wide(&weight));
    check_forward("y", &y, &forward(&x64, &w64), 16.0 * f64::from(f32::EPSILON));
    b.run(Conv1dBackward {
        dx: &mut dx,
        dweight: Some(&mut dweight),
        dy: &dy_,
        x: &x_,
        weight: &w_,
        p,
        row_starts: &[0, 9, 9, 14],
    });
    // A sum of four terms; in each the derivative of SiLU, below 1.1, at a point off by the error
    // of four steps (its slope is below a half), and four roundings around it.
    let point = 4.0 * largest(&x) * largest(&weight);
    let magnitude = |factor: f64, terms: f64| terms * 1.1 * largest(&dy) * factor * (1.0 + point);
    check("dx", &dx, &x, 20, magnitude(largest(&weight), 4.0), |x| dot(&dy, forward(x, &w64)));
    check("dweight", &dweight, &weight, 30, magnitude(largest(&x), 14.0), |w| dot(&dy, forward(&x64, w)));
}

#[test]
fn l2_norm() {
    for factor in [1.0f32, 0.125] {
        let (p, b) = (L2Norm { tokens: 6, width: 41, eps: 1e-6, factor }, &Reference);
        let mut random = Random::new(4);
        let [x, dy] = [(); 2].map(|()| random.f32s(Distribution::Plain, p.tokens * p.width));
        let forward = |x: &[f64]| {
            let mut y = Vec::new();
            for row in x.chunks_exact(p.width) {
                let length = (row.iter().map(|x| x * x).sum::<f64>() + f64::from(p.eps)).sqrt();
                y.extend(row.iter().map(|x| x / length * f64::from(factor)));
            }
            y
        };
        let (x_, mut inverse) = (b.upload(&x), poisoned(b, p.tokens));
        let [mut y, mut dx] = [(); 2].map(|()| poisoned(b, x.len()));
        b.run(L2NormForward { y: &mut y, inverse: &mut inverse, x: &x_, p });
        check_forward("y", &y, &forward(&wide(&x)), 16.0 * f64::from(f32::EPSILON));
        b.run(L2NormBackward { dx: &mut dx, dy: &b.upload(&dy), x: &x_, inverse: &inverse, p });
        // dx = (g − n·(g·n))·inv: the sum has two lane steps and five levels, its terms are n·g; a
        // dozen operations around it.
        let (n, g) = (largest(&x) * largest(&inverse), largest(&dy) * f64::from(factor));
        let magnitude = largest(&inverse) * (g + n * (p.width as f64).sqrt() * g);
        check("dx", &dx, &x, 30, magnitude, |x| dot(&dy, forward(x)));
    }
}

#[test]
fn decay() {
    let (p, b) = (Decay { tokens: 9, heads: 5 }, &Reference);
    let mut random = Random::new(5);
    let [a, strength, dg, dbeta] = [(); 4].map(|()| random.f32s(Distribution::Plain, p.tokens * p.heads));
    let [a_log, dt_bias] = [(); 2].map(|()| random.f32s(Distribution::Plain, p.heads));
    let decays = |a: &[f64], a_log: &[f64], dt_bias: &[f64]| -> Vec<f64> {
        let head = |index: usize| index % p.heads;
        let of = |(index, a): (usize, &f64)| {
            -libm::exp(a_log[head(index)]) * Function::Softplus.reference_f64(a + dt_bias[head(index)])
        };
        a.iter().enumerate().map(of).collect()
    };
    let strengths = |b: &[f64]| -> Vec<f64> { b.iter().map(|b| sigmoid(*b)).collect() };
    let [a_, b_, dg_, dbeta_] = [&a, &strength, &dg, &dbeta].map(|host| b.upload(host));
    let [log_, bias_] = [&a_log, &dt_bias].map(|host| b.upload(host));
    let [mut g, mut beta, mut da, mut db] = [(); 4].map(|()| poisoned(b, a.len()));
    b.run(DecayForward { g: &mut g, beta: &mut beta, a: &a_, b: &b_, a_log: &log_, dt_bias: &bias_, p });
    let [a64, log64, bias64] = [&a, &a_log, &dt_bias].map(|x| wide(x));
    check_forward("g", &g, &decays(&a64, &log64, &bias64), 16.0 * f64::from(f32::EPSILON));
    check_forward("beta", &beta, &strengths(&wide(&strength)), 4.0 * f64::from(f32::EPSILON));
    let [mut da_log, mut ddt_bias] = [(); 2].map(|()| b.zeros(p.heads));
    let parameters = Some((&mut da_log, &mut ddt_bias));
    let rows = [0, 4, 4, p.tokens];
    b.run(DecayBackward {
        da: &mut da,
        db: &mut db,
        dparameters: parameters,
        dg: &dg_,
        dbeta: &dbeta_,
        a: &a_,
        b: &b_,
        a_log: &log_,
        dt_bias: &bias_,
        p,
        row_starts: &rows,
    });
    let rate = a_log.iter().map(|x| libm::exp(f64::from(*x))).fold(0.0, f64::max);
    // Exponential and sigmoid are good to two units each (their argument's rounding counts once
    // more), two products.
    let magnitude = largest(&dg) * rate;
    check("da", &da, &a, 16, magnitude, |a| dot(&dg, decays(a, &log64, &bias64)));
    check("db", &db, &strength, 8, largest(&dbeta), |b| dot(&dbeta, strengths(b)));
    let terms = p.tokens as f64;
    check("da_log", &da_log, &a_log, 25, terms * largest(&dg) * largest(&g), |a_log| {
        dot(&dg, decays(&a64, a_log, &bias64))
    });
    check("ddt_bias", &ddt_bias, &dt_bias, 25, terms * magnitude, |bias| dot(&dg, decays(&a64, &log64, bias)));
}

#[test]
fn gated_norm() {
    let (tokens, width, eps) = (7, 41, 1e-6f32);
    let (p, b) = (GatedNorm { tokens, width, eps }, &Reference);
    let mut random = Random::new(6);
    let [h, z, dy] = [(); 3].map(|()| random.f32s(Distribution::Plain, tokens * width));
    let weight = random.f32s(Distribution::Plain, width);
    let forward = |h: &[f64], z: &[f64], weight: &[f64]| {
        let mut y = Vec::new();
        for (h, z) in h.chunks_exact(width).zip(z.chunks_exact(width)) {
            let mean = h.iter().map(|h| h * h).sum::<f64>() / width as f64;
            let inverse = 1.0 / (mean + f64::from(eps)).sqrt();
            y.extend((0..width).map(|c| h[c] * inverse * weight[c] * silu(z[c])));
        }
        y
    };
    let [h_, z_, dy_, w_] = [&h, &z, &dy, &weight].map(|host| b.upload(host));
    let ([mut y, mut dh, mut dz], mut inverse) = ([(); 3].map(|()| poisoned(b, h.len())), poisoned(b, tokens));
    let mut dweight = b.zeros(width);
    b.run(GatedNormForward { y: &mut y, inverse: &mut inverse, h: &h_, z: &z_, weight: &w_, p });
    let [h64, z64, w64] = [&h, &z, &weight].map(|x| wide(x));
    check_forward("y", &y, &forward(&h64, &z64, &w64), 16.0 * f64::from(f32::EPSILON));
    b.run(GatedNormBackward {
        dh: &mut dh,
        dz: &mut dz,
        dweight: Some(&mut dweight),
        dy: &dy_,
        h: &h_,
        z: &z_,
        inverse: &inverse,
        weight: &w_,
        p,
        row_starts: &[0, 3, tokens],
    });
    // As the RMS norm, with the elementary function and one product more.
    let inv = largest(&downloaded(b, &inverse));
    let (n, g) = (largest(&h) * inv, largest(&dy) * largest(&z) * largest(&weight));
    check("dh", &dh, &h, 40, inv * (g + n * n * g), |h| dot(&dy, forward(h, &z64, &w64)));
    let magnitude = 1.1 * largest(&dy) * largest(&weight) * n;
    check("dz", &dz, &z, 30, magnitude, |z| dot(&dy, forward(&h64, z, &w64)));
    let magnitude = tokens as f64 * largest(&dy) * largest(&z) * n;
    check("dweight", &dweight, &weight, 2 * tokens + 20, magnitude, |weight| dot(&dy, forward(&h64, &z64, weight)));
}
