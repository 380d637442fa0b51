//! Tries what a disk may hold after a power cut at every moment of a run: each state is resumed
//! from, and must end as the undisturbed run did. And: the n-th change fails, for every n.

use super::disk::{Cut, Disk, Tree};
use super::scene::{Scene, saved};
use super::trace::{Failing, Op, Recorder};
use crate::torture::random::Random;
use isobit_training::checkpoint::Start;
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::rc::Rc;

/// What was tried, and what was wrong.
#[derive(Debug, Default)]
pub(crate) struct Tried {
    /// Moments: before every change, and after the last.
    pub(crate) moments: usize,
    pub(crate) states: usize,
    pub(crate) findings: Vec<String>,
}

impl Tried {
    fn add(&mut self, what: Option<String>, place: impl FnOnce() -> String) {
        self.findings.extend(what.map(|what| format!("{}: {what}", place())));
    }
}

/// How much is tried.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    pub(crate) seed: u64,
    /// States per moment, besides the fixed ones.
    pub(crate) random: u64,
    /// Only every so many moments.
    pub(crate) every: usize,
    /// Findings after which it ends.
    pub(crate) enough: usize,
}

/// The changes of the whole story. The trace is checked: made on the simulated disk, they leave
/// what the run left, so nothing was changed past it.
pub(crate) fn recorded(scene: &Scene) -> Result<Vec<Op>, String> {
    scene.put(&Tree::new())?;
    let recorder = scene.recorder();
    scene.story(&recorder).map_err(|error| format!("the run that is recorded: {error}"))?;
    let ops = recorder.ops();
    let mut disk = Disk::empty();
    for op in &ops {
        disk.apply(op);
    }
    if disk.after(Cut::Everything) == scene.left()? {
        Ok(ops)
    } else {
        Err("the run changed something that was not recorded".to_string())
    }
}

/// Cuts the power at every moment of a trace.
pub(crate) fn cuts(scene: &Scene, ops: &[Op], effort: &Effort) -> Result<Tried, String> {
    let (mut disk, mut tried, mut seen) = (Disk::empty(), Tried::default(), BTreeSet::new());
    for moment in 0..=ops.len() {
        if moment % effort.every == 0 || moment == ops.len() {
            tried.moments += 1;
            let saved = saved(&ops[..moment]);
            let random = (0..effort.random).map(|number| Cut::Random(effort.seed ^ (moment as u64) << 20 ^ number));
            for cut in Cut::FIXED.into_iter().chain(random) {
                let state = disk.after(cut);
                if !seen.insert(digest(&state, saved)) {
                    continue;
                }
                tried.states += 1;
                tried.add(scene.check(&state, saved)?, || place(ops, moment, cut));
                if tried.findings.len() >= effort.enough {
                    return Ok(tried);
                }
            }
        }
        if let Some(op) = ops.get(moment) {
            disk.apply(op);
        }
    }
    // A run that has said that it is finished must be so after a power cut.
    tried.add(scene.is_finished(&disk.after(Cut::Durable)), || "what is durable at the end".to_string());
    Ok(tried)
}

fn digest(state: &Tree, saved: u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    (state, saved).hash(&mut hasher);
    hasher.finish()
}

fn place(ops: &[Op], moment: usize, cut: Cut) -> String {
    let next = match ops.get(moment) {
        Some(Op::Write(path, bytes)) => format!("before {} bytes of {}", bytes.len(), path.display()),
        Some(op) => format!("before {op:?}"),
        None => "at the end".to_string(),
    };
    format!("moment {moment}, {next}, {cut:?}")
}

/// Power cuts in a row: the run that resumes is cut off too.
pub(crate) fn walks(scene: &Scene, count: usize, effort: &Effort) -> Result<Tried, String> {
    const IN_A_ROW: usize = 4;
    let mut tried = Tried::default();
    for walk in 0..count {
        let mut random = Random::of(effort.seed, "walk", walk);
        let (mut state, mut kept) = (Tree::new(), 0);
        for _ in 0..=random.below(IN_A_ROW) {
            scene.put(&state)?;
            let recorder = scene.recorder();
            let stop = random.once_in(2).then(|| 1 + random.below(5) as u64);
            if let Err(error) = scene.train(Start::Resume, stop, &recorder).ended {
                tried.add(Some(format!("it cannot be resumed: {error}")), || format!("walk {walk}"));
                break;
            }
            let ops = recorder.ops();
            let moment = random.below(ops.len() + 1);
            let mut disk = Disk::of(&state);
            ops[..moment].iter().for_each(|op| disk.apply(op));
            let cut = if random.once_in(3) { *random.pick(&Cut::FIXED) } else { Cut::Random(random.next()) };
            (state, kept) = (disk.after(cut), saved(&ops[..moment]).max(kept));
            tried.moments += 1;
        }
        tried.states += 1;
        tried.add(scene.check(&state, kept)?, || format!("walk {walk}"));
    }
    Ok(tried)
}

/// Lets changes fail one by one: with an I/O error, with a full disk, and with a disk that stays
/// full. The run must say so, and resume once the disk works.
pub(crate) fn failures(scene: &Scene, effort: &Effort) -> Result<Tried, String> {
    let mut tried = Tried::default();
    for change in (0..).step_by(effort.every) {
        let mut reached = false;
        tried.moments += 1;
        for (kind, lasts) in
            [(io::ErrorKind::Other, false), (io::ErrorKind::StorageFull, false), (io::ErrorKind::StorageFull, true)]
        {
            scene.put(&Tree::new())?;
            let recorder = Rc::new(Recorder::new(scene.root(), Some(Failing { change, kind, lasts })));
            let ended = scene.story(&recorder);
            reached |= recorder.changes() > change;
            let place = || format!("change {change} fails with {kind:?}");
            if let Err(error) = &ended
                && error.exit_code() != 7
            {
                tried.add(Some(format!("exit code {}: {error}", error.exit_code())), place);
            }
            tried.states += 1;
            tried.add(scene.check_as_it_is(saved(&recorder.ops()), &scene.recorder())?, place);
        }
        if !reached || tried.findings.len() >= effort.enough {
            break;
        }
    }
    Ok(tried)
}
