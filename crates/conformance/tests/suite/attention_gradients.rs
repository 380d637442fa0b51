//! The reference's attention against float64: an analytic backward pass whose own derivatives are
//! checked by differences.
//!
//! Errors are `‖got − want‖ / ‖want‖` per tensor. The derivation of the limits stands at
//! [`limits`].
#![expect(clippy::float_arithmetic, reason = "errors are measured in float64")]

use isobit_conformance::cases::attention::{AttentionCase, packed};
use isobit_conformance::cases::sink::AttentionWithSinks;
use isobit_conformance::data::Distribution;
use isobit_conformance::downloaded;
use isobit_kernels::op::{BiasBackward, SinkBackward, SinkForward};
use isobit_kernels::{Device, Reference};
use isobit_numerics::slices::Profile;

struct Exact<'a> {
    case: &'a AttentionCase,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    d_o: Vec<f64>,
    /// One per head, or none.
    sinks: Vec<f64>,
}

/// Everything float64 says about one case.
struct Results {
    o: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
    dsinks: Vec<f64>,
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl<'a> Exact<'a> {
    fn new(case: &'a AttentionCase) -> Self {
        let inputs = case.inputs();
        let [q, k, v, d_o] = [inputs.q, inputs.k, inputs.v, inputs.d_o].map(|x| widen(&x));
        Self { case, q, k, v, d_o, sinks: Vec::new() }
    }

    fn with_sinks(case: &'a AttentionCase, sinks: &[f32]) -> Self {
        Self { sinks: widen(sinks), ..Self::new(case) }
    }

    fn row(&self, x: &'a [f64], token: usize, head: usize, heads: usize) -> &'a [f64] {
        let width = x.len() / self.tokens() / heads;
        &x[(token * heads + head) * width..][..width]
    }

    fn tokens(&self) -> usize {
        self.q.len() / self.case.heads / self.case.key_width
    }

    /// Visible keys of a query with their probabilities, and the base-2 logarithm of the
    /// denominator.
    fn probabilities(&self, start: usize, i: usize, h: usize) -> (Vec<(usize, f64)>, f64) {
        let p = self.case.op();
        let (heads, kv) = (p.heads, h / p.group());
        let width = p.key_width;
        let q = &self.q[((start + i) * heads + h) * width..][..width];
        let scores: Vec<(usize, f64)> = p
            .visible(i)
            .map(|j| {
                let k = &self.k[((start + j) * p.kv_heads + kv) * width..][..width];
                let score = dot(q, k) * f64::from(p.softmax_scale);
                (start + j, p.cap.map_or(score, |cap| f64::from(cap) * libm::tanh(score / f64::from(cap))))
            })
            .collect();
        let sink = self.sinks.get(h).copied();
        let most = scores.iter().map(|s| s.1).chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|s| s.1).chain(sink).map(|s| libm::exp(s - most)).sum();
        let lse = (most + libm::log(total)) * std::f64::consts::LOG2_E;
        (scores.into_iter().map(|(j, s)| (j, libm::exp(s - most) / total)).collect(), lse)
    }

    /// `Σ dO·o`: the scalar whose gradients are wanted.
    fn objective(&self) -> f64 {
        let p = self.case.op();
        let mut total = 0.0;
        for span in &self.case.spans {
            for i in 0..span.queries.len() {
                for h in 0..p.heads {
                    for (j, probability) in self.probabilities(span.keys.start, i, h).0 {
                        let d_o = self.row(&self.d_o, span.queries.start + i, h, p.heads);
                        total += probability * dot(d_o, self.row(&self.v, j, h / p.group(), p.kv_heads));
                    }
                }
            }
        }
        total
    }

    fn results(&self) -> Results {
        let p = self.case.op();
        let (kw, vw) = (p.key_width, p.value_width);
        let mut r = Results {
            o: vec![0.0; self.d_o.len()],
            lse: vec![0.0; self.tokens() * p.heads],
            dq: vec![0.0; self.q.len()],
            dk: vec![0.0; self.k.len()],
            dv: vec![0.0; self.v.len()],
            dsinks: vec![0.0; self.sinks.len()],
        };
        for span in &self.case.spans {
            for (i, t) in span.queries.clone().enumerate() {
                for h in 0..p.heads {
                    let kv = h / p.group();
                    let (probabilities, lse) = self.probabilities(span.keys.start, i, h);
                    let (row, key_row) = (t * p.heads + h, |j: usize| j * p.kv_heads + kv);
                    r.lse[row] = lse;
                    let d_o = &self.d_o[row * vw..][..vw];
                    let d_p: Vec<f64> =
                        probabilities.iter().map(|&(j, _)| dot(d_o, &self.v[key_row(j) * vw..][..vw])).collect();
                    let delta: f64 = probabilities.iter().zip(&d_p).map(|((_, p), d)| p * d).sum();
                    if let Some(sink) = self.sinks.get(h) {
                        r.dsinks[h] -= libm::exp(sink - lse / std::f64::consts::LOG2_E) * delta;
                    }
                    for (&(j, probability), d_p) in probabilities.iter().zip(&d_p) {
                        let score = (libm::log2(probability) + lse) / std::f64::consts::LOG2_E;
                        let share = p.cap.map_or(0.0, |cap| score / f64::from(cap));
                        let d_s = probability * (d_p - delta) * (1.0 - share * share) * f64::from(p.softmax_scale);
                        for d in 0..vw {
                            r.o[row * vw + d] += probability * self.v[key_row(j) * vw + d];
                            r.dv[key_row(j) * vw + d] += probability * d_o[d];
                        }
                        for d in 0..kw {
                            r.dq[row * kw + d] += d_s * self.k[key_row(j) * kw + d];
                            r.dk[key_row(j) * kw + d] += d_s * self.q[row * kw + d];
                        }
                    }
                }
            }
        }
        r
    }
}

fn case(lengths: &[usize], widths: (usize, usize), window: Option<usize>, profile: Profile) -> AttentionCase {
    AttentionCase {
        spans: packed(lengths),
        heads: 4,
        kv_heads: 2,
        key_width: widths.0,
        value_width: widths.1,
        window,
        profile,
        kind: Distribution::Plain,
        cap: None,
    }
}

/// Central differences in float64 with step 1e-5: truncation about 1e-10, cancellation about
/// 1e-16·|objective|/1e-5 < 1e-9.
#[test]
fn the_analytic_gradient_is_the_derivative() {
    for cap in [None, Some(0.8)] {
        for sinks in [&[][..], &[0.5, -1.0, 2.0, 0.0]] {
            is_the_derivative(&AttentionCase { cap, ..case(&[3, 9], (4, 6), Some(7), Profile::X2) }, sinks);
        }
    }
}

fn is_the_derivative(case: &AttentionCase, sinks: &[f32]) {
    let exact = Exact::with_sinks(case, sinks);
    let analytic = exact.results();
    let check = |name: &str, gradient: &[f64], tensor: for<'x> fn(&'x mut Exact<'_>) -> &'x mut Vec<f64>| {
        for index in (0..gradient.len()).step_by(3) {
            let at = |offset: f64| {
                let mut moved = Exact::with_sinks(case, sinks);
                tensor(&mut moved)[index] += offset;
                moved.objective()
            };
            let difference = (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!(
                (difference - gradient[index]).abs() < 1e-8,
                "{name}[{index}]: difference {difference}, analytic {}",
                gradient[index]
            );
        }
    };
    check("dq", &analytic.dq, |e| &mut e.q);
    check("dk", &analytic.dk, |e| &mut e.k);
    check("dv", &analytic.dv, |e| &mut e.v);
    check("dsinks", &analytic.dsinks, |e| &mut e.sinks);
}

/// Largest relative error allowed for `(o, lse, gradients)`.
///
/// Rows of roughly normal numbers have a maximum near 3σ. Profile x2 rounds them to 3σ/32512 (rms
/// 2.7e-5 σ) and drops `lo·lo` (rms 74² of units², 4.6e-5 of a term): 6e-5 relative per product of
/// independent terms. A score (rms 1, or 1.4 in base 2) so moves its probability by about 6e-5
/// relative. `o` adds the slicing of P, whose largest entry may be ten times the rms: 1e-4 each,
/// 2e-4 in all with the score's share. Gradients stack score, dP, and the slices of dS, in which
/// `P·(dP − D)` cancels: 5e-4. Profile x3 gains 2⁸ on each of these (2e-6), and float32 itself adds
/// 2⁻²⁴ per operation of a chain about ten long, 1e-6.
fn limits(profile: Profile) -> (f64, f64, f64) {
    match profile {
        Profile::X2 => (2e-4, 2e-4, 5e-4),
        Profile::X3 => (2e-6, 2e-6, 3e-6),
    }
}

#[test]
fn the_reference_is_close_to_float64() {
    for profile in Profile::ALL {
        for (lengths, widths, window, cap) in [
            (&[1, 2, 150][..], (64, 64), None, None),
            (&[40][..], (192, 128), None, None),
            (&[140, 33][..], (24, 40), Some(50), None),
            (&[140, 33][..], (24, 40), Some(50), Some(2.0)),
        ] {
            let case = AttentionCase { cap, ..case(lengths, widths, window, profile) };
            let inputs = case.inputs();
            let [o, lse] = case.forward(&Reference, &inputs);
            let [dq, dk, dv] = case.backward(&Reference, &inputs, &o, &lse);
            let want = Exact::new(&case).results();
            let (o_limit, lse_limit, grad_limit) = limits(profile);
            for (name, got, want, limit) in [
                ("o", &o, &want.o, o_limit),
                ("lse", &lse, &want.lse, lse_limit),
                ("dq", &dq, &want.dq, grad_limit),
                ("dk", &dk, &want.dk, grad_limit),
                ("dv", &dv, &want.dv, grad_limit),
            ] {
                is_close(&format!("{name}, {}, {lengths:?}, {widths:?}", profile.name()), got, want, limit);
            }
        }
    }
}

fn is_close(what: &str, got: &[f32], want: &[f64], limit: f64) {
    let (mut error, mut norm) = (0.0, 0.0);
    for (got, want) in got.iter().zip(want) {
        error += (f64::from(*got) - want) * (f64::from(*got) - want);
        norm += want * want;
    }
    let relative = (error / norm).sqrt();
    assert!(relative < limit, "{what}: relative error {relative:.2e}, limit {limit:.0e}");
}

/// The limits are those without sinks: the factor and the new logarithm add a few roundings.
#[test]
fn with_sinks_too() {
    for profile in Profile::ALL {
        let case = AttentionWithSinks(case(&[1, 2, 150], (64, 64), Some(50), profile));
        let (b, sinks, inputs) = (&Reference, case.sinks(), case.0.inputs());
        let want = Exact::with_sinks(&case.0, &sinks).results();
        let [o, lse] = case.0.forward(b, &inputs);
        let (mut o, mut lse, sink) = (b.upload(&o), b.upload(&lse), b.upload(&sinks));
        b.run(SinkForward { o: &mut o, lse: &mut lse, sink: &sink });
        let mut terms = b.zeros(lse.len());
        let d_o = b.upload(&inputs.d_o);
        b.run(SinkBackward { terms: &mut terms, d_o: &d_o, o: &o, lse: &lse, sink: &sink });
        let mut dsinks = b.zeros(sinks.len());
        b.run(BiasBackward { dbias: &mut dsinks, dy: &terms, row_starts: &[0, 1, 3, 153] });
        let (o, lse) = (downloaded(b, &o), downloaded(b, &lse));
        let [dq, dk, dv] = case.0.backward(b, &inputs, &o, &lse);
        let (o_limit, lse_limit, grad_limit) = limits(profile);
        let at = |name: &str| format!("{name} with sinks, {}", profile.name());
        is_close(&at("o"), &o, &want.o, o_limit);
        is_close(&at("lse"), &lse, &want.lse, lse_limit);
        is_close(&at("dq"), &dq, &want.dq, grad_limit);
        is_close(&at("dk"), &dk, &want.dk, grad_limit);
        is_close(&at("dv"), &dv, &want.dv, grad_limit);
        is_close(&at("dsinks"), &downloaded(b, &dsinks), &want.dsinks, grad_limit);
    }
}
