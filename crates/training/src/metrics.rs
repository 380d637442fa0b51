//! `metrics.jsonl`: one JSON object a line, only ever appended to. Everything but `timing` is a function of the run, and
//! numbers stand beside their bits, so two runs are compared line by line with `timing` cut off.
//!
//! After a step: append its lines, `sync`, then save the checkpoint. A resumed run drops what came after its checkpoint,
//! and the file ends as if nothing had happened.

use isobit_proof::FileError;
use isobit_proof::atomic::AtomicFile;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

pub const NAME: &str = "metrics.jsonl";
const SCHEMA: &str = "isobit.metrics/1";

/// BOUND: bytes of a line, far above what we write.
const LINE_BYTES_MOST: u64 = 1 << 16;

/// One line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Record {
    /// Completed updates.
    pub step: u64,
    pub epoch: f64,
    /// Trained on so far.
    pub tokens: u64,
    pub event: Event,
    pub timing: Option<Timing>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// The mean loss since the last such line; learning rate and norm before clipping of this step.
    Train {
        loss: f64,
        learning_rate: f64,
        grad_norm: f64,
    },
    Eval {
        loss: f64,
        accuracy: f64,
        tokens: u64,
    },
}

/// What a clock said: never compared.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Timing {
    pub seconds: f64,
    pub tokens_per_s: f64,
}

/// The form in the file; fields come in this order. A number that is none is null and told by its bits.
#[derive(Serialize)]
struct Line {
    schema: &'static str,
    step: u64,
    epoch: f64,
    tokens: u64,
    #[serde(flatten)]
    event: EventLine,
    // Last, so that it can be cut off.
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<Timing>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EventLine {
    Train {
        loss: f64,
        loss_bits: String,
        learning_rate: f64,
        learning_rate_bits: String,
        grad_norm: f64,
        grad_norm_bits: String,
    },
    Eval {
        eval_loss: f64,
        eval_loss_bits: String,
        eval_accuracy: f64,
        eval_tokens: u64,
    },
}

impl Record {
    /// What TensorBoard shows of it.
    pub fn scalars(&self) -> Vec<(&'static str, f32)> {
        match self.event {
            Event::Train { loss, learning_rate, grad_norm } => vec![
                ("train/loss", loss as f32),
                ("train/learning_rate", learning_rate as f32),
                ("train/grad_norm", grad_norm as f32),
            ],
            Event::Eval { loss, accuracy, .. } => vec![("eval/loss", loss as f32), ("eval/accuracy", accuracy as f32)],
        }
    }

    /// The line of `metrics.jsonl`, without its newline.
    pub fn to_line(&self) -> String {
        let event = match self.event {
            Event::Train { loss, learning_rate, grad_norm } => EventLine::Train {
                loss,
                loss_bits: hex(loss),
                learning_rate,
                learning_rate_bits: hex(learning_rate),
                grad_norm,
                grad_norm_bits: hex(grad_norm),
            },
            Event::Eval { loss, accuracy, tokens } => EventLine::Eval {
                eval_loss: loss,
                eval_loss_bits: hex(loss),
                eval_accuracy: accuracy,
                eval_tokens: tokens,
            },
        };
        let Self { step, epoch, tokens, timing, .. } = *self;
        let line = Line { schema: SCHEMA, step, epoch, tokens, event, timing };
        serde_json::to_string(&line).expect("strings and numbers have a JSON form")
    }
}

fn hex(value: f64) -> String {
    format!("{:016x}", value.to_bits())
}

/// The part of a line that two equal runs share.
pub fn without_timing(line: &str) -> String {
    match line.rfind(",\"timing\":") {
        Some(at) => format!("{}}}", &line[..at]),
        None => line.to_string(),
    }
}

/// The open file of a run.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
}

impl Metrics {
    /// A new file; one that is there is emptied.
    pub fn create(folder: &Path) -> Result<Self, FileError> {
        let path = folder.join(NAME);
        AtomicFile::create(&path)?.commit()?;
        Self::append_to(path)
    }

    /// The file of a run that goes on after `step`: lines of later steps, and one that a crash cut short, are dropped, all
    /// at once.
    pub fn resume(folder: &Path, step: u64) -> Result<Self, FileError> {
        let path = folder.join(NAME);
        keep_up_to(&path, step)?;
        Self::append_to(path)
    }

    fn append_to(path: PathBuf) -> Result<Self, FileError> {
        match File::options().append(true).open(&path) {
            Ok(file) => Ok(Self { path, file }),
            Err(error) => Err(FileError::from_io("write", &path, error)),
        }
    }

    /// In one write, so that a reader sees whole lines.
    pub fn append(&mut self, record: &Record) -> Result<(), FileError> {
        let line = record.to_line() + "\n";
        self.file.write_all(line.as_bytes()).map_err(|error| FileError::from_io("write", &self.path, error))
    }

    /// What was appended survives a power cut. To be called before a checkpoint is saved.
    pub fn sync(&mut self) -> Result<(), FileError> {
        self.file.sync_data().map_err(|error| FileError::from_io("write", &self.path, error))
    }
}

/// What matters of a line here.
#[derive(Deserialize)]
struct Position {
    schema: String,
    step: u64,
}

fn keep_up_to(path: &Path, step: u64) -> Result<(), FileError> {
    let failed = |error| FileError::from_io("read", path, error);
    let mut kept = AtomicFile::create(path)?;
    let file = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return kept.commit(),
        file => file.map_err(failed)?,
    };
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        reader.by_ref().take(LINE_BYTES_MOST).read_until(b'\n', &mut line).map_err(failed)?;
        if line.last() != Some(&b'\n') {
            if line.len() as u64 == LINE_BYTES_MOST {
                return Err(malformed(path, number, "it is longer than any line of metrics"));
            }
            break;
        }
        match serde_json::from_slice::<Position>(&line) {
            Ok(position) if position.schema == SCHEMA => {
                if position.step <= step {
                    kept.write(&line)?;
                }
            }
            _ => return Err(malformed(path, number, "it is not a line of metrics")),
        }
    }
    kept.commit()
}

fn malformed(path: &Path, number: usize, what: &str) -> FileError {
    FileError::Malformed { path: path.to_path_buf(), what: format!("line {number}: {what}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train(step: u64, loss: f64) -> Record {
        let event = Event::Train { loss, learning_rate: 2e-4, grad_norm: 0.1 };
        Record {
            step,
            epoch: 0.25,
            tokens: 512 * step,
            event,
            timing: Some(Timing { seconds: 1.5, tokens_per_s: 9.0 }),
        }
    }

    #[test]
    fn lines_are_what_the_schema_says() {
        let line = train(3, 1.0 / 3.0).to_line();
        let same = r#"{"schema":"isobit.metrics/1","step":3,"epoch":0.25,"tokens":1536,"loss":0.3333333333333333,"loss_bits":"3fd5555555555555","learning_rate":0.0002,"learning_rate_bits":"3f2a36e2eb1c432d","grad_norm":0.1,"grad_norm_bits":"3fb999999999999a""#;
        assert_eq!(line, format!(r#"{same},"timing":{{"seconds":1.5,"tokens_per_s":9.0}}}}"#));
        assert_eq!(without_timing(&line), format!("{same}}}"));
        assert_eq!(without_timing(&without_timing(&line)), format!("{same}}}"));
        let event = Event::Eval { loss: f64::NAN, accuracy: 0.5, tokens: 7 };
        let line = Record { event, timing: None, ..train(3, 0.0) }.to_line();
        assert!(
            line.contains(
                r#""eval_loss":null,"eval_loss_bits":"7ff8000000000000","eval_accuracy":0.5,"eval_tokens":7}"#
            ),
            "{line}"
        );
    }

    #[test]
    fn a_resumed_file_ends_like_one_that_never_stopped() {
        let whole = tempfile::tempdir().expect("folder");
        let mut metrics = Metrics::create(whole.path()).expect("created");
        (1..=6).for_each(|step| metrics.append(&train(step, 1.0)).expect("appended"));
        let expected = std::fs::read_to_string(whole.path().join(NAME)).expect("read");

        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join(NAME);
        let mut metrics = Metrics::resume(folder.path(), 0).expect("nothing is there");
        (1..=5).for_each(|step| metrics.append(&train(step, 1.0)).expect("appended"));
        metrics.sync().expect("synced");
        let torn = std::fs::read(&path).expect("read");
        std::fs::write(&path, &torn[..torn.len() - 9]).expect("written");
        let mut metrics = Metrics::resume(folder.path(), 3).expect("resumed");
        (4..=6).for_each(|step| metrics.append(&train(step, 1.0)).expect("appended"));
        assert_eq!(std::fs::read_to_string(&path).expect("read"), expected);
        Metrics::create(folder.path()).expect("emptied");
        assert_eq!(std::fs::read(&path).expect("read"), b"");
    }

    #[test]
    fn a_strange_file_is_refused_and_left_alone() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join(NAME);
        let good = train(1, 1.0).to_line();
        for bad in ["{}", "", "[1]", "{\"schema\":\"x\",\"step\":1}", &"x".repeat(1 << 17)] {
            let text = format!("{good}\n{bad}\n{good}\n");
            std::fs::write(&path, &text).expect("written");
            let error = Metrics::resume(folder.path(), 1).expect_err("strange");
            assert_eq!(error.exit_code(), 8);
            assert!(error.to_string().contains("line 2: "), "{error}");
            assert_eq!(std::fs::read_to_string(&path).expect("read"), text);
        }
    }
}
