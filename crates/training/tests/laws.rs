//! Laws of the training step, on bits: threads, SIMD paths, micro-batch splits, checkpoint policies and devices change nothing.

use isobit_autograd::{Layout, Policy, Tape};
use isobit_kernels::gpu::{Api, Selector, list};
use isobit_kernels::op::Span;
use isobit_kernels::{Backend, Cpu, Gpu, Path as CpuPath};
use isobit_models::build::{Built, Settings};
use isobit_models::weights::Weights;
use isobit_models::{Config, LoraConfig, Session, Trained, build};
use isobit_numerics::digest::Digest;
use isobit_numerics::philox::{Key, Purpose};
use isobit_numerics::slices::Profile;
use isobit_proof::safetensors::Checkpoint;
use isobit_training::batch::TokenRow;
use isobit_training::step::{StepSettings, Trainer};
use std::fmt::Write;
use std::path::Path;

const SEVEN: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Linear layers of delta rules and latent attention.
const RECURRENT: [&str; 5] = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"];
const LATENT: [&str; 5] = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"];

/// Rows of unequal length, one of them packed.
fn rows(vocabulary: usize) -> Vec<TokenRow> {
    let row = |length: usize, starts: &[usize]| {
        let tokens = (0..length).map(|t| ((t * 31 + length * 7) % vocabulary) as u32).collect();
        let targets = (0..length).map(|t| t % 5 != 3).collect();
        TokenRow { tokens, targets, document_starts: starts.iter().copied().chain([length]).collect() }
    };
    vec![row(17, &[0]), row(40, &[0, 9, 10, 30]), row(3, &[0]), row(131, &[0]), row(2, &[0])]
}

#[derive(Clone)]
struct Run {
    model: &'static str,
    trained: Trained,
    profile: Profile,
    policy: Policy,
    micro_batch_size: usize,
}

impl Run {
    /// Three steps; losses, norms, weights and moments as one line.
    fn on<B: Backend>(&self, backend: B) -> String {
        let (trained, profile) = (self.trained.clone(), self.profile);
        let built = model(&backend, self.model, trained, profile);
        let mut trainer = Trainer::new(backend, built);
        let settings = StepSettings {
            profile,
            policy: self.policy,
            micro_batch_size: self.micro_batch_size,
            seed: 7,
            max_grad_norm: Some(1.0),
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
        };
        let rows = rows(trainer.model.config.vocabulary);
        let rows: Vec<&TokenRow> = rows.iter().collect();
        let mut text = String::new();
        for step in 1..=3 {
            let report = trainer.step(&rows, step, 1e-2, &settings).expect("a step");
            let _ = write!(text, "{:016x} {:08x} ", report.loss.to_bits(), report.grad_norm.to_bits());
        }
        let mut digests = Vec::new();
        for ((_, parameter), moments) in trainer.parameters.iter().zip(&trainer.moments) {
            for buffer in [&parameter.value, &moments[0], &moments[1]] {
                digests.extend(trainer.backend.digest(buffer).expect("a digest").to_string().into_bytes());
            }
        }
        text + &Digest::of_bytes(&digests).to_string()
    }
}

/// A model of the fixtures.
fn model<B: Backend>(backend: &B, name: &str, trained: Trained, profile: Profile) -> Built<B> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures").join(name);
    let config = std::fs::read_to_string(folder.join("config.json")).expect("a config");
    let config = Config::parse(&config).expect("a readable config");
    let source = Weights::new(Checkpoint::open(&folder).expect("weights"), &config).expect("known names");
    build(backend, &config, &source, &Settings { trained, profile, positions: 256, seed: 7 }).expect("a model")
}

fn runs() -> Vec<Run> {
    let lora = |targets: &[&str]| Trained::Lora(LoraConfig { dropout: 0.25, ..LoraConfig::new(4, 8.0, targets) });
    let parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"].map(str::to_string).to_vec();
    let run = |model, trained| Run { model, trained, profile: Profile::X2, policy: Policy::None, micro_batch_size: 5 };
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
        run("gptq-v2-order", lora(&SEVEN)),
        Run { profile: Profile::X3, ..run("gptq-v1-asymmetric", lora(&SEVEN)) },
        run("gptq-moe", lora(&SEVEN[..4])),
        // Adapters of every expert's modules.
        run("gptq-moe", Trained::Lora(LoraConfig::new(3, 6.0, &SEVEN))),
        run("qwen3moe-base", Trained::Lora(LoraConfig::new(3, 6.0, &SEVEN))),
        run("gptq-moe-order", Trained::Lora(LoraConfig { parameters, ..LoraConfig::new(4, 8.0, &SEVEN[..4]) })),
    ]
}

fn cpu(threads: usize, path: CpuPath) -> Cpu {
    Cpu::new(threads, path).expect("an available path")
}

#[test]
fn again_threads_and_paths() {
    for run in runs() {
        let want = run.on(cpu(1, CpuPath::Scalar));
        for path in CpuPath::available() {
            for threads in [1, 2, 7] {
                assert_eq!(run.on(cpu(threads, path)), want, "{} on {path} with {threads} threads", run.model);
            }
        }
    }
}

#[test]
fn any_split_and_any_checkpoint_policy() {
    for run in runs() {
        let want = run.on(cpu(2, CpuPath::best()));
        for policy in Policy::ALL {
            for micro_batch_size in [1, 2, 3, 5] {
                let other = Run { policy, micro_batch_size, ..run.clone() };
                let got = other.on(cpu(2, CpuPath::best()));
                assert_eq!(got, want, "{} with {} and micro-batches of {micro_batch_size}", run.model, policy.name());
            }
        }
    }
}

/// Law 10 on whatever device there is; the `paths` test of the conformance suite counts the missing ones.
#[test]
fn devices_equal_the_cpu() {
    for api in Api::ALL {
        for index in 0..list(api).map_or(0, |devices| devices.len()) {
            let Ok(gpu) = Gpu::open(Selector { api, index }) else { continue };
            for run in runs() {
                let run = Run { policy: Policy::Full, micro_batch_size: 2, ..run };
                assert_eq!(run.on(gpu.clone()), run.on(cpu(2, CpuPath::best())), "{} on {}", run.model, gpu.name());
            }
        }
    }
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
    let layout = Layout {
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

/// Models of every kind of mixer.
const MIXERS: [&str; 7] = [
    "qwen2-window",
    "qwen3-base",
    "llama3-rope",
    "qwen3_5-hybrid",
    "qwen3next-hybrid",
    "deepseek-base",
    "deepseek-plain",
];

/// Law 11: generation with a cache has the logits of the full forward pass, whatever the pieces a text comes in.
#[test]
fn a_cache_equals_the_full_forward() {
    for name in MIXERS {
        let backend = cpu(2, CpuPath::best());
        let built = model(&backend, name, Trained::Nothing, Profile::X2);
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
    for name in MIXERS {
        let backend = cpu(2, CpuPath::best());
        let built = model(&backend, name, Trained::Nothing, Profile::X2);
        let vocabulary = built.model.config.vocabulary as u32;
        let texts = [1, 3, 64, 2, 65, 130]
            .map(|length| -> Vec<u32> { (0..length).map(|t| (t * 13 + 5 * length) % vocabulary).collect() });
        let documents = texts.each_ref().map(Vec::as_slice);
        let apart: Vec<f32> = documents.iter().flat_map(|document| logits(&backend, &built, &[document])).collect();
        assert!(same_bits(&logits(&backend, &built, &documents), &apart), "{name}");
    }
}
