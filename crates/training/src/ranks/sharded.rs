//! An update with shards. Each rank adds up its own groups on its device, as far as they are one
//! node of the tree, and sends every other rank its part; each folds its part through the rest of
//! the tree, updates it, and passes the new weights on.
//!
//! ORDER: the tree is that of `groups.rs`, whoever makes an addition.

use super::shards::{self, Shard, Shards};
use super::team::Team;
use super::update::{Report, groups_of, number, rank_of};
use super::wire::{self, Reader};
use super::{RankError, RankFailure};
use crate::engine::{Engine, Stored, first_not_finite, norm};
use crate::groups::{Groups, middle};
use crate::prepare::RunError;
use crate::row::Row;
use crate::step::{Losses, StepError, StepReport, StepSettings, Update};
use isobit_kernels::buffer::copied;
use isobit_kernels::float_state;
use isobit_numerics::digest::Digest;
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
    let (shard, grad_norm) = agreed_norm(engine, shards, team, shard, (step, settings.max_grad_norm))?;
    let coefficients = settings.coefficients(step, learning_rate);
    shards.apply(&shard, |tensor| coefficients(engine.tensors()[tensor].decays));
    let own = spread(engine, shards, team)?.and_then(|()| {
        let squares = shards.squares(shards.values())?;
        let digest_sums = if settings.digests { shards.digest_sums(&shard) } else { Vec::new() };
        let values = engine.digests()?;
        Ok((ShardReport { squares, digest_sums, report: Report::new(&values, losses) }, values))
    });
    let (loss, digests) = agreed_report(engine, shards, team, own, (step, settings.digests))?;
    Ok(update.report(loss, grad_norm, digests))
}

/// The gradient of this rank's shard, clipped, and the norm of all gradients before that.
fn agreed_norm<E: Engine>(
    engine: &E,
    shards: &Shards,
    team: &Team<'_>,
    shard: Result<Vec<Vec<f32>>, RunError>,
    (step, max_norm): (u64, Option<f32>),
) -> Result<(Vec<Vec<f32>>, f32), RunError> {
    let squared = shard.and_then(|shard| {
        let squares = shards.squares(shard.iter().map(Vec::as_slice))?;
        Ok((shard, squares))
    });
    let (mut shard, answer) = match squared {
        Ok((shard, squares)) => (shard, Ok(wire::floats(&squares))),
        Err(error) => (Vec::new(), Err(error)),
    };
    let decided = team.agree(answer, |answers| {
        let squares = answers.iter().enumerate().map(|(rank, answer)| floats_of(rank, answer));
        let totals = shards.totals(&squares.collect::<Result<Vec<_>, _>>()?)?;
        let (total, coefficient) = norm(engine, &totals, step, max_norm)?;
        Ok(wire::floats(&[Some(total), coefficient].into_iter().flatten().collect::<Vec<_>>()))
    })?;
    let decided = floats_of(0, &decided)?;
    let (total, coefficient) = decided.split_first().ok_or_else(|| RankError::damaged(0, "it has no norm"))?;
    if let Some(coefficient) = coefficient.first() {
        shards::scale(&mut shard, *coefficient);
    }
    Ok((shard, *total))
}

/// The sum of all losses once every rank has the same weights, all of them finite; and on rank 0,
/// which records them, the digests of every tensor. `own` is with the digests of all values.
fn agreed_report<E: Engine>(
    engine: &E,
    shards: &Shards,
    team: &Team<'_>,
    own: Result<(ShardReport, Vec<Digest>), RunError>,
    (step, wants_digests): (u64, bool),
) -> Result<(f64, Vec<TensorDigests>), RunError> {
    let (answer, values) = match own {
        Ok((report, values)) => (Ok(report.to_bytes()), values),
        Err(error) => (Err(error), Vec::new()),
    };
    let mut others = Vec::new();
    let loss = team.agree(answer, |answers| {
        let (mut squares, mut digest_sums, mut reports) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, answer) in answers.iter().enumerate() {
            let of_rank = ShardReport::from_bytes(answer).map_err(|what| RankError::damaged(rank, what))?;
            squares.push(of_rank.squares);
            digest_sums.push(of_rank.digest_sums);
            reports.push(of_rank.report);
        }
        if wants_digests {
            others = shards.digests(&digest_sums)?;
        }
        if let Some(tensor) = first_not_finite(engine, &shards.totals(&squares)?) {
            return Err(StepError::Parameter { step, tensor }.into());
        }
        Report::decide(step, reports)
    })?;
    let each = values.into_iter().zip(others);
    let digests = each.map(|(value, [gradient, m, v])| TensorDigests { gradient, value, moments: [m, v] }).collect();
    Ok((number(&loss)?, digests))
}

/// What a rank says at the end of an update, and of its shard.
#[derive(Clone, Debug, PartialEq)]
struct ShardReport {
    /// The sums of the squares of the blocks of its new values.
    squares: Vec<f32>,
    /// What its pieces contribute to the digests of gradients and moments; empty if these were not
    /// asked for.
    digest_sums: Vec<u64>,
    report: Report,
}

impl ShardReport {
    fn to_bytes(&self) -> Vec<u8> {
        let counts = [self.squares.len(), self.digest_sums.len()].map(|count| (count as u64).to_le_bytes()).concat();
        let sums: Vec<u8> = self.digest_sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        [counts, wire::floats(&self.squares), sums, self.report.to_bytes()].concat()
    }

    fn from_bytes(body: &[u8]) -> Result<Self, String> {
        let mut reader = Reader(body);
        let [squares, sums] = [reader.number()?, reader.number()?];
        let squares = reader.floats(squares as usize)?;
        let digest_sums = (0..sums).map(|_| reader.number()).collect::<Result<_, _>>()?;
        Ok(Self { squares, digest_sums, report: Report::from_bytes(reader.0)? })
    }
}

/// The numbers of a message of this rank.
fn floats_of(rank: usize, body: &[u8]) -> Result<Vec<f32>, RankError> {
    Reader(body).last_floats().map_err(|what| RankError::damaged(rank, what))
}

/// Passes the new weights of every rank on to all. The inner error is one of this rank alone.
fn spread<E: Engine>(engine: &mut E, shards: &Shards, team: &Team<'_>) -> Result<Result<(), RunError>, RankError> {
    let mut of_ranks: Vec<Vec<Cow<'_, [f32]>>> = Vec::new();
    for rank in 0..team.size() {
        if rank == team.rank() {
            team.broadcast_tensors(Ok(shards.values().collect::<Vec<_>>()))?;
            of_ranks.push(shards.values().map(Cow::Borrowed).collect());
        } else {
            let received = team.receive_broadcast(rank)?.map_err(RankError::Failed)?;
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
        .map_err(|failure| own.filter(|_| failure.rank == team.rank()).unwrap_or(RankError::Failed(failure).into()));
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
            Err(self.team.told_to_others(own, &mut self.own))
        } else {
            self.node(node).map_err(|error| self.team.told_to_others(error.into(), &mut self.own))
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
            (Some(Err(failure)), Some(_)) | (Some(Ok(_)), Some(Err(failure))) => Some(Err::<_, RankFailure>(failure)),
            (left, right) => left.or(right),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let losses = Losses { tokens: vec![0.5, -0.0, f32::MIN_POSITIVE], balance: vec![0.25, -1e-300] };
        let report = Report::new(&[Digest([3, u64::MAX])], losses);
        for digest_sums in [Vec::new(), vec![1, u64::MAX, 7]] {
            let written = ShardReport { squares: vec![1.5, 0.0, 3e38], digest_sums, report: report.clone() };
            let bytes = written.to_bytes();
            let read = ShardReport::from_bytes(&bytes).expect("whole");
            assert_eq!(read, written);
            assert_eq!(read.to_bytes(), bytes, "the sign of a zero too");
            for length in (0..bytes.len()).filter(|length| length % 4 != 0 || *length < bytes.len() - 12) {
                assert!(ShardReport::from_bytes(&bytes[..length]).is_err(), "{length} of {} bytes", bytes.len());
            }
        }
    }
}
