//! MessagePack, as far as the metadata of code objects uses it.

/// A value. Numbers are not negative there.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Nothing,
    Bool(bool),
    Number(u64),
    Text(String),
    Items(Vec<Value>),
    Fields(Vec<(Value, Value)>),
}

impl Value {
    pub(crate) fn field(&self, key: &str) -> Option<&Self> {
        let Self::Fields(fields) = self else { return None };
        fields.iter().find(|(found, _)| found.text() == Some(key)).map(|(_, value)| value)
    }

    pub(crate) fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    pub(crate) fn number(&self) -> Option<u64> {
        if let Self::Number(number) = self { Some(*number) } else { None }
    }

    pub(crate) fn items(&self) -> &[Self] {
        if let Self::Items(items) = self { items } else { &[] }
    }
}

/// BOUND: values inside values; metadata has four levels.
const DEPTH_MAX: usize = 16;

/// Reads one value; what follows it is padding.
pub(crate) fn read(bytes: &[u8]) -> Result<Value, String> {
    Reader { bytes, at: 0 }.value(0)
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], String> {
        let part = self.bytes.get(self.at..).and_then(|rest| rest.get(..length));
        self.at += length;
        part.ok_or_else(|| "metadata that ends early".to_string())
    }

    /// A big-endian number.
    fn number(&mut self, length: usize) -> Result<u64, String> {
        Ok(self.take(length)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn text(&mut self, length: usize) -> Result<Value, String> {
        Ok(Value::Text(String::from_utf8_lossy(self.take(length)?).into_owned()))
    }

    fn items(&mut self, count: u64, depth: usize) -> Result<Value, String> {
        (0..count).map(|_| self.value(depth)).collect::<Result<_, _>>().map(Value::Items)
    }

    fn fields(&mut self, count: u64, depth: usize) -> Result<Value, String> {
        let field = |_| Ok((self.value(depth)?, self.value(depth)?));
        (0..count).map(field).collect::<Result<_, String>>().map(Value::Fields)
    }

    fn value(&mut self, depth: usize) -> Result<Value, String> {
        if depth > DEPTH_MAX {
            return Err("metadata that is nested too deeply".to_string());
        }
        let depth = depth + 1;
        let kind = self.take(1)?[0];
        match kind {
            0..0x80 => Ok(Value::Number(u64::from(kind))),
            0x80..0x90 => self.fields(u64::from(kind & 15), depth),
            0x90..0xa0 => self.items(u64::from(kind & 15), depth),
            0xa0..0xc0 => self.text(usize::from(kind & 31)),
            0xc0 => Ok(Value::Nothing),
            0xc2 | 0xc3 => Ok(Value::Bool(kind == 0xc3)),
            0xcc..0xd0 => self.number(1 << (kind - 0xcc)).map(Value::Number),
            0xd9..0xdc => {
                let length = self.number(1 << (kind - 0xd9))?;
                self.text(length as usize)
            }
            0xdc | 0xdd => {
                let count = self.number(2 << (kind - 0xdc))?;
                self.items(count, depth)
            }
            0xde | 0xdf => {
                let count = self.number(2 << (kind - 0xde))?;
                self.fields(count, depth)
            }
            kind => Err(format!("metadata of an unknown kind ({kind:#x})")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values() {
        let bytes = [0x82, 0xa1, b'a', 0x92, 0x07, 0xcd, 0x01, 0x00, 0xd9, 0x01, b'b', 0xc3];
        let value = read(&bytes).expect("a map");
        assert_eq!(value.field("a").map(Value::items), Some(&[Value::Number(7), Value::Number(256)][..]));
        assert_eq!(value.field("b"), Some(&Value::Bool(true)));
        assert_eq!(value.field("c"), None);
        for cut in 0..bytes.len() {
            assert!(read(&bytes[..cut]).is_err(), "{cut}");
        }
        assert!(read(&[0xc1]).is_err() && read(&[0x91; 100]).is_err());
    }
}
