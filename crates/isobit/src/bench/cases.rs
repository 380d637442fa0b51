//! What `bench kernels` measures: ops with the shapes that training meets, and how much work each is.

use isobit_kernels::op::{Product, SliceShape};
use isobit_kernels::{Backend, Cpu, Matrix, StoredMatrix};
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
    Case { op: "roof", sliced: true, shapes: &["20000"] },
    Case { op: "slice_rows", sliced: true, shapes: &["512x896", "512x4864"] },
    Case { op: "product_forward", sliced: true, shapes: PRODUCTS },
    Case { op: "product_forward_bf16", sliced: true, shapes: BIG },
    Case { op: "product_grad_input", sliced: true, shapes: PRODUCTS },
    Case { op: "product_grad_weight", sliced: true, shapes: BIG },
];

/// Makes inputs of a shape and the closure that runs the op once.
pub(super) fn prepare(cpu: &Cpu, op: &str, shape: &str, profile: Profile) -> Result<Prepared, String> {
    // BOUND: a shape is at most this many elements along an axis.
    const AXIS_MAX: usize = 1 << 20;
    let axes: Vec<usize> = shape
        .split('x')
        .map(|axis| axis.parse().ok().filter(|axis| (1..=AXIS_MAX).contains(axis)))
        .collect::<Option<_>>()
        .ok_or_else(|| format!("`{shape}` is not a shape"))?;
    let cpu = Cpu::new(cpu.threads(), cpu.path()).map_err(|error| error.to_string())?;
    match (op, &axes[..]) {
        ("roof", &[rounds]) => Ok(roof(cpu, rounds, profile)),
        ("slice_rows", &[m, k]) => Ok(slice_rows(cpu, m, k, profile)),
        ("product_forward" | "product_forward_bf16" | "product_grad_input" | "product_grad_weight", &[m, n, k]) => {
            Ok(product(cpu, op, m, n, k, profile))
        }
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
    Prepared { work: Work { flops, bytes: 0.0 }, run: Box::new(move || _ = cpu.int8_roof(rounds)) }
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
    Prepared { work: Work { flops: 0.0, bytes }, run: Box::new(move || cpu.slice_rows(&mut rows, &x)) }
}

fn product(cpu: Cpu, op: &str, m: usize, n: usize, k: usize, profile: Profile) -> Prepared {
    let segments = [0, m];
    let (x, dy) = (cpu.upload(&noise(m * k, 1)), cpu.upload(&noise(m * n, 2)));
    let stored: Vec<_> = noise(n * k, 3).iter().map(|x| half::bf16::from_f32(x * 0.05)).collect();
    let stored = cpu.upload(&stored);
    let w = cpu.slice_weight(StoredMatrix::Bf16(&stored), 1, SliceShape { rows: n, width: k, profile });
    let describe = move |segments: &'static [usize]| Product { segments, n, k, profile, accumulate: false };
    // A benchmark's few descriptors live as long as the program.
    let p = describe(Box::leak(Box::new(segments)));
    let mut workspace = cpu.zeros::<u8>(cpu.product_workspace(&p));
    let mut rows = cpu.rows(SliceShape { rows: m, width: k, profile });
    let work = Work { flops: 2.0 * m as f64 * n as f64 * k as f64, bytes: 0.0 };
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
