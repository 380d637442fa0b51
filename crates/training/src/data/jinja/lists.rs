//! Filters over lists: sorting, grouping, selecting, mapping. Those that are generators in Jinja2
//! return iterators here.

use super::arguments::{self, Arguments};
use super::interpreter::Interpreter;
use super::value::Value;
use super::{CHARACTER, ITEM, Meter, Result, STEP, fail, operators, print};
use std::cmp::Ordering;
use std::sync::Arc;

/// A stable sort with a fallible comparison.
pub(super) fn sorted<T>(
    mut items: Vec<T>,
    mut order: impl FnMut(&T, &T) -> Result<Option<Ordering>>,
    meter: &Meter,
) -> Result<Vec<T>> {
    fn merge<T>(
        items: Vec<T>,
        order: &mut dyn FnMut(&T, &T) -> Result<Option<Ordering>>,
        meter: &Meter,
    ) -> Result<Vec<T>> {
        if items.len() < 2 {
            return Ok(items);
        }
        meter.charge(items.len(), STEP)?;
        let mut left = items;
        let right = left.split_off(left.len() / 2);
        let (left, right) = (merge(left, order, meter)?, merge(right, order, meter)?);
        let mut merged = Vec::with_capacity(left.len() + right.len());
        let mut right = right.into_iter().peekable();
        for item in left {
            while let Some(other) = right.peek() {
                // Python only compares with less-than.
                if order(other, &item)? != Some(Ordering::Less) {
                    break;
                }
                merged.extend(right.next());
            }
            merged.push(item);
        }
        merged.extend(right);
        Ok(merged)
    }
    items = merge(items, &mut order, meter)?;
    Ok(items)
}

/// What a filter reads of an item: a path of attributes, and whether case matters.
struct Key {
    path: Vec<Value>,
    default: Option<Value>,
    fold: bool,
}

impl Key {
    fn new(attribute: Option<&Value>, fold: bool) -> Self {
        let path = match attribute {
            None | Some(Value::None) => Vec::new(),
            Some(Value::Text(path)) => path
                .split('.')
                .map(|part| {
                    let index = part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse().ok()).flatten();
                    index.map_or_else(|| Value::text(part), Value::Int)
                })
                .collect(),
            Some(other) => vec![other.clone()],
        };
        Self { path, default: None, fold }
    }

    fn with_default(self, default: Option<Value>) -> Self {
        Self { default: default.filter(|value| !matches!(value, Value::None)), ..self }
    }

    fn of(&self, interpreter: &mut Interpreter, item: &Value) -> Result<Value> {
        let mut value = item.clone();
        for part in &self.path {
            value = interpreter.item(&value, part)?;
            if let (true, Some(default)) = (value.is_undefined(), &self.default) {
                value = default.clone();
            }
        }
        if let (true, Some(text)) = (self.fold, value.as_text()) {
            interpreter.meter.charge(text.len(), CHARACTER)?;
            return Ok(Value::text(&text.to_lowercase()));
        }
        Ok(value)
    }
}

impl Interpreter<'_> {
    pub(super) fn list_filter(&mut self, name: &str, value: &Value, given: &Arguments) -> Result<Option<Value>> {
        Ok(Some(match name {
            "first" => self.first(value, given)?,
            "last" => self.last(value, given)?,
            "list" => {
                given.none(name)?;
                Value::list(value.items(&self.meter)?)?
            }
            "reverse" => self.reverse(value, given)?,
            "sort" => self.sort(value, given)?,
            "dictsort" => self.dictsort(value, given)?,
            "unique" => self.unique(value, given)?,
            "min" | "max" => self.extreme(name, value, given)?,
            "sum" => self.sum(value, given)?,
            "join" => {
                let [separator, attribute] = given.bind(name, ["d", "attribute"], 0)?;
                self.join(value, separator.as_ref(), attribute.as_ref())?
            }
            "map" => self.map(value, given)?,
            "select" | "reject" | "selectattr" | "rejectattr" => self.pick_items(name, value, given)?,
            "groupby" => self.groupby(value, given)?,
            "batch" | "slice" => self.cut(name, value, given)?,
            _ => return Ok(None),
        }))
    }

    fn first(&mut self, value: &Value, given: &Arguments) -> Result<Value> {
        given.none("first")?;
        let first = match value {
            Value::List(list) | Value::Tuple(list) => list.items.first().cloned(),
            Value::Text(text) | Value::Markup(text) => {
                text.chars().next().map(|first| Value::text(first.encode_utf8(&mut [0; 4])))
            }
            Value::Iterator(once) => once.next(),
            other => other.items(&self.meter)?.into_iter().next(),
        };
        Ok(first.unwrap_or_else(|| Value::undefined("No first item, sequence was empty.")))
    }

    fn last(&mut self, value: &Value, given: &Arguments) -> Result<Value> {
        given.none("last")?;
        if matches!(value, Value::Iterator(_)) {
            return fail("'generator' object is not reversible");
        }
        let last = match value {
            Value::List(list) | Value::Tuple(list) => list.items.last().cloned(),
            other => other.items(&self.meter)?.pop(),
        };
        Ok(last.unwrap_or_else(|| Value::undefined("No last item, sequence was empty.")))
    }

    fn sort(&mut self, value: &Value, given: &Arguments) -> Result<Value> {
        let [reverse, case, attribute] = given.bind("sort", ["reverse", "case_sensitive", "attribute"], 0)?;
        let key = Key::new(attribute.as_ref(), !arguments::flag(case.as_ref()));
        if attribute.as_ref().and_then(Value::as_text).is_some_and(|path| path.contains(',')) {
            return fail("sort by several attributes is not supported");
        }
        let items = value.items(&self.meter)?;
        let items = self.sort_by(items, &key, arguments::flag(reverse.as_ref()))?;
        Value::list(items.into_iter().map(|(_, item)| item).collect())
    }

    fn unique(&mut self, value: &Value, given: &Arguments) -> Result<Value> {
        let [case, attribute] = given.bind("unique", ["case_sensitive", "attribute"], 0)?;
        let key = Key::new(attribute.as_ref(), !arguments::flag(case.as_ref()));
        let (mut seen, mut items): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
        for item in value.items(&self.meter)? {
            let found = key.of(self, &item)?;
            let mut is_new = true;
            for earlier in &seen {
                self.meter.charge(1, ITEM)?;
                if earlier.equals(&found, &self.meter)? {
                    is_new = false;
                    break;
                }
            }
            if is_new {
                seen.push(found);
                items.push(item);
            }
        }
        Value::iterator(items)
    }

    /// The least or the greatest item, depending on `name`.
    fn extreme(&mut self, name: &str, value: &Value, given: &Arguments) -> Result<Value> {
        let [case, attribute] = given.bind(name, ["case_sensitive", "attribute"], 0)?;
        let key = Key::new(attribute.as_ref(), !arguments::flag(case.as_ref()));
        let mut best: Option<(Value, Value)> = None;
        for item in value.items(&self.meter)? {
            let found = key.of(self, &item)?;
            let better = match &best {
                None => true,
                Some((known, _)) if name == "min" => operators::compare("<", &found, known, &self.meter)?,
                Some((known, _)) => operators::compare(">", &found, known, &self.meter)?,
            };
            best = if better { Some((found, item)) } else { best };
        }
        let none = || Value::undefined("No aggregated item, sequence was empty.");
        Ok(best.map_or_else(none, |(_, item)| item))
    }

    fn sum(&mut self, value: &Value, given: &Arguments) -> Result<Value> {
        let [attribute, start] = given.bind("sum", ["attribute", "start"], 0)?;
        let key = Key::new(attribute.as_ref(), false);
        let mut sum = start.unwrap_or(Value::Int(0));
        if sum.as_text().is_some() {
            return fail("sum() can't sum strings");
        }
        for item in value.items(&self.meter)? {
            let item = key.of(self, &item)?;
            sum = operators::binary("+", &sum, &item, &self.meter)?;
        }
        Ok(sum)
    }

    fn reverse(&mut self, value: &Value, given: &Arguments) -> Result<Value> {
        given.none("reverse")?;
        if let Some(text) = value.as_text() {
            self.meter.charge(text.len(), CHARACTER)?;
            return Ok(Value::text(&text.chars().rev().collect::<String>()));
        }
        let mut items = value.items(&self.meter)?;
        items.reverse();
        // A generator cannot be read backwards, so Jinja2 turns it into a list.
        if matches!(value, Value::Iterator(_)) { Value::list(items) } else { Value::iterator(items) }
    }

    /// Items with their keys, in order.
    fn sort_by(&mut self, items: Vec<Value>, key: &Key, reverse: bool) -> Result<Vec<(Value, Value)>> {
        let mut keyed = Vec::with_capacity(items.len());
        for item in items {
            keyed.push((key.of(self, &item)?, item));
        }
        // Equal items keep their order in a reversed sort too.
        if reverse {
            keyed.reverse();
        }
        let meter = &self.meter;
        let mut keyed = sorted(keyed, |left, right| left.0.order(&right.0, "<", meter), meter)?;
        if reverse {
            keyed.reverse();
        }
        Ok(keyed)
    }

    fn dictsort(&mut self, value: &Value, given: &Arguments) -> Result<Value> {
        let [case, by, reverse] = given.bind("dictsort", ["case_sensitive", "by", "reverse"], 0)?;
        let Some(dict) = value.as_dict() else { return fail("dictsort: a mapping is wanted") };
        let place = match by.as_ref().and_then(Value::as_text) {
            None | Some("key") => Value::Int(0),
            Some("value") => Value::Int(1),
            Some(_) => return fail("You can only sort by either \"key\" or \"value\""),
        };
        let key = Key::new(Some(&place), !arguments::flag(case.as_ref()));
        let pairs = Value::View(super::value::View::Items, std::rc::Rc::clone(dict)).items(&self.meter)?;
        let pairs = self.sort_by(pairs, &key, arguments::flag(reverse.as_ref()))?;
        Value::list(pairs.into_iter().map(|(_, pair)| pair).collect())
    }

    fn join(&mut self, value: &Value, separator: Option<&Value>, attribute: Option<&Value>) -> Result<Value> {
        let separator = separator.map_or_else(|| Ok(Arc::from("")), |text| print::text(text, &self.meter))?;
        let key = Key::new(attribute, false);
        let mut joined = String::new();
        for (index, item) in value.items(&self.meter)?.iter().enumerate() {
            let item = key.of(self, item)?;
            let text = print::text(&item, &self.meter)?;
            self.meter.charge(separator.len() + text.len(), super::COPY)?;
            joined.push_str(if index > 0 { &separator } else { "" });
            joined.push_str(&text);
        }
        Ok(Value::text(&joined))
    }

    fn map(&mut self, value: &Value, given: &Arguments) -> Result<Value> {
        if !value.truth() {
            return Value::iterator(Vec::new());
        }
        let mut mapped = Vec::new();
        if given.positional.is_empty() {
            let [attribute, default] = given.bind("map", ["attribute", "default"], 1)?;
            let key = Key::new(attribute.as_ref(), false).with_default(default);
            for item in value.items(&self.meter)? {
                mapped.push(key.of(self, &item)?);
            }
            return Value::iterator(mapped);
        }
        let filter = arguments::text("map", &given.positional[0])?.to_owned();
        let rest = Arguments { positional: given.positional[1..].to_vec(), named: given.named.clone() };
        for item in value.items(&self.meter)? {
            mapped.push(self.filter(&filter, item, &rest)?);
        }
        Value::iterator(mapped)
    }

    fn pick_items(&mut self, name: &str, value: &Value, given: &Arguments) -> Result<Value> {
        if !value.truth() {
            return Value::iterator(Vec::new());
        }
        let mut positional = given.positional.iter();
        let key = match (name.ends_with("attr"), positional.as_slice().first()) {
            (true, None) => return fail("Missing parameter for attribute name"),
            (true, attribute) => {
                positional.next();
                Key::new(attribute, false)
            }
            _ => Key::new(None, false),
        };
        let test = positional.next().map(|test| arguments::text(name, test).map(str::to_owned)).transpose()?;
        let rest = Arguments { positional: positional.cloned().collect(), named: given.named.clone() };
        let mut picked = Vec::new();
        for item in value.items(&self.meter)? {
            self.meter.charge(1, STEP)?;
            let looked_at = key.of(self, &item)?;
            let passes = match &test {
                Some(test) => self.check(test, &looked_at, &rest)?,
                None => looked_at.truth(),
            };
            if passes == name.starts_with("select") {
                picked.push(item);
            }
        }
        Value::iterator(picked)
    }

    fn groupby(&mut self, value: &Value, given: &Arguments) -> Result<Value> {
        let [attribute, default, case] = given.bind("groupby", ["attribute", "default", "case_sensitive"], 1)?;
        let fold = !arguments::flag(case.as_ref());
        let key = Key::new(attribute.as_ref(), fold).with_default(default.clone());
        let plain = Key::new(attribute.as_ref(), false).with_default(default);
        let items = value.items(&self.meter)?;
        let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
        for (found, item) in self.sort_by(items, &key, false)? {
            match groups.last_mut() {
                Some((known, members)) if known.equals(&found, &self.meter)? => members.push(item),
                _ => groups.push((found, vec![item])),
            }
        }
        let mut result = Vec::new();
        for (_, members) in groups {
            let name = plain.of(self, &members[0])?;
            result.push(Value::tuple(vec![name, Value::list(members)?])?);
        }
        Value::list(result)
    }

    fn cut(&mut self, name: &str, value: &Value, given: &Arguments) -> Result<Value> {
        let [count, fill] = given.bind(name, ["count", "fill_with"], 1)?;
        let fill = fill.filter(|fill| !matches!(fill, Value::None));
        let Some(count) = usize::try_from(arguments::integer(name, count.as_ref(), 1)?).ok().filter(|count| *count > 0)
        else {
            return fail(format!("{name}: the number must be positive"));
        };
        let items = value.items(&self.meter)?;
        let mut parts: Vec<Value> = Vec::new();
        if name == "batch" {
            self.meter.charge(if fill.is_some() { count } else { 0 }, ITEM)?;
            for chunk in items.chunks(count) {
                let mut chunk = chunk.to_vec();
                if let Some(fill) = &fill {
                    chunk.resize(count, fill.clone());
                }
                parts.push(Value::list(chunk)?);
            }
            return Value::iterator(parts);
        }
        self.meter.charge(count, STEP)?;
        let (size, longer) = (items.len() / count, items.len() % count);
        let mut rest = items.as_slice();
        for part in 0..count {
            let (piece, after) = rest.split_at(size + usize::from(part < longer));
            let mut piece = piece.to_vec();
            piece.extend(fill.clone().filter(|_| part >= longer));
            parts.push(Value::list(piece)?);
            rest = after;
        }
        Value::iterator(parts)
    }
}
