//! A run folder from the outside: whether two hold the same run, and the progress of one.

use isobit_training::metrics::without_timing;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Files that describe how a run was made, not its result.
const NOT_COMPARED: [&str; 4] = ["LOCK", "config.resolved.toml", "config.toml", "plan.json"];
const METRICS: &str = "metrics.jsonl";
const RECEIPT: &str = "receipt.json";

/// The first difference between two finished runs: weights, optimizer state, pointers and metrics
/// without timing, byte by byte, and no extra or missing file.
pub(crate) fn difference(expected: &Path, other: &Path) -> Result<Option<String>, String> {
    let (names, others) = (names(expected)?, names(other)?);
    let odd = names.symmetric_difference(&others).find(|name| !NOT_COMPARED.contains(&name.as_str()));
    if let Some(name) = odd {
        let which = if names.contains(name) { "is missing" } else { "should not be there" };
        return Ok(Some(format!("{} {which}", other.join(name).display())));
    }
    for name in names.iter().filter(|name| !NOT_COMPARED.contains(&name.as_str())) {
        let (first, second) = (expected.join(name), other.join(name));
        let found = if first.is_dir() {
            difference(&first, &second)?
        } else if name == METRICS {
            different_metrics(&first, &second)?
        } else if name == RECEIPT {
            // The rest is about the folder and the machine.
            let digest = |path: &Path| -> Result<Value, String> {
                let value: Value = serde_json::from_slice(&read(path)?).map_err(|error| error.to_string())?;
                Ok(value["digest"].clone())
            };
            let differ = digest(&first)? != digest(&second)?;
            differ.then(|| format!("{} is of another run", second.display()))
        } else {
            let differ = read(&first)? != read(&second)?;
            differ.then(|| format!("{} has other bytes", second.display()))
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

fn different_metrics(expected: &Path, other: &Path) -> Result<Option<String>, String> {
    let lines = |path: &Path| -> Result<Vec<String>, String> {
        Ok(String::from_utf8_lossy(&read(path)?).lines().map(without_timing).collect())
    };
    let (first, second) = (lines(expected)?, lines(other)?);
    let differ = first.iter().zip(&second).position(|(a, b)| a != b);
    Ok(match differ {
        Some(line) => Some(format!("{}:{} says something else", other.display(), line + 1)),
        None if first.len() != second.len() => {
            Some(format!("{} has {} lines, {} expected", other.display(), second.len(), first.len()))
        }
        None => None,
    })
}

/// The step in `latest.json`; None if there is no such file. Anything else in it is an error.
pub(crate) fn latest(run: &Path) -> Result<Option<u64>, String> {
    let path = run.join("latest.json");
    if !path.exists() {
        return Ok(None);
    }
    let value: serde_json::Value =
        serde_json::from_slice(&read(&path)?).map_err(|error| format!("{}: {error}", path.display()))?;
    // A run that has begun but not saved yet.
    if value.get("checkpoint").is_some_and(serde_json::Value::is_null) {
        return Ok(None);
    }
    let step = value["step"].as_u64().ok_or_else(|| format!("{} names no step", path.display()))?;
    if !run.join(format!("checkpoint-{step}")).is_dir() {
        return Err(format!("{} names step {step}, which is not there", path.display()));
    }
    Ok(Some(step))
}

/// The newest folder named like a checkpoint: it gets that name only once it is whole.
pub(crate) fn newest(run: &Path) -> Result<Option<u64>, String> {
    if !run.exists() {
        return Ok(None);
    }
    let step = |name: &String| name.strip_prefix("checkpoint-")?.parse().ok();
    Ok(names(run)?.iter().filter_map(step).max())
}

/// Names in a folder.
pub(crate) fn names(folder: &Path) -> Result<BTreeSet<String>, String> {
    let failed = |error| format!("{}: {error}", folder.display());
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        names.insert(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torture::scene::remove;

    #[test]
    fn differences_between_runs() {
        let root = std::env::temp_dir().join(format!("isobit-torture-runs-{}", std::process::id()));
        let put = |name: &str, text: &str| {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        for (run, seconds) in [("a", "1.5"), ("b", "2.5")] {
            put(&format!("{run}/metrics.jsonl"), &format!("{{\"step\":1,\"timing\":{{\"seconds\":{seconds}}}}}\n"));
            put(&format!("{run}/checkpoint-2/state.json"), "{}");
            put(&format!("{run}/latest.json"), "{\"step\":2}");
            put(&format!("{run}/config.resolved.toml"), run);
        }
        put("a/LOCK", "");
        let (a, b) = (root.join("a"), root.join("b"));
        let found = || difference(&a, &b).expect("read");
        assert_eq!(found(), None);
        assert_eq!((latest(&b), newest(&b)), (Ok(Some(2)), Ok(Some(2))));
        put("b/checkpoint-2/state.json", "{ }");
        assert!(found().is_some_and(|what| what.ends_with("state.json has other bytes")));
        put("b/checkpoint-2/state.json", "{}");
        put("b/metrics.jsonl", "{\"step\":2,\"timing\":{}}\n");
        assert!(found().is_some_and(|what| what.ends_with("metrics.jsonl:1 says something else")));
        put("b/metrics.jsonl", "");
        assert!(found().is_some_and(|what| what.ends_with("has 0 lines, 1 expected")));
        put("b/.checkpoint-4.partial/state.json", "{}");
        assert!(found().is_some_and(|what| what.ends_with("should not be there")));
        put("b/latest.json", "{\"step\":3}");
        assert!(latest(&b).is_err());
        remove(&root).expect("removed");
    }
}
