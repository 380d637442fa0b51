//! `isobit export gguf`, read back by a small reader of the format: names, shapes, numbers in every
//! type, the vocabulary, adapters, refusals.

use crate::model_folder::{EXPERTS, Folder, Shape, WIDTH, config_json, names, put_tensors, weights};
use isobit_numerics::cast::{f32_to_bf16, f32_to_f16};
use isobit_numerics::gguf_blocks::{q4_0, q8_0};
use isobit_proof::safetensors::SafeTensors;
use std::collections::BTreeMap;

/// A file: its keys, as text, and its tensors.
struct Gguf {
    keys: BTreeMap<String, String>,
    tensors: BTreeMap<String, Tensor>,
}

struct Tensor {
    /// Innermost first, as in the file.
    sizes: Vec<u64>,
    kind: u32,
    bytes: Vec<u8>,
}

/// Takes numbers off the front of a file.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (front, rest) = self.0.split_at(count);
        self.0 = rest;
        front
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("four bytes"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().expect("eight bytes"))
    }

    fn text(&mut self) -> String {
        let length = self.u64() as usize;
        String::from_utf8(self.take(length).to_vec()).expect("UTF-8")
    }

    fn value(&mut self, kind: u32) -> String {
        match kind {
            4 | 5 => self.u32().to_string(),
            6 => f32::from_bits(self.u32()).to_string(),
            7 => self.take(1)[0].to_string(),
            8 => self.text(),
            9 => {
                let (kind, count) = (self.u32(), self.u64());
                (0..count).map(|_| self.value(kind)).collect::<Vec<_>>().join("|")
            }
            other => panic!("type {other}"),
        }
    }
}

fn read(folder: &Folder, file: &str) -> Gguf {
    let bytes = std::fs::read(folder.path(file)).expect("read");
    let mut reader = Reader(&bytes);
    assert_eq!((reader.take(4), reader.u32()), (b"GGUF".as_slice(), 3));
    let (tensor_count, key_count) = (reader.u64(), reader.u64());
    let mut keys = BTreeMap::new();
    for _ in 0..key_count {
        let (key, kind) = (reader.text(), reader.u32());
        let value = reader.value(kind);
        assert_eq!(keys.insert(key, value), None);
    }
    let mut table = Vec::new();
    for _ in 0..tensor_count {
        let name = reader.text();
        let sizes: Vec<u64> = (0..reader.u32()).map(|_| reader.u64()).collect();
        table.push((name, sizes, reader.u32(), reader.u64() as usize));
    }
    let begin = (bytes.len() - reader.0.len()).next_multiple_of(32);
    let mut tensors = BTreeMap::new();
    for (name, sizes, kind, offset) in table {
        assert_eq!(offset % 32, 0, "{name}");
        let length = sizes.iter().product::<u64>() as usize;
        let size = match kind {
            0 => 4 * length,
            1 | 30 => 2 * length,
            2 => length / 32 * 18,
            8 => length / 32 * 34,
            39 => length / 32 * 17,
            other => panic!("type {other}"),
        };
        let bytes = bytes[begin + offset..begin + offset + size].to_vec();
        tensors.insert(name, Tensor { sizes, kind, bytes });
    }
    Gguf { keys, tensors }
}

#[track_caller]
fn exported(folder: &Folder, arguments: &[&str]) -> Gguf {
    let ran = folder.run(&[&["export", "gguf"], arguments].concat());
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{arguments:?}");
    let at = arguments.iter().position(|argument| *argument == "-o").expect("an output");
    read(folder, arguments[at + 1])
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn stored(folder: &Folder, file: &str) -> BTreeMap<String, Vec<f32>> {
    let file = SafeTensors::open(&folder.path(file)).expect("tensors");
    file.tensors().map(|tensor| (tensor.name.to_string(), tensor.to_f32().expect("numbers"))).collect()
}

/// Our name of a tensor of a dense model.
fn here(name: &str) -> String {
    const MODULES: [(&str, &str); 9] = [
        ("attn_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ];
    match name.split('.').collect::<Vec<_>>()[..] {
        ["token_embd", part] => format!("model.embed_tokens.{part}"),
        ["output_norm", part] => format!("model.norm.{part}"),
        ["output", part] => format!("lm_head.{part}"),
        ["blk", layer, module, part] => {
            let module = MODULES.iter().find(|(theirs, _)| *theirs == module).expect("a module").1;
            format!("model.layers.{layer}.{module}.{part}")
        }
        _ => panic!("{name}"),
    }
}

/// Every number of a model in every type, and the keys that describe it.
#[test]
fn a_model_in_every_type() {
    let folder = Folder::new(Shape::TINY);
    folder.put("model/chat_template.jinja", "{{ messages }}");
    let base = stored(&folder, "model/model.safetensors");
    for (kind, code, table) in [("f32", 0, 0), ("f16", 1, 1), ("bf16", 30, 30), ("q8_0", 8, 8), ("q4_0", 2, 8)] {
        let file = exported(&folder, &["model", "-o", &format!("{kind}.gguf"), "--type", kind]);
        assert!(file.tensors.keys().map(|name| here(name)).eq(sorted_like(&file, &base)), "{kind}");
        for (name, tensor) in &file.tensors {
            let values = &base[&here(name)];
            let wanted = match name.as_str() {
                "token_embd.weight" => table,
                // Rows of 48 are no whole blocks.
                _ if name.contains("ffn_down") && [2, 8].contains(&code) => 1,
                _ if tensor.sizes.len() == 1 => 0,
                _ => code,
            };
            let bytes: Vec<u8> = match wanted {
                0 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
                1 => values.iter().flat_map(|value| f32_to_f16(*value).to_le_bytes()).collect(),
                30 => values.iter().flat_map(|value| f32_to_bf16(*value).to_le_bytes()).collect(),
                8 => values.as_chunks().0.iter().flat_map(q8_0).collect(),
                _ => values.as_chunks().0.iter().flat_map(q4_0).collect(),
            };
            assert_eq!((tensor.kind, &tensor.bytes), (wanted, &bytes), "{kind} {name}");
        }
    }
    let keys = read(&folder, "q8_0.gguf").keys;
    let tokens = keys["tokenizer.ggml.tokens"].split('|').count();
    for (key, value) in [
        ("general.architecture", "qwen2"),
        ("general.type", "model"),
        ("general.name", "model"),
        ("general.file_type", "7"),
        ("general.quantization_version", "2"),
        ("qwen2.block_count", "2"),
        ("qwen2.embedding_length", "32"),
        ("qwen2.feed_forward_length", "48"),
        ("qwen2.attention.head_count", "4"),
        ("qwen2.attention.head_count_kv", "2"),
        ("qwen2.attention.key_length", "8"),
        ("qwen2.rope.freq_base", "10000"),
        ("qwen2.context_length", "512"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "qwen2"),
        ("tokenizer.ggml.eos_token_id", "320"),
        ("tokenizer.ggml.add_bos_token", "0"),
        ("tokenizer.chat_template", "{{ messages }}"),
    ] {
        assert_eq!(keys[key], value, "{key}");
    }
    assert!(tokens >= 352, "{tokens}: some tokens are themselves a bar");
    assert_eq!(keys["tokenizer.ggml.token_type"].split('|').count(), 352);
}

/// Our names of the file's tensors, in its order, which are all of the model's.
fn sorted_like(file: &Gguf, base: &BTreeMap<String, Vec<f32>>) -> Vec<String> {
    let mut wanted: Vec<&String> = base.keys().collect();
    let mut found: Vec<String> = file.tensors.keys().map(|name| here(name)).collect();
    wanted.sort_unstable();
    let order = found.clone();
    found.sort_unstable();
    assert!(found.iter().eq(wanted));
    order
}

/// llama.cpp rotates neighbours in a Llama: rows of queries and keys go in pairs, in a merged model
/// and in an adapter.
#[test]
fn rows_of_a_llama_go_in_pairs() {
    let folder = Folder::new(Shape::TINY);
    let mut config = config_json(folder.shape);
    config["model_type"] = "llama".into();
    let all: Vec<_> = weights(folder.shape, 1).into_iter().filter(|tensor| !tensor.0.ends_with("bias")).collect();
    folder.put_model("model", &config, &all);
    folder.trained("run", &["max_steps=2", "lora_dropout=0"]);
    assert_eq!(folder.run(&["export", "merge", "run", "-o", "merged", "--quiet"]).code, 0);
    let merged = stored(&folder, "merged/model.safetensors");
    let file = exported(&folder, &["run", "--merge", "-o", "merged.gguf"]);
    let same = exported(&folder, &["merged", "-o", "same.gguf"]);
    let paired = |values: &[f32], width: usize| -> Vec<f32> {
        let rows: Vec<&[f32]> = values.chunks(width).collect();
        (0..rows.len()).flat_map(|row| rows[row / 8 * 8 + row % 2 * 4 + row % 8 / 2].to_vec()).collect()
    };
    for (name, tensor) in &file.tensors {
        let values = &merged[&here(name)];
        let turned = name.contains("attn_q.") || name.contains("attn_k.");
        let values = if turned { paired(values, 32) } else { values.clone() };
        assert_eq!(f32s(&tensor.bytes), values, "{name}");
        assert_eq!(same.tensors[name].bytes, tensor.bytes, "{name}");
    }
    let adapter = exported(&folder, &["run", "-o", "adapter.gguf"]);
    let factors = stored(&folder, "run/final/adapter_model.safetensors");
    assert_eq!(adapter.tensors.len(), factors.len());
    for (key, value) in [
        ("general.type", "adapter"),
        ("general.architecture", "llama"),
        ("adapter.type", "lora"),
        ("adapter.lora.alpha", "8"),
    ] {
        assert_eq!(adapter.keys[key], value, "{key}");
    }
    for (name, tensor) in &adapter.tensors {
        let (module, factor) = name.rsplit_once(".weight.").expect("a factor");
        let path = here(&format!("{module}.weight"));
        let path = path.strip_suffix(".weight").expect("a module");
        let upper = if factor == "lora_a" { "lora_A" } else { "lora_B" };
        let values = &factors[&format!("base_model.model.{path}.{upper}.weight")];
        let turned = factor == "lora_b" && (name.contains("attn_q.") || name.contains("attn_k."));
        let values = if turned { paired(values, 4) } else { values.clone() };
        assert_eq!(f32s(&tensor.bytes), values, "{name}");
        let rank_at = usize::from(factor == "lora_a");
        assert_eq!((tensor.sizes.len(), tensor.sizes[rank_at]), (2, 4), "{name}");
    }
}

/// Experts are stacked by projection, whatever the base's layout; adapters on them too.
#[test]
fn experts_are_stacked() {
    let folder = Folder::with_experts(&[]);
    let config = folder.text("config.toml");
    folder.put(
        "config.toml",
        format!(
            "{config}[adapter]\ntype = \"lora\"\nlora_r = 2\nlora_alpha = 3\nlora_target_modules = [\"q_proj\"]\n\
             lora_target_parameters = [\"mlp.experts.gate_up_proj\", \"mlp.experts.down_proj\"]\n\
             [adapter.alpha_pattern]\nq_proj = 5\n"
        ),
    );
    folder.trained("run", &["max_steps=2"]);
    assert_eq!(folder.run(&["export", "merge", "run", "-o", "merged", "--quiet"]).code, 0);
    let merged = stored(&folder, "merged/model.safetensors");
    let file = exported(&folder, &["run", "--merge", "-o", "merged.gguf"]);
    let hidden = folder.shape.hidden as u64;
    for (layer, (module, theirs, sizes)) in (0..2).flat_map(|layer| {
        [
            ("gate_proj", "ffn_gate_exps", [hidden, WIDTH as u64, EXPERTS as u64]),
            ("up_proj", "ffn_up_exps", [hidden, WIDTH as u64, EXPERTS as u64]),
            ("down_proj", "ffn_down_exps", [WIDTH as u64, hidden, EXPERTS as u64]),
        ]
        .map(|module| (layer, module))
    }) {
        let tensor = &file.tensors[&format!("blk.{layer}.{theirs}.weight")];
        let name = |expert: usize| format!("model.layers.{layer}.mlp.experts.{expert}.{module}.weight");
        let values: Vec<f32> = (0..EXPERTS).flat_map(|expert| merged[&name(expert)].clone()).collect();
        assert_eq!((&tensor.sizes[..], f32s(&tensor.bytes)), (&sizes[..], values), "{theirs}");
    }
    assert_eq!(file.keys["qwen3moe.expert_count"], EXPERTS.to_string());
    assert_eq!(file.keys["qwen3moe.expert_feed_forward_length"], WIDTH.to_string());
    // The adapter adds the same numbers: B A of each tensor, by llama.cpp's formula.
    let adapter = exported(&folder, &["run", "-o", "adapter.gguf"]);
    let base = stored(&folder, "model/model.safetensors");
    let alpha: f32 = adapter.keys["adapter.lora.alpha"].parse().expect("a number");
    assert_eq!(adapter.tensors.len(), 2 * 2 * 4);
    check_product(&adapter, "blk.1.ffn_up_exps.weight", alpha, |at| {
        let name = format!("model.layers.1.mlp.experts.{}.up_proj.weight", at / (WIDTH * 32));
        let at = at % (WIDTH * 32);
        (base[&name][at], merged[&name][at])
    });
    check_product(&adapter, "blk.0.attn_q.weight", alpha, |at| {
        let name = "model.layers.0.self_attn.q_proj.weight";
        (base[name][at], merged[name][at])
    });
}

/// llama.cpp takes an alpha of zero for a scale of one.
#[test]
fn an_adapter_of_scale_zero_changes_nothing() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &["max_steps=3"]);
    std::fs::create_dir(folder.path("zero")).expect("a folder");
    let config = folder.text("run/final/adapter_config.json");
    let zero = config.replace("\"lora_alpha\": 8", "\"lora_alpha\": 0");
    assert_ne!(zero, config);
    folder.put("zero/adapter_config.json", zero);
    let factors = std::fs::read(folder.path("run/final/adapter_model.safetensors")).expect("read");
    folder.put("zero/adapter_model.safetensors", factors);
    let adapter = exported(&folder, &["zero", "-o", "zero.gguf"]);
    let alpha: f32 = adapter.keys["adapter.lora.alpha"].parse().expect("a number");
    assert!(alpha > 0.0, "{alpha}");
    let b: Vec<_> = adapter.tensors.iter().filter(|(name, _)| name.ends_with("lora_b")).collect();
    assert!(!b.is_empty());
    for (name, tensor) in b {
        assert!(f32s(&tensor.bytes).iter().all(|value| *value == 0.0), "{name}");
    }
}

/// `merged = base + alpha/r·B A` up to a few roundings, given base and merged by index.
#[expect(clippy::float_arithmetic, reason = "the product is computed in float64")]
fn check_product(adapter: &Gguf, name: &str, alpha: f32, pair: impl Fn(usize) -> (f32, f32)) {
    let [a, b] = ["lora_a", "lora_b"].map(|factor| &adapter.tensors[&format!("{name}.{factor}")]);
    let (inputs, rank, outputs) = (a.sizes[0] as usize, a.sizes[1] as usize, b.sizes[1] as usize);
    let (a_values, b_values) = (f32s(&a.bytes), f32s(&b.bytes));
    let mut most = 0.0f64;
    for at in 0..a_values.len() / rank * outputs {
        let (expert, o, i) = (at / (inputs * outputs), at / inputs % outputs, at % inputs);
        let term = |j: usize| {
            f64::from(b_values[(expert * outputs + o) * rank + j])
                * f64::from(a_values[(expert * rank + j) * inputs + i])
        };
        let delta = f64::from(alpha) / rank as f64 * (0..rank).map(term).sum::<f64>();
        let (base, merged) = pair(at);
        let error = (f64::from(merged) - f64::from(base) - delta).abs();
        assert!(error <= f64::from(merged.abs() + 1.0) / 4_194_304.0, "{name} {at}: {error}");
        most = most.max(delta.abs());
    }
    assert!(most > 1e-4, "{name}: the adapter does something");
}

#[test]
fn what_cannot_be_written_is_refused_and_nothing_is_left() {
    let folder = Folder::new(Shape::TINY);
    folder.trained("run", &["max_steps=1"]);
    let before = names(&folder.path(""));
    let refused = |arguments: &[&str], code: i32, parts: &[&str]| {
        folder.run(&[&["export", "gguf"], arguments].concat()).says(code, parts);
        assert_eq!(names(&folder.path("")), before, "{arguments:?}");
    };
    refused(&["model", "-o", "data.jsonl"], 2, &["data.jsonl already exists"]);
    refused(&["model", "-o", "a.gguf", "--type", "q5_1"], 2, &["q8_0 or q4_0"]);
    refused(&["model", "-o", "a.gguf", "--merge"], 2, &["is a model, not an adapter"]);
    refused(&["run", "-o", "a.gguf", "--type", "q8_0"], 2, &["--merge"]);
    refused(&["nowhere", "-o", "a.gguf"], 2, &["nowhere"]);
    refused(&["Qwen/Qwen3-0.6B", "-o", "a.gguf"], 2, &["Qwen/Qwen3-0.6B does not exist", "Hugging Face hub"]);
    let tokenizer = folder.text("model/tokenizer.json");
    folder.put("model/tokenizer.json", tokenizer.replace(r"\\p{N}| ?", r"\\p{N}{1,2}| ?"));
    refused(&["model", "-o", "a.gguf"], 2, &["pre_tokenizer", "--pre"]);
    assert_eq!(folder.run(&["export", "gguf", "model", "-o", "a.gguf", "--pre", "qwen2"]).code, 0);
    std::fs::remove_file(folder.path("a.gguf")).expect("removed");
    folder.put("model/tokenizer.json", "{");
    refused(&["model", "-o", "a.gguf"], 8, &["tokenizer.json"]);
    folder.put("model/tokenizer.json", &tokenizer);
    let mut config = config_json(folder.shape);
    config["use_sliding_window"] = true.into();
    config["sliding_window"] = 5.into();
    config["max_window_layers"] = 1.into();
    folder.put("model/config.json", config.to_string());
    folder
        .run(&["export", "gguf", "model", "-o", "a.gguf"])
        .says(0, &["note: ", "no sliding window", "up to 5 tokens"]);
    assert_eq!(read(&folder, "a.gguf").keys["qwen2.context_length"], "5");
    std::fs::remove_file(folder.path("a.gguf")).expect("removed");
    folder.put("model/config.json", config_json(folder.shape).to_string());
    let mut all = weights(folder.shape, 1);
    all[1].2[0] = 1e6;
    put_tensors(&folder.path("model/model.safetensors"), &all);
    refused(&["model", "-o", "a.gguf", "--type", "f16"], 5, &["does not fit in f16", "--type"]);
    all[1].1 = vec![16, 64];
    put_tensors(&folder.path("model/model.safetensors"), &all);
    refused(&["model", "-o", "a.gguf"], 8, &["q_proj", "[16, 64]"]);
}

/// Experts that are stored as MXFP4 keep their codes, unless the file is to be float32 or the
/// adapter changes them.
#[test]
fn codes_of_experts_stay_as_they_are() {
    let folder = Folder::new(Shape::TINY);
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/gptoss-mxfp4");
    std::fs::create_dir(folder.path("oss")).expect("a folder");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(format!("{fixture}/{name}"), folder.path(&format!("oss/{name}"))).expect("a copy");
    }
    let cutter = r#"{"type":"ByteLevel","add_prefix_space":false,"use_regex":true}"#;
    let model = r#"{"type":"BPE","vocab":{"a":0,"b":1},"merges":[]}"#;
    folder.put("oss/tokenizer.json", format!(r#"{{"model":{model},"pre_tokenizer":{cutter},"added_tokens":[]}}"#));
    let export = |arguments: &[&str], file: &str| {
        folder.run(&[&["export", "gguf"], arguments, &["-o", file]].concat()).says(0, &["`truncate` true"]);
        read(&folder, file)
    };
    let numbers = export(&["oss", "--type", "f32"], "numbers.gguf");
    let codes = export(&["oss", "--type", "q8_0"], "codes.gguf");
    let is_expert = |name: &str| name.contains("_exps.weight");
    assert_eq!(codes.tensors.keys().filter(|name| is_expert(name)).count(), 6);
    for (name, tensor) in codes.tensors.iter().filter(|(name, _)| is_expert(name)) {
        assert_eq!(tensor.kind, 39, "{name}");
        assert_eq!(expanded(&tensor.bytes), f32s(&numbers.tensors[name].bytes), "{name}");
    }
    let adapter = format!("{fixture}/adapter");
    let merged = export(&[&adapter, "--base", "oss", "--merge", "--type", "bf16"], "merged.gguf");
    let whole = export(&[&adapter, "--base", "oss", "--merge", "--type", "f32"], "whole.gguf");
    for (name, tensor) in merged.tensors.iter().filter(|(name, _)| is_expert(name)) {
        let is_changed = whole.tensors[name].bytes != numbers.tensors[name].bytes;
        assert_eq!(tensor.kind, if is_changed { 30 } else { 39 }, "{name}");
    }
}

/// The numbers of MXFP4 blocks.
#[expect(clippy::float_arithmetic, reason = "what the blocks stand for")]
fn expanded(blocks: &[u8]) -> Vec<f32> {
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let value = |code: u8, scale: u8| {
        let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
        sign * VALUES[usize::from(code & 7)] * f32::from_bits(u32::from(scale) << 23)
    };
    let block = |block: &[u8]| -> Vec<f32> {
        let low = block[1..].iter().map(|byte| value(byte & 15, block[0]));
        low.chain(block[1..].iter().map(|byte| value(byte >> 4, block[0]))).collect()
    };
    blocks.chunks(17).flat_map(block).collect()
}
