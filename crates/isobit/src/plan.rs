//! `isobit plan`: the memory a config needs, by item, before anything is loaded. The real step runs
//! on the counting backend, with rows as long as the config allows. Exit code 4 if it does not fit.

use crate::Failure;
use crate::failure::failed;
use crate::fits::{Available, HostFit, MemoryFit, Ranks, memory_fit, weights};
use crate::model;
use crate::split::{SplitFit, layers, split_fit};
use crate::stderr::tell;
use crate::units::size;
use isobit_models::Part;
use isobit_training::config::{self, Run};
use isobit_training::plan::{Item, MemoryPlan};
use isobit_training::prepare::{RunError, model_config};
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Config file
    config: PathBuf,
    /// Override a key of the config: `--set training.micro_batch_size=1`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Plan for this device instead of the config's: cpu, opencl:N, cuda:N, hip:N or auto; a list
    /// divides the layers: cuda:0,cpu. With `--memory` they need not be in this machine
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Memory of the device in GiB, to plan for another machine; one number for each device of a
    /// list, or one for all; default: the memory of this machine
    #[arg(long, value_name = "GIB", value_parser = gibibytes, value_delimiter = ',')]
    memory: Vec<u64>,
    /// Plan for one of so many ranks, each on a machine of its own; default: as many as
    /// `devices_by_rank` has entries
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: Option<u32>,
    /// List every line of code that holds memory, and the work of each op in a step
    #[arg(long)]
    explain: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Parses a number of GiB into bytes: `32` or `32GiB`.
pub(crate) fn gibibytes(text: &str) -> Result<u64, String> {
    let number: f64 =
        text.strip_suffix("GiB").unwrap_or(text).trim_end().parse().map_err(|_| "not a number".to_string())?;
    if (0.0..1e9).contains(&number) { Ok((number * f64::from(1 << 30)) as u64) } else { Err("not a size".to_string()) }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut overrides = arguments.overrides.clone();
    overrides.extend(arguments.device.iter().map(|device| format!("device={device}")));
    let settled = config::read(&arguments.config, &overrides);
    let mut run = settled.map_err(|error| failed(&RunError::Config(error)))?.run;
    run.base_model = model::located(&run.base_model);
    if arguments.device.is_some() || run.devices_by_rank.is_empty() {
        let ranks = Ranks { all: arguments.ranks.unwrap_or(1) as usize, ..Ranks::ALONE };
        return planned(&run, arguments, ranks);
    }
    let all = run.devices_by_rank.len();
    if arguments.ranks.is_some_and(|ranks| ranks as usize != all) {
        let message = format!("`devices_by_rank` names the devices of {all} ranks");
        return Err(Failure::usage(message, "leave out --ranks, or plan for one device with --device"));
    }
    // Ranks with the same devices have the same plan.
    let mut answer = Ok(());
    for (first, devices) in run.devices_by_rank.iter().enumerate() {
        if run.devices_by_rank[..first].contains(devices) {
            continue;
        }
        let same = (0..all).filter(|rank| run.devices_by_rank[*rank] == *devices);
        let same: Vec<String> = same.map(|rank| rank.to_string()).collect();
        if !arguments.json {
            tell(&format!("{} {}:", if same.len() == 1 { "rank" } else { "each of ranks" }, same.join(", ")));
        }
        let of_rank = Run { devices: devices.clone(), ..run.clone() };
        answer = planned(&of_rank, arguments, Ranks { all, ..Ranks::ALONE }).and(answer);
    }
    answer
}

/// Plans for one rank, or for the only process.
fn planned(run: &Run, arguments: &Arguments, ranks: Ranks) -> Result<(), Failure> {
    let refusal = if run.devices.len() > 1 {
        let fit = split_fit(run, &arguments.memory, ranks)?;
        tell_unused(run)?;
        print_split(&fit, arguments).map_err(|error| Failure::output(&error))?;
        fit.refusal(run, &arguments.memory, ranks)
    } else {
        let [memory] = match arguments.memory[..] {
            [] => [None],
            [bytes] => [Some(bytes)],
            _ => return Err(Failure::usage("several memories are given for one device", "give one: --memory 32")),
        };
        let fit = memory_fit(run, memory, ranks)?;
        tell_unused(run)?;
        print(&fit, arguments).map_err(|error| Failure::output(&error))?;
        fit.refusal(run, memory, ranks)
    };
    // The printed result already says that it does not fit.
    refusal.map_or(Ok(()), |refusal| Err(refusal.told()))
}

/// Warns about model tensors that a run would not use.
fn tell_unused(run: &Run) -> Result<(), Failure> {
    let model = model_config(&run.base_model).map_err(|error| failed(&error))?;
    match weights(run, &model).map_err(|error| failed(&error))? {
        Some(weights) => weights.unused_note().iter().for_each(|note| tell(&format!("warning: {note}"))),
        None => tell(&format!(
            "note: {} holds no weights: planned from its config, with two bytes for a number that is not quantised",
            run.base_model.display()
        )),
    }
    Ok(())
}

fn print(fit: &MemoryFit, arguments: &Arguments) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", json(fit, arguments.explain))?;
        return out.flush();
    }
    if let Some(plan) = &fit.plan {
        for (item, bytes) in &plan.items {
            writeln!(out, "{:<12} {:>12}", item.name(), size(*bytes as u64))?;
        }
        for (name, bytes, when) in moments(plan, fit.on_host) {
            writeln!(out, "{name:<12} {:>12}  {when}", size(bytes as u64))?;
        }
        print_host(&mut out, plan, "")?;
    }
    let least = if fit.plan.is_none() { "at least " } else { "" };
    let moment = fit.plan.as_ref().map_or("", |plan| largest_moment(plan, fit.on_host));
    let needed = format!("{least}{} needed{moment}", size(fit.needed));
    let device = &fit.device;
    let host_lacks = fit.host.as_ref().is_some_and(HostFit::lacks);
    let only_host_lacks = host_lacks && fit.available.as_ref().is_none_or(|available| fit.needed <= available.bytes);
    match (&fit.available, fit.fits()) {
        (Some(available), fits) => {
            let answer = if fits == Some(true) || only_host_lacks { "fits" } else { "does not fit" };
            let (there, of) = (size(available.bytes), &available.of);
            writeln!(out, "{answer}: {needed}, {there} available on {device} ({of})")?;
        }
        (None, Some(false)) if !only_host_lacks => writeln!(out, "does not fit: {needed} on {device}")?,
        (None, _) => writeln!(out, "{needed}; how much {device} has is unknown")?,
    }
    if let Some(HostFit { needed, available }) = &fit.host {
        let (answer, needed) = (if host_lacks { "does not fit" } else { "fits" }, size(*needed));
        match available {
            Some(Available { bytes, of }) => {
                writeln!(out, "{answer}: {needed} needed, {} available on the host ({of})", size(*bytes))?;
            }
            None => writeln!(out, "{needed} needed on the host; how much it has is unknown")?,
        }
    }
    if let (true, Some(plan)) = (arguments.explain, &fit.plan) {
        explain(&mut out, plan)?;
    }
    out.flush()
}

/// What is offloaded to host memory, by item.
fn print_host(out: &mut impl Write, plan: &MemoryPlan, margin: &str) -> std::io::Result<()> {
    if plan.bytes_ranks > 0 {
        let bytes = size(plan.bytes_ranks as u64);
        writeln!(out, "{margin}{:<12} {bytes:>12}  on the host, for shards and messages of a rank", "rank")?;
    }
    if plan.host_bytes_peak == 0 {
        return Ok(());
    }
    let items = plan.host_items.iter().filter(|(_, bytes)| **bytes > 0);
    let items: Vec<String> = items.map(|(item, bytes)| format!("{} {}", item.name(), size(*bytes as u64))).collect();
    let total = size(plan.host_bytes_peak as u64);
    writeln!(out, "{margin}{:<12} {total:>12}  offloaded to host memory: {}", "host", items.join(", "))
}

/// Device after device, then what they need together.
fn print_split(fit: &SplitFit, arguments: &Arguments) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", split_json(fit, arguments.explain))?;
        return out.flush();
    }
    for (stage, part) in fit.stages.iter().zip(&fit.split.parts) {
        writeln!(out, "{}, {}:", stage.device, layers(part))?;
        for (item, bytes) in &stage.plan.items {
            writeln!(out, "  {:<12} {:>12}", item.name(), size(*bytes as u64))?;
        }
        let total = size(stage.plan.bytes_peak as u64);
        let flight = match in_flight(fit, part) {
            1 => "one micro-batch".to_string(),
            count => format!("{count} micro-batches"),
        };
        writeln!(out, "  {:<12} {total:>12}  the peak of a step, with {flight} in flight", "total")?;
        print_host(&mut out, &stage.plan, "  ")?;
        if arguments.explain {
            explain(&mut out, &stage.plan)?;
        }
    }
    let transfer = size(fit.bytes_transfer);
    writeln!(out, "{:<14} {transfer:>12}  on the host, for what travels between devices", "transfer")?;
    for pool in &fit.pools {
        let (name, needed) = (&pool.name, size(pool.needed));
        match &pool.available {
            Some(Available { bytes, of }) => {
                writeln!(out, "{name}: {needed} needed, {} available ({of})", size(*bytes))?;
            }
            None => writeln!(out, "{name}: {needed} needed; how much it has is unknown")?,
        }
    }
    match fit.fits() {
        Some(true) => writeln!(out, "fits as {}", fit.counts())?,
        Some(false) => writeln!(out, "does not fit as {}", fit.counts())?,
        None => writeln!(out, "divided into {}", fit.counts())?,
    }
    out.flush()
}

/// The most micro-batches whose activations a device holds: one, and one for each device behind it.
fn in_flight(fit: &SplitFit, part: &Part) -> usize {
    fit.split.parts.iter().filter(|other| other.layers.start >= part.layers.start).count()
}

fn split_json(fit: &SplitFit, explained: bool) -> serde_json::Value {
    let stages = fit.stages.iter().zip(&fit.split.parts).map(|(stage, part)| {
        let mut value = serde_json::json!({
            "device": stage.device, "first_layer": part.layers.start, "layers": part.layers.len(),
            "micro_batches_in_flight": in_flight(fit, part),
        });
        put_plan(&mut value, &stage.plan);
        if explained {
            explain_json(&mut value, &stage.plan);
        }
        value
    });
    let pools = fit.pools.iter().map(|pool| {
        serde_json::json!({
            "of": pool.name, "needed_bytes": pool.needed,
            "available_bytes": pool.available.as_ref().map(|available| available.bytes),
            "available_of": pool.available.as_ref().map(|available| available.of.as_str()),
        })
    });
    serde_json::json!({
        "schema": "isobit.plan/1", "device": fit.split.name(), "devices": stages.collect::<Vec<_>>(),
        "memories": pools.collect::<Vec<_>>(), "transfer_host_bytes": fit.bytes_transfer, "fits": fit.fits(),
    })
}

/// The moments at which a run needs the most: name, bytes, and when. The host has to hold a save
/// together with the run only if the run is on it.
fn moments(plan: &MemoryPlan, on_host: bool) -> [(&'static str, usize, &'static str); 3] {
    let (save, saving, reading) = if on_host {
        let save = plan.bytes_between_steps + plan.bytes_save;
        (save, "between steps, while a checkpoint is written", "while a checkpoint is read back")
    } else {
        (
            plan.bytes_save,
            "on the host, while a checkpoint is written",
            "on device and host together, while a checkpoint is read back",
        )
    };
    [
        ("total", plan.bytes_peak, "all of the above: the peak of a step"),
        ("save", save, saving),
        ("resume", plan.bytes_resume, reading),
    ]
}

/// Which of them the device must have memory for, if it is not the total.
fn largest_moment(plan: &MemoryPlan, on_host: bool) -> &'static str {
    let [total, save, resume] = moments(plan, on_host).map(|(_, bytes, _)| bytes);
    if !on_host || total >= save.max(resume) {
        ""
    } else if save >= resume {
        " to save"
    } else {
        " to resume"
    }
}

fn explain(out: &mut impl Write, plan: &MemoryPlan) -> std::io::Result<()> {
    writeln!(out, "\nheld at the peak:")?;
    let mut holdings: Vec<_> = plan.holdings.iter().collect();
    holdings.sort_by_key(|(holder, bytes)| (std::cmp::Reverse(**bytes), **holder));
    for (holder, bytes) in holdings {
        writeln!(out, "{bytes:>16} bytes  {:?}, {}:{}", holder.kind, holder.file, holder.line)?;
    }
    writeln!(out, "\na step of {} trained numbers:", plan.trained_count)?;
    for (op, work) in &plan.work {
        writeln!(
            out,
            "{op:<20} {:>8} calls {:>16} multiply-adds {:>14} outputs",
            work.calls, work.multiply_adds, work.outputs
        )?;
    }
    Ok(())
}

fn json(fit: &MemoryFit, explained: bool) -> serde_json::Value {
    let mut value = serde_json::json!({"schema": "isobit.plan/1", "device": fit.device});
    if let Some(plan) = &fit.plan {
        put_plan(&mut value, plan);
    }
    value["needed_bytes"] = fit.needed.into();
    value["available_bytes"] = fit.available.as_ref().map(|available| available.bytes).into();
    value["available_of"] = fit.available.as_ref().map(|available| available.of.as_str()).into();
    if let Some(host) = &fit.host {
        value["host_needed_bytes"] = host.needed.into();
        value["host_available_bytes"] = host.available.as_ref().map(|available| available.bytes).into();
    }
    value["fits"] = fit.fits().into();
    if let (true, Some(plan)) = (explained, &fit.plan) {
        explain_json(&mut value, plan);
    }
    value
}

fn put_plan(value: &mut serde_json::Value, plan: &MemoryPlan) {
    for item in Item::ALL {
        value[format!("{}_bytes", item.name())] = plan.items[&item].into();
    }
    if plan.bytes_ranks > 0 {
        value["rank_host_bytes"] = plan.bytes_ranks.into();
    }
    if plan.host_bytes_peak > 0 {
        value["host_bytes"] = plan.host_bytes_peak.into();
        for item in Item::ALL {
            value[format!("host_{}_bytes", item.name())] = plan.host_items[&item].into();
        }
    }
    value["total_bytes"] = plan.bytes_peak.into();
    value["save_host_bytes"] = plan.bytes_save.into();
    value["resume_bytes"] = plan.bytes_resume.into();
    value["trained_parameters"] = plan.trained_count.into();
}

fn explain_json(value: &mut serde_json::Value, plan: &MemoryPlan) {
    let holdings = plan.holdings.iter().map(|(holder, bytes)| {
        serde_json::json!({"kind": format!("{:?}", holder.kind), "at": format!("{}:{}", holder.file, holder.line), "bytes": bytes})
    });
    value["holdings"] = holdings.collect();
    let work = plan.work.iter().map(|(op, work)| {
        let work =
            serde_json::json!({"calls": work.calls, "multiply_adds": work.multiply_adds, "outputs": work.outputs});
        ((*op).to_string(), work)
    });
    value["work"] = work.collect();
}
