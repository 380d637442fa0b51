//! Compares two runs by their `metrics.jsonl`: the first step at which they differ, and whether
//! they took the same number of steps.
//!
//! Lines are matched by step and kind, `timing` is ignored, and a loss is compared only if both
//! lines are the mean over the same steps: logging frequency is not a difference.

use super::receipt::{self, ChainDifference};
use crate::error::FileError;
use crate::json;
use crate::layout::{FINAL, METRICS, checkpoint_name, checkpoint_step};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// How two runs differ, besides their tensors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunDifference {
    /// The last step of each.
    pub steps: [u64; 2],
    /// Lines present in both.
    pub compared: u64,
    pub first: Option<MetricDifference>,
    /// The first update in which their chains differ, if both have one.
    pub chain: Option<ChainDifference>,
    /// What they were made from that differs, besides the config, in words.
    pub inputs: Vec<String>,
    /// Why chains or receipts were not compared: one is damaged.
    pub damaged: Vec<String>,
    /// The folder in each run whose tensors were compared: `final`, or the newest checkpoint that
    /// both have. None if they share none.
    pub tensors: Option<String>,
}

/// The first field of the first line that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricDifference {
    /// The first logged step that differs.
    pub step: u64,
    /// The last logged step before it that does not, or 0: the runs part after it.
    pub same_until: u64,
    pub field: String,
    /// None if the line has no such field.
    pub values: [Option<Value>; 2],
}

impl RunDifference {
    pub fn is_none(&self) -> bool {
        self.first.is_none() && self.chain.is_none() && self.steps[0] == self.steps[1]
    }
}

pub(super) fn is_run(path: &Path) -> bool {
    path.join(METRICS).is_file()
}

/// Compares the metrics of two runs, and finds the folders whose tensors can be compared.
pub(super) fn compare(a: &Path, b: &Path) -> Result<(RunDifference, Option<[PathBuf; 2]>), FileError> {
    let (lines_a, lines_b) = (lines(&a.join(METRICS))?, lines(&b.join(METRICS))?);
    let last = |lines: &Lines| lines.keys().next_back().map_or(0, |(step, _)| *step);
    let mut difference = RunDifference { steps: [last(&lines_a), last(&lines_b)], ..RunDifference::default() };
    let windows = [windows(&lines_a), windows(&lines_b)];
    let mut same_until = 0;
    for (place, first) in &lines_a {
        let Some(second) = lines_b.get(place) else { continue };
        difference.compared += 1;
        let same_window = windows[0].get(place) == windows[1].get(place);
        if difference.first.is_none() {
            match first_difference(first, second, same_window) {
                Some((field, values)) => {
                    difference.first = Some(MetricDifference { step: place.0, same_until, field, values });
                }
                None => same_until = place.0,
            }
        }
    }
    difference.chain = receipt::of_runs(a, b);
    difference.inputs = receipt::inputs_of_runs(a, b);
    difference.damaged = receipt::damaged([a, b]);
    difference.tensors = shared_folder(a, b)?;
    let folders = difference.tensors.as_ref().map(|name| [a.join(name), b.join(name)]);
    Ok((difference, folders))
}

/// The flag marks an evaluation line; a step may have one of each kind.
type Lines = BTreeMap<(u64, bool), Map<String, Value>>;

fn lines(path: &Path) -> Result<Lines, FileError> {
    let text = json::read_text(path)?;
    // A line cut short by a crash is ignored.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let mut lines = Lines::new();
    for (index, line) in whole.lines().enumerate() {
        let wrong = || FileError::malformed(path, format!("line {}: it is not a line of metrics", index + 1));
        let Ok(Value::Object(mut line)) = serde_json::from_str(line) else { return Err(wrong()) };
        let step = line.get("step").and_then(Value::as_u64).ok_or_else(wrong)?;
        // Timing, and the checksum that covers it.
        line.remove("timing");
        line.remove("check");
        lines.insert((step, line.contains_key("eval_loss")), line);
    }
    Ok(lines)
}

/// For each training line, the step of the previous one: its loss is the mean over the steps
/// between.
fn windows(lines: &Lines) -> BTreeMap<(u64, bool), u64> {
    let mut before = 0;
    let mut windows = BTreeMap::new();
    for (step, eval) in lines.keys().filter(|(_, eval)| !eval) {
        windows.insert((*step, *eval), before);
        before = *step;
    }
    windows
}

/// In file order. A number is reported in decimal and compared by its bits, which are stored next
/// to it.
fn first_difference(
    a: &Map<String, Value>,
    b: &Map<String, Value>,
    same_window: bool,
) -> Option<(String, [Option<Value>; 2])> {
    const ORDER: [&str; 9] = [
        "schema",
        "epoch",
        "tokens",
        "loss",
        "learning_rate",
        "grad_norm",
        "eval_loss",
        "eval_accuracy",
        "eval_tokens",
    ];
    let others = a.keys().chain(b.keys()).map(String::as_str).filter(|key| !ORDER.contains(key));
    for field in ORDER.into_iter().chain(others) {
        let name = field.strip_suffix("_bits").unwrap_or(field);
        if a.get(field) == b.get(field) || (name == "loss" && !same_window) {
            continue;
        }
        // Two NaNs are both null, and only their bits differ.
        let told =
            |line: &Map<String, Value>| line.get(name).filter(|value| !value.is_null()).or(line.get(field)).cloned();
        return Some((name.to_string(), [told(a), told(b)]));
    }
    None
}

/// `final` if both have it, else the newest checkpoint that both have.
fn shared_folder(a: &Path, b: &Path) -> Result<Option<String>, FileError> {
    if a.join(FINAL).is_dir() && b.join(FINAL).is_dir() {
        return Ok(Some(FINAL.to_string()));
    }
    let failed = |error| FileError::from_io("read", a, error);
    let mut steps: Vec<u64> = Vec::new();
    for entry in std::fs::read_dir(a).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        steps.extend(name.to_str().and_then(checkpoint_step));
    }
    steps.sort_unstable();
    let names = steps.into_iter().rev().map(checkpoint_name);
    Ok(names.into_iter().find(|name| a.join(name).is_dir() && b.join(name).is_dir()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(lines: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::write(folder.path().join(METRICS), lines).expect("written");
        folder
    }

    fn line(step: u64, loss: f64, more: &str) -> String {
        let bits = loss.to_bits();
        format!(
            "{{\"step\":{step},\"loss\":{loss:?},\"loss_bits\":\"{bits:016x}\"{more},\"timing\":{{\"seconds\":{loss:?}}}}}\n"
        )
    }

    #[test]
    fn the_first_differing_line_is_found_by_step() {
        let a = run(&[line(1, 3.0, ""), line(2, 2.0, ""), line(3, 1.0, "")].concat());
        let b = run(&[line(1, 3.0, ""), line(2, 2.5, ""), line(3, 1.5, "")].concat());
        let (difference, folders) = compare(a.path(), b.path()).expect("readable");
        let values = [Some(2.0.into()), Some(2.5.into())];
        let expected = MetricDifference { step: 2, same_until: 1, field: "loss".into(), values };
        assert_eq!((difference.first, difference.steps, folders), (Some(expected), [3, 3], None));
        assert!(compare(a.path(), a.path()).expect("readable").0.is_none());
        let c = run(&(line(1, 3.0, "") + "{\"step\":2"));
        let (difference, _) = compare(a.path(), c.path()).expect("readable");
        assert_eq!((difference.steps, difference.compared, difference.first), ([3, 1], 1, None));
    }

    #[test]
    fn a_difference_lies_between_two_logged_steps() {
        let a = run(&[line(10, 3.0, ""), line(20, 2.0, "")].concat());
        let b = run(&[line(10, 3.0, ""), line(20, 2.5, "")].concat());
        let first = compare(a.path(), b.path()).expect("readable").0.first.expect("a difference");
        assert_eq!((first.same_until, first.step), (10, 20));
    }

    #[test]
    fn how_often_a_run_logs_is_no_difference() {
        let a = run(&[line(1, 4.0, ""), line(2, 2.0, ",\"grad_norm\":1.0")].concat());
        let b = run(&line(2, 3.0, ",\"grad_norm\":1.0"));
        assert!(compare(a.path(), b.path()).expect("readable").0.is_none());
        let c = run(&line(2, 3.0, ",\"grad_norm\":1.5"));
        assert_eq!(compare(a.path(), c.path()).expect("readable").0.first.expect("a difference").field, "grad_norm");
    }

    #[test]
    fn numbers_that_are_none_are_told_by_their_bits() {
        let a = run("{\"step\":1,\"eval_loss\":null,\"eval_loss_bits\":\"7ff8000000000000\"}\n");
        let b = run("{\"step\":1,\"eval_loss\":null,\"eval_loss_bits\":\"7ff0000000000000\"}\n");
        let first = compare(a.path(), b.path()).expect("readable").0.first.expect("a difference");
        assert_eq!((first.field.as_str(), &first.values[0]), ("eval_loss", &Some("7ff8000000000000".into())));
        let bad = run("{\"step\":1}\n[]\n");
        assert!(compare(bad.path(), a.path()).expect_err("malformed").to_string().contains("line 2: "));
    }
}
