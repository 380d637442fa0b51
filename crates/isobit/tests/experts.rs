//! `isobit train` of a mixture of experts: the header, files in the layout of the base, going on from them, adapters on experts.

mod model_folder;

use isobit_models::Source;
use isobit_proof::safetensors::{Checkpoint, SafeTensors};
use model_folder::{Folder, Named, Shape, weights};

const EXPERTS: usize = 6;
const WIDTH: usize = 8;

/// The tiny model with experts one by one in its second layer.
fn folder() -> Folder {
    let folder = Folder::new(Shape::TINY);
    let Shape { hidden, intermediate, vocabulary, .. } = folder.shape;
    let config = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": hidden, "intermediate_size": intermediate, "moe_intermediate_size": WIDTH,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": vocabulary,
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": true, "mlp_only_layers": [0],
        "max_position_embeddings": 512, "tie_word_embeddings": true, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    });
    let dense = weights(folder.shape, 1);
    let cut = |name: &str, shape: &[usize]| -> Named {
        let length: usize = shape.iter().product();
        let from = name.len() * 131 % 500;
        (name.to_string(), shape.to_vec(), dense[0].2[from..from + length].to_vec())
    };
    let mut all: Vec<Named> =
        dense.iter().filter(|(name, ..)| !name.ends_with("bias") && !name.contains("layers.1.mlp")).cloned().collect();
    for layer in 0..2 {
        for norm in ["q_norm", "k_norm"] {
            all.push((format!("model.layers.{layer}.self_attn.{norm}.weight"), vec![8], vec![1.0; 8]));
        }
    }
    all.push(cut("model.layers.1.mlp.gate.weight", &[EXPERTS, hidden]));
    for expert in 0..EXPERTS {
        for (module, shape) in
            [("gate_proj", [WIDTH, hidden]), ("up_proj", [WIDTH, hidden]), ("down_proj", [hidden, WIDTH])]
        {
            let mut tensor = cut(&format!("model.layers.1.mlp.experts.{expert}.{module}.weight"), &shape);
            tensor.2.rotate_left(expert);
            all.push(tensor);
        }
    }
    folder.put_model("model", &config, &all);
    let config = folder.text("config.toml");
    let adapter = config.find("[adapter]").expect("a section");
    folder.put("config.toml", &config[..adapter]);
    folder
}

#[test]
fn a_full_run_is_written_like_its_base_and_resumes() {
    let folder = folder();
    let full = ["adapter.type=full"];
    let ran = folder.trained("first", &full);
    let header = "2 layers, 1 with kept choices of experts, 0 with conv1d; checkpointing full, profile x2";
    assert!(ran.err.contains(header), "{}", ran.err);
    let base = Checkpoint::open(&folder.path("model")).expect("weights");
    let written = Checkpoint::open(&folder.path("first/final")).expect("weights");
    let of = |checkpoint: &Checkpoint| -> Vec<(String, Option<Vec<usize>>)> {
        checkpoint.names().map(|name| (name.to_string(), checkpoint.shape(name))).collect()
    };
    assert_eq!(of(&written), of(&base));
    let way = ["gradient_checkpointing=none", "training.micro_batch_size=8", "gradient_accumulation_steps=1"];
    folder.trained("other", &[&full[..], &way].concat());
    folder.same("first", "other");
    // From the last checkpoint, whose tensors are one by one too.
    std::fs::remove_dir_all(folder.path("other/final")).expect("removed");
    folder.trained("other", &["adapter.type=full", "--resume"]);
    folder.same("first", "other");
}

#[test]
fn adapters_on_experts_are_peft_s() {
    let folder = folder();
    let names = "lora_target_parameters=mlp.experts.gate_up_proj,mlp.experts.down_proj";
    let lora = ["lora_r=2", "lora_target_modules=q_proj,v_proj", names];
    folder.trained("first", &lora);
    folder.trained("other", &[&lora[..], &["training.micro_batch_size=1", "gradient_accumulation_steps=8"]].concat());
    folder.same("first", "other");
    let file = SafeTensors::open(&folder.path("first/final/adapter_model.safetensors")).expect("an adapter");
    let start = "base_model.model.model.layers.1.mlp.experts.";
    let hidden = folder.shape.hidden;
    for (name, shape) in [
        ("base_layer.lora_A.weight", [2 * EXPERTS, hidden]),
        ("base_layer.lora_B.weight", [2 * WIDTH, 2 * EXPERTS]),
        ("lora_A.weight", [2 * EXPERTS, WIDTH]),
        ("lora_B.weight", [hidden, 2 * EXPERTS]),
    ] {
        assert_eq!(file.get(&format!("{start}{name}")).expect(name).shape, shape, "{name}");
    }
    let config: serde_json::Value =
        serde_json::from_str(&folder.text("first/final/adapter_config.json")).expect("JSON");
    let wanted = serde_json::json!(["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]);
    assert_eq!(config["target_parameters"], wanted);
    let evaluated = |more: &[&str]| {
        let arguments = ["eval", "--model", "model", "--data", "data.jsonl", "--json"];
        let ran = folder.run(&[&arguments[..], more].concat());
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran.json()[0]["loss"].as_f64().expect("a loss")
    };
    assert!(evaluated(&["--adapter", "first/final"]) < evaluated(&[]), "the adapter was trained and is read back");
}

#[test]
fn modules_that_peft_takes_for_fused_experts_are_refused() {
    let folder = folder();
    let ran = folder.train("first", &["lora_target_modules=q_proj,down_proj"]);
    ran.says(2, &["down_proj", "target_parameters", "mlp.experts.gate_up_proj"]);
    let ran = folder.train("first", &["lora_target_modules=\"all-linear\""]);
    ran.says(2, &["all-linear", "o_proj"]);
    let init = folder.run(&["init", "model", "data.jsonl", "-o", "made.toml"]);
    assert_eq!(init.code, 0, "{}", init.err);
    assert!(folder.text("made.toml").contains("[\"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\"]"));
    let ran = folder.train("first", &["lora_target_parameters=mlp.experts.down_proj", "lora_dropout=0.1"]);
    ran.says(2, &["dropout"]);
}
