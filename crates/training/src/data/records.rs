//! Cuts a data file into rows before anything is parsed: lines of JSONL, or the elements of one
//! JSON array. Every row records its first line, for errors.

use super::error::RowError;

/// BOUND: bytes of one row.
pub(super) const ROW_BYTES_MAX: usize = 16 << 20;
/// BOUND: rows of one file.
const ROWS_MAX: usize = 1 << 28;

/// One row, not yet parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record<'a> {
    /// Counted from 1.
    pub(super) line: usize,
    pub(super) bytes: &'a [u8],
}

/// The line of a problem, and the problem.
pub(super) type Located = (usize, RowError);

pub(super) fn split(bytes: &[u8]) -> Result<Vec<Record<'_>>, Located> {
    let bytes = without_mark(bytes);
    let records = if is_array(bytes) { elements(bytes)? } else { lines(bytes) };
    if records.len() > ROWS_MAX {
        let error = RowError::TooMany { field: "the file".into(), count: records.len(), limit: ROWS_MAX };
        return Err((records[ROWS_MAX].line, error));
    }
    Ok(records)
}

/// Without the byte order mark that some editors put first.
fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// Whether a file that begins so holds one array.
pub(super) fn is_array(bytes: &[u8]) -> bool {
    without_mark(bytes).iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[')
}

/// Lines that are not blank.
fn lines(bytes: &[u8]) -> Vec<Record<'_>> {
    let numbered = bytes.split(|byte| *byte == b'\n').enumerate();
    let records = numbered.map(|(index, bytes)| Record { line: index + 1, bytes: bytes.trim_ascii() });
    records.filter(|record| !record.bytes.is_empty()).collect()
}

/// Scans an array at byte level; the parser checks that the elements are JSON.
fn elements(bytes: &[u8]) -> Result<Vec<Record<'_>>, Located> {
    let mut records = Vec::new();
    let (mut line, mut depth, mut in_text, mut escaped) = (1, 0usize, false, false);
    let (mut start, mut start_line, mut end) = (0, 1, None);
    let broken = |line: usize, why: &str| (line, RowError::Json { why: why.to_owned() });
    for (at, &byte) in bytes.iter().enumerate() {
        if byte == b'\n' {
            line += 1;
        }
        if in_text {
            in_text = escaped || byte != b'"';
            escaped = !escaped && byte == b'\\';
            continue;
        }
        if byte.is_ascii_whitespace() {
            continue;
        }
        if end.is_some() {
            return Err(broken(line, "something follows the end of the array"));
        }
        let closes = matches!(byte, b']' | b'}');
        if depth == 1 && (closes || byte == b',') {
            let element = bytes[start..at].trim_ascii();
            let empty_array = closes && records.is_empty();
            if !element.is_empty() {
                records.push(Record { line: start_line, bytes: element });
            } else if !empty_array {
                return Err(broken(line, "an element of the array is missing"));
            }
            start = at + 1;
        } else if depth == 1 && bytes[start..at].trim_ascii().is_empty() {
            (start, start_line) = (at, line);
        }
        match byte {
            b'"' => in_text = true,
            b'[' | b'{' => {
                depth += 1;
                if depth == 1 {
                    start = at + 1;
                }
            }
            b']' | b'}' => {
                depth -= 1;
                end = (depth == 0).then_some(at);
            }
            _ => {}
        }
    }
    if end.is_none() { Err(broken(line, "the array does not end")) } else { Ok(records) }
}

impl Record<'_> {
    /// The row as text.
    pub(super) fn text(&self) -> Result<&str, RowError> {
        if self.bytes.len() > ROW_BYTES_MAX {
            return Err(RowError::TooLong { bytes: self.bytes.len(), limit: ROW_BYTES_MAX });
        }
        if let Some(at) = self.bytes.iter().position(|byte| *byte == 0) {
            return Err(RowError::Nul { column: at + 1 });
        }
        std::str::from_utf8(self.bytes).map_err(|error| {
            let at = error.valid_up_to();
            RowError::NotUtf8 { byte: self.bytes[at], column: at + 1 }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(text: &str) -> Vec<(usize, &str)> {
        let records = split(text.as_bytes()).expect("rows");
        records.into_iter().map(|record| (record.line, std::str::from_utf8(record.bytes).expect("UTF-8"))).collect()
    }

    #[test]
    fn lines_and_elements_know_where_they_start() {
        assert_eq!(rows("\u{feff}{\"a\":1}\r\n\n {\"b\":2}"), [(1, "{\"a\":1}"), (3, "{\"b\":2}")]);
        let array = "\n[ {\"a\": \"],[\\\"\"},\n\n{\"b\": [1,\n2]} , 3\n]\n";
        assert_eq!(rows(array), [(2, "{\"a\": \"],[\\\"\"}"), (4, "{\"b\": [1,\n2]}"), (5, "3")]);
        assert_eq!(rows("[]"), []);
        assert_eq!(rows(""), []);
        assert_eq!(rows("[\"a\"]"), [(1, "\"a\"")]);
    }

    #[test]
    fn broken_arrays_say_where() {
        for (text, line) in [("[\n{}", 2), ("[{},]", 1), ("[\n,{}]", 2), ("[{}]\n\nx", 3), ("[{} \"", 1), ("[", 1)] {
            let (found, error) = split(text.as_bytes()).expect_err(text);
            assert_eq!(found, line, "{text:?}: {error}");
        }
        // The parser reports mismatched brackets; nothing here may underflow.
        for text in ["[}]", "[{]}", "[]]", "[{}}", "[\"\\"] {
            let _ = split(text.as_bytes());
        }
    }
}
