//! Keys and tensors of small models of every kind, and what is refused.

use super::*;
use crate::experts::Projection;

fn config(more: &str) -> Config {
    let text = format!(
        r#"{{"vocab_size":8,"hidden_size":8,"intermediate_size":12,"num_hidden_layers":2,"num_attention_heads":2,
        "num_key_value_heads":1{more}}}"#
    );
    Config::parse(&text).expect("a config")
}

#[test]
fn every_tensor_of_a_small_model() {
    let model = GgufModel::of(&config(r#","model_type":"qwen2""#), true).expect("known");
    let names: Vec<&str> = model.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names.len(), 2 + 2 * 12);
    assert_eq!(
        names[..5],
        [
            "token_embd.weight",
            "blk.0.attn_norm.weight",
            "blk.0.attn_q.weight",
            "blk.0.attn_q.bias",
            "blk.0.attn_k.weight"
        ]
    );
    assert_eq!(names.last(), Some(&"output_norm.weight"));
    let untied = GgufModel::of(&config(r#","model_type":"llama""#), false).expect("known");
    assert_eq!(untied.tensors.last().map(|tensor| tensor.name.as_str()), Some("output.weight"));
    let q = GgufSource::Interleaved("model.layers.0.self_attn.q_proj.weight".to_string(), 2);
    assert!(untied.tensors.iter().any(|tensor| tensor.source == q));
    assert_eq!([0, 1, 2, 3].map(|row| interleaved_row(row, 4)), [0, 2, 1, 3]);
}

#[test]
fn factors_norms_and_experts_of_other_families() {
    let multipliers =
        r#""attention_multiplier":0.25,"embedding_multiplier":12,"residual_multiplier":0.5,"logits_scaling":6"#;
    let experts = r#""num_local_experts":4,"num_experts_per_tok":2"#;
    let granite = GgufModel::of(&config(&format!(",\"model_type\":\"granitemoe\",{multipliers},{experts}")), true);
    let granite = granite.expect("known");
    let key = |name: &str| granite.keys.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    for (name, value) in
        [("attention.scale", 0.25), ("embedding_scale", 12.0), ("residual_scale", 0.5), ("logit_scale", 6.0)]
    {
        assert_eq!(key(&format!("granitemoe.{name}")), Some(GgufValue::F32(value)), "{name}");
    }
    assert_eq!(key("granitemoe.feed_forward_length"), Some(GgufValue::U32(12)));
    assert_eq!(key("granitemoe.expert_count"), Some(GgufValue::U32(4)));
    let mixtral = GgufModel::of(&config(&format!(",\"model_type\":\"mixtral\",{experts}")), false).expect("known");
    assert_eq!((mixtral.architecture, mixtral.tensors.len()), ("llama", 3 + 2 * 10));
    let olmo = GgufModel::of(&config(r#","model_type":"olmo2""#), false).expect("known");
    let shape = |name: &str| olmo.tensors.iter().find(|tensor| tensor.name == name).map(|tensor| tensor.shape.clone());
    assert_eq!(shape("blk.1.attn_q_norm.weight"), Some(vec![8]));
    assert_eq!(shape("blk.1.attn_k_norm.weight"), Some(vec![4]));
    assert_eq!([shape("blk.1.attn_norm.weight"), shape("blk.1.ffn_norm.weight")], [None, None]);
    assert!(shape("blk.1.post_attention_norm.weight").is_some() && shape("blk.1.post_ffw_norm.weight").is_some());
    let smollm = GgufModel::of(&config(r#","model_type":"smollm3""#), true).expect("known");
    assert_eq!(smollm.tensors.len(), 2 + 2 * 9);
}

#[test]
fn what_llama_cpp_would_compute_differently_is_refused() {
    let experts =
        r#","model_type":"qwen3_moe","num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":4,"head_dim":4"#;
    for (more, wanted) in [
        (r#","model_type":"qwen3","attention_bias":true"#, "biases"),
        (r#","model_type":"qwen3_5_text","head_dim":8"#, "Qwen3.5"),
        (r#","model_type":"gemma2","head_dim":4,"query_pre_attn_scalar":9"#, "1/√4"),
        (
            r#","model_type":"gemma2","head_dim":4,"query_pre_attn_scalar":4,"final_logit_softcapping":null"#,
            "caps the logits",
        ),
        (
            r#","model_type":"gemma3_text","head_dim":4,"query_pre_attn_scalar":4,"layer_types":["full_attention","full_attention"]"#,
            "expects sliding windows",
        ),
        (
            r#","model_type":"gemma3_text","head_dim":4,"query_pre_attn_scalar":4,"sliding_window":7,"layer_types":["full_attention","sliding_attention"]"#,
            "every n-th",
        ),
        (r#","model_type":"gpt_oss","head_dim":4"#, "no head that is the table"),
        (r#","model_type":"glm","head_dim":8"#, "16 wide together"),
        (r#","model_type":"smollm3","no_rope_layers":[1,0]"#, "rotates other layers"),
        (r#","model_type":"olmo2""#, "no head that is the table"),
        (experts, "norm_topk_prob"),
        (&format!("{experts},\"norm_topk_prob\":true,\"mlp_only_layers\":[0]"), "same kind of MLP"),
    ] {
        let text = format!(
            r#"{{"vocab_size":8,"hidden_size":8,"intermediate_size":12,"num_hidden_layers":2,"num_attention_heads":2,
            "num_key_value_heads":2{more}}}"#
        );
        let error = GgufModel::of(&Config::parse(&text).expect("a config"), true).expect_err(&text).to_string();
        assert!(error.contains(wanted), "{error}");
    }
    assert!(GgufModel::of(&config(&format!("{experts},\"norm_topk_prob\":true")), true).is_ok());
}

/// A config with more keys, and what llama.cpp is told about it.
fn model(more: &str, tied: bool) -> GgufModel {
    GgufModel::of(&config(more), tied).expect("known")
}

fn key(model: &GgufModel, name: &str) -> Option<GgufValue> {
    let name = format!("{}.{name}", model.architecture);
    model.keys.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
}

fn source<'m>(model: &'m GgufModel, name: &str) -> &'m GgufTensor {
    model.tensors.iter().find(|tensor| tensor.name == name).expect(name)
}

#[test]
fn a_window_that_llama_cpp_ignores_limits_the_text() {
    let window = r#","model_type":"qwen2","use_sliding_window":true,"sliding_window":5,"max_window_layers":0"#;
    let limited = model(&format!("{window},\"max_position_embeddings\":16"), true);
    assert_eq!(key(&limited, "context_length"), Some(GgufValue::U32(5)));
    assert!(limited.notes[0].contains("up to 5 tokens"), "{:?}", limited.notes);
    let wide = model(&format!("{window},\"max_position_embeddings\":4"), true);
    assert_eq!((key(&wide, "context_length"), wide.notes.len()), (Some(GgufValue::U32(4)), 0));
}

#[test]
fn gemma_has_windows_caps_and_norms_plus_one() {
    let gemma2 = model(r#","model_type":"gemma2","head_dim":4,"query_pre_attn_scalar":4,"sliding_window":7"#, true);
    for (name, value) in [
        ("attention.sliding_window", GgufValue::U32(7)),
        ("attention.sliding_window_pattern", GgufValue::U32(2)),
        ("attn_logit_softcapping", GgufValue::F32(50.0)),
        ("final_logit_softcapping", GgufValue::F32(30.0)),
    ] {
        assert_eq!(key(&gemma2, name), Some(value), "{name}");
    }
    let norm = GgufSource::PlusOne("model.layers.1.pre_feedforward_layernorm.weight".to_string());
    assert_eq!(source(&gemma2, "blk.1.ffn_norm.weight").source, norm);
    assert!(GgufModel::of(&config(r#","model_type":"gemma2","head_dim":4,"query_pre_attn_scalar":4"#), false).is_err());
    let types = r#""layer_types":["sliding_attention","full_attention"]"#;
    let more = format!(
        r#","model_type":"gemma3_text","head_dim":4,"query_pre_attn_scalar":4,"rope_local_base_freq":50,"sliding_window":7,{types}"#
    );
    let gemma3 = model(&more, true);
    assert_eq!(key(&gemma3, "rope.freq_base_swa"), Some(GgufValue::F32(50.0)));
    assert_eq!(key(&gemma3, "attention.sliding_window_pattern"), Some(GgufValue::U32(2)));
}

#[test]
fn joined_modules_are_one_tensor() {
    let phi = model(r#","model_type":"phi3""#, false);
    assert_eq!(source(&phi, "blk.0.attn_qkv.weight").shape, [16, 8]);
    assert_eq!(source(&phi, "blk.0.ffn_up.weight").shape, [24, 8]);
    assert!(phi.tensors.iter().all(|tensor| !tensor.name.contains("ffn_gate")));
    let glm = model(r#","model_type":"glm4","head_dim":4"#, false);
    // Its rows are neighbours already.
    assert_eq!(source(&glm, "blk.0.attn_q.bias").source, tensor("model.layers.0.self_attn.q_proj.bias"));
    assert_eq!((glm.architecture, key(&glm, "rope.dimension_count")), ("glm4", Some(GgufValue::U32(2))));
    assert_eq!(model(r#","model_type":"glm","head_dim":4"#, false).architecture, "chatglm");
}

#[test]
fn experts_of_gpt_oss_take_turns() {
    let experts = r#""num_local_experts":4,"num_experts_per_tok":2"#;
    let oss = model(&format!(r#","model_type":"gpt_oss","head_dim":4,{experts}"#), false);
    let up = &source(&oss, "blk.0.ffn_up_exps.weight").source;
    assert!(matches!(up, GgufSource::Experts { projection: Projection::Up, alternating: true, .. }), "{up:?}");
    let bias = "model.layers.0.mlp.experts.gate_up_proj_bias".to_string();
    assert_eq!(source(&oss, "blk.0.ffn_up_exps.bias").source, GgufSource::Every { name: bias, step: 2, at: 1 });
    assert_eq!(source(&oss, "blk.1.attn_sinks.weight").source, tensor("model.layers.1.self_attn.sinks"));
    let norm = &source(&oss, "blk.1.post_attention_norm.weight").source;
    assert_eq!(*norm, tensor("model.layers.1.post_attention_layernorm.weight"));
    assert!(oss.notes.iter().any(|note| note.contains("`truncate`")), "{:?}", oss.notes);
}

#[test]
fn latent_attention_is_split_and_takes_few_adapters() {
    let yarn = r#""rope_scaling":{"type":"yarn","factor":40,"original_max_position_embeddings":4096,"mscale":1.0,
        "mscale_all_dim":1.0,"beta_fast":1,"beta_slow":1}"#;
    let text = format!(
        r#"{{"model_type":"deepseek_v3","vocab_size":8,"hidden_size":8,"intermediate_size":12,"num_hidden_layers":2,
        "num_attention_heads":2,"num_key_value_heads":2,"q_lora_rank":6,"kv_lora_rank":5,"qk_nope_head_dim":4,
        "qk_rope_head_dim":2,"v_head_dim":3,"first_k_dense_replace":1,"n_routed_experts":8,"num_experts_per_tok":2,
        "moe_intermediate_size":4,"n_group":4,"topk_group":2,{yarn}}}"#
    );
    let of = |text: &str| GgufModel::of(&Config::parse(text).expect("a config"), false);
    let latent = of(&text).expect("known");
    for (name, value) in [
        ("attention.head_count_kv", GgufValue::U32(1)),
        ("attention.key_length", GgufValue::U32(7)),
        ("attention.key_length_mla", GgufValue::U32(6)),
        ("attention.value_length_mla", GgufValue::U32(3)),
        ("leading_dense_block_count", GgufValue::U32(1)),
        ("expert_gating_func", GgufValue::U32(2)),
        ("expert_group_count", GgufValue::U32(4)),
        ("rope.scaling.yarn_log_multiplier", GgufValue::F32(0.1)),
    ] {
        assert_eq!(key(&latent, name), Some(value), "{name}");
    }
    assert!(latent.notes[0].contains("--yarn-beta-fast 1"), "{:?}", latent.notes);
    let keys = source(&latent, "blk.1.attn_k_b.weight");
    assert_eq!((&keys.shape[..], keys.adapted), (&[2, 5, 4][..], false));
    assert!(matches!(&keys.source, GgufSource::HeadRows { rows, transposed: true, .. } if *rows == (0..4)));
    assert_eq!(
        source(&latent, "blk.1.exp_probs_b.bias").source,
        tensor("model.layers.1.mlp.gate.e_score_correction_bias")
    );
    assert!(source(&latent, "blk.1.attn_output.weight").adapted && !source(&latent, "blk.1.attn_q_a.weight").adapted);
    for (from, to, wanted) in [
        ("\"mscale\":1.0", "\"mscale\":0.5", "mscale_all_dim"),
        ("\"q_lora_rank\":6", "\"q_lora_rank\":6,\"rope_interleave\":false", "rope_interleave"),
        ("\"q_lora_rank\":6", "\"q_lora_rank\":6,\"rms_norm_eps\":1e-5", "rms_norm_eps"),
    ] {
        let error = of(&text.replacen(from, to, 1)).expect_err(wanted).to_string();
        assert!(error.contains(wanted), "{error}");
    }
}
