//! How much there is in a data file, before it is read: what a plan counts rows by.

use super::parquet;
use super::records::{ROW_BYTES_MAX, is_array};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The rows of a file, and the bytes of text that they come from: at least as many as there are up
/// to [`SAMPLE_BYTES`], an estimate beyond. 0 rows of a Parquet file whose footer cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    pub rows: u64,
    pub bytes: u64,
    /// Bytes of the longest row that is short enough to be read; of a Parquet file, of the rows of
    /// a group on average.
    pub longest: u64,
}

/// Bytes that are read of a longer file, whose other rows are taken to be alike.
const SAMPLE_BYTES: u64 = 1 << 30;

/// None if there is no such file, or it cannot be read.
pub fn extent(path: &Path) -> Option<Extent> {
    sampled(path, SAMPLE_BYTES)
}

fn sampled(path: &Path, sample: u64) -> Option<Extent> {
    let file = File::open(path).ok()?;
    let about = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let is_named = |ending: &str| path.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending));
    if is_named("parquet") {
        return Some(parquet::extent(file, about.len()).unwrap_or(Extent { rows: 0, bytes: about.len(), longest: 0 }));
    }
    let (mut ends, mut rows, mut read) = (None, 1_u64, 0_u64);
    let (mut row_start, mut longest) = (0, 0);
    let (mut file, mut buffer) = (file.take(sample), vec![0; 1 << 18]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => {
                let bytes = &buffer[..length];
                let ends = ends
                    .get_or_insert_with(|| if is_array(bytes) { Ends::Array(Nesting::default()) } else { Ends::Lines });
                for (at, _) in (read..).zip(bytes).filter(|(_, byte)| ends.at(**byte)) {
                    rows += 1;
                    longest = longest.max(readable(at - row_start));
                    row_start = at;
                }
                read += length as u64;
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => (),
            Err(_) => return None,
        }
    }
    let bytes = about.len().max(read);
    let all = u128::from(rows) * u128::from(bytes) / u128::from(read.max(1));
    let longest = longest.max(readable(read - row_start));
    Some(Extent { rows: u64::try_from(all).unwrap_or(u64::MAX), bytes, longest })
}

/// The bytes of a row, the end of the one before included; 0 if reading it is an error.
fn readable(bytes: u64) -> u64 {
    if bytes > ROW_BYTES_MAX as u64 + 1 { 0 } else { bytes }
}

/// Where rows end; the last may have no end.
enum Ends {
    Lines,
    Array(Nesting),
}

impl Ends {
    fn at(&mut self, byte: u8) -> bool {
        match self {
            Self::Lines => byte == b'\n',
            Self::Array(nesting) => nesting.after(byte) == 1 && byte == b',',
        }
    }
}

/// How deep a byte of a JSON array lies; bytes of strings are at depth 0.
#[derive(Default)]
struct Nesting {
    depth: usize,
    in_text: bool,
    is_escaped: bool,
}

impl Nesting {
    fn after(&mut self, byte: u8) -> usize {
        if self.in_text {
            self.in_text = self.is_escaped || byte != b'"';
            self.is_escaped = !self.is_escaped && byte == b'\\';
            return 0;
        }
        match byte {
            b'"' => self.in_text = true,
            b'[' | b'{' => self.depth += 1,
            b']' | b'}' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        self.depth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_objects_and_what_is_missing() {
        let folder = tempfile::tempdir().expect("a folder");
        let of = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("written");
            extent(&path)
        };
        assert_eq!(of("a.jsonl", "{}\n{}\n"), Some(Extent { rows: 3, bytes: 6, longest: 3 }));
        assert_eq!(of("a.json", "[{},\n\n\n{}]"), Some(Extent { rows: 2, bytes: 10, longest: 7 }));
        assert_eq!(of("a.jsonl", " [{},{}]"), Some(Extent { rows: 2, bytes: 8, longest: 4 }));
        // A row of many objects, and a string that looks like two.
        let nested = "[{\"a\":[{},{}]},{\"a\":\"},{\\\"}\"}]";
        assert_eq!(of("a.json", nested), Some(Extent { rows: 2, bytes: 30, longest: 16 }));
        assert_eq!(of("a.csv", ""), Some(Extent { rows: 0, bytes: 0, longest: 0 }));
        assert_eq!(of("a.parquet", "PAR1 and no more"), Some(Extent { rows: 0, bytes: 16, longest: 0 }));
        assert_eq!(extent(&folder.path().join("none")), None);
        assert_eq!(extent(folder.path()), None);
        // What reading refuses takes no memory.
        let long = of("a.jsonl", &format!("{{}}\n{}", " ".repeat(ROW_BYTES_MAX + 2)));
        assert_eq!(long.map(|all| (all.rows, all.longest)), Some((2, 2)));
        // Two lines in the first four bytes of twelve.
        assert_eq!(of("a.csv", "a\na\nabcdefg\n").map(|all| all.rows), Some(4));
        assert_eq!(sampled(&folder.path().join("a.csv"), 4), Some(Extent { rows: 9, bytes: 12, longest: 2 }));
    }
}
