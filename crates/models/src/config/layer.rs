//! The layers of a model: one description per layer, which the model's code matches on, with the
//! names of its weights in files.
//!
//! A layer is attention, then an MLP. Sizes are those of the tensors; limits are those of the ops,
//! so every accepted config can be built.

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
}

/// Modules directly below `model.layers.N`, except the attention's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerNames {
    pub attention_norm: &'static str,
    pub mlp_norm: &'static str,
    pub mlp: &'static str,
}

impl LayerNames {
    /// Common to every family so far.
    pub(crate) const COMMON: Self =
        Self { attention_norm: "input_layernorm", mlp_norm: "post_attention_layernorm", mlp: "mlp" };
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
    /// `down(silu(gate) · up)`
    Dense {
        names: &'static MlpNames,
        width: usize,
        bias: bool,
    },
    Experts(ExpertsConfig),
}

/// Linear modules of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlpNames {
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
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
    /// Queries and keys are normalised per head, with the family's norm.
    pub head_norms: bool,
    /// `q_proj` is twice as tall: per head the query, then a gate whose sigmoid multiplies the
    /// head's output.
    pub gated: bool,
    /// `1/√head_width`, rounded once.
    pub scale: f32,
}

/// The module below a layer, and its submodules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionNames {
    pub module: &'static str,
    pub q: &'static str,
    pub k: &'static str,
    pub v: &'static str,
    pub o: &'static str,
    pub q_norm: &'static str,
    pub k_norm: &'static str,
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
