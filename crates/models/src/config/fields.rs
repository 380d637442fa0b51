//! The keys of a JSON object, read with limits and with errors that name them. A key that holds
//! null counts as absent, as in the tools that write these files; use `is_null` where null has a
//! meaning.

use crate::ModelError;
use isobit_proof::name::harmless;
use serde_json::Value;

/// BOUND: far above any published model; larger numbers mean a malformed file.
pub(crate) const AXIS_MAX: u64 = 1 << 24;
pub(crate) const POSITIONS_MAX: u64 = 1 << 30;
/// BOUND: characters of an untrusted value that a message repeats.
const SHOWN_MAX: usize = 80;

pub(crate) fn wrong(what: impl Into<String>) -> ModelError {
    ModelError::Config { file: "config.json".to_string(), what: what.into() }
}

/// An untrusted value in a message.
pub(crate) fn shown(value: &Value) -> String {
    harmless(&value.to_string(), SHOWN_MAX)
}

#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    value: &'a Value,
    /// The file name in messages.
    file: &'a str,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(value: &'a Value, file: &'a str) -> Self {
        Self { value, file }
    }

    pub(crate) fn wrong(&self, what: impl Into<String>) -> ModelError {
        ModelError::Config { file: self.file.to_string(), what: what.into() }
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is present and holds null.
    pub(crate) fn is_null(&self, key: &str) -> bool {
        self.value.get(key).is_some_and(Value::is_null)
    }

    /// The object under a key.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        if !value.is_object() {
            return Err(self.wrong(format!("`{key}` is {}, not an object", shown(value))));
        }
        Ok(Some(Self { value, ..*self }))
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.value.as_object().into_iter().flatten()
    }

    pub(crate) fn text(&self, key: &str) -> Result<&'a str, ModelError> {
        self.optional_text(key)?.ok_or_else(|| self.wrong(format!("`{key}` is missing")))
    }

    pub(crate) fn optional_text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(format!("`{key}` is not a string")))
    }

    /// A number from 1 to `most`; a missing one is the default, or an error without a default.
    pub(crate) fn size(&self, key: &str, most: u64, default: Option<usize>) -> Result<usize, ModelError> {
        self.optional_size(key, most)?.or(default).ok_or_else(|| self.wrong(format!("`{key}` is missing")))
    }

    pub(crate) fn optional_size(&self, key: &str, most: u64) -> Result<Option<usize>, ModelError> {
        self.whole(key, 1, most)
    }

    /// A number from `least` to `most`.
    pub(crate) fn whole(&self, key: &str, least: u64, most: u64) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_u64().filter(|number| (least..=most).contains(number));
        let what = || self.wrong(format!("`{key}` is {}, not {least} to {most}", shown(value)));
        number.map(|number| Some(number as usize)).ok_or_else(what)
    }

    /// A number under one of two names; both must agree.
    pub(crate) fn alias(&self, names: [&str; 2], most: u64, default: usize) -> Result<usize, ModelError> {
        let [first, second] = names;
        match (self.whole(first, 0, most)?, self.whole(second, 0, most)?) {
            (Some(a), Some(b)) if a != b => Err(self.wrong(format!("`{first}` is {a}, but `{second}` is {b}"))),
            (a, b) => Ok(a.or(b).unwrap_or(default)),
        }
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().filter(|number| number.is_finite());
        number.map(Some).ok_or_else(|| self.wrong(format!("`{key}` is {}, not a number", shown(value))))
    }

    pub(crate) fn positive(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.number(key)? {
            Some(number) if number <= 0.0 => Err(self.wrong(format!("`{key}` is {number}, not above zero"))),
            number => Ok(number),
        }
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        Ok(self.optional_flag(key)?.unwrap_or(default))
    }

    pub(crate) fn optional_flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(format!("`{key}` is {}, not true or false", shown(value))))
    }

    /// A list of numbers from 0 to `most`.
    pub(crate) fn numbers(&self, key: &str, most: u64) -> Result<Option<Vec<usize>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().ok_or_else(|| self.wrong(format!("`{key}` is {}, not a list", shown(value))))?;
        let number = |value: &Value| {
            let number = value.as_u64().filter(|number| *number <= most);
            number
                .map(|number| number as usize)
                .ok_or_else(|| self.wrong(format!("`{key}` holds {}, not a number from 0 to {most}", shown(value))))
        };
        list.iter().map(number).collect::<Result<_, _>>().map(Some)
    }
}
