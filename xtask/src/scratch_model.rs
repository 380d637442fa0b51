//! `cargo xtask scratch-model FOLDER`: random weights of a model with 20 million parameters, the
//! text of this repository as data, and a config for training from scratch with
//! `isobit train FOLDER/run.toml`. `docs/performance.md` shows its curve.

use crate::arguments::Arguments;
use crate::demo_model::initial_weights;
use crate::repository::{command, root};
use isobit_models::Config;
use std::fmt::Write;
use std::path::Path;

const CONFIG: &str = r#"{
  "model_type": "qwen2",
  "hidden_size": 384,
  "intermediate_size": 1536,
  "num_hidden_layers": 9,
  "num_attention_heads": 6,
  "num_key_value_heads": 2,
  "vocab_size": 352,
  "max_position_embeddings": 512,
  "rope_theta": 10000.0,
  "rms_norm_eps": 1e-06,
  "tie_word_embeddings": true
}
"#;

const RUN: &str = r#"# A full fine-tune of 20 million random weights on the text of a repository.
base_model = "start"
output_dir = "run"
seed = 1
device = "cpu"

[[datasets]]
path = "text.jsonl"

[eval]
val_set_size = 0.03
eval_steps = 25

[training]
max_seq_length = 512
sample_packing = true
micro_batch_size = 8
gradient_accumulation_steps = 2
max_steps = 150
learning_rate = 1e-3
lr_scheduler_type = "cosine"
warmup_steps = 10
weight_decay = 0.1
max_grad_norm = 1.0
gradient_checkpointing = "none"
save_steps = 1000
logging_steps = 1

[adapter]
type = "full"
"#;

/// Characters per row: two or three rows fill a sequence.
const ROW: usize = 600;

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let folder = arguments.word("a folder")?;
    arguments.finish()?;
    let folder = Path::new(&folder);
    let failed = |error: std::io::Error| error.to_string();
    let start = folder.join("start");
    std::fs::create_dir_all(&start).map_err(failed)?;
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(root().join("crates/isobit/demo").join(name), start.join(name)).map_err(failed)?;
    }
    std::fs::write(start.join("config.json"), CONFIG).map_err(failed)?;
    std::fs::write(folder.join("run.toml"), RUN).map_err(failed)?;
    std::fs::write(folder.join("text.jsonl"), text()?).map_err(failed)?;
    initial_weights(&start, &Config::parse(CONFIG).map_err(|error| error.to_string())?)
}

/// Sources and documents in order of their names, cut into rows at line ends.
pub(crate) fn text() -> Result<String, String> {
    let listed = command(&root(), "git", &["ls-files", "crates/*.rs", "crates/*.cl", "docs/*.md"]);
    let listed = { listed }.output().map_err(|error| error.to_string())?;
    let mut rows = String::new();
    for name in String::from_utf8_lossy(&listed.stdout).lines() {
        let text = std::fs::read_to_string(root().join(name)).map_err(|error| format!("{name}: {error}"))?;
        let mut row = String::new();
        for line in text.split_inclusive('\n') {
            row.push_str(line);
            if row.len() >= ROW {
                let _ = writeln!(rows, "{{\"text\":{}}}", serde_json::Value::from(std::mem::take(&mut row)));
            }
        }
    }
    Ok(rows)
}
