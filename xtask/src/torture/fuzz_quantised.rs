//! The target `quantisation` of `fuzz`: the config of a quantised model beside the files of that
//! model, because it fits no other. Most changes are inside `quantization_config`.

use super::fuzz_targets::{Check, Corpus, Reached, change, read, refused};
use super::mutate::{Form, mutated};
use super::random::Random;
use crate::repository::root;
use isobit_models::{Config, Copied, Inventory, WeightSource, Weights};
use isobit_numerics::digest::Digest;
use isobit_proof::safetensors::TensorFiles;
use serde_json::Value;
use std::path::{Path, PathBuf};

const MODELS: [&str; 12] = [
    "awq",
    "awq-moe",
    "deepseek-fp8",
    "fp4",
    "gptoss-mxfp4",
    "gptq-moe",
    "gptq-moe-order",
    "gptq-v1",
    "gptq-v1-asymmetric",
    "gptq-v2-order",
    "gptq-v2-whole",
    "nf4",
];
const SETTINGS: &str = "quantization_config";

fn folder(name: &str) -> PathBuf {
    root().join("crates/models/tests/fixtures").join(name)
}

/// The name of a model on a line, and its config.
pub(crate) fn corpus() -> Result<Corpus, String> {
    let one = |name: &&str| Ok([name.as_bytes(), b"\n", &read(&folder(name).join("config.json"))?].concat());
    MODELS.iter().map(one).collect()
}

pub(crate) fn made(random: &mut Random, corpus: &Corpus) -> Vec<u8> {
    let entry: &Vec<u8> = random.pick(corpus);
    let (name, config) = split(entry);
    let config = config.to_vec();
    let changed = match serde_json::from_slice::<Value>(&config) {
        Ok(mut value) if !random.once_in(4) => {
            let settings = mutated(random, Form::Json, value[SETTINGS].to_string().as_bytes(), false);
            value[SETTINGS] = "@settings@".into();
            value.to_string().replacen("\"@settings@\"", &String::from_utf8_lossy(&settings), 1).into_bytes()
        }
        _ => change(random, Form::Json, &vec![config]),
    };
    [name.as_bytes(), b"\n", &changed].concat()
}

fn split(input: &[u8]) -> (String, &[u8]) {
    let at = input.iter().position(|byte| *byte == b'\n').unwrap_or(input.len());
    (String::from_utf8_lossy(&input[..at]).into_owned(), &input[(at + 1).min(input.len())..])
}

/// Every tensor of an accepted model is expanded, twice to the same numbers.
#[expect(clippy::unnecessary_wraps, reason = "an entry of the table of targets")]
pub(crate) fn check(_: &Path) -> Result<Check, String> {
    Ok(Box::new(|input| {
        let (name, config) = split(input);
        let folder = folder(&name);
        let beside = std::fs::read_to_string(folder.join("quantize_config.json")).ok();
        let config = match Config::parse_with(&String::from_utf8_lossy(config), beside.as_deref()) {
            Ok(config) => config,
            Err(error) => return refused(error),
        };
        match (numbers(&folder, &config), numbers(&folder, &config)) {
            (Ok(first), Ok(second)) if first == second => Ok(Reached::Accepted),
            (Err(error), Err(_)) => refused(error),
            _ => Err("reading it twice gives two results".to_string()),
        }
    }))
}

/// A digest of all numbers.
fn numbers(folder: &Path, config: &Config) -> Result<Vec<Digest>, String> {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let files = TensorFiles::open(folder).map_err(|error| told(&error))?;
    let weights = Weights::new(files, config).map_err(|error| told(&error))?;
    let mut digests = Vec::new();
    let names: Vec<String> = weights.tensor_files().names().map(str::to_string).collect();
    for name in &names {
        if let Some(Copied::Numbers(tensor)) = weights.copied(name).map_err(|error| told(&error))? {
            let numbers = weights.numbers(tensor).map_err(|error| told(&error))?.to_f32();
            digests.push(Digest::of_bytes(&numbers.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>()));
        }
    }
    let is_awq = folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("awq"));
    for path in Inventory::of(config).adaptable() {
        let Some(packed) = weights.shape(&format!("{path}.qweight")) else { continue };
        // Integers are packed along inputs, by AWQ along outputs.
        let &[rows, columns] = &packed[..] else { continue };
        let [outputs, inputs] = if is_awq { [columns * 8, rows] } else { [columns, rows * 8] };
        let weight = weights.weight(path, outputs, inputs).map_err(|error| told(&error))?;
        digests.push(Digest::of_bytes(format!("{weight:?}").as_bytes()));
    }
    Ok(digests)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An input that is refused at once exercises nothing behind the refusal.
    #[test]
    fn a_good_share_of_the_inputs_is_accepted_by_every_model() {
        let corpus = corpus().expect("fixtures");
        let mut check = check(Path::new("")).expect("prepared");
        for entry in &corpus {
            assert!(matches!(check(entry), Ok(Reached::Accepted)), "{}", split(entry).0);
        }
        let mut one = |case| check(&made(&mut Random::of(1, "quantisation", case), &corpus)).expect("no finding");
        let accepted = (0..200).filter(|case| matches!(one(*case), Reached::Accepted)).count();
        assert!((15..180).contains(&accepted), "{accepted}");
    }
}
