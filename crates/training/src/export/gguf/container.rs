//! The GGUF container, version 3: keys, a table of tensors, and their data, each aligned to 32
//! bytes. Everything is little-endian; sizes of a tensor are listed innermost first.

use super::numbers::GgmlType;
use isobit_models::GgufValue;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// Bytes that the data of a tensor is aligned to.
pub(super) const ALIGNMENT: u64 = 32;

const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const TEXT: u32 = 8;
const ARRAY: u32 = 9;

/// A tensor of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) name: String,
    /// Outermost first.
    pub(super) shape: Vec<usize>,
    pub(super) kind: GgmlType,
}

impl Listed {
    /// Bytes of its data, without padding.
    pub(super) fn bytes(&self) -> u64 {
        self.kind.bytes(&self.shape)
    }
}

/// Everything before the data, padded.
pub(super) fn head(keys: &[(String, GgufValue)], tensors: &[Listed]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        put_text(&mut bytes, key);
        put_value(&mut bytes, value);
    }
    let mut offset = 0;
    for tensor in tensors {
        put_text(&mut bytes, &tensor.name);
        bytes.extend((tensor.shape.len() as u32).to_le_bytes());
        for size in tensor.shape.iter().rev() {
            bytes.extend((*size as u64).to_le_bytes());
        }
        bytes.extend(tensor.kind.code().to_le_bytes());
        bytes.extend(u64::to_le_bytes(offset));
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
    bytes
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn put_value(bytes: &mut Vec<u8>, value: &GgufValue) {
    let code = match value {
        GgufValue::U32(_) => U32,
        GgufValue::F32(_) => F32,
        GgufValue::Bool(_) => BOOL,
        GgufValue::Text(_) => TEXT,
        GgufValue::Texts(_) | GgufValue::I32s(_) | GgufValue::F32s(_) => ARRAY,
    };
    bytes.extend(code.to_le_bytes());
    match value {
        GgufValue::U32(value) => bytes.extend(value.to_le_bytes()),
        GgufValue::F32(value) => bytes.extend(value.to_le_bytes()),
        GgufValue::Bool(value) => bytes.push(u8::from(*value)),
        GgufValue::Text(text) => put_text(bytes, text),
        GgufValue::Texts(texts) => {
            bytes.extend(TEXT.to_le_bytes());
            bytes.extend((texts.len() as u64).to_le_bytes());
            for text in texts {
                put_text(bytes, text);
            }
        }
        GgufValue::I32s(values) => {
            bytes.extend(I32.to_le_bytes());
            bytes.extend((values.len() as u64).to_le_bytes());
            for value in values {
                bytes.extend(value.to_le_bytes());
            }
        }
        GgufValue::F32s(values) => {
            bytes.extend(F32.to_le_bytes());
            bytes.extend((values.len() as u64).to_le_bytes());
            for value in values {
                bytes.extend(value.to_le_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_head_byte_by_byte() {
        let keys = [("k".to_string(), GgufValue::Bool(true))];
        let tensors = [
            Listed { name: "a".to_string(), shape: vec![3, 2], kind: GgmlType::F16 },
            Listed { name: "b".to_string(), shape: vec![1], kind: GgmlType::F32 },
        ];
        let mut wanted = b"GGUF\x03\0\0\0\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0".to_vec();
        wanted.extend(b"\x01\0\0\0\0\0\0\0k\x07\0\0\0\x01");
        wanted.extend(b"\x01\0\0\0\0\0\0\0a\x02\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0");
        wanted.extend(b"\x01\0\0\0\0\0\0\0b\x01\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x20\0\0\0\0\0\0\0");
        wanted.resize(wanted.len().next_multiple_of(32), 0);
        assert_eq!(head(&keys, &tensors), wanted);
    }
}
