//! A simulated disk: what a power cut may leave of the changes that a run made.
//!
//! It keeps what is durable apart from what was only written. The bytes of a file are durable once
//! the file was synced, its name once its folder was. Until then each change of a folder survives
//! or not independently of all others, and of the bytes of a file any beginning and any sectors.

use super::trace::Op;
use crate::torture::random::Random;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Bytes that a disk writes at once.
const SECTOR: usize = 512;

/// Paths below the root, with the bytes of files; None is a folder.
pub(crate) type Tree = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// What is durable, and the changes since.
#[derive(Clone, Debug)]
enum Node {
    File { durable: Vec<u8>, pending: Vec<Edit> },
    Folder { durable: BTreeMap<String, usize>, pending: Vec<Entry> },
}

#[derive(Clone, Debug)]
enum Edit {
    Append(Vec<u8>),
    Truncate,
}

/// A change of a folder; nodes are numbers, so that a rename survives without the creation before
/// it.
#[derive(Clone, Debug)]
enum Entry {
    Add { name: String, node: usize },
    Move { from: String, to: String, node: usize },
    Remove { name: String, node: usize },
}

/// Which of the possible states after a power cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Cut {
    /// Only what is durable.
    Durable,
    /// Everything, as after a kill of the process.
    Everything,
    /// All names, and no byte that was not synced.
    Names,
    /// All names and lengths, and zeros instead of bytes that were not synced.
    Zeros,
    /// All bytes, and no name that was not synced.
    Bytes,
    Random(u64),
}

impl Cut {
    pub(crate) const FIXED: [Self; 5] = [Self::Durable, Self::Everything, Self::Names, Self::Zeros, Self::Bytes];
}

#[derive(Clone, Debug)]
pub(crate) struct Disk {
    /// The first is the root.
    nodes: Vec<Node>,
}

impl Disk {
    pub(crate) fn empty() -> Self {
        Self { nodes: vec![Node::Folder { durable: BTreeMap::new(), pending: Vec::new() }] }
    }

    /// A disk on which all of this is durable.
    pub(crate) fn of(tree: &Tree) -> Self {
        let mut disk = Self::empty();
        for (path, bytes) in tree {
            let node = disk.nodes.len();
            disk.nodes.push(match bytes {
                Some(bytes) => Node::File { durable: bytes.clone(), pending: Vec::new() },
                None => Node::Folder { durable: BTreeMap::new(), pending: Vec::new() },
            });
            let (folder, name) = disk.place(path);
            if let Node::Folder { durable, .. } = &mut disk.nodes[folder] {
                durable.insert(name, node);
            }
        }
        disk
    }

    /// The folder of a path and the name in it.
    fn place(&self, path: &Path) -> (usize, String) {
        let folder = self.found(path.parent().unwrap_or(Path::new("")));
        (folder, path.file_name().unwrap_or_default().to_string_lossy().into_owned())
    }

    /// The node of a path as the run sees it.
    fn found(&self, path: &Path) -> usize {
        let step = |node: usize, name: std::path::Component<'_>| {
            let name = name.as_os_str().to_string_lossy();
            *self.entries(node).get(&*name).unwrap_or_else(|| panic!("{} does not exist", path.display()))
        };
        path.components().fold(0, step)
    }

    /// The names in a folder as the run sees them.
    fn entries(&self, node: usize) -> BTreeMap<String, usize> {
        let Node::Folder { durable, pending } = &self.nodes[node] else { panic!("a file is no folder") };
        pending.iter().fold(durable.clone(), with_entry)
    }

    fn enter(&mut self, folder: usize, entry: Entry) {
        if let Node::Folder { pending, .. } = &mut self.nodes[folder] {
            pending.push(entry);
        }
    }

    fn edit(&mut self, path: &Path, edit: Edit) {
        let node = self.found(path);
        if let Node::File { pending, .. } = &mut self.nodes[node] {
            pending.push(edit);
        }
    }

    pub(crate) fn apply(&mut self, op: &Op) {
        match op {
            Op::CreateFile(path) => self.create(path, Node::File { durable: Vec::new(), pending: Vec::new() }),
            Op::CreateFolder(path) => {
                self.create(path, Node::Folder { durable: BTreeMap::new(), pending: Vec::new() });
            }
            Op::Write(path, bytes) => self.edit(path, Edit::Append(bytes.clone())),
            Op::Truncate(path) => self.edit(path, Edit::Truncate),
            Op::SyncFile(path) => {
                let node = self.found(path);
                let Node::File { durable, pending } = &mut self.nodes[node] else { return };
                *durable = pending.drain(..).fold(std::mem::take(durable), with_edit);
            }
            Op::SyncFolder(path) => {
                let node = self.found(path);
                let entries = self.entries(node);
                self.nodes[node] = Node::Folder { durable: entries, pending: Vec::new() };
            }
            Op::Rename(from, to) => {
                let ((folder, from), (other, to)) = (self.place(from), self.place(to));
                assert_eq!(folder, other, "a run renames within a folder");
                let node = self.entries(folder)[&from];
                self.enter(folder, Entry::Move { from, to, node });
            }
            Op::RemoveFile(path) | Op::RemoveFolder(path) => {
                let (folder, name) = self.place(path);
                let node = self.entries(folder)[&name];
                self.enter(folder, Entry::Remove { name, node });
            }
            Op::Saved(_) => {}
        }
    }

    fn create(&mut self, path: &Path, node: Node) {
        let (folder, name) = self.place(path);
        self.nodes.push(node);
        self.enter(folder, Entry::Add { name, node: self.nodes.len() - 1 });
    }

    /// What a power cut leaves.
    pub(crate) fn after(&self, cut: Cut) -> Tree {
        let mut tree = Tree::new();
        let seed = if let Cut::Random(seed) = cut { seed } else { 0 };
        let mut random = Random::of(seed, "cut", 0);
        self.leave(0, Path::new(""), cut, &mut random, &mut tree);
        tree
    }

    fn leave(&self, node: usize, at: &Path, cut: Cut, random: &mut Random, tree: &mut Tree) {
        let (durable, pending) = match &self.nodes[node] {
            Node::File { durable, pending } => {
                tree.insert(at.to_path_buf(), Some(bytes_after(durable, pending, cut, random)));
                return;
            }
            Node::Folder { durable, pending } => (durable, pending),
        };
        if node != 0 {
            tree.insert(at.to_path_buf(), None);
        }
        let mut likely = *random.pick(&[1, 2, 3]);
        let mut survives = |_: &&Entry| match cut {
            Cut::Durable | Cut::Bytes => false,
            Cut::Everything | Cut::Names | Cut::Zeros => true,
            Cut::Random(_) => {
                // Runs of survivors and of losses.
                likely = if random.once_in(8) { *random.pick(&[0, 1, 2, 3, 4]) } else { likely };
                random.below(4) < likely
            }
        };
        let entries = pending.iter().filter(&mut survives).fold(durable.clone(), with_entry);
        for (name, node) in entries {
            self.leave(node, &at.join(name), cut, random, tree);
        }
    }
}

fn with_entry(mut entries: BTreeMap<String, usize>, entry: &Entry) -> BTreeMap<String, usize> {
    let mut remove = |name: &String, node: usize| {
        if entries.get(name) == Some(&node) {
            entries.remove(name);
        }
    };
    match entry {
        Entry::Remove { name, node } => remove(name, *node),
        Entry::Add { name, node } => {
            entries.insert(name.clone(), *node);
        }
        Entry::Move { from, to, node } => {
            remove(from, *node);
            entries.insert(to.clone(), *node);
        }
    }
    entries
}

fn with_edit(mut bytes: Vec<u8>, edit: Edit) -> Vec<u8> {
    match edit {
        Edit::Append(more) => bytes.extend(more),
        Edit::Truncate => bytes.clear(),
    }
    bytes
}

/// What is left of a file.
fn bytes_after(durable: &[u8], pending: &[Edit], cut: Cut, random: &mut Random) -> Vec<u8> {
    let edits = match cut {
        Cut::Durable | Cut::Names => 0,
        Cut::Everything | Cut::Zeros | Cut::Bytes => pending.len(),
        Cut::Random(_) if random.once_in(4) => 0,
        Cut::Random(_) if random.once_in(2) => pending.len(),
        Cut::Random(_) => random.below(pending.len() + 1),
    };
    let edits = &pending[..edits];
    let kept = if edits.iter().any(|edit| matches!(edit, Edit::Truncate)) { 0 } else { durable.len() };
    let mut bytes = edits.iter().cloned().fold(durable.to_vec(), with_edit);
    let kept = kept.min(bytes.len());
    match cut {
        Cut::Zeros => bytes[kept..].fill(0),
        Cut::Random(_) => {
            if random.once_in(3) {
                bytes.truncate(kept + random.below(bytes.len() - kept + 1));
            }
            if random.once_in(3) {
                lose_sectors(&mut bytes, kept, random);
            }
        }
        _ => {}
    }
    bytes
}

/// Some sectors never reached the disk: what was not there before reads as zeros.
fn lose_sectors(bytes: &mut [u8], kept: usize, random: &mut Random) {
    let mut start = kept;
    while start < bytes.len() {
        let end = bytes.len().min((start / SECTOR + 1) * SECTOR);
        if random.once_in(2) {
            bytes[start..end].fill(0);
        }
        start = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> PathBuf {
        PathBuf::from(text)
    }

    fn disk(ops: &[Op]) -> Disk {
        let mut disk = Disk::empty();
        for op in ops {
            disk.apply(op);
        }
        disk
    }

    #[test]
    fn only_what_was_synced_is_durable() {
        let write = [Op::CreateFile(path("a")), Op::Write(path("a"), b"text".to_vec())];
        let unsynced = disk(&write);
        assert!(unsynced.after(Cut::Durable).is_empty());
        assert_eq!(unsynced.after(Cut::Everything)[&path("a")].as_deref(), Some(&b"text"[..]));
        assert_eq!(unsynced.after(Cut::Names)[&path("a")].as_deref(), Some(&b""[..]));
        assert_eq!(unsynced.after(Cut::Zeros)[&path("a")].as_deref(), Some(&[0; 4][..]));
        let of_file = disk(&[&write[..], &[Op::SyncFile(path("a"))]].concat());
        assert!(of_file.after(Cut::Bytes).is_empty());
        assert_eq!(of_file.after(Cut::Names)[&path("a")].as_deref(), Some(&b"text"[..]));
        let of_both = disk(&[&write[..], &[Op::SyncFile(path("a")), Op::SyncFolder(path(""))]].concat());
        assert_eq!(of_both.after(Cut::Durable), of_both.after(Cut::Everything));
        assert_eq!(Disk::of(&of_both.after(Cut::Durable)).after(Cut::Durable), of_both.after(Cut::Everything));
    }

    /// A rename may survive without the creation before it, and the removal of the old name without
    /// the creation of another.
    #[test]
    fn changes_of_a_folder_survive_in_any_combination() {
        let ops = [
            Op::CreateFolder(path("f")),
            Op::SyncFolder(path("")),
            Op::CreateFile(path("f/old")),
            Op::SyncFolder(path("f")),
            Op::CreateFile(path("f/new")),
            Op::Rename(path("f/new"), path("f/named")),
            Op::RemoveFile(path("f/old")),
        ];
        let disk = disk(&ops);
        let names = |tree: Tree| {
            let shown = tree.keys().filter(|path| path.components().count() == 2);
            shown.map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        let mut seen: Vec<_> = (0..200).map(|seed| names(disk.after(Cut::Random(seed))).join(" ")).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, ["", "named", "named old", "new", "new old", "old"]);
    }

    #[test]
    fn sectors_are_lost_one_by_one_and_old_bytes_stay() {
        let ops = [
            Op::CreateFile(path("a")),
            Op::Write(path("a"), vec![7; 100]),
            Op::SyncFile(path("a")),
            Op::SyncFolder(path("")),
            Op::Write(path("a"), vec![9; 2000]),
        ];
        let disk = disk(&ops);
        let mut holes = 0;
        for seed in 0..300 {
            let bytes = disk.after(Cut::Random(seed))[&path("a")].clone().expect("a file");
            assert!(bytes.len() >= 100 && bytes[..100].iter().all(|byte| *byte == 7));
            holes += usize::from(bytes.ends_with(&[9]) && bytes[100..].contains(&0));
        }
        assert!(holes > 10, "{holes}");
    }
}
