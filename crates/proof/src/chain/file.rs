//! The file of a chain: written line by line, cut when a run resumes, and read with every link
//! checked.

use super::{NAME, Origin, Parts, SCHEMA, Update, tensors_per_part};
use crate::atomic::AtomicFile;
use crate::disk::File;
use crate::error::FileError;
use crate::hash::Hash;
use crate::name::told;
use crate::regular;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

const LINK: &str = ",\"link\":\"";
/// The link before the first line.
const NO_LINK: Hash = Hash([0; 32]);
/// BOUND: bytes of a line: the names of 100,000 tensors.
const LINE_BYTES_MAX: u64 = 1 << 26;

/// A line with its link, without the newline, and the link.
fn linked(before: Hash, content: &impl Serialize) -> (String, Hash) {
    let mut line = serde_json::to_string(content).expect("strings and numbers have a JSON form");
    // The closing brace.
    line.pop();
    let link = Hash::of_bytes(&[&before.0, line.as_bytes()].concat());
    (format!("{line}{LINK}{link}\"}}"), link)
}

/// A whole chain; every link follows from the one before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    pub origin: Origin,
    pub updates: Vec<Update>,
    /// That of the origin, then those of the updates.
    pub links: Vec<Hash>,
    /// Bytes after the last whole line: one that a crash cut short.
    pub cut: u64,
}

impl Chain {
    /// Reads the chain of a run folder. A last line without its newline was cut short by a crash
    /// and is left out.
    pub fn read(folder: &Path) -> Result<Self, FileError> {
        Self::read_through(folder, u64::MAX)
    }

    /// The chain of the first `last` updates, whatever comes after them.
    pub fn read_through(folder: &Path, last: u64) -> Result<Self, FileError> {
        let path = folder.join(NAME);
        let mut lines = Lines::open(&path)?;
        let Some((_, origin)) = lines.next::<Origin>()? else {
            return Err(FileError::malformed(&path, "line 1: the chain has no origin"));
        };
        if origin.schema != SCHEMA || origin.step != 0 {
            return Err(FileError::malformed(&path, format!("line 1: this version reads `{SCHEMA}`")));
        }
        let (mut updates, mut links) = (Vec::new(), vec![lines.link]);
        while (updates.len() as u64) < last {
            let Some((_, update)) = lines.next::<Update>()? else { break };
            updates.push(lines.checked(update, &origin)?);
            links.push(lines.link);
        }
        Ok(Self { origin, updates, links, cut: lines.cut })
    }

    /// The link after so many updates.
    pub fn link(&self, updates: u64) -> Option<Hash> {
        self.links.get(usize::try_from(updates).ok()?).copied()
    }

    /// The last link.
    pub fn head(&self) -> Hash {
        self.links.last().copied().unwrap_or(NO_LINK)
    }

    /// The names of the tensors of a part.
    pub fn tensors_of(&self, part: usize) -> &[String] {
        let each = tensors_per_part(self.origin.tensors.len());
        self.origin.tensors.chunks(each).nth(part).unwrap_or(&[])
    }
}

/// Reads lines and follows their links.
struct Lines<'a> {
    path: &'a Path,
    reader: Box<dyn BufRead>,
    link: Hash,
    number: usize,
    /// Bytes of a last line without its newline.
    cut: u64,
}

impl<'a> Lines<'a> {
    fn open(path: &'a Path) -> Result<Self, FileError> {
        let reader = Box::new(BufReader::new(regular::open(path)?.0));
        Ok(Self { path, reader, link: NO_LINK, number: 0, cut: 0 })
    }

    /// The next line, as it stands in the file and as what it says.
    fn next<T: Serialize + for<'de> Deserialize<'de>>(&mut self) -> Result<Option<(Vec<u8>, T)>, FileError> {
        self.number += 1;
        let mut bytes = Vec::new();
        let read = self.reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes);
        read.map_err(|error| FileError::from_io("read", self.path, error))?;
        let Some((b'\n', line)) = bytes.split_last() else {
            self.cut = bytes.len() as u64;
            return if self.cut == LINE_BYTES_MAX { Err(self.malformed("it is too long")) } else { Ok(None) };
        };
        let strange = || self.malformed("it is not a line of a chain");
        let line = str::from_utf8(line).map_err(|_| strange())?;
        let before = line.rfind(LINK).map(|at| format!("{}}}", &line[..at])).ok_or_else(strange)?;
        let content: T = serde_json::from_str(&before).map_err(|error| self.malformed(&told(&error)))?;
        let (expected, link) = linked(self.link, &content);
        if expected != line {
            let what = format!("line {}: its link does not follow from the line and the one before", self.number);
            return Err(FileError::Altered { path: self.path.to_path_buf(), what });
        }
        self.link = link;
        Ok(Some((bytes, content)))
    }

    /// An update that follows the one before.
    fn checked(&self, update: Update, origin: &Origin) -> Result<Update, FileError> {
        if update.step != self.number as u64 - 1 {
            let what = format!("it has step {}, expected {}", update.step, self.number - 1);
            return Err(self.malformed(&what));
        }
        let count = origin.tensors.len().div_ceil(tensors_per_part(origin.tensors.len()));
        let Parts { gradient, weights, state } = &update.parts;
        if [gradient, weights, state].iter().any(|parts| parts.len() != count) {
            return Err(self.malformed("it lists different tensors"));
        }
        Ok(update)
    }

    fn malformed(&self, what: &str) -> FileError {
        FileError::malformed(self.path, format!("line {}: {what}", self.number))
    }
}

/// The open file of a run.
#[derive(Debug)]
pub struct ChainFile {
    path: PathBuf,
    file: File,
    link: Hash,
}

impl ChainFile {
    /// Creates the file, or replaces an existing one.
    pub fn create(folder: &Path, origin: &Origin) -> Result<Self, FileError> {
        let path = folder.join(NAME);
        let (line, link) = linked(NO_LINK, origin);
        let mut file = AtomicFile::create(&path)?;
        file.write(line.as_bytes())?;
        file.write(b"\n")?;
        file.commit()?;
        Self::append_to(path, link)
    }

    /// The file of a run that resumes after `step`: lines of later steps, and a line cut short by a
    /// crash, are dropped. The others must end with the link in the checkpoint. Nothing is replaced
    /// before [`CutChain::commit`].
    pub fn cut(folder: &Path, step: u64, link: Hash) -> Result<CutChain, FileError> {
        let path = folder.join(NAME);
        let mut kept = AtomicFile::create(&path)?;
        let mut lines = Lines::open(&path)?;
        let altered = |number: u64| FileError::Altered {
            path: path.clone(),
            what: format!("line {number}: it is missing or differs from what the checkpoint of step {step} recorded"),
        };
        let mut origin: Option<Origin> = None;
        for done in 0..=step {
            let bytes = match &origin {
                None => lines.next::<Origin>()?.map(|(bytes, first)| {
                    origin = Some(first);
                    bytes
                }),
                Some(origin) => match lines.next::<Update>()? {
                    None => None,
                    Some((bytes, update)) => lines.checked(update, origin).map(|_| Some(bytes))?,
                },
            };
            kept.write(&bytes.ok_or_else(|| altered(done + 1))?)?;
        }
        if lines.link != link {
            return Err(altered(step + 1));
        }
        Ok(CutChain { path, kept, link })
    }

    fn append_to(path: PathBuf, link: Hash) -> Result<Self, FileError> {
        match File::append(&path) {
            Ok(file) => Ok(Self { path, file, link }),
            Err(error) => Err(FileError::from_io("write", &path, error)),
        }
    }

    /// Appends in one write, so that readers see whole lines.
    pub fn append(&mut self, update: &Update) -> Result<(), FileError> {
        let (mut line, link) = linked(self.link, update);
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(|error| FileError::from_io("write", &self.path, error))?;
        self.link = link;
        Ok(())
    }

    /// The last link.
    pub fn link(&self) -> Hash {
        self.link
    }

    /// Makes appended lines survive a power cut. Call it before saving a checkpoint.
    pub fn sync(&mut self) -> Result<(), FileError> {
        self.file.sync_data().map_err(|error| FileError::from_io("write", &self.path, error))
    }
}

/// A chain that is cut and not yet in its place.
#[derive(Debug)]
pub struct CutChain {
    path: PathBuf,
    kept: AtomicFile,
    link: Hash,
}

impl CutChain {
    /// The link of the last line that stays.
    pub fn link(&self) -> Hash {
        self.link
    }

    pub fn commit(self) -> Result<ChainFile, FileError> {
        self.kept.commit()?;
        ChainFile::append_to(self.path, self.link)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::{Evaluation, Item, TensorDigests};
    use isobit_numerics::digest::Digest;
    use std::collections::BTreeMap;

    fn digests(of: u64) -> Vec<TensorDigests> {
        let digest = |at: u64| Digest([at << 32 | of, at]);
        (1..4)
            .map(|at| TensorDigests { gradient: digest(at), value: digest(2 * at), moments: [digest(at); 2] })
            .collect()
    }

    fn origin() -> Origin {
        let names = ["a", "b", "c"].map(str::to_string).to_vec();
        Origin::new(BTreeMap::from([("run".to_string(), "7".to_string())]), names, &[Digest([1, 2])])
    }

    fn update(step: u64) -> Update {
        let mut update = Update::new(step, Hash::of_bytes(&[step as u8]), 512);
        update.set_digests(&digests(step));
        update.evaluation =
            step.is_multiple_of(2).then_some(Evaluation { loss: 1, correct: 2, targets: 3, best: true });
        update
    }

    fn written(folder: &Path, steps: u64) -> ChainFile {
        let mut file = ChainFile::create(folder, &origin()).expect("created");
        (1..=steps).for_each(|step| file.append(&update(step)).expect("appended"));
        file
    }

    #[test]
    fn a_chain_is_read_back_and_a_resumed_one_ends_the_same() {
        let folder = tempfile::tempdir().expect("folder");
        let folder = folder.path();
        let head = written(folder, 6).link();
        let whole = std::fs::read(folder.join(NAME)).expect("read");
        let chain = Chain::read(folder).expect("a chain");
        assert_eq!((chain.head(), chain.updates.len(), &chain.updates[2]), (head, 6, &update(3)));
        assert_eq!(chain.tensors_of(1), ["b"]);

        // Cut short in the middle of a line, and resumed from an earlier checkpoint.
        std::fs::write(folder.join(NAME), &whole[..whole.len() - 20]).expect("written");
        assert_eq!(Chain::read(folder).expect("a chain").updates.len(), 5);
        let link = chain.link(3).expect("three updates");
        let mut file = ChainFile::cut(folder, 3, link).and_then(CutChain::commit).expect("resumed");
        (4..=6).for_each(|step| file.append(&update(step)).expect("appended"));
        assert_eq!(std::fs::read(folder.join(NAME)).expect("read"), whole);
        for (step, link) in [(3, head), (7, head), (0, link)] {
            assert_eq!(ChainFile::cut(folder, step, link).expect_err("not recorded").exit_code(), 8);
            assert_eq!(std::fs::read(folder.join(NAME)).expect("read"), whole, "it is left alone");
        }
    }

    #[test]
    fn every_changed_byte_is_found_and_its_line_named() {
        let folder = tempfile::tempdir().expect("folder");
        let folder = folder.path();
        written(folder, 3);
        let whole = std::fs::read(folder.join(NAME)).expect("read");
        for at in 0..whole.len() - 1 {
            for mask in [1, 0x20] {
                let mut bad = whole.clone();
                bad[at] ^= mask;
                std::fs::write(folder.join(NAME), &bad).expect("written");
                let error = Chain::read(folder).expect_err("changed");
                let line = whole[..at].split(|byte| *byte == b'\n').count();
                assert_eq!(error.exit_code(), 8);
                assert!(error.to_string().contains(&format!("line {line}: ")), "{at}: {error}");
            }
        }
        let lines: Vec<&[u8]> = whole.split_inclusive(|byte| *byte == b'\n').collect();
        for (wrong, line) in [(vec![0, 2, 1, 3], 2), (vec![0, 2, 3], 2), (vec![1, 2], 1), (vec![], 1)] {
            let text: Vec<u8> = wrong.iter().flat_map(|line| lines[*line].to_vec()).collect();
            std::fs::write(folder.join(NAME), text).expect("written");
            let error = Chain::read(folder).expect_err("other lines").to_string();
            assert!(error.contains(&format!("line {line}: ")), "{error}");
        }
    }

    #[test]
    fn the_first_difference_is_named_in_the_order_of_an_update() {
        let all = digests(1);
        let changed = |change: &dyn Fn(&mut Vec<TensorDigests>, &mut Update)| {
            let (mut tensors, mut other) = (all.clone(), update(1));
            change(&mut tensors, &mut other);
            let (rows, loss) = (other.rows, other.loss);
            other.set_digests(&tensors);
            (other.rows, other.loss) = (rows, loss);
            update(1).first_difference(&other)
        };
        assert_eq!(changed(&|_, _| ()), None);
        assert_eq!(changed(&|tensors, _| tensors[2].moments[1] = Digest([1 << 40, 0])), Some(Item::State(Some(2))));
        let both = |tensors: &mut Vec<TensorDigests>, _: &mut Update| {
            (tensors[0].value, tensors[1].gradient) = (Digest([0; 2]), Digest([0; 2]));
        };
        assert_eq!(changed(&both), Some(Item::Gradient(Some(1))));
        // A difference that the shortened digest does not show is still one.
        assert_eq!(changed(&|tensors, _| tensors[0].value.0[1] += 1), Some(Item::Weights(None)));
        assert_eq!(changed(&|tensors, other| (tensors[0].value, other.loss) = (Digest([0; 2]), 9)), Some(Item::Loss));
        assert_eq!(changed(&|_, other| (other.loss, other.rows) = (9, Hash([0; 32]))), Some(Item::Rows));
    }

    #[test]
    fn many_tensors_share_parts() {
        assert_eq!([0, 1, 1024, 1025, 2048, 2049].map(tensors_per_part), [1, 1, 1, 2, 2, 3]);
        let mut update = update(1);
        let many: Vec<TensorDigests> =
            (0..1500).map(|at| TensorDigests { value: Digest([at; 2]), ..digests(1)[0] }).collect();
        update.set_digests(&many);
        assert_eq!(update.parts.weights.len(), 750);
    }
}
