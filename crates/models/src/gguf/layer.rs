//! The tensors of one layer, under llama.cpp's names.

use super::{GgufModel, GgufRules, GgufSource, check, tensor};
use crate::ModelError;
use crate::config::{
    AttentionConfig, AttentionKind, Config, ExpertsConfig, GateUpRows, LatentConfig, MlpKind, MlpNames,
};
use crate::experts::{ExpertsShape, Projection};

impl GgufModel {
    pub(super) fn layer(&mut self, config: &Config, rules: GgufRules, layer: usize) -> Result<(), ModelError> {
        let of = &config.layers[layer];
        let (here, there) = (format!("model.layers.{layer}"), format!("blk.{layer}"));
        self.layer_norm(config, [&here, &there], of.names.attention_norm, "attn_norm");
        match &of.attention {
            AttentionKind::Softmax(attention) => {
                let path = format!("{here}.{}", attention.names.module);
                self.projections(config, rules, attention, [&path, &there]);
                self.head_norms(config, attention, [&path, &there]);
            }
            AttentionKind::Latent(latent) => {
                self.latent_projections(config, latent, [&format!("{here}.{}", latent.names.module), &there]);
            }
            AttentionKind::Delta(_) => unreachable!("refused before the layers are written"),
        }
        for (name, gguf) in [
            (of.names.attention_output_norm, "post_attention_norm"),
            (of.names.mlp_norm, rules.mlp_norm),
            (of.names.mlp_output_norm, "post_ffw_norm"),
        ] {
            self.layer_norm(config, [&here, &there], name, gguf);
        }
        self.mlp([&format!("{here}.{}", of.names.mlp), &there], config.hidden, &of.mlp, rules)
    }

    fn layer_norm(&mut self, config: &Config, [here, there]: [&str; 2], name: Option<&str>, gguf: &str) {
        if let Some(name) = name {
            let norm = self.norm(config, here, name);
            self.exact(&format!("{there}.{gguf}.weight"), vec![config.hidden], norm);
        }
    }

    fn projections(
        &mut self,
        config: &Config,
        rules: GgufRules,
        attention: &AttentionConfig,
        [path, there]: [&str; 2],
    ) {
        let (names, hidden) = (attention.names, config.hidden);
        let (rows, kv_rows) = (attention.query_rows(), attention.kv_rows());
        let paired = |heads: usize| (rules.interleaved && !attention.interleaved).then_some(heads);
        let bias = attention.qkv_bias;
        let mut all = match names.qkv {
            Some(qkv) => vec![(qkv, "attn_qkv", rows + 2 * kv_rows, hidden, None, bias)],
            None => vec![
                (names.q, "attn_q", rows, hidden, paired(attention.heads), bias),
                (names.k, "attn_k", kv_rows, hidden, paired(attention.kv_heads), bias),
                (names.v, "attn_v", kv_rows, hidden, None, bias),
            ],
        };
        all.push((names.o, "attn_output", hidden, attention.output_width(), None, attention.output_bias));
        for (module, gguf, outputs, inputs, interleaved, bias) in all {
            let source = |part: &str| match interleaved {
                Some(heads) => GgufSource::Interleaved(format!("{path}.{module}.{part}"), heads),
                None => tensor(&format!("{path}.{module}.{part}")),
            };
            self.add(&format!("{there}.{gguf}.weight"), vec![outputs, inputs], source("weight"));
            if bias {
                self.exact(&format!("{there}.{gguf}.bias"), vec![outputs], source("bias"));
            }
        }
        if attention.sinks {
            let sinks = tensor(&format!("{path}.{}", names.sinks));
            self.exact(&format!("{there}.attn_sinks.weight"), vec![attention.heads], sinks);
        }
    }

    fn head_norms(&mut self, config: &Config, attention: &AttentionConfig, [path, there]: [&str; 2]) {
        if !attention.head_norms {
            return;
        }
        let modules = [(attention.names.q_norm, "attn_q_norm"), (attention.names.k_norm, "attn_k_norm")];
        for ((module, gguf), width) in modules.into_iter().zip(attention.norm_widths()) {
            let norm = self.norm(config, path, module);
            self.exact(&format!("{there}.{gguf}.weight"), vec![width], norm);
        }
    }

    /// The projection to keys and values is split: llama.cpp multiplies queries with the one part,
    /// and what attention returns with the other. Its products there take no adapters.
    fn latent_projections(&mut self, config: &Config, latent: &LatentConfig, [path, there]: [&str; 2]) {
        let &LatentConfig { names, heads, kv_rank, plain_width, value_width, .. } = latent;
        let mut linear = |module: &str, gguf: &str, shape: [usize; 2], adapted: bool| {
            let source = tensor(&format!("{path}.{module}.weight"));
            self.add(&format!("{there}.{gguf}.weight"), shape.to_vec(), source);
            self.set_adapted(adapted);
        };
        match latent.query_rank {
            Some(rank) => {
                linear(names.q_a, "attn_q_a", [rank, config.hidden], false);
                linear(names.q_b, "attn_q_b", [latent.query_rows(), rank], false);
            }
            None => linear(names.q, "attn_q", [latent.query_rows(), config.hidden], false),
        }
        linear(names.kv_a, "attn_kv_a_mqa", [latent.kv_a_rows(), config.hidden], false);
        linear(names.o, "attn_output", [config.hidden, latent.output_width()], true);
        let ranks =
            [(names.q_a_norm, "attn_q_a_norm", latent.query_rank), (names.kv_a_norm, "attn_kv_a_norm", Some(kv_rank))];
        for (module, gguf, rank) in ranks {
            if let Some(rank) = rank {
                let norm = self.norm(config, path, module);
                self.exact(&format!("{there}.{gguf}.weight"), vec![rank], norm);
            }
        }
        let head_rows = plain_width + value_width;
        let part = |rows: std::ops::Range<usize>, transposed: bool| GgufSource::HeadRows {
            name: format!("{path}.{}.weight", names.kv_b),
            head_rows,
            rows,
            columns: kv_rank,
            transposed,
        };
        let keys = part(0..plain_width, true);
        self.add(&format!("{there}.attn_k_b.weight"), vec![heads, kv_rank, plain_width], keys);
        self.set_adapted(false);
        let values = part(plain_width..head_rows, false);
        self.add(&format!("{there}.attn_v_b.weight"), vec![heads, value_width, kv_rank], values);
        self.set_adapted(false);
    }

    fn mlp(
        &mut self,
        [path, there]: [&str; 2],
        hidden: usize,
        mlp: &MlpKind,
        rules: GgufRules,
    ) -> Result<(), ModelError> {
        match mlp {
            MlpKind::Dense { bias, .. } if *bias && !rules.other_bias => return Err(check::biases(rules)),
            MlpKind::Dense { names, width, bias, .. } => {
                self.dense([path, there], names, [hidden, *width], *bias, "");
            }
            MlpKind::Experts(experts) => self.experts([path, there], hidden, experts),
        }
        Ok(())
    }

    /// A gated MLP; `suffix` tells shared experts from others.
    fn dense(
        &mut self,
        [path, there]: [&str; 2],
        names: &MlpNames,
        [hidden, width]: [usize; 2],
        bias: bool,
        suffix: &str,
    ) {
        let inputs = match names.gate_up {
            // Its halves are told apart by their place.
            Some(both) => vec![(both, "ffn_up", [2 * width, hidden])],
            None => vec![(names.gate, "ffn_gate", [width, hidden]), (names.up, "ffn_up", [width, hidden])],
        };
        for (module, gguf, shape) in inputs.into_iter().chain([(names.down, "ffn_down", [hidden, width])]) {
            let source = |part: &str| tensor(&format!("{path}.{module}.{part}"));
            self.add(&format!("{there}.{gguf}{suffix}.weight"), shape.to_vec(), source("weight"));
            if bias {
                self.exact(&format!("{there}.{gguf}{suffix}.bias"), vec![shape[0]], source("bias"));
            }
        }
    }

    fn experts(&mut self, [path, there]: [&str; 2], hidden: usize, experts: &ExpertsConfig) {
        let router = format!("{path}.{}", experts.router);
        let count = experts.experts;
        self.exact(&format!("{there}.ffn_gate_inp.weight"), vec![count, hidden], tensor(&format!("{router}.weight")));
        if experts.router_bias {
            self.exact(&format!("{there}.ffn_gate_inp.bias"), vec![count], tensor(&format!("{router}.bias")));
        }
        if let Some(bias) = experts.correction_bias {
            self.exact(&format!("{there}.exp_probs_b.bias"), vec![count], tensor(&format!("{router}.{bias}")));
        }
        let shape = ExpertsShape::of(experts, hidden);
        let alternating = experts.gate_up_rows == GateUpRows::Alternating;
        for projection in Projection::ALL {
            let [outputs, inputs] = projection.shape(shape);
            let source = GgufSource::Experts { path: path.to_string(), shape, projection, alternating };
            let name = format!("{there}.{}", expert_name(projection));
            self.add(&format!("{name}.weight"), vec![count, outputs, inputs], source);
            if experts.biases {
                self.exact(&format!("{name}.bias"), vec![count, outputs], bias_of(path, projection));
            }
        }
        if let Some(shared) = experts.shared {
            let module = format!("{path}.{}", shared.module);
            self.dense([&module, there], shared.names, [hidden, shared.width], false, "_shexp");
        }
    }
}

fn expert_name(projection: Projection) -> &'static str {
    match projection {
        Projection::Gate => "ffn_gate_exps",
        Projection::Up => "ffn_up_exps",
        Projection::Down => "ffn_down_exps",
    }
}

/// The biases of all experts; those of gate and up take turns.
fn bias_of(path: &str, projection: Projection) -> GgufSource {
    let gate_up = |at: usize| GgufSource::Every { name: format!("{path}.experts.gate_up_proj_bias"), step: 2, at };
    match projection {
        Projection::Gate => gate_up(0),
        Projection::Up => gate_up(1),
        Projection::Down => tensor(&format!("{path}.experts.down_proj_bias")),
    }
}
