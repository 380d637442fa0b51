//! The cases as test vectors for a device: their results are known by the golden digests, so the
//! reference does not run. A sample has a few small cases of every op; its hash is the same on
//! every device that gives the bits.

use crate::cases;
use crate::digests::digest;
use crate::{Case, DirtyWorkspace, Output, SMALL_WORK_MAX, Visitor, work_of};
use isobit_kernels::observe::Observed;
use isobit_kernels::{Backend, Counting, Cpu, Gpu, Path};
use isobit_numerics::digest::Digest;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Digest and name of every case, as the reference gives them.
const GOLDEN: &str = include_str!("../golden/reference.txt");

/// Which cases to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Small cases of every op.
    pub per_op: usize,
    /// Small cases of an op that are passed over before these, to see others in another round.
    pub skipped: usize,
}

impl Sample {
    pub const QUICK: Self = Self { per_op: 3, skipped: 0 };
}

/// What a device made of a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    pub compared: usize,
    /// Cases of the sample that were not run, because the caller had enough.
    pub left_out: usize,
    /// Of the results.
    pub hash: Digest,
    /// What was wrong, the first case first; empty for a device that gives the bits.
    pub failures: Vec<String>,
}

/// A device to check.
pub enum Subject {
    Cpu(Observed<Cpu, DirtyWorkspace>),
    Gpu(Box<Observed<Gpu, DirtyWorkspace>>),
}

impl Subject {
    pub fn cpu(inner: Cpu) -> Self {
        Self::Cpu(Observed { inner, observer: DirtyWorkspace })
    }

    pub fn gpu(inner: Gpu) -> Self {
        Self::Gpu(Box::new(Observed { inner, observer: DirtyWorkspace }))
    }

    /// Runs a sample for as long as `goes_on` says so: a device may have to compile for minutes. A
    /// case that panics counts as wrong, and so do the cases after it: a failed device does nothing
    /// more.
    pub fn check(&self, sample: Sample, goes_on: &mut dyn FnMut() -> bool) -> Checked {
        match self {
            Self::Cpu(cpu) => check(cpu, sample, golden(), goes_on),
            Self::Gpu(gpu) => check(&**gpu, sample, golden(), goes_on),
        }
    }
}

/// The same for any backend: one that a test spoils, say.
pub fn check_backend<B: Backend>(backend: &B, sample: Sample, goes_on: &mut dyn FnMut() -> bool) -> Checked {
    check(backend, sample, golden(), goes_on)
}

fn check<B: Backend>(
    backend: &B,
    sample: Sample,
    golden: BTreeMap<&'static str, &'static str>,
    goes_on: &mut dyn FnMut() -> bool,
) -> Checked {
    let counting = Counting::new(Cpu::new(1, Path::Scalar).expect("a path that every CPU has"));
    let mut run = Run {
        backend,
        sample,
        goes_on,
        counting,
        golden,
        seen: 0,
        compared: 0,
        left_out: 0,
        results: Vec::new(),
        failures: Vec::new(),
    };
    cases::visit_all(&mut run);
    let Run { compared, left_out, results, failures, .. } = run;
    Checked { compared, left_out, hash: Digest::of_bytes(&results), failures }
}

fn golden() -> BTreeMap<&'static str, &'static str> {
    let lines = GOLDEN.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once(' ')).map(|(digest, name)| (name, digest)).collect()
}

struct Run<'a, B> {
    backend: &'a B,
    sample: Sample,
    goes_on: &'a mut dyn FnMut() -> bool,
    counting: Counting<Cpu>,
    golden: BTreeMap<&'static str, &'static str>,
    /// Small cases of the current op so far.
    seen: usize,
    compared: usize,
    left_out: usize,
    results: Vec<u8>,
    failures: Vec<String>,
}

impl<B: Backend> Run<'_, B> {
    fn result(&self, case: &impl Case) -> Result<Vec<Output>, String> {
        self.backend.scratch().clear();
        // A failure of the device arrives as the panic of a failed download.
        catch_unwind(AssertUnwindSafe(|| case.run(self.backend))).map_err(|panic| match panic.downcast::<String>() {
            Ok(message) => *message,
            Err(_) => "it failed".to_string(),
        })
    }
}

impl<B: Backend> Visitor for Run<'_, B> {
    fn op(&mut self, _: &'static str) {
        self.seen = 0;
    }

    fn case<C: Case>(&mut self, case: &C) {
        let Sample { per_op, skipped } = self.sample;
        if self.seen >= per_op + skipped || work_of(&self.counting, case) > SMALL_WORK_MAX {
            return;
        }
        self.seen += 1;
        if self.seen <= skipped {
            return;
        }
        let name = case.name();
        let Some(want) = self.golden.get(name.as_str()) else { return };
        if self.left_out > 0 || !(self.goes_on)() {
            self.left_out += 1;
            return;
        }
        self.compared += 1;
        match self.result(case) {
            Ok(outputs) => {
                let got = digest(&outputs).to_string();
                if got != *want {
                    self.failures.push(format!("{name}: {want} wanted, {got} given"));
                }
                self.results.extend(got.bytes());
            }
            Err(why) => self.failures.push(format!("{name}: {why}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_gives_one_hash_and_a_wrong_digest_is_found() {
        let subject = |path| Subject::cpu(Cpu::new(2, path).expect("an available path"));
        let all: Vec<Checked> =
            Path::available().into_iter().map(|path| subject(path).check(Sample::QUICK, &mut || true)).collect();
        assert!(all.iter().all(|checked| *checked == all[0]), "{all:?}");
        assert!(all[0].failures.is_empty() && all[0].compared > 60, "{all:?}");
        let mut wrong = golden();
        let (name, _) = wrong.iter().find(|(name, _)| name.starts_with("ScaleCase")).expect("a small case");
        let name = *name;
        wrong.insert(name, "00000000000000000000000000000000");
        let Subject::Cpu(cpu) = subject(Path::Scalar) else { panic!("a CPU") };
        let found = check(&cpu, Sample { per_op: 100, skipped: 0 }, wrong, &mut || true).failures;
        assert!(found.len() == 1 && found[0].starts_with(name), "{found:?}");
    }

    #[test]
    fn samples_that_skip_see_other_cases() {
        let cpu = Subject::cpu(Cpu::new(1, Path::best()).expect("an available path"));
        let [first, second] = [0, 3].map(|skipped| cpu.check(Sample { per_op: 3, skipped }, &mut || true));
        assert!(first.failures.is_empty() && second.failures.is_empty());
        assert_ne!(first.hash, second.hash);
        let mut left = 5;
        let cut = cpu.check(Sample::QUICK, &mut || {
            left -= 1;
            left >= 0
        });
        assert_eq!((cut.compared, cut.left_out), (5, first.compared - 5));
        assert!(cut.failures.is_empty() && cut.hash != first.hash);
    }
}
