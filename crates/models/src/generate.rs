//! Generation with a cache of earlier tokens: keys and values, or the inputs and state of a
//! recurrence. A token's results depend only on it and on what came before, so the logits are those
//! of the full forward pass, bit for bit.

use crate::config::{AttentionKind, Config, LayerConfig};
use crate::model::Model;
use isobit_autograd::{BatchLayout, Memory, Parameters, Tape, TapeError, Variable};
use isobit_kernels::op::Span;
use isobit_kernels::op::delta_rule::CHUNK;
use isobit_kernels::tensor::F32;
use isobit_kernels::{Backend, DeviceFailure};
use isobit_numerics::philox::{Key, Purpose, word};
use isobit_numerics::slices::Profile;
use std::cell::RefCell;
use std::ops::Range;

/// What a layer keeps from earlier tokens, on the host.
#[derive(Clone, Debug)]
pub(crate) enum LayerCache {
    Attention(KeysAndValues),
    Delta(DeltaCache),
}

impl LayerCache {
    fn of(layer: &LayerConfig) -> Self {
        match layer.attention {
            AttentionKind::Softmax(_) | AttentionKind::Latent(_) => Self::Attention(KeysAndValues::default()),
            AttentionKind::Delta(_) => Self::Delta(DeltaCache::default()),
        }
    }

    /// Of so many tokens, of zeros.
    fn filled(layer: &LayerConfig, tokens: usize) -> Self {
        let kept = |keys: usize, values: usize| {
            let [keys, values] = [keys, values].map(|each| vec![0.0; each * tokens]);
            Self::Attention(KeysAndValues { keys, values })
        };
        match &layer.attention {
            AttentionKind::Softmax(softmax) => {
                let each = softmax.kv_heads * softmax.head_width;
                kept(each, each)
            }
            AttentionKind::Latent(latent) => kept(latent.heads * latent.key_width(), latent.heads * latent.value_width),
            AttentionKind::Delta(_) => Self::of(layer),
        }
    }

    pub(crate) fn keys_and_values(&mut self) -> &mut KeysAndValues {
        match self {
            Self::Attention(cache) => cache,
            Self::Delta(_) => unreachable!("the cache of a layer is that of its attention"),
        }
    }

    pub(crate) fn delta(&mut self) -> &mut DeltaCache {
        match self {
            Self::Delta(cache) => cache,
            Self::Attention(_) => unreachable!("the cache of a layer is that of its attention"),
        }
    }
}

/// At most the bytes that the cache of a text of so many tokens takes on the host.
pub fn cache_bytes(config: &Config, tokens: usize) -> usize {
    let numbers = |layer: &LayerConfig| match &layer.attention {
        AttentionKind::Softmax(softmax) => 2 * softmax.kv_heads * softmax.head_width * tokens,
        AttentionKind::Latent(latent) => latent.heads * (latent.key_width() + latent.value_width) * tokens,
        AttentionKind::Delta(delta) => delta.value_heads * delta.key_width * (delta.value_width + 2 * CHUNK),
    };
    // A list that grows has room for twice its numbers at most.
    let all = config.layers.iter().fold(0_usize, |sum, layer| sum.saturating_add(numbers(layer)));
    all.saturating_mul(2 * size_of::<f32>())
}

/// The cache of a delta rule: the history that its convolution needs, the state at the last chunk
/// boundary, and the rule's inputs since.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeltaCache {
    pub(crate) history: Vec<f32>,
    /// Empty before the first boundary.
    pub(crate) state: Vec<f32>,
    /// Queries, keys, values, decays and write strengths.
    pub(crate) pending: [Vec<f32>; 5],
}

#[derive(Clone, Debug, Default)]
pub(crate) struct KeysAndValues {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl KeysAndValues {
    /// Appends the new tokens' keys and values and returns all of them.
    pub(crate) fn extend<B: Backend>(
        &mut self,
        backend: &B,
        k: &Variable<B>,
        v: &Variable<B>,
    ) -> Result<(F32<B>, F32<B>), DeviceFailure> {
        self.keys.extend(backend.download(k.buffer())?);
        self.values.extend(backend.download(v.buffer())?);
        Ok((backend.upload(&self.keys), backend.upload(&self.values)))
    }
}

/// A text being continued.
pub struct Session<'a, B: Backend> {
    backend: &'a B,
    model: &'a Model<B>,
    parameters: &'a Parameters<B>,
    profile: Profile,
    memory: Memory<B>,
    cache: Vec<RefCell<LayerCache>>,
    length: usize,
}

impl<'a, B: Backend> Session<'a, B> {
    pub fn new(backend: &'a B, model: &'a Model<B>, parameters: &'a Parameters<B>, profile: Profile) -> Self {
        let cache = model.config.layers.iter().map(|layer| RefCell::new(LayerCache::of(layer))).collect();
        Self { backend, model, parameters, profile, memory: Memory::new(), cache, length: 0 }
    }

    /// As if so many tokens were there, all zeros: for plans.
    #[must_use]
    pub fn pretending(self, tokens: usize) -> Self {
        let cache = self.model.config.layers.iter().map(|layer| RefCell::new(LayerCache::filled(layer, tokens)));
        Self { cache: cache.collect(), length: tokens, ..self }
    }

    /// Tokens so far.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Appends tokens and returns the logits after the last of them.
    ///
    /// # Panics
    /// If there are no tokens, or more than the model was built for.
    pub fn extend(&mut self, tokens: &[u32]) -> Result<Vec<f32>, TapeError> {
        assert!(!tokens.is_empty(), "something to continue");
        let (start, end) = (self.length, self.length + tokens.len());
        assert!(end <= self.model.positions, "{end} tokens, the model was built for {}", self.model.positions);
        let ids = self.backend.upload(tokens);
        let layout = self.layout(start..end);
        let hidden = self.model.next_hidden(&mut self.tape(&layout), &ids, &self.cache)?;
        // The head computes one row: of a long text it would need most of the memory.
        let layout = self.layout(end - 1..end);
        let logits = self.model.logits_of(&mut self.tape(&layout), &hidden)?;
        self.length = end;
        Ok(logits)
    }

    fn tape<'t>(&self, layout: &'t BatchLayout<B>) -> Tape<'t, B>
    where
        'a: 't,
    {
        Tape::inference(self.backend, self.parameters, layout, self.profile).with_buffers_of(&self.memory)
    }

    /// Of tokens that follow all before them.
    fn layout(&self, tokens: Range<usize>) -> BatchLayout<B> {
        let positions: Vec<u32> = (tokens.start as u32..tokens.end as u32).collect();
        BatchLayout {
            tokens: tokens.len(),
            row_starts: vec![0, tokens.len()],
            spans: vec![Span { queries: 0..tokens.len(), keys: 0..tokens.end }],
            positions: self.backend.upload(&positions),
            key: Key::new(0, Purpose::Dropout),
            step: 0,
            first_row: 0,
        }
    }
}

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Zero chooses the most likely token.
    pub temperature: f64,
    /// Only the most likely tokens whose probabilities together reach this.
    pub top_p: f64,
    pub seed: u64,
}

impl Sampling {
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, seed: 0 };

    /// The token at `position` of a text: a pure function of seed, logits and position, so a text
    /// does not depend on other texts. Host arithmetic in float64.
    #[expect(clippy::float_arithmetic, reason = "sampling is defined here, on the host")]
    pub fn choose(&self, logits: &[f32], position: u64) -> u32 {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        // Larger logit first, then the smaller token: a total order.
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        if self.temperature <= 0.0 {
            return order[0];
        }
        let largest = f64::from(logits[order[0] as usize]);
        let weight = |token: &u32| libm::exp((f64::from(logits[*token as usize]) - largest) / self.temperature);
        let weights: Vec<f64> = order.iter().map(weight).collect();
        let all: f64 = weights.iter().sum();
        let (mut kept, mut mass) = (0, 0.0);
        while kept < weights.len() && (kept == 0 || mass < self.top_p * all) {
            mass += weights[kept];
            kept += 1;
        }
        let bits = word(Key::new(self.seed, Purpose::Sampling), 0, 0, 0, position);
        let mut left = f64::from(bits) / 4294967296.0 * mass;
        for (token, weight) in order.iter().zip(&weights).take(kept) {
            if left < *weight {
                return *token;
            }
            left -= weight;
        }
        order[kept - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(Sampling::GREEDY.choose(&[0.5, 2.0, 2.0, -1.0], 0), 1);
    }

    #[test]
    fn samples_follow_the_probabilities_and_the_seed() {
        let sampling = Sampling { temperature: 1.0, top_p: 0.9, seed: 3 };
        let logits = [0.0, 1.0, 2.0, -30.0];
        let mut counts = [0; 4];
        for position in 0..3000 {
            let token = sampling.choose(&logits, position);
            assert_eq!(token, sampling.choose(&logits, position), "a pure function");
            counts[token as usize] += 1;
        }
        // 0.665 and 0.245 together reach 0.9; the others are never chosen.
        assert_eq!((counts[0], counts[3]), (0, 0), "{counts:?}");
        assert!((1900..2500).contains(&counts[2]), "{counts:?}");
    }
}
