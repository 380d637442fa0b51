//! GPTQ: packed by the rules of its writers here, unpacked by the loader.

use super::{File, MLP, Made, Numbers, Q, bf16, config, f32s, i32s, weights_of};
use isobit_kernels::op::{AsQuantized, Product, Product4Forward, Product4Rows, SliceShape};
use isobit_kernels::{Device, Reference};
use isobit_models::config::{Config, GptqConfig, Quantization};
use isobit_models::experts::{self, Experts, ExpertsShape, Projection};
use isobit_models::{GptqForm, GptqScales, GptqWeight, ModelError, Weight, WeightSource};
use isobit_numerics::cast::f32_to_f16;
use isobit_numerics::slices::Profile;
use isobit_proof::safetensors::Dtype;
use serde_json::{Value, json};

/// A quantised linear before it is packed.
pub(crate) struct Plain {
    outputs: usize,
    inputs: usize,
    size: usize,
    /// `[inputs, outputs]`
    integers: Vec<u32>,
    /// `[groups, outputs]`
    zeros: Vec<u32>,
    scales: Vec<f32>,
    group_of_input: Vec<u32>,
}

impl Plain {
    pub(crate) fn random(outputs: usize, inputs: usize, size: usize, shuffled: bool, zero: Option<u32>) -> Self {
        let mut numbers = Numbers(outputs as u64 + 100 * inputs as u64);
        let groups = inputs / size;
        let mut group_of_input: Vec<u32> = (0..inputs).map(|input| (input / size) as u32).collect();
        if shuffled {
            for input in 0..inputs {
                group_of_input.swap(input, numbers.next(inputs));
            }
        }
        Self {
            outputs,
            inputs,
            size,
            integers: (0..inputs * outputs).map(|_| numbers.next(16) as u32).collect(),
            zeros: (0..groups * outputs).map(|_| zero.unwrap_or(numbers.next(16) as u32)).collect(),
            scales: (0..groups * outputs).map(|_| (1 + numbers.next(64)) as f32 / 1024.0).collect(),
            group_of_input,
        }
    }

    /// As a writer packs it; the first format takes one from every word's every four bits at once.
    pub(crate) fn insert(&self, file: &mut File, path: &str, first_format: bool, with_groups: bool) {
        let (n, groups) = (self.outputs, self.inputs / self.size);
        let mut words = vec![0u32; self.inputs / 8 * n];
        for (at, integer) in self.integers.iter().enumerate() {
            words[at / n / 8 * n + at % n] |= integer << (4 * (at / n % 8));
        }
        let mut zeros = vec![0u32; groups * n / 8];
        for (at, zero) in self.zeros.iter().enumerate() {
            zeros[at / 8] |= zero << (4 * (at % 8));
        }
        if first_format {
            for word in &mut zeros {
                *word = word.wrapping_sub(0x1111_1111);
            }
        }
        let halves = self.scales.iter().flat_map(|scale| f32_to_f16(*scale).to_le_bytes()).collect();
        let scales = Made { dtype: Dtype::F16, shape: vec![groups, n], bytes: halves };
        file.insert(format!("{path}.qweight"), i32s(&[self.inputs / 8, n], &words));
        file.insert(format!("{path}.qzeros"), i32s(&[groups, n / 8], &zeros));
        file.insert(format!("{path}.scales"), scales);
        if with_groups {
            file.insert(format!("{path}.g_idx"), i32s(&[self.inputs], &self.group_of_input));
        }
    }

    /// As AutoAWQ's `gemm` packs it: along outputs, the even ones of eight first.
    fn insert_awq(&self, file: &mut File, path: &str) {
        let (n, groups) = (self.outputs, self.inputs / self.size);
        let packed = |integers: &[u32]| -> Vec<u32> {
            let word = |eight: &[u32]| {
                [0, 2, 4, 6, 1, 3, 5, 7]
                    .iter()
                    .enumerate()
                    .fold(0, |word, (at, output)| word | eight[*output] << (4 * at))
            };
            integers.chunks(8).map(word).collect()
        };
        let halves = self.scales.iter().flat_map(|scale| f32_to_f16(*scale).to_le_bytes()).collect();
        file.insert(format!("{path}.qweight"), i32s(&[self.inputs, n / 8], &packed(&self.integers)));
        file.insert(format!("{path}.qzeros"), i32s(&[groups, n / 8], &packed(&self.zeros)));
        file.insert(format!("{path}.scales"), Made { dtype: Dtype::F16, shape: vec![groups, n], bytes: halves });
    }

    pub(crate) fn matrix(&self) -> Vec<f32> {
        let value = |output: usize, input: usize| {
            let place = self.group_of_input[input] as usize * self.outputs + output;
            let steps = self.integers[input * self.outputs + output] as i32 - self.zeros[place] as i32;
            self.scales[place] * steps as f32
        };
        (0..self.outputs).flat_map(|output| (0..self.inputs).map(move |input| value(output, input))).collect()
    }
}

pub(crate) fn gptq_config(format: &str, group_size: i64, desc_act: bool, extra: &Value) -> Config {
    let mut settings = json!({"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": desc_act,
        "checkpoint_format": format});
    for (key, value) in extra.as_object().into_iter().flatten() {
        settings[key] = value.clone();
    }
    config(&settings)
}

pub(crate) fn quantised(weight: Result<Weight, ModelError>) -> GptqWeight {
    match weight.expect("a matrix") {
        Weight::Gptq(weight) => weight,
        Weight::Stored(_) => panic!("stored"),
    }
}

/// Whether the op's product multiplies by these numbers: the rows of the unit matrix come out as
/// columns of weights. The scale of a row of `x`, its product with the group scale and the sum are
/// rounded, by 2⁻²⁴ each (2.4e-7 is four of these); the next weight is farther by a sixteenth.
fn multiplies_by(weight: &GptqWeight, form: GptqForm, wanted: &[f32]) {
    let (n, k) = (weight.outputs, weight.inputs);
    let shape = form.shape(n, k);
    let packed = Reference.quantized_weight(shape, |_| Ok::<_, ModelError>(weight.clone())).expect("a weight");
    let unit: Vec<f32> = (0..k * k).map(|at| if at / k == at % k { 1.0 } else { 0.0 }).collect();
    let p = Product { segments: &[0, k], n, k, profile: Profile::X2, accumulate: false };
    let mut rows = Reference.rows(SliceShape { rows: k, width: k, profile: Profile::X2 });
    Reference.run(Product4Rows { rows: &mut rows, x: &Reference.upload(&unit), w: &packed, p });
    let mut y = Reference.zeros(k * n);
    Reference.run(Product4Forward { y: &mut y, x: &rows, w: &packed, p });
    for (at, wanted) in wanted.iter().enumerate() {
        let found = y[at % k * n + at / k];
        assert!((found - wanted).abs() <= wanted.abs() * 2.4e-7, "{at}: {found}, not {wanted}");
    }
}

/// AWQ's files hold the same integers, zeros and scales: the weight read is equal in every part.
#[test]
fn awq_is_gptq_packed_differently() {
    let awq = |group_size: i64, more: &Value| {
        let mut settings = json!({"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"});
        more.as_object().into_iter().flatten().for_each(|(key, value)| settings[key] = value.clone());
        config(&settings)
    };
    for (outputs, inputs, size) in [(16, 64, 32), (8, 24, 8), (24, 128, 128), (8, 8, 8)] {
        let plain = Plain::random(outputs, inputs, size, false, None);
        let (mut file, mut same) = (File::new(), File::new());
        plain.insert_awq(&mut file, Q);
        plain.insert(&mut same, Q, false, false);
        let group_size = if size == inputs { -1 } else { size as i64 };
        let (_folder, weights) = weights_of(&file, &awq(group_size, &json!({}))).expect("weights");
        let (_beside, gptq) =
            weights_of(&same, &gptq_config("gptq_v2", group_size, false, &json!({}))).expect("weights");
        let weight = quantised(weights.weight(Q, outputs, inputs));
        assert_eq!(weight, quantised(gptq.weight(Q, outputs, inputs)));
        assert_eq!(weight.dequantise(), plain.matrix());
        let form = weights.quantised(Q, outputs, inputs).expect("a form").expect("it is quantised");
        assert_eq!(form, GptqForm { group_size: size, half_scales: true, permuted: false, zero: None });
        multiplies_by(&weight, form, &plain.matrix());
    }
    let plain = Plain::random(16, 64, 32, false, None);
    let mut file = File::new();
    plain.insert_awq(&mut file, Q);
    let error = |config: &Config, outputs: usize| {
        let (_folder, weights) = weights_of(&file, config).expect("weights");
        weights.weight(Q, outputs, 64).expect_err("refused").to_string()
    };
    let q_proj = Q.rsplit('.').next().expect("a name");
    let excluded = awq(32, &json!({"modules_to_not_convert": [q_proj]}));
    assert!(error(&excluded, 16).contains("`modules_to_not_convert` says that it is not"));
    assert!(error(&awq(32, &json!({})), 24).contains("its shape is [64, 2], but the config says [64, 3]"));
    assert!(error(&awq(16, &json!({})), 16).contains("qzeros"));
    assert!(error(&gptq_config("gptq", 32, false, &json!({})), 16).contains("its shape is [64, 2]"));
}

#[test]
fn packed_integers_are_their_numbers() {
    for (outputs, inputs, size) in [(16, 64, 32), (8, 24, 8), (24, 128, 64), (8, 8, 8), (16, 384, 128)] {
        for (first, shuffled, whole) in
            [(true, false, false), (false, true, false), (true, true, false), (true, false, true)]
        {
            let size = if whole { inputs } else { size };
            let plain = Plain::random(outputs, inputs, size, shuffled && size < inputs, None);
            let mut file = File::new();
            plain.insert(&mut file, Q, first, shuffled);
            let group_size = if whole { -1 } else { size as i64 };
            let config =
                gptq_config(if first { "gptq" } else { "gptq_v2" }, group_size, shuffled, &json!({"sym": false}));
            let (_folder, weights) = weights_of(&file, &config).expect("weights");
            let weight = quantised(weights.weight(Q, outputs, inputs));
            assert_eq!(
                weight.zeros,
                plain.zeros.iter().map(|zero| *zero as u8).collect::<Vec<_>>(),
                "0 to 15, borrows undone"
            );
            let GptqScales::F16(scales) = &weight.scales else { panic!("scales keep their format") };
            assert_eq!(scales.iter().map(|scale| scale.to_f32()).collect::<Vec<_>>(), plain.scales);
            assert_eq!(weight.group_of_input, plain.group_of_input);
            assert_eq!(weight.dequantise(), plain.matrix());
            for (at, integer) in plain.integers.iter().enumerate() {
                assert_eq!(u32::from(weight.integer(at / outputs, at % outputs)), *integer);
            }
            let form = weights.quantised(Q, outputs, inputs).expect("a form").expect("it is quantised");
            let permuted = !plain.group_of_input.is_sorted();
            assert_eq!(form, GptqForm { group_size: size, half_scales: true, permuted, zero: None });
            assert_eq!(weight.quantized().check(), Ok(()));
            multiplies_by(&weight, form, &plain.matrix());
            weights.release_weight(Q);
        }
    }
}

#[test]
fn quantised_matrices_that_do_not_fit_together_are_named() {
    let plain = Plain::random(16, 64, 32, true, Some(8));
    let mut base = File::new();
    plain.insert(&mut base, Q, true, true);
    let ordinary = gptq_config("gptq", 32, true, &json!({"sym": true}));
    let check = |config: &Config, change: &dyn Fn(&mut File), wanted: &[&str]| {
        let mut file = base.clone();
        change(&mut file);
        let (_folder, weights) = weights_of(&file, config).expect("weights");
        let error = weights.weight(Q, 16, 64).expect_err("nonsense").to_string();
        assert!(wanted.iter().all(|part| error.contains(part)), "{error}: wanted {wanted:?}");
        // Whatever is seen without the numbers is refused in the same words.
        if let Err(early) = weights.quantised(Q, 16, 64) {
            assert_eq!(early.to_string(), error);
        }
    };
    let put =
        |part: &'static str, made: Made| move |file: &mut File| drop(file.insert(format!("{Q}.{part}"), made.clone()));
    let remove = |part: &'static str| move |file: &mut File| drop(file.remove(&format!("{Q}.{part}")));
    let groups = |change: &dyn Fn(&mut Vec<u32>)| {
        let mut groups = plain.group_of_input.clone();
        change(&mut groups);
        put("g_idx", i32s(&[64], &groups))
    };
    let half = |bits: u16| {
        let bytes = (0..32).flat_map(|at| (if at == 5 { bits } else { 0x2000 }).to_le_bytes()).collect();
        put("scales", Made { dtype: Dtype::F16, shape: vec![2, 16], bytes })
    };
    check(&ordinary, &remove("qzeros"), &["q_proj.qzeros"]);
    check(&ordinary, &remove("scales"), &["q_proj.scales"]);
    check(&ordinary, &remove("g_idx"), &["q_proj.g_idx", "`desc_act`"]);
    check(&ordinary, &groups(&|groups| groups[3] = 2), &["g_idx", "input 3 is in group 2 of 2"]);
    check(&ordinary, &groups(&|groups| groups[3] = u32::MAX), &["g_idx", "input 3 is in group -1"]);
    check(&ordinary, &groups(&|groups| groups.fill(0)), &["g_idx", "group 0 has 64 inputs, not 32"]);
    check(&ordinary, &put("g_idx", i32s(&[32], &[0; 32])), &["g_idx", "[32]"]);
    check(&ordinary, &put("qweight", i32s(&[8, 8], &[0; 64])), &["qweight", "[8, 8]", "[8, 16]"]);
    check(&ordinary, &put("qweight", f32s(&[8, 16], &[0.0; 128])), &["qweight", "F32"]);
    check(&ordinary, &put("qzeros", i32s(&[2, 3], &[0; 6])), &["qzeros", "[2, 3]"]);
    check(&ordinary, &put("scales", f32s(&[2, 8], &[1.0; 16])), &["scales", "[2, 8]"]);
    check(&ordinary, &put("scales", i32s(&[2, 16], &[1; 32])), &["scales", "I32"]);
    check(&ordinary, &half(0x7e00), &["scales", "element 5 is NaN"]);
    check(&ordinary, &half(0xfc00), &["scales", "element 5 is -inf"]);
    check(&ordinary, &put("weight", f32s(&[16, 64], &[0.0; 1024])), &["qweight", "`weight` beside it"]);
    check(
        &gptq_config("gptq_v2", 32, true, &json!({"sym": true})),
        &|_| {},
        &["qzeros", "zero 0 is 7", "`checkpoint_format`"],
    );
    check(&gptq_config("gptq", 24, true, &json!({})), &|_| {}, &["qweight", "groups of 24 do not divide 64"]);
    check(&gptq_config("gptq", 16, true, &json!({})), &|_| {}, &["qzeros", "[2, 2]", "[4, 2]"]);
    check(&config(&Value::Null), &|_| {}, &["qweight", "no `quantization_config`"]);
    check(&gptq_config("gptq", 32, true, &json!({"dynamic": {"-:.*q_proj": {}}})), &|_| {}, &["qweight", "`dynamic`"]);
    let (_folder, weights) = weights_of(&base, &ordinary).expect("weights");
    let error = weights.weight(Q, 16, 60).expect_err("60 inputs").to_string();
    assert!(error.contains("60 inputs are not a multiple of 8"), "{error}");
    assert!(weights.weight(Q, 12, 64).expect_err("12 outputs").to_string().contains("12 outputs"));
    // A head that is quantised needs the config's word.
    let mut file = File::new();
    plain.insert(&mut file, "lm_head", true, true);
    let (_folder, weights) = weights_of(&file, &ordinary).expect("weights");
    assert!(weights.weight("lm_head", 16, 64).expect_err("not said").to_string().contains("`lm_head`"));
    let said = gptq_config("gptq", 32, true, &json!({"lm_head": true}));
    assert!(weights_of(&file, &said).expect("weights").1.weight("lm_head", 16, 64).is_ok());
}

#[test]
fn quantised_experts() {
    let shape = ExpertsShape { experts: 2, width: 16, hidden: 8 };
    let mut file = File::new();
    for expert in 0..2 {
        for projection in Projection::ALL {
            let [outputs, inputs] = projection.shape(shape);
            let plain = Plain::random(outputs, inputs, 8, false, Some(8));
            plain.insert(&mut file, &format!("{MLP}.experts.{expert}.{}", projection.module()), true, true);
        }
    }
    // Everything else may be left as it is, and unwanted biases are zeros.
    file.insert(format!("{Q}.weight"), bf16(&[8, 8], |_| 0));
    file.insert(format!("{MLP}.experts.1.up_proj.bias"), bf16(&[16], |_| 0x8000));
    let config = gptq_config("gptq", 8, false, &json!({"sym": true, "dynamic": {"-:.*self_attn.*": {}}}));
    let (_folder, weights) = weights_of(&file, &config).expect("weights");
    let Quantization::Gptq(GptqConfig { symmetric: Some(true), .. }) = config.quantization else { panic!("symmetric") };
    let Experts::Gptq(loaded) = experts::load(&weights, MLP, shape).expect("experts") else { panic!("quantised") };
    let all = loaded.quantized_shape(Projection::Up).expect("a shape");
    assert_eq!((all.count, all.n, all.k, all.groups(), all.ordered, all.zero), (2, 16, 8, 1, 0, Some(8)));
    let down = loaded.expert(Projection::Down, 1).expect("a matrix");
    assert_eq!((down.outputs, down.inputs, down.group_size), (8, 16, 8));
    assert_eq!(down.dequantise(), Plain::random(8, 16, 8, false, Some(8)).matrix());
    loaded.release_expert(Projection::Down, 1);
    assert!(matches!(weights.weight(Q, 8, 8), Ok(Weight::Stored(_))));

    let error = |change: &dyn Fn(&mut File)| {
        let mut file = file.clone();
        change(&mut file);
        let (_folder, weights) = weights_of(&file, &config).expect("weights");
        experts::load(&weights, MLP, shape).err().expect("nonsense").to_string()
    };
    let gone = error(&|file| drop(file.remove(&format!("{MLP}.experts.1.gate_proj.qweight"))));
    assert!(gone.contains("1.gate_proj.qweight") && gone.contains("missing"), "{gone}");
    let mixed = error(&|file| {
        file.remove(&format!("{MLP}.experts.1.gate_proj.qweight"));
        file.insert(format!("{MLP}.experts.1.gate_proj.weight"), bf16(&[16, 8], |_| 0));
    });
    assert!(mixed.contains("some experts of its layer are quantised"), "{mixed}");
}
