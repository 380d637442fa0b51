//! GGUF files, which llama.cpp and what is built on it load: a model with its vocabulary, or a LoRA
//! adapter. `container.rs` is the file format, `numbers.rs` its number formats, `vocabulary.rs` the
//! tokenizer; llama.cpp's names are in `isobit_models::gguf`.

mod container;
mod numbers;
mod sentencepiece;
mod vocabulary;

pub use numbers::GgmlType;

use super::{check_signal, check_target};
use crate::prepare::RunError;
use container::{ALIGNMENT, Listed};
use isobit_kernels::Backend;
use isobit_models::gguf::interleaved_row;
use isobit_models::{
    GgufModel, GgufSource, GgufTensor, GgufValue, LowRankFactors, Merged, ModelError, Projection, Weights,
};
use isobit_numerics::gguf_blocks::BLOCK;
use isobit_proof::atomic::AtomicFile;
use isobit_proof::{FileError, disk};
use numbers::Numbers;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Version of the block formats, which files that use them state.
const BLOCKS_VERSION: u32 = 2;

/// A finished file that does not have its name yet.
pub struct UnpublishedFile {
    file: AtomicFile,
    target: PathBuf,
    written: WrittenFile,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenFile {
    pub tensors: usize,
    /// What llama.cpp does differently under circumstances that a user should know.
    pub notes: Vec<String>,
}

impl UnpublishedFile {
    /// Makes the file appear under its name.
    pub fn publish(self) -> Result<WrittenFile, RunError> {
        check_signal()?;
        check_target(&self.target)?;
        if let Err(error) = self.file.commit_new() {
            // Taken in the meantime.
            check_target(&self.target)?;
            return Err(error.into());
        }
        Ok(self.written)
    }
}

/// How a file is written.
#[derive(Clone, Debug)]
pub struct GgufSettings {
    pub kind: GgmlType,
    /// `general.name`
    pub name: String,
    /// llama.cpp's name for how text is cut, if not found by its expression.
    pub pre: Option<String>,
}

/// Writes a model, with its adapter merged if there is one.
pub fn model<B: Backend>(
    backend: &B,
    folder: &Path,
    weights: &Weights,
    merged: &Merged<'_>,
    settings: &GgufSettings,
    target: &Path,
) -> Result<UnpublishedFile, RunError> {
    let model = GgufModel::of(merged.config(), merged.tied())?;
    let kind = settings.kind;
    let mut keys = general(model.architecture, "model", settings);
    let kinds = kinds(merged, &model, kind)?;
    if kinds.iter().any(|kind| kind.is_blocks()) {
        keys.push(("general.quantization_version".to_string(), GgufValue::U32(BLOCKS_VERSION)));
    }
    keys.extend(model.keys);
    keys.extend(vocabulary::keys(folder, merged.config().vocabulary, settings.pre.as_deref())?);
    let listed: Vec<Listed> = model
        .tensors
        .iter()
        .zip(kinds)
        .map(|(tensor, kind)| Listed { name: tensor.name.clone(), shape: tensor.shape.clone(), kind })
        .collect();
    let file = write(target, &keys, &listed, |at, numbers| {
        let tensor = &model.tensors[at];
        if numbers.kind == GgmlType::Mxfp4 {
            return codes(merged, tensor, numbers);
        }
        values(backend, weights, merged, tensor, &mut |values| numbers.put(values))
    })?;
    let mut notes = model.notes;
    if !merged.changed().is_empty() && kind != GgmlType::F32 {
        notes.push(format!(
            "{} rounds the merged weights, and little of a small adapter may be left: evaluate the result, or write \
             `--type f32`; `isobit export merge` says how much bfloat16 leaves",
            kind.name()
        ));
    }
    Ok(UnpublishedFile { written: WrittenFile { notes, ..file.written }, ..file })
}

/// Writes the adapter alone.
pub fn adapter(merged: &Merged<'_>, settings: &GgufSettings, target: &Path) -> Result<UnpublishedFile, RunError> {
    let model = GgufModel::of(merged.config(), merged.config().tied)?;
    let mut factors = Vec::new();
    for tensor in &model.tensors {
        let found = match &tensor.source {
            _ if !tensor.adapted => None,
            GgufSource::Tensor(name) | GgufSource::Interleaved(name, _) => merged.factors_of(name)?,
            GgufSource::Experts { path, shape, projection, alternating } => {
                merged.expert_factors(path, *shape, *projection, *alternating)?
            }
            _ => None,
        };
        if let Some(found) = found {
            check_adapted(tensor)?;
            factors.push((tensor, found));
        }
    }
    check_ends(merged, &factors)?;
    // llama.cpp takes an alpha of zero for a scale of one: there B is zero.
    let scaled = factors.iter().find(|(_, of)| of.scale != 0.0).map(|(_, of)| alpha_of(of));
    let Some(alpha) = scaled.or_else(|| factors.first().map(|(_, of)| of.rank as f32)) else {
        return Err(ModelError::Gguf("the adapter changes nothing that llama.cpp adapts".to_string()).into());
    };
    let mut keys = general(model.architecture, "adapter", settings);
    keys.push(("adapter.type".to_string(), GgufValue::Text("lora".to_string())));
    keys.push(("adapter.lora.alpha".to_string(), GgufValue::F32(alpha)));
    let listed: Vec<Listed> = factors
        .iter()
        .flat_map(|(tensor, LowRankFactors { experts, rank, outputs, inputs, .. })| {
            [("lora_a", [*rank, *inputs]), ("lora_b", [*outputs, *rank])].map(|(factor, matrix)| {
                let outer = if tensor.shape.len() > 2 { vec![*experts] } else { Vec::new() };
                let shape = outer.into_iter().chain(matrix).collect();
                Listed { name: format!("{}.{factor}", tensor.name), shape, kind: settings.kind }
            })
        })
        .collect();
    write(target, &keys, &listed, |at, numbers| {
        let (tensor, of) = &factors[at / 2];
        if at % 2 == 0 { numbers.put(&of.a) } else { numbers.put(&scaled_b(tensor, of, alpha)) }
    })
}

/// Keys that every file has.
fn general(architecture: &str, of: &str, settings: &GgufSettings) -> Vec<(String, GgufValue)> {
    let text = |key: &str, value: &str| (format!("general.{key}"), GgufValue::Text(value.to_string()));
    vec![
        text("architecture", architecture),
        text("type", of),
        text("name", &settings.name),
        ("general.file_type".to_string(), GgufValue::U32(settings.kind.file_type())),
    ]
}

/// The format of a tensor in a file of some format: blocks need rows of whole blocks, and the table
/// and the head suffer most from four bits.
fn kind_of(tensor: &GgufTensor, kind: GgmlType) -> GgmlType {
    let row = tensor.shape.last().copied().unwrap_or(0);
    let is_end = ["token_embd.weight", "output.weight"].contains(&tensor.name.as_str());
    match kind {
        _ if tensor.exact => GgmlType::F32,
        kind if kind.is_blocks() && !row.is_multiple_of(BLOCK) => GgmlType::F16,
        GgmlType::Q4_0 if is_end => GgmlType::Q8_0,
        kind => kind,
    }
}

/// The formats of all tensors. Experts that are stored as MXFP4 stay so, unless everything is to be
/// float32.
fn kinds(merged: &Merged<'_>, model: &GgufModel, kind: GgmlType) -> Result<Vec<GgmlType>, RunError> {
    let of = |tensor: &GgufTensor| match &tensor.source {
        GgufSource::Experts { path, shape, projection, .. }
            if kind != GgmlType::F32 && merged.packed_experts(path, *shape, *projection)?.is_some() =>
        {
            Ok(GgmlType::Mxfp4)
        }
        _ => Ok(kind_of(tensor, kind)),
    };
    model.tensors.iter().map(of).collect()
}

/// Writes the codes of experts as they are.
fn codes(merged: &Merged<'_>, tensor: &GgufTensor, numbers: &mut Numbers<'_>) -> Result<(), RunError> {
    let GgufSource::Experts { path, shape, projection, .. } = &tensor.source else {
        unreachable!("only experts are stored as MXFP4");
    };
    let packed = merged.packed_experts(path, *shape, *projection)?;
    let packed = packed.expect("the list of tensors has the format of those that are there");
    for expert in 0..shape.experts {
        numbers.bytes(&packed.gguf_blocks(*projection, expert)?)?;
    }
    Ok(())
}

type Put<'p> = &'p mut dyn FnMut(&[f32]) -> Result<(), RunError>;

/// Passes on the numbers of a tensor.
fn values<B: Backend>(
    backend: &B,
    weights: &Weights,
    merged: &Merged<'_>,
    tensor: &GgufTensor,
    put: Put<'_>,
) -> Result<(), RunError> {
    // Passes on what `make` makes of every so many values.
    let in_parts = |name: &str, length: usize, make: &dyn Fn(&[f32]) -> Vec<f32>, put: Put<'_>| {
        let mut held: Vec<f32> = Vec::new();
        merged.values(backend, &weights.names().in_file(name), &mut |values| {
            held.extend_from_slice(values);
            let rest = held.split_off(held.len() / length * length);
            let made: Vec<f32> = held.chunks(length).flat_map(make).collect();
            held = rest;
            put(&made)
        })
    };
    match &tensor.source {
        GgufSource::Made(values) => put(values),
        GgufSource::Tensor(name) => merged.values(backend, &weights.names().in_file(name), put),
        GgufSource::PlusOne(name) => {
            #[expect(clippy::float_arithmetic, reason = "a convention of another program")]
            let plus_one = |values: &[f32]| values.iter().map(|value| value + 1.0).collect();
            in_parts(name, 1, &plus_one, put)
        }
        GgufSource::Every { name, step, at } => in_parts(name, *step, &|values| vec![values[*at]], put),
        GgufSource::Interleaved(name, heads) => {
            let (rows, width) = (tensor.shape[0] / heads, tensor.shape.get(1).copied().unwrap_or(1));
            in_parts(name, rows * width, &|head| interleaved(head, rows, width), put)
        }
        GgufSource::HeadRows { name, head_rows, rows, columns, transposed } => {
            let part = |head: &[f32]| head_rows_of(head, rows.clone(), *columns, *transposed);
            in_parts(name, head_rows * columns, &part, put)
        }
        GgufSource::Experts { path, shape, projection, alternating } => (0..shape.experts).try_for_each(|expert| {
            if !alternating || *projection == Projection::Down {
                return merged.expert(backend, path, *shape, (*projection, expert), put);
            }
            // Both halves of the matrix whose rows take turns.
            let mut both = Vec::with_capacity(2 * shape.width * shape.hidden);
            for half in [Projection::Gate, Projection::Up] {
                merged.expert(backend, path, *shape, (half, expert), &mut |values| {
                    both.extend_from_slice(values);
                    Ok::<(), RunError>(())
                })?;
            }
            let first = usize::from(*projection == Projection::Up);
            both.chunks(shape.hidden).skip(first).step_by(2).try_for_each(&mut *put)
        }),
    }
}

/// Some rows of a head `[rows, columns]`.
fn head_rows_of(head: &[f32], rows: Range<usize>, columns: usize, transposed: bool) -> Vec<f32> {
    let part = &head[rows.start * columns..rows.end * columns];
    if !transposed {
        return part.to_vec();
    }
    (0..columns).flat_map(|column| part.iter().skip(column).step_by(columns).copied()).collect()
}

/// The rows of one head in llama.cpp's order.
fn interleaved(head: &[f32], rows: usize, width: usize) -> Vec<f32> {
    (0..rows).flat_map(|row| head[interleaved_row(row, rows) * width..][..width].iter().copied()).collect()
}

/// The alpha for which llama.cpp computes the scale of this adapter.
#[expect(clippy::float_arithmetic, reason = "a setting of another program")]
fn alpha_of(of: &LowRankFactors) -> f32 {
    (f64::from(of.scale) * of.rank as f64) as f32
}

/// B in llama.cpp's row order. A file has one alpha: where it gives another scale, B makes up for
/// it.
#[expect(clippy::float_arithmetic, reason = "a setting of another program")]
fn scaled_b(tensor: &GgufTensor, of: &LowRankFactors, alpha: f32) -> Vec<f32> {
    let mut b = match tensor.source {
        GgufSource::Interleaved(_, heads) => {
            let rows = of.outputs / heads;
            of.b.chunks(rows * of.rank).flat_map(|head| interleaved(head, rows, of.rank)).collect()
        }
        _ => of.b.clone(),
    };
    let given = alpha / of.rank as f32;
    if given != of.scale {
        let factor = f64::from(of.scale) / f64::from(given);
        for value in &mut b {
            *value = (f64::from(*value) * factor) as f32;
        }
    }
    b
}

fn check_adapted(tensor: &GgufTensor) -> Result<(), RunError> {
    if tensor.name == "token_embd.weight" {
        let what = "an adapter on the embedding table is not written as GGUF yet: merge it (`--merge`)";
        return Err(ModelError::Gguf(what.to_string()).into());
    }
    Ok(())
}

/// Whatever the adapter changes must be in the file: llama.cpp rejects an adapter on a head that is
/// tied to its table, and has none on routers.
fn check_ends(merged: &Merged<'_>, factors: &[(&GgufTensor, LowRankFactors)]) -> Result<(), RunError> {
    let written = |name: &str| {
        factors.iter().any(|(tensor, _)| match &tensor.source {
            GgufSource::Tensor(of) | GgufSource::Interleaved(of, _) => of == name,
            GgufSource::Experts { path, .. } => name.starts_with(&format!("{path}.experts.")),
            _ => false,
        })
    };
    match merged.changed().into_iter().find(|name| !written(name)) {
        None => Ok(()),
        Some(name) => {
            let what = format!("llama.cpp has no adapters on {name} of such a model: merge it (`--merge`)");
            Err(ModelError::Gguf(what).into())
        }
    }
}

/// Writes a file; `fill` passes on the tensor with this index.
fn write(
    target: &Path,
    keys: &[(String, GgufValue)],
    tensors: &[Listed],
    mut fill: impl FnMut(usize, &mut Numbers<'_>) -> Result<(), RunError>,
) -> Result<UnpublishedFile, RunError> {
    check_target(target)?;
    if let Some(parent) = target.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        disk::create_folders(parent).map_err(|error| FileError::from_io("write", parent, error))?;
    }
    let mut file = AtomicFile::create(target)?;
    file.write(&container::head(keys, tensors))?;
    for (at, tensor) in tensors.iter().enumerate() {
        let mut numbers = Numbers { file: &mut file, kind: tensor.kind, name: &tensor.name, written: 0 };
        fill(at, &mut numbers)?;
        let written = numbers.written;
        assert_eq!(written, tensor.bytes(), "{} is written whole", tensor.name);
        let padding = written.next_multiple_of(ALIGNMENT) - written;
        file.write(&vec![0; padding as usize])?;
    }
    let written = WrittenFile { tensors: tensors.len(), notes: Vec::new() };
    Ok(UnpublishedFile { file, target: target.to_path_buf(), written })
}
