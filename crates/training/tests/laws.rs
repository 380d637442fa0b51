//! Laws of the training step, on bits: threads, SIMD paths, micro-batch splits, checkpoint policies and devices change nothing.

use isobit_autograd::Policy;
use isobit_kernels::gpu::{Api, Selector, list};
use isobit_kernels::{Backend, Cpu, Gpu, Path as CpuPath};
use isobit_models::build::Settings;
use isobit_models::{Config, LoraConfig, Trained, build};
use isobit_numerics::digest::Digest;
use isobit_numerics::slices::Profile;
use isobit_proof::safetensors::Checkpoint;
use isobit_training::batch::TokenRow;
use isobit_training::step::{StepSettings, Trainer};
use std::fmt::Write;
use std::path::Path;

const SEVEN: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Rows of unequal length, one of them packed.
fn rows() -> Vec<TokenRow> {
    let row = |length: usize, starts: &[usize]| {
        let tokens = (0..length).map(|t| ((t * 31 + length * 7) % 97) as u32).collect();
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
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures").join(self.model);
        let config = std::fs::read_to_string(folder.join("config.json")).expect("a config");
        let config = Config::parse(&config).expect("a readable config");
        let source = Checkpoint::open(&folder).expect("weights");
        let (trained, profile) = (self.trained.clone(), self.profile);
        let settings = Settings { trained, profile, positions: 256, seed: 7 };
        let built = build(&backend, &config, &source, &settings).expect("a model");
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
        let rows = rows();
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

fn runs() -> Vec<Run> {
    let mut lora = LoraConfig::new(4, 8.0, &SEVEN);
    lora.dropout = 0.25;
    let run = |model, trained| Run { model, trained, profile: Profile::X2, policy: Policy::None, micro_batch_size: 5 };
    vec![
        run("qwen2-base", Trained::Lora(lora)),
        run("qwen2-tied", Trained::Full),
        Run { profile: Profile::X3, ..run("qwen3-base", Trained::Full) },
        run("qwen2-window", Trained::LastBlocks(1)),
        run("llama-bias", Trained::Lora(LoraConfig::new(3, 3.0, &["q_proj", "down_proj"]))),
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

/// Law 11: generation with a cache has the logits of the full forward pass, whatever the pieces a text comes in.
#[test]
fn a_cache_equals_the_full_forward() {
    use isobit_autograd::{Layout, Tape};
    use isobit_kernels::op::Span;
    use isobit_models::Session;
    use isobit_numerics::philox::{Key, Purpose};
    for model in ["qwen2-window", "qwen3-base", "llama3-rope"] {
        let backend = cpu(2, CpuPath::best());
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures").join(model);
        let config = std::fs::read_to_string(folder.join("config.json")).expect("a config");
        let config = Config::parse(&config).expect("a readable config");
        let source = Checkpoint::open(&folder).expect("weights");
        let settings = Settings { trained: Trained::Nothing, profile: Profile::X2, positions: 256, seed: 0 };
        let built = build(&backend, &config, &source, &settings).expect("a model");
        let tokens: Vec<u32> = (0..200).map(|t| (t * 13 + 5) % 97).collect();
        let layout = Layout {
            tokens: 200,
            row_starts: vec![0, 200],
            spans: vec![Span { queries: 0..200, keys: 0..200 }],
            positions: backend.upload(&(0..200).collect::<Vec<u32>>()),
            key: Key::new(0, Purpose::Dropout),
            step: 0,
            first_row: 0,
        };
        let ids = backend.upload(&tokens);
        let mut tape = Tape::inference(&backend, &built.parameters, &layout, Profile::X2);
        let full = built.model.logits(&mut tape, &ids).expect("logits");
        let full = backend.download(full.buffer()).expect("a download");
        let mut session = Session::new(&backend, &built.model, &built.parameters, Profile::X2);
        for end in [1, 2, 7, 128, 129, 130, 200] {
            let logits = session.extend(&tokens[session.length()..end]).expect("logits");
            let want = &full[(end - 1) * 97..end * 97];
            assert!(logits.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()), "{model} at {end}");
        }
    }
}
