//! Parquet files as rows: every row becomes the JSON text that it would be in a JSONL file, so that
//! everything behind takes both alike. Columns that training does not read are null there.
//!
//! The format is read here and only decompression is left to crates: a file from anywhere must not
//! bring down the program or take more memory than its size allows, whatever it declares.

mod assemble;
mod levels;
mod pages;
mod schema;
mod thrift;
mod values;

use super::Extent;
use assemble::Reader;
use pages::{Bounds, Column};
use schema::{Node, Schema};
use std::cell::Cell;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use thrift::Fields;

const MAGIC: &[u8] = b"PAR1";
const MAGIC_ENCRYPTED: &[u8] = b"PARE";
/// BOUND: the footer. One takes about 100 bytes for a column of a row group.
const FOOTER_BYTES_MAX: usize = 16 << 20;
/// BOUND: bytes of rows, and of pages, for each byte of the file, and what any file may have.
const GROWTH_MAX: usize = 256;
const GROWTH_FREE: usize = 64 << 20;

/// The row of a problem, 0 if it is the whole file, and the problem.
pub(super) type Problem = (usize, String);

/// Whether a file is to be read as Parquet: by its name, or by its first bytes.
pub(super) fn is_parquet(path: &Path, bytes: &[u8]) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("parquet")) || bytes.starts_with(MAGIC)
}

/// Rows as JSON, each with its number, counted from 1. `is_read` tells which columns matter.
pub(super) fn objects(bytes: &[u8], is_read: impl Fn(&str) -> bool) -> Result<Vec<(usize, Vec<u8>)>, Problem> {
    let whole = |why: String| (0, why);
    let footer = footer(bytes).map_err(whole)?;
    let (footer, _) = Fields::read(footer).map_err(|why| whole(format!("its footer is damaged: {why}")))?;
    let elements = footer.structures(2).ok_or_else(|| whole("its footer names no schema".to_string()))?;
    let schema = Schema::read(&elements).map_err(whole)?;
    let columns = schema.fields.iter().map(|field| (field, is_read(&field.name))).collect::<Vec<_>>();
    for (field, _) in columns.iter().filter(|(_, is_read)| *is_read) {
        check_types(field, &schema).map_err(whole)?;
    }
    let limit = bytes.len().saturating_mul(GROWTH_MAX).saturating_add(GROWTH_FREE);
    let pages = Cell::new(limit);
    let mut table = Table { bytes, schema: &schema, columns, limit, pages: &pages, left: limit, rows: Vec::new() };
    for (index, group) in footer.structures(4).unwrap_or_default().into_iter().enumerate() {
        table.read_group(group).map_err(|(row, why)| match row {
            0 => (0, format!("row group {index}: {why}")),
            row => (row, why),
        })?;
    }
    match footer.size(3) {
        Some(count) if count == table.rows.len() => Ok(table.rows),
        count => Err(whole(format!("it has {} rows, but says {count:?}", table.rows.len()))),
    }
}

/// What the footer says of all rows; None if it cannot be read. Values that repeat are stored once,
/// so the text may be longer.
pub(super) fn extent(mut file: File, length: u64) -> Option<Extent> {
    // A footer is read behind the mark of a file.
    let tail = length.min(FOOTER_BYTES_MAX as u64);
    file.seek(SeekFrom::Start(length - tail)).ok()?;
    let mut bytes = MAGIC.to_vec();
    file.take(tail).read_to_end(&mut bytes).ok()?;
    let (footer, _) = Fields::read(footer(&bytes).ok()?).ok()?;
    let groups = footer.structures(4).unwrap_or_default();
    let group = |group: &&Fields<'_>| [2, 3].map(|field| group.size(field).unwrap_or(0) as u64);
    let groups: Vec<[u64; 2]> = groups.iter().map(group).collect();
    let unpacked = groups.iter().fold(0, |sum: u64, [bytes, _]| sum.saturating_add(*bytes));
    let (rows, bytes) = (footer.size(3)? as u64, unpacked.max(length));
    let on_average = |[bytes, rows]: [u64; 2]| bytes / rows.max(1);
    let longest = groups.into_iter().map(on_average).max().unwrap_or(0).max(on_average([bytes, rows]));
    Some(Extent { rows, bytes, longest })
}

/// The bytes of the footer, which stands before its length and the mark at the end.
fn footer(bytes: &[u8]) -> Result<&[u8], String> {
    if bytes.starts_with(MAGIC_ENCRYPTED) {
        return Err("it is encrypted".to_string());
    }
    let body = bytes.strip_prefix(MAGIC).ok_or("it does not begin with `PAR1`")?;
    if body.ends_with(MAGIC_ENCRYPTED) {
        return Err("its footer is encrypted".to_string());
    }
    let body = body.strip_suffix(MAGIC).ok_or("it does not end with `PAR1`: is it cut off?")?;
    let (body, length) = body.split_last_chunk::<4>().ok_or("it is too short")?;
    let length = u32::from_le_bytes(*length) as usize;
    if length > FOOTER_BYTES_MAX {
        return Err(format!("its footer claims to have {length} bytes, {FOOTER_BYTES_MAX} at most"));
    }
    let start = body.len().checked_sub(length).ok_or("its footer is longer than the file")?;
    Ok(&body[start..])
}

fn check_types(field: &Node, schema: &Schema) -> Result<(), String> {
    for leaf in &schema.leaves[field.leaves.clone()] {
        if let Err(what) = &leaf.meaning {
            let path = leaf.path.escape_debug();
            return Err(format!("column `{path}` holds {what}, but texts, numbers, lists and structures are read"));
        }
    }
    Ok(())
}

/// A file that is being read.
struct Table<'f> {
    bytes: &'f [u8],
    schema: &'f Schema,
    /// The fields of a row, and whether they are read.
    columns: Vec<(&'f Node, bool)>,
    /// BOUND: bytes of the pages in memory and of rows; what is left of all pages, and of rows.
    limit: usize,
    pages: &'f Cell<usize>,
    left: usize,
    rows: Vec<(usize, Vec<u8>)>,
}

impl<'f> Table<'f> {
    fn read_group(&mut self, group: &Fields<'_>) -> Result<(), Problem> {
        let whole = |why: &str| (0, why.to_string());
        let chunks = group.structures(1).ok_or_else(|| whole("it names no columns"))?;
        let count = group.size(3).ok_or_else(|| whole("it does not say how many rows it has"))?;
        if chunks.len() != self.schema.leaves.len() {
            let what = format!("it has {} columns, but the schema {}", chunks.len(), self.schema.leaves.len());
            return Err((0, what));
        }
        let next_row = self.rows.len() + 1;
        let mut leaves: Vec<Option<Column<'f>>> = (0..chunks.len()).map(|_| None).collect();
        let read = self.columns.iter().filter(|(_, is_read)| *is_read).flat_map(|(field, _)| field.leaves.clone());
        let read: Vec<usize> = read.collect();
        let bounds = Bounds { page: self.limit / read.len().max(1), left: self.pages };
        for &leaf in &read {
            let about = &self.schema.leaves[leaf];
            let column = Column::open(self.bytes, about, chunks[leaf], bounds);
            leaves[leaf] = Some(column.map_err(|why| in_column(next_row, &about.path, &why))?);
        }
        let mut reader = Reader::new(leaves);
        for _ in 0..count {
            let number = self.rows.len() + 1;
            let row = reader.row(&self.columns).map_err(|(path, why)| in_column(number, &path, &why))?;
            // What a row costs beside its text keeps files of nothing but nulls in bounds.
            let cost = row.len() + size_of::<(usize, Vec<u8>)>();
            self.left = self.left.checked_sub(cost).ok_or_else(|| {
                let (bytes, limit) = (self.bytes.len(), self.limit);
                (number, format!("{bytes} bytes of Parquet grow beyond {limit} bytes of rows"))
            })?;
            self.rows.push((number, row));
        }
        match reader.unfinished() {
            None => Ok(()),
            Some(column) => Err(in_column(self.rows.len(), &column.leaf.path, "it has more values than rows")),
        }
    }
}

fn in_column(row: usize, path: &str, why: &str) -> Problem {
    (row, format!("column `{}`: {why}", path.escape_debug()))
}

#[cfg(test)]
mod tests {
    use super::super::format::KEYS;
    use super::super::json::Json;
    use super::*;

    /// Files that pyarrow wrote (`tools/reference/parquet_data.py`), with their names.
    fn files(wanted: impl Fn(&str) -> bool) -> Vec<(String, Vec<u8>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet");
        let names = std::fs::read_dir(folder).expect("fixtures").map(|file| file.expect("a file").path());
        let name = |path: &Path| path.file_stem().and_then(|name| name.to_str()).expect("a name").to_string();
        let mut files: Vec<_> = names
            .filter(|path| path.extension().is_some_and(|extension| extension == "parquet") && wanted(&name(path)))
            .map(|path| (name(&path), std::fs::read(&path).expect("a file")))
            .collect();
        files.sort();
        files
    }

    /// The rows of a file, and what they are in the JSONL file beside it.
    fn both(name: &str, bytes: &[u8]) -> [Vec<(usize, Json)>; 2] {
        let rows = objects(bytes, |column| KEYS.contains(&column)).unwrap_or_else(|why| panic!("{name}: {why:?}"));
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet");
        let beside = std::fs::read_to_string(folder.join(format!("{name}.jsonl"))).ok();
        let beside = beside.unwrap_or_else(|| {
            let stem = name.split('-').next().expect("a stem");
            std::fs::read_to_string(folder.join(format!("{stem}.jsonl"))).expect("rows")
        });
        let parsed = |row: &str| Json::parse(row).unwrap_or_else(|why| panic!("{name}: {why}: {row}"));
        let rows = rows.iter().map(|(row, text)| (*row, parsed(std::str::from_utf8(text).expect("UTF-8"))));
        [rows.collect(), beside.lines().enumerate().map(|(index, line)| (index + 1, parsed(line))).collect()]
    }

    #[test]
    fn rows_are_those_of_the_same_data_in_jsonl() {
        let files = files(|name| !name.starts_with("refused"));
        assert_eq!(files.len(), 19);
        for (name, bytes) in files {
            let [found, mut wanted] = both(&name, &bytes);
            for (_, row) in &mut wanted {
                let Json::Object(entries) = row else { panic!("an object") };
                entries
                    .iter_mut()
                    .filter(|(key, _)| !KEYS.contains(&key.as_str()))
                    .for_each(|(_, value)| *value = Json::Null);
                if name == "pairs-beside" {
                    entries.extend(["when", "image"].map(|key| (key.to_string(), Json::Null)));
                }
            }
            assert_eq!(found, wanted, "{name}");
        }
    }

    #[test]
    fn what_has_no_form_in_json_is_refused_by_column() {
        for (name, row, words) in [
            ("timestamps", 0, "column `text` holds timestamps"),
            ("bytes", 0, "column `text` holds bytes"),
            ("decimals", 0, "column `text` holds decimals"),
            ("map", 0, "holds a map"),
            ("depth", 0, "nested too deeply"),
            ("infinite", 1, "column `text`: the number inf"),
            ("growth", 65, "grow beyond"),
        ] {
            let (_, bytes) = &files(|file| file == format!("refused-{name}"))[0];
            let (at, why) = objects(bytes, |_| true).expect_err(name);
            assert!(at == row && why.contains(words), "{name}: {at}: {why}");
            assert!(objects(bytes, |_| false).is_ok() || ["growth", "depth"].contains(&name), "{name}");
        }
    }

    #[test]
    fn a_file_that_is_cut_off_is_refused() {
        for (name, bytes) in files(|name| ["messages-snappy", "tokens-64"].contains(&name)) {
            for length in 0..bytes.len() {
                assert!(objects(&bytes[..length], |_| true).is_err(), "{name}: {length}");
            }
        }
    }

    /// No byte of a file makes the reader panic, and a checksum finds every one in a page.
    #[test]
    fn changed_bytes_end_in_rows_or_an_error() {
        for (name, bytes) in files(|name| !name.starts_with("refused-growth")) {
            for at in 0..bytes.len() {
                for change in [0x01, 0x80, 0xff] {
                    let mut bytes = bytes.clone();
                    bytes[at] ^= change;
                    let rows = objects(&bytes, |_| true);
                    let first_page = (64..80).contains(&at);
                    assert!(!(name == "messages-pages" && first_page) || rows.is_err(), "byte {at} of {name}");
                }
            }
        }
    }
}
