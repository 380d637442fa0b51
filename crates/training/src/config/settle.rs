//! Contradicting keys. Within a file they are an error (`resolve.rs`); a command-line argument
//! removes what contradicts it from the file, and a later argument what contradicts it from an
//! earlier one. This happens once, when all arguments are known, so that their order decides
//! nothing else.

use super::key::Section::{self, Adapter, Eval, Top, Training};
use super::low::{Entry, Low};
use super::value::Value;

/// A key with the condition under which it counts.
type Side = (Section, &'static str, fn(&Value) -> bool);

/// Of two keys that cannot both hold, the later one stays. With `OneWay` only the first can
/// displace the second: the other way round nothing sensible would be left (`min_lr` alone does not
/// determine a schedule). With `OverFile` the second goes only if it stands in the file: as an
/// argument it was typed for the first.
enum Rule {
    Both(Side, Side),
    OneWay(Side, Side),
    OverFile(Side, Side),
}
use Rule::{Both, OneWay, OverFile};

/// Causes come before their consequences.
const RULES: &[Rule] = &[
    OneWay((Top, "device", always), (Top, "devices_by_rank", always)),
    OverFile((Top, "device", always), (Top, "device_map", always)),
    OverFile((Top, "devices_by_rank", has_list), (Top, "device_map", always)),
    OverFile((Top, "device", is_cpu_alone), (Top, "offload", is_not_none)),
    Both((Eval, "path", always), (Eval, "val_set_size", not_zero)),
    Both((Eval, "eval_strategy", is_not_steps), (Eval, "eval_steps", always)),
    OneWay((Eval, "eval_strategy", is_no), (Training, "load_best_model_at_end", is_on)),
    OneWay((Eval, "eval_strategy", is_no), (Training, "early_stopping_patience", not_zero)),
    Both((Training, "save_strategy", is_not_steps), (Training, "save_steps", always)),
    Both((Training, "max_steps", positive), (Training, "num_epochs", always)),
    Both((Training, "warmup_steps", always), (Training, "warmup_ratio", always)),
    Both((Training, "min_lr", always), (Training, "min_lr_rate", always)),
    OneWay((Training, "lr_scheduler_type", ends_at_zero), (Training, "min_lr", always)),
    OneWay((Training, "lr_scheduler_type", ends_at_zero), (Training, "min_lr_rate", always)),
    OneWay((Training, "lr_scheduler_type", is_constant), (Training, "warmup_steps", not_zero)),
    OneWay((Training, "lr_scheduler_type", is_constant), (Training, "warmup_ratio", not_zero)),
];

/// Keys that need evaluations: without rows to evaluate on they have no meaning.
const OF_EVALUATION: [Side; 4] = [
    (Eval, "eval_steps", always),
    (Eval, "eval_strategy", is_not_no),
    (Training, "load_best_model_at_end", is_on),
    (Training, "early_stopping_patience", not_zero),
];

/// Removes what later arguments contradict; returns notes on what was removed and why.
pub(super) fn settle(low: &mut Low) -> Vec<String> {
    let mut notes = Vec::new();
    for rule in RULES {
        match *rule {
            Both(one, other) => displace(low, one, other, true, &mut notes),
            OneWay(one, other) => displace(low, one, other, false, &mut notes),
            OverFile(one, other) => {
                if counted(low, other).is_some_and(|entry| entry.rank == 0) {
                    displace(low, one, other, false, &mut notes);
                }
            }
        }
    }
    if counted(low, (Eval, "path", always)).is_none() {
        for side in OF_EVALUATION {
            displace(low, (Eval, "val_set_size", is_zero), side, false, &mut notes);
        }
    }
    settle_adapter(low, &mut notes);
    notes
}

/// An adapter type removes the keys of the others.
fn settle_adapter(low: &mut Low, notes: &mut Vec<String>) {
    let Some(chosen) = counted(low, (Adapter, "type", always)).cloned() else { return };
    let stays = |key: &str| match &chosen.value {
        Value::Text(text) if text == "full" => key == "type",
        Value::Text(text) if text == "last_blocks" => ["type", "last_blocks"].contains(&key),
        _ => key != "last_blocks",
    };
    let entries = low.sections.entry(Adapter).or_default();
    let stray = entries.iter().filter(|(key, entry)| !stays(key) && entry.rank < chosen.rank);
    let stray: Vec<&'static str> = stray.map(|(key, _)| *key).collect();
    for key in stray {
        notes.extend(entries.remove(key).map(|entry| note(&entry, &chosen)));
    }
}

fn displace(low: &mut Low, one: Side, other: Side, both_ways: bool, notes: &mut Vec<String>) {
    let (Some(first), Some(second)) = (counted(low, one).cloned(), counted(low, other).cloned()) else { return };
    let (loser, gone, winner) = match first.rank.cmp(&second.rank) {
        std::cmp::Ordering::Greater => (other, second, first),
        std::cmp::Ordering::Less if both_ways => (one, first, second),
        _ => return,
    };
    low.sections.entry(loser.0).or_default().remove(loser.1);
    notes.push(note(&gone, &winner));
}

fn note(gone: &Entry, winner: &Entry) -> String {
    let Entry { typed, value, place, .. } = gone;
    format!("{} overrides `{typed} = {value}` ({place})", winner.place)
}

/// The entry of a key, if present and in effect.
fn counted(low: &Low, (section, key, counts): Side) -> Option<&Entry> {
    low.sections.get(&section)?.get(key).filter(|entry| counts(&entry.value))
}

fn always(_: &Value) -> bool {
    true
}

fn text(value: &Value) -> &str {
    if let Value::Text(text) = value { text } else { "" }
}

fn texts(value: &Value) -> Vec<&str> {
    match value {
        Value::List(all) => all.iter().map(text).collect(),
        one => vec![text(one)],
    }
}

fn is_cpu_alone(value: &Value) -> bool {
    texts(value).iter().all(|name| *name == "cpu")
}

/// Whether a rank divides its layers among several devices.
fn has_list(value: &Value) -> bool {
    texts(value).iter().any(|names| names.contains(','))
}

fn is_not_none(value: &Value) -> bool {
    texts(value) != ["none"]
}

fn is_no(value: &Value) -> bool {
    text(value) == "no"
}

fn is_not_no(value: &Value) -> bool {
    !is_no(value)
}

fn is_not_steps(value: &Value) -> bool {
    ["no", "epoch"].contains(&text(value))
}

fn is_constant(value: &Value) -> bool {
    text(value) == "constant"
}

fn ends_at_zero(value: &Value) -> bool {
    text(value) != "cosine_with_min_lr"
}

fn is_on(value: &Value) -> bool {
    *value == Value::Switch(true)
}

fn is_zero(value: &Value) -> bool {
    matches!(value, Value::Whole(0)) || *value == Value::Number(0.0)
}

fn not_zero(value: &Value) -> bool {
    !is_zero(value)
}

fn positive(value: &Value) -> bool {
    matches!(value, Value::Whole(count) if *count > 0)
}
