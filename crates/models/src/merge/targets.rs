//! Which tensors of a model an adapter changes, and which of its tensors are the factors of each.
//!
//! The model's own builder says what the adapter must hold: it runs on a backend without memory, so
//! shapes, targets and PEFT's rules are checked as they are when the adapter is loaded. Adapters on
//! the head and on the embedding table, which no run trains, are added here.

use super::delta::{Factors, Orientation};
use super::{HEAD, TABLE, single_name};
use crate::ModelError;
use crate::adapter::{LoraConfig, Targets, Trained};
use crate::build::{ExpertTensor, Settings, build_part, expert_target, no_adapter};
use crate::config::{Config, MlpKind};
use crate::experts::{self, Experts, ExpertsLayout, ExpertsShape, Projection};
use crate::files::{Form, TrainedTensor};
use crate::inventory::Inventory;
use crate::model::Part;
use crate::peft;
use crate::source::Shapes;
use crate::weights::Weights;
use isobit_kernels::op::low_rank::RANK_MAX;
use isobit_kernels::{Counting, Cpu, Path};
use isobit_numerics::slices::Profile;
use isobit_proof::safetensors::SafeTensors;
use std::collections::{BTreeMap, BTreeSet};

/// An adapter's two factors.
pub(super) struct Delta {
    a: TrainedTensor,
    b: TrainedTensor,
    experts: usize,
    scale: f32,
}

impl Delta {
    pub(super) fn read(&self, file: &SafeTensors) -> Result<Factors, ModelError> {
        let read = |tensor: &TrainedTensor| tensor.from_file(|name, shape| peft::values(file, name, shape));
        let rank = self.a.shape[0] / self.experts;
        Ok(Factors {
            experts: self.experts,
            rank,
            outputs: self.b.length() / (self.experts * rank),
            inputs: self.a.shape[1],
            scale: self.scale,
            a: read(&self.a)?,
            b: read(&self.b)?,
        })
    }

    /// Whether gate and up have factors of their own, as diagonal blocks.
    pub(super) fn is_blocks(&self) -> bool {
        matches!(&self.b.form, Some(Form::Factors { part: ExpertTensor::GateUp, .. }))
    }

    fn names(&self) -> impl Iterator<Item = String> {
        [&self.a, &self.b].into_iter().flat_map(TrainedTensor::in_file).map(|(name, _)| name)
    }
}

/// The tensor of all experts that holds a matrix.
pub(super) fn fused_name(path: &str, projection: Projection) -> String {
    let part = if projection == Projection::Down { ExpertTensor::Down } else { ExpertTensor::GateUp };
    format!("{path}.experts.{}", part.name())
}

/// What happens to a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Change {
    /// Its adapter, if it has one.
    pub(super) delta: Option<usize>,
    /// The adapter file's tensor that takes the place of the base's.
    pub(super) base: Option<String>,
    pub(super) orientation: Orientation,
    /// The tensor holds the matrices of all experts, or of this one.
    pub(super) all_experts: bool,
    pub(super) expert: usize,
    /// Its first row in B.
    pub(super) first_row: usize,
}

impl Change {
    fn of(delta: usize) -> Self {
        let (base, orientation, all_experts) = (None, Orientation::Rows, false);
        Self { delta: Some(delta), base, orientation, all_experts, expert: 0, first_row: 0 }
    }
}

/// The adapter's factors, and the tensors that change, by our names in the layout of the files.
pub(super) fn of(
    config: &Config,
    weights: &Weights,
    lora: &LoraConfig,
    file: &SafeTensors,
) -> Result<(Vec<Delta>, BTreeMap<String, Change>), ModelError> {
    // Whole modules are no factors: the builder need not know them.
    let factors = LoraConfig { saved: Vec::new(), ..lora.clone() };
    let trained = build(config, weights, Trained::Lora(factors))?;
    let mut found = Found { config, weights, lora, file, trained, deltas: Vec::new(), changes: BTreeMap::new() };
    for path in Inventory::of(config).adaptable() {
        found.linear(path)?;
    }
    for (layer, of) in config.layers.iter().enumerate() {
        if let MlpKind::Experts(experts) = &of.mlp {
            let shape = ExpertsShape::of(experts, config.hidden);
            found.experts(&format!("model.layers.{layer}.{}", of.names.mlp), shape)?;
        }
    }
    let [vocabulary, hidden] = [config.vocabulary, config.hidden];
    found.end(HEAD, ["lora_A.weight", "lora_B.weight"], [vocabulary, hidden], Orientation::Rows)?;
    found.end(TABLE, ["lora_embedding_A", "lora_embedding_B"], [hidden, vocabulary], Orientation::Columns)?;
    found.check_names()?;
    if found.changes.is_empty() { Err(no_adapter()) } else { Ok((found.deltas, found.changes)) }
}

/// Checks that the files hold the model that the config describes.
pub(super) fn check(config: &Config, weights: &Weights) -> Result<(), ModelError> {
    build(config, weights, Trained::Nothing).map(|_| ())
}

/// The tensors that are trained, by name.
fn build(config: &Config, weights: &Weights, trained: Trained) -> Result<BTreeMap<String, TrainedTensor>, ModelError> {
    let counting = Counting::new(Cpu::new(1, Path::Scalar).expect("every machine has this path"));
    let settings = Settings { trained, profile: Profile::X2, positions: 1, seed: 0 };
    let built = build_part(&counting, config, &Shapes::Of(weights), &settings, &Part::whole(config))?;
    let tensors = built.parameters.iter().map(|(id, parameter)| built.model.trained_tensor(id, parameter));
    Ok(tensors.map(|tensor| (tensor.name.clone(), tensor)).collect())
}

struct Found<'a> {
    config: &'a Config,
    weights: &'a Weights,
    lora: &'a LoraConfig,
    file: &'a SafeTensors,
    trained: BTreeMap<String, TrainedTensor>,
    deltas: Vec<Delta>,
    changes: BTreeMap<String, Change>,
}

impl Found<'_> {
    fn linear(&mut self, path: &str) -> Result<(), ModelError> {
        let module = self.config.module_path(path).into_owned();
        let target = match self.lora.of(&module)? {
            None => self.lora.of_parameter(&format!("{module}.weight"))?,
            target => target,
        };
        if let Some((_, scale)) = target {
            let delta = self.delta(&format!("base_model.model.{module}"), 1, scale);
            self.changes.insert(format!("{path}.weight"), Change::of(delta));
        }
        Ok(())
    }

    /// Takes the factors whose names begin with `start`.
    fn delta(&mut self, start: &str, experts: usize, scale: f32) -> usize {
        let [a, b] = ["lora_A", "lora_B"].map(|factor| {
            let tensor = self.trained.remove(&format!("{start}.{factor}.weight"));
            tensor.expect("the model was built with an adapter for every target")
        });
        self.deltas.push(Delta { a, b, experts, scale });
        self.deltas.len() - 1
    }

    /// The two tensors of a layer's experts.
    fn experts(&mut self, path: &str, shape: ExpertsShape) -> Result<(), ModelError> {
        let targets = ExpertTensor::ALL.map(|part| expert_target(self.config, self.lora, path, part));
        let [gate_up, down] = targets;
        let (gate_up, down) = (gate_up?, down?);
        let both = gate_up.is_some() && down.is_some();
        for (part, target) in ExpertTensor::ALL.into_iter().zip([gate_up, down]) {
            let Some(target) = target else { continue };
            // The names that the builder gives: see there.
            let inner = if both && !target.per_expert && part == ExpertTensor::GateUp { ".base_layer" } else { "" };
            let inside = if target.per_expert { format!(".{}", part.name()) } else { String::new() };
            let module = format!("{path}.experts{inner}");
            let start = format!("base_model.model.{}{inside}", self.config.module_path(&module));
            let delta = self.delta(&start, shape.experts, target.scale);
            self.expert_changes(path, shape, part, delta)?;
        }
        Ok(())
    }

    fn expert_changes(
        &mut self,
        path: &str,
        shape: ExpertsShape,
        part: ExpertTensor,
        delta: usize,
    ) -> Result<(), ModelError> {
        let layout = match experts::load(self.weights, path, shape)? {
            Experts::Stored(stored) => stored.layout(),
            Experts::Gptq(_) => ExpertsLayout::PerExpert,
            // Expanded to transposed tensors.
            Experts::Mxfp4(_) => ExpertsLayout::Transposed,
        };
        let orientation = match layout {
            ExpertsLayout::PerExpert => {
                for (expert, &projection) in
                    (0..shape.experts).flat_map(|expert| part.projections().iter().map(move |of| (expert, of)))
                {
                    let first_row = if projection == Projection::Up { shape.width } else { 0 };
                    let change = Change { expert, first_row, ..Change::of(delta) };
                    self.changes.insert(single_name(path, projection, expert), change);
                }
                return Ok(());
            }
            ExpertsLayout::Fused => Orientation::Rows,
            ExpertsLayout::Transposed => Orientation::Columns,
        };
        let change = Change { orientation, all_experts: true, ..Change::of(delta) };
        self.changes.insert(format!("{path}.experts.{}", part.name()), change);
        Ok(())
    }

    /// The head or the embedding table: not modules that a run adapts, but PEFT may have.
    fn end(
        &mut self,
        name: &str,
        factors: [&str; 2],
        [outputs, inputs]: [usize; 2],
        orientation: Orientation,
    ) -> Result<(), ModelError> {
        let path = name.strip_suffix(".weight").unwrap_or(name);
        let module = self.config.module_path(path).into_owned();
        let target = if self.lora.targets == Targets::AllLinear { None } else { self.lora.of(&module)? };
        let start = format!("base_model.model.{module}");
        // PEFT saves the base's own table beside an adapter on it, and reads it back.
        let beside = format!("{start}.base_layer.weight");
        let base = self.file.contains(&beside).then_some(beside);
        let (base, target) = match (self.lora.saves(&module), base, target) {
            (true, None, None) => (Some(format!("{start}.weight")), None),
            (true, _, _) => {
                return Err(ModelError::Adapter(format!("{module} is in `modules_to_save` and has an adapter")));
            }
            (false, base, target) => (base, target),
        };
        let Some((rank, scale)) = target else {
            if let Some(base) = base {
                let change = Change { delta: None, base: Some(base), ..Change::of(0) };
                self.changes.insert(name.to_string(), change);
            }
            return Ok(());
        };
        if rank > RANK_MAX {
            return Err(ModelError::Rank(format!("rank {rank} of {module} is not 1 to {RANK_MAX}")));
        }
        let tensor = |factor: &str, shape: [usize; 2]| TrainedTensor {
            name: format!("{start}.{factor}"),
            shape: shape.to_vec(),
            decays: true,
            form: None,
        };
        let (a, b) = (tensor(factors[0], [rank, inputs]), tensor(factors[1], [outputs, rank]));
        self.deltas.push(Delta { a, b, experts: 1, scale });
        let change = Change { base, orientation, ..Change::of(self.deltas.len() - 1) };
        self.changes.insert(name.to_string(), change);
        Ok(())
    }

    /// Checks that the file holds what is needed, and nothing else.
    fn check_names(&self) -> Result<(), ModelError> {
        let bases = self.changes.values().filter_map(|change| change.base.clone());
        let known: BTreeSet<String> = self.deltas.iter().flat_map(Delta::names).chain(bases).collect();
        if let Some(extra) = self.file.names().find(|name| !known.contains(*name)) {
            return Err(peft::extra(extra));
        }
        for (name, shape) in self.deltas.iter().flat_map(|delta| [&delta.a, &delta.b]).flat_map(TrainedTensor::in_file)
        {
            peft::check_shape(&self.file.get(&name)?, &shape)?;
        }
        for (name, change) in &self.changes {
            let Some(base) = &change.base else { continue };
            debug_assert!([HEAD, TABLE].contains(&name.as_str()));
            peft::check_shape(&self.file.get(base)?, &[self.config.vocabulary, self.config.hidden])?;
        }
        Ok(())
    }
}
