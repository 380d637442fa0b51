//! A decoder of any family: embedding, layers, final norm, head. `layer/` defines the layers.

use crate::config::Config;
use crate::files::{Form, TrainedTensor};
use crate::generate::LayerCache;
use crate::layer::{Block, Context};
use isobit_autograd::{
    HeadOutput, HeadShape, LossTargets, Matrix, Norm, Parameter, ParameterId, Rotation, Table, Tape, TapeError,
    Variable,
};
use isobit_kernels::tensor::{F32, U32};
use isobit_kernels::{Backend, Pass, Place};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

/// Consecutive layers of a model. The part with the first layer also has the embedding, the part
/// with the last one the final norm and the head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub layers: Range<usize>,
    /// Layers of the whole model.
    pub of: usize,
}

impl Part {
    pub fn whole(config: &Config) -> Self {
        Self { layers: 0..config.layers.len(), of: config.layers.len() }
    }

    /// The parts with these numbers of layers, which together are the model's.
    pub fn divide(config: &Config, counts: &[usize]) -> Vec<Self> {
        let of = config.layers.len();
        assert_eq!(counts.iter().sum::<usize>(), of, "every layer is in one part");
        let mut next = 0;
        let part = |&count: &usize| {
            next += count;
            Self { layers: next - count..next, of }
        };
        counts.iter().map(part).collect()
    }

    pub fn is_first(&self) -> bool {
        self.layers.start == 0
    }

    pub fn is_last(&self) -> bool {
        self.layers.end == self.of
    }
}

/// Cosines and sines, `[position, rotary_width / 2]` each.
pub(crate) struct RotaryTables<B: Backend> {
    pub(crate) cos: F32<B>,
    pub(crate) sin: F32<B>,
}

impl<B: Backend> RotaryTables<B> {
    fn rotation(&self, width: usize) -> Rotation<'_, B> {
        Rotation { cos: &self.cos, sin: &self.sin, width }
    }
}

/// What follows the last block.
pub(crate) struct Head<B: Backend> {
    pub(crate) norm: Norm<B>,
    pub(crate) matrix: Matrix<B>,
}

/// A model with its weights, or a part of one.
pub struct Model<B: Backend> {
    pub config: Config,
    /// The layers in `blocks`: all, or those of a part.
    pub part: Part,
    /// In the first part.
    pub(crate) embedding: Option<Table<B>>,
    pub(crate) blocks: Vec<Block<B>>,
    /// In the last part.
    pub(crate) head: Option<Head<B>>,
    /// `[position, rotary_width / 2]`
    pub(crate) tables: RotaryTables<B>,
    /// Those of layers with a rotation of their own.
    pub(crate) local_tables: Option<RotaryTables<B>>,
    /// Positions covered by the tables.
    pub positions: usize,
    /// The head's copy of a trained table in the last part, where the first part has the table
    /// itself: it is the last parameter, and not updated but overwritten.
    pub table_copy: Option<ParameterId>,
    /// Forms of the parameters whose layout in a file differs from memory.
    pub(crate) forms: BTreeMap<ParameterId, Form>,
}

impl<B: Backend> Model<B> {
    /// The embedding of tokens: what enters the first layer.
    pub fn embed<'a>(&'a self, tape: &mut Tape<'a, B>, ids: &'a U32<B>) -> Variable<B> {
        tape.backend().enter(Place::Embedding(Pass::Forward));
        let table = self.embedding.as_ref().expect("only the first part of a model embeds");
        let x = tape.embedding(table, ids, self.config.hidden);
        match self.config.embedding_scale {
            Some(factor) => tape.scale(x, factor),
            None => x,
        }
    }

    /// Hidden states after the layers of this part.
    pub fn forward<'a>(&'a self, tape: &mut Tape<'a, B>, mut x: Variable<B>) -> Result<Variable<B>, TapeError> {
        for (layer, block) in self.part.layers.clone().zip(&self.blocks) {
            let context = self.context(None);
            let is_last = layer + 1 == self.part.of;
            x = tape.block(layer, is_last, x, move |tape, x| block.forward(tape, &x, context))?;
        }
        Ok(x)
    }

    /// Losses of all tokens, given the hidden states after the last layer.
    pub fn head_loss<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        x: &Variable<B>,
        targets: &'a LossTargets<B>,
    ) -> HeadOutput<B> {
        let hidden = self.last_hidden(tape, x);
        tape.head_loss(hidden, &self.head().matrix, self.head_shape(), targets)
    }

    fn head_shape(&self) -> HeadShape {
        HeadShape { vocabulary: self.config.vocabulary, cap: self.config.logit_cap }
    }

    /// What the head reads.
    fn last_hidden<'a>(&'a self, tape: &mut Tape<'a, B>, x: &Variable<B>) -> Variable<B> {
        tape.backend().enter(Place::Head(Pass::Forward));
        let hidden = tape.rms_norm(x, &self.head().norm);
        match self.config.head_scale {
            Some(factor) => tape.scale(hidden, factor),
            None => hidden,
        }
    }

    /// Whether this part trains a table that is also the head of another part.
    pub fn has_split_table(&self) -> bool {
        self.config.tied && matches!(self.embedding, Some(Table::Trained(_)))
    }

    /// The trained table that is both embedding and head of this part.
    pub fn tied_table(&self) -> Option<ParameterId> {
        match self.embedding {
            Some(Table::Tied(id)) => Some(id),
            _ => None,
        }
    }

    fn head(&self) -> &Head<B> {
        self.head.as_ref().expect("only the last part of a model has a head")
    }

    /// A parameter as files know it.
    pub fn trained_tensor(&self, id: ParameterId, parameter: &Parameter<B>) -> TrainedTensor {
        let Parameter { name, shape, decays, .. } = parameter;
        let form = self.forms.get(&id).cloned();
        TrainedTensor { name: name.clone(), shape: shape.clone(), decays: *decays, form }
    }

    fn context<'a>(&'a self, cache: Option<&'a RefCell<LayerCache>>) -> Context<'a, B> {
        let width = self.config.rotary_width;
        let local_rotation = self.local_tables.as_ref().map(|tables| tables.rotation(width));
        Context { rotation: self.tables.rotation(width), local_rotation, cache }
    }

    /// The hidden state of the last token, given earlier ones: every layer reads those from its
    /// cache and appends to it.
    pub(crate) fn next_hidden<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        ids: &'a U32<B>,
        caches: &'a [RefCell<LayerCache>],
    ) -> Result<Vec<f32>, TapeError> {
        let mut x = self.embed(tape, ids);
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.forward(tape, &x, self.context(Some(cache)))?;
        }
        Ok(tape.last_row(&x)?)
    }

    /// Logits of the one token of a tape, given its hidden state after the last layer.
    pub(crate) fn logits_of<'a>(&'a self, tape: &mut Tape<'a, B>, hidden: &[f32]) -> Result<Vec<f32>, TapeError> {
        let x = tape.constant(hidden, self.config.hidden);
        let hidden = self.last_hidden(tape, &x);
        let logits = tape.project(&hidden, &self.head().matrix, self.head_shape());
        Ok(tape.backend().download(logits.buffer())?)
    }

    /// Losses of all tokens.
    pub fn loss<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        ids: &'a U32<B>,
        targets: &'a LossTargets<B>,
    ) -> Result<HeadOutput<B>, TapeError> {
        let x = self.embed(tape, ids);
        let x = self.forward(tape, x)?;
        Ok(self.head_loss(tape, &x, targets))
    }

    /// Logits of all tokens, `[tokens, vocabulary]`: for generation and comparisons.
    pub fn logits<'a>(&'a self, tape: &mut Tape<'a, B>, ids: &'a U32<B>) -> Result<Variable<B>, TapeError> {
        let x = self.embed(tape, ids);
        let x = self.forward(tape, x)?;
        let hidden = self.last_hidden(tape, &x);
        Ok(tape.project(&hidden, &self.head().matrix, self.head_shape()))
    }
}
