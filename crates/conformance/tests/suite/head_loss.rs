//! Fused LM head and cross-entropy: every CPU path against the reference, and what must hold on any
//! backend.

use isobit_conformance::cases::head_loss::{HeadFormat, HeadLossCase, Ignored, Inputs, Results, visit};
use isobit_conformance::data::Distribution;
use isobit_kernels::{Backend, Cpu, Device, Matrix, Path, Reference, StoredMatrix};
use isobit_numerics::slices::Profile;

#[test]
fn head_loss() {
    let mut paths = isobit_conformance::EveryBackend::new();
    visit(&mut paths);
    paths.finish();
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Tokens `0..split` in a first call, the rest in a second one that adds to the first one's
/// `dhead`.
fn in_two_calls<B: Backend>(b: &B, case: &HeadLossCase, inputs: &Inputs, split: usize) -> Results {
    let part = |row_starts: Vec<usize>, from: usize, to: usize, dhead: Vec<f32>| {
        let inputs = Inputs {
            h: inputs.h[from * case.hidden..to * case.hidden].to_vec(),
            head: inputs.head.clone(),
            labels: inputs.labels[from..to].to_vec(),
            weight: inputs.weight[from..to].to_vec(),
            dhead,
        };
        let head = b.upload(&inputs.head);
        HeadLossCase { row_starts, ..case.clone() }.results(b, &inputs, Matrix::Stored(StoredMatrix::F32(&head)))
    };
    let tokens = case.tokens();
    let before = case.row_starts.iter().copied().filter(|&start| start < split).chain([split]);
    let after = [split].into_iter().chain(case.row_starts.iter().copied().filter(|&start| start > split));
    let mut first = part(before.collect(), 0, split, inputs.dhead.clone());
    let dhead = first.dhead.take().unwrap_or_default();
    let mut second = part(after.map(|start| start - split).collect(), split, tokens, dhead);
    first.loss.append(&mut second.loss);
    first.lse.append(&mut second.lse);
    first.best.append(&mut second.best);
    first.dh.append(&mut second.dh);
    Results { dhead: second.dhead, ..first }
}

fn splits_agree<B: Backend>(b: &B, profile: Profile) {
    let case = HeadLossCase {
        row_starts: vec![0, 9, 21, 37],
        hidden: 40,
        vocabulary: 700,
        profile,
        format: HeadFormat::F32,
        kind: Distribution::Outliers,
        ignored: Ignored::Some,
        with_dhead: true,
        poison: None,
        cap: None,
    };
    let inputs = case.inputs();
    let head = b.upload(&inputs.head);
    let whole = case.results(b, &inputs, Matrix::Stored(StoredMatrix::F32(&head)));
    for split in [1, 8, 9, 20, 21, 33] {
        let parts = in_two_calls(b, &case, &inputs, split);
        assert_eq!(bits(&whole.loss), bits(&parts.loss), "{} loss, split at {split}", b.name());
        assert_eq!(bits(&whole.lse), bits(&parts.lse), "{} lse, split at {split}", b.name());
        assert_eq!(whole.best, parts.best, "{} best, split at {split}", b.name());
        assert_eq!(bits(&whole.dh), bits(&parts.dh), "{} dh, split at {split}", b.name());
        // Token chunks restart at row starts, so only a split between rows keeps them.
        if case.row_starts.contains(&split) {
            let [whole, parts] = [&whole, &parts].map(|results| bits(results.dhead.as_deref().expect("dhead")));
            assert_eq!(whole, parts, "{} dhead, split at {split}", b.name());
        }
    }
}

#[test]
fn a_token_does_not_know_its_neighbours_and_dhead_accumulates_over_rows() {
    for profile in Profile::ALL {
        splits_agree(&Reference, profile);
        for path in Path::available() {
            splits_agree(&Cpu::new(2, path).expect("an available path"), profile);
        }
    }
}

#[test]
fn a_poisoned_token_is_nan_alone() {
    let case = HeadLossCase {
        row_starts: vec![0, 7],
        hidden: 33,
        vocabulary: 600,
        profile: Profile::X2,
        format: HeadFormat::F32,
        kind: Distribution::Plain,
        ignored: Ignored::None,
        with_dhead: false,
        poison: Some(3),
        cap: None,
    };
    let inputs = case.inputs();
    let head = Reference.upload(&inputs.head);
    let results = case.results(&Reference, &inputs, Matrix::Stored(StoredMatrix::F32(&head)));
    for token in 0..7 {
        assert_eq!(results.loss[token].is_nan(), token == 3, "loss of token {token}");
        assert_eq!(results.lse[token].is_nan(), token == 3, "lse of token {token}");
        assert_eq!(
            results.dh[token * 33..(token + 1) * 33].iter().all(|x| x.is_nan()),
            token == 3,
            "dh of token {token}"
        );
    }
    assert_eq!((results.lse[3].to_bits(), results.best[3]), (0x7fc0_0000, 0));
}

#[test]
#[should_panic(expected = "label 600 of token 2")]
fn a_label_outside_the_vocabulary_is_a_bug() {
    let case = HeadLossCase {
        row_starts: vec![0, 3],
        hidden: 4,
        vocabulary: 600,
        profile: Profile::X2,
        format: HeadFormat::F32,
        kind: Distribution::Plain,
        ignored: Ignored::None,
        with_dhead: false,
        poison: None,
        cap: None,
    };
    let mut inputs = case.inputs();
    inputs.labels[2] = 600;
    let head = Reference.upload(&inputs.head);
    case.results(&Reference, &inputs, Matrix::Stored(StoredMatrix::F32(&head)));
}
