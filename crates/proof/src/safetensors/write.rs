//! Writes a safetensors file: the same tensors give the same bytes, in whatever order they are
//! passed.
//!
//! Tensors are sorted by descending element size, then by name, after a header padded to eight
//! bytes, so that every element is aligned. This crate's reader reads everything written here.

use super::dtype::Dtype;
use super::{DIMENSIONS_MAX, HEADER_BYTES_MAX, METADATA, NAME_BYTES_MAX, TENSORS_MAX};
use crate::atomic::AtomicFile;
use crate::error::FileError;
use crate::name::quoted;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// A tensor to write.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [usize],
    /// Row-major, little-endian.
    pub bytes: &'a [u8],
}

/// A tensor whose bytes are written later.
#[derive(Clone, Copy, Debug)]
pub struct Declared<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [usize],
}

/// Writes a file atomically. Metadata always contains `"format": "pt"`, which other loaders
/// require.
pub fn write(path: &Path, metadata: &BTreeMap<String, String>, tensors: &[Entry]) -> Result<(), FileError> {
    for tensor in tensors {
        // Here rather than in the sink: a mistake should write nothing to disk.
        let needed = tensor.dtype.bytes_of(tensor.shape);
        if needed != Some(tensor.bytes.len()) {
            let (name, shape, found) = (quoted(tensor.name), tensor.shape, tensor.bytes.len());
            let what = format!("tensor {name} of shape {shape:?} and type {} was given {found} bytes", tensor.dtype);
            return Err(FileError::unwritable(path, what));
        }
    }
    let declared: Vec<Declared> =
        tensors.iter().map(|tensor| Declared { name: tensor.name, dtype: tensor.dtype, shape: tensor.shape }).collect();
    write_streamed(path, metadata, &declared, |index, sink| sink.write(tensors[index].bytes))
}

/// The same for tensors that do not fit in memory together: `fill` is called once for each, in file
/// order, with its index in `tensors`, and writes its bytes in any number of pieces.
pub fn write_streamed<E: From<FileError>>(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &[Declared],
    mut fill: impl FnMut(usize, &mut Sink) -> Result<(), E>,
) -> Result<(), E> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (&tensors[a], &tensors[b]);
        b.dtype.bits().cmp(&a.dtype.bits()).then(a.name.cmp(b.name))
    });
    let header = header(metadata, tensors, &order).map_err(|what| FileError::unwritable(path, what))?;
    let mut file = AtomicFile::create(path)?;
    file.write(&(header.len() as u64).to_le_bytes())?;
    file.write(&header)?;
    for index in order {
        let Declared { name, dtype, shape } = tensors[index];
        let left = dtype.bytes_of(shape).expect("the header has been made");
        let mut sink = Sink { path, name, file: &mut file, left };
        fill(index, &mut sink)?;
        if sink.left > 0 {
            let what = format!("tensor {} is short of {} bytes", quoted(name), sink.left);
            return Err(FileError::unwritable(path, what).into());
        }
    }
    Ok(file.commit()?)
}

/// Receives the bytes of one tensor.
#[derive(Debug)]
pub struct Sink<'a> {
    path: &'a Path,
    name: &'a str,
    file: &'a mut AtomicFile,
    left: usize,
}

impl Sink<'_> {
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        let Some(left) = self.left.checked_sub(bytes.len()) else {
            let what = format!("tensor {} was given {} bytes too many", quoted(self.name), bytes.len() - self.left);
            return Err(FileError::unwritable(self.path, what));
        };
        self.left = left;
        self.file.write(bytes)
    }
}

fn header(metadata: &BTreeMap<String, String>, tensors: &[Declared], order: &[usize]) -> Result<Vec<u8>, String> {
    check_names(tensors)?;
    let mut metadata = metadata.clone();
    metadata.entry("format".to_string()).or_insert_with(|| "pt".to_string());
    let mut json = format!("{{\"{METADATA}\":{}", json_of(&metadata));
    let mut begin = 0_usize;
    for &index in order {
        let Declared { name, dtype, shape } = tensors[index];
        let end = dtype.bytes_of(shape).and_then(|bytes| begin.checked_add(bytes));
        let end =
            end.ok_or_else(|| format!("shape {shape:?} of tensor {} is not a whole number of bytes", quoted(name)))?;
        let (name, shape) = (json_of(name), json_of(shape));
        let _ = write!(json, ",{name}:{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":[{begin},{end}]}}");
        begin = end;
    }
    json.push('}');
    let mut header = json.into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() > HEADER_BYTES_MAX {
        return Err(format!("its header of {} bytes is over the limit of {HEADER_BYTES_MAX}", header.len()));
    }
    Ok(header)
}

fn json_of<T: serde::Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).expect("strings and numbers have a JSON form")
}

fn check_names(tensors: &[Declared]) -> Result<(), String> {
    if tensors.len() > TENSORS_MAX {
        return Err(format!("{} tensors are over the limit of {TENSORS_MAX}", tensors.len()));
    }
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("two tensors are called {}", quoted(pair[0])));
    }
    for tensor in tensors {
        if tensor.name == METADATA || tensor.name.len() > NAME_BYTES_MAX {
            return Err(format!("a tensor cannot be called {}", quoted(tensor.name)));
        }
        if tensor.shape.len() > DIMENSIONS_MAX {
            let count = tensor.shape.len();
            return Err(format!("tensor {} has {count} dimensions, over {DIMENSIONS_MAX}", quoted(tensor.name)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::SafeTensors;
    use super::*;

    fn path() -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a.safetensors");
        (folder, path)
    }

    const TENSORS: [Entry; 4] = [
        Entry { name: "z", dtype: Dtype::Bf16, shape: &[2, 1], bytes: &[1, 2, 3, 4] },
        Entry { name: "a \"quoted\"\n", dtype: Dtype::U8, shape: &[3], bytes: &[9, 8, 7] },
        Entry { name: "b", dtype: Dtype::F32, shape: &[], bytes: &[0, 0, 128, 63] },
        Entry { name: "e", dtype: Dtype::F32, shape: &[0, 5], bytes: &[] },
    ];

    #[test]
    fn the_bytes_do_not_depend_on_the_order_and_are_read_back() {
        let (_folder, path) = path();
        let metadata = BTreeMap::from([("step".to_string(), "7".to_string())]);
        write(&path, &metadata, &TENSORS).expect("written");
        let first = std::fs::read(&path).expect("read");
        let mut reversed = TENSORS;
        reversed.reverse();
        write(&path, &metadata, &reversed).expect("written");
        assert_eq!(std::fs::read(&path).expect("read"), first);

        let file = SafeTensors::open(&path).expect("well formed");
        assert_eq!(file.tensors().map(|tensor| tensor.name).collect::<Vec<_>>(), ["b", "e", "z", "a \"quoted\"\n"]);
        assert_eq!(file.metadata()["format"], "pt");
        assert_eq!(file.metadata()["step"], "7");
        for tensor in TENSORS {
            let found = file.get(tensor.name).expect("there");
            assert_eq!((found.dtype, found.shape, found.bytes), (tensor.dtype, tensor.shape, tensor.bytes));
        }
    }

    #[test]
    fn the_other_implementation_reads_it_and_writes_the_same_bytes() {
        let (_folder, path) = path();
        write(&path, &BTreeMap::new(), &TENSORS).expect("written");
        let ours = std::fs::read(&path).expect("read");
        let judge = ::safetensors::SafeTensors::deserialize(&ours).expect("the judge reads it");
        assert_eq!(judge.len(), TENSORS.len());
        for tensor in TENSORS {
            let view = judge.tensor(tensor.name).expect("there");
            assert_eq!((view.shape(), view.data()), (tensor.shape, tensor.bytes));
            assert_eq!(view.dtype().to_string(), tensor.dtype.name());
        }
        let views: Vec<_> = TENSORS.iter().map(|t| (t.name, judge.tensor(t.name).expect("there"))).collect();
        let metadata = Some(std::iter::once(("format".to_string(), "pt".to_string())).collect());
        assert_eq!(::safetensors::serialize(views, metadata).expect("the judge writes"), ours);
    }

    #[test]
    fn tensors_may_come_in_pieces_but_must_fill_their_size() {
        let (folder, path) = path();
        let declared = [Declared { name: "a", dtype: Dtype::U8, shape: &[5] }];
        let pieces = |bytes: &[u8]| {
            write_streamed::<FileError>(&path, &BTreeMap::new(), &declared, |_, sink| {
                bytes.chunks(2).try_for_each(|chunk| sink.write(chunk))
            })
        };
        assert!(pieces(&[1; 4]).expect_err("short").to_string().contains("short of 1 bytes"));
        assert!(pieces(&[1; 7]).expect_err("long").to_string().contains("1 bytes too many"));
        assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 0, "nothing is left behind");
        pieces(&[1, 2, 3, 4, 5]).expect("written");
        assert_eq!(SafeTensors::open(&path).expect("well formed").get("a").expect("there").bytes, [1, 2, 3, 4, 5]);
    }

    #[test]
    fn mistakes_are_found_before_a_byte_is_written() {
        let (folder, path) = path();
        let entry = Entry { name: "a", dtype: Dtype::F32, shape: &[1], bytes: &[0; 4] };
        let long = "n".repeat(NAME_BYTES_MAX + 1);
        let cases = [
            (vec![entry, entry], "two tensors are called `a`"),
            (vec![Entry { bytes: &[0; 5], ..entry }], "was given 5 bytes"),
            (vec![Entry { name: METADATA, ..entry }], "cannot be called `__metadata__`"),
            (vec![Entry { name: &long, ..entry }], "cannot be called"),
            (vec![Entry { shape: &[1; 9], ..entry }], "9 dimensions"),
        ];
        for (tensors, expected) in cases {
            let error = write(&path, &BTreeMap::new(), &tensors).expect_err(expected);
            assert!(error.to_string().contains(expected), "{error}");
            assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 0);
        }
    }
}
