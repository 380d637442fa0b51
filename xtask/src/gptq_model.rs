//! `cargo xtask gptq-model FOLDER`: a 4-bit GPTQ base with the widths of Qwen3.5-35B-A3B, 4 of its
//! 40 layers and a tenth of its vocabulary, with random numbers; text, and a config for one step of
//! LoRA with `isobit train FOLDER/run.toml`. `docs/performance.md` states the memory it takes.
//!
//! Attention, delta layers, experts and shared experts are quantised, in groups of 128; routers,
//! gates, norms, tables and the two narrow projections of a delta layer are bfloat16, as quantisers
//! leave them.

use crate::arguments::Arguments;
use crate::repository::root;
use crate::scratch_model::text;
use isobit_models::{RandomSource, WeightSource};
use isobit_numerics::philox::{Key, Purpose, block};
use isobit_proof::FileError;
use isobit_proof::safetensors::{Declared, Dtype, Sink, write_streamed};
use std::collections::BTreeMap;
use std::path::Path;

const CONFIG: &str = r#"{
  "architectures": ["Qwen3_5MoeForCausalLM"],
  "model_type": "qwen3_5_moe_text",
  "hidden_size": 2048,
  "num_hidden_layers": 4,
  "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
  "num_attention_heads": 16,
  "num_key_value_heads": 2,
  "head_dim": 256,
  "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128,
  "linear_value_head_dim": 128,
  "linear_num_key_heads": 16,
  "linear_num_value_heads": 32,
  "moe_intermediate_size": 512,
  "shared_expert_intermediate_size": 512,
  "num_experts": 256,
  "num_experts_per_tok": 8,
  "vocab_size": 24832,
  "max_position_embeddings": 262144,
  "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
  "hidden_act": "silu",
  "attention_bias": false,
  "rms_norm_eps": 1e-06,
  "tie_word_embeddings": false,
  "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true,
    "checkpoint_format": "gptq", "lm_head": false}
}
"#;

const RUN: &str = r#"# One step of LoRA on a base of four bits.
base_model = "base"
output_dir = "run"
seed = 1
device = "cpu"

[[datasets]]
path = "text.jsonl"

[training]
max_seq_length = 512
sample_packing = true
micro_batch_size = 1
gradient_accumulation_steps = 1
max_steps = 1
learning_rate = 2e-4
gradient_checkpointing = "full"

[adapter]
type = "lora"
lora_r = 8
lora_alpha = 16
lora_target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj"]
"#;

/// Rows of text: enough for a step.
const ROWS: usize = 40;
const HIDDEN: usize = 2048;
const EXPERTS: usize = 256;
const WIDTH: usize = 512;
const VOCABULARY: usize = 24832;
const GROUP: usize = 128;
/// A zero point of 8 in every nibble, minus the one that the first format subtracts.
const ZEROS: u32 = 0x7777_7777;

/// How a tensor's bytes are generated.
#[derive(Clone, Copy)]
enum Content {
    /// Bell-shaped bfloat16.
    Numbers,
    /// Arbitrary bits.
    Words,
    Zeros,
    /// Float16 between 2⁻⁸ and 2⁻⁷.
    Scales,
    Groups,
}

struct Made {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    content: Content,
}

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let folder = arguments.word("a folder")?;
    arguments.finish()?;
    let folder = Path::new(&folder);
    let failed = |error: std::io::Error| error.to_string();
    let base = folder.join("base");
    std::fs::create_dir_all(&base).map_err(failed)?;
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(root().join("crates/isobit/demo").join(name), base.join(name)).map_err(failed)?;
    }
    std::fs::write(base.join("config.json"), CONFIG).map_err(failed)?;
    std::fs::write(folder.join("run.toml"), RUN).map_err(failed)?;
    let rows: String = text()?.split_inclusive('\n').take(ROWS).collect();
    std::fs::write(folder.join("text.jsonl"), rows).map_err(failed)?;
    let tensors = tensors();
    let declared: Vec<Declared> =
        tensors.iter().map(|made| Declared { name: &made.name, dtype: made.dtype, shape: &made.shape }).collect();
    let path = base.join("model.safetensors");
    write_streamed(&path, &BTreeMap::new(), &declared, |index, sink| fill(index, &tensors[index], sink))
        .map_err(|error| error.to_string())?;
    println!("{}: {} bytes", path.display(), std::fs::metadata(&path).map_err(failed)?.len());
    Ok(())
}

/// Every tensor of the model.
fn tensors() -> Vec<Made> {
    let mut all = Vec::new();
    for (name, shape) in [
        ("model.embed_tokens", vec![VOCABULARY, HIDDEN]),
        ("lm_head", vec![VOCABULARY, HIDDEN]),
        ("model.norm", vec![HIDDEN]),
    ] {
        numbers(&mut all, &format!("{name}.weight"), &shape);
    }
    for layer in 0..4 {
        let path = format!("model.layers.{layer}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            numbers(&mut all, &format!("{path}.{norm}.weight"), &[HIDDEN]);
        }
        if layer == 3 {
            attention(&mut all, &format!("{path}.self_attn"));
        } else {
            delta(&mut all, &format!("{path}.linear_attn"));
        }
        experts(&mut all, &format!("{path}.mlp"));
    }
    all
}

fn attention(all: &mut Vec<Made>, path: &str) {
    for (module, outputs, inputs) in
        [("q_proj", 8192, HIDDEN), ("k_proj", 512, HIDDEN), ("v_proj", 512, HIDDEN), ("o_proj", HIDDEN, 4096)]
    {
        quantised(all, &format!("{path}.{module}"), outputs, inputs);
    }
    for norm in ["q_norm", "k_norm"] {
        numbers(all, &format!("{path}.{norm}.weight"), &[256]);
    }
}

fn delta(all: &mut Vec<Made>, path: &str) {
    for (module, outputs, inputs) in
        [("in_proj_qkv", 8192, HIDDEN), ("in_proj_z", 4096, HIDDEN), ("out_proj", HIDDEN, 4096)]
    {
        quantised(all, &format!("{path}.{module}"), outputs, inputs);
    }
    let others: [(&str, &[usize]); 6] = [
        ("in_proj_b.weight", &[32, HIDDEN]),
        ("in_proj_a.weight", &[32, HIDDEN]),
        ("conv1d.weight", &[8192, 1, 4]),
        ("A_log", &[32]),
        ("dt_bias", &[32]),
        ("norm.weight", &[128]),
    ];
    for (name, shape) in others {
        numbers(all, &format!("{path}.{name}"), shape);
    }
}

fn experts(all: &mut Vec<Made>, path: &str) {
    numbers(all, &format!("{path}.gate.weight"), &[EXPERTS, HIDDEN]);
    numbers(all, &format!("{path}.shared_expert_gate.weight"), &[1, HIDDEN]);
    let modules = (0..EXPERTS).map(|expert| format!("{path}.experts.{expert}"));
    for module in modules.chain([format!("{path}.shared_expert")]) {
        for (name, outputs, inputs) in
            [("gate_proj", WIDTH, HIDDEN), ("up_proj", WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)]
        {
            quantised(all, &format!("{module}.{name}"), outputs, inputs);
        }
    }
}

fn numbers(all: &mut Vec<Made>, name: &str, shape: &[usize]) {
    all.push(Made { name: name.to_string(), dtype: Dtype::Bf16, shape: shape.to_vec(), content: Content::Numbers });
}

fn quantised(all: &mut Vec<Made>, path: &str, outputs: usize, inputs: usize) {
    let groups = inputs / GROUP;
    let parts = [
        ("qweight", Dtype::I32, vec![inputs / 8, outputs], Content::Words),
        ("qzeros", Dtype::I32, vec![groups, outputs / 8], Content::Zeros),
        ("scales", Dtype::F16, vec![groups, outputs], Content::Scales),
        ("g_idx", Dtype::I32, vec![inputs], Content::Groups),
    ];
    for (part, dtype, shape, content) in parts {
        all.push(Made { name: format!("{path}.{part}"), dtype, shape, content });
    }
}

fn fill(index: usize, made: &Made, sink: &mut Sink) -> Result<(), FileError> {
    let count: usize = made.shape.iter().product();
    let bytes = match made.content {
        Content::Numbers => {
            let stored = RandomSource { seed: 1 }.tensor(&made.name, &made.shape).expect("any tensor can be had");
            return sink.write(&stored.bytes);
        }
        Content::Words => random(index, count).flat_map(u32::to_le_bytes).collect::<Vec<u8>>(),
        Content::Zeros => ZEROS.to_le_bytes().repeat(count),
        Content::Scales => random(index, count).flat_map(|word| (0x1c00 | word as u16 & 0x3ff).to_le_bytes()).collect(),
        Content::Groups => (0..count).flat_map(|input| ((input / GROUP) as i32).to_le_bytes()).collect(),
    };
    sink.write(&bytes)
}

/// Random words of the tensor with this number.
fn random(tensor: usize, count: usize) -> impl Iterator<Item = u32> {
    let key = Key::new(1, Purpose::TestData);
    (0..count.div_ceil(4)).flat_map(move |group| block(key, 0, 0, tensor as u32, group as u32)).take(count)
}
