//! The `tojson` filter: `json.dumps` with `ensure_ascii=False` by default, as chat templates
//! expect.

use super::arguments::{self, Arguments};
use super::lists;
use super::value::Value;
use super::{BYTE, CHARACTER, ITEM, Meter, Result, fail, number};
use std::fmt::Write;
use std::sync::Arc;

struct JsonStyle {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item: Arc<str>,
    key: Arc<str>,
}

pub(super) fn tojson(value: &Value, given: &Arguments, meter: &Meter) -> Result<Value> {
    let [ensure_ascii, indent, separators, sort_keys] =
        given.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"], 0)?;
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Text(text)) => Some(text.to_string()),
        Some(width) => {
            let width = usize::try_from(arguments::integer("tojson", Some(&width), 0)?.max(0)).unwrap_or(usize::MAX);
            meter.charge(width, BYTE)?;
            Some(" ".repeat(width))
        }
    };
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = match separators {
        None | Some(Value::None) => (Arc::from(item), Arc::from(": ")),
        Some(pair) => match pair.items(meter)?.as_slice() {
            [Value::Text(item), Value::Text(key)] => (Arc::clone(item), Arc::clone(key)),
            _ => return fail("tojson: separators are two strings"),
        },
    };
    let (ensure_ascii, sort_keys) = (arguments::flag(ensure_ascii.as_ref()), arguments::flag(sort_keys.as_ref()));
    let mut text = String::new();
    dump(&mut text, value, &JsonStyle { ensure_ascii, sort_keys, indent, item, key }, 0, meter)?;
    meter.charge(text.len(), BYTE)?;
    Ok(Value::text(&text))
}

fn dump(text: &mut String, value: &Value, layout: &JsonStyle, depth: usize, meter: &Meter) -> Result<()> {
    meter.charge(1, ITEM)?;
    match value {
        Value::List(list) | Value::Tuple(list) => {
            bracket(text, ['[', ']'], &list.items, layout, depth, meter, &mut |text, item| {
                dump(text, item, layout, depth + 1, meter)
            })
        }
        Value::Dict(dict) => {
            meter.charge(dict.entries.len(), ITEM)?;
            let mut entries: Vec<(Value, Value)> = dict.entries.clone();
            if layout.sort_keys {
                entries = lists::sorted(entries, |left, right| left.0.order(&right.0, "<", meter), meter)?;
            }
            bracket(text, ['{', '}'], &entries, layout, depth, meter, &mut |text, (key, value)| {
                match key {
                    Value::Text(_) | Value::Markup(_) => dump(text, key, layout, depth, meter)?,
                    Value::None | Value::Bool(_) | Value::Int(_) | Value::Big(_) | Value::Float(_) => {
                        text.push('"');
                        dump(text, key, layout, depth, meter)?;
                        text.push('"');
                    }
                    key => return fail(format!("keys must be str, int, float, bool or None, not {}", key.type_name())),
                }
                text.push_str(&layout.key);
                dump(text, value, layout, depth + 1, meter)
            })
        }
        Value::Text(content) | Value::Markup(content) => dump_text(text, content, layout.ensure_ascii, meter),
        Value::None => {
            text.push_str("null");
            Ok(())
        }
        Value::Bool(flag) => {
            text.push_str(if *flag { "true" } else { "false" });
            Ok(())
        }
        Value::Int(number) => {
            write!(text, "{number}").expect("a string takes any text");
            Ok(())
        }
        Value::Big(digits) => {
            text.push_str(digits);
            Ok(())
        }
        Value::Float(float) if float.is_nan() => {
            text.push_str("NaN");
            Ok(())
        }
        Value::Float(float) if float.is_infinite() => {
            text.push_str(if *float > 0.0 { "Infinity" } else { "-Infinity" });
            Ok(())
        }
        Value::Float(float) => {
            number::print_float(text, *float);
            Ok(())
        }
        other => fail(format!("Object of type {} is not JSON serializable", other.type_name())),
    }
}

fn bracket<T>(
    text: &mut String,
    marks: [char; 2],
    items: &[T],
    layout: &JsonStyle,
    depth: usize,
    meter: &Meter,
    dump_item: &mut dyn FnMut(&mut String, &T) -> Result<()>,
) -> Result<()> {
    let line = |text: &mut String, depth: usize| {
        if let Some(indent) = layout.indent.as_ref().filter(|_| !items.is_empty()) {
            meter.charge(indent.len().saturating_mul(depth), BYTE)?;
            text.push('\n');
            text.push_str(&indent.repeat(depth));
        }
        Ok(())
    };
    text.push(marks[0]);
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            meter.charge(layout.item.len() + layout.key.len(), BYTE)?;
            text.push_str(&layout.item);
        }
        line(text, depth + 1)?;
        dump_item(text, item)?;
    }
    line(text, depth)?;
    text.push(marks[1]);
    Ok(())
}

fn dump_text(text: &mut String, content: &str, ensure_ascii: bool, meter: &Meter) -> Result<()> {
    meter.charge(content.len(), 2 * CHARACTER)?;
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
            '\0'..='\x1f' => write!(text, "\\u{:04x}", character as u32).expect("a string takes any text"),
            '\x7f'.. if ensure_ascii => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    write!(text, "\\u{unit:04x}").expect("a string takes any text");
                }
            }
            _ => text.push(character),
        }
    }
    text.push('"');
    Ok(())
}
