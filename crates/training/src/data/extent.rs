//! How much there is in a data file, before it is read: what a plan counts rows by.

use super::parquet;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// An upper bound of the rows of a file, and the bytes of text that they come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    pub rows: u64,
    pub bytes: u64,
}

/// Bytes that are read of a longer file, whose other rows are taken to be alike.
const SAMPLE_BYTES: u64 = 1 << 30;

/// None if there is no such file, or it cannot be read.
pub fn extent(path: &Path) -> Option<Extent> {
    let file = File::open(path).ok()?;
    let about = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let is_named = |ending: &str| path.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending));
    if is_named("parquet") {
        return Some(parquet::extent(file, about.len()).unwrap_or(Extent { rows: 0, bytes: about.len() }));
    }
    // Every line may be a row, and in an array every object.
    let mark = if is_named("json") { b'{' } else { b'\n' };
    let (mut marks, mut read) = (0, 0);
    let (mut file, mut buffer) = (file.take(SAMPLE_BYTES), vec![0; 1 << 18]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => {
                read += length as u64;
                marks += buffer[..length].iter().filter(|byte| **byte == mark).count() as u64;
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => (),
            Err(_) => return None,
        }
    }
    // The last line may have no end.
    let rows = marks + 1;
    let bytes = about.len().max(read);
    let all = u128::from(rows) * u128::from(bytes) / u128::from(read.max(1));
    Some(Extent { rows: u64::try_from(all).unwrap_or(u64::MAX), bytes })
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
        assert_eq!(of("a.jsonl", "{}\n{}\n"), Some(Extent { rows: 3, bytes: 6 }));
        assert_eq!(of("a.json", "[{},\n\n\n{}]"), Some(Extent { rows: 3, bytes: 10 }));
        assert_eq!(of("a.csv", ""), Some(Extent { rows: 0, bytes: 0 }));
        assert_eq!(of("a.parquet", "PAR1 and no more"), Some(Extent { rows: 0, bytes: 16 }));
        assert_eq!(extent(&folder.path().join("none")), None);
        assert_eq!(extent(folder.path()), None);
    }
}
