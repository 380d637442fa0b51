//! Callables: macros, methods, and the functions available to templates besides their variables.

use super::arguments::{self, Arguments};
use super::interpreter::{Counter, Interpreter};
use super::value::{Dict, Range, Value};
use super::{Fault, ITEM, Result, STEP, fail, print};
use std::rc::Rc;
use std::sync::Arc;

pub(super) const FUNCTIONS: [&str; 8] =
    ["range", "dict", "namespace", "cycler", "joiner", "raise_exception", "strftime_now", "lipsum"];
/// BOUND: length of a range, as in Jinja2's sandbox.
const RANGE_MAX: i128 = 100_000;

impl Interpreter<'_> {
    pub(super) fn call(&mut self, callee: &Value, arguments: &Arguments) -> Result<Value> {
        self.meter.charge(1 + arguments.positional.len() + arguments.named.len(), STEP)?;
        match callee {
            Value::Undefined(why) => fail(why.as_ref()),
            Value::Macro(index) => self.call_macro(*index, arguments),
            Value::Method(method) => self.call_method(&method.0, &method.1, arguments),
            Value::Function(name) => self.call_function(name, arguments),
            Value::Loop(scope) => self.recurse(*scope, arguments),
            Value::Counter(index) => self.call_joiner(*index, arguments),
            other => fail(format!("'{}' object is not callable", other.type_name())),
        }
    }

    fn call_macro(&mut self, index: usize, given: &Arguments) -> Result<Value> {
        let (scope, definition) = self.macros[index];
        let name = definition.name.as_str();
        let parameters = &definition.parameters;
        if given.positional.len() > parameters.len() && !definition.uses.varargs {
            return fail(format!("macro '{name}' takes not more than {} argument(s)", parameters.len()));
        }
        let mut values: Vec<Option<Value>> =
            given.positional.iter().take(parameters.len()).cloned().map(Some).collect();
        values.resize(parameters.len(), None);
        let mut more = Dict::default();
        let mut caller = None;
        for (keyword, value) in &given.named {
            let id = self.name_id(keyword);
            match parameters.iter().position(|(parameter, _)| Some(*parameter) == id) {
                Some(at) if values[at].is_none() => values[at] = Some(value.clone()),
                Some(_) => return fail(format!("macro '{name}' got multiple values for argument '{keyword}'")),
                None if keyword.as_ref() == "caller" && definition.uses.caller => caller = Some(value.clone()),
                None if definition.uses.kwargs => {
                    more.insert(&self.meter, Value::Text(Arc::clone(keyword)), value.clone())?;
                }
                None => return fail(format!("macro '{name}' takes no keyword argument '{}'", keyword.escape_debug())),
            }
        }
        let rest = Value::tuple(given.positional.iter().skip(parameters.len()).cloned().collect())?;
        let text = self.captured(scope, |interpreter| {
            if definition.uses.caller {
                interpreter.define("caller", caller.unwrap_or_else(|| Value::undefined("No caller defined")));
            }
            interpreter.define("varargs", rest);
            interpreter.define("kwargs", Value::dict(more));
            for ((parameter, default), value) in parameters.iter().zip(values) {
                let value = match (value, default) {
                    (Some(value), _) => value,
                    (None, Some(default)) => interpreter.evaluate(default)?,
                    (None, None) => Value::undefined("a parameter of the macro was not provided"),
                };
                interpreter.assign_name(*parameter, value);
            }
            interpreter.whole_body(&definition.body)
        })?;
        Ok(Value::text(&text))
    }

    fn call_function(&mut self, name: &str, arguments: &Arguments) -> Result<Value> {
        match name {
            "range" => range(arguments),
            "dict" => self.build_dict(name, arguments).map(Value::dict),
            "namespace" => {
                let dict = self.build_dict(name, arguments)?;
                self.namespaces.push(Vec::new());
                let index = self.namespaces.len() - 1;
                for (key, value) in &dict.entries {
                    let Value::Text(key) = key else { return fail("names of a namespace are strings") };
                    self.set_in_namespace(index, key, value.clone())?;
                }
                Ok(Value::Namespace(index))
            }
            "cycler" => {
                if arguments.positional.is_empty() || !arguments.named.is_empty() {
                    return fail("cycler: at least one item has to be provided");
                }
                self.counters.push(Counter::Cycler(Rc::from(arguments.positional.clone()), 0));
                Ok(Value::Counter(self.counters.len() - 1))
            }
            "joiner" => {
                let [separator] = arguments.bind(name, ["sep"], 0)?;
                let separator =
                    separator.map_or_else(|| Ok(Arc::from(", ")), |text| print::text(&text, &self.meter))?;
                self.counters.push(Counter::Joiner(separator, false));
                Ok(Value::Counter(self.counters.len() - 1))
            }
            "raise_exception" => {
                let [message] = arguments.bind(name, ["message"], 1)?;
                let message = print::text(&message.unwrap_or(Value::None), &self.meter)?;
                Err(Fault::Raised(message.to_string()))
            }
            "strftime_now" => {
                let [format] = arguments.bind(name, ["format"], 1)?;
                let format = format.unwrap_or(Value::None);
                let format = arguments::text(name, &format)?;
                self.meter.charge(format.len(), STEP)?;
                match self.date.strftime(format) {
                    Some(text) => Ok(Value::text(&text)),
                    None => fail(format!("strftime_now: unknown directive in `{}`", format.escape_debug())),
                }
            }
            _ => fail(format!("the function '{name}' is not supported in chat templates")),
        }
    }

    /// `dict(mapping or pairs, **more)`.
    fn build_dict(&mut self, name: &str, arguments: &Arguments) -> Result<Dict> {
        let mut dict = Dict::default();
        match arguments.positional.as_slice() {
            [] => {}
            [Value::Dict(from)] => {
                for (key, value) in &from.entries {
                    dict.insert(&self.meter, key.clone(), value.clone())?;
                }
            }
            [pairs] => {
                for pair in pairs.items(&self.meter)? {
                    let pair = pair.items(&self.meter)?;
                    let [key, value] = pair.as_slice() else { return fail(format!("{name}: pairs have two items")) };
                    dict.insert(&self.meter, key.clone(), value.clone())?;
                }
            }
            _ => return fail(format!("{name} takes one positional argument at most")),
        }
        for (key, value) in &arguments.named {
            dict.insert(&self.meter, Value::Text(Arc::clone(key)), value.clone())?;
        }
        Ok(dict)
    }

    fn call_joiner(&mut self, index: usize, arguments: &Arguments) -> Result<Value> {
        arguments.none("joiner")?;
        match &mut self.counters[index] {
            Counter::Joiner(separator, used) => {
                let text = if *used { Arc::clone(separator) } else { Arc::from("") };
                *used = true;
                Ok(Value::Text(text))
            }
            Counter::Cycler(..) => fail("'Cycler' object is not callable"),
        }
    }

    pub(super) fn cycler_attribute(&mut self, index: usize, name: &str) -> Result<Value> {
        match &self.counters[index] {
            Counter::Cycler(items, at) if name == "current" => Ok(items[*at].clone()),
            Counter::Cycler(..) if matches!(name, "next" | "reset") => Value::Counter(index).method(name),
            _ => Ok(Value::undefined(format!("there is no attribute '{}'", name.escape_debug()))),
        }
    }

    pub(super) fn cycler_method(&mut self, index: usize, name: &str, arguments: &Arguments) -> Result<Value> {
        arguments.none(name)?;
        self.meter.charge(1, ITEM)?;
        match &mut self.counters[index] {
            Counter::Cycler(items, at) if name == "next" => {
                let value = items[*at].clone();
                *at = (*at + 1) % items.len();
                Ok(value)
            }
            Counter::Cycler(_, at) => {
                *at = 0;
                Ok(Value::None)
            }
            Counter::Joiner(..) => fail("a joiner has no methods"),
        }
    }
}

fn range(arguments: &Arguments) -> Result<Value> {
    let bounds = arguments.bind("range", ["start", "stop", "step"], 1)?;
    let number = |at: usize, default: i128| arguments::integer("range", bounds[at].as_ref(), default);
    let (start, stop) = if bounds[1].is_some() { (number(0, 0)?, number(1, 0)?) } else { (0, number(0, 0)?) };
    let step = number(2, 1)?;
    if step == 0 {
        return fail("range() arg 3 must not be zero");
    }
    let length = match (stop.checked_sub(start), step.checked_abs()) {
        (Some(distance), Some(size)) if (distance > 0) == (step > 0) => {
            distance.checked_abs().map(|distance| (distance - 1) / size + 1)
        }
        (Some(_), Some(_)) => Some(0),
        _ => None,
    };
    match length.and_then(|length| usize::try_from(length.max(0)).ok()) {
        Some(length) if length as i128 <= RANGE_MAX => Ok(Value::Range(Range { start, step, length })),
        _ => super::limit(format!("a range of more than {RANGE_MAX} items")),
    }
}
