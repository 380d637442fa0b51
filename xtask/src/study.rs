//! `cargo xtask study`: measures the accuracy of the slice product against float64 and prints
//! Markdown tables to stdout.
//!
//! It justifies the constants of the arithmetic: the chunk length, one weight scale per row, which
//! products of slices are kept. `docs/accuracy.md` quotes its output.

use crate::arguments::Arguments;
use crate::study_data::{Data, Random, Weights};
use crate::study_product::*;
use isobit_numerics::slices::Quantiser;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Inputs and outputs of a linear layer, and where it occurs.
pub(crate) const SHAPES: [(usize, usize, &str); 7] = [
    (896, 4864, "Qwen2.5-0.5B up"),
    (4864, 896, "Qwen2.5-0.5B down"),
    (1536, 8960, "Qwen2.5-1.5B up"),
    (8960, 1536, "Qwen2.5-1.5B down"),
    (2048, 768, "Qwen3-30B-A3B expert up"),
    (768, 2048, "Qwen3-30B-A3B expert down"),
    (4096, 2048, "Qwen3-30B-A3B o_proj"),
];

/// The sampled part of each output.
const SAMPLE_ROWS: usize = 64;
const SAMPLE_COLUMNS: usize = 128;
/// Tokens of a weight gradient.
const TOKENS: usize = 512;
/// Chunk lengths; the last stands for the whole row.
const LENGTHS: [usize; 5] = [128, 256, 512, 1024, usize::MAX];

/// A way to compute a product.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Variant {
    Float(FloatArithmetic),
    Slices(Kept, ScaleRule, usize),
}

use FloatArithmetic::{Bf16, F32Chain, F32Lanes, Tf32};
use Kept::{X2, X2Full, X3};
use Variant::{Float, Slices};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Forward,
    GradInput,
    GradWeight,
}

impl Form {
    const ALL: [Self; 3] = [Self::Forward, Self::GradInput, Self::GradWeight];

    const fn title(self) -> &'static str {
        match self {
            Self::Forward => "Forward, `y = x Wᵀ`",
            Self::GradInput => "Input gradient, `dx = dy W`",
            Self::GradWeight => "Weight gradient, `dW = dyᵀ x` over 512 tokens",
        }
    }

    /// The contract's rule for the scale of the right operand.
    const fn rule(self) -> ScaleRule {
        match self {
            Self::Forward => ScaleRule::Row,
            Self::GradInput => ScaleRule::Folded,
            Self::GradWeight => ScaleRule::Chunk,
        }
    }

    fn variants(self) -> Vec<Variant> {
        let mut variants = vec![Float(Bf16), Float(Tf32), Float(F32Chain), Float(F32Lanes)];
        for kept in [X2, X3] {
            for length in LENGTHS {
                variants.push(Slices(kept, ScaleRule::Chunk, length));
                variants.push(Slices(kept, self.rule(), length));
            }
        }
        for rule in [self.rule(), ScaleRule::Chunk] {
            variants.push(Slices(X2Full, rule, 512));
        }
        variants
    }
}

/// One line of a table: what was multiplied, and the error of every variant.
struct Line {
    form: Form,
    shape: usize,
    left: Data,
    right: &'static str,
    errors: Vec<Error>,
}

impl Line {
    fn error(&self, variant: Variant) -> Error {
        let at = self.form.variants().iter().position(|v| *v == variant).expect("a measured variant");
        self.errors[at]
    }
}

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let threads = arguments.number("--threads", 2)?;
    let every_shape = arguments.flag("--every-shape");
    let four_bit = arguments.flag("--four-bit");
    arguments.finish()?;
    if four_bit {
        return crate::study4::run(threads);
    }
    let jobs: Vec<(usize, Weights)> =
        (0..SHAPES.len()).flat_map(|shape| Weights::ALL.map(|weights| (shape, weights))).collect();
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        while let Some(&(shape, weights)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            eprintln!("{} with {} weights", SHAPES[shape].2, weights.name());
            done.extend(layer(shape, weights).into_iter().map(|line| (weights as usize, line)));
        }
        done
    };
    let mut lines: Vec<(usize, Line)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a worker of the study")).collect()
    });
    lines.extend(grad_weight().into_iter().map(|line| (0, line)));
    // Threads finish in any order; the tables have a fixed one.
    lines.sort_by_key(|(weights, line)| (line.form as usize, line.left as usize, *weights, line.shape));
    let lines: Vec<Line> = lines.into_iter().map(|(_, line)| line).collect();
    for form in Form::ALL {
        print_form(form, &lines, every_shape);
    }
    Ok(())
}

/// Forward and input gradient of one layer.
fn layer(shape: usize, weights: Weights) -> Vec<Line> {
    let (k, n, _) = SHAPES[shape];
    let mut random = Random::new(1000 * shape as u64 + weights as u64);
    // Rows are streamed; the first rows, the first columns and the scales of all rows are kept.
    let (mut rows, mut columns) = (Vec::new(), vec![0.0; SAMPLE_COLUMNS * n]);
    let mut quantisers: [Vec<Quantiser>; 2] = [Vec::new(), Vec::new()];
    for index in 0..n {
        let row = weights.row(&mut random, k);
        for (quantisers, kept) in quantisers.iter_mut().zip([X2, X3]) {
            quantisers.push(quantiser_of(kept.profile(), &row));
        }
        for column in 0..SAMPLE_COLUMNS {
            columns[column * n + index] = row[column];
        }
        if index < SAMPLE_COLUMNS {
            rows.extend(row);
        }
    }
    let (rows, columns) = (Rows::new(SAMPLE_COLUMNS, k, rows), Rows::new(SAMPLE_COLUMNS, n, columns));
    let mut lines = Vec::new();
    for left in [Data::Gaussian, Data::Channels, Data::Massive] {
        let x = Rows::new(SAMPLE_ROWS, k, left.generate(&mut random, SAMPLE_ROWS, k));
        let errors = measure(Form::Forward, &x, &rows, None);
        lines.push(Line { form: Form::Forward, shape, left, right: weights.name(), errors });
    }
    for left in [Data::Gaussian, Data::Channels, Data::Student, Data::Products] {
        let dy = Rows::new(SAMPLE_ROWS, n, left.generate(&mut random, SAMPLE_ROWS, n));
        let errors = measure(Form::GradInput, &dy, &columns, Some(&quantisers));
        lines.push(Line { form: Form::GradInput, shape, left, right: weights.name(), errors });
    }
    lines
}

/// The contraction runs over tokens, so the layer's shape does not matter.
fn grad_weight() -> Vec<Line> {
    let mut random = Random::new(99);
    let mut lines = Vec::new();
    for left in [Data::Gaussian, Data::Student, Data::Products] {
        for right in [Data::Gaussian, Data::Channels, Data::Massive] {
            let dy = left.generate(&mut random, TOKENS, SAMPLE_ROWS);
            let x = right.generate(&mut random, TOKENS, SAMPLE_COLUMNS);
            let (dy, x) = (along_tokens(&dy, SAMPLE_ROWS), along_tokens(&x, SAMPLE_COLUMNS));
            let errors = measure(Form::GradWeight, &dy, &x, None);
            lines.push(Line { form: Form::GradWeight, shape: 0, left, right: right.name(), errors });
        }
    }
    lines
}

fn along_tokens(x: &[f32], width: usize) -> Rows {
    Rows::new(width, TOKENS, (0..width * TOKENS).map(|i| x[i % TOKENS * width + i / TOKENS]).collect())
}

fn measure(form: Form, a: &Rows, b: &Rows, quantisers: Option<&[Vec<Quantiser>; 2]>) -> Vec<Error> {
    let want = reference(a, b);
    let compute = |variant: Variant| match variant {
        Float(format) => float_product(a, b, format),
        Slices(kept, rule, length) => {
            let (length, profile) = (length.min(a.width), kept.profile());
            let sliced = |rows: &Rows, group: usize| Sliced::new(rows, group, profile);
            match (rule, quantisers) {
                (ScaleRule::Chunk, _) => slice_product(&sliced(a, length), &sliced(b, length), kept, rule),
                (ScaleRule::Row, _) => slice_product(&sliced(a, length), &sliced(b, b.width), kept, rule),
                (ScaleRule::Folded, Some(quantisers)) => {
                    let b = transposed(b, &quantisers[usize::from(kept == X3)], profile);
                    slice_product(&sliced(&folded(a, &b.scales), length), &b, kept, rule)
                }
                (ScaleRule::Folded, None) => unreachable!("the input gradient knows its weight's scales"),
            }
        }
    };
    form.variants().into_iter().map(|variant| Error::of(&compute(variant), &want, b.count)).collect()
}

/// A column of a table: its title and the value it shows of a line.
type Column = (String, Box<dyn Fn(&Line) -> f64>);

fn print_form(form: Form, lines: &[Line], every_shape: bool) {
    let lines: Vec<&Line> = lines.iter().filter(|line| line.form == form).collect();
    let rule = form.rule();
    let whole = |title: &str, variant: Variant| -> Column {
        (title.to_string(), Box::new(move |line: &Line| line.error(variant).whole))
    };
    let worst = |title: &str, variant: Variant| -> Column {
        (title.to_string(), Box::new(move |line: &Line| line.error(variant).worst_column))
    };
    println!("\n### {}\n", form.title());
    let formats = [
        whole("bf16", Float(Bf16)),
        whole("TF32", Float(Tf32)),
        whole("f32, one chain", Float(F32Chain)),
        whole("f32, 32 lanes", Float(F32Lanes)),
        whole("x2", Slices(X2, rule, 512)),
        whole("x2 with lo·lo", Slices(X2Full, rule, 512)),
        whole("x3", Slices(X3, rule, 512)),
    ];
    println!("Formats. Slices by the contract's rule, chunks of 512.\n");
    print_table(&lines, &formats, every_shape);
    let lengths = if form == Form::GradWeight { &LENGTHS[..3] } else { &LENGTHS[..] };
    for kept in [X2, X3] {
        let mut columns = Vec::new();
        let rules = if form == Form::GradWeight { &[ScaleRule::Chunk][..] } else { &[ScaleRule::Chunk, rule][..] };
        for &rule in rules {
            for &length in lengths {
                let length_name = if length == usize::MAX { "all".to_string() } else { length.to_string() };
                let rule_name = match (rule, form) {
                    (_, Form::GradWeight) => "both per chunk",
                    (ScaleRule::Chunk, _) => "per chunk",
                    _ => "per row",
                };
                columns.push(whole(&format!("{rule_name}, {length_name}"), Slices(kept, rule, length)));
            }
        }
        if kept == X2 && form != Form::GradWeight {
            columns.push(whole("per chunk, 512, lo·lo", Slices(X2Full, ScaleRule::Chunk, 512)));
            columns.push(whole("per row, 512, lo·lo", Slices(X2Full, rule, 512)));
        }
        let name = kept.profile().name();
        println!("\nScale of the right operand and chunk length, {name}.\n");
        print_table(&lines, &columns, false);
    }
    println!("\nThe worst column of the output (chunks of 512).\n");
    let mut columns = vec![worst("bf16", Float(Bf16)), worst("f32, one chain", Float(F32Chain))];
    if form != Form::GradWeight {
        columns.push(worst("x2, scale per chunk", Slices(X2, ScaleRule::Chunk, 512)));
    }
    columns.push(worst("x2", Slices(X2, rule, 512)));
    columns.push(worst("x2 with lo·lo", Slices(X2Full, rule, 512)));
    columns.push(worst("x3", Slices(X3, rule, 512)));
    print_table(&lines, &columns, false);
}

/// Lines with the same data are merged to their largest value over shapes, unless `every_shape`.
fn print_table(lines: &[&Line], columns: &[Column], every_shape: bool) {
    let shape_title = if every_shape { "shape | " } else { "" };
    let titles: Vec<&str> = columns.iter().map(|(title, _)| title.as_str()).collect();
    println!("| {shape_title}left | right | {} |", titles.join(" | "));
    println!("|{}", "---|".repeat(columns.len() + 2 + usize::from(every_shape)));
    let mut rows: Vec<(String, Vec<f64>)> = Vec::new();
    for line in lines {
        let shape = if every_shape { format!("{} | ", SHAPES[line.shape].2) } else { String::new() };
        let key = format!("{shape}{} | {}", line.left.name(), line.right);
        let values: Vec<f64> = columns.iter().map(|(_, value)| value(line)).collect();
        match rows.last_mut() {
            Some((last, old)) if *last == key => {
                for (old, new) in old.iter_mut().zip(values) {
                    *old = old.max(new);
                }
            }
            _ => rows.push((key, values)),
        }
    }
    for (key, values) in rows {
        let cells: Vec<String> = values.iter().map(|value| format!("{value:.1e}")).collect();
        println!("| {key} | {} |", cells.join(" | "));
    }
}
