//! Gradients of the trained tensors in float32, summed over a step.
//!
//! They rest on the device or in host memory. In host memory, a gradient comes to the device when
//! an op adds to it and leaves when its block is done, so that the device holds those of one block.
//! Parts are added on the device in the same order as without: where a sum waits does not show.

use crate::TapeError;
use crate::parameters::{ParameterId, Parameters};
use isobit_kernels::backend::Length;
use isobit_kernels::op::{Add, Scale, SumSquares};
use isobit_kernels::tensor::{F32, HostF32, HostMemory};
use isobit_kernels::{Backend, DeviceFailure, HostOps};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// What computes on gradients in host memory.
pub type Host<B> = Rc<dyn HostOps<HostMemory<B>>>;

/// Host memory for gradients: what computes there, and buffers of earlier gradients by length, to
/// be used again. New ones would cost page faults in every update.
pub struct HostPlace<B: Backend> {
    host: Host<B>,
    /// Bytes that may wait on the device until the group is done.
    waiting_max: usize,
    free: RefCell<BTreeMap<usize, Vec<HostF32<B>>>>,
}

impl<B: Backend> HostPlace<B> {
    /// At the end of a block gradients go to host memory if they are more than `waiting_max` bytes,
    /// at the end of a group in any case.
    pub fn new(host: Host<B>, waiting_max: usize) -> Rc<Self> {
        Rc::new(Self { host, waiting_max, free: RefCell::default() })
    }

    /// A buffer to be overwritten.
    fn take(self: &Rc<Self>, backend: &B, length: usize) -> HostSum<B> {
        let old = self.free.borrow_mut().get_mut(&length).and_then(Vec::pop);
        let numbers = old.unwrap_or_else(|| backend.host_zeros(length));
        HostSum { numbers: Some(numbers), place: Rc::clone(self) }
    }

    fn upload(self: &Rc<Self>, backend: &B, numbers: &[f32]) -> HostSum<B> {
        let mut sum = self.take(backend, numbers.len());
        self.host.overwrite(sum.numbers_mut(), numbers);
        sum
    }
}

/// A buffer of a [`HostPlace`]; dropping it gives it back.
struct HostSum<B: Backend> {
    numbers: Option<HostF32<B>>,
    place: Rc<HostPlace<B>>,
}

impl<B: Backend> HostSum<B> {
    fn numbers(&self) -> &HostF32<B> {
        self.numbers.as_ref().expect("until it is dropped")
    }

    fn numbers_mut(&mut self) -> &mut HostF32<B> {
        self.numbers.as_mut().expect("until it is dropped")
    }
}

impl<B: Backend> Drop for HostSum<B> {
    fn drop(&mut self) {
        if let Some(numbers) = self.numbers.take() {
            self.place.free.borrow_mut().entry(numbers.len()).or_default().push(numbers);
        }
    }
}

pub struct Gradients<B: Backend> {
    all: Vec<Sum<B>>,
    reached: Vec<bool>,
    /// The embedding's part of a tied table, separate from the head's: each is a sum over the rows
    /// of the step on its own; otherwise the order would depend on the micro-batches.
    tied: Option<(ParameterId, Sum<B>)>,
    /// None if they rest on the device.
    host: Option<Rc<HostPlace<B>>>,
}

/// One gradient. Where it is in neither memory, it is zero.
struct Sum<B: Backend> {
    length: usize,
    device: Option<F32<B>>,
    host: Option<HostSum<B>>,
}

impl<B: Backend> Sum<B> {
    fn zero(length: usize) -> Self {
        Self { length, device: None, host: None }
    }

    /// On the device, for an op's contribution.
    fn reach(&mut self, backend: &B) -> &mut F32<B> {
        let (length, host) = (self.length, &self.host);
        self.device.get_or_insert_with(|| {
            let mut device = backend.lasting_zeros(length);
            if let Some(host) = host {
                backend.load(&mut device, host.numbers());
            }
            device
        })
    }

    /// Moves it to host memory, if it is on the device.
    fn leave(&mut self, backend: &B, place: &Rc<HostPlace<B>>) -> Result<(), DeviceFailure> {
        if let Some(device) = self.device.take() {
            let host = self.host.get_or_insert_with(|| place.take(backend, self.length));
            backend.save(host.numbers_mut(), &device)?;
        }
        Ok(())
    }

    fn on_device(&self) -> &F32<B> {
        self.device.as_ref().expect("it rests on the device")
    }

    fn on_host(&self) -> &HostF32<B> {
        self.host.as_ref().expect("it rests in host memory").numbers()
    }

    /// The sum of two, where they rest.
    fn plus(&self, right: &Self, backend: &B, place: Option<&Rc<HostPlace<B>>>) -> Self {
        let mut sum = Self::zero(self.length);
        if let Some(place) = place {
            let mut y = place.take(backend, self.length);
            place.host.add(y.numbers_mut(), self.on_host(), right.on_host());
            sum.host = Some(y);
        } else {
            let mut y = backend.lasting_zeros(self.length);
            backend.run(Add { y: &mut y, a: self.on_device(), b: right.on_device() });
            sum.device = Some(y);
        }
        sum
    }
}

impl<B: Backend> Gradients<B> {
    /// On the device.
    pub fn zeros(backend: &B, parameters: &Parameters<B>) -> Self {
        let zeros = |length: usize| Sum { device: Some(backend.lasting_zeros(length)), ..Sum::zero(length) };
        let all = parameters.all.iter().map(|parameter| zeros(parameter.length())).collect();
        Self::new(all, false, None)
    }

    /// In host memory.
    pub fn zeros_on(host: Rc<HostPlace<B>>, parameters: &Parameters<B>) -> Self {
        let all = parameters.all.iter().map(|parameter| Sum::zero(parameter.length())).collect();
        Self::new(all, false, Some(host))
    }

    fn new(all: Vec<Sum<B>>, reached: bool, host: Option<Rc<HostPlace<B>>>) -> Self {
        let reached = vec![reached; all.len()];
        Self { all, reached, tied: None, host }
    }

    /// Gradients made elsewhere: a part per parameter, and possibly the embedding's part of a tied
    /// table, which is the first parameter.
    pub fn from_parts(
        backend: &B,
        host: Option<Rc<HostPlace<B>>>,
        parts: &[Vec<f32>],
        parameters: &Parameters<B>,
    ) -> Self {
        let sum = |part: &Vec<f32>| match &host {
            None => Sum { device: Some(backend.upload(part)), ..Sum::zero(part.len()) },
            Some(place) => Sum { host: Some(place.upload(backend, part)), ..Sum::zero(part.len()) },
        };
        let mut all: Vec<Sum<B>> = parts.iter().map(sum).collect();
        let tied = all.split_off(parameters.len()).pop().map(|part| (ParameterId(0), part));
        Self { tied, ..Self::new(all, true, host) }
    }

    /// What [`Gradients::from_parts`] takes.
    pub fn to_parts(&self, backend: &B) -> Result<Vec<Vec<f32>>, DeviceFailure> {
        let parts = self.all.iter().chain(self.tied.as_ref().map(|(_, part)| part));
        parts.map(|part| self.to_host(backend, part)).collect()
    }

    /// The gradient of one tensor, copied to the host.
    pub fn to_numbers(&self, backend: &B, id: ParameterId) -> Result<Vec<f32>, DeviceFailure> {
        self.to_host(backend, &self.all[id.0])
    }

    fn to_host(&self, backend: &B, part: &Sum<B>) -> Result<Vec<f32>, DeviceFailure> {
        match &self.host {
            None => backend.download(part.on_device()),
            Some(place) => place.host.download(part.on_host()),
        }
    }

    /// Of gradients on the device.
    pub fn get(&self, id: ParameterId) -> &F32<B> {
        self.all[id.0].on_device()
    }

    /// Of gradients in host memory, once they rest there.
    pub fn get_on_host(&self, id: ParameterId) -> &HostF32<B> {
        self.all[id.0].on_host()
    }

    /// For an op's contribution.
    pub(crate) fn reach(&mut self, backend: &B, id: ParameterId) -> &mut F32<B> {
        self.reached[id.0] = true;
        self.all[id.0].reach(backend)
    }

    /// For an op that contributes to two parameters at once.
    pub(crate) fn reach_both(&mut self, backend: &B, a: ParameterId, b: ParameterId) -> (&mut F32<B>, &mut F32<B>) {
        for id in [a, b] {
            self.reach(backend, id);
        }
        let [a, b] = self.all.get_disjoint_mut([a.0, b.0]).expect("two tensors");
        (a.reach(backend), b.reach(backend))
    }

    /// For an op that contributes to different parameters at once, in their order.
    pub(crate) fn reach_all(&mut self, backend: &B, ids: &[ParameterId]) -> Vec<&mut F32<B>> {
        let mut found: Vec<_> = ids.iter().map(|_| None).collect();
        for (index, (sum, reached)) in self.all.iter_mut().zip(&mut self.reached).enumerate() {
            if let Some(at) = ids.iter().position(|id| id.0 == index) {
                *reached = true;
                found[at] = Some(sum.reach(backend));
            }
        }
        found.into_iter().map(|sum| sum.expect("different parameters of the model")).collect()
    }

    /// For the embedding's contribution to a table that is also the head.
    pub(crate) fn reach_tied(&mut self, backend: &B, id: ParameterId, length: usize) -> &mut F32<B> {
        self.reached[id.0] = true;
        self.tied.get_or_insert_with(|| (id, Sum::zero(length))).1.reach(backend)
    }

    /// The embedding's part of a tied table, of zeros.
    pub fn add_tied_part(&mut self, backend: &B, id: ParameterId, length: usize) {
        self.reach_tied(backend, id, length);
    }

    /// A block is done: gradients that rest in host memory go there, unless they are few.
    pub(crate) fn leave_block(&mut self, backend: &B) -> Result<(), DeviceFailure> {
        let waiting = |sum: &Sum<B>| sum.device.as_ref().map_or(0, |device| device.len() * size_of::<f32>());
        let Some(place) = self.host.clone() else { return Ok(()) };
        if self.sums().map(|sum| waiting(sum)).sum::<usize>() > place.waiting_max {
            self.sums().try_for_each(|sum| sum.leave(backend, &place))?;
        }
        Ok(())
    }

    /// A group is done: all are where they rest.
    pub fn rest(&mut self, backend: &B) -> Result<(), DeviceFailure> {
        let Some(place) = self.host.clone() else { return Ok(()) };
        self.sums().try_for_each(|sum| {
            sum.leave(backend, &place)?;
            let length = sum.length;
            sum.host.get_or_insert_with(|| place.upload(backend, &vec![0.0; length]));
            Ok(())
        })?;
        backend.finish_saves()
    }

    fn sums(&mut self) -> impl Iterator<Item = &mut Sum<B>> {
        self.all.iter_mut().chain(self.tied.as_mut().map(|(_, sum)| sum))
    }

    /// The sum of the gradients of two groups of rows, tensor by tensor.
    #[must_use]
    pub fn plus(mut self, backend: &B, right: Self) -> Self {
        let host = self.host.clone();
        let add = |left: &mut Sum<B>, right: &Sum<B>| *left = left.plus(right, backend, host.as_ref());
        self.all.iter_mut().zip(right.all).for_each(|(left, right)| add(left, &right));
        // Every group uses the table, or none does: the tape is the same for all rows.
        if let (Some((_, left)), Some((_, right))) = (&mut self.tied, &right.tied) {
            add(left, right);
        }
        self
    }

    /// Adds the parts of a tied table: the head's, then the embedding's. Called once, after the
    /// last group.
    pub fn combine(&mut self, backend: &B) {
        if let Some((id, embedding)) = self.tied.take() {
            self.all[id.0] = self.all[id.0].plus(&embedding, backend, self.host.as_ref());
        }
    }

    /// The same where the head's part was formed on another device: `self` has the embedding's.
    pub fn combine_with(&mut self, backend: &B, id: ParameterId, head: &[f32]) {
        let mut part = Sum::zero(head.len());
        match &self.host {
            None => part.device = Some(backend.upload(head)),
            Some(place) => part.host = Some(place.upload(backend, head)),
        }
        self.all[id.0] = part.plus(&self.all[id.0], backend, self.host.as_ref());
    }

    /// The sum of the squares of each of the first `count` tensors; synchronises with the device
    /// once.
    pub fn sums_of_squares(&self, backend: &B, count: usize) -> Result<Vec<f32>, DeviceFailure> {
        let own = &self.all[..count];
        match &self.host {
            Some(place) => place.host.sums_of_squares(&own.iter().map(Sum::on_host).collect::<Vec<_>>()),
            None if own.is_empty() => Ok(Vec::new()),
            None => {
                let tensors: Vec<_> = own.iter().map(Sum::on_device).collect();
                let mut sums = backend.zeros(tensors.len());
                backend.run(SumSquares { sums: &mut sums, tensors: &tensors });
                backend.download(&sums)
            }
        }
    }

    /// Multiplies the first `count` tensors by `factor`.
    pub fn scale(&mut self, backend: &B, count: usize, factor: f32) {
        let own = &mut self.all[..count];
        if own.is_empty() {
            return;
        }
        if let Some(place) = &self.host {
            let tensors = own.iter_mut().filter_map(|sum| sum.host.as_mut().map(HostSum::numbers_mut));
            place.host.scale(tensors.collect(), factor);
        } else {
            let tensors = own.iter_mut().filter_map(|sum| sum.device.as_mut()).collect();
            backend.run(Scale { tensors, factor });
        }
    }

    /// Fails if a trained tensor received no gradient.
    pub fn check_reached(&self, parameters: &Parameters<B>) -> Result<(), TapeError> {
        match self.reached.iter().position(|reached| !reached) {
            None => Ok(()),
            Some(index) => Err(TapeError::NoGradient { name: parameters.all[index].name.clone() }),
        }
    }
}
