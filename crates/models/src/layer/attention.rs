//! Softmax attention with grouped heads: `o(attention(rope(norm(q)), rope(norm(k)), v))`.

use crate::layer::Context;
use isobit_autograd::{AttentionShape, Linear, Norm, Tape, TapeError, Variable};
use isobit_kernels::Backend;

pub(crate) struct Attention<B: Backend> {
    pub(crate) q: Linear<B>,
    pub(crate) k: Linear<B>,
    pub(crate) v: Linear<B>,
    pub(crate) o: Linear<B>,
    pub(crate) q_norm: Option<Norm<B>>,
    pub(crate) k_norm: Option<Norm<B>>,
    pub(crate) shape: AttentionShape,
}

impl<B: Backend> Attention<B> {
    pub(crate) fn forward<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        x: Variable<B>,
        context: Context<'a, B>,
    ) -> Result<Variable<B>, TapeError> {
        let [q, k, v] = tape.linears_of(&x, [&self.q, &self.k, &self.v]);
        drop(x);
        let turn = |tape: &mut Tape<'a, B>, x: Variable<B>, norm: &'a Option<Norm<B>>| {
            let x = match norm {
                Some(norm) => tape.rms_norm(&x, norm),
                None => x,
            };
            tape.rope(x, self.shape.key_width, context.rotation)
        };
        let q = turn(tape, q, &self.q_norm);
        let k = turn(tape, k, &self.k_norm);
        let mixed = attend(tape, q, k, v, self.shape, context)?;
        Ok(tape.linear(&mixed, &self.o))
    }
}

/// Over the tape's tokens, or over those and what the cache holds.
pub(crate) fn attend<'a, B: Backend>(
    tape: &mut Tape<'a, B>,
    q: Variable<B>,
    k: Variable<B>,
    v: Variable<B>,
    shape: AttentionShape,
    context: Context<'a, B>,
) -> Result<Variable<B>, TapeError> {
    let Some(cache) = context.cache else { return Ok(tape.attention(q, k, v, shape)) };
    let (keys, values) = cache.borrow_mut().extend(tape.backend(), &k, &v)?;
    Ok(tape.attention_over(&q, &keys, &values, shape))
}
