//! Causal convolution: documents shorter than the window, empty ones, rows of several documents,
//! every kernel width, with and without history.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{Conv1d, Conv1dBackward, Conv1dForward};

#[derive(Debug)]
struct Conv1dCase {
    row_starts: Vec<usize>,
    starts: Vec<usize>,
    channels: usize,
    kernel: usize,
    kind: Distribution,
}

impl Case for Conv1dCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let p = Conv1d { channels: self.channels, kernel: self.kernel, starts: &self.starts };
        let length = p.tokens() * p.channels;
        let mut random = Random::new((length + p.kernel) as u64);
        let [x, dy] = [(); 2].map(|()| b.upload(&random.f32s(self.kind, length)));
        let weight = b.upload(&random.f32s(self.kind, p.channels * p.kernel));
        let history = b.upload(&random.f32s(self.kind, p.history()));
        let mut dweight = b.upload(&random.f32s(Distribution::Plain, p.channels * p.kernel));
        let [mut y, mut continued, mut dx, mut alone] = [(); 4].map(|()| poisoned(b, length));
        b.run(Conv1dForward { y: &mut y, x: &x, weight: &weight, history: None, p });
        b.run(Conv1dForward { y: &mut continued, x: &x, weight: &weight, history: Some(&history), p });
        let (x, dy, weight, row_starts) = (&x, &dy, &weight, &self.row_starts[..]);
        b.run(Conv1dBackward { dx: &mut dx, dweight: Some(&mut dweight), dy, x, weight, p, row_starts });
        b.run(Conv1dBackward { dx: &mut alone, dweight: None, dy, x, weight, p, row_starts });
        vec![
            Output::download(b, "y", &y),
            Output::download(b, "y continued", &continued),
            Output::download(b, "dx", &dx),
            Output::download(b, "dx alone", &alone),
            Output::download(b, "dweight", &dweight),
        ]
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    let case = |row_starts: &[usize], starts: &[usize], channels, kernel, kind| Conv1dCase {
        row_starts: row_starts.to_vec(),
        starts: starts.to_vec(),
        channels,
        kernel,
        kind,
    };
    for kind in Distribution::ALL {
        visitor.case(&case(&[0, 1], &[0, 1], 1, 4, kind));
        visitor.case(&case(&[0, 0, 5, 5, 11], &[0, 0, 2, 5, 6, 11], 33, 4, kind));
        visitor.case(&case(&[0, 3, 40], &[0, 3, 3, 39, 40], 131, 4, kind));
        // A row of documents longer than a block of tokens, with one that crosses the end of the
        // block.
        visitor.case(&case(&[0, 300, 301], &[0, 1, 127, 131, 300, 301], 7, 4, kind));
        visitor.case(&case(&[0, 128, 257], &[0, 128, 257], 5, 3, kind));
        visitor.case(&case(&[0, 0], &[0, 0], 5, 4, kind));
    }
    for kernel in 1..=8 {
        visitor.case(&case(&[0, 4, 71], &[0, 4, 6, 13, 20, 71], 37, kernel, Distribution::Plain));
        visitor.case(&case(&[0, 97], &[0, 31, 33, 64, 65, 97], 3, kernel, Distribution::Outliers));
    }
    visitor.case(&case(&[0, 6, 19], &[0, 6, 19], 1543, 4, Distribution::Outliers));
}
