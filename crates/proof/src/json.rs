//! JSON files of strangers: a limit on their size, and no key twice, because two readers would each keep another one.

use crate::error::FileError;
use crate::name::{quoted, told};
use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::marker::PhantomData;
use std::path::Path;

/// BOUND: bytes of any JSON file, metrics included.
pub(crate) const BYTES_MOST: u64 = 100_000_000;

/// Reads a JSON file of at most `BYTES_MOST`.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, FileError> {
    let bytes = read_bytes(path)?;
    serde_json::from_slice(&bytes).map_err(|error| FileError::malformed(path, told(&error)))
}

/// Reads a text file of at most as many.
pub(crate) fn read_text(path: &Path) -> Result<String, FileError> {
    String::from_utf8(read_bytes(path)?).map_err(|_| FileError::malformed(path, "it is not UTF-8"))
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, FileError> {
    let failed = |error| FileError::from_io("read", path, error);
    // Before opening: a pipe would wait for a writer that never comes.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(FileError::malformed(path, "this is not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path).map_err(failed)?.take(BYTES_MOST + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > BYTES_MOST {
        return Err(FileError::malformed(path, format!("it is over the limit of {BYTES_MOST} bytes")));
    }
    Ok(bytes)
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
