//! `metrics.jsonl`: one JSON object per line, append-only. Everything but `timing` is a function of
//! the run, and every number is stored with its bits, so two runs can be compared line by line with
//! `timing` cut off.
//!
//! After a step: append its lines, `sync`, then save the checkpoint. A resumed run drops the lines
//! after its checkpoint, so the file ends up as if the run had never stopped. Every line ends with
//! its own checksum, and a checkpoint holds the digest of all lines before it without their timing,
//! so a changed, missing or moved line is detected.

use isobit_proof::atomic::AtomicFile;
use isobit_proof::disk::File;
pub use isobit_proof::layout::METRICS as NAME;
use isobit_proof::line::{NO_LINES, chained, checked, checksum, shared};
use isobit_proof::metrics_line::SCHEMA;
pub use isobit_proof::metrics_line::{Event, Record, Timing};
use isobit_proof::{FileError, Hash, regular};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

/// The start of every line.
pub(crate) const LINE_START: &str = "{\"schema\":\"isobit.metrics/";
/// BOUND: bytes of a line, far more than we write.
const LINE_BYTES_MAX: u64 = 1 << 16;

/// The part of a line that two equal runs share.
pub fn without_timing(line: &str) -> String {
    format!("{}}}", shared(line))
}

/// The open file of a run.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
    /// Digest of the lines so far.
    digest: Hash,
}

impl Metrics {
    /// Creates the file, or empties an existing one.
    pub fn create(folder: &Path) -> Result<Self, FileError> {
        let path = folder.join(NAME);
        AtomicFile::create(&path)?.commit()?;
        Self::append_to(path, NO_LINES)
    }

    /// The file of a run that resumes after `step`. Lines of later steps, and a line cut short by a
    /// crash, are dropped, all at once. The remaining lines must match the digest in the
    /// checkpoint; checkpoints of earlier versions have none. Nothing is replaced before
    /// [`CutMetrics::commit`].
    pub fn cut(folder: &Path, step: u64, recorded: Option<Hash>) -> Result<CutMetrics, FileError> {
        let path = folder.join(NAME);
        let (kept, digest) = keep_up_to(&path, step, recorded)?;
        Ok(CutMetrics { path, kept, digest })
    }

    /// Digest of the lines so far, without their timing.
    pub fn digest(&self) -> Hash {
        self.digest
    }

    fn append_to(path: PathBuf, digest: Hash) -> Result<Self, FileError> {
        match File::append(&path) {
            Ok(file) => Ok(Self { path, file, digest }),
            Err(error) => Err(FileError::from_io("write", &path, error)),
        }
    }

    /// Appends in one write, so that readers see whole lines.
    pub fn append(&mut self, record: &Record) -> Result<(), FileError> {
        let mut line = record.to_line();
        self.digest = chained(self.digest, &line);
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(|error| FileError::from_io("write", &self.path, error))
    }

    /// Makes appended lines survive a power cut. Call it before saving a checkpoint.
    pub fn sync(&mut self) -> Result<(), FileError> {
        self.file.sync_data().map_err(|error| FileError::from_io("write", &self.path, error))
    }
}

/// Metrics that are cut and not yet in their place.
#[derive(Debug)]
pub struct CutMetrics {
    path: PathBuf,
    kept: AtomicFile,
    digest: Hash,
}

impl CutMetrics {
    /// Digest of the lines that stay.
    pub fn digest(&self) -> Hash {
        self.digest
    }

    pub fn commit(self) -> Result<Metrics, FileError> {
        self.kept.commit()?;
        Metrics::append_to(self.path, self.digest)
    }
}

/// The fields needed here. A line without a checksum may have only the fields of `Unchecked`;
/// otherwise one of its characters has changed.
#[derive(Deserialize)]
struct Position {
    schema: String,
    step: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "which fields there are is what counts")]
struct Unchecked {
    schema: IgnoredAny,
    step: IgnoredAny,
    epoch: IgnoredAny,
    tokens: IgnoredAny,
    loss: Option<IgnoredAny>,
    loss_bits: Option<IgnoredAny>,
    learning_rate: Option<IgnoredAny>,
    learning_rate_bits: Option<IgnoredAny>,
    grad_norm: Option<IgnoredAny>,
    grad_norm_bits: Option<IgnoredAny>,
    eval_loss: Option<IgnoredAny>,
    eval_loss_bits: Option<IgnoredAny>,
    eval_accuracy: Option<IgnoredAny>,
    eval_tokens: Option<IgnoredAny>,
    timing: Option<IgnoredAny>,
}

/// The step of a line, if it is well formed and its checksum matches.
pub fn step_of(line: &[u8]) -> Result<u64, &'static str> {
    const STRANGE: &str = "it is not a line of metrics";
    let line = str::from_utf8(line).map_err(|_| STRANGE)?;
    let position = serde_json::from_str::<Position>(line).ok().filter(|position| position.schema == SCHEMA);
    match checked(line) {
        Some((before, check)) if checksum(before) != check => Err("its checksum does not match"),
        None if serde_json::from_str::<Unchecked>(line).is_err() => Err(STRANGE),
        _ => position.map(|position| position.step).ok_or(STRANGE),
    }
}

/// Returns the lines that stay, and their digest.
fn keep_up_to(path: &Path, step: u64, recorded: Option<Hash>) -> Result<(AtomicFile, Hash), FileError> {
    let failed = |error| FileError::from_io("read", path, error);
    let mut kept = AtomicFile::create(path)?;
    let mut digest = NO_LINES;
    let altered = |number: usize| FileError::Altered {
        path: path.to_path_buf(),
        what: format!(
            "line {number}: a line up to here is missing or differs from what the checkpoint of step {step} recorded"
        ),
    };
    let mut reader: Box<dyn BufRead> = match regular::if_there(regular::open(path))? {
        None => Box::new(std::io::empty()),
        Some((file, _)) => Box::new(BufReader::new(file)),
    };
    let (mut bytes, mut had_check) = (Vec::new(), false);
    for number in 1.. {
        if recorded == Some(digest) {
            // Everything after this came after the checkpoint.
            return Ok((kept, digest));
        }
        bytes.clear();
        reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes).map_err(failed)?;
        let Some((b'\n', line)) = bytes.split_last() else {
            if bytes.len() as u64 == LINE_BYTES_MAX {
                return Err(malformed(path, number, "it is longer than any line of metrics"));
            }
            if recorded.is_some() {
                return Err(altered(number));
            }
            break;
        };
        // Lines of an earlier version have no checksum; once a line has one, all later lines must.
        let has_check = str::from_utf8(line).is_ok_and(|line| checked(line).is_some());
        if had_check && !has_check {
            return Err(malformed(path, number, "its checksum is missing"));
        }
        had_check = has_check;
        if step_of(line).map_err(|what| malformed(path, number, what))? <= step {
            kept.write(&bytes)?;
            digest = chained(digest, &String::from_utf8_lossy(line));
        } else if recorded.is_some() {
            return Err(altered(number));
        }
    }
    Ok((kept, digest))
}

fn malformed(path: &Path, number: usize, what: &str) -> FileError {
    FileError::Malformed { path: path.to_path_buf(), what: format!("line {number}: {what}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resumed(folder: &Path, step: u64, recorded: Option<Hash>) -> Metrics {
        Metrics::cut(folder, step, recorded).and_then(CutMetrics::commit).expect("resumed")
    }

    fn train(step: u64, loss: f64) -> Record {
        let event = Event::Train { loss, learning_rate: 2e-4, grad_norm: 0.1 };
        Record {
            step,
            epoch: 0.25,
            tokens: 512 * step,
            event,
            timing: Some(Timing { seconds: 1.5, tokens_per_s: 9.0, communication_s: None }),
        }
    }

    #[test]
    fn lines_are_what_the_schema_says() {
        let line = train(3, 1.0 / 3.0).to_line();
        let same = r#"{"schema":"isobit.metrics/1","step":3,"epoch":0.25,"tokens":1536,"loss":0.3333333333333333,"loss_bits":"3fd5555555555555","learning_rate":0.0002,"learning_rate_bits":"3f2a36e2eb1c432d","grad_norm":0.1,"grad_norm_bits":"3fb999999999999a""#;
        let timed = format!(r#"{same},"timing":{{"seconds":1.5,"tokens_per_s":9.0}}"#);
        assert_eq!(line, format!(r#"{timed},"check":"{}"}}"#, &Hash::of_bytes(timed.as_bytes()).to_string()[..16]));
        assert_eq!(without_timing(&line), format!("{same}}}"));
        assert_eq!(without_timing(&without_timing(&line)), format!("{same}}}"));
        let event = Event::Eval { loss: f64::NAN, accuracy: 0.5, tokens: 7 };
        let line = Record { event, timing: None, ..train(3, 0.0) }.to_line();
        assert!(
            line.contains(
                r#""eval_loss":null,"eval_loss_bits":"7ff8000000000000","eval_accuracy":0.5,"eval_tokens":7,"check":"#
            ),
            "{line}"
        );
        assert!(without_timing(&line).ends_with(r#""eval_tokens":7}"#), "{line}");
    }

    #[test]
    fn a_resumed_file_ends_like_one_that_never_stopped() {
        let whole = tempfile::tempdir().expect("folder");
        let mut metrics = Metrics::create(whole.path()).expect("created");
        (1..=6).for_each(|step| metrics.append(&train(step, 1.0)).expect("appended"));
        let expected = std::fs::read_to_string(whole.path().join(NAME)).expect("read");

        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join(NAME);
        let mut metrics = resumed(folder.path(), 0, None);
        (1..=5).for_each(|step| metrics.append(&train(step, 1.0)).expect("appended"));
        metrics.sync().expect("synced");
        let torn = std::fs::read(&path).expect("read");
        std::fs::write(&path, &torn[..torn.len() - 9]).expect("written");
        let mut metrics = resumed(folder.path(), 3, None);
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
            let error = Metrics::cut(folder.path(), 1, None).expect_err("strange");
            assert_eq!(error.exit_code(), 8);
            assert!(error.to_string().contains("line 2: "), "{error}");
            assert_eq!(std::fs::read_to_string(&path).expect("read"), text);
        }
    }

    /// Changes every byte of the lines before the checkpoint, in several ways; anything may follow
    /// it.
    #[test]
    fn a_changed_byte_before_the_checkpoint_is_found() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join(NAME);
        let mut metrics = Metrics::create(folder.path()).expect("created");
        (1..=3).for_each(|step| metrics.append(&train(step, 1.0)).expect("appended"));
        let recorded = Some(metrics.digest());
        let before = std::fs::read(&path).expect("read");
        (4..=5).for_each(|step| metrics.append(&train(step, 1.0)).expect("appended"));
        let all = std::fs::read(&path).expect("read");
        let line_of = |at: usize| before[..at].split(|byte| *byte == b'\n').count();
        for at in 0..before.len() {
            for mask in [1, 2, 0x20, 0xff] {
                let mut bad = all.clone();
                bad[at] ^= mask;
                std::fs::write(&path, &bad).expect("written");
                let error = Metrics::cut(folder.path(), 3, recorded).expect_err("changed");
                assert_eq!(error.exit_code(), 8, "{error}");
                assert!(error.to_string().contains(&format!("line {}: ", line_of(at))), "{at} {mask}: {error}");
            }
        }
        let lines: Vec<&[u8]> = before.split_inclusive(|byte| *byte == b'\n').collect();
        let wrong = [lines[..2].concat(), [lines[1], lines[0], lines[2]].concat(), lines[1..].concat(), Vec::new()];
        for lines in wrong {
            std::fs::write(&path, lines).expect("written");
            assert_eq!(Metrics::cut(folder.path(), 3, recorded).expect_err("other lines").exit_code(), 8);
        }
        for after in [&b""[..], b"{\"sch", b"anything at all\n"] {
            std::fs::write(&path, [&before, after].concat()).expect("written");
            assert_eq!(Some(resumed(folder.path(), 3, recorded).digest()), recorded);
            assert_eq!(std::fs::read(&path).expect("read"), before);
        }
    }

    #[test]
    fn lines_of_an_earlier_version_are_taken_as_they_are() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join(NAME);
        let old = |step| {
            let line = train(step, 1.0).to_line();
            format!("{}}}\n", checked(&line).expect("a checksum").0)
        };
        std::fs::write(&path, old(1) + &old(2)).expect("written");
        let mut metrics = resumed(folder.path(), 2, None);
        metrics.append(&train(3, 1.0)).expect("appended");
        let recorded = metrics.digest();
        let again = resumed(folder.path(), 3, Some(recorded));
        let whole = tempfile::tempdir().expect("folder");
        let mut metrics = Metrics::create(whole.path()).expect("created");
        (1..=3).for_each(|step| metrics.append(&train(step, 1.0)).expect("appended"));
        assert_eq!((again.digest(), metrics.digest()), (recorded, recorded));
    }
}
