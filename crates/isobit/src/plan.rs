//! `isobit plan`: the memory a config needs, by item, before anything is loaded. The real step runs
//! on the counting backend, with rows as long as the config allows. Exit code 4 if it does not fit.

use crate::Failure;
use crate::advice::{self, Shown};
use crate::audit;
use crate::audit_fit::AuditFit;
use crate::disk::DiskFit;
use crate::fits::{Available, Given, HostFit, MemoryFit, Ranks, memory_fit, weights};
use crate::model;
use crate::overhead::data_files;
use crate::split::{SplitFit, layers, split_fit};
use crate::stderr::{tell, tell_notes};
use crate::units::{self, size};
use isobit_doctor::{NamedCard, cards_like, named_card, named_cards};
use isobit_models::Part;
use isobit_proof::name::counted;
use isobit_training::config::{self, Run, nearest};
use isobit_training::plan::{Item, MemoryPlan};
use isobit_training::prepare::{RunError, check_quantised, check_start, model_config};
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
    /// Whether audits fit beside the run, as with `train --audit-every`: on devices of this machine
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    audit_every: Option<u64>,
    /// Where audits compute, as with `train --audit-on`
    #[arg(long, value_name = "NAME", requires = "audit_every")]
    audit_on: Option<String>,
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
        let message = format!("{all} ranks cannot share {}", counted(u64::from(groups), "gradient group"));
        return Err(Failure::usage(message, format!("--set gradient_groups={all}, which is part of the result")));
    }
    let (distinct, mut objects) = (distinct(&plans), Vec::new());
    let mut answer = Ok(());
    for (same, plan) in &distinct {
        if plans.len() > 1 && !arguments.json {
            print_heading(same).map_err(|error| Failure::output(&error))?;
        }
        let planned = planned(&plan.run, arguments, &plan.given, Ranks { all, ..Ranks::ALONE });
        answer = planned
            .and_then(|(object, answer)| {
                objects.extend(object);
                answer
            })
            .and(answer);
    }
    // A rank that cannot be planned leaves an error and no object.
    if arguments.json && objects.len() == distinct.len() {
        let object = if plans.len() > 1 { of_ranks(&distinct, objects) } else { objects.remove(0) };
        print_object(object).map_err(|error| Failure::output(&error))?;
    }
    answer
}

/// Ranks with the same devices have the same plan: each with the ranks that it is for.
fn distinct(plans: &[RankPlan]) -> Vec<(Vec<usize>, &RankPlan)> {
    let mut all: Vec<(Vec<usize>, &RankPlan)> = Vec::new();
    for (rank, plan) in plans.iter().enumerate() {
        match all.iter_mut().find(|(_, other)| other.devices == plan.devices) {
            Some((ranks, _)) => ranks.push(rank),
            None => all.push((vec![rank], plan)),
        }
    }
    all
}

fn print_heading(ranks: &[usize]) -> std::io::Result<()> {
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let of = if ranks.len() == 1 { "rank" } else { "each of ranks" };
    writeln!(std::io::stdout().lock(), "{of} {}:", names.join(", "))
}

/// The plans of all ranks in one object. They fit if each of them does.
fn of_ranks(distinct: &[(Vec<usize>, &RankPlan)], mut objects: Vec<serde_json::Value>) -> serde_json::Value {
    for ((ranks, _), object) in distinct.iter().zip(&mut objects) {
        object["ranks"] = ranks.clone().into();
    }
    let has = |answer: Option<bool>| objects.iter().any(|object| object["fits"].as_bool() == answer);
    // One that is known not to fit decides.
    let unknown = if has(None) { None } else { Some(true) };
    let fits = if has(Some(false)) { Some(false) } else { unknown };
    serde_json::json!({ "ranks": objects, "fits": fits })
}

fn print_object(mut object: serde_json::Value) -> std::io::Result<()> {
    object["schema"] = "isobit.plan/1".into();
    let mut out = std::io::stdout().lock();
    writeln!(out, "{object}")?;
    out.flush()
}

/// The object of a plan, if one is asked for, and the refusal of a run that does not fit.
type Planned = (Option<serde_json::Value>, Result<(), Failure>);

/// What is planned for a rank, or for all of them.
struct RankPlan {
    run: Run,
    given: Given,
    /// Equal for ranks with the same plan.
    devices: String,
}

/// One for each `--device`, or for each entry of `devices_by_rank`; otherwise a single one.
fn plans(arguments: &Arguments) -> Result<Vec<RankPlan>, Failure> {
    let given = |cards| Given { memories: arguments.memory.clone(), cards };
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
    let settled = config::read(&arguments.config, &overrides).map_err(RunError::Config)?;
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
        return Err(Failure::usage(format!("`{}` is not a device", unknown.0), hint_for_unknown(unknown.0)));
    }
    // A config knows no cards by name: it reads one as a device of its interface, and the plan
    // takes the card itself.
    let entry = |at: usize| cards[at].map_or(names[at].to_string(), |card| format!("{}:{at}", card.api.name()));
    let entries: Vec<String> = (0..names.len()).map(entry).collect();
    Ok((entries.join(","), cards))
}

/// What may be meant by a name that is no device's: cards that begin so, or the one with the most
/// similar name.
fn hint_for_unknown(typed: &str) -> String {
    let known: Vec<&str> = named_cards().iter().map(|card| card.name.as_str()).collect();
    let plain: String = typed.chars().filter(char::is_ascii_alphanumeric).collect();
    let mut meant: Vec<&str> = cards_like(typed).into_iter().map(|card| card.name.as_str()).collect();
    if meant.is_empty() {
        meant.extend(nearest(&plain, known.iter().copied().chain(["cpu", "auto"])));
    }
    let any = "a card that has no name here is planned for by its memory: `--device cuda:0 --memory 11GiB` (`hip:0` if \
               it is AMD's)";
    if meant.is_empty() {
        return format!("cpu, opencl:0, cuda:0, hip:0, auto, or one of these cards: {}; {any}", known.join(", "));
    }
    let meant: Vec<String> = meant.iter().map(|name| format!("`{name}`")).collect();
    format!("did you mean {}? {any}", meant.join(" or "))
}

/// The memory of audits, if there are to be any; refuses those that `train` would refuse.
fn audit_fit(run: &Run, arguments: &Arguments, given: &Given, ranks: Ranks) -> Result<Option<AuditFit>, Failure> {
    if arguments.audit_every.is_none() {
        return Ok(None);
    }
    if ranks.all > 1 {
        return Err(audit::not_for_ranks());
    }
    if given.cards.iter().any(Option::is_some) {
        let hint = "leave out --audit-every, or name devices that are here";
        return Err(Failure::usage("audits are planned for devices of this machine", hint));
    }
    AuditFit::of(run, audit::auditing(run, arguments.audit_on.as_deref())?, given)
}

/// Plans for one rank, or for the only process: the object for `--json`, and whether it fits.
/// Without `--json` the plan is printed.
fn planned(run: &Run, arguments: &Arguments, given: &Given, ranks: Ranks) -> Result<Planned, Failure> {
    let mut object = None;
    let audits = audit_fit(run, arguments, given, ranks)?;
    let refusal = if run.devices.len() > 1 {
        let fit = split_fit(run, given, ranks).map_err(with_hint)?;
        tell_unused(run)?;
        let advice = advice::shown(fit.advice(run, given, ranks));
        let shown = Shown { all: &advice };
        let disk = DiskFit::of(run, fit.trained_count(), fit.is_here);
        if arguments.json {
            object = Some(split_json(&fit, &disk, &shown, arguments.explain));
        } else {
            print_split(&fit, &disk, &shown, arguments).map_err(|error| Failure::output(&error))?;
        }
        tell_disk(&disk);
        fit.refusal(advice.first())
    } else {
        let fit = memory_fit(run, given, ranks).map_err(with_hint)?;
        tell_unused(run)?;
        let advice = advice::shown(fit.advice(run, given, ranks));
        let shown = Shown { all: &advice };
        let disk = fit.plan.as_ref().map(|plan| DiskFit::of(run, plan.trained_count as u64, fit.is_here));
        if arguments.json {
            object = Some(json(&fit, disk.as_ref(), &shown, arguments.explain));
        } else {
            print(&fit, disk.as_ref(), &shown, arguments).map_err(|error| Failure::output(&error))?;
        }
        disk.iter().for_each(tell_disk);
        fit.refusal(advice.first())
    };
    if let Some(audits) = &audits {
        match &mut object {
            Some(object) => object["audit_bytes"] = audits.bytes.into(),
            None => {
                writeln!(std::io::stdout().lock(), "{}", audits.line()).map_err(|error| Failure::output(&error))?;
            }
        }
    }
    let refusal = refusal.or(audits.and_then(|audits| audits.refusal()));
    if let (Some(object), Some(_)) = (&mut object, &refusal) {
        object["fits"] = false.into();
    }
    // The printed result already says that it does not fit.
    Ok((object, refusal.map_or(Ok(()), |refusal| Err(refusal.told()))))
}

/// A device that is not here can be planned for.
fn with_hint(failure: Failure) -> Failure {
    let hint = "name the card (`--device mi50`, once for each rank), or give `--memory SIZE`, to plan for one that is \
                not here; `isobit devices` lists those that are";
    if failure.code == 6 { Failure::device(failure.message, hint) } else { failure }
}

fn tell_disk(disk: &DiskFit) {
    disk.warning().iter().for_each(|warning| tell(&format!("warning: {warning}")));
}

/// Warns about model tensors that a run would not use, and refuses a starting adapter that `train`
/// would refuse.
fn tell_unused(run: &Run) -> Result<(), Failure> {
    let model = model_config(&run.base_model)?;
    check_start(run, &model)?;
    for missing in data_files(run).filter(|path| !path.exists()) {
        tell(&format!("note: {} does not exist: its rows are not counted", missing.display()));
    }
    match weights(run, &model)? {
        Some(weights) => {
            check_quantised(&model, &weights)?;
            weights.unused_note().iter().for_each(|note| tell(&format!("warning: {note}")));
        }
        None => tell(&format!(
            "note: {} holds no weights: planned from its config, with two bytes for a number that is not quantised",
            run.base_model.display()
        )),
    }
    Ok(())
}

fn print(fit: &MemoryFit, disk: Option<&DiskFit>, advice: &Shown<'_>, arguments: &Arguments) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if let Some(plan) = &fit.plan {
        for (item, bytes) in &plan.items {
            writeln!(out, "{:<12} {:>12}", item.name(), size(*bytes as u64))?;
        }
        for Moment { name, bytes, when, .. } in moments(plan, fit.on_host) {
            writeln!(out, "{name:<12} {:>12}  {when}", size(bytes as u64))?;
        }
        let (name, what) = beside(fit.on_host);
        let limits_buffers = fit.available.as_ref().is_some_and(|available| available.of_buffers);
        let counts = if limits_buffers { "; not counted in --memory" } else { "" };
        writeln!(out, "{name:<12} {:>12}  {what}{counts}", size(fit.overhead))?;
        print_host(&mut out, plan, "")?;
    }
    if let Some(disk) = disk {
        writeln!(out, "{:<12} {:>12}  {}", "disk", size(disk.needed()), disk.described())?;
    }
    print_answer(&mut out, fit)?;
    if fit.is_estimate {
        writeln!(out, "{ESTIMATE}")?;
    }
    advice.print(&mut out, fit.fits())?;
    if let (true, Some(plan)) = (arguments.explain, &fit.plan) {
        explain(&mut out, plan)?;
    }
    out.flush()
}

/// Whether it fits, on the device and beside it.
fn print_answer(out: &mut impl Write, fit: &MemoryFit) -> std::io::Result<()> {
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
    if let Some(HostFit { needed, available, .. }) = &fit.host {
        let (answer, needed) = (if host_lacks { "does not fit" } else { "fits" }, size(*needed));
        match available {
            Some(Available { bytes, of, .. }) => {
                writeln!(out, "{answer}: {needed} needed, {} available on the host ({of})", size(*bytes))?;
            }
            None => writeln!(out, "{needed} needed on the host; how much it has is unknown")?,
        }
    }
    Ok(())
}

const ESTIMATE: &str = "an estimate: no plan was compared with the driver's figure on a card of this kind";

/// The name of what is needed beside the plan, and what it is.
fn beside(on_host: bool) -> (&'static str, &'static str) {
    if on_host {
        ("process", "beside buffers: the program, its threads, the tokenised data")
    } else {
        ("driver", "beside buffers: the driver's context, and gaps between buffers")
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
fn print_split(fit: &SplitFit, disk: &DiskFit, advice: &Shown<'_>, arguments: &Arguments) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
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
    writeln!(out, "{:<14} {:>12}  {}", "disk", size(disk.needed()), disk.described())?;
    for pool in &fit.pools {
        let (name, mut needed) = (&pool.name, format!("{} needed", size(pool.needed)));
        if pool.overhead > 0 {
            needed += &format!(", {} of it beside buffers", size(pool.overhead));
        }
        match &pool.available {
            Some(Available { bytes, of, .. }) => writeln!(out, "{name}: {needed}; {} available ({of})", size(*bytes))?,
            None => writeln!(out, "{name}: {needed}; how much it has is unknown")?,
        }
    }
    match fit.fits() {
        Some(true) => match fit.pools.iter().find(|pool| pool.available.is_none()) {
            Some(pool) => writeln!(out, "fits as {}, if {} has {}", fit.counts(), pool.name, size(pool.needed))?,
            None => writeln!(out, "fits as {}", fit.counts())?,
        },
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

fn split_json(fit: &SplitFit, disk: &DiskFit, advice: &Shown<'_>, explained: bool) -> serde_json::Value {
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
    let mut value = serde_json::json!({
        "device": fit.names.join(","), "devices": stages.collect::<Vec<_>>(),
        "memories": pools.collect::<Vec<_>>(), "transfer_host_bytes": fit.bytes_transfer, "fits": fit.fits(),
        "estimate": fit.is_estimate, "suggestions": advice.json(),
    });
    put_disk(&mut value, disk);
    value
}

fn put_disk(value: &mut serde_json::Value, disk: &DiskFit) {
    value["disk_bytes"] = disk.needed().into();
    value["disk_available_bytes"] = disk.available().into();
}

/// When a run needs the most.
struct Moment {
    name: &'static str,
    bytes: usize,
    when: &'static str,
    /// Whether the device must have memory for it, and what the answer then says.
    on_device: Option<&'static str>,
}

/// The host has to hold a save together with the run only if the run is on it.
fn moments(plan: &MemoryPlan, on_host: bool) -> Vec<Moment> {
    let moment = |name, bytes, when, on_device| Moment { name, bytes, when, on_device };
    let peak = "all of the above at their peak: loading, a step or an evaluation";
    let mut all = vec![moment("total", plan.bytes_peak, peak, Some(""))];
    if on_host {
        let save = plan.bytes_between_steps + plan.bytes_save;
        all.push(moment("save", save, "between steps, while a checkpoint is written", Some(" to save")));
        all.push(moment("resume", plan.bytes_resume, "while a checkpoint is read back", Some(" to resume")));
    } else {
        all.push(moment("save", plan.bytes_save, "on the host, while a checkpoint is written", None));
        let reading = "on device and host together, while a checkpoint is read back";
        all.push(moment("resume", plan.bytes_resume, reading, None));
    }
    if plan.bytes_generate > 0 {
        let bytes = plan.bytes_generate + if on_host { plan.host_bytes_generate } else { 0 };
        let when = "at most, for the samples at the end: the model without what trains it";
        all.push(moment("generate", bytes, when, Some(" to generate")));
    }
    all
}

/// Which of them the device must have memory for, if it is not the total.
fn largest_moment(plan: &MemoryPlan, on_host: bool) -> &'static str {
    let all = moments(plan, on_host);
    // The first of those that are equal.
    let largest = all.iter().rev().filter(|moment| moment.on_device.is_some()).max_by_key(|moment| moment.bytes);
    largest.and_then(|moment| moment.on_device).unwrap_or("")
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

fn json(fit: &MemoryFit, disk: Option<&DiskFit>, advice: &Shown<'_>, explained: bool) -> serde_json::Value {
    let mut value = serde_json::json!({ "device": fit.device });
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
    if let Some(disk) = disk {
        put_disk(&mut value, disk);
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
    if plan.bytes_generate > 0 {
        value["generate_bytes"] = plan.bytes_generate.into();
        value["generate_host_bytes"] = plan.host_bytes_generate.into();
    }
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
