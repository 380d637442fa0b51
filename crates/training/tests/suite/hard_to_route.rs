//! A small Qwen3-MoE on purpose hard to route: 32 experts in pairs with the same router row, and
//! logits near zero.
#![expect(clippy::float_arithmetic, reason = "weights are made up")]

use isobit_models::{Config, FloatFormat, ModelError, RandomSource, StoredTensor, WeightSource};
use isobit_training::row::Row;
use std::borrow::Cow;

pub(crate) const EXPERTS: usize = 32;
pub(crate) const HIDDEN: usize = 16;
pub(crate) const VOCABULARY: usize = 97;

/// Three layers, the second of them dense; three experts of each token, so that a pair is torn.
pub(crate) fn config(more: &str) -> Config {
    let text = format!(
        r#"{{"model_type":"qwen3_moe","hidden_size":{HIDDEN},"intermediate_size":24,"moe_intermediate_size":12,"num_hidden_layers":3,
        "num_attention_heads":4,"num_key_value_heads":2,"head_dim":12,"num_experts":{EXPERTS},"num_experts_per_tok":3,
        "mlp_only_layers":[1],"vocab_size":{VOCABULARY},"rope_theta":10000.0{more}}}"#
    );
    Config::parse(&text).expect("a config")
}

/// Random weights; those of routers tiny and in equal pairs.
pub(crate) struct Ties;

impl WeightSource for Ties {
    fn contains(&self, _name: &str) -> bool {
        true
    }

    fn format(&self, _name: &str) -> Result<FloatFormat, ModelError> {
        Ok(FloatFormat::F32)
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>, ModelError> {
        let made = RandomSource { seed: 5 }.tensor(name, shape)?.to_f32();
        let is_router = name.ends_with("mlp.gate.weight");
        let values = (0..made.len()).map(|at| {
            if is_router {
                // Row 2e + 1 is row 2e, all of them near zero.
                made[at / (2 * HIDDEN) * (2 * HIDDEN) + at % HIDDEN] / 1024.0
            } else if name.contains("norm") {
                made[at]
            } else {
                made[at] * 16.0
            }
        });
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        Ok(StoredTensor { format: FloatFormat::F32, shape: shape.to_vec(), bytes: Cow::Owned(bytes) })
    }
}

pub(crate) fn rows() -> Vec<Row> {
    rows_of(VOCABULARY)
}

/// Rows of unequal length, one of them packed.
pub(crate) fn rows_of(vocabulary: usize) -> Vec<Row> {
    let row = |length: usize, starts: &[usize]| {
        let tokens = (0..length).map(|t| ((t * 31 + length * 7) % vocabulary) as u32).collect();
        let targets = (0..length).map(|t| t % 5 != 3).collect();
        Row::new(tokens, targets, starts.iter().copied().chain([length]).collect())
    };
    vec![row(17, &[0]), row(40, &[0, 9, 10, 30]), row(3, &[0]), row(131, &[0]), row(2, &[0])]
}
