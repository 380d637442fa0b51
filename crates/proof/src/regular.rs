//! Opens files at untrusted paths: regular files only, with a limit on what is read.
//!
//! Opening a pipe waits for a writer that may never come, and reading a device never ends, so both
//! are refused before they are opened. Links are followed, because model caches consist of them.

use crate::error::FileError;
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::path::Path;

/// Bytes that [`read_in_pieces`] reads at a time.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Opens a regular file for reading; the second value is its size in bytes.
pub fn open(path: &Path) -> Result<(File, u64), FileError> {
    let failed = |error| FileError::from_io("read", path, error);
    let regular = |metadata: Metadata| {
        let wrong = || FileError::NotRegular { path: path.to_path_buf(), found: kind(&metadata) };
        metadata.is_file().then_some(metadata.len()).ok_or_else(wrong)
    };
    // Checked twice: before opening, because opening a pipe blocks; and on the open file, because
    // the path may have changed.
    regular(std::fs::metadata(path).map_err(|error| {
        let is_lost = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied);
        if !is_lost && path.is_symlink() {
            // It leads to itself, or to too many others.
            return FileError::NotRegular { path: path.to_path_buf(), found: "a link that cannot be followed" };
        }
        failed(error)
    })?)?;
    let file = File::open(path).map_err(failed)?;
    let size = regular(file.metadata().map_err(failed)?)?;
    Ok((file, size))
}

/// Reads a regular file of any size from start to end, in constant memory.
pub(crate) fn read_in_pieces(path: &Path, mut take: impl FnMut(&[u8])) -> Result<(), FileError> {
    let (mut file, _) = open(path)?;
    let mut buffer = vec![0; PIECE_BYTES];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => take(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(FileError::from_io("read", path, error)),
        }
    }
}

/// Reads a regular file of at most `limit` bytes.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let (file, size) = open(path)?;
    let too_large = |bytes| FileError::TooLarge { path: path.to_path_buf(), bytes, limit };
    if size > limit {
        return Err(too_large(size));
    }
    // The size is what the file system reports (0 for files in /proc), and a file may grow: the
    // limit applies to what is read.
    let mut bytes = Vec::new();
    let failed = |error| FileError::from_io("read", path, error);
    let refused = |_| failed(ErrorKind::OutOfMemory.into());
    bytes.try_reserve_exact(size as usize).map_err(refused)?;
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > limit {
        return Err(too_large(bytes.len() as u64));
    }
    Ok(bytes)
}

/// As [`read`], for text.
pub fn read_text(path: &Path, limit: u64) -> Result<String, FileError> {
    String::from_utf8(read(path, limit)?).map_err(|_| FileError::malformed(path, "it is not UTF-8"))
}

/// `None` for a file that does not exist: `if_there(read(path, limit))`.
pub fn if_there<T>(result: Result<T, FileError>) -> Result<Option<T>, FileError> {
    match result {
        Err(FileError::Missing { .. }) => Ok(None),
        result => result.map(Some),
    }
}

/// What was found instead of a file, in a message's words.
fn kind(metadata: &Metadata) -> &'static str {
    if metadata.is_dir() {
        return "a folder";
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = metadata.file_type();
        if kind.is_fifo() {
            return "a pipe";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
        if kind.is_socket() {
            return "a socket";
        }
    }
    "something else"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_the_last_size_that_is_read() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a");
        std::fs::write(&path, b"12345").expect("written");
        assert_eq!(read(&path, 5).expect("fits"), b"12345");
        assert_eq!(read_text(&path, u64::MAX).expect("fits"), "12345");
        let error = read(&path, 4).expect_err("too large");
        assert!(matches!(error, FileError::TooLarge { bytes: 5, limit: 4, .. }), "{error}");
        assert_eq!(error.exit_code(), 8);
        std::fs::write(&path, b"\xff").expect("written");
        assert!(matches!(read_text(&path, 4), Err(FileError::Malformed { .. })));
        let missing = folder.path().join("b");
        assert!(matches!(read(&missing, 4), Err(FileError::Missing { .. })));
        assert!(if_there(read(&missing, 4)).expect("absent is fine").is_none());
        assert!(if_there(read(&path, 0)).is_err());
    }

    #[test]
    fn only_regular_files_are_opened() {
        let folder = tempfile::tempdir().expect("folder");
        let error = read(folder.path(), 4).expect_err("a folder");
        assert!(error.to_string().contains("is a folder, not a regular file"), "{error}");
        assert_eq!(error.exit_code(), 8);
    }

    #[cfg(unix)]
    #[test]
    fn pipes_devices_and_links_to_them_are_refused_at_once() {
        let folder = tempfile::tempdir().expect("folder");
        let pipe = folder.path().join("pipe");
        let status = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
        assert!(status.success());
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/zero", &link).expect("link");
        for (path, found) in [(pipe.as_path(), "a pipe"), (&link, "a device"), (Path::new("/dev/null"), "a device")] {
            let error = read(path, 1 << 20).expect_err("refused");
            assert!(error.to_string().contains(&format!("is {found}, not a regular file")), "{error}");
        }
        let itself = folder.path().join("itself");
        std::os::unix::fs::symlink(&itself, &itself).expect("link");
        let error = read(&itself, 1).expect_err("refused");
        assert!(error.exit_code() == 8 && error.to_string().contains("cannot be followed"), "{error}");
        // Models in caches are links to regular files.
        let file = folder.path().join("file");
        std::fs::write(&file, b"1").expect("written");
        let link = folder.path().join("to_file");
        std::os::unix::fs::symlink(&file, &link).expect("link");
        assert_eq!(read(&link, 1).expect("a regular file"), b"1");
    }
}
