//! Where templates are Python in disguise: how values print, `tojson`, string methods, `strftime_now`. Templates are written
//! against Jinja2, so its answers are the right ones, to the last character.

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Output, State, Value};
use std::fmt::{self, Write};

/// BOUND: nesting of values that are printed.
const DEPTH_MAX: usize = 160;

fn append(text: &mut String, arguments: fmt::Arguments) {
    text.write_fmt(arguments).expect("a string takes any text");
}

fn fail(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why.into())
}

/// Prints as `str` does: `True`, `None`, `['a', 1.0]`.
pub(super) fn format(output: &mut Output, _state: &State, value: &Value) -> Result<(), Error> {
    output.write_str(&to_text(value)?).map_err(Error::from)
}

/// The `string` filter, and what `{{ … }}` prints.
pub(super) fn to_text(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let mut text = String::new();
    repr(&mut text, value, 0)?;
    Ok(text)
}

fn repr(text: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(fail("a value is nested too deeply to be printed"));
    }
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => text.push_str("None"),
        ValueKind::Bool => text.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => number(text, value),
        ValueKind::String => quote(text, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            text.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                repr(text, &item, depth + 1)?;
            }
            text.push(']');
        }
        ValueKind::Map => {
            text.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                repr(text, &key, depth + 1)?;
                text.push_str(": ");
                repr(text, &value.get_item(&key)?, depth + 1)?;
            }
            text.push('}');
        }
        _ => text.push_str(&value.to_string()),
    }
    Ok(())
}

/// A string as Python writes it in source.
fn quote(text: &mut String, content: &str) {
    let mark = if content.contains('\'') && !content.contains('"') { '"' } else { '\'' };
    text.push(mark);
    for character in content.chars() {
        match character {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            _ if character == mark => text.extend(['\\', mark]),
            '\0'..='\x1f' | '\x7f'..='\u{a0}' | '\u{ad}' => append(text, format_args!("\\x{:02x}", character as u32)),
            _ => text.push(character),
        }
    }
    text.push(mark);
}

fn number(text: &mut String, value: &Value) {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => float_text(text, float),
        _ => text.push_str(&value.to_string()),
    }
}

/// The shortest digits that give the number back, laid out as Python does: plain from 1e-4 to 1e16, else `1e-05`.
fn float_text(text: &mut String, float: f64) {
    if !float.is_finite() {
        text.push_str(if float.is_nan() {
            "NaN"
        } else if float > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        });
        return;
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the e format writes an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is a small integer");
    if (-4..16).contains(&exponent) {
        let plain = float.to_string();
        text.push_str(&plain);
        text.push_str(if plain.contains('.') { "" } else { ".0" });
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        append(text, format_args!("{digits}e{sign}{:02}", exponent.abs()));
    }
}

/// How `tojson` lays out.
struct Layout {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

/// `json.dumps`: `", "` and `": "`, non-ASCII kept, keys in their order; `indent`, `separators`, `ensure_ascii`, `sort_keys`.
pub(super) fn tojson(value: &Value, positional: Rest<Value>, options: &Kwargs) -> Result<Value, Error> {
    let mut positional = positional.0.into_iter();
    let mut option = |name: &str| -> Result<Option<Value>, Error> {
        let given: Option<Value> = positional.next().map_or_else(|| options.get(name), |value| Ok(Some(value)))?;
        Ok(given.filter(|value| !value.is_none()))
    };
    let ensure_ascii = option("ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = match option("indent")? {
        None => None,
        Some(value) => match (value.as_str(), value.as_i64()) {
            (Some(text), _) if text.len() <= 64 => Some(text.to_owned()),
            (_, Some(width)) if width <= 64 => Some(" ".repeat(usize::try_from(width).unwrap_or(0))),
            _ => return Err(fail("tojson: indent is a number or a string, 64 at most")),
        },
    };
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = match option("separators")? {
        None => (item.to_owned(), ": ".to_owned()),
        Some(pair) => {
            let pair: Vec<Value> = pair.try_iter()?.collect();
            match pair.iter().map(Value::as_str).collect::<Option<Vec<_>>>().as_deref() {
                Some([item, key]) => ((*item).to_owned(), (*key).to_owned()),
                _ => return Err(fail("tojson: separators are two strings")),
            }
        }
    };
    let sort_keys = option("sort_keys")?.is_some_and(|value| value.is_true());
    options.assert_all_used()?;
    let mut text = String::new();
    dump(&mut text, value, &Layout { ensure_ascii, sort_keys, indent, item, key }, 0)?;
    Ok(Value::from(text))
}

fn dump(text: &mut String, value: &Value, layout: &Layout, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(fail("tojson: the value is nested too deeply"));
    }
    match value.kind() {
        ValueKind::None => text.push_str("null"),
        ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => number(text, value),
        ValueKind::String => dump_text(text, value.as_str().unwrap_or_default(), layout.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            let mut dump_item = |text: &mut String, item: &Value| dump(text, item, layout, depth + 1);
            bracket(text, ['[', ']'], &items, layout, depth, &mut dump_item)?;
        }
        ValueKind::Map => {
            let mut keys = value
                .try_iter()?
                .map(|key| Ok((key_text(&key)?, key)))
                .collect::<Result<Vec<(String, Value)>, Error>>()?;
            if layout.sort_keys {
                keys.sort_by(|left, right| left.0.cmp(&right.0));
            }
            let mut dump_entry = |text: &mut String, (name, key): &(String, Value)| {
                dump_text(text, name, layout.ensure_ascii);
                text.push_str(&layout.key);
                dump(text, &value.get_item(key)?, layout, depth + 1)
            };
            bracket(text, ['{', '}'], &keys, layout, depth, &mut dump_entry)?;
        }
        kind => return Err(fail(format!("tojson: {kind} has no JSON form"))),
    }
    Ok(())
}

fn bracket<T>(
    text: &mut String,
    marks: [char; 2],
    items: &[T],
    layout: &Layout,
    depth: usize,
    dump_item: &mut dyn FnMut(&mut String, &T) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = |text: &mut String, depth: usize| {
        if let Some(indent) = layout.indent.as_ref().filter(|_| !items.is_empty()) {
            text.push('\n');
            text.push_str(&indent.repeat(depth));
        }
    };
    text.push(marks[0]);
    for (index, item) in items.iter().enumerate() {
        text.push_str(if index > 0 { &layout.item } else { "" });
        line(text, depth + 1);
        dump_item(text, item)?;
    }
    line(text, depth);
    text.push(marks[1]);
    Ok(())
}

/// Keys that are no strings become their JSON text, as in Python.
fn key_text(key: &Value) -> Result<String, Error> {
    let mut text = String::new();
    match key.kind() {
        ValueKind::String => text.push_str(key.as_str().unwrap_or_default()),
        ValueKind::None => text.push_str("null"),
        ValueKind::Bool => text.push_str(if key.is_true() { "true" } else { "false" }),
        ValueKind::Number => number(&mut text, key),
        kind => return Err(fail(format!("tojson: {kind} cannot be a key"))),
    }
    Ok(text)
}

fn dump_text(text: &mut String, content: &str, ensure_ascii: bool) {
    text.push('"');
    for character in content.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\x08' => text.push_str("\\b"),
            '\x0c' => text.push_str("\\f"),
            '\0'..='\x1f' => append(text, format_args!("\\u{:04x}", character as u32)),
            '\x7f'.. if ensure_ascii => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    append(text, format_args!("\\u{unit:04x}"));
                }
            }
            _ => text.push(character),
        }
    }
    text.push('"');
}

/// Python's idea of white space: Rust's, and the four separators of ASCII.
fn is_space(character: char) -> bool {
    character.is_whitespace() || ('\x1c'..='\x1f').contains(&character)
}

/// Where a strip takes away.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Side {
    Left,
    Right,
    Both,
}

pub(super) fn strip<'a>(text: &'a str, characters: Option<&str>, side: Side) -> &'a str {
    let strips = |character: char| characters.map_or_else(|| is_space(character), |set| set.contains(character));
    let text = if side == Side::Right { text } else { text.trim_start_matches(strips) };
    if side == Side::Left { text } else { text.trim_end_matches(strips) }
}

/// Methods of strings, lists and maps that templates call. What is not here answers as the `pycompat` module does.
pub(super) fn method(state: &State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments);
    };
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(arguments)?;
            let side = match name {
                "lstrip" => Side::Left,
                "rstrip" => Side::Right,
                _ => Side::Both,
            };
            Ok(Value::from(strip(text, characters, side)))
        }
        "split" | "rsplit" => {
            let (separator, limit, options): (Option<&str>, Option<i64>, Kwargs) = from_args(arguments)?;
            let separator = separator.map_or_else(|| options.get::<Option<&str>>("sep"), |text| Ok(Some(text)))?;
            let limit = limit.map_or_else(|| options.get::<Option<i64>>("maxsplit"), |limit| Ok(Some(limit)))?;
            options.assert_all_used()?;
            let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
            split(text, separator, limit, name == "rsplit")
        }
        "find" | "rfind" => {
            let (what,): (&str,) = from_args(arguments)?;
            let at = if name == "find" { text.find(what) } else { text.rfind(what) };
            // Positions count characters, as slices do.
            Ok(Value::from(at.map_or(-1, |at| text[..at].chars().count() as i64)))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments),
    }
}

fn split(text: &str, separator: Option<&str>, limit: usize, from_right: bool) -> Result<Value, Error> {
    let pieces: Vec<&str> = match separator {
        Some("") => return Err(fail("split: empty separator")),
        Some(separator) if from_right => {
            let mut pieces: Vec<&str> = text.rsplitn(limit.saturating_add(1), separator).collect();
            pieces.reverse();
            pieces
        }
        Some(separator) => text.splitn(limit.saturating_add(1), separator).collect(),
        None => split_at_space(text, limit, from_right),
    };
    Ok(Value::from(pieces.into_iter().map(Value::from).collect::<Vec<_>>()))
}

/// At runs of white space; the rest past `limit` splits stays whole.
fn split_at_space(text: &str, limit: usize, from_right: bool) -> Vec<&str> {
    let mut rest = strip(text, None, Side::Both);
    let mut pieces = Vec::new();
    while !rest.is_empty() {
        let cut = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = cut.filter(|_| pieces.len() < limit) else {
            pieces.push(rest);
            break;
        };
        if from_right {
            pieces.push(strip(&rest[at..], None, Side::Left));
            rest = strip(&rest[..at], None, Side::Right);
        } else {
            pieces.push(&rest[..at]);
            rest = strip(&rest[at..], None, Side::Left);
        }
    }
    if from_right {
        pieces.reverse();
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn float(number: f64) -> String {
        let mut text = String::new();
        float_text(&mut text, number);
        text
    }

    #[test]
    fn floats_print_as_in_python() {
        let cases = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (123456.789, "123456.789"),
        ];
        for (number, want) in cases {
            assert_eq!(float(number), want);
        }
    }

    #[test]
    fn strings_split_as_in_python() {
        let list = |value: Value| value.try_iter().expect("a list").map(|item| item.to_string()).collect::<Vec<_>>();
        let cases = [
            ("  a b\t c ", None, usize::MAX, false, vec!["a", "b", "c"]),
            ("  a b c ", None, 1, false, vec!["a", "b c"]),
            ("  a b c ", None, 1, true, vec!["a b", "c"]),
            ("", None, usize::MAX, false, vec![]),
            ("", Some(","), usize::MAX, false, vec![""]),
            ("a,b,c", Some(","), 1, false, vec!["a", "b,c"]),
            ("a,b,c", Some(","), 1, true, vec!["a,b", "c"]),
            ("a,b", Some(","), 0, false, vec!["a,b"]),
        ];
        for (text, separator, limit, right, want) in cases {
            assert_eq!(list(split(text, separator, limit, right).expect("splits")), want, "{text:?}");
        }
        assert!(split("a", Some(""), 1, false).is_err());
        assert_eq!(strip("\x1c x\u{a0}", None, Side::Both), "x");
        assert_eq!(strip("xyax", Some("xy"), Side::Left), "ax");
    }
}
