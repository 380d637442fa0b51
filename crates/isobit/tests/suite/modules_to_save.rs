//! `adapter.modules_to_save`: head and embedding table trained whole beside an adapter, written and
//! read as PEFT does. (That the numbers are PEFT's is tested with the fixtures of `training`.)

use crate::model_folder::{Folder, Shape, config_json, weights};
use isobit_proof::safetensors::SafeTensors;

const BOTH: &str = "modules_to_save=lm_head,embed_tokens";
const HEAD: &str = "base_model.model.lm_head.weight";
const TABLE: &str = "base_model.model.model.embed_tokens.weight";

/// A model with a head of its own.
fn untied() -> Folder {
    let folder = Folder::new(Shape::TINY);
    let mut config = config_json(folder.shape);
    config["tie_word_embeddings"] = false.into();
    let mut tensors = weights(folder.shape, 1);
    let mut head = tensors[0].clone();
    head.0 = "lm_head.weight".to_string();
    head.2.reverse();
    tensors.push(head);
    folder.put_model("model", &config, &tensors);
    folder
}

fn adapter(folder: &Folder, run: &str) -> SafeTensors {
    SafeTensors::open(&folder.path(run).join("final/adapter_model.safetensors")).expect("an adapter")
}

fn values(file: &SafeTensors, name: &str) -> Option<Vec<f32>> {
    Some(file.get(name).ok()?.to_f32().expect("numbers"))
}

#[test]
fn whole_modules_are_trained_and_read_back() {
    for (folder, is_tied) in [(Folder::new(Shape::TINY), true), (untied(), false)] {
        let settings = [BOTH, "max_steps=4", "val_set_size=0", "eval.path=data.jsonl", "eval_steps=4"];
        folder.trained("run", &settings);
        let file = adapter(&folder, "run");
        let (head, table) = (values(&file, HEAD).expect("a head"), values(&file, TABLE).expect("a table"));
        let base = weights(folder.shape, 1);
        assert_ne!(table, base[0].2);
        assert_ne!(head, table, "two copies, each with a gradient of its own");
        let config: serde_json::Value =
            serde_json::from_str(&folder.text("run/final/adapter_config.json")).expect("JSON");
        assert_eq!(config["modules_to_save"], serde_json::json!(["lm_head", "embed_tokens"]));

        // Other ways to compute it, and a resumed run.
        let otherwise = [
            "threads=3",
            "gradient_checkpointing=none",
            "training.micro_batch_size=8",
            "gradient_accumulation_steps=1",
        ];
        folder.trained("other", &[&settings[..], &otherwise].concat());
        folder.same("run", "other");
        folder.trained("list", &[&settings[..], &["device=cpu,cpu"]].concat());
        folder.same("run", "list");
        folder.trained("other", &[&settings[..], &["--resume-from=checkpoint-3"]].concat());
        folder.same("run", "other");

        // What was evaluated while it was trained is what `eval` finds.
        let metrics = folder.metrics("run");
        let last: serde_json::Value = serde_json::from_str(metrics.last().expect("lines")).expect("JSON");
        let ran = folder.run(&["eval", "--model", "model", "--adapter", "run", "--data", "data.jsonl", "--json"]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        assert_eq!(ran.json()[0]["loss_bits"], last["eval_loss_bits"]);

        // A merge has both, and is not tied.
        let ran = folder.run(&["export", "merge", "run", "-o", "merged"]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        let merged = SafeTensors::open(&folder.path("merged/model.safetensors")).expect("merged");
        assert_eq!(values(&merged, "lm_head.weight"), Some(head));
        assert_eq!(values(&merged, "model.embed_tokens.weight"), Some(table));
        let says = folder.text("merged/config.json").contains("\"tie_word_embeddings\": false");
        assert!(says, "tied before: {is_tied}");
    }
}

/// One side of a tied model: the other stays what the base has.
#[test]
fn one_module_of_a_tied_model_parts_from_the_other() {
    let folder = Folder::new(Shape::TINY);
    for (run, name, there, absent) in [("head", "lm_head", HEAD, TABLE), ("table", "embed_tokens", TABLE, HEAD)] {
        folder.trained(run, &[&format!("modules_to_save={name}"), "max_steps=3"]);
        let file = adapter(&folder, run);
        assert_ne!(values(&file, there).expect("saved"), weights(folder.shape, 1)[0].2, "{run}");
        assert!(file.get(absent).is_err(), "{run}");
        // Continued with a learning rate of zero it stays, and without the setting it is refused.
        let from = format!("adapter.resume_from={run}");
        folder.trained(&format!("{run}-on"), &[&format!("modules_to_save={name}"), &from, "max_steps=1"]);
        let [first, on] = [run.to_string(), format!("{run}-on")]
            .map(|run| std::fs::read(folder.path(&run).join("final/adapter_model.safetensors")).expect("read"));
        assert_eq!(first, on, "{run}");
        let refused = folder.train("out", &[&from, "max_steps=1"]);
        refused.says(2, &["resume_from", "the whole module", "none", &format!("modules_to_save = [\"{name}\"]")]);
    }
    folder.trained("plain", &["max_steps=1"]);
    assert!(!folder.text("plain/config.resolved.toml").contains("modules_to_save"));
    let refused = folder.train("out", &["modules_to_save=lm_head", "adapter.resume_from=plain", "max_steps=1"]);
    refused.says(2, &["the whole module"]);
    let ran = folder.run(&["export", "gguf", "table", "-o", "a.gguf"]);
    ran.says(2, &["--merge"]);
}

#[test]
fn other_modules_are_refused() {
    let folder = Folder::new(Shape::TINY);
    folder.train("out", &["modules_to_save=q_proj"]).says(2, &["modules_to_save", "lm_head", "embed_tokens"]);
    assert!(!folder.has("out"));
}
