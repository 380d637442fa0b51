//! Everything that can change during a run: what is saved in a checkpoint and restored from one,
//! and what the final folder is written from.

use crate::checkpoint::{Opened, Progress, Snapshot};
use crate::engine::{Engine, Stored};
use crate::prepare::RunError;
use crate::ranks::Team;
use crate::ranks::shards::Shards;
use isobit_numerics::digest::Digest;
use isobit_proof::chain::{Item, Update, combined};
use isobit_proof::safetensors::NamedTensor;
use std::collections::BTreeMap;

/// Everything that can change during a run.
pub(crate) struct State<E: Engine> {
    pub(crate) engine: E,
    /// The optimizer state, where ranks share it.
    pub(crate) shards: Option<Shards>,
    pub(crate) progress: Progress,
}

impl<E: Engine> State<E> {
    /// `moments` are those of all tensors if the engine does not hold them.
    pub(crate) fn snapshot(&self, mut moments: Option<[Vec<Vec<f32>>; 2]>) -> Result<Snapshot, RunError> {
        let (mut weights, mut moments1, mut moments2) = (Vec::new(), Vec::new(), Vec::new());
        for (at, tensor) in self.engine.tensors().iter().enumerate() {
            weights.extend(tensor.to_file(self.engine.read(at, Stored::Value)?));
            let mut moment = |order: usize| match &mut moments {
                Some(gathered) => Ok(std::mem::take(&mut gathered[order][at])),
                None => self.engine.read(at, Stored::Moment(order)),
            };
            moments1.extend(tensor.to_file(moment(0)?));
            moments2.extend(tensor.to_file(moment(1)?));
        }
        Ok(Snapshot { step: self.progress.step, weights, moments1, moments2, progress: self.progress.clone() })
    }

    /// Restores one tensor at a time, in place: nothing is held twice. Rank 0 reads the checkpoint
    /// and sends it to the others; it has the digests of what it read.
    pub(crate) fn restore(&mut self, opened: Option<&Opened>, team: &Team<'_>) -> Result<Restored, RunError> {
        let (mut restored, mut read_digests) = (Ok(()), Vec::new());
        for at in 0..self.engine.tensors().len() {
            for which in [Stored::Moment(0), Stored::Moment(1), Stored::Value] {
                let tensor = &self.engine.tensors()[at];
                let read = |opened: &Opened| -> Result<Vec<f32>, RunError> {
                    Ok(tensor.from_file(|name, shape| match which {
                        Stored::Moment(order) => opened.moment(order, name, shape),
                        Stored::Value => opened.weight(name, shape),
                    })?)
                };
                let own = opened.map(read);
                read_digests.extend(own.iter().flatten().map(|values| Digest::of_f32(values)));
                match team.numbers_of_rank_0(own) {
                    // A rank that cannot write still takes part in what follows.
                    Ok(values) => restored = restored.and(self.put(at, which, values)),
                    Err(error) => return team.agree_on(Err(error)),
                }
            }
        }
        let engine = &self.engine;
        let read = |shards: &mut Shards| shards.read_values(engine).map_err(RunError::from);
        team.agree_on(restored.and_then(|()| self.shards.as_mut().map_or(Ok(()), read)))?;
        let progress = || opened.map(|opened| opened.progress.clone()).expect("rank 0 has opened it");
        self.progress = team.value_of_rank_0(|| Ok(progress()))?;
        Ok(Restored::new(&read_digests))
    }

    /// Overwrites a tensor, or this rank's part of it.
    fn put(&mut self, tensor: usize, which: Stored, values: Vec<f32>) -> Result<(), RunError> {
        match (which, &mut self.shards) {
            (Stored::Moment(order), Some(shards)) => shards.write_moment(tensor, order, &values),
            _ => self.engine.write(tensor, which, values)?,
        }
        Ok(())
    }
}

/// Digests of what was read from a checkpoint, as a line of the chain has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Restored {
    weights: Digest,
    state: Digest,
}

impl Restored {
    /// Of both moments and the values of each tensor.
    fn new(read: &[Digest]) -> Self {
        let (tensors, _) = read.as_chunks::<3>();
        let weights: Vec<Digest> = tensors.iter().map(|[_, _, value]| *value).collect();
        let states: Vec<Digest> = tensors.iter().map(|[first, second, _]| combined(&[*first, *second])).collect();
        Self { weights: combined(&weights), state: combined(&states) }
    }

    /// What is not that of the update, if anything.
    pub(crate) fn difference(&self, update: &Update) -> Option<Item> {
        if self.weights != update.weights {
            return Some(Item::Weights(None));
        }
        (self.state != update.state).then_some(Item::State(None))
    }
}

/// Trained tensors as stored in files, copied from the device on demand.
pub(crate) struct Live<'a, E: Engine> {
    engine: &'a E,
    /// The tensor in memory for every name in a file.
    tensors: BTreeMap<String, usize>,
    /// The last few tensors: a file stores those of one layer's experts side by side.
    recent: Vec<(usize, Vec<NamedTensor>)>,
}

impl<'a, E: Engine> Live<'a, E> {
    const RECENT_MAX: usize = 2;

    pub(crate) fn new(engine: &'a E) -> Self {
        let all = engine.tensors().iter().enumerate();
        let named = all.flat_map(|(at, tensor)| tensor.in_file().into_iter().map(move |(name, _)| (name, at)));
        Self { engine, tensors: named.collect(), recent: Vec::new() }
    }

    pub(crate) fn tensor(&mut self, name: &str) -> Result<Vec<f32>, RunError> {
        let at = self.tensors[name];
        if !self.recent.iter().any(|(other, _)| *other == at) {
            if self.recent.len() == Self::RECENT_MAX {
                self.recent.remove(0);
            }
            let values = self.engine.read(at, Stored::Value)?;
            self.recent.push((at, self.engine.tensors()[at].to_file(values)));
        }
        let held = self.recent.iter_mut().find(|(other, _)| *other == at).map(|(_, tensors)| tensors);
        let tensor = held.into_iter().flatten().find(|tensor| tensor.name == name);
        // Each is requested once.
        Ok(tensor.map(|tensor| std::mem::take(&mut tensor.values)).unwrap_or_default())
    }
}
