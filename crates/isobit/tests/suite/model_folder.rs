//! A folder to run the program in: a tiny model with made-up weights, a tokenizer, sums to learn
//! and a config.
//!
//! The folder goes when the value does. Nothing here is random: the same call writes the same
//! bytes.

use isobit_proof::safetensors::{Dtype, Entry, write};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const TOKENIZER: &str = include_str!("../../../training/tests/fixtures/tokenizer.json");

/// Sizes of the model and length of the data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) vocabulary: usize,
    pub(crate) rows: usize,
}

impl Shape {
    pub(crate) const TINY: Self = Self { hidden: 32, intermediate: 48, vocabulary: 352, rows: 40 };
}

/// Of the model with experts: how many, and their width.
pub(crate) const EXPERTS: usize = 6;
pub(crate) const WIDTH: usize = 8;

/// A tensor of the model: name, shape, values.
pub(crate) type Named = (String, Vec<usize>, Vec<f32>);

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    /// Ended with this code, and said all of this on standard error.
    #[track_caller]
    pub(crate) fn says(&self, code: i32, parts: &[&str]) -> &Self {
        assert_eq!(self.code, code, "{}{}", self.out, self.err);
        for part in parts {
            assert!(self.err.contains(part), "`{part}` is missing in: {}", self.err);
        }
        self
    }

    /// The objects on standard output.
    pub(crate) fn json(&self) -> Vec<serde_json::Value> {
        self.out.lines().map(|line| serde_json::from_str(line).expect("a JSON object a line")).collect()
    }
}

pub(crate) struct Folder {
    held: tempfile::TempDir,
    pub(crate) shape: Shape,
}

impl Folder {
    /// `model/`, `data.jsonl` and `config.toml`.
    pub(crate) fn new(shape: Shape) -> Self {
        let folder = Self { held: tempfile::tempdir().expect("a temporary folder"), shape };
        folder.put_model("model", &config_json(shape), &weights(shape, 1));
        folder.put("data.jsonl", rows(shape.rows));
        folder.put("config.toml", CONFIG);
        folder
    }

    /// The tiny model with experts one by one in its second layer.
    pub(crate) fn of_experts() -> Self {
        Self::with_experts(&[0])
    }

    /// A mixture of experts whose layers are dense where `dense_layers` says so.
    pub(crate) fn with_experts(dense_layers: &[usize]) -> Self {
        let folder = Self::new(Shape::TINY);
        let Shape { hidden, intermediate, vocabulary, .. } = folder.shape;
        let config = serde_json::json!({
            "model_type": "qwen3_moe", "hidden_size": hidden, "intermediate_size": intermediate, "moe_intermediate_size": WIDTH,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": vocabulary,
            "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": true, "mlp_only_layers": dense_layers,
            "max_position_embeddings": 512, "tie_word_embeddings": true, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        });
        let dense = weights(folder.shape, 1);
        let cut = |name: &str, shape: &[usize]| -> Named {
            let length: usize = shape.iter().product();
            let from = name.len() * 131 % 500;
            (name.to_string(), shape.to_vec(), dense[0].2[from..from + length].to_vec())
        };
        let mut all: Vec<Named> = dense
            .iter()
            .filter(|(name, ..)| !name.ends_with("bias"))
            .filter(|(name, ..)| {
                !name.contains(".mlp.")
                    || dense_layers.iter().any(|layer| name.contains(&format!("layers.{layer}.mlp")))
            })
            .cloned()
            .collect();
        for layer in 0..2 {
            for norm in ["q_norm", "k_norm"] {
                all.push((format!("model.layers.{layer}.self_attn.{norm}.weight"), vec![8], vec![1.0; 8]));
            }
        }
        for layer in (0..2).filter(|layer| !dense_layers.contains(layer)) {
            all.push(cut(&format!("model.layers.{layer}.mlp.gate.weight"), &[EXPERTS, hidden]));
            for expert in 0..EXPERTS {
                for (module, shape) in
                    [("gate_proj", [WIDTH, hidden]), ("up_proj", [WIDTH, hidden]), ("down_proj", [hidden, WIDTH])]
                {
                    let name = format!("model.layers.{layer}.mlp.experts.{expert}.{module}.weight");
                    let mut tensor = cut(&name, &shape);
                    tensor.2.rotate_left(expert + EXPERTS * (1 - layer));
                    all.push(tensor);
                }
            }
        }
        folder.put_model("model", &config, &all);
        let config = folder.text("config.toml");
        let adapter = config.find("[adapter]").expect("a section");
        folder.put("config.toml", &config[..adapter]);
        folder
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.held.path().join(name)
    }

    pub(crate) fn put(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), bytes).expect("written");
    }

    pub(crate) fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    pub(crate) fn put_model(&self, name: &str, config: &serde_json::Value, weights: &[Named]) {
        std::fs::create_dir_all(self.path(name)).expect("folder");
        self.put(&format!("{name}/config.json"), config.to_string());
        self.put(&format!("{name}/tokenizer.json"), TOKENIZER);
        self.put(&format!("{name}/tokenizer_config.json"), r#"{"eos_token":"<|endoftext|>"}"#);
        put_tensors(&self.path(&format!("{name}/model.safetensors")), weights);
    }

    /// The program with these arguments, in this folder.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_isobit"));
        command.current_dir(self.held.path()).args(arguments).stdin(Stdio::null());
        command
    }

    #[track_caller]
    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        finished(self.command(arguments).output().expect("the program starts"))
    }

    /// `isobit train config.toml` into `output`, with more arguments or `key=value` overrides.
    #[track_caller]
    pub(crate) fn train(&self, output: &str, more: &[&str]) -> Ran {
        let arguments = train_arguments(output, more);
        self.run(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The same, which must end well.
    #[track_caller]
    pub(crate) fn trained(&self, output: &str, more: &[&str]) -> Ran {
        let ran = self.train(output, more);
        assert_eq!(ran.code, 0, "{output} {more:?}: {}", ran.err);
        ran
    }

    /// The same, while it runs.
    pub(crate) fn training(&self, output: &str, more: &[&str]) -> Child {
        let arguments = train_arguments(output, more);
        let mut command = self.command(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
    }

    /// Two whole runs are the same run: weights by `isobit diff`, every checkpoint byte for byte,
    /// metrics but for their timing, and which checkpoints are the latest and the best.
    #[track_caller]
    pub(crate) fn same(&self, expected: &str, other: &str) {
        let diff = self.run(&["diff", expected, other]);
        assert_eq!((diff.code, diff.out.as_str()), (0, "max=0 nonzero=0\n"), "{expected}, {other}: {}", diff.err);
        assert_eq!(self.metrics(expected), self.metrics(other), "{expected}, {other}");
        assert_eq!(self.checkpoints(expected), self.checkpoints(other), "{expected}, {other}");
        assert!(!self.has(&format!("{other}/stopped.json")), "{other}");
        for pointer in ["best.json", "latest.json"] {
            assert_eq!(self.has(&format!("{expected}/{pointer}")), self.has(&format!("{other}/{pointer}")), "{other}");
            if self.has(&format!("{expected}/{pointer}")) {
                let [first, second] = [expected, other].map(|run| self.text(&format!("{run}/{pointer}")));
                assert_eq!(first, second, "{other}/{pointer}");
            }
        }
        for folder in self.checkpoints(expected).iter().map(String::as_str).chain(["final"]) {
            for file in names(&self.path(&format!("{expected}/{folder}"))) {
                let [first, second] =
                    [expected, other].map(|run| std::fs::read(self.path(&format!("{run}/{folder}/{file}"))));
                let equal = first.expect("read") == second.unwrap_or_else(|error| panic!("{other}/{folder}: {error}"));
                assert!(equal, "{folder}/{file} of {expected} and {other}");
            }
        }
    }

    /// Lines of `metrics.jsonl` without what a clock said.
    pub(crate) fn metrics(&self, run: &str) -> Vec<String> {
        let text = self.text(&format!("{run}/metrics.jsonl"));
        assert!(text.ends_with('\n') && text.contains(",\"timing\":"), "{text}");
        text.lines().map(isobit_training::metrics::without_timing).collect()
    }

    /// Names of the checkpoints, by step.
    pub(crate) fn checkpoints(&self, run: &str) -> Vec<String> {
        let mut found: Vec<String> =
            names(&self.path(run)).into_iter().filter(|name| name.starts_with("checkpoint-")).collect();
        found.sort_by_key(|name| step_of(name));
        found
    }

    /// The step a pointer of the run names.
    pub(crate) fn pointer(&self, run: &str, name: &str) -> u64 {
        let value: serde_json::Value = serde_json::from_str(&self.text(&format!("{run}/{name}.json"))).expect("JSON");
        assert_eq!(value["checkpoint"], format!("checkpoint-{}", value["step"]));
        value["step"].as_u64().expect("a step")
    }
}

pub(crate) fn finished(output: std::process::Output) -> Ran {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    let ran = Ran { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) };
    assert!(!ran.err.contains("panicked"), "{}", ran.err);
    ran
}

/// `train config.toml` into `output`, with more arguments or `key=value` overrides.
pub(crate) fn train_arguments(output: &str, more: &[&str]) -> Vec<String> {
    let mut arguments: Vec<String> = ["train", "config.toml", "--set"].map(str::to_string).to_vec();
    arguments.push(format!("output_dir={output}"));
    for argument in more {
        if !argument.starts_with('-') {
            arguments.push("--set".to_string());
        }
        arguments.push((*argument).to_string());
    }
    arguments
}

fn step_of(checkpoint: &str) -> u64 {
    checkpoint.trim_start_matches("checkpoint-").parse().expect("a step")
}

/// Names in a folder, sorted.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("read").file_name().into_string();
    let mut names: Vec<String> = entries.map(|entry| name(entry).expect("UTF-8")).collect();
    names.sort_unstable();
    names
}

pub(crate) fn put_tensors(path: &Path, tensors: &[Named]) {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(_, _, values)| values.iter().flat_map(|value| value.to_le_bytes()).collect()).collect();
    let entries: Vec<Entry> = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, shape, _), bytes)| Entry { name, dtype: Dtype::F32, shape, bytes })
        .collect();
    write(path, &BTreeMap::new(), &entries).expect("written");
}

pub(crate) fn config_json(shape: Shape) -> serde_json::Value {
    serde_json::json!({
        "model_type": "qwen2", "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": shape.vocabulary,
        "max_position_embeddings": 512, "tie_word_embeddings": true, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    })
}

/// Every tensor of the model, from a small generator of numbers.
pub(crate) fn weights(shape: Shape, seed: u64) -> Vec<Named> {
    let Shape { hidden, intermediate, vocabulary, .. } = shape;
    let narrow = hidden / 2;
    let mut all = vec![("model.embed_tokens.weight".to_string(), vec![vocabulary, hidden])];
    for layer in 0..2 {
        let linear = [
            ("self_attn.q_proj", hidden, hidden, true),
            ("self_attn.k_proj", narrow, hidden, true),
            ("self_attn.v_proj", narrow, hidden, true),
            ("self_attn.o_proj", hidden, hidden, false),
            ("mlp.gate_proj", intermediate, hidden, false),
            ("mlp.up_proj", intermediate, hidden, false),
            ("mlp.down_proj", hidden, intermediate, false),
        ];
        for (name, outputs, inputs, bias) in linear {
            all.push((format!("model.layers.{layer}.{name}.weight"), vec![outputs, inputs]));
            if bias {
                all.push((format!("model.layers.{layer}.{name}.bias"), vec![outputs]));
            }
        }
        for name in ["input_layernorm", "post_attention_layernorm"] {
            all.push((format!("model.layers.{layer}.{name}.weight"), vec![hidden]));
        }
    }
    all.push(("model.norm.weight".to_string(), vec![hidden]));
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let filled = all.into_iter().map(|(name, dimensions)| {
        let base = if name.contains("norm") { 1.0 } else { 0.0 };
        let values = (0..dimensions.iter().product()).map(|_| near(base, &mut state)).collect();
        (name, dimensions, values)
    });
    filled.collect()
}

/// Within ±0.25 of `base`.
#[expect(clippy::float_arithmetic, reason = "made-up weights")]
fn near(base: f32, state: &mut u64) -> f32 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    base + (*state >> 40) as f32 / (1 << 25) as f32 - 0.25
}

/// Sums of two digits, `count` of them.
pub(crate) fn rows(count: usize) -> String {
    let row = |index: usize| {
        let (left, right) = (index * 7 % 10, index * 3 % 11);
        format!("{{\"prompt\":\"{left}+{right}=\",\"completion\":\"{}\"}}\n", left + right)
    };
    (0..count).map(row).collect()
}

/// Twelve updates of eight rows over a little more than two epochs.
const CONFIG: &str = r#"base_model = "model"
output_dir = "out"
seed = 7
threads = 1

[[datasets]]
path = "data.jsonl"

[eval]
val_set_size = 6
eval_steps = 4

[training]
max_seq_length = 64
micro_batch_size = 4
gradient_accumulation_steps = 2
max_steps = 12
learning_rate = 1e-2
lr_scheduler_type = "cosine"
warmup_ratio = 0.1
weight_decay = 0.01
save_steps = 3
logging_steps = 1

[adapter]
type = "lora"
lora_r = 4
lora_alpha = 8
lora_dropout = 0.1
"#;
