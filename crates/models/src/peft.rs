//! Adapters as PEFT writes and reads them: `adapter_config.json` and the names of the tensors.

use crate::ModelError;
use crate::adapter::{LoraConfig, Targets};

pub use crate::adapter_config::{base_name, parse as parse_config};
use crate::build::Built;
use crate::files::TrainedTensor;
use isobit_kernels::Backend;
use isobit_proof::safetensors::{SafeTensors, Tensor};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The `adapter_config.json` of an adapter on the base named `base`.
pub fn config_json(lora: &LoraConfig, base: &str) -> Value {
    let targets = |targets: &Targets| match targets {
        Targets::AllLinear => json!("all-linear"),
        Targets::Names(names) => json!(names),
        Targets::Pattern(pattern) => json!(pattern),
    };
    json!({
        "alpha_pattern": lora.alpha_pattern,
        "auto_mapping": null,
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": lora.exclude.as_ref().map(targets),
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": lora.layers,
        "lora_alpha": whole(lora.alpha),
        "lora_bias": false,
        "lora_dropout": lora.dropout,
        "modules_to_save": (!lora.saved.is_empty()).then_some(&lora.saved),
        "peft_type": "LORA",
        "r": lora.rank,
        "rank_pattern": lora.rank_pattern,
        "revision": null,
        "target_modules": targets(&lora.targets),
        "target_parameters": (!lora.parameters.is_empty()).then_some(&lora.parameters),
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": lora.rslora,
    })
}

/// PEFT writes whole numbers as integers.
fn whole(number: f64) -> Value {
    if libm::trunc(number) == number && number.abs() < 1e15 { json!(number as i64) } else { json!(number) }
}

/// Loads the tensors of an adapter's file. Every trained tensor must be present with its shape, and
/// nothing else.
pub fn load<B: Backend>(backend: &B, built: &mut Built<B>, file: &SafeTensors) -> Result<(), ModelError> {
    let Built { model, parameters } = built;
    let ids: Vec<_> = parameters.iter().map(|(id, _)| id).collect();
    let tensors: Vec<_> = parameters.iter().map(|(id, parameter)| model.trained_tensor(id, parameter)).collect();
    read(&tensors, file, |at, values| {
        *parameters.get_mut(ids[at]).value = backend.upload(&values);
        Ok(())
    })
}

/// Reads the tensors of an adapter's file one after the other and passes each to `put`, with its
/// index. Every one must be present with its shape, and nothing else.
pub fn read<E: From<ModelError>>(
    tensors: &[TrainedTensor],
    file: &SafeTensors,
    mut put: impl FnMut(usize, Vec<f32>) -> Result<(), E>,
) -> Result<(), E> {
    for (at, tensor) in tensors.iter().enumerate() {
        put(at, tensor.from_file(|name, shape| values(file, name, shape))?)?;
    }
    let known: BTreeSet<_> = tensors.iter().flat_map(TrainedTensor::in_file).map(|(name, _)| name).collect();
    match file.names().find(|name| !known.contains(*name)) {
        Some(name) => Err(extra(name).into()),
        None => Ok(()),
    }
}

/// The error of a tensor that nothing reads.
pub(crate) fn extra(name: &str) -> ModelError {
    ModelError::Adapter(format!("{name} belongs to no module that the config targets"))
}

pub(crate) fn check_shape(tensor: &Tensor, shape: &[usize]) -> Result<(), ModelError> {
    if tensor.shape == shape {
        return Ok(());
    }
    let what = format!("its shape is {:?}, but the adapter's config says {shape:?}", tensor.shape);
    Err(ModelError::Tensor { name: tensor.name.to_string(), what })
}

/// A tensor of the file, which must have the given shape and finite values.
pub(crate) fn values(file: &SafeTensors, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
    let tensor = file.get(name)?;
    check_shape(&tensor, shape)?;
    let values = tensor.to_f32()?;
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) => Err(ModelError::Tensor { name: name.to_string(), what: format!("element {at} is {}", values[at]) }),
    }
}
