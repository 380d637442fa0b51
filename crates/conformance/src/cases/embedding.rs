//! Embedding: every storage format; gradients with many equal ids, one id for all tokens, ids at
//! both ends of the table.

use crate::data::{Distribution, Random};
use crate::{Case, Output, Visitor, poisoned};
use half::{bf16, f16};
use isobit_kernels::op::{EmbeddingBackward, EmbeddingForward};
use isobit_kernels::{Backend, StoredMatrix};
use isobit_numerics::cast;

#[derive(Debug)]
struct EmbeddingCase {
    tokens: usize,
    vocabulary: usize,
    width: usize,
    /// Ids are drawn from this many of the table's rows.
    distinct: usize,
    kind: Distribution,
}

impl Case for EmbeddingCase {
    fn name(&self) -> String {
        format!("{self:?}")
    }

    fn run<B: Backend>(&self, b: &B) -> Vec<Output> {
        let (tokens, width) = (self.tokens, self.width);
        let mut random = Random::new(tokens as u64);
        let table = random.f32s(self.kind, self.vocabulary * width);
        let step = (self.vocabulary - 1) / self.distinct.max(2).saturating_sub(1);
        let ids: Vec<u32> = (0..tokens).map(|_| (random.below(self.distinct) * step) as u32).collect();
        let ids = b.upload(&ids);
        let mut outputs = Vec::new();
        let mut gather = |name, stored: StoredMatrix<B::Memory>| {
            let mut y = poisoned(b, tokens * width);
            b.run(EmbeddingForward { y: &mut y, table: stored, ids: &ids, width });
            outputs.push(Output::download(b, name, &y));
        };
        gather("y f32", StoredMatrix::F32(&b.upload(&table)));
        let narrow: Vec<bf16> = table.iter().map(|&x| bf16::from_bits(cast::f32_to_bf16(x))).collect();
        gather("y bf16", StoredMatrix::Bf16(&b.upload(&narrow)));
        let narrow: Vec<f16> = table.iter().map(|&x| f16::from_bits(cast::f32_to_f16(x))).collect();
        gather("y f16", StoredMatrix::F16(&b.upload(&narrow)));
        let mut dtable = b.upload(&random.f32s(Distribution::Plain, self.vocabulary * width));
        let dy = b.upload(&random.f32s(self.kind, tokens * width));
        b.run(EmbeddingBackward { dtable: &mut dtable, dy: &dy, ids: &ids, width });
        outputs.push(Output::download(b, "dtable", &dtable));
        outputs
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    for kind in Distribution::ALL {
        for (tokens, vocabulary, width, distinct) in
            [(0, 3, 5, 1), (1, 1, 1, 1), (37, 11, 33, 11), (129, 5000, 3, 40), (64, 7, 131, 1), (300, 2100, 17, 2)]
        {
            visitor.case(&EmbeddingCase { tokens, vocabulary, width, distinct, kind });
        }
    }
}
