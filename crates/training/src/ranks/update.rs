//! An update on several ranks. Each computes a range of consecutive groups; the gradients of a node
//! of the tree are with the rank of its first group that has rows, and a right part that is with
//! another rank travels to the left one. The root goes to all, and everyone applies it.
//!
//! ORDER: every addition is the one that a single process makes, by the engine's own kernel, so
//! nothing here can change a bit. A rank has computed all its groups before it first waits.

use super::team::Team;
use super::wire::{self, Reader};
use super::{RankError, RankFailure};
use crate::engine::{Applied, Engine};
use crate::groups::{Groups, middle};
use crate::prepare::RunError;
use crate::row::Row;
use crate::step::{Evaluated, Evaluation, Losses, StepError, StepReport, StepSettings, Update};
use isobit_kernels::float_state;
use isobit_numerics::digest::Digest;
use isobit_numerics::slices::Profile;
use isobit_proof::chain::combined;
use std::ops::Range;

/// Groups of a rank: `⌊r·G/W⌋ .. ⌊(r+1)·G/W⌋` of `G` groups on `W` ranks.
pub fn groups_of(rank: usize, ranks: usize, groups: usize) -> Range<usize> {
    Groups::new(groups, ranks).rows_of(rank)
}

/// The rank that computes a group.
pub(super) fn rank_of(group: usize, ranks: usize, groups: usize) -> usize {
    (0..ranks).find(|rank| groups_of(*rank, ranks, groups).contains(&group)).expect("every group has a rank")
}

/// Update number `step`, counted from one, over `rows`. Fails on all ranks or on none.
pub fn step<E: Engine>(
    engine: &mut E,
    team: &Team<'_>,
    rows: &[&Row],
    step: u64,
    learning_rate: f64,
    settings: &StepSettings,
) -> Result<StepReport, RunError> {
    if team.is_alone() {
        return Ok(engine.step(rows, step, learning_rate, settings)?);
    }
    // Norms and coefficients are computed on the calling thread.
    float_state::restore();
    let update = Update::new(rows, step);
    let mut applied = || -> Result<(Applied, Report), RunError> {
        update.check()?;
        let (mut gradients, losses) = gradients(engine, team, &update, settings)?;
        let applied = engine.clip_and_apply(&mut gradients, step, learning_rate, settings)?;
        let report = match &applied.digests[..] {
            [] => Report::new(&engine.digests()?, losses),
            digests => Report::new(&digests.iter().map(|of| of.value).collect::<Vec<_>>(), losses),
        };
        Ok((applied, report))
    };
    let (Applied { grad_norm, digests }, answer) = match applied() {
        Ok((applied, report)) => (applied, Ok(report.to_bytes())),
        Err(error) => (Applied { grad_norm: 0.0, digests: Vec::new() }, Err(error)),
    };
    let loss = team.agree(answer, |answers| {
        let reports = answers
            .iter()
            .enumerate()
            .map(|(rank, body)| Report::from_bytes(body).map_err(|what| RankError::damaged(rank, what)));
        Report::decide(step, reports.collect::<Result<_, _>>()?)
    })?;
    Ok(update.report(number(&loss)?, grad_norm, digests))
}

pub(super) fn number(bytes: &[u8]) -> Result<f64, RankError> {
    bytes.try_into().map(f64::from_le_bytes).map_err(|_| RankError::damaged(0, "it has another length"))
}

/// Loss and accuracy of rows: each rank evaluates a range of consecutive rows.
pub fn evaluate<E: Engine>(
    engine: &E,
    team: &Team<'_>,
    rows: &[&Row],
    profile: Profile,
    micro_batch_size: usize,
) -> Result<Evaluation, RunError> {
    if team.is_alone() {
        return Ok(engine.evaluate(rows, profile, micro_batch_size)?);
    }
    let range = Groups::new(rows.len(), team.size()).rows_of(team.rank());
    let evaluated = engine.evaluate_rows(rows, range, profile, micro_batch_size).map_err(RunError::from);
    let answer = evaluated.map(|Evaluated { losses, correct, targets }| {
        let mut bytes = [correct, targets].map(|count| (count as u64).to_le_bytes()).concat();
        wire::put_floats(&mut bytes, &losses);
        bytes
    });
    let decided = team.agree(answer, |answers| {
        let mut all = Evaluated::default();
        for (rank, body) in answers.iter().enumerate() {
            all.append(evaluated_from(body).map_err(|what| RankError::damaged(rank, what))?);
        }
        // ORDER: ranks have consecutive rows.
        let Evaluation { loss_sum, correct, targets } = all.total();
        Ok([loss_sum.to_bits(), correct as u64, targets as u64].map(u64::to_le_bytes).concat())
    })?;
    let read = |reader: &mut Reader<'_>| -> Result<Evaluation, String> {
        let loss_sum = f64::from_bits(reader.number()?);
        Ok(Evaluation { loss_sum, correct: reader.number()? as usize, targets: reader.number()? as usize })
    };
    Ok(read(&mut Reader(&decided)).map_err(|what| RankError::damaged(0, what))?)
}

fn evaluated_from(body: &[u8]) -> Result<Evaluated, String> {
    let mut reader = Reader(body);
    let (correct, targets) = (reader.number()? as usize, reader.number()? as usize);
    Ok(Evaluated { losses: reader.last_floats()?, correct, targets })
}

/// What a rank says at the end of an update.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Report {
    /// Of its weights.
    digest: Digest,
    /// Of its rows.
    losses: Losses,
}

impl Report {
    /// With the digests of all weights.
    pub(super) fn new(weights: &[Digest], losses: Losses) -> Self {
        Self { digest: combined(weights), losses }
    }

    /// The sum of all losses, if all ranks have the same weights.
    pub(super) fn decide(step: u64, reports: Vec<Self>) -> Result<Vec<u8>, RunError> {
        compare(step, &reports)?;
        // ORDER: ranks have consecutive groups, so this is the order of rows.
        let mut all = Losses::default();
        for report in reports {
            all.append(report.losses);
        }
        Ok(all.total().to_le_bytes().to_vec())
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let Losses { tokens, balance } = &self.losses;
        let mut bytes = self.digest.0.map(u64::to_le_bytes).concat();
        bytes.extend((balance.len() as u64).to_le_bytes());
        bytes.extend(balance.iter().flat_map(|loss| loss.to_le_bytes()));
        wire::put_floats(&mut bytes, tokens);
        bytes
    }

    pub(super) fn from_bytes(body: &[u8]) -> Result<Self, String> {
        let mut reader = Reader(body);
        let digest = Digest([reader.number()?, reader.number()?]);
        let count = reader.number()?;
        let balance = (0..count).map(|_| Ok(f64::from_bits(reader.number()?))).collect::<Result<_, String>>()?;
        Ok(Self { digest, losses: Losses { tokens: reader.last_floats()?, balance } })
    }
}

/// All ranks must have the same weights. The weights that most of them have are taken for the right
/// ones, of equally many those of the lowest rank.
fn compare(step: u64, reports: &[Report]) -> Result<(), RankError> {
    let same = |rank: &usize| reports.iter().filter(|report| report.digest == reports[*rank].digest).count();
    let reference = (0..reports.len()).rev().max_by_key(same).unwrap_or(0);
    let differs = |rank: &usize| reports[*rank].digest != reports[reference].digest;
    let ranks: Vec<usize> = (0..reports.len()).filter(differs).collect();
    let is_majority = 2 * ranks.len() < reports.len();
    if ranks.is_empty() { Ok(()) } else { Err(RankError::Weights { step, ranks, reference, is_majority }) }
}

/// The combined gradients of an update on this rank, and the losses of its groups.
fn gradients<E: Engine>(
    engine: &E,
    team: &Team<'_>,
    update: &Update<'_>,
    settings: &StepSettings,
) -> Result<(E::Gradients, Losses), RunError> {
    let groups = Groups::new(update.rows.len(), settings.gradient_groups);
    let mut tree = Tree { engine, team, update, settings, groups, losses: Losses::default(), own: None };
    let root = tree.node(0..groups.groups)?.expect("a row with a target is in a group");
    let gradients = tree.spread(root)?;
    let Tree { losses, own, .. } = tree;
    match gradients {
        Ok(gradients) => Ok((gradients, losses)),
        Err(failure) => Err(own.filter(|_| failure.rank == team.rank()).unwrap_or(RankError::Failed(failure).into())),
    }
}

/// Where the gradients of a node are.
enum Place<G> {
    Here(Result<G, RankFailure>),
    /// With another rank.
    With(usize),
}

struct Tree<'a, E: Engine> {
    engine: &'a E,
    team: &'a Team<'a>,
    update: &'a Update<'a>,
    settings: &'a StepSettings,
    groups: Groups,
    losses: Losses,
    /// The failure of this rank, as it came.
    own: Option<RunError>,
}

impl<E: Engine> Tree<'_, E> {
    /// None for a node without rows. Errors are those of the connection; a failure to compute
    /// travels through the tree in place of gradients.
    fn node(&mut self, groups: Range<usize>) -> Result<Option<Place<E::Gradients>>, RankError> {
        if self.groups.is_empty(&groups) {
            return Ok(None);
        }
        let Some(middle) = middle(&groups) else { return Ok(Some(self.leaf(groups.start))) };
        let left = self.node(groups.start..middle)?;
        let right = self.node(middle..groups.end)?;
        let (left, right) = match (left, right) {
            (Some(left), Some(right)) => (left, right),
            (left, right) => return Ok(left.or(right)),
        };
        Ok(Some(match (left, right) {
            (Place::Here(left), Place::Here(right)) => Place::Here(self.add(left, right)),
            (Place::Here(left), Place::With(rank)) => {
                let right = self.team.receive_tensors(rank)?;
                let right = right.and_then(|parts| self.kept(self.engine.upload(parts)));
                Place::Here(self.add(left, right))
            }
            (Place::With(rank), Place::Here(right)) => {
                let parts = right.and_then(|right| self.kept(self.engine.download(&right)));
                self.team.send_tensors(rank, parts)?;
                Place::With(rank)
            }
            (left @ Place::With(_), Place::With(_)) => left,
        }))
    }

    fn leaf(&mut self, group: usize) -> Place<E::Gradients> {
        let rank = rank_of(group, self.team.size(), self.groups.groups);
        if rank != self.team.rank() {
            return Place::With(rank);
        }
        if let Some(own) = self.own.take() {
            // Nothing more is computed after a failure.
            return Place::Here(Err(self.team.told_to_others(own, &mut self.own)));
        }
        let computed = self.engine.group_gradients(self.update, self.groups.rows_of(group), self.settings);
        Place::Here(self.kept(computed).map(|(gradients, losses)| {
            self.losses.append(losses);
            gradients
        }))
    }

    fn add(
        &mut self,
        left: Result<E::Gradients, RankFailure>,
        right: Result<E::Gradients, RankFailure>,
    ) -> Result<E::Gradients, RankFailure> {
        // The failure of the earlier rows is the one that a single process meets first.
        let (left, right) = (left?, right?);
        self.kept(self.engine.add(left, right))
    }

    /// The root's gradients, combined, for every rank.
    fn spread(&mut self, root: Place<E::Gradients>) -> Result<Result<E::Gradients, RankFailure>, RankError> {
        match root {
            Place::Here(gradients) => {
                let combined = gradients.and_then(|mut gradients| {
                    self.kept(self.engine.combine(&mut gradients))?;
                    let parts = self.kept(self.engine.download(&gradients))?;
                    Ok((gradients, parts))
                });
                let (gradients, parts) = match combined {
                    Ok((gradients, parts)) => (Ok(gradients), Ok(parts)),
                    Err(failure) => (Err(failure.clone()), Err(failure)),
                };
                self.team.broadcast_tensors(parts)?;
                Ok(gradients)
            }
            Place::With(root) => {
                let parts = self.team.receive_broadcast(root)?;
                Ok(parts.and_then(|parts| self.kept(self.engine.upload(parts))))
            }
        }
    }

    /// Keeps a failure of this rank and returns what others hear of it.
    fn kept<T>(&mut self, result: Result<T, StepError>) -> Result<T, RankFailure> {
        result.map_err(|error| self.team.told_to_others(error.into(), &mut self.own))
    }
}
