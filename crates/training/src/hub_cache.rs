//! Models in the cache of a hub client: `models--ORG--NAME` has revisions under `snapshots/`, and
//! `refs/main` names the current one.

use crate::prepare::{HUB_HINT, RunError, is_hub_name};
use isobit_proof::regular;
use std::path::{Path, PathBuf};

/// BOUND: bytes of a file that names a revision.
const REF_BYTES_MAX: u64 = 1 << 10;

/// Refuses a path that names no model: a name on the hub, and a cache whose current revision is not
/// known.
pub fn check(path: &Path) -> Result<(), RunError> {
    if !path.exists() && is_hub_name(path) {
        return Err(RunError::Refused { what: format!("{} does not exist", path.display()), hint: HUB_HINT });
    }
    resolved(path).map(|_| ())
}

/// The model folder that `path` stands for: itself, or the current revision of a cached model.
pub fn resolved(path: &Path) -> Result<PathBuf, RunError> {
    if path.join("config.json").exists() {
        return Ok(path.to_owned());
    }
    // The folder of all revisions stands for the cache that it is in.
    let parent = path.parent().filter(|_| path.ends_with("snapshots"));
    let is_cache =
        |folder: &&Path| folder.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"models--"));
    let path = parent.filter(is_cache).unwrap_or(path);
    let snapshots = path.join("snapshots");
    if !snapshots.is_dir() {
        return Ok(path.to_owned());
    }
    if let Some(name) = regular::if_there(regular::read_text(&path.join("refs").join("main"), REF_BYTES_MAX))? {
        let folder = Some(name.trim()).filter(|name| is_name(name)).map(|name| snapshots.join(name));
        // Another revision would be another model.
        return folder.filter(|folder| folder.is_dir()).ok_or_else(|| RunError::Refused {
            what: format!("{} does not have the revision that refs/main names", path.display()),
            hint: "download the model again, or give one of the folders under snapshots/",
        });
    }
    let mut revisions = revisions(&snapshots);
    match revisions.len() {
        1 => Ok(revisions.remove(0)),
        0 => Err(RunError::Refused {
            what: format!("{} has no revision of the model", snapshots.display()),
            hint: "download the model again",
        }),
        count => Err(RunError::Refused {
            what: format!("{} has {count} revisions of the model and no refs/main", path.display()),
            hint: "give one of the folders under snapshots/",
        }),
    }
}

/// The name on the hub of the model that a folder `models--ORG--NAME/snapshots/REVISION` holds.
pub fn hub_name(folder: &Path) -> Option<String> {
    let snapshots = folder.parent()?;
    let model = snapshots.parent().filter(|_| snapshots.ends_with("snapshots"))?;
    let name = model.file_name()?.to_str()?.strip_prefix("models--")?;
    Some(name.replacen("--", "/", 1))
}

/// Whether a revision's name is one part of a path.
fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

/// The folders of all revisions, in order.
fn revisions(snapshots: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(snapshots).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_current_revision_is_the_model() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("models--org--name");
        let put = |name: &str, text: &str| {
            let file = path.join(name);
            fs::create_dir_all(file.parent().expect("a folder")).expect("folders");
            fs::write(file, text).expect("a file");
        };
        let of = |path: &Path| resolved(path).map_err(|error| error.to_string());
        assert_eq!(of(&path), Ok(path.clone()), "nothing there: the next step says so");
        fs::create_dir_all(path.join("snapshots")).expect("folders");
        assert!(of(&path).is_err_and(|error| error.contains("no revision")));
        put("snapshots/aaa/config.json", "{}");
        assert_eq!(of(&path), Ok(path.join("snapshots/aaa")), "the only one");
        put("snapshots/bbb/config.json", "{}");
        assert!(of(&path).is_err_and(|error| error.contains("2 revisions")));
        assert_eq!(hub_name(&path.join("snapshots/bbb")).as_deref(), Some("org/name"));
        assert_eq!(hub_name(Path::new("models--gpt2/snapshots/aaa")).as_deref(), Some("gpt2"));
        for other in ["models--org--name/aaa", "org--name/snapshots/aaa", "snapshots/aaa", "aaa", ""] {
            assert_eq!(hub_name(Path::new(other)), None, "{other}");
        }
        put("refs/main", "bbb\n");
        assert_eq!(of(&path), Ok(path.join("snapshots/bbb")));
        assert_eq!(of(&path.join("snapshots")), Ok(path.join("snapshots/bbb")));
        // Nothing outside of the cache is reached, and a missing one is not invented.
        for text in ["../../etc", "/etc", "..", "", "ccc"] {
            put("refs/main", text);
            assert!(of(&path).is_err(), "{text}");
        }
        // A model folder that happens to have such a folder is itself.
        put("config.json", "{}");
        assert_eq!(of(&path), Ok(path.clone()));
    }
}
