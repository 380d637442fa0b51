//! What a config says that a model consists of, by name: linear modules, other tensors, experts.
//! Nothing is opened for it.
//!
//! `unused.rs` holds the tensors of a file against it, and whoever names modules learns from it
//! which there are. `build/` asks for the same names; a test holds the two together on every
//! family.

use crate::config::{Config, DeltaProjections, Feed, Mixer};
use crate::gptq;
use std::collections::BTreeSet;

/// Names as they are here: `model.…`, `lm_head`.
#[derive(Debug, Default)]
pub struct Inventory {
    /// Paths of linear modules that can get an adapter, in the order in which they are built.
    adaptable: Vec<String>,
    /// All modules with a matrix that may be quantised, those above included.
    modules: BTreeSet<String>,
    tensors: BTreeSet<String>,
    /// What the names of a layer's experts begin with: `model.layers.3.mlp.experts.`
    experts: BTreeSet<String>,
}

impl Inventory {
    pub fn of(config: &Config) -> Self {
        let mut all = Self::default();
        all.tensor("model.embed_tokens.weight".to_string());
        for (layer, of) in config.layers.iter().enumerate() {
            let path = format!("model.layers.{layer}");
            all.norms(&path, &["input_layernorm", "post_attention_layernorm"]);
            all.mixer(&path, &of.mixer);
            all.feed(&format!("{path}.mlp"), &of.feed);
        }
        all.norms("model", &["norm"]);
        if config.tied {
            // Some files hold it once more.
            all.tensor("lm_head.weight".to_string());
        } else {
            all.modules.insert("lm_head".to_string());
        }
        all
    }

    fn mixer(&mut self, layer: &str, mixer: &Mixer) {
        let attention = format!("{layer}.self_attn");
        match mixer {
            Mixer::Attention(config) => {
                self.linear(&attention, &["q_proj", "k_proj", "v_proj", "o_proj"]);
                if config.head_norms {
                    self.norms(&attention, &["q_norm", "k_norm"]);
                }
            }
            Mixer::Latent(config) => {
                if config.query_rank.is_some() {
                    self.linear(&attention, &["q_a_proj", "q_b_proj"]);
                    self.norms(&attention, &["q_a_layernorm"]);
                } else {
                    self.linear(&attention, &["q_proj"]);
                }
                self.linear(&attention, &["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]);
                self.norms(&attention, &["kv_a_layernorm"]);
            }
            Mixer::Delta(config) => {
                let path = format!("{layer}.linear_attn");
                let inputs: &[&str] = match config.projections {
                    DeltaProjections::Separate => &["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"],
                    DeltaProjections::Joined => &["in_proj_qkvz", "in_proj_ba"],
                };
                self.linear(&path, inputs);
                self.linear(&path, &["out_proj"]);
                self.norms(&path, &["conv1d", "norm"]);
                self.tensor(format!("{path}.A_log"));
                self.tensor(format!("{path}.dt_bias"));
            }
        }
    }

    fn feed(&mut self, path: &str, feed: &Feed) {
        const DENSE: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
        let Feed::Experts(config) = feed else { return self.linear(path, &DENSE) };
        self.modules.insert(format!("{path}.gate"));
        if config.correction_bias {
            self.tensor(format!("{path}.gate.e_score_correction_bias"));
        }
        self.experts.insert(format!("{path}.experts."));
        if let Some(shared) = config.shared {
            self.linear(&format!("{path}.{}", shared.module()), &DENSE);
            if shared.gated {
                self.linear(path, &["shared_expert_gate"]);
            }
        }
    }

    fn linear(&mut self, path: &str, names: &[&str]) {
        for name in names {
            let path = format!("{path}.{name}");
            self.modules.insert(path.clone());
            self.adaptable.push(path);
        }
    }

    /// Modules with nothing but a weight that is never quantised.
    fn norms(&mut self, path: &str, names: &[&str]) {
        for name in names {
            self.tensor(format!("{path}.{name}.weight"));
        }
    }

    fn tensor(&mut self, name: String) {
        self.tensors.insert(name);
    }

    /// Paths of linear modules that can get an adapter.
    pub fn adaptable(&self) -> &[String] {
        &self.adaptable
    }

    /// What the names of experts begin with, a layer each.
    pub fn experts(&self) -> impl Iterator<Item = &str> {
        self.experts.iter().map(String::as_str)
    }

    /// Whether a tensor is one that the model reads. Experts check their own names, and biases that
    /// the config does not have must be zero, which reading them tells. `is_there` knows the other
    /// tensors of the file.
    pub(crate) fn reads(&self, name: &str, is_there: impl Fn(&str) -> bool) -> bool {
        const EXPERTS: &str = ".experts.";
        if self.tensors.contains(name) {
            return true;
        }
        if let Some(at) = name.find(EXPERTS)
            && self.experts.contains(&name[..at + EXPERTS.len()])
        {
            return true;
        }
        let Some((path, part)) = name.rsplit_once('.') else { return false };
        let known = match part {
            "weight" | "bias" | "weight_scale_inv" => true,
            part => gptq::PARTS.contains(&part) && is_there(&format!("{path}.qweight")),
        };
        known && self.modules.contains(path)
    }
}
