//! The weights that a config describes, without their files: shapes and formats, but no numbers.
//! For plans of models that are not on this machine.
//!
//! Where the config quantises, every linear module that it does not exclude (GPTQ), or every expert
//! (MXFP4), is in 4 bits; in a file, the tensors decide.

use crate::ModelError;
use crate::build::ExpertTensor;
use crate::config::{Config, LayerConfig, MlpKind, Quantization, quantization};
use crate::experts::{ExpertsShape, Projection};
use crate::gptq::GptqForm;
use crate::int4;
use crate::mxfp4;
use crate::source::{FloatFormat, StoredTensor, Weight, WeightSource};
use regex::Regex;
use std::borrow::Cow;

/// Numbers that are not quantised take two bytes, as published models store them.
const FORMAT: FloatFormat = FloatFormat::Bf16;
/// The zero of symmetric 4-bit integers.
const SYMMETRIC_ZERO: u8 = 8;

pub struct ConfigShapes<'a> {
    config: &'a Config,
    /// Modules that the config excludes from quantisation.
    excluded: Vec<Regex>,
    /// Whether linear layers are quantised while they are loaded.
    loads_in_4bit: bool,
}

impl<'a> ConfigShapes<'a> {
    pub fn new(config: &'a Config) -> Result<Self, ModelError> {
        let patterns: &[String] = match &config.quantization {
            Quantization::Gptq(gptq) => &gptq.excluded,
            _ => &[],
        };
        let excluded = patterns.iter().map(|pattern| quantization::expression(pattern)).collect::<Result<_, _>>();
        let excluded = excluded.map_err(|what| ModelError::Config { file: "config.json".to_string(), what })?;
        Ok(Self { config, excluded, loads_in_4bit: false })
    }

    /// The same with linear layers quantised while they are loaded, if `wanted`.
    pub fn load_in_4bit(self, wanted: bool) -> Result<Self, ModelError> {
        if wanted {
            int4::check(&self.config.quantization)?;
        }
        Ok(Self { loads_in_4bit: wanted, ..self })
    }

    /// The form of a quantised module.
    fn form(&self, path: &str, inputs: usize) -> Option<GptqForm> {
        let Quantization::Gptq(gptq) = &self.config.quantization else { return None };
        let path_in_file = self.config.module_path(path);
        let excluded = |pattern: &Regex| pattern.is_match(path) || pattern.is_match(&path_in_file);
        if self.excluded.iter().any(excluded) || path == "lm_head" && !gptq.lm_head {
            return None;
        }
        Some(GptqForm {
            group_size: gptq.group_size.unwrap_or(inputs),
            half_scales: true,
            permuted: gptq.desc_act,
            zero: gptq.symmetric.unwrap_or(false).then_some(SYMMETRIC_ZERO),
        })
    }
}

impl WeightSource for ConfigShapes<'_> {
    fn contains(&self, _name: &str) -> bool {
        true
    }

    fn tensor(&self, _name: &str, shape: &[usize]) -> Result<StoredTensor<'_>, ModelError> {
        Ok(StoredTensor { format: FORMAT, shape: shape.to_vec(), bytes: Cow::Borrowed(&[]) })
    }

    fn format(&self, _name: &str) -> Result<FloatFormat, ModelError> {
        Ok(FORMAT)
    }

    /// The matrices of quantised experts; for others, any name is accepted.
    fn names_under(&self, start: &str) -> Option<Vec<String>> {
        if self.config.quantization == Quantization::Mxfp4 {
            let parts = |tensor: &str| mxfp4::PARTS.map(|part| format!("{start}{tensor}{part}"));
            return Some(["gate_up_proj", "down_proj"].iter().flat_map(|tensor| parts(tensor)).collect());
        }
        let path = |expert: usize, projection: Projection| format!("{start}{expert}.{}", projection.module());
        self.form(&path(0, Projection::Gate), self.config.hidden)?;
        let experts = self.config.layers.iter().find_map(|layer| match &layer.mlp {
            MlpKind::Experts(experts) => Some(experts.experts),
            MlpKind::Dense { .. } => None,
        })?;
        let of = |expert| Projection::ALL.map(|projection| format!("{}.qweight", path(expert, projection)));
        Some((0..experts).flat_map(of).collect())
    }

    /// Of the parts of MXFP4 tensors.
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        if self.config.quantization != Quantization::Mxfp4 {
            return None;
        }
        let of_layer = |layer: &LayerConfig| match &layer.mlp {
            MlpKind::Experts(experts) => Some(ExpertsShape::of(experts, self.config.hidden)),
            MlpKind::Dense { .. } => None,
        };
        let shape = self.config.layers.iter().find_map(of_layer)?;
        let part = mxfp4::PARTS.iter().position(|part| name.ends_with(part))?;
        let is_down = name.ends_with(&format!("down_proj{}", mxfp4::PARTS[part]));
        let tensor = if is_down { ExpertTensor::Down } else { ExpertTensor::GateUp };
        let [rows, columns] = tensor.shape(shape);
        mxfp4::shapes(name, shape.experts, rows, columns).ok().map(|shapes| shapes[part].clone())
    }

    fn mxfp4_part(&self, _name: &str, _shape: &[usize]) -> Result<Cow<'_, [u8]>, ModelError> {
        Ok(Cow::Borrowed(&[]))
    }

    fn weight(&self, path: &str, outputs: usize, inputs: usize) -> Result<Weight<'_>, ModelError> {
        Ok(Weight::Stored(self.tensor(&format!("{path}.weight"), &[outputs, inputs])?))
    }

    fn quantised(&self, path: &str, _outputs: usize, inputs: usize) -> Result<Option<GptqForm>, ModelError> {
        Ok(self.form(path, inputs))
    }

    fn loads_in_4bit(&self) -> bool {
        self.loads_in_4bit
    }
}
