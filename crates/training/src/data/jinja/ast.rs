//! A parsed template. Every expression stores the height of its tree, and the parser refuses trees
//! that are too high, so that walking, evaluating and dropping them take a bounded stack.

use super::value::Value;
use super::{HEIGHT_MAX, Result, limit};
use std::sync::Arc;

/// Index into the program's table of names.
pub(super) type NameId = u32;

#[derive(Debug)]
pub(super) struct Expression {
    pub(super) kind: ExpressionKind,
    height: usize,
}

/// A literal. Values themselves are not shared between threads.
#[derive(Clone, Debug)]
pub(super) enum Literal {
    None,
    Bool(bool),
    Int(i128),
    Big(Arc<str>),
    Float(f64),
    Text(Arc<str>),
}

impl Literal {
    pub(super) fn value(&self) -> Value {
        match self {
            Self::None => Value::None,
            Self::Bool(flag) => Value::Bool(*flag),
            Self::Int(number) => Value::Int(*number),
            Self::Big(digits) => Value::Big(Arc::clone(digits)),
            Self::Float(float) => Value::Float(*float),
            Self::Text(text) => Value::Text(Arc::clone(text)),
        }
    }
}

type Child = Box<Expression>;

#[derive(Debug)]
pub(super) enum ExpressionKind {
    Literal(Literal),
    Name(NameId),
    List(Vec<Expression>),
    Tuple(Vec<Expression>),
    Dict(Vec<(Expression, Expression)>),
    Negative(Child),
    Positive(Child),
    Not(Child),
    And(Child, Child),
    Or(Child, Child),
    Binary(&'static str, Child, Child),
    Compare(Child, Vec<(&'static str, Expression)>),
    Concat(Vec<Expression>),
    Condition {
        test: Child,
        yes: Child,
        no: Option<Child>,
    },
    Attribute(Child, Arc<str>),
    Item(Child, Child),
    Slice(Child, [Option<Child>; 3]),
    Call(Child, CallArguments),
    /// Without a value it applies to a block.
    Filter(Option<Child>, Arc<str>, CallArguments),
    Test(Child, Arc<str>, CallArguments),
}

#[derive(Debug, Default)]
pub(super) struct CallArguments {
    pub(super) positional: Vec<Expression>,
    pub(super) named: Vec<(Arc<str>, Expression)>,
    pub(super) more: Option<Child>,
    pub(super) more_named: Option<Child>,
}

impl CallArguments {
    fn height(&self) -> usize {
        let named = self.named.iter().map(|(_, value)| value.height);
        let more = self.more.iter().chain(&self.more_named).map(|child| child.height);
        self.positional.iter().map(|value| value.height).chain(named).chain(more).max().unwrap_or(0)
    }
}

impl Expression {
    pub(super) fn new(kind: ExpressionKind) -> Result<Self> {
        let highest = |items: &[Expression]| items.iter().map(|item| item.height).max().unwrap_or(0);
        let below = match &kind {
            ExpressionKind::Literal(_) | ExpressionKind::Name(_) => 0,
            ExpressionKind::List(items) | ExpressionKind::Tuple(items) | ExpressionKind::Concat(items) => {
                highest(items)
            }
            ExpressionKind::Dict(entries) => {
                entries.iter().map(|(key, value)| key.height.max(value.height)).max().unwrap_or(0)
            }
            ExpressionKind::Negative(child)
            | ExpressionKind::Positive(child)
            | ExpressionKind::Not(child)
            | ExpressionKind::Attribute(child, _) => child.height,
            ExpressionKind::And(left, right)
            | ExpressionKind::Or(left, right)
            | ExpressionKind::Binary(_, left, right)
            | ExpressionKind::Item(left, right) => left.height.max(right.height),
            ExpressionKind::Compare(left, others) => {
                others.iter().map(|(_, right)| right.height).max().unwrap_or(0).max(left.height)
            }
            ExpressionKind::Condition { test, yes, no } => {
                test.height.max(yes.height).max(no.as_ref().map_or(0, |no| no.height))
            }
            ExpressionKind::Slice(child, bounds) => {
                bounds.iter().flatten().map(|bound| bound.height).max().unwrap_or(0).max(child.height)
            }
            ExpressionKind::Call(child, arguments) | ExpressionKind::Test(child, _, arguments) => {
                child.height.max(arguments.height())
            }
            ExpressionKind::Filter(child, _, arguments) => {
                child.as_ref().map_or(0, |child| child.height).max(arguments.height())
            }
        };
        if below >= HEIGHT_MAX {
            return limit(format!("an expression of more than {HEIGHT_MAX} operators in a chain"));
        }
        Ok(Self { kind, height: below + 1 })
    }
}

/// The target of an assignment.
#[derive(Debug)]
pub(super) enum Target {
    Name(NameId),
    Attribute(NameId, Arc<str>),
    Tuple(Vec<Target>),
}

pub(super) type Body = Vec<Statement>;

#[derive(Debug)]
pub(super) struct Statement {
    pub(super) line: usize,
    pub(super) kind: Command,
}

#[derive(Debug)]
pub(super) enum Command {
    Data(String),
    Print(Expression),
    If { branches: Vec<(Expression, Body)>, otherwise: Body },
    For(Loop),
    Set(Target, Expression),
    SetBlock(Target, Option<Expression>, Body),
    With(Vec<(Target, Expression)>, Body),
    Macro(NameId, Macro),
    CallBlock { call: Expression, block: Macro },
    FilterBlock(Expression, Body),
    Generation(Body),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct Loop {
    pub(super) target: Target,
    pub(super) items: Expression,
    pub(super) condition: Option<Expression>,
    pub(super) recursive: bool,
    pub(super) body: Body,
    pub(super) otherwise: Body,
}

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: String,
    pub(super) parameters: Vec<(NameId, Option<Expression>)>,
    pub(super) body: Body,
    pub(super) uses: Uses,
}

/// Which of a macro's implicit names its body uses.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Uses {
    pub(super) caller: bool,
    pub(super) varargs: bool,
    pub(super) kwargs: bool,
}
