//! The gated delta rule on every CPU path and every device, and what follows from its contract.

use isobit_conformance::cases::delta_rule::{DeltaRuleCase, Inputs};
use isobit_conformance::data::Distribution;
use isobit_conformance::{Output, assert_same, fastest};
use isobit_kernels::op::DeltaRuleForward;
use isobit_kernels::op::delta_rule::CHUNK;
use isobit_kernels::{Backend, Reference};
use std::ops::Range;

#[test]
fn delta_rule() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::delta_rule::visit);
}

fn case(row_starts: &[usize]) -> DeltaRuleCase {
    DeltaRuleCase {
        row_starts: row_starts.to_vec(),
        key_heads: 2,
        value_heads: 4,
        key_width: 20,
        value_width: 36,
        initial: false,
        kind: Distribution::Outliers,
    }
}

/// The inputs of some tokens.
fn tokens(inputs: &Inputs, total: usize, range: Range<usize>) -> Inputs {
    let pick = |x: &[f32]| x[x.len() / total * range.start..x.len() / total * range.end].to_vec();
    Inputs {
        q: pick(&inputs.q),
        k: pick(&inputs.k),
        v: pick(&inputs.v),
        g: pick(&inputs.g),
        beta: pick(&inputs.beta),
        d_o: pick(&inputs.d_o),
        initial: None,
    }
}

fn equal(what: &'static str, want: &[f32], got: &[f32]) {
    assert_same(&[Output::new(what, want), Output::new(what, got)]);
}

/// A state handed over at chunk borders gives the bits of one call; so a decoder may keep the state
/// of the last border and the tokens since.
#[test]
fn a_state_is_handed_over_at_chunk_borders() {
    fn law<B: Backend>(b: &B) {
        let total = 3 * CHUNK + 17;
        let whole = case(&[0, total]);
        let inputs = whole.inputs();
        let [o, last] = whole.forward(b, &inputs);
        let width = o.len() / total;
        for borders in [vec![0, CHUNK, total], vec![0, 2 * CHUNK, 3 * CHUNK, total]] {
            let mut state: Option<Vec<f32>> = None;
            for part in borders.windows(2) {
                let mut given = tokens(&inputs, total, part[0]..part[1]);
                given.initial = state.take();
                let [part_o, next] = case(&[0, part[1] - part[0]]).forward(b, &given);
                equal("o", &o[part[0] * width..part[1] * width], &part_o);
                state = Some(next);
            }
            equal("final state", &last, &state.unwrap_or_default());
        }
        // Token by token within a chunk: the tokens since the border are computed again.
        let [_, border] = case(&[0, CHUNK]).forward(b, &tokens(&inputs, total, 0..CHUNK));
        for end in [CHUNK + 1, CHUNK + 2, CHUNK + 31, 2 * CHUNK] {
            let mut given = tokens(&inputs, total, CHUNK..end);
            given.initial = Some(border.clone());
            let [part_o, _] = case(&[0, end - CHUNK]).forward(b, &given);
            equal("decoded o", &o[CHUNK * width..end * width], &part_o);
        }
    }
    law(&Reference);
    law(&fastest());
}

/// The forward of a prefix is the prefix of the forward, even when what follows is not finite.
#[test]
fn a_token_depends_on_the_past_alone() {
    fn law<B: Backend>(b: &B) {
        let total = CHUNK + 50;
        let whole = case(&[0, total]);
        let inputs = whole.inputs();
        let [o, _] = whole.forward(b, &inputs);
        let width = o.len() / total;
        for end in [1, 2, 7, 16, 33, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 41] {
            let [prefix, _] = case(&[0, end]).forward(b, &tokens(&inputs, total, 0..end));
            equal("prefix", &o[..end * width], &prefix);
            for tensor in 0..5 {
                let mut bad = inputs.clone();
                let x = [&mut bad.q, &mut bad.k, &mut bad.v, &mut bad.g, &mut bad.beta];
                let x = x.into_iter().nth(tensor).expect("five tensors");
                let at = x.len() / total * end;
                x[at] = f32::NAN;
                let p = whole.op();
                let mut got = isobit_conformance::poisoned(b, o.len());
                let [q, k, v, g, beta] = [&bad.q, &bad.k, &bad.v, &bad.g, &bad.beta].map(|x| b.upload(x.as_slice()));
                b.run(DeltaRuleForward {
                    o: &mut got,
                    final_state: None,
                    q: &q,
                    k: &k,
                    v: &v,
                    g: &g,
                    beta: &beta,
                    initial_state: None,
                    p,
                });
                let got = isobit_conformance::downloaded(b, &got);
                equal("before the poison", &o[..end * width], &got[..end * width]);
                assert!(got[end * width..].iter().any(|x| x.is_nan()), "tensor {tensor} is read");
            }
        }
    }
    law(&Reference);
    law(&fastest());
}

/// A document's results do not depend on its neighbours.
#[test]
fn documents_are_alone() {
    fn law<B: Backend>(b: &B) {
        let starts = [0, 70, 70, 75, 205];
        let together = case(&starts);
        let inputs = together.inputs();
        let (forward, backward) = (together.forward(b, &inputs), together.backward(b, &inputs));
        let total = 205;
        for (index, row) in starts.windows(2).enumerate().filter(|(_, row)| row[0] < row[1]) {
            let alone = case(&[0, row[1] - row[0]]);
            let given = tokens(&inputs, total, row[0]..row[1]);
            let part = |x: &[f32]| x[x.len() / total * row[0]..x.len() / total * row[1]].to_vec();
            let [o, last] = alone.forward(b, &given);
            equal("o", &part(&forward[0]), &o);
            equal("final state", &forward[1][index * last.len()..][..last.len()], &last);
            for (want, got) in backward.iter().zip(&alone.backward(b, &given)) {
                equal("gradient", &part(want), got);
            }
        }
    }
    law(&Reference);
    law(&fastest());
}
