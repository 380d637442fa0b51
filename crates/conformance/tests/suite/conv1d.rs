//! Causal convolution on every CPU path and every device, and its laws: splits, packing, decoding.

use isobit_conformance::data::{Distribution, Random};
use isobit_conformance::{Output, assert_same, downloaded, fastest, poisoned};
use isobit_kernels::op::{ColumnMode, Columns, Conv1d, Conv1dBackward, Conv1dForward, CopyColumns, Place};
use isobit_kernels::tensor::F32;
use isobit_kernels::{Backend, Reference};

#[test]
fn conv1d() {
    isobit_conformance::on_every_backend(isobit_conformance::cases::conv1d::visit);
}

/// Rows of data in one call equal the same rows in two calls, whatever the documents inside them.
#[test]
fn rows_may_be_split_over_calls() {
    split(&Reference);
    split(&fastest());
}

fn split<B: Backend>(b: &B) {
    let (channels, kernel, random) = (37, 4, &mut Random::new(3));
    let [x, dy] = [(); 2].map(|()| random.f32s(Distribution::Plain, 170 * channels));
    let weight = b.upload(&random.f32s(Distribution::Plain, channels * kernel));
    let first = random.f32s(Distribution::Plain, channels * kernel);
    let run = |cuts: &[usize]| {
        let mut dweight = b.upload(&first);
        let (mut ys, mut dxs) = (Vec::new(), Vec::new());
        for cut in cuts.windows(2) {
            let [x, dy] = [&x, &dy].map(|x| b.upload(&x[cut[0] * channels..cut[1] * channels]));
            let inside =
                |ends: &[usize]| -> Vec<usize> { ends.iter().map(|&end| end.clamp(cut[0], cut[1]) - cut[0]).collect() };
            let (starts, rows) = (inside(&[0, 50, 51, 140, 142, 170]), inside(&[0, 140, 170]));
            let p = Conv1d { channels, kernel, starts: &starts };
            let [mut y, mut dx] = [(); 2].map(|()| poisoned(b, (cut[1] - cut[0]) * channels));
            b.run(Conv1dForward { y: &mut y, x: &x, weight: &weight, history: None, p });
            b.run(Conv1dBackward {
                dx: &mut dx,
                dweight: Some(&mut dweight),
                dy: &dy,
                x: &x,
                weight: &weight,
                p,
                row_starts: &rows,
            });
            ys.extend(downloaded(b, &y));
            dxs.extend(downloaded(b, &dx));
        }
        Output::new("y, dx and dweight", &[ys, dxs, downloaded(b, &dweight)].concat())
    };
    assert_same(&[run(&[0, 170]), run(&[0, 140, 170])]);
}

/// Tokens one by one, or a few at a time, from a history that begins with zeros: the bits of the
/// whole document. The history moves on by column copies.
#[test]
fn decoding_equals_the_whole_document() {
    decode(&Reference);
    decode(&fastest());
}

fn decode<B: Backend>(b: &B) {
    let (tokens, channels, kernel, random) = (23, 19, 4, &mut Random::new(5));
    for kind in [Distribution::Plain, Distribution::Edges] {
        let x = random.f32s(kind, tokens * channels);
        let weight = b.upload(&random.f32s(kind, channels * kernel));
        let whole = Conv1d { channels, kernel, starts: &[0, tokens] };
        let mut want = poisoned(b, tokens * channels);
        b.run(Conv1dForward { y: &mut want, x: &b.upload(&x), weight: &weight, history: None, p: whole });
        let (mut got, mut history) = (Vec::new(), b.zeros(whole.history()));
        let mut t = 0;
        for count in [1, 1, 2, 1, 5, 3, 1, 1, 4, 2, 2] {
            let part = b.upload(&x[t * channels..(t + count) * channels]);
            let p = Conv1d { channels, kernel, starts: &[0, count] };
            let mut y = poisoned(b, count * channels);
            b.run(Conv1dForward { y: &mut y, x: &part, weight: &weight, history: Some(&history), p });
            got.extend(downloaded(b, &y));
            history = moved_on(b, &history, &part, count, &p);
            t += count;
        }
        assert_eq!(t, tokens);
        assert_same(&[Output::download(b, "y", &want), Output::new("y", &got)]);
    }
}

/// The last `kernel − 1` inputs of what was there and `count` tokens more.
fn moved_on<B: Backend>(b: &B, old: &F32<B>, x: &F32<B>, count: usize, p: &Conv1d) -> F32<B> {
    let rows = p.kernel - 1;
    let (new, kept) = (count.min(rows), rows - count.min(rows));
    let mut next = poisoned(b, rows * p.channels);
    // Rows of both are the groups of one long token.
    let place = |all: usize, first: usize| Place::dense(all * p.channels, first * p.channels, p.channels);
    let shape =
        |groups, from, to| Columns { tokens: 1, groups, width: p.channels, from, to, mode: ColumnMode::Overwrite };
    b.run(CopyColumns { y: &mut next, x: old, p: shape(kept, place(rows, rows - kept), place(rows, 0)) });
    b.run(CopyColumns { y: &mut next, x, p: shape(new, place(count, count - new), place(rows, kept)) });
    next
}
