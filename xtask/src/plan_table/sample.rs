//! The memory of a process while it runs, sampled: its own on the host, or that of a card.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Between samples of the host's memory; a card's tool samples at its own pace.
const PAUSE: Duration = Duration::from_millis(2);
const CARD_PAUSE_MS: &str = "10";
/// Between two looks for the processes of a launcher, and how far below it they may be.
const SAMPLES_PER_LOOK: u32 = 25;
const ANCESTORS_MAX: usize = 16;

pub(super) enum Meter {
    Host,
    /// The number of an NVIDIA card.
    Card(String),
}

impl Meter {
    pub(super) fn of(device: &str) -> Result<Self, String> {
        match device.split_once(':') {
            None if device == "cpu" => Ok(Self::Host),
            Some(("cuda", number)) => Ok(Self::Card(number.to_string())),
            _ => Err(format!("{device}: memory is measured on cpu and cuda:N")),
        }
    }

    /// Runs the command and gives the most bytes that it took, or one of the processes of `program`
    /// that it started.
    pub(super) fn peak(&self, command: &mut Command, program: &Path) -> Result<u64, String> {
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        match self {
            Self::Host => {
                let mut child = command.spawn().map_err(|error| error.to_string())?;
                let launches = Path::new(command.get_program()) != program;
                let (mut peak, mut processes, mut samples) = (0, vec![child.id()], 0_u32);
                while child.try_wait().map_err(|error| error.to_string())?.is_none() {
                    if launches && samples.is_multiple_of(SAMPLES_PER_LOOK) {
                        processes = started_by(child.id(), program);
                    }
                    for process in &processes {
                        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
                        peak = peak.max(own_bytes(&status));
                    }
                    samples = samples.wrapping_add(1);
                    std::thread::sleep(PAUSE);
                }
                finished(child)?;
                Ok(peak)
            }
            Self::Card(number) => {
                let used = |line: &str| line.trim().parse::<u64>().ok();
                let query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", number];
                let before = Command::new("nvidia-smi").args(query).output().map_err(|error| error.to_string())?;
                let before = used(&String::from_utf8_lossy(&before.stdout)).ok_or("nvidia-smi gives no number")?;
                let mut samples = Command::new("nvidia-smi");
                let samples = samples.args(query).args(["-lms", CARD_PAUSE_MS]).stdout(Stdio::piped());
                let mut sampler = samples.spawn().map_err(|error| error.to_string())?;
                let lines = sampler.stdout.take().ok_or("nvidia-smi has no output")?;
                let reader = std::thread::spawn(move || {
                    let lines = BufReader::new(lines).lines().map_while(Result::ok);
                    lines.filter_map(|line| used(&line)).max().unwrap_or(0)
                });
                let mut child = command.spawn().map_err(|error| error.to_string())?;
                let ended = child.wait().map_err(|error| error.to_string());
                let _ = sampler.kill().and_then(|()| sampler.wait());
                let peak = reader.join().map_err(|_| "the samples are lost")?;
                ended?;
                finished(child)?;
                Ok(peak.saturating_sub(before) << 20)
            }
        }
    }
}

/// Processes of `program` below that of a launcher.
fn started_by(launcher: u32, program: &Path) -> Vec<u32> {
    let parent_of = |process: u32| {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse::<u32>().ok()
    };
    let is_below = |process: &u32| {
        let ancestors = std::iter::successors(Some(*process), |process| parent_of(*process));
        ancestors.take(ANCESTORS_MAX).any(|process| process == launcher)
    };
    let is_program = |process: &u32| std::fs::read_link(format!("/proc/{process}/exe")).is_ok_and(|exe| exe == program);
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let all = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    all.filter(is_program).filter(is_below).collect()
}

/// An error if the command failed.
fn finished(child: Child) -> Result<(), String> {
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)))
}

/// Resident bytes that are not pages of a file.
fn own_bytes(status: &str) -> u64 {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    (field("RssAnon:").unwrap_or(0) + field("RssShmem:").unwrap_or(0)) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_files_do_not_count() {
        let status = "VmHWM:\t  900 kB\nRssAnon:\t     500 kB\nRssFile:\t     300 kB\nRssShmem:\t      20 kB\n";
        assert_eq!(own_bytes(status), 520 * 1024);
        assert_eq!(own_bytes(""), 0);
    }
}
