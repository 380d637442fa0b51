//! Matrices of bitsandbytes: the float32 numbers that it gives back itself, bit for bit, and what
//! does not fit together is refused by name.

use super::{File, Made, Q, config, f32s, weights_of};
use isobit_models::config::Config;
use isobit_models::{FloatFormat, Weight, WeightSource, Weights};
use isobit_proof::safetensors::{Dtype, TensorFiles};
use serde_json::{Value, json};
use std::path::Path;

/// `tools/reference/quantized.py` has bitsandbytes expand every matrix of each file.
#[test]
fn numbers_are_those_that_bitsandbytes_gives() {
    for name in ["nf4", "fp4"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let text = std::fs::read_to_string(folder.join("config.json")).expect("a config");
        let config = Config::parse(&text).expect("a readable config");
        let files = TensorFiles::open_file(&folder.join("model.safetensors")).expect("weights");
        let weights = Weights::new(files, &config).expect("known names");
        assert!(weights.unused().is_empty(), "{:?}", weights.unused());
        let expanded = TensorFiles::open_file(&folder.join("expanded.safetensors")).expect("numbers");
        let mut compared = 0;
        for tensor in expanded.names() {
            let wanted = expanded.get(tensor).expect("a tensor");
            let &[outputs, inputs] = wanted.shape else { panic!("a matrix") };
            assert_eq!(weights.format(tensor).expect("a format"), FloatFormat::F32);
            assert_eq!(weights.shape(tensor).expect("a shape"), [outputs, inputs]);
            let path = tensor.strip_suffix(".weight").expect("a weight");
            let Weight::Stored(found) = weights.weight(path, outputs, inputs).expect("numbers") else {
                panic!("expanded")
            };
            assert_eq!(found.to_f32(), wanted.to_f32().expect("float32"), "{name} {tensor}");
            compared += outputs * inputs;
        }
        // Queries and output, keys and values, three projections of the MLP.
        assert_eq!(compared, (2 * 64 + 2 * 32 + 3 * 128) * 64);
    }
}

/// Two blocks of four numbers.
fn file() -> File {
    let state = json!({"quant_type": "nf4", "blocksize": 4, "dtype": "bfloat16", "shape": [2, 4],
        "nested_blocksize": 2, "nested_dtype": "float32", "nested_offset": 0.5});
    let bytes = |bytes: &[u8]| Made { dtype: Dtype::U8, shape: vec![bytes.len()], bytes: bytes.to_vec() };
    let table: Vec<f32> = (0..16).map(|code| code as f32 - 8.0).collect();
    let nested: Vec<f32> = (0..256).map(|code| code as f32 / 256.0).collect();
    let part = |part: &str| format!("{Q}.weight{part}");
    File::from([
        (part(""), bytes(&[0x8f, 0x07, 0x9a, 0x18])),
        (part(".absmax"), bytes(&[128, 64])),
        (part(".quant_map"), f32s(&[16], &table)),
        (part(".nested_absmax"), f32s(&[1], &[3.0])),
        (part(".nested_quant_map"), f32s(&[256], &nested)),
        (part(".quant_state.bitsandbytes__nf4"), bytes(state.to_string().as_bytes())),
    ])
}

fn settings(key: &str, value: Value) -> Value {
    let mut settings = json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"});
    settings[key] = value;
    settings
}

#[test]
fn codes_are_the_upper_bits_first_and_magnitudes_are_codes_too() {
    let config = config(&settings("bnb_4bit_use_double_quant", json!(true)));
    let (_folder, weights) = weights_of(&file(), &config).expect("weights");
    let found = weights.tensor(&format!("{Q}.weight"), &[2, 4]).expect("numbers").to_f32();
    // Magnitudes 0.5·3 + 0.5 and 0.25·3 + 0.5.
    assert_eq!(found, [0.0, 14.0, -16.0, -2.0, 1.25, 2.5, -8.75, 0.0]);
}

#[test]
fn what_does_not_fit_together_is_refused_by_name() {
    type Change = fn(&mut File);
    let packed = config(&settings("load_in_4bit", json!(true)));
    let cases: [(Change, &str); 9] = [
        (|file| drop(file.remove(&format!("{Q}.weight.quant_state.bitsandbytes__nf4"))), "`quant_state` of nf4 or fp4"),
        (|file| drop(file.remove(&format!("{Q}.weight.quant_map"))), "quant_map"),
        (|file| drop(file.insert(format!("{Q}.weight.quant_map"), f32s(&[15], &[0.0; 15]))), "it holds 15 numbers"),
        (|file| drop(file.insert(format!("{Q}.weight.absmax"), f32s(&[2], &[1.0; 2]))), "absmax"),
        (|file| drop(file.insert(format!("{Q}.weight.nested_absmax"), f32s(&[1], &[f32::NAN]))), "element 0 is NaN"),
        (|file| drop(file.insert(format!("{Q}.weight.nested_absmax"), f32s(&[1], &[3e38]))), "is "),
        (
            |file| {
                let made = Made { dtype: Dtype::U8, shape: vec![3], bytes: vec![0; 3] };
                file.insert(format!("{Q}.weight"), made);
            },
            "3 bytes do not hold a matrix [2, 4]",
        ),
        (
            |file| {
                let made = Made { dtype: Dtype::U8, shape: vec![2], bytes: b"{]".to_vec() };
                file.insert(format!("{Q}.weight.quant_state.bitsandbytes__nf4"), made);
            },
            "not JSON",
        ),
        (
            |file| {
                let text = br#"{"blocksize": 0, "shape": [2, 4], "nested_blocksize": 2, "nested_offset": 0.5}"#;
                let made = Made { dtype: Dtype::U8, shape: vec![text.len()], bytes: text.to_vec() };
                file.insert(format!("{Q}.weight.quant_state.bitsandbytes__nf4"), made);
            },
            "`blocksize` is missing or out of range",
        ),
    ];
    for (change, wanted) in cases {
        let mut file = file();
        change(&mut file);
        let (_folder, weights) = weights_of(&file, &packed).expect("weights");
        let error = weights.tensor(&format!("{Q}.weight"), &[2, 4]).expect_err(wanted).to_string();
        assert!(error.contains(wanted) && error.contains("q_proj"), "{wanted}: {error}");
    }
    let (_folder, weights) = weights_of(&file(), &packed).expect("weights");
    let error = weights.tensor(&format!("{Q}.weight"), &[4, 2]).expect_err("a shape").to_string();
    assert!(error.contains("it holds a matrix [2, 4], but the config says [4, 2]"), "{error}");
    let (_folder, weights) = weights_of(&file(), &config(&Value::Null)).expect("weights");
    let error = weights.tensor(&format!("{Q}.weight"), &[2, 4]).expect_err("no config").to_string();
    assert!(error.contains("no `quantization_config` of method bitsandbytes"), "{error}");
    for (key, value, wanted) in [
        ("load_in_4bit", json!(false), "not with 8 bits"),
        ("bnb_4bit_quant_type", json!("int4"), "`bnb_4bit_quant_type` is \"int4\""),
        ("bnb_4bit_quant_storage", json!("bfloat16"), "`bnb_4bit_quant_storage` is \"bfloat16\""),
    ] {
        let value = json!({"model_type": "qwen3_moe", "quantization_config": settings(key, value)});
        let error = Config::parse(&value.to_string()).expect_err(wanted).to_string();
        assert!(error.contains(wanted), "{error}");
    }
}
