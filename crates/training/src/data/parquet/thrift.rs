//! Thrift's compact protocol, in which Parquet writes its footer and page headers: a structure is
//! read into a tree, from which callers pick fields by number. Everything the tree holds has its
//! bytes in the file, so that no declared count allocates anything.

/// BOUND: levels of nesting; the format needs six.
const DEPTH_MAX: usize = 32;

#[derive(Debug)]
pub(super) enum Thrift<'f> {
    Bool(bool),
    Int(i64),
    /// Floating-point numbers and maps: nothing that is read here.
    Other,
    Bytes(&'f [u8]),
    List(Vec<Thrift<'f>>),
    Struct(Fields<'f>),
}

impl<'f> Thrift<'f> {
    fn structure(&self) -> Option<&Fields<'f>> {
        match self {
            Self::Struct(fields) => Some(fields),
            _ => None,
        }
    }
}

/// The fields of a structure, by number.
#[derive(Debug, Default)]
pub(super) struct Fields<'f>(Vec<(i16, Thrift<'f>)>);

impl<'f> Fields<'f> {
    /// Reads a structure from the start of `bytes`; returns how many bytes it takes.
    pub(super) fn read(bytes: &'f [u8]) -> Result<(Self, usize), String> {
        let mut reader = Reader { bytes, at: 0 };
        let fields = reader.fields(0)?;
        Ok((fields, reader.at))
    }

    pub(super) fn get(&self, number: i16) -> Option<&Thrift<'f>> {
        self.0.iter().find(|(id, _)| *id == number).map(|(_, value)| value)
    }

    pub(super) fn int(&self, number: i16) -> Option<i64> {
        match self.get(number) {
            Some(Thrift::Int(value)) => Some(*value),
            _ => None,
        }
    }

    /// A size or count.
    pub(super) fn size(&self, number: i16) -> Option<usize> {
        self.int(number).and_then(|value| usize::try_from(value).ok())
    }

    pub(super) fn flag(&self, number: i16) -> Option<bool> {
        match self.get(number) {
            Some(Thrift::Bool(value)) => Some(*value),
            _ => None,
        }
    }

    pub(super) fn text(&self, number: i16) -> Option<&'f str> {
        match self.get(number) {
            Some(Thrift::Bytes(bytes)) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    pub(super) fn structure(&self, number: i16) -> Option<&Fields<'f>> {
        self.get(number).and_then(Thrift::structure)
    }

    /// The structures of a list; `None` also if one is something else.
    pub(super) fn structures(&self, number: i16) -> Option<Vec<&Fields<'f>>> {
        let Some(Thrift::List(items)) = self.get(number) else { return None };
        items.iter().map(Thrift::structure).collect()
    }

    /// The number of the first field: which alternative of a union is there.
    pub(super) fn first(&self) -> Option<i16> {
        self.0.first().map(|(id, _)| *id)
    }
}

struct Reader<'f> {
    bytes: &'f [u8],
    at: usize,
}

impl<'f> Reader<'f> {
    fn byte(&mut self) -> Result<u8, String> {
        let byte = self.bytes.get(self.at).copied().ok_or("it ends within a structure")?;
        self.at += 1;
        Ok(byte)
    }

    fn varint(&mut self) -> Result<u64, String> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err("a number has more than ten bytes".to_string())
    }

    fn zigzag(&mut self) -> Result<i64, String> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    fn fields(&mut self, depth: usize) -> Result<Fields<'f>, String> {
        if depth > DEPTH_MAX {
            return Err("its structures are nested too deeply".to_string());
        }
        let (mut fields, mut id) = (Vec::new(), 0_i16);
        loop {
            let header = self.byte()?;
            let kind = header & 0x0f;
            if kind == 0 {
                return Ok(Fields(fields));
            }
            id = match header >> 4 {
                0 => i16::try_from(self.zigzag()?).map_err(|_| "a field number is out of range")?,
                step => id.checked_add(i16::from(step)).ok_or("a field number is out of range")?,
            };
            let value = match kind {
                1 => Thrift::Bool(true),
                2 => Thrift::Bool(false),
                kind => self.value(kind, depth)?,
            };
            fields.push((id, value));
        }
    }

    fn value(&mut self, kind: u8, depth: usize) -> Result<Thrift<'f>, String> {
        Ok(match kind {
            1 | 2 => Thrift::Bool(self.byte()? == 1),
            3 => Thrift::Int(i64::from(self.byte()?.cast_signed())),
            4..=6 => Thrift::Int(self.zigzag()?),
            7 => {
                self.take(8)?;
                Thrift::Other
            }
            8 => {
                let length = self.varint()?;
                Thrift::Bytes(self.take(length)?)
            }
            9 | 10 => self.list(depth + 1)?,
            11 => self.map(depth + 1)?,
            12 => Thrift::Struct(self.fields(depth + 1)?),
            other => return Err(format!("a field has the unknown type {other}")),
        })
    }

    fn take(&mut self, length: u64) -> Result<&'f [u8], String> {
        let rest = &self.bytes[self.at..];
        let length = usize::try_from(length).ok().filter(|length| *length <= rest.len());
        let length = length.ok_or("a text is longer than what is left of it")?;
        self.at += length;
        Ok(&rest[..length])
    }

    fn list(&mut self, depth: usize) -> Result<Thrift<'f>, String> {
        if depth > DEPTH_MAX {
            return Err("its structures are nested too deeply".to_string());
        }
        let header = self.byte()?;
        let count = if header >> 4 == 15 { self.varint()? } else { u64::from(header >> 4) };
        // Every item takes a byte or more, so the list grows no faster than the file is read.
        let items = (0..count).map(|_| self.value(header & 0x0f, depth));
        items.collect::<Result<_, _>>().map(Thrift::List)
    }

    fn map(&mut self, depth: usize) -> Result<Thrift<'f>, String> {
        if depth > DEPTH_MAX {
            return Err("its structures are nested too deeply".to_string());
        }
        let count = self.varint()?;
        let kinds = if count == 0 { 0 } else { self.byte()? };
        for _ in 0..count {
            self.value(kinds >> 4, depth)?;
            self.value(kinds & 0x0f, depth)?;
        }
        Ok(Thrift::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_picked_by_number() {
        // 1: true, 3: -2, 4: "ab", 5: [1, 2], 22: {1: 7}
        let bytes = [0x11, 0x25, 3, 0x18, 2, b'a', b'b', 0x19, 0x25, 2, 4, 0x0c, 44, 0x15, 14, 0, 0, 99];
        let (fields, taken) = Fields::read(&bytes).expect("a structure");
        assert_eq!(taken, bytes.len() - 1);
        assert_eq!((fields.flag(1), fields.int(3), fields.text(4)), (Some(true), Some(-2), Some("ab")));
        assert_eq!((fields.size(3), fields.int(2)), (None, None));
        assert!(
            matches!(fields.get(5), Some(Thrift::List(items)) if matches!(items[..], [Thrift::Int(1), Thrift::Int(2)]))
        );
        assert_eq!(fields.structure(22).and_then(|inner| inner.int(1)), Some(7));
    }

    #[test]
    fn what_is_cut_off_or_endless_is_refused() {
        for bytes in [
            &[][..],
            &[0x15],
            &[0x18, 200, 1, b'a'],
            &[0x19, 0xfc, 0xff, 0xff, 0xff, 0xff, 0x0f],
            &[0x15, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1],
            &[0x1f, 0],
            &[0x1c; 1000],
            &[0x19; 1000],
            &[0x1b, 0xff, 0xff, 0x03, 0xbb],
        ] {
            assert!(Fields::read(bytes).is_err(), "{bytes:?}");
        }
    }
}
