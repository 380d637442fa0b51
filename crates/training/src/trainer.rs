//! The engine of one device: weights, moments, and the buffers shared between steps.

use crate::batch::{Batch, BatchPosition};
use crate::engine::{Engine, Stored};
use crate::host_optimizer::HostOptimizer;
use crate::prepare::RunError;
use crate::row::Row;
use crate::step::{Evaluated, Losses, StepError, StepSettings, Update};
use isobit_autograd::{
    Balance, Gradients, Host, HostPlace, Memory, Offload, Parameter, ParameterId, Parameters, Tape, Value,
};
use isobit_kernels::backend::BegunDigests;
use isobit_kernels::op::{AdamWTensor, AdamWUpdate, AnyBuffer, IGNORED, SumSquares};
use isobit_kernels::tensor::F32;
use isobit_kernels::{Backend, DeviceFailure, Place};
use isobit_models::build::Settings;
use isobit_models::{Built, Config, Model, TrainedTensor, WeightSource, build_whole};
use isobit_numerics::adamw::Coefficients;
use isobit_numerics::digest::Digest;
use isobit_numerics::slices::Profile;
use isobit_proof::chain::TensorDigests;
use std::ops::Range;
use std::rc::Rc;

/// A model in training on one device, or the part of a model that a device has. The copy of a tied
/// table (`Model::table_copy`) is none of its trained tensors: another device updates the table.
pub struct Trainer<B: Backend> {
    pub backend: B,
    pub model: Model<B>,
    pub parameters: Parameters<B>,
    optimizer: Optimizer<B>,
    tensors: Vec<TrainedTensor>,
    ids: Vec<ParameterId>,
    pub(crate) memory: Memory<B>,
    offload: Offload,
    /// What computes in host memory, if anything is there.
    host: Option<Host<B>>,
    /// Where gradients rest; None if on the device.
    gradients_place: Option<Rc<HostPlace<B>>>,
}

/// First and second moments, in the order of the parameters, where they are.
enum Optimizer<B: Backend> {
    Device(Vec<[F32<B>; 2]>),
    Host(HostOptimizer<B>),
    /// Ranks hold them in shards, or a second device only computes gradients. Such an engine
    /// applies no update.
    Absent,
}

const ABSENT: &str = "an engine without optimizer state has no moments and applies no update";

/// Where a trainer keeps what it holds.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    pub offload: Offload,
    /// Without optimizer state it does not apply updates: ranks keep the state in shards.
    pub with_moments: bool,
    /// Of the host, for what is computed there.
    pub threads: usize,
    /// Bytes of gradients that may wait on the device until their group is done, if they rest in
    /// host memory. Those of adapters usually do, and travel once per group.
    pub waiting_max: usize,
}

impl Placement {
    pub fn new(offload: Offload, with_moments: bool, threads: usize) -> Self {
        Self { offload, with_moments, threads, waiting_max: 16 << 20 }
    }
}

impl<B: Backend> Trainer<B> {
    pub fn new(backend: B, built: Built<B>) -> Self {
        let zeros = |length: usize| [(); 2].map(|()| backend.zeros(length));
        let own = built.parameters.iter().filter(|(id, _)| Some(*id) != built.model.table_copy);
        let moments = own.map(|(_, parameter)| zeros(parameter.length())).collect();
        Self { optimizer: Optimizer::Device(moments), ..Self::without_moments(backend, built) }
    }

    /// Without optimizer state: ranks keep it in shards. Such an engine does not apply updates.
    pub fn without_moments(backend: B, built: Built<B>) -> Self {
        let Built { model, parameters } = built;
        let own = || parameters.iter().filter(|(id, _)| Some(*id) != model.table_copy);
        let tensors = own().map(|(id, parameter)| model.trained_tensor(id, parameter)).collect();
        let ids = own().map(|(id, _)| id).collect();
        let (memory, optimizer) = (Memory::new(), Optimizer::Absent);
        let (offload, host, gradients_place) = (Offload::NONE, None, None);
        Self { backend, model, parameters, optimizer, tensors, ids, memory, offload, host, gradients_place }
    }

    /// Builds the whole model and places it. Without memory of its own a device has nothing to
    /// offload.
    pub fn whole(
        backend: B,
        config: &Config,
        source: &dyn WeightSource,
        settings: &Settings,
        placement: Placement,
    ) -> Result<Self, RunError> {
        let has_memory = backend.device_peak_bytes().is_some();
        let offload = if has_memory { placement.offload } else { Offload::NONE };
        let built = build_whole(&backend, config, source, settings, offload)?;
        Ok(Self::placed(backend, built, Placement { offload, ..placement })?)
    }

    /// With what `placement` says in host memory. The model was built for it (`build_placed`).
    pub fn placed(backend: B, built: Built<B>, placement: Placement) -> Result<Self, DeviceFailure> {
        let Placement { offload, with_moments, threads, waiting_max } = placement;
        let host = if offload.is_none() { None } else { Some(backend.host(threads)?) };
        let on_device = with_moments && !offload.optimizer;
        let new = if on_device { Self::new } else { Self::without_moments };
        let of_gradients = host.clone().filter(|_| offload.optimizer);
        let gradients_place = of_gradients.map(|host| HostPlace::new(host, waiting_max));
        let mut trainer = Self { offload, host, gradients_place, ..new(backend, built) };
        if let (true, Some(host)) = (with_moments && offload.optimizer, &trainer.host) {
            let (host, count) = (Rc::clone(host), trainer.ids.len());
            trainer.optimizer =
                Optimizer::Host(HostOptimizer::new(&trainer.backend, host, &trainer.parameters, count)?);
        }
        Ok(trainer)
    }

    /// The moments, which must be on the device.
    pub fn moments(&self) -> &[[F32<B>; 2]] {
        match &self.optimizer {
            Optimizer::Device(moments) => moments,
            Optimizer::Host(_) => unreachable!("moments are in host memory"),
            Optimizer::Absent => unreachable!("{ABSENT}"),
        }
    }

    /// Gradients of zero, which rest where the optimizer is.
    pub(crate) fn zero_gradients(&self) -> Gradients<B> {
        match &self.gradients_place {
            Some(place) => Gradients::zeros_on(Rc::clone(place), &self.parameters),
            None => Gradients::zeros(&self.backend, &self.parameters),
        }
    }

    /// Whether activations wait in host memory.
    pub(crate) fn activations_on_host(&self) -> bool {
        self.offload.activations
    }

    /// Peak bytes of activations and workspace.
    pub fn peak_bytes(&self) -> usize {
        self.memory.peak_bytes()
    }

    /// Overwrites the copy of a tied table.
    pub(crate) fn write_table(&mut self, values: &[f32]) {
        if let Some(id) = self.model.table_copy {
            self.backend.overwrite(&mut self.parameters.get_mut(id).value, values);
        }
    }

    /// The forward and backward pass of one micro-batch; adds to `gradients` and `losses`.
    fn micro_batch(
        &self,
        update: &Update<'_>,
        rows: Range<usize>,
        settings: &StepSettings,
        gradients: &mut Gradients<B>,
        losses: &mut Losses,
    ) -> Result<(), StepError> {
        self.backend.enter(Place::MicroBatch { first: rows.start, end: rows.end });
        let (first_row, micro) = (rows.start, &update.rows[rows]);
        let batch = Batch::new(&self.backend, micro, BatchPosition::of(update, first_row, settings.seed));
        let mut tape = Tape::new(&self.backend, &self.parameters, &batch.layout, settings.profile, settings.policy)
            .with_buffers_of(&self.memory)
            .with_activations_on_host(self.offload.activations);
        if let Some(coefficient) = self.model.config.balance {
            let of_rows = micro.iter().map(|row| row.target_count()).collect();
            tape = tape.with_balance(Balance { coefficient, targets: of_rows, step_targets: update.targets });
        }
        let output = self.model.loss(&mut tape, &batch.ids, &batch.targets)?;
        let begun = self.backend.begin_download(&output.loss);
        tape.balance_loss(|of_row| losses.balance.push(of_row))?;
        // The device goes on with the backward pass while the losses are on their way.
        let backward = tape.backward(gradients);
        let of_tokens = self.backend.finish_download(&begun, &output.loss)?;
        check_losses(&of_tokens, &batch, update.step, first_row)?;
        losses.tokens.extend(of_tokens);
        Ok(backward?)
    }

    /// Applies AdamW on the device. Values in host memory come one at a time.
    fn apply_on_device(
        &mut self,
        gradients: &Gradients<B>,
        coefficients: impl Fn(&Parameter<B>) -> Coefficients,
    ) -> Result<Vec<f32>, StepError> {
        let Self { backend, parameters, optimizer: Optimizer::Device(moments), ids, .. } = self else {
            unreachable!("{ABSENT}")
        };
        let (mut resident, mut tensors, mut squares) = (Vec::new(), Vec::new(), vec![0.0; ids.len()]);
        for (at, ((parameter, [m, v]), id)) in parameters.iter_mut().zip(moments).zip(&*ids).enumerate() {
            let (gradient, coefficients, length) = (gradients.get(*id), coefficients(parameter), parameter.length());
            match &mut parameter.value {
                Value::Device(parameter) => {
                    resident.push(at);
                    tensors.push(AdamWTensor { parameter, m, v, gradient, coefficients });
                }
                Value::Host(host) => {
                    let mut value = backend.zeros(length);
                    backend.load(&mut value, host);
                    let tensor = AdamWTensor { parameter: &mut value, m, v, gradient, coefficients };
                    backend.run(AdamWUpdate { tensors: vec![tensor] });
                    backend.save(host, &value)?;
                    squares[at] = sums_of_squares(backend, &[&value])?[0];
                }
            }
        }
        if !tensors.is_empty() {
            backend.run(AdamWUpdate { tensors });
        }
        let values: Vec<_> = resident.iter().map(|at| parameters.value(ids[*at])).collect();
        for (at, square) in resident.iter().zip(sums_of_squares(backend, &values)?) {
            squares[*at] = square;
        }
        Ok(squares)
    }

    /// The digest of every value, and those of other tensors on the device, all in one op.
    fn digests_with(&self, others: &[&F32<B>]) -> Result<(Vec<Digest>, Vec<Digest>), StepError> {
        let (mut resident, mut in_host_memory) = (Vec::new(), Vec::new());
        for id in &self.ids {
            match &self.parameters.get(*id).value {
                Value::Device(value) => resident.push(value),
                Value::Host(value) => in_host_memory.push(value),
            }
        }
        let tensors: Vec<_> = resident.iter().chain(others).map(|tensor| AnyBuffer::F32(*tensor)).collect();
        let begun = BegunDigests::new(&self.backend, &tensors);
        let of_host = self.host.as_ref().map_or(Ok(Vec::new()), |host| host.digests(&in_host_memory))?;
        let mut of_device = begun.finish(&self.backend)?;
        let of_others = of_device.split_off(resident.len());
        let (mut of_device, mut of_host) = (of_device.into_iter(), of_host.into_iter());
        let of_values = self.ids.iter().map(|id| {
            let next = match &self.parameters.get(*id).value {
                Value::Device(_) => of_device.next(),
                Value::Host(_) => of_host.next(),
            };
            next.expect(IN_HOST_MEMORY)
        });
        Ok((of_values.collect(), of_others))
    }

    /// The numbers of a tensor.
    fn value(&self, id: ParameterId) -> Result<Vec<f32>, DeviceFailure> {
        match (&self.parameters.get(id).value, &self.host) {
            (Value::Device(value), _) => self.backend.download(value),
            (Value::Host(value), Some(host)) => host.download(value),
            (Value::Host(_), None) => unreachable!("{IN_HOST_MEMORY}"),
        }
    }
}

const IN_HOST_MEMORY: &str = "a trainer of values in host memory computes there";

/// One number per tensor; synchronises with the device once.
fn sums_of_squares<B: Backend>(backend: &B, tensors: &[&F32<B>]) -> Result<Vec<f32>, StepError> {
    if tensors.is_empty() {
        return Ok(Vec::new());
    }
    let mut sums = backend.zeros(tensors.len());
    backend.run(SumSquares { sums: &mut sums, tensors });
    Ok(backend.download(&sums)?)
}

impl<B: Backend> Engine for Trainer<B> {
    type Gradients = Gradients<B>;

    fn tensors(&self) -> &[TrainedTensor] {
        &self.tensors
    }

    fn group_gradients(
        &self,
        update: &Update<'_>,
        group: Range<usize>,
        settings: &StepSettings,
    ) -> Result<(Gradients<B>, Losses), StepError> {
        let mut gradients = self.zero_gradients();
        let mut losses = Losses::default();
        for micro in micro_batches(group, settings.micro_batch_size) {
            self.micro_batch(update, micro, settings, &mut gradients, &mut losses)?;
        }
        self.backend.enter(Place::Update);
        gradients.rest(&self.backend)?;
        Ok((gradients, losses))
    }

    fn add(&self, left: Gradients<B>, right: Gradients<B>) -> Result<Gradients<B>, StepError> {
        Ok(left.plus(&self.backend, right))
    }

    fn combine(&self, gradients: &mut Gradients<B>) -> Result<(), StepError> {
        gradients.combine(&self.backend);
        Ok(())
    }

    fn download(&self, gradients: &Gradients<B>) -> Result<Vec<Vec<f32>>, StepError> {
        Ok(gradients.to_parts(&self.backend)?)
    }

    fn upload(&self, parts: Vec<Vec<f32>>) -> Result<Gradients<B>, StepError> {
        Ok(Gradients::from_parts(&self.backend, self.gradients_place.clone(), &parts, &self.parameters))
    }

    fn sums_of_squares(&self, gradients: &Gradients<B>) -> Result<Vec<f32>, StepError> {
        Ok(gradients.sums_of_squares(&self.backend, self.ids.len())?)
    }

    fn scale(&self, gradients: &mut Gradients<B>, factor: f32) -> Result<(), StepError> {
        gradients.scale(&self.backend, self.ids.len(), factor);
        Ok(())
    }

    fn apply(
        &mut self,
        gradients: &Gradients<B>,
        step: u64,
        learning_rate: f64,
        settings: &StepSettings,
    ) -> Result<Vec<f32>, StepError> {
        let of_tensor = settings.coefficients(step, learning_rate);
        let coefficients = |parameter: &Parameter<B>| of_tensor(parameter.decays);
        match &mut self.optimizer {
            Optimizer::Device(_) | Optimizer::Absent => self.apply_on_device(gradients, coefficients),
            Optimizer::Host(optimizer) => {
                Ok(optimizer.apply(&self.backend, &mut self.parameters, gradients, coefficients)?)
            }
        }
    }

    fn evaluate_rows(
        &self,
        rows: &[&Row],
        range: Range<usize>,
        profile: Profile,
        micro_batch_size: usize,
    ) -> Result<Evaluated, StepError> {
        let mut result = Evaluated::default();
        for micro in micro_batches(range, micro_batch_size) {
            self.backend.enter(Place::Evaluation { first: micro.start, end: micro.end });
            let first_row = micro.start;
            let batch = Batch::new(&self.backend, &rows[micro], BatchPosition::of_evaluation(first_row));
            let mut tape =
                Tape::inference(&self.backend, &self.parameters, &batch.layout, profile).with_buffers_of(&self.memory);
            let output = self.model.loss(&mut tape, &batch.ids, &batch.targets)?;
            let losses = self.backend.download(&output.loss)?;
            check_losses(&losses, &batch, 0, first_row).map_err(StepError::in_evaluation)?;
            let best = self.backend.download(&output.best)?;
            result.append(hits(losses, &best, &batch.labels));
        }
        Ok(result)
    }

    fn read(&self, tensor: usize, which: Stored) -> Result<Vec<f32>, StepError> {
        Ok(match (which, &self.optimizer) {
            (Stored::Value, _) => self.value(self.ids[tensor])?,
            (Stored::Moment(order), Optimizer::Host(optimizer)) => optimizer.moment(tensor, order)?,
            (Stored::Moment(order), _) => self.backend.download(&self.moments()[tensor][order])?,
        })
    }

    fn write(&mut self, tensor: usize, which: Stored, values: Vec<f32>) -> Result<(), StepError> {
        match (which, &mut self.optimizer) {
            (Stored::Moment(order), Optimizer::Host(optimizer)) => optimizer.write_moment(tensor, order, &values),
            (Stored::Moment(order), Optimizer::Device(moments)) => {
                self.backend.overwrite(&mut moments[tensor][order], &values);
            }
            (Stored::Moment(_), Optimizer::Absent) => unreachable!("{ABSENT}"),
            (Stored::Value, optimizer) => {
                match (&mut self.parameters.get_mut(self.ids[tensor]).value, &self.host) {
                    (Value::Device(value), _) => self.backend.overwrite(value, &values),
                    (Value::Host(value), Some(host)) => host.overwrite(value, &values),
                    (Value::Host(_), None) => unreachable!("{IN_HOST_MEMORY}"),
                }
                if let Optimizer::Host(optimizer) = optimizer {
                    optimizer.write_value(tensor, &values);
                }
            }
        }
        Ok(())
    }

    fn device_peaks(&self) -> Result<Vec<Option<u64>>, StepError> {
        Ok(vec![self.backend.device_peak_bytes()])
    }

    fn digests(&self) -> Result<Vec<Digest>, StepError> {
        Ok(self.digests_with(&[])?.0)
    }

    fn update_digests(&self, gradients: &Gradients<B>) -> Result<Vec<TensorDigests>, StepError> {
        let (values, others) = if let Optimizer::Host(optimizer) = &self.optimizer {
            (self.digests()?, optimizer.digests(gradients, &self.parameters)?)
        } else {
            let each = self.ids.iter().zip(self.moments());
            let others: Vec<_> = each.flat_map(|(id, [m, v])| [gradients.get(*id), m, v]).collect();
            let (values, others) = self.digests_with(&others)?;
            (values, others.as_chunks::<3>().0.to_vec())
        };
        let each = values.into_iter().zip(others);
        Ok(each.map(|(value, [gradient, m, v])| TensorDigests { gradient, value, moments: [m, v] }).collect())
    }
}

/// The rows of each micro-batch.
pub(crate) fn micro_batches(rows: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(size).map(move |start| start..end.min(start + size))
}

/// The first loss that is not finite is an error.
pub(crate) fn check_losses<B: Backend>(
    losses: &[f32],
    batch: &Batch<B>,
    step: u64,
    first_row: usize,
) -> Result<(), StepError> {
    let Some(token) = losses.iter().position(|loss| !loss.is_finite()) else { return Ok(()) };
    let row = first_row + batch.layout.row_starts.partition_point(|start| *start <= token) - 1;
    Err(StepError::Loss { step, row, value: losses[token] })
}

/// Counts the targets that were predicted as the most likely token.
pub(crate) fn hits(losses: Vec<f32>, best: &[u32], labels: &[i32]) -> Evaluated {
    let mut result = Evaluated { losses, ..Evaluated::default() };
    for (best, label) in best.iter().zip(labels).filter(|(_, label)| **label != IGNORED) {
        result.targets += 1;
        result.correct += usize::from(*best as i32 == *label);
    }
    result
}
