//! `isobit train` of a mixture of experts: the header, files in the layout of the base, going on
//! from them, adapters on experts.

use crate::model_folder::{EXPERTS, Folder, WIDTH};
use isobit_models::WeightSource;
use isobit_proof::safetensors::{SafeTensors, TensorFiles};

#[test]
fn a_full_run_is_written_like_its_base_and_resumes() {
    let folder = Folder::of_experts();
    let full = ["adapter.type=full"];
    let ran = folder.trained("first", &full);
    let header = "2 layers, 1 with recorded expert indices, 0 with conv1d; checkpointing full, profile x2";
    assert!(ran.err.contains(header), "{}", ran.err);
    let base = TensorFiles::open(&folder.path("model")).expect("weights");
    let written = TensorFiles::open(&folder.path("first/final")).expect("weights");
    let of = |files: &TensorFiles| -> Vec<(String, Option<Vec<usize>>)> {
        files.names().map(|name| (name.to_string(), files.shape(name))).collect()
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
    let folder = Folder::of_experts();
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

/// Where every layer has experts, names of modules mean those of each of them.
#[test]
fn adapters_on_the_modules_of_every_expert() {
    let folder = Folder::with_experts(&[]);
    let lora = ["lora_r=2", "lora_target_modules=q_proj,gate_proj,up_proj,down_proj"];
    folder.trained("first", &lora);
    folder.trained("other", &[&lora[..], &["training.micro_batch_size=1", "gradient_accumulation_steps=8"]].concat());
    folder.same("first", "other");
    // From the last checkpoint, which has them one by one too.
    std::fs::remove_dir_all(folder.path("other/final")).expect("removed");
    folder.trained("other", &[&lora[..], &["--resume"]].concat());
    folder.same("first", "other");
    let file = SafeTensors::open(&folder.path("first/final/adapter_model.safetensors")).expect("an adapter");
    let hidden = folder.shape.hidden;
    for (module, inputs, outputs) in
        [("gate_proj", hidden, WIDTH), ("up_proj", hidden, WIDTH), ("down_proj", WIDTH, hidden)]
    {
        for expert in 0..EXPERTS {
            let start = format!("base_model.model.model.layers.0.mlp.experts.{expert}.{module}");
            assert_eq!(file.get(&format!("{start}.lora_A.weight")).expect("A").shape, [2, inputs], "{start}");
            assert_eq!(file.get(&format!("{start}.lora_B.weight")).expect("B").shape, [outputs, 2], "{start}");
        }
    }
    let evaluate = |more: &[&str]| {
        folder.run(&[&["eval", "--model", "model", "--data", "data.jsonl", "--json"][..], more].concat())
    };
    let loss = |more: &[&str]| evaluate(more).json()[0]["loss"].as_f64().expect("a loss");
    assert!(loss(&["--adapter", "first/final"]) < loss(&[]), "the adapter was trained and is read back");
    for (key, part) in [
        ("lora_target_modules=q_proj,gate_proj", "gate_proj and up_proj"),
        ("lora_dropout=0.1", "not support dropout"),
        ("lora_target_parameters=mlp.experts.down_proj", "mlp.experts.down_proj"),
    ] {
        folder.train("wrong", &[&lora[..], &[key]].concat()).says(2, &[part]);
    }
}

#[test]
fn modules_that_peft_takes_for_fused_experts_are_refused() {
    let folder = Folder::of_experts();
    let ran = folder.train("first", &["lora_target_modules=q_proj,down_proj"]);
    ran.says(2, &["down_proj", "target_parameters", "mlp.experts.gate_up_proj"]);
    let ran = folder.train("first", &["lora_target_modules=\"all-linear\""]);
    ran.says(2, &["all-linear", "o_proj"]);
    // An expression is as good as its matches.
    let ran = folder.train("first", &[r#"lora_target_modules=".*[.](q|down)_proj""#]);
    ran.says(2, &["model.layers.0.mlp.down_proj", "target_parameters"]);
    let ran = folder.train("matched", &[r#"lora_target_modules=".*[.][qv]_proj""#]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let init = folder.run(&["init", "model", "data.jsonl", "-o", "made.toml"]);
    assert_eq!(init.code, 0, "{}", init.err);
    assert!(folder.text("made.toml").contains("[\"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\"]"));
    let ran = folder.train("first", &["lora_target_parameters=mlp.experts.down_proj", "lora_dropout=0.1"]);
    ran.says(2, &["dropout"]);
}
