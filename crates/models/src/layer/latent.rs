//! Attention over a compressed stream: keys and values of all heads come from one narrow value, and
//! one rotated key part is shared by all heads (DeepSeek).

use crate::config::LatentConfig;
use crate::layer::Context;
use crate::layer::attention::attend;
use isobit_autograd::{AttentionShape, Blocks, Linear, Move, Norm, RotatedHead, Tape, TapeError, Variable};
use isobit_kernels::Backend;

pub(crate) struct Latent<B: Backend> {
    pub(crate) query: Query<B>,
    pub(crate) kv_a: Linear<B>,
    pub(crate) kv_norm: Norm<B>,
    pub(crate) kv_b: Linear<B>,
    pub(crate) o: Linear<B>,
    pub(crate) config: LatentConfig,
}

/// How queries are computed.
pub(crate) enum Query<B: Backend> {
    Plain(Linear<B>),
    /// Also through a narrow value.
    Narrow {
        a: Linear<B>,
        norm: Norm<B>,
        b: Linear<B>,
    },
}

impl<B: Backend> Latent<B> {
    pub(crate) fn forward<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        x: Variable<B>,
        context: Context<'a, B>,
    ) -> Result<Variable<B>, TapeError> {
        let c = &self.config;
        let (q, kv) = match &self.query {
            Query::Plain(layer) => {
                let [q, kv] = tape.linears_of(&x, [layer, &self.kv_a]);
                (q, kv)
            }
            Query::Narrow { a, norm, b } => {
                let [narrow, kv] = tape.linears_of(&x, [a, &self.kv_a]);
                let narrow = tape.rms_norm(&narrow, norm);
                (tape.linear(&narrow, b), kv)
            }
        };
        drop(x);
        let head = RotatedHead { width: c.key_width(), offset: c.plain_width, interleaved: c.interleaved };
        let q = tape.rope(q, head, context.rotation);
        let (k, v) = self.keys_and_values(tape, kv, context);
        let mixed = attend(tape, [q, k, v], self.shape(), None, context)?;
        Ok(tape.linear(&mixed, &self.o))
    }

    fn keys_and_values<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        kv: Variable<B>,
        context: Context<'a, B>,
    ) -> (Variable<B>, Variable<B>) {
        let c = &self.config;
        let (plain, rotary, value) = (c.plain_width, c.rotary_width, c.value_width);
        let cuts = [Move::cut(0, c.kv_rank, 0), Move::cut(c.kv_rank, rotary, 1)];
        let [narrow, shared] = tape.rearrange(&[&kv], [c.kv_rank, rotary], &cuts);
        drop(kv);
        let narrow = tape.rms_norm(&narrow, &self.kv_norm);
        let parts = tape.linear(&narrow, &self.kv_b);
        drop(narrow);
        let head = RotatedHead { width: rotary, offset: 0, interleaved: c.interleaved };
        let shared = tape.rope(shared, head, context.rotation);
        let [parts_of, shared_of, keys_of, values_of] = [0, 1, 0, 1];
        let blocks = |of, offset, stride| Blocks { of, offset, stride };
        let per_head = |width, from, to| Move { groups: c.heads, width, from, to };
        let moves = [
            per_head(plain, blocks(parts_of, 0, plain + value), blocks(keys_of, 0, plain + rotary)),
            per_head(rotary, blocks(shared_of, 0, 0), blocks(keys_of, plain, plain + rotary)),
            per_head(value, blocks(parts_of, plain, plain + value), blocks(values_of, 0, value)),
        ];
        let widths = [c.query_rows(), c.output_width()];
        let [k, v] = tape.rearrange(&[&parts, &shared], widths, &moves);
        (k, v)
    }

    fn shape(&self) -> AttentionShape {
        let c = &self.config;
        let (heads, key_width, value_width) = (c.heads, c.key_width(), c.value_width);
        AttentionShape { heads, kv_heads: heads, key_width, value_width, scale: c.scale, window: None, cap: None }
    }
}
