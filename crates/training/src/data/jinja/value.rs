//! Template values with Python's semantics: truth, equality, order, iteration. Lists and dicts
//! store their nesting depth, so that nothing recursive runs out of stack, not even dropping them.

use super::number;
use super::{BYTE, ITEM, Meter, PIECE, Result, VALUE_DEPTH_MAX, fail, limit};
use std::cell::Cell;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(in crate::data) enum Value {
    /// With the message for its use.
    Undefined(Arc<str>),
    None,
    Bool(bool),
    Int(i128),
    /// An integer of more than 128 bits, as its digits: it can be printed and compared, but not
    /// used in arithmetic.
    Big(Arc<str>),
    Float(f64),
    Text(Arc<str>),
    /// Text marked by `safe` or `escape`.
    Markup(Arc<str>),
    List(Rc<Items>),
    Tuple(Rc<Items>),
    Dict(Rc<Dict>),
    View(View, Rc<Dict>),
    Range(Range),
    /// The result of `map`, `select` and similar filters: read once, without a length, always true.
    Iterator(Rc<Once>),
    /// Index of a namespace in the interpreter.
    Namespace(usize),
    /// Index of a macro in the interpreter.
    Macro(usize),
    /// Index of the loop's scope.
    Loop(usize),
    /// Index of a cycler or joiner in the interpreter.
    Counter(usize),
    Method(Rc<(Value, Arc<str>)>),
    Function(&'static str),
}

#[derive(Debug)]
pub(in crate::data) struct Items {
    pub(super) items: Vec<Value>,
    depth: usize,
}

/// A dict: entries in insertion order.
#[derive(Debug, Default)]
pub(in crate::data) struct Dict {
    pub(super) entries: Vec<(Value, Value)>,
    by_text: BTreeMap<Arc<str>, usize>,
    depth: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::data) enum View {
    Keys,
    Values,
    Items,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::data) struct Range {
    pub(super) start: i128,
    pub(super) step: i128,
    pub(super) length: usize,
}

impl Range {
    pub(super) fn get(self, index: usize) -> Value {
        Value::Int(self.start + self.step * index as i128)
    }
}

#[derive(Debug)]
pub(in crate::data) struct Once {
    items: Vec<Value>,
    next: Cell<usize>,
    depth: usize,
}

impl Once {
    /// The next item; each is returned once.
    pub(super) fn next(&self) -> Option<Value> {
        let at = self.next.get();
        self.next.set(at + usize::from(at < self.items.len()));
        self.items.get(at).cloned()
    }
}

impl Dict {
    /// The last of equal keys wins, in the place of the first.
    pub(super) fn insert(&mut self, meter: &Meter, key: Value, value: Value) -> Result<()> {
        meter.charge(1, 2 * PIECE)?;
        self.depth = self.depth.max(1 + value.depth().max(key.depth()));
        if self.depth > VALUE_DEPTH_MAX {
            return limit("a value is nested too deeply");
        }
        if let Some(at) = self.position(meter, &key)? {
            self.entries[at].1 = value;
            return Ok(());
        }
        if let Some(text) = key.as_shared_text() {
            self.by_text.insert(text, self.entries.len());
        }
        self.entries.push((key, value));
        Ok(())
    }

    /// For values from outside that are already checked: distinct keys, bounded nesting.
    pub(in crate::data) fn from_row(entries: Vec<(Arc<str>, Value)>) -> Self {
        let depth = 1 + entries.iter().map(|(_, value)| value.depth()).max().unwrap_or(0);
        let by_text = entries.iter().enumerate().map(|(at, (key, _))| (Arc::clone(key), at)).collect();
        Self { entries: entries.into_iter().map(|(key, value)| (Value::Text(key), value)).collect(), by_text, depth }
    }

    fn position(&self, meter: &Meter, key: &Value) -> Result<Option<usize>> {
        if let Some(text) = key.as_text() {
            meter.charge(text.len(), BYTE)?;
            return Ok(self.by_text.get(text).copied());
        }
        if !key.hashable() {
            return fail(format!("unhashable type: '{}'", key.type_name()));
        }
        meter.charge(self.entries.len() - self.by_text.len(), ITEM)?;
        for (at, (name, _)) in self.entries.iter().enumerate() {
            if name.as_text().is_none() && name.equals(key, meter)? {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    pub(super) fn get(&self, meter: &Meter, key: &Value) -> Result<Option<&Value>> {
        Ok(self.position(meter, key)?.map(|at| &self.entries[at].1))
    }

    pub(super) fn get_text(&self, key: &str) -> Option<&Value> {
        self.by_text.get(key).map(|at| &self.entries[*at].1)
    }
}

fn deepest(items: &[Value]) -> Result<usize> {
    let depth = 1 + items.iter().map(Value::depth).max().unwrap_or(0);
    if depth > VALUE_DEPTH_MAX { limit("a value is nested too deeply") } else { Ok(depth) }
}

impl Value {
    pub(in crate::data) fn text(text: &str) -> Self {
        Self::Text(Arc::from(text))
    }

    /// The caller has charged the work.
    pub(super) fn list(items: Vec<Value>) -> Result<Self> {
        let depth = deepest(&items)?;
        Ok(Self::List(Rc::new(Items { items, depth })))
    }

    pub(super) fn tuple(items: Vec<Value>) -> Result<Self> {
        let depth = deepest(&items)?;
        Ok(Self::Tuple(Rc::new(Items { items, depth })))
    }

    pub(super) fn iterator(items: Vec<Value>) -> Result<Self> {
        let depth = deepest(&items)?;
        Ok(Self::Iterator(Rc::new(Once { items, next: Cell::new(0), depth })))
    }

    /// For values from outside with bounded nesting.
    pub(in crate::data) fn list_from_row(items: Vec<Value>) -> Self {
        let depth = 1 + items.iter().map(Value::depth).max().unwrap_or(0);
        Self::List(Rc::new(Items { items, depth }))
    }

    pub(in crate::data) fn dict(dict: Dict) -> Self {
        Self::Dict(Rc::new(dict))
    }

    pub(super) fn undefined(why: impl AsRef<str>) -> Self {
        Self::Undefined(Arc::from(why.as_ref()))
    }

    pub(super) fn method(&self, name: &str) -> Result<Self> {
        deepest(std::slice::from_ref(self))?;
        Ok(Self::Method(Rc::new((self.clone(), Arc::from(name)))))
    }

    fn depth(&self) -> usize {
        match self {
            Self::List(list) | Self::Tuple(list) => list.depth,
            Self::Dict(dict) | Self::View(_, dict) => dict.depth,
            Self::Iterator(iterator) => iterator.depth,
            Self::Method(method) => 1 + method.0.depth(),
            _ => 0,
        }
    }

    /// Python's name of the type, for messages.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) | Self::Big(_) => "int",
            Self::Float(_) => "float",
            Self::Text(_) => "str",
            Self::Markup(_) => "Markup",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::View(View::Keys, _) => "dict_keys",
            Self::View(View::Values, _) => "dict_values",
            Self::View(View::Items, _) => "dict_items",
            Self::Range(_) => "range",
            Self::Iterator(_) => "generator",
            Self::Namespace(_) => "Namespace",
            Self::Macro(_) => "Macro",
            Self::Loop(_) => "LoopContext",
            Self::Counter(_) => "Cycler",
            Self::Method(_) => "builtin_function_or_method",
            Self::Function(_) => "function",
        }
    }

    pub(super) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) | Self::Markup(text) => Some(text),
            _ => None,
        }
    }

    fn as_shared_text(&self) -> Option<Arc<str>> {
        match self {
            Self::Text(text) | Self::Markup(text) => Some(Arc::clone(text)),
            _ => None,
        }
    }

    /// An integer; true and false are 1 and 0.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Int(number) => Some(*number),
            Self::Bool(flag) => Some(i128::from(*flag)),
            _ => None,
        }
    }

    pub(super) fn as_dict(&self) -> Option<&Rc<Dict>> {
        match self {
            Self::Dict(dict) => Some(dict),
            _ => None,
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    pub(super) fn is_callable(&self) -> bool {
        // An undefined value has the method that refuses the call.
        matches!(
            self,
            Self::Undefined(_)
                | Self::Macro(_)
                | Self::Method(_)
                | Self::Function(_)
                | Self::Loop(_)
                | Self::Counter(_)
        )
    }

    fn hashable(&self) -> bool {
        match self {
            Self::List(_) | Self::Dict(_) | Self::View(..) => false,
            Self::Tuple(items) => items.items.iter().all(Self::hashable),
            _ => true,
        }
    }

    pub(super) fn truth(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(flag) => *flag,
            Self::Int(number) => *number != 0,
            Self::Float(number) => *number != 0.0,
            _ => self.length().is_none_or(|length| length > 0),
        }
    }

    /// The result of `len`, or `None` if there is none. For text this is bytes; the caller counts
    /// characters.
    pub(super) fn length(&self) -> Option<usize> {
        match self {
            Self::Undefined(_) => Some(0),
            Self::Text(text) | Self::Markup(text) => Some(text.len()),
            Self::List(list) | Self::Tuple(list) => Some(list.items.len()),
            Self::Dict(dict) | Self::View(_, dict) => Some(dict.entries.len()),
            Self::Range(range) => Some(range.length),
            _ => None,
        }
    }

    /// The items that a loop over the value sees. An iterator is empty afterwards.
    pub(super) fn items(&self, meter: &Meter) -> Result<Vec<Value>> {
        Ok(match self {
            Self::Undefined(_) => Vec::new(),
            Self::Text(text) | Self::Markup(text) => {
                meter.charge(text.len(), PIECE)?;
                let mut bytes = [0; 4];
                text.chars().map(|character| Self::text(character.encode_utf8(&mut bytes))).collect()
            }
            Self::List(list) | Self::Tuple(list) => {
                meter.charge(list.items.len(), ITEM)?;
                list.items.clone()
            }
            Self::Dict(dict) | Self::View(View::Keys, dict) => {
                meter.charge(dict.entries.len(), ITEM)?;
                dict.entries.iter().map(|(key, _)| key.clone()).collect()
            }
            Self::View(View::Values, dict) => {
                meter.charge(dict.entries.len(), ITEM)?;
                dict.entries.iter().map(|(_, value)| value.clone()).collect()
            }
            Self::View(View::Items, dict) => {
                meter.charge(dict.entries.len(), PIECE)?;
                let pair = |(key, value): &(Value, Value)| Self::tuple(vec![key.clone(), value.clone()]);
                dict.entries.iter().map(pair).collect::<Result<_>>()?
            }
            Self::Range(range) => {
                meter.charge(range.length, ITEM)?;
                (0..range.length).map(|index| range.get(index)).collect()
            }
            Self::Iterator(iterator) => {
                meter.charge(iterator.items.len() - iterator.next.get(), ITEM)?;
                std::iter::from_fn(|| iterator.next()).collect()
            }
            _ => return fail(format!("'{}' object is not iterable", self.type_name())),
        })
    }

    pub(super) fn is_iterable(&self) -> bool {
        self.length().is_some() || matches!(self, Self::Iterator(_) | Self::Loop(_))
    }

    /// `==`. Charges what it touches; the depth of values bounds the recursion.
    pub(super) fn equals(&self, other: &Value, meter: &Meter) -> Result<bool> {
        meter.charge(1, ITEM)?;
        if let Some(number::Order(order)) = number::compare(self, other) {
            return Ok(order == Some(Ordering::Equal));
        }
        if let (Some(left), Some(right)) = (self.as_text(), other.as_text()) {
            meter.charge(left.len().min(right.len()), BYTE)?;
            return Ok(left == right);
        }
        match (self, other) {
            (Self::None, Self::None) | (Self::Undefined(_), Self::Undefined(_)) => Ok(true),
            (Self::List(left), Self::List(right)) | (Self::Tuple(left), Self::Tuple(right)) => {
                if left.items.len() != right.items.len() {
                    return Ok(false);
                }
                for (left, right) in left.items.iter().zip(&right.items) {
                    if !left.equals(right, meter)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            (Self::Dict(left), Self::Dict(right)) => {
                if left.entries.len() != right.entries.len() {
                    return Ok(false);
                }
                for (key, value) in &left.entries {
                    match right.get(meter, key)? {
                        Some(found) if value.equals(found, meter)? => {}
                        _ => return Ok(false),
                    }
                }
                Ok(true)
            }
            (Self::Range(left), Self::Range(right)) => Ok(left == right),
            (Self::Function(left), Self::Function(right)) => Ok(left == right),
            (Self::Namespace(left), Self::Namespace(right))
            | (Self::Macro(left), Self::Macro(right))
            | (Self::Loop(left), Self::Loop(right))
            | (Self::Counter(left), Self::Counter(right)) => Ok(left == right),
            (Self::Iterator(left), Self::Iterator(right)) => Ok(Rc::ptr_eq(left, right)),
            (Self::Method(left), Self::Method(right)) => Ok(left.1 == right.1 && left.0.equals(&right.0, meter)?),
            _ => Ok(false),
        }
    }

    /// The order of two values, `None` for unordered numbers; `symbol` is for the message.
    pub(super) fn order(&self, other: &Value, symbol: &str, meter: &Meter) -> Result<Option<Ordering>> {
        meter.charge(1, ITEM)?;
        if let Some(number::Order(order)) = number::compare(self, other) {
            return Ok(order);
        }
        if let (Some(left), Some(right)) = (self.as_text(), other.as_text()) {
            meter.charge(left.len().min(right.len()), BYTE)?;
            // UTF-8 preserves the order of code points.
            return Ok(Some(left.cmp(right)));
        }
        match (self, other) {
            (Self::List(left), Self::List(right)) | (Self::Tuple(left), Self::Tuple(right)) => {
                for (left, right) in left.items.iter().zip(&right.items) {
                    if !left.equals(right, meter)? {
                        return left.order(right, symbol, meter);
                    }
                }
                Ok(Some(left.items.len().cmp(&right.items.len())))
            }
            (Self::Undefined(why), _) | (_, Self::Undefined(why)) => fail(why.as_ref()),
            _ => fail(format!(
                "'{symbol}' not supported between instances of '{}' and '{}'",
                self.type_name(),
                other.type_name()
            )),
        }
    }
}
