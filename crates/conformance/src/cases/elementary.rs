//! Elementary functions: every exponent, both signs, mantissas at both ends and random ones,
//! infinities and NaN.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::Elementary;
use isobit_numerics::elementary::Function;

#[derive(Debug)]
struct ElementaryCase {
    function: Function,
    arguments: Vec<f32>,
}

impl Case for ElementaryCase {
    fn name(&self) -> String {
        format!("{} of {} arguments", self.function.name(), self.arguments.len())
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let x = b.upload(&self.arguments);
        let mut y = poisoned(b, self.arguments.len());
        b.run(Elementary { y: &mut y, x: &x, function: self.function });
        vec![Output::download(b, "y", &y)]
    }
}

/// Bit patterns of every exponent and sign.
fn patterns(random: &mut Random) -> Vec<f32> {
    let mut patterns = Vec::new();
    for exponent in 0..256u32 {
        for sign in [0, 1u32 << 31] {
            let ends = [0, 1, 0x3f_ffff, 0x40_0000, 0x7f_fffe, 0x7f_ffff];
            let inside = [(); 4].map(|()| random.word() as u32 & 0x7f_ffff);
            patterns.extend(ends.into_iter().chain(inside).map(|m| f32::from_bits(sign | (exponent << 23) | m)));
        }
    }
    patterns
}

pub fn visit(visitor: &mut impl Visitor) {
    let mut random = Random::new(1);
    for function in Function::ALL {
        visitor.case(&ElementaryCase { function, arguments: patterns(&mut random) });
        // The most common arguments: a window around zero, an odd number of them.
        let arguments = random.f32s(Distribution::Plain, 2003).iter().map(|x| x * 8.0).collect();
        visitor.case(&ElementaryCase { function, arguments });
    }
}
