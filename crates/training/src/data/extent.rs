//! How much there is in a data file, before it is read: what a plan counts rows by.

use super::parquet;
use super::records::is_array;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The rows of a file, and the bytes of text that they come from: at least as many as there are up
/// to [`SAMPLE_BYTES`], an estimate beyond. 0 rows of a Parquet file whose footer cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    pub rows: u64,
    pub bytes: u64,
    /// Bytes of the longest row; of a Parquet file, of all rows on average.
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
    // Every line may be a row, and in an array every object.
    let (mut mark, mut marks, mut read) = (None, 0_u64, 0_u64);
    let (mut row_start, mut longest) = (0_u64, 0_u64);
    let (mut file, mut buffer) = (file.take(sample), vec![0; 1 << 18]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => {
                let bytes = &buffer[..length];
                let mark = *mark.get_or_insert_with(|| if is_array(bytes) { b'{' } else { b'\n' });
                for at in bytes.iter().enumerate().filter(|(_, byte)| **byte == mark).map(|(at, _)| read + at as u64) {
                    marks += 1;
                    longest = longest.max(at - row_start);
                    row_start = at;
                }
                read += length as u64;
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => (),
            Err(_) => return None,
        }
    }
    // The last line may have no end.
    let rows = marks + 1;
    let bytes = about.len().max(read);
    let all = u128::from(rows) * u128::from(bytes) / u128::from(read.max(1));
    let longest = longest.max(read - row_start);
    Some(Extent { rows: u64::try_from(all).unwrap_or(u64::MAX), bytes, longest })
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
        assert_eq!(of("a.json", "[{},\n\n\n{}]"), Some(Extent { rows: 3, bytes: 10, longest: 6 }));
        assert_eq!(of("a.jsonl", " [{},{}]"), Some(Extent { rows: 3, bytes: 8, longest: 3 }));
        assert_eq!(of("a.csv", ""), Some(Extent { rows: 0, bytes: 0, longest: 0 }));
        assert_eq!(of("a.parquet", "PAR1 and no more"), Some(Extent { rows: 0, bytes: 16, longest: 0 }));
        assert_eq!(extent(&folder.path().join("none")), None);
        assert_eq!(extent(folder.path()), None);
        // Two lines in the first four bytes of twelve.
        assert_eq!(of("a.csv", "a\na\nabcdefg\n").map(|all| all.rows), Some(4));
        assert_eq!(sampled(&folder.path().join("a.csv"), 4), Some(Extent { rows: 9, bytes: 12, longest: 2 }));
    }
}
