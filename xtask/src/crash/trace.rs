//! Every change that a run makes to the disk, recorded as it is made, with paths below a root. The
//! n-th change can be made to fail.

use isobit_proof::disk::{Change, Watcher};
use std::cell::{Cell, RefCell};
use std::io;
use std::path::{Path, PathBuf};

/// A change, or what the run said.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Op {
    CreateFile(PathBuf),
    Write(PathBuf, Vec<u8>),
    Truncate(PathBuf),
    SyncFile(PathBuf),
    CreateFolder(PathBuf),
    SyncFolder(PathBuf),
    Rename(PathBuf, PathBuf),
    RemoveFile(PathBuf),
    RemoveFolder(PathBuf),
    /// The run said that the checkpoint of this step is saved: from here on it must not be lost.
    Saved(u64),
}

/// Which changes fail, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failing {
    /// Counted from 0.
    pub(crate) change: usize,
    pub(crate) kind: io::ErrorKind,
    /// All later changes that take space fail too: the disk stays full.
    pub(crate) lasts: bool,
}

pub(crate) struct Recorder {
    root: PathBuf,
    ops: RefCell<Vec<Op>>,
    changes: Cell<usize>,
    failing: Option<Failing>,
}

impl Recorder {
    pub(crate) fn new(root: &Path, failing: Option<Failing>) -> Self {
        Self { root: root.to_path_buf(), ops: RefCell::default(), changes: Cell::new(0), failing }
    }

    pub(crate) fn saved(&self, step: u64) {
        self.ops.borrow_mut().push(Op::Saved(step));
    }

    pub(crate) fn ops(&self) -> Vec<Op> {
        self.ops.borrow().clone()
    }

    pub(crate) fn changes(&self) -> usize {
        self.changes.get()
    }

    fn below(&self, path: &Path) -> PathBuf {
        path.strip_prefix(&self.root).unwrap_or_else(|_| panic!("{} is outside", path.display())).to_path_buf()
    }
}

impl Watcher for Recorder {
    fn before(&self, change: &Change<'_>) -> io::Result<()> {
        let number = self.changes.replace(self.changes.get() + 1);
        if let Some(Failing { change: at, kind, lasts }) = self.failing {
            let takes_space = matches!(
                change,
                Change::CreateFile(_) | Change::Write { .. } | Change::CreateFolder(_) | Change::SyncFile(_)
            );
            if number == at || (lasts && number > at && takes_space) {
                return Err(kind.into());
            }
        }
        let op = match change {
            Change::CreateFile(path) => Op::CreateFile(self.below(path)),
            Change::Write { file, bytes } => Op::Write(self.below(file), bytes.to_vec()),
            Change::Truncate(path) => Op::Truncate(self.below(path)),
            Change::SyncFile(path) => Op::SyncFile(self.below(path)),
            Change::CreateFolder(path) => Op::CreateFolder(self.below(path)),
            Change::SyncFolder(path) => Op::SyncFolder(self.below(path)),
            Change::Rename { from, to } => Op::Rename(self.below(from), self.below(to)),
            Change::RemoveFile(path) => Op::RemoveFile(self.below(path)),
            Change::RemoveFolder(path) => Op::RemoveFolder(self.below(path)),
        };
        self.ops.borrow_mut().push(op);
        Ok(())
    }
}
