//! Attention sinks: forward on results of attention, the terms of the sink's gradient and their
//! sum, and the gradients of attention that follow from the changed results.

use crate::cases::attention::{AttentionCase, packed};
use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, downloaded, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{BiasBackward, SinkBackward, SinkForward};
use isobit_numerics::slices::Profile;

/// Any numbers in place of the results of attention.
#[derive(Debug)]
struct SinkCase {
    row_starts: Vec<usize>,
    heads: usize,
    width: usize,
    kind: Distribution,
}

impl Case for SinkCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let rows = self.row_starts[self.row_starts.len() - 1] * self.heads;
        let mut random = Random::new((rows * 100 + self.width) as u64);
        let mut o = b.upload(&random.f32s(self.kind, rows * self.width));
        let mut lse = b.upload(&random.f32s(self.kind, rows));
        let sink = b.upload(&random.f32s(self.kind, self.heads));
        b.run(SinkForward { o: &mut o, lse: &mut lse, sink: &sink });
        let d_o = b.upload(&random.f32s(Distribution::Plain, rows * self.width));
        let mut terms = poisoned(b, rows);
        b.run(SinkBackward { terms: &mut terms, d_o: &d_o, o: &o, lse: &lse, sink: &sink });
        let mut dsink = b.upload(&random.f32s(Distribution::Plain, self.heads));
        b.run(BiasBackward { dbias: &mut dsink, dy: &terms, row_starts: &self.row_starts });
        vec![
            Output::download(b, "o", &o),
            Output::download(b, "lse", &lse),
            Output::download(b, "terms", &terms),
            Output::download(b, "dsink", &dsink),
        ]
    }
}

/// After attention, and before its backward pass.
#[derive(Debug)]
pub struct AttentionWithSinks(pub AttentionCase);

impl AttentionWithSinks {
    pub fn sinks(&self) -> Vec<f32> {
        Random::new(self.0.heads as u64).f32s(Distribution::Plain, self.0.heads)
    }
}

impl Case for AttentionWithSinks {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn is_finite(&self) -> bool {
        true
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let case = &self.0;
        let inputs = case.inputs();
        let [o, lse] = case.forward(b, &inputs);
        let (mut o, mut lse, sink) = (b.upload(&o), b.upload(&lse), b.upload(&self.sinks()));
        b.run(SinkForward { o: &mut o, lse: &mut lse, sink: &sink });
        let (o, lse) = (downloaded(b, &o), downloaded(b, &lse));
        let [dq, dk, dv] = case.backward(b, &inputs, &o, &lse);
        let names = ["o", "lse", "dq", "dk", "dv"];
        names.into_iter().zip([&o, &lse, &dq, &dk, &dv]).map(|(name, values)| Output::new(name, values)).collect()
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for (row_starts, heads, width) in [
            (vec![0, 1], 1, 1),
            (vec![0, 0, 5, 12], 3, 33),
            (vec![0, 129, 140], 8, 64),
            (vec![0, 7], 5, 24),
            (vec![0, 0], 2, 4),
            (vec![0, 31], 2, 160),
        ] {
            visitor.case(&SinkCase { row_starts, heads, width, kind });
        }
    }
    for (profile, window) in
        Profile::ALL.into_iter().flat_map(|profile| [None, Some(5)].map(|window| (profile, window)))
    {
        visitor.case(&AttentionWithSinks(AttentionCase {
            spans: packed(&[1, 140, 9]),
            heads: 4,
            kv_heads: 2,
            key_width: 64,
            value_width: 64,
            window,
            profile,
            kind: Distribution::Plain,
            cap: None,
        }));
    }
}
