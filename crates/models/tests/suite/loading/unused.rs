//! Tensors that nothing reads: listed, or refused where they look like parts of the model that the
//! config leaves out.

use super::{File, bf16, weights_of};
use isobit_models::build::Settings;
use isobit_models::config::Config;
use isobit_models::{Inventory, Trained, WeightSource, Weights, build, peft};
use isobit_numerics::slices::Profile;
use isobit_proof::safetensors::TensorFiles;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn config(more: &Value) -> Config {
    let mut value = json!({"model_type": "llama", "vocab_size": 4, "hidden_size": 4, "intermediate_size": 8,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": true});
    for (key, more) in more.as_object().expect("an object") {
        value[key] = more.clone();
    }
    Config::parse(&value.to_string()).expect("a config")
}

/// What is not used of a file with these tensors alone, or why it is refused.
fn unused(names: &[&str], more: &Value) -> Result<Vec<String>, String> {
    let file: File = names.iter().map(|name| ((*name).to_string(), bf16(&[1], |_| 0))).collect();
    let found = weights_of(&file, &config(more)).map_err(|error| error.to_string())?;
    Ok(found.1.unused().to_vec())
}

#[test]
fn layers_behind_the_last_are_refused() {
    let name = "model.layers.2.mlp.up_proj.weight";
    let error = unused(&[name], &json!({})).expect_err("a layer too many");
    assert!(error.contains(name) && error.contains("layer 2") && error.contains("`num_hidden_layers`"), "{error}");
    let error = unused(&[name, "model.layers.7.x"], &json!({})).expect_err("two");
    assert!(error.contains("2 tensors in all"), "{error}");
    // A layer of the last one's kind is lost only where it is one that predicts.
    let prediction = json!({"num_nextn_predict_layers": 1});
    assert!(unused(&[name], &prediction).is_err());
    assert_eq!(unused(&[name, "model.layers.2.eh_proj.weight"], &prediction), Ok(vec![]));
    assert!(unused(&[name, "model.layers.3.eh_proj.weight"], &prediction).is_err());
    assert!(unused(&[name, "model.layers.2.eh_proj.weight"], &json!({})).is_err());
    assert!(unused(&["mtp.layers.0.x"], &json!({})).is_err());
    assert_eq!(unused(&["mtp.layers.0.x"], &json!({"model_type": "qwen3_5"})), Ok(vec![]));
}

#[test]
fn strangers_inside_the_model_are_refused() {
    for name in [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.pre_feedforward_layernorm.weight",
        "model.layers.1.input_layernorm.bias",
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.self_attn.q_proj.scales",
        "model.layers.0.self_attn.q_proj.input_scale",
        "model.layers.x",
        "model.norm.bias",
        "model.embed_norm.weight",
        "lm_head.bias",
    ] {
        let error = unused(&[name], &json!({})).expect_err(name);
        assert!(error.contains(name) && error.contains("config.json"), "{error}");
    }
    // With what makes them parts of this model they are read.
    let quantised = ["model.layers.0.self_attn.q_proj.scales", "model.layers.0.self_attn.q_proj.qweight"];
    assert_eq!(unused(&quantised, &json!({})), Ok(vec![]));
    assert_eq!(unused(&["model.layers.0.self_attn.q_norm.weight"], &json!({"model_type": "qwen3"})), Ok(vec![]));
    assert_eq!(unused(&["lm_head.bias"], &json!({"tie_word_embeddings": false})), Ok(vec![]));
}

#[test]
fn what_is_no_part_of_the_text_is_listed() {
    let names = ["adapter.x", "model.visual.blocks.0.norm1.bias", "vision_tower.layers.0.norm.bias", "visual.x"];
    assert_eq!(unused(&names, &json!({})), Ok(names.map(str::to_string).to_vec()));
    let buffers = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.7.self_attn.rotary_emb.inv_freq"];
    assert_eq!(unused(&buffers, &json!({})), Ok(vec![]));
    assert_eq!(unused(&["lm_head.weight"], &json!({})), Ok(vec![]));
    let many: Vec<String> = (10..22).map(|number| format!("visual.{number}")).collect();
    let file: File = many.iter().map(|name| (name.clone(), bf16(&[1], |_| 0))).collect();
    let (_folder, weights) = weights_of(&file, &config(&json!({}))).expect("weights");
    let note = weights.unused_note().expect("a note");
    assert!(note.starts_with("12 tensors of the model's files are not used: `visual.10`, "), "{note}");
    assert!(note.contains("`visual.19`") && note.ends_with(" and 2 more"), "{note}");
    let (_folder, weights) = weights_of(&File::new(), &config(&json!({}))).expect("weights");
    assert_eq!(weights.unused_note(), None);
}

/// Zeros are what some quantisers write for a bias that is not there; of a tied head there may be a
/// copy.
#[test]
fn biases_and_heads_that_the_config_does_not_have_say_nothing() {
    let backend = isobit_kernels::Cpu::new(1, isobit_kernels::Path::Scalar).expect("a path");
    let builds = |change: &dyn Fn(&mut File)| {
        let config = config(&json!({}));
        let mut file = File::new();
        let mut put = |name: String, shape: &[usize]| {
            file.insert(name, bf16(shape, |at| 0x3f80 + at as u16 % 3));
        };
        for name in Inventory::of(&config).adaptable() {
            let shape = if name.contains("down") { [4, 8] } else { [if name.contains("mlp") { 8 } else { 4 }, 4] };
            put(format!("{name}.weight"), &shape);
        }
        for layer in 0..2 {
            put(format!("model.layers.{layer}.input_layernorm.weight"), &[4]);
            put(format!("model.layers.{layer}.post_attention_layernorm.weight"), &[4]);
        }
        put("model.norm.weight".to_string(), &[4]);
        put("model.embed_tokens.weight".to_string(), &[4, 4]);
        change(&mut file);
        let (_folder, weights) = weights_of(&file, &config).map_err(|error| error.to_string())?;
        let settings = Settings { trained: Trained::Nothing, profile: Profile::X2, positions: 4, seed: 1 };
        build(&backend, &config, &weights, &settings).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(builds(&|_| ()), Ok(()));
    let bias = "model.layers.1.mlp.down_proj.bias";
    assert_eq!(builds(&|file| drop(file.insert(bias.to_string(), bf16(&[4], |_| 0)))), Ok(()));
    let error = builds(&|file| drop(file.insert(bias.to_string(), bf16(&[4], |at| at as u16)))).expect_err("a bias");
    assert!(error.contains(bias) && error.contains("element 1 is not zero"), "{error}");
    let head = |file: &mut File, change: u8| {
        let mut head = file["model.embed_tokens.weight"].clone();
        head.bytes[7] ^= change;
        file.insert("lm_head.weight".to_string(), head);
    };
    assert_eq!(builds(&|file| head(file, 0)), Ok(()));
    let error = builds(&|file| head(file, 1)).expect_err("another head");
    assert!(error.contains("lm_head.weight") && error.contains("tie_word_embeddings"), "{error}");
}

fn folders(under: &Path, holding: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(under).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(folders(&path, holding));
            found.extend(path.join(holding).is_file().then_some(path));
        }
    }
    found
}

/// Every family: transformers' files hold what the inventory says, and nothing else.
#[test]
fn the_inventory_is_what_files_hold() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let models = folders(&fixtures, "config.json");
    assert!(models.len() > 20, "{}", models.len());
    for folder in models {
        let text = std::fs::read_to_string(folder.join("config.json")).expect("a config");
        let config = Config::parse(&text).expect("a config");
        let files = TensorFiles::open(&folder).unwrap_or_else(|error| panic!("{error}"));
        let weights = Weights::new(files, &config).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let vision = ["model.visual.", "vision_tower.", "multi_modal_projector."];
        let is_vision = |name: &str| vision.iter().any(|start| name.starts_with(start));
        let text: Vec<_> = weights.unused().iter().filter(|name| !is_vision(name)).collect();
        assert_eq!(text, [""; 0], "{}", folder.display());
        let inventory = Inventory::of(&config);
        for path in inventory.adaptable() {
            let there = ["weight", "qweight"].iter().any(|part| weights.contains(&format!("{path}.{part}")));
            assert!(there, "{}: {path}", folder.display());
        }
        for start in inventory.experts() {
            assert!(weights.names_under(start).is_some_and(|names| !names.is_empty()), "{start}");
        }
    }
}

#[test]
fn configs_that_peft_wrote_are_read() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let adapters = folders(&fixtures, "adapter_config.json");
    assert!(adapters.len() > 5, "{}", adapters.len());
    for folder in adapters {
        let text = std::fs::read_to_string(folder.join("adapter_config.json")).expect("a config");
        peft::parse_config(&text).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    }
}
