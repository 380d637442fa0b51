//! The reference's gated delta rule against the step-by-step recurrence in float64, whose gradients
//! are checked by differences.
//!
//! Errors are `‖got − want‖ / ‖want‖` per tensor. The derivation of the limit stands at [`LIMIT`].
#![expect(clippy::float_arithmetic, reason = "errors are measured in float64")]

use isobit_conformance::cases::delta_rule::{DeltaRuleCase, Inputs};
use isobit_conformance::data::Distribution;
use isobit_kernels::Reference;

/// The inputs, widened.
struct Exact<'a> {
    case: &'a DeltaRuleCase,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    g: Vec<f64>,
    beta: Vec<f64>,
    d_o: Vec<f64>,
}

/// `o`, final states, `dq`, `dk`, `dv`, `dg`, `dbeta`.
type Results = [Vec<f64>; 7];

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl<'a> Exact<'a> {
    fn new(case: &'a DeltaRuleCase, x: &Inputs) -> Self {
        let [q, k, v] = [&x.q, &x.k, &x.v].map(|x| widen(x));
        Self { case, q, k, v, g: widen(&x.g), beta: widen(&x.beta), d_o: widen(&x.d_o) }
    }

    fn results(&self) -> Results {
        let p = self.case.op();
        let [keys, values, scalars, states] = p.lengths();
        let mut r = [values, states, keys, keys, values, scalars, scalars].map(|length| vec![0.0; length]);
        for document in 0..p.documents() {
            for head in 0..p.value_heads {
                self.head(document, head, &mut r);
            }
        }
        r
    }

    /// One value head of one document: forward over the tokens keeping every state, then backward
    /// over them.
    fn head(&self, document: usize, head: usize, [o, last, dq, dk, dv, dg, dbeta]: &mut Results) {
        let p = self.case.op();
        let (kw, vw) = (p.key_width, p.value_width);
        let key_at = |t: usize| (t * p.key_heads + head / p.group()) * kw;
        let value_at = |t: usize| (t * p.value_heads + head) * vw;
        let scalar_at = |t: usize| t * p.value_heads + head;
        let mut states = vec![vec![0.0; kw * vw]];
        // Per token: the decayed state, what it predicts for the key, δ.
        let mut kept = Vec::new();
        for t in p.document(document) {
            let (q, k, v) = (&self.q[key_at(t)..][..kw], &self.k[key_at(t)..][..kw], &self.v[value_at(t)..][..vw]);
            let decay = libm::exp(self.g[scalar_at(t)]);
            let decayed: Vec<f64> = states[states.len() - 1].iter().map(|s| decay * s).collect();
            let mut s = decayed.clone();
            let missing: Vec<f64> =
                (0..vw).map(|c| v[c] - (0..kw).map(|d| decayed[d * vw + c] * k[d]).sum::<f64>()).collect();
            let delta: Vec<f64> = missing.iter().map(|m| self.beta[scalar_at(t)] * m).collect();
            for d in 0..kw {
                for c in 0..vw {
                    s[d * vw + c] += k[d] * delta[c];
                    o[value_at(t) + c] += s[d * vw + c] * q[d];
                }
            }
            states.push(s);
            kept.push((decayed, missing, delta));
        }
        let at = (document * p.value_heads + head) * kw * vw;
        last[at..at + kw * vw].copy_from_slice(&states[states.len() - 1]);
        let mut ds = vec![0.0; kw * vw];
        for (index, t) in p.document(document).enumerate().rev() {
            let (q, k, d_o) = (&self.q[key_at(t)..][..kw], &self.k[key_at(t)..][..kw], &self.d_o[value_at(t)..][..vw]);
            let (decayed, missing, delta) = &kept[index];
            let beta = self.beta[scalar_at(t)];
            let mut d_delta = vec![0.0; vw];
            for d in 0..kw {
                let s = &states[index + 1][d * vw..][..vw];
                dq[key_at(t) + d] += dot(s, d_o);
                let ds = &mut ds[d * vw..][..vw];
                for c in 0..vw {
                    ds[c] += q[d] * d_o[c];
                    d_delta[c] += ds[c] * k[d];
                }
                dk[key_at(t) + d] += dot(ds, delta);
            }
            dbeta[scalar_at(t)] = dot(&d_delta, missing);
            let decay = libm::exp(self.g[scalar_at(t)]);
            for c in 0..vw {
                dv[value_at(t) + c] = beta * d_delta[c];
            }
            for d in 0..kw {
                for c in 0..vw {
                    let d_missing = -beta * d_delta[c];
                    let ds = &mut ds[d * vw + c];
                    *ds += k[d] * d_missing;
                    dk[key_at(t) + d] += decayed[d * vw + c] * d_missing;
                    dg[scalar_at(t)] += *ds * decayed[d * vw + c];
                    *ds *= decay;
                }
            }
        }
    }
}

fn case(row_starts: &[usize], widths: (usize, usize)) -> DeltaRuleCase {
    DeltaRuleCase {
        row_starts: row_starts.to_vec(),
        key_heads: 2,
        value_heads: 4,
        key_width: widths.0,
        value_width: widths.1,
        initial: false,
        kind: Distribution::Plain,
    }
}

/// Central differences in float64 with step 1e-5: truncation about 1e-9, cancellation about
/// 1e-14·|objective|/1e-5 < 1e-8.
#[test]
fn the_analytic_gradient_is_the_derivative() {
    let case = case(&[0, 3, 12], (4, 5));
    let inputs = case.inputs();
    let [_, _, dq, dk, dv, dg, dbeta] = Exact::new(&case, &inputs).results();
    let check = |name: &str, gradient: &[f64], tensor: for<'x> fn(&'x mut Exact<'_>) -> &'x mut Vec<f64>| {
        for index in (0..gradient.len()).step_by(3) {
            let at = |offset: f64| {
                let mut moved = Exact::new(&case, &inputs);
                tensor(&mut moved)[index] += offset;
                dot(&moved.results()[0], &moved.d_o)
            };
            let difference = (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!(
                (difference - gradient[index]).abs() < 1e-7,
                "{name}[{index}]: difference {difference}, analytic {}",
                gradient[index]
            );
        }
    };
    check("dq", &dq, |e| &mut e.q);
    check("dk", &dk, |e| &mut e.k);
    check("dv", &dv, |e| &mut e.v);
    check("dg", &dg, |e| &mut e.g);
    check("dbeta", &dbeta, |e| &mut e.beta);
}

/// Largest relative error allowed.
///
/// Every result is a few chains one after another, each at most 256 roundings of 2⁻²⁴ of its
/// running sum. With terms of mixed sign the roundings add like a random walk, √256·2⁻²⁴ = 1e-6 of
/// the terms' norm; decays add up to 64 roundings to a factor, 4e-6 at worst and 5e-7 as a walk.
/// The state, which carries errors over chunks, contracts (keys have norm 1, beta and decay are at
/// most 1), so that errors of about ten chunks' chains meet: 3e-6. Gradients pass the same again
/// backwards, and `dk`, `dg` add terms that partly cancel.
const LIMIT: f64 = 1e-5;

#[test]
fn the_reference_is_close_to_float64() {
    for row_starts in
        [&[0, 1][..], &[0, 5], &[0, 63], &[0, 64], &[0, 65], &[0, 130], &[0, 7, 7, 80, 300], &[0, 1, 2, 66]]
    {
        for widths in [(16, 24), (33, 7)] {
            let case = case(row_starts, widths);
            let inputs = case.inputs();
            let [o, last] = case.forward(&Reference, &inputs);
            let [dq, dk, dv, dg, dbeta] = case.backward(&Reference, &inputs);
            let want = Exact::new(&case, &inputs).results();
            let names = ["o", "final state", "dq", "dk", "dv", "dg", "dbeta"];
            for ((name, got), want) in names.into_iter().zip([o, last, dq, dk, dv, dg, dbeta]).zip(&want) {
                let (mut error, mut norm) = (0.0, 0.0);
                for (got, want) in got.iter().zip(want) {
                    error += (f64::from(*got) - want) * (f64::from(*got) - want);
                    norm += want * want;
                }
                assert!(
                    error.sqrt() <= LIMIT * norm.sqrt(),
                    "{name}, {row_starts:?}, {widths:?}: relative error {:.2e}, limit {LIMIT:.0e}",
                    (error / norm).sqrt()
                );
            }
        }
    }
}
