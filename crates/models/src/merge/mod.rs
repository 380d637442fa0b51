//! A model with an adapter added to its weights, tensor by tensor: what `export` writes.
//!
//! `Merged::new` settles which tensors change before a number is read; every tensor of the adapter
//! must belong somewhere. Tensors then come in the layout of the base's files, quantised matrices
//! expanded, a panel of rows at a time (`delta.rs` has the arithmetic), so memory does not grow
//! with the model.

mod delta;
mod quantised;
mod targets;

use crate::ModelError;
use crate::adapter::LoraConfig;
use crate::config::{Config, Quantization};
use crate::experts::{self, Experts, ExpertsShape, Mxfp4Experts, Projection};
use crate::int4;
use crate::mxfp4;
use crate::source::{FloatFormat, StoredTensor, Weight, WeightSource, stored};
use crate::weights::{Copied, Weights};
use delta::{Factors, Orientation};
use quantised::QuantisedTensors;

pub use delta::LowRankFactors;
use isobit_kernels::{Backend, DeviceFailure};
use isobit_proof::safetensors::{Dtype, SafeTensors};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use targets::{Change, Delta};

pub(crate) const TABLE: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";

/// Factors kept in memory: the tensors of one layer's experts lie side by side in files.
const RECENT: usize = 3;

/// A model and the adapter that is added to it.
pub struct Merged<'a> {
    config: &'a Config,
    weights: &'a Weights,
    adapter: Option<&'a SafeTensors>,
    deltas: Vec<Delta>,
    /// By our name of the tensor, in the layout of the files.
    changes: BTreeMap<String, Change>,
    recent: RefCell<Vec<(usize, Rc<Factors>)>>,
    /// Tensors whose numbers are those of the quantised base.
    quantised: QuantisedTensors,
    /// Whether the model's head is its embedding table, and the adapter changes only one of them.
    untied: bool,
}

/// A tensor of the merged model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergedTensor {
    /// In files.
    pub name: String,
    pub shape: Vec<usize>,
    /// How the base stores it; for a quantised matrix, its packed integers or float8.
    pub stored: Dtype,
    pub kind: MergedKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergedKind {
    /// Numbers of the base.
    Kept,
    /// A matrix of the base that is quantised, in its file or while it is loaded, as numbers.
    Expanded,
    /// Numbers with an adapter added, or in place of the base's.
    Changed,
    /// No numbers: copied as bytes.
    Opaque,
}

/// Receives consecutive values of a tensor.
pub type Put<'p, E> = &'p mut dyn FnMut(&[f32]) -> Result<(), E>;

/// The same with the base's values, where an adapter is added to them.
pub type PutBoth<'p, E> = &'p mut dyn FnMut(&[f32], Option<&[f32]>) -> Result<(), E>;

impl<'a> Merged<'a> {
    /// Settles which tensors the adapter changes. An error if it does not match the model.
    pub fn new(
        config: &'a Config,
        weights: &'a Weights,
        adapter: Option<(&LoraConfig, &'a SafeTensors)>,
    ) -> Result<Self, ModelError> {
        let (mut deltas, mut changes) = (Vec::new(), BTreeMap::new());
        match adapter {
            Some((lora, file)) => (deltas, changes) = targets::of(config, weights, lora, file)?,
            None => targets::check(config, weights)?,
        }
        let untied = config.tied && [TABLE, HEAD].iter().any(|name| changes.contains_key(*name));
        let adapter = adapter.map(|(_, file)| file);
        let quantised = QuantisedTensors::of(config, weights)?;
        Ok(Self { config, weights, adapter, deltas, changes, recent: RefCell::default(), quantised, untied })
    }

    pub fn config(&self) -> &'a Config {
        self.config
    }

    /// Whether the head of the result is tied to its embedding table.
    pub fn tied(&self) -> bool {
        self.config.tied && !self.untied
    }

    /// Whether the base stores matrices in fewer bits, so that the result is expanded.
    pub fn is_expanded(&self) -> bool {
        self.config.quantization != Quantization::None
    }

    /// Every tensor of the result, in the layout of the base's files, sorted by name.
    pub fn tensors(&self) -> Result<Vec<MergedTensor>, ModelError> {
        let (files, names) = (self.weights.tensor_files(), self.weights.names());
        let mut all = Vec::new();
        for name in files.names() {
            let here = names.here(name);
            // A stored copy of the tied table is written anew, or not at all.
            if self.config.tied && name == HEAD {
                continue;
            }
            let packed = name.strip_suffix(".qweight");
            if let (Some(path), Some(here)) = (packed, &here) {
                all.push(self.expanded(path, here)?);
                continue;
            }
            if let Some((whole, shape)) = mxfp4::whole(self.weights.tensor_files(), name) {
                if let Some(shape) = shape {
                    let is_changed = names.here(whole).is_some_and(|here| self.changes.contains_key(&*here));
                    let kind = if is_changed { MergedKind::Changed } else { MergedKind::Expanded };
                    all.push(MergedTensor { name: whole.to_string(), shape: shape.to_vec(), stored: Dtype::U8, kind });
                }
                continue;
            }
            let tensor = match self.weights.copied(name)? {
                None => continue,
                Some(Copied::Numbers(tensor)) => tensor,
                Some(Copied::AsStored(_)) if self.is_part_of_int4(name) => continue,
                // The bias of a 4-bit module, say.
                Some(Copied::AsStored(tensor)) if is_number(tensor.dtype) => tensor,
                Some(Copied::AsStored(tensor)) => {
                    let (shape, stored) = (tensor.shape.to_vec(), tensor.dtype);
                    all.push(MergedTensor { name: name.to_string(), shape, stored, kind: MergedKind::Opaque });
                    continue;
                }
            };
            let is_changed = here.as_ref().is_some_and(|here| self.changes.contains_key(&**here));
            let is_quantised = here.is_some_and(|here| self.quantised.contains(&here));
            let kind = match tensor.dtype {
                _ if is_changed => MergedKind::Changed,
                Dtype::F8E4M3 | Dtype::U8 => MergedKind::Expanded,
                _ if is_quantised => MergedKind::Expanded,
                _ => MergedKind::Kept,
            };
            let shape = self.weights.numbers_shape(&tensor)?;
            all.push(MergedTensor { name: name.to_string(), shape, stored: tensor.dtype, kind });
        }
        if self.untied {
            let table = names.in_file(TABLE);
            let tensor = files.get(&table)?;
            let (shape, stored) = (tensor.shape.to_vec(), tensor.dtype);
            all.push(MergedTensor { name: HEAD.to_string(), shape, stored, kind: MergedKind::Changed });
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// The matrix of a 4-bit module.
    fn expanded(&self, path: &str, here: &str) -> Result<MergedTensor, ModelError> {
        let name = format!("{path}.weight");
        let module = here.strip_suffix(".qweight").unwrap_or(here);
        let changed = self.changes.contains_key(&format!("{module}.weight"));
        let shape = self.int4_shape(module)?.to_vec();
        let kind = if changed { MergedKind::Changed } else { MergedKind::Expanded };
        Ok(MergedTensor { name, shape, stored: Dtype::I32, kind })
    }

    /// Whether a tensor of the file went into the numbers of a 4-bit matrix.
    fn is_part_of_int4(&self, name: &str) -> bool {
        let Some((path, part)) = name.rsplit_once('.') else { return false };
        crate::gptq::PARTS.contains(&part) && self.weights.tensor_files().contains(&format!("{path}.qweight"))
    }

    /// Outputs and inputs of a 4-bit module.
    fn int4_shape(&self, path: &str) -> Result<[usize; 2], ModelError> {
        let name = format!("{path}.qweight");
        let shape = self.weights.shape(&name).and_then(|shape| self.weights.int4_shape(&shape));
        shape.ok_or_else(|| ModelError::Tensor { name, what: "it is not a matrix".to_string() })
    }

    /// The values of a tensor of [`Self::tensors`], given its name in files, in order.
    pub fn values<B: Backend, E>(&self, backend: &B, name: &str, put: Put<'_, E>) -> Result<(), E>
    where
        E: From<ModelError> + From<DeviceFailure>,
    {
        self.values_and_base(backend, name, &mut |values, _| put(values))
    }

    /// The same beside the base's values.
    pub fn values_and_base<B: Backend, E>(&self, backend: &B, name: &str, put: PutBoth<'_, E>) -> Result<(), E>
    where
        E: From<ModelError> + From<DeviceFailure>,
    {
        let here = self.weights.names().here(name).unwrap_or(Cow::Borrowed(name));
        let change = self.changes.get(&*here);
        let base = match change {
            Some(Change { base: Some(of_adapter), .. }) => self.of_adapter(of_adapter)?,
            _ => self.base(&here)?,
        };
        match change.map(|change| (change, change.delta)) {
            Some((change, Some(delta))) => {
                let factors = self.factors(delta)?;
                let matrices = if change.all_experts { factors.experts } else { 1 };
                let length = base.length() / matrices.max(1);
                for expert in 0..matrices {
                    let part = part_of(&base, expert * length..(expert + 1) * length);
                    let at = factors.at(change.expert + expert, change.first_row);
                    at.add(backend, change.orientation, &part, put)?;
                }
            }
            _ => delta::unchanged(&base, &mut |values| put(values, None))?,
        }
        drop(base);
        self.release(&here);
        Ok(())
    }

    /// The values of one matrix of one expert, `[outputs, inputs]` whatever the file's layout.
    pub fn expert<B: Backend, E>(
        &self,
        backend: &B,
        path: &str,
        shape: ExpertsShape,
        (projection, expert): (Projection, usize),
        put: Put<'_, E>,
    ) -> Result<(), E>
    where
        E: From<ModelError> + From<DeviceFailure>,
    {
        let loaded = experts::load(self.weights, path, shape)?;
        let stored = match loaded {
            Experts::Gptq(_) => {
                return self.values(
                    backend,
                    &self.weights.names().in_file(&single_name(path, projection, expert)),
                    put,
                );
            }
            Experts::Mxfp4(packed) => {
                let matrix = packed.expanded(projection, expert)?;
                return self.expert_values(backend, path, shape, (projection, expert), &matrix, put);
            }
            Experts::Stored(stored) => stored,
        };
        let matrix = stored.expert(projection, expert)?;
        let names = [single_name(path, projection, expert), targets::fused_name(path, projection)];
        let matrix = match names.iter().find(|name| self.quantised.contains(name)) {
            Some(name) => int4::requantised(name, &matrix, projection.shape(shape)[1])?,
            None => matrix,
        };
        self.expert_values(backend, path, shape, (projection, expert), &matrix, put)?;
        stored.release_expert(projection, expert);
        Ok(())
    }

    /// The base's numbers of an expert's matrix, with the adapter.
    fn expert_values<B: Backend, E>(
        &self,
        backend: &B,
        path: &str,
        shape: ExpertsShape,
        (projection, expert): (Projection, usize),
        matrix: &StoredTensor<'_>,
        put: Put<'_, E>,
    ) -> Result<(), E>
    where
        E: From<ModelError> + From<DeviceFailure>,
    {
        let change = self.changes.get(&single_name(path, projection, expert));
        let change = change.or_else(|| self.changes.get(&targets::fused_name(path, projection)));
        match change.and_then(|change| change.delta) {
            Some(delta) => {
                let first_row = if projection == Projection::Up { shape.width } else { 0 };
                let put = &mut |values: &[f32], _: Option<&[f32]>| put(values);
                self.factors(delta)?.at(expert, first_row).add(backend, Orientation::Rows, matrix, put)
            }
            None => delta::unchanged(matrix, put),
        }
    }

    /// The experts of the MLP at `path` whose codes are written as they are: stored as MXFP4, the
    /// matrix not changed by the adapter.
    pub fn packed_experts(
        &self,
        path: &str,
        shape: ExpertsShape,
        projection: Projection,
    ) -> Result<Option<Mxfp4Experts<'_>>, ModelError> {
        if self.changes.contains_key(&targets::fused_name(path, projection)) {
            return Ok(None);
        }
        match experts::load(self.weights, path, shape)? {
            Experts::Mxfp4(packed) => Ok(Some(packed)),
            _ => Ok(None),
        }
    }

    /// The base's numbers of a tensor, by our name in the layout of the files.
    fn base(&self, here: &str) -> Result<StoredTensor<'_>, ModelError> {
        let here = if here == HEAD && self.config.tied { TABLE } else { here };
        let module = here.strip_suffix(".weight").unwrap_or(here);
        if self.weights.contains(&format!("{module}.qweight")) {
            let [outputs, inputs] = self.int4_shape(module)?;
            return match self.weights.weight(module, outputs, inputs)? {
                Weight::Stored(stored) => Ok(stored),
                Weight::Gptq(weight) => {
                    let bytes = weight.dequantise().into_iter().flat_map(f32::to_le_bytes).collect();
                    Ok(StoredTensor {
                        format: FloatFormat::F32,
                        shape: vec![outputs, inputs],
                        bytes: Cow::Owned(bytes),
                    })
                }
            };
        }
        let in_file = self.weights.names().in_file(here);
        if let Some((_, Some(shape))) =
            mxfp4::whole(self.weights.tensor_files(), &format!("{in_file}{}", mxfp4::PARTS[0]))
        {
            return mxfp4::transposed(self.weights, here, shape);
        }
        let tensor = self.weights.tensor_files().get(&in_file)?;
        self.quantised.numbers(here, self.weights.numbers(tensor)?)
    }

    fn of_adapter(&self, name: &str) -> Result<StoredTensor<'_>, ModelError> {
        let file = self.adapter.expect("only an adapter changes anything");
        let tensor = file.get(name)?;
        let shape = tensor.shape;
        stored(tensor, shape)
    }

    fn release(&self, here: &str) {
        for part in mxfp4::PARTS {
            self.weights.release(&format!("{here}{part}"));
        }
        self.weights.release(here);
        self.weights.release_weight(here.strip_suffix(".weight").unwrap_or(here));
    }

    fn factors(&self, delta: usize) -> Result<Rc<Factors>, ModelError> {
        let mut recent = self.recent.borrow_mut();
        if let Some((_, factors)) = recent.iter().find(|(at, _)| *at == delta) {
            return Ok(Rc::clone(factors));
        }
        let factors = Rc::new(self.deltas[delta].read(self.adapter.expect("only an adapter has factors"))?);
        if recent.len() == RECENT {
            recent.remove(0);
        }
        recent.push((delta, Rc::clone(&factors)));
        Ok(factors)
    }

    /// The factors of the adapter on a linear layer, the head or the table, by our name of its
    /// tensor.
    pub fn factors_of(&self, name: &str) -> Result<Option<LowRankFactors>, ModelError> {
        let delta = self.changes.get(name).filter(|change| change.base.is_none()).and_then(|change| change.delta);
        delta.map(|delta| Ok(LowRankFactors::whole(&*self.factors(delta)?))).transpose()
    }

    /// The factors of one matrix of every expert of the MLP at `path`; rows of gate and up may be
    /// `alternating`.
    pub fn expert_factors(
        &self,
        path: &str,
        shape: ExpertsShape,
        projection: Projection,
        alternating: bool,
    ) -> Result<Option<LowRankFactors>, ModelError> {
        let names = [single_name(path, projection, 0), targets::fused_name(path, projection)];
        let Some(delta) = names.iter().find_map(|name| self.changes.get(name)?.delta) else { return Ok(None) };
        let part = match (projection, alternating) {
            (Projection::Gate, false) => delta::Half::First,
            (Projection::Up, false) => delta::Half::Second,
            (Projection::Gate, true) => delta::Half::Even,
            (Projection::Up, true) => delta::Half::Odd,
            (Projection::Down, _) => delta::Half::Both,
        };
        let rows = projection.shape(shape)[0];
        Ok(Some(self.factors(delta)?.part(part, rows, self.deltas[delta].is_blocks())))
    }

    /// Our names of the tensors that change.
    pub fn changed(&self) -> BTreeSet<&str> {
        self.changes.keys().map(String::as_str).collect()
    }
}

/// Tensors that are quantised while a base is loaded.
pub fn quantised_count(config: &Config, weights: &Weights) -> Result<usize, ModelError> {
    Ok(QuantisedTensors::of(config, weights)?.count())
}

fn is_number(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16)
}

/// The name of one matrix of one expert in a file that holds them one by one.
fn single_name(path: &str, projection: Projection, expert: usize) -> String {
    format!("{path}.experts.{expert}.{}.weight", projection.module())
}

/// Some elements of a tensor.
fn part_of<'t>(stored: &'t StoredTensor<'_>, elements: std::ops::Range<usize>) -> StoredTensor<'t> {
    let size = stored.format.bytes();
    let shape = stored.shape[stored.shape.len().saturating_sub(2)..].to_vec();
    StoredTensor {
        format: stored.format,
        shape,
        bytes: Cow::Borrowed(&stored.bytes[elements.start * size..elements.end * size]),
    }
}
