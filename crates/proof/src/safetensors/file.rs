//! One safetensors file, mapped into memory. Tensors borrow their bytes from the map; pages are
//! loaded when read and dropped with `release`.
//!
//! A mapped file must not be changed by others while it is open: their writes would show up here,
//! and truncating the file would kill the process. Isobit itself only ever replaces whole files
//! (`atomic`), which leaves an open map unchanged.

use super::HEADER_BYTES_MAX;
use super::dtype::Dtype;
use super::header::{Header, HeaderEntry};
use crate::error::FileError;
use crate::regular;
use isobit_numerics::cast::{bf16_to_f32, f16_to_f32};
use memmap2::Mmap;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An open file whose header has been checked.
#[derive(Debug)]
pub struct SafeTensors {
    path: PathBuf,
    content: Content,
    header: Header,
    /// Offset of the data buffer.
    data_begin: usize,
}

#[derive(Debug)]
enum Content {
    Mapped(Mmap),
    Held(Vec<u8>),
}

impl Content {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Held(bytes) => bytes,
        }
    }
}

impl SafeTensors {
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let failed = |error| FileError::from_io("read", path, error);
        let (file, size) = regular::open(path)?;
        if size < 8 {
            return Err(FileError::malformed(path, "shorter than 8 bytes"));
        }
        // SAFETY: the map is read-only; that nobody changes the file meanwhile is the condition
        // stated above.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Self::parse(path, Content::Mapped(map))
    }

    /// The same from bytes in memory; `name` stands for the path in messages.
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<Self, FileError> {
        Self::parse(Path::new(name), Content::Held(bytes))
    }

    fn parse(path: &Path, content: Content) -> Result<Self, FileError> {
        let malformed = |what: String| FileError::malformed(path, what);
        let bytes = content.bytes();
        let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
            return Err(malformed("shorter than 8 bytes".to_string()));
        };
        let length = u64::from_le_bytes(*length);
        if length > HEADER_BYTES_MAX as u64 {
            return Err(malformed(format!(
                "its header would be {length} bytes, over the limit of {HEADER_BYTES_MAX}: is this a safetensors file?"
            )));
        }
        let length = length as usize;
        let Some((json, data)) = rest.split_at_checked(length) else {
            return Err(malformed(format!(
                "its header is {length} bytes, but only {} follow: the file is truncated",
                rest.len()
            )));
        };
        let header = Header::parse(json, data.len()).map_err(malformed)?;
        Ok(Self { path: path.to_path_buf(), header, data_begin: 8 + length, content })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Tensors in byte order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.header.entries.iter().map(|entry| self.tensor(entry))
    }

    /// Names in sorted order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.names()
    }

    pub fn contains(&self, name: &str) -> bool {
        self.header.find(name).is_some()
    }

    pub fn get(&self, name: &str) -> Result<Tensor<'_>, FileError> {
        match self.header.find(name) {
            Some(entry) => Ok(self.tensor(entry)),
            None => Err(FileError::NoTensor { path: self.path.clone(), name: name.to_string() }),
        }
    }

    /// Releases all pages: reading tensors also loaded pages around them.
    pub fn release(&self) {
        if let Content::Mapped(map) = &self.content {
            release(map, map);
        }
    }

    fn tensor<'a>(&'a self, entry: &'a HeaderEntry) -> Tensor<'a> {
        // The header's ranges tile the data buffer, so this cannot be out of range.
        let bytes = &self.content.bytes()[self.data_begin + entry.begin..self.data_begin + entry.end];
        let map = match &self.content {
            Content::Mapped(map) => Some(map),
            Content::Held(_) => None,
        };
        Tensor { name: &entry.name, dtype: entry.dtype, shape: &entry.shape, bytes, map }
    }
}

/// One tensor of an open file.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [usize],
    /// Row-major, little-endian, at any alignment.
    pub bytes: &'a [u8],
    map: Option<&'a Mmap>,
}

impl std::fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {:?}", self.name, self.dtype, self.shape)
    }
}

impl<'a> Tensor<'a> {
    /// Number of elements.
    pub fn element_count(&self) -> usize {
        super::dtype::element_count(self.shape).expect("the header's sizes were checked")
    }

    /// Values of an F32, BF16 or F16 tensor, exactly. NaNs of the 16-bit formats become the
    /// canonical NaN.
    pub fn to_f32(&self) -> Result<Vec<f32>, FileError> {
        match self.dtype {
            Dtype::F32 => Ok(self.elements(f32::from_le_bytes)),
            Dtype::Bf16 => Ok(self.elements(|bytes| bf16_to_f32(u16::from_le_bytes(bytes)))),
            Dtype::F16 => Ok(self.elements(|bytes| f16_to_f32(u16::from_le_bytes(bytes)))),
            _ => Err(self.wrong_type("F32, BF16 or F16")),
        }
    }

    /// Bits of a BF16 tensor: borrowed if aligned, else copied.
    pub fn bf16_bits(&self) -> Result<Cow<'a, [u16]>, FileError> {
        if self.dtype == Dtype::Bf16 { Ok(self.bits16()) } else { Err(self.wrong_type("BF16")) }
    }

    /// Bits of an F16 tensor: borrowed if aligned, else copied.
    pub fn f16_bits(&self) -> Result<Cow<'a, [u16]>, FileError> {
        if self.dtype == Dtype::F16 { Ok(self.bits16()) } else { Err(self.wrong_type("F16")) }
    }

    /// Values of an I32 tensor.
    pub fn to_i32(&self) -> Result<Vec<i32>, FileError> {
        if self.dtype == Dtype::I32 { Ok(self.elements(i32::from_le_bytes)) } else { Err(self.wrong_type("I32")) }
    }

    /// Values of an I64 tensor.
    pub fn to_i64(&self) -> Result<Vec<i64>, FileError> {
        if self.dtype == Dtype::I64 { Ok(self.elements(i64::from_le_bytes)) } else { Err(self.wrong_type("I64")) }
    }

    /// Asks the system to load a range of bytes now, at once: reading them would load them page by
    /// page.
    pub fn prefetch_range(&self, range: Range<usize>) {
        let Some(bytes) = self.bytes.get(range) else { return };
        let Some(map) = self.map else { return };
        prefetch(map, bytes);
    }

    /// Releases this tensor's pages. Its bytes stay readable: they are loaded from the file again.
    pub fn release(&self) {
        self.release_range(0..self.bytes.len());
    }

    /// The same for a range of its bytes.
    pub fn release_range(&self, range: Range<usize>) {
        let Some(bytes) = self.bytes.get(range) else { return };
        let Some(map) = self.map else { return };
        release(map, bytes);
    }

    fn elements<const N: usize, T>(&self, read: impl Fn([u8; N]) -> T) -> Vec<T> {
        let (chunks, rest) = self.bytes.as_chunks::<N>();
        debug_assert!(rest.is_empty(), "the header's sizes were checked");
        chunks.iter().map(|&bytes| read(bytes)).collect()
    }

    fn bits16(&self) -> Cow<'a, [u16]> {
        // SAFETY: any two bytes are a u16.
        let (before, middle, after) = unsafe { self.bytes.align_to::<u16>() };
        if before.is_empty() && after.is_empty() && cfg!(target_endian = "little") {
            Cow::Borrowed(middle)
        } else {
            Cow::Owned(self.elements(u16::from_le_bytes))
        }
    }

    fn wrong_type(&self, wanted: &'static str) -> FileError {
        FileError::WrongType { name: self.name.to_string(), found: self.dtype.name(), wanted }
    }
}

/// Best effort: a system that refuses loads pages when they are read.
#[cfg(target_os = "linux")]
fn prefetch(map: &Mmap, bytes: &[u8]) {
    let offset = bytes.as_ptr().addr() - map.as_ptr().addr();
    let _ = map.advise_range(memmap2::Advice::PopulateRead, offset, bytes.len());
}

#[cfg(not(target_os = "linux"))]
fn prefetch(_map: &Mmap, _bytes: &[u8]) {}

/// Best effort: a system that refuses only keeps the pages a while longer.
#[cfg(target_os = "linux")]
fn release(map: &Mmap, bytes: &[u8]) {
    let offset = bytes.as_ptr().addr() - map.as_ptr().addr();
    if bytes.is_empty() {
        return;
    }
    // SAFETY: the pages belong to a read-only map of a file, so the next access reads the same
    // bytes from the file.
    let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, bytes.len()) };
}

#[cfg(not(target_os = "linux"))]
fn release(_map: &Mmap, _bytes: &[u8]) {}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of one header and its data.
    pub(crate) fn container(json: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    /// The same tensor at the start of the data and shifted by one byte: one of them is unaligned.
    fn shifted(dtype: &str, data: &[u8], count: usize) -> [SafeTensors; 2] {
        [0, 1].map(|pad| {
            let end = data.len() + pad;
            let json = format!(
                r#"{{"p":{{"dtype":"U8","shape":[{pad}],"data_offsets":[0,{pad}]}},"x":{{"dtype":"{dtype}","shape":[{count}],"data_offsets":[{pad},{end}]}}}}"#
            );
            let json = format!("{json:<width$}", width = json.len().next_multiple_of(8));
            let mut all = vec![0; pad];
            all.extend_from_slice(data);
            SafeTensors::from_bytes("test", container(&json, &all)).expect("well formed")
        })
    }

    #[test]
    fn values_come_out_at_any_alignment() {
        let numbers = [1.5_f32, -0.0, f32::INFINITY, 1e-40];
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        for file in shifted("F32", &bytes, 4) {
            let values = file.get("x").expect("there").to_f32().expect("float");
            assert_eq!(values.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), numbers.map(f32::to_bits));
        }
        let bits = [0x3fc0_u16, 0x8000, 0x7f80, 0x0001];
        let bytes: Vec<u8> = bits.iter().flat_map(|x| x.to_le_bytes()).collect();
        for file in shifted("BF16", &bytes, 4) {
            let tensor = file.get("x").expect("there");
            assert_eq!(*tensor.bf16_bits().expect("bf16"), bits);
            assert_eq!(tensor.to_f32().expect("float")[0], 1.5);
            assert!(matches!(tensor.f16_bits(), Err(FileError::WrongType { found: "BF16", wanted: "F16", .. })));
        }
        for file in shifted("F16", &bytes, 4) {
            assert_eq!(*file.get("x").expect("there").f16_bits().expect("f16"), bits);
        }
        for file in shifted("I32", &[1, 0, 0, 0, 255, 255, 255, 255], 2) {
            assert_eq!(file.get("x").expect("there").to_i32().expect("integer"), [1, -1]);
            assert!(file.get("x").expect("there").to_f32().is_err());
            assert!(file.get("y").expect_err("absent").to_string().contains("no tensor `y`"));
        }
    }

    #[test]
    fn a_mapped_file_survives_the_release_of_its_pages() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a.safetensors");
        let data: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
        let json = r#"{"a":{"dtype":"U8","shape":[100000],"data_offsets":[0,100000]}}"#;
        std::fs::write(&path, container(json, &data)).expect("written");
        let file = SafeTensors::open(&path).expect("well formed");
        let tensor = file.get("a").expect("there");
        assert_eq!(tensor.bytes, data);
        tensor.release();
        tensor.release_range(5..70_000);
        tensor.release_range(5..700_000);
        assert_eq!(tensor.bytes, data);
        assert_eq!((tensor.element_count(), tensor.shape), (100_000, &[100_000][..]));
    }

    #[test]
    fn what_is_no_such_file_is_an_error() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("a.safetensors");
        assert!(matches!(SafeTensors::open(&path), Err(FileError::Missing { .. })));
        assert!(matches!(SafeTensors::open(folder.path()), Err(FileError::NotRegular { .. })));
        let cases: [(&[u8], &str); 5] = [
            (b"", "shorter than 8"),
            (b"1234567", "shorter than 8"),
            (&[255; 16], "is this a safetensors file?"),
            (&[9, 0, 0, 0, 0, 0, 0, 0, b'{', b'}'], "truncated"),
            (&[0; 8], "does not start with"),
        ];
        for (bytes, expected) in cases {
            std::fs::write(&path, bytes).expect("written");
            for result in [SafeTensors::open(&path), SafeTensors::from_bytes("a", bytes.to_vec())] {
                let error = result.expect_err("malformed");
                assert!(error.to_string().contains(expected), "{error}");
                assert_eq!(error.exit_code(), 8);
            }
        }
    }
}
