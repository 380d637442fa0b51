//! An interpreter for chat templates: the part of Jinja2 that templates use, with Python's values.
//! A template is an untrusted program, so everything it does is bounded: the size and nesting of
//! the source before it runs, the nesting of calls and values, and the work, counted by the bytes
//! touched. The count is a function of template and conversation alone, so a template refused on
//! one machine is refused on all.

mod arguments;
mod ast;
mod attributes;
mod calls;
mod checks;
mod filters;
mod format;
mod interpreter;
mod json;
mod lexer;
mod lists;
mod loops;
mod methods;
mod number;
mod operators;
mod parser;
mod print;
mod strings;
mod value;

pub(super) use interpreter::Interpreter;
pub(super) use number::integer;
pub(super) use parser::Program;
pub(super) use value::{Dict, Value};

use std::cell::Cell;

/// BOUND: levels of nesting in the source: parentheses, lists, signs, `not`, blocks.
const NESTING_MAX: usize = 100;
/// BOUND: height of an expression tree. A chain of operators is as high as it is long.
const HEIGHT_MAX: usize = 300;
/// BOUND: nesting of values. Rows have 128 levels at most.
const VALUE_DEPTH_MAX: usize = 160;
/// BOUND: expressions and blocks under evaluation at once. Each takes less than 2 KiB of the stack.
const CALL_DEPTH_MAX: usize = 600;
/// BOUND: text of one conversation.
pub(super) const RENDERED_BYTES_MAX: usize = 64 << 20;
/// BOUND: work that every template may do, in bytes touched. About a second.
const WORK_MAX: u64 = 1 << 30;
/// BOUND: further work for every byte of the conversation.
const WORK_PER_BYTE: u64 = 512;

/// Work of one expression, statement or call.
const STEP: usize = 64;
/// Work of creating one value: a separate allocation.
const PIECE: usize = 192;
/// Work of looking up one character in the Unicode tables.
const LOOKUP: usize = 60;
/// Work of reading or copying one item of a list or dict.
const ITEM: usize = 32;
/// Work of copying one byte unchanged. Text that grows by a piece per message is copied repeatedly.
const COPY: usize = 1;
/// Work of comparing, searching or filling in one byte.
const BYTE: usize = 4;
/// Work of decoding, converting or escaping one byte.
const CHARACTER: usize = 10;

/// Why a template failed to parse or to finish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// An error in Jinja2 too; the line is that of the source, 0 if there is none.
    Error { line: usize, why: String },
    /// A limit of this program was exceeded.
    Limit(String),
    /// `raise_exception` with its message.
    Raised(String),
}

type Result<T> = std::result::Result<T, Fault>;

/// An error of the template. The interpreter adds the line.
fn fail<T>(why: impl Into<String>) -> Result<T> {
    Err(Fault::Error { line: 0, why: why.into() })
}

fn limit<T>(why: impl Into<String>) -> Result<T> {
    Err(Fault::Limit(why.into()))
}

/// The remaining work.
#[derive(Debug)]
struct Meter {
    budget: u64,
    left: Cell<u64>,
}

impl Meter {
    fn new(conversation_bytes: usize) -> Self {
        let budget = WORK_MAX.saturating_add(WORK_PER_BYTE.saturating_mul(conversation_bytes as u64));
        Self { budget, left: Cell::new(budget) }
    }

    /// Charges `count` pieces of `cost` each. Called before doing the work and before allocating
    /// its memory.
    fn charge(&self, count: usize, cost: usize) -> Result<()> {
        let work = (count as u64).saturating_mul(cost as u64);
        match self.left.get().checked_sub(work) {
            Some(left) => {
                self.left.set(left);
                Ok(())
            }
            None => limit(format!("it does not end within {} bytes of work", self.budget)),
        }
    }
}
