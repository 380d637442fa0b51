//! Matrices of 4-bit integers as GPTQ's writers store them, unpacked as far as the ops want them and checked.
//!
//! `W[output, input] = scale[group, output] · (q[input, output] − zero[group, output])` with `group = g_idx[input]`. Eight integers share a
//! 32-bit word, the lowest bits first: `qweight` is packed along inputs, `qzeros` along outputs.
//!
//! Format 1 stores zeros less one, subtracted from whole words; so whole words have 0x11111111 added, with wrap-around. A zero of
//! 0 borrows from its neighbour there, which adding one to each four bits would not give back. Zeros are 0 to 15 either way.

use crate::ModelError;
use crate::config::{GptqConfig, GptqFormat};
use isobit_proof::safetensors::{Checkpoint, Dtype, Tensor};

/// Integers in a word.
const PACKED: usize = 8;
const NIBBLE: u32 = 0xf;
/// One in every nibble of a word.
const ONES: u32 = 0x1111_1111;
/// The zero of a symmetric file.
const MIDDLE: u8 = 8;

/// One quantised linear layer.
#[derive(Clone, Debug, PartialEq)]
pub struct GptqWeight {
    pub outputs: usize,
    pub inputs: usize,
    pub groups: usize,
    /// `[inputs / 8, outputs]`: bits `4j..4j+4` of word `[r, o]` are the integer of input `8r + j`.
    pub qweight: Vec<i32>,
    /// `[groups, outputs]`, 0 to 15.
    pub zeros: Vec<u8>,
    /// `[groups, outputs]`
    pub scales: Vec<f32>,
    /// The group of each input.
    pub group_of_input: Vec<u32>,
    /// The inputs in the order of their groups, each group's in ascending order; none where they are in that order already.
    pub order: Option<Vec<u32>>,
}

impl GptqWeight {
    /// The integer of an input and an output.
    pub fn integer(&self, input: usize, output: usize) -> u8 {
        let word = self.qweight[input / PACKED * self.outputs + output] as u32;
        (word >> (4 * (input % PACKED)) & NIBBLE) as u8
    }

    /// The matrix `[outputs, inputs]`: a difference of integers times the scale, rounded once.
    #[expect(clippy::float_arithmetic, reason = "the one product that defines the weight")]
    pub fn dequantise(&self) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.outputs * self.inputs);
        for output in 0..self.outputs {
            for input in 0..self.inputs {
                let place = self.group_of_input[input] as usize * self.outputs + output;
                let steps = i32::from(self.integer(input, output)) - i32::from(self.zeros[place]);
                values.push(steps as f32 * self.scales[place]);
            }
        }
        values
    }
}

/// What is stored for a quantised linear.
pub(crate) const PARTS: [&str; 4] = ["qweight", "qzeros", "scales", "g_idx"];

/// Reads the linear at `path`, the path in the file.
pub(crate) fn read(
    checkpoint: &Checkpoint,
    config: &GptqConfig,
    path: &str,
    outputs: usize,
    inputs: usize,
) -> Result<GptqWeight, ModelError> {
    let part = |part: &str| format!("{path}.{part}");
    let name = part("qweight");
    for (count, what) in [(inputs, "inputs"), (outputs, "outputs")] {
        if !count.is_multiple_of(PACKED) {
            return Err(wrong(&name, format!("{count} {what} do not fill words of {PACKED}")));
        }
    }
    let size = config.group_size.unwrap_or(inputs);
    if !inputs.is_multiple_of(size) {
        return Err(wrong(&name, format!("groups of {size} do not divide {inputs} inputs")));
    }
    let groups = inputs / size;
    let qweight = integers(&name, checkpoint.get(&name)?, &[inputs / PACKED, outputs])?;
    let zeros = zeros(checkpoint, config, &part("qzeros"), groups, outputs)?;
    let scales = scales(checkpoint, &part("scales"), groups, outputs)?;
    let name = part("g_idx");
    let group_of_input = if checkpoint.contains(&name) {
        group_of_input(&name, &integers(&name, checkpoint.get(&name)?, &[inputs])?, groups, size)?
    } else if config.desc_act {
        return Err(wrong(&name, "it is missing, and `desc_act` says that groups are not in order".to_string()));
    } else {
        (0..inputs).map(|input| (input / size) as u32).collect()
    };
    let order = order(&group_of_input, groups, size);
    Ok(GptqWeight { outputs, inputs, groups, qweight, zeros, scales, group_of_input, order })
}

fn wrong(name: &str, what: String) -> ModelError {
    ModelError::Tensor { name: name.to_string(), what }
}

fn shaped(name: &str, tensor: &Tensor, shape: &[usize]) -> Result<(), ModelError> {
    if tensor.shape == shape {
        return Ok(());
    }
    Err(wrong(name, format!("its shape is {:?}, the config says {shape:?}", tensor.shape)))
}

fn integers(name: &str, tensor: Tensor, shape: &[usize]) -> Result<Vec<i32>, ModelError> {
    if tensor.dtype != Dtype::I32 {
        return Err(wrong(name, format!("it holds {}, not I32", tensor.dtype)));
    }
    shaped(name, &tensor, shape)?;
    Ok(tensor.to_i32()?)
}

fn zeros(
    checkpoint: &Checkpoint,
    config: &GptqConfig,
    name: &str,
    groups: usize,
    outputs: usize,
) -> Result<Vec<u8>, ModelError> {
    let words = integers(name, checkpoint.get(name)?, &[groups, outputs / PACKED])?;
    let add = match config.format {
        GptqFormat::V1 => ONES,
        GptqFormat::V2 => 0,
    };
    let nibbles = |word: i32| {
        let word = (word as u32).wrapping_add(add);
        (0..PACKED).map(move |place| (word >> (4 * place) & NIBBLE) as u8)
    };
    let zeros: Vec<u8> = words.into_iter().flat_map(nibbles).collect();
    if config.symmetric == Some(true)
        && let Some(at) = zeros.iter().position(|zero| *zero != MIDDLE)
    {
        // Some readers take the zeros of a symmetric file for granted: two readings of one file are none.
        let what = format!("zero {at} is {}, `sym` says {MIDDLE}: is `checkpoint_format` right?", zeros[at]);
        return Err(wrong(name, what));
    }
    Ok(zeros)
}

fn scales(checkpoint: &Checkpoint, name: &str, groups: usize, outputs: usize) -> Result<Vec<f32>, ModelError> {
    let tensor = checkpoint.get(name)?;
    shaped(name, &tensor, &[groups, outputs])?;
    let scales = tensor.to_f32()?;
    match scales.iter().position(|scale| !scale.is_finite()) {
        None => Ok(scales),
        Some(at) => Err(wrong(name, format!("element {at} is {}", scales[at]))),
    }
}

/// Groups as numbers below `groups`, each of `size` inputs.
fn group_of_input(name: &str, indexes: &[i32], groups: usize, size: usize) -> Result<Vec<u32>, ModelError> {
    let mut counts = vec![0_usize; groups];
    let mut of_input = Vec::with_capacity(indexes.len());
    for (input, &index) in indexes.iter().enumerate() {
        let group = usize::try_from(index).ok().filter(|group| *group < groups);
        let group = group.ok_or_else(|| wrong(name, format!("input {input} is in group {index} of {groups}")))?;
        counts[group] += 1;
        of_input.push(group as u32);
    }
    match counts.iter().position(|count| *count != size) {
        None => Ok(of_input),
        Some(group) => Err(wrong(name, format!("group {group} has {} inputs, not {size}", counts[group]))),
    }
}

/// A stable sort of the inputs by group; none where there is nothing to sort.
fn order(group_of_input: &[u32], groups: usize, size: usize) -> Option<Vec<u32>> {
    if group_of_input.is_sorted() {
        return None;
    }
    let mut next: Vec<usize> = (0..groups).map(|group| group * size).collect();
    let mut order = vec![0; group_of_input.len()];
    for (input, &group) in group_of_input.iter().enumerate() {
        let place = &mut next[group as usize];
        order[*place] = input as u32;
        *place += 1;
    }
    Some(order)
}
