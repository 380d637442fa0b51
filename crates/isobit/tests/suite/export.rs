//! `isobit export merge`: every number of the result against plain loops over the adapter's
//! factors, and against PEFT's own merge; layouts, formats, refusals.

use crate::model_folder::{Folder, Named, Ran, Shape, config_json, names, put_tensors, weights};
use isobit_numerics::cast::{bf16_to_f32, f32_to_bf16};
use isobit_numerics::fma::fma;
use isobit_proof::safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<f32>)>;

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures")).join(name)
}

fn tensors(path: &Path) -> Tensors {
    let file = SafeTensors::open(path).expect("tensors");
    let of = |tensor: isobit_proof::safetensors::Tensor<'_>| {
        let values = tensor.to_f32().unwrap_or_default();
        (tensor.name.to_string(), (tensor.dtype, tensor.shape.to_vec(), values))
    };
    file.tensors().map(of).collect()
}

#[track_caller]
fn merged(folder: &Folder, adapter: &Path, base: &Path, output: &str, more: &[&str]) -> Tensors {
    let ran = merge(folder, adapter, base, output, more);
    assert_eq!(ran.code, 0, "{}", ran.err);
    tensors(&folder.path(output).join("model.safetensors"))
}

fn merge(folder: &Folder, adapter: &Path, base: &Path, output: &str, more: &[&str]) -> Ran {
    let [adapter, base] = [adapter, base].map(|path| path.to_str().expect("UTF-8"));
    folder.run(&[&["export", "merge", adapter, "--base", base, "-o", output, "--json"], more].concat())
}

/// `W + alpha·B A` by the contract, for `W[o, i]`.
fn expected(w: &[f32], a: &[f32], b: &[f32], rank: usize, alpha: f32) -> Vec<f32> {
    let (outputs, inputs) = (b.len() / rank, a.len() / rank);
    let one = |at: usize| {
        let (o, i) = (at / inputs, at % inputs);
        let sum = (0..rank).fold(0.0, |sum, j| fma(b[o * rank + j], a[j * inputs + i], sum));
        fma(alpha, sum, w[at])
    };
    (0..outputs * inputs).map(one).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A model, an adapter and a merge that PEFT made: equal to the contract on bits, and to PEFT
/// within the bound that the contract derives.
#[test]
fn a_merge_is_that_of_peft() {
    let folder = Folder::new(Shape::TINY);
    let (adapter, base) = (fixture("qwen2-base-lora/adapter"), fixture("qwen2-base"));
    let found = merged(&folder, &adapter, &base, "out", &[]);
    let stored = tensors(&base.join("model.safetensors"));
    let factors = tensors(&adapter.join("adapter_model.safetensors"));
    let theirs = tensors(&fixture("qwen2-base-lora/merged.safetensors"));
    assert!(found.keys().eq(stored.keys()));
    let (rank, alpha) = (4, 2.0);
    for (name, (dtype, shape, values)) in &found {
        assert_eq!((*dtype, shape), (stored[name].0, &stored[name].1), "{name}");
        let Some((_, _, theirs)) = theirs.get(name) else {
            assert_eq!(bits(values), bits(&stored[name].2), "{name}");
            continue;
        };
        let factor = |factor: &str| {
            let module = name.strip_suffix(".weight").expect("a module");
            &factors[&format!("base_model.model.{module}.{factor}.weight")].2
        };
        let (a, b) = (factor("lora_A"), factor("lora_B"));
        assert_eq!(bits(values), bits(&expected(&stored[name].2, a, b, rank, alpha)), "{name}");
        let positive = |values: &[f32]| values.iter().map(|value| value.abs()).collect::<Vec<_>>();
        let sums = expected(&vec![0.0; values.len()], &positive(a), &positive(b), rank, alpha);
        for ((ours, theirs), sum) in values.iter().zip(theirs).zip(sums) {
            let bound = (ours.abs() + (rank as f32 + 2.0) * sum) / 8_388_608.0;
            assert!((ours - theirs).abs() <= bound, "{name}: {ours} and {theirs}");
        }
    }
    assert_eq!(theirs.len(), 14);
}

/// Experts one by one, fused and transposed: the same model, so the same merged numbers.
#[test]
fn experts_of_every_layout() {
    let folder = Folder::new(Shape::TINY);
    let adapter = fixture("qwen3moe-base-experts/adapter");
    let factors = tensors(&adapter.join("adapter_model.safetensors"));
    let of = |base: &str, output: &str| {
        let base = fixture(base);
        (merged(&folder, &adapter, &base, output, &[]), tensors(&base.join("model.safetensors")))
    };
    let ((single, stored), (fused, _), (transposed, _)) = (
        of("qwen3moe-base", "single"),
        of("qwen3moe-base/fused", "fused"),
        of("qwen3moe-base/transposed", "transposed"),
    );
    let (experts, width, hidden, rank, alpha) = (8, 4, 16, 2, 2.0);
    for (layer, (part, outputs, inputs, inner)) in (0..2).flat_map(|layer| {
        [("gate_up_proj", 2 * width, hidden, ".base_layer"), ("down_proj", hidden, width, "")]
            .map(move |part| (layer, part))
    }) {
        let path = format!("model.layers.{layer}.mlp.experts");
        let factor = |factor: &str| &factors[&format!("base_model.model.{path}{inner}.{factor}.weight")].2;
        for expert in 0..experts {
            let modules: &[&str] = if part == "down_proj" { &["down_proj"] } else { &["gate_proj", "up_proj"] };
            let all = |file: &Tensors| -> Vec<f32> {
                modules.iter().flat_map(|module| file[&format!("{path}.{expert}.{module}.weight")].2.clone()).collect()
            };
            let a = &factor("lora_A")[expert * rank * inputs..(expert + 1) * rank * inputs];
            // PEFT's column `j·experts + e` is column `j` of expert `e`.
            let b: Vec<f32> = (0..outputs * rank)
                .map(|at| factor("lora_B")[at / rank * rank * experts + at % rank * experts + expert])
                .collect();
            let wanted = expected(&all(&stored), a, &b, rank, alpha);
            assert_eq!(bits(&all(&single)), bits(&wanted), "{path} {expert}");
            let size = outputs * inputs;
            let name = format!("{path}.{part}");
            assert_eq!(bits(&fused[&name].2[expert * size..(expert + 1) * size]), bits(&wanted), "{name}");
            let across = &transposed[&name].2[expert * size..(expert + 1) * size];
            let back: Vec<f32> = (0..size).map(|at| across[at % inputs * outputs + at / inputs]).collect();
            assert_eq!(bits(&back), bits(&wanted), "{name}");
        }
    }
}

/// A trained run, with any number of threads: one result, and its evaluation is that of the
/// adapter.
#[test]
fn a_run_is_merged_into_its_base() {
    let folder = Folder::new(Shape::TINY);
    folder.put("model/generation_config.json", "{\"eos_token_id\": 1}");
    folder.put("model/chat_template.jinja", "{{ messages }}");
    folder.trained("run", &[]);
    let file = |output: &str| std::fs::read(folder.path(output).join("model.safetensors")).expect("read");
    for threads in ["1", "2", "7"] {
        let output = format!("m{threads}");
        let ran = folder.run(&["export", "merge", "run", "-o", &output, "--threads", threads, "--quiet"]);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""));
        assert_eq!(file(&output), file("m1"));
    }
    let expected = [
        "MANIFEST.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names(&folder.path("m1")), expected);
    let loss = |arguments: &[&str]| {
        let ran = folder.run(&[&["eval", "--data", "data.jsonl", "--profile", "x3", "--json"], arguments].concat());
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran.json()[0]["loss"].as_f64().expect("a loss")
    };
    let (apart, together, base) =
        (loss(&["--model", "model", "--adapter", "run"]), loss(&["--model", "m1"]), loss(&["--model", "model"]));
    // Both are the loss of float32 arithmetic (x3) over the same real numbers: a few hundred
    // roundings of 2⁻²⁴ apart.
    assert!((apart - together).abs() < apart * 256.0 / 16_777_216.0, "{apart} {together}");
    assert!((apart - base).abs() > 0.01, "{apart} {base}");
    // Rounded by choice, once.
    let ran = folder.run(&["export", "merge", "run", "-o", "narrow", "--dtype", "bf16", "--json"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let (wide, narrow) =
        (tensors(&folder.path("m1/model.safetensors")), tensors(&folder.path("narrow/model.safetensors")));
    for (name, (dtype, _, values)) in &narrow {
        let rounded: Vec<f32> = wide[name].2.iter().map(|value| bf16_to_f32(f32_to_bf16(*value))).collect();
        assert_eq!((*dtype, bits(values)), (Dtype::Bf16, bits(&rounded)), "{name}");
    }
    assert!(folder.text("narrow/config.json").contains("\"torch_dtype\": \"bfloat16\""));
    let stored = tensors(&folder.path("model/model.safetensors"));
    let share = ran.json()[0]["kept"].as_f64().expect("a share");
    let wanted = kept(&stored, &wide, &narrow);
    // Sums of a few thousand products in float64, in another order.
    assert!((share - wanted).abs() <= 1e-9, "{share} {wanted}");
    assert_eq!(ran.err.contains("warning: rounding leaves"), share < 0.9, "{share}: {}", ran.err);
    let ran = folder.run(&["export", "merge", "run", "-o", "wide", "--dtype", "f32"]);
    assert!(ran.code == 0 && !format!("{}{}", ran.out, ran.err).contains("rounding"), "{}{}", ran.out, ran.err);
}

/// The share of what was added that rounding leaves, over the tensors that changed.
#[expect(clippy::float_arithmetic, reason = "the figure by its definition")]
fn kept(stored: &Tensors, wide: &Tensors, narrow: &Tensors) -> f64 {
    let (mut rounded, mut exact) = (0.0, 0.0);
    for (name, (_, _, values)) in wide.iter().filter(|(name, (_, _, values))| bits(values) != bits(&stored[*name].2)) {
        let wide = |at: usize| f64::from(values[at]) - f64::from(stored[name].2[at]);
        let narrow = |at: usize| f64::from(narrow[name].2[at]) - f64::from(stored[name].2[at]);
        rounded += (0..values.len()).map(|at| narrow(at) * wide(at)).sum::<f64>();
        exact += (0..values.len()).map(|at| wide(at) * wide(at)).sum::<f64>();
    }
    rounded / exact
}

/// A weight that bfloat16 holds, and a change below half a step of it: nothing is left.
#[test]
fn what_rounding_leaves_of_an_adapter_is_told() {
    let folder = Folder::new(Shape::TINY);
    let Shape { hidden, .. } = folder.shape;
    let mut base = weights(folder.shape, 1);
    for (_, _, values) in &mut base {
        for value in values.iter_mut() {
            *value = bf16_to_f32(f32_to_bf16(*value + value.signum()));
        }
    }
    folder.put_model("model", &config_json(folder.shape), &base);
    let path = "base_model.model.model.layers.0.self_attn.q_proj";
    let of = |b: f32| -> Vec<Named> {
        let a = (format!("{path}.lora_A.weight"), vec![2, hidden], vec![1.0; 2 * hidden]);
        vec![a, (format!("{path}.lora_B.weight"), vec![hidden, 2], vec![b; 2 * hidden])]
    };
    put_adapter(&folder, "small", &["layers.0.self_attn.q_proj"], &of(1e-6));
    put_adapter(&folder, "large", &["layers.0.self_attn.q_proj"], &of(8.0));
    let run = |adapter: &str| {
        folder.run(&["export", "merge", adapter, "--base", "model", "-o", &format!("of-{adapter}"), "--dtype", "bf16"])
    };
    let small = run("small");
    small.says(0, &["warning: rounding leaves 0.0 % of what the adapter adds", "--dtype f32"]);
    assert!(small.out.contains("rounding leaves 0.0 %"), "{}", small.out);
    let large = run("large");
    assert!(large.code == 0 && !large.err.contains("warning"), "{}", large.err);
}

/// `adapter_config.json` has a name without its folder; the run knows the folder.
#[test]
fn the_base_of_a_run_is_where_it_was() {
    let folder = Folder::new(Shape::TINY);
    let cached = "hub/models--some--model/snapshots/abc";
    for base in ["models/small", cached] {
        std::fs::create_dir_all(folder.path(base)).expect("folders");
        for name in names(&folder.path("model")) {
            std::fs::copy(folder.path("model").join(&name), folder.path(base).join(&name)).expect("copied");
        }
    }
    folder.trained("run", &["base_model=models/small", "max_steps=1"]);
    folder.trained("of-hub", &["base_model=hub/models--some--model", "max_steps=1"]);
    for (run, name) in [("run", "small"), ("of-hub", "some/model")] {
        let text = folder.text(&format!("{run}/final/adapter_config.json"));
        assert!(text.contains(&format!("\"base_model_name_or_path\": \"{name}\"")), "{text}");
        for (source, output) in [(run.to_string(), "a"), (format!("{run}/final"), "b")] {
            folder.run(&["export", "merge", &source, "-o", &format!("{run}-{output}"), "-q"]).says(0, &[]);
            // Missing folders are made, as for a merged model.
            folder.run(&["export", "gguf", &source, "-o", &format!("new/{run}/{output}.gguf")]).says(0, &[]);
        }
    }
    let model = folder.run(&["export", "merge", "model", "-o", "c"]);
    model.says(2, &["holds the weights of a model", "hint: only an adapter is merged"]);
    std::fs::rename(folder.path("models"), folder.path("moved")).expect("renamed");
    folder.run(&["export", "merge", "run", "-o", "c"]).says(2, &["the base `small`, which is not a folder here"]);
}

/// A manifest lists all files of its folder: one more would be a finding of `verify`.
#[test]
fn nothing_is_written_into_a_complete_folder() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &["max_steps=1", "save_steps=1"]);
    for (output, part) in [
        ("run/final/a", "whose files are listed"),
        ("run/final/b/c", "whose files are listed"),
        ("run/checkpoint-1/d", "whose files are listed"),
        ("run/f", "would be written into the run"),
        ("model/e", "the folder of the base model"),
    ] {
        for command in [["export", "merge"], ["export", "gguf"]] {
            folder.run(&[&command[..], &["run", "-o", output]].concat()).says(2, &[part, "hint: "]);
        }
        if output.contains('-') || output.contains("final") {
            folder.run(&["report", "run", "-o", output]).says(2, &[part, "hint: "]);
        }
    }
    folder.run(&["verify", "run", "--model", "model"]).says(0, &[]);
    assert!(!names(&folder.path("model")).contains(&"e".to_string()));
}

/// An adapter names its base without the folders above it; the run that it lies in knows them.
#[test]
fn the_base_of_a_run_is_found_where_the_run_found_it() {
    let folder = Folder::new(Shape::TINY);
    std::fs::create_dir(folder.path("models")).expect("a folder");
    std::fs::rename(folder.path("model"), folder.path("models/tiny")).expect("moved");
    // Another folder of that name.
    std::fs::create_dir(folder.path("tiny")).expect("a folder");
    folder.trained("run", &["max_steps=1", "save_steps=1", "base_model=models/tiny"]);
    for (source, output) in [("run", "a"), ("run/final", "b"), ("run/checkpoint-1", "c")] {
        let ran = folder.run(&["export", "merge", source, "-o", output, "--quiet"]);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{source}");
    }
    assert_eq!(folder.run(&["export", "gguf", "run", "--merge", "-o", "a.gguf"]).code, 0);
    std::fs::rename(folder.path("models"), folder.path("elsewhere")).expect("moved");
    std::fs::remove_dir(folder.path("tiny")).expect("removed");
    folder.run(&["export", "merge", "run", "-o", "d"]).says(2, &["names the base `tiny`", "--base"]);
}

/// An adapter folder with these tensors and targets.
fn put_adapter(folder: &Folder, name: &str, targets: &[&str], all: &[Named]) {
    std::fs::create_dir_all(folder.path(name)).expect("folder");
    let config = serde_json::json!({"peft_type": "LORA", "r": 2, "lora_alpha": 1, "target_modules": targets,
        "base_model_name_or_path": "model", "task_type": "CAUSAL_LM"});
    folder.put(&format!("{name}/adapter_config.json"), config.to_string());
    put_tensors(&folder.path(name).join("adapter_model.safetensors"), all);
}

#[expect(clippy::float_arithmetic, reason = "numbers for a test")]
fn ramp(length: usize, seed: usize) -> Vec<f32> {
    (0..length).map(|at| ((at * 37 + seed * 11) % 64) as f32 / 256.0).collect()
}

/// A head tied to its table, and an adapter on one of the two: the other keeps its numbers.
#[test]
fn an_adapter_on_one_side_of_a_tied_table_unties_it() {
    let folder = Folder::new(Shape::TINY);
    let Shape { hidden, vocabulary, .. } = folder.shape;
    let tensor = |name: &str, shape: [usize; 2]| -> Named {
        (format!("base_model.model.{name}"), shape.to_vec(), ramp(shape[0] * shape[1], name.len()))
    };
    let head = [tensor("lm_head.lora_A.weight", [2, hidden]), tensor("lm_head.lora_B.weight", [vocabulary, 2])];
    let table = [
        tensor("model.embed_tokens.lora_embedding_A", [2, vocabulary]),
        tensor("model.embed_tokens.lora_embedding_B", [hidden, 2]),
    ];
    put_adapter(&folder, "head", &["lm_head"], &head);
    put_adapter(&folder, "table", &["embed_tokens"], &table);
    let base = weights(folder.shape, 1)[0].2.clone();
    let (model, path) = (folder.path("model"), |name: &str| folder.path(name));
    let found = merged(&folder, &path("head"), &model, "a", &[]);
    assert_eq!(bits(&found["model.embed_tokens.weight"].2), bits(&base));
    assert_eq!(bits(&found["lm_head.weight"].2), bits(&expected(&base, &head[0].2, &head[1].2, 2, 0.5)));
    let found = merged(&folder, &path("table"), &model, "b", &[]);
    assert_eq!(bits(&found["lm_head.weight"].2), bits(&base));
    // As `W[c, v]`, which the table is transposed.
    let across: Vec<f32> = (0..base.len()).map(|at| base[at % vocabulary * hidden + at / vocabulary]).collect();
    let wanted = expected(&across, &table[0].2, &table[1].2, 2, 0.5);
    let wanted: Vec<f32> = (0..base.len()).map(|at| wanted[at % hidden * vocabulary + at / hidden]).collect();
    assert_eq!(bits(&found["model.embed_tokens.weight"].2), bits(&wanted));
    for output in ["a", "b"] {
        let config: serde_json::Value =
            serde_json::from_str(&folder.text(&format!("{output}/config.json"))).expect("JSON");
        assert_eq!(config["tie_word_embeddings"], false);
        let ran = folder.run(&["eval", "--model", output, "--data", "data.jsonl"]);
        assert_eq!(ran.code, 0, "{}", ran.err);
    }
}

/// Modules that PEFT saved whole take the place of the base's, each on its own side.
#[test]
fn whole_modules_replace_those_of_the_base() {
    let folder = Folder::new(Shape::TINY);
    let Shape { hidden, vocabulary, .. } = folder.shape;
    let tensor = |name: &str, shape: [usize; 2]| -> Named {
        (format!("base_model.model.{name}"), shape.to_vec(), ramp(shape[0] * shape[1], name.len()))
    };
    let q = "model.layers.0.self_attn.q_proj";
    let all = [
        tensor("lm_head.weight", [vocabulary, hidden]),
        tensor(&format!("{q}.lora_A.weight"), [2, hidden]),
        tensor(&format!("{q}.lora_B.weight"), [hidden, 2]),
    ];
    put_adapter(&folder, "adapter", &["layers.0.self_attn.q_proj"], &all);
    let mut config: serde_json::Value =
        serde_json::from_str(&folder.text("adapter/adapter_config.json")).expect("JSON");
    config["modules_to_save"] = serde_json::json!(["lm_head"]);
    folder.put("adapter/adapter_config.json", config.to_string());
    let found = merged(&folder, &folder.path("adapter"), &folder.path("model"), "out", &[]);
    assert_eq!(bits(&found["lm_head.weight"].2), bits(&all[0].2));
    let base = weights(folder.shape, 1);
    assert_eq!(bits(&found["model.embed_tokens.weight"].2), bits(&base[0].2));
    let stored = &base.iter().find(|tensor| tensor.0 == format!("{q}.weight")).expect("a module").2;
    let wanted = expected(stored, &all[1].2, &all[2].2, 2, 0.5);
    assert_eq!(bits(&found[&format!("{q}.weight")].2), bits(&wanted));
    assert!(folder.text("out/config.json").contains("\"tie_word_embeddings\": false"));
    // Beside its base it is read too.
    let ran = folder.run(&["eval", "--model", "model", "--adapter", "adapter", "--data", "data.jsonl"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
}

/// Quantised bases are expanded to bfloat16: no quantisation is left in tensors or config.
#[test]
fn quantised_bases_are_expanded() {
    let folder = Folder::new(Shape::TINY);
    for base in ["awq", "awq-moe", "nf4", "gptq-v1", "gptq-v2-order", "gptq-moe", "deepseek-fp8", "gptoss-mxfp4"] {
        let found = merged(&folder, &fixture(base).join("adapter"), &fixture(base), base, &[]);
        for (name, (dtype, ..)) in &found {
            let keeps = *dtype == Dtype::F32 && base == "deepseek-fp8";
            assert!(*dtype == Dtype::Bf16 || keeps, "{name} {dtype}");
            assert!(!["qweight", "blocks", "scales", "scale_inv"].iter().any(|part| name.ends_with(part)), "{name}");
        }
        let config = folder.text(&format!("{base}/config.json"));
        assert!(!config.contains("quantization_config") && config.contains("\"bfloat16\""), "{config}");
    }
}

#[test]
fn what_cannot_be_merged_is_refused_and_nothing_is_left() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &["max_steps=1"]);
    let before = names(&folder.path(""));
    let refused = |arguments: &[&str], code: i32, parts: &[&str]| {
        let ran = folder.run(&[&["export", "merge"], arguments].concat());
        ran.says(code, parts);
        assert_eq!(names(&folder.path("")), before, "{arguments:?}");
    };
    refused(&["run", "-o", "data.jsonl"], 2, &["data.jsonl already exists", "-o"]);
    refused(&["run", "-o", "model"], 2, &["model already exists"]);
    refused(&["run", "-o", "out", "--dtype", "int4"], 2, &["no longer a 4-bit number"]);
    refused(&["run", "-o", "out", "--dtype", "f64"], 2, &["bf16, f16 or f32"]);
    refused(&["run", "-o", "out", "--base", "nowhere"], 2, &["nowhere"]);
    refused(&["model", "-o", "out"], 2, &["holds the weights of a model, not an adapter"]);
    let wide = Shape { hidden: 64, ..folder.shape };
    folder.put_model("model", &config_json(wide), &weights(wide, 1));
    refused(
        &["run", "-o", "out"],
        8,
        &["lora_A", "the adapter names model as its base, but was made for another model"],
    );
    let mut all = weights(folder.shape, 1);
    all[1].2[0] = 1e6;
    folder.put_model("model", &config_json(folder.shape), &all);
    refused(&["run", "-o", "out", "--dtype", "f16"], 5, &["does not fit in float16", "--dtype f32"]);
    // An adapter with a tensor too many.
    let extra = [("base_model.model.lm_head.lora_A.weight".to_string(), vec![2, 2], vec![0.0; 4])];
    put_adapter(&folder, "run/final", &["q_proj"], &extra);
    for file in ["MANIFEST.json", "receipt.json"] {
        std::fs::remove_file(folder.path("run/final").join(file)).expect("removed");
    }
    refused(&["run", "-o", "out"], 2, &["belongs to no module that the config targets"]);
}
