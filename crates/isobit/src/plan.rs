//! `isobit plan`: the memory a config needs, by item, before anything is loaded. The real step runs
//! on the counting backend, with rows as long as the config allows. Exit code 4 if it does not fit.

use crate::Failure;
use crate::advice::Suggestions;
use crate::audit;
use crate::audit_fit::AuditFit;
use crate::auto;
use crate::backend::check_entries;
use crate::disk::DiskFit;
use crate::fits::{Given, Ranks, memory_fit, weights};
use crate::model;
use crate::overhead::data_files;
use crate::plan_output::{json, print, print_split, split_json};
use crate::ranks;
use crate::split::split_fit;
use crate::stderr::{tell, tell_notes};
use crate::units;
use isobit_doctor::{NamedCard, cards_like, named_card, named_cards};
use isobit_training::config::{self, Run, nearest};
use isobit_training::prepare::{RunError, check_quantised, check_start, model_config};
use isobit_training::ranks::handshake::too_many;
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
    /// Limit on the buffers of a card, as in `train --memory`; for a run on the CPU, the memory of
    /// the machine: 32 (in GiB), 512MiB, 24GB; one number for every card of a list, or one for each
    /// entry; default: what this machine has, or the card that is named, less what its driver takes
    #[arg(long, value_name = "SIZE", value_parser = units::bytes, value_delimiter = ',')]
    memory: Vec<u64>,
    /// Plan for one of N ranks, each on a machine of its own; default: as many as `--device` is
    /// given times, or else as `devices_by_rank` has entries or a launcher starts
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: Option<u32>,
    /// Also plan the audits of `train --audit-every`; only for devices of this machine
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    audit_every: Option<u64>,
    /// Where audits compute, as in `train --audit-on`
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
    let launched = ranks::launched();
    if launched.is_some_and(|(rank, _)| rank > 0) {
        // The first process plans for all.
        return Ok(());
    }
    let plans = plans(arguments)?;
    let ranks = arguments.ranks.map(|ranks| ranks as usize).or(launched.map(|(_, size)| size));
    let all = if plans.len() > 1 { plans.len() } else { ranks.unwrap_or(1) };
    if arguments.ranks.is_some_and(|ranks| ranks as usize != all) {
        let message = format!("devices are named for {all} ranks");
        return Err(Failure::usage(message, "leave out --ranks, or plan for one device with --device"));
    }
    let groups = plans[0].run.training.gradient_groups;
    if all > groups as usize {
        let (message, hint) = too_many(all, groups as usize);
        return Err(Failure::usage(message, hint));
    }
    let here = if arguments.ranks.is_none() && all > 1 { ranks::launched_here().min(all) } else { 1 };
    let (distinct, mut objects) = (distinct(&plans), Vec::new());
    let mut answer = Ok(());
    for (same, plan) in &distinct {
        if plans.len() > 1 && !arguments.json {
            print_heading(same).map_err(|error| Failure::output(&error))?;
        }
        let numbers = if plans.len() > 1 { &same[..] } else { &[] };
        let ranks = Ranks { here, all, planned: numbers, ..Ranks::ALONE };
        let planned = planned(&plan.run, arguments, &plan.given, ranks);
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
    check_entries(&names)?;
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
fn audit_fit(run: &Run, arguments: &Arguments, given: &Given, ranks: Ranks<'_>) -> Result<Option<AuditFit>, Failure> {
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
    AuditFit::of(run, audit::auditing(run, arguments.audit_on.as_deref())?, given).map(Some)
}

/// Plans for one rank, or for the only process: the object for `--json`, and whether it fits.
/// Without `--json` the plan is printed.
fn planned(run: &Run, arguments: &Arguments, given: &Given, ranks: Ranks<'_>) -> Result<Planned, Failure> {
    let placed = auto::placed(run.clone(), given, ranks, true);
    if let Some(note) = auto::note(run, &placed) {
        tell(&format!("note: {note}"));
    }
    let run = &placed;
    let mut object = None;
    let (refusal, audits) = if run.devices.len() > 1 {
        let fit = split_fit(run, given, ranks).map_err(with_hint)?;
        check_inputs(run)?;
        let audits = audit_fit(run, arguments, given, ranks)?;
        let suggestions = Suggestions::new(fit.advice(run, given, ranks));
        let disk = DiskFit::of(run, fit.trained_count(), fit.is_here);
        if arguments.json {
            object = Some(split_json(&fit, &disk, &suggestions, arguments.explain));
        } else {
            let printed = print_split(&fit, &disk, audits.as_ref(), &suggestions, arguments.explain);
            printed.map_err(|error| Failure::output(&error))?;
        }
        tell_disk(&disk);
        (fit.refusal(suggestions.first()), audits)
    } else {
        let fit = memory_fit(run, given, ranks).map_err(with_hint)?;
        check_inputs(run)?;
        // A run that is too large to count is refused for itself.
        let audits = if fit.plan.is_some() { audit_fit(run, arguments, given, ranks)? } else { None };
        let suggestions = Suggestions::new(fit.advice(run, given, ranks));
        let disk = fit.plan.as_ref().map(|plan| DiskFit::of(run, plan.trained_count as u64, fit.is_here));
        if arguments.json {
            object = Some(json(&fit, disk.as_ref(), &suggestions, arguments.explain));
        } else {
            let printed = print(&fit, disk.as_ref(), audits.as_ref(), &suggestions, arguments.explain);
            printed.map_err(|error| Failure::output(&error))?;
        }
        disk.iter().for_each(tell_disk);
        (fit.refusal(suggestions.first()), audits)
    };
    if let (Some(object), Some(audits)) = (&mut object, &audits) {
        object["audit_bytes"] = audits.bytes.into();
        object["audit_fits"] = audits.fits().into();
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

/// Checks what a plan reads: starting adapter, data files, weights. Warns about tensors that the
/// run would not use.
fn check_inputs(run: &Run) -> Result<(), Failure> {
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
