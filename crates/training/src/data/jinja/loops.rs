//! `for`: items, the condition that filters them, the `loop` variable, recursion. Items are
//! filtered one at a time, because a condition may read what the body has just set.

use super::arguments::Arguments;
use super::ast::Loop;
use super::interpreter::{Flow, Interpreter};
use super::value::Value;
use super::{ITEM, Result, STEP, fail};
use std::collections::VecDeque;

#[derive(Debug)]
pub(super) struct Looping<'p> {
    statement: &'p Loop,
    depth: usize,
    /// Number of items started.
    index: usize,
    /// Items not yet tested by the condition, the next one last.
    source: Vec<Value>,
    /// Items that passed the condition but have not started.
    ready: VecDeque<Value>,
    previous: Option<Value>,
    current: Option<Value>,
    last_seen: Option<Vec<Value>>,
}

impl<'p> Interpreter<'p> {
    pub(super) fn run_loop(&mut self, statement: &'p Loop, items: &Value, depth: usize) -> Result<()> {
        let mut items = match items {
            Value::Loop(_) => return fail("a loop over a loop is not supported"),
            items => items.items(&self.meter)?,
        };
        let back = self.scope;
        let scope = self.push_scope(back);
        let (mut source, mut ready) = (Vec::new(), VecDeque::new());
        if statement.condition.is_some() {
            items.reverse();
            source = items;
        } else {
            ready = VecDeque::from(items);
        }
        let state =
            Looping { statement, depth, index: 0, source, ready, previous: None, current: None, last_seen: None };
        self.scopes[scope].looping = Some(state);
        if let Some(name) = self.loop_name {
            self.assign_name(name, Value::Loop(scope));
        }
        let begun = self.iterate(statement, scope)?;
        self.pop_scope(scope, back);
        if !begun {
            let scope = self.push_scope(back);
            let flow = self.body(&statement.otherwise)?;
            self.pop_scope(scope, back);
            if flow != Flow::Next {
                return fail("'break' or 'continue' outside of a loop");
            }
        }
        Ok(())
    }

    /// Returns whether there was any item.
    fn iterate(&mut self, statement: &'p Loop, scope: usize) -> Result<bool> {
        let mut begun = false;
        while self.pick(scope)? {
            let Some(state) = self.scopes[scope].looping.as_mut() else { break };
            let Some(item) = state.ready.pop_front() else { break };
            state.previous = state.current.replace(item.clone());
            state.index += 1;
            begun = true;
            self.meter.charge(1, STEP)?;
            let inner = self.push_scope(scope);
            self.assign(&statement.target, item)?;
            let flow = self.body(&statement.body)?;
            self.pop_scope(inner, scope);
            if flow == Flow::Break {
                break;
            }
        }
        Ok(begun)
    }

    /// Ensures that the next item is ready; false if there is none.
    fn pick(&mut self, scope: usize) -> Result<bool> {
        loop {
            let Some(state) = self.scopes[scope].looping.as_mut() else { return Ok(false) };
            if !state.ready.is_empty() {
                return Ok(true);
            }
            if !self.pick_one(scope)? {
                return Ok(false);
            }
        }
    }

    /// Tests one more item with the condition; false if there is none.
    fn pick_one(&mut self, scope: usize) -> Result<bool> {
        let Some(state) = self.scopes[scope].looping.as_mut() else { return Ok(false) };
        let statement = state.statement;
        let (Some(item), Some(condition)) = (state.source.pop(), &statement.condition) else { return Ok(false) };
        let back = self.scope;
        let outer = self.scopes[scope].parent.unwrap_or(0);
        let inner = self.push_scope(outer);
        self.assign(&statement.target, item.clone())?;
        let picked = self.evaluate(condition)?.truth();
        self.pop_scope(inner, back);
        if let Some(state) = self.scopes[scope].looping.as_mut().filter(|_| picked) {
            state.ready.push_back(item);
        }
        Ok(true)
    }

    pub(super) fn loop_attribute(&mut self, scope: usize, name: &str) -> Result<Value> {
        if matches!(name, "last" | "nextitem") {
            self.pick(scope)?;
        }
        if matches!(name, "length" | "revindex" | "revindex0") {
            while self.pick_one(scope)? {}
        }
        let Some(state) = self.scopes[scope].looping.as_ref() else { return fail("the loop is over") };
        let number = |number: usize| Value::Int(number as i128);
        let length = state.index + state.ready.len();
        Ok(match name {
            "index" => number(state.index),
            "index0" => number(state.index - 1),
            "length" => number(length),
            "revindex" => number(length - state.index + 1),
            "revindex0" => number(length - state.index),
            "first" => Value::Bool(state.index == 1),
            "last" => Value::Bool(state.ready.is_empty()),
            "depth" => number(state.depth + 1),
            "depth0" => number(state.depth),
            "previtem" => state.previous.clone().unwrap_or_else(|| Value::undefined("there is no previous item")),
            "nextitem" => state.ready.front().cloned().unwrap_or_else(|| Value::undefined("there is no next item")),
            "cycle" | "changed" => {
                self.capture_scope(scope);
                Value::Loop(scope).method(name)?
            }
            _ => Value::undefined(format!("'LoopContext object' has no attribute '{}'", name.escape_debug())),
        })
    }

    pub(super) fn loop_method(&mut self, scope: usize, name: &str, arguments: &Arguments) -> Result<Value> {
        let values = &arguments.positional;
        if !arguments.named.is_empty() {
            return fail(format!("loop.{name} takes no keyword arguments"));
        }
        self.meter.charge(values.len(), ITEM)?;
        let Some(state) = self.scopes[scope].looping.as_mut() else { return fail("the loop is over") };
        if name == "cycle" {
            return match values.len() {
                0 => fail("no items for cycling given"),
                length => Ok(values[(state.index - 1) % length].clone()),
            };
        }
        let before = state.last_seen.replace(values.clone());
        let same = match before {
            Some(before) => Value::list(before)?.equals(&Value::list(values.clone())?, &self.meter)?,
            None => false,
        };
        Ok(Value::Bool(!same))
    }

    /// `loop(items)` in a recursive loop: the same body for the items, one level deeper.
    pub(super) fn recurse(&mut self, scope: usize, arguments: &Arguments) -> Result<Value> {
        let [items] = arguments.bind("loop", ["iterable"], 1)?;
        let Some(state) = self.scopes[scope].looping.as_ref() else { return fail("the loop is over") };
        let (statement, depth) = (state.statement, state.depth + 1);
        if !statement.recursive {
            return fail("the loop must have the 'recursive' marker to be called recursively");
        }
        let outer = self.scopes[scope].parent.unwrap_or(0);
        let text =
            self.captured(outer, |interpreter| interpreter.run_loop(statement, &items.unwrap_or(Value::None), depth))?;
        Ok(Value::text(&text))
    }
}
