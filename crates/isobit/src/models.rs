//! `isobit models`: model families and what each supports, taken from the loader.

use crate::Failure;
use isobit_models::{FamilySupport, families};
use std::io::Write;

/// Width of a line in columns.
const WIDTH: usize = 100;
/// Columns before the contents of a line.
const INDENT: usize = 15;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let families = families();
    let written = if arguments.json { json(&mut out, &families) } else { table(&mut out, &families) };
    written.and_then(|()| out.flush()).map_err(|error| Failure::output(&error))
}

fn json(out: &mut impl Write, families: &[FamilySupport]) -> std::io::Result<()> {
    writeln!(out, "{}", serde_json::json!({"schema": "isobit.models/1", "families": families}))
}

fn table(out: &mut impl Write, families: &[FamilySupport]) -> std::io::Result<()> {
    for family in families {
        writeln!(out, "{}", family.name)?;
        line(out, "model_type", &family.model_types)?;
        if !family.multimodal_types.is_empty() {
            let types = family.multimodal_types.join(", ");
            line(out, "", &[format!("the text part of multimodal files of type {types}")])?;
        }
        line(out, "attention", &family.attention)?;
        line(out, "MLP", &family.mlp)?;
        let all_linear = family.lora_all_linear.then_some("all-linear");
        let modules = all_linear.into_iter().chain(family.lora_modules.iter().map(String::as_str));
        line(out, "LoRA modules", &modules.collect::<Vec<_>>())?;
        line(out, "LoRA tensors", &family.lora_expert_parameters)?;
        line(out, "per expert", &family.lora_per_expert_modules)?;
        line(out, "weights", &weights(family))?;
        line(out, "also", &also(family))?;
        writeln!(out)?;
    }
    writeln!(out, "Names of modules, of every expert too, go into `lora_target_modules`, those of tensors into")?;
    writeln!(out, "`lora_target_parameters`. Every family also trains in full or its last blocks; 4-bit bases do not.")
}

fn weights(family: &FamilySupport) -> Vec<&'static str> {
    let quantised = [
        (family.gptq_4bit, "GPTQ and AWQ 4-bit"),
        (family.fp8, "FP8"),
        (family.fp8, "bitsandbytes 4-bit"),
        (family.mxfp4, "MXFP4"),
    ];
    let quantised = quantised.into_iter().filter_map(|(read, name)| read.then_some(name));
    ["float32", "bfloat16", "float16"].into_iter().chain(quantised).collect()
}

fn also(family: &FamilySupport) -> Vec<&'static str> {
    let parts = [
        (family.generation, "generation"),
        (family.tied_head, "tied head"),
        (family.balance_loss, "load-balancing loss"),
    ];
    parts.into_iter().filter_map(|(there, name)| there.then_some(name)).collect()
}

/// A list after its title, wrapped between entries; prints nothing if the list is empty.
fn line(out: &mut impl Write, title: &str, entries: &[impl AsRef<str>]) -> std::io::Result<()> {
    let mut text = format!("  {title:<width$}", width = INDENT - 2);
    for (index, entry) in entries.iter().enumerate() {
        let entry = entry.as_ref();
        let end = if index + 1 < entries.len() { "," } else { "" };
        // The first entry of a line follows the title, whatever its length.
        if text.len() > INDENT && text.len() + 1 + entry.len() + end.len() > WIDTH {
            writeln!(out, "{text}")?;
            text = " ".repeat(INDENT);
        }
        let space = if text.len() > INDENT { " " } else { "" };
        text = format!("{text}{space}{entry}{end}");
    }
    if entries.is_empty() { Ok(()) } else { writeln!(out, "{text}") }
}
