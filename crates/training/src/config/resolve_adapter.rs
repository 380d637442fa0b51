//! Resolves [adapter].

use super::error::Error;
use super::run::{Adapter, Lora};
use super::table::Table;
use super::value::Value;
use isobit_models::Targets;
use std::collections::BTreeMap;
use std::path::PathBuf;

pub(super) fn adapter(table: &Table<'_>) -> Result<Adapter, Error> {
    #[derive(Clone, Copy)]
    enum Type {
        Lora,
        Full,
        LastBlocks,
    }
    let names = [("lora", Type::Lora), ("full", Type::Full), ("last_blocks", Type::LastBlocks)];
    if let Some(entry) =
        table.get("type").filter(|entry| entry.texts().iter().any(|text| text.eq_ignore_ascii_case("qlora")))
    {
        let hint = "write type = \"lora\", and load_in_4bit = true at the top of the file; a base_model that is stored \
                    as 4-bit GPTQ needs no setting";
        return Err(entry.invalid("whether the base has 4 bits is a property of the base, not of the adapter", hint));
    }
    let chosen = table.one_of("type", &names)?;
    let stray = table.entries.iter().find(|(key, _)| match chosen {
        Type::Lora => **key == "last_blocks",
        Type::Full => **key != "type",
        Type::LastBlocks => !["type", "last_blocks"].contains(key),
    });
    if let Some((_, entry)) = stray {
        let kind = table.get("type").map_or("lora".to_string(), |entry| entry.texts().concat());
        return Err(
            entry.invalid(&format!("it has no effect with type = \"{kind}\""), "remove this line, or change type")
        );
    }
    match chosen {
        Type::Lora => Ok(Adapter::Lora(Box::new(lora(table)?))),
        Type::Full => Ok(Adapter::Full),
        Type::LastBlocks => Ok(Adapter::LastBlocks(table.whole("last_blocks", 1..=4096)? as u32)),
    }
}

fn lora(table: &Table<'_>) -> Result<Lora, Error> {
    let positive = |number: f64| number > 0.0 && number <= 1e6;
    Ok(Lora {
        r: table.whole("lora_r", 1..=65536)? as u32,
        alpha: table.number("lora_alpha", positive, "above 0, at most a million")?,
        dropout: table.number("lora_dropout", |share| (0.0..1.0).contains(&share), "from 0, below 1")?,
        targets: targets(table)?,
        target_parameters: names(table, "lora_target_parameters")?,
        use_rslora: table.switch("use_rslora"),
        layers_to_transform: layers(table)?,
        rank_pattern: pattern(table, "rank_pattern", |value| match value {
            Value::Whole(rank) if (1..=65536).contains(rank) => Some(*rank as u32),
            _ => None,
        })?,
        alpha_pattern: pattern(table, "alpha_pattern", |value| match value {
            Value::Number(alpha) if positive(*alpha) => Some(*alpha),
            _ => None,
        })?,
        exclude_modules: names(table, "exclude_modules")?,
        modules_to_save: saved(table)?,
        resume_from: table.text("resume_from")?.map(PathBuf::from),
    })
}

fn targets(table: &Table<'_>) -> Result<Targets, Error> {
    // A config that names tensors gets only these by default; modules are named separately.
    let by_parameters = !names(table, "lora_target_parameters")?.is_empty();
    let Some(entry) = table.get("lora_target_modules") else {
        return Ok(if by_parameters { Targets::Names(vec![]) } else { Targets::AllLinear });
    };
    match &entry.value {
        Value::Text(text) if text.eq_ignore_ascii_case("all-linear") => Ok(Targets::AllLinear),
        // As an expression a single name matches no path.
        Value::Text(text) if text.chars().all(|letter| letter.is_alphanumeric() || letter == '_') => Err(entry
            .invalid(
                "a string is a regular expression for whole paths, but this is a name",
                "\"all-linear\", a list: [\"q_proj\", \"v_proj\"], or an expression: '.*\\.[qv]_proj'",
            )),
        // An empty list is how "all" is written out.
        Value::Text(_) if !layers(table)?.is_empty() => {
            Err(entry.invalid("layers_to_transform needs a list of names", "let the expression choose the layers"))
        }
        Value::Text(text) => Ok(Targets::Pattern(text.clone())),
        _ => match names(table, "lora_target_modules")? {
            names if names.is_empty() && !by_parameters => {
                Err(entry.invalid("no module is named", "\"all-linear\" takes every linear module"))
            }
            names => Ok(Targets::Names(names)),
        },
    }
}

/// Names as typed, without duplicates: they are a set.
fn names(table: &Table<'_>, key: &str) -> Result<Vec<String>, Error> {
    let Some(entry) = table.get(key) else { return Ok(vec![]) };
    let mut names: Vec<String> = Vec::new();
    for name in entry.texts() {
        if name.is_empty() || names.contains(&name) {
            return Err(entry.invalid("a name is empty or repeated", "name every module once"));
        }
        names.push(name);
    }
    Ok(names)
}

/// What PEFT's key may name here.
fn saved(table: &Table<'_>) -> Result<Vec<String>, Error> {
    let names = names(table, "modules_to_save")?;
    let known = |name: &String| ["lm_head", "embed_tokens", "model.embed_tokens"].contains(&name.as_str());
    match table.get("modules_to_save") {
        Some(entry) if !names.iter().all(known) => {
            let hint = "modules_to_save = [\"lm_head\", \"embed_tokens\"], or one of them; other modules get adapters";
            Err(entry.invalid("only the head and the embedding table are trained whole", hint))
        }
        _ => Ok(names),
    }
}

fn layers(table: &Table<'_>) -> Result<Vec<u32>, Error> {
    let Some(entry) = table.get("layers_to_transform") else { return Ok(vec![]) };
    let Value::List(items) = &entry.value else { return Ok(vec![]) };
    let layer = |item: &Value| if let Value::Whole(layer) = item { u32::try_from(*layer).ok() } else { None };
    let layers: Option<Vec<u32>> = items.iter().map(|item| layer(item).filter(|&layer| layer < 65536)).collect();
    let mut layers = layers.ok_or_else(|| entry.invalid("out of range", "layers are counted from 0"))?;
    layers.sort_unstable();
    layers.dedup();
    Ok(layers)
}

fn pattern<T>(table: &Table<'_>, key: &str, of: impl Fn(&Value) -> Option<T>) -> Result<BTreeMap<String, T>, Error> {
    let Some(entry) = table.get(key) else { return Ok(BTreeMap::new()) };
    let Value::Table(entries) = &entry.value else { return Ok(BTreeMap::new()) };
    let pairs = entries.iter().map(|(name, value)| Some((name.clone(), of(value)?)));
    let pairs: Option<BTreeMap<String, T>> = pairs.collect();
    pairs
        .filter(|pairs| pairs.keys().all(|name| !name.is_empty()))
        .ok_or_else(|| entry.invalid("a name is empty or a value out of range", "write { \"q_proj\" = 16 }"))
}
