//! Laws of a mixture of experts, on bits, where routers have ties everywhere: threads, paths, splits, policies, devices and layouts of the
//! file change nothing; a cache gives what the full forward pass gives; files keep the layout of the base.

mod common;

use common::{Ties, VOCABULARY, config, rows};
use isobit_autograd::{Gradients, Layout, Policy, Tape};
use isobit_kernels::gpu::{Api, Selector, list};
use isobit_kernels::op::Span;
use isobit_kernels::{Backend, Cpu, Gpu, Path as CpuPath};
use isobit_models::build::Settings;
use isobit_models::{Config, LoraConfig, Session, Source, Trained, Weights, build};
use isobit_numerics::digest::Digest;
use isobit_numerics::philox::{Key, Purpose};
use isobit_numerics::slices::Profile;
use isobit_proof::safetensors::Checkpoint;
use isobit_training::batch::TokenRow;
use isobit_training::step::{StepSettings, Trainer};
use std::fmt::Write;
use std::path::Path;

fn cpu(threads: usize, path: CpuPath) -> Cpu {
    Cpu::new(threads, path).expect("an available path")
}

fn step_settings(profile: Profile, policy: Policy, micro_batch_size: usize) -> StepSettings {
    StepSettings {
        profile,
        policy,
        micro_batch_size,
        seed: 7,
        max_grad_norm: Some(1.0),
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
    }
}

#[derive(Clone)]
struct Run {
    name: &'static str,
    config: Config,
    trained: Trained,
    profile: Profile,
    policy: Policy,
    micro_batch_size: usize,
}

impl Run {
    /// Two steps; losses, norms, weights and moments as one line.
    fn on<B: Backend>(&self, backend: B) -> String {
        let (trained, profile) = (self.trained.clone(), self.profile);
        let settings = Settings { trained, profile, positions: 256, seed: 7 };
        let built = build(&backend, &self.config, &Ties, &settings).expect("a model");
        let mut trainer = Trainer::new(backend, built);
        let rows = rows();
        let rows: Vec<&TokenRow> = rows.iter().collect();
        let mut text = String::new();
        for step in 1..=2 {
            let settings = step_settings(profile, self.policy, self.micro_batch_size);
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

/// Everything trained with load balance; adapters on attention; adapters on experts.
fn runs() -> Vec<Run> {
    let run = |name, config, trained| Run {
        name,
        config,
        trained,
        profile: Profile::X2,
        policy: Policy::None,
        micro_batch_size: 5,
    };
    let balanced = r#","norm_topk_prob":true,"output_router_logits":true,"router_aux_loss_coef":0.1"#;
    let mut experts = LoraConfig::new(3, 6.0, &["q_proj"]);
    experts.parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"].map(str::to_string).to_vec();
    vec![
        run("full", config(balanced), Trained::Full),
        run("attention", config(""), Trained::Lora(LoraConfig::new(4, 8.0, &["q_proj", "k_proj", "v_proj", "o_proj"]))),
        Run { profile: Profile::X3, ..run("experts", config(r#","norm_topk_prob":true"#), Trained::Lora(experts)) },
    ]
}

#[test]
fn threads_and_paths() {
    for run in runs() {
        let want = run.on(cpu(1, CpuPath::Scalar));
        for path in CpuPath::available() {
            for threads in [1, 2, 7] {
                assert_eq!(run.on(cpu(threads, path)), want, "{} on {path} with {threads} threads", run.name);
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
                assert_eq!(got, want, "{} with {} and micro-batches of {micro_batch_size}", run.name, policy.name());
            }
        }
    }
}

#[test]
fn devices_equal_the_cpu() {
    for api in Api::ALL {
        for index in 0..list(api).map_or(0, |devices| devices.len()) {
            let Ok(gpu) = Gpu::open(Selector { api, index }) else { continue };
            for run in runs() {
                let run = Run { policy: Policy::Full, micro_batch_size: 2, ..run };
                assert_eq!(run.on(gpu.clone()), run.on(cpu(2, CpuPath::best())), "{} on {}", run.name, gpu.name());
            }
        }
    }
}

#[test]
fn a_cache_equals_the_full_forward() {
    let backend = cpu(2, CpuPath::best());
    let settings = Settings { trained: Trained::Nothing, profile: Profile::X2, positions: 256, seed: 0 };
    let built = build(&backend, &config(""), &Ties, &settings).expect("a model");
    let tokens: Vec<u32> = (0..150).map(|t| (t * 13 + 5) % VOCABULARY as u32).collect();
    let layout = Layout {
        tokens: 150,
        row_starts: vec![0, 150],
        spans: vec![Span { queries: 0..150, keys: 0..150 }],
        positions: backend.upload(&(0..150).collect::<Vec<u32>>()),
        key: Key::new(0, Purpose::Dropout),
        step: 0,
        first_row: 0,
    };
    let ids = backend.upload(&tokens);
    let mut tape = Tape::inference(&backend, &built.parameters, &layout, Profile::X2);
    let full = built.model.logits(&mut tape, &ids).expect("logits");
    let full = backend.download(full.buffer()).expect("a download");
    let mut session = Session::new(&backend, &built.model, &built.parameters, Profile::X2);
    for end in [1, 2, 7, 128, 129, 150] {
        let logits = session.extend(&tokens[session.length()..end]).expect("logits");
        let want = &full[(end - 1) * VOCABULARY..end * VOCABULARY];
        assert!(logits.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()), "at {end}");
    }
}

/// One by one, fused and transposed: the same loss and gradients, and each is written as it was read.
#[test]
fn layouts_of_the_file() {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/qwen3moe-base");
    let config = std::fs::read_to_string(base.join("config.json")).expect("a config");
    let config = Config::parse(&config).expect("a readable config");
    let mut found = Vec::new();
    for folder in [base.clone(), base.join("fused"), base.join("transposed")] {
        let source = Weights::new(Checkpoint::open(&folder).expect("weights"), &config).expect("known names");
        let backend = cpu(2, CpuPath::best());
        let settings = Settings { trained: Trained::Full, profile: Profile::X2, positions: 64, seed: 0 };
        let built = build(&backend, &config, &source, &settings).expect("a model");
        let trainer = Trainer::new(backend, built);
        let row = TokenRow::document((0..30).map(|t| (t * 11 + 3) % 37).collect(), vec![true; 30]);
        let mut gradients = Gradients::zeros(&trainer.backend, &trainer.parameters);
        let settings = step_settings(Profile::X2, Policy::Full, 1);
        let (loss, _) = trainer.gradients(&mut gradients, &[&row], 1, &settings).expect("gradients");
        let mut bits = vec![loss.to_bits()];
        let mut written = Vec::new();
        for (id, parameter) in trainer.parameters.iter() {
            bits.extend(gradients.get(id).iter().map(|x| u64::from(x.to_bits())));
            written.extend(trainer.model.to_file(id, parameter, parameter.value.to_vec()));
        }
        written.sort_by(|a, b| a.name.cmp(&b.name));
        let names: Vec<&str> = source.checkpoint().names().collect();
        assert_eq!(
            written.iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>(),
            names,
            "{}",
            folder.display()
        );
        for tensor in &written {
            let want = source.tensor(&tensor.name, &tensor.shape).expect("the same shape").to_f32();
            assert_eq!(tensor.values, want, "{} of {}", tensor.name, folder.display());
        }
        found.push(bits);
    }
    assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "layouts of one model");
}
