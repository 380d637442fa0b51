//! `receipt.json`: what a run was made from, where its chain ends, and the files it left
//! (`docs/receipt-format.md`).
//!
//! Equal runs share `made`, whatever they ran on. The digest covers it, the division into segments
//! and every file of the result; the rest is about one folder and one machine. The file has one
//! form only: reading it and writing it again must give its bytes.

use crate::atomic::write_atomically;
use crate::error::FileError;
use crate::hash::{FileRecord, Hash};
use crate::json;
use crate::name::{is_plain, quoted};
use crate::regular;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::path::Path;

pub const NAME: &str = "receipt.json";
const SCHEMA: &str = "isobit.receipt/2";
/// Its digest covers `made` alone, by BLAKE3.
const EARLIER: &str = "isobit.receipt/1";
/// The start of the file.
pub const FILE_START: &str = "{\n  \"schema\": \"isobit.receipt/";
/// Files that the tokenizer and the chat template are read from.
pub const TOKENIZER_FILES: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
];
/// What a run's identity may consist of, in the order of its digest; the last two are optional.
pub const IDENTITY: [&str; 7] = ["run", "data", "base", "profile", "numerics", "start", "load_in_4bit"];
/// Those of the identity that are digests of many things, each of which may be named instead.
pub const DIGESTS_OF_INPUTS: [&str; 3] = ["run", "data", "base"];
/// What a data file may be used for.
const USES: [&str; 2] = ["train", "eval"];
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
    /// Updates of a segment that a proof chooses; none in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segment: Option<u64>,
    /// Of `made`, `segment` and `result`.
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
    /// Rows of an epoch, packed ones counted once; none in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// Trained tensors that files hold in another layout than memory, which the chain has digests
    /// of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reordered: Vec<String>,
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

/// What the digest covers, in the order of the file.
#[derive(Serialize)]
struct Covered<'a> {
    made: &'a Made,
    segment: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<&'a BTreeMap<String, FileRecord>>,
}

/// `identity.run`: BLAKE3 of the keys that can influence the result.
pub fn config_digest(config: &BTreeMap<String, String>) -> Hash {
    let mut text = String::from("isobit.run/1\n");
    for (key, value) in config {
        writeln!(text, "{key} = {value}").expect("writing to a string succeeds");
    }
    Hash::of_bytes(text.as_bytes())
}

/// The digest of an identity, which manifests have: BLAKE3 of its fields as JSON without spaces, in
/// a fixed order.
pub fn identity_digest(identity: &BTreeMap<String, String>) -> Hash {
    let text = |value: &str| serde_json::to_string(value).expect("strings have a JSON form");
    let field = |name: &&str| Some(format!("{}:{}", text(name), text(identity.get(*name)?)));
    let fields: Vec<String> = IDENTITY.iter().filter_map(field).collect();
    Hash::of_bytes(format!("{{{}}}", fields.join(",")).as_bytes())
}

impl Base {
    /// Configs come before the files of weights.
    pub const CONFIGS: [&str; 2] = ["config.json", "quantize_config.json"];

    /// `identity.base`: of the hashes of the files, configs first.
    pub fn digest(&self) -> Hash {
        let configs = Self::CONFIGS.iter().filter_map(|name| self.files.get(*name));
        let weights = self.files.iter().filter(|(name, _)| !Self::CONFIGS.contains(&name.as_str()));
        let all = configs.chain(weights.map(|(_, record)| record));
        Hash::of_bytes(all.map(|record| record.blake3.to_string()).collect::<String>().as_bytes())
    }
}

impl Receipt {
    pub fn new(program: &str, made: Made, segment: u64, result: Option<BTreeMap<String, FileRecord>>) -> Self {
        let (schema, program) = (SCHEMA.to_string(), program.to_string());
        let digest = Hash([0; 32]);
        let mut receipt =
            Self { schema, program, made, segment: Some(segment), digest, result, folder: None, environment: None };
        receipt.digest = receipt.computed_digest();
        receipt
    }

    /// The digest of what it says. SHA-256, so that a standard library is enough to compute it.
    pub fn computed_digest(&self) -> Hash {
        let text = |value: Result<String, _>| value.expect("strings and numbers have a JSON form");
        match self.segment {
            None => Hash::of_bytes(text(serde_json::to_string(&self.made)).as_bytes()),
            Some(segment) => {
                let covered = Covered { made: &self.made, segment, result: self.result.as_ref() };
                Hash(Sha256::digest(text(serde_json::to_string(&covered))).into())
            }
        }
    }

    /// Version 2 has `segment` and `made.rows`, version 1 neither. Without them a receipt of
    /// version 2 would escape the checks that need them.
    fn other_version(&self) -> Option<String> {
        let both = [self.segment.is_some(), self.made.rows.is_some()];
        match self.schema.as_str() {
            SCHEMA if both != [true; 2] => Some(format!("`{SCHEMA}` has `segment` and `made.rows`")),
            EARLIER if both != [false; 2] => Some(format!("`{EARLIER}` has neither `segment` nor `made.rows`")),
            SCHEMA | EARLIER => None,
            _ => Some(format!("this version reads `{SCHEMA}` and `{EARLIER}`")),
        }
    }

    /// What a run would not write, whatever it was made from. The digest of a config is of lines:
    /// keys are plain and values have one line, so that readers cannot divide them differently.
    fn strange(&self) -> Option<String> {
        let Made { identity, config, base, tokenizer, data, .. } = &self.made;
        let files = base.files.keys().chain(tokenizer.keys());
        if let Some(name) = files.chain(self.result.iter().flat_map(BTreeMap::keys)).find(|name| !is_plain(name)) {
            return Some(format!("{} is not a file of a folder", quoted(name)));
        }
        if let Some(name) = identity.keys().find(|name| !IDENTITY.contains(&name.as_str())) {
            return Some(format!("{} is no part of an identity", quoted(name)));
        }
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'.';
        let is_line = |(key, value): (&String, &String)| key.bytes().all(is_part) && !value.contains('\n');
        if let Some((key, _)) = config.iter().find(|one| !is_line(*one)) {
            return Some(format!("{} is not a line of a config", quoted(key)));
        }
        if let Some(file) = data.iter().find(|file| !USES.contains(&file.used_for.as_str())) {
            return Some(format!("{} is no use of a data file", quoted(&file.used_for)));
        }
        if data.iter().any(|file| !file.has_digests_of_its_lines()) {
            return Some("a data file has not as many digests as its lines give".to_string());
        }
        (self.segment == Some(0)).then(|| "a segment has no updates".to_string())
    }

    /// As it stands in the final folder: without what is about the run folder or the machine.
    #[must_use]
    pub fn of_result(&self) -> Self {
        Self { folder: None, environment: None, ..self.clone() }
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
        if let Some(what) = receipt.other_version().or_else(|| receipt.strange()) {
            return Err(FileError::malformed(path, what));
        }
        if receipt.computed_digest() != receipt.digest {
            return Err(altered("its digest is not that of what it says"));
        }
        if receipt.to_text() != text {
            return Err(altered("its checksum does not match"));
        }
        Ok(receipt)
    }
}

impl DataFile {
    /// Reads a file once, or twice if it has more lines than digests. Memory depends neither on the
    /// lines nor on their length.
    pub fn of(path: &Path, used_for: &str) -> Result<Self, FileError> {
        let file = Self::grouped(path, used_for, 1)?;
        match file.line_count.div_ceil(LINES_MAX as u64) {
            0 | 1 => Ok(file),
            each => Self::grouped(path, used_for, each),
        }
    }

    /// With a digest for every `each` lines.
    fn grouped(path: &Path, used_for: &str, each: u64) -> Result<Self, FileError> {
        let (mut whole, mut size) = (blake3::Hasher::new(), 0);
        let see = |piece: &[u8]| {
            whole.update(piece);
            size += piece.len() as u64;
        };
        let mut lines = LineDigests { each, ..LineDigests::default() };
        read_lines(path, see, |digits| lines.push(digits))?;
        lines.end_group();
        Ok(Self {
            used_for: used_for.to_string(),
            size,
            blake3: Hash(*whole.finalize().as_bytes()),
            line_count: lines.count,
            lines_per_digest: each,
            lines: lines.digits,
        })
    }

    /// How lines are grouped follows from their number.
    fn has_digests_of_its_lines(&self) -> bool {
        let (each, most) = (self.lines_per_digest, LINES_MAX as u64);
        let digests = self.line_count.div_ceil(each.max(1));
        each == self.line_count.div_ceil(most).max(1) && self.lines.len() as u64 == digests * LINE_DIGITS as u64
    }

    /// Whether this is the same file, whatever it is used for.
    pub(crate) fn is_same_file(&self, other: &Self) -> bool {
        *self == Self { used_for: self.used_for.clone(), ..other.clone() }
    }

    /// A file as it is now, with the lines of a digest that this one has: only such digests can be
    /// compared.
    pub(crate) fn now(&self, path: &Path) -> Result<Self, FileError> {
        Self::grouped(path, &self.used_for, self.lines_per_digest)
    }

    /// The first lines of a file that are not those recorded here; None if it is the same file.
    pub fn first_difference_in(&self, path: &Path) -> Result<Option<LineRange>, FileError> {
        Ok(self.first_difference(&self.now(path)?))
    }

    /// The first lines that differ from those of another file; None if the files are the same.
    /// Their digests must be of equally many lines.
    pub(crate) fn first_difference(&self, other: &Self) -> Option<LineRange> {
        if self.blake3 == other.blake3 {
            return None;
        }
        let [ours, theirs] = [self, other].map(|file| file.lines.as_bytes().chunks(LINE_DIGITS));
        let equal = ours.zip(theirs).take_while(|(ours, theirs)| ours == theirs).count() as u64;
        let each = self.lines_per_digest;
        let first = equal.saturating_mul(each).saturating_add(1);
        let last = first.saturating_add(each - 1).min(self.line_count.max(other.line_count).max(first));
        Some(LineRange { first, last })
    }
}

/// Lines that share a digest, counted from 1: one of them is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineRange {
    pub first: u64,
    pub last: u64,
}

impl fmt::Display for LineRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, last } = self;
        if first == last { write!(f, "line {first}") } else { write!(f, "one of lines {first} to {last}") }
    }
}

/// Digests of groups of lines, `LINES_MAX` of them at most: that of a single line is its own, that
/// of several is of their digits one after another.
#[derive(Default)]
struct LineDigests {
    /// Lines of a group; the last one has what is left.
    each: u64,
    count: u64,
    digits: String,
    /// The digits of the lines of the group so far.
    group: blake3::Hasher,
    /// Of the last line.
    last: String,
}

impl LineDigests {
    fn push(&mut self, digits: &str) {
        self.count += 1;
        self.group.update(digits.as_bytes());
        digits.clone_into(&mut self.last);
        if self.count.is_multiple_of(self.each) {
            self.end_group();
        }
    }

    fn end_group(&mut self) {
        let bytes = self.group.count();
        if bytes > 0 && self.digits.len() < LINES_MAX * LINE_DIGITS {
            let is_one = bytes == LINE_DIGITS as u64;
            self.digits.push_str(&if is_one { std::mem::take(&mut self.last) } else { first_digits(&self.group) });
        }
        self.group.reset();
    }
}

/// Shows a file piece by piece, and the digits of each of its lines.
fn read_lines(path: &Path, mut see: impl FnMut(&[u8]), mut line: impl FnMut(&str)) -> Result<(), FileError> {
    let (mut hasher, mut is_open) = (blake3::Hasher::new(), false);
    regular::read_in_pieces(path, |piece| {
        see(piece);
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            hasher.update(part);
            is_open = !part.ends_with(b"\n");
            if !is_open {
                line(&first_digits(&hasher));
                hasher.reset();
            }
        }
    })?;
    if is_open {
        line(&first_digits(&hasher));
    }
    Ok(())
}

/// `LINE_DIGITS` of a hash.
fn first_digits(hasher: &blake3::Hasher) -> String {
    let [a, b, c, d, e, f, g, h, ..] = *hasher.finalize().as_bytes();
    format!("{:016x}", u64::from_be_bytes([a, b, c, d, e, f, g, h]))
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
            rows: Some(2),
            reordered: Vec::new(),
            updates: 3,
            link: Hash([7; 32]),
            best: Some(Best { step: 2, loss: "4004000000000000".to_string() }),
            finished: true,
        };
        let environment = Some(BTreeMap::from([("device".to_string(), "cpu".to_string())]));
        Receipt { environment, ..Receipt::new("0.1.0", made, 2, Some(BTreeMap::new())) }
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
    fn the_digest_covers_inputs_segments_and_result() {
        let one = receipt();
        let elsewhere = Receipt { environment: None, ..receipt() };
        assert_eq!(one.digest, elsewhere.digest);
        let with = |updates: u64, segment: u64, size: u64| {
            let files = BTreeMap::from([("a".to_string(), FileRecord { size, blake3: Hash([0; 32]) })]);
            Receipt::new("0.1.0", Made { updates, ..receipt().made }, segment, Some(files)).digest
        };
        let all = [with(3, 2, 5), with(4, 2, 5), with(3, 1, 5), with(3, 2, 6), one.digest];
        let different: std::collections::BTreeSet<Hash> = all.into_iter().collect();
        assert_eq!(different.len(), all.len());
    }

    /// Receipts of version 1 are read by their rule, and names outside of a folder are refused.
    #[test]
    fn earlier_receipts_are_read_and_names_are_plain() {
        let folder = tempfile::tempdir().expect("folder");
        let folder = folder.path();
        let made = Made { rows: None, ..receipt().made };
        let mut earlier = Receipt { schema: EARLIER.to_string(), segment: None, made, ..receipt() };
        earlier.digest = earlier.computed_digest();
        earlier.write(folder).expect("written");
        assert_eq!(Receipt::read(folder).expect("version 1"), earlier);
        for (schema, segment, rows) in [
            (SCHEMA, None, None),
            (SCHEMA, Some(2), None),
            (SCHEMA, None, Some(2)),
            (EARLIER, Some(2), None),
            (EARLIER, None, Some(2)),
            ("isobit.receipt/3", Some(2), Some(2)),
        ] {
            let made = Made { rows, ..receipt().made };
            let mut mixed = Receipt { schema: schema.to_string(), segment, made, ..receipt() };
            mixed.digest = mixed.computed_digest();
            mixed.write(folder).expect("written");
            assert_eq!(
                Receipt::read(folder).expect_err("of no version").exit_code(),
                8,
                "{schema} {segment:?} {rows:?}"
            );
        }
        let mut outside = receipt();
        let record = FileRecord { size: 1, blake3: Hash([0; 32]) };
        outside.made.base.files.insert("../../etc/hostname".to_string(), record);
        outside.digest = outside.computed_digest();
        outside.write(folder).expect("written");
        let error = Receipt::read(folder).expect_err("outside").to_string();
        assert!(error.contains("is not a file of a folder"), "{error}");
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
        let found = |file: &DataFile, text: &str| {
            let path = folder.path().join("data.jsonl");
            std::fs::write(&path, text).expect("written");
            file.first_difference_in(&path).expect("read").map(|lines| lines.to_string())
        };
        assert_eq!(found(&file, &text), None);
        let line = |number: u32| Some(format!("line {number}"));
        assert_eq!(found(&file, &text.replace("line 41\n", "Line 41\n")), line(42));
        assert_eq!(found(&file, &text[..text.len() - 1]), line(500));
        assert_eq!(found(&file, &format!("{text}more\n")), line(501));
        assert_eq!(found(&file, ""), line(1));
        // More lines than digests: they are compared in the groups that were recorded, though the
        // file has so few lines now that each would have its own digest, or so many more.
        let text = |count: usize, other: usize| {
            (0..count).map(|line| (line + usize::from(line == other)).to_string() + "\n").collect::<String>()
        };
        let file = of(&text(100_001, usize::MAX));
        assert_eq!((file.lines_per_digest, file.lines.len()), (2, 50_001 * LINE_DIGITS));
        let pair = |first: u32| Some(format!("one of lines {first} to {}", first + 1));
        assert_eq!(found(&file, &text(100_001, 77_001)), pair(77_001));
        assert_eq!(found(&file, &text(60_000, 77)), pair(77));
        assert_eq!(found(&file, &text(200_000, 77_001)), pair(77_001));
        assert_eq!(found(&file, &text(60_000, usize::MAX)), pair(60_001));
        assert_eq!(found(&file, &text(100_001, 100_000)), line(100_001));
        let short = of(&text(60_000, usize::MAX));
        assert_eq!(found(&short, &text(100_001, 59_000)), line(59_001));
    }
}
