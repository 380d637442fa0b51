//! `docs/models.md`: model families and what each supports, taken from the loader.

use super::{NOTICE, Table, code};
use isobit_models::{FamilySupport, families};

const OPENING: &str = "\
# Models

What `isobit models` lists. Every family trains with LoRA, in full, or its last blocks, from
float32, bfloat16 or float16 weights, and generates with a cache; 4-bit bases train with LoRA only.
*Expert tensors* are names for `lora_target_parameters`; where *per expert* is set,
`lora_target_modules` may name the modules of every expert instead.
";

pub(super) fn page() -> String {
    let heads = ["family", "model_type", "attention", "MLP", "LoRA modules", "expert tensors", "per expert"];
    let formats = ["GPTQ, AWQ 4-bit", "FP8", "MXFP4", "tied head", "balance loss"];
    let mut table = Table::new(&[&heads[..], &formats].concat());
    for family in families() {
        let FamilySupport { name, attention, mlp, .. } = &family;
        let all_linear = family.lora_all_linear.then(|| "all-linear".to_string());
        let modules: Vec<String> = all_linear.into_iter().chain(family.lora_modules.clone()).collect();
        let flags = [family.gptq_4bit, family.fp8, family.mxfp4, family.tied_head, family.balance_loss];
        let mut row = vec![name.to_string(), codes(&family.model_types), attention.join(", "), mlp.join(", ")];
        row.extend([codes(&modules), codes(&family.lora_expert_parameters), codes(&family.lora_per_expert_modules)]);
        row.extend(flags.map(|flag| if flag { "yes" } else { "" }.to_string()));
        table.row(&row);
    }
    format!("{NOTICE}\n{OPENING}\n{}", table.0)
}

fn codes<S: AsRef<str>>(names: &[S]) -> String {
    names.iter().map(|name| code(name.as_ref())).collect::<Vec<_>>().join(", ")
}
