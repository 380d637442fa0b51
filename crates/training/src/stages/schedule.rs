//! The work of one stage: the micro-batches of a group in one-forward-one-backward order.
//!
//! A stage with `n` stages behind it runs `n` forward passes ahead and then alternates, so it holds
//! at most `n + 1` micro-batches. Backward passes come in the order of the micro-batches: every
//! gradient is the sum that a single device forms.

use super::link::{Backward, Forward, Links, Shelf};
use crate::batch::{Batch, BatchPosition};
use crate::row::Row;
use crate::step::{Evaluated, Losses, StepError, StepSettings, Update};
use crate::trainer::{Trainer, check_losses, hits, micro_batches};
use isobit_autograd::{Balance, Gradients, Tape, TapeError};
use isobit_kernels::{Backend, DeviceFailure, Parcel};
use isobit_numerics::slices::Profile;
use std::collections::VecDeque;
use std::ops::Range;

/// The rows of a group; the first is row `first_row` of the update.
pub(crate) struct Group<'a> {
    pub(crate) update: Update<'a>,
    pub(crate) first_row: usize,
    pub(crate) settings: &'a StepSettings,
}

/// Why a stage stops.
pub(crate) enum Stop {
    Failed(StepError),
    /// A neighbour stopped first.
    Neighbour,
}

impl From<StepError> for Stop {
    fn from(error: StepError) -> Self {
        Self::Failed(error)
    }
}

impl From<TapeError> for Stop {
    fn from(error: TapeError) -> Self {
        Self::Failed(error.into())
    }
}

impl From<DeviceFailure> for Stop {
    fn from(failure: DeviceFailure) -> Self {
        Self::Failed(failure.into())
    }
}

/// A micro-batch between its forward and its backward pass.
struct InFlight<'a, B: Backend> {
    at: usize,
    tape: Tape<'a, B>,
    /// Of the load-balancing loss, in the last stage.
    share: Option<Vec<f32>>,
}

/// One stage in one group.
struct Schedule<'a, B: Backend> {
    trainer: &'a Trainer<B>,
    group: &'a Group<'a>,
    links: &'a Links,
    gradients: Gradients<B>,
    losses: Losses,
}

/// The gradients of a group for the part that `trainer` has; the last stage has the losses.
/// `stages_after` is the number of stages behind this one.
pub(crate) fn group_gradients<B: Backend>(
    trainer: &Trainer<B>,
    group: &Group<'_>,
    links: &Links,
    stages_after: usize,
) -> Result<(Gradients<B>, Losses), Stop> {
    let micro = micro_batches(0..group.update.rows.len(), group.settings.micro_batch_size);
    // Tapes borrow their batches, so these stay until the group is done: at most 16 bytes a token.
    let batches: Vec<(Range<usize>, Batch<B>)> =
        micro.map(|rows| (rows.clone(), batch(trainer, group, rows))).collect();
    let gradients = trainer.zero_gradients();
    let mut schedule = Schedule { trainer, group, links, gradients, losses: Losses::default() };
    let mut in_flight = VecDeque::new();
    for (at, (rows, batch)) in batches.iter().enumerate() {
        in_flight.extend(schedule.forward(at, rows.clone(), batch)?);
        if in_flight.len() > stages_after {
            schedule.backward(in_flight.pop_front())?;
        }
    }
    while !in_flight.is_empty() {
        schedule.backward(in_flight.pop_front())?;
    }
    schedule.gradients.rest(&trainer.backend)?;
    Ok((schedule.gradients, schedule.losses))
}

fn batch<B: Backend>(trainer: &Trainer<B>, group: &Group<'_>, rows: Range<usize>) -> Batch<B> {
    let place = BatchPosition::of(&group.update, group.first_row + rows.start, group.settings.seed);
    Batch::of_part(&trainer.backend, &group.update.rows[rows], place, &trainer.model.part)
}

impl<'a, B: Backend> Schedule<'a, B> {
    /// The forward pass of micro-batch `at`. None if nothing before its end is trained.
    fn forward(&mut self, at: usize, rows: Range<usize>, batch: &'a Batch<B>) -> Result<Option<InFlight<'a, B>>, Stop> {
        let Trainer { backend, model, parameters, memory, .. } = self.trainer;
        let StepSettings { profile, policy, .. } = *self.group.settings;
        let mut tape = Tape::new(backend, parameters, &batch.layout, profile, policy)
            .with_buffers_of(memory)
            .with_activations_on_host(self.trainer.activations_on_host());
        if let Some(coefficient) = model.config.balance {
            let targets = self.group.update.rows[rows.clone()].iter().map(|row| row.target_count()).collect();
            let step_targets = self.group.update.targets;
            tape = tape.with_balance(Balance { coefficient, targets, step_targets });
        }
        let (x, before) = match receive(self.links, at)? {
            None => (model.embed(&mut tape, &batch.ids), None),
            Some((Forward { mut values, needs_gradient, balance, .. }, shelf)) => {
                let x = tape.enter(&mut values, model.config.hidden, needs_gradient)?;
                shelf.put_back(values);
                (x, balance)
            }
        };
        let x = model.forward(&mut tape, x)?;
        let Some(after) = &self.links.after else {
            let output = model.head_loss(&mut tape, &x, &batch.targets);
            drop(x);
            let of_tokens = backend.download(&output.loss)?;
            check_losses(&of_tokens, batch, self.group.update.step, self.group.first_row + rows.start)?;
            self.losses.tokens.extend(of_tokens);
            let sums = tape.balance_sums(before)?;
            let share = sums.and_then(|sums| tape.balance_loss_of(&sums, |of_row| self.losses.balance.push(of_row)));
            return Ok(Some(InFlight { at, tape, share }));
        };
        let balance = tape.balance_sums(before)?;
        let mut values = after.shelf.take(batch.layout.tokens * model.config.hidden);
        let needs_gradient = tape.leave(&x, &mut values)?;
        drop(x);
        after.send(Forward { at, values, needs_gradient, balance })?;
        Ok(needs_gradient.then_some(InFlight { at, tape, share: None }))
    }

    fn backward(&mut self, in_flight: Option<InFlight<'a, B>>) -> Result<(), Stop> {
        let Some(InFlight { at, mut tape, mut share }) = in_flight else { return Ok(()) };
        let mut gradient = None;
        if let Some(after) = &self.links.after {
            let message = after.receive()?;
            assert_eq!(message.at, at, "gradients come in the order of the micro-batches");
            (gradient, share) = (Some(message.values), message.share);
        }
        if let Some(share) = &share {
            tape.set_balance_share(share);
        }
        let Links { before, after } = self.links;
        let parcel = |length| {
            let shelf = before.as_ref().map(|before| &before.shelf);
            shelf.map_or_else(|| Parcel::new(length), |shelf| shelf.take(length))
        };
        let done = |parcel| {
            if let Some(after) = after {
                after.shelf.put_back(parcel);
            }
        };
        let entered = tape.backward_part(gradient, &mut self.gradients, parcel, done)?;
        if let (Some(values), Some(before)) = (entered, before) {
            before.send(Backward { at, values, share })?;
        }
        Ok(())
    }
}

/// The activations of micro-batch `at`, and where their parcel goes then; None in the first stage.
fn receive(links: &Links, at: usize) -> Result<Option<(Forward, &Shelf)>, Stop> {
    let Some(before) = &links.before else { return Ok(None) };
    let message = before.receive()?;
    assert_eq!(message.at, at, "activations come in the order of the micro-batches");
    Ok(Some((message, &before.shelf)))
}

/// Losses and hits of rows, in the last stage; the others only pass activations on.
pub(crate) fn evaluate<B: Backend>(
    trainer: &Trainer<B>,
    rows: &[&Row],
    first_row: usize,
    (profile, micro_batch_size): (Profile, usize),
    links: &Links,
) -> Result<Evaluated, Stop> {
    let Trainer { backend, model, parameters, memory, .. } = trainer;
    let mut result = Evaluated::default();
    for (at, micro) in micro_batches(0..rows.len(), micro_batch_size).enumerate() {
        let first_row = first_row + micro.start;
        let batch = Batch::of_part(backend, &rows[micro], BatchPosition::of_evaluation(first_row), &model.part);
        let mut tape = Tape::inference(backend, parameters, &batch.layout, profile).with_buffers_of(memory);
        let x = match receive(links, at)? {
            None => model.embed(&mut tape, &batch.ids),
            Some((Forward { mut values, .. }, shelf)) => {
                let x = tape.enter(&mut values, model.config.hidden, false)?;
                shelf.put_back(values);
                x
            }
        };
        let x = model.forward(&mut tape, x)?;
        if let Some(after) = &links.after {
            let mut values = after.shelf.take(batch.layout.tokens * model.config.hidden);
            let needs_gradient = tape.leave(&x, &mut values)?;
            drop(x);
            after.send(Forward { at, values, needs_gradient, balance: None })?;
            continue;
        }
        let output = model.head_loss(&mut tape, &x, &batch.targets);
        let losses = backend.download(&output.loss)?;
        check_losses(&losses, &batch, 0, first_row).map_err(StepError::in_evaluation)?;
        result.append(hits(losses, &backend.download(&output.best)?, &batch.labels));
    }
    Ok(result)
}
