//! Operators between values of any type: arithmetic, repetition, membership, slices.

use super::value::{Range, Value};
use super::{BYTE, CHARACTER, COPY, ITEM, Meter, Result, fail, format, number, strings};
use std::cmp::Ordering;
use std::sync::Arc;

pub(super) fn positive(value: &Value) -> Result<Value> {
    match value {
        Value::Bool(flag) => Ok(Value::Int(i128::from(*flag))),
        Value::Int(_) | Value::Big(_) | Value::Float(_) => Ok(value.clone()),
        Value::Undefined(why) => fail(why.as_ref()),
        other => fail(format!("bad operand type for unary +: '{}'", other.type_name())),
    }
}

pub(super) fn binary(operator: &str, left: &Value, right: &Value, meter: &Meter) -> Result<Value> {
    // Text before a percent sign is a format string, and accepts any right operand.
    if let (Value::Text(text), "%") = (left, operator) {
        return format::percent(text, right, meter);
    }
    if let Value::Undefined(why) = left {
        return fail(why.as_ref());
    }
    if let Value::Undefined(why) = right {
        return fail(why.as_ref());
    }
    if matches!(left, Value::Markup(_)) || matches!(right, Value::Markup(_)) {
        if let ("+", Some(_), Some(_)) = (operator, left.as_text(), right.as_text()) {
            return add_marked(left, right, meter);
        }
        return fail(format!("'{operator}' on text that safe or escape has marked is not supported"));
    }
    if let Some(value) = number::calculate(operator, left, right)? {
        return Ok(value);
    }
    match (operator, left, right) {
        ("+", Value::Text(left), Value::Text(right)) => {
            meter.charge(left.len() + right.len(), COPY)?;
            Ok(Value::text(&[left.as_ref(), right.as_ref()].concat()))
        }
        ("+", Value::List(left), Value::List(right)) => {
            meter.charge(left.items.len() + right.items.len(), ITEM)?;
            Value::list([left.items.as_slice(), right.items.as_slice()].concat())
        }
        ("+", Value::Tuple(left), Value::Tuple(right)) => {
            meter.charge(left.items.len() + right.items.len(), ITEM)?;
            Value::tuple([left.items.as_slice(), right.items.as_slice()].concat())
        }
        ("*", other, count) if count.as_int().is_some() => repeat(other, count, left, right, meter),
        ("*", count, other) if count.as_int().is_some() => repeat(other, count, left, right, meter),
        _ => unsupported(operator, left, right),
    }
}

/// Marked text stays marked, and what is added to it is escaped.
fn add_marked(left: &Value, right: &Value, meter: &Meter) -> Result<Value> {
    let mut sum = String::new();
    for side in [left, right] {
        let text = side.as_text().unwrap_or_default();
        meter.charge(text.len(), 2 * CHARACTER)?;
        if matches!(side, Value::Markup(_)) {
            sum.push_str(text);
        } else {
            sum.push_str(&strings::escape(text));
        }
    }
    Ok(Value::Markup(Arc::from(sum)))
}

fn unsupported(operator: &str, left: &Value, right: &Value) -> Result<Value> {
    fail(format!("unsupported operand type(s) for {operator}: '{}' and '{}'", left.type_name(), right.type_name()))
}

fn repeat(value: &Value, count: &Value, left: &Value, right: &Value, meter: &Meter) -> Result<Value> {
    let count = count.as_int().and_then(|count| usize::try_from(count.max(0)).ok()).unwrap_or(usize::MAX);
    match value {
        Value::Text(text) => {
            meter.charge(text.len().saturating_mul(count), 2 * BYTE)?;
            Ok(Value::text(&text.repeat(if text.is_empty() { 0 } else { count })))
        }
        Value::List(list) | Value::Tuple(list) => {
            meter.charge(list.items.len().saturating_mul(count), ITEM)?;
            let count = if list.items.is_empty() { 0 } else { count };
            let items = std::iter::repeat_n(&list.items, count).flatten().cloned().collect();
            if matches!(value, Value::List(_)) { Value::list(items) } else { Value::tuple(items) }
        }
        _ => unsupported("*", left, right),
    }
}

pub(super) fn compare(operator: &str, left: &Value, right: &Value, meter: &Meter) -> Result<bool> {
    let order =
        |wanted: fn(Ordering) -> bool| left.order(right, operator, meter).map(|order| order.is_some_and(wanted));
    match operator {
        "==" => left.equals(right, meter),
        "!=" => left.equals(right, meter).map(|equal| !equal),
        "<" => order(Ordering::is_lt),
        "<=" => order(Ordering::is_le),
        ">" => order(Ordering::is_gt),
        ">=" => order(Ordering::is_ge),
        "in" => contains(right, left, meter),
        _ => contains(right, left, meter).map(|found| !found),
    }
}

pub(super) fn contains(container: &Value, value: &Value, meter: &Meter) -> Result<bool> {
    match container {
        Value::Text(text) | Value::Markup(text) => match value {
            Value::Undefined(why) => fail(why.as_ref()),
            value => match value.as_text() {
                Some(part) => {
                    meter.charge(text.len() + part.len(), BYTE)?;
                    Ok(text.contains(part))
                }
                None => fail(format!("'in <string>' requires string as left operand, not {}", value.type_name())),
            },
        },
        Value::Dict(dict) | Value::View(super::value::View::Keys, dict) => Ok(dict.get(meter, value)?.is_some()),
        Value::List(list) | Value::Tuple(list) => {
            for item in &list.items {
                if item.equals(value, meter)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        Value::Iterator(once) => {
            while let Some(item) = once.next() {
                if item.equals(value, meter)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        other if other.is_iterable() => {
            for item in other.items(meter)? {
                if item.equals(value, meter)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        other => fail(format!("argument of type '{}' is not iterable", other.type_name())),
    }
}

/// The positions a slice selects: first, step and count.
fn picked(bounds: [Option<i128>; 3], length: usize) -> Result<(usize, i128, usize)> {
    let length = length as i128;
    let step = bounds[2].unwrap_or(1);
    if step == 0 {
        return fail("slice step cannot be zero");
    }
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let clamp = |bound: Option<i128>, default: i128| {
        bound.map_or(default, |at| if at < 0 { at.saturating_add(length) } else { at }.clamp(lowest, highest))
    };
    let start = clamp(bounds[0], if step > 0 { lowest } else { highest });
    let stop = clamp(bounds[1], if step > 0 { highest } else { lowest });
    let distance = if step > 0 { stop - start } else { start - stop };
    let size = step.checked_abs().unwrap_or(i128::MAX);
    let count = if distance <= 0 { 0 } else { (distance - 1) / size + 1 };
    Ok((usize::try_from(start.max(0)).unwrap_or(0), step, usize::try_from(count).unwrap_or(0)))
}

pub(super) fn slice(value: &Value, bounds: [Option<i128>; 3], meter: &Meter) -> Result<Value> {
    match value {
        Value::Undefined(why) => fail(why.as_ref()),
        Value::Text(text) => {
            meter.charge(text.len(), CHARACTER)?;
            let (start, step, count) = picked(bounds, text.chars().count())?;
            if step == 1 {
                return Ok(Value::text(&text.chars().skip(start).take(count).collect::<String>()));
            }
            meter.charge(text.len(), CHARACTER)?;
            let characters: Vec<char> = text.chars().collect();
            let at = |index: usize| (start as i128 + step * index as i128) as usize;
            Ok(Value::text(&(0..count).map(|index| characters[at(index)]).collect::<String>()))
        }
        Value::List(list) | Value::Tuple(list) => {
            let (start, step, count) = picked(bounds, list.items.len())?;
            meter.charge(count, ITEM)?;
            let at = |index: usize| (start as i128 + step * index as i128) as usize;
            let items = (0..count).map(|index| list.items[at(index)].clone()).collect();
            if matches!(value, Value::List(_)) { Value::list(items) } else { Value::tuple(items) }
        }
        Value::Range(range) => {
            let (start, step, length) = picked(bounds, range.length)?;
            let Some(step) = range.step.checked_mul(step) else { return fail("a slice of too large a step") };
            Ok(Value::Range(Range {
                start: range.start.saturating_add(range.step.saturating_mul(start as i128)),
                step,
                length,
            }))
        }
        other => fail(format!("'{}' object is not subscriptable", other.type_name())),
    }
}
