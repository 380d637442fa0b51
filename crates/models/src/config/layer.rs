//! The layers of a model: one description per layer, which the model's code matches on, with the
//! names of its weights in files.
//!
//! A layer is attention, then an MLP. Sizes are those of the tensors; limits are those of the ops,
//! so every accepted config can be built.

use isobit_numerics::elementary::ClampedSwiglu;

/// How norms use their weight. A property of the family; the norm after a delta rule is always
/// plain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormStyle {
    /// `weight · normal`
    Plain,
    /// `(1 + weight) · normal`
    ZeroCentred,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    pub names: &'static LayerNames,
    pub attention: AttentionKind,
    pub mlp: MlpKind,
    /// Factor on the attention's output before it is added to the residual stream.
    pub attention_factor: Option<f32>,
    /// The same for the MLP's output. Experts have none: their router has a factor.
    pub mlp_factor: Option<f32>,
}

/// Modules directly below `model.layers.N`, except the attention's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerNames {
    /// On what attention reads.
    pub attention_norm: Option<&'static str>,
    /// On what attention returns.
    pub attention_output_norm: Option<&'static str>,
    /// On what the MLP reads.
    pub mlp_norm: Option<&'static str>,
    /// On what a dense MLP returns.
    pub mlp_output_norm: Option<&'static str>,
    pub mlp: &'static str,
}

impl LayerNames {
    /// A norm before attention and one before the MLP, as in most families.
    pub(crate) const COMMON: Self = Self {
        attention_norm: Some("input_layernorm"),
        attention_output_norm: None,
        mlp_norm: Some("post_attention_layernorm"),
        mlp_output_norm: None,
        mlp: "mlp",
    };

    /// The norms that there are.
    pub fn norms(&self) -> impl Iterator<Item = &'static str> {
        let norms = [self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm];
        norms.into_iter().flatten()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum AttentionKind {
    /// Softmax attention with grouped heads.
    Softmax(AttentionConfig),
    /// Softmax attention over a compressed stream.
    Latent(LatentConfig),
    /// Gated delta rule with a causal convolution.
    Delta(DeltaConfig),
}

#[derive(Clone, Debug, PartialEq)]
pub enum MlpKind {
    /// `down(activation(gate) · up)`
    Dense {
        names: &'static MlpNames,
        width: usize,
        bias: bool,
        activation: Activation,
    },
    Experts(ExpertsConfig),
}

/// The function of a gated MLP. A property of the family; experts have `silu`, or clamped SwiGLU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// GELU in the form with `tanh`.
    GeluTanh,
}

impl Activation {
    /// The key under which the files of its families name it, and the name.
    pub(crate) fn key_and_name(self) -> [&'static str; 2] {
        match self {
            Self::Silu => ["hidden_act", "silu"],
            Self::GeluTanh => ["hidden_activation", "gelu_pytorch_tanh"],
        }
    }
}

/// Linear modules of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlpNames {
    pub gate: &'static str,
    pub up: &'static str,
    /// In place of both: one module, gate rows before up rows.
    pub gate_up: Option<&'static str>,
    pub down: &'static str,
}

impl MlpNames {
    /// The modules that read the MLP's input.
    pub fn inputs(&self) -> Vec<&'static str> {
        self.gate_up.map_or(vec![self.gate, self.up], |both| vec![both])
    }
}

/// Which of the model's rotations a layer applies to queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotary {
    /// `Config::rope_theta` and `rope_scaling`.
    Global,
    /// `Config::local_rotation`.
    Local,
    None,
}

#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "the file has that many switches")]
pub struct AttentionConfig {
    pub names: &'static AttentionNames,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_width: usize,
    /// Rotated channels, the first of a head; the others pass through.
    pub rotary_width: usize,
    /// Number of keys that a query sees; all if none.
    pub window: Option<usize>,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub rotary: Rotary,
    /// Rotated pairs are neighbours instead of half the rotated channels apart.
    pub interleaved: bool,
    /// Queries and keys are normalised per head, with the family's norm.
    pub head_norms: bool,
    /// With `head_norms`: over all heads at once instead.
    pub norms_span_heads: bool,
    /// `q_proj` is twice as tall: per head the query, then a gate whose sigmoid multiplies the
    /// head's output.
    pub gated: bool,
    /// Scores stay between plus and minus this.
    pub cap: Option<f32>,
    /// A learned logit per head joins the denominator of the softmax.
    pub sinks: bool,
    /// `1/√head_width` unless the file has another one, rounded once.
    pub scale: f32,
}

/// The module below a layer, and its submodules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionNames {
    pub module: &'static str,
    pub q: &'static str,
    pub k: &'static str,
    pub v: &'static str,
    /// In place of the three: one module, rows of queries, keys, values.
    pub qkv: Option<&'static str>,
    pub o: &'static str,
    pub q_norm: &'static str,
    pub k_norm: &'static str,
    /// A tensor, not a module.
    pub sinks: &'static str,
}

impl AttentionConfig {
    /// Rows of `q_proj`.
    pub fn query_rows(&self) -> usize {
        self.heads * self.head_width * if self.gated { 2 } else { 1 }
    }

    /// Rows of `k_proj` and of `v_proj`.
    pub fn kv_rows(&self) -> usize {
        self.kv_heads * self.head_width
    }

    /// Columns of `o_proj`.
    pub fn output_width(&self) -> usize {
        self.heads * self.head_width
    }

    /// Widths of the norms of queries and of keys.
    pub fn norm_widths(&self) -> [usize; 2] {
        let heads = if self.norms_span_heads { [self.heads, self.kv_heads] } else { [1, 1] };
        heads.map(|heads| heads * self.head_width)
    }
}

impl AttentionNames {
    /// The modules that read the attention's input.
    pub fn inputs(&self) -> Vec<&'static str> {
        self.qkv.map_or(vec![self.q, self.k, self.v], |all| vec![all])
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct LatentConfig {
    pub names: &'static LatentNames,
    pub heads: usize,
    /// Width between `q_a_proj` and `q_b_proj`; none if there is a single `q_proj`.
    pub query_rank: Option<usize>,
    /// Width between `kv_a_proj_with_mqa` and `kv_b_proj`.
    pub kv_rank: usize,
    /// Unrotated channels of a key: the first of a head.
    pub plain_width: usize,
    /// Rotated channels: the last of a head; one key head shared by all.
    pub rotary_width: usize,
    pub value_width: usize,
    /// Whether pairs are (2i, 2i+1) instead of (i, i + width/2).
    pub interleaved: bool,
    /// Bias of `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj`; the other projections have none.
    pub bias: bool,
    /// For `q_a_layernorm` and `kv_a_layernorm`, regardless of the config's eps for the others.
    pub norm_eps: f32,
    /// `growth² / √key_width`, rounded once: scaled rotations increase the scores.
    pub scale: f32,
}

/// The module below a layer, and its submodules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentNames {
    pub module: &'static str,
    /// With a single query projection.
    pub q: &'static str,
    /// With two query projections.
    pub q_a: &'static str,
    pub q_a_norm: &'static str,
    pub q_b: &'static str,
    pub kv_a: &'static str,
    pub kv_a_norm: &'static str,
    pub kv_b: &'static str,
    pub o: &'static str,
}

impl LatentConfig {
    /// Width of a head's key and query.
    pub fn key_width(&self) -> usize {
        self.plain_width + self.rotary_width
    }

    /// Rows of `q_proj` or `q_b_proj`.
    pub fn query_rows(&self) -> usize {
        self.heads * self.key_width()
    }

    /// Rows of `kv_a_proj_with_mqa`.
    pub fn kv_a_rows(&self) -> usize {
        self.kv_rank + self.rotary_width
    }

    /// Rows of `kv_b_proj`: per head the plain part of the key, then the value.
    pub fn kv_b_rows(&self) -> usize {
        self.heads * (self.plain_width + self.value_width)
    }

    /// Columns of `o_proj`.
    pub fn output_width(&self) -> usize {
        self.heads * self.value_width
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct DeltaConfig {
    pub names: &'static DeltaNames,
    pub key_heads: usize,
    /// A multiple of `key_heads`; value head `h` uses key head `h / (value_heads / key_heads)`.
    pub value_heads: usize,
    pub key_width: usize,
    pub value_width: usize,
    /// Taps of the convolution.
    pub kernel: usize,
    pub projections: DeltaProjections,
}

/// The module below a layer, and its contents besides the input projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaNames {
    pub module: &'static str,
    pub convolution: &'static str,
    pub norm: &'static str,
    /// A tensor, not a module.
    pub a_log: &'static str,
    /// A tensor, not a module.
    pub dt_bias: &'static str,
    pub output: &'static str,
}

/// The input projections of a delta rule, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaProjections {
    /// Rows of `qkv` are `[q | k | v]`.
    Separate { qkv: &'static str, z: &'static str, b: &'static str, a: &'static str },
    /// Rows grouped by key head: `q`, `k`, then `v` and `z` of its value heads; likewise `b`, then
    /// `a`.
    Joined { qkvz: &'static str, ba: &'static str },
}

impl DeltaConfig {
    /// Channels of all keys.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_width
    }

    /// Channels of all values; also the columns of `out_proj`.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_width
    }

    /// Channels of the convolution: queries, keys, values.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// The router's module, next to the experts.
    pub router: &'static str,
    pub experts: usize,
    /// Experts per token.
    pub chosen: usize,
    /// Width inside an expert.
    pub width: usize,
    pub scoring: Scoring,
    /// Divide the chosen scores by their sum.
    pub renormalise: bool,
    /// Factor on the chosen scores.
    pub scale: f32,
    /// The router's tensor that is added to scores for choosing, if any.
    pub correction_bias: Option<&'static str>,
    /// Groups of consecutive experts; each token keeps some groups before it chooses. 1 means no
    /// grouping.
    pub groups: usize,
    pub kept_groups: usize,
    pub shared: Option<SharedExpertConfig>,
    /// Whether the router's logits have a bias.
    pub router_bias: bool,
    /// Whether the matrices of experts have biases.
    pub biases: bool,
    pub gate_up_rows: GateUpRows,
    /// Clamped SwiGLU in place of SwiGLU.
    pub clamp: Option<ClampedSwiglu>,
}

/// The rows of the fused gate and up matrix of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateUpRows {
    /// All gate rows before all up rows.
    Separate,
    /// A gate row, an up row, and so on; only such experts are stored as MXFP4.
    Alternating,
}

/// How router logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    Softmax,
    Sigmoid,
}

/// The MLP that every token goes through in addition to its chosen experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpertConfig {
    /// Its module, next to the experts.
    pub module: &'static str,
    pub names: &'static MlpNames,
    pub width: usize,
    /// The module, next to the experts, whose sigmoid multiplies the output.
    pub gate: Option<&'static str>,
}
