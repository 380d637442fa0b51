//! Fused LM head and cross-entropy: odd vocabularies and widths, ignored labels, every storage
//! format and kept slices.
//!
//! Each case runs forward and backward, separately and fused, with a stored head and with a sliced
//! head, and requires equal bits.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, downloaded, poisoned};
use half::{bf16, f16};
use isobit_kernels::op::slices::sliced_weight;
use isobit_kernels::op::{HeadLoss, HeadLossBackward, HeadLossForward, HeadLossStep, IGNORED, SliceRows, SliceShape};
use isobit_kernels::{Backend, Matrix, StoredMatrix};
use isobit_numerics::slices::Profile;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadFormat {
    F32,
    Bf16,
    F16,
}

/// Which tokens are not targets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ignored {
    None,
    /// About a third of them, at random.
    Some,
    /// The first three quarters of the tokens: whole blocks of rows.
    Prompt,
    All,
}

#[derive(Clone, Debug)]
pub struct HeadLossCase {
    pub row_starts: Vec<usize>,
    pub hidden: usize,
    pub vocabulary: usize,
    pub profile: Profile,
    pub format: HeadFormat,
    pub kind: Distribution,
    pub ignored: Ignored,
    pub with_dhead: bool,
    /// One element of this token's hidden state is NaN.
    pub poison: Option<usize>,
    pub cap: Option<f32>,
}

/// Inputs in host memory.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub h: Vec<f32>,
    pub head: Vec<f32>,
    pub labels: Vec<i32>,
    pub weight: Vec<f32>,
    pub dhead: Vec<f32>,
}

/// Results in host memory.
#[derive(Clone, Debug)]
pub struct Results {
    pub loss: Vec<f32>,
    pub lse: Vec<f32>,
    pub best: Vec<u32>,
    pub dh: Vec<f32>,
    pub dhead: Option<Vec<f32>>,
}

impl HeadLossCase {
    pub fn tokens(&self) -> usize {
        self.row_starts[self.row_starts.len() - 1]
    }

    pub fn inputs(&self) -> Inputs {
        let (tokens, vocabulary) = (self.tokens(), self.vocabulary);
        let mut random = Random::new((tokens * 1009 + vocabulary * 31 + self.hidden) as u64);
        let mut h = random.f32s(self.kind, tokens * self.hidden);
        let head = random.f32s(self.kind, vocabulary * self.hidden);
        if self.kind == Distribution::Plain {
            // Logits of a few units: a softmax that is neither flat nor one-hot.
            for x in &mut h {
                *x *= 0.1;
            }
        }
        if let Some(token) = self.poison {
            h[token * self.hidden] = f32::NAN;
        }
        let labels = (0..tokens).map(|token| {
            let label = random.below(vocabulary) as i32;
            let ignored = match self.ignored {
                Ignored::None => false,
                Ignored::Some => random.below(3) == 0,
                Ignored::Prompt => token < tokens * 3 / 4,
                Ignored::All => true,
            };
            if ignored { IGNORED } else { label }
        });
        let labels = labels.collect();
        let weight = random.f32s(Distribution::Plain, tokens);
        let dhead = random.f32s(Distribution::Plain, vocabulary * self.hidden);
        Inputs { h, head, labels, weight, dhead }
    }

    /// Forward and backward on `b` with the head as given.
    pub fn results<B: Backend>(&self, b: &B, inputs: &Inputs, head: Matrix<B::Memory>) -> Results {
        let tokens = self.tokens();
        let (row_starts, profile) = (&self.row_starts[..], self.profile);
        let p = HeadLoss { row_starts, hidden: self.hidden, vocabulary: self.vocabulary, cap: self.cap, profile };
        let h = b.upload(&inputs.h);
        let mut rows = b.rows(SliceShape { rows: tokens, width: self.hidden, profile });
        b.run(SliceRows { rows: &mut rows, x: &h });
        let labels = b.upload(&inputs.labels);
        let (mut loss, mut lse) = (poisoned(b, tokens), poisoned(b, tokens));
        let mut best = b.upload(&vec![u32::MAX; tokens]);
        b.run(HeadLossForward { loss: &mut loss, lse: &mut lse, best: &mut best, h: &rows, head, labels: &labels, p });
        let mut dh = poisoned(b, tokens * self.hidden);
        let mut dhead = self.with_dhead.then(|| b.upload(&inputs.dhead));
        let weight = b.upload(&inputs.weight);
        b.run(HeadLossBackward {
            dh: &mut dh,
            dhead: dhead.as_mut(),
            rows: &rows,
            h: &h,
            head,
            labels: &labels,
            lse: &lse,
            weight: &weight,
            p,
        });
        let results = Results {
            loss: downloaded(b, &loss),
            lse: downloaded(b, &lse),
            best: downloaded(b, &best),
            dh: downloaded(b, &dh),
            dhead: dhead.map(|dhead| downloaded(b, &dhead)),
        };
        let (mut loss, mut lse, mut dh) = (poisoned(b, tokens), poisoned(b, tokens), poisoned(b, tokens * self.hidden));
        let mut best = b.upload(&vec![u32::MAX; tokens]);
        b.run(HeadLossStep {
            loss: &mut loss,
            lse: &mut lse,
            best: &mut best,
            dh: &mut dh,
            rows: &rows,
            h: &h,
            head,
            labels: &labels,
            weight: &weight,
            p,
        });
        let at_once = Results {
            loss: downloaded(b, &loss),
            lse: downloaded(b, &lse),
            best: downloaded(b, &best),
            dh: downloaded(b, &dh),
            dhead: results.dhead.clone(),
        };
        assert_eq!(at_once.outputs(), results.outputs(), "both passes at once equal one after the other");
        results
    }
}

impl Results {
    pub fn outputs(&self) -> Vec<Output> {
        let mut outputs = vec![
            Output::new("loss", &self.loss),
            Output::new("lse", &self.lse),
            Output::new("best", &self.best),
            Output::new("dh", &canonical(&self.dh)),
        ];
        outputs.extend(self.dhead.as_ref().map(|dhead| Output::new("dhead", &canonical(dhead))));
        outputs
    }
}

/// The contract defines that a result is NaN, not which NaN.
fn canonical(x: &[f32]) -> Vec<f32> {
    x.iter().map(|&x| if x.is_nan() { f32::NAN } else { x }).collect()
}

impl Case for HeadLossCase {
    fn name(&self) -> String {
        // Cases without a cap have the names that they had before there were caps.
        format!("{self:?}").replace(", cap: None", "")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let inputs = self.inputs();
        let shape = SliceShape { rows: self.vocabulary, width: self.hidden, profile: self.profile };
        let both = |stored: StoredMatrix<B::Memory>| {
            let on_the_fly = self.results(b, &inputs, Matrix::Stored(stored)).outputs();
            let kept = self.results(b, &inputs, Matrix::Sliced(&sliced_weight(b, stored, 1, shape))).outputs();
            assert_eq!(on_the_fly, kept, "sliced on the fly equals kept slices");
            kept
        };
        match self.format {
            HeadFormat::F32 => both(StoredMatrix::F32(&b.upload(&inputs.head))),
            HeadFormat::Bf16 => {
                let head: Vec<_> = inputs.head.iter().map(|&x| bf16::from_f32(x)).collect();
                both(StoredMatrix::Bf16(&b.upload(&head)))
            }
            HeadFormat::F16 => {
                let head: Vec<_> = inputs.head.iter().map(|&x| f16::from_f32(x)).collect();
                both(StoredMatrix::F16(&b.upload(&head)))
            }
        }
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    use Distribution::{Edges, Outliers, Plain, Zeros};
    use HeadFormat::{Bf16, F16, F32};
    for profile in Profile::ALL {
        let plain = HeadLossCase {
            row_starts: vec![0, 1],
            hidden: 1,
            vocabulary: 1,
            profile,
            format: HeadFormat::F32,
            kind: Distribution::Plain,
            ignored: Ignored::None,
            with_dhead: true,
            poison: None,
            cap: None,
        };
        let case = |row_starts: &[usize], hidden, vocabulary, format, kind, ignored, with_dhead| HeadLossCase {
            row_starts: row_starts.to_vec(),
            hidden,
            vocabulary,
            format,
            kind,
            ignored,
            with_dhead,
            ..plain.clone()
        };
        visitor.case(&plain);
        visitor.case(&case(&[0, 3], 33, 1, F32, Plain, Ignored::None, true));
        visitor.case(&case(&[0, 2, 7], 33, 17, Bf16, Plain, Ignored::Some, true));
        visitor.case(&case(&[0, 16, 33], 64, 511, F16, Outliers, Ignored::Some, true));
        visitor.case(&case(&[0, 5], 33, 512, Bf16, Plain, Ignored::None, false));
        visitor.case(&case(&[0, 0, 9, 40], 64, 513, Bf16, Plain, Ignored::Prompt, true));
        visitor.case(&case(&[0, 13], 515, 513, F32, Outliers, Ignored::Some, false));
        visitor.case(&case(&[0, 7, 19], 515, 1100, Bf16, Plain, Ignored::Some, true));
        visitor.case(&case(&[0, 40], 1, 1100, F32, Outliers, Ignored::Prompt, true));
        visitor.case(&case(&[0, 3, 17], 64, 1100, F16, Plain, Ignored::All, true));
        visitor.case(&case(&[0, 6], 33, 17, F32, Plain, Ignored::All, false));
        visitor.case(&case(&[0, 4, 11], 33, 513, F32, Zeros, Ignored::Some, true));
        visitor.case(&case(&[0, 4, 11], 33, 513, F32, Edges, Ignored::Some, true));
        // More than one super-block of tokens, a row longer than a chunk of tokens, many vocabulary
        // blocks.
        visitor.case(&case(&[0, 3, 530, 531, 560], 3, 17, F32, Plain, Ignored::Some, true));
        visitor.case(&case(&[0, 5], 2, 9000, F32, Plain, Ignored::None, true));
        // A non-finite hidden state: the results of its token are NaN, those of other tokens are
        // not.
        let wounded = case(&[0, 4, 9], 33, 1100, F32, Plain, Ignored::None, true);
        visitor.case(&HeadLossCase { poison: Some(5), with_dhead: false, ..wounded });
        let capped = |cap: f32, case: HeadLossCase| HeadLossCase { cap: Some(cap), ..case };
        visitor.case(&capped(0.5, case(&[0, 7, 19], 515, 1100, Bf16, Plain, Ignored::Some, true)));
        visitor.case(&capped(30.0, case(&[0, 16, 33], 64, 513, F32, Outliers, Ignored::Prompt, false)));
        visitor.case(&capped(30.0, case(&[0, 4, 11], 33, 513, F32, Edges, Ignored::Some, true)));
    }
}
