//! The JSON header, parsed as a stream: a map that drops a repeated key would let two readers see
//! two different files.
//!
//! Entries are sorted by offset, and together they tile the data buffer: no gap, no overlap,
//! nothing left over.

use super::dtype::Dtype;
use super::{DIMENSIONS_MAX, METADATA, NAME_BYTES_MAX, TENSORS_MAX};
use crate::json::UniqueMap;
use crate::name::{quoted, told};
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt::{Formatter, Result as FormatResult};

/// A header whose rules have been checked.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) metadata: BTreeMap<String, String>,
    /// In file order.
    pub(crate) entries: Vec<HeaderEntry>,
    /// Indices into `entries`, sorted by name.
    by_name: Vec<u32>,
}

/// One tensor; its bytes are at `begin..end` of the data buffer.
#[derive(Debug)]
pub(crate) struct HeaderEntry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) begin: usize,
    pub(crate) end: usize,
}

impl Header {
    /// Parses the JSON of a header before a data buffer of `data_bytes`.
    pub(crate) fn parse(json: &[u8], data_bytes: usize) -> Result<Self, String> {
        if json.first() != Some(&b'{') {
            return Err("the header does not start with `{`".to_string());
        }
        let mut deserializer = serde_json::Deserializer::from_slice(json);
        let Parsed { metadata, mut entries } = HeaderVisitor
            .deserialize(&mut deserializer)
            .and_then(|parsed| deserializer.end().map(|()| parsed))
            .map_err(|error| format!("header: {}", told(&error)))?;
        entries.sort_by(|a, b| (a.begin, a.end, &a.name).cmp(&(b.begin, b.end, &b.name)));
        check_tiling(&entries, data_bytes)?;
        let by_name = names_sorted(&entries)?;
        Ok(Self { metadata: metadata.unwrap_or_default(), entries, by_name })
    }

    pub(crate) fn find(&self, name: &str) -> Option<&HeaderEntry> {
        let entry = |&position: &u32| &self.entries[position as usize];
        let place = self.by_name.binary_search_by(|position| entry(position).name.as_str().cmp(name)).ok()?;
        Some(entry(&self.by_name[place]))
    }

    /// Names in sorted order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.iter().map(|&position| self.entries[position as usize].name.as_str())
    }
}

fn check_tiling(entries: &[HeaderEntry], data_bytes: usize) -> Result<(), String> {
    let mut reached = 0;
    for entry in entries {
        let name = quoted(&entry.name);
        if entry.begin < reached {
            return Err(format!("tensor {name} overlaps the one before it at byte {}", entry.begin));
        }
        if entry.begin > reached {
            return Err(format!("{} bytes before tensor {name} belong to no tensor", entry.begin - reached));
        }
        reached = entry.end;
    }
    if reached > data_bytes {
        return Err(format!(
            "the tensors need {reached} bytes of data, but the file has {data_bytes}: it is truncated"
        ));
    }
    if reached < data_bytes {
        return Err(format!("{} bytes after the last tensor belong to no tensor", data_bytes - reached));
    }
    Ok(())
}

fn names_sorted(entries: &[HeaderEntry]) -> Result<Vec<u32>, String> {
    let name = |position: u32| entries[position as usize].name.as_str();
    let count = u32::try_from(entries.len()).map_err(|_| "too many tensors".to_string())?;
    let mut positions: Vec<u32> = (0..count).collect();
    positions.sort_by(|&a, &b| name(a).cmp(name(b)));
    match positions.windows(2).find(|pair| name(pair[0]) == name(pair[1])) {
        Some(pair) => Err(format!("tensor {} appears twice", quoted(name(pair[0])))),
        None => Ok(positions),
    }
}

struct Parsed {
    metadata: Option<BTreeMap<String, String>>,
    entries: Vec<HeaderEntry>,
}

struct HeaderVisitor;

impl<'de> DeserializeSeed<'de> for HeaderVisitor {
    type Value = Parsed;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Parsed, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Parsed;

    fn expecting(&self, f: &mut Formatter) -> FormatResult {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parsed, A::Error> {
        let mut parsed = Parsed { metadata: None, entries: Vec::new() };
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                let metadata = map.next_value::<UniqueMap<String>>()?.0;
                if parsed.metadata.replace(metadata).is_some() {
                    return Err(A::Error::custom(format!("`{METADATA}` appears twice")));
                }
                continue;
            }
            if name.len() > NAME_BYTES_MAX {
                return Err(A::Error::custom(format!("the name {} is over {NAME_BYTES_MAX} bytes", quoted(&name))));
            }
            if parsed.entries.len() == TENSORS_MAX {
                return Err(A::Error::custom(format!("more than {TENSORS_MAX} tensors")));
            }
            parsed.entries.push(map.next_value_seed(EntryVisitor(name))?);
        }
        Ok(parsed)
    }
}

/// The entry of the tensor with this name.
struct EntryVisitor(String);

impl<'de> DeserializeSeed<'de> for EntryVisitor {
    type Value = HeaderEntry;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<HeaderEntry, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntryVisitor {
    type Value = HeaderEntry;

    fn expecting(&self, f: &mut Formatter) -> FormatResult {
        write!(f, "dtype, shape and data_offsets of tensor {}", quoted(&self.0))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderEntry, A::Error> {
        let shown = quoted(&self.0);
        let twice = |field: &str| A::Error::custom(format!("tensor {shown} has two fields `{field}`"));
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key::<String>()? {
            let repeated = match field.as_str() {
                "dtype" => dtype.replace(map.next_value::<String>()?).is_some(),
                "shape" => shape.replace(map.next_value_seed(Numbers { most: DIMENSIONS_MAX })?).is_some(),
                "data_offsets" => offsets.replace(map.next_value_seed(Numbers { most: 2 })?).is_some(),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    return Err(A::Error::custom(format!("tensor {shown} has an unknown field {}", quoted(&field))));
                }
            };
            if repeated {
                return Err(twice(&field));
            }
        }
        entry(self.0, dtype, shape, offsets).map_err(|what| A::Error::custom(format!("tensor {shown}: {what}")))
    }
}

/// Checks the rules that concern a single tensor.
fn entry(
    name: String,
    dtype: Option<String>,
    shape: Option<Vec<usize>>,
    offsets: Option<Vec<usize>>,
) -> Result<HeaderEntry, String> {
    let missing = |field: &str| format!("field `{field}` is missing");
    let dtype = dtype.ok_or_else(|| missing("dtype"))?;
    let shape = shape.ok_or_else(|| missing("shape"))?;
    let offsets = offsets.ok_or_else(|| missing("data_offsets"))?;
    let dtype = Dtype::parse(&dtype).ok_or_else(|| format!("unknown dtype {}", quoted(&dtype)))?;
    let &[begin, end] = offsets.as_slice() else {
        return Err("data_offsets must be two numbers".to_string());
    };
    let found =
        end.checked_sub(begin).ok_or_else(|| format!("data_offsets end at {end}, before they begin at {begin}"))?;
    match dtype.bytes_of(&shape) {
        Some(needed) if needed == found => Ok(HeaderEntry { name, dtype, shape, begin, end }),
        Some(needed) => Err(format!("shape {shape:?} of {dtype} needs {needed} bytes, but data_offsets span {found}")),
        None => Err(format!("shape {shape:?} of {dtype} is not a whole number of bytes that fits 64 bits")),
    }
}

/// A list of sizes of limited length.
struct Numbers {
    most: usize,
}

impl<'de> DeserializeSeed<'de> for Numbers {
    type Value = Vec<usize>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<usize>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Numbers {
    type Value = Vec<usize>;

    fn expecting(&self, f: &mut Formatter) -> FormatResult {
        write!(f, "a list of at most {} numbers", self.most)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<usize>, A::Error> {
        let mut numbers = Vec::new();
        while let Some(number) = list.next_element::<usize>()? {
            if numbers.len() == self.most {
                return Err(A::Error::custom(format!("more than {} numbers in a list", self.most)));
            }
            numbers.push(number);
        }
        Ok(numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(json: &str, data_bytes: usize) -> String {
        Header::parse(json.as_bytes(), data_bytes).expect_err(json)
    }

    #[test]
    fn a_header_is_read_in_file_order_and_found_by_name() {
        let json = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[2,10]},
            "b":{"data_offsets":[0,2],"shape":[],"dtype":"BF16"},"none":{"dtype":"I8","shape":[0,7],"data_offsets":[2,2]}}  "#;
        let header = Header::parse(json.as_bytes(), 10).expect("well formed");
        let names: Vec<&str> = header.entries.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["b", "none", "a"]);
        assert_eq!(header.find("a").map(|entry| (entry.begin, entry.end)), Some((2, 10)));
        assert!(header.find("c").is_none());
        assert_eq!(header.metadata["format"], "pt");
        assert!(Header::parse(b"{}", 0).expect("empty").entries.is_empty());
    }

    #[test]
    fn every_rule_has_its_message() {
        let one = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        let cases = [
            (" {}".to_string(), 0, "does not start with"),
            ("{".to_string(), 0, "EOF"),
            ("{} x".to_string(), 0, "trailing"),
            ("{\"a\":1}".to_string(), 0, "expected dtype, shape and data_offsets of tensor `a`"),
            (one("F33", "[1]", "[0,4]"), 4, "unknown dtype `F33`"),
            (one("F32", "[1]", "[0,8]"), 8, "needs 4 bytes, but data_offsets span 8"),
            (one("F32", "[1]", "[4,0]"), 4, "before they begin"),
            (one("F32", "[1]", "[0]"), 4, "must be two numbers"),
            (one("F32", "[1]", "[0,4,8]"), 4, "more than 2 numbers"),
            (one("F32", "[-1]", "[0,4]"), 4, "invalid value"),
            (one("F32", "[1.5]", "[0,4]"), 4, "invalid type"),
            (one("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "more than 8 numbers"),
            (one("F32", "[18446744073709551615,2]", "[0,4]"), 4, "fits 64 bits"),
            (one("F4", "[3]", "[0,2]"), 2, "whole number of bytes"),
            (one("F32", "[1]", "[4,8]"), 8, "4 bytes before tensor `a` belong to no tensor"),
            (one("F32", "[1]", "[0,4]"), 5, "1 bytes after the last tensor"),
            (one("F32", "[1]", "[0,4]"), 3, "truncated"),
            (r#"{"__metadata__":{},"__metadata__":{}}"#.to_string(), 0, "`__metadata__` appears twice"),
            (r#"{"__metadata__":{"a":"1","a":"1"}}"#.to_string(), 0, "the key `a` appears twice"),
            (r#"{"__metadata__":{"a":1}}"#.to_string(), 0, "invalid type"),
            (r#"{"a":{"dtype":"I8","shape":[0]}}"#.to_string(), 0, "`data_offsets` is missing"),
            (r#"{"a":{"dtype":"I8","dtype":"I8"}}"#.to_string(), 0, "two fields `dtype`"),
            (r#"{"a":{"kind":"I8"}}"#.to_string(), 0, "unknown field `kind`"),
        ];
        for (json, data_bytes, expected) in cases {
            let message = refusal(&json, data_bytes);
            assert!(message.contains(expected), "{json}: {message}");
        }
    }

    #[test]
    fn repeated_and_overlapping_tensors_are_refused() {
        let pair = |first: &str, second: &str, at: &str| {
            let entry = |offsets: &str| format!(r#"{{"dtype":"I8","shape":[4],"data_offsets":{offsets}}}"#);
            format!(r#"{{"{first}":{},"{second}":{}}}"#, entry("[0,4]"), entry(at))
        };
        assert!(refusal(&pair("a", "a", "[4,8]"), 8).contains("tensor `a` appears twice"));
        assert!(refusal(&pair("a", "\\u0061", "[4,8]"), 8).contains("tensor `a` appears twice"));
        assert!(refusal(&pair("a", "b", "[2,6]"), 6).contains("overlaps"));
        assert!(refusal(&pair("a", "b", "[0,4]"), 4).contains("overlaps"));
        let long = "n".repeat(NAME_BYTES_MAX + 1);
        assert!(refusal(&pair("a", &long, "[4,8]"), 8).contains("over 4096 bytes"));
    }
}
