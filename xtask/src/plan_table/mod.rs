//! `cargo xtask plan-table`: what `isobit plan` says of runs beside what they take, as a
//! Markdown table for `docs/memory.md`. Each run loads a model, trains, evaluates and saves, and is
//! resumed from its checkpoint; the largest memory of both processes counts.
//!
//! On the CPU that is resident memory without pages that only mirror a file, sampled; on an NVIDIA
//! card what the driver counts as used, its context included, less what was used before.

mod configurations;
mod model;
mod sample;

use crate::arguments::Arguments;
use configurations::{Configuration, ON_CARD, ON_CPU};
use sample::Meter;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// How far a prediction may be above the measurement: 3 %, and below a gigabyte 32 MB more.
const PERCENT: u64 = 3;
const SMALL: u64 = 1_000_000_000;
const SMALL_MORE: u64 = 32_000_000;

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let program = arguments.option("--isobit")?.unwrap_or_else(|| "target/release/isobit".to_string());
    let device = arguments.option("--device")?.unwrap_or_else(|| "cpu".to_string());
    let folder = arguments.option("--folder")?.unwrap_or_else(|| "target/plan-table".to_string());
    let only: Option<usize> = arguments.parsed("--only")?;
    arguments.finish()?;
    let program = std::fs::canonicalize(&program).map_err(|error| format!("{program}: {error}"))?;
    let folder = PathBuf::from(folder);
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let meter = Meter::of(&device)?;
    let all: &[Configuration] = if device == "cpu" { &ON_CPU } else { &ON_CARD };
    println!("| configuration on {device} | predicted, MB | measured, MB | above |\n|---|---|---|---|");
    let mut wrong = 0;
    for (at, configuration) in all.iter().enumerate() {
        if only.is_some_and(|only| only != at + 1) {
            continue;
        }
        let work = Work { program: &program, folder: &folder, device: &device };
        let (predicted, measured) = work.compared(configuration, &meter)?;
        let limit = measured + measured * PERCENT / 100 + if measured < SMALL { SMALL_MORE } else { 0 };
        let is_right = (measured..=limit).contains(&predicted);
        wrong += usize::from(!is_right);
        let above = 100.0 * (predicted as f64 / measured as f64 - 1.0);
        let mark = if is_right { "" } else { " (outside the limits)" };
        let [predicted, measured] = [predicted, measured].map(|bytes| format!("{:.0}", bytes as f64 / 1e6));
        println!("| {} | {predicted} | {measured} | {above:.1} %{mark} |", configuration.title);
    }
    if wrong > 0 { Err(format!("{wrong} predictions are outside the limits")) } else { Ok(()) }
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
        let planned = self.command(&["plan", "run.toml", "--json"]).output().map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&planned.stdout).into_owned();
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|error| {
            format!("{}: {error}: {}", configuration.title, String::from_utf8_lossy(&planned.stderr))
        })?;
        let predicted = value["needed_bytes"].as_u64().ok_or("the plan has no sum")?;
        let measured = meter.peak(&mut self.command(&["train", "run.toml", "--quiet"]))?;
        std::fs::remove_dir_all(run.join("final")).map_err(|error| error.to_string())?;
        let resumed = ["train", "run.toml", "--quiet", "--resume-from", "checkpoint-1"];
        let resumed = meter.peak(&mut self.command(&resumed))?;
        Ok((predicted, measured.max(resumed)))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program);
        command.args(arguments).current_dir(self.folder).stdin(Stdio::null());
        command
    }
}
