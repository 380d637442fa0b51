//! The experts of a layer, from any of the layouts in which they are published.
//!
//! Per expert (`experts.7.gate_proj.weight` `[width, hidden]`, `up_proj`, `down_proj` `[hidden, width]`), or fused: `experts.gate_up_proj`
//! `[experts, 2·width, hidden]` (gate rows, then up rows) and `experts.down_proj` `[experts, hidden, width]`, or both of these transposed in their last two
//! dimensions. Which of the fused two it is, the shapes of the pair tell: one of them may look the same both ways
//! (`2·width = hidden`, or `width = hidden`), never both. Names, shapes and formats of a layer are all checked before any
//! of it is read; numbers are borrowed from the file wherever they lie as they are wanted.

use crate::ModelError;
use crate::config::ExpertsConfig;
use crate::gptq::{self, GptqWeight};
use crate::source::{Format, Source, StoredTensor, Weight};
use isobit_kernels::op::QuantizedShape;
use isobit_proof::name::harmless;
use std::borrow::Cow;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsShape {
    pub experts: usize,
    /// Width inside an expert.
    pub width: usize,
    pub hidden: usize,
}

impl ExpertsShape {
    pub fn of(config: &ExpertsConfig, hidden: usize) -> Self {
        Self { experts: config.experts, width: config.width, hidden }
    }
}

/// The three matrices of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    Gate,
    Up,
    Down,
}

impl Projection {
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    /// Its module in an expert.
    pub fn module(self) -> &'static str {
        match self {
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }

    /// Rows and columns of one expert's matrix.
    pub fn shape(self, shape: ExpertsShape) -> [usize; 2] {
        match self {
            Self::Gate | Self::Up => [shape.width, shape.hidden],
            Self::Down => [shape.hidden, shape.width],
        }
    }
}

/// The experts of one layer.
#[derive(Clone)]
pub enum Experts<'a> {
    Stored(StoredExperts<'a>),
    Gptq(GptqExperts<'a>),
}

impl Experts<'_> {
    pub fn shape(&self) -> ExpertsShape {
        match self {
            Self::Stored(stored) => stored.shape(),
            Self::Gptq(gptq) => gptq.shape(),
        }
    }
}

/// Finds and checks the experts of the feed-forward module at `path` (`model.layers.3.mlp`). No number is read yet.
pub fn load<'a>(source: &'a dyn Source, path: &str, shape: ExpertsShape) -> Result<Experts<'a>, ModelError> {
    let start = format!("{path}.experts.");
    let place = Place { source, start, shape };
    let Some(names) = place.source.names_under(&place.start) else {
        let format = source.format(&place.weight(Projection::Gate, 0))?;
        return Ok(Experts::Stored(StoredExperts { place, layout: Layout::Single, format }));
    };
    let mut found = Found { fused: Vec::new(), parts: vec![[Part::Nothing; 3]; shape.experts], biases: Vec::new() };
    for name in &names {
        found.take(&place, name)?;
    }
    if let Some(name) = found.fused.first() {
        if let Some(single) = names.iter().find(|name| !found.fused.contains(name)) {
            return Err(wrong(single, format!("{name} is there too: experts come one by one or fused, not both")));
        }
        return fused(place);
    }
    for (path, outputs) in &found.biases {
        source.bias(path, *outputs, false)?;
    }
    single(place, &found.parts)
}

/// Names here may be a stranger's.
fn wrong(name: &str, what: String) -> ModelError {
    ModelError::Tensor { name: harmless(name, 200), what }
}

fn unread(path: &str) -> ModelError {
    wrong(&format!("{path}.qweight"), "this source does not read quantised matrices".to_string())
}

/// Where a layer's experts are.
#[derive(Clone)]
struct Place<'a> {
    source: &'a dyn Source,
    /// `model.layers.3.mlp.experts.`
    start: String,
    shape: ExpertsShape,
}

impl Place<'_> {
    fn path(&self, projection: Projection, expert: usize) -> String {
        format!("{}{expert}.{}", self.start, projection.module())
    }

    fn weight(&self, projection: Projection, expert: usize) -> String {
        format!("{}.weight", self.path(projection, expert))
    }

    fn gate_up(&self) -> String {
        format!("{}gate_up_proj", self.start)
    }

    fn down(&self) -> String {
        format!("{}down_proj", self.start)
    }
}

/// What a file holds of one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Nothing,
    Stored,
    Gptq,
}

/// What the names of a layer say.
struct Found {
    fused: Vec<String>,
    /// Per expert, in the order of `Projection::ALL`.
    parts: Vec<[Part; 3]>,
    /// Paths and outputs of modules with a bias.
    biases: Vec<(String, usize)>,
}

impl Found {
    fn take(&mut self, place: &Place, name: &str) -> Result<(), ModelError> {
        if name == place.gate_up() || name == place.down() {
            self.fused.push(name.to_string());
            return Ok(());
        }
        let mut rest = name[place.start.len()..].splitn(3, '.');
        let mut next = || rest.next().unwrap_or("");
        let (number, module, part) = (next(), next(), next());
        let expert = number.parse::<usize>().ok().filter(|expert| expert.to_string() == number);
        let index = Projection::ALL.iter().position(|projection| projection.module() == module);
        let (Some(expert), Some(index)) = (expert, index) else {
            return Err(wrong(name, "this is no weight of an expert".to_string()));
        };
        let count = place.shape.experts;
        let Some(parts) = self.parts.get_mut(expert) else {
            return Err(wrong(name, format!("expert {expert} is there, the config has {count}")));
        };
        let held = match part {
            "weight" => Part::Stored,
            "qweight" => Part::Gptq,
            "bias" => {
                let projection = Projection::ALL[index];
                self.biases.push((place.path(projection, expert), projection.shape(place.shape)[0]));
                return Ok(());
            }
            "weight_scale_inv" => return Ok(()),
            part if gptq::PARTS.contains(&part) => return Ok(()),
            _ => return Err(wrong(name, "this is no weight of an expert".to_string())),
        };
        if parts[index] != Part::Nothing {
            return Err(wrong(name, "there is a `weight` and a `qweight`".to_string()));
        }
        parts[index] = held;
        Ok(())
    }
}

/// One tensor for all experts, twice.
fn fused(place: Place<'_>) -> Result<Experts<'_>, ModelError> {
    let ExpertsShape { experts: e, width, hidden: h } = place.shape;
    let names = [place.gate_up(), place.down()];
    let missing = || "it is missing: a fused layer has `gate_up_proj` and `down_proj`".to_string();
    let mut found = Vec::new();
    for name in &names {
        found.push(place.source.shape(name).ok_or_else(|| wrong(name, missing()))?);
    }
    let plain = [vec![e, 2 * width, h], vec![e, h, width]];
    let turned = [vec![e, h, 2 * width], vec![e, width, h]];
    let layout = if found == plain {
        Layout::Fused
    } else if found == turned {
        Layout::Transposed
    } else {
        // Name the tensor that fits neither way; where each fits one way, the second, which contradicts the first.
        let at = usize::from(found[0] == plain[0] || found[0] == turned[0]);
        let what =
            format!("its shape is {:?}, the config says {:?} or, transposed, {:?}", found[at], plain[at], turned[at]);
        return Err(wrong(&names[at], what));
    };
    let format = place.source.format(&names[0])?;
    same_format(&names[1], place.source.format(&names[1])?, format)?;
    Ok(Experts::Stored(StoredExperts { place, layout, format }))
}

fn same_format(name: &str, found: Format, format: Format) -> Result<(), ModelError> {
    if found == format {
        return Ok(());
    }
    Err(wrong(name, format!("it comes as {found:?}, other experts of its layer as {format:?}")))
}

/// Three tensors for each expert.
fn single<'a>(place: Place<'a>, parts: &[[Part; 3]]) -> Result<Experts<'a>, ModelError> {
    let kind = parts.iter().flatten().copied().find(|part| *part != Part::Nothing).unwrap_or(Part::Stored);
    let format = match (kind, parts.first()) {
        (Part::Stored, Some([Part::Stored, ..])) => place.source.format(&place.weight(Projection::Gate, 0))?,
        _ => Format::F32,
    };
    for (expert, parts) in parts.iter().enumerate() {
        for (projection, part) in Projection::ALL.into_iter().zip(parts) {
            let name = match kind {
                Part::Gptq => format!("{}.qweight", place.path(projection, expert)),
                _ => place.weight(projection, expert),
            };
            if *part == Part::Nothing {
                return Err(wrong(&name, format!("it is missing; the config has {} experts", place.shape.experts)));
            }
            if *part != kind {
                return Err(wrong(
                    &name,
                    "it is missing: some experts of its layer are quantised, some are not".to_string(),
                ));
            }
            if kind == Part::Stored {
                check(&place, &name, projection, format)?;
            }
        }
    }
    Ok(match kind {
        Part::Gptq => Experts::Gptq(GptqExperts { place }),
        _ => Experts::Stored(StoredExperts { place, layout: Layout::Single, format }),
    })
}

fn check(place: &Place, name: &str, projection: Projection, format: Format) -> Result<(), ModelError> {
    let wanted = projection.shape(place.shape);
    if let Some(found) = place.source.shape(name)
        && found != wanted
    {
        return Err(wrong(name, format!("its shape is {found:?}, the config says {wanted:?}")));
    }
    same_format(name, place.source.format(name)?, format)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    Single,
    Fused,
    Transposed,
}

/// Experts whose numbers are stored as such.
#[derive(Clone)]
pub struct StoredExperts<'a> {
    place: Place<'a>,
    layout: Layout,
    format: Format,
}

impl<'a> StoredExperts<'a> {
    /// The format of all of them.
    pub fn format(&self) -> Format {
        self.format
    }

    pub fn shape(&self) -> ExpertsShape {
        self.place.shape
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// One matrix of one expert: `[width, hidden]` for gate and up, `[hidden, width]` for down.
    pub fn expert(&self, projection: Projection, expert: usize) -> Result<StoredTensor<'a>, ModelError> {
        let ExpertsShape { experts, width, hidden } = self.place.shape;
        assert!(expert < experts, "expert {expert} of {experts}");
        let [rows, columns] = projection.shape(self.place.shape);
        if self.layout == Layout::Single {
            return self.place.source.tensor(&self.place.weight(projection, expert), &[rows, columns]);
        }
        let whole = self.whole(projection)?;
        let tall = if projection == Projection::Down { hidden } else { 2 * width };
        if whole.bytes.is_empty() {
            // Shapes without numbers.
            return Ok(StoredTensor { shape: vec![rows, columns], ..whole });
        }
        let bytes = self.format.bytes();
        let start = expert * tall * columns * bytes;
        if self.layout == Layout::Fused {
            let start = start + if projection == Projection::Up { rows * columns * bytes } else { 0 };
            return Ok(part(whole, start, vec![rows, columns]));
        }
        let matrix = &whole.bytes[start..][..tall * columns * bytes];
        let first = if projection == Projection::Up { rows } else { 0 };
        let bytes = Cow::Owned(transposed(matrix, tall, first..first + rows, bytes));
        Ok(StoredTensor { format: self.format, shape: vec![rows, columns], bytes })
    }

    /// One matrix of all experts, one after another: `[experts, width, hidden]` or `[experts, hidden, width]`.
    pub fn stacked(&self, projection: Projection) -> Result<StoredTensor<'a>, ModelError> {
        let [rows, columns] = projection.shape(self.place.shape);
        let count = self.place.shape.experts;
        if self.layout == Layout::Fused && projection == Projection::Down {
            return self.whole(projection);
        }
        let mut bytes = Vec::with_capacity(count * rows * columns * self.format.bytes());
        for expert in 0..count {
            bytes.extend_from_slice(&self.expert(projection, expert)?.bytes);
            self.release_expert(projection, expert);
        }
        Ok(StoredTensor { format: self.format, shape: vec![count, rows, columns], bytes: Cow::Owned(bytes) })
    }

    /// Gate and up of all experts: `[experts, 2·width, hidden]`, of each expert gate rows, then up rows.
    pub fn stacked_gate_up(&self) -> Result<StoredTensor<'a>, ModelError> {
        let ExpertsShape { experts, width, hidden } = self.place.shape;
        if self.layout == Layout::Fused {
            return self.whole(Projection::Gate);
        }
        let mut bytes = Vec::with_capacity(2 * experts * width * hidden * self.format.bytes());
        for expert in 0..experts {
            for projection in [Projection::Gate, Projection::Up] {
                bytes.extend_from_slice(&self.expert(projection, expert)?.bytes);
                self.release_expert(projection, expert);
            }
        }
        let shape = vec![experts, 2 * width, hidden];
        Ok(StoredTensor { format: self.format, shape, bytes: Cow::Owned(bytes) })
    }

    /// The fused tensor that holds a projection.
    fn whole(&self, projection: Projection) -> Result<StoredTensor<'a>, ModelError> {
        let ExpertsShape { experts, width, hidden } = self.place.shape;
        let (name, [rows, columns]) = match projection {
            Projection::Gate | Projection::Up => (self.place.gate_up(), [2 * width, hidden]),
            Projection::Down => (self.place.down(), [hidden, width]),
        };
        let shape = if self.layout == Layout::Transposed { [experts, columns, rows] } else { [experts, rows, columns] };
        self.place.source.tensor(&name, &shape)
    }

    /// This matrix will not be asked for again. Fused ones go together, with `release`.
    pub fn release_expert(&self, projection: Projection, expert: usize) {
        if self.layout == Layout::Single {
            self.place.source.release_weight(&self.place.path(projection, expert));
        }
    }

    /// None of the layer's experts will be asked for again.
    pub fn release(&self) {
        if self.layout == Layout::Single {
            for expert in 0..self.place.shape.experts {
                for projection in Projection::ALL {
                    self.release_expert(projection, expert);
                }
            }
        } else {
            self.place.source.release(&self.place.gate_up());
            self.place.source.release(&self.place.down());
        }
    }
}

/// A matrix inside a tensor, from a byte on.
fn part(whole: StoredTensor<'_>, start: usize, shape: Vec<usize>) -> StoredTensor<'_> {
    let range = start..start + shape.iter().product::<usize>() * whole.format.bytes();
    let bytes = match whole.bytes {
        Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[range]),
        Cow::Owned(bytes) => Cow::Owned(bytes[range].to_vec()),
    };
    StoredTensor { format: whole.format, shape, bytes }
}

/// Some columns of a matrix whose rows have `width` elements of so many bytes, as rows.
fn transposed(matrix: &[u8], width: usize, columns: std::ops::Range<usize>, bytes: usize) -> Vec<u8> {
    let mut turned = Vec::with_capacity(columns.len() * (matrix.len() / width.max(1)));
    for column in columns {
        for row in matrix.chunks(width * bytes) {
            turned.extend_from_slice(&row[column * bytes..][..bytes]);
        }
    }
    turned
}

/// Experts of 4-bit integers.
#[derive(Clone)]
pub struct GptqExperts<'a> {
    place: Place<'a>,
}

impl GptqExperts<'_> {
    pub fn shape(&self) -> ExpertsShape {
        self.place.shape
    }

    /// What all experts' matrices are like; none of their integers is read.
    pub fn quantized_shape(&self, projection: Projection) -> Result<QuantizedShape, ModelError> {
        let [rows, columns] = projection.shape(self.place.shape);
        let mut all: Option<QuantizedShape> = None;
        for expert in 0..self.place.shape.experts {
            let path = self.place.path(projection, expert);
            let form = self.place.source.quantised(&path, rows, columns)?;
            let one = form.ok_or_else(|| unread(&path))?.shape(rows, columns);
            all = Some(all.map_or(one, |all| QuantizedShape {
                count: all.count + one.count,
                half_scales: all.half_scales && one.half_scales,
                ordered: all.ordered + one.ordered,
                ..one
            }));
        }
        all.ok_or_else(|| wrong(&self.place.start, "there are no experts".to_string()))
    }

    /// One matrix of one expert.
    pub fn expert(&self, projection: Projection, expert: usize) -> Result<GptqWeight, ModelError> {
        assert!(expert < self.place.shape.experts, "expert {expert} of {}", self.place.shape.experts);
        let [rows, columns] = projection.shape(self.place.shape);
        let path = self.place.path(projection, expert);
        match self.place.source.weight(&path, rows, columns)? {
            Weight::Gptq(weight) => Ok(weight),
            Weight::Stored(_) => Err(unread(&path)),
        }
    }

    /// This matrix will not be asked for again.
    pub fn release_expert(&self, projection: Projection, expert: usize) {
        self.place.source.release_weight(&self.place.path(projection, expert));
    }
}
