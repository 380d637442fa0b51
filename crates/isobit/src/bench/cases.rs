//! What `bench kernels` measures: ops with the shapes that training meets, and how much work each is.

use isobit_kernels::op::attention::HEAD_WIDTH_MAX;
use isobit_kernels::op::delta_rule::CHUNK;
use isobit_kernels::op::digest::sums_length;
use isobit_kernels::op::low_rank::RANK_MAX;
use isobit_kernels::op::product4::CHANNELS_PER_WORD;
use isobit_kernels::op::slices::sliced_weight;
use isobit_kernels::op::{
    AdamWUpdate, Add, AnyBuffer, ApplyDropout, Attention, AttentionBackward, AttentionForward, BiasBackward, DeltaRule,
    DeltaRuleBackward, DeltaRuleForward, DigestSums, Dropout, EmbeddingBackward, FactorLayout, HeadLoss,
    HeadLossBackward, HeadLossForward, LowRank, LowRankContract, LowRankExpand, LowRankOuter, Product, Product4Forward,
    Product4GradInput, Product4Rows, ProductForward, ProductGradInput, ProductGradWeight, Quantized, QuantizedShape,
    RmsNorm, RmsNormBackward, RmsNormForward, Rope, RopeForward, Scales, SliceRows, SliceShape, Span, SumSquares,
    SwigluBackward, SwigluForward, ToBf16,
};
use isobit_kernels::{Backend, Cpu, DeviceFailure, Gpu, Matrix, StoredMatrix};
use isobit_numerics::adamw::AdamW;
use isobit_numerics::philox::{Key, Purpose};
use isobit_numerics::slices::Profile;
use std::convert::Infallible;
use std::rc::Rc;

/// An op and its shapes.
pub(super) struct Case {
    pub(super) op: &'static str,
    /// Whether the profile of slices matters.
    pub(super) sliced: bool,
    /// On a CPU.
    pub(super) shapes: &'static [&'static str],
    /// On a device, which small shapes would leave idle.
    pub(super) large: &'static [&'static str],
}

/// What a benchmark runs on.
#[derive(Clone)]
pub(super) enum Target {
    Cpu(Rc<Cpu>),
    Gpu(Gpu),
}

impl Target {
    /// As requests and results name it: a path or a device.
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

    /// Runs that are timed together. A device is given several commands at once, so that the way to it does not count.
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

/// The work of one run: floating-point operations of the mathematics (not of the slices), and bytes that must move.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    pub(super) flops: f64,
    pub(super) bytes: f64,
    /// Memory the op asks for beside its operands.
    pub(super) workspace: usize,
}

/// A case ready to run.
pub(super) struct Prepared {
    pub(super) work: Work,
    pub(super) run: Box<dyn FnMut()>,
}

const MATRIX_MAX: usize = 1 << 29;

/// Products are `rows x outputs x inputs` of the layer, `x experts` where the rows are spread over several weights.
const PRODUCTS: &[&str] = &["512x4864x896", "512x896x4864", "1024x8960x1536", "2048x2048x2048", "1x4864x896"];
const BIG: &[&str] = PRODUCTS.split_at(4).0;
const LARGE: &[&str] = &["8192x8960x1536", "8192x1536x8960", "4096x4096x4096", "8192x8192x8192", "32768x512x512x32"];
/// `rows x outputs x inputs x group`, channels in their own order
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
const THIN: &[&str] = &["2048x256x8", "2048x768x8", "512x4864x8", "512x4864x16"];
const THIN_LARGE: &[&str] = &["8192x8960x8", "8192x8960x16"];
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
    plain("thin_contract", THIN, THIN_LARGE),
    plain("thin_expand", THIN, THIN_LARGE),
    plain("thin_outer", THIN, THIN_LARGE),
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

/// Makes inputs of a shape and the closure that runs the op once.
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
        ("slice_rows", &[m, k]) => Some(slice_rows(b, m, k, profile)),
        (
            "product_forward"
            | "product_forward_sliced"
            | "product_forward_bf16"
            | "product_grad_input"
            | "product_grad_weight",
            &[m, n, k, ref experts @ ..],
        ) if experts.len() <= 1 && experts.iter().all(|experts| experts.saturating_mul(n * k) <= MATRIX_MAX) => {
            Some(product(b, op, (m, experts.first().copied().unwrap_or(1)), n, k, profile))
        }
        ("product4_forward" | "product4_grad_input", &[m, n, k, group])
            if k % CHANNELS_PER_WORD == 0 && group % CHANNELS_PER_WORD == 0 =>
        {
            Some(product4(b, op, m, n, k, group, profile))
        }
        (
            "attention" | "attention_forward" | "attention_backward",
            &[tokens, heads, kv_heads, width, ref documents @ ..],
        ) if heads % kv_heads == 0 && width <= HEAD_WIDTH_MAX && documents.len() <= 1 => {
            let spans = (0..documents.first().copied().unwrap_or(1)).map(|i| i * tokens..(i + 1) * tokens);
            let spans = spans.map(|rows| Span { queries: rows.clone(), keys: rows }).collect();
            Some(attention(b, op, spans, heads, kv_heads, width, profile))
        }
        ("delta_rule" | "delta_rule_forward", &[tokens, key_heads, value_heads, width])
            if value_heads % key_heads == 0 && width <= HEAD_WIDTH_MAX =>
        {
            Some(delta_rule(b, op == "delta_rule", tokens, key_heads, value_heads, width))
        }
        ("head_loss", &[tokens, hidden, vocabulary]) => Some(head_loss(b, tokens, hidden, vocabulary, profile)),
        ("thin_contract" | "thin_expand" | "thin_outer", &[tokens, width, rank]) if rank <= RANK_MAX => {
            Some(thin(b, op, tokens, width, rank))
        }
        ("rope", &[tokens, heads, width]) if width % 2 == 0 => Some(rope(b, tokens, heads, width)),
        (_, &[tokens, width]) => flat(b, op, tokens, width),
        _ => None,
    }
}

/// The int8 unit alone. A slice product of `n` multiply-adds needs three (x2) or six (x3) times as many int8 ones, so the rate
/// is the ceiling of `product_*`; zero where the path has no int8 unit.
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

fn slice_rows<B: Backend + 'static>(b: Rc<B>, m: usize, k: usize, profile: Profile) -> Prepared {
    let x = b.upload(&noise(m * k, 1));
    let mut rows = b.rows(SliceShape { rows: m, width: k, profile });
    let bytes = (m * k * (4 + profile.slice_count())) as f64;
    Prepared {
        work: Work { flops: 0.0, bytes, workspace: 0 },
        run: Box::new(move || b.run(SliceRows { rows: &mut rows, x: &x })),
    }
}

/// Rows that are spread evenly over so many weights.
fn product<B: Backend + 'static>(
    b: Rc<B>,
    op: &str,
    (m, experts): (usize, usize),
    n: usize,
    k: usize,
    profile: Profile,
) -> Prepared {
    let (x, dy) = (b.upload(&noise(m * k, 1)), b.upload(&noise(m * n, 2)));
    let stored: Vec<_> = noise(experts * n * k, 3).iter().map(|x| half::bf16::from_f32(x * 0.05)).collect();
    let stored = b.upload(&stored);
    let w = sliced_weight(&*b, StoredMatrix::Bf16(&stored), experts, SliceShape { rows: n, width: k, profile });
    let segments = (0..=experts).map(|expert| expert * m / experts).collect::<Vec<_>>();
    let p = Product { segments: forever(segments), n, k, profile, accumulate: false };
    let workspace_bytes = b.workspaces().product(&p);
    let mut rows = b.rows(SliceShape { rows: m, width: k, profile });
    let work = Work { flops: 2.0 * m as f64 * n as f64 * k as f64, bytes: 0.0, workspace: workspace_bytes };
    b.run(SliceRows { rows: &mut rows, x: &x });
    let op = op.to_string();
    let mut y = b.zeros(m * n);
    let mut dx = b.zeros(m * k);
    let mut dw = b.zeros(if op == "product_grad_weight" { experts * n * k } else { 0 });
    let run = move || match &op[..] {
        "product_forward" => {
            b.run(SliceRows { rows: &mut rows, x: &x });
            b.run(ProductForward { y: &mut y, x: &rows, w: Matrix::Sliced(&w), p });
        }
        "product_forward_sliced" => b.run(ProductForward { y: &mut y, x: &rows, w: Matrix::Sliced(&w), p }),
        "product_forward_bf16" => {
            b.run(SliceRows { rows: &mut rows, x: &x });
            b.run(ProductForward { y: &mut y, x: &rows, w: Matrix::Stored(StoredMatrix::Bf16(&stored)), p });
        }
        "product_grad_input" => b.run(ProductGradInput { dx: &mut dx, dy: &dy, w: Matrix::Sliced(&w), p }),
        _ => b.run(ProductGradWeight { dw: &mut dw, dy: &dy, x: &x, p, row_starts: p.segments }),
    };
    Prepared { work, run: Box::new(run) }
}

/// Slicing and product, as the layer of a model runs them.
fn product4<B: Backend + 'static>(
    b: Rc<B>,
    op: &str,
    m: usize,
    n: usize,
    k: usize,
    group: usize,
    profile: Profile,
) -> Prepared {
    let (x, dy) = (b.upload(&noise(m * k, 1)), b.upload(&noise(m * n, 2)));
    let groups = k.div_ceil(group);
    let words: Vec<i32> =
        noise(k / CHANNELS_PER_WORD * n, 3).iter().map(|x| x.to_bits().wrapping_mul(2654435769) as i32).collect();
    let scales: Vec<_> = noise(groups * n, 4).iter().map(|x| half::f16::from_f32(0.01 + 0.002 * x)).collect();
    let group_of: Vec<u32> = (0..k).map(|channel| (channel / group) as u32).collect();
    let zeros = vec![8; groups * n];
    let (words, zeros, scales, group_of) = (&words[..], &zeros[..], Scales::F16(&scales), &group_of[..]);
    let weight = Quantized { n, k, group_size: group, words, zeros, scales, group_of };
    let shape = QuantizedShape::of(&[weight]);
    let w = b.quantized_weight(shape, |_| Ok::<_, Infallible>(weight)).unwrap_or_else(|never| match never {});
    let p = Product { segments: forever([0, m]), n, k, profile, accumulate: false };
    let workspace_bytes = b.workspaces().product4(shape, &p);
    let work = Work { flops: 2.0 * m as f64 * n as f64 * k as f64, bytes: 0.0, workspace: workspace_bytes };
    let mut rows = b.rows(SliceShape { rows: m, width: k, profile });
    let (mut y, mut dx) = (b.zeros(m * n), b.zeros(m * k));
    let is_forward = op == "product4_forward";
    let run = move || {
        if is_forward {
            b.run(Product4Rows { rows: &mut rows, x: &x, w: &w, p });
            b.run(Product4Forward { y: &mut y, x: &rows, w: &w, p });
        } else {
            b.run(Product4GradInput { dx: &mut dx, dy: &dy, w: &w, p });
        }
    };
    Prepared { work, run: Box::new(run) }
}

/// A benchmark's few descriptors live as long as the program.
fn forever<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

/// Forward and backward of causal documents of one length, or one of both.
fn attention<B: Backend + 'static>(
    b: Rc<B>,
    op: &str,
    spans: Vec<Span>,
    heads: usize,
    kv_heads: usize,
    width: usize,
    profile: Profile,
) -> Prepared {
    let (documents, length) = (spans.len(), spans[0].keys.len());
    let tokens = documents * length;
    let scale = 1.0 / (width as f32).sqrt();
    let spans = &forever(spans)[..];
    let p = Attention { spans, heads, kv_heads, key_width: width, value_width: width, scale, window: None, profile };
    let (large, small) = (tokens * heads * width, tokens * kv_heads * width);
    let tensor = |length: usize, seed: u32| b.upload(&noise(length, seed));
    let (q, k, v, d_o) = (tensor(large, 1), tensor(small, 2), tensor(small, 3), tensor(large, 4));
    let (mut o, mut lse) = (b.zeros(large), b.zeros(tokens * heads));
    let (mut dq, mut dk, mut dv) = (b.zeros(large), b.zeros(small), b.zeros(small));
    let workspace_bytes = b.workspaces().attention(&p);
    let (forward, backward) = (op != "attention_backward", op != "attention_forward");
    if !forward {
        b.run(AttentionForward { o: &mut o, lse: &mut lse, q: &q, k: &k, v: &v, p });
    }
    // Two products forward, five backward, over the half of the square that is visible.
    let products = 2.0 * f64::from(u8::from(forward)) + 5.0 * f64::from(u8::from(backward));
    let flops = products * (documents * length * (length + 1) * heads * width) as f64;
    let run = move || {
        if forward {
            b.run(AttentionForward { o: &mut o, lse: &mut lse, q: &q, k: &k, v: &v, p });
        }
        if backward {
            b.run(AttentionBackward {
                dq: &mut dq,
                dk: &mut dk,
                dv: &mut dv,
                d_o: &d_o,
                q: &q,
                k: &k,
                v: &v,
                o: &o,
                lse: &lse,
                p,
            });
        }
    };
    Prepared { work: Work { flops, bytes: 0.0, workspace: workspace_bytes }, run: Box::new(run) }
}

/// Forward, and backward if asked for. The work counted is that of the chunked form without what is computed twice.
fn delta_rule<B: Backend + 'static>(
    b: Rc<B>,
    backward: bool,
    tokens: usize,
    key_heads: usize,
    value_heads: usize,
    width: usize,
) -> Prepared {
    let row_starts = forever([0, tokens]);
    let p = DeltaRule { row_starts, key_heads, value_heads, key_width: width, value_width: width };
    let [keys, values, scalars, _] = p.lengths();
    // Rows of norm one, as the layer gives them, and decays between exp(-1) and 1.
    let unit = 2.0 / (width as f32).sqrt();
    let unit_rows = |seed: u32| b.upload(&noise(keys, seed).iter().map(|x| x * unit).collect::<Vec<_>>());
    let (q, k, v, d_o) = (unit_rows(1), unit_rows(2), b.upload(&noise(values, 3)), b.upload(&noise(values, 4)));
    let fraction = |seed: u32| noise(scalars, seed).iter().map(|x| (x.abs() / 1.5).min(1.0)).collect::<Vec<_>>();
    let (g, beta) = (b.upload(&fraction(5).iter().map(|x| -x).collect::<Vec<_>>()), b.upload(&fraction(6)));
    let mut o = b.zeros(values);
    let [mut dq, mut dk, mut dv, mut dg, mut dbeta] =
        [keys, keys, values, scalars, scalars].map(|length| b.zeros(length));
    let workspace_bytes = b.workspaces().delta_rule(&p);
    // Per token and head: products with the state (3 forward, 7 backward), triangles of a chunk (4 and 10).
    let (states, triangles) = if backward { (10.0, 14.0) } else { (3.0, 4.0) };
    let per_token = states * (width * width) as f64 + triangles * (width * CHUNK / 2) as f64;
    let flops = 2.0 * (tokens * value_heads) as f64 * per_token;
    let run = move || {
        b.run(DeltaRuleForward {
            o: &mut o,
            final_state: None,
            q: &q,
            k: &k,
            v: &v,
            g: &g,
            beta: &beta,
            initial_state: None,
            p,
        });
        if backward {
            b.run(DeltaRuleBackward {
                dq: &mut dq,
                dk: &mut dk,
                dv: &mut dv,
                dg: &mut dg,
                dbeta: &mut dbeta,
                d_o: &d_o,
                q: &q,
                k: &k,
                v: &v,
                g: &g,
                beta: &beta,
                p,
            });
        }
    };
    Prepared { work: Work { flops, bytes: 0.0, workspace: workspace_bytes }, run: Box::new(run) }
}

/// Loss, and the gradient of the hidden states; the head is frozen and kept sliced.
fn head_loss<B: Backend + 'static>(
    b: Rc<B>,
    tokens: usize,
    hidden: usize,
    vocabulary: usize,
    profile: Profile,
) -> Prepared {
    let p = HeadLoss { row_starts: forever([0, tokens]), hidden, vocabulary, profile };
    let head = {
        let stored: Vec<_> = noise(vocabulary * hidden, 3).iter().map(|x| half::bf16::from_f32(x * 0.05)).collect();
        let shape = SliceShape { rows: vocabulary, width: hidden, profile };
        sliced_weight(&*b, StoredMatrix::Bf16(&b.upload(&stored)), 1, shape)
    };
    let h = b.upload(&noise(tokens * hidden, 1));
    let mut rows = b.rows(SliceShape { rows: tokens, width: hidden, profile });
    let labels = b.upload(&(0..tokens).map(|t| (t * 7919 % vocabulary) as i32).collect::<Vec<_>>());
    let weight = b.upload(&vec![1.0 / tokens as f32; tokens]);
    let (mut loss, mut lse, mut best) = (b.zeros(tokens), b.zeros(tokens), b.zeros(tokens));
    let mut dh = b.zeros(tokens * hidden);
    let workspace_bytes = b.workspaces().head_loss(&p);
    // The mathematics has two products; the third, which recomputes the logits, is our own choice.
    let flops = 4.0 * tokens as f64 * hidden as f64 * vocabulary as f64;
    let run = move || {
        b.run(SliceRows { rows: &mut rows, x: &h });
        b.run(HeadLossForward {
            loss: &mut loss,
            lse: &mut lse,
            best: &mut best,
            h: &rows,
            head: Matrix::Sliced(&head),
            labels: &labels,
            p,
        });
        let head = Matrix::Sliced(&head);
        b.run(HeadLossBackward {
            dh: &mut dh,
            dhead: None,
            rows: &rows,
            h: &h,
            head,
            labels: &labels,
            lse: &lse,
            weight: &weight,
            p,
        });
    };
    Prepared { work: Work { flops, bytes: 0.0, workspace: workspace_bytes }, run: Box::new(run) }
}

/// Factors as LoRA has them: A `[rank, width]` contracts, B `[width, rank]` expands.
fn thin<B: Backend + 'static>(b: Rc<B>, op: &str, tokens: usize, width: usize, rank: usize) -> Prepared {
    let layout = if op == "thin_contract" { FactorLayout::RankMajor } else { FactorLayout::WidthMajor };
    let p = LowRank { segments: forever([0, tokens]), rank, width, layout, alpha: 2.0 };
    let (mut x, mut u) = (b.upload(&noise(tokens * width, 1)), b.upload(&noise(tokens * rank, 2)));
    let mut factor = b.upload(&noise(width * rank, 3));
    let workspace_bytes = b.workspaces().low_rank(&p);
    let work = Work { flops: 2.0 * (tokens * width * rank) as f64, bytes: 0.0, workspace: workspace_bytes };
    let op = op.to_string();
    let run = move || match &op[..] {
        "thin_contract" => b.run(LowRankContract { u: &mut u, x: &x, factor: &factor, p }),
        "thin_expand" => b.run(LowRankExpand { y: &mut x, u: &u, factor: &factor, p }),
        _ => b.run(LowRankOuter { dfactor: &mut factor, u: &u, x: &x, p, row_starts: &[0, tokens] }),
    };
    Prepared { work, run: Box::new(run) }
}

fn rope<B: Backend + 'static>(b: Rc<B>, tokens: usize, heads: usize, width: usize) -> Prepared {
    let p = Rope { tokens, heads, head_width: width, rotary_width: width, offset: 0, interleaved: false };
    let mut x = b.upload(&noise(tokens * heads * width, 1));
    let (cos, sin) = (b.upload(&noise(tokens * width / 2, 2)), b.upload(&noise(tokens * width / 2, 3)));
    let positions = b.upload(&(0..tokens as u32).collect::<Vec<_>>());
    let bytes = 8.0 * (tokens * heads * width) as f64;
    Prepared {
        work: Work { flops: 0.0, bytes, workspace: 0 },
        run: Box::new(move || b.run(RopeForward { x: &mut x, cos: &cos, sin: &sin, positions: &positions, p })),
    }
}

/// Ops that stream over `tokens x width` numbers; the rate is the memory they must touch.
fn flat<B: Backend + 'static>(b: Rc<B>, op: &str, tokens: usize, width: usize) -> Option<Prepared> {
    let length = tokens * width;
    let tensor = |seed: u32| b.upload(&noise(length, seed));
    let (a, other, c) = (tensor(1), tensor(2), tensor(3));
    let (mut y, mut z) = (tensor(4), tensor(5));
    let mut second = b.upload(&noise(length, 6).iter().map(|v| v.abs()).collect::<Vec<_>>());
    let mut row = b.upload(&noise(width, 7));
    let mut inverse = b.upload(&vec![1.0; tokens]);
    let starts = forever([0, tokens]);
    let norm = RmsNorm { tokens, width, eps: 1e-6, zero_centred: false, accumulate: false };
    let elements = length as f64;
    let (bytes, run): (f64, Box<dyn FnMut()>) = match op {
        "rms_norm_forward" => (
            8.0 * elements,
            Box::new(move || b.run(RmsNormForward { y: &mut y, inverse: &mut inverse, x: &a, weight: &row, p: norm })),
        ),
        "rms_norm_backward" => {
            let run = move || {
                b.run(RmsNormBackward {
                    dx: &mut y,
                    dweight: None,
                    dy: &a,
                    x: &other,
                    inverse: &inverse,
                    weight: &row,
                    p: norm,
                    row_starts: starts,
                })
            };
            (12.0 * elements, Box::new(run))
        }
        "swiglu_forward" => {
            (12.0 * elements, Box::new(move || b.run(SwigluForward { h: &mut y, gate: &a, up: &other })))
        }
        "swiglu_backward" => (
            20.0 * elements,
            Box::new(move || b.run(SwigluBackward { dgate: &mut y, dup: &mut z, dh: &a, gate: &other, up: &c })),
        ),
        "bias_backward" => {
            (4.0 * elements, Box::new(move || b.run(BiasBackward { dbias: &mut row, dy: &a, row_starts: starts })))
        }
        "add" => (12.0 * elements, Box::new(move || b.run(Add { y: &mut y, a: &a, b: &other }))),
        "dropout" => {
            let key = Key::new(1, Purpose::Dropout);
            let (threshold, keep_scale) = (1 << 30, 4.0 / 3.0);
            let p = Dropout { key, step: 1, tensor: 1, first_row: 0, row_starts: starts, width, threshold, keep_scale };
            (8.0 * elements, Box::new(move || b.run(ApplyDropout { y: &mut y, x: &a, p })))
        }
        "embedding_backward" => {
            let ids = b.upload(&(0..tokens as u32).map(|t| t * 7919 % tokens as u32).collect::<Vec<_>>());
            (12.0 * elements, Box::new(move || b.run(EmbeddingBackward { dtable: &mut y, dy: &a, ids: &ids, width })))
        }
        "adamw" => {
            let rule = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
            let coefficients = rule.coefficients(10);
            (
                28.0 * elements,
                Box::new(move || {
                    b.run(AdamWUpdate { parameter: &mut y, m: &mut z, v: &mut second, gradient: &a, c: coefficients })
                }),
            )
        }
        "sum_squares" => {
            let mut sums = b.zeros(1);
            (4.0 * elements, Box::new(move || b.run(SumSquares { sums: &mut sums, tensors: &[&a] })))
        }
        "to_bf16" => {
            let mut narrow = b.zeros(length);
            (6.0 * elements, Box::new(move || b.run(ToBf16 { y: &mut narrow, x: &a })))
        }
        "digest" => {
            let mut sums = b.zeros(sums_length(length * size_of::<f32>()));
            (4.0 * elements, Box::new(move || b.run(DigestSums { sums: &mut sums, x: AnyBuffer::F32(&a) })))
        }
        _ => return None,
    };
    Some(Prepared { work: Work { flops: 0.0, bytes, workspace: 0 }, run })
}
