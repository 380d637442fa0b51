//! Methods of strings, lists and dicts. Positions count characters, as in Python.

use super::arguments::{self, Arguments};
use super::interpreter::Interpreter;
use super::strings::{self, Side};
use super::value::{Value, View};
use super::{BYTE, CHARACTER, COPY, ITEM, LOOKUP, Meter, PIECE, Result, fail, format, print};
use std::rc::Rc;

impl Interpreter<'_> {
    pub(super) fn call_method(&mut self, value: &Value, name: &str, given: &Arguments) -> Result<Value> {
        match value {
            Value::Text(text) => match name {
                "format" => self.format(text, given),
                "join" => {
                    let [items] = given.bind(name, ["iterable"], 1)?;
                    join(text, &items.unwrap_or(Value::None), &self.meter)
                }
                _ => text_method(text, name, given, &self.meter),
            },
            Value::Markup(_) => fail("methods of text that safe or escape has marked are not supported"),
            Value::Dict(dict) => match name {
                "items" | "keys" | "values" => {
                    given.none(name)?;
                    let view = match name {
                        "items" => View::Items,
                        "keys" => View::Keys,
                        _ => View::Values,
                    };
                    Ok(Value::View(view, Rc::clone(dict)))
                }
                "get" => {
                    let [key, default] = given.bind(name, ["key", "default"], 1)?;
                    let found = dict.get(&self.meter, &key.unwrap_or(Value::None))?.cloned();
                    Ok(found.or(default).unwrap_or(Value::None))
                }
                "copy" => Ok(value.clone()),
                _ => fail(format!("the method '{name}' of dicts is not supported")),
            },
            Value::List(list) | Value::Tuple(list) => self.list_method(value, &list.items, name, given),
            Value::Range(_) => {
                let items = value.items(&self.meter)?;
                self.list_method(value, &items, name, given)
            }
            Value::Loop(scope) => self.loop_method(*scope, name, given),
            Value::Counter(index) => self.cycler_method(*index, name, given),
            other => fail(format!("'{}' has no method '{name}'", other.type_name())),
        }
    }

    fn list_method(&mut self, value: &Value, items: &[Value], name: &str, given: &Arguments) -> Result<Value> {
        if name == "copy" {
            given.none(name)?;
            return Ok(value.clone());
        }
        let [wanted] = given.bind(name, ["value"], 1)?;
        let wanted = wanted.unwrap_or(Value::None);
        let mut count = 0;
        for (at, item) in items.iter().enumerate() {
            if item.equals(&wanted, &self.meter)? {
                if name == "index" {
                    return Ok(Value::Int(at as i128));
                }
                count += 1;
            }
        }
        if name == "index" { fail("the value is not in the list") } else { Ok(Value::Int(count)) }
    }
}

fn join(separator: &str, items: &Value, meter: &Meter) -> Result<Value> {
    let mut joined = String::new();
    for (index, item) in items.items(meter)?.iter().enumerate() {
        let Some(text) = item.as_text() else {
            return fail(format!("sequence item {index}: expected str instance, {} found", item.type_name()));
        };
        meter.charge(separator.len() + text.len(), COPY)?;
        joined.push_str(if index > 0 { separator } else { "" });
        joined.push_str(text);
    }
    Ok(Value::text(&joined))
}

fn text_method(text: &str, name: &str, given: &Arguments, meter: &Meter) -> Result<Value> {
    meter.charge(text.len(), CHARACTER)?;
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let [characters] = given.bind(name, ["chars"], 0)?;
            let characters = optional_text(name, characters.as_ref())?;
            meter.charge(text.len(), characters.map_or(1, str::len))?;
            let side = match name {
                "lstrip" => Side::Left,
                "rstrip" => Side::Right,
                _ => Side::Both,
            };
            Ok(Value::text(strings::strip(text, characters, side)))
        }
        "split" | "rsplit" => {
            let [separator, limit] = given.bind(name, ["sep", "maxsplit"], 0)?;
            let limit = usize::try_from(arguments::integer(name, limit.as_ref(), -1)?).unwrap_or(usize::MAX);
            let separator = optional_text(name, separator.as_ref())?;
            match strings::split(text, separator, limit, name == "rsplit") {
                Some(pieces) => list_of(&pieces, meter),
                None => fail("empty separator"),
            }
        }
        "splitlines" => {
            let [keep] = given.bind(name, ["keepends"], 0)?;
            list_of(&strings::lines(text, arguments::flag(keep.as_ref())), meter)
        }
        "find" | "rfind" | "index" | "rindex" | "count" => search(text, name, given, meter),
        "startswith" | "endswith" => affix(text, name, given, meter),
        "removeprefix" | "removesuffix" => {
            let [affix] = given.bind(name, ["affix"], 1)?;
            let affix = affix.unwrap_or(Value::None);
            let affix = arguments::text(name, &affix)?;
            let cut = if name == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            Ok(Value::text(cut.unwrap_or(text)))
        }
        "partition" | "rpartition" => {
            let [separator] = given.bind(name, ["sep"], 1)?;
            let separator = separator.unwrap_or(Value::None);
            let separator = arguments::text(name, &separator)?;
            if separator.is_empty() {
                return fail("empty separator");
            }
            let cut = if name == "partition" { text.split_once(separator) } else { text.rsplit_once(separator) };
            let parts = match cut {
                Some((before, after)) => [before, separator, after],
                None if name == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            Value::tuple(parts.map(Value::text).to_vec())
        }
        "replace" => {
            let [old, new, count] = given.bind(name, ["old", "new", "count"], 2)?;
            let (old, new) = (old.unwrap_or(Value::None), new.unwrap_or(Value::None));
            let count = arguments::integer(name, count.as_ref(), -1)?;
            replace(text, arguments::text(name, &old)?, arguments::text(name, &new)?, count, meter)
        }
        "zfill" | "ljust" | "rjust" | "center" => pad(text, name, given, meter),
        "encode" | "maketrans" | "translate" | "format_map" | "expandtabs" | "casefold" | "isidentifier" => {
            fail(format!("the method '{name}' of strings is not supported"))
        }
        _ => {
            given.none(name)?;
            meter.charge(text.len(), LOOKUP)?;
            plain_method(text, name)
        }
    }
}

fn optional_text<'a>(function: &str, value: Option<&'a Value>) -> Result<Option<&'a str>> {
    match value {
        None | Some(Value::None) => Ok(None),
        Some(value) => arguments::text(function, value).map(Some),
    }
}

fn list_of(pieces: &[&str], meter: &Meter) -> Result<Value> {
    meter.charge(pieces.len(), PIECE)?;
    Value::list(pieces.iter().map(|piece| Value::text(piece)).collect())
}

/// Methods without arguments.
fn plain_method(text: &str, name: &str) -> Result<Value> {
    let every = |wanted: fn(char) -> bool| Ok(Value::Bool(!text.is_empty() && text.chars().all(wanted)));
    match name {
        "upper" => Ok(Value::text(&text.to_uppercase())),
        "lower" => Ok(Value::text(&text.to_lowercase())),
        "capitalize" => Ok(Value::text(&strings::capitalize(text))),
        "title" => Ok(Value::text(&strings::title(text))),
        "swapcase" => {
            let swap =
                |c: char| if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() };
            Ok(Value::text(&text.chars().map(swap).collect::<String>()))
        }
        "isspace" => every(strings::is_space),
        "isalpha" => every(char::is_alphabetic),
        "isalnum" => every(char::is_alphanumeric),
        "isascii" => Ok(Value::Bool(text.is_ascii())),
        "isprintable" => Ok(Value::Bool(text.chars().all(print::is_printable))),
        "isdigit" | "isdecimal" | "isnumeric" => {
            every(|c| if c.is_ascii() { c.is_ascii_digit() } else { c.is_numeric() })
        }
        "islower" => Ok(Value::Bool(strings::has_case(text, char::is_lowercase, char::is_uppercase))),
        "isupper" => Ok(Value::Bool(strings::has_case(text, char::is_uppercase, char::is_lowercase))),
        "istitle" => Ok(Value::Bool(text.chars().any(strings::is_cased) && strings::title(text) == text)),
        _ => fail(format!("the method '{name}' of strings is not supported")),
    }
}

/// The part of a text between two character positions, and the number of characters before it.
/// `None` if the first lies past the end: nothing is found there, not even the empty string.
fn window<'a>(
    text: &'a str,
    name: &str,
    start: Option<&Value>,
    end: Option<&Value>,
) -> Result<Option<(&'a str, usize)>> {
    let given = |value: Option<&Value>| value.filter(|value| !matches!(value, Value::None)).cloned();
    let (start, end) = (given(start), given(end));
    if start.is_none() && end.is_none() {
        return Ok(Some((text, 0)));
    }
    let length = text.chars().count() as i128;
    let place = |value: Option<&Value>, default: i128| {
        arguments::integer(name, value, default).map(|at| if at < 0 { at.saturating_add(length).max(0) } else { at })
    };
    let (start, end) = (place(start.as_ref(), 0)?, place(end.as_ref(), length)?.min(length));
    if start > length || end < start {
        return Ok(None);
    }
    let byte = |at: i128| text.char_indices().nth(at as usize).map_or(text.len(), |(byte, _)| byte);
    Ok(Some((&text[byte(start)..byte(end)], start as usize)))
}

fn search(text: &str, name: &str, given: &Arguments, meter: &Meter) -> Result<Value> {
    let [part, start, end] = given.bind(name, ["sub", "start", "end"], 1)?;
    let part = part.unwrap_or(Value::None);
    let part = arguments::text(name, &part)?;
    meter.charge(part.len(), BYTE)?;
    let found = match window(text, name, start.as_ref(), end.as_ref())? {
        None if name == "count" => return Ok(Value::Int(0)),
        None => None,
        Some((inside, _)) if name == "count" => return Ok(Value::Int(inside.matches(part).count() as i128)),
        Some((inside, before)) => {
            let at = if name.starts_with('r') { inside.rfind(part) } else { inside.find(part) };
            at.map(|at| before + inside[..at].chars().count())
        }
    };
    match found {
        Some(at) => Ok(Value::Int(at as i128)),
        None if name.ends_with("find") => Ok(Value::Int(-1)),
        None => fail("substring not found"),
    }
}

fn affix(text: &str, name: &str, given: &Arguments, meter: &Meter) -> Result<Value> {
    let [wanted, start, end] = given.bind(name, ["affix", "start", "end"], 1)?;
    let Some((inside, _)) = window(text, name, start.as_ref(), end.as_ref())? else { return Ok(Value::Bool(false)) };
    let wanted = match wanted.unwrap_or(Value::None) {
        Value::Tuple(several) => several.items.clone(),
        one => vec![one],
    };
    for affix in &wanted {
        let affix = arguments::text(name, affix)?;
        meter.charge(affix.len(), BYTE)?;
        if if name == "startswith" { inside.starts_with(affix) } else { inside.ends_with(affix) } {
            return Ok(Value::Bool(true));
        }
    }
    Ok(Value::Bool(false))
}

/// Replaces the first `count` occurrences of `old` with `new`, or all if `count` is negative.
pub(super) fn replace(text: &str, old: &str, new: &str, count: i128, meter: &Meter) -> Result<Value> {
    meter.charge(text.len() + old.len(), CHARACTER)?;
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let found = text.matches(old).take(count).count();
    meter.charge(text.len().saturating_add(found.saturating_mul(new.len())), 2 * BYTE)?;
    meter.charge(found, ITEM)?;
    Ok(Value::text(&text.replacen(old, new, count)))
}

fn pad(text: &str, name: &str, given: &Arguments, meter: &Meter) -> Result<Value> {
    let [width, fill] = given.bind(name, ["width", "fillchar"], 1)?;
    let width = usize::try_from(arguments::integer(name, width.as_ref(), 0)?.max(0)).unwrap_or(usize::MAX);
    let fill = match fill {
        None => ' ',
        Some(fill) => match arguments::text(name, &fill)?.chars().collect::<Vec<_>>().as_slice() {
            [fill] if name != "zfill" => *fill,
            _ => return fail("The fill character must be exactly one character long"),
        },
    };
    let missing = width.saturating_sub(text.chars().count());
    meter.charge(missing, 4 * BYTE)?;
    let (sign, digits) = match text.strip_prefix(['+', '-']) {
        Some(digits) => (&text[..1], digits),
        None => ("", text),
    };
    let padding = |count: usize| format::padding(fill, count);
    Ok(Value::text(&match name {
        "zfill" => format!("{sign}{}{digits}", "0".repeat(missing)),
        "ljust" => format!("{text}{}", padding(missing)),
        "rjust" => format!("{}{text}", padding(missing)),
        _ => centre(text, width, missing, fill),
    }))
}

/// Distributes an odd number of fill characters as Python does.
pub(super) fn centre(text: &str, width: usize, missing: usize, fill: char) -> String {
    let left = missing / 2 + (missing & width & 1);
    format!("{}{text}{}", format::padding(fill, left), format::padding(fill, missing - left))
}
