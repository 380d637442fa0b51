//! What `bench kernels` measures: ops with shapes that occur in training, and the work of each.

mod flat;
mod layers;
mod products;

use isobit_kernels::op::Span;
use isobit_kernels::op::attention::HEAD_WIDTH_MAX;
use isobit_kernels::op::low_rank::RANK_MAX;
use isobit_kernels::op::product4::CHANNELS_PER_WORD;
use isobit_kernels::{Backend, Cpu, DeviceFailure, Gpu};
use isobit_numerics::slices::Profile;
use std::rc::Rc;

/// An op and its shapes.
pub(super) struct Case {
    pub(super) op: &'static str,
    /// Whether the slice profile matters.
    pub(super) sliced: bool,
    /// Shapes for a CPU.
    pub(super) shapes: &'static [&'static str],
    /// Shapes for a device, which small shapes would leave idle.
    pub(super) large: &'static [&'static str],
}

/// The CPU or device a benchmark runs on.
#[derive(Clone)]
pub(super) enum Target {
    Cpu(Rc<Cpu>),
    Gpu(Gpu),
}

impl Target {
    /// The name in requests and results: a path or a device.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Cpu(cpu) => cpu.path().to_string(),
            Self::Gpu(gpu) => gpu.selector().to_string(),
        }
    }

    pub(super) fn threads(&self) -> usize {
        match self {
            Self::Cpu(cpu) => cpu.threads(),
            Self::Gpu(_) => 1,
        }
    }

    pub(super) fn shapes(&self, case: &Case) -> &'static [&'static str] {
        match self {
            Self::Cpu(_) => case.shapes,
            Self::Gpu(_) => case.large,
        }
    }

    /// Runs timed together. A device gets several commands at once, so that launch latency does not
    /// count.
    pub(super) fn batch(&self) -> usize {
        match self {
            Self::Cpu(_) => 1,
            Self::Gpu(_) => 10,
        }
    }

    pub(super) fn finish(&self) -> Result<(), DeviceFailure> {
        match self {
            Self::Cpu(_) => Ok(()),
            Self::Gpu(gpu) => gpu.finish(),
        }
    }
}

/// The work of one run: floating-point operations of the mathematics (not of the slices), and bytes
/// that must be moved.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    pub(super) flops: f64,
    pub(super) bytes: f64,
    /// Memory the op needs besides its operands.
    pub(super) workspace: usize,
}

/// A case ready to run.
pub(super) struct Prepared {
    pub(super) work: Work,
    pub(super) run: Box<dyn FnMut()>,
}

/// BOUND: elements of any matrix of two axes (2 GiB of float32).
const MATRIX_MAX: usize = 1 << 29;

/// Products are `rows x outputs x inputs` of the layer, `x experts` if the rows are spread over
/// several weights.
const PRODUCTS: &[&str] = &["512x4864x896", "512x896x4864", "1024x8960x1536", "2048x2048x2048", "1x4864x896"];
const BIG: &[&str] = PRODUCTS.split_at(4).0;
const LARGE: &[&str] = &["8192x8960x1536", "8192x1536x8960", "4096x4096x4096", "8192x8192x8192", "32768x512x512x32"];
/// `rows x outputs x inputs x group`, channels in their original order
const PRODUCTS4: &[&str] = &[
    "512x4864x896x128",
    "512x896x4864x128",
    "1024x8960x1536x128",
    "2048x2048x2048x128",
    "2048x2048x2048x32",
    "16x768x2048x128",
    "1x4864x896x128",
];
const LARGE4: &[&str] = &["8192x8960x1536x128", "8192x1536x8960x128", "4096x4096x4096x128"];
/// `tokens x width x rank`
const LOW_RANK: &[&str] = &["2048x256x8", "2048x768x8", "512x4864x8", "512x4864x16"];
const LOW_RANK_LARGE: &[&str] = &["8192x8960x8", "8192x8960x16"];
/// `tokens x key heads x value heads x width`
const DELTA_RULE: &[&str] = &["1024x16x32x128"];
/// `tokens x query heads x key heads x width`, and documents of that many tokens
const ATTENTION: &[&str] = &["1024x14x2x64", "1024x16x8x128", "256x8x4x32x8", "256x8x2x64x4"];
/// `tokens x width`
const FLAT: &[&str] = &["2048x256", "2048x768", "512x896", "512x4864"];
const FLAT_LARGE: &[&str] = &["8192x8960"];

pub(super) const ALL: &[Case] = &[
    sliced("roof", &["400000"], &[]),
    sliced("slice_rows", &["2048x256", "2048x768", "512x896", "512x4864"], &["8192x1536", "8192x8960"]),
    sliced("product_forward", PRODUCTS, LARGE),
    sliced("product_forward_sliced", BIG, LARGE),
    sliced("product_forward_bf16", BIG, LARGE),
    sliced("product_grad_input", PRODUCTS, LARGE),
    sliced("product_grad_weight", BIG, LARGE),
    sliced("product4_forward", PRODUCTS4, LARGE4),
    sliced("product4_grad_input", PRODUCTS4, LARGE4),
    sliced("attention", ATTENTION, ATTENTION),
    sliced("attention_forward", ATTENTION, ATTENTION),
    sliced("attention_backward", ATTENTION, ATTENTION),
    plain("delta_rule_forward", DELTA_RULE, DELTA_RULE),
    plain("delta_rule", DELTA_RULE, DELTA_RULE),
    sliced("head_loss", &["512x896x151936"], &["512x896x151936"]),
    plain("low_rank_contract", LOW_RANK, LOW_RANK_LARGE),
    plain("low_rank_expand", LOW_RANK, LOW_RANK_LARGE),
    plain("low_rank_outer", LOW_RANK, LOW_RANK_LARGE),
    plain("rms_norm_forward", FLAT, FLAT_LARGE),
    plain("rms_norm_backward", FLAT, FLAT_LARGE),
    plain("rope", &["512x14x64"], &["8192x14x64"]),
    plain("swiglu_forward", FLAT, FLAT_LARGE),
    plain("swiglu_backward", FLAT, FLAT_LARGE),
    plain("bias_backward", FLAT, FLAT_LARGE),
    plain("add", FLAT, FLAT_LARGE),
    plain("dropout", FLAT, FLAT_LARGE),
    plain("embedding_backward", FLAT, FLAT_LARGE),
    plain("adamw", FLAT, FLAT_LARGE),
    plain("sum_squares", FLAT, FLAT_LARGE),
    plain("to_bf16", FLAT, FLAT_LARGE),
    plain("digest", FLAT, FLAT_LARGE),
];

const fn sliced(op: &'static str, shapes: &'static [&'static str], large: &'static [&'static str]) -> Case {
    Case { op, sliced: true, shapes, large }
}

const fn plain(op: &'static str, shapes: &'static [&'static str], large: &'static [&'static str]) -> Case {
    Case { op, sliced: false, shapes, large }
}

/// Creates inputs of a shape and the closure that runs the op once.
pub(super) fn prepare(target: &Target, op: &str, shape: &str, profile: Profile) -> Result<Prepared, String> {
    // BOUND: elements along an axis, and of any matrix of two axes (2 GiB of float32).
    const AXIS_MAX: usize = 1 << 20;
    let axes: Vec<usize> = shape
        .split('x')
        .map(|axis| axis.parse().ok().filter(|axis| (1..=AXIS_MAX).contains(axis)))
        .collect::<Option<_>>()
        .ok_or_else(|| format!("`{shape}` is not a shape"))?;
    let heads: usize = if op.starts_with("attention") || op.starts_with("delta_rule") || op == "rope" {
        axes.iter().skip(1).product()
    } else {
        1
    };
    let pairs = || axes.iter().enumerate().flat_map(|(i, a)| axes[i + 1..].iter().map(move |b| a * b));
    if pairs().any(|elements| elements > MATRIX_MAX) || axes[0].saturating_mul(heads) > MATRIX_MAX {
        return Err(format!("`{shape}` is too large for a benchmark"));
    }
    match (target, op, &axes[..]) {
        (Target::Cpu(cpu), "roof", &[rounds]) => Some(roof(Rc::clone(cpu), rounds, profile)),
        (Target::Cpu(cpu), ..) => on(Rc::clone(cpu), op, &axes, profile),
        (Target::Gpu(gpu), ..) => on(Rc::new(gpu.clone()), op, &axes, profile),
    }
    .ok_or_else(|| format!("no case `{op}` with shape `{shape}`"))
}

fn on<B: Backend + 'static>(b: Rc<B>, op: &str, axes: &[usize], profile: Profile) -> Option<Prepared> {
    match (op, axes) {
        ("slice_rows", &[m, k]) => Some(products::slice_rows(b, m, k, profile)),
        (
            "product_forward"
            | "product_forward_sliced"
            | "product_forward_bf16"
            | "product_grad_input"
            | "product_grad_weight",
            &[m, n, k, ref experts @ ..],
        ) if experts.len() <= 1 && experts.iter().all(|experts| experts.saturating_mul(n * k) <= MATRIX_MAX) => {
            Some(products::product(b, op, (m, experts.first().copied().unwrap_or(1)), n, k, profile))
        }
        ("product4_forward" | "product4_grad_input", &[m, n, k, group])
            if k % CHANNELS_PER_WORD == 0 && group % CHANNELS_PER_WORD == 0 =>
        {
            Some(products::product4(b, op, m, n, k, group, profile))
        }
        (
            "attention" | "attention_forward" | "attention_backward",
            &[tokens, heads, kv_heads, width, ref documents @ ..],
        ) if heads % kv_heads == 0 && width <= HEAD_WIDTH_MAX && documents.len() <= 1 => {
            let spans = (0..documents.first().copied().unwrap_or(1)).map(|i| i * tokens..(i + 1) * tokens);
            let spans = spans.map(|rows| Span { queries: rows.clone(), keys: rows }).collect();
            Some(layers::attention(b, op, spans, heads, kv_heads, width, profile))
        }
        ("delta_rule" | "delta_rule_forward", &[tokens, key_heads, value_heads, width])
            if value_heads % key_heads == 0 && width <= HEAD_WIDTH_MAX =>
        {
            Some(layers::delta_rule(b, op == "delta_rule", tokens, key_heads, value_heads, width))
        }
        ("head_loss", &[tokens, hidden, vocabulary]) => Some(layers::head_loss(b, tokens, hidden, vocabulary, profile)),
        ("low_rank_contract" | "low_rank_expand" | "low_rank_outer", &[tokens, width, rank]) if rank <= RANK_MAX => {
            Some(products::low_rank(b, op, tokens, width, rank))
        }
        ("rope", &[tokens, heads, width]) if width % 2 == 0 => Some(flat::rope(b, tokens, heads, width)),
        (_, &[tokens, width]) => flat::flat(b, op, tokens, width),
        _ => None,
    }
}

/// The int8 unit alone. A slice product of `n` multiply-adds needs three (x2) or six (x3) times as
/// many int8 multiply-adds, so the rate is the ceiling of `product_*`; zero if the path has no int8
/// unit.
fn roof(cpu: Rc<Cpu>, rounds: usize, profile: Profile) -> Prepared {
    let products = match profile {
        Profile::X2 => 3.0,
        Profile::X3 => 6.0,
    };
    let flops = 2.0 * cpu.int8_roof(rounds).unwrap_or(0.0) / products;
    Prepared { work: Work { flops, bytes: 0.0, workspace: 0 }, run: Box::new(move || _ = cpu.int8_roof(rounds)) }
}

/// Numbers that look like activations.
fn noise(length: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2654435769) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / 4294967296.0
    };
    (0..length).map(|_| next() + next() + next() - 1.5).collect()
}

/// Leaks a benchmark's few descriptors: they live as long as the program.
fn forever<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}
