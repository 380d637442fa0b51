//! What a model consists of according to its config, by name: linear modules, other tensors,
//! experts. Opens no files.
//!
//! `unused.rs` checks the tensors of a file against it, and code that takes module names looks them
//! up here. `build/` requests the same names; a test keeps the two in sync for every family.

use crate::config::{AttentionKind, Config, DeltaProjections, MlpKind, MlpNames};
use crate::{gptq, nf4};
use std::collections::BTreeSet;

/// Names in our form: `model.…`, `lm_head`.
#[derive(Debug, Default)]
pub struct Inventory {
    /// Paths of linear modules that can get an adapter, in build order.
    adaptable: Vec<String>,
    /// All modules with a matrix that may be quantised, including those above.
    modules: BTreeSet<String>,
    tensors: BTreeSet<String>,
    /// Name prefixes of a layer's experts: `model.layers.3.mlp.experts.`
    experts: BTreeSet<String>,
}

impl Inventory {
    pub fn of(config: &Config) -> Self {
        let mut all = Self::default();
        all.tensor("model.embed_tokens.weight".to_string());
        for (layer, of) in config.layers.iter().enumerate() {
            let path = format!("model.layers.{layer}");
            all.norms(&path, &of.names.norms().collect::<Vec<_>>());
            all.attention(&path, &of.attention);
            all.mlp(&format!("{path}.{}", of.names.mlp), &of.mlp);
        }
        all.norms("model", &["norm"]);
        if config.tied {
            // Some files also store the tied head.
            all.tensor("lm_head.weight".to_string());
        } else {
            all.modules.insert("lm_head".to_string());
        }
        all
    }

    /// The index of every layer's first module with a weight matrix, in build order, and the number
    /// of all: linear modules, and two tensors for the experts of a layer.
    pub(crate) fn first_modules(config: &Config) -> Vec<u32> {
        let mut all = Self::default();
        let mut firsts = vec![0];
        let mut of_experts = 0;
        for layer in &config.layers {
            all.attention("", &layer.attention);
            all.mlp("", &layer.mlp);
            of_experts += if matches!(layer.mlp, MlpKind::Experts(_)) { 2 } else { 0 };
            firsts.push(all.adaptable.len() as u32 + of_experts);
        }
        firsts
    }

    fn attention(&mut self, layer: &str, attention: &AttentionKind) {
        match attention {
            AttentionKind::Softmax(config) => {
                let names = config.names;
                let path = format!("{layer}.{}", names.module);
                self.linear(&path, &names.inputs());
                self.linear(&path, &[names.o]);
                if config.head_norms {
                    self.norms(&path, &[names.q_norm, names.k_norm]);
                }
                if config.sinks {
                    self.tensor(format!("{path}.{}", names.sinks));
                }
            }
            AttentionKind::Latent(config) => {
                let names = config.names;
                let path = format!("{layer}.{}", names.module);
                if config.query_rank.is_some() {
                    self.linear(&path, &[names.q_a, names.q_b]);
                    self.norms(&path, &[names.q_a_norm]);
                } else {
                    self.linear(&path, &[names.q]);
                }
                self.linear(&path, &[names.kv_a, names.kv_b, names.o]);
                self.norms(&path, &[names.kv_a_norm]);
            }
            AttentionKind::Delta(config) => {
                let names = config.names;
                let path = format!("{layer}.{}", names.module);
                match config.projections {
                    DeltaProjections::Separate { qkv, z, b, a } => self.linear(&path, &[qkv, z, b, a]),
                    DeltaProjections::Joined { qkvz, ba } => self.linear(&path, &[qkvz, ba]),
                }
                self.linear(&path, &[names.output]);
                self.norms(&path, &[names.convolution, names.norm]);
                self.tensor(format!("{path}.{}", names.a_log));
                self.tensor(format!("{path}.{}", names.dt_bias));
            }
        }
    }

    fn mlp(&mut self, path: &str, mlp: &MlpKind) {
        let config = match mlp {
            MlpKind::Dense { names, .. } => return self.gated_mlp(path, names),
            MlpKind::Experts(config) => config,
        };
        let router = format!("{path}.{}", config.router);
        if let Some(bias) = config.correction_bias {
            self.tensor(format!("{router}.{bias}"));
        }
        self.modules.insert(router);
        self.experts.insert(format!("{path}.experts."));
        if let Some(shared) = config.shared {
            self.gated_mlp(&format!("{path}.{}", shared.module), shared.names);
            if let Some(gate) = shared.gate {
                self.linear(path, &[gate]);
            }
        }
    }

    fn gated_mlp(&mut self, path: &str, names: &MlpNames) {
        self.linear(path, &names.inputs());
        self.linear(path, &[names.down]);
    }

    fn linear(&mut self, path: &str, names: &[&str]) {
        for name in names {
            let path = format!("{path}.{name}");
            self.modules.insert(path.clone());
            self.adaptable.push(path);
        }
    }

    /// Modules with only a weight, which is never quantised.
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

    /// Name prefixes of the experts, one per layer.
    pub fn experts(&self) -> impl Iterator<Item = &str> {
        self.experts.iter().map(String::as_str)
    }

    /// Whether the model reads a tensor. Experts check their own names; biases missing from the
    /// config must be zero, which is checked on reading. `is_there` looks up the file's other
    /// tensors.
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
        // What describes a packed matrix is read with it.
        if let Some(weight) = nf4::part_of(name).filter(|weight| is_there(weight)) {
            return self.reads(weight, is_there);
        }
        let Some((path, part)) = name.rsplit_once('.') else { return false };
        let known = match part {
            "weight" | "bias" | "weight_scale_inv" => true,
            part => gptq::PARTS.contains(&part) && is_there(&format!("{path}.qweight")),
        };
        known && self.modules.contains(path)
    }
}
