//! Hand-made files: every layout of experts gives the same matrices, quantised ones the
//! numbers of their formats, and whatever does not fit together is an error that names the tensor.
//! Broken ones never panic.
#![expect(clippy::float_arithmetic, reason = "the numbers that formats define, written down a second time")]

mod broken;
mod experts_of_a_layer;
mod float8;
mod nf4;
mod packed;
mod unused;

use isobit_models::config::Config;
use isobit_models::{ModelError, Weights};
use isobit_proof::safetensors::{Dtype, TensorFiles};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A tensor to be written.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) type File = BTreeMap<String, Made>;

pub(crate) fn weights_of(file: &File, config: &Config) -> Result<(tempfile::TempDir, Weights), ModelError> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.safetensors");
    // Not the careful writer: it waits for the disk, and this is called a thousand times.
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, made) in file {
        let begin = data.len();
        data.extend_from_slice(&made.bytes);
        let entry = json!({"dtype": made.dtype.name(), "shape": made.shape, "data_offsets": [begin, data.len()]});
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string().into_bytes();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    std::fs::write(&path, bytes).expect("written");
    Ok((folder, Weights::new(TensorFiles::open_file(&path)?, config)?))
}

pub(crate) fn config(quantization: &Value) -> Config {
    let value = json!({"model_type": "qwen3_moe", "num_hidden_layers": 1, "quantization_config": quantization});
    Config::parse(&value.to_string()).expect("a config")
}

/// Numbers that are the same everywhere.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % below
    }
}

pub(crate) fn bf16(shape: &[usize], value: impl Fn(usize) -> u16) -> Made {
    let bytes = (0..shape.iter().product()).flat_map(|index| value(index).to_le_bytes()).collect();
    Made { dtype: Dtype::Bf16, shape: shape.to_vec(), bytes }
}

pub(crate) fn f32s(shape: &[usize], values: &[f32]) -> Made {
    Made { dtype: Dtype::F32, shape: shape.to_vec(), bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect() }
}

pub(crate) fn i32s(shape: &[usize], values: &[u32]) -> Made {
    Made { dtype: Dtype::I32, shape: shape.to_vec(), bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect() }
}

/// The modules that the tests load.
pub(crate) const MLP: &str = "model.layers.0.mlp";
pub(crate) const Q: &str = "model.layers.0.self_attn.q_proj";
