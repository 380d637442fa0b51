//! Qwen2, Qwen3 and Llama: the forward pass.
//!
//! `x = x + o(attention(rope(norm(q), norm(k)), v))`, then `x = x + down(silu(gate)·up)`, both on the normalised stream.

use crate::config::Config;
use crate::generate::LayerCache;
use isobit_autograd::{
    AttentionShape, HeadOutput, Linear, Matrix, Rotation, Table, Tape, TapeError, Targets, Variable, Vector,
};
use isobit_kernels::Backend;
use isobit_kernels::backend::{F32, U32};
use std::cell::{Cell, RefCell};

/// A model with its weights.
pub struct Model<B: Backend> {
    pub config: Config,
    pub(crate) embedding: Table<B>,
    pub(crate) blocks: Vec<Block<B>>,
    pub(crate) norm: Vector<B>,
    pub(crate) head: Matrix<B>,
    /// `[position, head_width / 2]`
    pub(crate) cos: F32<B>,
    pub(crate) sin: F32<B>,
    /// Positions that the tables hold.
    pub positions: usize,
}

/// One decoder layer.
pub(crate) struct Block<B: Backend> {
    pub(crate) input_norm: Vector<B>,
    pub(crate) q: Linear<B>,
    pub(crate) k: Linear<B>,
    pub(crate) v: Linear<B>,
    pub(crate) o: Linear<B>,
    pub(crate) q_norm: Option<Vector<B>>,
    pub(crate) k_norm: Option<Vector<B>>,
    pub(crate) post_norm: Vector<B>,
    pub(crate) gate: Linear<B>,
    pub(crate) up: Linear<B>,
    pub(crate) down: Linear<B>,
    pub(crate) shape: AttentionShape,
}

impl<B: Backend> Model<B> {
    /// Hidden states after the final norm.
    pub fn hidden<'a>(&'a self, tape: &mut Tape<'a, B>, ids: &'a U32<B>) -> Result<Variable<B>, TapeError> {
        let config = &self.config;
        let mut x = tape.embedding(&self.embedding, ids, config.hidden);
        for (layer, block) in self.blocks.iter().enumerate() {
            let rotation = Rotation { cos: &self.cos, sin: &self.sin, width: config.rotary_width };
            let is_last = layer + 1 == self.blocks.len();
            x = tape.block(layer, is_last, x, move |tape, x| {
                block.forward(tape, &x, config.eps, rotation, |tape, q, k, v| tape.attention(q, k, v, block.shape))
            })?;
        }
        Ok(tape.rms_norm(&x, &self.norm, config.hidden, config.eps))
    }

    /// Logits of the last token, given what came before: keys and values of every layer are taken from the cache and added to it.
    pub(crate) fn next_logits<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        ids: &'a U32<B>,
        cache: &'a [RefCell<LayerCache>],
    ) -> Result<Vec<f32>, TapeError> {
        let config = &self.config;
        let mut x = tape.embedding(&self.embedding, ids, config.hidden);
        for (block, cache) in self.blocks.iter().zip(cache) {
            let rotation = Rotation { cos: &self.cos, sin: &self.sin, width: config.rotary_width };
            let failure = Cell::new(None);
            x = block.forward(tape, &x, config.eps, rotation, |tape, q, k, v| {
                let known = cache.borrow_mut().extend(tape.backend(), &k, &v);
                match known {
                    Ok((keys, values)) => tape.attention_over(&q, &keys, &values, block.shape),
                    Err(error) => {
                        failure.set(Some(error));
                        q
                    }
                }
            });
            if let Some(error) = failure.take() {
                return Err(error.into());
            }
        }
        let hidden = tape.rms_norm(&x, &self.norm, config.hidden, config.eps);
        let logits = tape.project(&hidden, &self.head, config.vocabulary);
        let mut all = tape.backend().download(logits.buffer())?;
        Ok(all.split_off(all.len() - config.vocabulary))
    }

    /// Losses of all tokens.
    pub fn loss<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        ids: &'a U32<B>,
        targets: &'a Targets<B>,
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

impl<B: Backend> Block<B> {
    fn forward<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        x: &Variable<B>,
        eps: f32,
        rotation: Rotation<'a, B>,
        attend: impl Fn(&mut Tape<'a, B>, Variable<B>, Variable<B>, Variable<B>) -> Variable<B>,
    ) -> Variable<B> {
        let width = self.shape.key_width;
        let normal = tape.rms_norm(x, &self.input_norm, x.width(), eps);
        let [q, k, v] = tape.linears_of(&normal, [&self.q, &self.k, &self.v]);
        drop(normal);
        let turn = |tape: &mut Tape<'a, B>, x: Variable<B>, norm: &'a Option<Vector<B>>| {
            let x = match norm {
                Some(norm) => tape.rms_norm(&x, norm, width, eps),
                None => x,
            };
            tape.rope(x, width, rotation)
        };
        let q = turn(tape, q, &self.q_norm);
        let k = turn(tape, k, &self.k_norm);
        let mixed = attend(tape, q, k, v);
        let mixed = tape.linear(&mixed, &self.o);
        let x = tape.add(x, &mixed);
        drop(mixed);
        let normal = tape.rms_norm(&x, &self.post_norm, x.width(), eps);
        let [gate, up] = tape.linears_of(&normal, [&self.gate, &self.up]);
        drop(normal);
        let active = tape.swiglu(gate, up);
        tape.finish(&x, &active, &self.down)
    }
}
