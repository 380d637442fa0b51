//! 4-bit integer matrices in GPTQ's storage format, checked and passed to the ops as stored: never
//! expanded. Those of AWQ (`awq.rs`) are packed anew.
//!
//! `W[output, input] = scale[group, output] · (q[input, output] − zero[group, output])` with
//! `group = g_idx[input]`. Eight integers share a 32-bit word, the lowest bits first: `qweight` is
//! packed along inputs, `qzeros` along outputs.
//!
//! Format 1 stores zeros minus one, subtracted from whole words; so reading adds 0x11111111 to
//! whole words, wrapping. There, a zero of 0 borrows from its neighbour, which adding one to each
//! four bits would not undo. Zeros are 0 to 15 either way.

use crate::ModelError;
use crate::awq;
use crate::config::{GptqConfig, GptqFormat};
use crate::source::check_shape;
use half::f16;
use isobit_kernels::op::product4::CHANNELS_PER_WORD;
use isobit_kernels::op::{AsQuantized, Quantized, QuantizedShape, Scales};
use isobit_proof::safetensors::{Dtype, Tensor, TensorFiles};

const INT4_MASK: u32 = 0xf;
/// One in every four bits of a word.
const ONES: u32 = 0x1111_1111;
/// Where a word of GPTQ has the integer of each of its eight outputs.
const IN_ORDER: [usize; CHANNELS_PER_WORD] = [0, 1, 2, 3, 4, 5, 6, 7];
/// The zero of a symmetric file.
const MIDDLE: u8 = 8;

/// Largest scale: sixteen steps of it are still finite.
const SCALE_MAX: f32 = 1e37;

/// One quantised linear layer.
#[derive(Clone, Debug, PartialEq)]
pub struct GptqWeight {
    pub outputs: usize,
    pub inputs: usize,
    /// Inputs per group.
    pub group_size: usize,
    /// `[inputs / 8, outputs]`: bits `4j..4j+4` of word `[r, o]` are the integer of input `8r + j`.
    pub qweight: Vec<i32>,
    /// `[groups, outputs]`, 0 to 15.
    pub zeros: Vec<u8>,
    /// `[groups, outputs]`
    pub scales: GptqScales,
    /// The group of each input.
    pub group_of_input: Vec<u32>,
}

/// Scales in their file's format; bfloat16 is converted to float32.
#[derive(Clone, Debug, PartialEq)]
pub enum GptqScales {
    F32(Vec<f32>),
    F16(Vec<f16>),
}

impl AsQuantized for GptqWeight {
    fn quantized(&self) -> Quantized<'_> {
        Quantized {
            n: self.outputs,
            k: self.inputs,
            group_size: self.group_size,
            words: &self.qweight,
            zeros: &self.zeros,
            scales: match &self.scales {
                GptqScales::F32(scales) => Scales::F32(scales),
                GptqScales::F16(scales) => Scales::F16(scales),
            },
            group_of: &self.group_of_input,
        }
    }
}

/// What is known about a quantised linear layer before its integers are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptqForm {
    pub group_size: usize,
    /// Whether scales are float16.
    pub half_scales: bool,
    /// Whether the inputs are not sorted by group.
    pub permuted: bool,
    /// The single zero of a symmetric file.
    pub zero: Option<u8>,
}

impl GptqForm {
    /// The shape of one such matrix.
    pub fn shape(self, outputs: usize, inputs: usize) -> QuantizedShape {
        let Self { group_size, half_scales, permuted, zero } = self;
        let ordered = usize::from(permuted);
        QuantizedShape { count: 1, n: outputs, k: inputs, group_size, half_scales, ordered, zero }
    }
}

impl GptqWeight {
    /// The integer at an input and an output.
    pub fn integer(&self, input: usize, output: usize) -> u8 {
        self.quantized().int4(input, output)
    }

    /// The matrix `[outputs, inputs]`: a difference of integers times the scale, rounded once. For
    /// a head or a router, whose ops take float32 numbers.
    #[expect(clippy::float_arithmetic, reason = "the one product that defines the weight")]
    pub fn dequantise(&self) -> Vec<f32> {
        let weight = self.quantized();
        let mut values = Vec::with_capacity(self.outputs * self.inputs);
        for output in 0..self.outputs {
            for input in 0..self.inputs {
                let place = self.group_of_input[input] as usize * self.outputs + output;
                let steps = weight.number(input, output);
                values.push(steps as f32 * weight.scales.get(place));
            }
        }
        values
    }
}

/// The tensors of a quantised linear layer.
pub(crate) const PARTS: [&str; 4] = ["qweight", "qzeros", "scales", "g_idx"];

/// A quantised linear layer in a file: its path there, and its settings from the config.
pub(crate) struct GptqModule<'a> {
    pub(crate) files: &'a TensorFiles,
    pub(crate) config: &'a GptqConfig,
    pub(crate) path: &'a str,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
}

impl GptqModule<'_> {
    pub(crate) fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.path)
    }

    /// The shape of `qweight`.
    fn packed_shape(&self) -> [usize; 2] {
        match self.config.format {
            GptqFormat::V1 | GptqFormat::V2 => [self.inputs / CHANNELS_PER_WORD, self.outputs],
            GptqFormat::Awq => [self.inputs, self.outputs / CHANNELS_PER_WORD],
        }
    }

    fn group_size(&self) -> usize {
        self.config.group_size.unwrap_or(self.inputs)
    }

    fn groups(&self) -> usize {
        self.inputs / self.group_size()
    }

    /// Checks that the sizes are consistent.
    fn check(&self) -> Result<(), ModelError> {
        let (name, inputs, size) = (self.name("qweight"), self.inputs, self.group_size());
        for (count, what) in [(inputs, "inputs"), (self.outputs, "outputs")] {
            if !count.is_multiple_of(CHANNELS_PER_WORD) {
                return Err(ModelError::tensor(
                    &name,
                    format!("{count} {what} are not a multiple of {CHANNELS_PER_WORD}"),
                ));
            }
        }
        if !inputs.is_multiple_of(size) {
            return Err(ModelError::tensor(&name, format!("groups of {size} do not divide {inputs} inputs")));
        }
        Ok(())
    }

    /// What is known before the integers are read. Checks names, shapes, types and groups.
    pub(crate) fn form(&self) -> Result<GptqForm, ModelError> {
        self.check()?;
        let (groups, outputs) = (self.groups(), self.outputs);
        for (part, shape) in [("qweight", self.packed_shape()), ("qzeros", [groups, outputs / CHANNELS_PER_WORD])] {
            packed(&self.files.get(&self.name(part))?, &shape)?;
        }
        let scales = self.files.get(&self.name("scales"))?;
        check_shape(&scales, &[groups, outputs])?;
        let permuted = !self.group_of_input()?.is_sorted();
        let zero = (self.config.symmetric == Some(true)).then_some(MIDDLE);
        Ok(GptqForm { group_size: self.group_size(), half_scales: scales.dtype == Dtype::F16, permuted, zero })
    }

    pub(crate) fn read(&self) -> Result<GptqWeight, ModelError> {
        self.check()?;
        let &Self { outputs, inputs, .. } = self;
        let name = self.name("qweight");
        let qweight = integers(self.files.get(&name)?, &self.packed_shape())?;
        let qweight = match self.config.format {
            GptqFormat::V1 | GptqFormat::V2 => qweight,
            GptqFormat::Awq => awq::along_inputs(&qweight, outputs),
        };
        let (zeros, scales) = (self.zeros()?, self.scales()?);
        let group_of_input = self.group_of_input()?;
        Ok(GptqWeight { outputs, inputs, group_size: self.group_size(), qweight, zeros, scales, group_of_input })
    }

    fn zeros(&self) -> Result<Vec<u8>, ModelError> {
        let name = self.name("qzeros");
        let words = integers(self.files.get(&name)?, &[self.groups(), self.outputs / CHANNELS_PER_WORD])?;
        let (add, order) = match self.config.format {
            GptqFormat::V1 => (ONES, IN_ORDER),
            GptqFormat::V2 => (0, IN_ORDER),
            GptqFormat::Awq => (0, awq::PLACES),
        };
        let unpacked = |word: i32| {
            let word = (word as u32).wrapping_add(add);
            order.into_iter().map(move |place| (word >> (4 * place) & INT4_MASK) as u8)
        };
        let zeros: Vec<u8> = words.into_iter().flat_map(unpacked).collect();
        if self.config.symmetric == Some(true)
            && let Some(at) = zeros.iter().position(|zero| *zero != MIDDLE)
        {
            // Some readers assume the zeros of a symmetric file; a file that can be read in two
            // ways is refused.
            let what = format!("zero {at} is {}, but `sym` says {MIDDLE}: is `checkpoint_format` right?", zeros[at]);
            return Err(ModelError::tensor(&name, what));
        }
        Ok(zeros)
    }

    fn scales(&self) -> Result<GptqScales, ModelError> {
        let name = self.name("scales");
        let tensor = self.files.get(&name)?;
        check_shape(&tensor, &[self.groups(), self.outputs])?;
        let scales = tensor.to_f32()?;
        if let Some(at) = scales.iter().position(|scale| !scale.is_finite() || scale.abs() > SCALE_MAX) {
            return Err(ModelError::tensor(&name, format!("element {at} is {}", scales[at])));
        }
        if tensor.dtype != Dtype::F16 {
            return Ok(GptqScales::F32(scales));
        }
        let bits = tensor.bytes.as_chunks().0.iter().map(|bytes| f16::from_bits(u16::from_le_bytes(*bytes)));
        Ok(GptqScales::F16(bits.collect()))
    }

    /// The group of each input: from `g_idx`, or consecutive.
    fn group_of_input(&self) -> Result<Vec<u32>, ModelError> {
        let (name, size) = (self.name("g_idx"), self.group_size());
        if self.files.contains(&name) {
            let indexes = integers(self.files.get(&name)?, &[self.inputs])?;
            return group_of_input(&name, &indexes, self.groups(), size);
        }
        if self.config.desc_act {
            return Err(ModelError::tensor(&name, "it is missing, but `desc_act` says that groups are not in order"));
        }
        Ok((0..self.inputs).map(|input| (input / size) as u32).collect())
    }
}

/// Checks for a tensor of 32-bit words of this shape.
fn packed(tensor: &Tensor, shape: &[usize]) -> Result<(), ModelError> {
    if tensor.dtype != Dtype::I32 {
        return Err(ModelError::tensor(tensor.name, format!("it holds {}, not I32", tensor.dtype)));
    }
    check_shape(tensor, shape)
}

fn integers(tensor: Tensor, shape: &[usize]) -> Result<Vec<i32>, ModelError> {
    packed(&tensor, shape)?;
    Ok(tensor.to_i32()?)
}

/// Group indices below `groups`, each used by `size` inputs.
fn group_of_input(name: &str, indexes: &[i32], groups: usize, size: usize) -> Result<Vec<u32>, ModelError> {
    let mut counts = vec![0_usize; groups];
    let mut of_input = Vec::with_capacity(indexes.len());
    for (input, &index) in indexes.iter().enumerate() {
        let group = usize::try_from(index).ok().filter(|group| *group < groups);
        let group =
            group.ok_or_else(|| ModelError::tensor(name, format!("input {input} is in group {index} of {groups}")))?;
        counts[group] += 1;
        of_input.push(group as u32);
    }
    match counts.iter().position(|count| *count != size) {
        None => Ok(of_input),
        Some(group) => Err(ModelError::tensor(name, format!("group {group} has {} inputs, not {size}", counts[group]))),
    }
}
