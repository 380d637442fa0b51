//! Arithmetic on host memory for a device that keeps optimizer state or gradients there. It runs on
//! a backend of the host, and every backend gives the same bits, so where a number is computed does
//! not show.

use crate::backend::{Backend, BegunDigests, DeviceFailure, F32, Memory};
use crate::op::{AdamWTensor, AdamWUpdate, Add, AnyBuffer, Scale, SumSquares};
use isobit_numerics::digest::Digest;

/// What the optimizer does with tensors in the memory `M`.
pub trait HostOps<M: Memory> {
    fn zeros(&self, length: usize) -> F32<M>;
    fn upload(&self, numbers: &[f32]) -> F32<M>;
    fn overwrite(&self, tensor: &mut F32<M>, numbers: &[f32]);
    fn download(&self, tensor: &F32<M>) -> Result<Vec<f32>, DeviceFailure>;
    /// `y = a + b`
    fn add(&self, y: &mut F32<M>, a: &F32<M>, b: &F32<M>);
    /// `x = x·factor` for every tensor.
    fn scale(&self, tensors: Vec<&mut F32<M>>, factor: f32);
    fn sums_of_squares(&self, tensors: &[&F32<M>]) -> Result<Vec<f32>, DeviceFailure>;
    fn adamw(&self, tensors: Vec<AdamWTensor<'_, M>>);
    fn digests(&self, tensors: &[&F32<M>]) -> Result<Vec<Digest>, DeviceFailure>;
}

impl<B: Backend> HostOps<B::Memory> for B {
    fn zeros(&self, length: usize) -> F32<B::Memory> {
        crate::Device::zeros(self, length)
    }

    fn upload(&self, numbers: &[f32]) -> F32<B::Memory> {
        crate::Device::upload(self, numbers)
    }

    fn overwrite(&self, tensor: &mut F32<B::Memory>, numbers: &[f32]) {
        crate::Device::overwrite(self, tensor, numbers);
    }

    fn download(&self, tensor: &F32<B::Memory>) -> Result<Vec<f32>, DeviceFailure> {
        crate::Device::download(self, tensor)
    }

    fn add(&self, y: &mut F32<B::Memory>, a: &F32<B::Memory>, b: &F32<B::Memory>) {
        self.run(Add { y, a, b });
    }

    fn scale(&self, tensors: Vec<&mut F32<B::Memory>>, factor: f32) {
        self.run(Scale { tensors, factor });
    }

    fn sums_of_squares(&self, tensors: &[&F32<B::Memory>]) -> Result<Vec<f32>, DeviceFailure> {
        if tensors.is_empty() {
            return Ok(Vec::new());
        }
        let mut sums = HostOps::zeros(self, tensors.len());
        self.run(SumSquares { sums: &mut sums, tensors });
        HostOps::download(self, &sums)
    }

    fn adamw(&self, tensors: Vec<AdamWTensor<'_, B::Memory>>) {
        if !tensors.is_empty() {
            self.run(AdamWUpdate { tensors });
        }
    }

    fn digests(&self, tensors: &[&F32<B::Memory>]) -> Result<Vec<Digest>, DeviceFailure> {
        let tensors: Vec<_> = tensors.iter().map(|tensor| AnyBuffer::F32(*tensor)).collect();
        BegunDigests::<B::Memory>::new(self, &tensors).finish(self)
    }
}
