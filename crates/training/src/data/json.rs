//! JSON values of data rows. Unlike the usual value type, this one keeps the order of keys, which
//! affects the training text through `tojson`; refuses duplicate keys, because programs disagree
//! about which one counts; and keeps numbers like Python's json: integers of any length, floats to
//! the last bit, `-0` an integer.

use super::error::RowError;
use super::jinja::{self, Dict, Value};
use std::collections::BTreeSet;
use std::sync::Arc;

/// BOUND: levels of nesting.
const DEPTH_MAX: usize = 127;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Signed(i64),
    Unsigned(u64),
    /// An integer beyond 64 bits, as its digits.
    Large(String),
    Float(f64),
    Text(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    pub(super) fn parse(text: &str) -> Result<Self, RowError> {
        let mut parser = Parser { text, at: 0, depth: 0 };
        let value = parser.value()?;
        parser.space();
        if parser.at < text.len() { parser.fail("trailing characters") } else { Ok(value) }
    }

    /// A description of the type, for messages.
    pub(super) fn what(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Signed(_) | Self::Unsigned(_) | Self::Large(_) | Self::Float(_) => "a number",
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
            Self::Null => Value::None,
            Self::Bool(flag) => Value::Bool(*flag),
            Self::Signed(number) => Value::Int(i128::from(*number)),
            Self::Unsigned(number) => Value::Int(i128::from(*number)),
            Self::Large(digits) => jinja::integer(digits).ok_or_else(|| {
                let start = digits.get(..20).unwrap_or_default();
                RowError::Number { number: format!("{start}… of {} digits", digits.len()) }
            })?,
            Self::Float(number) => Value::Float(*number),
            Self::Text(text) => Value::text(text),
            Self::Array(items) => {
                Value::list_from_row(items.iter().map(Self::to_value).collect::<Result<Vec<Value>, RowError>>()?)
            }
            Self::Object(entries) => {
                let entries = entries.iter().map(|(key, value)| Ok((Arc::from(key.as_str()), value.to_value()?)));
                Value::dict(Dict::from_row(entries.collect::<Result<_, RowError>>()?))
            }
        })
    }

    /// Bytes of its contents, about the length of its text.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Text(text) | Self::Large(text) => text.len() + 2,
            Self::Array(items) => 2 + items.iter().map(Self::size).sum::<usize>(),
            Self::Object(entries) => 2 + entries.iter().map(|(key, value)| key.len() + 4 + value.size()).sum::<usize>(),
            _ => 4,
        }
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

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn fail<T>(&self, why: &str) -> Result<T, RowError> {
        // The caller adds the line.
        let before = &self.text[..self.at];
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        let column = self.at - start + usize::from(self.at < self.text.len());
        Err(RowError::Json { why: format!("{why}, at column {column}") })
    }

    fn space(&mut self) {
        self.at += self.rest().bytes().take_while(|byte| b" \t\r\n".contains(byte)).count();
    }

    fn value(&mut self) -> Result<Json, RowError> {
        self.space();
        match self.peek() {
            None => self.fail("EOF while parsing a value"),
            Some(b'{') => self.nested(Self::object),
            Some(b'[') => self.nested(Self::array),
            Some(b'"') => self.string().map(Json::Text),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(_) => {
                for (word, value) in [("null", Json::Null), ("true", Json::Bool(true)), ("false", Json::Bool(false))] {
                    if self.rest().starts_with(word) {
                        self.at += word.len();
                        return Ok(value);
                    }
                }
                self.fail("expected value")
            }
        }
    }

    fn nested(&mut self, parse: fn(&mut Self) -> Result<Json, RowError>) -> Result<Json, RowError> {
        if self.depth >= DEPTH_MAX {
            return self.fail("recursion limit exceeded");
        }
        self.depth += 1;
        self.at += 1;
        let value = parse(self);
        self.depth -= 1;
        value
    }

    /// After an item: whether another follows.
    fn more(&mut self, end: u8, expected: &str, what: &str) -> Result<bool, RowError> {
        self.space();
        match self.peek() {
            None => self.fail(&format!("EOF while parsing {what}")),
            Some(byte) if byte == end => {
                self.at += 1;
                Ok(false)
            }
            Some(b',') => {
                self.at += 1;
                self.space();
                if self.peek() == Some(end) { self.fail("trailing comma") } else { Ok(true) }
            }
            Some(_) => self.fail(expected),
        }
    }

    fn array(&mut self) -> Result<Json, RowError> {
        let mut items = Vec::new();
        self.space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Json::Array(items));
        }
        loop {
            if self.peek().is_none() {
                return self.fail("EOF while parsing a list");
            }
            items.push(self.value()?);
            if !self.more(b']', "expected `,` or `]`", "a list")? {
                return Ok(Json::Array(items));
            }
        }
    }

    fn object(&mut self) -> Result<Json, RowError> {
        let mut entries: Vec<(String, Json)> = Vec::new();
        let mut seen = BTreeSet::new();
        self.space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Json::Object(entries));
        }
        loop {
            match self.peek() {
                None => return self.fail("EOF while parsing an object"),
                Some(b'"') => {}
                Some(_) => return self.fail("key must be a string"),
            }
            let key = self.string()?;
            self.space();
            match self.peek() {
                Some(b':') => self.at += 1,
                None => return self.fail("EOF while parsing an object"),
                Some(_) => return self.fail("expected `:`"),
            }
            let value = self.value()?;
            if !seen.insert(key.clone()) {
                return self.fail(&format!("key `{}` appears twice", key.escape_debug()));
            }
            entries.push((key, value));
            if !self.more(b'}', "expected `,` or `}`", "an object")? {
                return Ok(Json::Object(entries));
            }
        }
    }

    fn string(&mut self) -> Result<String, RowError> {
        self.at += 1;
        let mut text = String::new();
        loop {
            let plain = self.rest().bytes().position(|byte| byte < b' ' || byte == b'"' || byte == b'\\');
            let Some(length) = plain else {
                self.at = self.text.len();
                return self.fail("EOF while parsing a string");
            };
            text.push_str(&self.rest()[..length]);
            self.at += length;
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(text);
                }
                Some(b'\\') => text.push(self.escape()?),
                _ => return self.fail("control character (\\u0000-\\u001F) found while parsing a string"),
            }
        }
    }

    fn escape(&mut self) -> Result<char, RowError> {
        self.at += 1;
        let Some(byte) = self.peek() else { return self.fail("EOF while parsing a string") };
        let character = match byte {
            b'"' | b'\\' | b'/' => byte as char,
            b'b' => '\x08',
            b'f' => '\x0c',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => return self.unicode(),
            _ => return self.fail("invalid escape"),
        };
        self.at += 1;
        Ok(character)
    }

    fn unicode(&mut self) -> Result<char, RowError> {
        let first = self.unit()?;
        let code = match first {
            0xd800..=0xdbff => {
                if !self.rest().starts_with("\\u") {
                    return self.fail("lone leading surrogate in hex escape");
                }
                self.at += 1;
                match self.unit()? {
                    second @ 0xdc00..=0xdfff => 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00),
                    _ => return self.fail("lone leading surrogate in hex escape"),
                }
            }
            code => code,
        };
        char::from_u32(code).map_or_else(|| self.fail("lone trailing surrogate in hex escape"), Ok)
    }

    /// `uXXXX`.
    fn unit(&mut self) -> Result<u32, RowError> {
        let digits = self.text.as_bytes().get(self.at + 1..self.at + 5).filter(|d| d.iter().all(u8::is_ascii_hexdigit));
        let Some(digits) = digits else { return self.fail("invalid escape") };
        self.at += 5;
        Ok(digits.iter().fold(0, |code, digit| code * 16 + (*digit as char).to_digit(16).unwrap_or(0)))
    }

    fn number(&mut self) -> Result<Json, RowError> {
        let start = self.at;
        let digits = |parser: &mut Self| {
            let count = parser.rest().bytes().take_while(u8::is_ascii_digit).count();
            parser.at += count;
            if count > 0 {
                Ok(())
            } else if parser.at == parser.text.len() {
                parser.fail("EOF while parsing a value")
            } else {
                parser.fail("invalid number")
            }
        };
        self.at += usize::from(self.peek() == Some(b'-'));
        if self.peek() == Some(b'0') {
            self.at += 1;
            if self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
                return self.fail("invalid number");
            }
        } else {
            digits(self)?;
        }
        let whole = self.at;
        if self.peek() == Some(b'.') {
            self.at += 1;
            digits(self)?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            self.at += usize::from(matches!(self.peek(), Some(b'+' | b'-')));
            digits(self)?;
        }
        let text = &self.text[start..self.at];
        if self.at > whole {
            // The nearest float, as the standard library parses it.
            return match text.parse::<f64>() {
                Ok(float) if float.is_finite() => Ok(Json::Float(float)),
                _ => self.fail("number out of range"),
            };
        }
        Ok(match (text.parse(), text.parse()) {
            (Ok(number), _) => Json::Unsigned(number),
            (_, Ok(0)) => Json::Unsigned(0),
            (_, Ok(number)) => Json::Signed(number),
            _ => Json::Large(text.to_owned()),
        })
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
        assert!(Json::parse(&format!("{}{}", "[".repeat(128), "]".repeat(128))).is_err());
        assert!(Json::parse(&format!("{}{}", "[".repeat(127), "]".repeat(127))).is_ok());
    }

    #[test]
    fn numbers_are_kept_as_they_are() {
        let digits = "1234567890".repeat(10);
        for (text, want) in [
            ("0", Json::Unsigned(0)),
            ("-0", Json::Unsigned(0)),
            ("-0.0", Json::Float(-0.0)),
            ("18446744073709551615", Json::Unsigned(u64::MAX)),
            ("18446744073709551616", Json::Large("18446744073709551616".into())),
            ("-9223372036854775808", Json::Signed(i64::MIN)),
            ("-9223372036854775809", Json::Large("-9223372036854775809".into())),
            (digits.as_str(), Json::Large(digits.clone())),
            ("123.09510907566857", Json::Float(123.09510907566857)),
            ("1e20", Json::Float(1e20)),
            ("2.5E-3", Json::Float(0.0025)),
        ] {
            assert_eq!(Json::parse(text), Ok(want), "{text}");
        }
        let error = Json::parse(&"9".repeat(5000)).expect("a number").to_value().expect_err("beyond Python's limit");
        assert!(matches!(error, RowError::Number { .. }));
    }

    #[test]
    fn what_is_not_json_is_refused() {
        for text in [
            "",
            " ",
            "01",
            "-",
            "1.",
            ".5",
            "1e",
            "+1",
            "NaN",
            "1e400",
            "tru",
            "[1,]",
            "[1 2]",
            "{\"a\"}",
            "{\"a\":1,}",
            "{a:1}",
            "\"a",
            "\"\\q\"",
            "\"\\u12\"",
            "\"\\ud800\"",
            "\"\\ud800\\u0041\"",
            "\"\\udc00\"",
            "\"a\nb\"",
            "1 2",
            "[",
            "{",
        ] {
            assert!(matches!(Json::parse(text), Err(RowError::Json { .. })), "{text}");
        }
        assert_eq!(Json::parse(r#" "\ud83d\ude00\u00e4\/\t" "#), Ok(Json::Text("😀ä/\t".into())));
    }
}
