//! Prints values: exactly Python's `str` and `repr`.

use super::value::{Value, View};
use super::{BYTE, CHARACTER, ITEM, LOOKUP, Meter, Result, fail, number};
use std::fmt::Write;
use std::sync::Arc;

/// `str` of a value, which is what `{{ … }}` prints.
pub(super) fn text(value: &Value, meter: &Meter) -> Result<Arc<str>> {
    match value {
        Value::Text(text) | Value::Markup(text) => Ok(Arc::clone(text)),
        Value::Undefined(_) => Ok(Arc::from("")),
        other => {
            let mut text = String::new();
            repr(&mut text, other, meter)?;
            meter.charge(text.len(), BYTE)?;
            Ok(Arc::from(text))
        }
    }
}

/// `repr` of a value. The depth of values bounds the recursion.
pub(super) fn repr(text: &mut String, value: &Value, meter: &Meter) -> Result<()> {
    meter.charge(1, ITEM)?;
    match value {
        Value::Undefined(_) => text.push_str("Undefined"),
        Value::None => text.push_str("None"),
        Value::Bool(flag) => text.push_str(if *flag { "True" } else { "False" }),
        Value::Int(number) => write!(text, "{number}").expect("a string takes any text"),
        Value::Big(digits) => text.push_str(digits),
        Value::Float(float) => number::print_float(text, *float),
        Value::Text(content) => quote(text, content, meter)?,
        Value::Markup(content) => {
            text.push_str("Markup(");
            quote(text, content, meter)?;
            text.push(')');
        }
        Value::List(list) => sequence(text, ["[", "]"], &list.items, meter)?,
        Value::Tuple(list) => {
            let end = if list.items.len() == 1 { ",)" } else { ")" };
            sequence(text, ["(", end], &list.items, meter)?;
        }
        Value::Dict(dict) => {
            text.push('{');
            for (index, (key, value)) in dict.entries.iter().enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                repr(text, key, meter)?;
                text.push_str(": ");
                repr(text, value, meter)?;
            }
            text.push('}');
        }
        Value::View(view, _) => {
            let open = match view {
                View::Keys => "dict_keys([",
                View::Values => "dict_values([",
                View::Items => "dict_items([",
            };
            sequence(text, [open, "])"], &value.items(meter)?, meter)?;
        }
        Value::Range(range) if range.step == 1 && range.length > 0 => {
            let stop = range.start + range.length as i128;
            write!(text, "range({}, {stop})", range.start).expect("a string takes any text");
        }
        other => return fail(format!("a {} has no text of its own; the list filter makes a list", other.type_name())),
    }
    Ok(())
}

fn sequence(text: &mut String, marks: [&str; 2], items: &[Value], meter: &Meter) -> Result<()> {
    text.push_str(marks[0]);
    for (index, item) in items.iter().enumerate() {
        text.push_str(if index > 0 { ", " } else { "" });
        repr(text, item, meter)?;
    }
    text.push_str(marks[1]);
    Ok(())
}

/// A string as a Python literal.
fn quote(text: &mut String, content: &str, meter: &Meter) -> Result<()> {
    meter.charge(content.len(), if content.is_ascii() { CHARACTER } else { LOOKUP })?;
    let mark = if content.contains('\'') && !content.contains('"') { '"' } else { '\'' };
    text.push(mark);
    for character in content.chars() {
        match character {
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            _ if character == mark => text.extend(['\\', mark]),
            ' '..='~' => text.push(character),
            _ if is_printable(character) => text.push(character),
            _ => {
                let code = character as u32;
                let escaped = match code {
                    0..=0xff => write!(text, "\\x{code:02x}"),
                    0x100..=0xffff => write!(text, "\\u{code:04x}"),
                    _ => write!(text, "\\U{code:08x}"),
                };
                escaped.expect("a string takes any text");
            }
        }
    }
    text.push(mark);
    Ok(())
}

/// Python's `isprintable`: no control, format, separator (but the space), private or unassigned
/// character.
pub(super) fn is_printable(character: char) -> bool {
    if character.is_ascii() {
        return !character.is_ascii_control();
    }
    // Inside a string, Rust escapes exactly the characters that are not printable.
    let mut bytes = *b"a\0\0\0\0";
    let length = character.encode_utf8(&mut bytes[1..]).len();
    std::str::from_utf8(&bytes[..=length]).is_ok_and(|text| text.escape_debug().count() == 2)
}
