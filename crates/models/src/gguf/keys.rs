//! The keys of a GGUF file that describe a model.

use super::check::{self, Attention, Window};
use super::{GgufModel, GgufRules, GgufValue, Routing, WindowRotation, Windows, refused};
use crate::ModelError;
use crate::config::{AttentionConfig, Config, ExpertsConfig, LatentConfig, MlpKind, Scoring};
use isobit_numerics::rope::{RopeScaling, Yarn};

/// Its numbers of scoring functions.
const SOFTMAX: u32 = 1;
const SIGMOID: u32 = 2;

/// A size that the file cannot hold: refused by `check_keys`.
const UNWRITABLE: u32 = u32::MAX;

impl GgufModel {
    /// Refuses numbers of a config that a key cannot hold.
    pub(super) fn check_keys(&self) -> Result<(), ModelError> {
        let is_unwritable = |value: &GgufValue| match value {
            GgufValue::U32(value) => *value == UNWRITABLE,
            GgufValue::F32(value) => !value.is_finite(),
            _ => false,
        };
        match self.keys.iter().find(|(_, value)| is_unwritable(value)) {
            None => Ok(()),
            Some((name, _)) => {
                Err(refused(format!("its config has a number that `{name}` of a GGUF file cannot hold")))
            }
        }
    }

    fn key(&mut self, name: &str, value: GgufValue) {
        self.keys.push((format!("{}.{name}", self.architecture), value));
    }

    fn size(&mut self, name: &str, value: usize) {
        self.key(name, GgufValue::U32(u32::try_from(value).unwrap_or(UNWRITABLE)));
    }

    fn number(&mut self, name: &str, value: f32) {
        self.key(name, GgufValue::F32(value));
    }

    pub(super) fn describe(
        &mut self,
        config: &Config,
        rules: GgufRules,
        attention: &Attention,
    ) -> Result<(), ModelError> {
        self.size("block_count", config.layers.len());
        let longest = self.longest_text(config, attention);
        self.size("context_length", longest);
        self.size("embedding_length", config.hidden);
        self.size("vocab_size", config.vocabulary);
        self.number("rope.freq_base", config.rope_theta as f32);
        self.number("attention.layer_norm_rms_epsilon", config.eps);
        match attention {
            Attention::Softmax { shared, window } => {
                self.softmax(shared);
                self.window(config, rules, *window);
                if rules.multipliers {
                    self.multipliers(config, shared);
                }
                self.rotation(rules, &config.rope_scaling)?;
            }
            Attention::Latent(latent) => {
                self.latent(latent);
                self.latent_rotation(&config.rope_scaling)?;
            }
        }
        for (name, cap) in
            [("attn_logit_softcapping", score_cap(attention)), ("final_logit_softcapping", config.logit_cap)]
        {
            if let Some(cap) = cap {
                self.number(name, cap);
            }
        }
        self.mlps(config, rules)
    }

    /// Up to the smallest window, attention without windows computes the same.
    fn longest_text(&mut self, config: &Config, attention: &Attention) -> usize {
        let Attention::Softmax { window: Some(Window::Longest(size)), .. } = attention else {
            return config.max_positions;
        };
        self.notes.push(format!(
            "llama.cpp has no sliding window in such a model: the file is for texts of up to {size} tokens, the window"
        ));
        *size
    }

    fn softmax(&mut self, attention: &AttentionConfig) {
        self.size("attention.head_count", attention.heads);
        self.size("attention.head_count_kv", attention.kv_heads);
        self.size("attention.key_length", attention.head_width);
        self.size("attention.value_length", attention.head_width);
        self.size("rope.dimension_count", attention.rotary_width);
    }

    /// All heads share one key and one value, which are read from the compressed stream.
    fn latent(&mut self, latent: &LatentConfig) {
        self.size("attention.head_count", latent.heads);
        self.size("attention.head_count_kv", 1);
        self.size("attention.q_lora_rank", latent.query_rank.unwrap_or(0));
        self.size("attention.kv_lora_rank", latent.kv_rank);
        self.size("attention.key_length", latent.kv_a_rows());
        self.size("attention.value_length", latent.kv_rank);
        self.size("attention.key_length_mla", latent.key_width());
        self.size("attention.value_length_mla", latent.value_width);
        self.size("rope.dimension_count", latent.rotary_width);
    }

    fn window(&mut self, config: &Config, rules: GgufRules, window: Option<Window>) {
        let Some(Window::Periodic { size, period }) = window else { return };
        self.size("attention.sliding_window", size);
        self.size("attention.sliding_window_pattern", period);
        let has_base = matches!(rules.windows, Windows::Periodic { rotation: WindowRotation::OwnBase, .. });
        if let Some(local) = config.local_rotation.as_ref().filter(|_| has_base) {
            self.number("rope.freq_base_swa", local.theta as f32);
        }
    }

    /// Factors; llama.cpp divides logits by the last one.
    fn multipliers(&mut self, config: &Config, attention: &AttentionConfig) {
        self.number("attention.scale", attention.scale);
        self.number("embedding_scale", config.embedding_scale.unwrap_or(1.0));
        self.number("residual_scale", branch_factor(config));
        #[expect(clippy::float_arithmetic, reason = "a key of another format")]
        let divisor = (1.0 / f64::from(config.head_scale.unwrap_or(1.0))) as f32;
        self.number("logit_scale", divisor);
    }

    fn mlps(&mut self, config: &Config, rules: GgufRules) -> Result<(), ModelError> {
        if rules.routing == Routing::Grouped {
            return self.grouped(config);
        }
        match check::same_mlp(config)? {
            MlpKind::Dense { width, .. } => self.size("feed_forward_length", *width),
            MlpKind::Experts(experts) => {
                check::router(rules.routing, experts, branch_factor(config))?;
                self.size("expert_count", experts.experts);
                self.size("expert_used_count", experts.chosen);
                let key = if rules.common_width { "feed_forward_length" } else { "expert_feed_forward_length" };
                self.size(key, experts.width);
            }
        }
        Ok(())
    }

    fn grouped(&mut self, config: &Config) -> Result<(), ModelError> {
        let (dense, width, experts) = check::leading_dense(config)?;
        let &ExpertsConfig { groups, kept_groups, scoring, renormalise, scale, .. } = experts;
        let Some(shared) = experts.shared.filter(|shared| shared.gate.is_none()) else {
            return Err(refused("llama.cpp expects shared experts without a gate in models of this family"));
        };
        self.size("leading_dense_block_count", dense);
        self.size("feed_forward_length", width.unwrap_or(experts.width));
        self.size("expert_count", experts.experts);
        self.size("expert_used_count", experts.chosen);
        self.size("expert_feed_forward_length", experts.width);
        self.size("expert_shared_count", shared.width / experts.width.max(1));
        self.number("expert_weights_scale", scale);
        self.key("expert_weights_norm", GgufValue::Bool(renormalise));
        let function = if scoring == Scoring::Sigmoid { SIGMOID } else { SOFTMAX };
        self.key("expert_gating_func", GgufValue::U32(function));
        if groups > 1 {
            self.size("expert_group_count", groups);
            self.size("expert_group_used_count", kept_groups);
        }
        Ok(())
    }

    fn rotation(&mut self, rules: GgufRules, scaling: &RopeScaling) -> Result<(), ModelError> {
        match scaling {
            // The factors of Llama 3 are a tensor.
            RopeScaling::Default | RopeScaling::Llama3 { .. } => Ok(()),
            RopeScaling::Linear { factor } => {
                self.scaling("linear", *factor);
                Ok(())
            }
            RopeScaling::LongRope(long) if rules.long_rotation => {
                let original = long.original_max_position as usize;
                self.size("rope.scaling.original_context_length", original);
                self.number("rope.scaling.attn_factor", scaling.attention_factor() as f32);
                self.notes.push(format!(
                    "llama.cpp rotates for long texts whenever its context is larger than {original} tokens: give it a \
                     smaller one (`-c`) for short texts"
                ));
                Ok(())
            }
            RopeScaling::LongRope(_) => Err(refused("llama.cpp has no longrope rotation in models of this family")),
            RopeScaling::Yarn(yarn) => {
                if !is_near(scaling.attention_factor(), usual_growth(yarn.factor)) {
                    return Err(refused("its yarn rotation has settings that llama.cpp does not read"));
                }
                self.yarn(yarn);
                Ok(())
            }
            RopeScaling::Dynamic { .. } => Err(refused("llama.cpp has no rotation that grows with the text")),
        }
    }

    /// Its scale of scores follows from the multiplier.
    fn latent_rotation(&mut self, scaling: &RopeScaling) -> Result<(), ModelError> {
        match scaling {
            RopeScaling::Default => Ok(()),
            RopeScaling::Yarn(yarn) if yarn.mscale_all_dim != 0.0 && is_near(scaling.attention_factor(), 1.0) => {
                #[expect(clippy::float_arithmetic, reason = "a key of another format")]
                let multiplier = (0.1 * yarn.mscale_all_dim) as f32;
                self.number("rope.scaling.yarn_log_multiplier", multiplier);
                self.yarn(yarn);
                Ok(())
            }
            _ => Err(refused("llama.cpp has only yarn with `mscale` = `mscale_all_dim` beside latent attention")),
        }
    }

    fn yarn(&mut self, yarn: &Yarn) {
        self.size("rope.scaling.original_context_length", yarn.original_max_position as usize);
        self.scaling("yarn", yarn.factor);
        let Yarn { beta_fast, beta_slow, .. } = *yarn;
        self.number("rope.scaling.yarn_beta_fast", beta_fast as f32);
        self.number("rope.scaling.yarn_beta_slow", beta_slow as f32);
        let usual = Yarn::default();
        if beta_fast != usual.beta_fast || beta_slow != usual.beta_slow {
            self.notes.push(format!(
                "llama.cpp does not read the ends of a yarn rotation's ramp from the files of most architectures: give \
                 it `--yarn-beta-fast {beta_fast} --yarn-beta-slow {beta_slow}`"
            ));
        }
        if !yarn.truncate {
            self.notes.push(
                "llama.cpp always widens the ramp of a yarn rotation to whole indices (`truncate` true), this model does \
                 not: llama.cpp rotates by slightly different frequencies, so its probabilities differ slightly"
                    .to_string(),
            );
        }
    }

    fn scaling(&mut self, kind: &str, factor: f64) {
        self.key("rope.scaling.type", GgufValue::Text(kind.to_string()));
        self.number("rope.scaling.factor", factor as f32);
    }
}

/// The factor on what attention and MLP add to the residual stream.
fn branch_factor(config: &Config) -> f32 {
    config.layers.first().and_then(|layer| layer.attention_factor).unwrap_or(1.0)
}

fn score_cap(attention: &Attention) -> Option<f32> {
    match attention {
        Attention::Softmax { shared, .. } => shared.cap,
        Attention::Latent(_) => None,
    }
}

/// The factor on cosine and sine that yarn has by default.
fn usual_growth(factor: f64) -> f64 {
    RopeScaling::Yarn(Yarn { factor, ..Yarn::default() }).attention_factor()
}

#[expect(clippy::float_arithmetic, reason = "a setting of another program")]
fn is_near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-6
}
