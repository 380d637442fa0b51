//! Matrices of float8 with their scales.

use super::{File, Made, config, f32s, i32s, weights_of};
use isobit_models::config::Config;
use isobit_models::{FloatFormat, Weight, WeightSource};
use isobit_proof::safetensors::Dtype;
use serde_json::{Value, json};

#[test]
fn float8_matrices_are_their_numbers() {
    let fp8 = config(&json!({"quant_method": "fp8", "weight_block_size": [2, 3]}));
    let codes: Vec<u8> = (0..15).map(|at| 0x30 + at).collect();
    let made = Made { dtype: Dtype::F8E4M3, shape: vec![3, 5], bytes: codes.clone() };
    let (name, scale) = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight_scale_inv");
    let scales = [0.1f32, 2.0, 3.0, -0.7];
    let file = File::from([(name.to_string(), made.clone()), (scale.to_string(), f32s(&[2, 2], &scales))]);
    let (_folder, weights) = weights_of(&file, &fp8).expect("weights");
    let Weight::Stored(tensor) = weights.weight("model.layers.0.self_attn.q_proj", 3, 5).expect("numbers") else {
        panic!("stored")
    };
    let wanted: Vec<f32> =
        (0..15).map(|at| isobit_models::fp8::value(codes[at]) * scales[at / 5 / 2 * 2 + at % 5 / 3]).collect();
    assert_eq!((tensor.format, tensor.to_f32()), (FloatFormat::F32, wanted));
    assert_eq!(weights.format(name).expect("a format"), FloatFormat::F32);
    weights.release_weight("model.layers.0.self_attn.q_proj");

    let check = |config: &Config, change: &dyn Fn(&mut File), wanted: &str| {
        let mut file = file.clone();
        change(&mut file);
        let (_folder, weights) = weights_of(&file, config).expect("weights");
        let error = weights.tensor(name, &[3, 5]).expect_err(wanted).to_string();
        assert!(error.contains(wanted) && error.contains("q_proj.weight"), "{error}: wanted {wanted}");
    };
    let nan = |code: u8| {
        let mut made = made.clone();
        made.bytes[7] = code;
        move |file: &mut File| drop(file.insert(name.to_string(), made.clone()))
    };
    check(&fp8, &nan(0x7f), "element 7 is not a number");
    check(&fp8, &nan(0xff), "element 7 is not a number");
    check(&fp8, &|file| drop(file.remove(scale)), "there is no model.layers.0.self_attn.q_proj.weight_scale_inv");
    check(&fp8, &|file| drop(file.insert(scale.to_string(), f32s(&[4], &scales))), "[4]");
    check(&fp8, &|file| drop(file.insert(name.to_string(), f32s(&[3, 5], &[0.0; 15]))), "but there is a");
    check(&fp8, &|file| drop(file.insert(scale.to_string(), i32s(&[2, 2], &[0; 4]))), "I32");
    check(&config(&Value::Null), &|_| {}, "no `quantization_config`");
    check(&fp8, &|file| drop(file.insert(scale.to_string(), f32s(&[2, 2], &[f32::MAX; 4]))), "beyond float32");
}
