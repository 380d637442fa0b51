//! The model families: one file each, with everything specific to it, listed once below.
//!
//! A family is a value: its `model_type`s, the sizes its files may omit, how a `config.json`
//! becomes layers with the names of their weights, and how PEFT interprets target modules.
//! Everything else in this crate works from these values. `docs/add-a-model.md` walks through one.

mod deepseek_v3;
mod gemma2;
mod gemma3;
mod glm4;
mod glm4_moe;
mod gpt_oss;
mod granite;
mod granite_moe;
mod kimi_k2;
mod llama;
mod mistral;
mod mixtral;
mod olmo;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod qwen3_vl;
mod smollm3;
mod support;

pub use crate::peft_rules::PeftRules;
pub use support::{FamilySupport, families};

use crate::ModelError;
use crate::config::NormStyle;
use crate::config::fields::{Fields, wrong};
use crate::config::text::{Implied, Layers, SizeDefaults, TextConfig};
use crate::gguf::GgufRules;
use isobit_proof::name::quoted;

/// Every family, in the order in which messages and `isobit models` list them.
static FAMILIES: &[&Family] = &[
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &llama::FAMILY,
    &mistral::FAMILY,
    &smollm3::FAMILY,
    &granite::FAMILY,
    &olmo::OLMO2,
    &olmo::OLMO3,
    &phi3::FAMILY,
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &glm4::FAMILY,
    &glm4::FIRST,
    &qwen3_vl::DENSE,
    &qwen3_moe::FAMILY,
    &mixtral::FAMILY,
    &granite_moe::FAMILY,
    &gpt_oss::FAMILY,
    &glm4_moe::FAMILY,
    &qwen3_vl::MOE,
    &qwen3_next::FAMILY,
    &qwen3_5::FAMILY,
    &qwen3_5_moe::FAMILY,
    &deepseek_v3::FAMILY,
    &kimi_k2::FAMILY,
];

/// Everything specific to a family.
pub struct Family {
    /// Its common name.
    pub name: &'static str,
    /// Accepted values of `model_type` in its `config.json`.
    pub model_types: &'static [&'static str],
    /// Those whose file may describe the text model in `text_config`, next to other parts.
    pub multimodal_types: &'static [&'static str],
    /// What its files call parts of our names: ours, then theirs.
    pub(crate) file_names: &'static [(&'static str, &'static str)],
    pub(crate) defaults: SizeDefaults,
    pub(crate) implied: Implied,
    pub(crate) norm: NormStyle,
    /// Reads the layers, or returns why such a model cannot be built.
    pub(crate) layers: fn(&TextConfig) -> Result<Layers, ModelError>,
    /// Whether there is a load-balancing loss for its routers.
    pub(crate) balance_loss: bool,
    pub(crate) prediction: Prediction,
    pub(crate) peft: PeftRules,
    /// What it is to llama.cpp, if it is written as GGUF.
    pub(crate) gguf: Option<GgufRules>,
}

/// Parts of a family's files that only predict further tokens and are not read.
#[derive(Clone, Copy)]
pub(crate) struct Prediction {
    /// Layers after the last, if the config does not state how many.
    pub(crate) layers: usize,
    /// Whether `mtp.…` may be present without being mentioned in the config.
    pub(crate) module: bool,
}

impl Prediction {
    const NONE: Self = Self { layers: 0, module: false };
    const MODULE: Self = Self { layers: 0, module: true };
}

impl Family {
    /// The modules to name as LoRA targets; none if all linear modules are available.
    pub fn lora_modules(&self) -> Option<&'static [&'static str]> {
        match self.peft {
            PeftRules::Plain => None,
            PeftRules::FusesExperts { modules, .. } => Some(modules),
        }
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl std::fmt::Debug for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

fn unknown(what: String) -> ModelError {
    ModelError::Family { file: "config.json".to_string(), what }
}

fn of_type(model_type: &str) -> Result<&'static Family, ModelError> {
    let found = FAMILIES.iter().find(|family| family.model_types.contains(&model_type));
    found.copied().ok_or_else(|| {
        let known: Vec<&str> = FAMILIES.iter().flat_map(|family| family.model_types).copied().collect();
        unknown(format!("model_type {} is not one of {}", quoted(model_type), known.join(", ")))
    })
}

/// The family of a `config.json`, and the part of the file that describes the text model if it is
/// not the whole.
pub(crate) fn of_file(outer: Fields<'_>) -> Result<(&'static Family, Option<Fields<'_>>), ModelError> {
    let model_type = outer.text("model_type")?;
    let Some(inner) = outer.object("text_config")? else { return Ok((of_type(model_type)?, None)) };
    let Some(&family) = FAMILIES.iter().find(|family| family.multimodal_types.contains(&model_type)) else {
        return Err(unknown(format!(
            "model_type {} has a `text_config`, but is not a known multimodal model",
            quoted(model_type)
        )));
    };
    match inner.optional_text("model_type")? {
        Some(text_type) if of_type(text_type)? != family => {
            Err(wrong(format!("model_type {} holds a text model of type {}", quoted(model_type), quoted(text_type))))
        }
        _ => Ok((family, Some(inner))),
    }
}

#[cfg(test)]
mod tests {
    const PAGE: &str = include_str!("../../../../docs/add-a-model.md");
    const FILES: [&str; 2] = [include_str!("qwen3_moe.rs"), include_str!("mod.rs")];

    /// Every code block on the page appears in one of the files that it walks through, and all of
    /// the family's file except its opening and its imports appears on the page.
    #[test]
    fn the_page_about_adding_a_family_shows_its_files() {
        let pieces: Vec<&str> =
            PAGE.split("```rust\n").skip(1).filter_map(|rest| Some(rest.split_once("```")?.0)).collect();
        for piece in &pieces {
            assert!(FILES.iter().any(|file| file.contains(piece)), "{piece}");
        }
        let (_, body) = FILES[0].split_once("pub(super) static").expect("the family's value");
        for line in body.lines().skip(1).filter(|line| !line.is_empty()) {
            assert!(pieces.iter().any(|piece| piece.lines().any(|shown| shown == line)), "{line}");
        }
    }
}
