//! A layer of experts against differences of its loss: every kind of router and of shared expert,
//! adapters, load balance; and under every recomputation policy the same bits.
#![expect(clippy::float_arithmetic, reason = "differences of losses, made-up weights")]

use isobit_autograd::{
    Adapter, Balance, BatchLayout, ExpertActivation, ExpertAdapter, ExpertMatrix, Experts, Gradients, Linear,
    LossTargets, Matrix, ParameterId, Parameters, Policy, Router, SharedBranch, Table, Tape, TapeError, Variable,
    Vector,
};
use isobit_kernels::op::{Scoring, Span};
use isobit_kernels::{Cpu, Device, Path};
use isobit_numerics::elementary::ClampedSwiglu;
use isobit_numerics::philox::{Key, Purpose, word};
use isobit_numerics::slices::Profile;

const HIDDEN: usize = 12;
const WIDTH: usize = 6;
const EXPERTS: usize = 8;
const RANK: usize = 2;
const VOCABULARY: usize = 11;
const TOKENS: usize = 9;

/// Numbers between −1/2 and 1/2.
fn numbers(tensor: usize, length: usize) -> Vec<f32> {
    let key = Key::new(2, Purpose::TestData);
    (0..length).map(|at| (word(key, 0, 0, tensor as u32, at as u64) as i32) as f32 / 4_294_967_296.0).collect()
}

/// What varies.
#[derive(Clone, Copy, Debug)]
struct NetShape {
    scoring: Scoring,
    renormalise: bool,
    groups: usize,
    /// Without a gate, or with one.
    shared: Option<bool>,
    balance: bool,
    /// Biases of router and experts, and clamped SwiGLU.
    biased: bool,
}

struct Net {
    backend: Cpu,
    kind: NetShape,
    parameters: Parameters<Cpu>,
    table: Table<Cpu>,
    router: Router<Cpu>,
    experts: Experts<Cpu>,
    /// Gate, up, down, and the gate of the whole.
    shared: Vec<Linear<Cpu>>,
    head: Matrix<Cpu>,
}

impl Net {
    fn new(kind: NetShape) -> Self {
        let backend = Cpu::new(1, Path::best()).expect("a path");
        let mut parameters = Parameters::default();
        let mut add = |name: &str, shape: &[usize]| -> ParameterId {
            let values = numbers(parameters.len(), shape.iter().product());
            parameters.add(name, shape.to_vec(), backend.upload(&values), true)
        };
        let table = Table::Trained(add("table", &[VOCABULARY, HIDDEN]));
        let router = Router {
            weight: Matrix::Trained(add("router", &[EXPERTS, HIDDEN])),
            logit_bias: kind.biased.then(|| Vector::Trained(add("router bias", &[EXPERTS]))),
            bias: (kind.scoring == Scoring::Sigmoid).then(|| backend.upload(&numbers(99, EXPERTS))),
            hidden: HIDDEN,
            experts: EXPERTS,
            chosen: 3,
            scoring: kind.scoring,
            renormalise: kind.renormalise,
            scale: if kind.scoring == Scoring::Sigmoid { 1.5 } else { 1.0 },
            groups: kind.groups,
            kept_groups: kind.groups.div_ceil(2),
        };
        let mut matrix = |name: &str, outputs: usize, inputs: usize| {
            let weight = Matrix::Trained(add(name, &[EXPERTS, outputs, inputs]));
            let a = add(&format!("{name} A"), &[EXPERTS, RANK, inputs]);
            let b = add(&format!("{name} B"), &[EXPERTS, outputs, RANK]);
            let adapter = Some(ExpertAdapter { a, b, rank: RANK, scale: 0.5, halves: false });
            let bias = kind.biased.then(|| Vector::Trained(add(&format!("{name} bias"), &[EXPERTS, outputs])));
            ExpertMatrix { experts: EXPERTS, outputs, inputs, weight, bias, adapter }
        };
        let gate_up = matrix("gate_up", 2 * WIDTH, HIDDEN);
        let down = matrix("down", HIDDEN, WIDTH);
        let mut shared = Vec::new();
        if let Some(gated) = kind.shared {
            let shapes =
                [("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH), ("switch", 1, HIDDEN)];
            for (name, outputs, inputs) in shapes.into_iter().take(if gated { 4 } else { 3 }) {
                let weight = Matrix::Trained(add(name, &[outputs, inputs]));
                let (a, b) = (add(&format!("{name} A"), &[RANK, inputs]), add(&format!("{name} B"), &[outputs, RANK]));
                let adapter = Some(Adapter { a, b, rank: RANK, scale: 0.5, dropout: 0.0, tensor: 0 });
                shared.push(Linear { outputs, inputs, weight, bias: None, adapter });
            }
        }
        let head = Matrix::Trained(add("head", &[VOCABULARY, HIDDEN]));
        let activation = if kind.biased {
            ExpertActivation::Clamped(ClampedSwiglu { alpha: 1.702, limit: 7.0 })
        } else {
            ExpertActivation::Swiglu
        };
        Self { backend, kind, parameters, table, router, experts: Experts { gate_up, activation, down }, shared, head }
    }

    fn layer<'a>(&'a self, tape: &mut Tape<'a, Cpu>, x: &Variable<Cpu>) -> Result<Variable<Cpu>, TapeError> {
        let routes = tape.route(x, &self.router);
        let active = tape.experts_up(x, &routes, &self.experts)?;
        let shared = (!self.shared.is_empty()).then(|| {
            let inputs: Vec<&Linear<Cpu>> =
                [&self.shared[0], &self.shared[1]].into_iter().chain(self.shared.get(3)).collect();
            let mut outputs = tape.linears(x, &inputs).into_iter();
            let (gate, up) = (outputs.next().expect("gate"), outputs.next().expect("up"));
            SharedBranch { active: tape.swiglu(gate, up), down: &self.shared[2], gate: outputs.next() }
        });
        tape.finish_experts(x, &active, &routes, &self.experts, shared)
    }

    /// The loss, what was chosen, and the gradients of all parameters.
    fn pass(&self, policy: Policy) -> (f64, Vec<Vec<u32>>, Vec<Vec<f32>>) {
        let backend = &self.backend;
        let positions: Vec<u32> = (0..TOKENS as u32).collect();
        let layout = BatchLayout {
            tokens: TOKENS,
            row_starts: vec![0, 4, TOKENS],
            spans: vec![Span { queries: 0..TOKENS, keys: 0..TOKENS }],
            positions: backend.upload(&positions),
            key: Key::new(0, Purpose::Dropout),
            step: 1,
            first_row: 0,
        };
        let ids = backend.upload(&[3, 1, 4, 1, 5, 9, 2, 6, 10]);
        let labels = backend.upload(&[1, 4, 1, 5, 9, 2, 6, 5, 3]);
        let targets = LossTargets { labels, weight: backend.upload(&[1.0 / TOKENS as f32; TOKENS]) };
        let mut tape = Tape::new(backend, &self.parameters, &layout, Profile::X3, policy);
        if self.kind.balance {
            tape = tape.with_balance(Balance { coefficient: 0.5, targets: vec![4, 5], step_targets: TOKENS });
        }
        let mut x = tape.embedding(&self.table, &ids, HIDDEN);
        for layer in 0..2 {
            x = tape.block(layer, layer == 1, x, move |tape, x| self.layer(tape, &x)).expect("a layer");
        }
        let output = tape.head_loss(x, &self.head, VOCABULARY, &targets);
        let mut loss: f64 = output.loss.iter().map(|loss| f64::from(*loss)).sum();
        tape.balance_loss(|of_row| loss += of_row).expect("a loss");
        let expert_indices = tape.expert_indices().expect("expert indices");
        let mut gradients = Gradients::zeros(backend, &self.parameters);
        tape.backward(&mut gradients).expect("gradients");
        let gradients = self.parameters.iter().map(|(id, _)| gradients.get(id).to_vec()).collect();
        (loss / TOKENS as f64, expert_indices, gradients)
    }
}

fn kinds() -> Vec<NetShape> {
    let kind = |scoring, renormalise, groups, shared, balance| NetShape {
        scoring,
        renormalise,
        groups,
        shared,
        balance,
        biased: false,
    };
    vec![
        NetShape { biased: true, ..kind(Scoring::Softmax, true, 1, None, true) },
        kind(Scoring::Softmax, true, 1, None, true),
        kind(Scoring::Softmax, false, 1, Some(true), false),
        kind(Scoring::Softmax, true, 1, Some(true), true),
        kind(Scoring::Sigmoid, true, 4, Some(false), false),
        kind(Scoring::Sigmoid, false, 2, None, false),
    ]
}

/// Along a random direction of every tensor.
#[test]
fn gradients_are_the_slopes_of_the_loss() {
    for kind in kinds() {
        let mut net = Net::new(kind);
        let (_, expert_indices, gradients) = net.pass(Policy::None);
        let ids: Vec<ParameterId> = net.parameters.iter().map(|(id, _)| id).collect();
        for (id, gradient) in ids.into_iter().zip(gradients) {
            let name = net.parameters.get(id).name.clone();
            let direction = numbers(1000 + name.len(), gradient.len());
            let start = net.parameters.get(id).value.to_vec();
            // None where the step sends a token elsewhere: there the loss jumps.
            let mut at = |step: f32| {
                let moved: Vec<f32> = start.iter().zip(&direction).map(|(x, d)| x + step * d).collect();
                let value = net.backend.upload(&moved);
                *net.parameters.get_mut(id).value = value;
                let (loss, chosen, _) = net.pass(Policy::None);
                (chosen == expert_indices).then_some(loss)
            };
            let mut slope = |step: f32| Some((at(step)? - at(-step)?) / f64::from(2.0 * step));
            // Long steps see the curve, short ones the rounding of float32: one of them sees the
            // slope.
            let slopes: Vec<f64> = [1.6e-2, 4e-3, 1e-3, 2.5e-4].into_iter().filter_map(&mut slope).collect();
            at(0.0);
            let want: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
            let size: f64 = gradient.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt();
            let near = slopes.iter().any(|slope| (slope - want).abs() < 1e-3 * size + 5e-6);
            assert!(near, "{kind:?}, {name}: {slopes:?} along the loss, {want} by the tape ({size})");
            assert!(size > 1e-4, "{kind:?}, {name} hardly matters: {size}");
        }
    }
}

#[test]
fn policies_change_no_bit() {
    for kind in kinds() {
        let net = Net::new(kind);
        let (loss, expert_indices, want) = net.pass(Policy::None);
        for policy in [Policy::Full, Policy::Selective] {
            let (other, chosen, got) = net.pass(policy);
            assert_eq!((other.to_bits(), chosen), (loss.to_bits(), expert_indices.clone()), "{kind:?}");
            let bits = |all: &[Vec<f32>]| all.iter().flatten().map(|x| x.to_bits()).collect::<Vec<u32>>();
            assert_eq!(bits(&got), bits(&want), "{kind:?}, {}", policy.name());
        }
    }
}
