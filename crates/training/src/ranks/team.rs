//! Ranks that wait for each other, at most until a deadline, and agree: everyone's answer goes to
//! rank 0, and its decision goes to everyone.
//!
//! A failure of one rank is an answer too, so all ranks end with the same error. A rank that no
//! longer answers is found by asking: who waits in vain asks the rank it waits for, and is told
//! whom that one waits for in turn; the first that gives no answer is the one.

use super::wire::{self, Kind, Reader, message, opened};
use super::{Alone, Channel, Message, RankError, RankFailure, World, WorldError};
use crate::prepare::RunError;
use crate::signal::Signal;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

/// How often a waiting rank looks for questions of others.
const QUESTION_INTERVAL: Duration = Duration::from_millis(20);
/// A rank that waits sleeps between looks, first briefly, then longer.
const PAUSES: [Duration; 2] = [Duration::from_micros(10), Duration::from_micros(250)];
/// How long a rank may take to say whom it waits for, at most.
const REPLY_MAX: Duration = Duration::from_secs(5);
/// Tensors travel together up to this many bytes, so that ranks can pass on the first ones while
/// the next arrive.
const BUCKET_BYTES: usize = 16 << 20;

/// Tensors that arrived, or the failure that came instead of them.
pub(super) type Tensors = Result<Vec<Vec<f32>>, RankFailure>;

/// The clock of deadlines and of the time spent in communication.
#[expect(clippy::disallowed_types, reason = "deadlines; results never depend on them")]
struct Clock(std::time::Instant);

impl Clock {
    #[expect(clippy::disallowed_types, reason = "as above")]
    fn start() -> Self {
        Self(std::time::Instant::now())
    }

    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}

/// The ranks of a run and how long they wait for each other.
pub struct Team<'w> {
    world: &'w dyn World,
    timeout: Duration,
    /// Threads for work on the host.
    threads: usize,
    /// The signal this rank has received.
    requested: Box<dyn Fn() -> Option<Signal> + 'w>,
    /// The signal all ranks have agreed on.
    signal: Cell<Option<Signal>>,
    is_end_agreed: Cell<bool>,
    spent: Cell<Duration>,
    /// Questions asked so far: a late answer to an earlier one is not taken for the new one's.
    questions: Cell<u64>,
}

impl Team<'static> {
    /// A single process.
    pub fn alone() -> Self {
        Self::new(&Alone, Duration::MAX)
    }
}

impl<'w> Team<'w> {
    pub fn new(world: &'w dyn World, timeout: Duration) -> Self {
        let (signal, is_end_agreed) = (Cell::new(None), Cell::new(false));
        let requested = Box::new(|| None);
        Self {
            world,
            timeout,
            threads: 1,
            requested,
            signal,
            is_end_agreed,
            spent: Cell::new(Duration::ZERO),
            questions: Cell::new(0),
        }
    }

    /// Looks for signals here whenever ranks agree.
    #[must_use]
    pub fn with_signals(self, requested: impl Fn() -> Option<Signal> + 'w) -> Self {
        Self { requested: Box::new(requested), ..self }
    }

    /// How many threads this rank may use on its host.
    #[must_use]
    pub fn with_threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    pub fn threads(&self) -> usize {
        self.threads
    }

    pub fn rank(&self) -> usize {
        self.world.rank()
    }

    pub fn size(&self) -> usize {
        self.world.size()
    }

    pub fn is_alone(&self) -> bool {
        self.size() == 1
    }

    /// Whether this rank locks the folder, writes to it, and talks to the user.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Seconds spent waiting for other ranks and packing messages.
    pub fn communication_seconds(&self) -> f64 {
        self.spent.get().as_secs_f64()
    }

    /// The signal that all ranks agreed on in the last decision.
    pub fn signal(&self) -> Option<Signal> {
        self.signal.get()
    }

    /// Whether the other ranks know how the run ends. Otherwise they wait for this one.
    pub fn others_know_the_end(&self) -> bool {
        self.is_alone() || self.is_end_agreed.get()
    }

    /// All ranks have come to the end of the run.
    pub(crate) fn end(&self) {
        self.is_end_agreed.set(true);
    }

    /// Stops the other ranks unless they already know how the run ends.
    pub fn abandon(&self, code: u8) {
        if !self.others_know_the_end() {
            self.world.abort(code);
        }
    }

    /// `decide` gets the answers of all ranks, on rank 0; its decision is returned on every rank.
    /// If a rank fails, or `decide` does, all fail: with the failure of the lowest rank.
    pub fn agree(
        &self,
        answer: Result<Vec<u8>, RunError>,
        decide: impl FnOnce(Vec<Vec<u8>>) -> Result<Vec<u8>, RunError>,
    ) -> Result<Vec<u8>, RunError> {
        if self.is_alone() {
            return decide(vec![answer?]);
        }
        if let Err(RunError::Rank(error)) = &answer
            && !error.leaves_all_reachable()
        {
            return answer;
        }
        let begun = Clock::start();
        let (mut own, noted) = (None, (self.requested)());
        let mut kept = |answer: Result<Vec<u8>, RunError>| answer.map_err(|error| self.told_to_others(error, &mut own));
        let decided = if self.is_first() {
            let answers = self.gather(kept(answer), noted)?;
            let decided = answers.and_then(|(answers, signal)| Ok((kept(decide(answers))?, signal)));
            Some(
                decided.map_or_else(
                    |failure| failed(&failure),
                    |(body, signal)| with_signal(Kind::Decision, signal, &body),
                ),
            )
        } else {
            let answer = kept(answer);
            let answer = answer.map_or_else(|failure| failed(&failure), |body| with_signal(Kind::Answer, noted, &body));
            self.send(0, answer)?;
            None
        };
        let decided = self.broadcast(0, decided)?;
        self.spend(&begun);
        match open(0, &decided, Kind::Decision)? {
            Ok(body) => {
                let (signal, body) = split_signal(0, body)?;
                self.signal.set(signal);
                Ok(body.to_vec())
            }
            Err(failure) => {
                self.is_end_agreed.set(true);
                Err(own.filter(|_| failure.rank == self.rank()).unwrap_or(RankError::Failed(failure).into()))
            }
        }
    }

    /// Agrees that every rank has come this far. Returns this rank's own result.
    pub fn agree_on<T>(&self, result: Result<T, RunError>) -> Result<T, RunError> {
        if self.is_alone() {
            return result;
        }
        let (value, answer) = match result {
            Ok(value) => (Some(value), Ok(Vec::new())),
            Err(error) => (None, Err(error)),
        };
        self.agree(answer, |_| Ok(Vec::new()))?;
        Ok(value.expect("a rank that failed does not come here"))
    }

    /// What rank 0 makes, for every rank.
    pub fn value_of_rank_0<T: Serialize + DeserializeOwned>(
        &self,
        make: impl FnOnce() -> Result<T, RunError>,
    ) -> Result<T, RunError> {
        if self.is_alone() {
            return make();
        }
        let json = |value: T| serde_json::to_vec(&value).expect("what ranks share has a JSON form");
        let answer = if self.is_first() { make().map(json) } else { Ok(Vec::new()) };
        let made = self.agree(answer, |mut answers| Ok(answers.swap_remove(0)))?;
        Ok(serde_json::from_slice(&made).map_err(|error| RankError::damaged(0, error.to_string()))?)
    }

    /// The numbers that rank 0 found, for every rank. If it failed, all fail; the next agreement
    /// settles with which error.
    pub fn numbers_of_rank_0(&self, own: Option<Result<Vec<f32>, RunError>>) -> Result<Vec<f32>, RunError> {
        let Some(own) = own else {
            let shared = self.receive_broadcast(0)?.map_err(RankError::Failed)?;
            let damaged = RankError::damaged(0, format!("{} tensors came instead of one", shared.len()));
            return shared.into_iter().next().ok_or(damaged.into());
        };
        if self.is_alone() {
            return own;
        }
        let mut failure = None;
        let own = own.map_err(|error| self.told_to_others(error, &mut failure));
        self.broadcast_tensors(own.as_ref().map(|values| vec![values]).map_err(Clone::clone))?;
        own.map_err(|told| failure.unwrap_or(RankError::Failed(told).into()))
    }

    /// The form in which other ranks hear of a failure. Keeps the failure itself for this rank.
    pub(super) fn told_to_others(&self, error: RunError, own: &mut Option<RunError>) -> RankFailure {
        if let RunError::Rank(RankError::Failed(failure)) = error {
            if failure.rank == self.rank() && own.is_none() {
                *own = Some(RankError::Failed(failure.clone()).into());
            }
            return failure;
        }
        let (rank, code, what, hint) = (self.rank(), error.exit_code(), error.to_string(), error.hint());
        own.get_or_insert(error);
        RankFailure { rank, code, what, hint }
    }

    /// The answers of all ranks and the first signal, on rank 0; or the failure of the lowest rank.
    #[expect(clippy::type_complexity, reason = "a failure of a rank is an answer, a lost rank is an error")]
    fn gather(
        &self,
        own: Result<Vec<u8>, RankFailure>,
        noted: Option<Signal>,
    ) -> Result<Result<(Vec<Vec<u8>>, Option<Signal>), RankFailure>, RankError> {
        let (mut answers, mut signal) = (own.map(|own| vec![own]), noted);
        for rank in 1..self.size() {
            let message = self.receive(rank)?;
            let answer = open(rank, &message, Kind::Answer)?;
            let answer = answer
                .map(|body| split_signal(rank, body))
                .map_or_else(|failure| Ok(Err(failure)), |body| body.map(Ok));
            match (&mut answers, answer?) {
                (Ok(answers), Ok((of_rank, body))) => {
                    answers.push(body.to_vec());
                    signal = signal.or(of_rank);
                }
                (answers @ Ok(_), Err(failure)) => *answers = Err(failure),
                (Err(_), _) => (),
            }
        }
        Ok(answers.map(|answers| (answers, signal)))
    }

    /// Sends tensors, or the failure that came instead of them.
    pub(super) fn send_tensors<T: AsRef<[f32]>>(
        &self,
        to: usize,
        tensors: Result<Vec<T>, RankFailure>,
    ) -> Result<(), RankError> {
        let begun = Clock::start();
        for message in packed(tensors) {
            self.send(to, message)?;
        }
        self.spend(&begun);
        Ok(())
    }

    pub(super) fn receive_tensors(&self, from: usize) -> Result<Tensors, RankError> {
        let begun = Clock::start();
        let tensors = unpack(from, || self.receive(from));
        self.spend(&begun);
        tensors
    }

    /// Tensors of this rank, or the failure that came instead of them, for every other.
    pub(super) fn broadcast_tensors<T: AsRef<[f32]>>(&self, own: Result<Vec<T>, RankFailure>) -> Result<(), RankError> {
        let begun = Clock::start();
        let result = packed(own).try_for_each(|message| self.broadcast(self.rank(), Some(message)).map(drop));
        self.spend(&begun);
        result
    }

    /// What `root`, another rank, broadcasts.
    pub(super) fn receive_broadcast(&self, root: usize) -> Result<Tensors, RankError> {
        let begun = Clock::start();
        let result = unpack(root, || self.broadcast(root, None));
        self.spend(&begun);
        result
    }

    /// Passes a message of `root` on in a binomial tree.
    fn broadcast(&self, root: usize, own: Option<Message>) -> Result<Message, RankError> {
        let size = self.size();
        let place = (self.rank() + size - root) % size;
        let rank_at = |place: usize| (place + root) % size;
        let message = match own {
            Some(message) => message,
            None => self.receive(rank_at(place & (place - 1)))?,
        };
        // The subtree of a place has as many places as its lowest bit says.
        let mut step = if place == 0 { size.next_power_of_two() } else { place & place.wrapping_neg() };
        while step > 1 {
            step /= 2;
            if place + step < size {
                self.send(rank_at(place + step), Arc::clone(&message))?;
            }
        }
        Ok(message)
    }

    fn send(&self, to: usize, message: Message) -> Result<(), RankError> {
        self.world.send(to, Channel::Data, message).map_err(lost)
    }

    /// The next message of a rank. After the deadline, finds out which rank does not answer.
    fn receive(&self, from: usize) -> Result<Message, RankError> {
        let begun = Clock::start();
        let mut looked = Clock::start();
        let mut asked: Option<(usize, Clock)> = None;
        loop {
            if let Some(message) = self.world.poll(from, Channel::Data).map_err(lost)? {
                return Ok(message);
            }
            std::thread::sleep(PAUSES[usize::from(begun.elapsed() > QUESTION_INTERVAL)]);
            if looked.elapsed() < QUESTION_INTERVAL {
                continue;
            }
            looked = Clock::start();
            let silent = |rank| RankError::Silent { rank, seconds: self.timeout.as_secs() };
            for rank in (0..self.size()).filter(|rank| *rank != self.rank()) {
                match self.control_of(rank)? {
                    Some((Kind::Question, number, _)) => self.reply(rank, number, from)?,
                    Some((Kind::Waiting, number, next))
                        if number == self.questions.get()
                            && asked.as_ref().is_some_and(|(asked, _)| *asked == rank) =>
                    {
                        if next == self.rank() || next >= self.size() {
                            return Err(silent(rank));
                        }
                        asked = Some((next, self.ask(next)?));
                    }
                    _ => (),
                }
            }
            match &asked {
                None if begun.elapsed() > self.timeout => asked = Some((from, self.ask(from)?)),
                Some((rank, since)) if since.elapsed() > (self.timeout / 2).min(REPLY_MAX) => {
                    return Err(silent(*rank));
                }
                _ => (),
            }
        }
    }

    /// Asks a rank whom it waits for.
    fn ask(&self, rank: usize) -> Result<Clock, RankError> {
        self.questions.set(self.questions.get() + 1);
        let question = message(Kind::Question, |bytes| bytes.extend(self.questions.get().to_le_bytes()));
        self.world.send(rank, Channel::Control, question).map_err(lost)?;
        Ok(Clock::start())
    }

    fn reply(&self, to: usize, number: u64, waits_for: usize) -> Result<(), RankError> {
        let body = [number, waits_for as u64].map(u64::to_le_bytes).concat();
        let reply = message(Kind::Waiting, |bytes| bytes.extend(body));
        self.world.send(to, Channel::Control, reply).map_err(lost)
    }

    /// A question and its number, or the answer to one: the rank that `rank` waits for.
    fn control_of(&self, rank: usize) -> Result<Option<(Kind, u64, usize)>, RankError> {
        let Some(message) = self.world.poll(rank, Channel::Control).map_err(lost)? else { return Ok(None) };
        let damaged = |what| RankError::damaged(rank, what);
        let (kind, body) = opened(&message).map_err(damaged)?;
        let mut reader = Reader(body);
        let number = reader.number().map_err(damaged)?;
        let waits_for = if kind == Kind::Waiting { reader.number().map_err(damaged)? } else { 0 };
        Ok(Some((kind, number, waits_for as usize)))
    }

    fn spend(&self, begun: &Clock) {
        self.spent.set(self.spent.get() + begun.elapsed());
    }
}

/// Tensors from the messages they came in.
fn unpack(from: usize, next: impl Fn() -> Result<Message, RankError>) -> Result<Tensors, RankError> {
    let damaged = |what: String| RankError::damaged(from, what);
    let first = next()?;
    let mut lengths = Vec::new();
    match open(from, &first, Kind::Tensors)? {
        Err(failure) => return Ok(Err(failure)),
        Ok(body) => {
            let mut reader = Reader(body);
            while !reader.0.is_empty() {
                lengths.push(reader.number().map_err(damaged)? as usize);
            }
        }
    }
    let mut tensors = Vec::with_capacity(lengths.len());
    for bucket in buckets(&lengths) {
        let message = next()?;
        let body = match open(from, &message, Kind::Tensors)? {
            Err(failure) => return Ok(Err(failure)),
            Ok(body) => body,
        };
        let mut reader = Reader(body);
        for length in &lengths[bucket] {
            tensors.push(reader.floats(*length).map_err(damaged)?);
        }
        reader.end().map_err(damaged)?;
    }
    Ok(Ok(tensors))
}

/// The body of a message of the expected kind, or the failure that came instead.
fn open(from: usize, message: &Message, kind: Kind) -> Result<Result<&[u8], RankFailure>, RankError> {
    let damaged = |what: String| RankError::damaged(from, what);
    match opened(message).map_err(damaged)? {
        (Kind::Failure, body) => {
            let failure = serde_json::from_slice(body).map_err(|error| damaged(error.to_string()))?;
            Ok(Err(failure))
        }
        (found, body) if found == kind => Ok(Ok(body)),
        (found, _) => Err(damaged(format!("{found:?} came instead of {kind:?}"))),
    }
}

/// Splits a body into a signal and the rest.
fn split_signal(from: usize, body: &[u8]) -> Result<(Option<Signal>, &[u8]), RankError> {
    let (code, rest) = body.split_first().ok_or_else(|| RankError::damaged(from, "it is empty"))?;
    Ok((Signal::from_exit_code(*code), rest))
}

fn lost(error: WorldError) -> RankError {
    let WorldError::Gone { rank, why } = error;
    RankError::Gone { rank, why }
}

fn failed(failure: &RankFailure) -> Message {
    message(Kind::Failure, |bytes| {
        bytes.extend(serde_json::to_vec(failure).expect("strings and numbers have a JSON form"));
    })
}

/// A message whose body begins with a signal.
fn with_signal(kind: Kind, signal: Option<Signal>, body: &[u8]) -> Message {
    message(kind, |bytes| {
        bytes.push(signal.map_or(0, Signal::exit_code));
        bytes.extend_from_slice(body);
    })
}

/// The messages that tensors travel in: their lengths, then buckets of them. Each tensor is packed
/// when its message is sent, and dropped then.
fn packed<T: AsRef<[f32]>>(tensors: Result<Vec<T>, RankFailure>) -> impl Iterator<Item = Message> {
    let (head, tensors) = match tensors {
        Ok(tensors) => {
            let lengths = tensors.iter().flat_map(|tensor| (tensor.as_ref().len() as u64).to_le_bytes());
            (message(Kind::Tensors, |bytes| bytes.extend(lengths)), tensors)
        }
        Err(failure) => (failed(&failure), Vec::new()),
    };
    let buckets = buckets(&tensors.iter().map(|tensor| tensor.as_ref().len()).collect::<Vec<_>>());
    let mut tensors = tensors.into_iter();
    let bodies = buckets.into_iter().map(move |bucket| {
        let numbers = tensors.as_slice()[..bucket.len()].iter().map(|tensor| tensor.as_ref().len()).sum::<usize>();
        wire::long_message(Kind::Tensors, numbers * size_of::<f32>(), |bytes| {
            tensors.by_ref().take(bucket.len()).for_each(|tensor| wire::put_floats(bytes, tensor.as_ref()));
        })
    });
    std::iter::once(head).chain(bodies)
}

/// Ranges of consecutive tensors that share a message.
fn buckets(lengths: &[usize]) -> Vec<std::ops::Range<usize>> {
    let (mut all, mut start, mut bytes) = (Vec::new(), 0, 0_usize);
    for (index, length) in lengths.iter().enumerate() {
        bytes = bytes.saturating_add(length.saturating_mul(4));
        if bytes >= BUCKET_BYTES || index + 1 == lengths.len() {
            all.push(start..index + 1);
            (start, bytes) = (index + 1, 0);
        }
    }
    all
}
