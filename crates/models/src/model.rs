//! A decoder of any family: embedding, layers, final norm, head. `layer/` defines the layers.

use crate::config::Config;
use crate::files::{Form, TrainedTensor};
use crate::generate::LayerCache;
use crate::layer::{Block, Context};
use isobit_autograd::{
    HeadOutput, LossTargets, Matrix, Norm, Parameter, ParameterId, Rotation, Table, Tape, TapeError, Variable,
};
use isobit_kernels::Backend;
use isobit_kernels::tensor::{F32, U32};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// A model with its weights.
pub struct Model<B: Backend> {
    pub config: Config,
    pub(crate) embedding: Table<B>,
    pub(crate) blocks: Vec<Block<B>>,
    pub(crate) norm: Norm<B>,
    pub(crate) head: Matrix<B>,
    /// `[position, rotary_width / 2]`
    pub(crate) cos: F32<B>,
    pub(crate) sin: F32<B>,
    /// Positions covered by the tables.
    pub positions: usize,
    /// Forms of the parameters whose layout in a file differs from memory.
    pub(crate) forms: BTreeMap<ParameterId, Form>,
}

impl<B: Backend> Model<B> {
    /// Hidden states after the final norm.
    pub fn hidden<'a>(&'a self, tape: &mut Tape<'a, B>, ids: &'a U32<B>) -> Result<Variable<B>, TapeError> {
        let mut x = tape.embedding(&self.embedding, ids, self.config.hidden);
        for (layer, block) in self.blocks.iter().enumerate() {
            let context = Context { rotation: self.rotation(), cache: None };
            let is_last = layer + 1 == self.blocks.len();
            x = tape.block(layer, is_last, x, move |tape, x| block.forward(tape, &x, context))?;
        }
        Ok(tape.rms_norm(&x, &self.norm))
    }

    /// A parameter as files know it.
    pub fn trained_tensor(&self, id: ParameterId, parameter: &Parameter<B>) -> TrainedTensor {
        let Parameter { name, shape, .. } = parameter;
        TrainedTensor { name: name.clone(), shape: shape.clone(), form: self.forms.get(&id).cloned() }
    }

    fn rotation(&self) -> Rotation<'_, B> {
        Rotation { cos: &self.cos, sin: &self.sin, width: self.config.rotary_width }
    }

    /// Logits of the last token, given earlier ones: every layer reads those from its cache and
    /// appends to it.
    pub(crate) fn next_logits<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        ids: &'a U32<B>,
        caches: &'a [RefCell<LayerCache>],
    ) -> Result<Vec<f32>, TapeError> {
        let config = &self.config;
        let mut x = tape.embedding(&self.embedding, ids, config.hidden);
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.forward(tape, &x, Context { rotation: self.rotation(), cache: Some(cache) })?;
        }
        let hidden = tape.rms_norm(&x, &self.norm);
        let logits = tape.project(&hidden, &self.head, config.vocabulary);
        let mut all = tape.backend().download(logits.buffer())?;
        Ok(all.split_off(all.len() - config.vocabulary))
    }

    /// Losses of all tokens.
    pub fn loss<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        ids: &'a U32<B>,
        targets: &'a LossTargets<B>,
    ) -> Result<HeadOutput<B>, TapeError> {
        let hidden = self.hidden(tape, ids)?;
        Ok(tape.head_loss(hidden, &self.head, self.config.vocabulary, targets))
    }

    /// Logits of all tokens, `[tokens, vocabulary]`: for generation and comparisons.
    pub fn logits<'a>(&'a self, tape: &mut Tape<'a, B>, ids: &'a U32<B>) -> Result<Variable<B>, TapeError> {
        let hidden = self.hidden(tape, ids)?;
        Ok(tape.project(&hidden, &self.head, self.config.vocabulary))
    }
}
