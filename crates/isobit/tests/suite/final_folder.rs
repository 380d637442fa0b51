//! `final/` of runs that train the model's own weights: a whole model folder, whose evaluation is
//! the run's last on bits.

use crate::model_folder::{Folder, Named, Shape, config_json, names, put_tensors, weights};
use isobit_models::Weights;
use isobit_numerics::cast::{bf16_to_f32, f32_to_bf16, f32_to_f16};
use isobit_proof::safetensors::{Dtype, Entry, SafeTensors, TensorFiles, write};
use isobit_training::config::SaveDtype;
use isobit_training::model_folder::{ModelFolder, Shapes};
use isobit_training::prepare::model_config;
use std::collections::BTreeMap;
use std::path::Path;

const FULL: &str = "type = \"full\"";
const LAST: &str = "type = \"last_blocks\"\nlast_blocks = 1";
/// Evaluates on all rows after the last step.
const EVALUATED: [&str; 3] = ["val_set_size=0", "eval.path=data.jsonl", "eval_steps=12"];

/// Training as `adapter` says instead of an adapter.
fn set_adapter(folder: &Folder, adapter: &str) {
    let config = folder.text("config.toml");
    let end = config.find("[adapter]").unwrap_or(config.len());
    folder.put("config.toml", format!("{}[adapter]\n{adapter}\n", &config[..end]));
}

/// The tiny model in bfloat16, as models are published, with what lies beside one.
fn folder(adapter: &str) -> Folder {
    let folder = Folder::new(Shape::TINY);
    let mut config = config_json(folder.shape);
    config["torch_dtype"] = "bfloat16".into();
    config["architectures"] = serde_json::json!(["Qwen2ForCausalLM"]);
    folder.put("model/config.json", config.to_string());
    folder.put("model/generation_config.json", "{\"eos_token_id\": 1}");
    folder.put("model/chat_template.jinja", "{{ messages }}");
    folder.put("model/README.md", "of the base");
    put_bf16(&folder.path("model/model.safetensors"), &weights(folder.shape, 1));
    set_adapter(&folder, adapter);
    folder
}

fn put_bf16(path: &Path, tensors: &[Named]) {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, _, values)| values.iter().flat_map(|value| f32_to_bf16(*value).to_le_bytes()).collect())
        .collect();
    let entries = tensors.iter().zip(&bytes);
    let entries: Vec<Entry> =
        entries.map(|((name, shape, _), bytes)| Entry { name, dtype: Dtype::Bf16, shape, bytes }).collect();
    write(path, &BTreeMap::new(), &entries).expect("written");
}

fn tensors(folder: &Folder, file: &str) -> BTreeMap<String, (Dtype, Vec<f32>)> {
    let file = SafeTensors::open(&folder.path(file)).expect("tensors");
    let tensor = |tensor: isobit_proof::safetensors::Tensor<'_>| {
        (tensor.name.to_string(), (tensor.dtype, tensor.to_f32().expect("numbers")))
    };
    file.tensors().map(tensor).collect()
}

/// Trains, and evaluates what the run leaves: its last evaluation.
#[track_caller]
fn check(folder: &Folder) {
    folder.trained("run", &EVALUATED);
    let metrics = folder.metrics("run");
    let last: serde_json::Value = serde_json::from_str(metrics.last().expect("lines")).expect("JSON");
    let outside = evaluated(folder, "run/final");
    assert_eq!((&last["eval_loss_bits"], &last["eval_tokens"]), (&outside["loss_bits"], &outside["targets"]));
    assert_ne!(evaluated(folder, "model")["loss_bits"], outside["loss_bits"]);
    let prompt = ["generate", "--model", "run/final", "--prompt", "1+2=", "--max-tokens", "2"];
    assert_eq!(folder.run(&prompt).code, 0);
}

#[track_caller]
fn evaluated(folder: &Folder, model: &str) -> serde_json::Value {
    let ran = folder.run(&["eval", "--model", model, "--data", "data.jsonl", "--json"]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    ran.json().remove(0)
}

#[test]
fn a_whole_model_whose_evaluation_is_the_last_of_the_run() {
    for adapter in [FULL, LAST] {
        let folder = folder(adapter);
        check(&folder);
        assert_eq!(
            names(&folder.path("run/final")),
            [
                "MANIFEST.json",
                "chat_template.jinja",
                "config.json",
                "generation_config.json",
                "model.safetensors",
                "receipt.json",
                "tokenizer.json",
                "tokenizer_config.json"
            ]
        );
        let config: serde_json::Value = serde_json::from_str(&folder.text("run/final/config.json")).expect("JSON");
        let mut expected = config_json(folder.shape);
        expected["torch_dtype"] = "float32".into();
        expected["architectures"] = serde_json::json!(["Qwen2ForCausalLM"]);
        assert_eq!(config, expected);
        // Every tensor of the base in float32, no head beside a tied table, and what was frozen as
        // it was.
        let (base, left) =
            (tensors(&folder, "model/model.safetensors"), tensors(&folder, "run/final/model.safetensors"));
        assert!(base.keys().eq(left.keys()));
        for (name, (dtype, values)) in &left {
            assert_eq!(*dtype, Dtype::F32, "{name}");
            let frozen = adapter == LAST && !name.contains("layers.1.") && name != "model.norm.weight";
            assert_eq!(values == &base[name].1, frozen, "{name}");
        }
        // It can be trained on, and a flipped bit of it is found.
        folder.trained("on", &["base_model=run/final", "max_steps=1"]);
        let path = folder.path("run/final/model.safetensors");
        let mut bytes = std::fs::read(&path).expect("read");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes).expect("written");
        folder.run(&["eval", "--model", "run/final", "--data", "data.jsonl"]).says(8, &["model.safetensors"]);
        folder.train("more", &["base_model=run/final"]).says(8, &["model.safetensors"]);
    }
}

/// A head beside the table in the file of a tied model, experts one by one, and the best weights
/// instead of the last.
#[test]
fn other_layouts_and_the_best_weights() {
    let tied = folder(FULL);
    let mut all = weights(tied.shape, 1);
    let head = ("lm_head.weight".to_string(), all[0].1.clone(), all[0].2.clone());
    all.push(head);
    put_bf16(&tied.path("model/model.safetensors"), &all);
    check(&tied);
    assert!(!tensors(&tied, "run/final/model.safetensors").contains_key("lm_head.weight"));

    let experts = Folder::of_experts();
    for adapter in [FULL, LAST] {
        set_adapter(&experts, adapter);
        if experts.has("run") {
            std::fs::remove_dir_all(experts.path("run")).expect("removed");
        }
        check(&experts);
    }

    let best = folder(FULL);
    best.put("letters.jsonl", "{\"prompt\":\"1+1=\",\"completion\":\"qxzjkqxzjkqxzjk\"}\n");
    let worse = ["val_set_size=0", "eval.path=letters.jsonl", "eval_steps=1", "learning_rate=0.01"];
    best.trained("run", &[&worse[..], &["load_best_model_at_end=true", "save_total_limit=1"]].concat());
    let step = best.pointer("run", "best");
    assert!(step < 12, "{step}");
    let saved = tensors(&best, &format!("run/checkpoint-{step}/model.safetensors"));
    assert_eq!(tensors(&best, "run/final/model.safetensors"), saved);
}

/// Rounding is by choice, to nearest even, and changes nothing else of the run.
#[test]
fn numbers_are_rounded_by_choice() {
    for adapter in [FULL, LAST, "type = \"lora\"\nlora_r = 4"] {
        let folder = folder(adapter);
        let name = if adapter.contains("lora") { "adapter_model.safetensors" } else { "model.safetensors" };
        folder.trained("exact", &[]);
        let exact = tensors(&folder, &format!("exact/final/{name}"));
        for (dtype, kind, round) in
            [("bfloat16", Dtype::Bf16, f32_to_bf16 as fn(f32) -> u16), ("float16", Dtype::F16, f32_to_f16)]
        {
            folder.trained(dtype, &[&format!("save_dtype={dtype}")]);
            for (name, (found, values)) in tensors(&folder, &format!("{dtype}/final/{name}")) {
                assert_eq!(found, kind, "{name}");
                let bits = |values: &[f32]| values.iter().map(|value| round(*value)).collect::<Vec<_>>();
                assert_eq!(bits(&values), bits(&exact[&name].1), "{name}");
                assert!(values.iter().all(|value| kind != Dtype::Bf16 || bf16_to_f32(f32_to_bf16(*value)) == *value));
            }
            if !adapter.contains("lora") {
                let config = folder.text(&format!("{dtype}/final/config.json"));
                assert!(config.contains(&format!("\"torch_dtype\": \"{dtype}\"")), "{config}");
                evaluated(&folder, &format!("{dtype}/final"));
            }
            let state = |run: &str| std::fs::read(folder.path(&format!("{run}/checkpoint-12/MANIFEST.json")));
            assert_eq!(state(dtype).expect("read"), state("exact").expect("read"));
        }
    }
}

#[test]
fn what_a_format_cannot_hold_is_named_and_nothing_is_lost() {
    let folder = folder(LAST);
    let mut all = weights(folder.shape, 1);
    let bias = "model.layers.0.self_attn.q_proj.bias";
    all.iter_mut().find(|tensor| tensor.0 == bias).expect("a bias").2[0] = 70_000.0;
    put_tensors(&folder.path("model/model.safetensors"), &all);
    folder.train("run", &["save_dtype=float16"]).says(5, &[bias, "7e4", "does not fit in float16", "--resume"]);
    assert!(folder.has("run/checkpoint-12") && !folder.has("run/final") && !folder.has("run/.final.partial"));
    folder.trained("run", &["save_dtype=bfloat16", "--resume"]);
    evaluated(&folder, "run/final");
}

/// Float8 with scales is expanded: the folder holds the numbers that were trained on, and no
/// quantisation.
#[test]
fn a_base_of_float8_is_expanded() {
    for adapter in [FULL, LAST] {
        let folder = folder(adapter);
        let plain = weights(folder.shape, 1);
        let mut file: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
        for (name, shape, values) in &plain {
            if shape.len() == 2 && name.contains("layers.") {
                // Any codes will do that are numbers.
                let codes = (0..values.len()).map(|at| ((at * 37 % 127) | (at % 2) << 7) as u8).collect();
                file.insert(name.clone(), (Dtype::F8E4M3, shape.clone(), codes));
                let scale = 0.001f32.to_le_bytes().to_vec();
                file.insert(format!("{name}_scale_inv"), (Dtype::F32, vec![1, 1], scale));
            } else {
                let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                file.insert(name.clone(), (Dtype::F32, shape.clone(), bytes));
            }
        }
        let entries: Vec<Entry> =
            file.iter().map(|(name, (dtype, shape, bytes))| Entry { name, dtype: *dtype, shape, bytes }).collect();
        write(&folder.path("model/model.safetensors"), &BTreeMap::new(), &entries).expect("written");
        let mut config = config_json(folder.shape);
        config["quantization_config"] = serde_json::json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"});
        folder.put("model/config.json", config.to_string());
        check(&folder);
        let left = tensors(&folder, "run/final/model.safetensors");
        assert!(left.keys().eq(plain.iter().map(|tensor| &tensor.0).collect::<std::collections::BTreeSet<_>>()));
        assert!(!folder.text("run/final/config.json").contains("quantization_config"));
    }
}

/// A model larger than one file, here of 20 kB, is read back through its index.
#[test]
fn large_models_are_written_in_parts() {
    let folder = folder(FULL);
    let base = folder.path("model");
    let model = model_config(&base).expect("a config");
    let files = TensorFiles::open(&base).expect("weights");
    let weights = Weights::new(files, &model).expect("weights");
    let whole =
        ModelFolder::new(&base, &model, &weights, &Shapes::new(), SaveDtype::Float32).expect("all from the base");
    std::fs::create_dir(folder.path("parts")).expect("folder");
    let mut none = |name: &str, _: &[usize]| panic!("{name} was not trained");
    let written = whole.with_shards_of(20_000).write(&folder.path("parts"), &mut none).expect("written");
    let parts: Vec<&String> = written.iter().filter(|name| name.starts_with("model-0000")).collect();
    assert!(parts.len() > 2 && parts[0].ends_with(&format!("-of-0000{}.safetensors", parts.len())), "{parts:?}");
    assert_eq!(evaluated(&folder, "parts"), evaluated(&folder, "model"));
}
