//! Damaged files: bits flipped, bytes replaced, ends cut off, at every position of a header and
//! beyond. Each gives a typed error or a file that still obeys every rule; never a panic, and never
//! bytes outside the file.

use isobit_proof::safetensors::{Dtype, Entry, SafeTensors, TensorFiles, write};
use isobit_proof::{FileError, Manifest, difference};
use std::collections::BTreeMap;
use std::path::Path;

const TENSORS: [Entry; 4] = [
    Entry { name: "model.layers.0.q_proj.weight", dtype: Dtype::F32, shape: &[2, 3], bytes: &[7; 24] },
    Entry { name: "b", dtype: Dtype::Bf16, shape: &[3], bytes: &[1, 2, 3, 4, 5, 6] },
    Entry { name: "empty", dtype: Dtype::I64, shape: &[0], bytes: &[] },
    Entry { name: "scalar \u{1b}", dtype: Dtype::U8, shape: &[], bytes: &[1] },
];

fn valid(folder: &Path) -> Vec<u8> {
    let path = folder.join("model.safetensors");
    write(&path, &BTreeMap::from([("k".to_string(), "v\"\n".to_string())]), &TENSORS).expect("written");
    std::fs::read(path).expect("read")
}

/// Bytes that mean something in JSON or at the edges of a number.
const TELLING: [u8; 18] = *b"{}[]\",:\\0159eE-+ \xff";

/// Reads everything there is to read; says whether the file was accepted.
fn survives(bytes: Vec<u8>) -> bool {
    let length = bytes.len();
    match SafeTensors::from_bytes("damaged", bytes) {
        Ok(file) => {
            let mut total = 0;
            for tensor in file.tensors() {
                assert_eq!(tensor.dtype.bytes_of(tensor.shape), Some(tensor.bytes.len()));
                assert_eq!(file.get(tensor.name).expect("a listed name is found").bytes, tensor.bytes);
                total += tensor.bytes.len();
                let _ = (tensor.to_f32(), tensor.bf16_bits().map(|bits| bits.len()), tensor.to_i64());
                tensor.release();
            }
            assert!(total <= length);
            true
        }
        Err(error) => {
            assert!(matches!(error, FileError::Malformed { .. }), "{error}");
            assert_eq!(error.exit_code(), 8);
            assert!(!error.to_string().contains(|c: char| c.is_control()), "{error:?}");
            false
        }
    }
}

#[test]
fn one_byte_wrong_at_every_position() {
    let folder = tempfile::tempdir().expect("folder");
    let bytes = valid(folder.path());
    assert!(survives(bytes.clone()));
    let data = TENSORS.iter().map(|tensor| tensor.bytes.len()).sum::<usize>();
    for position in 0..bytes.len() {
        let flips = (0..8).map(|bit| bytes[position] ^ (1 << bit));
        for byte in flips.chain(TELLING) {
            let mut damaged = bytes.clone();
            damaged[position] = byte;
            let accepted = survives(damaged);
            assert!(accepted || position < bytes.len() - data, "every byte of data is a number");
        }
    }
}

#[test]
fn cut_and_grown_files_are_refused() {
    let folder = tempfile::tempdir().expect("folder");
    let bytes = valid(folder.path());
    for length in 0..bytes.len() {
        assert!(!survives(bytes[..length].to_vec()), "cut to {length}");
    }
    for extra in [1, 7, 8, 100] {
        let mut grown = bytes.clone();
        grown.resize(bytes.len() + extra, b' ');
        assert!(!survives(grown));
    }
    for position in 0..bytes.len() {
        let mut removed = bytes.clone();
        removed.remove(position);
        survives(removed);
        let mut inserted = bytes.clone();
        inserted.insert(position, b'1');
        survives(inserted);
    }
}

#[test]
fn many_bytes_wrong() {
    let folder = tempfile::tempdir().expect("folder");
    let bytes = valid(folder.path());
    let mut state = 1_u64;
    // Any generator will do that is the same everywhere.
    let mut next = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    for _ in 0..300_000 {
        let mut damaged = bytes.clone();
        for _ in 0..=next(6) {
            let position = next(damaged.len());
            match next(4) {
                0 => damaged[position] = TELLING[next(TELLING.len())],
                1 => damaged[position] = next(256) as u8,
                2 => damaged.truncate(position + 1),
                _ => {
                    let from = next(damaged.len());
                    let count = next(40).min(damaged.len() - from.max(position));
                    damaged.copy_within(from..from + count, position);
                }
            }
        }
        survives(damaged);
    }
}

#[test]
fn damaged_indexes_and_manifests_are_typed_errors() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    std::fs::write(folder.join("m-1.safetensors"), valid(folder)).expect("written");
    std::fs::remove_file(folder.join("model.safetensors")).expect("removed");
    let index = br#"{"metadata":{"total_size":31},"weight_map":{"b":"m-1.safetensors","empty":"m-1.safetensors"}}"#;
    let index_path = folder.join("model.safetensors.index.json");
    std::fs::write(&index_path, index).expect("written");
    TensorFiles::open(folder).expect("well formed");
    Manifest::of(folder, ["m-1.safetensors"]).expect("made").write(folder).expect("written");
    let manifest = std::fs::read(folder.join(Manifest::NAME)).expect("read");
    for position in 0..index.len().max(manifest.len()) {
        for byte in TELLING {
            if position < index.len() {
                let mut damaged = index.to_vec();
                damaged[position] = byte;
                replace(&index_path, &damaged);
                typed(TensorFiles::open(folder).err());
            }
            if position < manifest.len() {
                let mut damaged = manifest.clone();
                damaged[position] = byte;
                replace(&folder.join(Manifest::NAME), &damaged);
                typed(Manifest::read(folder).err());
            }
        }
    }
    std::fs::write(&index_path, "{").expect("written");
    typed(difference::compare(folder, folder, 2).err());
}

/// Removed first: overwriting makes some file systems wait for the disk.
fn replace(path: &Path, bytes: &[u8]) {
    std::fs::remove_file(path).expect("removed");
    std::fs::write(path, bytes).expect("written");
}

fn typed(error: Option<FileError>) {
    if let Some(error) = error {
        assert_eq!(error.exit_code(), 8, "{error}");
        assert!(!error.to_string().contains(|c: char| c.is_control()), "{error:?}");
    }
}
