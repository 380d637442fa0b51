//! Names of modules, tensors and layers in a config: each must mean something in the model, and
//! what is written to `adapter_config.json` is what PEFT would understand alike.

use crate::model_folder::{Folder, Shape};

#[test]
fn names_that_match_nothing_are_refused_with_the_nearest() {
    let all = "the linear modules are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";
    let two = "lora_target_modules=[\"q_proj\",\"v_proj\"]";
    for (overrides, parts) in [
        (&["lora_target_modules=[\"q_proj\",\"v_porj\"]"][..], ["`lora_target_modules`: no module", "mean `v_proj`?"]),
        (&["lora_target_modules=[\"q_proj\",\"c_attn\"]"], ["called `c_attn`", all]),
        (&["lora_target_modules=[\"q_proj\",\"lm_head\"]"], ["called `lm_head`", all]),
        (&["lora_target_modules=[\"q_proj\",\"proj\"]"], ["called `proj`", "hint: "]),
        (
            &["lora_target_modules=.*\\.query"],
            ["no module's path matches `.*\\.query`", "model.layers.0.self_attn.q_proj"],
        ),
        (&["lora_target_modules=.*q_proj|lm_head"], ["matches lm_head, which gets no adapter", "modules_to_save"]),
        (&["lora_target_modules=.*"], ["matches lm_head, which gets no adapter", "hint: "]),
        (&["exclude_modules=[\"o_porj\"]"], ["`exclude_modules`: no module", "mean `o_proj`?"]),
        (&[two, "exclude_modules=[\"q_proj\",\"v_proj\"]"], ["no module of the model is a target", "exclude_modules"]),
        (&[two, "rank_pattern={ v_porj = 2 }"], ["`rank_pattern`: `v_porj`", "mean `v_proj`?"]),
        (&[two, "rank_pattern={ o_proj = 2 }"], ["`rank_pattern`: `o_proj` matches nothing", "hint: "]),
        (
            &[two, "alpha_pattern={ mlp = 2.0 }"],
            ["`alpha_pattern`: `mlp` matches nothing", "adapters are on q_proj, v_proj"],
        ),
        (&["layers_to_transform=[0,2]"], ["`layers_to_transform` names 2", "layers are 0 to 1"]),
        (
            &["lora_target_modules=[\"layers.0.mlp.up_proj\"]", "layers_to_transform=[0,1]"],
            ["`layers_to_transform` names 1", "no module of this layer is a target"],
        ),
        (
            &["lora_dropout=0", "lora_target_parameters=[\"self_attn.q_porj.weight\"]"],
            ["`lora_target_parameters`: no tensor", "q_proj.weight"],
        ),
    ] {
        let folder = Folder::new(Shape::TINY);
        folder.train("out", overrides).says(2, &parts);
        assert!(!folder.has("out"), "{overrides:?}");
        let sets: Vec<&str> = overrides.iter().flat_map(|argument| ["--set", argument]).collect();
        folder.run(&[&["plan", "config.toml"][..], &sets].concat()).says(2, &parts);
    }
}

#[test]
fn names_that_match_are_written() {
    let folder = Folder::new(Shape::TINY);
    let written = |output: &str| -> serde_json::Value {
        serde_json::from_str(&folder.text(&format!("{output}/final/adapter_config.json"))).expect("JSON")
    };
    let named =
        ["max_steps=1", "lora_target_modules=[\"q_proj\",\"mlp.up_proj\"]", "rank_pattern={ \"layers.1.*\" = 2 }"];
    folder.trained("named", &named);
    assert_eq!(written("named")["target_modules"], serde_json::json!(["q_proj", "mlp.up_proj"]));
    folder.trained("all", &["max_steps=1"]);
    assert_eq!(written("all")["target_modules"], "all-linear");
    // PEFT refuses a choice of layers beside "all-linear".
    folder.trained("one", &["max_steps=1", "layers_to_transform=[1]"]);
    let names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];
    assert_eq!(written("one")["target_modules"], serde_json::json!(names));
    assert_eq!(written("one")["layers_to_transform"], serde_json::json!([1]));
    let ran = folder.run(&["eval", "--model", "model", "--data", "data.jsonl", "--adapter", "one/final"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
}

#[test]
fn experts_by_their_tensors() {
    let folder = Folder::of_experts();
    let tensors = "lora_target_parameters=[\"mlp.experts.gate_up_proj\",\"mlp.experts.donw_proj\"]";
    folder.train("out", &["max_steps=1", tensors]).says(2, &["called `mlp.experts.donw_proj`", "experts.down_proj"]);
    folder.trained("out", &["max_steps=1", "lora_target_parameters=[\"mlp.experts.down_proj\"]"]);
}
