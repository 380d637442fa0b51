//! Model folders of the table: published shapes with random numbers, made once. Which tensors a
//! shape has is read off the program's own build.

use isobit_kernels::plan::Counting;
use isobit_kernels::{Cpu, Path as CpuPath};
use isobit_models::build::Settings;
use isobit_models::{Config, FloatFormat, ModelError, RandomSource, StoredTensor, Trained, WeightSource, build};
use isobit_numerics::slices::Profile;
use isobit_proof::FileError;
use isobit_proof::safetensors::{Declared, Dtype, write_streamed};
use serde_json::Value;
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Clone, Copy)]
pub(super) struct Model {
    /// Its folder.
    pub(super) name: &'static str,
    pub(super) vocabulary: usize,
    config: &'static str,
}

pub(super) const M135: Model = Model {
    name: "m135",
    vocabulary: 49152,
    config: r#"{"model_type":"llama","hidden_size":576,"intermediate_size":1536,"num_hidden_layers":30,
        "num_attention_heads":9,"num_key_value_heads":3,"vocab_size":49152,"max_position_embeddings":8192,
        "rope_theta":100000.0,"rms_norm_eps":1e-05,"tie_word_embeddings":true}"#,
};
/// Twelve layers, and a table that is also the head or is not.
macro_rules! twelve_layers {
    ($tied:literal) => {
        concat!(
            r#"{"model_type":"llama","hidden_size":576,"intermediate_size":1536,"num_hidden_layers":12,
            "num_attention_heads":9,"num_key_value_heads":3,"vocab_size":16384,"max_position_embeddings":8192,
            "rope_theta":100000.0,"rms_norm_eps":1e-05,"tie_word_embeddings":"#,
            $tied,
            "}"
        )
    };
}
pub(super) const M52: Model = Model { name: "m52", vocabulary: 16384, config: twelve_layers!(true) };
pub(super) const M61: Model = Model { name: "m61", vocabulary: 16384, config: twelve_layers!(false) };
pub(super) const B05: Model = Model {
    name: "b05",
    vocabulary: 151_936,
    config: r#"{"model_type":"qwen2","hidden_size":896,"intermediate_size":4864,"num_hidden_layers":24,
        "num_attention_heads":14,"num_key_value_heads":2,"vocab_size":151936,"max_position_embeddings":32768,
        "rope_theta":1000000.0,"rms_norm_eps":1e-06,"tie_word_embeddings":true}"#,
};
pub(super) const B15: Model = Model {
    name: "b15",
    vocabulary: 151_936,
    config: r#"{"model_type":"qwen2","hidden_size":1536,"intermediate_size":8960,"num_hidden_layers":28,
        "num_attention_heads":12,"num_key_value_heads":2,"vocab_size":151936,"max_position_embeddings":32768,
        "rope_theta":1000000.0,"rms_norm_eps":1e-06,"tie_word_embeddings":true}"#,
};
pub(super) const EXPERTS: Model = Model {
    name: "experts",
    vocabulary: 32768,
    config: r#"{"model_type":"qwen3_moe","hidden_size":512,"intermediate_size":1024,"moe_intermediate_size":256,
        "num_hidden_layers":8,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":64,"num_experts":32,
        "num_experts_per_tok":4,"vocab_size":32768,"max_position_embeddings":4096,"norm_topk_prob":true,
        "tie_word_embeddings":false,"rms_norm_eps":1e-06,"rope_theta":10000.0}"#,
};
pub(super) const HYBRID: Model = Model {
    name: "hybrid",
    vocabulary: 32768,
    config: r#"{"model_type":"qwen3_5_text","hidden_size":512,"intermediate_size":1536,"num_hidden_layers":8,
        "num_attention_heads":4,"num_key_value_heads":2,"head_dim":128,"linear_num_key_heads":4,
        "linear_num_value_heads":8,"linear_key_head_dim":128,"linear_value_head_dim":128,"vocab_size":32768,
        "max_position_embeddings":4096,"rms_norm_eps":1e-06,"tie_word_embeddings":false}"#,
};

/// Notes the tensors that a build asks for.
#[derive(Default)]
struct Recorder(RefCell<BTreeMap<String, Vec<usize>>>);

impl WeightSource for Recorder {
    fn contains(&self, _name: &str) -> bool {
        true
    }

    fn format(&self, _name: &str) -> Result<FloatFormat, ModelError> {
        Ok(FloatFormat::Bf16)
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>, ModelError> {
        self.0.borrow_mut().insert(name.to_string(), shape.to_vec());
        Ok(StoredTensor { format: FloatFormat::Bf16, shape: shape.to_vec(), bytes: Cow::Borrowed(&[]) })
    }
}

/// Writes the model's folder below `folder`, unless it is there.
pub(super) fn make(folder: &Path, model: Model) -> Result<(), String> {
    let folder = folder.join(model.name);
    let file = folder.join("model.safetensors");
    if file.exists() {
        return Ok(());
    }
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    std::fs::write(folder.join("config.json"), model.config).map_err(|error| error.to_string())?;
    let config = Config::parse(model.config).map_err(|error| error.to_string())?;
    let recorder = Recorder::default();
    let counting = Counting::new(Cpu::new(1, CpuPath::Scalar).map_err(|error| error.to_string())?);
    let settings = Settings { trained: Trained::Full, profile: Profile::X2, positions: 16, seed: 0 };
    build(&counting, &config, &recorder, &settings).map_err(|error| error.to_string())?;
    let shapes = recorder.0.into_inner();
    let all: Vec<(&String, &Vec<usize>)> = shapes.iter().collect();
    let declared = all.iter().map(|(name, shape)| Declared { name, dtype: Dtype::Bf16, shape });
    let declared: Vec<Declared> = declared.collect();
    let source = RandomSource { seed: 1 };
    write_streamed(&file, &BTreeMap::new(), &declared, |index, sink| {
        let (name, shape) = all[index];
        let stored = source.tensor(name, shape).expect("any tensor can be had");
        sink.write(&stored.bytes)
    })
    .map_err(|error: FileError| error.to_string())
}

pub(super) const TOKENIZER: &str = "tokenizer.json";

/// Writes the demo's tokenizer with a token for pairs of its letters, as many as the vocabulary
/// has room for: in memory it is as large as a published one.
pub(super) fn write_tokenizer(folder: &Path, vocabulary: usize) -> Result<(), String> {
    let malformed = || "the demo's tokenizer has another layout".to_string();
    let text = include_str!("../../../crates/isobit/demo/tokenizer.json");
    let mut all: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let mut tokens = all["model"]["vocab"].as_object().ok_or_else(malformed)?.clone();
    let mut merges = all["model"]["merges"].as_array().ok_or_else(malformed)?.clone();
    let letters: Vec<String> = tokens.keys().filter(|token| token.chars().count() == 1).cloned().collect();
    let added = all["added_tokens"].as_array().ok_or_else(malformed)?.iter().filter_map(|token| token["id"].as_u64());
    let ids = tokens.values().filter_map(Value::as_u64).chain(added);
    let mut next = ids.max().ok_or_else(malformed)? as usize + 1;
    for (first, second) in letters.iter().flat_map(|first| letters.iter().map(move |second| (first, second))) {
        let pair = format!("{first}{second}");
        if next == vocabulary {
            break;
        }
        if !tokens.contains_key(&pair) {
            tokens.insert(pair, next.into());
            merges.push(serde_json::json!([first, second]));
            next += 1;
        }
    }
    all["model"]["vocab"] = Value::Object(tokens);
    all["model"]["merges"] = Value::Array(merges);
    let settings = include_str!("../../../crates/isobit/demo/tokenizer_config.json");
    let written = std::fs::write(folder.join("tokenizer_config.json"), settings)
        .and_then(|()| std::fs::write(folder.join(TOKENIZER), all.to_string()));
    written.map_err(|error| format!("{}: {error}", folder.display()))
}
