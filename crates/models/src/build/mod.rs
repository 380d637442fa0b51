//! Builds a model: finds every tensor by name, checks its shape, and slices it or keeps it in the
//! form its op needs.
//!
//! Frozen matrices are kept only as slices, two bytes per weight (x2), or in 4 bits, as stored or
//! as quantised here; a tensor's file pages may be dropped once it is read.

mod experts;
mod layer;

pub(crate) use experts::{ExpertTensor, expert_target};

use crate::ModelError;
use crate::adapter::{Trained, decays};
use crate::config::{AttentionKind, Config, MlpKind, NormStyle};
use crate::files::Form;
use crate::int4;
use crate::inventory::Inventory;
use crate::layer::Block;
use crate::model::{Head, Model, Part, RotaryTables};
use crate::source::{FloatFormat, StoredTensor, Weight, WeightSource};
use half::{bf16, f16};
use isobit_autograd::{
    Adapter, Frozen, HostNumbers, Linear, Matrix, Norm, Offload, ParameterId, Parameters, Quantized, Streamed,
    StreamedMatrix, StreamedQuantized, Table, Value, Vector,
};
use isobit_kernels::Backend;
use isobit_kernels::backend::Expected;
use isobit_kernels::buffer::{Element, elements_of};
use isobit_kernels::op::low_rank::RANK_MAX;
use isobit_kernels::op::slices::sliced_weight;
use isobit_kernels::op::{AsQuantized, QuantizedShape, SliceShape, SliceWeight};
use isobit_kernels::tensor::F32;
use isobit_numerics::philox::{Key, Purpose, uniform, word};
use isobit_numerics::rope::{RopeScaling, cos_sin_row, inverse_frequencies};
use isobit_numerics::slices::Profile;
use std::borrow::Cow;
use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::rc::Rc;

/// The name of the embedding table.
const TABLE: &str = "model.embed_tokens.weight";
/// Modules that an adapter may hold whole.
const EMBEDDING: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

/// A model and its trained parameters.
pub struct Built<B: Backend> {
    pub model: Model<B>,
    pub parameters: Parameters<B>,
}

/// Options for building a model.
#[derive(Clone, Debug)]
pub struct Settings {
    pub trained: Trained,
    pub profile: Profile,
    /// Longest sequence.
    pub positions: usize,
    /// For the adapter's initial values.
    pub seed: u64,
}

/// Loads every tensor of the model from `source`.
pub fn build<B: Backend>(
    backend: &B,
    config: &Config,
    source: &dyn WeightSource,
    settings: &Settings,
) -> Result<Built<B>, ModelError> {
    build_whole(backend, config, source, settings, Offload::NONE)
}

/// The same, placed as [`build_placed`] says.
pub fn build_whole<B: Backend>(
    backend: &B,
    config: &Config,
    source: &dyn WeightSource,
    settings: &Settings,
    offload: Offload,
) -> Result<Built<B>, ModelError> {
    let built = build_placed(backend, config, source, settings, &Part::whole(config), offload)?;
    match settings.trained {
        Trained::Lora(_) if built.parameters.is_empty() => Err(no_adapter()),
        _ => Ok(built),
    }
}

/// Adapters were asked for, but nothing gets one.
pub fn no_adapter() -> ModelError {
    ModelError::Adapter("no module of the model is a target".to_string())
}

/// Loads the tensors of a part of the model. The parameters of all parts, one part after the other,
/// are those of the whole model, apart from [`Model::table_copy`].
pub fn build_part<B: Backend>(
    backend: &B,
    config: &Config,
    source: &dyn WeightSource,
    settings: &Settings,
    part: &Part,
) -> Result<Built<B>, ModelError> {
    build_placed(backend, config, source, settings, part, Offload::NONE)
}

/// The same, with the matrices of layers in host memory if `offload` says so. Embedding, head,
/// norms and adapters are on the device.
pub fn build_placed<B: Backend>(
    backend: &B,
    config: &Config,
    source: &dyn WeightSource,
    settings: &Settings,
    part: &Part,
    offload: Offload,
) -> Result<Built<B>, ModelError> {
    // Tables and initial values are computed on this thread, after files have been opened.
    isobit_kernels::float_state::restore();
    if let Trained::Lora(lora) = &settings.trained {
        config.family.peft.check(config, lora)?;
    }
    if settings.trained != Trained::Nothing {
        backend.prepare(&expected(config, settings.profile));
    }
    let (parameters, forms) = (Parameters::default(), BTreeMap::new());
    let (streams, layer) = (offload.weights, None);
    let mut builder = Builder { backend, config, source, settings, parameters, forms, modules: 0, streams, layer };
    let mut model = builder.model(part)?;
    source.release_all();
    model.forms = std::mem::take(&mut builder.forms);
    Ok(Built { model, parameters: builder.parameters })
}

/// What the device will be asked to compute.
fn expected(config: &Config, profile: Profile) -> Expected {
    let layers = config.layers.iter();
    let head_widths = layers.clone().filter_map(|layer| match &layer.attention {
        AttentionKind::Softmax(softmax) => Some((softmax.head_width, softmax.head_width)),
        AttentionKind::Latent(latent) => Some((latent.key_width(), latent.value_width)),
        AttentionKind::Delta(_) => None,
    });
    Expected {
        profile,
        head_widths: head_widths.collect(),
        experts: layers.clone().any(|layer| matches!(layer.mlp, MlpKind::Experts(_))),
        delta_rule: layers.clone().any(|layer| matches!(layer.attention, AttentionKind::Delta(_))),
    }
}

struct Builder<'a, B: Backend> {
    backend: &'a B,
    config: &'a Config,
    source: &'a dyn WeightSource,
    settings: &'a Settings,
    parameters: Parameters<B>,
    /// Parameters stored in a file in another form.
    forms: BTreeMap<ParameterId, Form>,
    /// Number of linear modules so far: the index of the next one, which keys its random numbers.
    modules: u32,
    /// Whether the matrices of layers are in host memory.
    streams: bool,
    /// The layer that is built.
    layer: Option<usize>,
}

impl<B: Backend> Builder<'_, B> {
    fn model(&mut self, part: &Part) -> Result<Model<B>, ModelError> {
        let (embedding, tied_head) = match part.is_first().then(|| self.embedding(part.is_last())).transpose()? {
            Some((embedding, head)) => (Some(embedding), head),
            None => (None, None),
        };
        let blocks = self.blocks(part)?;
        let (mut head, mut table_copy) = (None, None);
        if part.is_last() {
            let norm = self.norm("model.norm", self.config.hidden, self.ends_trained())?;
            let matrix = match tied_head {
                Some(head) => head,
                None => self.head()?,
            };
            table_copy = match matrix {
                Matrix::Trained(id) if self.has_tied_weights() && !part.is_first() => Some(id),
                _ => None,
            };
            head = Some(Head { norm, matrix });
        }
        let tables = self.rotation(self.config.rope_theta, &self.config.rope_scaling);
        let local = self.config.local_rotation.as_ref();
        let local_tables = local.map(|local| self.rotation(local.theta, &local.scaling));
        Ok(Model {
            config: Config { tied: self.has_tied_weights(), ..self.config.clone() },
            part: part.clone(),
            embedding,
            blocks,
            head,
            tables,
            local_tables,
            positions: self.settings.positions,
            table_copy,
            forms: BTreeMap::new(),
        })
    }

    /// Whether an adapter holds a module whole (`modules_to_save`), and so trains it.
    fn is_saved(&self, path: &str) -> bool {
        matches!(&self.settings.trained, Trained::Lora(lora) if lora.saves(&self.config.module_path(path)))
    }

    /// Whether head and table are one tensor. As in PEFT, a module that an adapter holds whole is a
    /// copy of its own.
    fn has_tied_weights(&self) -> bool {
        self.config.tied && !self.is_saved(EMBEDDING) && !self.is_saved(HEAD)
    }

    /// The copy of a module that an adapter holds whole; it starts from the base's tensor `name`.
    fn saved_module(&mut self, path: &str, name: &str) -> Result<ParameterId, ModelError> {
        let shape = [self.config.vocabulary, self.config.hidden];
        if self.source.quantised(path, shape[0], shape[1])?.is_some() {
            return Err(only_adapters(format!("{}.qweight", self.source.name_in_file(path))));
        }
        let value = self.float32(name, &shape)?;
        self.source.release(name);
        let name = format!("base_model.model.{}.weight", self.config.module_path(path));
        let decays = decays(&name);
        Ok(self.parameters.add(name, shape.to_vec(), value, decays))
    }

    /// The embedding, and `with_head` also the head if they are tied.
    fn embedding(&mut self, with_head: bool) -> Result<(Table<B>, Option<Matrix<B>>), ModelError> {
        let (vocabulary, hidden, tied) = (self.config.vocabulary, self.config.hidden, self.config.tied);
        // A head that an adapter holds whole is made where the head is.
        let both = tied && with_head && !self.is_saved(HEAD);
        let (embedding, head) = if self.settings.trained == Trained::Full {
            let id = self.trained(TABLE, &[vocabulary, hidden])?;
            (if both { Table::Tied(id) } else { Table::Trained(id) }, both.then_some(Matrix::Trained(id)))
        } else {
            let stored = self.source.tensor(TABLE, &[vocabulary, hidden])?;
            stored_finite(TABLE, &stored)?;
            let frozen = self.frozen(&stored);
            let head = both.then(|| self.sliced(&frozen, vocabulary, hidden));
            drop(stored);
            let is_saved = self.is_saved(EMBEDDING);
            (if is_saved { Table::Trained(self.saved_module(EMBEDDING, TABLE)?) } else { Table::Frozen(frozen) }, head)
        };
        if tied {
            self.check_tied_head(TABLE)?;
        }
        self.source.release(TABLE);
        Ok((embedding, head))
    }

    /// A head that is not also the embedding of this part.
    fn head(&mut self) -> Result<Matrix<B>, ModelError> {
        let (vocabulary, hidden, profile) = (self.config.vocabulary, self.config.hidden, self.settings.profile);
        if self.is_saved(HEAD) {
            if !self.config.tied {
                self.source.bias(HEAD, vocabulary, false)?;
            }
            let name = if self.config.tied { TABLE } else { "lm_head.weight" };
            return Ok(Matrix::Trained(self.saved_module(HEAD, name)?));
        }
        if self.config.tied {
            if self.settings.trained == Trained::Full {
                return Ok(Matrix::Trained(self.trained(TABLE, &[vocabulary, hidden])?));
            }
            return self.sliced_matrix("model.embed_tokens", vocabulary, hidden, profile);
        }
        self.source.bias("lm_head", vocabulary, false)?;
        if self.ends_trained() {
            return Ok(Matrix::Trained(self.trained("lm_head.weight", &[vocabulary, hidden])?));
        }
        self.sliced_matrix("lm_head", vocabulary, hidden, profile)
    }

    /// The blocks of a part. Modules are counted over the whole model, since their numbers key
    /// random numbers.
    fn blocks(&mut self, part: &Part) -> Result<Vec<Block<B>>, ModelError> {
        let firsts = Inventory::first_modules(self.config);
        let mut blocks = Vec::with_capacity(part.layers.len());
        for layer in part.layers.clone() {
            self.modules = firsts[layer];
            self.layer = Some(layer);
            blocks.push(self.block(layer)?);
            self.layer = None;
            assert_eq!(self.modules, firsts[layer + 1], "the inventory counts the modules that layer {layer} has");
        }
        Ok(blocks)
    }

    /// A file may hold the head that the config ties to the embedding: it must then be identical,
    /// or one of them would be lost.
    fn check_tied_head(&self, table: &str) -> Result<(), ModelError> {
        let (name, shape) = ("lm_head.weight", [self.config.vocabulary, self.config.hidden]);
        if self.source.shape(name).is_none() {
            return Ok(());
        }
        let [head, embedding] = [self.source.tensor(name, &shape)?, self.source.tensor(table, &shape)?];
        let equal = if head.format == embedding.format {
            head.bytes == embedding.bytes
        } else {
            head.to_f32() == embedding.to_f32()
        };
        self.source.release(name);
        self.source.release(table);
        if equal {
            return Ok(());
        }
        let what =
            format!("it differs from {table}, but `tie_word_embeddings` in config.json says that they are the same");
        Err(ModelError::Tensor { name: name.to_string(), what })
    }

    /// Whether the final norm and the head are trained.
    fn ends_trained(&self) -> bool {
        matches!(self.settings.trained, Trained::Full | Trained::LastBlocks(_))
    }

    /// Whether a layer's own weights are trained.
    fn is_trained(&self, layer: usize) -> bool {
        match self.settings.trained {
            Trained::Full => true,
            Trained::LastBlocks(count) => layer + count >= self.config.layers.len(),
            Trained::Nothing | Trained::Lora(_) => false,
        }
    }

    /// A norm in the style of the family.
    fn norm(&mut self, path: &str, width: usize, trained: bool) -> Result<Norm<B>, ModelError> {
        let weight = self.vector(&format!("{path}.weight"), width, trained)?;
        Ok(Norm { weight, width, eps: self.config.eps, zero_centred: self.config.norm == NormStyle::ZeroCentred })
    }

    fn linear(
        &mut self,
        path: &str,
        outputs: usize,
        inputs: usize,
        with_bias: bool,
        trained: bool,
    ) -> Result<Linear<B>, ModelError> {
        let weight = self.matrix(path, outputs, inputs, trained)?;
        let bias = with_bias.then(|| self.vector(&format!("{path}.bias"), outputs, trained)).transpose()?;
        if !with_bias {
            self.source.bias(path, outputs, false)?;
        }
        let adapter = self.adapter(path, outputs, inputs)?;
        self.modules += 1;
        Ok(Linear { outputs, inputs, weight, bias, adapter })
    }

    fn adapter(&mut self, path: &str, outputs: usize, inputs: usize) -> Result<Option<Adapter>, ModelError> {
        let Trained::Lora(lora) = &self.settings.trained else { return Ok(None) };
        let path = &*self.config.module_path(path);
        let target = match lora.of(path)? {
            None => lora.of_parameter(&format!("{path}.weight"))?,
            target => target,
        };
        let Some((rank, scale)) = target else { return Ok(None) };
        if rank == 0 || rank > RANK_MAX {
            return Err(ModelError::Rank(format!("rank {rank} of {path} is not 1 to {RANK_MAX}")));
        }
        let name = |factor: &str| format!("base_model.model.{path}.{factor}.weight");
        let tensor = self.modules;
        let initial = || Ok::<_, ModelError>(initial_a(self.settings.seed, tensor, rank, inputs));
        let a = self.backend.upload_made(rank * inputs, initial)?;
        let b = self.backend.zeros(outputs * rank);
        let a = self.parameters.add(name("lora_A"), vec![rank, inputs], a, true);
        let b = self.parameters.add(name("lora_B"), vec![outputs, rank], b, true);
        Ok(Some(Adapter { a, b, rank, scale, dropout: lora.dropout, tensor }))
    }

    fn vector(&mut self, name: &str, length: usize, trained: bool) -> Result<Vector<B>, ModelError> {
        self.shaped(name, &[length], trained)
    }

    /// A vector that has more dimensions in its file.
    fn shaped(&mut self, name: &str, shape: &[usize], trained: bool) -> Result<Vector<B>, ModelError> {
        if trained {
            return Ok(Vector::Trained(self.trained(name, shape)?));
        }
        Ok(Vector::Frozen(self.float32(name, shape)?))
    }

    /// The matrix of the linear layer at `path`.
    fn matrix(&mut self, path: &str, rows: usize, width: usize, trained: bool) -> Result<Matrix<B>, ModelError> {
        let Some(form) = self.source.quantised(path, rows, width)? else {
            if trained {
                return self.trained_matrix(path, rows, width, self.settings.profile);
            }
            if self.source.loads_in_4bit() && int4::takes(rows, width) {
                return self.matrix_to_quantise(path, rows, width);
            }
            return self.sliced_matrix(path, rows, width, self.settings.profile);
        };
        if trained {
            return Err(only_adapters(format!("{}.qweight", self.source.name_in_file(path))));
        }
        let shape = form.shape(rows, width);
        let source = self.source;
        let quantized = self.quantized(shape, |_| match source.weight(path, rows, width)? {
            Weight::Gptq(weight) => Ok(weight),
            Weight::Stored(_) => unreachable!("a source that says that it is quantised gives it so"),
        })?;
        self.source.release_weight(path);
        Ok(Matrix::Quantized(vec![quantized]))
    }

    /// A frozen matrix that is quantised now.
    fn matrix_to_quantise(&mut self, path: &str, rows: usize, width: usize) -> Result<Matrix<B>, ModelError> {
        let name = format!("{path}.weight");
        let stored = self.source.tensor(&name, &[rows, width])?;
        let quantized = self.quantized(int4::FORM.shape(rows, width), |_| {
            stored_finite(&name, &stored)?;
            int4::quantise(&name, &stored, rows, width)
        })?;
        drop(stored);
        self.source.release_weight(path);
        Ok(Matrix::Quantized(vec![quantized]))
    }

    /// Weights in 4 bits, where they are to be.
    fn quantized<Q: AsQuantized>(
        &mut self,
        shape: QuantizedShape,
        make: impl FnMut(usize) -> Result<Q, ModelError>,
    ) -> Result<Quantized<B>, ModelError> {
        let weight = self.backend.quantized_weight(shape, make)?;
        let Some(layer) = self.streamed_layer() else { return Ok(Quantized::new(weight, shape)) };
        let streamed = StreamedQuantized::new(self.backend.save_quantized(weight));
        self.parameters.stream(layer, Streamed::Quantized(Rc::clone(&streamed)));
        Ok(Quantized::streamed(streamed, shape))
    }

    /// The layer that is built, if its matrices are in host memory.
    fn streamed_layer(&self) -> Option<usize> {
        self.layer.filter(|_| self.streams)
    }

    /// A frozen matrix whose op takes slices, even if stored in 4 bits.
    fn sliced_matrix(
        &mut self,
        path: &str,
        rows: usize,
        width: usize,
        profile: Profile,
    ) -> Result<Matrix<B>, ModelError> {
        let stored = match self.source.weight(path, rows, width)? {
            Weight::Stored(stored) => stored,
            Weight::Gptq(weight) => {
                let bytes = weight.dequantise().into_iter().flat_map(f32::to_le_bytes).collect();
                StoredTensor { format: FloatFormat::F32, shape: vec![rows, width], bytes: Cow::Owned(bytes) }
            }
        };
        stored_finite(&format!("{path}.weight"), &stored)?;
        let matrix = self.frozen_matrix(&stored, 1, SliceShape { rows, width, profile });
        self.source.release_weight(path);
        Ok(matrix)
    }

    /// Frozen matrices, where they are to be.
    fn frozen_matrix(&mut self, stored: &StoredTensor, count: usize, shape: SliceShape) -> Matrix<B> {
        let Some(layer) = self.streamed_layer() else {
            // The slices first: where buffers lie in ranges, the stored numbers are then at the
            // end, and leave no gap that later matrices of other sizes would lie around.
            let mut weight = self.backend.weight(count, shape);
            self.backend.run(SliceWeight { weight: &mut weight, w: self.frozen(stored).stored() });
            return Matrix::Frozen(weight);
        };
        let streamed = StreamedMatrix::new(self.host_numbers(stored), count, shape);
        self.parameters.stream(layer, Streamed::Matrix(Rc::clone(&streamed)));
        Matrix::Streamed(streamed)
    }

    /// The numbers of matrices that are trained, where they are to be.
    fn trained_value(&self, name: &str, stored: &StoredTensor) -> Result<Value<B>, ModelError> {
        let made = || finite(name, stored.to_f32());
        Ok(match self.streamed_layer() {
            Some(_) => Value::Host(self.backend.host_made(stored.length(), made)?),
            None => Value::Device(self.backend.upload_made(stored.length(), made)?),
        })
    }

    /// Trained matrices of the layer that is built, stacked if there are several.
    fn trained_in_layer(&mut self, id: ParameterId, count: usize, shape: SliceShape) -> Matrix<B> {
        if let Some(layer) = self.streamed_layer() {
            self.parameters.stream(layer, Streamed::Trained { id, count, shape });
        }
        Matrix::Trained(id)
    }

    /// A matrix that is trained.
    fn trained_matrix(
        &mut self,
        path: &str,
        rows: usize,
        width: usize,
        profile: Profile,
    ) -> Result<Matrix<B>, ModelError> {
        let name = format!("{path}.weight");
        let stored = self.source.tensor(&name, &[rows, width])?;
        let value = self.trained_value(&name, &stored)?;
        self.source.release(&name);
        let id = self.parameters.add_value(self.source.name_in_file(&name), vec![rows, width], value, decays(&name));
        Ok(self.trained_in_layer(id, 1, SliceShape { rows, width, profile }))
    }

    fn trained(&mut self, name: &str, shape: &[usize]) -> Result<ParameterId, ModelError> {
        let value = self.float32(name, shape)?;
        self.source.release(name);
        Ok(self.parameters.add(self.source.name_in_file(name), shape.to_vec(), value, decays(name)))
    }

    /// A tensor as float32 on the device.
    fn float32(&self, name: &str, shape: &[usize]) -> Result<F32<B>, ModelError> {
        let stored = self.source.tensor(name, shape)?;
        self.backend.upload_made(stored.length(), || finite(name, stored.to_f32()))
    }

    fn frozen(&self, stored: &StoredTensor) -> Frozen<B> {
        let length = stored.length();
        let made = match stored.format {
            FloatFormat::F32 => self.backend.upload_made(length, || Ok(stored.to_f32())).map(Frozen::F32),
            FloatFormat::Bf16 => {
                let numbers = || Ok(numbers(stored, bf16::from_bits));
                self.backend.upload_made(length, numbers).map(Frozen::Bf16)
            }
            FloatFormat::F16 => {
                let numbers = || Ok(numbers(stored, f16::from_bits));
                self.backend.upload_made(length, numbers).map(Frozen::F16)
            }
        };
        made.unwrap_or_else(|never: Infallible| match never {})
    }

    /// Frozen numbers in host memory.
    fn host_numbers(&self, stored: &StoredTensor) -> HostNumbers<B> {
        let length = stored.length();
        let made = match stored.format {
            FloatFormat::F32 => self.backend.host_made(length, || Ok(stored.to_f32())).map(HostNumbers::F32),
            FloatFormat::Bf16 => {
                let numbers = || Ok(stored.bits().map(bf16::from_bits).collect::<Vec<_>>());
                self.backend.host_made(length, numbers).map(HostNumbers::Bf16)
            }
            FloatFormat::F16 => {
                let numbers = || Ok(stored.bits().map(f16::from_bits).collect::<Vec<_>>());
                self.backend.host_made(length, numbers).map(HostNumbers::F16)
            }
        };
        made.unwrap_or_else(|never: Infallible| match never {})
    }

    fn sliced(&self, frozen: &Frozen<B>, rows: usize, width: usize) -> Matrix<B> {
        let shape = SliceShape { rows, width, profile: self.settings.profile };
        Matrix::Frozen(sliced_weight(self.backend, frozen.stored(), 1, shape))
    }

    fn rotation(&self, theta: f64, scaling: &RopeScaling) -> RotaryTables<B> {
        let positions = self.settings.positions;
        let frequencies = inverse_frequencies(self.config.rotary_width, theta, scaling, positions);
        let factor = scaling.attention_factor();
        let tables = LazyCell::new(|| {
            let (mut cos, mut sin) = (Vec::new(), Vec::new());
            for position in 0..positions as u32 {
                let (row_cos, row_sin) = cos_sin_row(&frequencies, factor, position);
                cos.extend(row_cos);
                sin.extend(row_sin);
            }
            [cos, sin]
        });
        let [cos, sin] = [0, 1].map(|table| {
            let made = self.backend.upload_made(positions * frequencies.len(), || Ok(&tables[table]));
            made.unwrap_or_else(|never: Infallible| match never {})
        });
        RotaryTables { cos, sin }
    }
}

/// 4-bit weights cannot be trained.
fn only_adapters(name: String) -> ModelError {
    ModelError::Quantised { name }
}

/// NaN or infinity in the weights means a malformed file; it is found before the first step.
fn finite(name: &str, values: Vec<f32>) -> Result<Vec<f32>, ModelError> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) => Err(ModelError::Tensor { name: name.to_string(), what: format!("element {at} is {}", values[at]) }),
    }
}

/// 16-bit numbers as they lie in the file, or a copy if they are not aligned there.
fn numbers<'s, T: Element>(stored: &'s StoredTensor, from_bits: fn(u16) -> T) -> Cow<'s, [T]> {
    elements_of(&stored.bytes).map_or_else(|| stored.bits().map(from_bits).collect(), Cow::Borrowed)
}

/// The same without converting to float32: an exponent of all ones is not finite.
fn stored_finite(name: &str, stored: &StoredTensor) -> Result<(), ModelError> {
    let exponent = |mask: u16| first_with_all(&stored.bytes, mask);
    let at = match stored.format {
        FloatFormat::F32 => return finite(name, stored.to_f32()).map(|_| ()),
        FloatFormat::Bf16 => exponent(0x7f80),
        FloatFormat::F16 => exponent(0x7c00),
    };
    match at {
        None => Ok(()),
        Some(at) => {
            let value = stored.to_f32()[at];
            Err(ModelError::Tensor { name: name.to_string(), what: format!("element {at} is {value}") })
        }
    }
}

/// The index of the first 16-bit number that has all bits of `mask`.
fn first_with_all(bytes: &[u8], mask: u16) -> Option<usize> {
    // Whole blocks are tested without an exit, which the compiler turns into vector instructions:
    // models have billions of numbers, and none that is found.
    const BLOCK: usize = 4096;
    let has_all = |number: &[u8; 2]| u16::from_le_bytes(*number) & mask == mask;
    let numbers = bytes.as_chunks().0;
    let in_block = |block: &[[u8; 2]]| block.iter().fold(false, |found, number| found | has_all(number));
    let block = numbers.chunks(BLOCK).position(in_block)?;
    let start = block * BLOCK;
    numbers[start..].iter().position(has_all).map(|at| start + at)
}

/// A of a new adapter, uniform within `±1/√inputs` (`docs/numerics.md`, "Initial adapters").
#[expect(clippy::float_arithmetic, reason = "initial values, as numerics.md defines them")]
fn initial_a(seed: u64, tensor: u32, rank: usize, inputs: usize) -> Vec<f32> {
    let key = Key::new(seed, Purpose::AdapterInit);
    let bound = (1.0 / (inputs as f64).sqrt()) as f32;
    let element = |index: usize| (2.0 * uniform(word(key, 0, 0, tensor, index as u64)) - 1.0) * bound;
    (0..rank * inputs).map(element).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_number_that_is_not_finite_is_found_wherever_it_is() {
        let (infinity, mask) = (0xff80_u16, 0x7f80_u16);
        for length in [0, 1, 4095, 4096, 4097, 9000] {
            let mut bits = vec![0x7f7f_u16; length];
            let bytes = |bits: &[u16]| bits.iter().flat_map(|bits| bits.to_le_bytes()).collect::<Vec<u8>>();
            assert_eq!(first_with_all(&bytes(&bits), mask), None);
            for at in [0, length / 2, length.saturating_sub(1)].into_iter().filter(|at| *at < length).rev() {
                bits[at] = infinity;
                assert_eq!(first_with_all(&bytes(&bits), mask), Some(at), "of {length}");
            }
        }
    }
}
