//! What `isobit plan` prints: for people, and as one JSON object.

use crate::advice::Suggestions;
use crate::audit_fit::AuditFit;
use crate::disk::DiskFit;
use crate::fits::{Available, HostFit, MemoryFit};
use crate::split::{SplitFit, layers};
use crate::units::size;
use isobit_models::Part;
use isobit_training::plan::{Item, MemoryPlan};
use std::io::Write;

pub(crate) fn print(
    fit: &MemoryFit,
    disk: Option<&DiskFit>,
    audits: Option<&AuditFit>,
    suggestions: &Suggestions,
    explained: bool,
) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if let Some(plan) = &fit.plan {
        for (item, bytes) in &plan.items {
            writeln!(out, "{:<12} {:>12}", item.name(), size(*bytes as u64))?;
        }
        for Moment { name, bytes, when, .. } in moments(plan, fit.on_host) {
            writeln!(out, "{name:<12} {:>12}  {when}", size(bytes as u64))?;
        }
        let (name, what) = overhead_label(fit.on_host);
        let limits_buffers = fit.available.as_ref().is_some_and(|available| available.of_buffers);
        let counts = if limits_buffers { "; not counted in --memory" } else { "" };
        writeln!(out, "{name:<12} {:>12}  {what}{counts}", size(fit.overhead))?;
        print_host(&mut out, plan, "")?;
    }
    if let Some(disk) = disk {
        writeln!(out, "{:<12} {:>12}  {}", "disk", size(disk.needed()), disk.described())?;
    }
    print_answer(&mut out, fit)?;
    print_audits(&mut out, audits)?;
    if fit.is_estimate {
        writeln!(out, "{ESTIMATE}")?;
    }
    suggestions.print(&mut out, fit.fits())?;
    if let (true, Some(plan)) = (explained, &fit.plan) {
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

fn print_audits(out: &mut impl Write, audits: Option<&AuditFit>) -> std::io::Result<()> {
    audits.map_or(Ok(()), |audits| writeln!(out, "{}", audits.line()))
}

const ESTIMATE: &str = "an estimate: no plan was compared with the driver's figure on a card of this kind";

/// The name of what is needed beside the plan, and what it is.
pub(crate) fn overhead_label(on_host: bool) -> (&'static str, &'static str) {
    if on_host {
        ("process", "beside buffers: the program, its threads, the tokenised data")
    } else {
        ("driver", "beside buffers: the driver's context, and gaps between buffers")
    }
}

/// What is offloaded to host memory, by item.
fn print_host(out: &mut impl Write, plan: &MemoryPlan, margin: &str) -> std::io::Result<()> {
    let of_rank = plan.host_items.get(&Item::Rank).copied().unwrap_or(0);
    if of_rank > 0 {
        let bytes = size(of_rank as u64);
        writeln!(out, "{margin}{:<12} {bytes:>12}  on the host, for shards and messages of a rank", "rank")?;
    }
    if plan.bytes_offloaded() == 0 {
        return Ok(());
    }
    let items = plan.host_items.iter().filter(|(item, bytes)| **bytes > 0 && **item != Item::Rank);
    let items: Vec<String> = items.map(|(item, bytes)| format!("{} {}", item.name(), size(*bytes as u64))).collect();
    let total = size(plan.bytes_offloaded() as u64);
    writeln!(out, "{margin}{:<12} {total:>12}  offloaded to host memory: {}", "host", items.join(", "))
}

/// Device after device, then what they need together.
pub(crate) fn print_split(
    fit: &SplitFit,
    disk: &DiskFit,
    audits: Option<&AuditFit>,
    suggestions: &Suggestions,
    explained: bool,
) -> std::io::Result<()> {
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
        if explained {
            explain(&mut out, &stage.plan)?;
        }
    }
    let transfer = size(fit.bytes_transfer);
    writeln!(out, "{:<14} {transfer:>12}  on the host, for what travels between devices", "transfer")?;
    writeln!(out, "{:<14} {:>12}  {}", "disk", size(disk.needed()), disk.described())?;
    for pool in &fit.pools {
        let (name, mut needed) = (&pool.name, format!("{} needed", size(pool.needed)));
        if pool.overhead > 0 {
            needed = format!("{needed}, {} of it beside buffers", size(pool.overhead));
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
    print_audits(&mut out, audits)?;
    if fit.is_estimate {
        writeln!(out, "{ESTIMATE}")?;
    }
    suggestions.print(&mut out, fit.fits())?;
    out.flush()
}

/// The most micro-batches whose activations a device holds: one, and one for each device behind it.
fn in_flight(fit: &SplitFit, part: &Part) -> usize {
    fit.split.parts.iter().filter(|other| other.layers.start >= part.layers.start).count()
}

pub(crate) fn split_json(
    fit: &SplitFit,
    disk: &DiskFit,
    suggestions: &Suggestions,
    explained: bool,
) -> serde_json::Value {
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
            "overhead_bytes": pool.overhead,
        })
    });
    let mut value = serde_json::json!({
        "device": fit.names.join(","), "devices": stages.collect::<Vec<_>>(),
        "memories": pools.collect::<Vec<_>>(), "transfer_host_bytes": fit.bytes_transfer, "fits": fit.fits(),
        "estimate": fit.is_estimate, "suggestions": suggestions.json(),
    });
    put_disk(&mut value, disk);
    value
}

fn put_disk(value: &mut serde_json::Value, disk: &DiskFit) {
    value["disk_bytes"] = disk.needed().into();
    value["disk_available_bytes"] = disk.available().into();
}

/// When a run needs the most.
pub(crate) struct Moment {
    pub(crate) name: &'static str,
    pub(crate) bytes: usize,
    when: &'static str,
    /// Whether the device must have memory for it, and what the answer then says.
    pub(crate) on_device: Option<&'static str>,
}

/// The host has to hold a save together with the run only if the run is on it.
pub(crate) fn moments(plan: &MemoryPlan, on_host: bool) -> Vec<Moment> {
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

pub(crate) fn json(
    fit: &MemoryFit,
    disk: Option<&DiskFit>,
    suggestions: &Suggestions,
    explained: bool,
) -> serde_json::Value {
    let mut value = serde_json::json!({ "device": fit.device });
    if let Some(plan) = &fit.plan {
        put_plan(&mut value, plan);
    }
    if fit.plan.is_some() {
        value[format!("{}_bytes", overhead_label(fit.on_host).0)] = fit.overhead.into();
    }
    let moments = fit.plan.iter().flat_map(|plan| moments(plan, fit.on_host)).map(|moment| {
        serde_json::json!({"name": moment.name, "bytes": moment.bytes, "on_device": moment.on_device.is_some()})
    });
    value["moments"] = moments.collect();
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
    value["suggestions"] = suggestions.json();
    if let (true, Some(plan)) = (explained, &fit.plan) {
        explain_json(&mut value, plan);
    }
    value
}

fn put_plan(value: &mut serde_json::Value, plan: &MemoryPlan) {
    for item in Item::ALL {
        value[format!("{}_bytes", item.name())] = plan.items[&item].into();
    }
    if plan.bytes_of_rank() > 0 {
        value["rank_host_bytes"] = plan.bytes_of_rank().into();
    }
    if plan.bytes_offloaded() > 0 {
        value["host_bytes"] = plan.bytes_offloaded().into();
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
