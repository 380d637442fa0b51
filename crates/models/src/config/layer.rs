//! What the layers of a model are: one description per layer that the model's code can match on.
//!
//! A layer mixes tokens (`Mixer`) and then feeds each through a network (`Feed`). Sizes are those of the tensors; limits are those of
//! the ops, so that whatever a config gives can be built.

/// How norms use their weight. A property of the family; the norm inside a delta mixer is always plain.
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
    pub mixer: Mixer,
    pub feed: Feed,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Softmax attention with grouped heads: `self_attn`.
    Attention(AttentionConfig),
    /// Attention over a compressed stream (DeepSeek): `self_attn`.
    Latent(LatentConfig),
    /// Gated delta rule with a causal convolution: `linear_attn`.
    Delta(DeltaConfig),
}

#[derive(Clone, Debug, PartialEq)]
pub enum Feed {
    /// `down(silu(gate) · up)`
    Dense {
        width: usize,
        bias: bool,
    },
    Experts(ExpertsConfig),
}

#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "the file has that many switches")]
pub struct AttentionConfig {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_width: usize,
    /// First channels of a head that are turned; the others pass.
    pub rotary_width: usize,
    /// Keys that a query sees; all of them where there is none.
    pub window: Option<usize>,
    pub qkv_bias: bool,
    pub output_bias: bool,
    /// Queries and keys are normalised per head, in the style of the family.
    pub head_norms: bool,
    /// `q_proj` is twice as tall: per head the query, then a gate whose sigmoid multiplies the head's output.
    pub gated: bool,
    /// `1/√head_width`, rounded once.
    pub scale: f32,
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
    pub heads: usize,
    /// Width between `q_a_proj` and `q_b_proj`; none where there is one `q_proj`.
    pub query_rank: Option<usize>,
    /// Width between `kv_a_proj_with_mqa` and `kv_b_proj`.
    pub kv_rank: usize,
    /// Channels of a key that are not turned: the first of a head.
    pub plain_width: usize,
    /// Channels that are: the last of a head; one key head shared by all.
    pub rotary_width: usize,
    pub value_width: usize,
    /// Whether pairs are (2i, 2i+1) instead of (i, i + width/2).
    pub interleaved: bool,
    /// Of `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj`; the other projections have none.
    pub bias: bool,
    /// Of `q_a_layernorm` and `kv_a_layernorm`, whatever the config says of the others.
    pub norm_eps: f32,
    /// `growth² / √key_width`, rounded once: scaled rotations make scores larger.
    pub scale: f32,
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
    pub key_heads: usize,
    /// A multiple of `key_heads`; value head `h` uses key head `h / (value_heads / key_heads)`.
    pub value_heads: usize,
    pub key_width: usize,
    pub value_width: usize,
    /// Taps of the convolution.
    pub kernel: usize,
    pub projections: DeltaProjections,
}

/// Which input projections a delta mixer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaProjections {
    /// `in_proj_qkv` (rows `[q | k | v]`), `in_proj_z`, `in_proj_b`, `in_proj_a`.
    Separate,
    /// `in_proj_qkvz` and `in_proj_ba`, rows grouped by key head: `q, k, v of its value heads, z of them`; `b of them, a of them`.
    Joined,
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
    pub experts: usize,
    /// Experts of each token.
    pub chosen: usize,
    /// Width inside an expert.
    pub width: usize,
    pub scoring: Scoring,
    /// Divide the chosen scores by their sum.
    pub renormalise: bool,
    /// Factor of the chosen scores.
    pub scale: f32,
    /// Whether `gate.e_score_correction_bias` is added for choosing.
    pub correction_bias: bool,
    /// Groups of consecutive experts, of which each token keeps some before it chooses; 1 where there are none.
    pub groups: usize,
    pub kept_groups: usize,
    pub shared: Option<Shared>,
}

/// How logits of the router become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    Softmax,
    Sigmoid,
}

/// What every token goes through besides its chosen experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    pub width: usize,
    /// Multiplied by the sigmoid of `shared_expert_gate`.
    pub gated: bool,
}

impl Shared {
    /// Its module beside the experts.
    pub fn module(&self) -> &'static str {
        if self.gated { "shared_expert" } else { "shared_experts" }
    }
}
