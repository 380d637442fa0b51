//! `value.name` and `value[key]`. A name is looked up among the methods of the type first and then
//! among the keys, a key the other way round; mutating methods are unavailable, as in Jinja2's
//! immutable sandbox.

use super::interpreter::Interpreter;
use super::value::{Items, Value};
use super::{BYTE, ITEM, Result, fail};

const TEXT_METHODS: [&str; 47] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];
const DICT_METHODS: [&str; 6] = ["copy", "fromkeys", "get", "items", "keys", "values"];
const DICT_CHANGES: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];
const LIST_METHODS: [&str; 3] = ["copy", "count", "index"];
const LIST_CHANGES: [&str; 8] = ["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];

impl Interpreter<'_> {
    pub(super) fn attribute(&mut self, value: &Value, name: &str) -> Result<Value> {
        self.meter.charge(name.len(), BYTE)?;
        if let Some(found) = self.own_attribute(value, name)? {
            return Ok(found);
        }
        if let Some(found) = value.as_dict().and_then(|dict| dict.get_text(name)) {
            return Ok(found.clone());
        }
        let what = format!("'{} object' has no attribute '{}'", value.type_name(), name.escape_debug());
        Ok(Value::undefined(what))
    }

    /// What Python's `getattr` finds.
    fn own_attribute(&mut self, value: &Value, name: &str) -> Result<Option<Value>> {
        let (methods, changes): (&[&str], &[&str]) = match value {
            Value::Undefined(why) => return fail(why.as_ref()),
            Value::Text(_) | Value::Markup(_) => (&TEXT_METHODS, &[]),
            Value::Dict(_) => (&DICT_METHODS, &DICT_CHANGES),
            Value::List(_) => (&LIST_METHODS, &LIST_CHANGES),
            Value::Tuple(_) | Value::Range(_) => (&["count", "index"], &[]),
            Value::Loop(scope) => return self.loop_attribute(*scope, name).map(Some),
            Value::Counter(index) => return self.cycler_attribute(*index, name).map(Some),
            Value::Namespace(index) => {
                let attributes = &self.namespaces[*index];
                self.meter.charge(attributes.len(), ITEM)?;
                return Ok(attributes.iter().find(|(known, _)| known.as_ref() == name).map(|(_, value)| value.clone()));
            }
            Value::Macro(index) if name == "name" => return Ok(Some(Value::text(&self.macros[*index].1.name))),
            _ => (&[], &[]),
        };
        if methods.contains(&name) {
            return value.method(name).map(Some);
        }
        let unsafe_name = changes.contains(&name) || (name.starts_with("__") && name.ends_with("__"));
        Ok(unsafe_name.then(|| {
            let name = name.escape_debug();
            Value::undefined(format!("access to attribute '{name}' of '{}' object is unsafe", value.type_name()))
        }))
    }

    pub(super) fn item(&mut self, value: &Value, key: &Value) -> Result<Value> {
        let found = match value {
            Value::Undefined(why) => return fail(why.as_ref()),
            Value::Dict(dict) => match key {
                Value::List(_) | Value::Dict(_) => None,
                key => dict.get(&self.meter, key)?.cloned(),
            },
            Value::List(list) | Value::Tuple(list) => item_at(list, key),
            Value::Range(range) => index(key, range.length).map(|at| range.get(at)),
            Value::Text(text) | Value::Markup(text) => {
                self.meter.charge(text.len(), BYTE)?;
                let at = key.as_int().and_then(|_| index(key, text.chars().count()));
                at.and_then(|at| text.chars().nth(at)).map(|found| Value::text(found.encode_utf8(&mut [0; 4])))
            }
            _ => None,
        };
        if let Some(found) = found {
            return Ok(found);
        }
        if let Some(name) = key.as_text() {
            return Ok(match self.own_attribute(value, name)? {
                Some(found) => found,
                None => Value::undefined(format!("'{} object' has no attribute '{}'", value.type_name(), shown(name))),
            });
        }
        Ok(Value::undefined(format!("'{}' has no such element", value.type_name())))
    }
}

/// A name for a message, shortened if long.
fn shown(name: &str) -> String {
    name.chars().take(80).flat_map(char::escape_debug).collect()
}

fn item_at(list: &Items, key: &Value) -> Option<Value> {
    index(key, list.items.len()).map(|at| list.items[at].clone())
}

/// The position an index refers to; negative ones count from the end.
fn index(key: &Value, length: usize) -> Option<usize> {
    let at = key.as_int()?;
    let at = if at < 0 { at.checked_add(length as i128)? } else { at };
    usize::try_from(at).ok().filter(|at| *at < length)
}
