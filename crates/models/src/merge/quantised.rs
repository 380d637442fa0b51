//! Which tensors of a base are quantised while it is loaded (`load_in_4bit`), and the numbers that
//! they then stand for: what an adapter was trained against.

use super::single_name;
use crate::ModelError;
use crate::build::ExpertTensor;
use crate::config::{Config, MlpKind};
use crate::experts::{self, Experts, ExpertsLayout, ExpertsShape};
use crate::int4;
use crate::inventory::Inventory;
use crate::source::{StoredTensor, WeightSource};
use crate::weights::Weights;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// How the matrices of a quantised tensor lie in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// `[…, outputs, inputs]`
    Rows { inputs: usize },
    /// `[…, inputs, outputs]`
    Columns { inputs: usize, outputs: usize },
}

/// The tensors that are quantised, by our names in the layout of the files.
#[derive(Debug, Default)]
pub(super) struct QuantisedTensors {
    layouts: BTreeMap<String, Layout>,
}

impl QuantisedTensors {
    /// Those of a base; none unless it is loaded in 4 bits.
    pub(super) fn of(config: &Config, weights: &Weights) -> Result<Self, ModelError> {
        let mut found = Self::default();
        if !weights.loads_in_4bit() {
            return Ok(found);
        }
        for path in Inventory::of(config).adaptable() {
            let name = format!("{path}.weight");
            if let Some(&[outputs, inputs]) = weights.shape(&name).as_deref()
                && int4::takes(outputs, inputs)
            {
                found.layouts.insert(name, Layout::Rows { inputs });
            }
        }
        for (layer, of) in config.layers.iter().enumerate() {
            if let MlpKind::Experts(experts) = &of.mlp {
                let shape = ExpertsShape::of(experts, config.hidden);
                found.experts(weights, &format!("model.layers.{layer}.{}", of.names.mlp), shape)?;
            }
        }
        Ok(found)
    }

    pub(super) fn count(&self) -> usize {
        self.layouts.len()
    }

    fn experts(&mut self, weights: &Weights, path: &str, shape: ExpertsShape) -> Result<(), ModelError> {
        let Experts::Stored(stored) = experts::load(weights, path, shape)? else { return Ok(()) };
        for part in ExpertTensor::ALL {
            let mut shapes = part.projections().iter().map(|projection| projection.shape(shape));
            if !shapes.all(|[outputs, inputs]| int4::takes(outputs, inputs)) {
                continue;
            }
            let [outputs, inputs] = part.shape(shape);
            let layout = match stored.layout() {
                ExpertsLayout::Transposed => Layout::Columns { inputs, outputs },
                ExpertsLayout::PerExpert | ExpertsLayout::Fused => Layout::Rows { inputs },
            };
            if stored.layout() == ExpertsLayout::PerExpert {
                for expert in 0..shape.experts {
                    let names = part.projections().iter().map(|projection| single_name(path, *projection, expert));
                    self.layouts.extend(names.map(|name| (name, layout)));
                }
            } else {
                self.layouts.insert(format!("{path}.experts.{}", part.name()), layout);
            }
        }
        Ok(())
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.layouts.contains_key(name)
    }

    /// The numbers of a tensor once it is quantised, or as they are.
    pub(super) fn numbers<'t>(&self, name: &str, stored: StoredTensor<'t>) -> Result<StoredTensor<'t>, ModelError> {
        match self.layouts.get(name) {
            None => Ok(stored),
            Some(Layout::Rows { inputs }) => int4::requantised(name, &stored, *inputs),
            Some(Layout::Columns { inputs, outputs }) => {
                let rows = transposed(&stored, *inputs, *outputs);
                Ok(transposed(&int4::requantised(name, &rows, *inputs)?, *outputs, *inputs))
            }
        }
    }
}

/// Every matrix `[rows, columns]` of a stack, transposed; the shape is left alone.
fn transposed(stored: &StoredTensor<'_>, rows: usize, columns: usize) -> StoredTensor<'static> {
    let size = stored.format.bytes();
    let mut bytes = Vec::with_capacity(stored.bytes.len());
    for matrix in stored.bytes.chunks(rows * columns * size) {
        for column in 0..columns {
            for row in 0..rows {
                bytes.extend_from_slice(&matrix[(row * columns + column) * size..][..size]);
            }
        }
    }
    StoredTensor { format: stored.format, shape: stored.shape.clone(), bytes: Cow::Owned(bytes) }
}
