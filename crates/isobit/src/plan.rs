//! `isobit plan`: the memory a config needs, by item, before anything is loaded. The real step runs on the backend that counts, with
//! rows as long as the config allows. Exit code 4 if it does not fit.

use crate::Failure;
use crate::backend::Chosen;
use crate::train::failed;
use isobit_kernels::gpu::{self, Api};
use isobit_kernels::plan::Layout;
use isobit_kernels::{Cpu, Gpu, Path};
use isobit_models::build::Settings;
use isobit_models::{Shapes, Weights};
use isobit_proof::safetensors::Checkpoint;
use isobit_training::batch::TokenRow;
use isobit_training::config::{self, Run};
use isobit_training::plan::{Item, MemoryPlan, longest_rows, memory};
use isobit_training::prepare::{RunError, model_config, profile, step_settings, trained};
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Config file
    config: PathBuf,
    /// Override a key of the config: `--set training.micro_batch_size=1`
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Memory of the device in GiB, to plan for another machine; default: what this one has
    #[arg(long, value_name = "GIB", value_parser = gibibytes)]
    memory: Option<u64>,
    /// List every line of code that holds memory, and what the ops of a step do
    #[arg(long)]
    explain: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Bytes of a number of GiB.
fn gibibytes(text: &str) -> Result<u64, String> {
    let number: f64 = text.parse().map_err(|_| "not a number".to_string())?;
    if (0.0..1e9).contains(&number) { Ok((number * f64::from(1 << 30)) as u64) } else { Err("not a size".to_string()) }
}

/// A plan and the memory it meets.
struct Meeting {
    plan: MemoryPlan,
    device: String,
    /// What the device must hold.
    needed: usize,
    /// None where the system does not say.
    available: Option<u64>,
}

impl Meeting {
    fn fits(&self) -> Option<bool> {
        self.available.map(|available| self.needed as u64 <= available)
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let settled = config::read(&arguments.config, &arguments.overrides);
    let run = settled.map_err(|error| failed(&RunError::Config(error)))?.run;
    let mut meeting = meet(&run)?;
    meeting.available = arguments.memory.or(meeting.available);
    print(&meeting, arguments).map_err(|error| Failure::output(&error))?;
    match (meeting.fits(), meeting.available) {
        (Some(false), Some(available)) => Err(Failure {
            code: 4,
            message: format!(
                "this run needs {} on {}, {} is there",
                gib(meeting.needed as u64),
                meeting.device,
                gib(available)
            ),
            hint: Some(hint(&run)),
        }),
        _ => Ok(()),
    }
}

/// One thing to try.
fn hint(run: &Run) -> String {
    let training = &run.training;
    if training.micro_batch_size > 1 {
        "`--set training.micro_batch_size=1` needs less and gives the same weights".to_string()
    } else if training.checkpointing != config::Checkpointing::Full {
        "`--set training.gradient_checkpointing=full` needs less and gives the same weights".to_string()
    } else {
        "lower `max_seq_length`, or train an adapter".to_string()
    }
}

fn meet(run: &Run) -> Result<Meeting, Failure> {
    match Chosen::of(run)? {
        Chosen::Cpu { threads } => {
            let cpu = Cpu::new(threads, Path::best()).map_err(|error| unusable(&error))?;
            let plan = plan(run, cpu).map_err(|error| failed(&error))?;
            Ok(Meeting { needed: plan.bytes_on_host(), device: "the CPU".to_string(), available: free_bytes(), plan })
        }
        Chosen::Gpu(selector) => {
            let plan =
                plan(run, Gpu::open(selector).map_err(|error| unusable(&error))?).map_err(|error| failed(&error))?;
            let available = memory_of(selector.api, selector.index);
            Ok(Meeting { needed: plan.bytes_peak, device: selector.to_string(), available, plan })
        }
    }
}

fn unusable(error: &impl std::fmt::Display) -> Failure {
    Failure::device(error.to_string(), "`isobit devices` lists what this machine has")
}

/// The worst case of a config: every row as long as it may be.
fn plan<L: Layout>(run: &Run, like: L) -> Result<MemoryPlan, RunError> {
    let model = model_config(&run.base_model)?;
    let weights = Weights::new(Checkpoint::open(&run.base_model)?, &model)?;
    let positions = run.training.max_seq_length as usize;
    let settings = Settings { trained: trained(run), profile: profile(run), positions, seed: run.seed };
    let step = step_settings(run);
    // Two micro-batches: further ones find the buffers of these.
    let count = (run.rows_per_update() as usize).min(2 * step.micro_batch_size);
    let rows = longest_rows(count, positions);
    let rows: Vec<&TokenRow> = rows.iter().collect();
    memory(like, &model, &Shapes::Of(&weights), &settings, &step, &rows)
}

/// What the system could give a new process without swapping.
fn free_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// All memory of a device.
fn memory_of(api: Api, index: usize) -> Option<u64> {
    gpu::list(api).ok()?.get(index).map(|listing| listing.memory).filter(|bytes| *bytes > 0)
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

fn print(meeting: &Meeting, arguments: &Arguments) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", json(meeting, arguments.explain))?;
        return out.flush();
    }
    let plan = &meeting.plan;
    for (item, bytes) in &plan.items {
        writeln!(out, "{:<12} {:>12}", item.name(), gib(*bytes as u64))?;
    }
    writeln!(out, "{:<12} {:>12}  at most at once in a step", "total", gib(plan.bytes_peak as u64))?;
    writeln!(out, "{:<12} {:>12}  on the host while a checkpoint is written", "save", gib(plan.bytes_save as u64))?;
    match meeting.available {
        Some(available) => {
            let answer = if meeting.fits() == Some(true) { "fits" } else { "does not fit" };
            writeln!(
                out,
                "{answer}: {} needed, {} there on {}",
                gib(meeting.needed as u64),
                gib(available),
                meeting.device
            )?;
        }
        None => writeln!(out, "{} needed; how much {} has is unknown", gib(meeting.needed as u64), meeting.device)?,
    }
    if arguments.explain {
        explain(&mut out, plan)?;
    }
    out.flush()
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

fn json(meeting: &Meeting, explain: bool) -> serde_json::Value {
    let plan = &meeting.plan;
    let mut value = serde_json::json!({"schema": "isobit.plan/1", "device": meeting.device});
    for item in Item::ALL {
        value[format!("{}_bytes", item.name())] = plan.items[&item].into();
    }
    value["total_bytes"] = plan.bytes_peak.into();
    value["save_host_bytes"] = plan.bytes_save.into();
    value["needed_bytes"] = meeting.needed.into();
    value["available_bytes"] = meeting.available.into();
    value["fits"] = meeting.fits().into();
    value["trained_parameters"] = plan.trained_count.into();
    if explain {
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
    value
}
