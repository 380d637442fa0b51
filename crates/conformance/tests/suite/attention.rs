//! Attention on every CPU path, and the laws that make cached decoding and packing exact.

use isobit_conformance::cases::attention::{AttentionCase, Inputs, packed, visit};
use isobit_conformance::data::Distribution;
use isobit_conformance::{EveryBackend, Output, devices, first_difference};
use isobit_kernels::op::Span;
use isobit_kernels::{Backend, Cpu, Path, Reference};
use isobit_numerics::slices::Profile;

#[test]
fn attention() {
    let mut paths = EveryBackend::new();
    visit(&mut paths);
    paths.finish();
}

fn case(lengths: &[usize], window: Option<usize>, profile: Profile) -> AttentionCase {
    AttentionCase {
        spans: packed(lengths),
        heads: 2,
        kv_heads: 1,
        key_width: 12,
        value_width: 20,
        window,
        profile,
        kind: Distribution::Outliers,
        cap: None,
    }
}

/// Runs a law on the reference, on the fastest path and on every device.
fn everywhere(
    law: impl Fn(&dyn Fn(&AttentionCase, &Inputs) -> [Vec<f32>; 2], &dyn Fn(&AttentionCase, &Inputs) -> [Vec<f32>; 5]),
) {
    fn all<B: Backend>(b: &B, case: &AttentionCase, inputs: &Inputs) -> [Vec<f32>; 5] {
        let [o, lse] = case.forward(b, inputs);
        let [dq, dk, dv] = case.backward(b, inputs, &o, &lse);
        [o, lse, dq, dk, dv]
    }
    law(&|case, inputs| case.forward(&Reference, inputs), &|case, inputs| all(&Reference, case, inputs));
    let cpu = Cpu::new(2, Path::best()).expect("the best path is available");
    law(&|case, inputs| case.forward(&cpu, inputs), &|case, inputs| all(&cpu, case, inputs));
    for gpu in devices().into_iter().filter_map(|(_, device)| device.ok()) {
        law(&|case, inputs| case.forward(&gpu, inputs), &|case, inputs| all(&gpu, case, inputs));
    }
}

#[track_caller]
fn equal(name: &'static str, want: &[f32], got: &[f32]) {
    let difference = first_difference(&[Output::new(name, want)], &[Output::new(name, got)]);
    assert!(difference.is_none(), "{}", difference.unwrap_or_default());
}

const PROFILES_AND_WINDOWS: [(Profile, Option<usize>); 3] =
    [(Profile::X2, None), (Profile::X2, Some(70)), (Profile::X3, None)];

#[test]
fn the_forward_of_a_prefix_is_the_prefix_of_the_forward() {
    for (profile, window) in PROFILES_AND_WINDOWS {
        everywhere(|forward, _| {
            let whole = case(&[140], window, profile);
            let inputs = whole.inputs();
            let [o, lse] = forward(&whole, &inputs);
            for length in [1, 31, 64, 127, 128, 129] {
                let prefix = case(&[length], window, profile);
                let part = |x: &[f32]| x[..x.len() / 140 * length].to_vec();
                let inputs = Inputs { q: part(&inputs.q), k: part(&inputs.k), v: part(&inputs.v), d_o: Vec::new() };
                let [prefix_o, prefix_lse] = forward(&prefix, &inputs);
                equal("o", &part(&o), &prefix_o);
                equal("lse", &part(&lse), &prefix_lse);
            }
        });
    }
}

#[test]
fn cached_decoding_equals_the_full_forward() {
    for (profile, window) in PROFILES_AND_WINDOWS {
        everywhere(|forward, _| {
            let whole = case(&[150], window, profile);
            let inputs = whole.inputs();
            let [o, lse] = forward(&whole, &inputs);
            for (end, queries) in [(1, 1), (2, 2), (64, 1), (128, 1), (129, 3), (130, 2), (150, 1), (150, 40)] {
                let step = AttentionCase { spans: vec![Span { queries: 0..queries, keys: 0..end }], ..whole.clone() };
                let rows = |x: &[f32]| x[x.len() / 150 * (end - queries)..x.len() / 150 * end].to_vec();
                let cached = |x: &[f32]| x[..x.len() / 150 * end].to_vec();
                let inputs = Inputs { q: rows(&inputs.q), k: cached(&inputs.k), v: cached(&inputs.v), d_o: Vec::new() };
                let [step_o, step_lse] = forward(&step, &inputs);
                equal("o", &rows(&o), &step_o);
                equal("lse", &rows(&lse), &step_lse);
            }
        });
    }
}

/// Documents packed into one buffer, in any order, against one call each.
#[test]
fn packed_documents_do_not_see_each_other() {
    let lengths = [5, 130, 1, 64];
    for (profile, window) in PROFILES_AND_WINDOWS {
        everywhere(|_, all| {
            let pack = case(&lengths, window, profile);
            let inputs = pack.inputs();
            let together = all(&pack, &inputs);
            let tokens: usize = lengths.iter().sum();
            let rows = |x: &[f32], span: &Span| {
                let width = x.len() / tokens;
                x[span.queries.start * width..span.queries.end * width].to_vec()
            };
            let pick = |spans: &[Span]| {
                let gather = |x: &[f32]| spans.iter().flat_map(|span| rows(x, span)).collect::<Vec<_>>();
                Inputs { q: gather(&inputs.q), k: gather(&inputs.k), v: gather(&inputs.v), d_o: gather(&inputs.d_o) }
            };
            for span in &pack.spans {
                let alone = all(&case(&[span.queries.len()], window, profile), &pick(std::slice::from_ref(span)));
                for (together, alone) in together.iter().zip(&alone) {
                    equal("alone", &rows(together, span), alone);
                }
            }
            let mut shuffled = pack.spans.clone();
            shuffled.rotate_left(1);
            shuffled.swap(0, 1);
            let order: Vec<usize> = shuffled.iter().map(|span| span.queries.len()).collect();
            let again = all(&case(&order, window, profile), &pick(&shuffled));
            for (together, again) in together.iter().zip(&again) {
                let want: Vec<f32> = shuffled.iter().flat_map(|span| rows(together, span)).collect();
                equal("shuffled", &want, again);
            }
        });
    }
}

/// A non-finite number poisons what sees it and nothing else: not earlier positions, not other
/// documents.
#[test]
fn poison_does_not_travel_backwards_or_sideways() {
    for (profile, window) in PROFILES_AND_WINDOWS {
        everywhere(|forward, all| {
            let pack = case(&[70, 140], window, profile);
            let inputs = pack.inputs();
            let (clean, poisoned_at) = (all(&pack, &inputs), 70 + 40);
            for tensor in 0..4 {
                let mut bad = inputs.clone();
                let tensors = [&mut bad.q, &mut bad.k, &mut bad.v, &mut bad.d_o];
                let x = &mut *tensors[tensor];
                let width = x.len() / 210;
                x[poisoned_at * width + 1] = if tensor % 2 == 0 { f32::NAN } else { f32::INFINITY };
                let before = |x: &[f32], rows: usize| x[..x.len() / 210 * rows].to_vec();
                for (want, got) in clean.iter().zip(&all(&pack, &bad)) {
                    equal("other document", &before(want, 70), &before(got, 70));
                }
                let got = forward(&pack, &bad);
                for (want, got) in clean.iter().zip(&got) {
                    equal("earlier positions", &before(want, poisoned_at), &before(got, poisoned_at));
                }
                let heads = 2;
                let (o, lse) = (&got[0], &got[1]);
                // A poisoned query or key reaches the denominator, a value only the output.
                assert_eq!(lse[poisoned_at * heads].is_nan(), tensor < 2, "lse, tensor {tensor}");
                assert_eq!(o[poisoned_at * heads * 20].is_nan(), tensor < 3, "o, tensor {tensor}");
            }
        });
    }
}
