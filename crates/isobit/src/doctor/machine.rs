//! The machine around the cards: processor, memory, disk, and the float state that this process
//! was started with.

use crate::backend::cores;
use crate::devices::total_memory;
use crate::disk::free_bytes;
use crate::units::size;
use isobit_doctor::{COLUMN, Finding, Level};
use isobit_kernels::Path;
use isobit_proof::name::counted;
use isobit_training::free_memory::free_memory;
use serde::Serialize;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

/// Below this, checkpoints of a long run may not fit.
const DISK_BYTES_MIN: u64 = 10 << 30;
const MEMORY_BYTES_MIN: u64 = 2 << 30;
/// A checkpoint is synced file by file.
const SYNC_MS_MAX: u64 = 500;
/// How often a sync is timed; the median counts.
const SYNCS: usize = 3;
const SYNC_BYTES: usize = 1 << 20;

#[derive(Debug, Serialize)]
pub(super) struct Machine {
    processor: Option<String>,
    cores: Option<usize>,
    paths: Vec<&'static str>,
    memory_bytes: Option<u64>,
    memory_available_bytes: Option<u64>,
    /// What limits the available memory.
    memory_limit: Option<&'static str>,
    folder: PathBuf,
    disk_available_bytes: Option<u64>,
    /// Milliseconds to make a file of a mebibyte durable.
    sync_ms: Option<u64>,
    /// Why the folder cannot be written to.
    unwritable: Option<String>,
    /// Whether rounding or subnormal numbers were changed when the process started.
    float_state_changed: bool,
}

impl Machine {
    pub(super) fn examine() -> Self {
        let free = free_memory();
        let folder = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
        let synced = sync_ms(&folder);
        Self {
            processor: processor(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            cores: cores(),
            paths: Path::available().into_iter().map(Path::name).collect(),
            memory_bytes: total_memory(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default()),
            memory_available_bytes: free.map(|free| free.bytes),
            memory_limit: free.map(|free| free.of),
            disk_available_bytes: free_bytes(&folder),
            sync_ms: synced.as_ref().ok().copied(),
            unwritable: synced.err().map(|error| error.to_string()),
            folder,
            float_state_changed: crate::float_state_changed(),
        }
    }

    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        let mut put = |name: &str, parts: Vec<String>| {
            let _ = writeln!(out, "{name:<COLUMN$}{}", parts.join(", "));
        };
        let mut parts: Vec<String> = self.processor.iter().cloned().collect();
        parts.extend(self.cores.map(|cores| counted(cores as u64, "core")));
        parts.push(format!("paths {}", self.paths.join(", ")));
        put("CPU", parts);
        let mut parts: Vec<String> = self.memory_bytes.iter().map(|bytes| size(*bytes)).collect();
        parts.extend(
            self.memory_available_bytes
                .zip(self.memory_limit)
                .map(|(bytes, limit)| format!("{} can be used ({limit})", size(bytes))),
        );
        put("memory", if parts.is_empty() { vec!["unknown".to_string()] } else { parts });
        let mut parts = vec![self.folder.display().to_string()];
        parts.extend(self.disk_available_bytes.map(|bytes| format!("{} free", size(bytes))));
        parts.extend(self.sync_ms.map(|ms| format!("a sync takes {ms} ms")));
        put("disk", parts);
        let state = if self.float_state_changed { "was changed, and is restored" } else { "IEEE-754 defaults" };
        put("floats", vec![state.to_string()]);
        out
    }

    pub(super) fn findings(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        let mut add = |id: &str, level: Level, what: String, why: &str, remedy: &str| {
            let [id, why, remedy] = [id, why, remedy].map(str::to_string);
            found.push(Finding { id, level, what, why, remedy, source: Vec::new() });
        };
        if self.float_state_changed {
            let what = "the process started with changed rounding or flushed subnormal numbers".to_string();
            let why = "a preloaded library changes them (one linked with -ffast-math does); Isobit restores them, other \
                       programs compute with them";
            add("float-state", Level::Warning, what, why, "look at LD_PRELOAD");
        }
        if let Some(bytes) = self.memory_available_bytes.filter(|bytes| *bytes < MEMORY_BYTES_MIN) {
            let what = format!("{} of memory can be used ({})", size(bytes), self.memory_limit.unwrap_or("unknown"));
            let remedy = "end other programs, or raise the limit; `isobit plan` says what a run needs";
            add("little-memory", Level::Warning, what, "only the smallest models fit", remedy);
        }
        if let Some(bytes) = self.disk_available_bytes.filter(|bytes| *bytes < DISK_BYTES_MIN) {
            let what = format!("{} free in {}", size(bytes), self.folder.display());
            let remedy = "free some space, or set `save_total_limit`, or choose another `output_dir`";
            add("little-disk", Level::Warning, what, "checkpoints of a long run may not fit", remedy);
        }
        if let Some(ms) = self.sync_ms.filter(|ms| *ms > SYNC_MS_MAX) {
            let what = format!("a sync in {} takes {ms} ms", self.folder.display());
            let why = "every file of a checkpoint is synced, so saving is slow";
            add("slow-disk", Level::Note, what, why, "save less often (`save_steps`), or on another disk");
        }
        if let Some(error) = &self.unwritable {
            let what = format!("{} cannot be written to: {error}", self.folder.display());
            let remedy = "change to another folder, or check owner and permissions";
            add("unwritable-folder", Level::Warning, what, "runs are written below the current folder", remedy);
        }
        found
    }
}

/// The processor's name, from the text of `/proc/cpuinfo`.
fn processor(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).trim().chars().take(100).collect())
}

/// The median time to write a small file and make it durable.
#[expect(clippy::disallowed_types, reason = "a disk is timed; no result depends on it")]
fn sync_ms(folder: &std::path::Path) -> std::io::Result<u64> {
    let path = folder.join(format!(".isobit-{}-0.partial", std::process::id()));
    let bytes = vec![0x5a; SYNC_BYTES];
    let mut times = Vec::new();
    for _ in 0..SYNCS {
        let begun = std::time::Instant::now();
        let mut file = File::options().write(true).create_new(true).open(&path)?;
        let written = file.write_all(&bytes).and_then(|()| file.sync_all());
        times.push(begun.elapsed().as_millis() as u64);
        std::fs::remove_file(&path)?;
        written?;
    }
    times.sort_unstable();
    Ok(times[SYNCS / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy() -> Machine {
        Machine {
            processor: None,
            cores: Some(2),
            paths: vec!["scalar"],
            memory_bytes: Some(64 << 30),
            memory_available_bytes: Some(32 << 30),
            memory_limit: Some("limit of the control group"),
            folder: PathBuf::from("/here"),
            disk_available_bytes: Some(100 << 30),
            sync_ms: Some(4),
            unwritable: None,
            float_state_changed: false,
        }
    }

    #[test]
    fn each_finding_has_its_cause() {
        let ids = |machine: &Machine| machine.findings().into_iter().map(|finding| finding.id).collect::<Vec<_>>();
        assert_eq!(ids(&healthy()), Vec::<String>::new());
        assert_eq!(ids(&Machine { float_state_changed: true, ..healthy() }), ["float-state"]);
        assert_eq!(ids(&Machine { memory_available_bytes: Some(1 << 30), ..healthy() }), ["little-memory"]);
        assert_eq!(ids(&Machine { disk_available_bytes: Some(1 << 30), ..healthy() }), ["little-disk"]);
        assert_eq!(ids(&Machine { sync_ms: Some(900), ..healthy() }), ["slow-disk"]);
        let unwritable = Machine { sync_ms: None, unwritable: Some("denied".to_string()), ..healthy() };
        assert_eq!(ids(&unwritable), ["unwritable-folder"]);
        assert!(
            healthy().text().contains("32.00 GiB can be used (limit of the control group)"),
            "{}",
            healthy().text()
        );
    }

    #[test]
    fn the_name_of_the_processor() {
        assert_eq!(processor("processor\t: 0\nmodel name\t: AMD EPYC 9R14\n").as_deref(), Some("AMD EPYC 9R14"));
        assert_eq!(processor("\u{0}\u{1}"), None);
    }

    #[test]
    fn space_and_sync_of_a_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(sync_ms(folder.path()).is_ok());
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0, "nothing is left behind");
        assert!(sync_ms(&folder.path().join("nowhere")).is_err());
        assert!(!cfg!(unix) || free_bytes(folder.path()).is_some());
    }
}
