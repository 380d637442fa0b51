//! Builds the layers of a model, each from the tensors of its kind, by the names in the config.

use crate::ModelError;
use crate::build::Builder;
use crate::config::{AttentionConfig, AttentionKind, DeltaConfig, DeltaProjections, LatentConfig, MlpKind, MlpNames};
use crate::layer::attention::Attention;
use crate::layer::delta::{Delta, Projections};
use crate::layer::dense::Dense;
use crate::layer::latent::{Latent, Query};
use crate::layer::{AnyAttention, AnyMlp, Block};
use isobit_autograd::{AttentionShape, Convolution, DecayRates, Norm};
use isobit_kernels::Backend;

impl<B: Backend> Builder<'_, B> {
    pub(super) fn block(&mut self, layer: usize) -> Result<Block<B>, ModelError> {
        let trained = self.is_trained(layer);
        let path = format!("model.layers.{layer}");
        let config = &self.config.layers[layer];
        let (names, hidden) = (config.names, self.config.hidden);
        let below = |name: &str| format!("{path}.{name}");
        let attention_norm = self.norm(&below(names.attention_norm), hidden, trained)?;
        let attention = match &config.attention {
            AttentionKind::Softmax(c) => AnyAttention::Softmax(self.attention(&below(c.names.module), c, trained)?),
            AttentionKind::Latent(c) => AnyAttention::Latent(self.latent(&below(c.names.module), c, trained)?),
            AttentionKind::Delta(c) => AnyAttention::Delta(self.delta(&below(c.names.module), c, trained)?),
        };
        let mlp_norm = self.norm(&below(names.mlp_norm), hidden, trained)?;
        let mlp = match &config.mlp {
            &MlpKind::Dense { names: modules, width, bias } => {
                AnyMlp::Dense(self.dense(&below(names.mlp), modules, width, bias, trained)?)
            }
            MlpKind::Experts(experts) => AnyMlp::Experts(self.sparse(&below(names.mlp), experts, trained)?),
        };
        self.source.release_all();
        Ok(Block { attention_norm, attention, mlp_norm, mlp })
    }

    fn attention(&mut self, path: &str, a: &AttentionConfig, trained: bool) -> Result<Attention<B>, ModelError> {
        let (names, hidden) = (a.names, self.config.hidden);
        let head_norm = |builder: &mut Self, name: &str| -> Result<Option<Norm<B>>, ModelError> {
            a.head_norms.then(|| builder.norm(&format!("{path}.{name}"), a.head_width, trained)).transpose()
        };
        let shape = AttentionShape {
            heads: a.heads,
            kv_heads: a.kv_heads,
            key_width: a.head_width,
            value_width: a.head_width,
            scale: a.scale,
            window: a.window,
            cap: None,
        };
        Ok(Attention {
            q: self.linear(&format!("{path}.{}", names.q), a.query_rows(), hidden, a.qkv_bias, trained)?,
            k: self.linear(&format!("{path}.{}", names.k), a.kv_rows(), hidden, a.qkv_bias, trained)?,
            v: self.linear(&format!("{path}.{}", names.v), a.kv_rows(), hidden, a.qkv_bias, trained)?,
            o: self.linear(&format!("{path}.{}", names.o), hidden, a.output_width(), a.output_bias, trained)?,
            q_norm: head_norm(self, names.q_norm)?,
            k_norm: head_norm(self, names.k_norm)?,
            shape,
            gated: a.gated,
        })
    }

    fn latent(&mut self, path: &str, c: &LatentConfig, trained: bool) -> Result<Latent<B>, ModelError> {
        let (names, hidden) = (c.names, self.config.hidden);
        let norm = |builder: &mut Self, name: &str, width: usize| -> Result<Norm<B>, ModelError> {
            Ok(Norm { eps: c.norm_eps, ..builder.norm(&format!("{path}.{name}"), width, trained)? })
        };
        let query = match c.query_rank {
            None => {
                Query::Plain(self.linear(&format!("{path}.{}", names.q), c.query_rows(), hidden, false, trained)?)
            }
            Some(rank) => Query::Narrow {
                a: self.linear(&format!("{path}.{}", names.q_a), rank, hidden, c.bias, trained)?,
                norm: norm(self, names.q_a_norm, rank)?,
                b: self.linear(&format!("{path}.{}", names.q_b), c.query_rows(), rank, false, trained)?,
            },
        };
        Ok(Latent {
            query,
            kv_a: self.linear(&format!("{path}.{}", names.kv_a), c.kv_a_rows(), hidden, c.bias, trained)?,
            kv_norm: norm(self, names.kv_a_norm, c.kv_rank)?,
            kv_b: self.linear(&format!("{path}.{}", names.kv_b), c.kv_b_rows(), c.kv_rank, false, trained)?,
            o: self.linear(&format!("{path}.{}", names.o), hidden, c.output_width(), c.bias, trained)?,
            config: c.clone(),
        })
    }

    fn delta(&mut self, path: &str, c: &DeltaConfig, trained: bool) -> Result<Delta<B>, ModelError> {
        let (names, hidden) = (c.names, self.config.hidden);
        let input = |builder: &mut Self, name: &str, outputs: usize| {
            builder.linear(&format!("{path}.{name}"), outputs, hidden, false, trained)
        };
        let projections = match c.projections {
            DeltaProjections::Separate { qkv, z, b, a } => Projections::Separate {
                qkv: input(self, qkv, c.channels())?,
                z: input(self, z, c.values())?,
                b: input(self, b, c.value_heads)?,
                a: input(self, a, c.value_heads)?,
            },
            DeltaProjections::Joined { qkvz, ba } => Projections::Joined {
                qkvz: input(self, qkvz, c.channels() + c.values())?,
                ba: input(self, ba, 2 * c.value_heads)?,
            },
        };
        let (channels, kernel, heads) = (c.channels(), c.kernel, c.value_heads);
        let weight = self.shaped(&format!("{path}.{}.weight", names.convolution), &[channels, 1, kernel], trained)?;
        let rates = DecayRates {
            a_log: self.vector(&format!("{path}.{}", names.a_log), heads, trained)?,
            dt_bias: self.vector(&format!("{path}.{}", names.dt_bias), heads, trained)?,
            heads,
        };
        Ok(Delta {
            projections,
            convolution: Convolution { weight, channels, kernel },
            rates,
            norm: Norm { zero_centred: false, ..self.norm(&format!("{path}.{}", names.norm), c.value_width, trained)? },
            output: self.linear(&format!("{path}.{}", names.output), hidden, c.values(), false, trained)?,
            config: c.clone(),
        })
    }

    fn dense(
        &mut self,
        path: &str,
        names: &MlpNames,
        width: usize,
        bias: bool,
        trained: bool,
    ) -> Result<Dense<B>, ModelError> {
        let hidden = self.config.hidden;
        Ok(Dense {
            gate: self.linear(&format!("{path}.{}", names.gate), width, hidden, bias, trained)?,
            up: self.linear(&format!("{path}.{}", names.up), width, hidden, bias, trained)?,
            down: self.linear(&format!("{path}.{}", names.down), hidden, width, bias, trained)?,
        })
    }
}
