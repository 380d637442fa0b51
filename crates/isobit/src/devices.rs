//! `isobit devices`: what this machine can compute on. Every device is opened and tested with a
//! dozen operations whose results are known; one that gets them wrong is reported and never used.

use crate::Failure;
use crate::backend::Chosen;
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
    memory_bytes: u64,
    units: u32,
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
    let auto = Chosen::parse("auto", 0)?.name();
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
        runtime: format!("paths {}", paths.join(", ")),
        ..line("cpu")
    }
}

fn line(device: impl Into<String>) -> Line {
    Line {
        schema: "isobit.devices/1",
        device: device.into(),
        name: String::new(),
        memory_bytes: 0,
        units: 0,
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
            None => Gpu::open(Selector { api, index }).map(|gpu| gpu.name()).map_err(|failure| failure.what),
        };
        Line {
            name: listing.name,
            memory_bytes: listing.memory,
            units: listing.units,
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
        if line.memory_bytes > 0 {
            let gib = line.memory_bytes as f64 / f64::from(1 << 30);
            writeln!(out, "{:<9} {gib:.1} GiB, {} compute units, {}", "", line.units, line.runtime)?;
        } else {
            writeln!(out, "{:<9} {}", "", line.runtime)?;
        }
    }
    out.flush()
}
