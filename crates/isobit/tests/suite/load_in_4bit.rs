//! `load_in_4bit`: a base of 32 bits quantised while it is loaded. A run on it is the run on a GPTQ
//! file of the same integers, whatever the threads, the device and the layout of the base; what was
//! trained says so, and is evaluated, continued and merged against the same weights.

use crate::model_folder::{EXPERTS, Folder, Named, Shape, WIDTH, config_json, put_tensors, weights};
use isobit_conformance::named_devices_or_skips;
use isobit_numerics::cast::f16_to_f32;
use isobit_numerics::fma::fma;
use isobit_numerics::int4::{GROUP, quantise_group};
use isobit_proof::safetensors::{Dtype, Entry, SafeTensors, write};
use std::collections::BTreeMap;

const ON: &str = "load_in_4bit=true";
/// Groups of 64 and a last one of 48.
const SHAPE: Shape = Shape { hidden: 64, intermediate: 112, vocabulary: 352, rows: 40 };
/// Whole groups only, as GPTQ files have them.
const WHOLE: Shape = Shape { intermediate: 128, ..SHAPE };

/// Integers, scales as float16 bits, and zero points of a matrix with `inputs` columns.
fn quantised(values: &[f32], inputs: usize) -> (Vec<u8>, Vec<u16>, Vec<u8>) {
    let (mut integers, mut scales, mut zeros) = (vec![0; values.len()], Vec::new(), Vec::new());
    for (row, integers) in values.chunks(inputs).zip(integers.chunks_mut(inputs)) {
        for (group, integers) in row.chunks(GROUP).zip(integers.chunks_mut(GROUP)) {
            let form = quantise_group(group, integers).expect("within range");
            scales.push(form.scale);
            zeros.push(form.zero);
        }
    }
    (integers, scales, zeros)
}

/// What a matrix stands for.
#[expect(clippy::float_arithmetic, reason = "the definition of the format")]
fn stands_for(values: &[f32], inputs: usize) -> Vec<f32> {
    let ((integers, scales, zeros), groups) = (quantised(values, inputs), inputs.div_ceil(GROUP));
    let value = |(at, integer): (usize, &u8)| {
        let group = at / inputs * groups + at % inputs / GROUP;
        f32::from(*integer as i8 - zeros[group] as i8) * f16_to_f32(scales[group])
    };
    integers.iter().enumerate().map(value).collect()
}

fn is_linear(name: &str) -> bool {
    name.ends_with("_proj.weight")
}

/// The model as a quantiser would write the same integers: format 2, whose zero points are as they
/// are.
fn gptq_model(folder: &Folder, name: &str) {
    let mut file: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (name, shape, values) in weights(folder.shape, 1) {
        let Some(path) = name.strip_suffix(".weight").filter(|_| is_linear(&name)) else {
            file.insert(name, (Dtype::F32, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect()));
            continue;
        };
        let &[outputs, inputs] = &shape[..] else { panic!("a matrix") };
        let ((integers, scales, zeros), groups) = (quantised(&values, inputs), inputs / GROUP);
        let (mut words, mut packed) = (vec![0u32; inputs / 8 * outputs], vec![0u32; groups * outputs / 8]);
        for (at, integer) in integers.iter().enumerate() {
            let (output, input) = (at / inputs, at % inputs);
            words[input / 8 * outputs + output] |= u32::from(*integer) << (4 * (input % 8));
        }
        let mut transposed = vec![0u16; scales.len()];
        for (at, (scale, zero)) in scales.iter().zip(&zeros).enumerate() {
            let (output, group) = (at / groups, at % groups);
            transposed[group * outputs + output] = *scale;
            packed[(group * outputs + output) / 8] |= u32::from(*zero) << (4 * (output % 8));
        }
        let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let mut put = |part: &str, dtype, shape: &[usize], bytes| {
            file.insert(format!("{path}.{part}"), (dtype, shape.to_vec(), bytes));
        };
        put("qweight", Dtype::I32, &[inputs / 8, outputs], bytes(&words));
        put("qzeros", Dtype::I32, &[groups, outputs / 8], bytes(&packed));
        let scales = transposed.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        put("scales", Dtype::F16, &[groups, outputs], scales);
    }
    let mut config = config_json(folder.shape);
    config["quantization_config"] = serde_json::json!({"quant_method": "gptq", "bits": 4, "group_size": GROUP,
        "desc_act": false, "sym": false, "checkpoint_format": "gptq_v2"});
    folder.put_model(name, &config, &[]);
    let entries: Vec<Entry> =
        file.iter().map(|(name, (dtype, shape, bytes))| Entry { name, dtype: *dtype, shape, bytes }).collect();
    write(&folder.path(name).join("model.safetensors"), &BTreeMap::new(), &entries).expect("written");
}

fn adapter(folder: &Folder, run: &str) -> Vec<u8> {
    std::fs::read(folder.path(run).join("final/adapter_model.safetensors")).expect("an adapter")
}

/// A model without a layer that the rule takes would train as if the key were not there.
#[test]
fn nothing_to_quantise_is_refused() {
    let folder = Folder::new(Shape::TINY);
    let shape = Shape { hidden: 36, intermediate: 70, ..Shape::TINY };
    let mut config = config_json(shape);
    (config["num_attention_heads"], config["num_key_value_heads"]) = (2.into(), 1.into());
    folder.put_model("model", &config, &weights(shape, 1));
    for command in [["train", "config.toml"], ["plan", "config.toml"]] {
        folder.run(&[&command[..], &["--set", ON]].concat()).says(2, &["no linear layer of this model", "hint: "]);
    }
    assert!(!folder.has("out"));
}

#[test]
fn it_is_the_run_on_a_file_of_the_same_integers() {
    let folder = Folder::new(WHOLE);
    gptq_model(&folder, "gptq");
    folder.trained("at-load", &[ON, "max_steps=4"]);
    folder.trained("stored", &["base_model=gptq", "max_steps=4"]);
    assert_eq!(adapter(&folder, "at-load"), adapter(&folder, "stored"));
    folder.trained("plain", &["max_steps=4"]);
    assert_ne!(adapter(&folder, "at-load"), adapter(&folder, "plain"));
    // Other ways to compute it, and a resumed run.
    folder.trained("other", &[ON, "max_steps=4", "threads=2", "gradient_checkpointing=none"]);
    folder.same("at-load", "other");
    let seven = ["threads=7", "training.micro_batch_size=8", "gradient_accumulation_steps=1"];
    folder.trained("seven", &[&[ON, "max_steps=4"], &seven[..]].concat());
    folder.same("at-load", "seven");
    folder.trained("list", &[ON, "max_steps=4", "device=cpu,cpu"]);
    folder.same("at-load", "list");
    folder.trained("seven", &[ON, "max_steps=4", "--resume-from=checkpoint-3"]);
    folder.same("at-load", "seven");
    // The plan counts what GPTQ's would, and less than for the numbers of the file.
    let planned = |more: &[&str]| {
        let ran = folder.run(&[&["plan", "config.toml", "--json"], more].concat());
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran.json()[0]["weights_bytes"].as_u64().expect("bytes")
    };
    let at_load = planned(&["--set", ON]);
    assert_eq!(at_load, planned(&["--set", "base_model=gptq"]));
    assert!(at_load < planned(&[]));
}

#[test]
fn other_devices_have_the_same_bits() {
    for (name, gpu) in named_devices_or_skips("load_in_4bit::other_devices_have_the_same_bits") {
        drop(gpu);
        let folder = Folder::new(SHAPE);
        folder.trained("one", &[ON, "max_steps=2"]);
        folder.trained("other", &[ON, "max_steps=2", &format!("device={name}")]);
        folder.same("one", "other");
        if name != "cpu" {
            folder.trained("offload", &[ON, "max_steps=2", &format!("device={name}"), "offload=weights"]);
            folder.same("one", "offload");
        }
    }
}

/// Experts one by one, fused and transposed are one model. Their router stays.
#[test]
fn experts_of_every_layout() {
    let folder = Folder::of_experts();
    let path = "model.layers.1.mlp.experts";
    let file: Vec<Named> = SafeTensors::open(&folder.path("model/model.safetensors"))
        .expect("weights")
        .tensors()
        .map(|tensor| (tensor.name.to_string(), tensor.shape.to_vec(), tensor.to_f32().expect("numbers")))
        .collect();
    let of = |expert: usize, module: &str| {
        let name = format!("{path}.{expert}.{module}.weight");
        file.iter().find(|tensor| tensor.0 == name).expect("a matrix").2.clone()
    };
    let hidden = folder.shape.hidden;
    let gate_up = |expert| [of(expert, "gate_proj"), of(expert, "up_proj")].concat();
    let transposed = |matrix: Vec<f32>, columns: usize| -> Vec<f32> {
        (0..columns)
            .flat_map(|column| matrix.iter().copied().skip(column).step_by(columns).collect::<Vec<_>>())
            .collect()
    };
    let others: Vec<Named> = file.iter().filter(|tensor| !tensor.0.contains(".experts.")).cloned().collect();
    let tensor = |name: &str, shape: [usize; 3], values: Vec<f32>| (format!("{path}.{name}"), shape.to_vec(), values);
    let all = 0..EXPERTS;
    let fused = [
        tensor("gate_up_proj", [EXPERTS, 2 * WIDTH, hidden], all.clone().flat_map(gate_up).collect()),
        tensor("down_proj", [EXPERTS, hidden, WIDTH], all.clone().flat_map(|e| of(e, "down_proj")).collect()),
    ];
    let turned = [
        tensor(
            "gate_up_proj",
            [EXPERTS, hidden, 2 * WIDTH],
            all.clone().flat_map(|e| transposed(gate_up(e), hidden)).collect(),
        ),
        tensor(
            "down_proj",
            [EXPERTS, WIDTH, hidden],
            all.flat_map(|e| transposed(of(e, "down_proj"), WIDTH)).collect(),
        ),
    ];
    let config: serde_json::Value = serde_json::from_str(&folder.text("model/config.json")).expect("JSON");
    folder.put_model("fused", &config, &[&others[..], &fused].concat());
    folder.put_model("transposed", &config, &[&others[..], &turned].concat());
    let targets = "lora_target_parameters=mlp.experts.gate_up_proj,mlp.experts.down_proj";
    let settings = [ON, "max_steps=3", "lora_r=2", "lora_target_modules=q_proj,v_proj", targets];
    let merged = |base: &str| {
        folder.trained(&format!("on-{base}"), &[&settings[..], &[&format!("base_model={base}")]].concat());
        let output = format!("merged-{base}");
        let ran = folder.run(&["export", "merge", &format!("on-{base}"), "--base", base, "-o", &output]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        SafeTensors::open(&folder.path(&output).join("model.safetensors")).expect("merged")
    };
    let [single, fused, turned] = ["model", "fused", "transposed"].map(merged);
    assert_eq!(adapter(&folder, "on-model"), adapter(&folder, "on-fused"));
    assert_eq!(adapter(&folder, "on-model"), adapter(&folder, "on-transposed"));
    let values = |file: &SafeTensors, name: &str| file.get(name).expect("a tensor").to_f32().expect("numbers");
    let (down, down_turned) =
        (values(&fused, &format!("{path}.down_proj")), values(&turned, &format!("{path}.down_proj")));
    for expert in 0..EXPERTS {
        let one = values(&single, &format!("{path}.{expert}.down_proj.weight"));
        let range = expert * hidden * WIDTH..(expert + 1) * hidden * WIDTH;
        assert_eq!(one, down[range.clone()], "{expert}");
        assert_eq!(transposed(one, WIDTH), down_turned[range], "{expert}");
    }
    let router = "model.layers.1.mlp.gate.weight";
    let stored = &file.iter().find(|tensor| tensor.0 == router).expect("a router").2;
    assert_eq!(&values(&single, router), stored);
}

/// What it was trained on is in `final/`, and in the run's identity; other runs are what they were.
#[test]
fn a_run_says_that_it_did_and_others_do_not() {
    let folder = Folder::new(SHAPE);
    let settings = ["max_steps=2", "save_steps=2", "val_set_size=0", "eval.path=data.jsonl", "eval_steps=2"];
    let train = |run: &str, more: &[&str]| folder.trained(run, &[&settings[..], more].concat());
    train("on", &[ON]);
    train("plain", &[]);
    train("off", &["load_in_4bit=false"]);
    folder.same("plain", "off");
    let said = ["checkpoint-2/state.json", "checkpoint-2/MANIFEST.json", "final/MANIFEST.json"];
    for file in said {
        assert!(
            folder.text(&format!("on/{file}")).contains("\"load_in_4bit\": \"int4-1\"")
                || folder.text(&format!("on/{file}")).contains("\"load_in_4bit\":\"int4-1\""),
            "{file}"
        );
        assert!(!folder.text(&format!("plain/{file}")).contains("4bit"), "{file}");
    }
    assert!(folder.text("on/config.resolved.toml").contains("load_in_4bit = true"));
    assert!(!folder.text("off/config.resolved.toml").contains("4bit"));
    folder.train("on", &[&settings[..], &["--resume"]].concat()).says(2, &["rule of load_in_4bit"]);
    folder.train("plain", &[&settings[..], &["--resume", ON]].concat()).says(2, &["load_in_4bit"]);
    let ran = folder.run(&["verify", "on"]);
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);

    // eval quantises as the run did, also from its config; or as it is told.
    let loss = |more: &[&str]| {
        let arguments = ["eval", "--model", "model", "--data", "data.jsonl", "--json"];
        let ran = folder.run(&[&arguments[..], more].concat());
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran.json()[0]["loss_bits"].as_str().expect("bits").to_string()
    };
    let metrics = folder.metrics("on");
    let last: serde_json::Value = serde_json::from_str(metrics.last().expect("lines")).expect("JSON");
    let trained = loss(&["--adapter", "on"]);
    assert_eq!(last["eval_loss_bits"].as_str(), Some(&*trained));
    assert_eq!(loss(&["--adapter", "on/checkpoint-2"]), trained);
    assert_ne!(loss(&["--adapter", "on", "--load-in-4bit", "false"]), trained);
    assert_ne!(loss(&["--load-in-4bit"]), loss(&[]));
    let prompt =
        ["generate", "--model", "model", "--adapter", "on", "--prompt", "3+4=", "--max-tokens", "3", "--compare"];
    assert_eq!(folder.run(&prompt).code, 0);

    // So does a run that goes on from it.
    let from = ["adapter.resume_from=on", "warmup_ratio=0.0"];
    train("next", &from);
    assert!(folder.text("next/final/MANIFEST.json").contains("int4-1"));
    train("told", &[&from[..], &[ON]].concat());
    folder.same("next", "told");
    let ran = folder.train("otherwise", &[&settings[..], &from, &["load_in_4bit=false"]].concat());
    ran.says(0, &["warning: `adapter.resume_from`", "load_in_4bit"]);
    assert!(!folder.text("otherwise/final/MANIFEST.json").contains("4bit"));
    assert!(folder.text("otherwise/config.resolved.toml").contains("load_in_4bit = false"));
    assert_ne!(adapter(&folder, "next"), adapter(&folder, "otherwise"));

    // A rule of the future is not guessed.
    let text = folder.text("on/final/MANIFEST.json").replace("int4-1", "int4-9");
    folder.put("on/final/MANIFEST.json", text);
    let ran = folder.run(&["eval", "--model", "model", "--adapter", "on", "--data", "data.jsonl"]);
    ran.says(8, &["its own digest does not match"]);
}

/// `W + alpha·B A` for the weights trained against, or for those of the file.
#[test]
fn a_merge_onto_either() {
    let folder = Folder::new(SHAPE);
    folder.trained("run", &[ON, "max_steps=3", "lora_target_modules=q_proj,down_proj"]);
    let merged = |onto: &str| {
        let ran = folder.run(&["export", "merge", "run", "-o", onto, "--onto", onto]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        SafeTensors::open(&folder.path(onto).join("model.safetensors")).expect("merged")
    };
    let files = [merged("trained"), merged("original")];
    let ran = folder.run(&["export", "merge", "run", "-o", "default"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let bytes = |name: &str| std::fs::read(folder.path(name).join("model.safetensors")).expect("read");
    assert_eq!(bytes("default"), bytes("trained"));
    let factors = SafeTensors::open(&folder.path("run/final/adapter_model.safetensors")).expect("an adapter");
    for (name, shape, stored) in weights(folder.shape, 1) {
        let bases =
            if is_linear(&name) { [stands_for(&stored, shape[1]), stored.clone()] } else { [stored.clone(), stored] };
        for (file, base) in files.iter().zip(bases) {
            let path = name.strip_suffix(".weight").unwrap_or(&name);
            let factor = |factor: &str| factors.get(&format!("base_model.model.{path}.{factor}.weight"));
            let wanted = match (factor("lora_A"), factor("lora_B")) {
                (Ok(a), Ok(b)) => {
                    let (a, b, rank) = (a.to_f32().expect("A"), b.to_f32().expect("B"), 4);
                    let one = |(at, w): (usize, &f32)| {
                        let (o, i) = (at / shape[1], at % shape[1]);
                        let sum = (0..rank).fold(0.0, |sum, j| fma(b[o * rank + j], a[j * shape[1] + i], sum));
                        fma(2.0, sum, *w)
                    };
                    base.iter().enumerate().map(one).collect()
                }
                _ => base,
            };
            let found = file.get(&name).expect("a tensor").to_f32().expect("numbers");
            let [found, wanted] = [found, wanted].map(|values| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
            assert_eq!(found, wanted, "{name}");
        }
    }
    let gguf = |onto: &str| {
        let output = format!("{onto}.gguf");
        let ran = folder.run(&["export", "gguf", "run", "--merge", "-o", &output, "--onto", onto, "--pre", "gpt-2"]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        std::fs::read(folder.path(&output)).expect("read")
    };
    assert_ne!(gguf("trained"), gguf("original"));
}

#[test]
fn what_cannot_be_loaded_so_is_refused() {
    let folder = Folder::new(WHOLE);
    let config = folder.text("config.toml");
    let adapter = config.find("[adapter]").expect("a section");
    for kind in ["full", "last_blocks"] {
        folder.put("config.toml", format!("{}[adapter]\ntype = \"{kind}\"\n", &config[..adapter]));
        folder.train("out", &[ON]).says(2, &["load_in_4bit", &format!("type = \"{kind}\" trains them"), "lora"]);
        assert!(!folder.has("out"));
    }
    folder.put("config.toml", &config);
    gptq_model(&folder, "gptq");
    folder.train("out", &[ON, "base_model=gptq"]).says(2, &["stored in 4 bits already", "leave the setting out"]);
    let plan = folder.run(&["plan", "config.toml", "--set", ON, "--set", "base_model=gptq"]);
    plan.says(2, &["stored in 4 bits already"]);
    let mut tensors = weights(folder.shape, 1);
    let at = tensors.iter().position(|tensor| is_linear(&tensor.0)).expect("a matrix");
    tensors[at].2[70] = 3e6;
    let path = folder.path("model/model.safetensors");
    put_tensors(&path, &tensors);
    folder.train("out", &[ON]).says(8, &[&tensors[at].0, "3000000", "load_in_4bit"]);
    tensors[at].2[70] = f32::NAN;
    put_tensors(&path, &tensors);
    folder.train("out", &[ON]).says(8, &[&tensors[at].0, "element 70 is NaN"]);
}

/// The rule is part of the identity: a record of the run and one of the same run without it differ
/// by name.
#[test]
fn the_rule_is_named_where_records_differ() {
    let folder = Folder::new(SHAPE);
    let steps = ["max_steps=1", "save_steps=1"];
    folder.trained("on", &[&steps[..], &[ON]].concat());
    folder.trained("off", &steps);
    let found = folder.run(&["replay", "on", "--steps", "1", "--set", "load_in_4bit=false"]);
    let part =
        "the rule by which the base is quantised while it is loaded (`load_in_4bit`) is none, the run's was int4-1";
    assert!(found.code == 1 && found.out.contains(part), "{}{}", found.out, found.err);
    let found = folder.run(&["diff", "on/receipt.json", "off/receipt.json"]);
    assert!(found.code == 1 && found.out.contains("load_in_4bit: int4-1 against none"), "{}", found.out);
}
