//! Filters by name. Jinja2 filters that make no sense in a chat template, such as `urlize` or
//! `random`, are refused.

use super::arguments::{self, Arguments};
use super::interpreter::Interpreter;
use super::strings::{self, Side};
use super::value::{Value, View};
use super::{BYTE, CHARACTER, LOOKUP, Result, fail, format, json, methods, number, print};
use std::fmt::Write;
use std::rc::Rc;
use std::sync::Arc;

/// All filter names, for `is filter`.
pub(super) const NAMES: [&str; 48] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
    "xmlattr",
];

impl Interpreter<'_> {
    pub(super) fn filter(&mut self, name: &str, value: Value, given: &Arguments) -> Result<Value> {
        self.meter.charge(1, super::STEP)?;
        match name {
            "default" | "d" => {
                let [default, boolean] = given.bind(name, ["default_value", "boolean"], 0)?;
                let missing = value.is_undefined() || (arguments::flag(boolean.as_ref()) && !value.truth());
                Ok(if missing { default.unwrap_or_else(|| Value::text("")) } else { value })
            }
            "tojson" => json::tojson(&value, given, &self.meter),
            "length" | "count" => self.length(name, &value, given),
            "items" => {
                given.none(name)?;
                match &value {
                    Value::Undefined(_) => Value::iterator(Vec::new()),
                    Value::Dict(dict) => Value::iterator(Value::View(View::Items, Rc::clone(dict)).items(&self.meter)?),
                    _ => fail("Can only get item pairs from a mapping."),
                }
            }
            "attr" => self.attr(&value, given),
            "string" => {
                given.none(name)?;
                if matches!(value, Value::Markup(_)) {
                    Ok(value)
                } else {
                    Ok(Value::Text(print::text(&value, &self.meter)?))
                }
            }
            "safe" => {
                given.none(name)?;
                Ok(Value::Markup(print::text(&value, &self.meter)?))
            }
            "escape" | "e" | "forceescape" => {
                given.none(name)?;
                if matches!(value, Value::Markup(_)) && name != "forceescape" {
                    return Ok(value);
                }
                let text = print::text(&value, &self.meter)?;
                Ok(Value::Markup(Arc::from(self.escape(&text)?)))
            }
            "abs" | "int" | "float" | "round" => self.number_filter(name, &value, given),
            "replace" => self.replaced(&value, given),
            "xmlattr" | "urlencode" => self.web_filter(name, &value, given),
            _ => match self.list_filter(name, &value, given)? {
                Some(value) => Ok(value),
                None => self.text_filter(name, &value, given),
            },
        }
    }

    fn length(&mut self, name: &str, value: &Value, given: &Arguments) -> Result<Value> {
        given.none(name)?;
        match (value.as_text(), value.length()) {
            (Some(text), _) => {
                self.meter.charge(text.len(), BYTE)?;
                Ok(Value::Int(text.chars().count() as i128))
            }
            (None, Some(length)) => Ok(Value::Int(length as i128)),
            _ => fail(format!("object of type '{}' has no len()", value.type_name())),
        }
    }

    fn attr(&mut self, value: &Value, given: &Arguments) -> Result<Value> {
        let [attribute] = given.bind("attr", ["name"], 1)?;
        let attribute = attribute.unwrap_or(Value::None);
        let attribute = arguments::text("attr", &attribute)?;
        // Unlike the dot, the filter does not look up keys.
        if value.as_dict().is_some_and(|dict| dict.get_text(attribute).is_some()) {
            return Ok(Value::undefined(format!("'dict object' has no attribute '{}'", attribute.escape_debug())));
        }
        self.attribute(value, attribute)
    }

    fn replaced(&mut self, value: &Value, given: &Arguments) -> Result<Value> {
        let [old, new, count] = given.bind("replace", ["old", "new", "count"], 2)?;
        let text = print::text(value, &self.meter)?;
        let old = print::text(&old.unwrap_or(Value::None), &self.meter)?;
        let new = print::text(&new.unwrap_or(Value::None), &self.meter)?;
        let count = count.filter(|count| !matches!(count, Value::None));
        methods::replace(&text, &old, &new, arguments::integer("replace", count.as_ref(), -1)?, &self.meter)
    }

    fn escape(&mut self, text: &str) -> Result<String> {
        self.meter.charge(text.len(), 2 * CHARACTER)?;
        Ok(strings::escape(text))
    }

    fn number_filter(&mut self, name: &str, value: &Value, given: &Arguments) -> Result<Value> {
        match name {
            "int" => {
                let [default, base] = given.bind(name, ["default", "base"], 0)?;
                let default = default.unwrap_or(Value::Int(0));
                let base = u32::try_from(arguments::integer(name, base.as_ref(), 10)?).unwrap_or(0);
                if !matches!(base, 2 | 8 | 10 | 16) {
                    return fail("int: a base other than 2, 8, 10 and 16 is not supported");
                }
                self.meter.charge(value.as_text().map_or(0, str::len), CHARACTER)?;
                Ok(match value {
                    Value::Undefined(why) => return fail(why.as_ref()),
                    Value::Bool(flag) => Value::Int(i128::from(*flag)),
                    Value::Int(_) | Value::Big(_) => value.clone(),
                    Value::Float(float) if float.is_infinite() => {
                        return fail("cannot convert float infinity to integer");
                    }
                    Value::Float(float) => number::truncate(*float).unwrap_or(default),
                    other => match other.as_text() {
                        Some(text) => number::parse_integer(text, base)
                            .or_else(|| number::truncate(number::parse_float(text)?).ok())
                            .unwrap_or(default),
                        None => default,
                    },
                })
            }
            "float" => {
                let [default] = given.bind(name, ["default"], 0)?;
                if let Value::Undefined(why) = value {
                    return fail(why.as_ref());
                }
                self.meter.charge(value.as_text().map_or(0, str::len), CHARACTER)?;
                let float = match value.as_text() {
                    Some(text) => number::parse_float(text),
                    None => number::to_float(value)?,
                };
                Ok(float.map(Value::Float).or(default).unwrap_or(Value::Float(0.0)))
            }
            "abs" => match value {
                Value::Float(float) => Ok(Value::Float(float.abs())),
                Value::Big(digits) => Ok(Value::Big(Arc::from(digits.trim_start_matches('-')))),
                other => match other.as_int().map(i128::checked_abs) {
                    Some(Some(number)) => Ok(Value::Int(number)),
                    _ => fail(format!("bad operand type for abs(): '{}'", other.type_name())),
                },
            },
            _ => {
                let [precision, method] = given.bind(name, ["precision", "method"], 0)?;
                let precision = arguments::integer(name, precision.as_ref(), 0)?;
                let Ok(digits) = u32::try_from(precision) else {
                    return fail("round: a negative precision is not supported");
                };
                let common = match method.as_ref().map(|method| arguments::text(name, method)).transpose()? {
                    None | Some("common") => true,
                    Some("ceil" | "floor") => false,
                    Some(_) => return fail("method must be common, ceil or floor"),
                };
                match number::to_float(value)? {
                    None => fail(format!("type {} doesn't define __round__ method", value.type_name())),
                    Some(_) if common && value.as_int().is_some() => Ok(value.clone()),
                    Some(float) if common => Ok(Value::Float(number::round(float, digits.min(2000) as usize))),
                    Some(float) => {
                        let up = method.as_ref().and_then(Value::as_text) == Some("ceil");
                        Ok(Value::Float(number::round_towards(float, digits, up)))
                    }
                }
            }
        }
    }

    /// Filters on the text of a value.
    fn text_filter(&mut self, name: &str, value: &Value, given: &Arguments) -> Result<Value> {
        if !NAMES.contains(&name) {
            return fail(format!("no filter named '{}', or none that is supported", name.escape_debug()));
        }
        if let Value::Markup(text) = value {
            // Filters that only change or remove characters keep the text marked.
            if matches!(name, "trim" | "upper" | "lower" | "capitalize") {
                let changed = self.text_filter(name, &Value::Text(Arc::clone(text)), given)?;
                return Ok(Value::Markup(print::text(&changed, &self.meter)?));
            }
            return fail(format!("the filter '{name}' on text that safe or escape has marked is not supported"));
        }
        let text = print::text(value, &self.meter)?;
        self.meter.charge(text.len(), CHARACTER)?;
        match name {
            "trim" => {
                let [characters] = given.bind(name, ["chars"], 0)?;
                let characters = characters.filter(|value| !matches!(value, Value::None));
                let characters = characters.as_ref().map(|value| arguments::text(name, value)).transpose()?;
                self.meter.charge(text.len(), characters.map_or(1, str::len))?;
                Ok(Value::text(strings::strip(&text, characters, Side::Both)))
            }
            "format" => {
                let values = if given.named.is_empty() {
                    Value::tuple(given.positional.clone())?
                } else if given.positional.is_empty() {
                    let entries = given.named.iter().map(|(name, value)| (Arc::clone(name), value.clone()));
                    Value::dict(super::value::Dict::from_row(entries.collect()))
                } else {
                    return fail("can't handle positional and keyword arguments at the same time");
                };
                format::percent(&text, &values, &self.meter)
            }
            "indent" => self.indent(value, given),
            "truncate" => truncate(value, given),
            "center" => {
                let [width] = given.bind(name, ["width"], 0)?;
                let arguments = Arguments::one(width.unwrap_or(Value::Int(80)));
                self.call_method(&Value::Text(text), "center", &arguments)
            }
            _ => {
                given.none(name)?;
                self.meter.charge(text.len(), LOOKUP)?;
                Ok(match name {
                    "upper" => Value::text(&text.to_uppercase()),
                    "lower" => Value::text(&text.to_lowercase()),
                    "capitalize" => Value::text(&strings::capitalize(&text)),
                    "title" => Value::text(&strings::title_filter(&text)),
                    _ => {
                        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
                        Value::Int(words.filter(|word| !word.is_empty()).count() as i128)
                    }
                })
            }
        }
    }

    fn indent(&mut self, value: &Value, given: &Arguments) -> Result<Value> {
        let [width, first, blank] = given.bind("indent", ["width", "first", "blank"], 0)?;
        let text = arguments::text("indent", value)?;
        let indent = match width {
            Some(Value::Text(indent)) => indent.to_string(),
            width => {
                let width =
                    usize::try_from(arguments::integer("indent", width.as_ref(), 4)?.max(0)).unwrap_or(usize::MAX);
                self.meter.charge(width, BYTE)?;
                " ".repeat(width)
            }
        };
        let text = format!("{text}\n");
        let lines = strings::lines(&text, false);
        self.meter.charge(lines.len().saturating_mul(indent.len()), 2 * BYTE)?;
        let blank = arguments::flag(blank.as_ref());
        let mut indented = String::new();
        for (index, line) in lines.iter().enumerate() {
            indented.push_str(if index > 0 { "\n" } else { "" });
            let wanted = if index > 0 { blank || !line.is_empty() } else { arguments::flag(first.as_ref()) };
            indented.push_str(if wanted { &indent } else { "" });
            indented.push_str(line);
        }
        Ok(Value::text(&indented))
    }

    fn web_filter(&mut self, name: &str, value: &Value, given: &Arguments) -> Result<Value> {
        if name == "xmlattr" {
            let [space] = given.bind(name, ["autospace"], 0)?;
            let Some(dict) = value.as_dict() else { return fail("xmlattr: a mapping is wanted") };
            let mut text = String::new();
            for (key, value) in
                dict.entries.iter().filter(|(_, value)| !value.is_undefined() && !matches!(value, Value::None))
            {
                let key = arguments::text(name, key)?;
                if key.contains(|c: char| c.is_ascii_whitespace() || "/>=\x0b".contains(c)) {
                    return fail("Invalid character in attribute name");
                }
                let value = print::text(value, &self.meter)?;
                let (key, value) = (self.escape(key)?, self.escape(&value)?);
                write!(text, " {key}=\"{value}\"").expect("a string takes any text");
            }
            let space = space.is_none_or(|space| space.truth());
            return Ok(Value::text(if space { &text } else { text.trim_start_matches(' ') }));
        }
        given.none(name)?;
        let pairs = match value {
            Value::Dict(dict) => Value::View(View::Items, Rc::clone(dict)).items(&self.meter)?,
            other if other.as_text().is_none() && other.is_iterable() => other.items(&self.meter)?,
            other => {
                let text = print::text(other, &self.meter)?;
                return Ok(Value::text(&self.quote(&text, false)?));
            }
        };
        let mut query = String::new();
        for pair in pairs {
            let pair = pair.items(&self.meter)?;
            let [key, value] = pair.as_slice() else { return fail("urlencode: pairs have two items") };
            let (key, value) = (print::text(key, &self.meter)?, print::text(value, &self.meter)?);
            let (key, value) = (self.quote(&key, true)?, self.quote(&value, true)?);
            query.push_str(if query.is_empty() { "" } else { "&" });
            write!(query, "{key}={value}").expect("a string takes any text");
        }
        Ok(Value::text(&query))
    }

    /// Percent-encoding; in a query a space becomes a plus and the slash is encoded too.
    fn quote(&mut self, text: &str, query: bool) -> Result<String> {
        self.meter.charge(text.len(), 2 * CHARACTER)?;
        let mut quoted = String::with_capacity(text.len());
        for byte in text.bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => quoted.push(byte as char),
                b'/' if !query => quoted.push('/'),
                b' ' if query => quoted.push('+'),
                _ => write!(quoted, "%{byte:02X}").expect("a string takes any text"),
            }
        }
        Ok(quoted)
    }
}

fn truncate(value: &Value, given: &Arguments) -> Result<Value> {
    let [length, kill, end, leeway] = given.bind("truncate", ["length", "killwords", "end", "leeway"], 0)?;
    let text = arguments::text("truncate", value)?;
    let length = arguments::integer("truncate", length.as_ref(), 255)?;
    let leeway = leeway.filter(|value| !matches!(value, Value::None));
    let leeway = arguments::integer("truncate", leeway.as_ref(), 5)?;
    let end = end.unwrap_or_else(|| Value::text("..."));
    let end = arguments::text("truncate", &end)?;
    let Some(kept) = length.checked_sub(end.chars().count() as i128).filter(|kept| *kept >= 0 && leeway >= 0) else {
        return fail("truncate: the length must hold the end, and the leeway must not be negative");
    };
    if text.chars().count() as i128 <= length.saturating_add(leeway) {
        return Ok(value.clone());
    }
    let cut: String = text.chars().take(usize::try_from(kept).unwrap_or(usize::MAX)).collect();
    let cut =
        if arguments::flag(kill.as_ref()) { &cut } else { cut.rsplit_once(' ').map_or(cut.as_str(), |pair| pair.0) };
    Ok(Value::text(&format!("{cut}{end}")))
}
