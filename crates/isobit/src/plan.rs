//! `isobit plan`: the memory a config needs, by item, before anything is loaded. The real step runs
//! on the counting backend, with rows as long as the config allows. Exit code 4 if it does not fit.

use crate::Failure;
use crate::advice::{self, Shown};
use crate::failure::failed;
use crate::fits::{Available, Given, HostFit, MemoryFit, Ranks, memory_fit, weights};
use crate::model;
use crate::split::{SplitFit, layers, split_fit};
use crate::stderr::{tell, tell_notes};
use crate::units::{self, size};
use isobit_doctor::{NamedCard, named_card, named_cards};
use isobit_models::Part;
use isobit_training::config::{self, Run};
use isobit_training::plan::{Item, MemoryPlan, PeakOfUpdate};
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
    /// Plan for this device instead of the config's: cpu, opencl:N, cuda:N, hip:N or auto, or a
    /// card by name, which need not be in this machine: mi50, mi50-32, rtx4090, a100-80; a list
    /// divides the layers: cuda:0,cpu. Given several times, once for each rank
    #[arg(long, value_name = "NAME")]
    device: Vec<String>,
    /// Memory that the buffers of a card may take, as `train --memory`, or that a machine has for a
    /// run on its CPU: 32 (in GiB), 512MiB, 24GB; one number for every card of a list, or one for
    /// each entry; default: what this machine has, or the card that is named, less what its
    /// driver takes
    #[arg(long, value_name = "SIZE", value_parser = units::bytes, value_delimiter = ',')]
    memory: Vec<u64>,
    /// Plan for one of so many ranks, each on a machine of its own; default: as many as `--device`
    /// is given times, or else as `devices_by_rank` has entries
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: Option<u32>,
    /// List every line of code that holds memory, and the work of each op in a step
    #[arg(long)]
    explain: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let plans = plans(arguments)?;
    let all = if plans.len() > 1 { plans.len() } else { arguments.ranks.unwrap_or(1) as usize };
    if arguments.ranks.is_some_and(|ranks| ranks as usize != all) {
        let message = format!("devices are named for {all} ranks");
        return Err(Failure::usage(message, "leave out --ranks, or plan for one device with --device"));
    }
    let groups = plans[0].run.training.gradient_groups;
    if all > groups as usize {
        let message = format!("{all} ranks share {groups} groups: `gradient_groups` must be at least as many");
        return Err(Failure::usage(message, format!("--set gradient_groups={all}, which is part of the result")));
    }
    // Ranks with the same devices have the same plan.
    let mut answer = Ok(());
    for (first, plan) in plans.iter().enumerate() {
        let is_same = |other: &&RankPlan| other.devices == plan.devices;
        if plans[..first].iter().any(|other| is_same(&other)) {
            continue;
        }
        if plans.len() > 1 && !arguments.json {
            let same = (0..all).filter(|rank| is_same(&&plans[*rank])).map(|rank| rank.to_string());
            let same: Vec<String> = same.collect();
            tell(&format!("{} {}:", if same.len() == 1 { "rank" } else { "each of ranks" }, same.join(", ")));
        }
        answer = planned(&plan.run, arguments, &plan.given, Ranks { all, ..Ranks::ALONE }).and(answer);
    }
    answer
}

/// What is planned for a rank, or for all of them.
struct RankPlan {
    run: Run,
    given: Given,
    /// Equal for ranks with the same plan.
    devices: String,
}

/// One for each `--device`, or for each entry of `devices_by_rank`; otherwise a single one.
fn plans(arguments: &Arguments) -> Result<Vec<RankPlan>, Failure> {
    let given = |cards| Given { memories: arguments.memory.clone(), cards, starts_here: false };
    if arguments.device.is_empty() {
        let run = read(arguments, None)?;
        let by_rank = run.devices_by_rank.iter().map(|devices| RankPlan {
            run: Run { devices: devices.clone(), ..run.clone() },
            given: given(Vec::new()),
            devices: format!("{devices:?}"),
        });
        let by_rank: Vec<RankPlan> = by_rank.collect();
        let alone = RankPlan { run, given: given(Vec::new()), devices: String::new() };
        return Ok(if by_rank.is_empty() { vec![alone] } else { by_rank });
    }
    let of_rank = |(rank, typed): (usize, &String)| {
        let (device, cards) = devices(typed)?;
        let notes = (rank == 0).then_some(typed.as_str());
        Ok(RankPlan { run: read(arguments, Some((&device, notes)))?, given: given(cards), devices: typed.clone() })
    };
    arguments.device.iter().enumerate().map(of_rank).collect()
}

/// The config with the arguments, on this device if one is named; notes are told as of what was
/// typed.
fn read(arguments: &Arguments, device: Option<(&str, Option<&str>)>) -> Result<Run, Failure> {
    let mut overrides = arguments.overrides.clone();
    overrides.extend(device.iter().map(|(device, _)| format!("device={device}")));
    let settled = config::read(&arguments.config, &overrides).map_err(|error| failed(&RunError::Config(error)))?;
    match device {
        None => tell_notes(&settled.notes, None),
        Some((device, Some(typed))) => tell_notes(&settled.notes, Some((device, typed))),
        Some((_, None)) => {}
    }
    let base_model = model::located(&settled.run.base_model);
    Ok(Run { base_model, ..settled.run })
}

/// The list of devices as a config would have it, and which of them are cards by name.
type Listed = (String, Vec<Option<&'static NamedCard>>);

fn devices(list: &str) -> Result<Listed, Failure> {
    let names: Vec<&str> = list.split(',').map(str::trim).collect();
    let cards: Vec<Option<&NamedCard>> = names.iter().map(|name| named_card(name)).collect();
    let is_known = |name: &str| name.contains(':') || ["cpu", "auto"].contains(&name);
    if let Some(unknown) = names.iter().zip(&cards).find(|(name, card)| card.is_none() && !is_known(name)) {
        let known: Vec<&str> = named_cards().iter().map(|card| card.name.as_str()).collect();
        let hint = format!("cpu, opencl:0, cuda:0, hip:0, auto, or one of these cards: {}", known.join(", "));
        return Err(Failure::usage(format!("`{}` is not a device", unknown.0), hint));
    }
    // A card by name stands for one that no other entry of the list names.
    let selector = |at: usize| match cards[at] {
        Some(card) => format!("{}:{}", card.api.name(), FIRST_NAMED + at),
        None => names[at].to_string(),
    };
    let selectors: Vec<String> = (0..names.len()).map(selector).collect();
    Ok((selectors.join(","), cards))
}

/// Device numbers that no machine has.
const FIRST_NAMED: usize = 1000;

/// Plans for one rank, or for the only process.
fn planned(run: &Run, arguments: &Arguments, given: &Given, ranks: Ranks) -> Result<(), Failure> {
    let refusal = if run.devices.len() > 1 {
        let fit = split_fit(run, given, ranks)?;
        tell_unused(run)?;
        let need = |fit: &SplitFit| {
            let bytes = fit.pools.iter().map(|pool| pool.needed).sum();
            advice::Need { bytes, fits: fit.fits(), work_per_row: 0 }
        };
        let advice = advice::of(run, need(&fit), |run| split_fit(run, given, ranks).ok().as_ref().map(need));
        let advice = advice::Shown { all: &advice, run };
        print_split(&fit, &advice, arguments).map_err(|error| Failure::output(&error))?;
        fit.refusal(run, given, ranks)
    } else {
        let fit = memory_fit(run, given, ranks)?;
        tell_unused(run)?;
        let advice = advice::of(run, need(run, &fit), |run| {
            let fit = memory_fit(run, given, ranks).ok()?;
            Some(need(run, &fit))
        });
        let advice = advice::Shown { all: &advice, run };
        print(&fit, &advice, arguments).map_err(|error| Failure::output(&error))?;
        fit.refusal(run, given, ranks)
    };
    // The printed result already says that it does not fit.
    refusal.map_or(Ok(()), |refusal| Err(refusal.told()))
}

fn need(run: &Run, fit: &MemoryFit) -> advice::Need {
    let rows = PeakOfUpdate::new(
        run.rows_per_update() as usize,
        run.training.gradient_groups as usize,
        run.training.micro_batch_size as usize,
    );
    let work = fit.plan.iter().flat_map(|plan| plan.work.values()).map(|work| work.multiply_adds).sum::<u64>();
    advice::Need { bytes: fit.needed, fits: fit.fits(), work_per_row: work / rows.rows.max(1) as u64 }
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

fn print(fit: &MemoryFit, advice: &Shown<'_>, arguments: &Arguments) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", json(fit, advice, arguments.explain))?;
        return out.flush();
    }
    if let Some(plan) = &fit.plan {
        for (item, bytes) in &plan.items {
            writeln!(out, "{:<12} {:>12}", item.name(), size(*bytes as u64))?;
        }
        for (name, bytes, when) in moments(plan, fit.on_host) {
            writeln!(out, "{name:<12} {:>12}  {when}", size(bytes as u64))?;
        }
        let (name, what) = beside(fit.on_host);
        let limits_buffers = fit.available.as_ref().is_some_and(|available| available.of_buffers);
        let counts = if limits_buffers { "; not counted in --memory" } else { "" };
        writeln!(out, "{name:<12} {:>12}  {what}{counts}", size(fit.overhead))?;
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
            Some(Available { bytes, of, .. }) => {
                writeln!(out, "{answer}: {needed} needed, {} available on the host ({of})", size(*bytes))?;
            }
            None => writeln!(out, "{needed} needed on the host; how much it has is unknown")?,
        }
    }
    if fit.is_estimate {
        writeln!(out, "{ESTIMATE}")?;
    }
    advice.print(&mut out, fit.fits())?;
    if let (true, Some(plan)) = (arguments.explain, &fit.plan) {
        explain(&mut out, plan)?;
    }
    out.flush()
}

const ESTIMATE: &str = "an estimate: no plan was compared with the driver's figure on a card of this kind";

/// The name of what is needed beside the plan, and what it is.
fn beside(on_host: bool) -> (&'static str, &'static str) {
    if on_host {
        ("process", "beside buffers: the program, its threads, the tokenised data")
    } else {
        ("driver", "beside buffers: the driver's context, and gaps that its pool cannot use")
    }
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
fn print_split(fit: &SplitFit, advice: &Shown<'_>, arguments: &Arguments) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", split_json(fit, advice, arguments.explain))?;
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
            Some(Available { bytes, of, .. }) => {
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
    if fit.is_estimate {
        writeln!(out, "{ESTIMATE}")?;
    }
    advice.print(&mut out, fit.fits())?;
    out.flush()
}

/// The most micro-batches whose activations a device holds: one, and one for each device behind it.
fn in_flight(fit: &SplitFit, part: &Part) -> usize {
    fit.split.parts.iter().filter(|other| other.layers.start >= part.layers.start).count()
}

fn split_json(fit: &SplitFit, advice: &Shown<'_>, explained: bool) -> serde_json::Value {
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
        "estimate": fit.is_estimate, "suggestions": advice.json(),
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

fn json(fit: &MemoryFit, advice: &Shown<'_>, explained: bool) -> serde_json::Value {
    let mut value = serde_json::json!({"schema": "isobit.plan/1", "device": fit.device});
    if let Some(plan) = &fit.plan {
        put_plan(&mut value, plan);
    }
    if fit.plan.is_some() {
        value[format!("{}_bytes", beside(fit.on_host).0)] = fit.overhead.into();
    }
    value["needed_bytes"] = fit.needed.into();
    value["available_bytes"] = fit.available.as_ref().map(|available| available.bytes).into();
    value["available_of"] = fit.available.as_ref().map(|available| available.of.as_str()).into();
    if let Some(host) = &fit.host {
        value["host_needed_bytes"] = host.needed.into();
        value["host_available_bytes"] = host.available.as_ref().map(|available| available.bytes).into();
    }
    value["fits"] = fit.fits().into();
    value["estimate"] = fit.is_estimate.into();
    value["suggestions"] = advice.json();
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
