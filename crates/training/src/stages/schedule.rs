//! The work of one stage: the micro-batches of a group in one-forward-one-backward order.
//!
//! A stage with `n` stages behind it runs `n` forward passes ahead and then alternates, so it holds
//! at most `n + 1` micro-batches. Backward passes come in the order of the micro-batches: every
//! gradient is the sum that a single device forms.

use super::link::{Backward, Forward, Links};
use crate::batch::{Batch, BatchPosition};
use crate::row::Row;
use crate::step::{Evaluated, Losses, StepError, StepSettings, Update};
use crate::trainer::{Trainer, check_losses, hits, micro_batches};
use isobit_autograd::{Balance, Gradients, Tape, TapeError};
use isobit_kernels::{Backend, DeviceFailure};
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
/// `behind` is the number of stages behind this one.
pub(crate) fn group_gradients<B: Backend>(
    trainer: &Trainer<B>,
    group: &Group<'_>,
    links: &Links,
    behind: usize,
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
        if in_flight.len() > behind {
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
            Some(Forward { values, needs_gradient, balance, .. }) => {
                (tape.enter(&values, model.config.hidden, needs_gradient), balance)
            }
        };
        let x = model.forward(&mut tape, x)?;
        let Some((send, _)) = &self.links.after else {
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
        let (values, needs_gradient) = tape.leave(&x)?;
        drop(x);
        send.send(Forward { at, values, needs_gradient, balance }).map_err(|_| Stop::Neighbour)?;
        Ok(needs_gradient.then_some(InFlight { at, tape, share: None }))
    }

    fn backward(&mut self, in_flight: Option<InFlight<'a, B>>) -> Result<(), Stop> {
        let Some(InFlight { at, mut tape, mut share }) = in_flight else { return Ok(()) };
        let mut gradient = None;
        if let Some((_, receive)) = &self.links.after {
            let message = receive.recv().map_err(|_| Stop::Neighbour)?;
            assert_eq!(message.at, at, "gradients come in the order of the micro-batches");
            (gradient, share) = (Some(message.values), message.share);
        }
        if let Some(share) = &share {
            tape.set_balance_share(share);
        }
        let entered = tape.backward_part(gradient.as_deref(), &mut self.gradients)?;
        if let (Some(values), Some((_, send))) = (entered, &self.links.before) {
            send.send(Backward { at, values, share }).map_err(|_| Stop::Neighbour)?;
        }
        Ok(())
    }
}

/// The activations of micro-batch `at`; None in the first stage.
fn receive(links: &Links, at: usize) -> Result<Option<Forward>, Stop> {
    let Some((receive, _)) = &links.before else { return Ok(None) };
    let message = receive.recv().map_err(|_| Stop::Neighbour)?;
    assert_eq!(message.at, at, "activations come in the order of the micro-batches");
    Ok(Some(message))
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
            Some(message) => tape.enter(&message.values, model.config.hidden, false),
        };
        let x = model.forward(&mut tape, x)?;
        if let Some((send, _)) = &links.after {
            let (values, needs_gradient) = tape.leave(&x)?;
            drop(x);
            send.send(Forward { at, values, needs_gradient, balance: None }).map_err(|_| Stop::Neighbour)?;
            continue;
        }
        let output = model.head_loss(&mut tape, &x, &batch.targets);
        let losses = backend.download(&output.loss)?;
        check_losses(&losses, &batch, 0, first_row).map_err(StepError::in_evaluation)?;
        result.append(hits(losses, &backend.download(&output.best)?, &batch.labels));
    }
    Ok(result)
}
