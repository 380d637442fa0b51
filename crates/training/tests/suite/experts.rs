//! Laws of a mixture of experts, on bits, where routers have ties everywhere: threads, paths,
//! splits, policies, devices and layouts of the file change nothing; a cache gives what the full
//! forward pass gives; files keep the layout of the base.

use crate::hard_to_route::{Ties, VOCABULARY, config};
use crate::short_runs::{self, Run, cpu, step_settings};
use isobit_autograd::{BatchLayout, Policy, Tape};
use isobit_kernels::op::Span;
use isobit_kernels::{Device, Path as CpuPath};
use isobit_models::build::Settings;
use isobit_models::{Config, LoraConfig, Session, Trained, WeightSource, Weights, build};
use isobit_numerics::philox::{Key, Purpose};
use isobit_numerics::slices::Profile;
use isobit_proof::safetensors::TensorFiles;
use isobit_training::engine::{Engine, StepGradients};
use isobit_training::row::Row;
use isobit_training::trainer::Trainer;
use std::path::Path;

/// Everything trained with load balance; adapters on attention; adapters on experts.
fn runs() -> Vec<Run> {
    let run = |name, config, trained| Run { hard_to_route: Some(config), ..Run::new(name, trained) };
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
fn again_threads_and_paths() {
    short_runs::again_threads_and_paths(runs());
}

#[test]
fn any_split_and_any_checkpoint_policy() {
    short_runs::any_split_and_any_checkpoint_policy(runs());
}

#[test]
fn devices_equal_the_cpu() {
    short_runs::devices_equal_the_cpu("experts::devices_equal_the_cpu", &runs());
}

#[test]
fn a_cache_equals_the_full_forward() {
    let backend = cpu(2, CpuPath::best());
    let settings = Settings { trained: Trained::Nothing, profile: Profile::X2, positions: 256, seed: 0 };
    let built = build(&backend, &config(""), &Ties, &settings).expect("a model");
    let tokens: Vec<u32> = (0..150).map(|t| (t * 13 + 5) % VOCABULARY as u32).collect();
    let layout = BatchLayout {
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

/// One by one, fused and transposed: the same loss and gradients, and each is written as it was
/// read.
#[test]
fn layouts_of_the_file() {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/qwen3moe-base");
    let config = std::fs::read_to_string(base.join("config.json")).expect("a config");
    let config = Config::parse(&config).expect("a readable config");
    let mut found = Vec::new();
    for folder in [base.clone(), base.join("fused"), base.join("transposed")] {
        let source = Weights::new(TensorFiles::open(&folder).expect("weights"), &config).expect("known names");
        let backend = cpu(2, CpuPath::best());
        let settings = Settings { trained: Trained::Full, profile: Profile::X2, positions: 64, seed: 0 };
        let built = build(&backend, &config, &source, &settings).expect("a model");
        let trainer = Trainer::new(backend, built);
        let row = Row::document((0..30).map(|t| (t * 11 + 3) % 37).collect(), vec![true; 30]);
        let settings = step_settings(Profile::X2, Policy::Full, 1);
        let StepGradients { gradients, loss, .. } = trainer.gradients(&[&row], 1, &settings).expect("gradients");
        let mut bits = vec![loss.to_bits()];
        let mut written = Vec::new();
        for (id, parameter) in trainer.parameters.iter() {
            bits.extend(gradients.get(id).iter().map(|x| u64::from(x.to_bits())));
            written.extend(trainer.model.trained_tensor(id, parameter).to_file(parameter.value.to_vec()));
        }
        written.sort_by(|a, b| a.name.cmp(&b.name));
        let names: Vec<&str> = source.tensor_files().names().collect();
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
