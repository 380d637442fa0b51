//! Slice product: three forms, both profiles, every storage format, kept slices, segments with
//! empty ones.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use half::{bf16, f16};
use isobit_kernels::op::slices::sliced_weight;
use isobit_kernels::op::{Product, ProductForward, ProductGradInput, ProductGradWeight, SliceRows, SliceShape};
use isobit_kernels::{Backend, Matrix, StoredMatrix};
use isobit_numerics::slices::Profile;

#[derive(Clone, Copy, Debug, PartialEq)]
enum WeightFormat {
    F32,
    Bf16,
    F16,
}

#[derive(Debug)]
struct ProductCase {
    segments: Vec<usize>,
    row_starts: Vec<usize>,
    n: usize,
    k: usize,
    profile: Profile,
    format: WeightFormat,
    kind: Distribution,
}

impl ProductCase {
    fn form<B: Backend>(&self, b: &B, w: Matrix<B::Memory>, outputs: &mut Vec<Output>) {
        let m = self.segments[self.segments.len() - 1];
        let mut random = Random::new(m as u64 + 2);
        let x = random.f32s(self.kind, m * self.k);
        let dy = random.f32s(self.kind, m * self.n);
        let old = random.f32s(Distribution::Plain, m * self.k);
        let p = Product { segments: &self.segments, n: self.n, k: self.k, profile: self.profile, accumulate: false };
        let mut rows = b.rows(SliceShape { rows: m, width: self.k, profile: self.profile });
        b.run(SliceRows { rows: &mut rows, x: &b.upload(&x) });
        let mut y = poisoned(b, m * self.n);
        b.run(ProductForward { y: &mut y, x: &rows, w, p });
        outputs.push(Output::download(b, "y", &y));
        let mut dx = poisoned(b, m * self.k);
        b.run(ProductGradInput { dx: &mut dx, dy: &b.upload(&dy), w, p });
        outputs.push(Output::download(b, "dx", &dx));
        let mut dx = b.upload(&old);
        b.run(ProductGradInput { dx: &mut dx, dy: &b.upload(&dy), w, p: Product { accumulate: true, ..p } });
        outputs.push(Output::download(b, "dx accumulated", &dx));
        let mut dw = b.upload(&random.f32s(Distribution::Plain, p.weights() * self.n * self.k));
        b.run(ProductGradWeight { dw: &mut dw, dy: &b.upload(&dy), x: &b.upload(&x), p, row_starts: &self.row_starts });
        outputs.push(Output::download(b, "dw", &dw));
    }
}

impl Case for ProductCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let count = self.segments.len() - 1;
        let w = Random::new(1).f32s(self.kind, count * self.n * self.k);
        let shape = SliceShape { rows: self.n, width: self.k, profile: self.profile };
        let mut outputs = Vec::new();
        let mut both = |stored: StoredMatrix<B::Memory>| {
            self.form(b, Matrix::Stored(stored), &mut outputs);
            self.form(b, Matrix::Sliced(&sliced_weight(b, stored, count, shape)), &mut outputs);
        };
        match self.format {
            WeightFormat::F32 => both(StoredMatrix::F32(&b.upload(&w))),
            WeightFormat::Bf16 => {
                both(StoredMatrix::Bf16(&b.upload(&w.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>())));
            }
            WeightFormat::F16 => {
                both(StoredMatrix::F16(&b.upload(&w.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>())));
            }
        }
        let (on_the_fly, kept) = outputs.split_at(outputs.len() / 2);
        assert_eq!(on_the_fly, kept, "sliced on the fly equals kept slices");
        outputs
    }
}

fn dense(m: usize, n: usize, k: usize, profile: Profile, format: WeightFormat, kind: Distribution) -> ProductCase {
    ProductCase { segments: vec![0, m], row_starts: vec![0, m / 3, m], n, k, profile, format, kind }
}

/// Sizes at and around the sides of tiles of 32, 64 and 128, and no rows at all.
pub fn visit_tile_borders(visitor: &mut impl Visitor) {
    for profile in Profile::ALL {
        for (m, n, k) in [(0, 5, 7), (1, 129, 63), (32, 65, 64), (33, 64, 129), (65, 33, 128), (64, 128, 31)] {
            visitor.case(&dense(m, n, k, profile, WeightFormat::F32, Distribution::Outliers));
        }
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for profile in Profile::ALL {
        visitor.case(&dense(1, 1, 1, profile, WeightFormat::F32, Distribution::Plain));
        visitor.case(&dense(3, 17, 65, profile, WeightFormat::Bf16, Distribution::Plain));
        visitor.case(&dense(33, 31, 64, profile, WeightFormat::F16, Distribution::Outliers));
        visitor.case(&dense(16, 32, 512, profile, WeightFormat::F32, Distribution::Outliers));
        visitor.case(&dense(37, 67, 513, profile, WeightFormat::Bf16, Distribution::Outliers));
        visitor.case(&dense(7, 515, 131, profile, WeightFormat::F32, Distribution::Plain));
        visitor.case(&dense(525, 19, 23, profile, WeightFormat::F32, Distribution::Outliers));
        // Whole and partial token chunks.
        visitor.case(&dense(1100, 40, 24, profile, WeightFormat::F32, Distribution::Outliers));
        for kind in Distribution::ALL {
            visitor.case(&dense(13, 29, 71, profile, WeightFormat::F32, kind));
            // Devices load multiples of four at once.
            visitor.case(&dense(9, 12, 76, profile, WeightFormat::F32, kind));
        }
        visitor.case(&dense(5, 20, 516, profile, WeightFormat::Bf16, Distribution::Outliers));
        // More numbers in a row than a group of work items keeps in registers.
        visitor.case(&dense(3, 8, 9476, profile, WeightFormat::F32, Distribution::Outliers));
        visitor.case(&dense(2, 4, 9220, profile, WeightFormat::F16, Distribution::Outliers));
        // Experts: several segments, some empty; no row of data crosses a segment border.
        visitor.case(&ProductCase {
            segments: vec![0, 5, 5, 22, 39, 39],
            row_starts: vec![0, 2, 5, 11, 22, 39],
            n: 33,
            k: 47,
            profile,
            format: WeightFormat::Bf16,
            kind: Distribution::Outliers,
        });
        // Experts with more rows, outputs and inputs than a tensor core tile, none a multiple of
        // it.
        visitor.case(&ProductCase {
            segments: vec![0, 130, 130, 300, 433],
            row_starts: vec![0, 60, 130, 300, 433],
            n: 523,
            k: 139,
            profile,
            format: WeightFormat::F32,
            kind: Distribution::Outliers,
        });
        // Many experts: most are empty or have a few rows, one is larger than a block; rows of data
        // lie inside segments.
        let (mut segments, mut row_starts) = (vec![0], vec![0]);
        for e in 0..256 {
            let (start, rows) = (segments[e], if e == 200 { 70 } else { [0, 1, 0, 3, 0, 0, 2][e % 7] });
            segments.push(start + rows);
            row_starts.extend((rows > 1).then_some(start + rows / 2));
            row_starts.extend((rows > 0).then_some(start + rows));
        }
        for experts in [32, 256] {
            let segments = segments[..=experts].to_vec();
            let row_starts = row_starts.iter().copied().filter(|start| *start <= segments[experts]).collect();
            let (format, kind) = (WeightFormat::Bf16, Distribution::Plain);
            visitor.case(&ProductCase { segments, row_starts, n: 19, k: 37, profile, format, kind });
        }
    }
}
