//! Sum of squares: nothing, less than a lane block, blocks of 4,096 and one past, and a third
//! level.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, downloaded, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::SumSquares;

#[derive(Debug)]
struct SumSquaresCase {
    length: usize,
    kind: Distribution,
}

impl Case for SumSquaresCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        // A short repeated pattern: the third level needs more numbers than are worth generating.
        let pattern = Random::new(self.length as u64).f32s(self.kind, self.length.min(10007));
        let x: Vec<f32> = pattern.iter().copied().cycle().take(self.length).collect();
        let (x, nothing) = (b.upload(&x), b.upload(&[]));
        let (mut alone, mut several) = (poisoned(b, 1), poisoned(b, 3));
        b.run(SumSquares { sums: &mut alone, tensors: &[&x] });
        b.run(SumSquares { sums: &mut several, tensors: &[&x, &nothing, &x] });
        let (alone, several) = (downloaded(b, &alone), downloaded(b, &several));
        let bits = [several[0], several[1], several[2]].map(f32::to_bits);
        assert_eq!(bits, [alone[0].to_bits(), 0, alone[0].to_bits()], "one tensor and several");
        vec![Output::new("sum", &alone)]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for length in [0, 1, 31, 32, 33, 4095, 4096, 4097, 12289, 99991] {
            visitor.case(&SumSquaresCase { length, kind });
        }
    }
}

/// One past 4,096 blocks: the level above has two values. Too large to run on every path with every
/// thread count.
pub fn visit_third_level(visitor: &mut impl Visitor) {
    visitor.case(&SumSquaresCase { length: 4096 * 4096 + 4097, kind: Distribution::Outliers });
}
