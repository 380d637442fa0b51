//! Keys of other trainers that have no counterpart here: for each, in one line, why it is not
//! needed or what replaces it.

/// Names, and what to tell somebody who writes one of them.
const KEYS: &[(&[&str], &str)] = &[
    (
        &["bf16", "fp16", "tf32", "torch_dtype", "dtype", "mixed_precision", "bf16_full_eval", "fp16_full_eval"],
        "not needed: weights are read as they are stored, and the arithmetic is the same everywhere; remove this line",
    ),
    (
        &["optim", "optimizer", "optim_args", "optimizer_type"],
        "not needed: the optimizer is AdamW (`adam_beta1`, `adam_beta2`, `adam_epsilon`, `weight_decay`); remove this line",
    ),
    (
        &["load_in_8bit"],
        "not yet: `load_in_4bit` quantises the base to 4 bits; without it, its weights take two bytes each",
    ),
    (
        &["bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "quantization_config"],
        "not needed: `load_in_4bit` has one rule, the same on every device; remove this line",
    ),
    (
        &["deepspeed", "fsdp", "fsdp_config", "ddp_backend", "ddp_find_unused_parameters", "local_rank"],
        "not needed: `device = [\"cuda:0\", \"cuda:1\"]` divides the layers among devices; remove this line",
    ),
    (
        &["gradient_checkpointing_kwargs", "use_reentrant"],
        "not needed: `gradient_checkpointing` is none, selective or full, with the same bits; remove this line",
    ),
    (
        &[
            "flash_attention",
            "flash_attn",
            "use_flash_attention_2",
            "attn_implementation",
            "sdp_attention",
            "xformers_attention",
        ],
        "not needed: there is one attention, the same bits on every device; remove this line",
    ),
    (
        &["torch_compile", "use_liger_kernel", "use_unsloth", "use_cache", "auto_find_batch_size"],
        "not needed: the kernels are built in, and every batch split gives the same weights; remove this line",
    ),
    (
        &["full_determinism", "deterministic", "data_seed"],
        "not needed: every run is deterministic, and `seed` covers the data order too; remove this line",
    ),
    (
        &["logging_dir", "run_name", "wandb_project", "use_wandb", "use_tensorboard"],
        "metrics are always in metrics.jsonl; `report_to` also writes a page (html) or TensorBoard files (tensorboard)",
    ),
    (
        &["push_to_hub", "hub_model_id", "hub_token", "trust_remote_code"],
        "not needed: nothing is uploaded, and no code of a model is run; remove this line",
    ),
    (
        &["resume_from_checkpoint", "overwrite_output_dir"],
        "not a key: `isobit train --resume` continues a run, and no run is overwritten; remove this line",
    ),
    (
        &["remove_unused_columns", "dataset_text_field", "dataset_format", "dataset_type"],
        "not needed: the format is detected from the fields of the rows; remove this line",
    ),
    (&["chat_template"], "put the template into the model folder, as chat_template.jinja"),
    (
        &["task_type", "peft_type", "fan_in_fan_out", "inference_mode"],
        "not needed: it follows from the model; remove this line",
    ),
    (
        &["use_dora", "bias", "lora_bias"],
        "not yet: adapters are LoRA matrices, and whole modules with `modules_to_save`; remove this line",
    ),
];

/// What to tell somebody who writes this key, if it is one of another trainer.
pub(super) fn hint(typed: &str) -> Option<&'static str> {
    KEYS.iter().find(|(names, _)| names.contains(&typed)).map(|(_, hint)| *hint)
}

#[cfg(test)]
mod tests {
    use super::super::key::KEYS as OWN;
    use super::*;

    #[test]
    fn no_key_of_our_own_is_called_foreign() {
        let own: Vec<&str> = OWN.iter().flat_map(|key| key.aliases.iter().copied().chain([key.name])).collect();
        for name in KEYS.iter().flat_map(|(names, _)| names.iter()) {
            assert!(!own.contains(name), "{name}");
        }
    }

    /// A key that a hint recommends exists.
    #[test]
    fn hints_name_keys_that_exist() {
        for (_, hint) in KEYS {
            for name in hint.split('`').skip(1).step_by(2).filter(|name| !name.starts_with("isobit ")) {
                let name = name.split(' ').next().unwrap_or_default();
                assert!(OWN.iter().any(|key| key.name == name), "{name}");
            }
        }
    }
}
