//! Gradients of trained tensors: none may be missing in silence, and moving columns does not change
//! them.

use isobit_autograd::{
    BatchLayout, Blocks, Frozen, Gradients, Linear, LossTargets, Matrix, Move, ParameterId, Parameters, Policy, Table,
    Tape, TapeError, Variable, Vector,
};
use isobit_kernels::op::slices::sliced_weight;
use isobit_kernels::op::{SliceShape, Span};
use isobit_kernels::tensor::U32;
use isobit_kernels::{Device, Reference, StoredMatrix};
use isobit_numerics::philox::{Key, Purpose, word};
use isobit_numerics::slices::Profile;

const WIDTH: usize = 8;
const VOCABULARY: usize = 11;
const TOKENS: usize = 5;
const PROFILE: Profile = Profile::X2;

/// Numbers between −1 and 1.
#[expect(clippy::float_arithmetic, reason = "made-up weights")]
fn numbers(tensor: u32, length: usize) -> Vec<f32> {
    let key = Key::new(1, Purpose::TestData);
    (0..length).map(|at| (word(key, 0, 0, tensor, at as u64) as i32) as f32 / 2_147_483_648.0).collect()
}

struct Net {
    parameters: Parameters<Reference>,
    table: Table<Reference>,
    layer: Linear<Reference>,
    head: Matrix<Reference>,
}

impl Net {
    /// A trained layer between a frozen table and a frozen head.
    fn new() -> Self {
        let backend = &Reference;
        let mut parameters = Parameters::default();
        let weight = parameters.add("weight", vec![WIDTH, WIDTH], backend.upload(&numbers(0, WIDTH * WIDTH)), true);
        let bias = parameters.add("bias", vec![WIDTH], backend.upload(&numbers(1, WIDTH)), false);
        let head = backend.upload(&numbers(2, VOCABULARY * WIDTH));
        let shape = SliceShape { rows: VOCABULARY, width: WIDTH, profile: PROFILE };
        let head = Matrix::Frozen(sliced_weight(backend, StoredMatrix::F32(&head), 1, shape));
        let table = Table::Frozen(Frozen::F32(backend.upload(&numbers(3, VOCABULARY * WIDTH))));
        let layer = Linear {
            outputs: WIDTH,
            inputs: WIDTH,
            weight: Matrix::Trained(weight),
            bias: Some(Vector::Trained(bias)),
            adapter: None,
        };
        Self { parameters, table, layer, head }
    }

    fn add(&mut self, name: &str) -> ParameterId {
        self.parameters.add(name, vec![WIDTH], Reference.upload(&numbers(9, WIDTH)), true)
    }

    /// Gradients of the loss after `forward`.
    fn gradients<'a>(
        &'a self,
        inputs: &'a Inputs,
        forward: impl Fn(&mut Tape<'a, Reference>, Variable<Reference>) -> Variable<Reference>,
    ) -> Result<Gradients<Reference>, TapeError> {
        let mut gradients = Gradients::zeros(&Reference, &self.parameters);
        let mut tape = Tape::new(&Reference, &self.parameters, &inputs.layout, PROFILE, Policy::None);
        let x = tape.embedding(&self.table, &inputs.ids, WIDTH);
        let h = forward(&mut tape, x);
        tape.head_loss(h, &self.head, VOCABULARY, &inputs.targets);
        tape.backward(&mut gradients).map(|()| gradients)
    }
}

/// Two rows, the tokens and what they should predict.
struct Inputs {
    layout: BatchLayout<Reference>,
    ids: U32<Reference>,
    targets: LossTargets<Reference>,
}

fn inputs() -> Inputs {
    let layout = BatchLayout {
        tokens: TOKENS,
        row_starts: vec![0, 2, TOKENS],
        spans: vec![Span { queries: 0..TOKENS, keys: 0..TOKENS }],
        positions: Reference.upload(&[0, 1, 2, 3, 4]),
        key: Key::new(0, Purpose::Dropout),
        step: 1,
        first_row: 0,
    };
    let targets = LossTargets { labels: Reference.upload(&[1, 4, 1, 5, 9]), weight: Reference.upload(&[0.2; TOKENS]) };
    Inputs { layout, ids: Reference.upload(&[3, 1, 4, 1, 5]), targets }
}

fn missing(result: Result<Gradients<Reference>, TapeError>) -> Option<String> {
    match result {
        Ok(_) => None,
        Err(TapeError::NoGradient { name }) => Some(name),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn a_trained_tensor_without_a_gradient_is_an_error() {
    let inputs = inputs();
    let mut net = Net::new();
    assert_eq!(missing(net.gradients(&inputs, |tape, x| tape.linear(&x, &net.layer))), None);
    // Computed, but the loss does not depend on it.
    let result = net.gradients(&inputs, |tape, x| {
        tape.linear(&x, &net.layer);
        x
    });
    assert_eq!(missing(result).as_deref(), Some("weight"));
    // Not even computed.
    net.add("forgotten");
    let result = net.gradients(&inputs, |tape, x| tape.linear(&x, &net.layer));
    assert_eq!(missing(result).as_deref(), Some("forgotten"));
}

/// Column `c` of a value, in groups.
fn per_group(groups: usize, width: usize, from: (usize, usize), to: (usize, usize, usize)) -> Move {
    let from = Blocks { of: 0, offset: from.0, stride: from.1 };
    Move { groups, width, from, to: Blocks { of: to.0, offset: to.1, stride: to.2 } }
}

fn weight_gradient(gradients: &Gradients<Reference>, net: &Net) -> Vec<f32> {
    let (id, _) = net.parameters.iter().next().expect("a weight");
    Reference.download(gradients.get(id)).expect("numbers")
}

#[test]
fn what_is_parted_and_joined_again_has_the_same_gradient() {
    let (inputs, net) = (inputs(), Net::new());
    let whole = net.gradients(&inputs, |tape, x| tape.linear(&x, &net.layer)).expect("gradients");
    let parted = net.gradients(&inputs, |tape, x| {
        let y = tape.linear(&x, &net.layer);
        // Two groups of [1 | 3] columns.
        let parts = [per_group(2, 1, (0, 4), (0, 0, 1)), per_group(2, 3, (1, 4), (1, 0, 3))];
        let [a, b] = tape.rearrange(&[&y], [2, 6], &parts);
        let back = parts.map(|Move { groups, width, from, to }| Move {
            groups,
            width,
            from: Blocks { offset: 0, ..to },
            to: Blocks { of: 0, ..from },
        });
        let [y] = tape.rearrange(&[&a, &b], [WIDTH], &back);
        y
    });
    assert_eq!(weight_gradient(&parted.expect("gradients"), &net), weight_gradient(&whole, &net));
}

/// Against a product with a matrix of zeros and ones, to the precision of its profile.
#[test]
fn one_block_for_all_groups_gets_the_sum_of_their_gradients() {
    let (inputs, net) = (inputs(), Net::new());
    let copied = net.gradients(&inputs, |tape, x| {
        let y = tape.linear(&x, &net.layer);
        let moves = [per_group(4, 2, (0, 0), (0, 0, 2)), Move::cut(2, 6, 1)];
        let [shared, _unused] = tape.rearrange(&[&y], [WIDTH, 6], &moves);
        shared
    });
    let ones = (0..WIDTH * WIDTH).map(|at| if at % WIDTH == at / WIDTH % 2 { 1.0 } else { 0.0 });
    let ones = Reference.upload(&ones.collect::<Vec<f32>>());
    let shape = SliceShape { rows: WIDTH, width: WIDTH, profile: PROFILE };
    let weight = Matrix::Frozen(sliced_weight(&Reference, StoredMatrix::F32(&ones), 1, shape));
    let copy = Linear { outputs: WIDTH, inputs: WIDTH, weight, bias: None, adapter: None };
    let multiplied = net.gradients(&inputs, |tape, x| {
        let y = tape.linear(&x, &net.layer);
        tape.linear(&y, &copy)
    });
    let [got, want] = [copied, multiplied].map(|gradients| weight_gradient(&gradients.expect("gradients"), &net));
    let largest = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let difference = |(got, want): (&f32, &f32)| (f64::from(*got) - f64::from(*want)).abs();
    assert!(got.iter().zip(&want).map(difference).all(|difference| difference < 1e-3 * f64::from(largest)));
    assert!(got[2 * WIDTH..].iter().all(|x| x.to_bits() << 1 == 0) && got[..2 * WIDTH].iter().all(|x| *x != 0.0));
}
