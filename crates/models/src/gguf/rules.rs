//! What a family is to llama.cpp: the rules of that program that differ from one architecture to
//! the next. A family's file states them, the rest of this folder applies them.

/// What a family is to llama.cpp.
#[expect(clippy::struct_excessive_bools, reason = "each is a rule of another program")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgufRules {
    /// `general.architecture`
    pub architecture: &'static str,
    /// Whether its rotation is of neighbours: rows of queries and keys that we rotate in pairs
    /// `(i, i + width/2)` then go side by side.
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
    pub head: HeadRule,
    pub windows: Windows,
    pub routing: Routing,
    /// Its name of the norm before the MLP.
    pub mlp_norm: &'static str,
    /// Gemma: the embedding is scaled by `√hidden`, and scores by `1/√head_width`, except in the
    /// model with this many layers, where they are by `1/√(hidden/heads)`.
    pub gemma: Option<usize>,
    /// Whether scores and logits are capped, always.
    pub capped: bool,
    /// Whether it reads the two tables of a longrope rotation.
    pub long_rotation: bool,
    /// Whether all heads together must be as wide as the hidden states.
    pub heads_fill_hidden: bool,
}

/// Whether there is a head beside the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadRule {
    Free,
    Needed,
    Tied,
}

/// What it makes of sliding windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    /// Nothing: a file states the smallest window as the longest text, since both compute the same
    /// up to there.
    Ignored,
    /// The last of every `period` layers sees all keys, the others have the window.
    Periodic { period: usize, needed: bool, rotation: WindowRotation },
}

/// How it rotates layers with a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowRotation {
    /// As the others.
    Same,
    /// Unscaled, with a base of their own.
    OwnBase,
    /// Unscaled, with the base of the others.
    SameBase,
}

/// What it knows of routers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// Softmax, the chosen weights renormalised.
    Softmax,
    /// Scores, groups, correction bias, scale and shared experts by keys; dense layers first.
    Grouped,
    /// Softmax of the chosen ones, biases everywhere, clamped SwiGLU with fixed constants.
    Clamped,
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
            head: HeadRule::Free,
            windows: Windows::Ignored,
            routing: Routing::Softmax,
            mlp_norm: "ffn_norm",
            gemma: None,
            capped: false,
            long_rotation: false,
            heads_fill_hidden: false,
        }
    }
}
