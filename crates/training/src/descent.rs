//! The descent to an op: one update is executed on two devices of this machine, from the same
//! weights and state, and the first op that writes other bits is named, with its micro-batch, layer
//! and element.
//!
//! The first execution keeps a digest per call (`trace.rs`), the next one the tensors of the call
//! that differs: memory holds one model and one copy of the trained tensors at a time. Every device
//! executes the update twice, which tells a device that differs from another one from a device that
//! differs from itself.

use crate::checkpoint::Progress;
use crate::engine::{Engine, Stored};
use crate::prepare::{Prepared, RunError};
use crate::replay::{Event, Replay};
use crate::trace::{Format, Parting, Trace, TracedCall, Tracer, Written};
use isobit_models::build::Settings;
use isobit_proof::chain::{Chain, Update};

/// What an update starts from, in host memory: every trained tensor and its two moments.
pub struct Before {
    pub step: u64,
    progress: Progress,
    tensors: Vec<[Vec<f32>; 3]>,
}

const STORED: [Stored; 3] = [Stored::Value, Stored::Moment(0), Stored::Moment(1)];

/// An update that was executed.
pub struct Execution {
    pub trace: Trace,
    /// Its line of the chain; if it stopped, why.
    pub line: Result<Update, String>,
}

/// Executes updates on a device that a tracer observes.
pub struct Executor<'a, E: Engine> {
    replay: Replay<'a, E>,
    tracer: Tracer,
}

impl<'a, E: Engine> Executor<'a, E> {
    /// `tracer` observes the backend of the engine. Starts from the nearest checkpoint before an
    /// update, or from the base.
    pub fn new(
        make: impl FnOnce(&Settings) -> Result<E, RunError>,
        tracer: Tracer,
        (prepared, chain): (&'a Prepared, &'a Chain),
        step: u64,
        watch: &'a mut dyn FnMut(Event),
    ) -> Result<Self, RunError> {
        Ok(Self { replay: Replay::begin(make, prepared, chain, step, watch)?, tracer })
    }

    /// Executes all updates before one.
    pub fn reach(&mut self, step: u64) -> Result<Before, RunError> {
        while self.replay.state.progress.step + 1 < step {
            self.replay.update()?;
        }
        let engine = &self.replay.state.engine;
        let read = |at: usize| -> Result<[Vec<f32>; 3], RunError> {
            let [value, first, second] = STORED.map(|which| engine.read(at, which));
            Ok([value?, first?, second?])
        };
        let tensors = (0..engine.tensors().len()).map(read).collect::<Result<_, _>>()?;
        Ok(Before { step, progress: self.replay.state.progress.clone(), tensors })
    }

    /// Executes the update.
    pub fn execute(&mut self, before: &Before) -> Result<Execution, RunError> {
        Ok(self.run(before, None)?.0)
    }

    /// Executes it once more, and returns what the call of this number wrote, if it wrote the same
    /// again.
    pub fn fetch(&mut self, before: &Before, call: &TracedCall) -> Result<Option<Vec<Written>>, RunError> {
        let (execution, kept) = self.run(before, Some(call.number))?;
        let again = execution.trace.call(call.number);
        Ok(kept.filter(|_| again.is_some_and(|again| again.written == call.written)))
    }

    fn run(&mut self, before: &Before, keep: Option<usize>) -> Result<(Execution, Option<Vec<Written>>), RunError> {
        let state = &mut self.replay.state;
        state.progress = before.progress.clone();
        for (at, tensors) in before.tensors.iter().enumerate() {
            for (which, values) in STORED.into_iter().zip(tensors) {
                state.engine.write(at, which, values.clone())?;
            }
        }
        self.tracer.start(keep);
        let line = self.replay.update().map_err(|error| error.to_string());
        let (trace, kept) = self.tracer.stop();
        Ok((Execution { trace, line }, kept))
    }
}

/// Two executions on one device, and on another.
pub struct Pair {
    pub first: [Execution; 2],
    pub second: [Execution; 2],
}

impl Pair {
    /// Where the devices part.
    pub fn parting(&self) -> Option<Parting> {
        self.first[0].trace.parting(&self.second[0].trace)
    }

    /// Where each device parts from itself.
    pub fn own_partings(&self) -> [Option<Parting>; 2] {
        [&self.first, &self.second].map(|[one, again]| one.trace.parting(&again.trace))
    }
}

/// The first element in which two tensors of a call differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Differing {
    /// Which of the tensors that the op wrote, from 0, and how many it wrote.
    pub output: usize,
    pub outputs: usize,
    /// In row-major order.
    pub index: usize,
    pub length: usize,
    /// Elements of the tensor that differ.
    pub count: usize,
    pub format: Format,
    pub bits: [u32; 2],
}

/// Compares what one call wrote on two devices.
pub fn first_element(first: &[Written], second: &[Written]) -> Option<Differing> {
    let (output, (one, other)) = first.iter().zip(second).enumerate().find(|(_, (one, other))| one != other)?;
    let differs = |(a, b): &(&u32, &u32)| a != b;
    let both = || one.bits.iter().zip(&other.bits);
    let index = both().position(|pair| differs(&pair))?;
    Some(Differing {
        output,
        outputs: first.len(),
        index,
        length: one.bits.len(),
        count: both().filter(differs).count(),
        format: one.format,
        bits: [one.bits[index], other.bits[index]],
    })
}
