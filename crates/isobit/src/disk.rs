//! Disk space of a run: its checkpoints and its final folder, against what is left where they are
//! written. `plan` shows it, and `plan` and `train` warn of a disk that will be full; `doctor` asks
//! for the free space alone.

use crate::overhead;
use crate::units::size;
use isobit_training::checkpoint::step_of;
use isobit_training::config::{Adapter, Every, Length, Run, SaveDtype};
use std::path::Path;

/// Bytes of one number in a checkpoint: the weight and its two moments, in float32.
const PER_NUMBER: u64 = 12;

pub(crate) struct DiskFit {
    /// Bytes of a checkpoint.
    checkpoint: u64,
    /// The most checkpoints at a time, with one that is being written; None if it depends on the
    /// number of rows.
    count: Option<u64>,
    /// Bytes of the final folder.
    last: u64,
    /// Bytes that the run may write; None if it is for another machine.
    available: Option<u64>,
    folder: String,
}

impl DiskFit {
    /// Of a run that trains `trained_count` numbers.
    pub(crate) fn of(run: &Run, trained_count: u64, is_here: bool) -> Self {
        let number = if run.training.save_dtype == SaveDtype::Float32 { 4 } else { 2 };
        let trained = trained_count.saturating_mul(number);
        let last = match run.adapter {
            Adapter::Lora(_) | Adapter::Full => trained,
            Adapter::LastBlocks(_) => trained.saturating_add(overhead::mapped_weight_bytes(run)),
        };
        Self {
            checkpoint: trained_count.saturating_mul(PER_NUMBER),
            count: checkpoints(run),
            last,
            available: if is_here { left_for(&run.output_dir) } else { None },
            folder: run.output_dir.display().to_string(),
        }
    }

    /// If the number of checkpoints is unknown, what the first needs.
    pub(crate) fn needed(&self) -> u64 {
        self.checkpoint.saturating_mul(self.count.unwrap_or(1)).saturating_add(self.last)
    }

    pub(crate) fn available(&self) -> Option<u64> {
        self.available
    }

    /// What it is for, and what there is.
    pub(crate) fn described(&self) -> String {
        let each = size(self.checkpoint);
        let what = match self.count {
            Some(1) => format!("a checkpoint of {each} and the final weights"),
            Some(count) => format!("up to {count} checkpoints of {each} and the final weights"),
            None => format!("the final weights and a checkpoint; each more takes {each}"),
        };
        match self.available {
            Some(bytes) => format!("{what}; {} free in {}", size(bytes), self.folder),
            None => what,
        }
    }

    /// Of a run that will not find the space it needs.
    pub(crate) fn warning(&self) -> Option<String> {
        let available = self.available.filter(|bytes| self.needed() > *bytes)?;
        let up_to = if self.count.is_some() { "up to" } else { "at least" };
        Some(format!(
            "this run writes {up_to} {} to {}, where {} are free: set `save_total_limit`, save less often, or choose \
             another `output_dir`",
            size(self.needed()),
            self.folder,
            size(available)
        ))
    }
}

/// The most checkpoints of a run that exist at a time.
fn checkpoints(run: &Run) -> Option<u64> {
    let times = |every: Every| match (every, run.training.length) {
        (Every::Never, _) => Some(0),
        (Every::Steps(every), Length::Steps(steps)) => Some(steps / every.max(1)),
        (Every::Epoch, Length::Epochs(epochs)) => Some(epochs.ceil() as u64),
        (Every::Steps(_), Length::Epochs(_)) | (Every::Epoch, Length::Steps(_)) => None,
    };
    // One at the end, and one whenever an evaluation was the best so far.
    let better = if run.has_eval() { times(run.eval.every) } else { Some(0) };
    let all =
        times(run.training.save).zip(better).map(|(saves, better)| saves.saturating_add(better).saturating_add(1));
    match u64::from(run.training.save_total_limit) {
        0 => all,
        // The newest, the best, and the one that is being written.
        limit => Some(all.unwrap_or(u64::MAX).min(limit + u64::from(run.has_eval()) + 1)),
    }
}

/// Bytes that a run may write to its folder: those that are free, and those of its checkpoints,
/// which a resumed run keeps or replaces.
fn left_for(output_dir: &Path) -> Option<u64> {
    let there = output_dir.ancestors().find(|folder| folder.is_dir() || folder.as_os_str().is_empty())?;
    let there = if there.as_os_str().is_empty() { Path::new(".") } else { there };
    let folders = std::fs::read_dir(output_dir).into_iter().flatten().flatten();
    let checkpoints = folders.filter(|entry| entry.file_name().to_str().and_then(step_of).is_some());
    let files = checkpoints.flat_map(|entry| std::fs::read_dir(entry.path()).into_iter().flatten().flatten());
    let written = files.filter_map(|file| file.metadata().ok()).map(|about| about.len());
    Some(written.fold(free_bytes(there)?, u64::saturating_add))
}

/// Bytes that a user may still write in a folder.
#[cfg(unix)]
#[allow(clippy::unnecessary_cast, reason = "some systems count in 32 bits")]
pub(crate) fn free_bytes(folder: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
    let mut about = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the path ends with a zero byte, and `about` has room for the answer.
    if unsafe { libc::statvfs(path.as_ptr(), about.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: all zeros are a value of this struct of numbers, and the call succeeded.
    let about = unsafe { about.assume_init() };
    (about.f_bavail as u64).checked_mul(about.f_frsize as u64)
}

#[cfg(not(unix))]
pub(crate) fn free_bytes(_: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobit_training::config;

    fn run(training: &str, top: &str) -> Run {
        let text = format!(
            "base_model = \"m\"\noutput_dir = \"out\"\n{top}\n[[datasets]]\npath = \"d\"\n[training]\n{training}"
        );
        config::parse("the config", &text, &[]).expect("a config").run
    }

    #[test]
    fn as_many_checkpoints_as_a_run_keeps() {
        let count = |training: &str| checkpoints(&run(training, ""));
        assert_eq!(count("max_steps = 10\nsave_steps = 4"), Some(3));
        assert_eq!(count("max_steps = 10\nsave_steps = 4\nsave_total_limit = 1"), Some(2));
        assert_eq!(count("num_epochs = 3\nsave_steps = 4"), None);
        assert_eq!(count("num_epochs = 3\nsave_steps = 4\nsave_total_limit = 2"), Some(3));
        let with_eval =
            run("max_steps = 10\nsave_steps = 4\nsave_total_limit = 1", "[eval]\npath = \"e\"\neval_steps = 2");
        assert_eq!(checkpoints(&with_eval), Some(3));
    }

    #[test]
    fn space_is_that_of_the_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let (output, missing) = (folder.path().join("out"), folder.path().join("a/b"));
        assert!(!cfg!(unix) || left_for(&missing).is_some());
        std::fs::create_dir_all(output.join("checkpoint-5")).expect("a folder");
        std::fs::write(output.join("checkpoint-5/model.safetensors"), [0; 5]).expect("written");
        // Others write to the disk meanwhile: the file is far larger than what they may.
        let large = std::fs::File::create(output.join("checkpoint-5/optimizer.safetensors")).expect("created");
        large.set_len(1 << 40).expect("a hole");
        assert!(!cfg!(unix) || left_for(&output) > left_for(&missing).map(|free| free + (1 << 39)));
    }

    #[test]
    fn a_full_disk_is_told() {
        let mut fit = DiskFit::of(&run("max_steps = 10\nsave_steps = 5", ""), 1 << 28, false);
        assert_eq!(fit.needed(), 3 * (12 << 28) + (4 << 28));
        assert_eq!(fit.warning(), None, "another machine");
        fit.available = Some(fit.needed());
        assert_eq!(fit.warning(), None);
        fit.available = Some(fit.needed() - 1);
        assert!(fit.warning().is_some_and(|text| text.contains("up to 10.00 GiB to out")), "{:?}", fit.warning());
        assert!(fit.described().contains("up to 3 checkpoints of 3.00 GiB"), "{}", fit.described());
    }
}
