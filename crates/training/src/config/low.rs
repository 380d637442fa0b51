//! The low form: the keys as typed, under canonical names and with their places. A file fills it,
//! `--set` overrides it. Names and types are settled here; `resolve.rs` interprets the values.

use super::error::Error;
use super::key::{Key, Section, ValueKind, hint_for_unknown};
use super::value::{Origin, Value};
use isobit_proof::{FileError, regular};
use std::collections::BTreeMap;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// BOUND: bytes of a config file.
pub const BYTES_MAX: usize = 1 << 20;

/// BOUND: `[[datasets]]` of one run.
const DATASETS_MAX: usize = 1024;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    /// The name as typed, for messages.
    pub(super) typed: String,
    pub(super) value: Value,
    pub(super) place: Origin,
    /// 0 for the file, then the number of the argument: of two contradicting entries the later one
    /// wins.
    pub(super) rank: u32,
}

/// The keys of one table, by canonical name.
pub(super) type Entries = BTreeMap<&'static str, Entry>;

#[derive(Clone, Debug)]
pub struct Low {
    pub(super) source: String,
    arguments: u32,
    pub(super) sections: BTreeMap<Section, Entries>,
    pub(super) datasets: Vec<Entries>,
}

/// The source of a table: its name, and its text for counting lines.
struct ConfigText<'a> {
    name: &'a str,
    /// None for an argument, which has no lines.
    text: Option<&'a str>,
    rank: u32,
}

impl ConfigText<'_> {
    fn place(&self, offset: usize) -> Origin {
        let line = self.text.map(|text| 1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count() as u32);
        Origin { source: self.name.into(), line }
    }
}

impl Low {
    pub fn read(path: &Path) -> Result<Self, Error> {
        let place = Origin::whole(&path.display().to_string());
        let text = regular::read_text(path, BYTES_MAX as u64).map_err(|error| match error {
            FileError::TooLarge { .. } => Error::TooLarge { place: place.clone(), limit: BYTES_MAX },
            FileError::Malformed { .. } => Error::NotText { place: place.clone() },
            other => Error::Read { source: other },
        })?;
        Self::parse(&place.source, &text)
    }

    pub fn parse(name: &str, text: &str) -> Result<Self, Error> {
        if text.len() > BYTES_MAX {
            return Err(Error::TooLarge { place: Origin::whole(name), limit: BYTES_MAX });
        }
        let source = ConfigText { name, text: Some(text), rank: 0 };
        let table = DeTable::parse(text).map_err(|error| {
            let message = error.message().lines().collect::<Vec<_>>().join(", ");
            let key = error.span().and_then(|span| text.get(span)).filter(|_| message == "duplicate key");
            Error::Syntax {
                place: source.place(error.span().map_or(0, |span| span.start)),
                message: key.map_or(message.clone(), |key| format!("{message} `{}`", key.trim())),
            }
        })?;
        let mut low = Self { source: name.to_string(), arguments: 0, sections: BTreeMap::new(), datasets: Vec::new() };
        low.take_top(&source, table.get_ref(), false)?;
        Ok(low)
    }

    /// Applies one `--set key=value`. The key is dotted (`training.lr`, `datasets.0.path`) or a
    /// bare name that only one section has; the value is TOML, or else a string, or a
    /// comma-separated list of strings.
    pub fn set(&mut self, argument: &str) -> Result<(), Error> {
        let refused = |why: &str, hint| Error::Override { argument: argument.to_string(), why: why.to_string(), hint };
        let refuse = |why| refused(why, "write --set key=value, for example --set training.learning_rate=1e-4");
        let (key, value) = argument.split_once('=').ok_or_else(|| refuse("there is no `=`"))?;
        let (key, value) = (key.trim(), value.trim());
        if key.is_empty() || key.chars().any(char::is_control) {
            return Err(refuse("the part before `=` is not a key"));
        }
        let lacks_entry =
            || !value.starts_with('[') && value.contains(',') && value.split(',').any(|name| name.trim().is_empty());
        if ["device", "devices"].contains(&key) && lacks_entry() {
            return Err(refused("an entry of the list is empty", "name each device of the list: cuda:0,cpu"));
        }
        let kind = kind_of(key);
        let text = format!("{key} = {}", toml_text(kind, value));
        let table = DeTable::parse(&text).map_err(|_| refuse("the part before `=` is not a key"))?;
        let name = format!("--set {argument}");
        self.arguments += 1;
        self.take_top(&ConfigText { name: &name, text: None, rank: self.arguments }, table.get_ref(), true)
    }

    fn take_top(&mut self, source: &ConfigText<'_>, table: &DeTable<'_>, over: bool) -> Result<(), Error> {
        for (name, value) in in_order(table) {
            let typed = name.get_ref().as_ref();
            let section = Section::NAMED.into_iter().find(|section| section.name() == typed);
            match (section, value.get_ref()) {
                (Some(Section::Datasets), value) => self.take_datasets(source, name, value, over)?,
                (Some(section), DeValue::Table(inner)) => {
                    let entries = self.sections.entry(section).or_default();
                    take_section(entries, section, source, inner, over)?;
                }
                (Some(section), _) => {
                    return Err(Error::WrongType {
                        place: source.place(name.span().start),
                        key: typed.to_string(),
                        expected: "a section",
                        found: value.get_ref().type_str().to_string(),
                        hint: format!("write {} on a line of its own, its keys below it", section.heading()),
                    });
                }
                (None, _) => {
                    let home = home_of(source, name, over)?;
                    let entries = self.sections.entry(home).or_default();
                    take_key(entries, home, source, name, value, over)?;
                }
            }
        }
        Ok(())
    }

    fn take_datasets(
        &mut self,
        source: &ConfigText<'_>,
        name: &Spanned<std::borrow::Cow<'_, str>>,
        value: &DeValue<'_>,
        over: bool,
    ) -> Result<(), Error> {
        let wrong = |hint: &str| Error::WrongType {
            place: source.place(name.span().start),
            key: "datasets".to_string(),
            expected: "a list of tables",
            found: value.type_str().to_string(),
            hint: hint.to_string(),
        };
        match value {
            DeValue::Array(tables) => {
                let mut datasets = Vec::new();
                for table in tables {
                    let table = table.get_ref().as_table().ok_or_else(|| wrong("[[datasets]], then path = \"…\""))?;
                    let mut entries = Entries::new();
                    take_section(&mut entries, Section::Datasets, source, table, false)?;
                    datasets.push(entries);
                }
                self.datasets = datasets;
            }
            DeValue::Table(numbered) if over => {
                for (index, table) in numbered {
                    let index: usize =
                        index.get_ref().parse().map_err(|_| wrong("name the dataset by number: datasets.0.path"))?;
                    let table = table.get_ref().as_table().ok_or_else(|| wrong("datasets.0.path=…"))?;
                    if index > self.datasets.len() {
                        return Err(wrong("datasets are counted from 0, without gaps"));
                    }
                    if index == self.datasets.len() {
                        self.datasets.push(Entries::new());
                    }
                    take_section(&mut self.datasets[index], Section::Datasets, source, table, true)?;
                }
            }
            _ => return Err(wrong("each dataset begins with [[datasets]], in double brackets")),
        }
        if self.datasets.len() > DATASETS_MAX {
            return Err(wrong("a run has at most 1024 datasets"));
        }
        Ok(())
    }
}

/// Sorted by position in the text, so that the first error of a file is the one reported.
fn in_order<'t, 'i>(table: &'t DeTable<'i>) -> Vec<(&'t Spanned<std::borrow::Cow<'i, str>>, &'t Spanned<DeValue<'i>>)> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    entries
}

/// The section of a key typed at the top level. A file must give it; an argument may omit it if
/// only one fits.
fn home_of(source: &ConfigText<'_>, name: &Spanned<std::borrow::Cow<'_, str>>, over: bool) -> Result<Section, Error> {
    let typed = name.get_ref().as_ref();
    if !over || Key::find(Section::Top, typed).is_some() {
        return Ok(Section::Top);
    }
    match Key::anywhere(typed)[..] {
        [] => Ok(Section::Top),
        [key] if key.section != Section::Datasets => Ok(key.section),
        // For a key that evaluation has too, training's is meant.
        ref several if several.iter().any(|key| key.section == Section::Training) => Ok(Section::Training),
        ref several => Err(Error::UnknownKey {
            place: source.place(0),
            key: typed.to_string(),
            section: " without its section".to_string(),
            hint: several.iter().map(|key| format!("`{}`", key.dotted())).collect::<Vec<_>>().join(" or "),
        }),
    }
}

fn take_section(
    entries: &mut Entries,
    section: Section,
    source: &ConfigText<'_>,
    table: &DeTable<'_>,
    over: bool,
) -> Result<(), Error> {
    for (name, value) in in_order(table) {
        take_key(entries, section, source, name, value, over)?;
    }
    Ok(())
}

fn take_key(
    entries: &mut Entries,
    section: Section,
    source: &ConfigText<'_>,
    name: &Spanned<std::borrow::Cow<'_, str>>,
    value: &Spanned<DeValue<'_>>,
    over: bool,
) -> Result<(), Error> {
    let typed = name.get_ref().to_string();
    let place = source.place(name.span().start);
    let Some(key) = Key::find(section, &typed) else {
        let within = if section == Section::Top { String::new() } else { format!(" in {}", section.heading()) };
        let hint = hint_for_unknown(section, &typed);
        return Err(Error::UnknownKey { place, key: typed, section: within, hint });
    };
    let read = Value::of(value.get_ref()).map_err(|why| Error::Invalid {
        place: place.clone(),
        key: typed.clone(),
        value: value.get_ref().type_str().to_string(),
        why,
        hint: format!("it must be {}", key.kind.expected()),
    })?;
    let found = read.to_string();
    let Some(value) = key.kind.take(read.clone()) else {
        let hint = hint_for_type(key, &read);
        let found = format!("{} ({found})", read.type_name());
        return Err(Error::WrongType { place, key: typed, expected: key.kind.expected(), found, hint });
    };
    match entries.get(key.name) {
        Some(earlier) if !over => {
            Err(Error::Twice { place, key: typed, earlier: earlier.place.clone(), earlier_key: earlier.typed.clone() })
        }
        earlier => {
            let value = over_table(earlier, value);
            entries.insert(key.name, Entry { typed, value, place, rank: source.rank });
            Ok(())
        }
    }
}

/// An override of a table (`--set adapter.rank_pattern.q_proj=4`) replaces the entries it names and
/// keeps the rest.
fn over_table(earlier: Option<&Entry>, value: Value) -> Value {
    match (earlier.map(|entry| &entry.value), value) {
        (Some(Value::Table(below)), Value::Table(above)) => {
            Value::Table(below.clone().into_iter().chain(above).collect())
        }
        (_, value) => value,
    }
}

fn hint_for_type(key: &Key, value: &Value) -> String {
    match value {
        Value::Text(text) if text.parse::<f64>().is_ok() => "remove the quotes".to_string(),
        Value::Text(text) if text == "true" || text == "false" => "remove the quotes".to_string(),
        Value::Text(text) if key.kind == ValueKind::Texts => format!("write [{text:?}]"),
        Value::Number(number) if key.kind == ValueKind::Whole && number.to_string().parse::<i64>().is_ok() => {
            format!("write {number} without a decimal point")
        }
        Value::Number(_) if key.kind == ValueKind::Whole => {
            format!("write a whole number: `{}` is: {}", key.name, key.help)
        }
        _ => format!("`{}` is: {}", key.name, key.help),
    }
}

/// The kind of a `--set` key, if the name alone determines it.
fn kind_of(dotted: &str) -> Option<ValueKind> {
    let mut parts = dotted.split('.').map(str::trim);
    let first = parts.next()?;
    let section = Section::NAMED.into_iter().find(|section| section.name() == first);
    let rest: Vec<&str> = parts.collect();
    let found = match (section, &rest[..]) {
        (None, []) => Key::anywhere(first).first().copied(),
        (Some(Section::Datasets), [_, name]) => Key::find(Section::Datasets, name),
        (Some(section), [name]) => Key::find(section, name),
        _ => None,
    };
    found.map(|key| key.kind)
}

/// The value of an argument as TOML. Text keys take anything verbatim (a path may look like a
/// number); others are parsed as TOML if possible, else taken as a bare string or a bare list of
/// strings.
fn toml_text(kind: Option<ValueKind>, value: &str) -> String {
    let quoted = value.starts_with(['"', '\'', '[', '{']);
    let parsed = DeValue::parse(value).is_ok();
    let listed = value.contains(',') || value.starts_with('[');
    match kind {
        Some(ValueKind::Text) if !(quoted && parsed) => Value::Text(value.to_string()).to_string(),
        _ if parsed => value.to_string(),
        Some(ValueKind::Texts | ValueKind::TextOrTexts | ValueKind::Wholes | ValueKind::Counts) if listed => {
            let items = value.trim_start_matches('[').trim_end_matches(']').split(',');
            let items = items.map(str::trim).filter(|item| !item.is_empty());
            let items: Vec<String> = items.map(|item| bare_item(kind, item)).collect();
            format!("[{}]", items.join(", "))
        }
        Some(ValueKind::Texts) => format!("[{}]", Value::Text(value.to_string())),
        _ => Value::Text(value.to_string()).to_string(),
    }
}

fn bare_item(kind: Option<ValueKind>, item: &str) -> String {
    let keeps = (matches!(kind, Some(ValueKind::Wholes | ValueKind::Counts)) || item.starts_with(['"', '\'']))
        && DeValue::parse(item).is_ok();
    if keeps { item.to_string() } else { Value::Text(item.to_string()).to_string() }
}
