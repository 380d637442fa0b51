//! `isobit devices`: what this machine can compute on. Every device is opened and tested with a
//! dozen operations whose results are known; one that gets them wrong is reported and never used.

use crate::Failure;
use crate::backend::{cores, first_working};
use isobit_kernels::gpu::{self, Api, Gpu, Selector};
use isobit_kernels::{Device, Path};
use serde::Serialize;
use std::io::Write;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// One line of output.
#[derive(Debug, Serialize)]
struct Line {
    schema: &'static str,
    device: String,
    name: String,
    /// None if the system does not report it, or there is no device.
    memory_bytes: Option<u64>,
    units: Option<u32>,
    runtime: String,
    ready: bool,
    /// Why the device is not ready.
    reason: Option<String>,
    /// Whether the device `auto` is this one.
    auto: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut lines = vec![cpu()];
    for api in Api::ALL {
        lines.extend(devices(api));
    }
    // The devices were just opened; `auto` need not open them again.
    let count =
        |api: Api| lines.iter().filter(|line| line.device.parse().is_ok_and(|at: Selector| at.api == api)).count();
    let is_ready = |card: Selector| lines.iter().any(|line| line.ready && line.device == card.to_string());
    let card = first_working(count, |card| gpu::is_gpu(card) && is_ready(card));
    let auto = card.map_or("cpu".to_string(), |card| card.to_string());
    for line in &mut lines {
        line.auto = line.device == auto;
    }
    let mut out = std::io::stdout().lock();
    print(&mut out, &lines, arguments.json).map_err(|error| Failure::output(&error))
}

fn cpu() -> Line {
    let paths: Vec<_> = Path::available().into_iter().map(Path::name).collect();
    Line {
        name: format!("this machine's processor, {}", Path::best()),
        memory_bytes: total_memory(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default()),
        units: cores().and_then(|cores| u32::try_from(cores).ok()),
        runtime: format!("paths {}", paths.join(", ")),
        ..line("cpu")
    }
}

/// Bytes of memory that the machine has, from the text of `/proc/meminfo`.
pub(crate) fn total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn line(device: impl Into<String>) -> Line {
    Line {
        schema: "isobit.devices/1",
        device: device.into(),
        name: String::new(),
        memory_bytes: None,
        units: None,
        runtime: String::new(),
        ready: true,
        reason: None,
        auto: false,
    }
}

fn devices(api: Api) -> Vec<Line> {
    let none = |why: String| vec![Line { ready: false, reason: Some(why), ..line(api.name()) }];
    let listings = match gpu::list(api) {
        Ok(listings) if listings.is_empty() => return none("no device".to_string()),
        Ok(listings) => listings,
        Err(why) => return none(why),
    };
    let describe = |(index, listing): (usize, gpu::Listing)| {
        let opened = match listing.objection {
            Some(objection) => Err(objection),
            // Opened and tested by the child process that listed it.
            None if api == Api::Hip => Ok(listing.name.clone()),
            None => Gpu::open(Selector { api, index }).map(|gpu| gpu.name()).map_err(|failure| failure.what),
        };
        Line {
            name: listing.name,
            memory_bytes: Some(listing.memory).filter(|bytes| *bytes > 0),
            units: Some(listing.units).filter(|units| *units > 0),
            runtime: listing.runtime,
            ready: opened.is_ok(),
            reason: opened.err(),
            ..line(listing.selector)
        }
    };
    listings.into_iter().enumerate().map(describe).collect()
}

fn print(out: &mut impl Write, lines: &[Line], json: bool) -> std::io::Result<()> {
    for line in lines {
        if json {
            writeln!(out, "{}", serde_json::to_string(line)?)?;
            continue;
        }
        let state = line.reason.as_deref().unwrap_or(if line.auto { "ready, used by `auto`" } else { "ready" });
        if line.name.is_empty() {
            writeln!(out, "{:<9} {state}", line.device)?;
            continue;
        }
        writeln!(out, "{:<9} {}: {state}", line.device, line.name)?;
        let memory = line.memory_bytes.map(|bytes| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)));
        let name = if line.device == "cpu" { "cores" } else { "compute units" };
        let units = line.units.map(|units| format!("{units} {name}"));
        let parts: Vec<String> = memory.into_iter().chain(units).chain([line.runtime.clone()]).collect();
        writeln!(out, "{:<9} {}", "", parts.join(", "))?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_as_the_system_tells_it() {
        assert_eq!(total_memory("MemFree: 1 kB\nMemTotal:       16384 kB\n"), Some(1 << 24));
        assert_eq!(total_memory("MemTotal: many kB\n"), None);
        assert_eq!(total_memory(""), None);
    }
}
