//! The reference's gradients (profile x3) against an analytic gradient in float64, whose forward is
//! itself checked with central differences. Tolerances are derived, not tuned.
#![expect(clippy::float_arithmetic, reason = "gradients are numbers")]
#![expect(clippy::disallowed_methods, reason = "float64 of the platform is what the reference is compared with")]

use isobit_conformance::cases::head_loss::{HeadFormat, HeadLossCase, Ignored, Inputs};
use isobit_conformance::data::Distribution;
use isobit_kernels::op::IGNORED;
use isobit_kernels::{Device, Matrix, Reference, StoredMatrix};
use isobit_numerics::slices::Profile;

const HIDDEN: usize = 33;
const VOCABULARY: usize = 600;

/// One term a·b of an x3 product: each operand is off by at most half a unit, max/(2·8323072), and
/// the dropped slice products are at most 2·128·128·256 + 128·128 of 8323072², so 2.5e-7 of the
/// product of the two maxima. Rounding adds at most four float32 roundings of the sum of
/// magnitudes.
const TERM: f64 = 2.5e-7 + 4.0 / 16_777_216.0;

/// Everything in float64.
struct Exact {
    h: Vec<f64>,
    head: Vec<f64>,
    labels: Vec<i32>,
    weight: Vec<f64>,
}

impl Exact {
    fn new(inputs: &Inputs) -> Self {
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect();
        let labels = inputs.labels.clone();
        Self { h: wide(&inputs.h), head: wide(&inputs.head), labels, weight: wide(&inputs.weight) }
    }

    fn logits(&self, token: usize) -> Vec<f64> {
        let h = &self.h[token * HIDDEN..(token + 1) * HIDDEN];
        self.head.chunks_exact(HIDDEN).map(|row| row.iter().zip(h).map(|(w, h)| w * h).sum()).collect()
    }

    fn log_sum_exp(z: &[f64]) -> f64 {
        let m = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        m + z.iter().map(|z| (z - m).exp()).sum::<f64>().ln()
    }

    /// `Σ_t weight[t]·loss[t]`
    fn objective(&self) -> f64 {
        let losses = self.labels.iter().enumerate().filter(|(_, label)| **label != IGNORED).map(|(token, &label)| {
            let z = self.logits(token);
            self.weight[token] * (Self::log_sum_exp(&z) - z[label as usize])
        });
        losses.sum()
    }

    /// `[token][vocabulary]`
    fn grad_logits(&self) -> Vec<Vec<f64>> {
        let rows = self.labels.iter().enumerate().map(|(token, &label)| {
            let z = self.logits(token);
            let lse = Self::log_sum_exp(&z);
            let target = |v: usize| f64::from(u8::from(v as i32 == label));
            let weight = if label == IGNORED { 0.0 } else { self.weight[token] };
            z.iter().enumerate().map(|(v, z)| ((z - lse).exp() - target(v)) * weight).collect()
        });
        rows.collect()
    }
}

fn max_magnitude(x: impl IntoIterator<Item = f64>) -> f64 {
    x.into_iter().fold(0.0, |max, x| max.max(x.abs()))
}

fn case() -> HeadLossCase {
    HeadLossCase {
        row_starts: vec![0, 4, 9],
        hidden: HIDDEN,
        vocabulary: VOCABULARY,
        profile: Profile::X3,
        format: HeadFormat::F32,
        kind: Distribution::Plain,
        ignored: Ignored::Some,
        with_dhead: true,
        poison: None,
        cap: None,
    }
}

#[test]
fn reference_against_float64() {
    let case = case();
    let mut inputs = case.inputs();
    inputs.dhead.fill(0.0);
    let head = Reference.upload(&inputs.head);
    let got = case.results(&Reference, &inputs, Matrix::Stored(StoredMatrix::F32(&head)));
    let exact = Exact::new(&inputs);
    let dz = exact.grad_logits();

    let (h_max, head_max) = (max_magnitude(exact.h.iter().copied()), max_magnitude(exact.head.iter().copied()));
    let z_error = HIDDEN as f64 * h_max * head_max * TERM;
    // lse moves by at most the largest move of a logit, and its own arithmetic is good to 1e-6
    // of |lse| + 1.
    let lse_max = max_magnitude((0..case.tokens()).map(|token| Exact::log_sum_exp(&exact.logits(token))));
    let lse_error = z_error + 1e-6 * (lse_max + 1.0);
    // p = exp(z − lse) is off by the factor of both errors and 3 units in the last place; dz by
    // that times the weight.
    let relative = z_error + lse_error + 4.0 / 16_777_216.0;
    for (token, &label) in inputs.labels.iter().enumerate() {
        let z = exact.logits(token);
        let want = Exact::log_sum_exp(&z);
        let lse = f64::from(got.lse[token]);
        assert!(
            (lse - want).abs() <= lse_error,
            "lse of token {token}: {want} wanted, {lse} given, within {lse_error:e}"
        );
        let want = if label == IGNORED { 0.0 } else { want - z[label as usize] };
        assert!(
            (f64::from(got.loss[token]) - want).abs() <= z_error + lse_error + 1e-6 * want,
            "loss of token {token}"
        );
        let best = (0..VOCABULARY).fold(0, |best, v| if z[v] > z[best] { v } else { best });
        assert!(z[got.best[token] as usize] >= z[best] - 2.0 * z_error, "best of token {token}");
    }
    let dz_error = |dz: f64, weight: f64| (dz.abs() + weight.abs() / 16_777_216.0) * relative + dz.abs() / 8e6;
    for token in 0..case.tokens() {
        let dz_max = max_magnitude(dz[token].iter().copied());
        // The label's dz is 1 less than its probability, so its error is bounded with the weight
        // itself.
        let slack: f64 = dz[token].iter().map(|&dz| dz_error(dz, exact.weight[token])).sum::<f64>()
            + exact.weight[token].abs() * relative;
        let limit = head_max * (slack + VOCABULARY as f64 * dz_max * TERM);
        for k in 0..HIDDEN {
            let want: f64 = (0..VOCABULARY).map(|v| dz[token][v] * exact.head[v * HIDDEN + k]).sum();
            let got = f64::from(got.dh[token * HIDDEN + k]);
            assert!((got - want).abs() <= limit, "dh[{token}, {k}]: {want:e} wanted, {got:e} given, within {limit:e}");
        }
    }
    let dhead = got.dhead.expect("dhead was asked for");
    for v in 0..VOCABULARY {
        let slack: f64 = (0..case.tokens())
            .map(|token| {
                let label = if inputs.labels[token] == v as i32 { exact.weight[token].abs() * relative } else { 0.0 };
                dz_error(dz[token][v], exact.weight[token]) + label
            })
            .sum();
        let column_max = max_magnitude((0..case.tokens()).map(|token| dz[token][v]));
        let limit = h_max * (slack + case.tokens() as f64 * column_max * TERM);
        for k in 0..HIDDEN {
            let want: f64 = (0..case.tokens()).map(|token| dz[token][v] * exact.h[token * HIDDEN + k]).sum();
            let got = f64::from(dhead[v * HIDDEN + k]);
            assert!((got - want).abs() <= limit, "dhead[{v}, {k}]: {want:e} wanted, {got:e} given, within {limit:e}");
        }
    }
}

#[test]
fn analytic_gradient_against_central_differences() {
    const STEP: f64 = 1e-4;
    let mut exact = Exact::new(&case().inputs());
    let dz = exact.grad_logits();
    // The objective's third derivative along one input is at most Σ|weight|·max|other operand|³
    // (the third cumulant of a bounded variable), so the difference quotient is off by STEP²/6 of
    // that, and by rounding: 1e-16·|objective|/STEP.
    let tolerance = |others: f64, weights: f64| STEP * STEP / 6.0 * weights * others.powi(3) * 8.0 + 1e-10;
    let weights: f64 = exact.weight.iter().map(|w| w.abs()).sum();
    let quotient = |exact: &mut Exact, pick: fn(&mut Exact) -> &mut Vec<f64>, index: usize| {
        let middle = pick(exact)[index];
        pick(exact)[index] = middle + STEP;
        let above = exact.objective();
        pick(exact)[index] = middle - STEP;
        let below = exact.objective();
        pick(exact)[index] = middle;
        (above - below) / (2.0 * STEP)
    };
    let head_max = max_magnitude(exact.head.iter().copied());
    for index in (0..exact.h.len()).step_by(17) {
        let (token, k) = (index / HIDDEN, index % HIDDEN);
        let want: f64 = (0..VOCABULARY).map(|v| dz[token][v] * exact.head[v * HIDDEN + k]).sum();
        let got = quotient(&mut exact, |exact| &mut exact.h, index);
        assert!((got - want).abs() <= tolerance(head_max, weights), "dh[{token}, {k}]: {want:e} against {got:e}");
    }
    let h_max = max_magnitude(exact.h.iter().copied());
    for index in (0..exact.head.len()).step_by(997) {
        let (v, k) = (index / HIDDEN, index % HIDDEN);
        let want: f64 = (0..exact.labels.len()).map(|token| dz[token][v] * exact.h[token * HIDDEN + k]).sum();
        let got = quotient(&mut exact, |exact| &mut exact.head, index);
        assert!((got - want).abs() <= tolerance(h_max, weights), "dhead[{v}, {k}]: {want:e} against {got:e}");
    }
}
