//! Files that obey the container's rules and break those of a model, a few things at a time.

use super::experts_of_a_layer::{ExpertsLayout, expert_file};
use super::packed::{Plain, gptq_config};
use super::{File, MLP, Made, Numbers, Q, bf16, config, f32s, weights_of};
use isobit_kernels::op::AsQuantized;
use isobit_models::config::Quantization;
use isobit_models::experts::{self, Experts, ExpertsShape, Projection};
use isobit_models::{ModelError, StoredTensor, Weight, WeightSource, Weights};
use isobit_proof::safetensors::Dtype;
use serde_json::{Value, json};

/// Everything there is to read, whatever it gives.
fn read_all(weights: &Weights, shape: ExpertsShape) -> Result<(), ModelError> {
    let look = |tensor: StoredTensor| assert_eq!(tensor.length() * tensor.format.bytes(), tensor.bytes.len());
    let loaded = experts::load(weights, MLP, shape)?;
    for projection in Projection::ALL {
        for expert in 0..shape.experts {
            match &loaded {
                Experts::Stored(stored) => look(stored.expert(projection, expert)?),
                Experts::Gptq(gptq) => {
                    let weight = gptq.expert(projection, expert)?;
                    assert_eq!(weight.quantized().check(), Ok(()), "what the loader lets through the ops take");
                    drop((weight.dequantise(), gptq.quantized_shape(projection)?));
                }
                Experts::Mxfp4(packed) => {
                    let shape = packed.quantized_shape(projection)?;
                    let weight = packed.expert(projection, expert, shape)?;
                    assert_eq!(weight.quantized().check(), Ok(()), "what the loader lets through the ops take");
                }
            }
        }
        if let Experts::Stored(stored) = &loaded {
            look(stored.stacked(projection)?);
        }
    }
    if let Weight::Gptq(weight) = weights.weight(Q, 8, 16)? {
        assert_eq!(weight.quantized().check(), Ok(()), "what the loader lets through the ops take");
        drop(weight.dequantise());
    }
    weights.quantised(Q, 8, 16)?;
    weights.bias(Q, 8, false)?;
    look(weights.tensor("model.norm.weight", &[16])?);
    Ok(())
}

#[test]
fn broken_files_never_end_the_program() {
    let shape = ExpertsShape { experts: 2, width: 8, hidden: 16 };
    let mut bases = Vec::new();
    for layout in [ExpertsLayout::Single, ExpertsLayout::Fused, ExpertsLayout::Transposed] {
        bases.push((expert_file(shape, layout), config(&Value::Null)));
    }
    let mut file = File::new();
    let mut fp8 = File::new();
    for expert in 0..2 {
        for projection in Projection::ALL {
            let [outputs, inputs] = projection.shape(shape);
            let path = format!("{MLP}.experts.{expert}.{}", projection.module());
            Plain::random(outputs, inputs, 8, false, None).insert(&mut file, &path, true, true);
            let codes =
                Made { dtype: Dtype::F8E4M3, shape: vec![outputs, inputs], bytes: vec![0x41; outputs * inputs] };
            fp8.insert(format!("{path}.weight"), codes);
            let [rows, columns] = isobit_models::fp8::scale_shape(outputs, inputs, [8, 8]);
            fp8.insert(format!("{path}.weight_scale_inv"), f32s(&[rows, columns], &vec![0.5; rows * columns]));
        }
    }
    bases.push((file, gptq_config("gptq", 8, false, &json!({}))));
    bases.push((fp8, config(&json!({"quant_method": "fp8", "weight_block_size": [8, 8]}))));
    for (base, config) in &mut bases {
        if matches!(config.quantization, Quantization::Gptq(_)) {
            Plain::random(8, 16, 8, true, None).insert(base, Q, true, true);
        } else {
            base.insert(format!("{Q}.weight"), bf16(&[8, 16], |at| at as u16));
        }
        base.insert("model.norm.weight".to_string(), bf16(&[16], |_| 0x3f80));
        base.insert(format!("{Q}.bias"), bf16(&[8], |_| 0));
        let (_folder, weights) = weights_of(base, config).expect("weights");
        read_all(&weights, shape).expect("a sound file");
    }
    let mut numbers = Numbers(5);
    let (mut read, mut refused) = (0, 0);
    for (base, config) in &bases {
        for _ in 0..150 {
            let mut file = base.clone();
            for _ in 0..=numbers.next(2) {
                damage(&mut file, &mut numbers);
            }
            match weights_of(&file, config).and_then(|(_folder, weights)| read_all(&weights, shape)) {
                Ok(()) => read += 1,
                Err(error) => {
                    refused += 1;
                    assert!(!error.to_string().contains(char::is_control), "{error:?}");
                    assert!(!matches!(error, ModelError::File(isobit_proof::FileError::Io { .. })), "{error}");
                }
            }
        }
    }
    assert!(read > 25 && refused > 250, "{read} read, {refused} refused");
}

/// One thing wrong with a file that still obeys its format.
fn damage(file: &mut File, numbers: &mut Numbers) {
    let names: Vec<String> = file.keys().cloned().collect();
    let name = names[numbers.next(names.len())].clone();
    match numbers.next(6) {
        0 => drop(file.remove(&name)),
        1 => {
            let made = file.remove(&name).expect("there");
            file.insert(names[numbers.next(names.len())].clone(), made);
        }
        2 => {
            let made = file.get_mut(&name).expect("there");
            let at = numbers.next(made.bytes.len());
            made.bytes[at] = [0, 0x7f, 0x80, 0xff][numbers.next(4)];
        }
        3 => {
            let made = file.get_mut(&name).expect("there");
            match numbers.next(3) {
                0 => made.shape.reverse(),
                1 => made.shape = vec![made.shape.iter().product()],
                _ => made.shape.push(1),
            }
        }
        4 => {
            let made = file.get_mut(&name).expect("there");
            let other = [Dtype::F32, Dtype::I32, Dtype::F16, Dtype::Bf16, Dtype::U8, Dtype::F8E4M3][numbers.next(6)];
            let count: usize = made.shape.iter().product();
            made.dtype = other;
            made.bytes.resize(count * other.bits() / 8, 0x3c);
        }
        _ => {
            let made = file[&name].clone();
            let number = [1, 2, 3, 7_000_000][numbers.next(4)];
            let part = ["up_proj.weight", "up_proj.qweight", "down_proj.bias", "\u{1b}x"][numbers.next(4)];
            file.insert(format!("{MLP}.experts.{number}.{part}"), made);
        }
    }
}
