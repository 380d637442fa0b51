//! The schema of a Parquet file: a flat list of elements becomes a tree of columns that training
//! reads: texts, numbers, truth values, lists and structures of them. What JSON has no form for
//! (timestamps, decimals, bytes, maps) is refused, but only in a column that is used.

use super::thrift::Fields;

/// BOUND: levels of nesting of a column. A row of JSON may have about twice as many.
const DEPTH_MAX: usize = 48;

/// How values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Physical {
    Bool,
    Int32,
    Int64,
    Float,
    Double,
    Bytes,
    /// Bytes of one length.
    Fixed(usize),
}

/// What values mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    Bool,
    Signed,
    Unsigned32,
    Unsigned64,
    Float,
    Float16,
    Text,
}

/// A column of values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    /// Its path for messages: names of fields, without those of lists.
    pub(super) path: String,
    pub(super) physical: Physical,
    /// `Err` says what the column holds instead of something that is read.
    pub(super) meaning: Result<Meaning, String>,
    /// Largest definition and repetition levels.
    pub(super) definition: u32,
    pub(super) repetition: u32,
}

/// A field of a row, of a structure or of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) name: String,
    /// The definition level from which on it is not null.
    pub(super) definition: u32,
    pub(super) kind: Kind,
    /// Its columns, of those of the file.
    pub(super) leaves: std::ops::Range<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Value,
    Struct(Vec<Node>),
    List {
        /// The repetition level of all items but the first.
        repetition: u32,
        item: Box<Node>,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Schema {
    pub(super) fields: Vec<Node>,
    pub(super) leaves: Vec<Leaf>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Repetition {
    Required,
    Optional,
    Repeated,
}

/// One element of the list.
struct Element<'f> {
    name: &'f str,
    repetition: Repetition,
    children: usize,
    /// `ConvertedType` and the alternative of `LogicalType`.
    converted: Option<i64>,
    logical: Option<i16>,
    fields: &'f Fields<'f>,
}

/// Where the tree stands.
#[derive(Clone, Copy)]
struct Levels {
    definition: u32,
    repetition: u32,
    depth: usize,
}

impl Schema {
    pub(super) fn read(elements: &[&Fields<'_>]) -> Result<Self, String> {
        let root = elements.first().ok_or("its schema is empty")?;
        let count = root.size(5).unwrap_or(0);
        let mut builder = Builder { elements, at: 1, leaves: Vec::new() };
        let levels = Levels { definition: 0, repetition: 0, depth: 0 };
        // Every column takes an element, so a count that is too large ends with the elements.
        let mut fields = Vec::new();
        for _ in 0..count {
            fields.push(builder.field(levels, "")?);
        }
        if builder.at != elements.len() {
            return Err(format!("{} elements of its schema belong to no column", elements.len() - builder.at));
        }
        Ok(Self { fields, leaves: builder.leaves })
    }
}

struct Builder<'b, 'f> {
    elements: &'b [&'b Fields<'f>],
    at: usize,
    leaves: Vec<Leaf>,
}

impl<'b> Builder<'b, '_> {
    fn element(&mut self) -> Result<Element<'b>, String> {
        let fields: &'b Fields<'b> =
            self.elements.get(self.at).copied().ok_or("its schema names more columns than it has")?;
        self.at += 1;
        let name = fields.text(4).ok_or("a column of its schema has no name")?;
        let repetition = match fields.int(3) {
            Some(0) => Repetition::Required,
            Some(1) => Repetition::Optional,
            Some(2) => Repetition::Repeated,
            other => return Err(format!("column `{}` has the repetition {other:?}", name.escape_debug())),
        };
        let logical = fields.structure(10).and_then(Fields::first);
        Ok(Element {
            name,
            repetition,
            children: fields.size(5).unwrap_or(0),
            converted: fields.int(6),
            logical,
            fields,
        })
    }

    /// The next field, which stands in `parent`.
    fn field(&mut self, levels: Levels, parent: &str) -> Result<Node, String> {
        let element = self.element()?;
        let path = if parent.is_empty() { element.name.to_string() } else { format!("{parent}.{}", element.name) };
        self.of(&element, levels, &path)
    }

    fn of(&mut self, element: &Element<'b>, levels: Levels, path: &str) -> Result<Node, String> {
        let Levels { definition, repetition, depth } = levels;
        if depth > DEPTH_MAX {
            return Err(format!("column `{}…` is nested too deeply", path.get(..64).unwrap_or(path).escape_debug()));
        }
        match element.repetition {
            // A list without a group around it: it is never null.
            Repetition::Repeated => {
                let inner = Levels { definition: definition + 1, repetition: repetition + 1, depth: depth + 1 };
                let item = self.inside(element, inner, path)?;
                Ok(list(element.name, definition, item, repetition + 1))
            }
            Repetition::Optional => self.inside(element, Levels { definition: definition + 1, ..levels }, path),
            Repetition::Required => self.inside(element, levels, path),
        }
    }

    /// What an element holds, its own repetition aside.
    fn inside(&mut self, element: &Element<'b>, levels: Levels, path: &str) -> Result<Node, String> {
        let name = element.name.to_string();
        let first = self.leaves.len();
        if element.children == 0 {
            self.leaves.push(leaf(element, levels, path)?);
            return Ok(Node { name, definition: levels.definition, kind: Kind::Value, leaves: first..first + 1 });
        }
        let is_list = element.converted == Some(3) || element.logical == Some(3);
        if is_list && element.children == 1 {
            return self.list_in(element, levels, path);
        }
        let is_map = matches!(element.converted, Some(1 | 2)) || element.logical == Some(2);
        let levels = Levels { depth: levels.depth + 1, ..levels };
        let mut fields = Vec::new();
        for _ in 0..element.children {
            fields.push(self.field(levels, path)?);
        }
        if is_map || element.logical == Some(16) {
            let what = if is_map { "a map" } else { "variants" };
            self.leaves[first..].iter_mut().for_each(|leaf| leaf.meaning = Err(what.to_string()));
        }
        let leaves = first..self.leaves.len();
        Ok(Node { name, definition: levels.definition, kind: Kind::Struct(fields), leaves })
    }

    /// A group that is marked as a list. Its one child repeats, and holds the items or is an item
    /// itself: older files leave a level out.
    fn list_in(&mut self, element: &Element<'b>, levels: Levels, path: &str) -> Result<Node, String> {
        let repeated = self.element()?;
        if repeated.repetition != Repetition::Repeated {
            return Err(format!("list `{}` holds something that does not repeat", path.escape_debug()));
        }
        let inner =
            Levels { definition: levels.definition + 1, repetition: levels.repetition + 1, depth: levels.depth + 1 };
        let legacy = repeated.name == "array" || repeated.name == format!("{}_tuple", element.name);
        let wrapper = repeated.children == 1 && !legacy && {
            let child = self.elements.get(self.at).and_then(|child| child.int(3));
            child != Some(2)
        };
        let item = if wrapper {
            let item = self.element()?;
            self.of(&item, inner, path)?
        } else {
            self.inside(&repeated, inner, path)?
        };
        Ok(list(element.name, levels.definition, item, inner.repetition))
    }
}

fn list(name: &str, definition: u32, item: Node, repetition: u32) -> Node {
    let leaves = item.leaves.clone();
    Node { name: name.to_string(), definition, kind: Kind::List { repetition, item: Box::new(item) }, leaves }
}

fn leaf(element: &Element, levels: Levels, path: &str) -> Result<Leaf, String> {
    let physical = match element.fields.int(1) {
        Some(0) => Ok(Physical::Bool),
        Some(1) => Ok(Physical::Int32),
        Some(2) => Ok(Physical::Int64),
        // INT96 was for timestamps only.
        Some(3) => Ok(Physical::Fixed(12)),
        Some(4) => Ok(Physical::Float),
        Some(5) => Ok(Physical::Double),
        Some(6) => Ok(Physical::Bytes),
        Some(7) => element.fields.size(2).map(Physical::Fixed).ok_or("no length"),
        _ => Err("no type"),
    };
    let physical = physical.map_err(|what| format!("column `{}` has {what}", path.escape_debug()))?;
    Ok(Leaf {
        path: path.to_string(),
        physical,
        meaning: meaning(element, physical),
        definition: levels.definition,
        repetition: levels.repetition,
    })
}

/// What the values of a column mean; an error names what is not read.
fn meaning(element: &Element, physical: Physical) -> Result<Meaning, String> {
    let (converted, logical) = (element.converted, element.logical);
    let other = match (logical, converted) {
        (Some(5), _) | (None, Some(5)) => "decimals",
        (Some(6), _) | (None, Some(6)) => "dates",
        (Some(7), _) | (None, Some(7 | 8)) => "times",
        (Some(8), _) | (None, Some(9 | 10)) => "timestamps",
        (Some(13), _) | (None, Some(20)) => "BSON",
        (None, Some(21)) => "intervals",
        (Some(14), _) => "UUIDs",
        (Some(17 | 18), _) => "shapes",
        _ => "",
    };
    if !other.is_empty() {
        return Err(other.to_string());
    }
    match physical {
        Physical::Bool => Ok(Meaning::Bool),
        Physical::Float | Physical::Double => Ok(Meaning::Float),
        Physical::Fixed(2) if logical == Some(15) => Ok(Meaning::Float16),
        Physical::Fixed(12) if element.fields.int(1) == Some(3) => Err("timestamps".to_string()),
        Physical::Bytes if matches!(logical, Some(1 | 4 | 12)) || matches!(converted, Some(0 | 4 | 19)) => {
            Ok(Meaning::Text)
        }
        Physical::Bytes | Physical::Fixed(_) => Err("bytes that are not marked as text".to_string()),
        Physical::Int32 | Physical::Int64 => {
            let integer = element.fields.structure(10).and_then(|union| union.structure(10));
            let signed = integer.and_then(|integer| integer.flag(2));
            let unsigned = signed.map_or(matches!(converted, Some(11..=14)), |signed| !signed);
            Ok(match (unsigned, physical) {
                (false, _) => Meaning::Signed,
                (true, Physical::Int32) => Meaning::Unsigned32,
                (true, _) => Meaning::Unsigned64,
            })
        }
    }
}
