//! `isobit models` from the outside: one document that names every family the loader knows, and a
//! table that says the same.

use serde_json::Value;
use std::process::Command;

fn isobit(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_isobit")).args(arguments).output().expect("the program starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "results are on stdout alone");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The families of the one JSON document.
fn families() -> Vec<Value> {
    let text = isobit(&["models", "--json"]);
    assert_eq!(text.lines().count(), 1, "one document: {text}");
    let document: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(document["schema"], "isobit.models/1");
    document["families"].as_array().expect("a list").clone()
}

fn strings(list: &Value) -> Vec<&str> {
    list.as_array().expect("a list").iter().map(|entry| entry.as_str().expect("a string")).collect()
}

/// The message about an unknown `model_type` lists what the loader knows.
#[test]
fn the_document_names_every_type_that_the_loader_knows() {
    let families = families();
    let listed: Vec<&str> = families.iter().flat_map(|family| strings(&family["model_types"])).collect();
    let error = isobit_models::Config::parse(r#"{"model_type":"?"}"#).expect_err("no such type").to_string();
    assert!(error.ends_with(&format!("is not one of {}", listed.join(", "))), "{error}");
}

#[test]
fn the_document_says_what_adapters_can_target() {
    let families = families();
    let of = |name: &str| families.iter().find(|family| family["name"] == name).expect("a family");
    let mixture = of("Qwen3-MoE");
    assert_eq!(strings(&mixture["lora_modules"]), ["q_proj", "k_proj", "v_proj", "o_proj"]);
    assert_eq!(strings(&mixture["lora_per_expert_modules"]), ["gate_proj", "up_proj", "down_proj"]);
    let fused = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"];
    assert_eq!(strings(&mixture["lora_expert_parameters"]), fused);
    assert_eq!((&mixture["lora_all_linear"], &of("Llama")["lora_all_linear"]), (&false.into(), &true.into()));
    assert_eq!(strings(&of("Qwen3.5-MoE")["multimodal_types"]), ["qwen3_5_moe"]);
    assert_eq!(of("DeepSeek-V3")["balance_loss"], false);
    for family in &families {
        // Files of gpt-oss have a format of their own.
        let usual = family["name"] != "gpt-oss";
        assert_eq!(
            (&family["gptq_4bit"], &family["fp8"], &family["mxfp4"], &family["tied_head"]),
            (&usual.into(), &usual.into(), &(!usual).into(), &true.into())
        );
    }
}

#[test]
fn the_table_says_the_same_in_lines_that_fit() {
    let text = isobit(&["models"]);
    assert!(text.lines().all(|line| line.len() <= 100), "{text}");
    let words: Vec<&str> = text.split([' ', ',', '\n']).collect();
    for family in families() {
        let name = family["name"].as_str().expect("a name");
        assert!(text.lines().any(|line| line == name), "{name} in {text}");
        for key in ["model_types", "lora_modules", "lora_expert_parameters", "lora_per_expert_modules"] {
            for entry in strings(&family[key]) {
                assert!(words.contains(&entry), "{entry} of {name} in {text}");
            }
        }
    }
}
