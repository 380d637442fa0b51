//! Casts: all 16-bit patterns when widening; ties, subnormals, overflow, infinities and NaN when
//! narrowing.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use half::{bf16, f16};
use isobit_kernels::op::{ToBf16, ToF16, ToF32};
use isobit_kernels::{Backend, StoredMatrix};

#[derive(Debug)]
struct NarrowCase {
    name: &'static str,
    values: Vec<f32>,
}

impl Case for NarrowCase {
    fn name(&self) -> String {
        format!("casts of {} {}", self.values.len(), self.name)
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let (x, length) = (b.upload(&self.values), self.values.len());
        let mut to_bf16 = b.upload(&vec![bf16::NAN; length]);
        let mut to_f16 = b.upload(&vec![f16::NAN; length]);
        let mut copy = poisoned(b, length);
        b.run(ToBf16 { y: &mut to_bf16, x: &x });
        b.run(ToF16 { y: &mut to_f16, x: &x });
        b.run(ToF32 { y: &mut copy, x: StoredMatrix::F32(&x) });
        vec![
            Output::download(b, "bf16", &to_bf16),
            Output::download(b, "f16", &to_f16),
            Output::download(b, "f32", &copy),
        ]
    }
}

/// Every 16-bit pattern, in both formats.
#[derive(Debug)]
struct WidenCase;

impl Case for WidenCase {
    fn name(&self) -> String {
        "casts of all 16-bit patterns".to_string()
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let from_bf16: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let from_f16: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let [mut first, mut second] = [(); 2].map(|()| poisoned(b, 1 << 16));
        b.run(ToF32 { y: &mut first, x: StoredMatrix::Bf16(&b.upload(&from_bf16)) });
        b.run(ToF32 { y: &mut second, x: StoredMatrix::F16(&b.upload(&from_f16)) });
        vec![Output::download(b, "from bf16", &first), Output::download(b, "from f16", &second)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    visitor.case(&WidenCase);
    for (kind, length) in Distribution::ALL.into_iter().zip([1, 33, 4097, 0]) {
        visitor.case(&NarrowCase { name: "numbers", values: Random::new(2).f32s(kind, length) });
    }
    // Around every boundary between neighbouring numbers of either format, and a stride over all
    // patterns.
    let boundaries = (0..=u16::MAX).step_by(7).flat_map(|bits| {
        let f16_boundary = f16::from_bits(bits).to_f32().to_bits() | 0x1000;
        [u32::from(bits) << 16 | 0x8000, f16_boundary]
            .into_iter()
            .flat_map(|b| [b.wrapping_sub(1), b, b.wrapping_add(1)])
    });
    visitor.case(&NarrowCase { name: "boundaries", values: boundaries.map(f32::from_bits).collect() });
    let stride = (0..=u32::MAX).step_by(99_991).map(f32::from_bits).collect();
    visitor.case(&NarrowCase { name: "patterns", values: stride });
}
