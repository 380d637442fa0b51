//! The gated delta rule, forward and backward: lengths around a chunk, packed documents, even and
//! odd widths, shared key heads, states.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, downloaded, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{DeltaRule, DeltaRuleBackward, DeltaRuleForward};

#[derive(Clone, Debug)]
pub struct DeltaRuleCase {
    pub row_starts: Vec<usize>,
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_width: usize,
    pub value_width: usize,
    /// Whether documents start from a given state.
    pub initial: bool,
    pub kind: Distribution,
}

/// Inputs of one call, in the op's layouts.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub g: Vec<f32>,
    pub beta: Vec<f32>,
    pub d_o: Vec<f32>,
    pub initial: Option<Vec<f32>>,
}

impl DeltaRuleCase {
    pub fn op(&self) -> DeltaRule<'_> {
        DeltaRule {
            row_starts: &self.row_starts,
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            key_width: self.key_width,
            value_width: self.value_width,
        }
    }

    pub fn inputs(&self) -> Inputs {
        const DECAYS: [f32; 8] = [0.0, -0.0, -1e-45, -1e-20, -1e-3, -20.0, -90.0, -200.0];
        let [keys, values, scalars, states] = self.op().lengths();
        let random = &mut Random::new((self.key_width * 1000 + self.op().tokens()) as u64);
        let edges = self.kind == Distribution::Edges;
        // The gradient of edge values would overflow if the incoming gradient had them too.
        let grad_kind = if edges { Distribution::Plain } else { self.kind };
        let mut unit_rows = |length: usize, scale: f32| {
            let mut x = random.f32s(self.kind, length);
            for row in x.chunks_mut(self.key_width) {
                let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt() + 1e-6;
                for x in row {
                    *x *= scale / norm;
                }
            }
            x
        };
        let q = unit_rows(keys, 1.0 / (self.key_width as f32).sqrt());
        let k = unit_rows(keys, 1.0);
        let v = random.f32s(self.kind, values);
        let decay = |random: &mut Random| match self.kind {
            Distribution::Zeros => 0.0,
            Distribution::Edges if random.below(2) == 0 => DECAYS[random.below(DECAYS.len())],
            // Most decays are slow, so that a chunk's first token still matters at its end; some
            // are fast.
            _ if random.below(8) > 0 => -0.1 * random.uniform(),
            _ => -3.0 * random.uniform(),
        };
        let g = (0..scalars).map(|_| decay(random)).collect();
        let strength = |random: &mut Random| match self.kind {
            Distribution::Zeros => 0.0,
            Distribution::Edges if random.below(4) == 0 => [0.0, 1.0, 1e-30, 0.5][random.below(4)],
            _ => random.uniform(),
        };
        let beta = (0..scalars).map(|_| strength(random)).collect();
        let d_o = random.f32s(grad_kind, values);
        let initial = self.initial.then(|| random.f32s(grad_kind, states));
        Inputs { q, k, v, g, beta, d_o, initial }
    }

    /// `o` and the final state.
    pub fn forward<B: Backend>(&self, b: &B, inputs: &Inputs) -> [Vec<f32>; 2] {
        let p = self.op();
        let [_, values, _, states] = p.lengths();
        let (mut o, mut last) = (poisoned(b, values), poisoned(b, states));
        let [q, k, v, g, beta] =
            [&inputs.q, &inputs.k, &inputs.v, &inputs.g, &inputs.beta].map(|x| b.upload(x.as_slice()));
        let initial = inputs.initial.as_ref().map(|state| b.upload(state.as_slice()));
        let mut plain = poisoned(b, values);
        let (q, k, v, g, beta, initial_state) = (&q, &k, &v, &g, &beta, initial.as_ref());
        b.run(DeltaRuleForward { o: &mut o, final_state: Some(&mut last), q, k, v, g, beta, initial_state, p });
        b.run(DeltaRuleForward { o: &mut plain, final_state: None, q, k, v, g, beta, initial_state, p });
        let [o, plain] = [&o, &plain].map(|o| downloaded(b, o));
        assert!(o.iter().zip(&plain).all(|(a, b)| a.to_bits() == b.to_bits()), "o does not depend on the final state");
        [o, downloaded(b, &last)]
    }

    /// `dq`, `dk`, `dv`, `dg`, `dbeta`.
    pub fn backward<B: Backend>(&self, b: &B, inputs: &Inputs) -> [Vec<f32>; 5] {
        let p = self.op();
        let [keys, values, scalars, _] = p.lengths();
        let [q, k, v, g, beta, d_o] =
            [&inputs.q, &inputs.k, &inputs.v, &inputs.g, &inputs.beta, &inputs.d_o].map(|x| b.upload(x.as_slice()));
        let [mut dq, mut dk, mut dv, mut dg, mut dbeta] =
            [keys, keys, values, scalars, scalars].map(|length| poisoned(b, length));
        b.run(DeltaRuleBackward {
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
            dg: &mut dg,
            dbeta: &mut dbeta,
            d_o: &d_o,
            q: &q,
            k: &k,
            v: &v,
            g: &g,
            beta: &beta,
            p,
        });
        [&dq, &dk, &dv, &dg, &dbeta].map(|x| downloaded(b, x))
    }
}

impl Case for DeltaRuleCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn is_finite(&self) -> bool {
        true
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let inputs = self.inputs();
        let [o, last] = self.forward(b, &inputs);
        let mut outputs = vec![Output::new("o", &o), Output::new("final_state", &last)];
        if !self.initial {
            let grads = self.backward(b, &inputs);
            outputs.extend(
                ["dq", "dk", "dv", "dg", "dbeta"].into_iter().zip(&grads).map(|(name, x)| Output::new(name, x)),
            );
        }
        outputs
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    let case = |row_starts: &[usize], heads: (usize, usize), widths: (usize, usize), kind| DeltaRuleCase {
        row_starts: row_starts.to_vec(),
        key_heads: heads.0,
        value_heads: heads.1,
        key_width: widths.0,
        value_width: widths.1,
        initial: false,
        kind,
    };
    visitor.case(&case(&[0], (1, 1), (4, 4), Distribution::Plain));
    visitor.case(&case(&[0, 1], (1, 1), (1, 1), Distribution::Plain));
    visitor.case(&case(&[0, 5], (1, 2), (16, 33), Distribution::Plain));
    visitor.case(&case(&[0, 63], (2, 2), (24, 17), Distribution::Outliers));
    visitor.case(&case(&[0, 64], (1, 1), (33, 31), Distribution::Plain));
    visitor.case(&case(&[0, 65], (1, 3), (7, 65), Distribution::Outliers));
    visitor.case(&case(&[0, 130], (2, 4), (32, 16), Distribution::Plain));
    visitor.case(&case(&[0, 70], (1, 1), (128, 128), Distribution::Outliers));
    visitor.case(&case(&[0, 20], (1, 1), (256, 256), Distribution::Plain));
    visitor.case(&case(&[0, 0, 3, 3, 131, 140, 140], (1, 2), (20, 12), Distribution::Outliers));
    visitor.case(&case(&[0, 64, 192, 193], (2, 2), (9, 40), Distribution::Plain));
    for kind in Distribution::ALL {
        visitor.case(&case(&[0, 12, 89], (2, 4), (19, 21), kind));
    }
    for row_starts in [&[0, 1][..], &[0, 65], &[0, 3, 3, 80]] {
        visitor.case(&DeltaRuleCase { initial: true, ..case(row_starts, (1, 2), (23, 37), Distribution::Outliers) });
    }
    visitor.case(&DeltaRuleCase { initial: true, ..case(&[0, 40], (2, 2), (64, 64), Distribution::Plain) });
}
