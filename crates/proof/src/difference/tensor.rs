//! Compares two sets of tensors, matched by name. Work is split into pieces of a fixed number of
//! elements, distributed over threads; pages are released piece by piece, so the files may be
//! larger than memory.

use super::number::{self, Tally};
use crate::error::FileError;
use crate::safetensors::{Dtype, Tensor, TensorFiles};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Elements per piece: a multiple of eight, so that packed formats begin on a byte.
const PIECE: usize = 1 << 20;

/// One tensor that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorDifference {
    pub name: String,
    pub kind: TensorMismatch,
}

#[derive(Clone, Debug, PartialEq)]
pub enum TensorMismatch {
    OnlyInFirst,
    OnlyInSecond,
    Shape {
        first: Vec<usize>,
        second: Vec<usize>,
    },
    /// Formats without common numbers.
    Dtype {
        first: Dtype,
        second: Dtype,
    },
    Values(Values),
}

/// Elements that differ. Two different formats were compared by value; then `tally` may be empty.
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    pub dtypes: [Dtype; 2],
    pub shape: Vec<usize>,
    /// Elements of the tensor.
    pub count: u64,
    pub tally: Tally,
    /// The first differing element on both sides: its bytes, as a hexadecimal number, and its
    /// value.
    pub first: Option<[Shown; 2]>,
}

/// One element, for display.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    pub hex: String,
    /// None for a format of less than a byte.
    pub value: Option<String>,
}

impl TensorMismatch {
    /// Whether the numbers differ. The same numbers in two formats are only worth a note.
    pub fn is_difference(&self) -> bool {
        !matches!(self, Self::Values(values) if values.tally.nonzero == 0)
    }
}

/// Compares all tensors; the result is sorted by name and does not depend on `threads`.
pub fn compare(a: &TensorFiles, b: &TensorFiles, threads: usize) -> Result<Vec<TensorDifference>, FileError> {
    let mut found = Vec::new();
    let mut pairs = Vec::new();
    let names: BTreeSet<&str> = a.names().chain(b.names()).collect();
    for name in names {
        let kind = match (a.contains(name), b.contains(name)) {
            (true, false) => TensorMismatch::OnlyInFirst,
            (false, _) => TensorMismatch::OnlyInSecond,
            (true, true) => {
                let pair = [a.get(name)?, b.get(name)?];
                let Some(kind) = unlike(&pair) else {
                    pairs.push(pair);
                    continue;
                };
                kind
            }
        };
        found.push(TensorDifference { name: name.to_string(), kind });
    }
    for (index, tally) in tallies(&pairs, threads.max(1)) {
        let [first, second] = &pairs[index];
        let values = Values {
            dtypes: [first.dtype, second.dtype],
            shape: first.shape.to_vec(),
            count: first.element_count() as u64,
            first: tally.first.map(|index| [first, second].map(|tensor| show(tensor, index as usize))),
            tally,
        };
        found.push(TensorDifference { name: first.name.to_string(), kind: TensorMismatch::Values(values) });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Why two tensors cannot be compared element by element.
fn unlike([a, b]: &[Tensor; 2]) -> Option<TensorMismatch> {
    if a.shape != b.shape {
        return Some(TensorMismatch::Shape { first: a.shape.to_vec(), second: b.shape.to_vec() });
    }
    let comparable = a.dtype == b.dtype || (number::has_values(a.dtype) && number::has_values(b.dtype));
    (!comparable).then_some(TensorMismatch::Dtype { first: a.dtype, second: b.dtype })
}

/// Tallies of the pairs that differ in any way, by index.
fn tallies(pairs: &[[Tensor; 2]], threads: usize) -> BTreeMap<usize, Tally> {
    let mut tallies: BTreeMap<usize, Tally> =
        pairs.iter().enumerate().filter(|(_, [a, b])| a.dtype != b.dtype).map(|(i, _)| (i, Tally::default())).collect();
    let shares: Vec<BTreeMap<usize, Tally>> = std::thread::scope(|scope| {
        let start = |thread| {
            let builder = std::thread::Builder::new();
            (thread, builder.spawn_scoped(scope, move || share(pairs, thread, threads)))
        };
        let workers: Vec<_> = (0..threads).map(start).collect();
        let done = workers.into_iter().map(|(thread, worker)| match worker {
            Ok(worker) => worker.join().expect("comparing does not panic"),
            // The system provides no more threads: this one does that share.
            Err(_) => share(pairs, thread, threads),
        });
        done.collect()
    });
    for (index, tally) in shares.into_iter().flatten() {
        let joined = tallies.get(&index).copied().unwrap_or_default().join(tally);
        tallies.insert(index, joined);
    }
    tallies
}

/// The pieces of one thread: every `threads`-th.
fn share(pairs: &[[Tensor; 2]], thread: usize, threads: usize) -> BTreeMap<usize, Tally> {
    let mut tallies = BTreeMap::<usize, Tally>::new();
    let mut turn = 0;
    for (index, pair) in pairs.iter().enumerate() {
        let count = pair[0].element_count();
        for start in (0..count).step_by(PIECE) {
            let mine = turn == thread;
            turn = (turn + 1) % threads;
            if !mine {
                continue;
            }
            let tally = piece(pair, start..count.min(start + PIECE));
            if tally.nonzero > 0 {
                let joined = tallies.get(&index).copied().unwrap_or_default().join(tally);
                tallies.insert(index, joined);
            }
        }
    }
    tallies
}

fn piece([a, b]: &[Tensor; 2], elements: Range<usize>) -> Tally {
    let span = |tensor: &Tensor| {
        let bits = tensor.dtype.bits();
        elements.start * bits / 8..elements.end * bits / 8
    };
    let spans = [span(a), span(b)];
    a.prefetch_range(spans[0].clone());
    b.prefetch_range(spans[1].clone());
    let (first, second) = (&a.bytes[spans[0].clone()], &b.bytes[spans[1].clone()]);
    let tally = if a.dtype != b.dtype {
        number::compare_values([a.dtype, b.dtype], first, second, elements.start).expect("`unlike` has asked")
    } else if first == second {
        Tally::default()
    } else {
        number::compare(a.dtype, first, second, elements.start)
    };
    let [from_a, from_b] = spans;
    a.release_range(from_a);
    b.release_range(from_b);
    tally
}

/// One element, for display.
fn show(tensor: &Tensor, index: usize) -> Shown {
    let bits = tensor.dtype.bits();
    let bytes = &tensor.bytes[index * bits / 8..(index * bits / 8 + bits.div_ceil(8)).min(tensor.bytes.len())];
    let hex = bytes.iter().rev().fold("0x".to_string(), |hex, byte| format!("{hex}{byte:02x}"));
    let value = number::show(tensor.dtype, bytes);
    // Reading one element may have paged in megabytes around it.
    tensor.release();
    Shown { hex, value }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safetensors::{Entry, write};
    use std::path::Path;

    fn file(folder: &Path, name: &str, tensors: &[Entry]) -> TensorFiles {
        write(&folder.join(name), &BTreeMap::new(), tensors).expect("written");
        TensorFiles::open_file(&folder.join(name)).expect("well formed")
    }

    fn entry(bytes: &[u8]) -> Entry<'_> {
        Entry { name: "w", dtype: Dtype::Bf16, shape: &[PIECE * 2 + 5], bytes }
    }

    #[test]
    fn the_result_does_not_depend_on_threads_and_pieces() {
        let folder = tempfile::tempdir().expect("folder");
        let count = PIECE * 2 + 5;
        let mut bytes = vec![0; count * 2];
        let a = file(folder.path(), "a", &[entry(&bytes)]);
        for (index, value) in [(PIECE - 1, 1), (PIECE, 7), (count - 1, 3)] {
            bytes[index * 2] = value;
        }
        let b = file(folder.path(), "b", &[entry(&bytes)]);
        let found: Vec<_> = [1, 2, 7].map(|threads| compare(&a, &b, threads).expect("compared")).into();
        assert!(found[0] == found[1] && found[1] == found[2]);
        let TensorMismatch::Values(values) = &found[0][0].kind else { panic!("{found:?}") };
        assert_eq!((values.tally.nonzero, values.tally.ulps, values.tally.first), (3, Some(7), Some(PIECE as u64 - 1)));
        let [first, second] = values.first.as_ref().expect("there is one");
        assert_eq!((first.hex.as_str(), first.value.as_deref()), ("0x0000", Some("0")));
        assert_eq!((second.hex.as_str(), second.value.as_deref()), ("0x0001", Some("9.183549615799121e-41")));
        assert_eq!(compare(&a, &a, 2).expect("compared"), []);
    }

    #[test]
    fn every_kind_is_found_and_sorted() {
        let folder = tempfile::tempdir().expect("folder");
        let byte = |name, shape| Entry { name, dtype: Dtype::U8, shape, bytes: &[1, 2] };
        let one = |name| Entry { name, dtype: Dtype::F32, shape: &[1], bytes: &[0, 0, 128, 63] };
        let a = file(folder.path(), "a", &[byte("s", &[2]), byte("o", &[2]), one("half"), one("int")]);
        let half = Entry { name: "half", dtype: Dtype::Bf16, shape: &[1], bytes: &[128, 63] };
        let int = Entry { name: "int", dtype: Dtype::I32, shape: &[1], bytes: &[0; 4] };
        let b = file(folder.path(), "b", &[byte("s", &[1, 2]), byte("p", &[2]), half, int]);
        let found = compare(&a, &b, 2).expect("compared");
        assert_eq!(
            found.iter().map(|difference| difference.name.as_str()).collect::<Vec<_>>(),
            ["half", "int", "o", "p", "s"]
        );
        assert!(!found[0].kind.is_difference(), "the same number in two formats");
        assert_eq!(found[1].kind, TensorMismatch::Dtype { first: Dtype::F32, second: Dtype::I32 });
        assert_eq!((&found[2].kind, &found[3].kind), (&TensorMismatch::OnlyInFirst, &TensorMismatch::OnlyInSecond));
        assert_eq!(found[4].kind, TensorMismatch::Shape { first: vec![2], second: vec![1, 2] });
    }
}
