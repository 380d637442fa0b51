//! Runs a program: statements, expressions, scopes. Scopes, namespaces and macros are stored in
//! tables and refer to each other by index, so there are no cycles to leak and no long chains to
//! drop.

use super::arguments::Arguments;
use super::ast::{Body, CallArguments, Command, Expression, ExpressionKind, Macro, NameId, Target};
use super::loops::Looping;
use super::parser::Program;
use super::value::{Dict, Value};
use super::{CALL_DEPTH_MAX, COPY, Fault, ITEM, Meter, RENDERED_BYTES_MAX, Result, STEP, fail, limit};
use super::{number, operators, print};
use crate::data::date::Date;
use crate::data::generation::MARKS;
use std::rc::Rc;
use std::sync::Arc;

#[derive(Debug, Default)]
pub(super) struct Scope<'p> {
    pub(super) parent: Option<usize>,
    variables: Vec<(NameId, Value)>,
    /// A macro or a loop value refers to it: it is kept until the end.
    captured: bool,
    pub(super) looping: Option<Looping<'p>>,
}

/// How a body ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Flow {
    Next,
    Break,
    Continue,
}

/// `cycler` and `joiner`.
#[derive(Debug)]
pub(super) enum Counter {
    Cycler(Rc<[Value]>, usize),
    Joiner(Arc<str>, bool),
}

pub(in crate::data) struct Interpreter<'p> {
    pub(super) program: &'p Program,
    pub(super) meter: Meter,
    pub(super) date: Date,
    pub(super) scopes: Vec<Scope<'p>>,
    pub(super) scope: usize,
    pub(super) namespaces: Vec<Vec<(Arc<str>, Value)>>,
    pub(super) macros: Vec<(usize, &'p Macro)>,
    pub(super) counters: Vec<Counter>,
    pub(super) loop_name: Option<NameId>,
    out: String,
    depth: usize,
}

impl<'p> Interpreter<'p> {
    /// `bytes` is the size of the conversation, which the work limit scales with.
    pub(in crate::data) fn new(program: &'p Program, date: Date, bytes: usize) -> Self {
        let loop_name = program.names.iter().position(|name| name.as_ref() == "loop").map(|at| at as NameId);
        Self {
            program,
            meter: Meter::new(bytes),
            date,
            scopes: vec![Scope::default()],
            scope: 0,
            namespaces: Vec::new(),
            macros: Vec::new(),
            counters: Vec::new(),
            loop_name,
            out: String::new(),
            depth: 0,
        }
    }

    /// Defines a template variable. One that the template never names is dropped.
    pub(in crate::data) fn define(&mut self, name: &str, value: Value) {
        if let Some(id) = self.name_id(name) {
            self.assign_name(id, value);
        }
    }

    /// Runs the template and returns its output.
    pub(in crate::data) fn run(mut self) -> Result<String> {
        let program = self.program;
        match self.body(&program.body)? {
            Flow::Next => Ok(self.out),
            _ => fail("'break' or 'continue' outside of a loop"),
        }
    }

    pub(super) fn name_id(&self, name: &str) -> Option<NameId> {
        self.program.names.iter().position(|known| known.as_ref() == name).map(|at| at as NameId)
    }

    pub(super) fn push_scope(&mut self, parent: usize) -> usize {
        self.scopes.push(Scope { parent: Some(parent), ..Scope::default() });
        self.scope = self.scopes.len() - 1;
        self.scope
    }

    /// Leaves a scope for another.
    pub(super) fn pop_scope(&mut self, scope: usize, back: usize) {
        if scope + 1 == self.scopes.len() && !self.scopes[scope].captured {
            self.scopes.pop();
        }
        self.scope = back;
    }

    /// Keeps a scope and its ancestors.
    pub(super) fn capture_scope(&mut self, scope: usize) {
        let mut next = Some(scope);
        while let Some(at) = next.filter(|at| !self.scopes[*at].captured) {
            self.scopes[at].captured = true;
            next = self.scopes[at].parent;
        }
    }

    pub(super) fn assign_name(&mut self, id: NameId, value: Value) {
        let variables = &mut self.scopes[self.scope].variables;
        match variables.iter_mut().find(|(name, _)| *name == id) {
            Some((_, place)) => *place = value,
            None => variables.push((id, value)),
        }
    }

    fn find(&self, id: NameId) -> Option<&Value> {
        let mut next = Some(self.scope);
        while let Some(at) = next {
            let scope = &self.scopes[at];
            if let Some((_, value)) = scope.variables.iter().find(|(name, _)| *name == id) {
                return Some(value);
            }
            next = scope.parent;
        }
        None
    }

    fn name_value(&self, id: NameId) -> Value {
        if let Some(value) = self.find(id) {
            return value.clone();
        }
        let name = &self.program.names[id as usize];
        match super::calls::FUNCTIONS.iter().find(|function| **function == name.as_ref()) {
            Some(function) => Value::Function(function),
            None => Value::undefined(format!("'{}' is undefined", name.escape_debug())),
        }
    }

    pub(super) fn assign(&mut self, target: &Target, value: Value) -> Result<()> {
        match target {
            Target::Name(id) => self.assign_name(*id, value),
            Target::Attribute(id, attribute) => {
                let Value::Namespace(index) = self.name_value(*id) else {
                    return fail("cannot assign attribute on non-namespace object");
                };
                self.set_in_namespace(index, attribute, value)?;
            }
            Target::Tuple(targets) => {
                let values = value.items(&self.meter)?;
                if values.len() != targets.len() {
                    return fail(format!("{} values to unpack, {} expected", values.len(), targets.len()));
                }
                for (target, value) in targets.iter().zip(values) {
                    self.assign(target, value)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn set_in_namespace(&mut self, index: usize, name: &Arc<str>, value: Value) -> Result<()> {
        if name.starts_with('_') {
            return fail(format!("a namespace cannot hold '{}': the name begins with _", name.escape_debug()));
        }
        let attributes = &mut self.namespaces[index];
        self.meter.charge(attributes.len(), ITEM)?;
        match attributes.iter_mut().find(|(known, _)| known == name) {
            Some((_, place)) => *place = value,
            None => attributes.push((Arc::clone(name), value)),
        }
        Ok(())
    }

    fn deeper(&mut self) -> Result<()> {
        self.depth += 1;
        if self.depth > CALL_DEPTH_MAX {
            return limit(format!("its calls are nested too deeply: {CALL_DEPTH_MAX} levels at most"));
        }
        self.meter.charge(1, STEP)
    }

    fn write(&mut self, text: &str) -> Result<()> {
        self.meter.charge(text.len(), COPY)?;
        if text.len() > RENDERED_BYTES_MAX - self.out.len() {
            return limit(format!("it writes more than {RENDERED_BYTES_MAX} bytes"));
        }
        self.out.push_str(text);
        Ok(())
    }

    /// The output of a body run in its own scope.
    pub(super) fn captured(&mut self, parent: usize, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<String> {
        let (back, outer) = (self.scope, std::mem::take(&mut self.out));
        let scope = self.push_scope(parent);
        work(self)?;
        self.pop_scope(scope, back);
        Ok(std::mem::replace(&mut self.out, outer))
    }

    fn captured_body(&mut self, body: &'p Body) -> Result<String> {
        self.captured(self.scope, |interpreter| interpreter.whole_body(body))
    }

    /// Runs a body that no `break` may leave.
    pub(super) fn whole_body(&mut self, body: &'p Body) -> Result<()> {
        match self.body(body)? {
            Flow::Next => Ok(()),
            _ => fail("'break' or 'continue' outside of a loop"),
        }
    }

    pub(super) fn body(&mut self, body: &'p Body) -> Result<Flow> {
        self.deeper()?;
        for statement in body {
            self.meter.charge(1, STEP)?;
            let flow = self.command(&statement.kind).map_err(|fault| match fault {
                Fault::Error { line: 0, why } => Fault::Error { line: statement.line, why },
                other => other,
            })?;
            if flow != Flow::Next {
                self.depth -= 1;
                return Ok(flow);
            }
        }
        self.depth -= 1;
        Ok(Flow::Next)
    }

    fn command(&mut self, command: &'p Command) -> Result<Flow> {
        match command {
            Command::Data(text) => self.write(text)?,
            Command::Print(value) => {
                let value = self.evaluate(value)?;
                let text = print::text(&value, &self.meter)?;
                self.write(&text)?;
            }
            Command::If { branches, otherwise } => {
                for (test, body) in branches {
                    if self.evaluate(test)?.truth() {
                        return self.body(body);
                    }
                }
                return self.body(otherwise);
            }
            Command::For(statement) => {
                let items = self.evaluate(&statement.items)?;
                self.run_loop(statement, &items, 0)?;
            }
            Command::Set(target, value) => {
                let value = self.evaluate(value)?;
                self.assign(target, value)?;
            }
            Command::SetBlock(target, filter, body) => {
                let text = Value::text(&self.captured_body(body)?);
                let value = match filter {
                    Some(filter) => self.filter_over(filter, text)?,
                    None => text,
                };
                self.assign(target, value)?;
            }
            Command::With(values, body) => return self.with(values, body),
            Command::Macro(name, definition) => {
                self.meter.charge(1, STEP)?;
                self.capture_scope(self.scope);
                self.macros.push((self.scope, definition));
                self.assign_name(*name, Value::Macro(self.macros.len() - 1));
            }
            Command::CallBlock { call, block } => self.call_block(call, block)?,
            Command::FilterBlock(filter, body) => {
                let text = Value::text(&self.captured_body(body)?);
                let value = self.filter_over(filter, text)?;
                let text = print::text(&value, &self.meter)?;
                self.write(&text)?;
            }
            Command::Generation(body) => {
                let text = self.captured_body(body)?;
                self.write(MARKS[0].encode_utf8(&mut [0; 4]))?;
                self.write(&text)?;
                self.write(MARKS[1].encode_utf8(&mut [0; 4]))?;
            }
            Command::Break => return Ok(Flow::Break),
            Command::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn with(&mut self, values: &'p [(Target, Expression)], body: &'p Body) -> Result<Flow> {
        let mut evaluated = Vec::new();
        for (target, value) in values {
            evaluated.push((target, self.evaluate(value)?));
        }
        let back = self.scope;
        let scope = self.push_scope(back);
        for (target, value) in evaluated {
            self.assign(target, value)?;
        }
        let flow = self.body(body)?;
        self.pop_scope(scope, back);
        Ok(flow)
    }

    fn call_block(&mut self, call: &'p Expression, block: &'p Macro) -> Result<()> {
        let ExpressionKind::Call(callee, arguments) = &call.kind else { return fail("expected call") };
        self.capture_scope(self.scope);
        self.macros.push((self.scope, block));
        let caller = Value::Macro(self.macros.len() - 1);
        let callee = self.base(callee)?;
        let mut arguments = self.arguments(arguments)?;
        arguments.named.push((Arc::from("caller"), caller));
        let value = self.call(&callee, &arguments)?;
        let text = print::text(&value, &self.meter)?;
        self.write(&text)
    }

    /// Applies a block's filter to the text of the block.
    fn filter_over(&mut self, filter: &'p Expression, text: Value) -> Result<Value> {
        self.deeper()?;
        let ExpressionKind::Filter(inner, name, arguments) = &filter.kind else { return fail("expected a filter") };
        let value = match inner {
            Some(inner) => self.filter_over(inner, text)?,
            None => text,
        };
        let arguments = self.arguments(arguments)?;
        self.depth -= 1;
        self.filter(name, value, &arguments)
    }

    pub(super) fn arguments(&mut self, given: &'p CallArguments) -> Result<Arguments> {
        let mut arguments = Arguments::default();
        for value in &given.positional {
            let value = self.evaluate(value)?;
            arguments.positional.push(value);
        }
        for (name, value) in &given.named {
            let value = self.evaluate(value)?;
            arguments.named.push((Arc::clone(name), value));
        }
        if let Some(more) = &given.more {
            let more = self.evaluate(more)?;
            arguments.positional.extend(more.items(&self.meter)?);
        }
        if let Some(more) = &given.more_named {
            let Value::Dict(dict) = self.evaluate(more)? else { return fail("argument after ** must be a mapping") };
            self.meter.charge(dict.entries.len(), ITEM)?;
            for (key, value) in &dict.entries {
                let Value::Text(name) = key else { return fail("keywords must be strings") };
                arguments.named.push((Arc::clone(name), value.clone()));
            }
        }
        Ok(arguments)
    }

    /// A value that is only indexed or called: a loop used this way need not outlive its block.
    fn base(&mut self, expression: &'p Expression) -> Result<Value> {
        match &expression.kind {
            ExpressionKind::Name(id) => Ok(self.name_value(*id)),
            _ => self.evaluate(expression),
        }
    }

    pub(super) fn evaluate(&mut self, expression: &'p Expression) -> Result<Value> {
        self.deeper()?;
        let value = self.evaluate_kind(&expression.kind)?;
        self.depth -= 1;
        Ok(value)
    }

    fn evaluate_kind(&mut self, kind: &'p ExpressionKind) -> Result<Value> {
        match kind {
            ExpressionKind::Literal(literal) => Ok(literal.value()),
            ExpressionKind::Name(id) => {
                let value = self.name_value(*id);
                if let Value::Loop(scope) = &value {
                    self.capture_scope(*scope);
                }
                Ok(value)
            }
            ExpressionKind::List(items) => Value::list(self.all(items)?),
            ExpressionKind::Tuple(items) => Value::tuple(self.all(items)?),
            ExpressionKind::Dict(entries) => self.dict(entries),
            ExpressionKind::Negative(value) => number::negate(&self.evaluate(value)?),
            ExpressionKind::Positive(value) => operators::positive(&self.evaluate(value)?),
            ExpressionKind::Not(value) => Ok(Value::Bool(!self.evaluate(value)?.truth())),
            ExpressionKind::And(left, right) => {
                let left = self.evaluate(left)?;
                if left.truth() { self.evaluate(right) } else { Ok(left) }
            }
            ExpressionKind::Or(left, right) => {
                let left = self.evaluate(left)?;
                if left.truth() { Ok(left) } else { self.evaluate(right) }
            }
            ExpressionKind::Binary(operator, left, right) => {
                let left = self.evaluate(left)?;
                let right = self.evaluate(right)?;
                operators::binary(operator, &left, &right, &self.meter)
            }
            ExpressionKind::Compare(left, others) => self.compare(left, others),
            ExpressionKind::Concat(items) => self.concat(items),
            ExpressionKind::Condition { test, yes, no } => match (self.evaluate(test)?.truth(), no) {
                (true, _) => self.evaluate(yes),
                (false, Some(no)) => self.evaluate(no),
                (false, None) => Ok(Value::undefined("an inline if was false, and it has no else")),
            },
            ExpressionKind::Attribute(value, name) => {
                let value = self.base(value)?;
                self.attribute(&value, name)
            }
            ExpressionKind::Item(value, key) => {
                let value = self.evaluate(value)?;
                let key = self.evaluate(key)?;
                self.item(&value, &key)
            }
            ExpressionKind::Slice(value, bounds) => self.slice(value, bounds),
            ExpressionKind::Call(callee, arguments) => {
                let callee = self.base(callee)?;
                let arguments = self.arguments(arguments)?;
                self.call(&callee, &arguments)
            }
            ExpressionKind::Filter(value, name, arguments) => {
                let Some(value) = value else { return fail("a filter without a value") };
                let value = self.evaluate(value)?;
                let arguments = self.arguments(arguments)?;
                self.filter(name, value, &arguments)
            }
            ExpressionKind::Test(value, name, arguments) => {
                let value = self.evaluate(value)?;
                let arguments = self.arguments(arguments)?;
                Ok(Value::Bool(self.check(name, &value, &arguments)?))
            }
        }
    }

    fn all(&mut self, items: &'p [Expression]) -> Result<Vec<Value>> {
        self.meter.charge(items.len(), ITEM)?;
        items.iter().map(|item| self.evaluate(item)).collect()
    }

    fn dict(&mut self, entries: &'p [(Expression, Expression)]) -> Result<Value> {
        let mut dict = Dict::default();
        for (key, value) in entries {
            let key = self.evaluate(key)?;
            let value = self.evaluate(value)?;
            dict.insert(&self.meter, key, value)?;
        }
        Ok(Value::dict(dict))
    }

    fn compare(&mut self, left: &'p Expression, others: &'p [(&'static str, Expression)]) -> Result<Value> {
        let mut left = self.evaluate(left)?;
        for (operator, right) in others {
            let right = self.evaluate(right)?;
            if !operators::compare(operator, &left, &right, &self.meter)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    fn concat(&mut self, items: &'p [Expression]) -> Result<Value> {
        let mut text = String::new();
        for item in self.all(items)? {
            let piece = print::text(&item, &self.meter)?;
            self.meter.charge(piece.len(), COPY)?;
            text.push_str(&piece);
        }
        Ok(Value::text(&text))
    }

    fn slice(&mut self, value: &'p Expression, bounds: &'p [Option<Box<Expression>>; 3]) -> Result<Value> {
        let value = self.evaluate(value)?;
        let mut numbers = [None; 3];
        for (number, bound) in numbers.iter_mut().zip(bounds) {
            let Some(bound) = bound else { continue };
            *number = match self.evaluate(bound)? {
                Value::None => None,
                bound => match bound.as_int() {
                    Some(number) => Some(number),
                    None => return fail("slice indices must be integers or None"),
                },
            };
        }
        operators::slice(&value, numbers, &self.meter)
    }
}
