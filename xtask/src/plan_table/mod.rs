//! `cargo xtask plan-table`: what `isobit plan` says of runs beside what they take, as a
//! Markdown table for `docs/memory.md`. Each run loads a model, trains, evaluates and saves, and is
//! resumed from its checkpoint; the largest memory of both processes counts.
//!
//! On the CPU that is resident memory without pages that only mirror a file, sampled; on an NVIDIA
//! card what the driver counts as used, its context included, less what was used before. Runs of
//! several ranks follow on the CPU, where the program was built with MPI; the largest rank counts,
//! with what it shares with others.

mod configurations;
mod model;
mod sample;

use crate::arguments::Arguments;
use configurations::{Configuration, ON_CARD, ON_CPU, ON_RANKS};
use sample::Meter;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// How far a prediction may be above the measurement: 3 %, and below a gigabyte 32 MB more.
const PERCENT: u64 = 3;
const SMALL: u64 = 1_000_000_000;
const SMALL_MORE: u64 = 32_000_000;
/// Of ranks: a plan assumes that all messages arrive at the worst time.
const PERCENT_OF_RANKS: u64 = 15;
/// A rank: on one core with all others, and behind them if it is the one that is to come last. The
/// arguments are the number of that one, and a command.
const RANK: &str = r#"
late=$1; shift
[ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = "$late" ] && exec taskset -c 0 nice -n 19 "$@"
exec taskset -c 0 "$@"
"#;

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let program = arguments.option("--isobit")?.unwrap_or_else(|| "target/release/isobit".to_string());
    let device = arguments.option("--device")?.unwrap_or_else(|| "cpu".to_string());
    let folder = arguments.option("--folder")?.unwrap_or_else(|| "target/plan-table".to_string());
    let only: Option<usize> = arguments.parsed("--only")?;
    let only_ranks = arguments.flag("--ranks");
    arguments.finish()?;
    let program = std::fs::canonicalize(&program).map_err(|error| format!("{program}: {error}"))?;
    let folder = PathBuf::from(folder);
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let meter = Meter::of(&device)?;
    let (mut all, mut missing) = (Vec::new(), None);
    match device.as_str() {
        "cpu" => {
            all.extend(&ON_CPU);
            missing = missing_for_ranks(&program);
            all.extend(ON_RANKS.iter().filter(|_| missing.is_none()));
        }
        _ => all.extend(&ON_CARD),
    }
    println!("| configuration on {device} | predicted, MB | measured, MB | above |\n|---|---|---|---|");
    let mut wrong = 0;
    for (at, configuration) in all.into_iter().enumerate() {
        if only.is_some_and(|only| only != at + 1) || (only_ranks && configuration.ranks == 1) {
            continue;
        }
        let work = Work { program: &program, folder: &folder, device: &device };
        let (predicted, measured) = work.compared(configuration, &meter)?;
        let percent = if configuration.ranks > 1 { PERCENT_OF_RANKS } else { PERCENT };
        let limit = measured + measured * percent / 100 + if measured < SMALL { SMALL_MORE } else { 0 };
        let is_right = (measured..=limit).contains(&predicted);
        wrong += usize::from(!is_right);
        let above = 100.0 * (predicted as f64 / measured as f64 - 1.0);
        let mark = if is_right { "" } else { " (outside the limits)" };
        let [predicted, measured] = [predicted, measured].map(|bytes| format!("{:.0}", bytes as f64 / 1e6));
        println!("| {} | {predicted} | {measured} | {above:.1} %{mark} |", configuration.title);
    }
    if let Some(why) = &missing {
        println!("skipped: {} configurations of ranks: {why}", ON_RANKS.len());
    }
    if wrong > 0 { Err(format!("{wrong} predictions are outside the limits")) } else { Ok(()) }
}

/// Why no ranks can be started, if none can.
fn missing_for_ranks(program: &Path) -> Option<String> {
    let said = |program: &str, argument: &OsStr| {
        let output = Command::new(program).arg(argument).stdin(Stdio::null()).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    if let Err(error) = said("mpirun", OsStr::new("--version")) {
        return Some(format!("mpirun does not start: {error}"));
    }
    // What the program is linked with; without `ldd` it is tried.
    let is_linked = said("ldd", program.as_os_str()).map_or(true, |libraries| libraries.contains("libmpi"));
    (!is_linked).then(|| "the program is built without MPI (`--features mpi`)".to_string())
}

/// Where a configuration runs.
struct Work<'a> {
    program: &'a Path,
    folder: &'a Path,
    device: &'a str,
}

impl Work<'_> {
    /// Predicted and measured bytes.
    fn compared(&self, configuration: &Configuration, meter: &Meter) -> Result<(u64, u64), String> {
        model::make(self.folder, configuration.model)?;
        configuration.write_data(self.folder)?;
        let config = self.folder.join("run.toml");
        std::fs::write(&config, configuration.toml(self.device)).map_err(|error| error.to_string())?;
        let run = self.folder.join("run");
        if run.exists() {
            std::fs::remove_dir_all(&run).map_err(|error| error.to_string())?;
        }
        let ranks = configuration.ranks;
        let launched = (ranks > 1).then_some(configuration);
        let mut planned = self.command(None, &["plan", "run.toml", "--json"]);
        if ranks > 1 {
            planned.args(["--ranks", &ranks.to_string()]);
        }
        let planned = planned.output().map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&planned.stdout).into_owned();
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|error| {
            format!("{}: {error}: {}", configuration.title, String::from_utf8_lossy(&planned.stderr))
        })?;
        let predicted = value["needed_bytes"].as_u64().ok_or("the plan has no sum")?;
        let measured = meter.peak(&mut self.command(launched, &["train", "run.toml", "--quiet"]), self.program)?;
        std::fs::remove_dir_all(run.join("final")).map_err(|error| error.to_string())?;
        let resumed = ["train", "run.toml", "--quiet", "--resume-from", "checkpoint-1"];
        let resumed = meter.peak(&mut self.command(launched, &resumed), self.program)?;
        Ok((predicted, measured.max(resumed)))
    }

    /// The program, or the launcher of several: Open MPI (the variables) or MPICH.
    fn command(&self, launched: Option<&Configuration>, arguments: &[&str]) -> Command {
        let mut command = Command::new(if launched.is_some() { Path::new("mpirun") } else { self.program });
        if let Some(configuration) = launched {
            let [ranks, late] = [configuration.ranks, configuration.late_rank()].map(|number| number.to_string());
            command.args(["-n", &ranks, "sh", "-c", RANK, "rank", &late]).arg(self.program);
            command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
            command.env("OMPI_MCA_rmaps_base_oversubscribe", "1").env("OMPI_MCA_hwloc_base_binding_policy", "none");
        }
        command.args(arguments).current_dir(self.folder).stdin(Stdio::null());
        command
    }
}
