//! What `bench kernels` measures: ops with the shapes that training meets, and how much work each is.

use isobit_kernels::op::attention::HEAD_WIDTH_MAX;
use isobit_kernels::op::thin::RANK_MAX;
use isobit_kernels::op::{Attention, Dropout, HeadLoss, Layout, Product, RmsNorm, Rope, SliceShape, Span, Thin};
use isobit_kernels::{Backend, Cpu, Matrix, StoredMatrix};
use isobit_numerics::adamw::AdamW;
use isobit_numerics::philox::{Key, Purpose};
use isobit_numerics::slices::Profile;

/// An op and its shapes.
pub(super) struct Case {
    pub(super) op: &'static str,
    /// Whether the profile of slices matters.
    pub(super) sliced: bool,
    pub(super) shapes: &'static [&'static str],
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

/// Products are `rows x outputs x inputs` of the layer.
const PRODUCTS: &[&str] = &["512x4864x896", "512x896x4864", "1024x8960x1536", "2048x2048x2048", "1x4864x896"];
const BIG: &[&str] = PRODUCTS.split_at(4).0;

pub(super) const ALL: &[Case] = &[
    Case { op: "roof", sliced: true, shapes: &["400000"] },
    Case { op: "slice_rows", sliced: true, shapes: &["512x896", "512x4864"] },
    Case { op: "product_forward", sliced: true, shapes: PRODUCTS },
    Case { op: "product_forward_bf16", sliced: true, shapes: BIG },
    Case { op: "product_grad_input", sliced: true, shapes: PRODUCTS },
    Case { op: "product_grad_weight", sliced: true, shapes: BIG },
    Case { op: "attention", sliced: true, shapes: &["1024x14x2x64", "1024x16x8x128"] },
    Case { op: "head_loss", sliced: true, shapes: &["512x896x151936"] },
    Case { op: "thin_contract", sliced: false, shapes: THIN },
    Case { op: "thin_expand", sliced: false, shapes: THIN },
    Case { op: "thin_outer", sliced: false, shapes: THIN },
    Case { op: "rms_norm_forward", sliced: false, shapes: FLAT },
    Case { op: "rms_norm_backward", sliced: false, shapes: FLAT },
    Case { op: "rope", sliced: false, shapes: &["512x14x64"] },
    Case { op: "swiglu_forward", sliced: false, shapes: FLAT },
    Case { op: "swiglu_backward", sliced: false, shapes: FLAT },
    Case { op: "bias_backward", sliced: false, shapes: FLAT },
    Case { op: "add", sliced: false, shapes: FLAT },
    Case { op: "dropout", sliced: false, shapes: FLAT },
    Case { op: "embedding_backward", sliced: false, shapes: FLAT },
    Case { op: "adamw", sliced: false, shapes: FLAT },
    Case { op: "sum_squares", sliced: false, shapes: FLAT },
    Case { op: "to_bf16", sliced: false, shapes: FLAT },
    Case { op: "digest", sliced: false, shapes: FLAT },
];

/// `tokens x width x rank`
const THIN: &[&str] = &["512x4864x8", "512x4864x16"];
/// `tokens x width`
const FLAT: &[&str] = &["512x896", "512x4864"];

/// Makes inputs of a shape and the closure that runs the op once.
pub(super) fn prepare(cpu: &Cpu, op: &str, shape: &str, profile: Profile) -> Result<Prepared, String> {
    // BOUND: elements along an axis, and of any matrix of two axes (2 GiB of float32).
    const AXIS_MAX: usize = 1 << 20;
    const MATRIX_MAX: usize = 1 << 29;
    let axes: Vec<usize> = shape
        .split('x')
        .map(|axis| axis.parse().ok().filter(|axis| (1..=AXIS_MAX).contains(axis)))
        .collect::<Option<_>>()
        .ok_or_else(|| format!("`{shape}` is not a shape"))?;
    let heads: usize = if op == "attention" || op == "rope" { axes.iter().skip(1).product() } else { 1 };
    let pairs = || axes.iter().enumerate().flat_map(|(i, a)| axes[i + 1..].iter().map(move |b| a * b));
    if pairs().any(|elements| elements > MATRIX_MAX) || axes[0].saturating_mul(heads) > MATRIX_MAX {
        return Err(format!("`{shape}` is too large for a benchmark"));
    }
    let cpu = Cpu::new(cpu.threads(), cpu.path()).map_err(|error| error.to_string())?;
    match (op, &axes[..]) {
        ("roof", &[rounds]) => Ok(roof(cpu, rounds, profile)),
        ("slice_rows", &[m, k]) => Ok(slice_rows(cpu, m, k, profile)),
        ("product_forward" | "product_forward_bf16" | "product_grad_input" | "product_grad_weight", &[m, n, k]) => {
            Ok(product(cpu, op, m, n, k, profile))
        }
        ("attention", &[tokens, heads, kv_heads, width]) if heads % kv_heads == 0 && width <= HEAD_WIDTH_MAX => {
            Ok(attention(cpu, tokens, heads, kv_heads, width, profile))
        }
        ("head_loss", &[tokens, hidden, vocabulary]) => Ok(head_loss(cpu, tokens, hidden, vocabulary, profile)),
        ("thin_contract" | "thin_expand" | "thin_outer", &[tokens, width, rank]) if rank <= RANK_MAX => {
            Ok(thin(cpu, op, tokens, width, rank))
        }
        ("rope", &[tokens, heads, width]) if width % 2 == 0 => Ok(rope(cpu, tokens, heads, width)),
        (_, &[tokens, width]) => flat(cpu, op, tokens, width).ok_or_else(|| format!("no case `{op}`")),
        _ => Err(format!("no case `{op}` with shape `{shape}`")),
    }
}

/// The int8 unit alone. A slice product of `n` multiply-adds needs three (x2) or six (x3) times as many int8 ones, so the rate
/// is the ceiling of `product_*`; zero where the path has no int8 unit.
fn roof(cpu: Cpu, rounds: usize, profile: Profile) -> Prepared {
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

fn slice_rows(cpu: Cpu, m: usize, k: usize, profile: Profile) -> Prepared {
    let x = cpu.upload(&noise(m * k, 1));
    let mut rows = cpu.rows(SliceShape { rows: m, width: k, profile });
    let bytes = (m * k * (4 + profile.slice_count())) as f64;
    Prepared { work: Work { flops: 0.0, bytes, workspace: 0 }, run: Box::new(move || cpu.slice_rows(&mut rows, &x)) }
}

fn product(cpu: Cpu, op: &str, m: usize, n: usize, k: usize, profile: Profile) -> Prepared {
    let (x, dy) = (cpu.upload(&noise(m * k, 1)), cpu.upload(&noise(m * n, 2)));
    let stored: Vec<_> = noise(n * k, 3).iter().map(|x| half::bf16::from_f32(x * 0.05)).collect();
    let stored = cpu.upload(&stored);
    let w = cpu.slice_weight(StoredMatrix::Bf16(&stored), 1, SliceShape { rows: n, width: k, profile });
    let p = Product { segments: forever([0, m]), n, k, profile, accumulate: false };
    let workspace_bytes = cpu.product_workspace(&p);
    let mut workspace = cpu.zeros::<u8>(workspace_bytes);
    let mut rows = cpu.rows(SliceShape { rows: m, width: k, profile });
    let work = Work { flops: 2.0 * m as f64 * n as f64 * k as f64, bytes: 0.0, workspace: workspace_bytes };
    let op = op.to_string();
    let mut y = cpu.zeros(m * n);
    let mut dx = cpu.zeros(m * k);
    let mut dw = cpu.zeros(if op == "product_grad_weight" { n * k } else { 0 });
    let run = move || match &op[..] {
        "product_forward" => {
            cpu.slice_rows(&mut rows, &x);
            cpu.product_forward(&mut y, &rows, Matrix::Sliced(&w), &p, &mut workspace);
        }
        "product_forward_bf16" => {
            cpu.slice_rows(&mut rows, &x);
            cpu.product_forward(&mut y, &rows, Matrix::Stored(StoredMatrix::Bf16(&stored)), &p, &mut workspace);
        }
        "product_grad_input" => cpu.product_grad_input(&mut dx, &dy, Matrix::Sliced(&w), &p, &mut workspace),
        _ => cpu.product_grad_weight(&mut dw, &dy, &x, &p, p.segments, &mut workspace),
    };
    Prepared { work, run: Box::new(run) }
}

/// A benchmark's few descriptors live as long as the program.
fn forever<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

/// Forward and backward of one causal document.
fn attention(cpu: Cpu, tokens: usize, heads: usize, kv_heads: usize, width: usize, profile: Profile) -> Prepared {
    let spans = forever([Span { queries: 0..tokens, keys: 0..tokens }]);
    let scale = 1.0 / (width as f32).sqrt();
    let p = Attention { spans, heads, kv_heads, key_width: width, value_width: width, scale, window: None, profile };
    let (large, small) = (tokens * heads * width, tokens * kv_heads * width);
    let tensor = |length: usize, seed: u32| cpu.upload(&noise(length, seed));
    let (q, k, v, d_o) = (tensor(large, 1), tensor(small, 2), tensor(small, 3), tensor(large, 4));
    let (mut o, mut lse) = (cpu.zeros(large), cpu.zeros(tokens * heads));
    let (mut dq, mut dk, mut dv) = (cpu.zeros(large), cpu.zeros(small), cpu.zeros(small));
    let workspace_bytes = cpu.attention_workspace(&p);
    let mut workspace = cpu.zeros(workspace_bytes);
    // Two products forward, five backward, over the half of the square that is visible.
    let flops = 7.0 * (tokens * (tokens + 1) * heads * width) as f64;
    let run = move || {
        cpu.attention_forward(&mut o, &mut lse, &q, &k, &v, &p, &mut workspace);
        cpu.attention_backward((&mut dq, &mut dk, &mut dv), &d_o, (&q, &k, &v), &o, &lse, &p, &mut workspace);
    };
    Prepared { work: Work { flops, bytes: 0.0, workspace: workspace_bytes }, run: Box::new(run) }
}

/// Loss, and the gradient of the hidden states; the head is frozen and kept sliced.
fn head_loss(cpu: Cpu, tokens: usize, hidden: usize, vocabulary: usize, profile: Profile) -> Prepared {
    let p = HeadLoss { row_starts: forever([0, tokens]), hidden, vocabulary, profile };
    let head = {
        let stored: Vec<_> = noise(vocabulary * hidden, 3).iter().map(|x| half::bf16::from_f32(x * 0.05)).collect();
        let shape = SliceShape { rows: vocabulary, width: hidden, profile };
        cpu.slice_weight(StoredMatrix::Bf16(&cpu.upload(&stored)), 1, shape)
    };
    let h = cpu.upload(&noise(tokens * hidden, 1));
    let mut rows = cpu.rows(SliceShape { rows: tokens, width: hidden, profile });
    let labels = cpu.upload(&(0..tokens).map(|t| (t * 7919 % vocabulary) as i32).collect::<Vec<_>>());
    let weight = cpu.upload(&vec![1.0 / tokens as f32; tokens]);
    let (mut loss, mut lse, mut best) = (cpu.zeros(tokens), cpu.zeros(tokens), cpu.zeros(tokens));
    let mut dh = cpu.zeros(tokens * hidden);
    let workspace_bytes = cpu.head_loss_workspace(&p);
    let mut workspace = cpu.zeros(workspace_bytes);
    // The mathematics has two products; the third, which recomputes the logits, is our own choice.
    let flops = 4.0 * tokens as f64 * hidden as f64 * vocabulary as f64;
    let run = move || {
        cpu.slice_rows(&mut rows, &h);
        cpu.head_loss_forward(
            &mut loss,
            &mut lse,
            &mut best,
            &rows,
            Matrix::Sliced(&head),
            &labels,
            &p,
            &mut workspace,
        );
        let head = Matrix::Sliced(&head);
        cpu.head_loss_backward(&mut dh, None, (&rows, &h), head, &labels, &lse, &weight, &p, &mut workspace);
    };
    Prepared { work: Work { flops, bytes: 0.0, workspace: workspace_bytes }, run: Box::new(run) }
}

/// Factors as LoRA has them: A `[rank, width]` contracts, B `[width, rank]` expands.
fn thin(cpu: Cpu, op: &str, tokens: usize, width: usize, rank: usize) -> Prepared {
    let layout = if op == "thin_contract" { Layout::RankMajor } else { Layout::WidthMajor };
    let p = Thin { tokens, rank, width, layout, alpha: 2.0 };
    let (mut x, mut u) = (cpu.upload(&noise(tokens * width, 1)), cpu.upload(&noise(tokens * rank, 2)));
    let mut factor = cpu.upload(&noise(width * rank, 3));
    let workspace_bytes = cpu.thin_workspace(&p);
    let mut workspace = cpu.zeros(workspace_bytes);
    let work = Work { flops: 2.0 * (tokens * width * rank) as f64, bytes: 0.0, workspace: workspace_bytes };
    let op = op.to_string();
    let run = move || match &op[..] {
        "thin_contract" => cpu.thin_contract(&mut u, &x, &factor, &p, &mut workspace),
        "thin_expand" => cpu.thin_expand(&mut x, &u, &factor, &p, &mut workspace),
        _ => cpu.thin_outer(&mut factor, &u, &x, &p, &[0, tokens]),
    };
    Prepared { work, run: Box::new(run) }
}

fn rope(cpu: Cpu, tokens: usize, heads: usize, width: usize) -> Prepared {
    let p = Rope { tokens, heads, head_width: width, rotary_width: width };
    let mut x = cpu.upload(&noise(tokens * heads * width, 1));
    let (cos, sin) = (cpu.upload(&noise(tokens * width / 2, 2)), cpu.upload(&noise(tokens * width / 2, 3)));
    let positions = cpu.upload(&(0..tokens as u32).collect::<Vec<_>>());
    let bytes = 8.0 * (tokens * heads * width) as f64;
    Prepared {
        work: Work { flops: 0.0, bytes, workspace: 0 },
        run: Box::new(move || cpu.rope_forward(&mut x, &cos, &sin, &positions, &p)),
    }
}

/// Ops that stream over `tokens x width` numbers; the rate is the memory they must touch.
fn flat(cpu: Cpu, op: &str, tokens: usize, width: usize) -> Option<Prepared> {
    let length = tokens * width;
    let tensor = |seed: u32| cpu.upload(&noise(length, seed));
    let (a, b, c) = (tensor(1), tensor(2), tensor(3));
    let (mut y, mut z, mut w) = (tensor(4), tensor(5), tensor(6));
    let mut row = cpu.upload(&noise(width, 7));
    let mut inverse = cpu.upload(&vec![1.0; tokens]);
    let starts = forever([0, tokens]);
    let norm = RmsNorm { tokens, width, eps: 1e-6, zero_centred: false, accumulate: false };
    let elements = length as f64;
    let (bytes, run): (f64, Box<dyn FnMut()>) = match op {
        "rms_norm_forward" => {
            (8.0 * elements, Box::new(move || cpu.rms_norm_forward(&mut y, &mut inverse, &a, &row, &norm)))
        }
        "rms_norm_backward" => {
            let run = move || cpu.rms_norm_backward(&mut y, None, &a, &b, &inverse, &row, &norm, starts);
            (12.0 * elements, Box::new(run))
        }
        "swiglu_forward" => (12.0 * elements, Box::new(move || cpu.swiglu_forward(&mut y, &a, &b))),
        "swiglu_backward" => (20.0 * elements, Box::new(move || cpu.swiglu_backward(&mut y, &mut z, &a, &b, &c))),
        "bias_backward" => (4.0 * elements, Box::new(move || cpu.bias_backward(&mut row, &a, starts))),
        "add" => (12.0 * elements, Box::new(move || cpu.add(&mut y, &a, &b))),
        "dropout" => {
            let key = Key::new(1, Purpose::Dropout);
            let (threshold, keep_scale) = (1 << 30, 4.0 / 3.0);
            let p = Dropout { key, step: 1, tensor: 1, first_row: 0, row_starts: starts, width, threshold, keep_scale };
            (8.0 * elements, Box::new(move || cpu.dropout(&mut y, &a, &p)))
        }
        "embedding_backward" => {
            let ids = cpu.upload(&(0..tokens as u32).map(|t| t * 7919 % tokens as u32).collect::<Vec<_>>());
            let mut workspace = cpu.zeros(cpu.embedding_workspace(tokens));
            (12.0 * elements, Box::new(move || cpu.embedding_backward(&mut y, &a, &ids, width, &mut workspace)))
        }
        "adamw" => {
            let rule = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
            let coefficients = rule.coefficients(10);
            w.iter_mut().for_each(|v| *v = v.abs());
            (28.0 * elements, Box::new(move || cpu.adamw(&mut y, &mut z, &mut w, &a, &coefficients)))
        }
        "sum_squares" => (4.0 * elements, Box::new(move || _ = std::hint::black_box(cpu.sum_squares(&a)))),
        "to_bf16" => {
            let mut narrow = cpu.zeros(length);
            (6.0 * elements, Box::new(move || cpu.to_bf16(&mut narrow, &a)))
        }
        "digest" => (4.0 * elements, Box::new(move || _ = std::hint::black_box(cpu.digest(&a)))),
        _ => return None,
    };
    Some(Prepared { work: Work { flops: 0.0, bytes, workspace: 0 }, run })
}
