//! JSON values of data rows. Unlike the usual value type this one keeps the order of keys, which reaches the training text
//! through `tojson`, and refuses duplicate keys, because programs disagree about which one counts.

use super::error::RowError;
use minijinja::Value;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeSet;
use std::fmt;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Signed(i64),
    Unsigned(u64),
    Float(f64),
    Text(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    pub(super) fn parse(text: &str) -> Result<Self, RowError> {
        // BOUND: the parser refuses more than 128 levels of nesting.
        serde_json::from_str(text).map_err(|error| {
            // The caller knows the line; the parser's own would always be the first.
            let why = error.to_string();
            let why = why.rsplit_once(" at line ").map_or(why.as_str(), |(why, _)| why);
            RowError::Json { why: format!("{why}, at column {}", error.column()) }
        })
    }

    /// What it is, for messages.
    pub(super) fn what(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Signed(_) | Self::Unsigned(_) | Self::Float(_) => "a number",
            Self::Text(_) => "a string",
            Self::Array(_) => "an array",
            Self::Object(_) => "an object",
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&Json> {
        match self {
            Self::Object(entries) => entries.iter().find(|(name, _)| name == key).map(|(_, value)| value),
            _ => None,
        }
    }

    /// The value as templates see it.
    pub(super) fn to_value(&self) -> Result<Value, RowError> {
        Ok(match self {
            Self::Null => Value::from(()),
            Self::Bool(flag) => Value::from(*flag),
            Self::Signed(number) => Value::from(*number),
            Self::Unsigned(number) => Value::from(*number),
            // An integer above 64 bits has become a float here, and would be printed as another text.
            Self::Float(number) if number.abs() >= 18446744073709551616.0 => {
                return Err(RowError::Number { number: number.to_string() });
            }
            Self::Float(number) => Value::from(*number),
            Self::Text(text) => Value::from(text.as_str()),
            Self::Array(items) => {
                Value::from(items.iter().map(Self::to_value).collect::<Result<Vec<Value>, RowError>>()?)
            }
            Self::Object(entries) => entries
                .iter()
                .map(|(key, value)| Ok((Value::from(key.as_str()), value.to_value()?)))
                .collect::<Result<Vec<(Value, Value)>, RowError>>()?
                .into_iter()
                .collect(),
        })
    }

    /// Every string inside, keys included.
    pub(super) fn visit_text(&self, visit: &mut impl FnMut(&str)) {
        match self {
            Self::Text(text) => visit(text),
            Self::Array(items) => items.iter().for_each(|item| item.visit_text(visit)),
            Self::Object(entries) => {
                for (key, value) in entries {
                    visit(key);
                    value.visit_text(visit);
                }
            }
            _ => {}
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Json, E> {
        Ok(Json::Bool(flag))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Json, E> {
        Ok(Json::Signed(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Json, E> {
        Ok(Json::Unsigned(number))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Json, E> {
        Ok(Json::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Json, E> {
        Ok(Json::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Json::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut entries: Vec<(String, Json)> = Vec::new();
        let mut seen = BTreeSet::new();
        while let Some((key, value)) = access.next_entry::<String, Json>()? {
            if !seen.insert(key.clone()) {
                return Err(A::Error::custom(format!("key `{}` appears twice", key.escape_debug())));
            }
            entries.push((key, value));
        }
        Ok(Json::Object(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_their_order_and_duplicates_are_refused() {
        let value = Json::parse(r#"{"z": 1, "a": [true, null, -2, 0.5]}"#).expect("JSON");
        let Json::Object(entries) = &value else { panic!("an object") };
        assert_eq!(entries.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), ["z", "a"]);
        let error = Json::parse(r#"{"a": 1, "a": 2}"#).expect_err("a duplicate");
        assert!(error.to_string().contains("`a` appears twice"), "{error}");
    }

    #[test]
    fn errors_say_the_column_and_nesting_is_bounded() {
        let error = Json::parse(r#"{"a": "#).expect_err("cut off");
        assert_eq!(error.to_string(), "not JSON: EOF while parsing a value, at column 6");
        assert!(Json::parse(&"[".repeat(100_000)).is_err());
        let error = Json::parse("123456789012345678901234567890").expect("a number").to_value().expect_err("inexact");
        assert!(matches!(error, RowError::Number { .. }));
    }
}
