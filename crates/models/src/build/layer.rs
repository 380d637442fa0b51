//! Builds the layers of a model, each from the tensors of its kind, by the names in the config.

use crate::ModelError;
use crate::build::Builder;
use crate::config::{
    Activation, AttentionConfig, AttentionKind, DeltaConfig, DeltaProjections, LatentConfig, MlpKind, MlpNames,
};
use crate::layer::attention::{Attention, QueryKeyValue};
use crate::layer::delta::{Delta, Projections};
use crate::layer::dense::{Dense, GateUp};
use crate::layer::latent::{Latent, Query};
use crate::layer::{AnyAttention, AnyMlp, Block, BranchEnd};
use isobit_autograd::{AttentionShape, Convolution, DecayRates, Norm};
use isobit_kernels::Backend;

impl<B: Backend> Builder<'_, B> {
    pub(super) fn block(&mut self, layer: usize) -> Result<Block<B>, ModelError> {
        let trained = self.is_trained(layer);
        let path = format!("model.layers.{layer}");
        let config = &self.config.layers[layer];
        let (names, hidden) = (config.names, self.config.hidden);
        let below = |name: &str| format!("{path}.{name}");
        let norm = |builder: &mut Self, name: Option<&str>| {
            name.map(|name| builder.norm(&below(name), hidden, trained)).transpose()
        };
        let attention_norm = norm(self, names.attention_norm)?;
        let attention = match &config.attention {
            AttentionKind::Softmax(c) => AnyAttention::Softmax(self.attention(&below(c.names.module), c, trained)?),
            AttentionKind::Latent(c) => AnyAttention::Latent(self.latent(&below(c.names.module), c, trained)?),
            AttentionKind::Delta(c) => AnyAttention::Delta(self.delta(&below(c.names.module), c, trained)?),
        };
        let attention_output =
            BranchEnd { norm: norm(self, names.attention_output_norm)?, factor: config.attention_factor };
        let mlp_norm = norm(self, names.mlp_norm)?;
        let mlp = match &config.mlp {
            &MlpKind::Dense { names: modules, width, bias, activation } => {
                let dense = self.dense(&below(names.mlp), modules, width, bias, trained)?;
                AnyMlp::Dense(Dense { activation, ..dense })
            }
            MlpKind::Experts(experts) => AnyMlp::Experts(self.sparse(&below(names.mlp), experts, trained)?),
        };
        let mlp_output = BranchEnd { norm: norm(self, names.mlp_output_norm)?, factor: config.mlp_factor };
        self.source.release_all();
        Ok(Block { attention_norm, attention, attention_output, mlp_norm, mlp, mlp_output })
    }

    fn attention(&mut self, path: &str, a: &AttentionConfig, trained: bool) -> Result<Attention<B>, ModelError> {
        let (names, hidden) = (a.names, self.config.hidden);
        let head_norm = |builder: &mut Self, name: &str, width: usize| -> Result<Option<Norm<B>>, ModelError> {
            a.head_norms.then(|| builder.norm(&format!("{path}.{name}"), width, trained)).transpose()
        };
        let [q_norm, k_norm] = a.norm_widths();
        let input = |builder: &mut Self, name: &str, rows: usize| {
            builder.linear(&format!("{path}.{name}"), rows, hidden, a.qkv_bias, trained)
        };
        let projections = match names.qkv {
            Some(all) => QueryKeyValue::Joined(input(self, all, a.query_rows() + 2 * a.kv_rows())?),
            None => QueryKeyValue::Separate {
                q: input(self, names.q, a.query_rows())?,
                k: input(self, names.k, a.kv_rows())?,
                v: input(self, names.v, a.kv_rows())?,
            },
        };
        let shape = AttentionShape {
            heads: a.heads,
            kv_heads: a.kv_heads,
            key_width: a.head_width,
            value_width: a.head_width,
            scale: a.scale,
            window: a.window,
            cap: a.cap,
        };
        Ok(Attention {
            projections,
            o: self.linear(&format!("{path}.{}", names.o), hidden, a.output_width(), a.output_bias, trained)?,
            q_norm: head_norm(self, names.q_norm, q_norm)?,
            k_norm: head_norm(self, names.k_norm, k_norm)?,
            shape,
            rotary: a.rotary,
            interleaved: a.interleaved,
            gated: a.gated,
            sinks: a.sinks.then(|| self.vector(&format!("{path}.{}", names.sinks), a.heads, trained)).transpose()?,
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
        let input = |builder: &mut Self, name: &str, rows: usize| {
            builder.linear(&format!("{path}.{name}"), rows, hidden, bias, trained)
        };
        let gate_up = match names.gate_up {
            Some(both) => GateUp::Joined(input(self, both, 2 * width)?),
            None => GateUp::Separate { gate: input(self, names.gate, width)?, up: input(self, names.up, width)? },
        };
        Ok(Dense {
            gate_up,
            activation: Activation::Silu,
            down: self.linear(&format!("{path}.{}", names.down), hidden, width, bias, trained)?,
        })
    }
}
