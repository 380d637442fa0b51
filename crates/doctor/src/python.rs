//! A Python environment, from the metadata of its packages. Nothing in it is run: a broken one may
//! hang or crash, and its files say the same.

use crate::tree::Tree;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// BOUND: folders with packages, and packages.
const FOLDERS_MAX: usize = 16;
const PACKAGES_MAX: usize = 16_384;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Python {
    pub folder: String,
    pub version: Option<String>,
    /// Versions by name, in lower case with `-` between words.
    pub packages: BTreeMap<String, String>,
    /// Why its interpreter cannot be run.
    pub problem: Option<String>,
}

/// Reads the environment of an interpreter, or of a folder; or says why it is none.
pub(crate) fn python(given: &Path) -> Result<Python, String> {
    let folder = folder_of(given)?;
    let tree = Tree::new(&folder);
    let settings = tree.text("pyvenv.cfg").unwrap_or_default();
    let setting = |name: &str| {
        let line = settings.lines().find_map(|line| line.split_once('=').filter(|(key, _)| key.trim() == name));
        line.map(|(_, value)| value.trim().to_string())
    };
    let mut folders = package_folders(&tree);
    let named = setting("version").or_else(|| setting("version_info"));
    // An interpreter that is no environment of its own may stand beside others: its name tells.
    let wanted = interpreter_version(given);
    if let Some(wanted) = wanted.as_deref().filter(|_| named.is_none()) {
        let own = format!("python{wanted}/");
        let is_own = |path: &PathBuf| path.to_string_lossy().contains(&own) || path.ends_with("python3/dist-packages");
        folders.retain(is_own);
    }
    if folders.is_empty() {
        return Err(format!("{} has no folder lib/python3.N/site-packages", folder.display()));
    }
    let from_folder = folders.iter().find_map(|path| version_of_folder(path));
    let mut packages = BTreeMap::new();
    for found in folders {
        for name in tree.names(&found).into_iter().take(PACKAGES_MAX) {
            if let Some((package, version)) = package(&tree, &found, &name) {
                packages.entry(package).or_insert(version);
            }
        }
    }
    let (version, problem) = (named.or(wanted).or(from_folder), problem(&folder, &settings));
    Ok(Python { folder: folder.display().to_string(), version, packages, problem })
}

/// The environment's folder: that of `bin/python`, without following links, which lead out of it
/// or, if it is broken, nowhere.
fn folder_of(given: &Path) -> Result<PathBuf, String> {
    let refused = |what: &str| Err(format!("{} {what}", given.display()));
    if given.is_dir() {
        return Ok(given.to_path_buf());
    }
    let Ok(about) = given.symlink_metadata() else { return refused("does not exist") };
    let leads_nowhere = about.is_symlink() && !given.exists();
    if !given.is_file() && !leads_nowhere {
        return refused("is neither a folder nor a file");
    }
    if !is_named_as_interpreter(given) {
        return refused("is not a Python interpreter");
    }
    // `python` alone is one in the current folder.
    let whole = std::path::absolute(given).unwrap_or_else(|_| given.to_path_buf());
    let bin = whole.parent().filter(|folder| folder.ends_with("bin"));
    let Some(folder) = bin.and_then(Path::parent) else { return refused("is in no folder `bin`") };
    let as_typed = given.parent().and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty());
    Ok(as_typed.unwrap_or(folder).to_path_buf())
}

/// `python`, `python3`, `python3.12`, `pypy3`.
fn is_named_as_interpreter(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let version = ["python", "pypy"].iter().find_map(|start| name.strip_prefix(start));
    version.is_some_and(|version| version.chars().all(|c| c.is_ascii_digit() || c == '.' || c == 't'))
}

/// Why nothing can be run in an environment: its interpreter is missing.
fn problem(folder: &Path, settings: &str) -> Option<String> {
    if settings.is_empty() {
        return None;
    }
    let bin = folder.join("bin");
    let names = ["python", "python3"].map(|name| bin.join(name));
    if names.iter().any(|path| path.exists()) {
        return None;
    }
    let link = names.iter().find_map(|path| Some((path, std::fs::read_link(path).ok()?)));
    Some(match link {
        Some((path, target)) => format!("{} links to {}, which does not exist", path.display(), target.display()),
        None => format!("{} has no python", bin.display()),
    })
}

/// `3.12` of `/usr/bin/python3.12`, also at the end of links.
fn interpreter_version(given: &Path) -> Option<String> {
    let file = given.canonicalize().ok().filter(|path| path.is_file())?;
    let version = file.file_name()?.to_str()?.strip_prefix("python")?.to_string();
    version.contains('.').then_some(version)
}

fn package_folders(tree: &Tree) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for library in ["lib", "lib64", "local/lib"] {
        let names = tree.names(library).into_iter().filter(|name| name.starts_with("python3")).take(FOLDERS_MAX);
        for name in names {
            for kind in ["site-packages", "dist-packages"] {
                let folder = Path::new(library).join(&name).join(kind);
                if tree.has_folder(&folder) {
                    found.push(folder);
                }
            }
        }
    }
    found
}

fn version_of_folder(folder: &Path) -> Option<String> {
    let name = folder.parent()?.file_name()?.to_str()?;
    name.strip_prefix("python").filter(|version| version.contains('.')).map(str::to_string)
}

/// Name and version of a folder of metadata.
fn package(tree: &Tree, folder: &Path, name: &str) -> Option<(String, String)> {
    let stem = name.strip_suffix(".dist-info").or_else(|| name.strip_suffix(".egg-info"))?;
    let text = ["METADATA", "PKG-INFO"].iter().find_map(|file| tree.text(folder.join(name).join(file)));
    let text = text.unwrap_or_default();
    // The header ends with an empty line; a description follows.
    let header = text.lines().take_while(|line| !line.is_empty());
    let field = |wanted: &str| {
        let line = header.clone().find_map(|line| line.split_once(": ").filter(|(key, _)| *key == wanted));
        line.map(|(_, value)| value.trim().chars().take(80).collect::<String>())
    };
    let (stem_name, stem_version) = stem.split_once('-').unwrap_or((stem, ""));
    let version = field("Version").unwrap_or_else(|| stem_version.to_string());
    Some((normalized(&field("Name").unwrap_or_else(|| stem_name.to_string())), version))
}

/// Names of packages are the same in any spelling.
fn normalized(name: &str) -> String {
    name.to_lowercase().replace(['_', '.'], "-")
}
