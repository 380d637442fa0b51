//! Rows of a table, one per token.

use crate::gradients::Gradients;
use crate::op::Node;
use crate::parameters::{ParameterId, Table};
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::op::{EmbeddingBackward, EmbeddingForward};
use isobit_kernels::tensor::U32;
use isobit_kernels::{Backend, StoredMatrix};
use std::rc::Rc;

pub(crate) struct Saved<'a, B: Backend> {
    table: ParameterId,
    tied: bool,
    ids: &'a U32<B>,
    width: usize,
    output: usize,
}

impl<'a, B: Backend> Tape<'a, B> {
    pub fn embedding(&mut self, table: &Table<B>, ids: &'a U32<B>, width: usize) -> Variable<B> {
        let mut y = self.take(self.layout.tokens * width);
        let (stored, trained) = match table {
            Table::Frozen(frozen) => (frozen.stored(), None),
            Table::Trained(id) | Table::Tied(id) => (StoredMatrix::F32(self.parameters.value(*id)), Some(*id)),
        };
        self.backend.run(EmbeddingForward { y: y.buffer_mut(), table: stored, ids, width });
        let y = self.variable(Rc::new(y), width, trained.is_some());
        if let Some(id) = trained {
            let (tied, output) = (matches!(table, Table::Tied(_)), y.id);
            self.record("embedding", &[], || Node::Embedding(Saved { table: id, tied, ids, width, output }));
        }
        y
    }
}

impl<B: Backend> Saved<'_, B> {
    pub(crate) fn backward(self, tape: &Tape<B>, values: &mut [Gradient<B>], gradients: &mut Gradients<B>) {
        let Some(gradient) = values[self.output].take() else { return };
        let length = tape.parameters.get(self.table).length();
        let table = if self.tied {
            gradients.reach_tied(tape.backend, self.table, length)
        } else {
            gradients.reach(tape.backend, self.table)
        };
        tape.backend.run(EmbeddingBackward { dtable: table, dy: gradient.buffer(), ids: self.ids, width: self.width });
    }
}
