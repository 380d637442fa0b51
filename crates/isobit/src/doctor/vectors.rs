//! Every path of the CPU and every device, checked with test vectors: results that are known, from
//! a few cases of every op. A soak repeats them, since failing hardware is wrong only sometimes.

use crate::Failure;
use crate::backend::{cores, open_cpu};
use crate::progress::Clock;
use crate::stderr::tell;
use isobit_conformance::vectors::{Checked, Sample, Subject};
use isobit_doctor::{COLUMN, Facts, Finding, Level};
use isobit_kernels::Path;
use isobit_kernels::cpu::pool::THREADS_MAX;
use isobit_kernels::gpu::{self, Api, Gpu, Selector};
use serde::Serialize;
use std::sync::mpsc;
use std::time::Duration;

/// Failures that are told of a device.
const FAILURES_MAX: usize = 3;
/// Small cases of an op that a soak goes through, before it begins again.
const CASES_MAX: usize = 30;
/// Seconds for all devices together, and for each at least: one that was never used compiles its
/// kernels first, which may take minutes.
const ALL_DEVICES_SECONDS: f64 = 4.0;
const DEVICE_SECONDS_MIN: f64 = 0.5;
/// How much longer the kernel at hand may be compiled.
const KERNEL_SECONDS_MORE: f64 = 3.0;
/// Compilers of drivers need more stack than a thread has by default.
const STACK_BYTES: usize = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// Gives the bits.
    Conformant,
    /// Is here, and fails.
    Failed,
    /// Is here, and is not used, for a reason that its listing gives.
    Unusable,
    /// Is here, and its driver still compiles.
    Unfinished,
    /// No driver or no device.
    Absent,
}

#[derive(Debug, Serialize)]
pub(super) struct DeviceCheck {
    device: String,
    name: String,
    state: State,
    vectors: usize,
    /// Vectors that there was no time for.
    vectors_left_out: usize,
    /// Of the results; None if vectors are left out.
    hash: Option<String>,
    /// Why it is not conformant.
    reasons: Vec<String>,
}

impl DeviceCheck {
    fn without_vectors(device: String, name: String, state: State, why: String) -> Self {
        Self { device, name, state, vectors: 0, vectors_left_out: 0, hash: None, reasons: vec![why] }
    }

    fn of(device: String, name: String, checked: &Checked) -> Self {
        if checked.compared == 0 && checked.failures.is_empty() {
            let why = "no vector was compared: its kernels take long to compile; `--soak 5m` runs them all";
            return Self::without_vectors(device, name, State::Unfinished, why.to_string());
        }
        let state = if checked.failures.is_empty() { State::Conformant } else { State::Failed };
        let mut reasons: Vec<String> = checked.failures.iter().take(FAILURES_MAX).cloned().collect();
        if checked.failures.len() > FAILURES_MAX {
            reasons.push(format!("{} more", checked.failures.len() - FAILURES_MAX));
        }
        let hash = (checked.left_out == 0).then(|| checked.hash.to_string());
        Self { device, name, state, vectors: checked.compared, vectors_left_out: checked.left_out, hash, reasons }
    }

    pub(super) fn text(&self) -> String {
        let Self { device, name, state, vectors, vectors_left_out, hash, reasons } = self;
        let name = if name.is_empty() { String::new() } else { format!("{name}: ") };
        match (state, hash) {
            (State::Conformant, Some(hash)) => {
                format!("{device:<COLUMN$}{name}conformant, {vectors} vectors, {hash}\n")
            }
            (State::Conformant, None) => format!(
                "{device:<COLUMN$}{name}conformant in the first {vectors} of {} vectors; its kernels take long to \
                 compile: `--soak 5m` runs them all\n",
                vectors + vectors_left_out
            ),
            (State::Failed, _) => format!("{device:<COLUMN$}{name}FAILS: {}\n", reasons.join("; ")),
            (State::Unusable | State::Unfinished | State::Absent, _) => {
                format!("{device:<COLUMN$}{name}{}\n", reasons.join("; "))
            }
        }
    }

    pub(super) fn is_unfinished(&self) -> bool {
        self.state == State::Unfinished
    }
}

/// A device that was opened, with its name.
pub(super) type Opened = (String, Subject);

/// Checks everything that computes; `told` hears of each as it is done. Devices are opened to be
/// used again, unless they fail, or closed and given up if they take too long.
pub(super) fn check(
    used_again: bool,
    mut told: impl FnMut(&DeviceCheck) -> Result<(), Failure>,
) -> Result<(Vec<DeviceCheck>, Vec<Opened>), Failure> {
    let (mut checks, mut subjects) = (Vec::new(), Vec::new());
    let mut add = |check: DeviceCheck, subject: Option<Subject>| -> Result<(), Failure> {
        told(&check)?;
        let sound = subject.filter(|_| check.state != State::Failed);
        subjects.extend(sound.map(|subject| (check.device.clone(), subject)));
        checks.push(check);
        Ok(())
    };
    let threads = cores().unwrap_or(1).min(THREADS_MAX);
    for path in Path::available() {
        let subject = Subject::cpu(open_cpu(threads, path)?);
        let checked = quietly(|| subject.check(Sample::QUICK, &mut || true));
        add(DeviceCheck::of(format!("cpu/{path}"), String::new(), &checked), Some(subject))?;
    }
    let clock = Clock::start();
    for api in Api::ALL {
        let listings = match gpu::list(api) {
            Ok(listings) if !listings.is_empty() => listings,
            other => {
                let why = other.err().unwrap_or_else(|| "no device".to_string());
                // Drivers that are there and break are worth a finding.
                let state = if gpu::driver_failure(api).is_some() { State::Unusable } else { State::Absent };
                add(DeviceCheck::without_vectors(api.name().to_string(), String::new(), state, why), None)?;
                continue;
            }
        };
        for (index, listing) in listings.into_iter().enumerate() {
            let seconds = (ALL_DEVICES_SECONDS - clock.seconds()).max(DEVICE_SECONDS_MIN);
            if used_again {
                let (check, subject) = check_card(Selector { api, index }, &listing, seconds);
                add(check, subject)?;
            } else {
                add(check_in_time(Selector { api, index }, listing, seconds), None)?;
            }
        }
    }
    Ok((checks, subjects))
}

/// A driver may compile one kernel for longer than all vectors should take: then the thread is left
/// behind.
fn check_in_time(selector: Selector, listing: gpu::Listing, seconds: f64) -> DeviceCheck {
    let (device, name) = (listing.selector.clone(), listing.name.clone());
    let checked = within(seconds + KERNEL_SECONDS_MORE, move || check_card(selector, &listing, seconds).0);
    checked.unwrap_or_else(|| {
        let why = "not checked: its driver compiles a kernel for longer than a check should take; \
                   `--soak 5m` waits for it";
        DeviceCheck::without_vectors(device, name, State::Unfinished, why.to_string())
    })
}

/// The result of `work`, or None if it takes longer.
fn within<T: Send + 'static>(seconds: f64, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (send, receive) = mpsc::channel();
    let builder = std::thread::Builder::new().stack_size(STACK_BYTES);
    builder.spawn(move || drop(send.send(work()))).ok()?;
    receive.recv_timeout(Duration::from_secs_f64(seconds)).ok()
}

fn check_card(selector: Selector, listing: &gpu::Listing, seconds: f64) -> (DeviceCheck, Option<Subject>) {
    let clock = Clock::start();
    let (device, name) = (listing.selector.clone(), listing.name.clone());
    if let Some(objection) = &listing.objection {
        return (DeviceCheck::without_vectors(device, name, State::Unusable, objection.clone()), None);
    }
    match Gpu::open(selector) {
        Ok(gpu) => {
            let subject = Subject::gpu(gpu);
            let checked = quietly(|| subject.check(Sample::QUICK, &mut || clock.seconds() < seconds));
            (DeviceCheck::of(device, name, &checked), Some(subject))
        }
        Err(failure) => (DeviceCheck::without_vectors(device, name, State::Failed, failure.what), None),
    }
}

/// Without messages of panics: a failed device is told of in our own words.
fn quietly<T>(work: impl FnOnce() -> T) -> T {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let done = work();
    std::panic::set_hook(hook);
    done
}

/// The finding about a device that is wrong whenever it is tried.
const DEVICE_FAILS: &str = "device-fails";
const DEVICE_FAILS_REMEDY: &str =
    "do not train on it as it is; after a change of driver, memory or disk run this again";

/// What the checks say: devices that fail, and cards that no runtime shows.
pub(super) fn findings(facts: &Facts, checks: &[DeviceCheck]) -> Vec<Finding> {
    let mut found = Vec::new();
    for check in checks {
        let (level, id, what, remedy) = match check.state {
            State::Failed => (Level::Error, DEVICE_FAILS, "is here, but fails", DEVICE_FAILS_REMEDY),
            State::Unusable => {
                let remedy = "see the reason; run this again after a change";
                (Level::Warning, "device-cannot-be-used", "cannot be used", remedy)
            }
            State::Conformant | State::Unfinished | State::Absent => continue,
        };
        let name = if check.name.is_empty() { String::new() } else { format!(" ({})", check.name) };
        found.push(Finding {
            id: id.to_string(),
            level,
            what: format!("{}{name} {what}", check.device),
            why: check.reasons.join("; "),
            remedy: remedy.to_string(),
            source: Vec::new(),
        });
    }
    let cards =
        [("hip", "AMD", facts.cards.len()), ("cuda", "NVIDIA", facts.nvidia.as_ref().map_or(0, |n| n.cards.len()))];
    for (api, make, count) in cards {
        let shown = checks.iter().filter(|check| check.device.starts_with(&format!("{api}:"))).count();
        if shown >= count {
            continue;
        }
        let of_api = checks.iter().find(|check| check.device == api);
        // A driver that breaks has a finding of its own.
        if of_api.is_some_and(|check| check.state == State::Unusable) {
            continue;
        }
        let why = of_api.and_then(|check| check.reasons.first()).cloned().unwrap_or_else(|| {
            "variables like ROCR_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES hide cards, and so does a missing permission".into()
        });
        found.push(Finding {
            id: "cards-without-runtime".to_string(),
            level: Level::Warning,
            what: format!(
                "the system has {count} {make} {}, {api} shows {shown}",
                if count == 1 { "card" } else { "cards" }
            ),
            why,
            remedy: format!("install the runtime of {make} for this driver, or unset what hides cards"),
            source: Vec::new(),
        });
    }
    found
}

/// Test vectors repeated for a while.
#[derive(Debug, Serialize)]
pub(super) struct Soak {
    seconds: u64,
    rounds: usize,
    vectors: usize,
    wrong: Vec<Wrong>,
}

/// What a device got wrong in a soak.
#[derive(Debug, Serialize)]
struct Wrong {
    device: String,
    round: usize,
    what: String,
    /// Whether the same vectors gave the same wrong results again: those do not come from hardware
    /// that fails now and then.
    every_time: bool,
}

/// Something that can run test vectors again and again.
pub(super) trait Repeats {
    fn repeat(&self, sample: Sample, goes_on: &mut dyn FnMut() -> bool) -> Checked;
}

impl Repeats for Subject {
    fn repeat(&self, sample: Sample, goes_on: &mut dyn FnMut() -> bool) -> Checked {
        self.check(sample, goes_on)
    }
}

impl Soak {
    pub(super) fn run(subjects: &[(String, impl Repeats)], limit: Duration, json: bool) -> Self {
        let clock = Clock::start();
        let mut soak = Self { seconds: limit.as_secs(), rounds: 0, vectors: 0, wrong: Vec::new() };
        if !json {
            tell(&format!("test vectors are repeated for {} s", limit.as_secs()));
        }
        let mut left: Vec<&(String, _)> = subjects.iter().collect();
        while clock.seconds() < limit.as_secs_f64() && !left.is_empty() {
            let sample = Sample { skipped: soak.rounds * Sample::QUICK.per_op % CASES_MAX, ..Sample::QUICK };
            soak.rounds += 1;
            left.retain(|(device, subject)| {
                let goes_on = &mut || clock.seconds() < limit.as_secs_f64();
                soak.round(device, subject, sample, goes_on)
            });
        }
        soak
    }

    /// One device and one sample; false if it is wrong every time and need not be tried again.
    fn round(
        &mut self,
        device: &str,
        subject: &impl Repeats,
        sample: Sample,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> bool {
        let checked = quietly(|| subject.repeat(sample, goes_on));
        self.vectors += checked.compared;
        let Some(first) = checked.failures.first() else { return true };
        let again = quietly(|| subject.repeat(sample, &mut || true));
        let every_time = again.failures.starts_with(&checked.failures);
        if self.wrong.len() < WRONG_MAX {
            let (device, what) = (device.to_string(), first.clone());
            self.wrong.push(Wrong { device, round: self.rounds, what, every_time });
        }
        !every_time
    }

    pub(super) fn text(&self) -> String {
        let Self { seconds, rounds, vectors, wrong } = self;
        format!("{:<COLUMN$}{vectors} vectors in {rounds} rounds, {seconds} s, {} wrong\n", "soak", wrong.len())
    }

    /// The first of every device.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let is_first = |at: &usize| self.wrong[..*at].iter().all(|other| other.device != self.wrong[*at].device);
        (0..self.wrong.len()).filter(is_first).map(|at| self.wrong[at].finding()).collect()
    }
}

impl Wrong {
    fn finding(&self) -> Finding {
        let Self { device, round, what, every_time } = self;
        let (id, said, why, remedy) = if *every_time {
            let why = format!("wrong every time, so by its driver or compiler: {what}");
            (DEVICE_FAILS, format!("{device} is here, but fails in further test vectors"), why, DEVICE_FAILS_REMEDY)
        } else {
            let why = format!("results that change from time to time come from hardware: round {round}: {what}");
            let remedy = "check cooling, power and overclocking, run a memory test, and do not train on it";
            ("suspect-hardware", format!("{device} gave other bits when the test vectors were repeated"), why, remedy)
        };
        Finding {
            id: id.to_string(),
            level: Level::Error,
            what: said,
            why,
            remedy: remedy.to_string(),
            source: Vec::new(),
        }
    }
}

/// BOUND: wrong results that are kept.
const WRONG_MAX: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use isobit_conformance::vectors::check_backend;
    use isobit_kernels::cpu::CpuMemory;
    use isobit_kernels::observe::{Call, Observed, Observer};
    use isobit_kernels::op::Output;
    use isobit_kernels::{Buffer, Cpu};
    use std::cell::Cell;

    fn check(device: &str, state: State) -> DeviceCheck {
        DeviceCheck::without_vectors(device.to_string(), String::new(), state, "why".to_string())
    }

    #[test]
    fn only_a_device_that_fails_is_an_error() {
        let levels = |state| {
            findings(&Facts::default(), &[check("opencl:0", state)]).iter().map(|f| f.level).collect::<Vec<_>>()
        };
        assert_eq!(levels(State::Failed), [Level::Error]);
        assert_eq!(levels(State::Unusable), [Level::Warning]);
        assert_eq!(levels(State::Conformant), []);
        assert_eq!(levels(State::Absent), []);
        assert_eq!(levels(State::Unfinished), []);
    }

    #[test]
    fn a_device_without_a_compared_vector_is_not_conformant() {
        let cpu = Cpu::new(1, Path::best()).expect("an available path");
        let checked = check_backend(&cpu, Sample::QUICK, &mut || false);
        let check = DeviceCheck::of("opencl:0".to_string(), String::new(), &checked);
        assert_eq!((check.state, check.text().contains("conformant")), (State::Unfinished, false), "{}", check.text());
    }

    #[test]
    fn a_driver_that_does_not_answer_is_given_up() {
        assert_eq!(within(60.0, || 7), Some(7));
        assert_eq!(within(0.05, || std::thread::sleep(Duration::from_hours(1))), None);
    }

    #[test]
    fn cards_that_no_runtime_shows_are_told() {
        let facts =
            Facts { cards: vec![isobit_doctor::Card::default(), isobit_doctor::Card::default()], ..Facts::default() };
        let found = findings(&facts, &[check("hip:0", State::Conformant)]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].what, "the system has 2 AMD cards, hip shows 1");
        let both = [check("hip:0", State::Conformant), check("hip:1", State::Conformant)];
        assert!(findings(&facts, &both).is_empty());
        assert_eq!(findings(&facts, &[check("hip", State::Absent)])[0].why, "why");
        let broken = findings(&facts, &[check("hip", State::Unusable)]);
        assert_eq!(broken.iter().map(|finding| finding.id.as_str()).collect::<Vec<_>>(), ["device-cannot-be-used"]);
    }

    /// A processor that gives results of some calls wrong, by a unit in the last place.
    struct Drift {
        calls: Cell<usize>,
        is_wrong: fn(usize) -> bool,
    }

    impl Drift {
        fn new(is_wrong: fn(usize) -> bool) -> Self {
            Self { calls: Cell::new(0), is_wrong }
        }
    }

    impl Observer<Cpu> for Drift {
        fn before(&self, _: &Cpu, _: Call, _: &mut Buffer<u8>) {}

        fn after(&self, _: &Cpu, _: Call, outputs: Vec<Output<'_, CpuMemory>>) {
            for output in outputs {
                if let Output::F32(result) = output {
                    self.calls.set(self.calls.get() + 1);
                    if (self.is_wrong)(self.calls.get())
                        && let Some(value) = result.iter_mut().find(|value| **value != 0.0)
                    {
                        *value = f32::from_bits(value.to_bits() + 1);
                    }
                }
            }
        }
    }

    impl Repeats for Observed<Cpu, Drift> {
        fn repeat(&self, sample: Sample, goes_on: &mut dyn FnMut() -> bool) -> Checked {
            check_backend(self, sample, goes_on)
        }
    }

    #[test]
    fn a_soak_tells_hardware_that_drifts_from_a_device_that_is_always_wrong() {
        let inner = || Cpu::new(1, Path::best()).expect("an available path");
        let subjects = [
            ("cpu/sound", Drift::new(|_| false)),
            ("cpu/drifting", Drift::new(|call| call == 5)),
            ("cpu/broken", Drift::new(|_| true)),
        ];
        let subjects = subjects.map(|(name, observer)| (name.to_string(), Observed { inner: inner(), observer }));
        let soak = Soak::run(&subjects, Duration::from_secs(1), true);
        let wrong: Vec<(&str, bool)> = soak.wrong.iter().map(|one| (one.device.as_str(), one.every_time)).collect();
        assert_eq!(wrong, [("cpu/drifting", false), ("cpu/broken", true)], "each once");
        let found = soak.findings();
        let ids: Vec<&str> = found.iter().map(|finding| finding.id.as_str()).collect();
        assert_eq!(ids, ["suspect-hardware", "device-fails"]);
        assert!(found.iter().all(|finding| finding.level == Level::Error), "{found:?}");
        assert!(found[0].what.starts_with("cpu/drifting ") && found[1].what.starts_with("cpu/broken "), "{found:?}");
    }

    #[test]
    fn a_device_is_told_of_once() {
        let wrong = [("cuda:0", 7), ("cuda:0", 9), ("cuda:1", 9)].map(|(device, round)| Wrong {
            device: device.to_string(),
            round,
            what: "x".to_string(),
            every_time: false,
        });
        let soak = Soak { seconds: 1, rounds: 9, vectors: 90, wrong: wrong.into() };
        let found = soak.findings();
        assert_eq!(found.len(), 2);
        assert!(found[0].why.contains("round 7") && found[1].what.starts_with("cuda:1 "), "{found:?}");
        assert!(Soak { wrong: Vec::new(), ..soak }.findings().is_empty());
    }
}
