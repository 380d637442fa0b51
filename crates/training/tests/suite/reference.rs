//! Loss, gradients and five AdamW steps against transformers and peft in float32
//! (`crates/models/tests/fixtures`, made by `tools/reference`).
//!
//! Bounds. The fixtures say how far the judge itself moves when every product is perturbed by a
//! relative 1e-4, 1e-6 or 1e-7 (`product_noise_error`, float64, worst of three seeds) and how far
//! its float32 is from its float64 (`float32_error`). Products of profile x2 have errors near 1e-4,
//! those of x3 are like float32's; a quantity may lie within ten times what noise of that size does
//! to it, plus a floor for what three seeds did not show. Weights after five steps are compared by
//! their update: the norm of the deviation over the norm of the update.
#![expect(clippy::float_arithmetic, reason = "comparison with another framework")]

use isobit_autograd::{Parameter, ParameterId, Policy, Tape};
use isobit_kernels::{Cpu, Device, Path as CpuPath};
use isobit_models::build::Settings;
use isobit_models::generate::Session;
use isobit_models::{Config, LoraConfig, Trained, Weights, build, peft};
use isobit_numerics::slices::Profile;
use isobit_proof::safetensors::{SafeTensors, TensorFiles};
use isobit_training::batch::{Batch, BatchPosition};
use isobit_training::engine::{Engine, StepGradients};
use isobit_training::row::Row;
use isobit_training::step::StepSettings;
use isobit_training::trainer::Trainer;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures")
}

fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

/// One case: a base model, rows, and what the judge found.
struct Case {
    name: &'static str,
    folder: PathBuf,
    base: PathBuf,
    found: Value,
}

impl Case {
    fn new(name: &'static str) -> Self {
        let folder = fixtures().join(name);
        let found = json(&folder.join("case.json"));
        let base = fixtures().join(found["model"].as_str().expect("a model"));
        Self { name, folder, base, found }
    }

    fn rows(&self) -> Vec<Row> {
        let numbers = |value: &Value| -> Vec<i64> {
            value.as_array().expect("numbers").iter().map(|x| x.as_i64().expect("a number")).collect()
        };
        let rows = self.found["rows"].as_array().expect("rows");
        rows.iter()
            .map(|row| {
                let tokens: Vec<u32> = numbers(&row["input_ids"]).into_iter().map(|id| id as u32).collect();
                let targets = numbers(&row["labels"]).into_iter().map(|label| label != -100).collect();
                let mut document_starts: Vec<usize> =
                    numbers(&row["document_starts"]).into_iter().map(|start| start as usize).collect();
                document_starts.push(tokens.len());
                Row::new(tokens, targets, document_starts)
            })
            .collect()
    }

    fn trained(&self) -> Trained {
        if self.found["mode"] == "full" {
            return Trained::Full;
        }
        let adapter = json(&self.folder.join("adapter/adapter_config.json"));
        let targets: Vec<&str> =
            adapter["target_modules"].as_array().expect("targets").iter().filter_map(Value::as_str).collect();
        let number = |key: &str| adapter[key].as_f64().expect(key);
        let mut lora = LoraConfig::new(number("r") as usize, number("lora_alpha"), &targets);
        lora.rslora = adapter["use_rslora"] == true;
        let pattern = |key: &str| -> BTreeMap<String, f64> {
            let entries = adapter[key].as_object().into_iter().flatten();
            entries.map(|(name, value)| (name.clone(), value.as_f64().expect("a number"))).collect()
        };
        lora.rank_pattern = pattern("rank_pattern").into_iter().map(|(name, rank)| (name, rank as usize)).collect();
        lora.alpha_pattern = pattern("alpha_pattern");
        lora.layers = adapter["layers_to_transform"]
            .as_array()
            .map(|layers| layers.iter().map(|layer| layer.as_u64().expect("a layer") as usize).collect());
        let saved = adapter["modules_to_save"].as_array().into_iter().flatten();
        lora.saved = saved.filter_map(Value::as_str).map(str::to_string).collect();
        lora.parameters = adapter["target_parameters"]
            .as_array()
            .map(|names| names.iter().filter_map(Value::as_str).map(str::to_string).collect())
            .unwrap_or_default();
        Trained::Lora(lora)
    }

    fn trainer(&self, profile: Profile) -> Trainer<Cpu> {
        self.trainer_of(&self.base, profile)
    }

    /// With the weights of another folder.
    fn trainer_of(&self, weights: &Path, profile: Profile) -> Trainer<Cpu> {
        let backend = Cpu::new(2, CpuPath::best()).expect("the best path");
        let config = std::fs::read_to_string(self.base.join("config.json")).expect("a config");
        let config = Config::parse(&config).expect("a readable config");
        let source = Weights::new(TensorFiles::open(weights).expect("weights"), &config).expect("known names");
        let settings = Settings { trained: self.trained(), profile, positions: 128, seed: 1 };
        let mut built = build(&backend, &config, &source, &settings).expect("a model");
        if self.found["mode"] == "lora" {
            let start = SafeTensors::open(&self.folder.join("adapter/adapter_model.safetensors")).expect("an adapter");
            peft::load(&backend, &mut built, &start).unwrap_or_else(|error| panic!("{}: {error}", self.name));
            for (id, parameter) in built.parameters.iter() {
                let written = built.model.trained_tensor(id, parameter).to_file(parameter.value.to_vec());
                let tensor = start.get(&parameter.name).expect("PEFT's name");
                assert_eq!(written[0].shape, tensor.shape, "{}", parameter.name);
                assert_eq!(written[0].values, tensor.to_f32().expect("float32"), "{}", parameter.name);
            }
        }
        Trainer::new(backend, built)
    }

    /// After so many updates every router chooses what the judge's does. The judge's are sorted by
    /// weight, ours by what decided; a correction bias makes these differ, so the order inside a
    /// token is left out.
    fn check_expert_indices(&self, trainer: &Trainer<Cpu>, profile: Profile, updates: usize) {
        let path = self.folder.join("routing.json");
        if !path.exists() {
            return;
        }
        let routing = json(&path);
        for (index, row) in self.rows().iter().enumerate() {
            let place = BatchPosition { seed: 0, step: 1, first_row: 0, weight: 1.0 };
            let batch = Batch::new(&trainer.backend, &[row], place);
            let mut tape = Tape::inference(&trainer.backend, &trainer.parameters, &batch.layout, profile);
            trainer.model.logits(&mut tape, &batch.ids).expect("logits");
            let layers = routing["rows"][index].as_object().expect("layers");
            let got = tape.expert_indices().expect("expert indices");
            assert_eq!(got.len(), layers.len(), "{}: layers with experts", self.name);
            for (got, (layer, want)) in got.iter().zip(layers) {
                let mut got = got.clone();
                let mut want: Vec<u32> =
                    serde_json::from_value(want["experts"][updates].clone()).expect("expert indices");
                let chosen = routing["experts_per_token"].as_u64().expect("experts of a token") as usize;
                for all in [&mut got, &mut want] {
                    all.chunks_mut(chosen).for_each(<[u32]>::sort_unstable);
                }
                assert_eq!(got, want, "{} {profile:?}: row {index}, layer {layer}, {updates} updates", self.name);
            }
        }
    }

    /// The text that the judge continues gets the same tokens here, one by one with a cache. Its
    /// margins are beyond what the profiles may differ by.
    fn check_generation(&self, trainer: &Trainer<Cpu>, profile: Profile) {
        let Some(wanted) = self.found.get("generation") else { return };
        let tokens = |key: &str| -> Vec<u32> { serde_json::from_value(wanted[key].clone()).expect("tokens") };
        let margin = wanted["margin"].as_f64().expect("a margin");
        assert!(margin > 2.0 * self.bound(profile, "logits", None), "{} {profile:?}: margin {margin}", self.name);
        let mut session = Session::new(&trainer.backend, &trainer.model, &trainer.parameters, profile);
        let (mut next, mut got) = (tokens("prompt"), Vec::new());
        for _ in tokens("tokens") {
            let logits = session.extend(&next).expect("logits");
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).expect("a token");
            next = vec![best as u32];
            got.push(best as u32);
        }
        assert_eq!(got, tokens("tokens"), "{} {profile:?}: generation", self.name);
    }

    /// The largest error allowed for a quantity of the judge.
    fn bound(&self, profile: Profile, quantity: &str, tensor: Option<&str>) -> f64 {
        let largest = |value: &Value| {
            let value = &value[quantity];
            let value = tensor.map_or(value, |tensor| &value[tensor]);
            let all = value.as_array().into_iter().flatten().filter_map(Value::as_f64);
            all.chain(value.as_f64()).fold(0.0, f64::max)
        };
        let noise = |size: &str| largest(&self.found["product_noise_error"][size]);
        match profile {
            Profile::X3 => 10.0 * largest(&self.found["float32_error"]).max(noise("1e-07")) + 1e-5,
            Profile::X2 => 10.0 * noise("1e-04") + 1e-3,
        }
    }
}

/// Largest difference relative to the largest wanted value.
fn relative(want: &[f32], got: &[f32]) -> f64 {
    assert_eq!(want.len(), got.len(), "elements");
    let largest = want.iter().fold(0.0f64, |most, x| most.max(f64::from(x.abs())));
    let differences = want.iter().zip(got).map(|(want, got)| f64::from((want - got).abs()));
    differences.fold(0.0, f64::max) / largest.max(1e-30)
}

/// Norm of the deviation over the norm of the update.
fn deviation(start: &[f32], want: &[f32], got: &[f32]) -> f64 {
    let norm =
        |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a - b) * f64::from(a - b)).sum::<f64>().sqrt();
    norm(want, got) / norm(want, start).max(1e-30)
}

fn settings(profile: Profile, policy: Policy, micro_batch_size: usize) -> StepSettings {
    StepSettings {
        profile,
        policy,
        micro_batch_size,
        gradient_groups: 1,
        seed: 1,
        max_grad_norm: Some(1.0),
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.1,
        digests: false,
    }
}

fn check(name: &'static str) {
    let case = Case::new(name);
    let rows = case.rows();
    let rows: Vec<&Row> = rows.iter().collect();
    for profile in [Profile::X3, Profile::X2] {
        let mut trainer = case.trainer(profile);
        let settings = settings(profile, Policy::Full, 1);
        case.check_generation(&trainer, profile);
        let StepGradients { gradients, loss, targets } = trainer.gradients(&rows, 1, &settings).expect("gradients");
        let want = case.found["loss"]["float64"].as_f64().expect("a loss");
        let error = (loss / targets as f64 - want).abs();
        assert!(error < case.bound(profile, "losses", None), "{name} {profile:?}: loss {error:e}");
        let wanted = SafeTensors::open(&case.folder.join("gradients.safetensors")).expect("gradients");
        for (id, parameter) in trainer.parameters.iter() {
            let want = judged(&trainer, id, parameter, &wanted);
            let got = trainer.backend.download(gradients.get(id)).expect("a download");
            let (error, bound) = (relative(&want, &got), case.bound(profile, "gradients", Some(&parameter.name)));
            assert!(error < bound, "{name} {profile:?}: gradient of {} {error:e} > {bound:e}", parameter.name);
        }
        if !case.folder.join("after.safetensors").exists() {
            continue;
        }
        let wanted = SafeTensors::open(&case.folder.join("after.safetensors")).expect("weights");
        let values = |trainer: &Trainer<Cpu>| -> Vec<Vec<f32>> {
            trainer.parameters.iter().map(|(_, parameter)| parameter.value.to_vec()).collect()
        };
        let start = values(&trainer);
        for step in 1..=5 {
            case.check_expert_indices(&trainer, profile, step as usize - 1);
            let report = trainer.step(&rows, step, 1e-2, &settings).expect("a step");
            let want = case.found["steps"][step as usize - 1]["loss"]["float64"].as_f64().expect("a loss");
            let error = (report.loss - want).abs() / want;
            assert!(
                error < case.bound(profile, "loss", None) * 50.0,
                "{name} {profile:?}: loss of step {step} {error:e}"
            );
        }
        case.check_expert_indices(&trainer, profile, 5);
        for (((id, parameter), start), got) in trainer.parameters.iter().zip(&start).zip(values(&trainer)) {
            let want = judged(&trainer, id, parameter, &wanted);
            let (error, bound) = (deviation(start, &want, &got), case.bound(profile, "updates", Some(&parameter.name)));
            assert!(error < bound, "{name} {profile:?}: {} after five steps {error:e} > {bound:e}", parameter.name);
        }
    }
}

/// The judge's tensor, as it lies in memory here. Experts are stacked there as here, in gpt-oss
/// transposed as in its files; adapters are as in PEFT's files.
fn judged(trainer: &Trainer<Cpu>, id: ParameterId, parameter: &Parameter<Cpu>, file: &SafeTensors) -> Vec<f32> {
    let get = |name: &str| Some(file.get(name).ok()?.to_f32().expect("float32"));
    let tensor = trainer.model.trained_tensor(id, parameter);
    let in_file = tensor.in_file();
    let is_transposed = in_file.len() == 1
        && in_file[0].1 != parameter.shape
        && file.get(&parameter.name).is_ok_and(|judged| judged.shape == in_file[0].1);
    if parameter.name.contains("lora_") || is_transposed {
        return tensor.from_file(|name, _| get(name).ok_or(())).expect("the judge's name");
    }
    get(&parameter.name).unwrap_or_else(|| panic!("the judge has no {}", parameter.name))
}

macro_rules! cases {
    ($($test:ident = $name:literal;)*) => {
        $(#[test]
        fn $test() {
            check($name);
        })*
    };
}

cases! {
    qwen2 = "qwen2-base";
    qwen2_lora = "qwen2-base-lora";
    qwen2_lora_of_one_layer = "qwen2-base-layers";
    qwen2_lora_patterns = "qwen2-base-pattern";
    qwen2_rslora = "qwen2-base-rslora";
    qwen2_whole_modules = "qwen2-base-saved";
    qwen2_whole_head_of_a_tied_model = "qwen2-tied-saved";
    qwen2_tied = "qwen2-tied";
    qwen2_window = "qwen2-window";
    qwen2_window_packed = "qwen2-window-packed";
    qwen2_packed = "qwen2-packed";
    qwen2_unpacked = "qwen2-unpacked";
    qwen2_yarn = "qwen2-yarn";
    qwen2_bf16 = "qwen2-bf16";
    qwen3 = "qwen3-base";
    qwen3_lora = "qwen3-base-lora";
    qwen3_bias = "qwen3-bias";
    llama3_rope = "llama3-rope";
    llama_bias = "llama-bias";
    qwen3_5 = "qwen3_5-hybrid";
    qwen3moe = "qwen3moe-base";
    qwen3moe_raw = "qwen3moe-raw";
    qwen3moe_mixed = "qwen3moe-mixed";
    qwen3moe_lora = "qwen3moe-base-lora";
    qwen3moe_experts = "qwen3moe-base-experts";
    qwen3moe_balance = "qwen3moe-aux";
    awq = "awq";
    awq_moe = "awq-moe";
    fp4 = "fp4";
    gptq_moe = "gptq-moe";
    gptq_moe_order = "gptq-moe-order";
    gptq_v1 = "gptq-v1";
    gptq_v1_asymmetric = "gptq-v1-asymmetric";
    gptq_v2_order = "gptq-v2-order";
    gptq_v2_whole = "gptq-v2-whole";
    nf4 = "nf4";
    qwen3_5moe = "qwen3_5moe-hybrid";
    qwen3_5moe_lora = "qwen3_5moe-hybrid-lora";
    qwen3_5moe_packed = "qwen3_5moe-hybrid-packed";
    qwen3_5moe_full = "qwen3_5moe-full";
    qwen3_5moe_linear = "qwen3_5moe-linear";
    qwen3_5moe_linear_64 = "qwen3_5moe-linear-64";
    qwen3_5moe_linear_65 = "qwen3_5moe-linear-65";
    qwen3_5moe_linear_130 = "qwen3_5moe-linear-130";
    qwen3_5moe_two = "qwen3_5moe-two";
    qwen3_5moe_balance = "qwen3_5moe-aux";
    qwen3next = "qwen3next-hybrid";
    qwen3next_lora = "qwen3next-hybrid-lora";
    deepseek = "deepseek-base";
    deepseek_lora = "deepseek-base-lora";
    deepseek_mscale = "deepseek-mscale";
    deepseek_plain = "deepseek-plain";
    deepseek_fp8 = "deepseek-fp8";
    kimi_k2 = "kimi-base";
    mistral = "mistral-window";
    mixtral = "mixtral-base";
    mixtral_lora = "mixtral-base-lora";
    mixtral_balance = "mixtral-aux";
    smollm3 = "smollm3-base";
    granite = "granite-base";
    granite_moe = "granitemoe-base";
    gpt_oss = "gptoss-base";
    gpt_oss_lora = "gptoss-base-lora";
    gpt_oss_balance = "gptoss-aux";
    gpt_oss_mxfp4 = "gptoss-mxfp4";
    olmo2 = "olmo2-base";
    olmo3 = "olmo3-base";
    phi3 = "phi3-base";
    phi3_lora = "phi3-base-lora";
    phi3_long = "phi3-long";
    phi3_short = "phi3-short";
    glm = "glm-base";
    glm4 = "glm4-base";
    glm4_lora = "glm4-base-lora";
    glm4_moe = "glm4moe-base";
    gemma2 = "gemma2-base";
    gemma2_lora = "gemma2-base-lora";
    gemma3 = "gemma3-base";
    gemma3_lora = "gemma3-base-lora";
    qwen3_vl = "qwen3vl-base";
    qwen3_vl_moe = "qwen3vlmoe-base";
}
