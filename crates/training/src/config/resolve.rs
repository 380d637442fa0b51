//! Resolves typed values: defaults, ranges and the checks across several sections.

use super::error::Error;
use super::key::Section;
use super::low::{Entries, Low};
use super::resolve_adapter::adapter;
use super::resolve_training::training;
use super::run::{Adapter, Device, Eval, EvalRows, Every, Run};
use super::table::{CountOrShare, Table, count_or_share, every};
use super::value::{Origin, Value};
use crate::data::DATE_DEFAULT;
use isobit_autograd::Offload;
use isobit_kernels::cpu::pool::THREADS_MAX;
use isobit_numerics::slices::Profile;
use std::path::PathBuf;

/// BOUND: a week, in seconds.
const RANK_TIMEOUT_MAX: u64 = 7 * 24 * 3600;
/// BOUND: ranks with devices of their own.
const RANKS_MAX: usize = 65_536;

/// BOUND: devices that layers are split over.
const DEVICES_MAX: usize = 64;

pub(super) fn resolve(low: &Low) -> Result<Run, Error> {
    let empty = Entries::new();
    let section = |section| Table { section, entries: low.sections.get(&section).unwrap_or(&empty) };
    let top = section(Section::Top);
    let missing = |key, hint| Error::Missing { place: Origin::whole(&low.source), key, hint };
    let path = |table: &Table<'_>, key, hint| Ok(PathBuf::from(table.text(key)?.ok_or_else(|| missing(key, hint))?));

    if low.datasets.is_empty() {
        return Err(missing("datasets", "add [[datasets]] and below it path = \"data/train.jsonl\""));
    }
    let datasets = low.datasets.iter().map(|entries| {
        let table = Table { section: Section::Datasets, entries };
        path(&table, "path", "every [[datasets]] names a file: path = \"data/train.jsonl\"")
    });
    let datasets = datasets.collect::<Result<Vec<_>, Error>>()?;
    let adapter = adapter(&section(Section::Adapter))?;
    let training = training(&section(Section::Training), &adapter)?;
    let reports = reports(&top)?;
    let run = Run {
        base_model: path(&top, "base_model", "name the folder of a model: base_model = \"models/…\"")?,
        output_dir: path(&top, "output_dir", "name the folder of the run: output_dir = \"out/run-a\"")?,
        seed: top.whole("seed", 0..=i64::MAX as u64)?,
        device_layers: device_layers(&top, &devices(&top)?)?,
        devices: devices(&top)?,
        profile: profile(&top)?,
        load_in_4bit: load_in_4bit(&top, &adapter)?,
        threads: top.whole("threads", 0..=THREADS_MAX as u64)? as u32,
        data_workers: top.whole("data_workers", 1..=1024)? as u32,
        rank_timeout: top.whole("rank_timeout", 1..=RANK_TIMEOUT_MAX)? as u32,
        devices_by_rank: devices_by_rank(&top)?,
        offload: offload(&top)?,
        date: date(&top)?,
        report_to_tensorboard: top.switch("report_to_tensorboard") || reports.iter().any(|to| to == "tensorboard"),
        report_to_html: reports.iter().any(|to| to == "html"),
        generate_prompts: generate_prompts(&top)?,
        generate_tokens: top.whole("generate_tokens", 1..=GENERATE_TOKENS_MAX)? as u32,
        eval: eval(&section(Section::Eval), training.micro_batch_size)?,
        datasets,
        training,
        adapter,
    };
    needs_eval(low, &run)?;
    Ok(run)
}

/// BOUND: prompts, and tokens that each is continued by.
const GENERATE_PROMPTS_MAX: usize = 64;
const GENERATE_TOKENS_MAX: u64 = 4096;

fn generate_prompts(top: &Table<'_>) -> Result<Vec<String>, Error> {
    let Some(entry) = top.get("generate_prompts") else { return Ok(Vec::new()) };
    let prompts = entry.texts();
    if prompts.len() > GENERATE_PROMPTS_MAX || prompts.iter().any(String::is_empty) {
        let hint = format!("1 to {GENERATE_PROMPTS_MAX} texts: generate_prompts = [\"The capital of France is\"]");
        return Err(entry.invalid("too many prompts, or an empty one", &hint));
    }
    Ok(prompts)
}

/// What `report_to` names.
fn reports(top: &Table<'_>) -> Result<Vec<String>, Error> {
    let Some(entry) = top.get("report_to") else { return Ok(Vec::new()) };
    let names = entry.texts();
    if names.iter().any(|name| !["none", "html", "tensorboard"].contains(&name.as_str())) {
        let hint = "none, html, tensorboard or a list of them; metrics are always in metrics.jsonl";
        return Err(entry.invalid("not something that is written here", hint));
    }
    if names.len() > 1 && names.iter().any(|name| name == "none") {
        return Err(entry.invalid("none is listed with others", "leave out `none`, or everything else"));
    }
    Ok(names)
}

fn devices(top: &Table<'_>) -> Result<Vec<Device>, Error> {
    let Some(entry) = top.get("device") else { return Ok(vec![Device::Cpu]) };
    let names = entry.texts();
    let devices: Option<Vec<Device>> = names.iter().map(|name| device(name)).collect();
    let devices = devices.ok_or_else(|| {
        entry.invalid("not a device", "cpu, opencl:0, cuda:0, hip:0 or auto; `isobit devices` lists what is here, and `isobit plan` takes cards by name")
    })?;
    if devices.is_empty() || devices.len() > DEVICES_MAX {
        return Err(entry.invalid("the list has no device or too many", "name 1 to 64 devices"));
    }
    if devices.len() > 1 && devices.contains(&Device::Auto) {
        return Err(entry.invalid("auto cannot be listed with other devices", "name each device of the list"));
    }
    Ok(devices)
}

/// `device_map`: a table by the names of the list, or a list in its order. A table has no order of
/// its own, so the list must be there, and it cannot tell a device that is listed twice.
fn device_layers(top: &Table<'_>, devices: &[Device]) -> Result<Vec<u32>, Error> {
    let Some(entry) = top.get("device_map") else { return Ok(Vec::new()) };
    if devices_by_rank(top)?.iter().any(|of_rank| of_rank.len() > 1) {
        let why = "it divides the layers of `device`, but `devices_by_rank` names other devices";
        return Err(entry.invalid(why, "leave `device_map` out: each rank's layers are divided by the plan"));
    }
    let list = "name the devices in order: device = [\"cuda:0\", \"cpu\"]";
    if devices.len() < 2 {
        return Err(entry.invalid("`device` is not a list of devices", list));
    }
    let counts: Option<Vec<&Value>> = match &entry.value {
        Value::Table(map) => {
            let twice = devices.iter().enumerate().any(|(at, device)| devices[..at].contains(device));
            if twice {
                let hint = "write a list in the order of `device`: device_map = [14, 14]";
                return Err(entry.invalid("a device is listed twice", hint));
            }
            let of = |device: &Device| map.iter().find(|(name, _)| self::device(name) == Some(*device));
            let counts = devices.iter().map(|device| of(device).map(|(_, count)| count)).collect();
            if map.len() == devices.len() { counts } else { None }
        }
        Value::List(counts) if counts.len() == devices.len() => Some(counts.iter().collect()),
        _ => None,
    };
    let counts = counts.ok_or_else(|| entry.invalid("it does not give every device of `device` one number", list))?;
    let layers = |count: &&Value| match count {
        Value::Whole(..=0) => {
            Err(entry.invalid("every device has at least one layer", "leave out a device without layers"))
        }
        Value::Whole(count) => u32::try_from(*count).map_err(|_| entry.invalid("no model has as many layers", list)),
        _ => Err(entry.invalid("a number of layers is a whole number", list)),
    };
    counts.iter().map(layers).collect()
}

/// The devices of each rank: a device, or several with commas between them.
fn devices_by_rank(top: &Table<'_>) -> Result<Vec<Vec<Device>>, Error> {
    let Some(entry) = top.get("devices_by_rank") else { return Ok(Vec::new()) };
    let names = entry.texts();
    let of_rank = |names: &String| names.split(',').map(|name| device(name.trim())).collect::<Option<Vec<Device>>>();
    let all: Option<Vec<Vec<Device>>> = names.iter().map(of_rank).collect();
    let all = all.filter(|all| all.len() <= RANKS_MAX && all.iter().all(|devices| devices.len() <= DEVICES_MAX));
    all.ok_or_else(|| {
        entry.invalid("not a list of devices", "one entry per rank: devices_by_rank = [\"cuda:0\", \"cpu\"]")
    })
}

/// `offload`: any of its names. The memory of the CPU is the host's: nothing can be offloaded.
fn offload(top: &Table<'_>) -> Result<Offload, Error> {
    let Some(entry) = top.get("offload") else { return Ok(Offload::NONE) };
    let mut offload = Offload::NONE;
    if entry.texts() == ["none"] {
        return Ok(Offload::NONE);
    }
    for name in entry.texts().iter().flat_map(|names| names.split(',')).map(str::trim) {
        let known = "any of \"optimizer\", \"activations\" and \"weights\", or \"none\"";
        offload = offload.with(name).ok_or_else(|| entry.invalid(&format!("`{name}` cannot be offloaded"), known))?;
    }
    let on_cpu = |devices: &[Device]| devices.iter().all(|device| *device == Device::Cpu);
    let by_rank = devices_by_rank(top)?;
    let all_on_cpu = if by_rank.is_empty() { on_cpu(&devices(top)?) } else { by_rank.iter().all(|of| on_cpu(of)) };
    if offload.is_none() || !all_on_cpu {
        return Ok(offload);
    }
    Err(entry.invalid("the CPU computes in host memory already", "leave it out, or name a card: device = \"cuda:0\""))
}

/// `opencl:1`, or `opencl` for the first device.
fn device(name: &str) -> Option<Device> {
    let (make, index) = name.split_once(':').unwrap_or((name, "0"));
    let plain = !index.is_empty() && index.len() <= 4 && index.bytes().all(|byte| byte.is_ascii_digit());
    let index = if plain { index.parse().ok()? } else { return None };
    match make {
        "auto" if name == "auto" => Some(Device::Auto),
        "cpu" if name == "cpu" => Some(Device::Cpu),
        "opencl" => Some(Device::OpenCl(index)),
        "cuda" => Some(Device::Cuda(index)),
        "hip" => Some(Device::Hip(index)),
        _ => None,
    }
}

fn profile(top: &Table<'_>) -> Result<Profile, Error> {
    top.one_of("profile", &Profile::ALL.map(|profile| (profile.name(), profile)))
}

/// Only adapters are trained on weights of 4 bits.
fn load_in_4bit(top: &Table<'_>, adapter: &Adapter) -> Result<Option<bool>, Error> {
    let Some(entry) = top.get("load_in_4bit") else { return Ok(None) };
    let wanted = top.switch("load_in_4bit");
    let kind = match adapter {
        Adapter::Lora(_) => return Ok(Some(wanted)),
        Adapter::Full => "full",
        Adapter::LastBlocks(_) => "last_blocks",
    };
    if !wanted {
        return Ok(None);
    }
    let why = format!("weights of 4 bits cannot be trained, and type = \"{kind}\" trains them");
    Err(entry.invalid(&why, "set type = \"lora\" under [adapter], or remove this line"))
}

fn date(top: &Table<'_>) -> Result<String, Error> {
    let Some(entry) = top.get("date") else { return Ok(DATE_DEFAULT.to_string()) };
    match &entry.value {
        Value::Text(text) if is_date(text) => Ok(text.clone()),
        _ => Err(entry.invalid("not a valid date", "write it as YYYY-MM-DD, for example \"2025-01-01\"")),
    }
}

fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let digits = |part: &str, count| part.len() == count && part.bytes().all(|byte| byte.is_ascii_digit());
    let [year, month, day] = parts[..] else { return false };
    if !digits(year, 4) || !digits(month, 2) || !digits(day, 2) {
        return false;
    }
    let number = |part: &str| part.parse::<u32>().unwrap_or(0);
    let (year, month, day) = (number(year), number(month), number(day));
    let leap = (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    let last = match month {
        4 | 6 | 9 | 11 => 30,
        2 => 28 + u32::from(leap),
        _ => 31,
    };
    year > 0 && (1..=12).contains(&month) && (1..=last).contains(&day)
}

fn eval(table: &Table<'_>, micro_batch_size: u32) -> Result<Eval, Error> {
    let rows = eval_rows(table)?;
    let default = if rows == EvalRows::None { Every::Never } else { Every::Epoch };
    let every = every(table, "eval_strategy", "eval_steps", default, None)?;
    let micro_batch_size = table.whole_or("micro_batch_size", u64::from(micro_batch_size), 1..=65536)? as u32;
    if let (EvalRows::None, true, Some(entry)) =
        (&rows, every != Every::Never, table.get("eval_steps").or(table.get("eval_strategy")))
    {
        return Err(entry.invalid("there is nothing to evaluate on", "give [eval] a path, or val_set_size = 0.05"));
    }
    Ok(Eval { rows, every, micro_batch_size })
}

fn eval_rows(table: &Table<'_>) -> Result<EvalRows, Error> {
    let held_out = match table.get("val_set_size") {
        None => EvalRows::None,
        Some(entry) => match count_or_share(entry, "rows") {
            Ok(CountOrShare::Count(0)) => EvalRows::None,
            Ok(CountOrShare::Count(rows)) => EvalRows::Count(rows),
            Ok(CountOrShare::Share(share)) => EvalRows::Share(share),
            Err(error) => return Err(error),
        },
    };
    match (table.text("path")?, held_out) {
        (None, held_out) => Ok(held_out),
        (Some(path), EvalRows::None) => Ok(EvalRows::File(PathBuf::from(path))),
        (Some(_), _) => {
            let entry = table.get("val_set_size").expect("rows are held out because the key is there");
            Err(entry.invalid("[eval] also has a path", "keep one of them; val_set_size = 0 holds nothing out"))
        }
    }
}

/// Choosing a best checkpoint and stopping early both need evaluations.
fn needs_eval(low: &Low, run: &Run) -> Result<(), Error> {
    let asks = [
        ("load_best_model_at_end", run.training.load_best_model_at_end),
        ("early_stopping_patience", run.training.early_stopping_patience > 0),
    ];
    for (key, asked) in asks {
        let entry = low.sections.get(&Section::Training).and_then(|entries| entries.get(key));
        if let (true, true, Some(entry)) = (asked, run.eval.every == Every::Never, entry) {
            let why = if run.has_eval() { "eval_strategy is \"no\"" } else { "there is nothing to evaluate on" };
            return Err(entry.invalid(why, "give [eval] a path (or val_set_size = 0.05) and eval_steps = 50"));
        }
    }
    Ok(())
}
