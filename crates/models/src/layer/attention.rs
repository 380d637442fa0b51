//! Softmax attention with grouped heads: `o(attention(rope(norm(q)), rope(norm(k)), v))`. If gated,
//! `q` also contains a gate for every channel of the attention's output.

use crate::layer::Context;
use isobit_autograd::{AttentionShape, Blocks, Linear, Move, Norm, RotatedHead, Tape, TapeError, Variable};
use isobit_kernels::Backend;

pub(crate) struct Attention<B: Backend> {
    pub(crate) q: Linear<B>,
    pub(crate) k: Linear<B>,
    pub(crate) v: Linear<B>,
    pub(crate) o: Linear<B>,
    pub(crate) q_norm: Option<Norm<B>>,
    pub(crate) k_norm: Option<Norm<B>>,
    pub(crate) shape: AttentionShape,
    /// Whether `q` returns, per head, the query and then the gate.
    pub(crate) gated: bool,
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
        let (q, gate) = if self.gated { self.part(tape, &q) } else { (q, None) };
        let turn = |tape: &mut Tape<'a, B>, x: Variable<B>, norm: &'a Option<Norm<B>>| {
            let x = match norm {
                Some(norm) => tape.rms_norm(&x, norm),
                None => x,
            };
            tape.rope(x, RotatedHead::first(self.shape.key_width), context.rotation)
        };
        let q = turn(tape, q, &self.q_norm);
        let k = turn(tape, k, &self.k_norm);
        let mixed = attend(tape, q, k, v, self.shape, context)?;
        let mixed = match gate {
            Some(gate) => tape.gate(mixed, gate),
            None => mixed,
        };
        Ok(tape.linear(&mixed, &self.o))
    }

    /// Queries and gates of all heads.
    fn part(&self, tape: &mut Tape<'_, B>, joined: &Variable<B>) -> (Variable<B>, Option<Variable<B>>) {
        let (groups, width) = (self.shape.heads, self.shape.key_width);
        let part = |of: usize| Move {
            groups,
            width,
            from: Blocks { of: 0, offset: of * width, stride: 2 * width },
            to: Blocks { of, offset: 0, stride: width },
        };
        let [q, gate] = tape.rearrange(&[joined], [groups * width; 2], &[part(0), part(1)]);
        (q, Some(gate))
    }
}

/// Over the tape's tokens, preceded by the cached ones if there is a cache.
pub(crate) fn attend<'a, B: Backend>(
    tape: &mut Tape<'a, B>,
    q: Variable<B>,
    k: Variable<B>,
    v: Variable<B>,
    shape: AttentionShape,
    context: Context<'a, B>,
) -> Result<Variable<B>, TapeError> {
    let Some(cache) = context.cache else { return Ok(tape.attention(q, k, v, shape)) };
    let (keys, values) = cache.borrow_mut().keys_and_values().extend(tape.backend(), &k, &v)?;
    Ok(tape.attention_over(&q, &keys, &values, shape))
}
