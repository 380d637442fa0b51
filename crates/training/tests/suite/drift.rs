//! What drifting hardware does to a recomputation, and who notices: a backend changes one result by
//! a unit in the last place.
//!
//! Routers choose among near ties. If a recomputation chose anew, a drift would send tokens
//! elsewhere and tensors would not fit; with the expert indices of the forward pass they fit, and
//! the digest at the block's ends stops the step and says where it began. Every op of a block is
//! tried.

use crate::hard_to_route::{EXPERTS, HIDDEN, Ties, config, rows};
use isobit_autograd::{Finding, Gradients, Policy, Tape, TapeError};
use isobit_kernels::cpu::CpuMemory;
use isobit_kernels::observe::{Call, Observed, Observer};
use isobit_kernels::op::Output;
use isobit_kernels::{Buffer, Cpu, Device, Path as CpuPath};
use isobit_models::build::Settings;
use isobit_models::{Built, Config, LoraConfig, Trained, build};
use isobit_numerics::slices::Profile;
use isobit_training::batch::{Batch, BatchPosition};
use isobit_training::row::Row;
use std::cell::{Cell, RefCell};

/// Changes results of the calls it is told to, and notes all calls.
#[derive(Default)]
struct Drift {
    on: Cell<bool>,
    calls: RefCell<Vec<(Call, bool)>>,
    /// The number of the call from which on, and how many calls of that op, drift.
    from: Cell<Option<usize>>,
    every: Cell<bool>,
    /// One element alone drifts: this one, counted round the result.
    element: Cell<Option<usize>>,
}

/// The size that tells what is kept aside from an op's first result.
const ASIDE: [usize; 3] = [1; 3];

impl Observer<Cpu> for Drift {
    fn before(&self, _: &Cpu, _: Call, _: &mut Buffer<u8>) {}

    /// What is kept aside counts as a call of its own.
    fn after(&self, _: &Cpu, call: Call, outputs: Vec<Output<'_, CpuMemory>>) {
        if !self.on.get() {
            return;
        }
        let (mut first, mut aside) = (None, None);
        for output in outputs {
            match output {
                Output::F32(result) if first.is_none() => first = Some(result),
                Output::Kept(result) => aside = Some(result),
                _ => {}
            }
        }
        self.drift(call, first);
        if let Some(result) = aside {
            self.drift(Call { size: ASIDE, ..call }, Some(result));
        }
    }
}

impl Drift {
    fn drift(&self, call: Call, result: Option<&mut Buffer<f32>>) {
        let mut calls = self.calls.borrow_mut();
        calls.push((call, result.is_some()));
        let Some(from) = self.from.get() else { return };
        let number = calls.len() - 1;
        let hit = number == from || self.every.get() && number > from && calls[from].0 == call;
        let Some(result) = result.filter(|_| hit) else { return };
        // Every other element, or one, away from zero by one unit.
        let (first, step) = self.element.get().map_or((1, 2), |at| (at % result.len(), usize::MAX));
        for value in result.iter_mut().skip(first).step_by(step).filter(|value| **value != 0.0) {
            *value = f32::from_bits(value.to_bits() + 1);
        }
    }
}

type Backed = Observed<Cpu, Drift>;

struct Setup {
    backend: Backed,
    built: Built<Backed>,
    profile: Profile,
}

/// How a tape is run.
#[derive(Clone, Copy)]
struct How {
    policy: Policy,
    cached: bool,
    checked: bool,
}

const FULL: How = How { policy: Policy::Full, cached: true, checked: true };

impl Setup {
    fn new(trained: Trained, profile: Profile) -> Self {
        Self::of(&config(r#","norm_topk_prob":true"#), trained, profile)
    }

    #[expect(clippy::float_arithmetic, reason = "made-up weights")]
    fn of(config: &Config, trained: Trained, profile: Profile) -> Self {
        let inner = Cpu::new(2, CpuPath::best()).expect("a path");
        let backend = Observed { inner, observer: Drift::default() };
        let settings = Settings { trained, profile, positions: 256, seed: 3 };
        let mut built = build(&backend, config, &Ties, &settings).expect("a model");
        // B of a fresh adapter is zero and would hide what leads to it.
        let ids: Vec<_> = built.parameters.iter().map(|(id, _)| id).collect();
        for id in ids {
            let parameter = built.parameters.get_mut(id);
            if parameter.name.contains("lora_B") {
                let values: Vec<f32> =
                    (0..parameter.length()).map(|at| ((at * 37 % 101) as f32 - 50.0) / 500.0).collect();
                *parameter.value = backend.upload(&values);
            }
        }
        Self { backend, built, profile }
    }

    /// A forward and a backward pass, drifting in the backward one.
    fn pass(&self, how: How, from: Option<usize>, every: bool) -> Result<Vec<u32>, TapeError> {
        let rows = rows();
        let rows: Vec<&Row> = rows.iter().take(2).collect();
        let batch = Batch::new(&self.backend, &rows, BatchPosition { seed: 3, step: 1, first_row: 0, weight: 0.01 });
        let drift = &self.backend.observer;
        drift.on.set(false);
        let mut tape = Tape::new(&self.backend, &self.built.parameters, &batch.layout, self.profile, how.policy)
            .with_cached_indices(how.cached);
        if !how.checked {
            tape = tape.without_digest_check();
        }
        self.built.model.loss(&mut tape, &batch.ids, &batch.targets)?;
        drift.calls.borrow_mut().clear();
        drift.from.set(from);
        drift.every.set(every);
        drift.on.set(true);
        let mut gradients = Gradients::zeros(&self.backend, &self.built.parameters);
        let result = tape.backward(&mut gradients);
        drift.on.set(false);
        result?;
        let bits = |id| gradients.get(id).iter().map(|x: &f32| x.to_bits()).collect::<Vec<u32>>();
        Ok(self.built.parameters.iter().flat_map(|(id, _)| bits(id)).collect())
    }

    /// The calls of every recomputation: from a block's first norm to the first digest of its ends.
    fn recomputations(&self, how: How) -> Vec<Vec<(usize, Call)>> {
        self.pass(how, None, false).expect("no drift");
        let mut all = vec![Vec::new()];
        let mut inside = false;
        for (number, (call, has_result)) in self.backend.observer.calls.borrow().iter().enumerate() {
            if call.op == "rms_norm_forward" && !inside {
                inside = true;
            } else if call.op == "digest" && inside {
                inside = false;
                all.push(Vec::new());
            }
            if inside && *has_result {
                all.last_mut().expect("at least one").push((number, *call));
            }
        }
        all.pop();
        all
    }
}

fn lora() -> Trained {
    let mut lora = LoraConfig::new(3, 6.0, &["q_proj", "v_proj", "o_proj"]);
    lora.parameters =
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.down_proj.weight"].map(str::to_string).to_vec();
    Trained::Lora(lora)
}

/// The router's product in the recomputation of layer 0, the last block that is computed again.
fn router_call(setup: &Setup, how: How) -> usize {
    let of_layer_0 = setup.recomputations(how).pop().expect("layer 0 is computed again");
    let is_router = |(_, call): &&(usize, Call)| call.op == "product_forward" && call.size[1..] == [EXPERTS, HIDDEN];
    of_layer_0.iter().find(is_router).expect("a router").0
}

#[test]
fn expert_indices_computed_again_are_stopped_by_layer_op_and_counts() {
    let setup = Setup::new(lora(), Profile::X2);
    let how = How { cached: false, checked: false, ..FULL };
    // Without drift choosing again chooses the same.
    assert_eq!(setup.pass(how, None, false), setup.pass(FULL, None, false));
    let error = setup.pass(how, Some(router_call(&setup, how)), false).map(|_| ()).expect_err("tokens went elsewhere");
    let TapeError::Recompute { layer, op, forward, recomputed } = &error else { panic!("{error}") };
    assert_eq!((*layer, *op), (0, "router"), "{error}");
    assert_ne!(forward, recomputed);
    assert!(forward.contains('[') && error.to_string().contains("layer 0"), "{error}");
}

#[test]
fn with_kept_expert_indices_shapes_agree_and_the_digest_names_the_op() {
    let setup = Setup::new(lora(), Profile::X2);
    let error = setup.pass(FULL, Some(router_call(&setup, FULL)), false).map(|_| ()).expect_err("different bits");
    let TapeError::Digest { layer, finding, .. } = &error else { panic!("{error}") };
    assert_eq!((*layer, finding), (0, &Finding::Op { op: "router", tensor: 0 }), "{error}");
}

#[test]
fn a_drift_that_repeats_is_told_apart() {
    let setup = Setup::new(lora(), Profile::X2);
    let error = setup.pass(FULL, Some(router_call(&setup, FULL)), true).map(|_| ()).expect_err("different bits");
    let TapeError::Digest { finding, .. } = &error else { panic!("{error}") };
    assert_eq!(*finding, Finding::Agrees, "{error}");
}

#[test]
fn without_the_digest_check_it_trains_on_with_other_bits() {
    let setup = Setup::new(lora(), Profile::X2);
    let how = How { checked: false, ..FULL };
    setup.pass(how, Some(router_call(&setup, how)), false).expect("shapes agree");
    // Of queries, where more of it survives than of a router's near ties.
    let of_layer_0 = setup.recomputations(how).pop().expect("layer 0 is computed again");
    let query = of_layer_0.iter().find(|(_, call)| call.op == "linear_forward").expect("a linear layer").0;
    let got = setup.pass(how, Some(query), false).expect("shapes agree");
    let want = setup.pass(FULL, None, false).expect("no drift");
    assert!(got != want, "the drift reached the gradients");
}

/// The ends of a block cover it: a drift of any op of a recomputation, dense or sparse, is caught.
#[test]
fn every_op_of_a_block() {
    for (name, trained) in [("adapters", lora()), ("everything", Trained::Full)] {
        check_every_op(name, &Setup::new(trained, Profile::X3));
    }
}

/// One bit of one element, far below what a product's slices keep: none of what parameter gradients
/// read, and of what attention reads, slips through.
#[test]
fn one_low_bit_of_what_products_round_away() {
    const OPS: [&str; 6] =
        ["rms_norm_forward", "rope_forward", "attention_forward", "dropout", "low_rank_contract", "embedding_forward"];
    let mut dropout = LoraConfig::new(3, 6.0, &["q_proj", "v_proj", "o_proj"]);
    dropout.dropout = 0.2;
    for trained in [lora(), Trained::Lora(dropout), Trained::Full] {
        let setup = Setup::new(trained, Profile::X2);
        let undisturbed = setup.pass(FULL, None, false).expect("no drift");
        let (mut caught, mut harmless) = (0, 0);
        for (number, call) in setup.recomputations(FULL).concat().iter().filter(|(_, call)| OPS.contains(&call.op)) {
            for element in [0, 131, 1_037, 5_003] {
                setup.backend.observer.element.set(Some(element));
                match setup.pass(FULL, Some(*number), false) {
                    Err(TapeError::Digest { .. }) => caught += 1,
                    Ok(gradients) if gradients == undisturbed => harmless += 1,
                    other => panic!("{call:?}, element {element}: {:?}", other.err()),
                }
            }
        }
        setup.backend.observer.element.set(None);
        assert!(caught > 40, "{caught} caught, {harmless} without effect");
    }
}

/// Every op where tokens are mixed by delta rules, gated or latent attention.
#[test]
fn every_op_of_other_mixers() {
    let hybrid = r#"{"model_type":"qwen3_5_text","hidden_size":16,"intermediate_size":24,"num_hidden_layers":3,"num_attention_heads":4,
        "num_key_value_heads":2,"head_dim":8,"linear_num_key_heads":2,"linear_num_value_heads":4,"linear_key_head_dim":4,
        "linear_value_head_dim":8,"layer_types":["linear_attention","full_attention","linear_attention"],"vocab_size":97}"#;
    let latent = r#"{"model_type":"deepseek_v3","hidden_size":16,"intermediate_size":24,"num_hidden_layers":3,"num_attention_heads":4,
        "num_key_value_heads":4,"q_lora_rank":12,"kv_lora_rank":8,"qk_nope_head_dim":6,"qk_rope_head_dim":8,"v_head_dim":10,
        "first_k_dense_replace":3,"vocab_size":97}"#;
    let targets = ["q_proj", "o_proj", "in_proj_qkv", "in_proj_a", "out_proj", "q_b_proj", "kv_a_proj_with_mqa"];
    for text in [hybrid, latent] {
        let config = Config::parse(text).expect("a config");
        for trained in [Trained::Lora(LoraConfig::new(3, 6.0, &targets)), Trained::Full] {
            check_every_op(text, &Setup::of(&config, trained, Profile::X3));
        }
    }
}

fn check_every_op(name: &str, setup: &Setup) {
    for policy in [Policy::Full, Policy::Selective] {
        let how = How { policy, ..FULL };
        let blocks = setup.recomputations(how);
        let undisturbed = setup.pass(how, None, false).expect("no drift");
        assert_eq!(blocks.len(), 2, "two blocks are computed again");
        for (layer, calls) in [1, 0].into_iter().zip(blocks) {
            assert!(calls.len() > 12, "{} calls of layer {layer}", calls.len());
            for (number, call) in calls {
                let result = setup.pass(how, Some(number), false);
                let caught = match &result {
                    Err(TapeError::Digest { layer: at, .. }) => *at == layer,
                    Err(_) => false,
                    // What is kept aside is not looked at where nothing before it is trained.
                    Ok(gradients) => call.size == ASIDE && *gradients == undisturbed,
                };
                assert!(caught, "{name}, {}, layer {layer}, {call:?}: {:?}", policy.name(), result.err());
            }
        }
    }
}
