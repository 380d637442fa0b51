//! `cargo xtask demo-model`: makes the model embedded in `isobit demo`. Random weights and
//! sentences come from Philox, trained by `isobit train` with `crates/isobit/demo/pretrain.toml`;
//! the result and its record are written beside it.

use crate::arguments::Arguments;
use crate::repository::{command, root};
use isobit_models::config::{AttentionKind, MlpKind};
use isobit_models::{Config, RandomSource, WeightSource};
use isobit_numerics::philox::{Key, Purpose, word};
use isobit_proof::hash::Hash;
use isobit_proof::safetensors::{Dtype, Entry, write};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

const SENTENCES: usize = 3000;
const NAMES: [&str; 24] = [
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Klara", "Leo", "Mila", "Noah",
    "Olga", "Paul", "Rosa", "Sam", "Tina", "Uwe", "Vera", "Willi", "Yara", "Zoe",
];
const THINGS: [&str; 12] =
    ["apple", "boat", "cat", "door", "egg", "fish", "goat", "hat", "island", "jar", "key", "lamp"];

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let program = arguments.option("--isobit")?.unwrap_or_else(|| "target/release/isobit".to_string());
    arguments.finish()?;
    let program = std::fs::canonicalize(&program).map_err(|error| format!("{program}: {error}"))?;
    let folder = std::env::temp_dir().join(format!("isobit-demo-model-{}", std::process::id()));
    let result = make(&folder, &program);
    let _ = std::fs::remove_dir_all(&folder);
    result
}

fn make(folder: &Path, program: &Path) -> Result<(), String> {
    let demo = root().join("crates/isobit/demo");
    let start = folder.join("start");
    let failed = |error: std::io::Error| error.to_string();
    std::fs::create_dir_all(&start).map_err(failed)?;
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(demo.join(name), start.join(name)).map_err(failed)?;
    }
    std::fs::copy(demo.join("pretrain.toml"), folder.join("pretrain.toml")).map_err(failed)?;
    std::fs::write(folder.join("sentences.jsonl"), sentences()).map_err(failed)?;
    let config = std::fs::read_to_string(demo.join("config.json")).map_err(failed)?;
    initial_weights(&start, &Config::parse(&config).map_err(|error| error.to_string())?)?;
    let program = program.to_string_lossy().into_owned();
    let status = command(folder, &program, &["train", "pretrain.toml"]).status().map_err(failed)?;
    if !status.success() {
        return Err(format!("training ended with {status}"));
    }
    let weights = folder.join("run/final/model.safetensors");
    std::fs::copy(&weights, demo.join("model.safetensors")).map_err(failed)?;
    let hash = |path: &Path| Hash::of_file(path).map(|hash| hash.to_string()).map_err(|error| error.to_string());
    let record = format!(
        "{{\n  \"start\": \"{}\",\n  \"sentences\": \"{}\",\n  \"config\": \"{}\",\n  \"model\": \"{}\"\n}}\n",
        hash(&start.join("model.safetensors"))?,
        hash(&folder.join("sentences.jsonl"))?,
        hash(&folder.join("pretrain.toml"))?,
        hash(&weights)?
    );
    std::fs::write(demo.join("pretrain.json"), &record).map_err(failed)?;
    print!("{record}");
    Ok(())
}

/// Simple instructions and their answers.
fn sentences() -> String {
    let key = Key::new(1, Purpose::TestData);
    let mut text = String::new();
    for row in 0..SENTENCES as u32 {
        let pick = |element: u64, count: usize| word(key, 0, row, 0, element) as usize % count;
        let (name, thing) = (NAMES[pick(0, NAMES.len())], THINGS[pick(1, THINGS.len())]);
        let (prompt, completion) = match pick(2, 5) {
            0 => (format!("greet {name}:"), format!(" Hello, {name}!")),
            1 => (format!("leave {name}:"), format!(" Goodbye, {name}.")),
            2 => (format!("give {name} {thing}:"), format!(" {name} has the {thing}.")),
            3 => (format!("ask {name}:"), format!(" How are you, {name}?")),
            _ => (format!("name {thing}:"), format!(" This is the {thing}.")),
        };
        let _ = writeln!(text, "{{\"prompt\":\"{prompt}\",\"completion\":\"{completion}\"}}");
    }
    text
}

/// Weights with the usual model initialisation, from the benchmark's random source.
pub(crate) fn initial_weights(folder: &Path, config: &Config) -> Result<(), String> {
    let hidden = config.hidden;
    let mut shapes: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    shapes.insert("model.embed_tokens.weight".to_string(), vec![config.vocabulary, hidden]);
    shapes.insert("model.norm.weight".to_string(), vec![hidden]);
    for (layer, described) in config.layers.iter().enumerate() {
        let (AttentionKind::Softmax(attention), MlpKind::Dense { width, .. }) = (&described.attention, &described.mlp)
        else {
            return Err(format!("layer {layer} of the demo's config is not a dense layer"));
        };
        let (wide, narrow) = (attention.output_width(), attention.kv_rows());
        let path = format!("model.layers.{layer}");
        let mut add = |name: &str, shape: &[usize]| shapes.insert(format!("{path}.{name}"), shape.to_vec());
        for (module, outputs) in [("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow)] {
            add(&format!("self_attn.{module}.weight"), &[outputs, hidden]);
            add(&format!("self_attn.{module}.bias"), &[outputs]);
        }
        add("self_attn.o_proj.weight", &[hidden, wide]);
        for module in ["gate_proj", "up_proj"] {
            add(&format!("mlp.{module}.weight"), &[*width, hidden]);
        }
        add("mlp.down_proj.weight", &[hidden, *width]);
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
    }
    let source = RandomSource { seed: 1 };
    let mut values = BTreeMap::new();
    for (name, shape) in &shapes {
        let tensor = source.tensor(name, shape).map_err(|error| error.to_string())?;
        values.insert(name.as_str(), tensor.bytes.into_owned());
    }
    let entries: Vec<_> = shapes
        .iter()
        .map(|(name, shape)| Entry { name, dtype: Dtype::Bf16, shape, bytes: &values[name.as_str()] })
        .collect();
    write(&folder.join("model.safetensors"), &BTreeMap::new(), &entries).map_err(|error| error.to_string())
}
