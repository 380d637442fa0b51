//! The experts of a layer, from any published layout.
//!
//! Per expert (`experts.7.gate_proj.weight` `[width, hidden]`, `up_proj`, `down_proj`
//! `[hidden, width]`), or fused: `experts.gate_up_proj` `[experts, 2·width, hidden]` (gate rows,
//! then up rows) and `experts.down_proj` `[experts, hidden, width]`, or both of these transposed in
//! their last two dimensions. The shapes of the pair decide which: one tensor may fit both ways
//! (`2·width = hidden`, or `width = hidden`), never both tensors. Nothing is read until everything
//! is checked.
//!
//! Where gate and up rows alternate (gpt-oss), the fused tensors are transposed, or MXFP4
//! (`mxfp4.rs`); the gate of a stored expert then stands for the first half of these rows, its up
//! for the second.

use crate::ModelError;
use crate::config::{ExpertsConfig, GateUpRows};
use crate::gptq::{self, GptqWeight};
use crate::mxfp4;
use crate::source::{FloatFormat, StoredTensor, Weight, WeightSource};
use isobit_kernels::op::QuantizedShape;
use std::borrow::Cow;
use std::ops::Range;

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

    /// Its module name within an expert.
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
    Mxfp4(Mxfp4Experts<'a>),
}

impl Experts<'_> {
    pub fn shape(&self) -> ExpertsShape {
        match self {
            Self::Stored(stored) => stored.shape(),
            Self::Gptq(gptq) => gptq.shape(),
            Self::Mxfp4(packed) => packed.shape(),
        }
    }

    /// Whether they are stored in fewer bits, so that only adapters can be trained.
    pub(crate) fn is_quantised(&self) -> bool {
        !matches!(self, Self::Stored(_))
    }

    /// Checks that the layout has gate and up rows in the order that the model expects.
    pub(crate) fn check_order(&self, rows: GateUpRows) -> Result<(), ModelError> {
        let alternates = rows == GateUpRows::Alternating;
        let one_by_one = |layer: &LayerExperts| {
            let what = "experts of this family are read from fused tensors, not one by one".to_string();
            Err(ModelError::tensor(&layer.path(Projection::Gate, 0), what))
        };
        match self {
            Self::Mxfp4(Mxfp4Experts { layer }) if !alternates => {
                let what = "MXFP4 is read only in models whose gate and up rows alternate".to_string();
                Err(ModelError::tensor(&format!("{}{}", layer.gate_up(), mxfp4::PARTS[0]), what))
            }
            Self::Gptq(GptqExperts { layer }) if alternates => one_by_one(layer),
            Self::Stored(StoredExperts { layer, layout, .. }) if alternates => match layout {
                ExpertsLayout::Fused => {
                    let ExpertsShape { experts, width, hidden } = layer.shape;
                    let shape = [experts, hidden, 2 * width];
                    Err(ModelError::tensor(
                        &layer.gate_up(),
                        format!("it is not transposed: the config says {shape:?}"),
                    ))
                }
                // A source that accepts any name has them in any order.
                ExpertsLayout::PerExpert if layer.source.names_under(&layer.start).is_some() => one_by_one(layer),
                ExpertsLayout::PerExpert | ExpertsLayout::Transposed => Ok(()),
            },
            _ => Ok(()),
        }
    }
}

/// Finds and checks the experts of the feed-forward module at `path` (`model.layers.3.mlp`). Reads
/// no weights yet.
pub fn load<'a>(source: &'a dyn WeightSource, path: &str, shape: ExpertsShape) -> Result<Experts<'a>, ModelError> {
    let start = format!("{path}.experts.");
    let layer = LayerExperts { source, start, shape };
    let Some(names) = layer.source.names_under(&layer.start) else {
        let format = source.format(&layer.weight(Projection::Gate, 0))?;
        return Ok(Experts::Stored(StoredExperts { layer, layout: ExpertsLayout::PerExpert, format }));
    };
    let mut found = Found::none(shape.experts);
    for name in &names {
        found.take(&layer, name)?;
    }
    if let Some(name) = found.fused.first().or(found.packed.first()) {
        if let Some(single) = found.single.first() {
            return Err(ModelError::tensor(
                single,
                format!("{name} is there too: experts come one by one or fused, not both"),
            ));
        }
        if let (Some(fused), Some(packed)) = (found.fused.first(), found.packed.first()) {
            return Err(ModelError::tensor(
                packed,
                format!("{fused} is there too: experts are numbers or MXFP4, not both"),
            ));
        }
        return if found.packed.is_empty() { fused(layer) } else { packed(layer) };
    }
    // Beside fused tensors, the builder knows whether there are biases.
    if let Some(name) = found.fused_biases.first() {
        return Err(ModelError::tensor(name, "this is not a weight of an expert"));
    }
    for (path, outputs) in &found.biases {
        source.bias(path, *outputs, false)?;
    }
    single(layer, &found.parts)
}

fn unread(path: &str) -> ModelError {
    ModelError::tensor(&format!("{path}.qweight"), "this source does not read quantised matrices")
}

/// Where the experts of a layer are.
#[derive(Clone)]
struct LayerExperts<'a> {
    source: &'a dyn WeightSource,
    /// `model.layers.3.mlp.experts.`
    start: String,
    shape: ExpertsShape,
}

impl LayerExperts<'_> {
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

    /// The fused tensor that holds a projection, and rows and columns of one expert's matrix in it.
    fn fused(&self, projection: Projection) -> (String, [usize; 2]) {
        let ExpertsShape { width, hidden, .. } = self.shape;
        match projection {
            Projection::Gate | Projection::Up => (self.gate_up(), [2 * width, hidden]),
            Projection::Down => (self.down(), [hidden, width]),
        }
    }
}

/// What a file holds for one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    Missing,
    Stored,
    Gptq,
}

/// What the names of a layer show.
struct Found {
    fused: Vec<String>,
    /// Parts of MXFP4 tensors.
    packed: Vec<String>,
    /// Biases of fused tensors.
    fused_biases: Vec<String>,
    /// Tensors of one expert.
    single: Vec<String>,
    /// Per expert, in the order of `Projection::ALL`.
    parts: Vec<[Presence; 3]>,
    /// Paths and output counts of modules with a bias.
    biases: Vec<(String, usize)>,
}

impl Found {
    fn none(experts: usize) -> Self {
        let parts = vec![[Presence::Missing; 3]; experts];
        let (fused, packed, fused_biases) = (Vec::new(), Vec::new(), Vec::new());
        Self { fused, packed, fused_biases, single: Vec::new(), parts, biases: Vec::new() }
    }

    fn take(&mut self, layer: &LayerExperts, name: &str) -> Result<(), ModelError> {
        for tensor in [layer.gate_up(), layer.down()] {
            match name.strip_prefix(&tensor) {
                Some("") => self.fused.push(name.to_string()),
                Some(part) if mxfp4::PARTS.contains(&part) => self.packed.push(name.to_string()),
                Some("_bias") => self.fused_biases.push(name.to_string()),
                _ => continue,
            }
            return Ok(());
        }
        self.single.push(name.to_string());
        let mut rest = name[layer.start.len()..].splitn(3, '.');
        let mut next = || rest.next().unwrap_or("");
        let (number, module, part) = (next(), next(), next());
        let expert = number.parse::<usize>().ok().filter(|expert| expert.to_string() == number);
        let index = Projection::ALL.iter().position(|projection| projection.module() == module);
        let (Some(expert), Some(index)) = (expert, index) else {
            return Err(ModelError::tensor(name, "this is not a weight of an expert"));
        };
        let count = layer.shape.experts;
        let Some(parts) = self.parts.get_mut(expert) else {
            return Err(ModelError::tensor(
                name,
                format!("it belongs to expert {expert}, but the config has {count} experts"),
            ));
        };
        let held = match part {
            "weight" => Presence::Stored,
            "qweight" => Presence::Gptq,
            "bias" => {
                let projection = Projection::ALL[index];
                self.biases.push((layer.path(projection, expert), projection.shape(layer.shape)[0]));
                return Ok(());
            }
            "weight_scale_inv" => return Ok(()),
            part if gptq::PARTS.contains(&part) => return Ok(()),
            _ => return Err(ModelError::tensor(name, "this is not a weight of an expert")),
        };
        if parts[index] != Presence::Missing {
            return Err(ModelError::tensor(name, "there is a `weight` and a `qweight`"));
        }
        parts[index] = held;
        Ok(())
    }
}

/// Two tensors, each for all experts.
fn fused(layer: LayerExperts<'_>) -> Result<Experts<'_>, ModelError> {
    let ExpertsShape { experts: e, width, hidden: h } = layer.shape;
    let names = [layer.gate_up(), layer.down()];
    let missing = || "it is missing: a fused layer has `gate_up_proj` and `down_proj`".to_string();
    let mut found = Vec::new();
    for name in &names {
        found.push(layer.source.shape(name).ok_or_else(|| ModelError::tensor(name, missing()))?);
    }
    let plain = [vec![e, 2 * width, h], vec![e, h, width]];
    let swapped = [vec![e, h, 2 * width], vec![e, width, h]];
    let layout = if found == plain {
        ExpertsLayout::Fused
    } else if found == swapped {
        ExpertsLayout::Transposed
    } else {
        // Name the tensor that fits neither way; if each fits one way, name the second, which
        // contradicts the first.
        let at = usize::from(found[0] == plain[0] || found[0] == swapped[0]);
        let what = format!(
            "its shape is {:?}, but the config says {:?} or, transposed, {:?}",
            found[at], plain[at], swapped[at]
        );
        return Err(ModelError::tensor(&names[at], what));
    };
    let format = layer.source.format(&names[0])?;
    same_format(&names[1], layer.source.format(&names[1])?, format)?;
    Ok(Experts::Stored(StoredExperts { layer, layout, format }))
}

/// Two MXFP4 tensors, each for all experts.
fn packed(layer: LayerExperts<'_>) -> Result<Experts<'_>, ModelError> {
    for projection in [Projection::Gate, Projection::Down] {
        let (name, [rows, columns]) = layer.fused(projection);
        for (part, shape) in mxfp4::PARTS.into_iter().zip(mxfp4::shapes(&name, layer.shape.experts, rows, columns)?) {
            let name = format!("{name}{part}");
            let missing = || "it is missing: an MXFP4 tensor has blocks and scales".to_string();
            let found = layer.source.shape(&name).ok_or_else(|| ModelError::tensor(&name, missing()))?;
            if found != shape {
                return Err(ModelError::tensor(
                    &name,
                    format!("its shape is {found:?}, but the config says {shape:?}"),
                ));
            }
        }
    }
    Ok(Experts::Mxfp4(Mxfp4Experts { layer }))
}

fn same_format(name: &str, found: FloatFormat, format: FloatFormat) -> Result<(), ModelError> {
    if found == format {
        return Ok(());
    }
    Err(ModelError::tensor(name, format!("it is stored as {found:?}, but other experts of its layer as {format:?}")))
}

/// Three tensors for each expert.
fn single<'a>(layer: LayerExperts<'a>, parts: &[[Presence; 3]]) -> Result<Experts<'a>, ModelError> {
    let kind = parts.iter().flatten().copied().find(|part| *part != Presence::Missing).unwrap_or(Presence::Stored);
    let format = match (kind, parts.first()) {
        (Presence::Stored, Some([Presence::Stored, ..])) => layer.source.format(&layer.weight(Projection::Gate, 0))?,
        _ => FloatFormat::F32,
    };
    for (expert, parts) in parts.iter().enumerate() {
        for (projection, part) in Projection::ALL.into_iter().zip(parts) {
            let name = match kind {
                Presence::Gptq => format!("{}.qweight", layer.path(projection, expert)),
                _ => layer.weight(projection, expert),
            };
            if *part == Presence::Missing {
                return Err(ModelError::tensor(
                    &name,
                    format!("it is missing; the config has {} experts", layer.shape.experts),
                ));
            }
            if *part != kind {
                return Err(ModelError::tensor(
                    &name,
                    "it is missing: some experts of its layer are quantised, some are not".to_string(),
                ));
            }
            if kind == Presence::Stored {
                check(&layer, &name, projection, format)?;
            }
        }
    }
    Ok(match kind {
        Presence::Gptq => Experts::Gptq(GptqExperts { layer }),
        _ => Experts::Stored(StoredExperts { layer, layout: ExpertsLayout::PerExpert, format }),
    })
}

fn check(layer: &LayerExperts, name: &str, projection: Projection, format: FloatFormat) -> Result<(), ModelError> {
    let wanted = projection.shape(layer.shape);
    if let Some(found) = layer.source.shape(name)
        && found != wanted
    {
        return Err(ModelError::tensor(name, format!("its shape is {found:?}, but the config says {wanted:?}")));
    }
    same_format(name, layer.source.format(name)?, format)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertsLayout {
    PerExpert,
    Fused,
    Transposed,
}

/// Experts stored as floating-point numbers.
#[derive(Clone)]
pub struct StoredExperts<'a> {
    layer: LayerExperts<'a>,
    layout: ExpertsLayout,
    format: FloatFormat,
}

impl<'a> StoredExperts<'a> {
    /// The common format.
    pub fn format(&self) -> FloatFormat {
        self.format
    }

    pub fn shape(&self) -> ExpertsShape {
        self.layer.shape
    }

    pub(crate) fn layout(&self) -> ExpertsLayout {
        self.layout
    }

    /// One matrix of one expert: `[width, hidden]` for gate and up, `[hidden, width]` for down.
    pub fn expert(&self, projection: Projection, expert: usize) -> Result<StoredTensor<'a>, ModelError> {
        let ExpertsShape { experts, width, hidden } = self.layer.shape;
        assert!(expert < experts, "expert {expert} of {experts}");
        let [rows, columns] = projection.shape(self.layer.shape);
        if self.layout == ExpertsLayout::PerExpert {
            return self.layer.source.tensor(&self.layer.weight(projection, expert), &[rows, columns]);
        }
        let whole = self.whole(projection)?;
        let tall = if projection == Projection::Down { hidden } else { 2 * width };
        if whole.bytes.is_empty() {
            // Shapes without data.
            return Ok(StoredTensor { shape: vec![rows, columns], ..whole });
        }
        let bytes = self.format.bytes();
        let start = expert * tall * columns * bytes;
        if self.layout == ExpertsLayout::Fused {
            let start = start + if projection == Projection::Up { rows * columns * bytes } else { 0 };
            return Ok(part(whole, start, vec![rows, columns]));
        }
        let matrix = &whole.bytes[start..][..tall * columns * bytes];
        let first = if projection == Projection::Up { rows } else { 0 };
        let bytes = Cow::Owned(transposed(matrix, tall, first..first + rows, bytes));
        Ok(StoredTensor { format: self.format, shape: vec![rows, columns], bytes })
    }

    /// One matrix of all experts, stacked: `[experts, width, hidden]` or
    /// `[experts, hidden, width]`.
    pub fn stacked(&self, projection: Projection) -> Result<StoredTensor<'a>, ModelError> {
        let [rows, columns] = projection.shape(self.layer.shape);
        let count = self.layer.shape.experts;
        if self.layout == ExpertsLayout::Fused && projection == Projection::Down {
            return self.whole(projection);
        }
        let mut bytes = Vec::with_capacity(count * rows * columns * self.format.bytes());
        for expert in 0..count {
            bytes.extend_from_slice(&self.expert(projection, expert)?.bytes);
            self.release_expert(projection, expert);
        }
        Ok(StoredTensor { format: self.format, shape: vec![count, rows, columns], bytes: Cow::Owned(bytes) })
    }

    /// Gate and up of all experts: `[experts, 2·width, hidden]`, per expert gate rows, then up
    /// rows.
    pub fn stacked_gate_up(&self) -> Result<StoredTensor<'a>, ModelError> {
        let ExpertsShape { experts, width, hidden } = self.layer.shape;
        if self.layout == ExpertsLayout::Fused {
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
        let experts = self.layer.shape.experts;
        let (name, [rows, columns]) = self.layer.fused(projection);
        let shape =
            if self.layout == ExpertsLayout::Transposed { [experts, columns, rows] } else { [experts, rows, columns] };
        self.layer.source.tensor(&name, &shape)
    }

    /// This matrix will not be requested again. Fused ones are released together, with `release`.
    pub fn release_expert(&self, projection: Projection, expert: usize) {
        if self.layout == ExpertsLayout::PerExpert {
            self.layer.source.release_weight(&self.layer.path(projection, expert));
        }
    }

    /// None of the layer's experts will be requested again.
    pub fn release(&self) {
        if self.layout == ExpertsLayout::PerExpert {
            for expert in 0..self.layer.shape.experts {
                for projection in Projection::ALL {
                    self.release_expert(projection, expert);
                }
            }
        } else {
            self.layer.source.release(&self.layer.gate_up());
            self.layer.source.release(&self.layer.down());
        }
    }
}

/// A matrix inside a tensor, starting at a byte offset.
fn part(whole: StoredTensor<'_>, start: usize, shape: Vec<usize>) -> StoredTensor<'_> {
    let range = start..start + shape.iter().product::<usize>() * whole.format.bytes();
    let bytes = match whole.bytes {
        Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[range]),
        Cow::Owned(bytes) => Cow::Owned(bytes[range].to_vec()),
    };
    StoredTensor { format: whole.format, shape, bytes }
}

/// Some columns of a matrix, as rows; its rows have `width` elements of `bytes` bytes each.
fn transposed(matrix: &[u8], width: usize, columns: std::ops::Range<usize>, bytes: usize) -> Vec<u8> {
    let mut rows = Vec::with_capacity(columns.len() * (matrix.len() / width.max(1)));
    for column in columns {
        for row in matrix.chunks(width * bytes) {
            rows.extend_from_slice(&row[column * bytes..][..bytes]);
        }
    }
    rows
}

/// Experts stored as 4-bit integers.
#[derive(Clone)]
pub struct GptqExperts<'a> {
    layer: LayerExperts<'a>,
}

impl GptqExperts<'_> {
    pub fn shape(&self) -> ExpertsShape {
        self.layer.shape
    }

    /// The common shape of all experts' matrices; reads none of their integers.
    pub fn quantized_shape(&self, projection: Projection) -> Result<QuantizedShape, ModelError> {
        let [rows, columns] = projection.shape(self.layer.shape);
        let mut all: Option<QuantizedShape> = None;
        for expert in 0..self.layer.shape.experts {
            let path = self.layer.path(projection, expert);
            let form = self.layer.source.quantised(&path, rows, columns)?;
            let one = form.ok_or_else(|| unread(&path))?.shape(rows, columns);
            all = Some(all.map_or(one, |all| QuantizedShape {
                count: all.count + one.count,
                half_scales: all.half_scales && one.half_scales,
                ordered: all.ordered + one.ordered,
                ..one
            }));
        }
        all.ok_or_else(|| ModelError::tensor(&self.layer.start, "there are no experts"))
    }

    /// One matrix of one expert.
    pub fn expert(&self, projection: Projection, expert: usize) -> Result<GptqWeight, ModelError> {
        assert!(expert < self.layer.shape.experts, "expert {expert} of {}", self.layer.shape.experts);
        let [rows, columns] = projection.shape(self.layer.shape);
        let path = self.layer.path(projection, expert);
        match self.layer.source.weight(&path, rows, columns)? {
            Weight::Gptq(weight) => Ok(weight),
            Weight::Stored(_) => Err(unread(&path)),
        }
    }

    /// This matrix will not be requested again.
    pub fn release_expert(&self, projection: Projection, expert: usize) {
        self.layer.source.release_weight(&self.layer.path(projection, expert));
    }
}

/// Experts stored as MXFP4: gate and up are one matrix of alternating rows.
#[derive(Clone)]
pub struct Mxfp4Experts<'a> {
    layer: LayerExperts<'a>,
}

impl<'a> Mxfp4Experts<'a> {
    pub fn shape(&self) -> ExpertsShape {
        self.layer.shape
    }

    /// The tensor that holds a projection.
    fn packed(&self, projection: Projection) -> Result<mxfp4::Packed<'a>, ModelError> {
        let (name, [rows, columns]) = self.layer.fused(projection);
        mxfp4::Packed::read(self.layer.source, &name, self.layer.shape.experts, rows, columns)
    }

    /// The common shape of all experts' matrices.
    pub fn quantized_shape(&self, projection: Projection) -> Result<QuantizedShape, ModelError> {
        self.packed(projection)?.shape()
    }

    /// The matrix of one expert in the tensor that holds a projection: gate and up together.
    /// `shape` is that of all.
    pub fn expert(
        &self,
        projection: Projection,
        expert: usize,
        shape: QuantizedShape,
    ) -> Result<GptqWeight, ModelError> {
        Ok(self.packed(projection)?.matrix(expert, shape.half_scales))
    }

    /// The rows of gate and up are halves of the matrix that holds both.
    fn rows(&self, projection: Projection, expert: usize) -> Range<usize> {
        let ExpertsShape { width, hidden, .. } = self.layer.shape;
        match projection {
            Projection::Gate => 2 * width * expert..2 * width * expert + width,
            Projection::Up => 2 * width * expert + width..2 * width * (expert + 1),
            Projection::Down => hidden * expert..hidden * (expert + 1),
        }
    }

    /// The numbers of one expert's matrix. Gate stands for the first half of the rows that take
    /// turns, up for the second.
    pub(crate) fn expanded(&self, projection: Projection, expert: usize) -> Result<StoredTensor<'a>, ModelError> {
        let bytes = self.packed(projection)?.expanded(self.rows(projection, expert))?;
        let shape = projection.shape(self.layer.shape).to_vec();
        Ok(StoredTensor { format: FloatFormat::Bf16, shape, bytes: Cow::Owned(bytes) })
    }

    /// One expert's gate, up or down matrix as blocks of a GGUF file: per 32 numbers of a row the
    /// scale, then 16 bytes, number `i` below number `i + 16`.
    pub fn gguf_blocks(&self, projection: Projection, expert: usize) -> Result<Vec<u8>, ModelError> {
        let ExpertsShape { width, hidden, .. } = self.layer.shape;
        let rows: Vec<usize> = match projection {
            Projection::Gate => (0..width).map(|row| 2 * (width * expert + row)).collect(),
            Projection::Up => (0..width).map(|row| 2 * (width * expert + row) + 1).collect(),
            Projection::Down => (hidden * expert..hidden * (expert + 1)).collect(),
        };
        self.packed(projection)?.gguf_blocks(&rows)
    }

    /// None of the layer's experts will be requested again.
    pub fn release(&self) {
        for name in [self.layer.gate_up(), self.layer.down()] {
            for part in mxfp4::PARTS {
                self.layer.source.release(&format!("{name}{part}"));
            }
        }
    }
}
