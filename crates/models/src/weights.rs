//! The weights of a model folder: its files, their tensor names, and how its matrices are
//! quantised.
//!
//! The file's contents decide: a module with a `qweight` is quantised, one with a `weight` is not,
//! a float8 `weight` needs its scales. The config defines how to read them and must not contradict.

use crate::ModelError;
use crate::config::{Config, Fp8Config, GptqConfig, GptqFormat, Quantization, quantization};
use crate::gptq::GptqForm;
use crate::names::Names;
use crate::nf4::{self, Nf4Matrix};
use crate::source::{FloatFormat, StoredTensor, Weight, WeightSource, check_shape, format_of, stored, stored_bytes};
use crate::{fp8, gptq, int4, unused};
use isobit_kernels::op::product4::CHANNELS_PER_WORD;
use isobit_proof::safetensors::{Dtype, Tensor, TensorFiles};
use regex::Regex;
use std::borrow::Cow;

#[derive(Debug)]
pub struct Weights {
    files: TensorFiles,
    names: Names,
    /// Tensors of the file that nothing reads.
    unused: Vec<String>,
    quantization: Quantization,
    /// Modules that the config excludes from quantisation.
    excluded: Vec<Regex>,
    /// Whether linear layers are quantised while they are loaded.
    loads_in_4bit: bool,
}

/// A tensor to be copied with the model.
#[derive(Debug)]
pub enum Copied<'a> {
    Numbers(Tensor<'a>),
    AsStored(Tensor<'a>),
}

impl Weights {
    /// Checks the names in the files; reads no tensor. An error if the file holds parts of a
    /// model that the config does not describe.
    pub fn new(files: TensorFiles, config: &Config) -> Result<Self, ModelError> {
        let names = Names::of(files.names(), config)?;
        let unused = unused::find(&files, &names, config)?;
        let excluded = match &config.quantization {
            Quantization::Gptq(gptq) => gptq.excluded.iter().map(|pattern| quantization::expression(pattern)).collect(),
            _ => Ok(Vec::new()),
        };
        let excluded = excluded.map_err(|what| ModelError::Config { file: "config.json".to_string(), what })?;
        let quantization = config.quantization.clone();
        Ok(Self { files, names, unused, quantization, excluded, loads_in_4bit: false })
    }

    /// The same with linear layers quantised while they are loaded, if `wanted`. An error if the
    /// file holds them in 4 bits already.
    pub fn load_in_4bit(self, wanted: bool) -> Result<Self, ModelError> {
        if wanted {
            int4::check(&self.quantization)?;
        }
        Ok(Self { loads_in_4bit: wanted, ..self })
    }

    /// Outputs and inputs of a 4-bit module whose packed integers have this shape.
    pub(crate) fn int4_shape(&self, packed: &[usize]) -> Option<[usize; 2]> {
        let is_awq = matches!(&self.quantization, Quantization::Gptq(gptq) if gptq.format == GptqFormat::Awq);
        match *packed {
            [inputs, words] if is_awq => Some([words.saturating_mul(CHANNELS_PER_WORD), inputs]),
            [words, outputs] => Some([outputs, words.saturating_mul(CHANNELS_PER_WORD)]),
            _ => None,
        }
    }

    pub fn tensor_files(&self) -> &TensorFiles {
        &self.files
    }

    /// File names of tensors that nothing reads, except those of layers that predict further
    /// tokens.
    pub fn unused(&self) -> &[String] {
        &self.unused
    }

    /// One line about them, if there are any.
    pub fn unused_note(&self) -> Option<String> {
        unused::note(&self.unused)
    }

    /// How the file names its tensors.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// What a copy of the model holds for the file's tensor `name`: its numbers, with float8
    /// expanded; parts of a 4-bit module and anything non-numeric as stored; nothing for scales
    /// that went into the numbers.
    pub fn copied(&self, name: &str) -> Result<Option<Copied<'_>>, ModelError> {
        let tensor = self.files.get(name)?;
        let module = name.rsplit_once('.').map_or("", |(module, _)| module);
        let part = |part: &str| self.files.contains(&format!("{module}.{part}"));
        if name.strip_suffix("_scale_inv").or_else(|| nf4::part_of(name)).is_some_and(|of| self.files.contains(of)) {
            return Ok(None);
        }
        if self.nf4(&tensor)?.is_some() {
            return Ok(Some(Copied::Numbers(tensor)));
        }
        let number = matches!(tensor.dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16 | Dtype::F8E4M3);
        if !number || part("qweight") {
            return Ok(Some(Copied::AsStored(tensor)));
        }
        if self.scales(&tensor)?.is_some() {
            self.fp8(tensor.name)?;
            if tensor.shape.len() != 2 {
                return Err(ModelError::tensor(
                    name,
                    format!("a float8 tensor of {} dimensions is not a matrix", tensor.shape.len()),
                ));
            }
        }
        Ok(Some(Copied::Numbers(tensor)))
    }

    /// The numbers of a tensor for which [`Weights::copied`] returned `Numbers`.
    pub fn numbers<'a>(&'a self, tensor: Tensor<'a>) -> Result<StoredTensor<'a>, ModelError> {
        let shape = self.numbers_shape(&tensor)?;
        self.stored(tensor, &shape)
    }

    /// Their shape, which packed matrices do not have in the file.
    pub fn numbers_shape(&self, tensor: &Tensor) -> Result<Vec<usize>, ModelError> {
        Ok(self.nf4(tensor)?.map_or_else(|| tensor.shape.to_vec(), |matrix| matrix.shape))
    }

    /// The matrix that a tensor of bitsandbytes holds.
    fn nf4<'a>(&'a self, tensor: &Tensor<'a>) -> Result<Option<Nf4Matrix<'a>>, ModelError> {
        let found = nf4::find(&self.files, tensor)?;
        if found.is_some() && self.quantization != Quantization::Bitsandbytes {
            let what = "it is packed, but the config has no `quantization_config` of method bitsandbytes";
            return Err(ModelError::tensor(tensor.name, what.to_string()));
        }
        Ok(found)
    }

    /// Adds where the tensor is.
    fn placed(&self, error: ModelError) -> ModelError {
        match error {
            ModelError::Tensor { name, what } => {
                ModelError::Tensor { name: format!("{name} of {}", self.files.path().display()), what }
            }
            other => other,
        }
    }

    fn get(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        Ok(self.files.get(&self.names.in_file(name))?)
    }

    /// A tensor of the file with float8 and packed matrices expanded.
    fn stored<'a>(&'a self, tensor: Tensor<'a>, shape: &[usize]) -> Result<StoredTensor<'a>, ModelError> {
        if let Some(matrix) = self.nf4(&tensor)? {
            if matrix.shape != shape {
                let what = format!("it holds a matrix {:?}, but the config says {shape:?}", matrix.shape);
                return Err(ModelError::tensor(tensor.name, what));
            }
            return Ok(expanded(&matrix.dequantise()?, shape));
        }
        let Some(scales) = self.scales(&tensor)? else { return stored(tensor, shape) };
        check_shape(&tensor, shape)?;
        let block = self.fp8(tensor.name)?.block;
        let &[rows, columns] = shape else {
            return Err(ModelError::tensor(
                tensor.name,
                format!("a float8 tensor of {} dimensions is not a matrix", shape.len()),
            ));
        };
        check_shape(&scales, &fp8::scale_shape(rows, columns, block))?;
        let values = fp8::dequantise(tensor.name, tensor.bytes, columns, &scales.to_f32()?, block)?;
        Ok(expanded(&values, shape))
    }

    /// All tensors of the matrix at `path`.
    fn parts(&self, path: &str) -> impl Iterator<Item = Tensor<'_>> {
        let file_path = self.names.in_file(path).into_owned();
        let names = gptq::PARTS.into_iter().chain(["weight", "weight_scale_inv"]);
        let packed = nf4::part_names(&format!("{file_path}.weight"));
        names
            .map(move |part| format!("{file_path}.{part}"))
            .chain(packed)
            .filter_map(move |name| self.files.get(&name).ok())
    }

    /// The scales of a float8 matrix. Only such a matrix may have them.
    fn scales(&self, tensor: &Tensor) -> Result<Option<Tensor<'_>>, ModelError> {
        let name = format!("{}_scale_inv", tensor.name);
        let there = tensor.name.ends_with(".weight") && self.files.contains(&name);
        match (tensor.dtype == Dtype::F8E4M3, there) {
            (false, false) => Ok(None),
            (true, true) => Ok(Some(self.files.get(&name)?)),
            (true, false) => Err(ModelError::tensor(tensor.name, format!("it holds F8_E4M3, but there is no {name}"))),
            (false, true) => {
                Err(ModelError::tensor(tensor.name, format!("it holds {}, but there is a {name}", tensor.dtype)))
            }
        }
    }

    fn fp8(&self, name: &str) -> Result<Fp8Config, ModelError> {
        match self.quantization {
            Quantization::Fp8(config) => Ok(config),
            _ => Err(ModelError::tensor(
                name,
                "it holds F8_E4M3, but the config has no `quantization_config` of method fp8".to_string(),
            )),
        }
    }

    /// The quantised module at `path`, or `file_path` in the file.
    fn gptq_module<'a>(
        &'a self,
        path: &str,
        file_path: &'a str,
        outputs: usize,
        inputs: usize,
    ) -> Result<gptq::GptqModule<'a>, ModelError> {
        if self.files.contains(&format!("{file_path}.weight")) {
            return Err(ModelError::tensor(&format!("{file_path}.qweight"), "there is a `weight` beside it"));
        }
        let config = self.gptq(path, file_path)?;
        Ok(gptq::GptqModule { files: &self.files, config, path: file_path, outputs, inputs })
    }

    /// The settings of the quantised module at `path`.
    fn gptq(&self, path: &str, file_path: &str) -> Result<&GptqConfig, ModelError> {
        let wrong = |what: &str| Err(ModelError::tensor(&format!("{file_path}.qweight"), what));
        let Quantization::Gptq(config) = &self.quantization else {
            return wrong("it is quantised, but the config has no `quantization_config` of method gptq or awq");
        };
        if self.excluded.iter().any(|pattern| pattern.is_match(path) || pattern.is_match(file_path)) {
            let key = if config.format == GptqFormat::Awq { "modules_to_not_convert" } else { "dynamic" };
            return wrong(&format!("it is quantised, but the config's `{key}` says that it is not"));
        }
        if path == "lm_head" && !config.lm_head && config.format == GptqFormat::Awq {
            return wrong("it is quantised, but AWQ leaves the head as it is");
        }
        if path == "lm_head" && !config.lm_head {
            return wrong("it is quantised, but the config's `lm_head` says that it is not");
        }
        Ok(config)
    }
}

/// Numbers that were stored in fewer bits.
fn expanded<'a>(values: &[f32], shape: &[usize]) -> StoredTensor<'a> {
    let mut bytes = vec![0; 4 * values.len()];
    for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
        *bytes = value.to_le_bytes();
    }
    StoredTensor { format: FloatFormat::F32, shape: shape.to_vec(), bytes: Cow::Owned(bytes) }
}

impl WeightSource for Weights {
    fn contains(&self, name: &str) -> bool {
        self.files.contains(&self.names.in_file(name))
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>, ModelError> {
        self.stored(self.get(name)?, shape).map_err(|error| self.placed(error))
    }

    fn format(&self, name: &str) -> Result<FloatFormat, ModelError> {
        let tensor = self.get(name)?;
        let expands = self.nf4(&tensor)?.is_some() || self.scales(&tensor)?.is_some();
        if expands { Ok(FloatFormat::F32) } else { format_of(&tensor) }
    }

    fn name_in_file<'n>(&self, name: &'n str) -> Cow<'n, str> {
        self.names.in_file(name)
    }

    fn release(&self, name: &str) {
        self.files.release(&self.names.in_file(name));
    }

    fn release_all(&self) {
        self.files.release_all();
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let tensor = self.get(name).ok()?;
        // What is wrong with a packed matrix is said when it is read.
        Some(self.numbers_shape(&tensor).unwrap_or_else(|_| tensor.shape.to_vec()))
    }

    fn names_under(&self, start: &str) -> Option<Vec<String>> {
        let here = self.files.names().filter_map(|name| self.names.here(name));
        let mut names: Vec<String> = here.filter(|name| name.starts_with(start)).map(Cow::into_owned).collect();
        names.sort_unstable();
        Some(names)
    }

    fn mxfp4_part(&self, name: &str, shape: &[usize]) -> Result<Cow<'_, [u8]>, ModelError> {
        let tensor = self.get(name)?;
        if self.quantization != Quantization::Mxfp4 {
            let what = "it is quantised, but the config has no `quantization_config` of method mxfp4".to_string();
            return Err(self.placed(ModelError::tensor(tensor.name, what)));
        }
        stored_bytes(tensor, shape).map_err(|error| self.placed(error))
    }

    fn weight(&self, path: &str, outputs: usize, inputs: usize) -> Result<Weight<'_>, ModelError> {
        let file_path = self.names.in_file(path);
        let there = |part: &str| self.files.contains(&format!("{file_path}.{part}"));
        if !there("qweight") {
            return Ok(Weight::Stored(self.tensor(&format!("{path}.weight"), &[outputs, inputs])?));
        }
        let module = self.gptq_module(path, &file_path, outputs, inputs)?;
        self.parts(path).for_each(|tensor| tensor.prefetch_range(0..tensor.bytes.len()));
        Ok(Weight::Gptq(module.read()?))
    }

    fn quantised(&self, path: &str, outputs: usize, inputs: usize) -> Result<Option<GptqForm>, ModelError> {
        let file_path = self.names.in_file(path);
        if !self.files.contains(&format!("{file_path}.qweight")) {
            return Ok(None);
        }
        let form = self.gptq_module(path, &file_path, outputs, inputs)?.form()?;
        self.files.release(&format!("{file_path}.g_idx"));
        Ok(Some(form))
    }

    fn loads_in_4bit(&self) -> bool {
        self.loads_in_4bit
    }

    fn release_weight(&self, path: &str) {
        self.parts(path).for_each(|tensor| tensor.release());
    }
}
