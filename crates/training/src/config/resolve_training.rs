//! Resolves [training].

use super::error::Error;
use super::low::Entry;
use super::run::{Adapter, Every, Fields, Length, Metric, SaveDtype, Scheduler, Training, Warmup};
use super::table::{COUNT_MAX, CountOrShare, Table, count_or_share, every};
use super::value::Value;
use crate::data::check_name;
use isobit_autograd::Policy;
use std::collections::BTreeMap;

/// BOUND: rows of one update. Enough for a run of any size, and far from overflow.
const ROWS_PER_UPDATE_MAX: u64 = 1 << 24;
const EPOCHS_MAX: f64 = 1e6;

pub(super) fn training(table: &Table<'_>, adapter: &Adapter) -> Result<Training, Error> {
    let below_one = |number: f64| (0.0..1.0).contains(&number);
    let not_negative = |number: f64| number >= 0.0;
    let positive = |number: f64| number > 0.0;
    let usual_rate = if matches!(adapter, Adapter::Lora(_)) { 2e-4 } else { 2e-5 };
    let training = Training {
        max_seq_length: table.whole("max_seq_length", 2..=1 << 20)? as u32,
        sample_packing: table.switch("sample_packing"),
        fields: fields(table)?,
        assistant_only_loss: table.switch("assistant_only_loss"),
        completion_only_loss: table.switch("completion_only_loss"),
        allow_untrainable_rows: table.switch("allow_untrainable_rows"),
        drop_special_token_rows: table.switch("drop_special_token_rows"),
        chat_template_kwargs: chat_template_kwargs(table)?,
        micro_batch_size: table.whole("micro_batch_size", 1..=65536)? as u32,
        gradient_accumulation_steps: table.whole("gradient_accumulation_steps", 1..=1 << 20)? as u32,
        gradient_groups: table.whole("gradient_groups", 1..=65536)? as u32,
        length: length(table)?,
        learning_rate: table.number_or(
            "learning_rate",
            usual_rate,
            |rate| rate > 0.0 && rate <= 100.0,
            "above 0, at most 100",
        )?,
        scheduler: scheduler(table, usual_rate)?,
        warmup: warmup(table)?,
        weight_decay: table.number("weight_decay", not_negative, "0 or more")?,
        adam_beta1: table.number("adam_beta1", below_one, "from 0, below 1")?,
        adam_beta2: table.number("adam_beta2", below_one, "from 0, below 1")?,
        adam_epsilon: table.number("adam_epsilon", positive, "above 0")?,
        max_grad_norm: table.number("max_grad_norm", not_negative, "above 0, or 0 for no clipping")?,
        recomputation: recomputation(table)?,
        save: save(table)?,
        save_dtype: table.one_of("save_dtype", &SaveDtype::ALL.map(|dtype| (dtype.name(), dtype)))?,
        save_total_limit: table.whole("save_total_limit", 0..=1 << 20)? as u32,
        logging_steps: table.whole("logging_steps", 1..=COUNT_MAX)?,
        load_best_model_at_end: table.switch("load_best_model_at_end"),
        metric_for_best: table.one_of("metric_for_best", &[("loss", Metric::Loss), ("eval_loss", Metric::Loss)])?,
        early_stopping_patience: table.whole("early_stopping_patience", 0..=1 << 20)? as u32,
    };
    agree(table, &training)?;
    Ok(training)
}

/// Keys of [training] that only make sense together.
fn agree(table: &Table<'_>, training: &Training) -> Result<(), Error> {
    let rows = u64::from(training.micro_batch_size) * u64::from(training.gradient_accumulation_steps);
    if let Some(entry) = table.get("gradient_accumulation_steps").or(table.get("micro_batch_size"))
        && rows > ROWS_PER_UPDATE_MAX
    {
        let why = format!("micro_batch_size × gradient_accumulation_steps is {rows} rows per update");
        return Err(entry.invalid(&why, &format!("{ROWS_PER_UPDATE_MAX} at most")));
    }
    if let Some(entry) = table.get("warmup_steps").or(table.get("warmup_ratio"))
        && training.scheduler == Scheduler::Constant
        && training.warmup != Warmup::Steps(0)
    {
        let hint = "lr_scheduler_type = \"constant_with_warmup\", or remove this line";
        return Err(entry.invalid("the constant schedule has no warm-up", hint));
    }
    Ok(())
}

/// Given together or not at all.
fn fields(table: &Table<'_>) -> Result<Fields, Error> {
    match (table.text("prompt_field")?, table.text("completion_field")?) {
        (None, None) => Ok(Fields::Detected),
        (Some(prompt), Some(completion)) => Ok(Fields::Named { prompt, completion }),
        _ => {
            let entry = table.get("prompt_field").or(table.get("completion_field")).expect("one of them is there");
            Err(entry.invalid("the other field is missing", "name both: prompt_field and completion_field"))
        }
    }
}

fn chat_template_kwargs(table: &Table<'_>) -> Result<BTreeMap<String, Value>, Error> {
    let Some(entry) = table.get("chat_template_kwargs") else { return Ok(BTreeMap::new()) };
    let Value::Table(variables) = &entry.value else { return Ok(BTreeMap::new()) };
    for name in variables.keys() {
        check_name(name).map_err(|why| entry.invalid(&why, "write { enable_thinking = false }"))?;
    }
    Ok(variables.clone())
}

fn length(table: &Table<'_>) -> Result<Length, Error> {
    let fits = |epochs: f64| epochs > 0.0 && epochs <= EPOCHS_MAX;
    let epochs = table.number("num_epochs", fits, "above 0, at most a million")?;
    // -1 means "by epochs" in other tools.
    let by_epochs = table.get("max_steps").is_none_or(|entry| matches!(entry.value, Value::Whole(-1 | 0)));
    if by_epochs { Ok(Length::Epochs(epochs)) } else { Ok(Length::Steps(table.whole("max_steps", 1..=COUNT_MAX)?)) }
}

fn scheduler(table: &Table<'_>, usual_rate: f64) -> Result<Scheduler, Error> {
    let rate = 0.0;
    let all = [
        Scheduler::Constant,
        Scheduler::ConstantWithWarmup,
        Scheduler::Linear,
        Scheduler::Cosine,
        Scheduler::CosineWithMinLr { rate },
    ];
    let named = table.one_of("lr_scheduler_type", &all.map(|scheduler| (scheduler.name(), scheduler)))?;
    let floor = table.get("min_lr").or(table.get("min_lr_rate"));
    match (named, floor) {
        (Scheduler::CosineWithMinLr { .. }, Some(entry)) => {
            Ok(Scheduler::CosineWithMinLr { rate: min_lr_rate(table, entry, usual_rate)? })
        }
        (Scheduler::CosineWithMinLr { .. }, None) => {
            let entry = table.get("lr_scheduler_type").expect("this schedule is never the default");
            Err(entry.invalid("the final learning rate is missing", "add min_lr_rate = 0.1"))
        }
        (named, None) => Ok(named),
        (_, Some(entry)) => {
            Err(entry
                .invalid("this schedule ends at 0", "lr_scheduler_type = \"cosine_with_min_lr\", or remove this line"))
        }
    }
}

#[expect(clippy::float_arithmetic, reason = "a share of the learning rate, once, on the host")]
fn min_lr_rate(table: &Table<'_>, entry: &Entry, usual_rate: f64) -> Result<f64, Error> {
    if table.get("min_lr").is_some() && table.get("min_lr_rate").is_some() {
        return Err(entry.invalid("min_lr_rate is also set", "keep one of them"));
    }
    let at_most_one = |share: f64| (0.0..=1.0).contains(&share);
    if table.get("min_lr_rate").is_some() {
        return table.number_or("min_lr_rate", 0.0, at_most_one, "from 0 to 1");
    }
    let peak =
        table.number_or("learning_rate", usual_rate, |rate| rate > 0.0 && rate <= 100.0, "above 0, at most 100")?;
    let least = table.number_or("min_lr", 0.0, |rate| (0.0..=peak).contains(&rate), "from 0 to learning_rate")?;
    Ok(least / peak)
}

fn warmup(table: &Table<'_>) -> Result<Warmup, Error> {
    let ratio = table.number("warmup_ratio", |share| (0.0..1.0).contains(&share), "from 0, below 1")?;
    let steps = match table.get("warmup_steps") {
        None => Warmup::Steps(0),
        Some(entry) => match count_or_share(entry, "updates")? {
            CountOrShare::Count(steps) => Warmup::Steps(steps),
            CountOrShare::Share(share) => Warmup::Share(share),
        },
    };
    match (steps, table.get("warmup_steps")) {
        (Warmup::Steps(0), _) if ratio > 0.0 => Ok(Warmup::Share(ratio)),
        (_, Some(entry)) if ratio > 0.0 => Err(entry.invalid("warmup_ratio is also set", "keep one of them")),
        (steps, _) => Ok(steps),
    }
}

fn save(table: &Table<'_>) -> Result<Every, Error> {
    let steps = table.whole("save_steps", 1..=COUNT_MAX)?;
    every(table, "save_strategy", "save_steps", Every::Steps(steps), Some(steps))
}

fn recomputation(table: &Table<'_>) -> Result<Policy, Error> {
    match table.get("gradient_checkpointing").map(|entry| &entry.value) {
        Some(Value::Switch(true)) => Ok(Policy::Full),
        Some(Value::Switch(false)) => Ok(Policy::None),
        None | Some(_) => {
            let names = Policy::ALL.map(|policy| (policy.name(), policy));
            table.one_of("gradient_checkpointing", &names)
        }
    }
}
