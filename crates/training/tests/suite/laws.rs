//! Laws of the training step, on bits: threads, SIMD paths, micro-batch splits, checkpoint policies
//! and devices change nothing.

use crate::short_runs::{self, Run, cpu, fixture};
use isobit_autograd::{BatchLayout, Tape};
use isobit_kernels::op::Span;
use isobit_kernels::{Cpu, Device, Path as CpuPath};
use isobit_models::build::Built;
use isobit_models::{LoraConfig, Session, Trained};
use isobit_numerics::philox::{Key, Purpose};
use isobit_numerics::slices::Profile;

pub(crate) const SEVEN: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Linear layers of delta rules and latent attention.
const RECURRENT: [&str; 5] = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"];
const LATENT: [&str; 5] = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"];

fn runs() -> Vec<Run> {
    let lora = |targets: &[&str]| Trained::Lora(LoraConfig { dropout: 0.25, ..LoraConfig::new(4, 8.0, targets) });
    let parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"].map(str::to_string).to_vec();
    let run = Run::new;
    vec![
        run("qwen2-base", lora(&SEVEN)),
        run("qwen2-tied", Trained::Full),
        Run { profile: Profile::X3, ..run("qwen3-base", Trained::Full) },
        run("qwen2-window", Trained::LastBlocks(1)),
        run("llama-bias", Trained::Lora(LoraConfig::new(3, 3.0, &["q_proj", "down_proj"]))),
        run("qwen3_5-hybrid", Trained::Full),
        Run { profile: Profile::X3, ..run("qwen3_5-hybrid", lora(&[&SEVEN[..], &RECURRENT[..]].concat())) },
        run("deepseek-base", lora(&LATENT)),
        run("deepseek-plain", Trained::Full),
        run("qwen3next-hybrid", Trained::Full),
        // Norms and factors after the branches, capped scores and logits, joined modules.
        run("gemma2-base", Trained::Full),
        run("granite-base", lora(&SEVEN)),
        run("phi3-base", lora(&["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])),
        // Sinks, and experts with biases.
        run("gptoss-base", Trained::Full),
        run(
            "gptoss-mxfp4",
            Trained::Lora(LoraConfig { parameters: parameters.clone(), ..LoraConfig::new(4, 8.0, &SEVEN[..4]) }),
        ),
        run("gptq-v2-order", lora(&SEVEN)),
        Run { profile: Profile::X3, ..run("gptq-v1-asymmetric", lora(&SEVEN)) },
        run("gptq-moe", lora(&SEVEN[..4])),
        // Adapters of every expert's modules.
        run("gptq-moe", Trained::Lora(LoraConfig::new(3, 6.0, &SEVEN))),
        run("qwen3moe-base", Trained::Lora(LoraConfig::new(3, 6.0, &SEVEN))),
        run("gptq-moe-order", Trained::Lora(LoraConfig { parameters, ..LoraConfig::new(4, 8.0, &SEVEN[..4]) })),
    ]
}

#[test]
fn again_threads_and_paths() {
    short_runs::again_threads_and_paths(runs());
}

#[test]
fn any_split_and_any_checkpoint_policy() {
    short_runs::any_split_and_any_checkpoint_policy(runs());
}

#[test]
fn devices_equal_the_cpu() {
    short_runs::devices_equal_the_cpu("laws::devices_equal_the_cpu", &runs());
}

/// Logits of documents in one row.
fn logits(backend: &Cpu, built: &Built<Cpu>, documents: &[&[u32]]) -> Vec<f32> {
    let tokens = documents.concat();
    let (mut spans, mut positions) = (Vec::new(), Vec::new());
    for document in documents {
        let span = positions.len()..positions.len() + document.len();
        spans.push(Span { queries: span.clone(), keys: span });
        positions.extend(0..document.len() as u32);
    }
    let layout = BatchLayout {
        tokens: tokens.len(),
        row_starts: vec![0, tokens.len()],
        spans,
        positions: backend.upload(&positions),
        key: Key::new(0, Purpose::Dropout),
        step: 0,
        first_row: 0,
    };
    let ids = backend.upload(&tokens);
    let mut tape = Tape::inference(backend, &built.parameters, &layout, Profile::X2);
    let logits = built.model.logits(&mut tape, &ids).expect("logits");
    backend.download(logits.buffer()).expect("a download")
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Models of every kind of attention, MLP and delta layer.
const MODELS: [&str; 9] = [
    "qwen2-window",
    "qwen3-base",
    "llama3-rope",
    "qwen3_5-hybrid",
    "qwen3next-hybrid",
    "deepseek-base",
    "deepseek-plain",
    "gemma2-base",
    "smollm3-base",
];

/// Law 11: generation with a cache has the logits of the full forward pass, whatever the pieces a
/// text comes in.
#[test]
fn a_cache_equals_the_full_forward() {
    for name in MODELS {
        let backend = cpu(2, CpuPath::best());
        let built = fixture(&backend, name, Trained::Nothing, Profile::X2);
        let vocabulary = built.model.config.vocabulary;
        let tokens: Vec<u32> = (0..200).map(|t| (t * 13 + 5) % vocabulary as u32).collect();
        let full = logits(&backend, &built, &[&tokens]);
        let mut ends = vec![vec![1, 2, 7, 128, 129, 130, 200], vec![63, 64, 65, 67, 192, 193, 200], vec![200]];
        ends.push((1..=70).collect());
        for ends in ends {
            let mut session = Session::new(&backend, &built.model, &built.parameters, Profile::X2);
            for end in ends {
                let logits = session.extend(&tokens[session.length()..end]).expect("logits");
                let want = &full[(end - 1) * vocabulary..end * vocabulary];
                assert!(same_bits(&logits, want), "{name} at {end}");
            }
        }
    }
}

/// A document's logits are its own, whatever it shares a row with.
#[test]
fn packed_documents_equal_separate_ones() {
    for name in MODELS {
        let backend = cpu(2, CpuPath::best());
        let built = fixture(&backend, name, Trained::Nothing, Profile::X2);
        let vocabulary = built.model.config.vocabulary as u32;
        let texts = [1, 3, 64, 2, 65, 130]
            .map(|length| -> Vec<u32> { (0..length).map(|t| (t * 13 + 5 * length) % vocabulary).collect() });
        let documents = texts.each_ref().map(Vec::as_slice);
        let apart: Vec<f32> = documents.iter().flat_map(|document| logits(&backend, &built, &[document])).collect();
        assert!(same_bits(&logits(&backend, &built, &documents), &apart), "{name}");
    }
}
