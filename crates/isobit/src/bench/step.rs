//! `isobit bench step`: a training step of a published shape with random weights, LoRA or full,
//! with the names and JSON fields of the peer benchmark; or the first update of a config, with its
//! model, data and settings.

use super::UnitsArguments;
use super::breakdown::{Share, Stopwatch, Times};
use crate::Failure;
use crate::auto;
use crate::backend::{Chosen, Job, Opening, on_limited_device};
use crate::fits::{Given, Ranks};
use crate::input;
use crate::memory_limits;
use crate::model;
use crate::split::Split;
use crate::stderr::tell_notes;
use crate::units::{self, size};
use crate::watcher::Watcher;
use isobit_autograd::{Offload, Policy};
use isobit_kernels::Backend;
use isobit_kernels::observe::Observed;
use isobit_models::build::Settings;
use isobit_models::{Config, LoraConfig, RandomSource, Trained, WeightSource};
use isobit_numerics::philox::{Key, Purpose, word};
use isobit_numerics::slices::Profile;
use isobit_training::engine::Engine;
use isobit_training::prepare::{RunError, prepare, step_settings, trained};
use isobit_training::row::Row;
use isobit_training::stages::{Divided, Stages};
use isobit_training::step::{StepError, StepSettings};
use isobit_training::trainer::{Placement, Trainer};
use isobit_training::{config, data};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};

#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the command line")]
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Model shape: tiny, 0.5B, 1.5B or 3B of Qwen2, moe-small of Qwen3-MoE, hybrid-small of
    /// Qwen3.5
    #[arg(long, default_value = "0.5B")]
    model: String,
    /// Rows per step
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Tokens per row
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..=131_072))]
    seq: u32,
    /// Training method: lora, or full to train every weight
    #[arg(long, default_value = "lora")]
    method: String,
    /// Rank of the adapters on all seven projections, or on the four of attention if the model has
    /// experts
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    rank: u32,
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Timed steps, after one warm-up step
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    steps: u32,
    /// Device: cpu, opencl:N, cuda:N, or auto for the first card that works, else the CPU; a list
    /// divides the layers: cuda:0,cpu
    #[arg(long, default_value = "cpu")]
    device: String,
    #[command(flatten)]
    units: UnitsArguments,
    /// Slice product profile: x2 or x3
    #[arg(long, default_value = "x2")]
    profile: String,
    /// Recomputation of activations: none, selective or full
    #[arg(long, default_value = "full")]
    checkpointing: String,
    /// Measure the first update of this config instead, with its model, rows and settings
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "batch", "seq", "method", "rank", "threads", "device", "profile", "checkpointing", "micro_batch", "mma_sync", "portable"])]
    config: Option<PathBuf>,
    /// Override a key of the config: `--set training.micro_batch_size=1`
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "config")]
    overrides: Vec<String>,
    /// Rows computed together (default: all rows of the step)
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    micro_batch: Option<u32>,
    /// What a card keeps in host memory: any of optimizer, activations and weights, with commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',', conflicts_with = "config")]
    offload: Vec<String>,
    /// The most memory that the buffers of a card may take: 32 (in GiB), 512MiB, 24GB; one number
    /// for every card of a list, or one for each entry: exit 4 beyond it
    #[arg(long, value_name = "SIZE", value_parser = units::bytes, value_delimiter = ',')]
    memory: Vec<u64>,
    /// Leave out the digests that the receipt of a run needs, to see what they cost
    #[arg(long)]
    no_receipt: bool,
    /// Also time every op; on a device this waits for each op and slows the step
    #[arg(long)]
    breakdown: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Run one step for every line of standard input, and print one JSON object for each
    #[arg(long, conflicts_with_all = ["steps", "breakdown"])]
    serve: bool,
}

/// The result, with the same fields as `tools/peer_lora_step.py`.
#[derive(Debug, Serialize)]
struct Line<'a> {
    schema: &'static str,
    model: &'a str,
    batch: usize,
    micro_batch: usize,
    seq: usize,
    device: &'a str,
    profile: &'a str,
    checkpointing: &'a str,
    threads: usize,
    step_s: f64,
    tokens_per_s: f64,
    peak_bytes: u64,
    /// Peak of the device's own memory, if it has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_peak_bytes: Option<u64>,
    /// The same of each device of a list.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    devices_peak_bytes: Vec<Option<u64>>,
    loss: f64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    breakdown: Vec<Share>,
}

const SHAPES: [(&str, [usize; 6]); 4] = [
    ("tiny", [256, 768, 8, 8, 4, 4096]),
    ("0.5B", [896, 4864, 24, 14, 2, 151936]),
    ("1.5B", [1536, 8960, 28, 12, 2, 151936]),
    ("3B", [2048, 11008, 36, 16, 2, 151936]),
];

/// What to measure.
struct Subject {
    name: String,
    /// More than one divide the layers among them.
    devices: Vec<Chosen>,
    device: String,
    model: Config,
    source: Box<dyn WeightSource + Sync>,
    settings: Settings,
    step: StepSettings,
    rows: Vec<Row>,
    /// Layers of each device; empty: divided by memory.
    layers: Vec<u32>,
    opening: Opening,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut subject = match &arguments.config {
        Some(path) => configured(path, &arguments.overrides, &arguments.memory)?,
        None => published(arguments)?,
    };
    subject.step.digests = !arguments.no_receipt;
    memory_limits::check_cards(&arguments.memory, &subject.devices)?;
    // The result says which device it is.
    match subject.devices[..] {
        [chosen] => {
            let limit = arguments.memory.first().copied();
            on_limited_device(&chosen, subject.opening.units, limit, true, Measuring { subject, arguments })?
        }
        _ => measure_stages(&subject, arguments),
    }
}

/// With the layers divided among devices.
fn measure_stages(subject: &Subject, arguments: &Arguments) -> Result<(), Failure> {
    if arguments.breakdown {
        return Err(Failure::usage("ops are timed on one device only", "leave out --breakdown, or name one device"));
    }
    let split = Split::new(subject.devices.clone(), &subject.layers, &subject.model)?;
    let limits = memory_limits::limits(&arguments.memory, &split.devices);
    let stages = split.stages(|at| Opening { limit: limits[at].clone(), ..subject.opening.clone() })?;
    std::thread::scope(|scope| {
        let model = Divided { config: &subject.model, source: &*subject.source };
        let engine = Stages::new(scope, model, &subject.settings, true, stages)?;
        measure(engine, subject, arguments, &Times::default())
    })
}

/// The first update of a config.
fn configured(path: &Path, overrides: &[String], memory: &[u64]) -> Result<Subject, Failure> {
    let settled = config::read(path, overrides).map_err(RunError::Config)?;
    tell_notes(&settled.notes, None);
    let mut run = settled.run;
    run.base_model = model::located(&run.base_model);
    run = auto::placed(run, &Given::of_run(memory), Ranks::ALONE, true);
    let devices = Chosen::all_of(&run)?;
    let prepared = prepare(run)?;
    let run = &prepared.run;
    let first = data::order(run.seed, 0, prepared.train.len()).into_iter().take(run.rows_per_update() as usize);
    let positions = run.training.max_seq_length as usize;
    Ok(Subject {
        name: run.base_model.display().to_string(),
        device: names(&devices),
        devices,
        settings: Settings { trained: trained(run), profile: run.profile, positions, seed: run.seed },
        step: step_settings(run),
        rows: first.map(|row| prepared.train[row].clone()).collect(),
        layers: run.device_layers.clone(),
        opening: Opening {
            offload: run.offload,
            threads: Chosen::host_threads(run.threads as usize)?,
            ..Opening::PLAIN
        },
        model: prepared.model,
        source: Box::new(prepared.weights),
    })
}

fn names(devices: &[Chosen]) -> String {
    devices.iter().map(Chosen::name).collect::<Vec<_>>().join(",")
}

/// A published shape with random weights.
fn published(arguments: &Arguments) -> Result<Subject, Failure> {
    let model = shape(&arguments.model)?;
    let profile = Profile::ALL.into_iter().find(|profile| profile.name() == arguments.profile);
    let profile = profile.ok_or_else(|| Failure::usage("unknown profile", "use x2 or x3"))?;
    let policy = Policy::ALL.into_iter().find(|policy| policy.name() == arguments.checkpointing);
    let policy = policy.ok_or_else(|| Failure::usage("unknown policy", "use none, selective or full"))?;
    let targets =
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj_qkv", "out_proj"];
    let targets = if arguments.model == SPARSE { &targets[..4] } else { &targets };
    let trained = match &arguments.method[..] {
        "lora" => Trained::Lora(LoraConfig::new(arguments.rank as usize, f64::from(2 * arguments.rank), targets)),
        "full" => Trained::Full,
        _ => return Err(Failure::usage("unknown method", "use lora or full")),
    };
    let listed: Vec<&str> = arguments.device.split(',').map(str::trim).collect();
    let devices = Chosen::parse_list(&listed, usize::from(arguments.threads))?;
    let threads = Chosen::host_threads(arguments.threads.into())?;
    let opening =
        Opening { offload: offload(arguments)?, threads, units: arguments.units.units(&devices)?, ..Opening::PLAIN };
    Ok(Subject {
        name: arguments.model.clone(),
        device: names(&devices),
        devices,
        source: Box::new(RandomSource { seed: 0 }),
        settings: Settings { trained, profile, positions: arguments.seq as usize, seed: 0 },
        step: StepSettings {
            profile,
            policy,
            micro_batch_size: arguments.micro_batch.unwrap_or(arguments.batch) as usize,
            gradient_groups: 1,
            seed: 0,
            max_grad_norm: Some(1.0),
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            digests: true,
        },
        rows: (0..arguments.batch).map(|row| random_row(row, arguments.seq, &model)).collect(),
        layers: Vec::new(),
        opening,
        model,
    })
}

fn offload(arguments: &Arguments) -> Result<Offload, Failure> {
    if arguments.device == "cpu" && !arguments.offload.is_empty() {
        let hint = "leave out --offload, or name a card: --device cuda:0";
        return Err(Failure::usage("the CPU computes in host memory already", hint));
    }
    let with = |offload: Offload, name: &String| {
        let hint = "any of optimizer, activations and weights";
        offload.with(name).ok_or_else(|| Failure::usage(format!("`{name}` cannot be offloaded"), hint))
    };
    arguments.offload.iter().try_fold(Offload::NONE, with)
}

struct Measuring<'a> {
    subject: Subject,
    arguments: &'a Arguments,
}

impl Job for Measuring<'_> {
    type Result = Result<(), Failure>;

    fn run<B: Backend>(self, backend: B) -> Self::Result {
        let times = Times::default();
        if !self.arguments.breakdown {
            return measure_one(backend, &self.subject, self.arguments, &times);
        }
        let observer = Watcher::Times(Stopwatch::new(times.clone()));
        measure_one(Observed { inner: backend, observer }, &self.subject, self.arguments, &times)
    }
}

fn measure_one<B: Backend>(backend: B, subject: &Subject, arguments: &Arguments, ops: &Times) -> Result<(), Failure> {
    let Subject { model, source, settings, opening, .. } = subject;
    let placement = Placement::new(opening.offload, true, opening.threads);
    let trainer = Trainer::whole(backend, model, &**source, settings, placement)?;
    measure(trainer, subject, arguments, ops)
}

fn measure<E: Engine>(mut engine: E, subject: &Subject, arguments: &Arguments, ops: &Times) -> Result<(), Failure> {
    let rows: Vec<&Row> = subject.rows.iter().collect();
    let tokens: usize = rows.iter().map(|row| row.tokens().len()).sum();
    let settings = &subject.step;
    let line = |(step_s, loss, peaks): (f64, f64, Vec<Option<u64>>), breakdown: Vec<Share>| Line {
        schema: "isobit.bench.step/1",
        model: &subject.name,
        batch: rows.len(),
        micro_batch: settings.micro_batch_size.min(rows.len()),
        seq: rows.iter().map(|row| row.tokens().len()).max().unwrap_or(0),
        device: &subject.device,
        profile: settings.profile.name(),
        checkpointing: settings.policy.name(),
        threads: subject.devices.iter().map(Chosen::threads).sum(),
        step_s,
        tokens_per_s: tokens as f64 / step_s,
        peak_bytes: peak_resident_bytes(),
        device_peak_bytes: if let [peak] = peaks[..] { peak } else { None },
        devices_peak_bytes: if peaks.len() > 1 { peaks } else { Vec::new() },
        loss,
        breakdown,
    };
    let mut step = |number: u64| {
        let (seconds, report) = timed(|| engine.step(&rows, number, 1e-4, settings));
        let report = report.map_err(|error| stopped(&error))?;
        let peaks = engine.device_peaks().map_err(|error| stopped(&error))?;
        Ok::<_, Failure>((seconds, report.loss, peaks))
    };
    if arguments.serve {
        let (mut requests, mut number) = (std::io::stdin().lock(), 0);
        while input::line(&mut requests)?.is_some() {
            number += 1;
            let measured = step(number)?;
            print(&line(measured, Vec::new()), true).map_err(|error| Failure::output(&error))?;
        }
        return Ok(());
    }
    let (mut times, mut last_loss, mut last_peaks) = (Vec::new(), 0.0, Vec::new());
    for number in 1..=u64::from(arguments.steps) + 1 {
        if number == 2 {
            ops.forget();
        }
        let (seconds, loss, peaks) = step(number)?;
        times.push(seconds);
        (last_loss, last_peaks) = (loss, peaks);
    }
    let mut timed = times.split_off(1);
    timed.sort_by(f64::total_cmp);
    let line = line((timed[timed.len() / 2], last_loss, last_peaks), ops.shares(arguments.steps));
    print(&line, arguments.json).map_err(|error| Failure::output(&error))
}

fn stopped(error: &StepError) -> Failure {
    match error {
        StepError::Device(failure) if failure.is_out_of_memory() => {
            Failure { code: 4, message: failure.to_string(), hint: Some("lower --batch or --micro-batch".to_string()) }
        }
        StepError::Device(failure) => {
            Failure::device(failure.to_string(), "`isobit devices` lists what this machine has")
        }
        other => Failure { code: 5, message: other.to_string(), hint: None },
    }
}

/// Shapes of other families: with experts, 8 layers, 4 of 32 experts; hybrid, 6 delta layers and 2
/// of attention. Untied heads.
const SPARSE: &str = "moe-small";
const OTHERS: [(&str, &str); 2] = [
    (
        SPARSE,
        r#"{"model_type":"qwen3_moe","hidden_size":512,"intermediate_size":1024,"moe_intermediate_size":256,
        "num_hidden_layers":8,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":64,"num_experts":32,"num_experts_per_tok":4,
        "vocab_size":32768,"norm_topk_prob":true,"tie_word_embeddings":false,"rope_theta":10000.0}"#,
    ),
    (
        "hybrid-small",
        r#"{"model_type":"qwen3_5_text","hidden_size":512,"intermediate_size":1536,"num_hidden_layers":8,"num_attention_heads":4,
        "num_key_value_heads":2,"head_dim":128,"linear_num_key_heads":4,"linear_num_value_heads":8,"linear_key_head_dim":128,
        "linear_value_head_dim":128,"vocab_size":32768,"tie_word_embeddings":false}"#,
    ),
];

fn shape(model: &str) -> Result<Config, Failure> {
    let bug = |error: isobit_models::ModelError| Failure::usage(error.to_string(), "this is a bug in the benchmark");
    if let Some((_, text)) = OTHERS.into_iter().find(|(name, _)| *name == model) {
        return Config::parse(text).map_err(bug);
    }
    let shape = SHAPES.into_iter().find(|(name, _)| *name == model);
    let (_, [hidden, intermediate, layers, heads, kv_heads, vocabulary]) = shape.ok_or_else(|| {
        Failure::usage(format!("unknown shape `{model}`"), "use tiny, 0.5B, 1.5B, moe-small or hybrid-small")
    })?;
    let text = format!(
        r#"{{"model_type":"qwen2","hidden_size":{hidden},"intermediate_size":{intermediate},"num_hidden_layers":{layers},
        "num_attention_heads":{heads},"num_key_value_heads":{kv_heads},"vocab_size":{vocabulary},"tie_word_embeddings":true,
        "rope_theta":1000000.0}}"#
    );
    Config::parse(&text).map_err(bug)
}

fn random_row(row: u32, length: u32, config: &Config) -> Row {
    let key = Key::new(0, Purpose::TestData);
    let token = |t: u32| word(key, 1, row, 0, u64::from(t)) % config.vocabulary as u32;
    Row::document((0..length).map(token).collect(), vec![true; length as usize])
}

#[expect(clippy::disallowed_types, reason = "a benchmark reads the clock")]
fn timed<T>(run: impl FnOnce() -> T) -> (f64, T) {
    let start = std::time::Instant::now();
    let result = run();
    (start.elapsed().as_secs_f64(), result)
}

/// The peak resident memory of this process, as reported by the system; zero if it is not reported.
pub(crate) fn peak_resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map_or(0, |kib| kib * 1024)
}

fn print(line: &Line, json: bool) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string(line)?)?;
    } else {
        let on_device = |bytes: u64| format!("{} on the device and ", size(bytes));
        let named = line.device.split(',').zip(&line.devices_peak_bytes);
        let named = named.filter_map(|(name, bytes)| bytes.map(|bytes| format!("{} on {name} and ", size(bytes))));
        let device = line.device_peak_bytes.map_or_else(|| named.collect::<String>(), on_device);
        writeln!(
            out,
            "{} {}x{} in micro-batches of {} on {}, {}, checkpointing {}: {:.1} tokens/s, {:.3} s a step, \
             {device}{} resident at most, loss {:.4}",
            line.model,
            line.batch,
            line.seq,
            line.micro_batch,
            line.device,
            line.profile,
            line.checkpointing,
            line.tokens_per_s,
            line.step_s,
            size(line.peak_bytes),
            line.loss
        )?;
        for share in &line.breakdown {
            writeln!(out, "{share}")?;
        }
    }
    out.flush()
}
