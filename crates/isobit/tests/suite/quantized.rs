//! The commands on folders of 4-bit weights, dense and with experts: the same bits by any split,
//! threads and policy; plans without numbers; refusals that name the tensor.

use crate::model_folder::{Folder, Ran, Shape};
use isobit_numerics::cast::f32_to_f16;
use isobit_proof::safetensors::{Dtype, Entry, SafeTensors, write};
use std::collections::BTreeMap;
use std::path::Path;

/// Inputs of a group: every width of the models is made of these.
const GROUP: usize = 8;

/// A tensor by its type, shape and bytes.
type File = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Linear layers as a quantiser writes them: the nearest of 16 steps, zero points of 8, less one in
/// the file. With `shuffled` groups their inputs take turns.
#[expect(clippy::float_arithmetic, reason = "a quantiser rounds")]
fn quantise(file: &mut File, path: &str, shape: &[usize], values: &[f32], shuffled: bool) {
    let &[outputs, inputs] = shape else { panic!("a matrix") };
    let groups = inputs / GROUP;
    let group_of = |input: usize| if shuffled { input % groups } else { input / GROUP };
    let scale = |group: usize, output: usize| {
        let own = (0..inputs).filter(|input| group_of(*input) == group).map(|input| values[output * inputs + input]);
        own.fold(0.0f32, |most, value| most.max(value.abs())) / 7.0 + 1e-3
    };
    let (mut words, mut scales) = (vec![0u32; inputs / 8 * outputs], Vec::new());
    for group in 0..groups {
        for output in 0..outputs {
            let scale = scale(group, output);
            scales.extend(f32_to_f16(scale).to_le_bytes());
            for input in (0..inputs).filter(|input| group_of(*input) == group) {
                let steps = (values[output * inputs + input] / scale).round() as i32 + 8;
                words[input / 8 * outputs + output] |= (steps as u32) << (4 * (input % 8));
            }
        }
    }
    let mut put = |part: &str, dtype, shape: &[usize], bytes: Vec<u8>| {
        file.insert(format!("{path}.{part}"), (dtype, shape.to_vec(), bytes));
    };
    put("qweight", Dtype::I32, &[inputs / 8, outputs], words.iter().flat_map(|word| word.to_le_bytes()).collect());
    put("qzeros", Dtype::I32, &[groups, outputs / 8], [0x77; 4].repeat(groups * outputs / 8));
    put("scales", Dtype::F16, &[groups, outputs], scales);
    put("g_idx", Dtype::I32, &[inputs], (0..inputs).flat_map(|input| (group_of(input) as i32).to_le_bytes()).collect());
}

/// The model of a folder with its linear layers as four bits; tables, norms and routers stay.
fn quantised(folder: Folder, shuffled: bool) -> Folder {
    quantised_in(folder, shuffled, "layers.")
}

/// The same for the linear layers whose names hold `part`.
fn quantised_in(folder: Folder, shuffled: bool, part: &str) -> Folder {
    let path = folder.path("model/model.safetensors");
    let mut file = File::new();
    for tensor in SafeTensors::open(&path).expect("weights").tensors() {
        let module = tensor.name.strip_suffix(".weight").filter(|module| !module.ends_with("mlp.gate"));
        match module.filter(|module| module.contains(part) && tensor.shape.len() == 2) {
            Some(module) => {
                quantise(&mut file, module, tensor.shape, &tensor.to_f32().expect("numbers"), shuffled);
            }
            None => {
                file.insert(tensor.name.to_string(), (tensor.dtype, tensor.shape.to_vec(), tensor.bytes.to_vec()));
            }
        }
    }
    put(&path, &file);
    let mut config: serde_json::Value = serde_json::from_str(&folder.text("model/config.json")).expect("JSON");
    config["quantization_config"] = serde_json::json!({"quant_method": "gptq", "bits": 4, "group_size": GROUP,
        "desc_act": shuffled, "sym": true, "checkpoint_format": "gptq"});
    folder.put("model/config.json", config.to_string());
    folder
}

fn put(path: &Path, file: &File) {
    let entries: Vec<Entry> =
        file.iter().map(|(name, (dtype, shape, bytes))| Entry { name, dtype: *dtype, shape, bytes }).collect();
    write(path, &BTreeMap::new(), &entries).expect("written");
}

/// Trains, plans, evaluates and generates; `lora` are the settings of the adapter.
fn check(folder: &Folder, lora: &[&str]) {
    folder.trained("first", lora);
    let otherwise =
        ["threads=3", "gradient_checkpointing=none", "training.micro_batch_size=8", "gradient_accumulation_steps=1"];
    folder.trained("other", &[lora, &otherwise].concat());
    folder.same("first", "other");
    let run = |arguments: &[&str]| -> Ran {
        let ran = folder.run(arguments);
        assert_eq!(ran.code, 0, "{arguments:?}: {}", ran.err);
        ran
    };
    let overrides: Vec<&str> = lora.iter().flat_map(|setting| ["--set", setting]).collect();
    let plan = run(&[&["plan", "config.toml", "--json"], &overrides[..]].concat()).json();
    let weights = plan[0]["weights_bytes"].as_u64().expect("bytes");
    let length = std::fs::metadata(folder.path("model/model.safetensors")).expect("a file").len();
    // The table is float32 in the file; as the head it is sliced once more.
    let Shape { hidden, vocabulary, .. } = folder.shape;
    let head = 4 * (hidden.next_multiple_of(64) * vocabulary.next_multiple_of(32)) as u64;
    assert!(weights < length + head, "{weights} bytes of weights, {length} in the file");
    let evaluated = |more: &[&str]| {
        let arguments = ["eval", "--model", "model", "--data", "data.jsonl", "--json"];
        run(&[&arguments[..], more].concat()).json()[0]["loss"].as_f64().expect("a loss")
    };
    assert!(evaluated(&["--adapter", "first/final"]) < evaluated(&[]), "the adapter was trained and is read back");
    let prompt = ["generate", "--model", "model", "--adapter", "first/final", "--prompt", "3+4=", "--max-tokens", "3"];
    run(&prompt);
}

#[test]
fn a_dense_base_of_four_bits() {
    for shuffled in [false, true] {
        check(&quantised(Folder::new(Shape::TINY), shuffled), &[]);
    }
}

#[test]
fn experts_of_four_bits() {
    let names = "lora_target_parameters=mlp.experts.gate_up_proj,mlp.experts.down_proj";
    for shuffled in [false, true] {
        let folder = quantised(Folder::of_experts(), shuffled);
        check(&folder, &["lora_r=2", "lora_target_modules=q_proj,v_proj", names]);
    }
}

#[test]
fn what_is_wrong_is_named() {
    let experts = "model.layers.1.mlp.experts.3.up_proj";
    let query = "model.layers.0.self_attn.q_proj";
    let refused = |change: &dyn Fn(&mut File), settings: &[&str], parts: &[&str]| {
        let folder = quantised(Folder::of_experts(), false);
        let path = folder.path("model/model.safetensors");
        let mut file: File = SafeTensors::open(&path)
            .expect("weights")
            .tensors()
            .map(|tensor| (tensor.name.to_string(), (tensor.dtype, tensor.shape.to_vec(), tensor.bytes.to_vec())))
            .collect();
        change(&mut file);
        put(&path, &file);
        let code = if settings.is_empty() { 8 } else { 2 };
        folder.train("out", &[&["lora_target_modules=q_proj,v_proj"], settings].concat()).says(code, parts);
    };
    let bytes = |path: &'static str, part: &'static str, at: usize, with: [u8; 2]| {
        move |file: &mut File| {
            let (_, _, bytes) = file.get_mut(&format!("{path}.{part}")).expect("a part");
            bytes[at..at + 2].copy_from_slice(&with);
        }
    };
    for path in [experts, query] {
        refused(&bytes(path, "g_idx", 4, [9, 0]), &[], &[&format!("{path}.g_idx"), "input 1 is in group 9 of 4"]);
        refused(&bytes(path, "g_idx", 4, [1, 0]), &[], &[&format!("{path}.g_idx"), "group 0 has 7 inputs, not 8"]);
        refused(&bytes(path, "scales", 2, [0, 0x7e]), &[], &[&format!("{path}.scales"), "element 1 is NaN"]);
        refused(&bytes(path, "qzeros", 0, [0x78, 0x77]), &[], &[&format!("{path}.qzeros"), "zero 0 is 9"]);
    }
    let gone = |file: &mut File| drop(file.remove(&format!("{experts}.qweight")));
    refused(&gone, &[], &[&format!("{experts}.qweight"), "missing"]);
    let narrow = |file: &mut File| {
        let (_, shape, _) = file.get_mut(&format!("{experts}.qweight")).expect("a part");
        shape.reverse();
    };
    refused(&narrow, &[], &[&format!("{experts}.qweight"), "[8, 4]", "[4, 8]"]);
    refused(&|_| {}, &["adapter.type=full"], &[".qweight", "only adapters can be trained"]);
}

/// The last block is not quantised and is trained: the others come out as the four bits that they
/// are.
#[test]
fn a_trained_block_over_four_bits_is_saved_with_them() {
    let folder = quantised_in(Folder::new(Shape::TINY), false, "layers.0.");
    let config = folder.text("config.toml");
    let adapter = config.find("[adapter]").expect("a section");
    folder.put("config.toml", format!("{}[adapter]\ntype = \"last_blocks\"\nlast_blocks = 1\n", &config[..adapter]));
    folder.trained("run", &["val_set_size=0", "eval.path=data.jsonl", "eval_steps=12"]);
    let metrics = folder.metrics("run");
    let last: serde_json::Value = serde_json::from_str(metrics.last().expect("lines")).expect("JSON");
    let ran = folder.run(&["eval", "--model", "run/final", "--data", "data.jsonl", "--json"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert_eq!(ran.json()[0]["loss_bits"], last["eval_loss_bits"]);
    let [base, left] = ["model", "run/final"]
        .map(|model| SafeTensors::open(&folder.path(&format!("{model}/model.safetensors"))).expect("weights"));
    assert!(base.names().eq(left.names()));
    for name in base.names().filter(|name| name.contains("layers.0.") && name.ends_with("_proj.qweight")) {
        let [base, left] = [&base, &left].map(|file| file.get(name).expect("a tensor"));
        assert_eq!((base.dtype, base.bytes), (left.dtype, left.bytes), "{name}");
    }
    assert!(folder.text("run/final/config.json").contains("\"quantization_config\": {"));
}
