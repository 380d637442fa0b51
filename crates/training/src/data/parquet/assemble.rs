//! Puts rows together from columns, as JSON. A value comes with two levels: how many of the
//! optional and repeated fields above it are there (definition), and which of the repeated ones
//! goes on with it (repetition). All columns below a list must tell the same story about it.

use super::super::records::ROW_BYTES_MAX;
use super::pages::{Column, Levels};
use super::schema::{Kind, Meaning, Node};
use super::values::Value;
use isobit_numerics::cast::f16_to_f32;
use std::io::Write;

pub(super) struct Reader<'f> {
    /// By index; `None` for columns that are not read.
    leaves: Vec<Option<Column<'f>>>,
    out: Vec<u8>,
}

/// The path of a column, and what is wrong with it.
pub(super) type Trouble = (String, String);

impl<'f> Reader<'f> {
    pub(super) fn new(leaves: Vec<Option<Column<'f>>>) -> Self {
        Self { leaves, out: Vec::new() }
    }

    /// A column that has a value left.
    pub(super) fn unfinished(&self) -> Option<&Column<'f>> {
        self.leaves.iter().flatten().find(|column| column.next.is_some())
    }

    /// The next row. Fields that are not read are null.
    pub(super) fn row(&mut self, fields: &[(&Node, bool)]) -> Result<Vec<u8>, Trouble> {
        self.out.push(b'{');
        for (index, (field, is_read)) in fields.iter().enumerate() {
            self.key(index, &field.name);
            if !is_read {
                self.out.extend_from_slice(b"null");
                continue;
            }
            for leaf in field.leaves.clone() {
                if self.levels(leaf)?.repetition != 0 {
                    return Err(self.trouble(leaf, "a row does not begin where it should"));
                }
            }
            self.node(field)?;
        }
        self.out.push(b'}');
        let row = self.out.as_slice().to_vec();
        self.out.clear();
        Ok(row)
    }

    fn key(&mut self, index: usize, name: &str) {
        if index > 0 {
            self.out.push(b',');
        }
        write_text(&mut self.out, name);
        self.out.push(b':');
    }

    fn node(&mut self, node: &Node) -> Result<(), Trouble> {
        let first = node.leaves.start;
        if self.out.len() > ROW_BYTES_MAX {
            return Err(self.trouble(first, &format!("a row has more than {ROW_BYTES_MAX} bytes")));
        }
        let definition = self.levels(first)?.definition;
        match &node.kind {
            _ if definition < node.definition => {
                self.out.extend_from_slice(b"null");
                self.skip(node, |levels| levels.definition < node.definition)
            }
            Kind::Value => self.value(first),
            Kind::Struct(fields) => {
                self.out.push(b'{');
                for (index, field) in fields.iter().enumerate() {
                    self.key(index, &field.name);
                    self.node(field)?;
                }
                self.out.push(b'}');
                Ok(())
            }
            Kind::List { .. } if definition == node.definition => {
                self.out.extend_from_slice(b"[]");
                self.skip(node, |levels| levels.definition == node.definition)
            }
            Kind::List { repetition, item } => {
                self.out.push(b'[');
                self.node(item)?;
                while self.goes_on(node, *repetition)? {
                    self.out.push(b',');
                    self.node(item)?;
                }
                self.out.push(b']');
                Ok(())
            }
        }
    }

    /// Whether a list has another item.
    fn goes_on(&self, node: &Node, repetition: u32) -> Result<bool, Trouble> {
        let next = |leaf: usize| self.leaves[leaf].as_ref().and_then(|column| column.next);
        let more = |leaf: usize| next(leaf).is_some_and(|levels| levels.repetition == repetition);
        let first = more(node.leaves.start);
        match node.leaves.clone().find(|leaf| more(*leaf) != first) {
            None => Ok(first),
            Some(leaf) => Err(self.trouble(leaf, "a list has another length here than in its other columns")),
        }
    }

    /// Passes over a field that is null or empty, which all its columns must say.
    fn skip(&mut self, node: &Node, agrees: impl Fn(Levels) -> bool) -> Result<(), Trouble> {
        for leaf in node.leaves.clone() {
            if !agrees(self.levels(leaf)?) {
                return Err(self.trouble(leaf, "a field is null or empty here, but not in its other columns"));
            }
            self.advance(leaf)?;
        }
        Ok(())
    }

    fn value(&mut self, leaf: usize) -> Result<(), Trouble> {
        let (column, out) = (self.leaves[leaf].as_mut(), &mut self.out);
        let column = column.expect("the columns of a field that is read are open");
        let written = column.value().and_then(|value| write_value(out, column, &value));
        written.map_err(|why| self.trouble(leaf, &why))?;
        self.advance(leaf)
    }

    fn advance(&mut self, leaf: usize) -> Result<(), Trouble> {
        let advanced = self.leaves[leaf].as_mut().map_or(Ok(()), Column::advance);
        advanced.map_err(|why| self.trouble(leaf, &why))
    }

    fn levels(&self, leaf: usize) -> Result<Levels, Trouble> {
        let next = self.leaves[leaf].as_ref().and_then(|column| column.next);
        next.ok_or_else(|| self.trouble(leaf, "it has fewer values than rows"))
    }

    fn trouble(&self, leaf: usize, why: &str) -> Trouble {
        (self.leaves[leaf].as_ref().map_or_else(String::new, |column| column.leaf.path.clone()), why.to_string())
    }
}

/// Writes a text with its quotation marks.
fn write_text(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("a text has a JSON form, and memory takes it");
}

fn write_value(out: &mut Vec<u8>, column: &Column<'_>, value: &Value) -> Result<(), String> {
    let written = match (&column.leaf.meaning, value) {
        (Ok(Meaning::Bool), Value::Bool(value)) => write!(out, "{value}"),
        (Ok(Meaning::Signed), Value::Int(value)) => write!(out, "{value}"),
        (Ok(Meaning::Unsigned32), Value::Int(value)) => write!(out, "{}", *value as u32),
        (Ok(Meaning::Unsigned64), Value::Int(value)) => write!(out, "{}", value.cast_unsigned()),
        (Ok(Meaning::Float), Value::Float(value)) => return write_float(out, *value),
        (Ok(Meaning::Float16), value) => {
            let bits = column.text(value).try_into().map(u16::from_le_bytes);
            let bits = bits.map_err(|_| "a number of 16 bits is damaged")?;
            return write_float(out, f64::from(f16_to_f32(bits)));
        }
        (Ok(Meaning::Text), value) => {
            let bytes = column.text(value);
            if bytes.len() > ROW_BYTES_MAX {
                return Err(format!("{} bytes in one value, {ROW_BYTES_MAX} at most", bytes.len()));
            }
            let text = std::str::from_utf8(bytes);
            let text = text.map_err(|error| format!("not UTF-8 at byte {}", error.valid_up_to() + 1))?;
            write_text(out, text);
            return Ok(());
        }
        (meaning, value) => return Err(format!("{value:?} in a column of {meaning:?}")),
    };
    written.map_err(|error| error.to_string())
}

/// The shortest decimal form that stands for the number, with a point or an exponent.
fn write_float(out: &mut Vec<u8>, value: f64) -> Result<(), String> {
    if !value.is_finite() {
        return Err(format!("the number {value} has no JSON form"));
    }
    write!(out, "{value:?}").map_err(|error| error.to_string())
}
