//! Router: both scorings, with and without renormalisation, bias, groups and scale; ties, signed
//! zeros, non-finite numbers; weights for the computed expert indices and for others.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, downloaded, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{Router, RouterBackward, RouterChoose, RouterWeights, Scoring};

#[derive(Debug)]
struct RouterCase {
    tokens: usize,
    experts: usize,
    chosen: usize,
    scoring: Scoring,
    renormalise: bool,
    scale: f32,
    groups: usize,
    kept_groups: usize,
    biased: bool,
    /// Some logits are NaN or infinite; then only the expert indices are defined.
    poison: bool,
    kind: Distribution,
}

impl Case for RouterCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let Self { tokens, experts, chosen, scoring, renormalise, scale, groups, kept_groups, .. } = *self;
        let p = Router { tokens, experts, chosen, scoring, renormalise, scale, groups, kept_groups };
        let mut random = Random::new((tokens + experts) as u64);
        let mut logits = random.f32s(self.kind, tokens * experts);
        if self.poison {
            for logit in &mut logits {
                *logit = match random.below(8) {
                    0 | 1 => f32::NAN,
                    2 => f32::INFINITY,
                    3 => f32::NEG_INFINITY,
                    _ => *logit,
                };
            }
        }
        let logits = b.upload(&logits);
        let bias = self.biased.then(|| b.upload(&random.f32s(Distribution::Plain, experts)));
        let mut expert_indices = b.upload(&vec![u32::MAX; tokens * chosen]);
        b.run(RouterChoose { indices: &mut expert_indices, logits: &logits, bias: bias.as_ref(), p });
        let mut outputs = vec![Output::download(b, "choices", &expert_indices)];
        if self.poison {
            return outputs;
        }
        let others: Vec<u32> = downloaded(b, &expert_indices).iter().map(|e| (e + 1) % experts as u32).collect();
        let dweights = b.upload(&random.f32s(self.kind, tokens * chosen));
        for expert_indices in [expert_indices, b.upload(&others)] {
            let mut weights = poisoned(b, tokens * chosen);
            b.run(RouterWeights { weights: &mut weights, logits: &logits, indices: &expert_indices, p });
            outputs.push(Output::download(b, "weights", &weights));
            let mut dlogits = poisoned(b, tokens * experts);
            b.run(RouterBackward {
                dlogits: &mut dlogits,
                dweights: &dweights,
                logits: &logits,
                indices: &expert_indices,
                p,
            });
            outputs.push(Output::download(b, "dlogits", &dlogits));
        }
        outputs
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    let modes =
        [Scoring::Softmax, Scoring::Sigmoid].map(|scoring| [true, false].map(|renormalise| (scoring, renormalise)));
    for (scoring, renormalise) in modes.into_iter().flatten() {
        let case = |tokens, experts, chosen, groups, kept_groups, kind| RouterCase {
            tokens,
            experts,
            chosen,
            scoring,
            renormalise,
            scale: if groups > 1 { 2.5 } else { 1.0 },
            groups,
            kept_groups,
            biased: scoring == Scoring::Sigmoid && groups != 3,
            poison: false,
            kind,
        };
        visitor.case(&case(1, 1, 1, 1, 1, Distribution::Plain));
        visitor.case(&case(9, 33, 5, 1, 1, Distribution::Outliers));
        visitor.case(&case(70, 128, 8, 1, 1, Distribution::Plain));
        visitor.case(&case(3, 512, 10, 1, 1, Distribution::Plain));
        visitor.case(&case(2, 1024, 64, 1, 1, Distribution::Edges));
        visitor.case(&case(17, 256, 8, 8, 4, Distribution::Plain));
        visitor.case(&case(11, 96, 7, 32, 3, Distribution::Outliers));
        // All experts, and groups of one.
        visitor.case(&case(5, 7, 7, 7, 7, Distribution::Edges));
        for kind in Distribution::ALL {
            visitor.case(&case(13, 45, 6, 3, 2, kind));
            visitor.case(&RouterCase { poison: true, ..case(19, 40, 4, 5, 2, kind) });
        }
        visitor.case(&RouterCase { poison: true, ..case(19, 37, 20, 1, 1, Distribution::Plain) });
    }
}
