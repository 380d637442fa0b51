//! The calls by which a run changes the disk, all in one place.
//!
//! Each does what its namesake in `std::fs` does. Before that it tells the watcher of this thread,
//! if there is one: the crash simulation (`cargo xtask crash`) records a run this way, and lets the
//! n-th change fail. Reading goes through `std::fs` as usual.

use std::cell::RefCell;
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A change to the disk. Written bytes go to the end of a file: no file of a run is changed in the
/// middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<'a> {
    CreateFile(&'a Path),
    Write {
        file: &'a Path,
        bytes: &'a [u8],
    },
    /// To nothing.
    Truncate(&'a Path),
    SyncFile(&'a Path),
    CreateFolder(&'a Path),
    /// Makes creations, renames and removals in it survive a power cut.
    SyncFolder(&'a Path),
    Rename {
        from: &'a Path,
        to: &'a Path,
    },
    RemoveFile(&'a Path),
    /// An empty one.
    RemoveFolder(&'a Path),
}

/// Learns of every change before it is made.
pub trait Watcher {
    /// An error takes the place of the change.
    fn before(&self, change: &Change<'_>) -> io::Result<()>;
}

thread_local! {
    static WATCHER: RefCell<Option<Rc<dyn Watcher>>> = const { RefCell::new(None) };
}

/// Runs `work` with a watcher of all changes that this thread makes.
pub fn watched<T>(watcher: Rc<dyn Watcher>, work: impl FnOnce() -> T) -> T {
    /// Restores the watcher before, even after a panic.
    struct Before(Option<Rc<dyn Watcher>>);
    impl Drop for Before {
        fn drop(&mut self) {
            WATCHER.set(self.0.take());
        }
    }
    let _before = Before(WATCHER.replace(Some(watcher)));
    work()
}

fn watcher() -> Option<Rc<dyn Watcher>> {
    WATCHER.with_borrow(Clone::clone)
}

fn tell(change: &Change<'_>) -> io::Result<()> {
    watcher().map_or(Ok(()), |watcher| watcher.before(change))
}

/// A file open for writing.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    inner: std::fs::File,
}

impl File {
    /// A new file; an error if there is one.
    pub fn create_new(path: &Path) -> io::Result<Self> {
        tell(&Change::CreateFile(path))?;
        Self::of(path, std::fs::File::options().write(true).create_new(true).open(path))
    }

    /// An existing file, to append to.
    pub fn append(path: &Path) -> io::Result<Self> {
        Self::of(path, std::fs::File::options().append(true).open(path))
    }

    /// An existing file as it is, or a new one, to read and to write.
    pub fn open_or_create(path: &Path) -> io::Result<Self> {
        if path.symlink_metadata().is_err() {
            tell(&Change::CreateFile(path))?;
        }
        Self::of(path, std::fs::File::options().read(true).write(true).create(true).truncate(false).open(path))
    }

    fn of(path: &Path, opened: io::Result<std::fs::File>) -> io::Result<Self> {
        Ok(Self { path: path.to_path_buf(), inner: opened? })
    }

    /// For locks and reading.
    pub fn inner(&self) -> &std::fs::File {
        &self.inner
    }

    /// Makes it empty; what is written next is its beginning.
    pub fn truncate(&mut self) -> io::Result<()> {
        tell(&Change::Truncate(&self.path))?;
        self.inner.set_len(0)?;
        self.inner.rewind()
    }

    /// Makes what was written survive a power cut, and everything about the file but its name.
    pub fn sync_all(&self) -> io::Result<()> {
        tell(&Change::SyncFile(&self.path))?;
        self.inner.sync_all()
    }

    /// Makes what was written survive a power cut.
    pub fn sync_data(&self) -> io::Result<()> {
        tell(&Change::SyncFile(&self.path))?;
        self.inner.sync_data()
    }
}

impl Write for File {
    /// Writes everything, so that what is told is what happens.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        tell(&Change::Write { file: &self.path, bytes })?;
        self.inner.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    tell(&Change::Rename { from, to })?;
    std::fs::rename(from, to)
}

/// Renames a file unless the new name is taken, also by somebody who takes it at this moment.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    tell(&Change::Rename { from, to })?;
    match std::fs::hard_link(from, to) {
        Ok(()) => std::fs::remove_file(from),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(error),
        // A file system without links: all that is left is to look first.
        Err(_) if to.symlink_metadata().is_ok() => Err(io::ErrorKind::AlreadyExists.into()),
        Err(_) => std::fs::rename(from, to),
    }
}

pub fn remove_file(path: &Path) -> io::Result<()> {
    if path.symlink_metadata().is_ok() {
        tell(&Change::RemoveFile(path))?;
    }
    std::fs::remove_file(path)
}

pub fn create_folder(path: &Path) -> io::Result<()> {
    tell(&Change::CreateFolder(path))?;
    std::fs::create_dir(path)
}

/// Creates a folder and those it is in, as far as they are missing, so that they survive a power
/// cut. The folder may be there from a process that was killed before it had synced.
pub fn create_folders(path: &Path) -> io::Result<()> {
    let is_missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let missing: Vec<&Path> = path.ancestors().take_while(is_missing).collect();
    for folder in missing.iter().rev() {
        tell(&Change::CreateFolder(folder))?;
    }
    std::fs::create_dir_all(path)?;
    for folder in missing.into_iter().rev().chain([path]) {
        match folder
            .parent()
            .map(|parent| sync_folder(if parent.as_os_str().is_empty() { Path::new(".") } else { parent }))
        {
            // Folders that may be written and not read cannot be opened.
            Some(Err(error)) if error.kind() != io::ErrorKind::PermissionDenied => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Removes a folder and all that is in it. Links are not followed.
pub fn remove_folder(path: &Path) -> io::Result<()> {
    if watcher().is_some() {
        tell_of_removals(path)?;
    }
    std::fs::remove_dir_all(path)
}

fn tell_of_removals(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            tell_of_removals(&entry.path())?;
        } else {
            tell(&Change::RemoveFile(&entry.path()))?;
        }
    }
    tell(&Change::RemoveFolder(folder))
}

/// Makes creations, renames and removals in a folder survive a power cut.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    tell(&Change::SyncFolder(folder))?;
    if cfg!(not(unix)) {
        return Ok(());
    }
    match std::fs::File::open(folder)?.sync_all() {
        // Some network file systems have no such call on folders; their servers sync on rename.
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Told {
        changes: RefCell<Vec<String>>,
        fails_at: Option<usize>,
    }

    impl Watcher for Told {
        fn before(&self, change: &Change<'_>) -> io::Result<()> {
            let mut changes = self.changes.borrow_mut();
            changes.push(format!("{change:?}").split(['(', ' ']).next().unwrap_or_default().to_string());
            if self.fails_at == Some(changes.len()) { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
        }
    }

    fn work(folder: &Path) -> io::Result<()> {
        let deep = folder.join("a/b");
        create_folders(&deep)?;
        let mut file = File::create_new(&deep.join("one"))?;
        file.write_all(b"text")?;
        file.sync_all()?;
        rename(&deep.join("one"), &deep.join("two"))?;
        sync_folder(&deep)?;
        remove_folder(&folder.join("a"))?;
        let mut file = File::open_or_create(&folder.join("lock"))?;
        file.truncate()?;
        remove_file(&folder.join("lock"))
    }

    #[test]
    fn every_change_is_told_and_any_can_fail() {
        let folder = tempfile::tempdir().expect("folder");
        let told = Rc::new(Told::default());
        watched(told.clone(), || work(folder.path())).expect("works");
        let expected = "CreateFolder CreateFolder SyncFolder SyncFolder SyncFolder CreateFile Write SyncFile Rename SyncFolder RemoveFile RemoveFolder \
                        RemoveFolder CreateFile Truncate RemoveFile";
        assert_eq!(told.changes.borrow().join(" "), expected);
        let count = expected.split_whitespace().count();
        for fails_at in 1..=count {
            let folder = tempfile::tempdir().expect("folder");
            let told = Rc::new(Told { fails_at: Some(fails_at), ..Told::default() });
            let error = watched(told.clone(), || work(folder.path())).expect_err("it fails");
            assert_eq!((error.kind(), told.changes.borrow().len()), (io::ErrorKind::StorageFull, fails_at));
        }
        work(folder.path()).expect("nobody watches");
        assert_eq!(told.changes.borrow().len(), count);
    }
}
