//! `receipt.json`: what a run was made from, where its chain ends, and the files it left
//! (`docs/receipt-format.md`).
//!
//! Equal runs share `made` and its digest, whatever they ran on; the rest is about one folder and
//! one machine. The file has one form only: reading it and writing it again must give its bytes.

use crate::atomic::write_atomically;
use crate::error::FileError;
use crate::hash::{FileRecord, Hash};
use crate::json;
use crate::regular;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;

pub const NAME: &str = "receipt.json";
const SCHEMA: &str = "isobit.receipt/1";
/// The start of the file.
pub const FILE_START: &str = "{\n  \"schema\": \"isobit.receipt/";
/// Digests of lines of a data file at most.
const LINES_MAX: usize = 1 << 16;
/// Hexadecimal digits of the digest of a line.
const LINE_DIGITS: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    schema: String,
    /// Version of the program.
    pub program: String,
    pub made: Made,
    /// Of `made`.
    pub digest: Hash,
    /// Files of the final folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<BTreeMap<String, FileRecord>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folder: Option<FolderRecord>,
    /// For information.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<BTreeMap<String, String>>,
}

/// What equal runs share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Made {
    pub identity: BTreeMap<String, String>,
    /// Keys that can influence the result.
    pub config: BTreeMap<String, String>,
    pub base: Base,
    /// Files of the tokenizer and the chat template.
    pub tokenizer: BTreeMap<String, FileRecord>,
    pub data: Vec<DataFile>,
    /// The end of the chain.
    pub updates: u64,
    pub link: Hash,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
    pub finished: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    pub files: BTreeMap<String, FileRecord>,
    pub tensors: BTreeMap<String, Hash>,
}

/// The best evaluation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Best {
    pub step: u64,
    /// Bits of a float64.
    pub loss: String,
}

/// A data file. Its path is no part of the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// `train` or `eval`.
    #[serde(rename = "use")]
    pub used_for: String,
    pub size: u64,
    pub blake3: Hash,
    pub line_count: u64,
    pub lines_per_digest: u64,
    /// 16 digits each.
    pub lines: String,
}

/// The files of a run folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FolderRecord {
    /// Small files, by name.
    pub files: BTreeMap<String, Hash>,
    /// Of the lines of the metrics, without timing.
    pub metrics: Hash,
    /// The manifest of every checkpoint, by the name of its folder.
    pub checkpoints: BTreeMap<String, Hash>,
}

impl Made {
    pub fn digest(&self) -> Hash {
        Hash::of_bytes(serde_json::to_string(self).expect("strings and numbers have a JSON form").as_bytes())
    }
}

impl Receipt {
    pub fn new(program: &str, made: Made) -> Self {
        let digest = made.digest();
        let (schema, program) = (SCHEMA.to_string(), program.to_string());
        Self { schema, program, made, digest, result: None, folder: None, environment: None }
    }

    /// The file's text.
    pub fn to_text(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("strings and numbers have a JSON form");
        // The closing brace.
        text.truncate(text.len() - 2);
        let check = Hash::of_bytes(text.as_bytes());
        format!("{text},\n  \"check\": \"{check}\"\n}}\n")
    }

    pub fn write(&self, folder: &Path) -> Result<(), FileError> {
        write_atomically(&folder.join(NAME), self.to_text().as_bytes())
    }

    /// Reads a receipt; every byte must be the one that was written.
    pub fn read(folder: &Path) -> Result<Self, FileError> {
        Self::read_file(&folder.join(NAME))
    }

    /// The same for a file of any name.
    pub fn read_file(path: &Path) -> Result<Self, FileError> {
        let text = json::read_text(path)?;
        let altered = |what: &str| FileError::Altered { path: path.to_path_buf(), what: what.to_string() };
        let Some((body, _)) = text.rsplit_once(",\n  \"check\": \"") else {
            return Err(FileError::malformed(path, "it has no checksum at its end"));
        };
        let receipt: Self = serde_json::from_str(&format!("{body}\n}}"))
            .map_err(|error| FileError::malformed(path, crate::name::told(&error)))?;
        if receipt.schema != SCHEMA {
            return Err(FileError::malformed(path, format!("this version reads `{SCHEMA}`")));
        }
        if receipt.made.digest() != receipt.digest {
            return Err(altered("its digest is not that of `made`"));
        }
        if receipt.to_text() != text {
            return Err(altered("its checksum does not match"));
        }
        Ok(receipt)
    }
}

impl DataFile {
    /// Reads a file once.
    pub fn of(path: &Path, used_for: &str) -> Result<Self, FileError> {
        let failed = |error| FileError::from_io("read", path, error);
        let mut reader = BufReader::with_capacity(1 << 20, regular::open(path)?.0);
        let (mut whole, mut size, mut digests) = (blake3::Hasher::new(), 0, Vec::new());
        let mut line = Vec::new();
        loop {
            line.clear();
            if reader.read_until(b'\n', &mut line).map_err(failed)? == 0 {
                break;
            }
            whole.update(&line);
            size += line.len() as u64;
            digests.push(short(&line));
        }
        let line_count = digests.len();
        let each = line_count.div_ceil(LINES_MAX).max(1);
        let of = |lines: &[String]| if let [one] = lines { one.clone() } else { short(lines.concat().as_bytes()) };
        Ok(Self {
            used_for: used_for.to_string(),
            size,
            blake3: Hash(*whole.finalize().as_bytes()),
            line_count: line_count as u64,
            lines_per_digest: each as u64,
            lines: digests.chunks(each).map(of).collect(),
        })
    }

    /// The first lines that differ from those of another file, counted from 1; None if the files
    /// are the same.
    pub fn first_difference(&self, other: &Self) -> Option<std::ops::RangeInclusive<u64>> {
        if self.blake3 == other.blake3 {
            return None;
        }
        let [ours, theirs] = [self, other].map(|file| file.lines.as_bytes().chunks(LINE_DIGITS));
        let equal = ours.zip(theirs).take_while(|(ours, theirs)| ours == theirs).count() as u64;
        let each = self.lines_per_digest.max(1);
        let first = equal * each + 1;
        Some(first..=first.saturating_add(each - 1).min(self.line_count.max(other.line_count).max(first)))
    }
}

fn short(bytes: &[u8]) -> String {
    let mut digits = Hash::of_bytes(bytes).to_string();
    digits.truncate(LINE_DIGITS);
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn receipt() -> Receipt {
        let made = Made {
            identity: BTreeMap::from([("run".to_string(), "a \"b\"".to_string())]),
            config: BTreeMap::new(),
            base: Base::default(),
            tokenizer: BTreeMap::new(),
            data: Vec::new(),
            updates: 3,
            link: Hash([7; 32]),
            best: Some(Best { step: 2, loss: "4004000000000000".to_string() }),
            finished: true,
        };
        let environment = Some(BTreeMap::from([("device".to_string(), "cpu".to_string())]));
        Receipt { environment, ..Receipt::new("0.1.0", made) }
    }

    #[test]
    fn every_changed_byte_of_a_receipt_is_found() {
        let folder = tempfile::tempdir().expect("folder");
        let folder = folder.path();
        receipt().write(folder).expect("written");
        assert_eq!(Receipt::read(folder).expect("as written"), receipt());
        let whole = std::fs::read(folder.join(NAME)).expect("read");
        for at in 0..whole.len() {
            for mask in [1, 4, 0x20] {
                let mut bad = whole.clone();
                bad[at] ^= mask;
                std::fs::write(folder.join(NAME), &bad).expect("written");
                assert_eq!(Receipt::read(folder).expect_err("changed").exit_code(), 8, "{at}");
            }
        }
        for length in 0..whole.len() {
            std::fs::write(folder.join(NAME), &whole[..length]).expect("written");
            assert_eq!(Receipt::read(folder).expect_err("cut").exit_code(), 8, "{length}");
        }
    }

    #[test]
    fn the_digest_is_of_what_equal_runs_share() {
        let one = receipt();
        let elsewhere = Receipt { environment: None, ..receipt() };
        assert_eq!(one.digest, elsewhere.digest);
        let other = Receipt::new("0.1.0", Made { updates: 4, ..one.made });
        assert_ne!(one.digest, other.digest);
    }

    #[test]
    fn a_changed_line_of_data_is_named() {
        let folder = tempfile::tempdir().expect("folder");
        let of = |text: &str| {
            let path = folder.path().join("data.jsonl");
            std::fs::write(&path, text).expect("written");
            DataFile::of(&path, "train").expect("read")
        };
        let text: String = (0..500).map(|line| ["line ", &line.to_string(), "\n"].concat()).collect();
        let file = of(&text);
        assert_eq!((file.line_count, file.lines.len(), file.lines_per_digest), (500, 8000, 1));
        assert_eq!(file.first_difference(&of(&text)), None);
        assert_eq!(file.first_difference(&of(&text.replace("line 41\n", "Line 41\n"))), Some(42..=42));
        assert_eq!(file.first_difference(&of(&text[..text.len() - 1])), Some(500..=500));
        assert_eq!(file.first_difference(&of(&format!("{text}more\n"))), Some(501..=501));
        assert_eq!(file.first_difference(&of("")), Some(1..=1));
        let many = |other: usize| {
            of(&(0..100_000).map(|line| (line + usize::from(line == other)).to_string() + "\n").collect::<String>())
        };
        let file = many(usize::MAX);
        assert_eq!((file.lines_per_digest, file.lines.len()), (2, 50_000 * LINE_DIGITS));
        assert_eq!(file.first_difference(&many(77_001)), Some(77_001..=77_002));
    }
}
