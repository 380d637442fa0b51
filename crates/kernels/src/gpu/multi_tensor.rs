//! Many tensors in one launch on a CUDA device (`gpu/multi_tensor.cu`): sums of squares, scaling,
//! AdamW. A table in device memory holds the addresses. Other devices use one launch per tensor;
//! the bits are the same.

use super::GpuMemory;
use super::device::{GROUP, Gpu, Groups, arguments, dimension};
use super::memory::{DevicePointer, GpuBuffer};
use super::program::{Program, files};
use super::runtime::Language;
use crate::backend::Device;
use crate::op::AdamWTensor;
use crate::op::sum_squares::BLOCK;
use isobit_numerics::lanes::LANES;

pub(super) static MULTI_TENSOR: Program =
    Program { name: "multi_tensor", text: files!("multi_tensor.cu"), language: Language::Cuda };

/// Whether the device supports tables of addresses.
pub(super) fn serves(gpu: &Gpu) -> bool {
    gpu.architecture().is_some()
}

/// Rows of a kernel's table, in 32-bit words, and the number of blocks before each tensor.
#[derive(Default)]
struct Table {
    words: Vec<u32>,
    starts: Vec<u32>,
    blocks: usize,
}

impl Table {
    /// Adds a row for a tensor of `length` elements: addresses and length, then 32-bit numbers.
    /// Empty tensors get none.
    fn push(&mut self, addresses: &[u64], length: usize, numbers: &[f32]) {
        if length == 0 {
            return;
        }
        let wide = addresses.iter().copied().chain([length as u64]);
        self.words.extend(wide.flat_map(|word| [word as u32, (word >> 32) as u32]));
        self.words.extend(numbers.iter().map(|number| number.to_bits()));
        self.starts.push(dimension(self.blocks));
        self.blocks += length.div_ceil(BLOCK);
    }

    /// Rows, starts and number of tensors, for a launch.
    fn upload(&self, gpu: &Gpu) -> (GpuBuffer<u32>, GpuBuffer<u32>, u32) {
        (gpu.upload(&self.words), gpu.upload(&self.starts), dimension(self.starts.len()))
    }
}

fn address(buffer: &GpuBuffer<f32>) -> u64 {
    DevicePointer::from(buffer).address()
}

/// Level by level for all tensors at once, until one number per tensor is left.
pub(super) fn sums_of_squares(gpu: &Gpu, results: &GpuBuffer<f32>, tensors: &[&GpuBuffer<f32>]) {
    let result = |index: usize| address(results) + (index * size_of::<f32>()) as u64;
    let mut left: Vec<_> = tensors.iter().enumerate().map(|(index, x)| (index, address(x), x.len())).collect();
    let mut kernel = "sums_of_squares_first";
    // Allocated here: the op has no workspace.
    let mut below: Option<GpuBuffer<f32>> = None;
    while left.iter().any(|&(_, _, length)| length > 0) {
        let above: usize = left.iter().map(|&(_, _, length)| length.div_ceil(BLOCK)).sum();
        let sums = GpuBuffer::<f32>::new(gpu, above);
        let (mut table, mut next, mut free) = (Table::default(), Vec::new(), address(&sums));
        for (index, from, length) in left {
            let blocks = length.div_ceil(BLOCK);
            let to = if blocks == 1 { result(index) } else { free };
            table.push(&[from, to], length, &[]);
            if blocks > 1 {
                next.push((index, to, blocks));
                free += (blocks * size_of::<f32>()) as u64;
            }
        }
        let (rows, starts, count) = table.upload(gpu);
        let groups = Groups::each(table.blocks.div_ceil(GROUP / LANES));
        gpu.launch(&MULTI_TENSOR, kernel, groups, arguments![&rows, &starts, count, dimension(table.blocks)]);
        (kernel, left) = ("sums_of_squares_further", next);
        // The previous level's sums are released after this one has read them: commands run in
        // order.
        drop(below.replace(sums));
    }
}

pub(super) fn scale(gpu: &Gpu, tensors: &[&mut GpuBuffer<f32>], factor: f32) {
    let mut table = Table::default();
    for x in tensors {
        table.push(&[address(x)], x.len(), &[]);
    }
    let (rows, starts, count) = table.upload(gpu);
    gpu.launch(&MULTI_TENSOR, "scale_all", Groups::each(table.blocks), arguments![&rows, &starts, count, factor]);
}

pub(super) fn adamw(gpu: &Gpu, tensors: &[AdamWTensor<GpuMemory>]) {
    let mut table = Table::default();
    for AdamWTensor { parameter, m, v, gradient, coefficients: c } in tensors {
        let length = parameter.len();
        let addresses = [address(parameter), address(m), address(v), address(gradient)];
        let numbers = [c.decay, c.one_minus_beta1, c.beta2, c.one_minus_beta2, c.step_size, c.inv_sqrt_c2, c.eps, 0.0];
        table.push(&addresses, length, &numbers);
    }
    let (rows, starts, count) = table.upload(gpu);
    gpu.launch(&MULTI_TENSOR, "adamw_all", Groups::each(table.blocks), arguments![&rows, &starts, count]);
}
