//! CSV and TSV files as rows: the first line names the columns, and every line after it becomes an
//! object with a text for each column.

use super::error::RowError;
use super::records::Located;
use csv::{ErrorKind, Position, ReaderBuilder, StringRecord};
use std::collections::BTreeSet;
use std::path::Path;

/// The mark between cells, if the name of a file says that it is a table.
pub(super) fn delimiter(path: &Path) -> Option<u8> {
    let extension = path.extension()?.to_str()?.to_ascii_lowercase();
    match extension.as_str() {
        "csv" => Some(b','),
        "tsv" => Some(b'\t'),
        _ => None,
    }
}

/// Rows as JSON, each with its first line.
pub(super) fn objects(bytes: &[u8], delimiter: u8) -> Result<Vec<(usize, Vec<u8>)>, Located> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let broken = |line: usize, why: &str| (line, RowError::Csv { why: why.to_owned() });
    if bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff") {
        return Err(broken(1, "the file is UTF-16: save it as UTF-8"));
    }
    // A cell that does not end would swallow all rows after it. A cell of several lines has two
    // with an odd number.
    let is_odd = |bytes: &[u8]| bytes.iter().fold(false, |odd, byte| odd ^ (*byte == b'"'));
    if is_odd(bytes) {
        let first = bytes.split(|byte| *byte == b'\n').position(is_odd).unwrap_or(0);
        let why = "the number of quotation marks is odd, first in this line: a quoted cell does not end";
        return Err(broken(first + 1, why));
    }
    let mut lines = Lines { bytes, at: 0, line: 1 };
    let mut reader = ReaderBuilder::new().delimiter(delimiter).from_reader(bytes);
    let columns = reader.headers().map_err(|error| located(&error, &mut lines))?.clone();
    let mut names = BTreeSet::new();
    if let Some(twice) = columns.iter().find(|name| !names.insert(*name)) {
        return Err(broken(1, &format!("two columns are called `{twice}`")));
    }
    if let (1, Some(name)) = (columns.len(), columns.get(0).filter(|name| name.contains(';'))) {
        let why =
            format!("its only column is called `{}`: are cells separated by `;`? Use commas", name.escape_debug());
        return Err(broken(1, &why));
    }
    let mut rows = Vec::new();
    let mut row = StringRecord::new();
    while reader.read_record(&mut row).map_err(|error| located(&error, &mut lines))? {
        rows.push((lines.of(row.position()), object(&columns, &row)));
    }
    Ok(rows)
}

fn object(columns: &StringRecord, row: &StringRecord) -> Vec<u8> {
    let text = |text: &str| serde_json::to_string(text).expect("a text has a JSON form");
    let cells = columns.iter().zip(row).map(|(name, cell)| format!("{}:{}", text(name), text(cell)));
    format!("{{{}}}", cells.collect::<Vec<_>>().join(",")).into_bytes()
}

/// Counts lines from row to row. The reader's own count is one less after `\r\n`: there a row
/// begins between the two.
struct Lines<'a> {
    bytes: &'a [u8],
    at: usize,
    line: usize,
}

impl Lines<'_> {
    fn of(&mut self, position: Option<&Position>) -> usize {
        let start = position.map_or(0, |position| usize::try_from(position.byte()).unwrap_or(usize::MAX));
        while let Some(byte) = self.bytes.get(self.at).filter(|byte| self.at < start || b"\r\n".contains(byte)) {
            self.line += usize::from(*byte == b'\n');
            self.at += 1;
        }
        self.line
    }
}

fn located(error: &csv::Error, lines: &mut Lines<'_>) -> Located {
    let (at, why) = match error.kind() {
        ErrorKind::UnequalLengths { pos, expected_len, len } => {
            (lines.of(pos.as_ref()), format!("{len} cells, but the first line names {expected_len} columns"))
        }
        ErrorKind::Utf8 { pos, err } => (lines.of(pos.as_ref()), format!("cell {} is not UTF-8", err.field() + 1)),
        other => (1, format!("{other:?}")),
    };
    (at, RowError::Csv { why })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str) -> Vec<(usize, String)> {
        let rows = objects(text.as_bytes(), b',').expect("rows");
        rows.into_iter().map(|(line, json)| (line, String::from_utf8(json).expect("UTF-8"))).collect()
    }

    #[test]
    fn cells_become_texts() {
        let text = "\u{feff}prompt,completion\r\n\"a, \"\"b\"\"\nc\",1\r\n\u{e9},\n";
        let expected = [
            (2, "{\"prompt\":\"a, \\\"b\\\"\\nc\",\"completion\":\"1\"}".to_string()),
            (4, "{\"prompt\":\"\u{e9}\",\"completion\":\"\"}".to_string()),
        ];
        assert_eq!(rows(text), expected);
        assert_eq!(rows("text\n"), []);
        assert_eq!(rows(""), []);
        let tabs = objects(b"a\tb\n1,2\t3\n", b'\t').expect("rows");
        assert_eq!(tabs, [(2, b"{\"a\":\"1,2\",\"b\":\"3\"}".to_vec())]);
    }

    #[test]
    fn broken_tables_say_where() {
        for (bytes, at, part) in [
            (&b"a,b\n1,2\n3\n"[..], 3, "1 cells"),
            (b"a,b\n1,2,3\n", 2, "3 cells"),
            (b"a,a\n1,2\n", 1, "two columns"),
            (b"a\n\"b\n", 2, "quotation marks"),
            (b"a\n\"b\"\nc\n\"d\n", 4, "quotation marks"),
            (b"prompt;completion\n1;2\n", 1, "separated by `;`"),
            (b"\xff\xfea\0\n\0", 1, "UTF-16"),
            (b"a,b\nx,\xff\n", 2, "cell 2 is not UTF-8"),
        ] {
            let (line, why) = objects(bytes, b',').expect_err(part);
            assert_eq!(line, at, "{why}");
            assert!(why.to_string().contains(part), "{why}");
        }
    }

    #[test]
    fn the_name_decides() {
        for (name, expected) in [("a.csv", Some(b',')), ("a.TSV", Some(b'\t')), ("a.jsonl", None), ("csv", None)] {
            assert_eq!(delimiter(Path::new(name)), expected, "{name}");
        }
    }
}
