//! Optimizer state in host memory (`offload = ["optimizer"]`): moments, and a copy of the values
//! that the update is computed from. The host computes it with the same bits as the device would,
//! and new values go to the device.

use isobit_autograd::{Gradients, Host, Parameter, Parameters, Value};
use isobit_kernels::op::AdamWTensor;
use isobit_kernels::tensor::HostF32;
use isobit_kernels::{Backend, DeviceFailure};
use isobit_numerics::adamw::Coefficients;
use isobit_numerics::digest::Digest;

/// Of the first tensors, in the order of the parameters.
pub(crate) struct HostOptimizer<B: Backend> {
    host: Host<B>,
    /// The values; None where the only copy of a value is in host memory already.
    values: Vec<Option<HostF32<B>>>,
    moments: Vec<[HostF32<B>; 2]>,
}

impl<B: Backend> HostOptimizer<B> {
    /// Of the first `count` tensors.
    pub(crate) fn new(
        backend: &B,
        host: Host<B>,
        parameters: &Parameters<B>,
        count: usize,
    ) -> Result<Self, DeviceFailure> {
        let own = || parameters.iter().take(count).map(|(_, parameter)| parameter);
        let copy = |parameter: &Parameter<B>| match &parameter.value {
            Value::Host(_) => Ok(None),
            Value::Device(value) => {
                let mut copy = backend.host_zeros(parameter.length());
                backend.save(&mut copy, value)?;
                Ok(Some(copy))
            }
        };
        let values = own().map(copy).collect::<Result<_, DeviceFailure>>()?;
        let zeros = |parameter: &Parameter<B>| [(); 2].map(|()| backend.host_zeros(parameter.length()));
        Ok(Self { values, moments: own().map(zeros).collect(), host })
    }

    /// Applies AdamW; returns the sum of the squares of each tensor's new values.
    pub(crate) fn apply(
        &mut self,
        backend: &B,
        parameters: &mut Parameters<B>,
        gradients: &Gradients<B>,
        coefficients: impl Fn(&Parameter<B>) -> Coefficients,
    ) -> Result<Vec<f32>, DeviceFailure> {
        let ids: Vec<_> = parameters.iter().map(|(id, _)| id).collect();
        let own = parameters.iter_mut().zip(&mut self.values).zip(&mut self.moments).zip(&ids);
        let tensors = own.map(|(((parameter, copy), [m, v]), id)| {
            let coefficients = coefficients(parameter);
            let value = match &mut parameter.value {
                Value::Host(value) => value,
                Value::Device(_) => copy.as_mut().expect(COPIED),
            };
            AdamWTensor { parameter: value, m, v, gradient: gradients.get_on_host(*id), coefficients }
        });
        self.host.adamw(tensors.collect());
        for (parameter, copy) in parameters.iter_mut().zip(&self.values) {
            if let (Value::Device(value), Some(copy)) = (&mut parameter.value, copy) {
                backend.load(value, copy);
            }
        }
        let new = parameters.iter().zip(&self.values).map(|((_, parameter), copy)| match &parameter.value {
            Value::Host(value) => value,
            Value::Device(_) => copy.as_ref().expect(COPIED),
        });
        self.host.sums_of_squares(&new.collect::<Vec<_>>())
    }

    pub(crate) fn moment(&self, tensor: usize, order: usize) -> Result<Vec<f32>, DeviceFailure> {
        self.host.download(&self.moments[tensor][order])
    }

    /// Digests of the gradient that was applied and of both moments, by tensor.
    pub(crate) fn digests(
        &self,
        gradients: &Gradients<B>,
        parameters: &Parameters<B>,
    ) -> Result<Vec<[Digest; 3]>, DeviceFailure> {
        let of = |(id, _): (_, &Parameter<B>)| gradients.get_on_host(id);
        let all = parameters.iter().map(of).zip(&self.moments).flat_map(|(gradient, [m, v])| [gradient, m, v]);
        let digests = self.host.digests(&all.collect::<Vec<_>>())?;
        Ok(digests.as_chunks::<3>().0.to_vec())
    }

    pub(crate) fn write_moment(&mut self, tensor: usize, order: usize, numbers: &[f32]) {
        self.host.overwrite(&mut self.moments[tensor][order], numbers);
    }

    /// A tensor has new values on the device.
    pub(crate) fn write_value(&mut self, tensor: usize, numbers: &[f32]) {
        if let Some(copy) = &mut self.values[tensor] {
            self.host.overwrite(copy, numbers);
        }
    }
}

const COPIED: &str = "values on the device have a copy in host memory";
