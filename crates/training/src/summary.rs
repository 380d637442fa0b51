//! Summary of a run from its `metrics.jsonl`: first and last loss, the best evaluation, and whether
//! it learned at all. It is a function of the run, so a run that was stopped and resumed ends with
//! the same words as one that was not.
#![expect(clippy::float_arithmetic, reason = "means of losses, for people")]

use crate::metrics;
use isobit_proof::{FileError, regular};
use serde::Deserialize;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// A mean loss this far above its limit (in nats: a perplexity e times as large) is an explosion,
/// not noise.
const EXPLODED: f64 = 1.0;

/// BOUND: bytes of a line, far more than we write.
const LINE_BYTES_MAX: u64 = 1 << 16;

/// How a run went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Ok,
    /// The last gradient is exactly zero though the loss is not: updates no longer change anything.
    Dead,
    /// The loss of the last tenth of the run is far above the first loss, or above the loss of
    /// giving every token the same probability.
    Exploded,
}

impl Verdict {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Dead => "dead",
            Self::Exploded => "exploded",
        }
    }
}

/// A loss, and the number of updates after which it was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    pub step: u64,
    pub loss: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// From the first and the last line of the metrics.
    pub first: Option<Measured>,
    pub last: Option<Measured>,
    /// The first of the lowest.
    pub best_eval: Option<Measured>,
    pub verdict: Verdict,
}

/// The fields needed here. Numbers are read from their bits: decimal parsers differ in the last
/// place.
#[derive(Deserialize)]
struct Line {
    step: u64,
    loss_bits: Option<String>,
    grad_norm_bits: Option<String>,
    eval_loss_bits: Option<String>,
}

impl Summary {
    /// Summarises the run in this folder; `vocabulary` is the number of tokens of the model.
    pub fn of(output_dir: &Path, vocabulary: usize) -> Result<Self, FileError> {
        let path = output_dir.join(metrics::NAME);
        let failed = |error| FileError::from_io("read", &path, error);
        let mut reader = BufReader::new(regular::open(&path)?.0);
        let mut lines = Vec::new();
        loop {
            let mut line = Vec::new();
            reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(failed)?;
            if line.is_empty() {
                return Ok(Self::from_lines(&lines, vocabulary));
            }
            lines.push(serde_json::from_slice(&line).map_err(|_| FileError::Malformed {
                path: path.clone(),
                what: format!("line {}: it is not a line of metrics", lines.len() + 1),
            })?);
        }
    }

    fn from_lines(lines: &[Line], vocabulary: usize) -> Self {
        let measured =
            |step: u64, bits: &Option<String>| bits.as_deref().and_then(number).map(|loss| Measured { step, loss });
        let train: Vec<(Measured, f64)> = lines
            .iter()
            .filter_map(|line| {
                Some((measured(line.step, &line.loss_bits)?, line.grad_norm_bits.as_deref().and_then(number)?))
            })
            .collect();
        let evals: Vec<Measured> = lines.iter().filter_map(|line| measured(line.step, &line.eval_loss_bits)).collect();
        let mut best_eval: Option<Measured> = None;
        for eval in &evals {
            if best_eval.is_none_or(|best| eval.loss < best.loss) {
                best_eval = Some(*eval);
            }
        }
        let fell = evals.first().zip(evals.last()).is_some_and(|(first, last)| last.loss < first.loss);
        Self {
            first: train.first().map(|(measured, _)| *measured),
            last: train.last().map(|(measured, _)| *measured),
            best_eval,
            verdict: verdict(&train, fell, vocabulary),
        }
    }
}

/// Judges a run by its losses and gradient norms, and by whether the loss of its held-out rows
/// fell.
fn verdict(train: &[(Measured, f64)], fell: bool, vocabulary: usize) -> Verdict {
    let (Some((first, _)), Some((last, norm))) = (train.first(), train.last()) else { return Verdict::Ok };
    if *norm == 0.0 && last.loss > 0.0 {
        return Verdict::Dead;
    }
    // The last tenth, not the last line: a single update may contain only hard rows.
    let end = &train[train.len() - train.len().div_ceil(10)..];
    let mean = end.iter().map(|(measured, _)| measured.loss).sum::<f64>() / end.len() as f64;
    // A loss that fell did not explode, however large it still is: a short trial may begin far
    // above guessing. A single line does not say whether it fell, and the last may be of few rows:
    // held-out rows are the same each time.
    let is_worse = mean > first.loss + EXPLODED;
    let is_lost = !fell && train.len() > 1 && mean >= first.loss && mean > even_loss(vocabulary) + EXPLODED;
    if is_worse || is_lost { Verdict::Exploded } else { Verdict::Ok }
}

/// The loss of giving every token the same probability.
pub fn even_loss(vocabulary: usize) -> f64 {
    libm::log(vocabulary as f64)
}

/// A number from the sixteen hexadecimal digits of its bits.
fn number(bits: &str) -> Option<f64> {
    u64::from_str_radix(bits, 16).ok().map(f64::from_bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Event, Metrics, Record};

    /// The summary of a run with these losses and gradient norms.
    fn of(steps: &[(f64, f64)], evals: &[(u64, f64)]) -> Summary {
        let folder = tempfile::tempdir().expect("folder");
        let mut metrics = Metrics::create(folder.path()).expect("created");
        for (index, (loss, grad_norm)) in steps.iter().enumerate() {
            let step = index as u64 + 1;
            let event = Event::Train { loss: *loss, learning_rate: 1e-3, grad_norm: *grad_norm };
            let record = Record { step, epoch: 0.5, tokens: 9, event, timing: None };
            metrics.append(&record).expect("appended");
            for (_, loss) in evals.iter().filter(|(at, _)| *at == step) {
                let event = Event::Eval { loss: *loss, accuracy: 0.5, tokens: 7 };
                metrics.append(&Record { event, ..record }).expect("appended");
            }
        }
        Summary::of(folder.path(), 1000).expect("read")
    }

    #[test]
    fn losses_and_the_first_of_the_best() {
        let summary = of(&[(3.0, 1.0), (2.0, 1.0), (0.1 + 0.2, 1.0)], &[(1, 2.5), (2, 2.25), (3, 2.25)]);
        assert_eq!(summary.first, Some(Measured { step: 1, loss: 3.0 }));
        assert_eq!(summary.last, Some(Measured { step: 3, loss: 0.1 + 0.2 }), "to the last bit");
        assert_eq!(summary.best_eval, Some(Measured { step: 2, loss: 2.25 }));
        assert_eq!(summary.verdict, Verdict::Ok);
        assert_eq!(of(&[], &[]), Summary { first: None, last: None, best_eval: None, verdict: Verdict::Ok });
    }

    #[test]
    fn dead_and_exploded_runs() {
        let verdict = |steps: &[(f64, f64)]| of(steps, &[]).verdict;
        assert_eq!(verdict(&[(3.0, 1.0), (5.86, 0.0)]), Verdict::Dead);
        assert_eq!(verdict(&[(3.0, 1.0), (2.0, 0.0)]), Verdict::Dead, "whatever the loss");
        assert_eq!(verdict(&[(3.0, 1.0), (0.0, 0.0)]), Verdict::Ok, "nothing is left to learn");
        assert_eq!(verdict(&[(3.0, 0.0), (2.0, 1.0)]), Verdict::Ok, "it came back");
        assert_eq!(verdict(&[(3.0, 1.0), (4.01, 1.0)]), Verdict::Exploded);
        assert_eq!(verdict(&[(3.0, 1.0), (4.0, 1.0)]), Verdict::Ok);
        // Exploded before the first line was written: 1000 equally likely tokens give a loss of
        // 6.9.
        assert_eq!(verdict(&[(20.0, 1.0), (20.0, 1.0)]), Verdict::Exploded);
        let above_guessing = |evals: &[(u64, f64)]| of(&[(8.2, 1.0), (8.3, 1.0)], evals).verdict;
        assert_eq!(above_guessing(&[]), Verdict::Exploded);
        assert_eq!(above_guessing(&[(1, 8.1), (2, 8.2)]), Verdict::Exploded);
        assert_eq!(above_guessing(&[(1, 8.2), (2, 8.1)]), Verdict::Ok, "held-out rows say that it learns");
        // One line does not say whether the loss fell.
        assert_eq!(verdict(&[(20.0, 1.0)]), Verdict::Ok);
        assert_eq!(verdict(&[(20.0, 1.0), (19.9, 1.0)]), Verdict::Ok, "it falls");
        assert_eq!(verdict(&[(13.4, 1.0), (9.4, 1.0)]), Verdict::Ok, "a short trial of a base above guessing");
        let mut long = vec![(3.0, 1.0); 20];
        long[19].0 = 4.9;
        assert_eq!(verdict(&long), Verdict::Ok, "one hard update is no explosion");
        long[18].0 = 4.9;
        assert_eq!(verdict(&long), Verdict::Exploded);
    }

    #[test]
    fn a_strange_file_is_refused() {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::write(folder.path().join(metrics::NAME), "{}\n").expect("written");
        let error = Summary::of(folder.path(), 1000).expect_err("strange");
        assert!(error.exit_code() == 8 && error.to_string().contains("line 1"), "{error}");
    }
}
