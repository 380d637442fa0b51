//! `isobit generate`, `chat` and `eval` from the outside: the same text and numbers alone and in
//! company, with and without an adapter, and adapters that do not fit.

use crate::model_folder::{Folder, Named, Ran, Shape, config_json, put_tensors, weights};

/// A folder with an adapter in `adapter`, trained far enough to change what is said.
fn folder() -> Folder {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &["learning_rate=0.1", "lr_scheduler_type=constant", "warmup_ratio=0"]);
    std::fs::rename(folder.path("run/final"), folder.path("adapter")).expect("renamed");
    folder
}

#[track_caller]
fn generate(folder: &Folder, more: &[&str]) -> Vec<serde_json::Value> {
    let most: &[&str] = if more.contains(&"--max-tokens") { &[] } else { &["--max-tokens", "12"] };
    let ran = folder.run(&[&["generate", "--model", "model", "--json"], most, more].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
    ran.json()
}

#[track_caller]
fn eval(folder: &Folder, more: &[&str]) -> serde_json::Value {
    let ran = folder.run(&[&["eval", "--model", "model", "--data", "data.jsonl", "--json"], more].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
    ran.json().remove(0)
}

#[test]
fn alone_and_in_company() {
    let folder = folder();
    for adapter in [&[][..], &["--adapter", "adapter"]] {
        let prompts = ["1+2=", "7+7= and a longer text before", "9"];
        let flags: Vec<&str> = prompts.iter().flat_map(|prompt| ["--prompt", prompt]).collect();
        let together = generate(&folder, &[adapter, &flags].concat());
        assert_eq!(together.len(), 3);
        for (prompt, line) in prompts.iter().zip(&together) {
            for threads in ["1", "3"] {
                let alone = generate(&folder, &[adapter, &["--threads", threads, "--prompt", prompt]].concat());
                assert_eq!(alone, std::slice::from_ref(line));
            }
            assert!(!line["text_tokens"].as_array().expect("tokens").is_empty() || line["text"] == "");
        }
    }
}

/// A text's next token is the same whether the text before was generated or given.
#[test]
fn a_continued_text_goes_on_the_same() {
    let folder = folder();
    let flags = ["--adapter", "adapter", "--prompt", "4+4="];
    let short = generate(&folder, &[&flags[..], &["--max-tokens", "5"]].concat()).remove(0);
    let long = generate(&folder, &flags).remove(0);
    let tokens = |line: &serde_json::Value| line["text_tokens"].as_array().expect("tokens").clone();
    let count = tokens(&short).len();
    assert_eq!(tokens(&short), tokens(&long)[..count]);
}

#[test]
fn sampling_is_a_function_of_the_seed() {
    let folder = folder();
    let hot = |seed: &str| {
        generate(&folder, &["--temperature", "1.5", "--top-p", "0.95", "--seed", seed, "--prompt", "1+2="])
    };
    assert_eq!(hot("1"), hot("1"));
    assert_ne!(hot("1"), hot("2"));
    assert_ne!(hot("1"), generate(&folder, &["--prompt", "1+2="]));
    for (flag, value) in [("--temperature", "-1"), ("--temperature", "nan"), ("--top-p", "0"), ("--top-p", "2")] {
        let flag = format!("{flag}={value}");
        folder.run(&["generate", "--model", "model", &flag, "--prompt", "1"]).says(2, &["out of range"]);
    }
}

#[test]
fn base_and_adapter_side_by_side() {
    let folder = folder();
    let line = generate(&folder, &["--adapter", "adapter", "--compare", "--prompt", "1+2="]).remove(0);
    let base = generate(&folder, &["--prompt", "1+2="]).remove(0);
    let adapted = generate(&folder, &["--adapter", "adapter", "--prompt", "1+2="]).remove(0);
    assert_eq!((&line["base"], &line["text"]), (&base["text"], &adapted["text"]));
    assert_ne!(base["text_tokens"], adapted["text_tokens"]);
    let ran = folder.run(&[
        "generate",
        "--model",
        "model",
        "--adapter",
        "adapter",
        "--compare",
        "--prompt",
        "1+2=",
        "--max-tokens=4",
    ]);
    assert!(ran.out.starts_with("[base]\n") && ran.out.contains("\n[adapter]\n"), "{}", ran.out);
}

#[test]
fn prompts_that_cannot_be_continued() {
    let folder = folder();
    folder.run(&["generate", "--model", "model", "--prompt", ""]).says(2, &["prompt is empty"]);
    folder.run(&["generate", "--model", "model", "--chat", "--prompt", "1"]).says(2, &["no chat template"]);
    folder.run(&["generate", "--model", "nowhere", "--prompt", "1"]).says(2, &["nowhere does not exist"]);
    folder.run(&["generate", "--model", "model", "--device", "abacus", "--prompt", "1"]).says(2, &["abacus"]);
    folder.run(&["generate", "--model", "model", "--profile", "x9", "--prompt", "1"]).says(2, &["x9"]);
    let long = "1 ".repeat(600);
    let ran = folder.run(&["generate", "--model", "model", "--prompt", &long]);
    ran.says(3, &["512"]);
}

#[test]
fn evaluation_does_not_depend_on_how_many_rows_are_taken_together() {
    let folder = folder();
    let expected = eval(&folder, &["--micro-batch-size", "1"]);
    for more in [["--micro-batch-size", "3"], ["--micro-batch-size", "40"], ["--threads", "3"]] {
        assert_eq!(eval(&folder, &more), expected);
    }
    assert_eq!(expected["loss_bits"].as_str().expect("bits").len(), 16);
    let adapted = eval(&folder, &["--adapter", "adapter"]);
    assert!(adapted["loss"].as_f64() < expected["loss"].as_f64(), "{adapted} {expected}");
    assert_eq!(adapted, eval(&folder, &["--adapter", "adapter", "--micro-batch-size", "7"]));
}

#[test]
fn losses_that_are_not_numbers() {
    let folder = Folder::new(Shape::TINY);
    let mut tensors = weights(folder.shape, 1);
    // Every step of the last layer is finite; its product with the head is not.
    for (name, _, values) in &mut tensors {
        if name == "model.norm.weight" {
            values.fill(f32::MAX);
        }
    }
    put_tensors(&folder.path("model/model.safetensors"), &tensors);
    let ran = folder.run(&["eval", "--model", "model", "--data", "data.jsonl"]);
    ran.says(5, &["the loss of evaluation row 0"]);
    folder.train("out", &[]).says(5, &["step 1: the loss of row 0"]);
    folder.run(&["generate", "--model", "model", "--prompt", "1+2="]).says(5, &["a logit after 4 tokens is"]);
}

/// Every file of `final`, a byte at its start, in its middle and at its end.
#[test]
fn a_changed_byte_of_an_adapter_is_found() {
    let folder = folder();
    for file in ["adapter_model.safetensors", "adapter_config.json", "MANIFEST.json"] {
        let path = folder.path(&format!("adapter/{file}"));
        let good = std::fs::read(&path).expect("read");
        for at in [1, good.len() / 2, good.len() - 3] {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            std::fs::write(&path, &bad).expect("written");
            for command in [&["generate", "--prompt", "1+2="][..], &["eval", "--data", "data.jsonl"]] {
                let ran = folder.run(&[command, &["--model", "model", "--adapter", "adapter"]].concat());
                ran.says(8, &[file]);
                assert_eq!(ran.out, "");
            }
        }
        std::fs::write(&path, &good).expect("written");
    }
    // A file of the user beside them is none of ours.
    folder.put("adapter/README.md", "mine");
    generate(&folder, &["--adapter", "adapter", "--prompt", "1+2="]);
}

#[test]
fn an_adapter_on_a_base_of_other_weights_is_told() {
    let folder = folder();
    let flags = ["generate", "-q", "--adapter", "adapter", "--prompt", "1+2=", "--max-tokens", "2"];
    let told = |model: &str| folder.run(&[&flags[..], &["--model", model]].concat());
    let fits = told("model");
    assert_eq!((fits.code, fits.err.as_str()), (0, ""));
    let mut tensors = weights(folder.shape, 1);
    tensors[0].2[9] = 0.5;
    folder.put_model("other", &config_json(folder.shape), &tensors);
    told("other").says(0, &["warning: the adapter was trained on a different base"]);
    let eval = ["eval", "--model", "other", "--adapter", "adapter", "--data", "data.jsonl"];
    folder.run(&eval).says(0, &["warning: the adapter was trained on a different base"]);
    // Without a word about its base there is nothing to compare.
    for file in ["MANIFEST.json", "receipt.json"] {
        std::fs::remove_file(folder.path("adapter").join(file)).expect("removed");
    }
    assert_eq!(told("other").err, "");
}

/// What a run measures at its end is what `eval` measures with the adapter it leaves.
#[test]
fn evaluation_of_a_run_is_that_of_its_adapter() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &["val_set_size=0", "eval.path=data.jsonl", "eval_steps=12"]);
    let metrics = folder.metrics("run");
    let last: serde_json::Value = serde_json::from_str(metrics.last().expect("lines")).expect("JSON");
    let outside = eval(&folder, &["--adapter", "run/final"]);
    assert_eq!((&last["eval_loss_bits"], &last["eval_tokens"]), (&outside["loss_bits"], &outside["targets"]));
    assert_eq!(outside, eval(&folder, &["--adapter", "run/checkpoint-12"]));
}

/// `eval` with the adapter after its file or config was changed, as another tool might have left
/// it: without a manifest.
fn with_adapter(change: impl FnOnce(&Folder)) -> Ran {
    let folder = folder();
    for file in ["MANIFEST.json", "receipt.json"] {
        std::fs::remove_file(folder.path("adapter").join(file)).expect("removed");
    }
    change(&folder);
    folder.run(&["eval", "--model", "model", "--data", "data.jsonl", "--adapter", "adapter"])
}

fn tensors(folder: &Folder) -> Vec<Named> {
    let file = isobit_proof::safetensors::SafeTensors::open(&folder.path("adapter/adapter_model.safetensors"));
    let file = file.expect("an adapter");
    file.tensors()
        .map(|tensor| (tensor.name.to_string(), tensor.shape.to_vec(), tensor.to_f32().expect("F32")))
        .collect()
}

fn put_adapter(folder: &Folder, tensors: &[Named]) {
    put_tensors(&folder.path("adapter/adapter_model.safetensors"), tensors);
}

#[test]
fn adapters_that_do_not_fit() {
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    let changed = |change: &dyn Fn(&mut Vec<Named>)| {
        with_adapter(|folder| {
            let mut all = tensors(folder);
            change(&mut all);
            put_adapter(folder, &all);
        })
    };
    let of = |all: &mut Vec<Named>| all.iter().position(|tensor| tensor.0 == name).expect("a tensor of the adapter");
    let swapped = |all: &mut Vec<Named>| {
        let at = of(all);
        all[at].1.reverse();
    };
    changed(&swapped).says(8, &[name, "[32, 4]", "[4, 32]"]);
    let missing = |all: &mut Vec<Named>| {
        let at = of(all);
        all.remove(at);
    };
    changed(&missing).says(8, &[name]);
    let nan = |all: &mut Vec<Named>| {
        let at = of(all);
        all[at].2[1] = f32::NAN;
    };
    changed(&nan).says(8, &[name, "element 1 is NaN"]);
    let extra = |all: &mut Vec<Named>| all.push(("stranger".to_string(), vec![1], vec![0.0]));
    changed(&extra).says(2, &["stranger"]);
}

#[test]
fn configs_of_adapters_that_do_not_fit() {
    let path = "adapter/adapter_config.json";
    let set = |key: &'static str, value: serde_json::Value| {
        with_adapter(|folder| {
            let mut config: serde_json::Value = serde_json::from_str(&folder.text(path)).expect("JSON");
            config[key] = value;
            folder.put(path, config.to_string());
        })
    };
    set("peft_type", "IA3".into()).says(8, &["adapter_config.json", "peft_type", "IA3"]);
    set("use_dora", true.into()).says(8, &["adapter_config.json", "use_dora"]);
    set("use_dora", 1.into()).says(8, &["adapter_config.json", "`use_dora` is 1"]);
    set("init_lora_weights", "pissa".into()).says(8, &["adapter_config.json", "`init_lora_weights` is \"pissa\""]);
    set("alora_invocation_tokens", serde_json::json!([1])).says(8, &["`alora_invocation_tokens` is [1]"]);
    set("modules_to_save", "lm_head".into()).says(8, &["`modules_to_save` is \"lm_head\""]);
    set("rank_pattern", "x".into()).says(8, &["`rank_pattern` is \"x\""]);
    set("of_tomorrow", 2.into()).says(8, &["`of_tomorrow` is 2", "unknown key"]);
    set("r", 8.into()).says(8, &["lora_A", "[4, 32]", "[8, 32]"]);
    set("r", (1u64 << 60).into()).says(2, &["adapter_config.json", "`r`", "up to 64"]);
    set("target_modules", serde_json::json!(["nothing"])).says(2, &["no module of the model is a target"]);
    set("target_modules", serde_json::json!(["q_proj"])).says(2, &["belongs to no module"]);
    with_adapter(|folder| folder.put(path, "{")).says(8, &["adapter_config.json"]);
    with_adapter(|folder| std::fs::remove_file(folder.path(path)).expect("removed")).says(2, &["adapter_config.json"]);
}

#[test]
fn an_adapter_of_another_model() {
    let folder = folder();
    let wide = Shape { hidden: 64, ..Shape::TINY };
    folder.put_model("wide", &config_json(wide), &weights(wide, 2));
    let ran = folder.run(&["eval", "--model", "wide", "--data", "data.jsonl", "--adapter", "adapter"]);
    ran.says(8, &["lora_A", "[4, 32]", "[4, 64]", "made for the base `model`, but --model is wide"]);
    let ran = folder.run(&["eval", "--model", "model", "--data", "data.jsonl", "--adapter", "someone/adapter"]);
    ran.says(2, &["someone/adapter does not exist", "hub"]);
    folder.run(&["eval", "--model", "model", "--data", "none.jsonl"]).says(2, &["none.jsonl does not exist"]);
}

/// A run stands for its final weights, and before it has any for its latest checkpoint.
#[test]
fn an_adapter_by_its_run() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &["learning_rate=0.1", "lr_scheduler_type=constant", "max_steps=6"]);
    let of = |adapter: &str| generate(&folder, &["--adapter", adapter, "--prompt", "1+2="]);
    assert_eq!(of("run"), of("run/final"));
    assert_ne!(of("run"), generate(&folder, &["--prompt", "1+2="]));
    let measured = eval(&folder, &["--adapter", "run"]);
    assert_eq!(measured, eval(&folder, &["--adapter", "run/final"]));
    assert_ne!(measured, eval(&folder, &["--adapter", "run/checkpoint-3"]));
    std::fs::remove_dir_all(folder.path("run/final")).expect("removed");
    assert_eq!(eval(&folder, &["--adapter", "run"]), measured);
    let ran = folder.run(&["generate", "--model", "model", "--adapter", "run", "--prompt", "1", "--max-tokens", "2"]);
    ran.says(0, &["note: run has not finished; using run/checkpoint-6\n"]);
    folder.run(&["generate", "--model", "model", "--adapter", "run/none", "--prompt", "1"]).says(2, &["run/none"]);
    let ran = folder.run(&["generate", "--model", "model", "--adapter", "model", "--prompt", "1"]);
    ran.says(2, &["model holds the weights of a model, not an adapter", "hint: pass it with `--model model`"]);
}

/// Shown as it comes, a text is what it is as a whole.
#[test]
fn a_text_as_it_comes() {
    let folder = folder();
    for more in [&["--temperature", "1.5"][..], &["--adapter", "adapter", "--compare", "--temperature", "2"]] {
        let flags = [&["--prompt", "1+2=", "--prompt", "9", "--max-tokens", "40"], more].concat();
        let expected: String = generate(&folder, &flags)
            .iter()
            .map(|line| match line["base"].as_str() {
                Some(base) => format!("[base]\n{base}\n[adapter]\n{}\n", line["text"].as_str().expect("a text")),
                None => format!("{}\n", line["text"].as_str().expect("a text")),
            })
            .collect();
        let ran = folder.run(&[&["generate", "--model", "model"], &flags[..]].concat());
        assert_eq!((ran.code, ran.out), (0, expected), "{}", ran.err);
    }
}
