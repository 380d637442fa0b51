//! The layers of a model, each from the tensors that its kind has.

use crate::ModelError;
use crate::build::Builder;
use crate::config::{
    AttentionConfig, DeltaConfig, DeltaProjections, Feed as FeedConfig, LatentConfig, Mixer as MixerConfig,
};
use crate::layer::attention::Attention;
use crate::layer::delta::{Delta, Projections};
use crate::layer::dense::Dense;
use crate::layer::latent::{Latent, Query};
use crate::layer::{Block, Feed, Mixer};
use isobit_autograd::{AttentionShape, Convolution, DecayRates, Norm};
use isobit_kernels::Backend;

impl<B: Backend> Builder<'_, B> {
    pub(super) fn block(&mut self, layer: usize) -> Result<Block<B>, ModelError> {
        let trained = self.is_trained(layer);
        let path = format!("model.layers.{layer}");
        let config = &self.config.layers[layer];
        let hidden = self.config.hidden;
        let input_norm = self.norm(&format!("{path}.input_layernorm"), hidden, trained)?;
        let mixer = match &config.mixer {
            MixerConfig::Attention(attention) => {
                Mixer::Attention(self.attention(&format!("{path}.self_attn"), attention, trained)?)
            }
            MixerConfig::Latent(latent) => Mixer::Latent(self.latent(&format!("{path}.self_attn"), latent, trained)?),
            MixerConfig::Delta(delta) => Mixer::Delta(self.delta(&format!("{path}.linear_attn"), delta, trained)?),
        };
        let post_norm = self.norm(&format!("{path}.post_attention_layernorm"), hidden, trained)?;
        let feed = match &config.feed {
            &FeedConfig::Dense { width, bias } => {
                Feed::Dense(self.dense(&format!("{path}.mlp"), width, bias, trained)?)
            }
            FeedConfig::Experts(experts) => Feed::Experts(self.sparse(&format!("{path}.mlp"), experts, trained)?),
        };
        self.source.release_all();
        Ok(Block { input_norm, mixer, post_norm, feed })
    }

    fn attention(&mut self, path: &str, a: &AttentionConfig, trained: bool) -> Result<Attention<B>, ModelError> {
        let hidden = self.config.hidden;
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
        };
        Ok(Attention {
            q: self.linear(&format!("{path}.q_proj"), a.query_rows(), hidden, a.qkv_bias, trained)?,
            k: self.linear(&format!("{path}.k_proj"), a.kv_rows(), hidden, a.qkv_bias, trained)?,
            v: self.linear(&format!("{path}.v_proj"), a.kv_rows(), hidden, a.qkv_bias, trained)?,
            o: self.linear(&format!("{path}.o_proj"), hidden, a.output_width(), a.output_bias, trained)?,
            q_norm: head_norm(self, "q_norm")?,
            k_norm: head_norm(self, "k_norm")?,
            shape,
            gated: a.gated,
        })
    }

    fn latent(&mut self, path: &str, c: &LatentConfig, trained: bool) -> Result<Latent<B>, ModelError> {
        let hidden = self.config.hidden;
        let norm = |builder: &mut Self, name: &str, width: usize| -> Result<Norm<B>, ModelError> {
            Ok(Norm { eps: c.norm_eps, ..builder.norm(&format!("{path}.{name}"), width, trained)? })
        };
        let query = match c.query_rank {
            None => Query::Plain(self.linear(&format!("{path}.q_proj"), c.query_rows(), hidden, false, trained)?),
            Some(rank) => Query::Narrow {
                a: self.linear(&format!("{path}.q_a_proj"), rank, hidden, c.bias, trained)?,
                norm: norm(self, "q_a_layernorm", rank)?,
                b: self.linear(&format!("{path}.q_b_proj"), c.query_rows(), rank, false, trained)?,
            },
        };
        Ok(Latent {
            query,
            kv_a: self.linear(&format!("{path}.kv_a_proj_with_mqa"), c.kv_a_rows(), hidden, c.bias, trained)?,
            kv_norm: norm(self, "kv_a_layernorm", c.kv_rank)?,
            kv_b: self.linear(&format!("{path}.kv_b_proj"), c.kv_b_rows(), c.kv_rank, false, trained)?,
            o: self.linear(&format!("{path}.o_proj"), hidden, c.output_width(), c.bias, trained)?,
            config: c.clone(),
        })
    }

    fn delta(&mut self, path: &str, c: &DeltaConfig, trained: bool) -> Result<Delta<B>, ModelError> {
        let hidden = self.config.hidden;
        let input = |builder: &mut Self, name: &str, outputs: usize| {
            builder.linear(&format!("{path}.{name}"), outputs, hidden, false, trained)
        };
        let projections = match c.projections {
            DeltaProjections::Separate => Projections::Separate {
                qkv: input(self, "in_proj_qkv", c.channels())?,
                z: input(self, "in_proj_z", c.values())?,
                b: input(self, "in_proj_b", c.value_heads)?,
                a: input(self, "in_proj_a", c.value_heads)?,
            },
            DeltaProjections::Joined => Projections::Joined {
                qkvz: input(self, "in_proj_qkvz", c.channels() + c.values())?,
                ba: input(self, "in_proj_ba", 2 * c.value_heads)?,
            },
        };
        let (channels, kernel, heads) = (c.channels(), c.kernel, c.value_heads);
        let weight = self.shaped(&format!("{path}.conv1d.weight"), &[channels, 1, kernel], trained)?;
        let rates = DecayRates {
            a_log: self.vector(&format!("{path}.A_log"), heads, trained)?,
            dt_bias: self.vector(&format!("{path}.dt_bias"), heads, trained)?,
            heads,
        };
        Ok(Delta {
            projections,
            convolution: Convolution { weight, channels, kernel },
            rates,
            norm: Norm { zero_centred: false, ..self.norm(&format!("{path}.norm"), c.value_width, trained)? },
            output: self.linear(&format!("{path}.out_proj"), hidden, c.values(), false, trained)?,
            config: c.clone(),
        })
    }

    fn dense(&mut self, path: &str, width: usize, bias: bool, trained: bool) -> Result<Dense<B>, ModelError> {
        let hidden = self.config.hidden;
        Ok(Dense {
            gate: self.linear(&format!("{path}.gate_proj"), width, hidden, bias, trained)?,
            up: self.linear(&format!("{path}.up_proj"), width, hidden, bias, trained)?,
            down: self.linear(&format!("{path}.down_proj"), hidden, width, bias, trained)?,
        })
    }
}
