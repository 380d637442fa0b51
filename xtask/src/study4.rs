//! `cargo xtask study --four-bit`: the accuracy of products with 4-bit weights against float64,
//! beside the slice product of the same weights expanded to float32. Whole layers run on the CPU
//! backend; errors are measured on a sample of columns.

use crate::study::SHAPES;
use crate::study_data::{Data, Random, Weights, bf16};
use crate::study_product::Error;
use isobit_kernels::op::{
    Product, Product4Forward, Product4GradInput, ProductForward, ProductGradInput, Quantized, QuantizedShape, Scales,
    SliceRows, SliceShape,
};
use isobit_kernels::{Cpu, Device, Matrix, Path, StoredMatrix};
use isobit_numerics::cast::f16_to_f32;
use isobit_numerics::slices::Profile;
use std::convert::Infallible;

const ROWS: usize = 64;
/// Columns of the output that are compared.
const SAMPLE: usize = 128;

/// A weight quantised to the nearest of 16 levels between each group's smallest and largest number.
struct Layer {
    n: usize,
    k: usize,
    group_size: usize,
    words: Vec<i32>,
    zeros: Vec<u8>,
    scales: Vec<f32>,
    group_of: Vec<u32>,
    /// `[n, k]`
    expanded: Vec<f32>,
}

impl Layer {
    fn new(random: &mut Random, weights: Weights, n: usize, k: usize, group: usize) -> Self {
        let groups = k.div_ceil(group);
        let group_of = (0..k).map(|channel| (channel / group) as u32).collect();
        let (zeros, scales) = (vec![0; groups * n], vec![0.0; groups * n]);
        let (words, expanded) = (vec![0; k / 8 * n], vec![0.0; n * k]);
        let mut layer = Self { n, k, group_size: group, words, zeros, scales, group_of, expanded };
        for output in 0..n {
            let row = weights.row(random, k);
            for (index, numbers) in row.chunks(group).enumerate() {
                layer.quantise(output, index, index * group, numbers);
            }
        }
        layer
    }

    fn quantise(&mut self, output: usize, group: usize, first: usize, numbers: &[f32]) {
        let least = numbers.iter().fold(0.0f32, |least, &x| if x < least { x } else { least });
        let most = numbers.iter().fold(0.0f32, |most, &x| if x > most { x } else { most });
        let scale = f16_to_f32(half_bits((most - least).max(1e-5) / 15.0));
        let zero = (-least / scale).round().clamp(0.0, 15.0);
        self.scales[group * self.n + output] = scale;
        self.zeros[group * self.n + output] = zero as u8;
        for (channel, x) in (first..).zip(numbers) {
            let q = (x / scale + zero).round().clamp(0.0, 15.0);
            self.words[channel / 8 * self.n + output] |= (q as i32) << (4 * (channel % 8));
            self.expanded[output * self.k + channel] = scale * (q - zero);
        }
    }

    fn view(&self) -> Quantized<'_> {
        let (words, zeros, group_of) = (&self.words[..], &self.zeros[..], &self.group_of[..]);
        let scales = Scales::F32(&self.scales);
        Quantized { n: self.n, k: self.k, group_size: self.group_size, words, zeros, scales, group_of }
    }
}

fn half_bits(x: f32) -> u16 {
    isobit_numerics::cast::f32_to_f16(x)
}

/// Errors of bf16, then of x2 and x3, each expanded and with 4 bits.
type Errors = [f64; 5];

pub(crate) fn run(threads: usize) -> Result<(), String> {
    let cpu = Cpu::new(threads.max(1), Path::best()).map_err(|error| error.to_string())?;
    for group in [128, 32] {
        for (forward, title) in [(true, "Forward"), (false, "Input gradient")] {
            println!("\n{title}, groups of {group}.\n");
            println!("| left | right | bf16 | x2 | x2, 4 bit | x3 | x3, 4 bit |\n|---|---|---|---|---|---|---|");
            let lefts: &[Data] = if forward {
                &[Data::Gaussian, Data::Channels, Data::Massive]
            } else {
                &[Data::Gaussian, Data::Channels, Data::Student, Data::Products]
            };
            for weights in Weights::ALL {
                let mut worst = vec![[0.0f64; 5]; lefts.len()];
                for (shape, &(k, n, name)) in SHAPES.iter().enumerate() {
                    eprintln!("{name} with {} weights", weights.name());
                    let mut random = Random::new(1000 * shape as u64 + weights as u64);
                    let layer = Layer::new(&mut random, weights, n, k, group);
                    for (worst, &left) in worst.iter_mut().zip(lefts) {
                        let width = if forward { k } else { n };
                        let x = left.generate(&mut random, ROWS, width);
                        for (worst, error) in worst.iter_mut().zip(errors(&cpu, &layer, &x, forward)) {
                            *worst = worst.max(error);
                        }
                    }
                }
                for (errors, left) in worst.iter().zip(lefts) {
                    let cells: Vec<_> = errors.iter().map(|error| format!("{error:.1e}")).collect();
                    println!("| {} | {} | {} |", left.name(), weights.name(), cells.join(" | "));
                }
            }
        }
    }
    Ok(())
}

fn errors(cpu: &Cpu, layer: &Layer, x: &[f32], forward: bool) -> Errors {
    let (n, k) = (layer.n, layer.k);
    let weight = |column: usize, place: usize| {
        if forward { layer.expanded[column * k + place] } else { layer.expanded[place * k + column] }
    };
    let depth = if forward { k } else { n };
    let exact = |round: &dyn Fn(f32) -> f32| -> Vec<f64> {
        let at = |index: usize| {
            let row = &x[index / SAMPLE * depth..][..depth];
            (0..depth).map(|d| f64::from(round(row[d])) * f64::from(round(weight(index % SAMPLE, d)))).sum()
        };
        (0..ROWS * SAMPLE).map(at).collect()
    };
    let want = exact(&|x| x);
    let sample = |out: &[f32]| -> Vec<f32> {
        out.chunks_exact(out.len() / ROWS).flat_map(|row| row[..SAMPLE].iter().copied()).collect()
    };
    let error = |out: &[f32]| Error::of(&sample(out), &want, SAMPLE).whole;
    let rounded: Vec<f32> = exact(&bf16).into_iter().map(|x| x as f32).collect();
    let mut errors = [Error::of(&rounded, &want, SAMPLE).whole, 0.0, 0.0, 0.0, 0.0];
    let (x, stored) = (cpu.upload(x), cpu.upload(&layer.expanded));
    for (index, profile) in Profile::ALL.into_iter().enumerate() {
        let p = Product { segments: &[0, ROWS], n, k, profile, accumulate: false };
        let w = Matrix::Stored(StoredMatrix::F32(&stored));
        let shape = QuantizedShape::of(&[layer.view()]);
        let made = cpu.quantized_weight(shape, |_| Ok::<_, Infallible>(layer.view()));
        let packed = made.unwrap_or_else(|never| match never {});
        let mut out = cpu.zeros(ROWS * if forward { n } else { k });
        if forward {
            let mut rows = cpu.rows(SliceShape { rows: ROWS, width: k, profile });
            cpu.run(SliceRows { rows: &mut rows, x: &x });
            cpu.run(ProductForward { y: &mut out, x: &rows, w, p });
            errors[1 + 2 * index] = error(&out);
            cpu.run(Product4Forward { y: &mut out, x: &rows, w: &packed, p });
        } else {
            cpu.run(ProductGradInput { dx: &mut out, dy: &x, w, p });
            errors[1 + 2 * index] = error(&out);
            cpu.run(Product4GradInput { dx: &mut out, dy: &x, w: &packed, p });
        }
        errors[2 + 2 * index] = error(&out);
    }
    errors
}
