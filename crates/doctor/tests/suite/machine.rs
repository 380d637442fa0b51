//! A machine as a folder of files, unpacked from `tests/machines` or made up.

use isobit_doctor::{Facts, Sources};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub(crate) struct Machine {
    held: tempfile::TempDir,
    pub(crate) variables: BTreeMap<String, String>,
    pub(crate) python: Option<PathBuf>,
}

pub(crate) const ALL: [&str; 5] = ["mi50", "two-mi100", "mi300x", "mixed", "none"];

impl Machine {
    pub(crate) fn empty() -> Self {
        Self { held: tempfile::tempdir().expect("a folder"), variables: BTreeMap::new(), python: None }
    }

    /// One of `tests/machines`: each file of the machine follows a line `==== path`; `\t` is a
    /// tab.
    pub(crate) fn of(name: &str) -> Self {
        let machine = Self::empty();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/machines").join(name).with_extension("txt");
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for file in text.split("==== ").skip(1) {
            let (path, contents) = file.split_once('\n').expect("a path, then contents");
            machine.put(path, contents.replace("\\t", "\t"));
        }
        machine
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.held.path().join(path)
    }

    pub(crate) fn put(&self, path: &str, contents: impl AsRef<[u8]>) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, contents).expect("written");
    }

    pub(crate) fn remove(&self, path: &str) {
        let path = self.path(path);
        if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }.expect("removed");
    }

    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.variables.insert(name.to_string(), value.to_string());
    }

    /// A Python environment with these packages; a version may have a local part.
    pub(crate) fn put_python(&mut self, version: &str, packages: &[(&str, &str)]) {
        let _ = std::fs::remove_dir_all(self.path("venv"));
        let short: Vec<&str> = version.split('.').take(2).collect();
        let folder = format!("venv/lib/python{}/site-packages", short.join("."));
        self.put(
            "venv/pyvenv.cfg",
            format!("home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n"),
        );
        self.put(&format!("{folder}/README.txt"), "");
        self.put("venv/bin/python", "");
        for (name, version) in packages {
            let metadata = format!("Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nName: not a field\n");
            let stem = name.replace('-', "_");
            self.put(&format!("{folder}/{stem}-{version}.dist-info/METADATA"), metadata);
        }
        self.python = Some(self.path("venv"));
    }

    pub(crate) fn sources(&self) -> Sources {
        Sources { root: self.held.path().to_path_buf(), variables: self.variables.clone(), python: self.python.clone() }
    }

    pub(crate) fn facts(&self) -> Facts {
        Facts::read(&self.sources()).expect("a Python environment, if any")
    }

    /// The rules that apply.
    pub(crate) fn ids(&self) -> Vec<String> {
        isobit_doctor::findings(&self.facts()).into_iter().map(|finding| finding.id).collect()
    }
}
