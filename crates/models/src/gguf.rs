//! A model as llama.cpp knows it: the keys of a GGUF file that describe it, and its tensors under
//! that program's names. A family's file says whether llama.cpp has it; names follow from what a
//! tensor does, so nothing here knows a family.
//!
//! What llama.cpp would compute differently is refused: sliding windows, routers that do not
//! renormalise, layers of mixed kinds, rotations left out elsewhere than it leaves them out.

use crate::ModelError;
use crate::config::{AttentionConfig, AttentionKind, Config, ExpertsConfig, MlpKind, Rotary, Scoring};
use crate::experts::{ExpertsShape, Projection};
use isobit_numerics::rope::{RopeScaling, Yarn, inverse_frequencies};

/// What a family is to llama.cpp.
#[expect(clippy::struct_excessive_bools, reason = "each is a rule of another program")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgufRules {
    /// `general.architecture`
    pub architecture: &'static str,
    /// Whether rows of queries and keys go in pairs `(i, i + width/2)` side by side: its rotation
    /// is of neighbours.
    pub interleaved: bool,
    /// Whether queries, keys and values may have biases.
    pub qkv_bias: bool,
    /// Whether other linear layers may.
    pub other_bias: bool,
    /// It does not rotate the last of every so many layers.
    pub unrotated: Option<usize>,
    /// Whether it reads factors on embedding, scores, branches and logits.
    pub multipliers: bool,
    /// Whether the width of an expert is under the key of a dense MLP's.
    pub common_width: bool,
    /// Whether the head must be there beside the table.
    pub needs_head: bool,
}

impl GgufRules {
    /// No biases, nothing special.
    pub(crate) const fn plain(architecture: &'static str) -> Self {
        Self {
            architecture,
            interleaved: false,
            qkv_bias: false,
            other_bias: false,
            unrotated: None,
            multipliers: false,
            common_width: false,
            needs_head: false,
        }
    }
}

/// A value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
}

/// Where the numbers of a tensor come from.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufSource {
    /// Our name of it.
    Tensor(String),
    /// The same, rows of each of these heads interleaved.
    Interleaved(String, usize),
    /// One matrix of every expert of the MLP at a path.
    Experts { path: String, shape: ExpertsShape, projection: Projection },
    /// Not in the model's files.
    Made(Vec<f32>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct GgufTensor {
    pub name: String,
    /// Outermost first, as in PyTorch.
    pub shape: Vec<usize>,
    pub source: GgufSource,
    /// Whether it stays float32 in every file: norms, biases, routers.
    pub exact: bool,
}

/// A model's description and tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufModel {
    pub architecture: &'static str,
    pub keys: Vec<(String, GgufValue)>,
    pub tensors: Vec<GgufTensor>,
}

impl GgufModel {
    /// The model of a config; `tied` says whether its head is its table.
    pub fn of(config: &Config, tied: bool) -> Result<Self, ModelError> {
        let rules = config
            .family
            .gguf
            .ok_or_else(|| refused(format!("{} models are not written as GGUF yet", config.family.name)))?;
        let mut model = Self { architecture: rules.architecture, keys: Vec::new(), tensors: Vec::new() };
        let attention = attention_of(config, rules)?;
        check_attention(rules, &attention)?;
        if tied && rules.needs_head {
            return Err(refused("llama.cpp reads no head that is the table in models of this family".to_string()));
        }
        model.describe(config, rules, &attention)?;
        model.add("token_embd.weight", vec![config.vocabulary, config.hidden], tensor("model.embed_tokens.weight"));
        if let Some(factors) = rotation_factors(config) {
            model.exact("rope_freqs.weight", vec![factors.len()], GgufSource::Made(factors));
        }
        for layer in 0..config.layers.len() {
            model.layer(config, rules, &attention, layer)?;
        }
        model.exact("output_norm.weight", vec![config.hidden], tensor("model.norm.weight"));
        if !tied {
            model.add("output.weight", vec![config.vocabulary, config.hidden], tensor("lm_head.weight"));
        }
        Ok(model)
    }

    fn add(&mut self, name: &str, shape: Vec<usize>, source: GgufSource) {
        self.tensors.push(GgufTensor { name: name.to_string(), shape, source, exact: false });
    }

    fn exact(&mut self, name: &str, shape: Vec<usize>, source: GgufSource) {
        self.tensors.push(GgufTensor { name: name.to_string(), shape, source, exact: true });
    }

    fn key(&mut self, name: &str, value: GgufValue) {
        self.keys.push((format!("{}.{name}", self.architecture), value));
    }

    fn size(&mut self, name: &str, value: usize) {
        // BOUND: sizes of a config are below 2³².
        self.key(name, GgufValue::U32(value as u32));
    }

    fn describe(&mut self, config: &Config, rules: GgufRules, attention: &AttentionConfig) -> Result<(), ModelError> {
        self.size("block_count", config.layers.len());
        self.size("context_length", config.max_positions);
        self.size("embedding_length", config.hidden);
        self.size("vocab_size", config.vocabulary);
        self.size("attention.head_count", attention.heads);
        self.size("attention.head_count_kv", attention.kv_heads);
        self.size("attention.key_length", attention.head_width);
        self.size("attention.value_length", attention.head_width);
        self.size("rope.dimension_count", attention.rotary_width);
        self.key("rope.freq_base", GgufValue::F32(config.rope_theta as f32));
        self.key("attention.layer_norm_rms_epsilon", GgufValue::F32(config.eps));
        match mlp_of(config)? {
            MlpKind::Dense { width, .. } => self.size("feed_forward_length", *width),
            MlpKind::Experts(experts) => {
                check_experts(experts, branch_factor(config))?;
                self.size("expert_count", experts.experts);
                self.size("expert_used_count", experts.chosen);
                let key = if rules.common_width { "feed_forward_length" } else { "expert_feed_forward_length" };
                self.size(key, experts.width);
            }
        }
        if rules.multipliers {
            self.multipliers(config, attention);
        }
        self.rotation(&config.rope_scaling)
    }

    /// Factors; llama.cpp divides logits by the last one.
    fn multipliers(&mut self, config: &Config, attention: &AttentionConfig) {
        self.key("attention.scale", GgufValue::F32(attention.scale));
        self.key("embedding_scale", GgufValue::F32(config.embedding_scale.unwrap_or(1.0)));
        self.key("residual_scale", GgufValue::F32(branch_factor(config)));
        #[expect(clippy::float_arithmetic, reason = "a key of another format")]
        let divisor = (1.0 / f64::from(config.head_scale.unwrap_or(1.0))) as f32;
        self.key("logit_scale", GgufValue::F32(divisor));
    }

    fn rotation(&mut self, scaling: &RopeScaling) -> Result<(), ModelError> {
        let (kind, factor) = match *scaling {
            // The factors of Llama 3 are a tensor.
            RopeScaling::Default | RopeScaling::Llama3 { .. } => return Ok(()),
            RopeScaling::Linear { factor } => ("linear", factor),
            RopeScaling::LongRope(_) => {
                return Err(refused("its longrope rotation cannot be written as GGUF yet".to_string()));
            }
            RopeScaling::Yarn(yarn) => {
                let Yarn { factor, original_max_position, .. } = yarn;
                if yarn != (Yarn { factor, original_max_position, ..Yarn::default() }) {
                    return Err(refused("its yarn rotation has settings that llama.cpp does not read".to_string()));
                }
                self.size("rope.scaling.original_context_length", original_max_position as usize);
                ("yarn", factor)
            }
            RopeScaling::Dynamic { .. } => {
                return Err(refused("llama.cpp has no rotation that grows with the text".to_string()));
            }
        };
        self.key("rope.scaling.type", GgufValue::Text(kind.to_string()));
        self.key("rope.scaling.factor", GgufValue::F32(factor as f32));
        Ok(())
    }

    fn layer(
        &mut self,
        config: &Config,
        rules: GgufRules,
        attention: &AttentionConfig,
        layer: usize,
    ) -> Result<(), ModelError> {
        let of = &config.layers[layer];
        let (here, there, hidden) = (format!("model.layers.{layer}"), format!("blk.{layer}"), config.hidden);
        if let Some(name) = of.names.attention_norm {
            self.exact(&format!("{there}.attn_norm.weight"), vec![hidden], norm(&here, name));
        }
        let names = attention.names;
        let path = format!("{here}.{}", names.module);
        let (heads, kv_heads) = (attention.heads, attention.kv_heads);
        let (rows, kv_rows) = (attention.query_rows(), attention.kv_rows());
        let paired = |heads: usize| if rules.interleaved { Some(heads) } else { None };
        for (module, gguf, outputs, inputs, interleaved, bias) in [
            (names.q, "attn_q", rows, hidden, paired(heads), attention.qkv_bias),
            (names.k, "attn_k", kv_rows, hidden, paired(kv_heads), attention.qkv_bias),
            (names.v, "attn_v", kv_rows, hidden, None, attention.qkv_bias),
            (names.o, "attn_output", hidden, attention.output_width(), None, attention.output_bias),
        ] {
            let source = |part: &str| match interleaved {
                Some(heads) => GgufSource::Interleaved(format!("{path}.{module}.{part}"), heads),
                None => tensor(&format!("{path}.{module}.{part}")),
            };
            self.add(&format!("{there}.{gguf}.weight"), vec![outputs, inputs], source("weight"));
            if bias {
                self.exact(&format!("{there}.{gguf}.bias"), vec![outputs], source("bias"));
            }
        }
        if attention.head_norms {
            let spans = |heads: usize| if attention.norms_span_heads { heads } else { 1 };
            for (module, gguf, heads) in [(names.q_norm, "attn_q_norm", heads), (names.k_norm, "attn_k_norm", kv_heads)]
            {
                let width = spans(heads) * attention.head_width;
                self.exact(&format!("{there}.{gguf}.weight"), vec![width], norm(&path, module));
            }
        }
        for (name, gguf) in [
            (of.names.attention_output_norm, "post_attention_norm"),
            (of.names.mlp_norm, "ffn_norm"),
            (of.names.mlp_output_norm, "post_ffw_norm"),
        ] {
            if let Some(name) = name {
                self.exact(&format!("{there}.{gguf}.weight"), vec![hidden], norm(&here, name));
            }
        }
        self.mlp(&format!("{here}.{}", of.names.mlp), &there, hidden, &of.mlp, rules)
    }

    fn mlp(
        &mut self,
        path: &str,
        there: &str,
        hidden: usize,
        mlp: &MlpKind,
        rules: GgufRules,
    ) -> Result<(), ModelError> {
        match mlp {
            MlpKind::Dense { names, width, bias, .. } => {
                if *bias && !rules.other_bias {
                    return Err(biases(rules));
                }
                let modules = [names.gate, names.up, names.down].into_iter().zip(["ffn_gate", "ffn_up", "ffn_down"]);
                for (module, gguf) in modules {
                    let [outputs, inputs] = if module == names.down { [hidden, *width] } else { [*width, hidden] };
                    let source = |part: &str| tensor(&format!("{path}.{module}.{part}"));
                    self.add(&format!("{there}.{gguf}.weight"), vec![outputs, inputs], source("weight"));
                    if *bias {
                        self.exact(&format!("{there}.{gguf}.bias"), vec![outputs], source("bias"));
                    }
                }
            }
            MlpKind::Experts(experts) => {
                let router = tensor(&format!("{path}.{}.weight", experts.router));
                self.exact(&format!("{there}.ffn_gate_inp.weight"), vec![experts.experts, hidden], router);
                let shape = ExpertsShape::of(experts, hidden);
                for projection in Projection::ALL {
                    let [outputs, inputs] = projection.shape(shape);
                    let source = GgufSource::Experts { path: path.to_string(), shape, projection };
                    let name = format!("{there}.{}.weight", expert_name(projection));
                    self.add(&name, vec![shape.experts, outputs, inputs], source);
                }
            }
        }
        Ok(())
    }
}

fn expert_name(projection: Projection) -> &'static str {
    match projection {
        Projection::Gate => "ffn_gate_exps",
        Projection::Up => "ffn_up_exps",
        Projection::Down => "ffn_down_exps",
    }
}

fn refused(what: String) -> ModelError {
    ModelError::Gguf(what)
}

fn biases(rules: GgufRules) -> ModelError {
    refused(format!("llama.cpp reads no biases of these layers in a model of architecture {}", rules.architecture))
}

fn tensor(name: &str) -> GgufSource {
    GgufSource::Tensor(name.to_string())
}

fn norm(path: &str, module: &str) -> GgufSource {
    tensor(&format!("{path}.{module}.weight"))
}

/// The attention that all layers have, apart from the rotation that some leave out.
fn attention_of(config: &Config, rules: GgufRules) -> Result<AttentionConfig, ModelError> {
    let mut found: Option<AttentionConfig> = None;
    for (at, layer) in config.layers.iter().enumerate() {
        let AttentionKind::Softmax(attention) = &layer.attention else {
            return Err(refused("its attention is not one that can be written as GGUF yet".to_string()));
        };
        let rotated = AttentionConfig { rotary: Rotary::Global, ..attention.clone() };
        let first = found.get_or_insert(rotated.clone());
        if attention.window.is_some() || *first != rotated {
            return Err(refused("llama.cpp has no sliding windows in models of this family".to_string()));
        }
        let is_left_out = rules.unrotated.is_some_and(|every| (at + 1).is_multiple_of(every));
        let expected = if is_left_out { Rotary::None } else { Rotary::Global };
        if attention.rotary != expected {
            return Err(refused("llama.cpp rotates other layers of such a model".to_string()));
        }
    }
    found.ok_or_else(|| refused("it has no layers".to_string()))
}

/// The factor on what attention and MLP add to the residual stream.
fn branch_factor(config: &Config) -> f32 {
    config.layers.first().and_then(|layer| layer.attention_factor).unwrap_or(1.0)
}

fn check_attention(rules: GgufRules, attention: &AttentionConfig) -> Result<(), ModelError> {
    if attention.gated || attention.cap.is_some() {
        return Err(refused("its gated or capped attention cannot be written as GGUF yet".to_string()));
    }
    if attention.qkv_bias && !rules.qkv_bias || attention.output_bias && !rules.other_bias {
        return Err(biases(rules));
    }
    Ok(())
}

/// The MLP that all layers have.
fn mlp_of(config: &Config) -> Result<&MlpKind, ModelError> {
    let mut all = config.layers.iter().map(|layer| &layer.mlp);
    match all.next() {
        Some(first) if all.all(|other| other == first) => Ok(first),
        _ => Err(refused("llama.cpp needs the same kind of MLP in every layer of this family".to_string())),
    }
}

fn check_experts(experts: &ExpertsConfig, scale: f32) -> Result<(), ModelError> {
    if !experts.renormalise || experts.scoring != Scoring::Softmax || experts.scale != scale {
        let what =
            "llama.cpp always renormalises the chosen experts' weights (`norm_topk_prob` true), this model does not";
        return Err(refused(what.to_string()));
    }
    let has_biases = experts.correction_bias.is_some() || experts.router_bias || experts.biases;
    if experts.shared.is_some() || has_biases || experts.groups > 1 || experts.clamp.is_some() {
        return Err(refused("its router cannot be written as GGUF yet".to_string()));
    }
    Ok(())
}

/// By how much Llama 3's rule divides each frequency.
fn rotation_factors(config: &Config) -> Option<Vec<f32>> {
    if !matches!(config.rope_scaling, RopeScaling::Llama3 { .. }) {
        return None;
    }
    let of = |scaling: &RopeScaling| inverse_frequencies(config.rotary_width, config.rope_theta, scaling, 1);
    let pairs = of(&RopeScaling::Default).into_iter().zip(of(&config.rope_scaling));
    #[expect(clippy::float_arithmetic, reason = "a table of another format")]
    let factors = pairs.map(|(plain, scaled)| (f64::from(plain) / f64::from(scaled)) as f32).collect();
    Some(factors)
}

/// The order in which llama.cpp has the rows of a head: `(i, i + width/2)` become neighbours. Row
/// `at` of the result is this row of ours.
pub fn interleaved_row(at: usize, width: usize) -> usize {
    at % 2 * (width / 2) + at / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(more: &str) -> Config {
        let text = format!(
            r#"{{"vocab_size":8,"hidden_size":8,"intermediate_size":12,"num_hidden_layers":2,"num_attention_heads":2,
            "num_key_value_heads":1{more}}}"#
        );
        Config::parse(&text).expect("a config")
    }

    #[test]
    fn every_tensor_of_a_small_model() {
        let model = GgufModel::of(&config(r#","model_type":"qwen2""#), true).expect("known");
        let names: Vec<&str> = model.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names.len(), 2 + 2 * 12);
        assert_eq!(
            names[..5],
            [
                "token_embd.weight",
                "blk.0.attn_norm.weight",
                "blk.0.attn_q.weight",
                "blk.0.attn_q.bias",
                "blk.0.attn_k.weight"
            ]
        );
        assert_eq!(names.last(), Some(&"output_norm.weight"));
        let untied = GgufModel::of(&config(r#","model_type":"llama""#), false).expect("known");
        assert_eq!(untied.tensors.last().map(|tensor| tensor.name.as_str()), Some("output.weight"));
        let q = GgufSource::Interleaved("model.layers.0.self_attn.q_proj.weight".to_string(), 2);
        assert!(untied.tensors.iter().any(|tensor| tensor.source == q));
        assert_eq!([0, 1, 2, 3].map(|row| interleaved_row(row, 4)), [0, 2, 1, 3]);
    }

    #[test]
    fn factors_norms_and_experts_of_other_families() {
        let multipliers =
            r#""attention_multiplier":0.25,"embedding_multiplier":12,"residual_multiplier":0.5,"logits_scaling":6"#;
        let experts = r#""num_local_experts":4,"num_experts_per_tok":2"#;
        let granite = GgufModel::of(&config(&format!(",\"model_type\":\"granitemoe\",{multipliers},{experts}")), true);
        let granite = granite.expect("known");
        let key = |name: &str| granite.keys.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        for (name, value) in
            [("attention.scale", 0.25), ("embedding_scale", 12.0), ("residual_scale", 0.5), ("logit_scale", 6.0)]
        {
            assert_eq!(key(&format!("granitemoe.{name}")), Some(GgufValue::F32(value)), "{name}");
        }
        assert_eq!(key("granitemoe.feed_forward_length"), Some(GgufValue::U32(12)));
        assert_eq!(key("granitemoe.expert_count"), Some(GgufValue::U32(4)));
        let mixtral = GgufModel::of(&config(&format!(",\"model_type\":\"mixtral\",{experts}")), false).expect("known");
        assert_eq!((mixtral.architecture, mixtral.tensors.len()), ("llama", 3 + 2 * 10));
        let olmo = GgufModel::of(&config(r#","model_type":"olmo2""#), false).expect("known");
        let shape =
            |name: &str| olmo.tensors.iter().find(|tensor| tensor.name == name).map(|tensor| tensor.shape.clone());
        assert_eq!(shape("blk.1.attn_q_norm.weight"), Some(vec![8]));
        assert_eq!(shape("blk.1.attn_k_norm.weight"), Some(vec![4]));
        assert_eq!([shape("blk.1.attn_norm.weight"), shape("blk.1.ffn_norm.weight")], [None, None]);
        assert!(shape("blk.1.post_attention_norm.weight").is_some() && shape("blk.1.post_ffw_norm.weight").is_some());
        let smollm = GgufModel::of(&config(r#","model_type":"smollm3""#), true).expect("known");
        assert_eq!(smollm.tensors.len(), 2 + 2 * 9);
    }

    #[test]
    fn what_llama_cpp_would_compute_differently_is_refused() {
        let experts = r#","model_type":"qwen3_moe","num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":4,"head_dim":4"#;
        for (more, wanted) in [
            (r#","model_type":"qwen2","use_sliding_window":true,"sliding_window":5,"max_window_layers":0"#, "windows"),
            (r#","model_type":"qwen3","attention_bias":true"#, "biases"),
            (r#","model_type":"deepseek_v3""#, "DeepSeek-V3"),
            (r#","model_type":"smollm3","no_rope_layers":[1,0]"#, "rotates other layers"),
            (r#","model_type":"olmo2""#, "no head that is the table"),
            (experts, "norm_topk_prob"),
            (&format!("{experts},\"norm_topk_prob\":true,\"mlp_only_layers\":[0]"), "same kind of MLP"),
        ] {
            let text = format!(
                r#"{{"vocab_size":8,"hidden_size":8,"intermediate_size":12,"num_hidden_layers":2,"num_attention_heads":2,
                "num_key_value_heads":2{more}}}"#
            );
            let error = GgufModel::of(&Config::parse(&text).expect("a config"), true).expect_err(&text).to_string();
            assert!(error.contains(wanted), "{error}");
        }
        assert!(GgufModel::of(&config(&format!("{experts},\"norm_topk_prob\":true")), true).is_ok());
    }
}
