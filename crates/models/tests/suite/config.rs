//! Configs of published models, what the classes leave out, and files that say nonsense: named
//! errors, never a panic.

use isobit_models::Config;
use isobit_models::config::{
    AttentionConfig, AttentionKind, DeltaProjections, ExpertsConfig, Fp8Config, GptqFormat, LatentConfig, MlpKind,
    NormStyle, Quantization, Rotary, Scoring,
};
use isobit_numerics::rope::RopeScaling;
use serde_json::{Value, json};

const SEPARATE: DeltaProjections =
    DeltaProjections::Separate { qkv: "in_proj_qkv", z: "in_proj_z", b: "in_proj_b", a: "in_proj_a" };

fn parse(value: &Value) -> Config {
    Config::parse(&value.to_string()).expect("a config")
}

fn refused(value: &Value) -> String {
    Config::parse(&value.to_string()).expect_err("nonsense").to_string()
}

fn qwen3_moe() -> Value {
    json!({"model_type": "qwen3_moe", "attention_bias": false, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": false,
        "max_position_embeddings": 40960, "max_window_layers": 48, "rope_theta": 1e6, "rope_scaling": null,
        "sliding_window": null, "use_sliding_window": false, "tie_word_embeddings": false, "vocab_size": 151_936,
        "rms_norm_eps": 1e-6})
}

fn qwen35_moe() -> Value {
    let types: Vec<&str> = (1..=40).map(|n| if n % 4 == 0 { "full_attention" } else { "linear_attention" }).collect();
    json!({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "image_token_id": 248_056, "tie_word_embeddings": false, "vision_config": {"depth": 27, "hidden_size": 1152},
        "text_config": {"model_type": "qwen3_5_moe_text", "vocab_size": 248_320, "hidden_size": 2048,
            "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256,
            "max_position_embeddings": 262_144, "layer_types": types, "attn_output_gate": true,
            "full_attention_interval": 4, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                "mrope_interleaved": true, "mrope_section": [11, 11, 10]}}})
}

fn deepseek() -> Value {
    json!({"model_type": "deepseek_v3", "max_position_embeddings": 163_840, "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1,
        "num_nextn_predict_layers": 1, "n_group": 8, "topk_group": 4, "q_lora_rank": 1536,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128]}})
}

/// Numbers of all tensors that the config asks for.
fn parameters(config: &Config) -> usize {
    let h = config.hidden;
    let attention = |attention: &AttentionKind| match attention {
        AttentionKind::Softmax(a) => {
            let norms = if a.head_norms { a.norm_widths().iter().sum() } else { 0 };
            let bias = if a.qkv_bias { a.query_rows() + 2 * a.kv_rows() } else { 0 };
            let bias = bias + if a.output_bias { h } else { 0 } + if a.sinks { a.heads } else { 0 };
            h * (a.query_rows() + 2 * a.kv_rows() + a.output_width()) + norms + bias
        }
        AttentionKind::Latent(l) => {
            let query = l.query_rank.map_or(h * l.query_rows(), |rank| rank * (h + 1 + l.query_rows()));
            query + h * l.kv_a_rows() + l.kv_rank * (1 + l.kv_b_rows()) + h * l.output_width()
        }
        AttentionKind::Delta(d) => {
            let projections = h * (d.channels() + d.values() + 2 * d.value_heads) + d.values() * h;
            projections + d.channels() * d.kernel + 2 * d.value_heads + d.value_width
        }
    };
    let mlp = |mlp: &MlpKind| match mlp {
        MlpKind::Dense { width, .. } => 3 * h * width,
        MlpKind::Experts(e) => {
            let shared = e.shared.map_or(0, |shared| 3 * h * shared.width + if shared.gate.is_some() { h } else { 0 });
            let router_biases = usize::from(e.correction_bias.is_some()) + usize::from(e.router_bias);
            let biases = router_biases + if e.biases { h + 2 * e.width } else { 0 };
            e.experts * (h + 3 * h * e.width + biases) + shared
        }
    };
    let ends = config.vocabulary * h * if config.tied { 1 } else { 2 } + h;
    ends + config
        .layers
        .iter()
        .map(|layer| attention(&layer.attention) + mlp(&layer.mlp) + layer.names.norms().count() * h)
        .sum::<usize>()
}

fn attention(config: &Config, layer: usize) -> &AttentionConfig {
    match &config.layers[layer].attention {
        AttentionKind::Softmax(attention) => attention,
        other => panic!("{other:?}"),
    }
}

fn experts(config: &Config, layer: usize) -> &ExpertsConfig {
    match &config.layers[layer].mlp {
        MlpKind::Experts(experts) => experts,
        other @ MlpKind::Dense { .. } => panic!("{other:?}"),
    }
}

/// The width of an MLP that must be dense, without biases.
fn dense_width(mlp: &MlpKind) -> usize {
    match mlp {
        MlpKind::Dense { width, bias: false, .. } => *width,
        other => panic!("{other:?}"),
    }
}

fn latent(config: &Config) -> &LatentConfig {
    match &config.layers[0].attention {
        AttentionKind::Latent(latent) => latent,
        other => panic!("{other:?}"),
    }
}

/// A published model by its sizes: vocabulary, hidden, intermediate, layers, heads, key heads.
fn sized(model_type: &str, [v, h, i, l, n, k]: [usize; 6], more: &Value) -> Value {
    let mut config = json!({"model_type": model_type, "vocab_size": v, "hidden_size": h, "intermediate_size": i,
        "num_hidden_layers": l, "num_attention_heads": n, "num_key_value_heads": k});
    for (key, value) in more.as_object().expect("keys") {
        config[key] = value.clone();
    }
    config
}

/// Numbers of parameters as their publishers state them.
#[test]
fn published_sizes_of_further_families() {
    let tied = json!({"tie_word_embeddings": true});
    for (config, wanted) in [
        (sized("mistral", [32000, 4096, 14336, 32, 32, 8], &json!({"sliding_window": 4096})), 7_241_732_096),
        (sized("mixtral", [32000, 4096, 14336, 32, 32, 8], &json!({"num_local_experts": 8})), 46_702_792_704),
        (sized("smollm3", [128_256, 2048, 11008, 36, 16, 4], &json!({})), 3_075_098_624),
        (sized("granite", [49155, 2048, 8192, 40, 32, 8], &tied), 2_533_531_648),
        (sized("olmo2", [100_352, 4096, 11008, 32, 32, 32], &json!({})), 7_298_617_344),
        (sized("phi3", [32064, 3072, 8192, 32, 32, 32], &json!({})), 3_821_079_552),
        (sized("gemma2", [256_000, 2304, 9216, 26, 8, 4], &json!({})), 2_614_341_888),
        (sized("gemma3_text", [262_144, 1152, 6912, 26, 4, 1], &json!({})), 999_885_952),
        (sized("gpt_oss", [201_088, 2880, 2880, 24, 64, 8], &json!({"num_local_experts": 32})), 20_914_757_184),
        (json!({"model_type": "gpt_oss"}), 116_829_156_672),
        (sized("glm4", [151_552, 4096, 13696, 40, 32, 2], &json!({"head_dim": 128})), 9_400_279_040),
    ] {
        assert_eq!(parameters(&parse(&config)), wanted, "{config}");
    }
}

#[test]
fn what_further_families_leave_out() {
    let small = |model_type: &str| json!({"model_type": model_type, "hidden_size": 128, "num_hidden_layers": 4});
    let mistral = parse(&small("mistral"));
    assert_eq!(attention(&mistral, 3).window, Some(4096));
    let mut open = small("mistral");
    open["sliding_window"] = Value::Null;
    assert_eq!(attention(&parse(&open), 3).window, None);
    // Every other layer of gpt-oss has a window, and a silent file has YaRN.
    let gpt_oss = parse(&small("gpt_oss"));
    assert_eq!([0, 1, 2].map(|layer| attention(&gpt_oss, layer).window), [Some(128), None, Some(128)]);
    let RopeScaling::Yarn(yarn) = gpt_oss.rope_scaling else { panic!("{:?}", gpt_oss.rope_scaling) };
    assert_eq!((yarn.factor, yarn.truncate, gpt_oss.rope_theta), (32.0, false, 150_000.0));
    let mut plain = small("gpt_oss");
    plain["rope_scaling"] = json!({"rope_type": "default"});
    plain["sliding_window"] = Value::Null;
    let plain = parse(&plain);
    assert_eq!((attention(&plain, 0).window, plain.rope_scaling), (None, RopeScaling::Default));
    let smollm3 = parse(&small("smollm3"));
    let rotary = |config: &Config, layer: usize| attention(config, layer).rotary;
    assert_eq!([2, 3].map(|layer| rotary(&smollm3, layer)), [Rotary::Global, Rotary::None]);
    assert_eq!((smollm3.tied, smollm3.rope_theta), (true, 2e6));
    let olmo3 = parse(&small("olmo3"));
    assert_eq!([2, 3].map(|layer| rotary(&olmo3, layer)), [Rotary::Local, Rotary::Global]);
    assert_eq!([2, 3].map(|layer| attention(&olmo3, layer).window), [Some(4096), None]);
    assert_eq!(olmo3.local_rotation.map(|local| local.theta), Some(5e5));
}

#[test]
fn published_mixture_of_experts() {
    let config = parse(&qwen3_moe());
    assert_eq!(parameters(&config), 30_532_122_624);
    assert_eq!((config.norm, config.layers.len(), config.rotary_width), (NormStyle::Plain, 48, 128));
    let a = attention(&config, 47);
    assert!(a.head_norms && !a.gated && !a.qkv_bias && !a.output_bias && a.window.is_none());
    let e = experts(&config, 0);
    assert_eq!((e.experts, e.chosen, e.width, e.renormalise, e.scoring), (128, 8, 768, true, Scoring::Softmax));
    assert_eq!((e.shared, e.groups, e.kept_groups, e.scale, e.correction_bias), (None, 1, 1, 1.0, None));
    assert_eq!((config.balance, config.wrapped), (None, false));
    assert_eq!(config.module_path("model.layers.0.mlp"), "model.layers.0.mlp");
}

#[test]
fn the_class_fills_in_what_a_mixture_leaves_out() {
    let config = parse(&json!({"model_type": "qwen3_moe", "output_router_logits": true}));
    assert_eq!((config.vocabulary, config.hidden, config.layers.len()), (151_936, 2048, 24));
    assert_eq!((config.balance, config.eps, config.max_positions, config.rope_theta), (Some(0.001), 1e-6, 32768, 1e4));
    assert!(!experts(&config, 0).renormalise, "the class divides by the sum only when told");
    assert_eq!(attention(&config, 0).head_width, 64, "hidden over heads: the class has no default");
    let sparse = |extra: &[(&str, Value)]| {
        let mut value = json!({"model_type": "qwen3_moe", "num_hidden_layers": 6});
        for (key, entry) in extra {
            value[*key] = entry.clone();
        }
        let config = parse(&value);
        config.layers.iter().map(|layer| matches!(layer.mlp, MlpKind::Experts(_))).collect::<Vec<_>>()
    };
    assert_eq!(sparse(&[("decoder_sparse_step", json!(2))]), [false, true, false, true, false, true]);
    assert_eq!(sparse(&[("mlp_only_layers", json!([0, 5]))]), [false, true, true, true, true, false]);
    assert_eq!(sparse(&[("num_experts", json!(0))]), [false; 6]);
    let config = parse(&json!({"model_type": "qwen3_moe", "num_experts": 0}));
    assert_eq!(dense_width(&config.layers[0].mlp), 6144);
    let windowed =
        json!({"model_type": "qwen3_moe", "use_sliding_window": true, "sliding_window": 7, "max_window_layers": 9});
    assert!((0..24).all(|layer| attention(&parse(&windowed), layer).window == Some(7)), "no split by layers");
    assert_eq!(experts(&parse(&json!({"model_type": "qwen3_moe", "num_local_experts": 16})), 0).experts, 16);
}

#[test]
fn published_hybrid() {
    let config = parse(&qwen35_moe());
    assert_eq!(parameters(&config), 34_660_610_688);
    assert_eq!((config.norm, config.wrapped, config.rotary_width), (NormStyle::ZeroCentred, true, 64));
    assert_eq!((config.rope_theta, &config.rope_scaling), (1e7, &RopeScaling::Default));
    assert_eq!(config.module_path("model.layers.3.self_attn"), "model.language_model.layers.3.self_attn");
    assert_eq!(config.module_path("lm_head"), "lm_head");
    let full = |config: &Config| -> Vec<usize> {
        let of = |(n, layer): (usize, &isobit_models::config::LayerConfig)| {
            matches!(layer.attention, AttentionKind::Softmax(_)).then_some(n)
        };
        config.layers.iter().enumerate().filter_map(of).collect()
    };
    assert_eq!(full(&config), (0..10).map(|n| 4 * n + 3).collect::<Vec<_>>());
    let a = attention(&config, 3);
    assert_eq!((a.query_rows(), a.kv_rows(), a.output_width(), a.scale), (8192, 512, 4096, 0.0625));
    assert!(a.gated && a.head_norms);
    let AttentionKind::Delta(delta) = &config.layers[0].attention else { panic!("linear attention") };
    assert_eq!((delta.channels(), delta.values(), delta.projections), (8192, 4096, SEPARATE));
    let e = experts(&config, 0);
    assert_eq!((e.experts, e.chosen, e.renormalise), (256, 8, true));
    let shared = e.shared.expect("a shared expert");
    assert_eq!((shared.module, shared.width, shared.gate), ("shared_expert", 512, Some("shared_expert_gate")));

    // The same from the class's defaults, and without the wrapper.
    let bare = parse(&json!({"model_type": "qwen3_5_moe_text"}));
    assert_eq!((bare.layers == config.layers, bare.wrapped, bare.rope_theta), (true, false, 1e4));
    assert_eq!(parameters(&bare), 34_660_610_688);
    assert!(!parse(&json!({"model_type": "qwen3_5_moe"})).wrapped);
    let mut other = qwen35_moe();
    other["text_config"]["layer_types"] = Value::Null;
    other["text_config"]["full_attention_interval"] = json!(5);
    assert_eq!(full(&parse(&other)), (0..8).map(|n| 5 * n + 4).collect::<Vec<_>>());
    assert_eq!(dense_width(&parse(&json!({"model_type": "qwen3_5_text"})).layers[0].mlp), 12288);
    let tied = json!({"model_type": "qwen3_5", "tie_word_embeddings": true, "text_config": {"hidden_size": 1024}});
    assert_eq!((parse(&tied).tied, parse(&tied).hidden), (true, 1024));
}

#[test]
fn the_ancestor_of_the_hybrids() {
    let config = parse(&json!({"model_type": "qwen3_next", "mlp_only_layers": [1]}));
    assert_eq!((config.vocabulary, config.layers.len(), config.norm), (151_936, 48, NormStyle::ZeroCentred));
    let e = experts(&config, 0);
    assert_eq!((e.experts, e.chosen, e.width, e.renormalise), (512, 10, 512, true));
    assert_eq!(dense_width(&config.layers[1].mlp), 5632);
    let AttentionKind::Delta(delta) = &config.layers[0].attention else { panic!("linear attention") };
    assert_eq!(delta.projections, DeltaProjections::Joined { qkvz: "in_proj_qkvz", ba: "in_proj_ba" });
    assert_eq!((attention(&config, 3).rotary_width, attention(&config, 3).gated), (64, true));
}

#[test]
fn published_latent_attention() {
    let config = parse(&deepseek());
    assert_eq!((config.layers.len(), config.vocabulary, config.hidden, config.rotary_width), (61, 129_280, 7168, 64));
    let l = latent(&config);
    assert_eq!((l.query_rank, l.kv_rank, l.key_width(), l.value_width), (Some(1536), 512, 192, 128));
    assert_eq!((l.query_rows(), l.kv_a_rows(), l.kv_b_rows(), l.output_width()), (24576, 576, 32768, 16384));
    assert!(l.interleaved && !l.bias);
    assert!((f64::from(l.scale) - 0.135_233_78).abs() < 1.5e-8, "{}", l.scale);
    assert_eq!(dense_width(&config.layers[2].mlp), 18432);
    let e = experts(&config, 3);
    assert_eq!((e.experts, e.chosen, e.width, e.groups, e.kept_groups), (256, 8, 2048, 8, 4));
    assert_eq!((e.scoring, e.scale, e.renormalise, e.correction_bias.is_some()), (Scoring::Sigmoid, 2.5, true, true));
    let shared = e.shared.expect("a shared expert");
    assert_eq!((shared.module, shared.width, shared.gate), ("shared_experts", 2048, None));
    assert_eq!(config.quantization, Quantization::Fp8(Fp8Config { block: [128, 128] }));
    assert_eq!((config.prediction_layers, config.balance), (1, None));

    let plain = parse(&json!({"model_type": "deepseek_v3", "q_lora_rank": null, "n_shared_experts": 2}));
    assert_eq!((latent(&plain).query_rank, plain.max_positions), (None, 4096));
    assert_eq!(latent(&plain).scale, (1.0 / 192f64.sqrt()) as f32);
    assert_eq!(experts(&plain, 3).shared.map(|shared| shared.width), Some(4096));
    assert_eq!(experts(&parse(&json!({"model_type": "deepseek_v3", "n_shared_experts": null})), 3).shared, None);
}

#[test]
fn awq_is_read_in_its_one_packing() {
    let awq = |key: &str, value: Value| {
        let mut settings = json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true,
            "version": "gemm", "modules_to_not_convert": null});
        settings[key] = value;
        json!({"model_type": "qwen3_moe", "quantization_config": settings})
    };
    for version in ["gemm", "GEMM"] {
        let Quantization::Gptq(read) = parse(&awq("version", json!(version))).quantization else { panic!("awq") };
        assert_eq!((read.group_size, read.format, read.format.method()), (Some(128), GptqFormat::Awq, "awq"));
        assert_eq!((read.symmetric, read.desc_act, read.lm_head, read.excluded), (None, false, false, Vec::new()));
    }
    let excluded = awq("modules_to_not_convert", json!(["mlp.gate", "model.layers.0."]));
    let Quantization::Gptq(read) = parse(&excluded).quantization else { panic!("awq") };
    let excludes = |path: &str| {
        read.excluded
            .iter()
            .any(|pattern| regex::Regex::new(&format!("^(?:{pattern})")).expect("a pattern").is_match(path))
    };
    assert!(excludes("model.layers.7.mlp.gate") && excludes("model.layers.0.self_attn.q_proj"));
    assert!(!excludes("model.layers.7.mlp.gate_proj") && !excludes("model.layers.10.self_attn.q_proj"));
    for (key, value, wanted) in [
        ("bits", json!(8), "only AWQ with 4 bits"),
        ("version", json!("gemv"), "`version` is \"gemv\": only AWQ's packing \"gemm\""),
        ("format", json!("gemv_fast"), "`format` is \"gemv_fast\""),
        ("version", json!("marlin"), "\"marlin\""),
        ("backend", json!("llm-awq"), "`backend` is \"llm-awq\""),
        ("zero_point", json!(false), "`zero_point` is false"),
        ("group_size", Value::Null, "`group_size` is missing"),
        ("modules_to_not_convert", json!("lm_head"), "not a list of names"),
        ("modules_to_not_convert", json!([1]), "not a list of names"),
    ] {
        let error = refused(&awq(key, value));
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn quantisation_is_read_from_both_places() {
    let text = json!({"model_type": "qwen3_moe"}).to_string();
    let beside = json!({"bits": 4, "group_size": 128, "desc_act": true, "sym": false, "checkpoint_format": "gptq_v2",
        "dynamic": {"-:.*mlp\\.gate$": {}, "+:.*": {}}, "lm_head": true})
    .to_string();
    let config = Config::parse_with(&text, Some(&beside)).expect("a config");
    let Quantization::Gptq(gptq) = config.quantization else { panic!("gptq") };
    assert_eq!((gptq.group_size, gptq.desc_act, gptq.symmetric), (Some(128), true, Some(false)));
    assert_eq!(
        (gptq.format, gptq.lm_head, &gptq.excluded[..]),
        (GptqFormat::V2, true, &[".*mlp\\.gate$".to_string()][..])
    );

    let inside = |quantization: Value| json!({"model_type": "qwen2_5_text", "quantization_config": quantization});
    let moe = |quantization: Value| {
        let mut value = inside(quantization);
        value["model_type"] = json!("qwen3_moe");
        value
    };
    let config = parse(&moe(json!({"quant_method": "gptq", "bits": 4, "group_size": -1})));
    let Quantization::Gptq(gptq) = config.quantization else { panic!("gptq") };
    assert_eq!((gptq.group_size, gptq.format, gptq.symmetric), (None, GptqFormat::V1, None));
    let gptq = |key: &str, value: Value| {
        let mut settings = json!({"quant_method": "gptq", "bits": 4, "group_size": 64});
        settings[key] = value;
        refused(&moe(settings))
    };
    for (key, value, wanted) in [
        ("bits", json!(8), "`bits` is 8"),
        ("bits", Value::Null, "`bits` is missing"),
        ("group_size", json!(12), "multiple of 8"),
        ("group_size", json!(0), "`group_size` is 0"),
        ("group_size", Value::Null, "`group_size` is missing"),
        ("checkpoint_format", json!("marlin"), "`checkpoint_format` is \"marlin\""),
        ("pack_dtype", json!("int64"), "`pack_dtype`"),
        ("desc_act", json!("yes"), "`desc_act` is \"yes\""),
        ("dynamic", json!({"+:.*down.*": {"bits": 8}}), "changes how a module is quantised"),
        ("dynamic", json!({"-:(": {}}), "`dynamic` `-:(`"),
        ("dynamic", json!(7), "`dynamic` is 7"),
        ("quant_method", json!("hqq"), "`quant_method` `hqq`"),
        ("quant_method", json!(null), "`quant_method` is missing"),
    ] {
        let error = gptq(key, value);
        assert!(error.contains(wanted), "{error}");
    }
    let both = Config::parse_with(
        &moe(json!({"quant_method": "gptq", "bits": 4, "group_size": 64})).to_string(),
        Some(&beside),
    );
    let error = both.expect_err("two group sizes").to_string();
    assert!(error.contains("quantize_config.json: `group_size` is 128 here and 64 elsewhere"), "{error}");
    let fp8 = |extra: Value| refused(&moe(json!({"quant_method": "fp8", "weight_block_size": extra})));
    assert!(fp8(Value::Null).contains("weight_block_size"));
    assert!(fp8(json!([128])).contains("weight_block_size"));
    assert!(fp8(json!([0, 128])).contains("weight_block_size"));
    assert!(Config::parse_with(&text, Some("{")).expect_err("cut").to_string().contains("quantize_config.json"));
}

#[test]
fn inconsistent_values_are_refused_by_key() {
    let cases = [
        (qwen3_moe(), "/num_experts_per_tok", json!(65), "`num_experts_per_tok` is 65"),
        (qwen3_moe(), "/num_experts", json!(4), "`num_experts_per_tok` is 8, but there are 4"),
        (qwen3_moe(), "/num_local_experts", json!(4), "`num_experts` is 128, but `num_local_experts` is 4"),
        (qwen3_moe(), "/mlp_only_layers", json!([48]), "`mlp_only_layers` names layer 48, but there are 48 layers"),
        (qwen3_moe(), "/mlp_only_layers", json!([-1]), "`mlp_only_layers` holds -1"),
        (qwen3_moe(), "/mlp_only_layers", json!("x"), "`mlp_only_layers` is \"x\", not a list"),
        (qwen3_moe(), "/decoder_sparse_step", json!(0), "`decoder_sparse_step` is 0"),
        (qwen3_moe(), "/moe_intermediate_size", json!(0), "`moe_intermediate_size` is 0"),
        (qwen3_moe(), "/router_aux_loss_coef", json!(-1), "`router_aux_loss_coef` is -1"),
        (qwen3_moe(), "/layer_types", json!(["full_attention"]), "`layer_types` does not have one entry per layer"),
        (qwen3_moe(), "/partial_rotary_factor", json!(0.5), "`partial_rotary_factor`"),
        (qwen3_moe(), "/hidden_act", json!("gelu"), "hidden_act `gelu`"),
        (qwen3_moe(), "/text_config", json!({}), "has a `text_config`"),
        (qwen35_moe(), "/text_config/layer_types/7", json!("sliding_attention"), "layer type \"sliding_attention\""),
        (qwen35_moe(), "/text_config/layer_types", json!([]), "`layer_types` does not have one entry"),
        (qwen35_moe(), "/text_config/rope_parameters/mrope_section", json!([11, 11, 11]), "`mrope_section`"),
        (qwen35_moe(), "/text_config/rope_parameters/mrope_section", json!([16, 16]), "`mrope_section`"),
        (qwen35_moe(), "/text_config/rope_parameters/partial_rotary_factor", json!(0.012), "rotates 3 of 256"),
        (qwen35_moe(), "/text_config/rope_parameters/partial_rotary_factor", json!(1.5), "rotates 384 of 256"),
        (qwen35_moe(), "/text_config/linear_num_value_heads", json!(24), "`linear_num_value_heads` 24"),
        (qwen35_moe(), "/text_config/linear_conv_kernel_dim", json!(9), "`linear_conv_kernel_dim` is 9"),
        (qwen35_moe(), "/text_config/linear_key_head_dim", json!(512), "`linear_key_head_dim` is 512"),
        (qwen35_moe(), "/text_config/shared_expert_intermediate_size", json!(0), "`shared_expert_intermediate_size`"),
        (qwen35_moe(), "/text_config/num_experts", json!(0), "the number of experts is 0"),
        (qwen35_moe(), "/text_config/attn_output_gate", json!(false), "`attn_output_gate`"),
        (qwen35_moe(), "/text_config/tie_word_embeddings", json!(true), "`tie_word_embeddings` is true in"),
        (qwen35_moe(), "/text_config/model_type", json!("qwen3_moe"), "holds a text model of type"),
        (qwen35_moe(), "/text_config", json!(3), "`text_config` is 3"),
        (json!({"model_type": "mistral"}), "/layer_types", json!(vec!["full_attention"; 32]), "disagree"),
        (json!({"model_type": "mixtral"}), "/router_jitter_noise", json!(0.1), "`router_jitter_noise`"),
        (json!({"model_type": "gpt_oss"}), "/swiglu_limit", json!(0), "`swiglu_limit`"),
        (json!({"model_type": "gpt_oss"}), "/swiglu_alpha", json!(1e60), "`swiglu_alpha`"),
        (json!({"model_type": "gpt_oss", "num_local_experts": 3}), "/num_experts_per_tok", json!(4), "there are 3"),
        (json!({"model_type": "gpt_oss"}), "/quantization_config", json!({"quant_method": "fp8"}), "mxfp4"),
        (qwen3_moe(), "/quantization_config", json!({"quant_method": "mxfp4"}), "mxfp4 is not read in this family"),
        (json!({"model_type": "smollm3"}), "/no_rope_layers", json!([1, 0]), "`no_rope_layers`"),
        (
            json!({"model_type": "smollm3", "num_hidden_layers": 1, "sliding_window": 4}),
            "/layer_types",
            json!(["sliding_attention"]),
            "disagree",
        ),
        (json!({"model_type": "granite"}), "/logits_scaling", json!(1e60), "`logits_scaling`"),
        (json!({"model_type": "granite"}), "/residual_multiplier", json!(0), "`residual_multiplier`"),
        (json!({"model_type": "olmo3"}), "/rope_theta", json!(1e4), "`rope_theta` is not 500000"),
        (json!({"model_type": "olmo3"}), "/rope_parameters", json!({"rope_theta": 1e4}), "neither `full_attention`"),
        (json!({"model_type": "olmo2"}), "/rope_parameters", json!({"full_attention": {}}), "differ by layer type"),
        (json!({"model_type": "phi3"}), "/resid_pdrop", json!(0.1), "`resid_pdrop`"),
        (json!({"model_type": "phi3"}), "/rope_scaling", json!({"type": "linear", "factor": 2}), "longrope"),
        (json!({"model_type": "phi3"}), "/rope_scaling", json!({"type": "longrope"}), "`short_factor`"),
        (
            json!({"model_type": "phi3"}),
            "/rope_scaling",
            json!({"type": "longrope", "short_factor": [1], "long_factor": [2]}),
            "1 numbers for 48 rotated pairs",
        ),
        (json!({"model_type": "glm4"}), "/partial_rotary_factor", json!(0.01), "rotates 1 of 128"),
        (json!({"model_type": "glm4_moe", "head_dim": 128}), "/scoring_func", json!("softmax"), "`scoring_func`"),
        (json!({"model_type": "gemma3_text"}), "/attn_logit_softcapping", json!(50), "`attn_logit_softcapping`"),
        (json!({"model_type": "gemma3_text"}), "/use_bidirectional_attention", json!(true), "bidirectional"),
        (json!({"model_type": "gemma3_text"}), "/hidden_activation", json!("gelu"), "hidden_activation `gelu`"),
        (json!({"model_type": "gemma2"}), "/final_logit_softcapping", json!(-1), "`final_logit_softcapping`"),
        (json!({"model_type": "gemma2"}), "/query_pre_attn_scalar", json!(1e-90), "`query_pre_attn_scalar`"),
        (json!({"model_type": "kimi_k2"}), "/hidden_size", json!(7168), "`num_hidden_layers` is missing"),
        (deepseek(), "/n_group", json!(7), "`n_group` 7 does not divide"),
        (deepseek(), "/n_group", json!(33), "`n_group` is 33"),
        (deepseek(), "/topk_group", json!(9), "`topk_group` is 9"),
        (deepseek(), "/n_routed_experts", json!(8), "leaves one expert per group"),
        (deepseek(), "/num_key_value_heads", json!(8), "`num_key_value_heads` is 8"),
        (deepseek(), "/qk_rope_head_dim", json!(63), "`qk_rope_head_dim` 63 is odd"),
        (deepseek(), "/qk_nope_head_dim", json!(200), "add up to 264"),
        (deepseek(), "/scoring_func", json!("softmax"), "`scoring_func`"),
        (deepseek(), "/topk_method", json!("greedy"), "`topk_method`"),
        (deepseek(), "/moe_layer_freq", json!(2), "`moe_layer_freq`"),
        (deepseek(), "/routed_scaling_factor", json!(0), "`routed_scaling_factor`"),
        (deepseek(), "/rms_norm_eps", json!(2), "rms_norm_eps"),
    ];
    for (mut value, place, entry, wanted) in cases {
        let (parent, key) = place.rsplit_once('/').expect("a path");
        match value.pointer_mut(parent).expect("a place") {
            Value::Array(list) => list[key.parse::<usize>().expect("an index")] = entry,
            object => object[key] = entry,
        }
        let error = refused(&value);
        assert!(error.contains(wanted), "{error}: wanted {wanted}");
    }
}

/// Every value of a config, by its path.
fn paths(value: &Value, path: String, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| paths(value, format!("{path}/{key}"), found)),
        Value::Array(list) => {
            list.iter().enumerate().take(4).for_each(|(index, value)| paths(value, format!("{path}/{index}"), found));
        }
        _ => {}
    }
    found.push(path);
}

#[test]
fn strange_values_anywhere_are_errors_or_configs() {
    let strange = [
        json!(null),
        json!(-1),
        json!(0),
        json!(1),
        json!(3),
        json!(64),
        json!(257),
        json!(1e99),
        json!(-1e300),
        json!(0.3),
        json!(u64::MAX),
        json!(1 << 24),
        json!(1 << 30),
        json!("\u{1b}[31m"),
        json!(""),
        json!([]),
        json!([0]),
        json!([16_777_216, 16_777_216]),
        json!({}),
        json!({"a": {}}),
        json!(true),
        json!(false),
    ];
    let gptq = json!({"model_type": "qwen3_moe", "quantization_config": {"quant_method": "gptq", "bits": 4,
        "group_size": 64, "desc_act": false, "sym": true, "dynamic": {"-:x": {}}, "checkpoint_format": "gptq"}});
    let (mut read, mut refused) = (0, 0);
    for base in [qwen3_moe(), qwen35_moe(), deepseek(), gptq] {
        let mut found = Vec::new();
        paths(&base, String::new(), &mut found);
        for path in &found {
            for value in &strange {
                let mut config = base.clone();
                *config.pointer_mut(path).expect("a place") = value.clone();
                match Config::parse(&config.to_string()) {
                    Ok(config) => {
                        assert!(!config.layers.is_empty() && config.rotary_width.is_multiple_of(2));
                        read += 1;
                    }
                    Err(error) => {
                        assert!(!error.to_string().contains(char::is_control), "{error:?}");
                        refused += 1;
                    }
                }
            }
        }
    }
    assert!(read > 300 && refused > 1000, "{read} read, {refused} refused");
}

#[test]
fn damaged_text_is_an_error_or_a_config() {
    let mut state = 7_u64;
    let mut next = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    for base in [qwen3_moe(), qwen35_moe(), deepseek()] {
        let text = base.to_string().into_bytes();
        for _ in 0..4000 {
            let mut damaged = text.clone();
            for _ in 0..=next(3) {
                let position = next(damaged.len());
                damaged[position] = b"{}[]\",:0159eE-+ntf "[next(19)];
            }
            let Ok(damaged) = String::from_utf8(damaged) else { continue };
            let _ = Config::parse(&damaged);
        }
    }
}
