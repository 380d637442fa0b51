//! `docs/models.md`: families of models and what is tested of each, from the configs of the tiny
//! models that the tests compare with transformers.

use super::{NOTICE, Table, code, source};
use crate::repository::root;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const FIXTURES: &str = "crates/models/tests/fixtures";

const OPENING: &str = "\
# Models

Families by the `model_type` of their `config.json`. Each fixture is a tiny model of the family
whose loss, gradients or adapter were computed by transformers and PEFT, and which the tests compare
with. *Stored as* lists the number formats that these cover besides float32.
";

pub(super) fn page() -> Result<String, String> {
    let mut table = Table::new(&["model_type", "attention", "experts", "stored as", "fixtures"]);
    for (family, row) in rows()? {
        let joined = |words: &BTreeSet<String>| words.iter().cloned().collect::<Vec<_>>().join(", ");
        let experts = if row.experts { "yes" } else { "" };
        table.row(&[
            code(&family),
            joined(&row.attention),
            experts.to_string(),
            joined(&row.stored),
            joined(&row.fixtures),
        ]);
    }
    Ok(format!("{NOTICE}\n{OPENING}\n{}", table.0))
}

#[derive(Default)]
struct Row {
    attention: BTreeSet<String>,
    experts: bool,
    stored: BTreeSet<String>,
    fixtures: BTreeSet<String>,
}

/// Family to what its fixtures cover.
fn rows() -> Result<BTreeMap<String, Row>, String> {
    let entries = std::fs::read_dir(root().join(FIXTURES)).map_err(|error| format!("{FIXTURES}: {error}"))?;
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{FIXTURES}/{name}/config.json");
        // Adapters have no config of a model.
        let Ok(text) = source(&path) else { continue };
        let config: Value = serde_json::from_str(&text).map_err(|error| format!("{path}: {error}"))?;
        let model_type = config["model_type"].as_str().ok_or_else(|| format!("{path}: no model_type"))?;
        note(rows.entry(model_type.to_string()).or_default(), &name, &config);
    }
    Ok(rows)
}

fn note(row: &mut Row, fixture: &str, config: &Value) {
    let inner = if config["text_config"].is_object() { &config["text_config"] } else { config };
    let has = |key: &str| inner[key].as_u64().is_some_and(|count| count > 0);
    row.fixtures.insert(fixture.to_string());
    row.experts |= ["num_experts", "n_routed_experts", "num_local_experts"].into_iter().any(has);
    let hybrid = has("linear_num_value_heads");
    let kind = match (has("kv_lora_rank"), hybrid) {
        (true, _) => "latent",
        (false, true) => "gated delta rule and gated attention",
        (false, false) => "grouped-query",
    };
    row.attention.insert(kind.to_string());
    let stored = [inner, config].into_iter().flat_map(|config| {
        let dtype = ["dtype", "torch_dtype"].iter().find_map(|key| config[*key].as_str());
        let method = config["quantization_config"]["quant_method"].as_str();
        let bits = config["quantization_config"]["bits"].as_u64();
        let method = method.map(|method| bits.map_or(method.to_string(), |bits| format!("{method} ({bits} bits)")));
        dtype.filter(|dtype| *dtype != "float32").map(str::to_string).into_iter().chain(method)
    });
    row.stored.extend(stored);
}
