//! The curves of a run, from its `metrics.jsonl`. The file may come from anywhere: a line that is
//! not one of metrics is an error, one that a crash cut short is left out, and a number that is not
//! finite stays so.

use super::chart::Point;
use isobit_proof::{FileError, regular};
use isobit_training::metrics::{self, NAME};
use serde::Deserialize;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// BOUND: bytes of a line, far more than a run writes.
const LINE_BYTES_MAX: u64 = 1 << 16;
/// BOUND: bytes of the file, that of a few million updates.
const BYTES_MAX: u64 = 1 << 31;

/// What a run measured, by step.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Curves {
    pub(super) loss: Vec<Point>,
    pub(super) eval_loss: Vec<Point>,
    pub(super) learning_rate: Vec<Point>,
    pub(super) grad_norm: Vec<Point>,
    pub(super) tokens_per_s: Vec<Point>,
    /// Of the last line.
    pub(super) step: u64,
    pub(super) tokens: u64,
    pub(super) epoch: f64,
    /// Of all lines, evaluations included.
    pub(super) seconds: f64,
}

/// The fields of a line that are drawn. A number that is not finite is null, and its bits tell
/// which.
#[derive(Deserialize)]
struct Line {
    step: u64,
    epoch: Option<f64>,
    tokens: Option<u64>,
    loss: Option<f64>,
    loss_bits: Option<String>,
    learning_rate: Option<f64>,
    grad_norm: Option<f64>,
    grad_norm_bits: Option<String>,
    eval_loss: Option<f64>,
    eval_loss_bits: Option<String>,
    timing: Option<Timing>,
}

#[derive(Deserialize)]
struct Timing {
    seconds: Option<f64>,
    tokens_per_s: Option<f64>,
}

impl Curves {
    pub(super) fn read(run: &Path) -> Result<Self, FileError> {
        let path = run.join(NAME);
        let failed = |error| FileError::from_io("read", &path, error);
        let (file, bytes) = regular::open(&path)?;
        if bytes > BYTES_MAX {
            return Err(FileError::TooLarge { path, bytes, limit: BYTES_MAX });
        }
        let (mut reader, mut line, mut curves) = (BufReader::new(file.take(BYTES_MAX)), Vec::new(), Self::default());
        for number in 1.. {
            let malformed =
                |what: &str| FileError::Malformed { path: path.clone(), what: format!("line {number}: {what}") };
            line.clear();
            reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line).map_err(failed)?;
            let Some((b'\n', whole)) = line.split_last() else {
                if line.len() as u64 == LINE_BYTES_MAX {
                    return Err(malformed("it is longer than any line of metrics"));
                }
                break;
            };
            metrics::step_of(whole).map_err(malformed)?;
            let parsed: Line = serde_json::from_slice(whole).map_err(|_| malformed("it is not a line of metrics"))?;
            if parsed.step < curves.step {
                return Err(malformed("its step is lower than that of the line before"));
            }
            curves.add(parsed);
        }
        Ok(curves)
    }

    fn add(&mut self, line: Line) {
        let step = line.step;
        self.step = step;
        let tokens = line.tokens.unwrap_or(self.tokens).saturating_sub(self.tokens);
        self.tokens += tokens;
        self.epoch = line.epoch.unwrap_or(self.epoch);
        let put = |points: &mut Vec<Point>, value: Option<f64>| points.extend(value.map(|value| (step, value)));
        put(&mut self.loss, number(line.loss, line.loss_bits));
        put(&mut self.learning_rate, line.learning_rate);
        put(&mut self.grad_norm, number(line.grad_norm, line.grad_norm_bits));
        let is_eval = line.eval_loss_bits.is_some() || line.eval_loss.is_some();
        put(&mut self.eval_loss, number(line.eval_loss, line.eval_loss_bits));
        let Some(timing) = line.timing else { return };
        let mut seconds = timing.seconds.unwrap_or(0.0);
        if !is_eval {
            put(&mut self.tokens_per_s, timing.tokens_per_s);
            // A line after a resume has the seconds of that process alone.
            let rate = timing.tokens_per_s.filter(|rate| *rate > 0.0);
            seconds = rate.map_or(seconds, |rate| seconds.max(tokens as f64 / rate));
        }
        self.seconds += if seconds.is_finite() { seconds } else { 0.0 };
    }

    /// The best evaluation.
    pub(super) fn best(&self) -> Option<Point> {
        let finite = self.eval_loss.iter().filter(|(_, loss)| loss.is_finite());
        finite.min_by(|a, b| a.1.total_cmp(&b.1)).copied()
    }

    /// The median throughput of training: evaluations and the first, cold line hardly move it.
    pub(super) fn typical_rate(&self) -> Option<f64> {
        let mut rates: Vec<f64> =
            self.tokens_per_s.iter().map(|(_, rate)| *rate).filter(|rate| rate.is_finite()).collect();
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied()
    }
}

/// The value, or what its bits say where JSON has no number for it.
fn number(value: Option<f64>, bits: Option<String>) -> Option<f64> {
    value.or_else(|| u64::from_str_radix(&bits?, 16).ok().map(f64::from_bits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobit_training::metrics::{Event, Record, Timing};

    fn run(text: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join(NAME), text).expect("written");
        folder
    }

    fn line(step: u64, event: Event) -> String {
        let timing = Some(Timing { seconds: 2.0, tokens_per_s: 100.0 * step as f64, communication_s: None });
        Record { step, epoch: 0.5, tokens: 10 * step, event, timing }.to_line() + "\n"
    }

    fn train(step: u64, loss: f64) -> String {
        line(step, Event::Train { loss, learning_rate: 1e-4, grad_norm: 0.5 })
    }

    #[test]
    fn every_line_has_its_points() {
        let eval = line(2, Event::Eval { loss: 2.5, accuracy: 0.5, tokens: 7 });
        let text = [train(1, 3.0), train(2, f64::NAN), eval, train(3, 1e308)].concat();
        let curves = Curves::read(run(&text).path()).expect("metrics");
        assert_eq!(curves.loss.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(curves.loss[1].1.is_nan() && curves.loss[2].1 == 1e308);
        assert_eq!((curves.eval_loss.clone(), curves.best()), (vec![(2, 2.5)], Some((2, 2.5))));
        assert_eq!(curves.tokens_per_s, [(1, 100.0), (2, 200.0), (3, 300.0)]);
        assert_eq!((curves.step, curves.tokens, curves.seconds, curves.typical_rate()), (3, 30, 8.0, Some(200.0)));
    }

    #[test]
    fn a_line_cut_short_is_left_out_and_a_strange_one_refused() {
        let whole = train(1, 3.0);
        let torn = format!("{whole}{}", &train(2, 2.0)[..40]);
        assert_eq!(Curves::read(run(&torn).path()).expect("metrics").step, 1);
        assert_eq!(Curves::read(run("").path()).expect("no line yet"), Curves::default());
        let missing = train(2, 2.0).replace("\"step\":2,", "");
        let long = "x".repeat(1 << 17) + "\n";
        for bad in ["{}\n", "\n", "\u{0}\u{1}\n", &missing, &train(0, 1.0), &long] {
            let error = Curves::read(run(&format!("{whole}{bad}")).path()).expect_err(bad);
            assert_eq!(error.exit_code(), 8);
            assert!(error.to_string().contains("line 2: "), "{error}");
        }
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(Curves::read(folder.path()).expect_err("no run").exit_code(), 2);
    }
}
