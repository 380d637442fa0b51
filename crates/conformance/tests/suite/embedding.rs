//! Embedding on every CPU path and every device.

use isobit_conformance::data::{Distribution, Random};
use isobit_conformance::{Output, assert_same, fastest};
use isobit_kernels::op::EmbeddingBackward;
use isobit_kernels::{Backend, Reference};

#[test]
fn embedding() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::embedding::visit);
}

/// Tokens in one call equal the same tokens in two calls, cut anywhere.
#[test]
fn tokens_may_be_split_over_calls() {
    split(&Reference);
    split(&fastest());
}

fn split<B: Backend>(b: &B) {
    let (tokens, width, random) = (97, 19, &mut Random::new(3));
    let (first, dy) =
        (random.f32s(Distribution::Plain, 5 * width), random.f32s(Distribution::Outliers, tokens * width));
    let ids: Vec<u32> = (0..tokens).map(|_| random.below(5) as u32).collect();
    let run = |cuts: &[usize]| {
        let mut dtable = b.upload(&first);
        for cut in cuts.windows(2) {
            let dy = b.upload(&dy[cut[0] * width..cut[1] * width]);
            b.run(EmbeddingBackward { dtable: &mut dtable, dy: &dy, ids: &b.upload(&ids[cut[0]..cut[1]]), width });
        }
        Output::download(b, "dtable", &dtable)
    };
    assert_same(&[run(&[0, tokens]), run(&[0, 41, tokens])]);
}
