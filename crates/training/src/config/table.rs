//! Typed access to a table of the low form: a value of the right type and range, or an error that
//! names its place.

use super::error::Error;
use super::key::{Fallback, Key, Section};
use super::low::{Entries, Entry};
use super::run::Every;
use super::suggest::nearest;
use super::value::Value;
use std::ops::RangeInclusive;

/// BOUND: updates, rows and the like.
pub(super) const COUNT_MAX: u64 = 1 << 40;

/// A table of typed keys. Types were checked before: a key that is present has the type requested
/// here. Defaults come from the table of keys.
pub(super) struct Table<'a> {
    pub(super) section: Section,
    pub(super) entries: &'a Entries,
}

impl Table<'_> {
    pub(super) fn get(&self, key: &str) -> Option<&Entry> {
        self.entries.get(key)
    }

    fn default(&self, key: &str) -> Fallback {
        Key::named(self.section, key).default
    }

    pub(super) fn switch(&self, key: &str) -> bool {
        match self.get(key).map(|entry| &entry.value) {
            Some(Value::Switch(switch)) => *switch,
            _ => self.default(key) == Fallback::On,
        }
    }

    pub(super) fn whole(&self, key: &str, range: RangeInclusive<u64>) -> Result<u64, Error> {
        let Fallback::Integer(default) = self.default(key) else { panic!("{key} has no integer for a default") };
        self.whole_or(key, default, range)
    }

    pub(super) fn whole_or(&self, key: &str, default: u64, range: RangeInclusive<u64>) -> Result<u64, Error> {
        let Some(entry) = self.get(key) else { return Ok(default) };
        let value = if let Value::Whole(whole) = entry.value { u64::try_from(whole).ok() } else { None };
        value.filter(|value| range.contains(value)).ok_or_else(|| {
            let (least, most) = range.into_inner();
            entry.invalid("out of range", &format!("a whole number from {least} to {most}"))
        })
    }

    pub(super) fn number(&self, key: &str, fits: impl Fn(f64) -> bool, range: &str) -> Result<f64, Error> {
        let Fallback::Float(default) = self.default(key) else { panic!("{key} has no float for a default") };
        self.number_or(key, default, fits, range)
    }

    pub(super) fn number_or(
        &self,
        key: &str,
        default: f64,
        fits: impl Fn(f64) -> bool,
        range: &str,
    ) -> Result<f64, Error> {
        let Some(entry) = self.get(key) else { return Ok(default) };
        match entry.value {
            Value::Number(number) if fits(number) => Ok(number),
            _ => Err(entry.invalid("out of range", range)),
        }
    }

    /// A string that is not empty.
    pub(super) fn text(&self, key: &str) -> Result<Option<String>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(entry) => match &entry.value {
                Value::Text(text) if !text.is_empty() && !text.contains('\0') => Ok(Some(text.clone())),
                _ => Err(entry.invalid("it is empty", "give it a value, or remove the line")),
            },
        }
    }

    /// One of several names.
    pub(super) fn one_of<T: Copy>(&self, key: &str, names: &[(&'static str, T)]) -> Result<T, Error> {
        let Fallback::Str(default) = self.default(key) else { panic!("{key} has no name for a default") };
        let default = names.iter().find(|(name, _)| *name == default);
        let (_, default) = default.unwrap_or_else(|| panic!("the default of {key} is none of its names"));
        self.one_of_or(key, *default, names)
    }

    pub(super) fn one_of_or<T: Copy>(&self, key: &str, default: T, names: &[(&'static str, T)]) -> Result<T, Error> {
        let Some(entry) = self.get(key) else { return Ok(default) };
        let typed = if let Value::Text(text) = &entry.value { text.as_str() } else { "" };
        names.iter().find(|(name, _)| *name == typed).map(|(_, value)| *value).ok_or_else(|| entry.none_of(names))
    }
}

impl Entry {
    pub(super) fn invalid(&self, why: &str, hint: &str) -> Error {
        Error::Invalid {
            place: self.place.clone(),
            key: self.typed.clone(),
            value: self.value.to_string(),
            why: why.to_string(),
            hint: hint.to_string(),
        }
    }

    pub(super) fn none_of<T>(&self, names: &[(&'static str, T)]) -> Error {
        let names = names.iter().map(|(name, _)| *name);
        let typed = if let Value::Text(text) = &self.value { text.as_str() } else { "" };
        let hint = match nearest(typed, names.clone()) {
            Some(name) => format!("did you mean \"{name}\"?"),
            None => format!("one of: {}", names.collect::<Vec<_>>().join(", ")),
        };
        self.invalid("not known", &hint)
    }

    /// The strings of a list, or a single string as a list.
    pub(super) fn texts(&self) -> Vec<String> {
        match &self.value {
            Value::Text(text) => vec![text.clone()],
            Value::List(items) => items
                .iter()
                .filter_map(|item| if let Value::Text(text) = item { Some(text.clone()) } else { None })
                .collect(),
            _ => vec![],
        }
    }
}

pub(super) enum CountOrShare {
    Count(u64),
    Share(f64),
}

/// Whole numbers are counts, fractions below 1 are shares; 0 is none.
pub(super) fn count_or_share(entry: &Entry, what: &str) -> Result<CountOrShare, Error> {
    match entry.value {
        Value::Whole(count) if (0..=COUNT_MAX as i64).contains(&count) => Ok(CountOrShare::Count(count as u64)),
        Value::Number(0.0) => Ok(CountOrShare::Count(0)),
        Value::Number(share) if share > 0.0 && share < 1.0 => Ok(CountOrShare::Share(share)),
        Value::Number(number) if (1.0..=1e12).contains(&number) && libm::trunc(number) == number => {
            Ok(CountOrShare::Count(number as u64))
        }
        _ => Err(entry.invalid("out of range", &format!("a whole number of {what}, or a share above 0 and below 1"))),
    }
}

pub(super) fn every(
    table: &Table<'_>,
    strategy: &'static str,
    steps: &'static str,
    default: Every,
    default_steps: Option<u64>,
) -> Result<Every, Error> {
    #[derive(Clone, Copy, PartialEq)]
    enum Strategy {
        Unsaid,
        No,
        Steps,
        Epoch,
    }
    let names = [("no", Strategy::No), ("steps", Strategy::Steps), ("epoch", Strategy::Epoch)];
    let said = table.one_of_or(strategy, Strategy::Unsaid, &names)?;
    let count = table.whole_or(steps, default_steps.unwrap_or(0), 1..=COUNT_MAX)?;
    match (said, table.get(steps)) {
        (Strategy::Unsaid, None) => Ok(default),
        (Strategy::Steps, None) if default_steps.is_none() => {
            let entry = table.get(strategy).expect("the strategy was said");
            Err(entry.invalid("the number of steps is missing", &format!("add {steps} = 50")))
        }
        (Strategy::Unsaid, Some(_)) | (Strategy::Steps, _) => Ok(Every::Steps(count)),
        (Strategy::No, None) => Ok(Every::Never),
        (Strategy::Epoch, None) => Ok(Every::Epoch),
        (Strategy::No | Strategy::Epoch, Some(entry)) => {
            Err(entry.invalid(&format!("{strategy} is not \"steps\""), &format!("remove {steps} or {strategy}")))
        }
    }
}
