//! The recurrent attention of hybrid models: projections, causal convolution, gated delta rule,
//! gated norm, output.

use crate::config::DeltaConfig;
use crate::generate::DeltaCache;
use crate::layer::Context;
use isobit_autograd::{Blocks, Convolution, DecayRates, DeltaShape, Linear, Move, Norm, Tape, TapeError, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::delta_rule::CHUNK;

/// For the L2 norms of queries and keys, fixed by the families.
const L2_EPS: f32 = 1e-6;

pub(crate) struct Delta<B: Backend> {
    pub(crate) projections: Projections<B>,
    pub(crate) convolution: Convolution<B>,
    pub(crate) rates: DecayRates<B>,
    pub(crate) norm: Norm<B>,
    pub(crate) output: Linear<B>,
    pub(crate) config: DeltaConfig,
}

pub(crate) enum Projections<B: Backend> {
    Separate { qkv: Linear<B>, z: Linear<B>, b: Linear<B>, a: Linear<B> },
    Joined { qkvz: Linear<B>, ba: Linear<B> },
}

/// The results of the projections: inputs of the convolution, gates of the norm, and inputs of
/// write strength and decay.
struct Projected<B: Backend> {
    qkv: Variable<B>,
    z: Variable<B>,
    b: Variable<B>,
    a: Variable<B>,
}

impl<B: Backend> Delta<B> {
    pub(crate) fn forward<'a>(
        &'a self,
        tape: &mut Tape<'a, B>,
        x: Variable<B>,
        context: Context<'a, B>,
    ) -> Result<Variable<B>, TapeError> {
        let Projected { qkv, z, b, a } = self.project(tape, x);
        let mut cache = context.cache.map(|cache| cache.borrow_mut());
        let mixed = match &mut cache {
            None => tape.conv1d(qkv, &self.convolution),
            Some(cache) => cache.delta().convolve(tape, &qkv, &self.convolution)?,
        };
        let (keys, values) = (self.config.keys(), self.config.values());
        let cuts = [Move::cut(0, keys, 0), Move::cut(keys, keys, 1), Move::cut(2 * keys, values, 2)];
        let [q, k, v] = tape.rearrange(&[&mixed], [keys, keys, values], &cuts);
        drop(mixed);
        let width = self.config.key_width;
        let q = tape.l2_norm(q, width, L2_EPS, query_factor(width));
        let k = tape.l2_norm(k, width, L2_EPS, 1.0);
        let [g, beta] = tape.decay(a, b, &self.rates);
        let inputs = [q, k, v, g, beta];
        let o = match &mut cache {
            None => tape.delta_rule(inputs, self.shape()),
            Some(cache) => cache.delta().mix(tape, &inputs, self.shape())?,
        };
        let o = tape.gated_norm(o, z, &self.norm);
        Ok(tape.linear(&o, &self.output))
    }

    fn project<'a>(&'a self, tape: &mut Tape<'a, B>, x: Variable<B>) -> Projected<B> {
        match &self.projections {
            Projections::Separate { qkv, z, b, a } => {
                let [qkv, z, b, a] = tape.linears_of(&x, [qkv, z, b, a]);
                Projected { qkv, z, b, a }
            }
            Projections::Joined { qkvz, ba } => {
                let [qkvz, ba] = tape.linears_of(&x, [qkvz, ba]);
                drop(x);
                let [qkv, z] = self.part_qkvz(tape, &qkvz);
                let [b, a] = self.part_ba(tape, &ba);
                Projected { qkv, z, b, a }
            }
        }
    }

    /// Splits rows grouped by key head, `q k v z`, into `[q | k | v]` and `z`.
    fn part_qkvz(&self, tape: &mut Tape<'_, B>, joined: &Variable<B>) -> [Variable<B>; 2] {
        let c = &self.config;
        let (key, value, keys) = (c.key_width, self.group() * c.value_width, c.keys());
        let stride = 2 * key + 2 * value;
        let per_head = |width, from, of, to| Move {
            groups: c.key_heads,
            width,
            from: Blocks { of: 0, offset: from, stride },
            to: Blocks { of, offset: to, stride: width },
        };
        let moves = [
            per_head(key, 0, 0, 0),
            per_head(key, key, 0, keys),
            per_head(value, 2 * key, 0, 2 * keys),
            per_head(value, 2 * key + value, 1, 0),
        ];
        tape.rearrange(&[joined], [c.channels(), c.values()], &moves)
    }

    /// Splits rows grouped by key head, `b a`, into both.
    fn part_ba(&self, tape: &mut Tape<'_, B>, joined: &Variable<B>) -> [Variable<B>; 2] {
        let (group, heads) = (self.group(), self.config.value_heads);
        let part = |of: usize| Move {
            groups: self.config.key_heads,
            width: group,
            from: Blocks { of: 0, offset: of * group, stride: 2 * group },
            to: Blocks { of, offset: 0, stride: group },
        };
        tape.rearrange(&[joined], [heads; 2], &[part(0), part(1)])
    }

    /// Value heads that share one key head.
    fn group(&self) -> usize {
        self.config.value_heads / self.config.key_heads
    }

    fn shape(&self) -> DeltaShape {
        let &DeltaConfig { key_heads, value_heads, key_width, value_width, .. } = &self.config;
        DeltaShape { key_heads, value_heads, key_width, value_width }
    }
}

/// `1/√width` in float64, rounded once.
#[expect(clippy::float_arithmetic, reason = "a parameter of the op, host arithmetic")]
fn query_factor(width: usize) -> f32 {
    (1.0 / (width as f64).sqrt()) as f32
}

impl DeltaCache {
    /// The convolution of new tokens, whose window reaches back over earlier ones.
    fn convolve<B: Backend>(
        &mut self,
        tape: &mut Tape<'_, B>,
        x: &Variable<B>,
        convolution: &Convolution<B>,
    ) -> Result<Variable<B>, TapeError> {
        let length = (convolution.kernel - 1) * convolution.channels;
        if self.history.is_empty() {
            // Zeros before a document change nothing.
            self.history = vec![0.0; length];
        }
        let y = tape.conv1d_after(x, convolution, &tape.backend().upload(&self.history));
        self.history.extend(tape.backend().download(x.buffer())?);
        self.history.drain(..self.history.len() - length);
        Ok(y)
    }

    /// The delta rule of new tokens. Recomputes the tokens since the last chunk boundary, so that
    /// the chunks are those of the whole text.
    fn mix<B: Backend>(
        &mut self,
        tape: &mut Tape<'_, B>,
        inputs: &[Variable<B>; 5],
        shape: DeltaShape,
    ) -> Result<Variable<B>, TapeError> {
        let backend = tape.backend();
        for (pending, input) in self.pending.iter_mut().zip(inputs) {
            pending.extend(backend.download(input.buffer())?);
        }
        let tokens = self.pending[3].len() / shape.value_heads;
        let whole = tokens - tokens % CHUNK;
        let mut output = Vec::new();
        for part in [0..whole, whole..tokens].into_iter().filter(|part| !part.is_empty()) {
            let numbers: [_; 5] = std::array::from_fn(|at| {
                let width = shape.widths()[at];
                backend.upload(&self.pending[at][part.start * width..part.end * width])
            });
            let state = (!self.state.is_empty()).then(|| backend.upload(&self.state));
            let [o, after] = tape.delta_rule_from(numbers.each_ref(), part.len(), state.as_ref(), shape);
            output.extend(backend.download(&o)?);
            if part.end == whole {
                self.state = backend.download(&after)?;
            }
        }
        for (pending, width) in self.pending.iter_mut().zip(shape.widths()) {
            pending.drain(..whole * width);
        }
        let width = inputs[2].width();
        let new = tape.layout().tokens;
        Ok(tape.constant(&output[(tokens - new) * width..], width))
    }
}
