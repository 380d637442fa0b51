//! `isobit doctor`: what this machine has, whether its devices give the bits, and which of its
//! combinations are known not to work, each with a remedy. `crates/doctor` reads the system's files
//! and holds the rules; here every device is opened and checked with test vectors.

mod machine;
mod vectors;

use crate::Failure;
use isobit_doctor::{Facts, Finding, Level, Sources, facts_text, findings, findings_text};
use machine::Machine;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;
use vectors::{DeviceCheck, Soak};

/// How long the system's files may take to answer.
const FILES_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Also look at the packages of a Python environment: its folder or its interpreter, which is
    /// not run
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Repeat the test vectors for this long, to find hardware that is sometimes wrong: 30s, 10m,
    /// 2h
    #[arg(long, value_name = "TIME", value_parser = duration)]
    soak: Option<Duration>,
}

/// Parses `30s`, `10m` or `2h`.
fn duration(text: &str) -> Result<Duration, String> {
    let (number, scale) = match text.char_indices().next_back() {
        Some((at, 's')) => (&text[..at], 1),
        Some((at, 'm')) => (&text[..at], 60),
        Some((at, 'h')) => (&text[..at], 3600),
        _ => return Err("write 30s, 10m or 2h".to_string()),
    };
    let number: u64 = number.parse().map_err(|_| "write 30s, 10m or 2h".to_string())?;
    let seconds = number.checked_mul(scale).filter(|seconds| (1..=SOAK_MAX).contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| "from 1s to 720h".to_string())
}

/// BOUND: a month, in seconds.
const SOAK_MAX: u64 = 720 * 3600;

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let variable = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let sources = Sources::here(variable, arguments.python.clone());
    let read = Facts::read_within(&sources, FILES_LIMIT);
    let in_time = read.is_some();
    let hint = "name the folder of an environment, or its bin/python; `python3 -c 'import sys; print(sys.prefix)'` \
                says which folder it is";
    let facts = read.unwrap_or_else(|| Ok(Facts::default())).map_err(|what| Failure::usage(what, hint))?;
    let machine = Machine::examine();
    let mut out = Output { json: arguments.json };
    out.text(&(machine.text() + &facts_text(&facts)))?;
    let (checks, subjects) = vectors::check(arguments.soak.is_some(), |check| out.text(&check.text()))?;
    let mut found = findings(&facts);
    if !in_time {
        found.push(files_hang());
    }
    found.extend(machine.findings());
    found.extend(vectors::findings(&facts, &checks));
    let soak = arguments.soak.map(|limit| Soak::run(&subjects, limit, arguments.json));
    found.extend(soak.iter().flat_map(Soak::findings));
    found.sort_by_key(|finding| finding.level);
    if let Some(soak) = &soak {
        out.text(&soak.text())?;
    }
    out.end(&facts, &machine, &checks, soak.as_ref(), &found)?;
    let answer = answer(&found);
    if checks.iter().any(DeviceCheck::is_unfinished) {
        leave(answer.as_ref().err().map_or(0, |failure| failure.code));
    }
    answer
}

fn answer(found: &[Finding]) -> Result<(), Failure> {
    let broken = found.iter().filter(|finding| finding.level == Level::Error).count();
    if broken == 0 {
        return Ok(());
    }
    let message = format!("{broken} {}", if broken == 1 { "device fails" } else { "devices fail" });
    Err(Failure::device(message, "do not train on it as it is; the findings say more").told())
}

/// Ends the process while a driver is busy on another thread: what libraries do at the end of a
/// process would wait for it, or crash. Everything is printed and flushed.
#[cfg(unix)]
fn leave(code: u8) {
    // SAFETY: nothing runs after this, and nothing is left to be written.
    unsafe { libc::_exit(i32::from(code)) }
}

#[cfg(not(unix))]
fn leave(_code: u8) {}

fn files_hang() -> Finding {
    Finding {
        id: "system-files-hang".to_string(),
        level: Level::Warning,
        what: format!("the system's files about cards did not answer within {} s", FILES_LIMIT.as_secs()),
        why: "the driver of a card hangs, so nothing above is known of cards".to_string(),
        remedy: "look at `dmesg` for the driver's messages, and start the machine again".to_string(),
        source: Vec::new(),
    }
}

/// Text as it becomes known, or one object at the end.
struct Output {
    json: bool,
}

impl Output {
    fn text(&mut self, text: &str) -> Result<(), Failure> {
        if self.json {
            return Ok(());
        }
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| Failure::output(&error))
    }

    fn end(
        &mut self,
        facts: &Facts,
        machine: &Machine,
        checks: &[DeviceCheck],
        soak: Option<&Soak>,
        found: &[Finding],
    ) -> Result<(), Failure> {
        if !self.json {
            let text = findings_text(found);
            return self.text(&if text.is_empty() { "no findings\n".to_string() } else { format!("\n{text}") });
        }
        let object = serde_json::json!({
            "schema": "isobit.doctor/1", "machine": machine, "system": facts, "devices": checks, "soak": soak,
            "findings": found,
        });
        let mut out = std::io::stdout().lock();
        writeln!(out, "{object}").and_then(|()| out.flush()).map_err(|error| Failure::output(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_as_people_write_them() {
        for (text, seconds) in [("30s", 30), ("10m", 600), ("2h", 7200)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)));
        }
        for text in ["", "10", "m", "-1m", "1.5h", "0s", "721h", "99999999999999999999h", "10 m", "1ü"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
