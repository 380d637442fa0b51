//! Softmax attention with grouped heads: `o(attention(rope(norm(q)), rope(norm(k)), v))`. If gated,
//! `q` also contains a gate for every channel of the attention's output. Heads may have sinks.

use crate::config::Rotary;
use crate::layer::Context;
use isobit_autograd::{AttentionShape, Blocks, Linear, Move, Norm, RotatedHead, Tape, TapeError, Variable, Vector};
use isobit_kernels::Backend;

pub(crate) struct Attention<B: Backend> {
    pub(crate) projections: QueryKeyValue<B>,
    pub(crate) o: Linear<B>,
    pub(crate) q_norm: Option<Norm<B>>,
    pub(crate) k_norm: Option<Norm<B>>,
    pub(crate) shape: AttentionShape,
    pub(crate) rotary: Rotary,
    /// Rotated pairs are neighbours.
    pub(crate) interleaved: bool,
    /// Whether `q` returns, per head, the query and then the gate.
    pub(crate) gated: bool,
    /// One logit per head.
    pub(crate) sinks: Option<Vector<B>>,
}

pub(crate) enum QueryKeyValue<B: Backend> {
    Separate {
        q: Linear<B>,
        k: Linear<B>,
        v: Linear<B>,
    },
    /// Rows of queries, keys, values.
    Joined(Linear<B>),
}

impl<B: Backend> Attention<B> {
    pub(crate) fn forward<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        x: Variable<B>,
        context: Context<'a, B>,
    ) -> Result<Variable<B>, TapeError> {
        let [q, k, v] = self.project(tape, &x);
        drop(x);
        let (q, gate) = if self.gated { self.part(tape, &q) } else { (q, None) };
        let head = RotatedHead { width: self.shape.key_width, offset: 0, interleaved: self.interleaved };
        let rotation = context.rotation_of(self.rotary);
        let rotated = |tape: &mut Tape<'a, B>, x: Variable<B>, norm: &'a Option<Norm<B>>| {
            let x = match norm {
                Some(norm) => tape.rms_norm(&x, norm),
                None => x,
            };
            match rotation {
                Some(rotation) => tape.rope(x, head, rotation),
                None => x,
            }
        };
        let q = rotated(tape, q, &self.q_norm);
        let k = rotated(tape, k, &self.k_norm);
        let mixed = attend(tape, [q, k, v], self.shape, self.sinks.as_ref(), context)?;
        let mixed = match gate {
            Some(gate) => tape.gate(mixed, gate),
            None => mixed,
        };
        Ok(tape.linear(&mixed, &self.o))
    }

    fn project<'a>(&'a self, tape: &mut Tape<'a, B>, x: &Variable<B>) -> [Variable<B>; 3] {
        match &self.projections {
            QueryKeyValue::Separate { q, k, v } => tape.linears_of(x, [q, k, v]),
            QueryKeyValue::Joined(all) => {
                let (queries, keys) =
                    (self.shape.heads * self.shape.key_width, self.shape.kv_heads * self.shape.key_width);
                let all = tape.linear(x, all);
                let cuts = [Move::cut(0, queries, 0), Move::cut(queries, keys, 1), Move::cut(queries + keys, keys, 2)];
                tape.rearrange(&[&all], [queries, keys, keys], &cuts)
            }
        }
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
    [q, k, v]: [Variable<B>; 3],
    shape: AttentionShape,
    sinks: Option<&'a Vector<B>>,
    context: Context<'a, B>,
) -> Result<Variable<B>, TapeError> {
    let Some(cache) = context.cache else { return Ok(tape.attention(q, k, v, shape, sinks)) };
    let (keys, values) = cache.borrow_mut().keys_and_values().extend(tape.backend(), &k, &v)?;
    Ok(tape.attention_over(&q, &keys, &values, shape, sinks))
}
