//! Untrusted JSON: the size is limited and repeated keys are refused, because two readers might
//! each keep a different one.

use crate::error::FileError;
use crate::name::{quoted, told};
use crate::regular;
use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::path::Path;

/// BOUND: bytes of any JSON file, metrics included.
pub(crate) const BYTES_MAX: u64 = 100_000_000;

/// BOUND: bytes of a JSON file that holds a few numbers: the state of a checkpoint, a pointer. A
/// value takes many times the memory of its text.
const SMALL_BYTES_MAX: u64 = 1 << 20;

/// Reads a JSON file of at most `BYTES_MAX`.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, FileError> {
    read_within(path, BYTES_MAX)
}

/// The same for one that holds a few numbers.
pub(crate) fn read_small<T: DeserializeOwned>(path: &Path) -> Result<T, FileError> {
    read_within(path, SMALL_BYTES_MAX)
}

/// Reads a JSON file of at most so many bytes.
pub(crate) fn read_within<T: DeserializeOwned>(path: &Path, bytes_max: u64) -> Result<T, FileError> {
    let bytes = regular::read(path, bytes_max)?;
    serde_json::from_slice(&bytes).map_err(|error| FileError::malformed(path, told(&error)))
}

/// Reads a text file of at most `BYTES_MAX`.
pub(crate) fn read_text(path: &Path) -> Result<String, FileError> {
    regular::read_text(path, BYTES_MAX)
}

/// A map that refuses a repeated key.
#[derive(Debug)]
pub(crate) struct UniqueMap<V>(pub(crate) BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueVisitor(PhantomData)).map(Self)
    }
}

struct UniqueVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
    type Value = BTreeMap<String, V>;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut values = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if values.contains_key(&key) {
                return Err(A::Error::custom(format!("the key {} appears twice", quoted(&key))));
            }
            values.insert(key, map.next_value()?);
        }
        Ok(values)
    }
}

/// Any JSON value in which no object has a key twice; `Value` itself keeps the last.
#[derive(Debug)]
pub(crate) struct UniqueValue(pub(crate) Value);

impl<'de> Deserialize<'de> for UniqueValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueValueVisitor).map(Self)
    }
}

struct UniqueValueVisitor;

impl<'de> Visitor<'de> for UniqueValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(UniqueValue(value)) = sequence.next_element()? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Value, A::Error> {
        let values = UniqueVisitor::<UniqueValue>(PhantomData).visit_map(map)?;
        Ok(Value::Object(values.into_iter().map(|(key, UniqueValue(value))| (key, value)).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_read_as_it_stands_and_a_repeated_key_is_refused() {
        let text = r#"{"a": [null, true, -3, 18446744073709551615, 1.5, "ü", {"a": {}}], "b": {"a": []}}"#;
        let UniqueValue(value) = serde_json::from_str(text).expect("no key twice");
        assert_eq!(value, serde_json::from_str::<Value>(text).expect("JSON"));
        for twice in [r#"{"a": 1, "a": 1}"#, r#"[{"b": [{"a": 1, "\u0061": 2}]}]"#, r#"{"x": {"a": {}, "a": {}}}"#] {
            let error = serde_json::from_str::<UniqueValue>(twice).expect_err("a key twice").to_string();
            assert!(error.contains("the key `a` appears twice"), "{error}");
        }
    }
}
