//! The tests behind `is`.

use super::arguments::Arguments;
use super::interpreter::Interpreter;
use super::value::Value;
use super::{CHARACTER, Result, fail, filters, number, operators, print, strings};
use std::rc::Rc;
use std::sync::Arc;

const NAMES: [&str; 38] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
];

impl Interpreter<'_> {
    pub(super) fn check(&mut self, name: &str, value: &Value, given: &Arguments) -> Result<bool> {
        self.meter.charge(1, super::STEP)?;
        let comparison = match name {
            "eq" | "==" | "equalto" => Some("=="),
            "ne" | "!=" => Some("!="),
            "lt" | "<" | "lessthan" => Some("<"),
            "le" | "<=" => Some("<="),
            "gt" | ">" | "greaterthan" => Some(">"),
            "ge" | ">=" => Some(">="),
            "in" => Some("in"),
            _ => None,
        };
        if let Some(operator) = comparison {
            let [other] = given.bind(name, ["other"], 1)?;
            return operators::compare(operator, value, &other.unwrap_or(Value::None), &self.meter);
        }
        match name {
            "divisibleby" => {
                let [divisor] = given.bind(name, ["num"], 1)?;
                self.has_rest(value, &divisor.unwrap_or(Value::None), 0)
            }
            "sameas" => {
                let [other] = given.bind(name, ["other"], 1)?;
                Ok(same(value, &other.unwrap_or(Value::None)))
            }
            _ => {
                given.none(name)?;
                self.plain_check(name, value)
            }
        }
    }

    fn has_rest(&self, value: &Value, divisor: &Value, rest: i128) -> Result<bool> {
        match number::calculate("%", value, divisor)? {
            Some(found) => found.equals(&Value::Int(rest), &self.meter),
            None => fail(format!("'{}' is not a number", value.type_name())),
        }
    }

    fn plain_check(&mut self, name: &str, value: &Value) -> Result<bool> {
        Ok(match name {
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "integer" => matches!(value, Value::Int(_) | Value::Big(_)),
            "float" => matches!(value, Value::Float(_)),
            "number" => matches!(value, Value::Int(_) | Value::Big(_) | Value::Float(_) | Value::Bool(_)),
            "string" => value.as_text().is_some(),
            "mapping" => matches!(value, Value::Dict(_)),
            "iterable" => value.is_iterable(),
            // Anything with a length and an index operator, including an undefined value.
            "sequence" => value.length().is_some() && !matches!(value, Value::View(..)),
            "callable" => value.is_callable(),
            "escaped" => matches!(value, Value::Markup(_)),
            "odd" | "even" => self.has_rest(value, &Value::Int(2), i128::from(name == "odd"))?,
            "lower" | "upper" => {
                let text = print::text(value, &self.meter)?;
                self.meter.charge(text.len(), CHARACTER)?;
                if name == "lower" {
                    strings::has_case(&text, char::is_lowercase, char::is_uppercase)
                } else {
                    strings::has_case(&text, char::is_uppercase, char::is_lowercase)
                }
            }
            "filter" => value.as_text().is_some_and(|name| filters::NAMES.contains(&name)),
            "test" => value.as_text().is_some_and(|name| NAMES.contains(&name) || name == "upper"),
            _ => return fail(format!("no test named '{}'", name.escape_debug())),
        })
    }
}

/// Python's `is`.
fn same(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::None, Value::None) => true,
        (Value::Bool(left), Value::Bool(right)) => left == right,
        (Value::Int(left), Value::Int(right)) => left == right,
        (Value::Text(left), Value::Text(right)) => Arc::ptr_eq(left, right),
        (Value::List(left), Value::List(right)) | (Value::Tuple(left), Value::Tuple(right)) => Rc::ptr_eq(left, right),
        (Value::Dict(left), Value::Dict(right)) => Rc::ptr_eq(left, right),
        (Value::Namespace(left), Value::Namespace(right)) => left == right,
        _ => false,
    }
}
