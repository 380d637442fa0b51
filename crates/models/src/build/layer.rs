//! The layers of a model, each from the tensors that its kind has.

use crate::ModelError;
use crate::build::Builder;
use crate::config::{AttentionConfig, Feed as FeedConfig, Mixer as MixerConfig};
use crate::layer::attention::Attention;
use crate::layer::dense::Dense;
use crate::layer::{Block, Feed, Mixer};
use isobit_autograd::{AttentionShape, Norm};
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
            MixerConfig::Latent(_) | MixerConfig::Delta(_) => unreachable!("checked by `build`"),
        };
        let post_norm = self.norm(&format!("{path}.post_attention_layernorm"), hidden, trained)?;
        let feed = match &config.feed {
            &FeedConfig::Dense { width, bias } => {
                Feed::Dense(self.dense(&format!("{path}.mlp"), width, bias, trained)?)
            }
            FeedConfig::Experts(experts) => Feed::Experts(self.sparse(&format!("{path}.mlp"), experts, trained)?),
        };
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
