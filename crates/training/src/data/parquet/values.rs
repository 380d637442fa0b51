//! The values of a page in any of the format's encodings, read one by one as they are asked for.

use super::levels::{Deltas, Hybrid};
use super::schema::Physical;
use std::ops::Range;

/// A value as it is stored. Bytes are a place in the page or in the dictionary.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Bool(bool),
    Int(i64),
    Float(f64),
    Bytes {
        at: Range<usize>,
        in_dictionary: bool,
    },
    /// Bytes that are put together from several places.
    Joined,
}

/// The values of a dictionary page, with the bytes they point into.
#[derive(Debug, Default)]
pub(super) struct Dictionary {
    pub(super) bytes: Vec<u8>,
    values: Vec<Value>,
}

impl Dictionary {
    pub(super) fn new(bytes: Vec<u8>, physical: Physical, count: usize) -> Option<Self> {
        let mut plain = Plain { at: 0, bit: 0 };
        let mut values = Vec::new();
        for _ in 0..count {
            let value = match plain.next(&bytes, physical)? {
                Value::Bytes { at, .. } => Value::Bytes { at, in_dictionary: true },
                value => value,
            };
            values.push(value);
            // Truth values take less than a byte each: nobody keeps them in a dictionary.
            if values.len() > bytes.len() {
                return None;
            }
        }
        Some(Self { bytes, values })
    }
}

#[derive(Debug)]
struct Plain {
    at: usize,
    bit: usize,
}

impl Plain {
    fn next(&mut self, bytes: &[u8], physical: Physical) -> Option<Value> {
        Some(match physical {
            Physical::Bool => {
                let byte = *bytes.get(self.at)?;
                let value = byte >> self.bit & 1 == 1;
                self.bit = (self.bit + 1) % 8;
                self.at += usize::from(self.bit == 0);
                Value::Bool(value)
            }
            Physical::Bytes => {
                let length = u32::from_le_bytes(*bytes.get(self.at..)?.first_chunk()?) as usize;
                let start = self.at + 4;
                let at = start..start.checked_add(length)?;
                bytes.get(at.clone())?;
                self.at = at.end;
                Value::Bytes { at, in_dictionary: false }
            }
            fixed => {
                let at = self.at..self.at.checked_add(width(fixed)?)?;
                let value = of_bytes(fixed, bytes.get(at.clone())?, at.clone())?;
                self.at = at.end;
                value
            }
        })
    }
}

/// Bytes of a value of fixed length.
fn width(physical: Physical) -> Option<usize> {
    match physical {
        Physical::Int32 | Physical::Float => Some(4),
        Physical::Int64 | Physical::Double => Some(8),
        Physical::Fixed(length) => Some(length),
        Physical::Bool | Physical::Bytes => None,
    }
}

fn of_bytes(physical: Physical, bytes: &[u8], at: Range<usize>) -> Option<Value> {
    Some(match physical {
        Physical::Int32 => Value::Int(i64::from(i32::from_le_bytes(*bytes.first_chunk()?))),
        Physical::Int64 => Value::Int(i64::from_le_bytes(*bytes.first_chunk()?)),
        Physical::Float => Value::Float(f64::from(f32::from_le_bytes(*bytes.first_chunk()?))),
        Physical::Double => Value::Float(f64::from_le_bytes(*bytes.first_chunk()?)),
        Physical::Fixed(_) => Value::Bytes { at, in_dictionary: false },
        Physical::Bool | Physical::Bytes => return None,
    })
}

/// The values of one page.
#[derive(Debug)]
pub(super) struct Values {
    physical: Physical,
    form: Form,
    /// The value that stands for [`Value::Joined`].
    pub(super) joined: Vec<u8>,
}

#[derive(Debug)]
enum Form {
    Plain(Plain),
    Dictionary(Hybrid),
    Runs(Hybrid),
    Deltas(Deltas),
    Lengths { lengths: Deltas, at: usize },
    Prefixes { prefixes: Deltas, lengths: Deltas, at: usize },
    Split { at: usize, index: usize, count: usize },
}

impl Values {
    /// Values in `bytes` from `at` on.
    pub(super) fn new(physical: Physical, encoding: i64, bytes: &[u8], at: usize) -> Result<Self, String> {
        let form = match encoding {
            0 => Some(Form::Plain(Plain { at, bit: 0 })),
            2 | 8 => {
                // A page without values may leave the width out.
                let width = bytes.get(at).map_or(0, |width| u32::from(*width));
                (width <= 32).then(|| Form::Dictionary(Hybrid::new((at + 1).min(bytes.len())..bytes.len(), width)))
            }
            3 if physical == Physical::Bool => runs(bytes, at),
            5 if matches!(physical, Physical::Int32 | Physical::Int64) => {
                Deltas::new(bytes, at..bytes.len()).map(Form::Deltas)
            }
            6 if physical == Physical::Bytes => lengths(bytes, at),
            7 if physical == Physical::Bytes => prefixes(bytes, at),
            9 => width(physical).filter(|width| *width > 0).map(|width| {
                let count = (bytes.len() - at) / width;
                Form::Split { at, index: 0, count }
            }),
            other => return Err(format!("encoding {other} does not go with its type")),
        };
        let form = form.ok_or("a page is damaged: its values do not begin as they should")?;
        Ok(Self { physical, form, joined: Vec::new() })
    }

    pub(super) fn next(&mut self, bytes: &[u8], dictionary: &Dictionary) -> Option<Value> {
        match &mut self.form {
            Form::Plain(plain) => plain.next(bytes, self.physical),
            Form::Dictionary(indices) => dictionary.values.get(indices.next(bytes)? as usize).cloned(),
            Form::Runs(runs) => Some(Value::Bool(runs.next(bytes)? == 1)),
            Form::Deltas(deltas) => {
                let value = deltas.next(bytes)?;
                Some(Value::Int(if self.physical == Physical::Int32 { i64::from(value as i32) } else { value }))
            }
            Form::Lengths { lengths, at } => {
                let at = piece(bytes, lengths, at)?;
                Some(Value::Bytes { at, in_dictionary: false })
            }
            Form::Prefixes { prefixes, lengths, at } => {
                let kept = usize::try_from(prefixes.next(bytes)?).ok().filter(|kept| *kept <= self.joined.len())?;
                let rest = piece(bytes, lengths, at)?;
                self.joined.truncate(kept);
                self.joined.extend_from_slice(&bytes[rest]);
                Some(Value::Joined)
            }
            Form::Split { at, index, count } => {
                let width = width(self.physical)?;
                let mut value = [0; 8];
                if *index >= *count || width > value.len() {
                    return None;
                }
                for (byte, place) in value.iter_mut().zip(0..width) {
                    *byte = bytes[*at + place * *count + *index];
                }
                *index += 1;
                if let Physical::Fixed(_) = self.physical {
                    self.joined.clear();
                    self.joined.extend_from_slice(&value[..width]);
                    return Some(Value::Joined);
                }
                of_bytes(self.physical, &value, 0..0)
            }
        }
    }
}

/// The next piece of text: its length is one of `lengths`, and it begins at `at`.
fn piece(bytes: &[u8], lengths: &mut Deltas, at: &mut usize) -> Option<Range<usize>> {
    let length = usize::try_from(lengths.next(bytes)?).ok()?;
    let piece = *at..at.checked_add(length)?;
    bytes.get(piece.clone())?;
    *at = piece.end;
    Some(piece)
}

fn runs(bytes: &[u8], at: usize) -> Option<Form> {
    let length = u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?) as usize;
    let range = at + 4..(at + 4).checked_add(length)?;
    bytes.get(range.clone())?;
    Some(Form::Runs(Hybrid::new(range, 1)))
}

fn lengths(bytes: &[u8], at: usize) -> Option<Form> {
    let lengths = Deltas::new(bytes, at..bytes.len())?;
    let at = lengths.end(bytes)?;
    Some(Form::Lengths { lengths, at })
}

fn prefixes(bytes: &[u8], at: usize) -> Option<Form> {
    let prefixes = Deltas::new(bytes, at..bytes.len())?;
    let lengths = Deltas::new(bytes, prefixes.end(bytes)?..bytes.len())?;
    let at = lengths.end(bytes)?;
    (prefixes.left() == lengths.left()).then_some(Form::Prefixes { prefixes, lengths, at })
}
