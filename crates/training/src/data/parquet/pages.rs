//! One column of a row group: its pages are decompressed one at a time, and its values come out
//! with their levels, in order.

use super::levels::Hybrid;
use super::schema::Leaf;
use super::thrift::Fields;
use super::values::{Dictionary, Value, Values};
use std::borrow::Cow;
use std::cell::Cell;
use std::io::Read;

/// A column that is being read.
pub(super) struct Column<'f> {
    pub(super) leaf: &'f Leaf,
    /// Its pages.
    bytes: &'f [u8],
    at: usize,
    codec: i64,
    /// Values, nulls included, in pages that are not yet read.
    left: usize,
    bounds: Bounds<'f>,
    dictionary: Option<Dictionary>,
    page: Option<Page<'f>>,
    /// Levels of the next value; `None` at the end of the column.
    pub(super) next: Option<Levels>,
}

/// BOUND: bytes of decompressed pages.
#[derive(Clone, Copy)]
pub(super) struct Bounds<'f> {
    /// Of one page.
    pub(super) page: usize,
    /// Of all pages of the file that are still to be read, which limits the time it takes.
    pub(super) left: &'f Cell<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Levels {
    pub(super) repetition: u32,
    pub(super) definition: u32,
}

struct Page<'f> {
    bytes: Cow<'f, [u8]>,
    left: usize,
    repetition: Option<Hybrid>,
    definition: Option<Hybrid>,
    values: Values,
}

/// What a page's header says about its data.
struct Header<'h> {
    fields: &'h Fields<'h>,
    compressed: usize,
    uncompressed: usize,
}

impl<'f> Column<'f> {
    /// The column that a chunk's metadata describes.
    pub(super) fn open(file: &'f [u8], leaf: &'f Leaf, chunk: &Fields<'_>, bounds: Bounds<'f>) -> Result<Self, String> {
        if chunk.get(1).is_some() {
            return Err("its data are in another file".to_string());
        }
        if chunk.get(8).is_some() || chunk.get(9).is_some() {
            return Err("it is encrypted".to_string());
        }
        let about = chunk.structure(3).ok_or("its metadata are missing")?;
        let data = about.size(9).ok_or("its metadata do not say where its pages are")?;
        // Some writers put 0 where there is no dictionary.
        let start = about.size(11).filter(|at| *at > 0).map_or(data, |dictionary| dictionary.min(data));
        let length = about.size(7).ok_or("its metadata do not say how long it is")?;
        let bytes = start.checked_add(length).and_then(|end| file.get(start..end));
        let bytes = bytes.ok_or_else(|| format!("its pages ({start}..+{length}) are beyond the end of the file"))?;
        let left = about.size(5).ok_or("its metadata do not say how many values it has")?;
        let codec = about.int(4).ok_or("its metadata name no compression")?;
        let mut column = Self { leaf, bytes, at: 0, codec, left, bounds, dictionary: None, page: None, next: None };
        column.advance()?;
        Ok(column)
    }

    /// Moves on to the levels of the next value.
    pub(super) fn advance(&mut self) -> Result<(), String> {
        while self.page.as_ref().is_none_or(|page| page.left == 0) {
            if self.left == 0 {
                self.next = None;
                return Ok(());
            }
            self.page = self.next_page()?;
        }
        let Some(page) = &mut self.page else { return Ok(()) };
        page.left -= 1;
        let level = |levels: &mut Option<Hybrid>, bytes: &[u8], max: u32| match levels {
            None => Ok(0),
            Some(levels) => levels.next(bytes).filter(|level| *level <= max).ok_or("a page is damaged: its levels"),
        };
        let repetition = level(&mut page.repetition, &page.bytes, self.leaf.repetition)?;
        let definition = level(&mut page.definition, &page.bytes, self.leaf.definition)?;
        self.next = Some(Levels { repetition, definition });
        Ok(())
    }

    /// The value whose levels are next. It must not be null.
    pub(super) fn value(&mut self) -> Result<Value, String> {
        let none = Dictionary::default();
        let dictionary = self.dictionary.as_ref().unwrap_or(&none);
        let value = self.page.as_mut().and_then(|page| page.values.next(&page.bytes, dictionary));
        value.ok_or_else(|| "a page is damaged: its values".to_string())
    }

    /// The bytes of a value that was just read.
    pub(super) fn text(&self, value: &Value) -> &[u8] {
        let page = self.page.as_ref();
        let bytes = match value {
            Value::Bytes { at, in_dictionary: true } => {
                self.dictionary.as_ref().and_then(|dictionary| dictionary.bytes.get(at.clone()))
            }
            Value::Bytes { at, in_dictionary: false } => page.and_then(|page| page.bytes.get(at.clone())),
            _ => page.map(|page| page.values.joined.as_slice()),
        };
        bytes.unwrap_or_default()
    }

    /// The next page of data; a dictionary before it is kept.
    fn next_page(&mut self) -> Result<Option<Page<'f>>, String> {
        let rest = &self.bytes[self.at..];
        if rest.is_empty() {
            return Err(format!("{} of its values are missing", self.left));
        }
        let (fields, taken) = Fields::read(rest).map_err(|why| format!("the header of a page: {why}"))?;
        let (kind, sizes) = (fields.int(1), [2, 3].map(|number| fields.size(number)));
        let (Some(kind), [Some(uncompressed), Some(compressed)]) = (kind, sizes) else {
            return Err("the header of a page lacks its sizes".to_string());
        };
        let stored = rest[taken..].get(..compressed);
        let stored = stored.ok_or_else(|| format!("a page of {compressed} bytes is cut off"))?;
        let left = self.bounds.left.get().checked_sub(uncompressed.max(compressed));
        let left = left.filter(|_| uncompressed <= self.bounds.page);
        let left =
            left.ok_or_else(|| format!("a page of {compressed} bytes claims to hold {uncompressed}, too many"))?;
        self.bounds.left.set(left);
        if let Some(wanted) = fields.int(4) {
            check_sum(stored, wanted)?;
        }
        self.at += taken + compressed;
        let header = |number: i16| {
            let fields = fields.structure(number).ok_or("the header of a page is incomplete")?;
            Ok::<_, String>(Header { fields, compressed, uncompressed })
        };
        match kind {
            0 => self.page_1(&header(5)?, stored).map(Some),
            2 => {
                let header = header(7)?;
                let bytes = self.decompressed(stored, header.uncompressed)?.into_owned();
                let count = header.fields.size(1).ok_or("a dictionary has no count")?;
                let dictionary = Dictionary::new(bytes, self.leaf.physical, count);
                self.dictionary = Some(dictionary.ok_or("its dictionary is damaged")?);
                Ok(None)
            }
            3 => self.page_2(&header(8)?, stored).map(Some),
            // Index pages, and kinds that are not known yet.
            _ => Ok(None),
        }
    }

    /// A page of the first version: everything is compressed, and levels say their length.
    fn page_1(&mut self, header: &Header<'_>, stored: &'f [u8]) -> Result<Page<'f>, String> {
        let bytes = self.decompressed(stored, header.uncompressed)?;
        let count = self.count(header)?;
        let mut at = 0;
        let mut levels = |max: u32, number: i16| -> Result<Option<Hybrid>, String> {
            if max == 0 {
                return Ok(None);
            }
            if header.fields.int(number) != Some(3) {
                return Err("its levels are in an encoding that is no longer written".to_string());
            }
            let length =
                bytes.get(at..).and_then(<[u8]>::first_chunk).map(|length| u32::from_le_bytes(*length) as usize);
            let range = length.and_then(|length| Some(at + 4..(at + 4).checked_add(length)?));
            let range = range.filter(|range| range.end <= bytes.len()).ok_or("a page is damaged: its levels")?;
            at = range.end;
            Ok(Some(Hybrid::new(range, width(max))))
        };
        let repetition = levels(self.leaf.repetition, 4)?;
        let definition = levels(self.leaf.definition, 3)?;
        let values = self.values(header.fields.int(2), &bytes, at)?;
        Ok(Page { bytes, left: count, repetition, definition, values })
    }

    /// A page of the second version: levels come first, uncompressed.
    fn page_2(&mut self, header: &Header<'_>, stored: &'f [u8]) -> Result<Page<'f>, String> {
        let count = self.count(header)?;
        let lengths = [6, 5].map(|number| header.fields.size(number));
        let [Some(repetition), Some(definition)] = lengths else {
            return Err("the header of a page is incomplete".to_string());
        };
        let levels =
            repetition.checked_add(definition).filter(|levels| *levels <= header.compressed.min(header.uncompressed));
        let levels = levels.ok_or("a page is damaged: its levels")?;
        let bytes = if header.fields.flag(7) == Some(false) {
            Cow::Borrowed(stored)
        } else {
            let values = self.decompressed(&stored[levels..], header.uncompressed - levels)?;
            let mut bytes = stored[..levels].to_vec();
            bytes.extend_from_slice(&values);
            Cow::Owned(bytes)
        };
        let part = |max: u32, range| (max > 0).then(|| Hybrid::new(range, width(max)));
        let values = self.values(header.fields.int(4), &bytes, levels)?;
        Ok(Page {
            left: count,
            repetition: part(self.leaf.repetition, 0..repetition),
            definition: part(self.leaf.definition, repetition..levels),
            bytes,
            values,
        })
    }

    fn count(&mut self, header: &Header<'_>) -> Result<usize, String> {
        let count = header.fields.size(1).ok_or("a page has no count")?;
        self.left = self.left.checked_sub(count).ok_or("its pages hold more values than it says")?;
        Ok(count)
    }

    fn values(&self, encoding: Option<i64>, bytes: &[u8], at: usize) -> Result<Values, String> {
        let encoding = encoding.ok_or("a page names no encoding")?;
        if matches!(encoding, 2 | 8) && self.dictionary.is_none() {
            return Err("its dictionary is missing".to_string());
        }
        Values::new(self.leaf.physical, encoding, bytes, at)
    }

    fn decompressed(&self, stored: &'f [u8], size: usize) -> Result<Cow<'f, [u8]>, String> {
        let (name, result) = match self.codec {
            0 => return Ok(Cow::Borrowed(stored)),
            1 => ("snappy", snappy(stored, size)),
            2 => ("gzip", whole(flate2::read::MultiGzDecoder::new(stored), size)),
            4 => ("brotli", whole(brotli_decompressor::Decompressor::new(stored, 4096), size)),
            6 => ("zstd", zstd(stored, size)),
            7 => ("lz4", lz4(stored, size)),
            3 => return Err("it is compressed with LZO, which is not supported".to_string()),
            5 => return Err("it is compressed with the old form of LZ4, which is not supported".to_string()),
            other => return Err(format!("it is compressed with method {other}, which is not known")),
        };
        match result {
            Ok(bytes) if bytes.len() == size => Ok(Cow::Owned(bytes)),
            Ok(_) => Err(format!("a page of {name} does not hold the {size} bytes that it claims")),
            Err(why) => Err(format!("a page of {name} is damaged: {why}")),
        }
    }
}

/// Bits of a level.
fn width(max: u32) -> u32 {
    u32::BITS - max.leading_zeros()
}

fn check_sum(stored: &[u8], wanted: i64) -> Result<(), String> {
    let mut sum = flate2::Crc::new();
    // The sum counts lengths in 32 bits; a page is shorter.
    sum.update(stored);
    if sum.sum() == wanted as u32 { Ok(()) } else { Err("a page does not match its checksum".to_string()) }
}

fn snappy(stored: &[u8], size: usize) -> Result<Vec<u8>, String> {
    // The length comes first, and is checked before anything is allocated.
    match snap::raw::decompress_len(stored) {
        Ok(length) if length == size => snap::raw::Decoder::new().decompress_vec(stored).map_err(|why| why.to_string()),
        Ok(_) => Ok(Vec::new()),
        Err(why) => Err(why.to_string()),
    }
}

fn lz4(stored: &[u8], size: usize) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; size];
    let length = lz4_flex::block::decompress_into(stored, &mut bytes).map_err(|why| why.to_string())?;
    bytes.truncate(length);
    Ok(bytes)
}

fn zstd(stored: &[u8], size: usize) -> Result<Vec<u8>, String> {
    let decoder = ruzstd::decoding::StreamingDecoder::new(stored).map_err(|why| why.to_string())?;
    whole(decoder, size)
}

/// Everything that a decoder gives, or one byte more than `size` if it gives too much.
fn whole(decoder: impl Read, size: usize) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    decoder.take(size as u64 + 1).read_to_end(&mut bytes).map_err(|why| why.to_string())?;
    Ok(bytes)
}
