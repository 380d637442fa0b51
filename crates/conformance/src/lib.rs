//! Every op on every backend against the reference, on bits.
//!
//! A [`Case`] is one op with one set of inputs, written once for any backend. `cases/` holds a file per op that visits its
//! cases; a visitor decides what to run them on. The tests visit with [`CpuPaths`]: every path this machine has, 1, 2 and 7
//! threads, each twice, outputs filled with NaN beforehand.
#![expect(clippy::float_arithmetic, reason = "test data is made of numbers")]

pub mod cases;
pub mod data;
pub mod digests;

use isobit_kernels::{Backend, Cpu, Element, Path, Reference};

/// A named result, as bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    pub name: &'static str,
    pub element: &'static str,
    pub bits: Vec<u64>,
}

impl Output {
    pub fn new<T: Element>(name: &'static str, values: &[T]) -> Self {
        Self { name, element: T::NAME, bits: values.iter().map(|x| x.bits()).collect() }
    }

    pub fn download<B: Backend, T: Element>(backend: &B, name: &'static str, buffer: &B::Buffer<T>) -> Self {
        Self::new(name, &backend.download(buffer))
    }
}

/// One op with its inputs.
pub trait Case {
    /// Op and shape, for messages.
    fn name(&self) -> String;
    fn run<B: Backend>(&self, backend: &B) -> Vec<Output>;
}

/// What is done with each case.
pub trait Visitor {
    fn case<C: Case>(&mut self, case: &C);
}

/// The first difference between two results, or none.
pub fn first_difference(want: &[Output], got: &[Output]) -> Option<String> {
    if want.len() != got.len() {
        return Some(format!("{} outputs wanted, {} given", want.len(), got.len()));
    }
    for (want, got) in want.iter().zip(got) {
        if want.bits.len() != got.bits.len() {
            return Some(format!("{}: {} elements wanted, {} given", want.name, want.bits.len(), got.bits.len()));
        }
        let differing = want.bits.iter().zip(&got.bits).filter(|(a, b)| a != b).count();
        if let Some(index) = want.bits.iter().zip(&got.bits).position(|(a, b)| a != b) {
            let show = |bits: u64| match want.element {
                "f32" => format!("{:e} (0x{bits:08x})", f32::from_bits(bits as u32)),
                _ => format!("{bits} (0x{bits:x})"),
            };
            return Some(format!(
                "{}[{index}]: {} wanted, {} given; {differing} of {} differ",
                want.name,
                show(want.bits[index]),
                show(got.bits[index]),
                want.bits.len()
            ));
        }
    }
    None
}

/// Thread counts that every path is tried with.
pub const THREADS: [usize; 3] = [1, 2, 7];

/// Compares every CPU path with the reference.
pub struct CpuPaths {
    backends: Vec<Cpu>,
    pub compared: usize,
    pub differences: Vec<String>,
}

impl CpuPaths {
    pub fn new() -> Self {
        let backends = Path::available()
            .into_iter()
            .flat_map(|path| THREADS.map(|threads| Cpu::new(threads, path).expect("an available path")))
            .collect();
        Self { backends, compared: 0, differences: Vec::new() }
    }

    /// Paths this machine lacks: each is a skip that is reported, never a pass.
    pub fn skipped() -> Vec<Path> {
        Path::ALL.into_iter().filter(|path| !path.is_available()).collect()
    }

    /// Fails on any difference, and on having compared nothing.
    pub fn finish(self) {
        let skipped: Vec<_> =
            Self::skipped().iter().map(|path| format!("skipped: no {path} on this machine")).collect();
        assert!(self.compared > 0, "no case was compared");
        assert!(self.differences.is_empty(), "{}\n{}", self.differences.join("\n"), skipped.join("\n"));
    }
}

/// Visits the cases of an op with every path of this machine; fails on any difference.
pub fn on_every_path(visit: impl Fn(&mut CpuPaths)) {
    let mut paths = CpuPaths::new();
    visit(&mut paths);
    paths.finish();
}

impl Default for CpuPaths {
    fn default() -> Self {
        Self::new()
    }
}

impl Visitor for CpuPaths {
    fn case<C: Case>(&mut self, case: &C) {
        let want = case.run(&Reference);
        for backend in &self.backends {
            for attempt in ["first", "second"] {
                let got = case.run(backend);
                self.compared += 1;
                if let Some(difference) = first_difference(&want, &got) {
                    self.differences.push(format!(
                        "{} on {}, {attempt} run: {difference}",
                        case.name(),
                        backend.name()
                    ));
                }
            }
        }
    }
}

/// The fastest path of this machine, on two threads: for laws that need no matrix of backends.
pub fn fastest() -> Cpu {
    Cpu::new(2, Path::best()).expect("an available path")
}

/// Fails where two ways to one result differ.
pub fn assert_same(ways: &[Output; 2]) {
    assert_eq!(first_difference(&ways[..1], &ways[1..]), None);
}

/// A buffer whose every element is NaN: an op that overwrites must leave none.
pub fn poisoned<B: Backend>(backend: &B, length: usize) -> B::Buffer<f32> {
    backend.upload(&vec![f32::NAN; length])
}

/// A workspace full of ones: an op may not count on zeros.
pub fn workspace<B: Backend>(backend: &B, bytes: usize) -> B::Buffer<u8> {
    backend.upload(&vec![0xffu8; bytes])
}
