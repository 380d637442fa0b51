//! A config value as typed, and where it came from. Integers and floats stay distinct until the
//! kind of the key joins them; dates become text.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use toml::Spanned;
use toml::de::DeValue;

/// BOUND: elements of a list, entries of a table, bytes of a string.
const ELEMENTS_MAX: usize = 4096;
const TEXT_BYTES_MAX: usize = 4096;

/// Where something was typed: a line of a file, or an argument of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    pub source: Arc<str>,
    /// Counted from 1; None for a whole file or an argument.
    pub line: Option<u32>,
}

impl Origin {
    pub(super) fn whole(source: &str) -> Self {
        Self { source: source.into(), line: None }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(out, "{}:{line}", self.source),
            None => write!(out, "{}", self.source),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Switch(bool),
    Whole(i64),
    Number(f64),
    Text(String),
    List(Vec<Value>),
    Table(BTreeMap<String, Value>),
}

impl Value {
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Switch(_) => "true or false",
            Self::Whole(_) => "a whole number",
            Self::Number(_) => "a number",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Table(_) => "a table",
        }
    }

    pub fn texts<S: AsRef<str>>(texts: &[S]) -> Self {
        Self::List(texts.iter().map(|text| Self::Text(text.as_ref().to_string())).collect())
    }

    /// The same as JSON, for other tools.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Switch(switch) => (*switch).into(),
            Self::Whole(whole) => (*whole).into(),
            Self::Number(number) => (*number).into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(items) => items.iter().map(Self::to_json).collect(),
            Self::Table(entries) => entries.iter().map(|(name, item)| (name.clone(), item.to_json())).collect(),
        }
    }

    /// Converts a parsed value, or explains why it cannot be a value here.
    pub(super) fn of(value: &DeValue<'_>) -> Result<Self, String> {
        Ok(match value {
            DeValue::Boolean(switch) => Self::Switch(*switch),
            DeValue::Integer(whole) => Self::Whole(
                i64::from_str_radix(whole.as_str(), whole.radix())
                    .map_err(|_| format!("{whole} does not fit in 64 bits"))?,
            ),
            DeValue::Float(number) => Self::Number(finite(number.as_str())?),
            DeValue::String(text) if text.len() > TEXT_BYTES_MAX => {
                return Err(format!("a string of {} bytes, {TEXT_BYTES_MAX} at most", text.len()));
            }
            DeValue::String(text) => Self::Text(text.to_string()),
            DeValue::Datetime(date) => Self::Text(date.to_string()),
            DeValue::Array(list) => {
                bounded(list.iter().len())?;
                Self::List(list.iter().map(|item| Self::of(item.get_ref())).collect::<Result<_, _>>()?)
            }
            DeValue::Table(table) => {
                bounded(table.len())?;
                let entries = table.iter().map(|(name, item): (&Spanned<_>, &Spanned<_>)| {
                    Ok((name.get_ref().to_string(), Self::of(item.get_ref())?))
                });
                Self::Table(entries.collect::<Result<_, String>>()?)
            }
        })
    }
}

fn bounded(elements: usize) -> Result<(), String> {
    if elements > ELEMENTS_MAX { Err(format!("{elements} elements, {ELEMENTS_MAX} at most")) } else { Ok(()) }
}

fn finite(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(number),
        _ => Err(format!("{text} is not a finite number")),
    }
}

/// TOML on one line; floats are the shortest that read back to the same bits.
impl fmt::Display for Value {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch(switch) => write!(out, "{switch}"),
            Self::Whole(whole) => write!(out, "{whole}"),
            Self::Number(number) => write!(out, "{number:?}"),
            Self::Text(text) => write_quoted(out, text),
            Self::List(items) => {
                write!(out, "[")?;
                for (index, item) in items.iter().enumerate() {
                    write!(out, "{}{item}", if index == 0 { "" } else { ", " })?;
                }
                write!(out, "]")
            }
            Self::Table(entries) => {
                write!(out, "{{")?;
                for (index, (name, item)) in entries.iter().enumerate() {
                    write!(out, "{}", if index == 0 { " " } else { ", " })?;
                    write_quoted(out, name)?;
                    write!(out, " = {item}")?;
                }
                write!(out, "{}}}", if entries.is_empty() { "" } else { " " })
            }
        }
    }
}

fn write_quoted(out: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    write!(out, "\"")?;
    for letter in text.chars() {
        match letter {
            '"' | '\\' => write!(out, "\\{letter}")?,
            '\n' => write!(out, "\\n")?,
            '\t' => write!(out, "\\t")?,
            _ if letter.is_control() => write!(out, "\\u{:04X}", u32::from(letter))?,
            _ => write!(out, "{letter}")?,
        }
    }
    write!(out, "\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Value, String> {
        let value = DeValue::parse(text).map_err(|error| error.message().to_string())?;
        Value::of(value.get_ref())
    }

    #[test]
    fn values_print_as_toml_that_reads_back() {
        for text in [
            "true",
            "-7",
            "0.0002",
            "2e-5",
            "1e300",
            "\"a \\\"b\\\\ \\n\\u0007 ü\"",
            "[1, [2.5, \"x\"]]",
            "{ \"q.proj\" = 4 }",
        ] {
            let value = read(text).expect("valid TOML");
            assert_eq!(value.to_string(), text);
            assert_eq!(read(&value.to_string()), Ok(value));
        }
        assert_eq!(read("{}").expect("valid").to_string(), "{}");
        assert_eq!(read("2024-07-26"), Ok(Value::Text("2024-07-26".to_string())));
        assert_eq!(read("0x1f"), Ok(Value::Whole(31)));
    }

    #[test]
    fn what_cannot_be_held_is_refused() {
        assert!(read("9223372036854775808").is_err());
        assert!(read("inf").is_err());
        assert!(read("nan").is_err());
        assert!(read("1e999").is_err());
        assert!(read(&format!("\"{}\"", "x".repeat(5000))).is_err());
        assert!(read(&format!("[{}]", "1,".repeat(5000))).is_err());
    }
}
