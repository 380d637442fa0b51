//! Checks the names in [adapter] against the model before anything is loaded: every module, tensor,
//! pattern and layer must match something. A typo would otherwise train less than intended and end
//! up in the adapter's config.

use crate::config::nearest;
use crate::prepare::RunError;
use isobit_models::adapter::{ends_with, pattern_matches};
use isobit_models::{Config, Inventory, LoraConfig, ModelError, Projection, Targets, Trained};
use isobit_proof::name::quoted;

/// Most names that a hint lists.
const LISTED_MAX: usize = 24;

/// Checks what a run trains; only adapters name anything.
pub fn check(model: &Config, trained: &Trained) -> Result<(), RunError> {
    let Trained::Lora(lora) = trained else { return Ok(()) };
    let all = Names::of(model);
    match &lora.targets {
        Targets::AllLinear => {}
        Targets::Names(names) => each(names, "lora_target_modules", &all.modules, &all.of_experts)?,
        Targets::Pattern(pattern) => {
            if !any(&all.modules, |path| lora.targets.matches(path))? {
                let what = format!("`lora_target_modules`: no module's path matches {}", quoted(pattern));
                return Err(refused(what, listed("paths are like", &all.modules[..1])));
            }
            // PEFT would adapt them, and here they get no adapter.
            let ends = ["lm_head", "model.embed_tokens"].map(|path| model.module_path(path).into_owned());
            for end in &ends {
                if lora.of(end)?.is_some() && !lora.saves(end) {
                    let what =
                        format!("`lora_target_modules`: {} matches {end}, which gets no adapter", quoted(pattern));
                    let hint = "train it whole with `modules_to_save`, or write an expression that leaves it out";
                    return Err(refused(what, hint.to_string()));
                }
            }
        }
    }
    each(&lora.parameters, "lora_target_parameters", &all.parameters, &[])?;
    if let Some(Targets::Names(names)) = &lora.exclude {
        each(names, "exclude_modules", &all.modules, &all.of_experts)?;
    }
    let adapted = all.adapted(lora)?;
    layers(model, lora, &adapted)?;
    patterns("rank_pattern", lora.rank_pattern.keys(), &adapted)?;
    patterns("alpha_pattern", lora.alpha_pattern.keys(), &adapted)?;
    if adapted.is_empty() {
        let what = "no module of the model is a target: `exclude_modules` excludes all that are named".to_string();
        return Err(refused(what, listed("the linear modules are", &short(&all.modules))));
    }
    Ok(())
}

/// The names of a model's modules and tensors, as adapters use them.
struct Names {
    modules: Vec<String>,
    /// Modules of the first expert of a layer: what a name may match if experts are separate
    /// modules.
    of_experts: Vec<String>,
    parameters: Vec<String>,
}

impl Names {
    fn of(model: &Config) -> Self {
        let inventory = Inventory::of(model);
        let path = |path: &str| model.module_path(path).into_owned();
        let modules: Vec<String> = inventory.adaptable().iter().map(|name| path(name)).collect();
        let single = |start: &str| Projection::ALL.map(|part| path(&format!("{start}0.{}", part.module())));
        let fused = |start: &str| ["gate_up_proj", "down_proj"].map(|part| path(&format!("{start}{part}")));
        let parameters = inventory.experts().flat_map(fused).chain(modules.iter().map(|path| format!("{path}.weight")));
        Self { of_experts: inventory.experts().flat_map(single).collect(), parameters: parameters.collect(), modules }
    }

    /// Modules and tensors that get an adapter.
    fn adapted(&self, lora: &LoraConfig) -> Result<Vec<&str>, ModelError> {
        let mut adapted = Vec::new();
        for path in self.modules.iter().chain(&self.of_experts) {
            if lora.of(path)?.is_some() {
                adapted.push(path.as_str());
            }
        }
        for name in &self.parameters {
            if lora.of_parameter(name)?.is_some() {
                adapted.push(name);
            }
        }
        Ok(adapted)
    }
}

fn refused(what: String, hint: String) -> RunError {
    RunError::Target { what, hint }
}

/// Checks that every name matches something.
fn each(names: &[String], key: &str, of: &[String], also: &[String]) -> Result<(), RunError> {
    let is_name = |name: &str| of.iter().chain(also).any(|path| ends_with(path, name));
    match names.iter().find(|name| !is_name(name)) {
        None => Ok(()),
        Some(name) => {
            let (kind, start) = match key {
                "lora_target_parameters" => ("tensor", "the tensors are"),
                _ => ("module", "the linear modules are"),
            };
            let what = format!("`{key}`: no {kind} of the model that can get an adapter is called {}", quoted(name));
            Err(refused(what, meant(name, start, &short(of))))
        }
    }
}

fn any(paths: &[impl AsRef<str>], is: impl Fn(&str) -> Result<bool, ModelError>) -> Result<bool, ModelError> {
    for path in paths {
        if is(path.as_ref())? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Checks that every layer exists and has a module that gets an adapter.
fn layers(model: &Config, lora: &LoraConfig, adapted: &[&str]) -> Result<(), RunError> {
    for layer in lora.layers.iter().flatten() {
        let part = format!(".layers.{layer}.");
        if adapted.iter().any(|path| path.contains(&part)) {
            continue;
        }
        let count = model.layers.len();
        let (what, hint) = if *layer >= count {
            ("there is no such layer in the model", format!("layers are 0 to {}", count - 1))
        } else {
            ("no module of this layer is a target", "leave this layer out, or name a module that it has".to_string())
        };
        return Err(refused(format!("`layers_to_transform` names {layer}: {what}"), hint));
    }
    Ok(())
}

/// Checks that every pattern matches something that gets an adapter.
fn patterns<'a>(key: &str, patterns: impl Iterator<Item = &'a String>, adapted: &[&str]) -> Result<(), RunError> {
    for pattern in patterns {
        if !any(adapted, |path| pattern_matches(pattern, path))? {
            let what = format!("`{key}`: {} matches nothing that gets an adapter", quoted(pattern));
            let names: Vec<String> = adapted.iter().map(ToString::to_string).collect();
            return Err(refused(what, meant(pattern, "adapters are on", &short(&names))));
        }
    }
    Ok(())
}

/// Paths reduced to the part that is the same in all layers: the last component of a module, the
/// last two of a tensor.
fn short(paths: &[String]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for path in paths {
        let parts: Vec<&str> = path.split('.').collect();
        let of_tensor = path.ends_with(".weight") || parts.iter().rev().nth(1) == Some(&"experts");
        let name = parts[parts.len().saturating_sub(if of_tensor { 2 } else { 1 })..].join(".");
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// The name that was probably meant, or the list of valid names.
fn meant(typed: &str, start: &str, names: &[String]) -> String {
    match nearest(typed, names.iter().map(String::as_str)) {
        Some(name) => format!("did you mean `{name}`?"),
        None => listed(start, names),
    }
}

fn listed(start: &str, names: &[String]) -> String {
    let more = if names.len() > LISTED_MAX { ", ..." } else { "" };
    format!("{start} {}{more}", names[..names.len().min(LISTED_MAX)].join(", "))
}
