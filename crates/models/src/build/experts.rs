//! Builds the MLP of a mixture of experts: router, experts of any layout as one grouped matrix,
//! shared expert.
//!
//! Gate and up of an expert become one matrix, with rows in the order of transformers' memory
//! layout; trained experts are two such tensors per layer, and `files.rs` converts them back to the
//! layout of the file. With 4-bit integers, gate and up stay separate: each has its own channel
//! order.

use crate::ModelError;
use crate::adapter::{LoraConfig, Trained};
use crate::build::{Builder, initial_a, only_adapters, stored_finite};
use crate::config::{Config, ExpertsConfig, Scoring as ScoringConfig};
use crate::experts::{self, Experts as Loaded, ExpertsShape, GptqExperts, Projection, StoredExperts};
use crate::files::{Factor, Form};
use crate::int4;
use crate::layer::experts::{SharedExpert, SparseMlp};
use crate::source::StoredTensor;
use isobit_autograd::{
    ExpertActivation, ExpertAdapter, ExpertMatrix, Experts, Matrix, Quantized, ROUTER_PROFILE, Router, Vector,
};
use isobit_kernels::Backend;
use isobit_kernels::op::low_rank::RANK_MAX;
use isobit_kernels::op::{QuantizedShape, Scoring, SliceShape};

/// The two tensors of a layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertTensor {
    GateUp,
    Down,
}

impl ExpertTensor {
    pub(crate) const ALL: [Self; 2] = [Self::GateUp, Self::Down];

    /// Its name below the experts module.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::GateUp => "gate_up_proj",
            Self::Down => "down_proj",
        }
    }

    pub(crate) fn projections(self) -> &'static [Projection] {
        match self {
            Self::GateUp => &[Projection::Gate, Projection::Up],
            Self::Down => &[Projection::Down],
        }
    }

    /// Rows and columns of one expert's matrix.
    pub(crate) fn shape(self, shape: ExpertsShape) -> [usize; 2] {
        match self {
            Self::GateUp => [2 * shape.width, shape.hidden],
            Self::Down => [shape.hidden, shape.width],
        }
    }
}

/// The adapter of an expert tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ExpertTarget {
    pub(crate) rank: usize,
    pub(crate) scale: f32,
    /// Stored as adapters of the linear modules of every expert.
    pub(crate) per_expert: bool,
}

/// The adapter of a layer's experts, if their tensor is a target, or the equivalent per-expert
/// linear modules are.
pub(crate) fn expert_target(
    config: &Config,
    lora: &LoraConfig,
    path: &str,
    part: ExpertTensor,
) -> Result<Option<ExpertTarget>, ModelError> {
    let name = format!("{path}.experts.{}", part.name());
    let fused = lora.of_parameter(&config.module_path(&name))?;
    let per_expert = if config.family.peft.per_expert(config, lora) {
        let module = format!("{path}.experts.0.{}", part.projections()[0].module());
        lora.of(&config.module_path(&module))?
    } else {
        None
    };
    let rank_max = if per_expert.is_some() { RANK_MAX / part.projections().len() } else { RANK_MAX };
    let target = match (fused, per_expert) {
        (Some(_), Some(_)) => {
            return Err(ModelError::Adapter(format!("{name} is a target, and so are the modules of its experts")));
        }
        (fused, per_expert) => {
            fused.or(per_expert).map(|(rank, scale)| ExpertTarget { rank, scale, per_expert: fused.is_none() })
        }
    };
    if let Some(ExpertTarget { rank, .. }) = target.filter(|target| !(1..=rank_max).contains(&target.rank)) {
        return Err(ModelError::Rank(format!("rank {rank} of {name} is not 1 to {rank_max}")));
    }
    Ok(target)
}

impl<B: Backend> Builder<'_, B> {
    pub(super) fn sparse(&mut self, path: &str, c: &ExpertsConfig, trained: bool) -> Result<SparseMlp<B>, ModelError> {
        let hidden = self.config.hidden;
        let router = self.router(&format!("{path}.{}", c.router), c, trained)?;
        let shape = ExpertsShape::of(c, hidden);
        let loaded = experts::load(self.source, path, shape)?;
        loaded.check_order(c.gate_up_rows)?;
        let gate_up_target = self.expert_target(path, ExpertTensor::GateUp)?;
        let down_target = self.expert_target(path, ExpertTensor::Down)?;
        // PEFT's later wrapper is the outer one: with a single target there is no inner name.
        let inner = if gate_up_target.is_some() && down_target.is_some() { ".base_layer" } else { "" };
        let gate_up =
            self.expert_matrix(path, ExpertTensor::GateUp, &loaded, trained, gate_up_target.map(|of| (of, inner)))?;
        let gate_up = ExpertMatrix { bias: self.expert_bias(path, ExpertTensor::GateUp, c, trained)?, ..gate_up };
        let down = self.expert_matrix(path, ExpertTensor::Down, &loaded, trained, down_target.map(|of| (of, "")))?;
        let down = ExpertMatrix { bias: self.expert_bias(path, ExpertTensor::Down, c, trained)?, ..down };
        match &loaded {
            Loaded::Stored(stored) => stored.release(),
            Loaded::Mxfp4(packed) => packed.release(),
            Loaded::Gptq(_) => {}
        }
        let shared = match c.shared {
            None => None,
            Some(shared) => {
                let (module, names, width) = (format!("{path}.{}", shared.module), shared.names, shared.width);
                let gate = self.linear(&format!("{module}.{}", names.gate), width, hidden, false, trained)?;
                let up = self.linear(&format!("{module}.{}", names.up), width, hidden, false, trained)?;
                let down = self.linear(&format!("{module}.{}", names.down), hidden, width, false, trained)?;
                let switch = shared.gate.map(|name| self.linear(&format!("{path}.{name}"), 1, hidden, false, trained));
                let switch = switch.transpose()?;
                Some(SharedExpert { gate, up, down, switch })
            }
        };
        let activation = c.clamp.map_or(ExpertActivation::Swiglu, ExpertActivation::Clamped);
        Ok(SparseMlp { router, experts: Experts { gate_up, activation, down }, shared })
    }

    /// The biases of one tensor of all experts.
    fn expert_bias(
        &mut self,
        path: &str,
        part: ExpertTensor,
        c: &ExpertsConfig,
        trained: bool,
    ) -> Result<Option<Vector<B>>, ModelError> {
        let name = format!("{path}.experts.{}_bias", part.name());
        if c.biases {
            let [outputs, _] = part.shape(ExpertsShape::of(c, self.config.hidden));
            return self.shaped(&name, &[c.experts, outputs], trained).map(Some);
        }
        if self.source.shape(&name).is_some() {
            let what = "config.json describes no such tensor of this layer".to_string();
            return Err(ModelError::Tensor { name, what });
        }
        Ok(None)
    }

    fn router(&mut self, path: &str, c: &ExpertsConfig, trained: bool) -> Result<Router<B>, ModelError> {
        let hidden = self.config.hidden;
        let weight = if trained {
            self.trained_matrix(path, c.experts, hidden, ROUTER_PROFILE)?
        } else {
            self.sliced_matrix(path, c.experts, hidden, ROUTER_PROFILE)?
        };
        let logit_bias = c.router_bias.then(|| self.vector(&format!("{path}.bias"), c.experts, trained)).transpose()?;
        if !c.router_bias {
            self.source.bias(path, c.experts, false)?;
        }
        let bias = c.correction_bias.map(|name| self.float32(&format!("{path}.{name}"), &[c.experts])).transpose()?;
        Ok(Router {
            weight,
            logit_bias,
            bias,
            hidden,
            experts: c.experts,
            chosen: c.chosen,
            scoring: match c.scoring {
                ScoringConfig::Softmax => Scoring::Softmax,
                ScoringConfig::Sigmoid => Scoring::Sigmoid,
            },
            renormalise: c.renormalise,
            scale: c.scale,
            groups: c.groups,
            kept_groups: c.kept_groups,
        })
    }

    fn expert_target(&self, path: &str, part: ExpertTensor) -> Result<Option<ExpertTarget>, ModelError> {
        match &self.settings.trained {
            Trained::Lora(lora) => expert_target(self.config, lora, path, part),
            _ => Ok(None),
        }
    }

    fn expert_matrix(
        &mut self,
        path: &str,
        part: ExpertTensor,
        loaded: &Loaded,
        trained: bool,
        target: Option<(ExpertTarget, &str)>,
    ) -> Result<ExpertMatrix<B>, ModelError> {
        let shape = loaded.shape();
        let [outputs, inputs] = part.shape(shape);
        let name = format!("{path}.experts.{}", part.name());
        if trained && loaded.is_quantised() {
            return Err(only_adapters(name));
        }
        let shape_of_one = SliceShape { rows: outputs, width: inputs, profile: self.settings.profile };
        let weight = match loaded {
            Loaded::Gptq(gptq) => {
                let mut parts = Vec::new();
                for &projection in part.projections() {
                    parts.push(self.quantised_experts(gptq, projection)?);
                }
                Matrix::Quantized(parts)
            }
            Loaded::Mxfp4(packed) => {
                let projection = part.projections()[0];
                let shape = packed.quantized_shape(projection)?;
                Matrix::Quantized(vec![self.quantized(shape, |expert| packed.expert(projection, expert, shape))?])
            }
            Loaded::Stored(stored) if trained => {
                let stacked = Self::stacked(part, stored)?;
                let value = self.trained_value(&name, &stacked)?;
                let in_file = self.source.name_in_file(&name);
                let id = self.parameters.add_value(in_file, vec![shape.experts, outputs, inputs], value, true);
                if let Some(form) = Form::of_experts(self.source, path, part, loaded) {
                    self.forms.insert(id, form);
                }
                self.trained_in_layer(id, shape.experts, shape_of_one)
            }
            Loaded::Stored(stored) if self.quantises(part, shape) => {
                let mut parts = Vec::new();
                for &projection in part.projections() {
                    parts.push(self.experts_to_quantise(&name, stored, projection)?);
                }
                Matrix::Quantized(parts)
            }
            Loaded::Stored(stored) => {
                let stacked = Self::stacked(part, stored)?;
                stored_finite(&name, &stacked)?;
                self.frozen_matrix(&stacked, shape.experts, shape_of_one)
            }
        };
        let adapter = target
            .map(|(target, inner)| {
                let inner = if target.per_expert { "" } else { inner };
                self.expert_adapter(&format!("{path}.experts{inner}"), part, shape, target)
            })
            .transpose()?;
        self.modules += 1;
        Ok(ExpertMatrix { experts: shape.experts, outputs, inputs, weight, bias: None, adapter })
    }

    fn expert_adapter(
        &mut self,
        path: &str,
        part: ExpertTensor,
        shape: ExpertsShape,
        target: ExpertTarget,
    ) -> Result<ExpertAdapter, ModelError> {
        let path = format!("base_model.model.{}", self.config.module_path(path));
        let (experts, [outputs, inputs]) = (shape.experts, part.shape(shape));
        // Separate gate and up: diagonal blocks of one pair of factors of twice the rank.
        let halves = target.per_expert && part == ExpertTensor::GateUp;
        let rank = if halves { 2 * target.rank } else { target.rank };
        let (tensor, rows) = (self.modules, experts * rank);
        let initial = || Ok::<_, ModelError>(initial_a(self.settings.seed, tensor, rows, inputs));
        let a = self.backend.upload_made(rows * inputs, initial)?;
        let b = self.backend.zeros(rows * outputs);
        let inside = if target.per_expert { format!(".{}", part.name()) } else { String::new() };
        let name = |factor: &str| format!("{path}{inside}.{factor}.weight");
        let a = self.parameters.add(name("lora_A"), vec![rows, inputs], a, true);
        let b = self.parameters.add(name("lora_B"), vec![experts, outputs, rank], b, true);
        if target.per_expert {
            for (id, factor) in [(a, Factor::A), (b, Factor::B)] {
                let start = format!("{path}.");
                self.forms.insert(id, Form::Factors { start, part, factor, shape, rank: target.rank });
            }
        } else {
            self.forms.insert(b, Form::RankMajor { experts, outputs, rank });
        }
        Ok(ExpertAdapter { a, b, rank, scale: target.scale, halves })
    }

    /// Whether the matrices of a tensor are quantised while they are loaded.
    fn quantises(&self, part: ExpertTensor, shape: ExpertsShape) -> bool {
        let mut shapes = part.projections().iter().map(|projection| projection.shape(shape));
        self.source.loads_in_4bit() && shapes.all(|[rows, columns]| int4::takes(rows, columns))
    }

    /// A projection of all experts, quantised one expert at a time.
    fn experts_to_quantise(
        &mut self,
        name: &str,
        stored: &StoredExperts,
        projection: Projection,
    ) -> Result<Quantized<B>, ModelError> {
        let [rows, columns] = projection.shape(stored.shape());
        let shape = QuantizedShape { count: stored.shape().experts, ..int4::FORM.shape(rows, columns) };
        self.quantized(shape, |expert| {
            let matrix = stored.expert(projection, expert)?;
            stored_finite(name, &matrix)?;
            let weight = int4::quantise(name, &matrix, rows, columns)?;
            drop(matrix);
            stored.release_expert(projection, expert);
            Ok(weight)
        })
    }

    /// One tensor of all experts, stacked.
    fn stacked<'s>(part: ExpertTensor, stored: &StoredExperts<'s>) -> Result<StoredTensor<'s>, ModelError> {
        match part {
            ExpertTensor::GateUp => stored.stacked_gate_up(),
            ExpertTensor::Down => stored.stacked(Projection::Down),
        }
    }

    /// A projection of all experts in 4 bits. Reads one expert at a time, then releases its pages.
    fn quantised_experts(&mut self, experts: &GptqExperts, projection: Projection) -> Result<Quantized<B>, ModelError> {
        let shape = experts.quantized_shape(projection)?;
        self.quantized(shape, |expert| {
            let weight = experts.expert(projection, expert)?;
            experts.release_expert(projection, expert);
            Ok(weight)
        })
    }
}
