//! Arguments of a call, and their binding to parameters.

use super::value::Value;
use super::{Result, fail};
use std::sync::Arc;

#[derive(Clone, Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Arc<str>, Value)>,
}

impl Arguments {
    pub(super) fn one(value: Value) -> Self {
        Self { positional: vec![value], named: Vec::new() }
    }

    /// The arguments of a function in parameter order; the first `required` of them must be given.
    pub(super) fn bind<const N: usize>(
        &self,
        function: &str,
        parameters: [&str; N],
        required: usize,
    ) -> Result<[Option<Value>; N]> {
        let mut bound = [const { None }; N];
        if self.positional.len() > N {
            return fail(format!("{function} takes {N} arguments at most, {} are given", self.positional.len()));
        }
        for (place, value) in bound.iter_mut().zip(&self.positional) {
            *place = Some(value.clone());
        }
        for (name, value) in &self.named {
            let Some(at) = parameters.iter().position(|parameter| *parameter == name.as_ref()) else {
                return fail(format!("{function} has no argument '{}'", name.escape_debug()));
            };
            if bound[at].is_some() {
                return fail(format!("{function} got multiple values for argument '{name}'"));
            }
            bound[at] = Some(value.clone());
        }
        match bound[..required].iter().position(Option::is_none) {
            Some(missing) => fail(format!("{function} misses its argument '{}'", parameters[missing])),
            None => Ok(bound),
        }
    }

    /// Checks that no arguments are given.
    pub(super) fn none(&self, function: &str) -> Result<()> {
        self.bind::<0>(function, [], 0).map(drop)
    }
}

/// An integer argument, or `default` if missing.
pub(super) fn integer(function: &str, value: Option<&Value>, default: i128) -> Result<i128> {
    match value {
        None => Ok(default),
        Some(value) => match value.as_int() {
            Some(number) => Ok(number),
            None => fail(format!("{function}: '{}' object cannot be interpreted as an integer", value.type_name())),
        },
    }
}

/// A text argument.
pub(super) fn text<'a>(function: &str, value: &'a Value) -> Result<&'a str> {
    match value {
        Value::Undefined(why) => fail(why.as_ref()),
        value => match value.as_text() {
            Some(text) => Ok(text),
            None => fail(format!("{function}: a string is wanted, not '{}'", value.type_name())),
        },
    }
}

/// A flag, or `false` if missing.
pub(super) fn flag(value: Option<&Value>) -> bool {
    value.is_some_and(Value::truth)
}
