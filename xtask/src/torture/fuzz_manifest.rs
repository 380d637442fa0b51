//! The target `manifest` of `fuzz`: a manifest together with the files that it lists, because alone
//! it fits nothing. Files and manifest are made to fit; then a part is changed, and its own digest
//! is made to fit again or not.

use super::fuzz_targets::{Check, Corpus, Reached, fresh, refused};
use super::mutate::{Form, mutated};
use super::random::Random;
use isobit_proof::{FileError, Hash, Manifest};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

const NAMES: [&str; 6] = ["state.json", "adapter_model.safetensors", "a", "b c", "\u{fc}", "-"];
/// Of the digest, in its order.
const FIELDS: [&str; 5] = ["schema", "run", "base", "load_in_4bit", "files"];

/// Everything is made anew.
pub(crate) fn corpus() -> Corpus {
    Vec::new()
}

/// The files as a line of JSON, and the manifest.
pub(crate) fn made(random: &mut Random, _: &Corpus) -> Vec<u8> {
    let mut files = BTreeMap::new();
    for _ in 0..random.below(4) {
        let content = "x".repeat(random.below(40));
        files.insert(*random.pick(&NAMES), content);
    }
    let record = |content: &String| json!({ "size": content.len(), "blake3": Hash::of_bytes(content.as_bytes()) });
    let records: Map<String, Value> = files.iter().map(|(name, text)| ((*name).to_string(), record(text))).collect();
    let is_earlier = random.once_in(4);
    let mut manifest = json!({ "schema": format!("isobit.manifest/{}", if is_earlier { 1 } else { 2 }) });
    manifest["files"] = Value::Object(records);
    for field in ["run", "base"] {
        let hash = Hash::of_bytes(&random.next().to_le_bytes());
        if !is_earlier && !random.once_in(4) {
            manifest[field] = hash.to_string().into();
        }
    }
    if !is_earlier && random.once_in(3) {
        manifest["load_in_4bit"] = (*random.pick(&["isobit.int4/1", "", "\u{202e}\"\\", "nf4"])).into();
    }
    let mut text = manifest.to_string();
    for _ in 0..random.below(3) {
        text = String::from_utf8_lossy(&mutated(random, Form::Json, text.as_bytes(), false)).into_owned();
    }
    if !is_earlier && !random.once_in(6) {
        text = with_digest(&text);
    }
    if random.once_in(8) {
        text = String::from_utf8_lossy(&mutated(random, Form::Json, text.as_bytes(), false)).into_owned();
    }
    [json!(files).to_string().as_bytes(), b"\n", text.as_bytes()].concat()
}

/// Puts in the digest of what a manifest says, if it is one.
fn with_digest(text: &str) -> String {
    let Ok(Value::Object(mut fields)) = serde_json::from_str(text) else { return text.to_string() };
    let record = |of: &Value| match of {
        Value::Object(entries) if entries.len() == 2 => {
            format!("{{\"size\":{},\"blake3\":{}}}", of["size"], of["blake3"])
        }
        other => other.to_string(),
    };
    let files = |all: &Map<String, Value>| -> String {
        let each: Vec<String> = all.iter().map(|(name, of)| format!("{}:{}", json!(name), record(of))).collect();
        format!("{{{}}}", each.join(","))
    };
    let field = |name: &&str| {
        let value = fields.get(*name)?;
        Some(format!("\"{name}\":{}", value.as_object().map_or_else(|| value.to_string(), files)))
    };
    let covered: Vec<String> = FIELDS.iter().filter_map(field).collect();
    let digest = Hash::of_bytes(format!("{{{}}}", covered.join(",")).as_bytes());
    fields.insert("digest".to_string(), digest.to_string().into());
    Value::Object(fields).to_string()
}

/// What is accepted lists the files that are there, as they are, and is read again as it was.
#[expect(clippy::unnecessary_wraps, reason = "the checks of all targets are made alike; some can fail")]
pub(crate) fn check(place: &Path) -> Result<Check, String> {
    let folder = place.join("fuzz-manifest");
    Ok(Box::new(move |input| {
        let split = input.iter().position(|byte| *byte == b'\n').ok_or("an input of two parts")?;
        let files: BTreeMap<String, String> = serde_json::from_slice(&input[..split]).map_err(|_| "files")?;
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", folder.display());
        if folder.exists() {
            std::fs::remove_dir_all(&folder).map_err(|error| failed(&error))?;
        }
        std::fs::create_dir_all(&folder).map_err(|error| failed(&error))?;
        for (name, content) in &files {
            fresh(&folder.join(name), content.as_bytes())?;
        }
        fresh(&folder.join(Manifest::NAME), &input[split + 1..])?;
        let read = || -> Result<Manifest, FileError> {
            let manifest = Manifest::read(&folder)?;
            manifest.verify(&folder).map(|()| manifest)
        };
        let manifest = match read() {
            Ok(manifest) => manifest,
            Err(error) => return refused(error),
        };
        let is_right = |(name, text): (&String, &String)| {
            let of = manifest.files.get(name);
            of.is_some_and(|of| (of.size, of.blake3) == (text.len() as u64, Hash::of_bytes(text.as_bytes())))
        };
        if manifest.files.len() != files.len() || !files.iter().all(is_right) {
            return Err("a manifest of other files was accepted".to_string());
        }
        manifest.write(&folder).map_err(|error| failed(&error))?;
        match read() {
            Ok(again) if again == manifest => Ok(Reached::Accepted),
            Ok(_) => Err("another manifest is read from what was written".to_string()),
            Err(error) => Err(format!("what was written is refused: {error}")),
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An input that is refused at once exercises nothing behind the refusal.
    #[test]
    fn a_good_share_of_the_inputs_is_accepted() {
        let place = std::env::temp_dir().join(format!("isobit-fuzz-manifest-{}", std::process::id()));
        let mut check = check(&place).expect("prepared");
        let mut one = |case| check(&made(&mut Random::of(1, "manifest", case), &corpus())).expect("no finding");
        let accepted = (0..400).filter(|case| matches!(one(*case), Reached::Accepted)).count();
        std::fs::remove_dir_all(&place).expect("removed");
        assert!((60..350).contains(&accepted), "{accepted}");
    }
}
