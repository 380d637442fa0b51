//! An update with shards. Each rank adds up its own groups on its device, as far as they are one
//! node of the tree, and sends every other rank its part; each folds its part through the rest of
//! the tree, updates it, and passes the new weights on.
//!
//! ORDER: the tree is that of `groups.rs`, whoever makes an addition.

use super::shards::{self, Shard, Shards};
use super::team::Team;
use super::update::{Report, groups_of, number, rank_of};
use super::wire::{self, Reader};
use super::{Elsewhere, RankError};
use crate::engine::{Engine, Stored, first_not_finite, norm};
use crate::groups::{Groups, middle};
use crate::prepare::RunError;
use crate::row::Row;
use crate::step::{Losses, StepError, StepReport, StepSettings, Update};
use isobit_kernels::buffer::copied;
use isobit_kernels::float_state;
use isobit_proof::chain::TensorDigests;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;

/// Update number `step`, counted from one, over `rows`. Fails on all ranks or on none.
pub fn step<E: Engine>(
    engine: &mut E,
    shards: &mut Shards,
    team: &Team<'_>,
    rows: &[&Row],
    step: u64,
    learning_rate: f64,
    settings: &StepSettings,
) -> Result<StepReport, RunError> {
    // Sums and coefficients are computed on the calling thread.
    float_state::restore();
    let update = Update::new(rows, step);
    let (shard, losses) = folded(engine, shards, team, &update, settings)?;
    let (mut shard, answer) = match shard.and_then(|shard| {
        let squares = shards.squares(shard.iter().map(Vec::as_slice))?;
        Ok((shard, squares))
    }) {
        Ok((shard, squares)) => (shard, Ok(floats(&squares))),
        Err(error) => (Vec::new(), Err(error)),
    };
    let decided = team.agree(answer, |answers| {
        let totals = shards.totals(&blocks(&answers)?)?;
        let (total, coefficient) = norm(engine, &totals, step, settings.max_grad_norm)?;
        Ok(floats(&[Some(total), coefficient].into_iter().flatten().collect::<Vec<_>>()))
    })?;
    let damaged = |what: String| RankError::damaged(0, what);
    let decided = Reader(&decided).floats(decided.len() / 4).map_err(damaged)?;
    if let Some(coefficient) = decided.get(1) {
        shards::scale(&mut shard, *coefficient);
    }
    let coefficients = settings.coefficients(step, learning_rate);
    shards.apply(&shard, |tensor| coefficients(engine.tensors()[tensor].decays));
    let written = spread(engine, shards, team)?;
    let (mut values, mut digests) = (Vec::new(), Vec::new());
    let answer = written.and_then(|()| {
        let squares = shards.squares(shards.values())?;
        let sums = if settings.digests { shards.digest_sums(&shard) } else { Vec::new() };
        values = engine.digests()?;
        let counts = [squares.len(), sums.len()].map(|count| (count as u64).to_le_bytes()).concat();
        let sums: Vec<u8> = sums.into_iter().flat_map(u64::to_le_bytes).collect();
        Ok([&counts[..], &floats(&squares), &sums, &Report::new(&values, losses).to_bytes()].concat())
    });
    let loss = team.agree(answer, |answers| {
        let (mut squares, mut sums, mut reports) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, answer) in answers.iter().enumerate() {
            let damaged = |what: String| RankError::damaged(rank, what);
            let mut reader = Reader(answer);
            let [count, sum_count] = [reader.number().map_err(damaged)?, reader.number().map_err(damaged)?];
            squares.extend(reader.floats(count as usize).map_err(damaged)?);
            sums.push((0..sum_count).map(|_| reader.number()).collect::<Result<Vec<_>, _>>().map_err(damaged)?);
            reports.push(Report::from_bytes(reader.0).map_err(damaged)?);
        }
        if settings.digests {
            digests = shards.digests(&sums)?;
        }
        if let Some(tensor) = first_not_finite(engine, &shards.totals(&squares)?) {
            return Err(StepError::Parameter { step, tensor }.into());
        }
        Report::decide(step, reports)
    })?;
    let grad_norm = decided.first().copied().unwrap_or(0.0);
    // Rank 0 has them, and only it records them.
    let each = values.into_iter().zip(digests);
    let digests = each.map(|(value, [gradient, m, v])| TensorDigests { gradient, value, moments: [m, v] }).collect();
    Ok(update.report(number(&loss)?, grad_norm, digests))
}

fn floats(values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::put_floats(&mut bytes, values);
    bytes
}

/// The numbers of all ranks, in their order.
fn blocks(answers: &[Vec<u8>]) -> Result<Vec<f32>, RankError> {
    let mut all = Vec::new();
    for (rank, answer) in answers.iter().enumerate() {
        all.extend(Reader(answer).floats(answer.len() / 4).map_err(|what| RankError::damaged(rank, what))?);
    }
    Ok(all)
}

/// Passes the new weights of every rank on to all. The inner error is one of this rank alone.
fn spread<E: Engine>(engine: &mut E, shards: &Shards, team: &Team<'_>) -> Result<Result<(), RunError>, RankError> {
    let mut of_ranks: Vec<Vec<Cow<'_, [f32]>>> = Vec::new();
    for rank in 0..team.size() {
        if rank == team.rank() {
            team.broadcast_tensors(Ok(shards.values().collect::<Vec<_>>()))?;
            of_ranks.push(shards.values().map(Cow::Borrowed).collect());
        } else {
            let received = team.receive_broadcast(rank)?.map_err(RankError::Elsewhere)?;
            of_ranks.push(received.into_iter().map(Cow::Owned).collect());
        }
    }
    let mut written = Ok(());
    for (tensor, values) in shards.whole(of_ranks)?.into_iter().enumerate() {
        written = written.and_then(|()| engine.write(tensor, Stored::Value, values).map_err(RunError::from));
    }
    Ok(written)
}

/// The gradient of this rank's shard, and the losses of its rows. The outer error is one of the
/// connection.
#[expect(clippy::type_complexity, reason = "a failure to compute is agreed on, a lost rank is not")]
fn folded<E: Engine>(
    engine: &E,
    shards: &Shards,
    team: &Team<'_>,
    update: &Update<'_>,
    settings: &StepSettings,
) -> Result<(Result<Vec<Vec<f32>>, RunError>, Losses), RankError> {
    if let Err(error) = update.check() {
        return Ok((Err(error.into()), Losses::default()));
    }
    let groups = Groups::new(update.rows.len(), settings.gradient_groups);
    let (losses, kept) = (Losses::default(), VecDeque::new());
    let mut exchange = Exchange { engine, shards, team, update, settings, groups, losses, kept, own: None };
    exchange.compute(0..groups.groups)?;
    let shard = exchange.fold(0..groups.groups)?.expect("a row with a target is in a group");
    let Exchange { losses, own, .. } = exchange;
    let shard = shard
        .map(|shard| shards.combined(shard))
        .map_err(|failure| own.filter(|_| failure.rank == team.rank()).unwrap_or(RankError::Elsewhere(failure).into()));
    Ok((shard, losses))
}

struct Exchange<'a, E: Engine> {
    engine: &'a E,
    shards: &'a Shards,
    team: &'a Team<'a>,
    update: &'a Update<'a>,
    settings: &'a StepSettings,
    groups: Groups,
    losses: Losses,
    /// This rank's part of the nodes it has computed.
    kept: VecDeque<Shard>,
    /// The failure of this rank, as it came.
    own: Option<RunError>,
}

impl<E: Engine> Exchange<'_, E> {
    /// The rank that has all groups of a node, if one has.
    fn rank_of(&self, node: &Range<usize>) -> Option<usize> {
        let rank = rank_of(node.start, self.team.size(), self.groups.groups);
        let own = groups_of(rank, self.team.size(), self.groups.groups);
        (node.end <= own.end).then_some(rank)
    }

    /// Computes the nodes of this rank and sends every rank its part of them.
    fn compute(&mut self, node: Range<usize>) -> Result<(), RankError> {
        match (self.rank_of(&node), middle(&node)) {
            _ if self.groups.is_empty(&node) => Ok(()),
            (Some(rank), _) if rank == self.team.rank() => self.send(node),
            (None, Some(middle)) => {
                self.compute(node.start..middle)?;
                self.compute(middle..node.end)
            }
            _ => Ok(()),
        }
    }

    fn send(&mut self, node: Range<usize>) -> Result<(), RankError> {
        let parts = if let Some(own) = self.own.take() {
            // Nothing more is computed after a failure.
            Err(self.team.keep(own, &mut self.own))
        } else {
            self.node(node).map_err(|error| self.team.keep(error.into(), &mut self.own))
        };
        for rank in 0..self.team.size() {
            let shard = parts.as_ref().map(|parts| self.shards.part_of(rank, parts)).map_err(Clone::clone);
            if rank == self.team.rank() {
                self.kept.push_back(shard.map(|shard| shard.into_iter().map(copied).collect()));
            } else {
                self.team.send_tensors(rank, shard)?;
            }
        }
        Ok(())
    }

    /// The gradients of a node, computed by this rank alone.
    fn node(&mut self, node: Range<usize>) -> Result<Vec<Vec<f32>>, StepError> {
        let (engine, update, settings, losses) = (self.engine, self.update, self.settings, &mut self.losses);
        let mut leaf = |_, rows| {
            let (gradients, of_group) = engine.group_gradients(update, rows, settings)?;
            losses.append(of_group);
            Ok(gradients)
        };
        let sum = self.groups.reduce_node(node, &mut leaf, &mut |left, right| engine.add(left, right))?;
        engine.download(&sum.expect("the node has rows"))
    }

    /// This rank's part of a node.
    fn fold(&mut self, node: Range<usize>) -> Result<Option<Shard>, RankError> {
        if self.groups.is_empty(&node) {
            return Ok(None);
        }
        if let Some(rank) = self.rank_of(&node) {
            let own = if rank == self.team.rank() { self.kept.pop_front() } else { None };
            return own.map_or_else(|| self.team.receive_tensors(rank), Ok).map(Some);
        }
        let middle = middle(&node).expect("a group has one rank");
        let rank = rank_of(middle, self.team.size(), self.groups.groups);
        let left = self.fold(node.start..middle)?;
        let right = self.fold(middle..node.end)?;
        Ok(match (left, right) {
            // The failure of the earlier rows is the one that a single process meets first.
            (Some(Ok(left)), Some(Ok(right))) => Some(Ok(shards::add(left, &right, rank)?)),
            (Some(Err(failure)), Some(_)) | (Some(Ok(_)), Some(Err(failure))) => Some(Err::<_, Elsewhere>(failure)),
            (left, right) => left.or(right),
        })
    }
}
