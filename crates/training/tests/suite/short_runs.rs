//! Laws that a training run keeps whatever it trains: threads, paths, splits, checkpoint policies
//! and devices change no bit.

use crate::hard_to_route::{Ties, rows_of};
use isobit_autograd::Policy;
use isobit_conformance::devices_or_skips;
use isobit_kernels::backend::BegunDigests;
use isobit_kernels::op::AnyBuffer;
use isobit_kernels::{Backend, Cpu, Device, Path as CpuPath};
use isobit_models::build::{Built, Settings};
use isobit_models::weights::Weights;
use isobit_models::{Config, Trained, build};
use isobit_numerics::digest::Digest;
use isobit_numerics::slices::Profile;
use isobit_proof::chain::combined;
use isobit_proof::safetensors::TensorFiles;
use isobit_training::engine::Engine;
use isobit_training::row::Row;
use isobit_training::step::StepSettings;
use isobit_training::trainer::Trainer;
use std::fmt::Write;
use std::path::Path;

pub(crate) fn cpu(threads: usize, path: CpuPath) -> Cpu {
    Cpu::new(threads, path).expect("an available path")
}

pub(crate) fn step_settings(profile: Profile, policy: Policy, micro_batch_size: usize) -> StepSettings {
    StepSettings {
        profile,
        policy,
        micro_batch_size,
        gradient_groups: 1,
        seed: 7,
        max_grad_norm: Some(1.0),
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        digests: true,
    }
}

/// Config and weights of a model of the fixtures.
pub(crate) fn fixture_files(name: &str) -> (Config, Weights) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures").join(name);
    let config = std::fs::read_to_string(folder.join("config.json")).expect("a config");
    let config = Config::parse(&config).expect("a readable config");
    let source = Weights::new(TensorFiles::open(&folder).expect("weights"), &config).expect("known names");
    (config, source)
}

/// A model of the fixtures.
pub(crate) fn fixture<B: Backend>(backend: &B, name: &str, trained: Trained, profile: Profile) -> Built<B> {
    let (config, source) = fixture_files(name);
    build(backend, &config, &source, &Settings { trained, profile, positions: 256, seed: 7 }).expect("a model")
}

/// A few steps of a model: a fixture, or the one that is hard to route with a config of its own.
#[derive(Clone)]
pub(crate) struct Run {
    pub(crate) name: &'static str,
    pub(crate) hard_to_route: Option<Config>,
    pub(crate) trained: Trained,
    pub(crate) profile: Profile,
    pub(crate) policy: Policy,
    pub(crate) micro_batch_size: usize,
}

impl Run {
    pub(crate) fn new(name: &'static str, trained: Trained) -> Self {
        Self { name, hard_to_route: None, trained, profile: Profile::X2, policy: Policy::None, micro_batch_size: 5 }
    }

    fn built<B: Backend>(&self, backend: &B) -> Built<B> {
        let (trained, profile) = (self.trained.clone(), self.profile);
        let Some(config) = &self.hard_to_route else { return fixture(backend, self.name, trained, profile) };
        build(backend, config, &Ties, &Settings { trained, profile, positions: 256, seed: 7 }).expect("a model")
    }

    /// Three steps; losses, norms, weights and moments as one line.
    pub(crate) fn on<B: Backend>(&self, backend: B) -> String {
        let built = self.built(&backend);
        let mut trainer = Trainer::new(backend, built);
        let settings = step_settings(self.profile, self.policy, self.micro_batch_size);
        let rows = rows_of(trainer.model.config.vocabulary);
        let rows: Vec<&Row> = rows.iter().collect();
        let (mut text, mut last) = (String::new(), Vec::new());
        for step in 1..=3 {
            let report = trainer.step(&rows, step, 1e-2, &settings).expect("a step");
            let _ = write!(text, "{:016x} {:08x} ", report.loss.to_bits(), report.grad_norm.to_bits());
            let _ = write!(text, "{} ", combined(&report.digests.iter().map(|of| of.gradient).collect::<Vec<_>>()));
            last = report.digests;
        }
        let mut digests = Vec::new();
        for (((_, parameter), moments), of) in trainer.parameters.iter().zip(trainer.moments()).zip(&last) {
            let recorded = [of.value, of.moments[0], of.moments[1]];
            for (buffer, recorded) in [&*parameter.value, &moments[0], &moments[1]].into_iter().zip(recorded) {
                let digest = BegunDigests::new(&trainer.backend, &[AnyBuffer::F32(buffer)]);
                let digest = digest.finish(&trainer.backend).expect("a digest")[0];
                assert_eq!(digest, recorded, "what the last step said");
                digests.extend(digest.to_string().into_bytes());
            }
        }
        text + &Digest::of_bytes(&digests).to_string()
    }
}

pub(crate) fn again_threads_and_paths(runs: Vec<Run>) {
    for run in runs {
        let want = run.on(cpu(1, CpuPath::Scalar));
        for path in CpuPath::available() {
            for threads in [1, 2, 7] {
                assert_eq!(run.on(cpu(threads, path)), want, "{} on {path} with {threads} threads", run.name);
            }
        }
    }
}

pub(crate) fn any_split_and_any_checkpoint_policy(runs: Vec<Run>) {
    for run in runs {
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

/// Law 10 on whatever device there is. A missing one is printed and counted, or a failure where it
/// is required.
pub(crate) fn devices_equal_the_cpu(test: &str, runs: &[Run]) {
    for gpu in devices_or_skips(test) {
        for run in runs {
            let run = Run { policy: Policy::Full, micro_batch_size: 2, ..run.clone() };
            assert_eq!(run.on(gpu.clone()), run.on(cpu(2, CpuPath::best())), "{} on {}", run.name, gpu.name());
        }
    }
}
