//! BLAKE3 of bytes and files, and the manifest that lists a folder's files with their hashes.
//!
//! The manifest is written after everything it lists: a folder with a manifest is complete; one
//! interrupted by a power cut has none.

use crate::atomic::{is_partial, write_atomically};
use crate::error::FileError;
use crate::json::{self, UniqueMap};
use crate::layout;
use crate::name::{is_plain, quoted};
use crate::receipt;
use crate::regular;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

/// A hash of 32 bytes, BLAKE3 where nothing else is said, or SHA-256; shown, stored and read as 64
/// hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hash(pub [u8; 32]);

impl Hash {
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// Hashes a file of any size, in constant memory.
    pub fn of_file(path: &Path) -> Result<Self, FileError> {
        FileRecord::of(path).map(|record| record.blake3)
    }

    /// From 64 lower-case hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != 32 || !rest.is_empty() {
            return None;
        }
        let mut bytes = [0; 32];
        for (byte, &[high, low]) in bytes.iter_mut().zip(pairs) {
            *byte = digit(high)? << 4 | digit(low)?;
        }
        Some(Self(bytes))
    }
}

fn digit(character: u8) -> Option<u8> {
    match character {
        b'0'..=b'9' => Some(character - b'0'),
        b'a'..=b'f' => Some(character - b'a' + 10),
        _ => None,
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text)
            .ok_or_else(|| D::Error::custom(format!("{} is not a hash of 64 hexadecimal digits", quoted(&text))))
    }
}

/// A manifest's record of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    pub size: u64,
    pub blake3: Hash,
}

impl FileRecord {
    /// Size and hash from one pass over the file.
    pub fn of(path: &Path) -> Result<Self, FileError> {
        let (mut hasher, mut size) = (blake3::Hasher::new(), 0);
        regular::read_in_pieces(path, |piece| {
            hasher.update(piece);
            size += piece.len() as u64;
        })?;
        Ok(Self { size, blake3: Hash(*hasher.finalize().as_bytes()) })
    }
}

/// The files of a folder, and the run and base they come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    pub files: BTreeMap<String, FileRecord>,
    /// Digest that identifies the run that made the folder; none in folders of earlier versions.
    pub run: Option<Hash>,
    /// Digest of the model it was trained from.
    pub base: Option<Hash>,
    /// The rule by which the linear layers of that model were quantised while it was loaded, if
    /// they were.
    pub load_in_4bit: Option<String>,
}

/// The form on disk.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored<Files> {
    schema: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    run: Option<Hash>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<Hash>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    load_in_4bit: Option<String>,
    files: Files,
    /// Hash of the same content without this field, as JSON without spaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    digest: Option<Hash>,
}

impl Manifest {
    /// The manifest's file name.
    pub const NAME: &str = "MANIFEST.json";
    const SCHEMA: &str = "isobit.manifest/2";
    /// Without `run`, `base` and `digest`.
    const EARLIER: &str = "isobit.manifest/1";

    /// Reads these files of a folder and records them.
    pub fn of<'a>(folder: &Path, names: impl IntoIterator<Item = &'a str>) -> Result<Self, FileError> {
        let mut files = BTreeMap::new();
        for name in names {
            if !is_plain(name) || name == Self::NAME {
                let what = format!("{} cannot be listed in a manifest", quoted(name));
                return Err(FileError::unwritable(&folder.join(Self::NAME), what));
            }
            files.insert(name.to_string(), FileRecord::of(&folder.join(name))?);
        }
        Ok(Self { files, run: None, base: None, load_in_4bit: None })
    }

    /// Writes the manifest into the folder; it must be the last file written there.
    pub fn write(&self, folder: &Path) -> Result<(), FileError> {
        write_atomically(&folder.join(Self::NAME), self.to_text().as_bytes())
    }

    /// The file's text.
    pub(crate) fn to_text(&self) -> String {
        let mut stored = self.stored(Self::SCHEMA);
        stored.digest = Some(digest(&stored));
        serde_json::to_string_pretty(&stored).expect("strings and numbers have a JSON form") + "\n"
    }

    /// Reads the manifest of a folder, without checking the files it lists.
    pub fn read(folder: &Path) -> Result<Self, FileError> {
        let path = folder.join(Self::NAME);
        let Stored { schema, run, base, load_in_4bit, files, digest: recorded } =
            json::read::<Stored<UniqueMap<FileRecord>>>(&path)?;
        if schema != Self::SCHEMA && schema != Self::EARLIER {
            let what = format!("its schema is {}, but this version reads `{}`", quoted(&schema), Self::SCHEMA);
            return Err(FileError::malformed(&path, what));
        }
        if let Some(name) = files.0.keys().find(|name| !is_plain(name)) {
            return Err(FileError::malformed(&path, format!("{} is not a file of this folder", quoted(name))));
        }
        let manifest = Self { files: files.0, run, base, load_in_4bit };
        let wanted = (schema == Self::SCHEMA).then(|| digest(&manifest.stored(&schema)));
        if recorded != wanted || (wanted.is_none() && manifest.says_more_than_files()) {
            let what = "its own digest does not match".to_string();
            return Err(FileError::Altered { path, what });
        }
        Ok(manifest)
    }

    /// Checks a folder that another tool may have written: if there is a manifest, the files it
    /// lists must be as recorded. Other files may be present.
    pub fn check(folder: &Path) -> Result<Option<Self>, FileError> {
        match Self::read(folder) {
            Err(FileError::Missing { path }) if is_of_run(folder) => {
                Err(FileError::Altered { path, what: "it is missing from what a run has written".to_string() })
            }
            Err(FileError::Missing { .. }) => Ok(None),
            manifest => {
                let manifest = manifest?;
                manifest.verify_files(folder, &manifest.files.keys().cloned().collect())?;
                Ok(Some(manifest))
            }
        }
    }

    fn stored(&self, schema: &str) -> Stored<&BTreeMap<String, FileRecord>> {
        Stored {
            schema: schema.to_string(),
            run: self.run,
            base: self.base,
            load_in_4bit: self.load_in_4bit.clone(),
            files: &self.files,
            digest: None,
        }
    }

    /// Manifests of the earlier schema list files only.
    fn says_more_than_files(&self) -> bool {
        self.run.is_some() || self.base.is_some() || self.load_in_4bit.is_some()
    }

    /// Compares a folder with this manifest. The error names the first file, by name, that is
    /// missing, extra or of a different size; otherwise the first whose content differs.
    pub fn verify(&self, folder: &Path) -> Result<(), FileError> {
        self.verify_files(folder, &self.listed_or_present(folder)?)
    }

    /// Names and sizes of all files come before the content of any.
    fn verify_files(&self, folder: &Path, names: &BTreeSet<String>) -> Result<(), FileError> {
        let altered = |name: &str, what: String| Err(FileError::Altered { path: folder.join(name), what });
        for name in names {
            if let Some(what) = self.wrong_size(folder, name)? {
                return altered(name, what);
            }
        }
        for name in names {
            if let Some(what) = self.wrong_content(folder, name)? {
                return altered(name, what);
            }
        }
        Ok(())
    }

    /// Whether a folder holds anything that this manifest does not list.
    pub fn has_more(&self, folder: &Path) -> Result<bool, FileError> {
        Ok(Self::present(folder)?.iter().any(|name| !self.files.contains_key(name)))
    }

    /// What is wrong with a file before it is read: it is not listed, is missing, or has another
    /// size.
    pub(crate) fn wrong_size(&self, folder: &Path, name: &str) -> Result<Option<String>, FileError> {
        let Some(record) = self.files.get(name) else { return Ok(Some("it is not in the manifest".to_string())) };
        Ok(match regular::if_there(regular::open(&folder.join(name))) {
            Ok(None) => Some("it is missing".to_string()),
            Ok(Some((_, size))) => {
                (size != record.size).then(|| format!("{} bytes are recorded, but it has {size}", record.size))
            }
            Err(FileError::NotRegular { found, .. }) => Some(format!("it is {found}, not a regular file")),
            Err(error) => return Err(error),
        })
    }

    /// What is wrong with the content of a listed file.
    pub(crate) fn wrong_content(&self, folder: &Path, name: &str) -> Result<Option<String>, FileError> {
        let Some(record) = self.files.get(name) else { return Ok(None) };
        let found = Hash::of_file(&folder.join(name))?;
        Ok((found != record.blake3).then(|| format!("the recorded hash is {}, but it has {found}", record.blake3)))
    }

    /// The names of all files that are recorded or there.
    pub(crate) fn listed_or_present(&self, folder: &Path) -> Result<BTreeSet<String>, FileError> {
        Ok(self.files.keys().cloned().chain(Self::present(folder)?).collect())
    }

    /// The contents of a folder, except the manifest and what a crash left behind.
    fn present(folder: &Path) -> Result<BTreeSet<String>, FileError> {
        let failed = |error| FileError::from_io("read", folder, error);
        let mut present = BTreeSet::new();
        for entry in std::fs::read_dir(folder).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            if name != Self::NAME && !is_partial(&name) {
                present.insert(name);
            }
        }
        Ok(present)
    }
}

/// Whether a folder without a manifest is what is left of a checkpoint or the final folder of a
/// run.
fn is_of_run(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).is_file();
    let is_result = has(receipt::NAME) && (has(layout::ADAPTER) || has(layout::MODEL));
    is_result || has(layout::STATE) && has(layout::OPTIMIZER)
}

fn digest(stored: &Stored<&BTreeMap<String, FileRecord>>) -> Hash {
    Hash::of_bytes(serde_json::to_string(stored).expect("strings and numbers have a JSON form").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_definition() {
        // From the test vectors of BLAKE3: the empty input.
        let empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        assert_eq!(Hash::of_bytes(b"").to_string(), empty);
        assert_eq!(Hash::parse(empty), Some(Hash::of_bytes(b"")));
        for bad in ["", &empty[1..], &empty.to_uppercase(), &format!("{empty}00"), &empty.replace('a', "ü")] {
            assert_eq!(Hash::parse(bad), None);
        }
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a");
        let bytes: Vec<u8> = (0..regular::PIECE_BYTES * 2 + 17).map(|i| (i % 253) as u8).collect();
        std::fs::write(&path, &bytes).expect("written");
        assert_eq!(Hash::of_file(&path).expect("read"), Hash::of_bytes(&bytes));
        assert!(Hash::of_file(folder.path()).is_err());
    }

    #[test]
    fn a_manifest_names_the_first_file_that_is_wrong() {
        let folder = tempfile::tempdir().expect("folder");
        let folder = folder.path();
        let put = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("written");
        put("a", "1");
        put("b", "2");
        put(".isobit-1-2.partial", "crashed");
        let manifest = Manifest::of(folder, ["b", "a"]).expect("made");
        manifest.write(folder).expect("written");
        assert_eq!(Manifest::read(folder).expect("read"), manifest);
        manifest.verify(folder).expect("as recorded");

        let refusal = || {
            let error = manifest.verify(folder).expect_err("altered");
            assert_eq!(error.exit_code(), 8);
            let FileError::Altered { path, what } = error else { panic!("{error}") };
            (path.file_name().expect("name").to_string_lossy().into_owned(), what)
        };
        put("b", "3");
        let (name, what) = refusal();
        assert!(name == "b" && what.starts_with("the recorded hash is "), "{what}");
        put("b", "22");
        assert_eq!(refusal(), ("b".to_string(), "1 bytes are recorded, but it has 2".to_string()));
        put("aa", "");
        assert_eq!(refusal(), ("aa".to_string(), "it is not in the manifest".to_string()));
        std::fs::remove_file(folder.join("a")).expect("removed");
        assert_eq!(refusal(), ("a".to_string(), "it is missing".to_string()));
    }

    /// Changes one letter anywhere, including the digests of run and base.
    #[test]
    fn a_manifest_covers_itself() {
        let folder = tempfile::tempdir().expect("folder");
        let folder = folder.path();
        assert_eq!(Manifest::check(folder).expect("another tool's"), None);
        std::fs::write(folder.join("a"), "1").expect("written");
        let made = Manifest::of(folder, ["a"]).expect("made");
        let load_in_4bit = Some("a-rule".to_string());
        let manifest = Manifest { run: Some(Hash([7; 32])), base: Some(Hash([8; 32])), load_in_4bit, ..made.clone() };
        manifest.write(folder).expect("written");
        std::fs::write(folder.join("notes"), "the user's").expect("written");
        assert_eq!(Manifest::check(folder).expect("as recorded"), Some(manifest.clone()));
        assert!(manifest.has_more(folder).expect("read"));
        let text = std::fs::read_to_string(folder.join(Manifest::NAME)).expect("read");
        for (at, _) in text.char_indices().filter(|(_, letter)| letter.is_ascii_alphanumeric()) {
            let mut bad = text.clone().into_bytes();
            bad[at] ^= 1;
            std::fs::write(folder.join(Manifest::NAME), &bad).expect("written");
            let error = Manifest::read(folder).expect_err("changed");
            assert_eq!(error.exit_code(), 8, "{at}: {error}");
        }
        // As written by an earlier version: only the files.
        let earlier = serde_json::json!({"schema": "isobit.manifest/1", "files": made.files});
        std::fs::write(folder.join(Manifest::NAME), earlier.to_string()).expect("written");
        assert_eq!(Manifest::check(folder).expect("read"), Some(made));
    }

    #[test]
    fn a_manifest_lists_plain_names_once() {
        let folder = tempfile::tempdir().expect("folder");
        let folder = folder.path();
        for name in ["../a", "/a", "", Manifest::NAME] {
            assert!(matches!(Manifest::of(folder, [name]), Err(FileError::Unwritable { .. })), "{name}");
        }
        assert!(matches!(Manifest::of(folder, ["a"]), Err(FileError::Missing { .. })));
        assert!(matches!(Manifest::read(folder), Err(FileError::Missing { .. })));
        let record = format!(r#"{{"size":1,"blake3":"{}"}}"#, "0".repeat(64));
        let cases = [
            (format!(r#"{{"schema":"isobit.manifest/1","files":{{"../a":{record}}}}}"#), "`../a` is not a file"),
            (format!(r#"{{"schema":"isobit.manifest/1","files":{{"a":{record},"a":{record}}}}}"#), "appears twice"),
            (r#"{"schema":"isobit.manifest/9","files":{}}"#.to_string(), "its schema is `isobit.manifest/9`"),
            (r#"{"schema":"isobit.manifest/1","files":{"a":{"size":1,"blake3":"x"}}}"#.to_string(), "not a hash of 64"),
            (r#"{"schema":"isobit.manifest/1","files":{},"more":1}"#.to_string(), "unknown field"),
        ];
        for (json, expected) in cases {
            std::fs::write(folder.join(Manifest::NAME), &json).expect("written");
            let error = Manifest::read(folder).expect_err(&json);
            assert!(error.to_string().contains(expected), "{error}");
            assert_eq!(error.exit_code(), 8);
        }
    }
}
