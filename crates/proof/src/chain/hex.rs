//! Numbers as hexadecimal digits of a fixed count, in lower case: bits have one form in a file.

use isobit_numerics::digest::Digest;
use serde::{Deserialize, Deserializer, Serializer, de::Error};

pub(super) trait Hex: Sized {
    fn text(&self) -> String;
    fn parse(text: &str) -> Option<Self>;
}

fn digits(text: &str, count: usize) -> Option<&str> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    (text.len() == count && text.bytes().all(is_digit)).then_some(text)
}

impl Hex for u64 {
    fn text(&self) -> String {
        format!("{self:016x}")
    }

    fn parse(text: &str) -> Option<Self> {
        Self::from_str_radix(digits(text, 16)?, 16).ok()
    }
}

impl Hex for u32 {
    fn text(&self) -> String {
        format!("{self:08x}")
    }

    fn parse(text: &str) -> Option<Self> {
        Self::from_str_radix(digits(text, 8)?, 16).ok()
    }
}

impl Hex for Digest {
    fn text(&self) -> String {
        self.to_string()
    }

    fn parse(text: &str) -> Option<Self> {
        digits(text, 32)?.parse().ok()
    }
}

impl Hex for Vec<u32> {
    fn text(&self) -> String {
        self.iter().map(Hex::text).collect()
    }

    fn parse(text: &str) -> Option<Self> {
        let (each, rest) = text.as_bytes().as_chunks::<8>();
        let one = |digits: &[u8; 8]| u32::parse(str::from_utf8(digits).ok()?);
        each.iter().map(one).collect::<Option<_>>().filter(|_| rest.is_empty())
    }
}

pub(super) fn serialize<T: Hex, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&value.text())
}

pub(super) fn deserialize<'de, T: Hex, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    let text = String::deserialize(deserializer)?;
    T::parse(&text).ok_or_else(|| D::Error::custom("not the hexadecimal digits of a number"))
}
