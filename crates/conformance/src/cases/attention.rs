//! Attention, forward and backward: widths even and odd, grouped heads, packed documents, windows,
//! cached decoding.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, downloaded, poisoned};
use isobit_kernels::Backend;
use isobit_kernels::op::{Attention, AttentionBackward, AttentionForward, Span};
use isobit_numerics::slices::Profile;

/// Packed documents, with all positions as queries.
pub fn packed(lengths: &[usize]) -> Vec<Span> {
    let mut start = 0;
    lengths
        .iter()
        .map(|length| {
            let range = start..start + length;
            start = range.end;
            Span { queries: range.clone(), keys: range }
        })
        .collect()
}

#[derive(Clone, Debug)]
pub struct AttentionCase {
    pub spans: Vec<Span>,
    pub heads: usize,
    pub kv_heads: usize,
    pub key_width: usize,
    pub value_width: usize,
    pub window: Option<usize>,
    pub profile: Profile,
    pub kind: Distribution,
    pub cap: Option<f32>,
}

/// Inputs of one call, in the op's layouts.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub d_o: Vec<f32>,
}

impl AttentionCase {
    pub fn op(&self) -> Attention<'_> {
        Attention {
            spans: &self.spans,
            heads: self.heads,
            kv_heads: self.kv_heads,
            key_width: self.key_width,
            value_width: self.value_width,
            softmax_scale: 1.0 / (self.key_width as f32).sqrt(),
            window: self.window,
            cap: self.cap,
            profile: self.profile,
        }
    }

    fn query_rows(&self) -> usize {
        self.spans.iter().map(|span| span.queries.end).max().unwrap_or(0)
    }

    fn key_rows(&self) -> usize {
        self.spans.iter().map(|span| span.keys.end).max().unwrap_or(0)
    }

    pub fn inputs(&self) -> Inputs {
        let mut random = Random::new((self.key_width * 1000 + self.query_rows()) as u64);
        let (queries, keys) = (self.query_rows() * self.heads, self.key_rows() * self.kv_heads);
        // The gradient of edge values would overflow if the incoming gradient had them too.
        let grad_kind = if self.kind == Distribution::Edges { Distribution::Plain } else { self.kind };
        Inputs {
            q: random.f32s(self.kind, queries * self.key_width),
            k: random.f32s(self.kind, keys * self.key_width),
            v: random.f32s(self.kind, keys * self.value_width),
            d_o: random.f32s(grad_kind, queries * self.value_width),
        }
    }

    /// `o` and `lse`.
    pub fn forward<B: Backend>(&self, b: &B, inputs: &Inputs) -> [Vec<f32>; 2] {
        let p = self.op();
        let mut o = poisoned(b, self.query_rows() * self.heads * self.value_width);
        let mut lse = poisoned(b, self.query_rows() * self.heads);
        let (q, k, v) = (b.upload(&inputs.q), b.upload(&inputs.k), b.upload(&inputs.v));
        b.run(AttentionForward { o: &mut o, lse: &mut lse, q: &q, k: &k, v: &v, p });
        [downloaded(b, &o), downloaded(b, &lse)]
    }

    /// `dq`, `dk`, `dv`.
    pub fn backward<B: Backend>(&self, b: &B, inputs: &Inputs, o: &[f32], lse: &[f32]) -> [Vec<f32>; 3] {
        let p = self.op();
        let mut dq = poisoned(b, inputs.q.len());
        let mut dk = poisoned(b, inputs.k.len());
        let mut dv = poisoned(b, inputs.v.len());
        let (q, k, v) = (b.upload(&inputs.q), b.upload(&inputs.k), b.upload(&inputs.v));
        let d_o = b.upload(&inputs.d_o);
        let (o, lse) = (b.upload(o), b.upload(lse));
        b.run(AttentionBackward {
            dq: &mut dq,
            dk: &mut dk,
            dv: &mut dv,
            d_o: &d_o,
            q: &q,
            k: &k,
            v: &v,
            o: &o,
            lse: &lse,
            p,
        });
        [downloaded(b, &dq), downloaded(b, &dk), downloaded(b, &dv)]
    }

    fn trains(&self) -> bool {
        self.spans.iter().all(|span| span.queries.len() == span.keys.len())
    }
}

impl Case for AttentionCase {
    fn name(&self) -> String {
        // Cases without a cap have the names that they had before there were caps.
        format!("{self:?}").replace(", cap: None", "")
    }

    fn is_finite(&self) -> bool {
        true
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let inputs = self.inputs();
        let [o, lse] = self.forward(b, &inputs);
        let mut outputs = vec![Output::new("o", &o), Output::new("lse", &lse)];
        if self.trains() {
            let [dq, dk, dv] = self.backward(b, &inputs, &o, &lse);
            outputs.extend([Output::new("dq", &dq), Output::new("dk", &dk), Output::new("dv", &dv)]);
        }
        outputs
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    let case = |lengths: &[usize], (heads, kv_heads), (key_width, value_width), profile, kind| AttentionCase {
        spans: packed(lengths),
        heads,
        kv_heads,
        key_width,
        value_width,
        window: None,
        profile,
        kind,
        cap: None,
    };
    for profile in Profile::ALL {
        visitor.case(&case(&[1], (1, 1), (1, 1), profile, Distribution::Plain));
        visitor.case(&case(&[1, 2, 65], (2, 1), (24, 40), profile, Distribution::Outliers));
        visitor.case(&case(&[33, 1, 31], (7, 1), (16, 8), profile, Distribution::Plain));
        visitor.case(&case(&[40], (2, 2), (256, 256), profile, Distribution::Outliers));
        visitor.case(&case(&[35], (1, 1), (192, 128), profile, Distribution::Plain));
        visitor.case(&case(&[127, 2, 128], (1, 1), (32, 20), profile, Distribution::Outliers));
        for kind in Distribution::ALL {
            visitor.case(&case(&[5, 41], (4, 2), (20, 33), profile, kind));
        }
        for (window, length) in [(1, 40), (5, 131), (128, 140), (130, 140)] {
            visitor.case(&AttentionCase {
                window: Some(window),
                ..case(&[3, length], (1, 1), (8, 16), profile, Distribution::Outliers)
            });
        }
        // Decoding: queries are the last positions; key rows lie elsewhere, in a different order.
        visitor.case(&AttentionCase {
            spans: vec![
                Span { queries: 1..3, keys: 200..330 },
                Span { queries: 0..1, keys: 70..199 },
                Span { queries: 3..70, keys: 0..70 },
            ],
            ..case(&[], (2, 1), (12, 36), profile, Distribution::Outliers)
        });
    }
    visitor.case(&case(&[129, 1, 64], (2, 1), (64, 64), Profile::X2, Distribution::Outliers));
    visitor.case(&case(&[130], (7, 1), (64, 64), Profile::X3, Distribution::Plain));
    visitor.case(&case(&[200], (4, 2), (128, 128), Profile::X2, Distribution::Plain));
    visitor.case(&case(&[150], (1, 1), (256, 256), Profile::X3, Distribution::Outliers));
    visitor.case(&case(&[257, 127], (1, 1), (16, 16), Profile::X2, Distribution::Outliers));
    visitor.case(&case(&[129, 385], (1, 1), (64, 64), Profile::X2, Distribution::Plain));
    visitor
        .case(&AttentionCase { window: Some(128), ..case(&[385], (2, 1), (64, 24), Profile::X2, Distribution::Plain) });
    visitor
        .case(&AttentionCase { window: Some(100), ..case(&[300], (1, 1), (24, 64), Profile::X3, Distribution::Edges) });
    visitor
        .case(&AttentionCase { window: Some(5), ..case(&[300], (1, 1), (24, 64), Profile::X2, Distribution::Plain) });
    for (profile, kind) in Profile::ALL.into_iter().flat_map(|profile| Distribution::ALL.map(|kind| (profile, kind))) {
        let cap = Some(if kind == Distribution::Plain { 0.75 } else { 50.0 });
        visitor.case(&AttentionCase { cap, ..case(&[5, 141], (4, 2), (20, 33), profile, kind) });
    }
    visitor.case(&AttentionCase {
        cap: Some(2.0),
        window: Some(70),
        ..case(&[261, 17], (4, 2), (128, 96), Profile::X2, Distribution::Plain)
    });
    visit_fragments(visitor);
}

/// Shapes at the edges of what a warp holds for tensor cores: 16 rows, blocks of 32 and tiles of
/// 128 columns, widths in steps of 32 and beyond 128, where results are computed in parts.
fn visit_fragments(visitor: &mut impl Visitor) {
    let case = |lengths: &[usize], (heads, kv_heads), (key_width, value_width), window| AttentionCase {
        spans: packed(lengths),
        heads,
        kv_heads,
        key_width,
        value_width,
        window,
        profile: Profile::X2,
        kind: Distribution::Outliers,
        cap: None,
    };
    visitor.case(&case(&[1, 127, 130, 31], (6, 2), (128, 128), None));
    visitor.case(&case(&[129, 64], (4, 2), (96, 64), None));
    visitor.case(&case(&[145], (2, 1), (192, 128), None));
    visitor.case(&case(&[33, 65], (3, 1), (64, 160), None));
    visitor.case(&case(&[261, 17], (4, 2), (128, 96), Some(70)));
    visitor.case(&case(&[300], (2, 2), (32, 256), Some(129)));
    let spans = vec![
        Span { queries: 80..83, keys: 300..590 },
        Span { queries: 3..80, keys: 0..300 },
        Span { queries: 0..3, keys: 590..593 },
    ];
    visitor.case(&AttentionCase { spans, ..case(&[], (4, 2), (128, 128), None) });
}
