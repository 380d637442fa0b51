//! Untrusted JSON: the size is limited and repeated keys are refused, because two readers might
//! each keep a different one.

use crate::error::FileError;
use crate::name::{quoted, told};
use crate::regular;
use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::path::Path;

/// BOUND: bytes of any JSON file, metrics included.
pub(crate) const BYTES_MAX: u64 = 100_000_000;

/// Reads a JSON file of at most `BYTES_MAX`.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, FileError> {
    let bytes = regular::read(path, BYTES_MAX)?;
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
