//! `cargo xtask sweep`: every elementary function over all 2³² arguments. Every path of this
//! machine must produce the same bits as the scalar one, and the error against float64 must stay
//! within the stated bound.
//!
//! Takes about a minute per function on two cores, several for the float64 sine of large arguments.
//! `--scalar-stride 8` runs the scalar path on every eighth block (chosen by a hash),
//! `--error-stride 4` measures every fourth argument. The vector paths are always compared with
//! each other on all arguments.

use crate::arguments::Arguments;
use crate::repository::now;
use crate::sweep_device;
use isobit_kernels::Path;
use isobit_kernels::gpu::Selector;
use isobit_numerics::elementary::{Function, error_ulp};
use isobit_numerics::lanes::{LANES, Lanes};
use isobit_numerics::philox::mix64;
use isobit_numerics::{Fma, HardFma, SoftFma};
use std::sync::atomic::{AtomicU64, Ordering};

/// Arguments that a path computes per call.
pub(crate) const BLOCK: usize = 4096;
/// Blocks that a thread takes at a time.
const STRETCH: u64 = 256;
const BLOCKS: u64 = (1 << 32) / BLOCK as u64;

/// The findings of a thread, later merged over all threads.
#[derive(Clone, Default)]
struct Finding {
    differing: u64,
    /// Argument, and two paths with their results.
    first_difference: Option<(u32, Path, u32, Path, u32)>,
    /// Arguments computed by the scalar path.
    scalar: u64,
    worst_ulp: f32,
    worst_bits: u32,
    measured: u64,
}

impl Finding {
    fn join(mut self, other: &Self) -> Self {
        self.differing += other.differing;
        self.measured += other.measured;
        self.scalar += other.scalar;
        let earlier = |finding: &Self| finding.first_difference.map_or(u64::MAX, |(bits, ..)| u64::from(bits));
        if earlier(other) < earlier(&self) {
            self.first_difference = other.first_difference;
        }
        // The smallest argument with the largest error, independent of thread scheduling.
        let tie = other.worst_ulp == self.worst_ulp && other.worst_bits < self.worst_bits;
        if other.worst_ulp > self.worst_ulp || tie {
            (self.worst_ulp, self.worst_bits) = (other.worst_ulp, other.worst_bits);
        }
        self
    }
}

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let threads = arguments.number("--threads", 2)?.max(1);
    let error_stride = arguments.number("--error-stride", 1)?.max(1);
    let scalar_stride = arguments.number("--scalar-stride", 1)?.max(1);
    let name = arguments.option("--function")?;
    let only: Option<Path> = arguments.parsed("--path")?;
    let devices = arguments.option("--device")?;
    arguments.finish()?;
    let functions: Vec<Function> = Function::ALL
        .into_iter()
        .filter(|function| name.as_deref().is_none_or(|name| name == function.name()))
        .collect();
    if functions.is_empty() {
        let names = Function::ALL.map(Function::name).join(", ");
        return Err(format!("unknown function `{}`: {names}", name.unwrap_or_default()));
    }
    if let Some(devices) = devices {
        let selectors: Vec<Selector> = devices.split(',').map(str::parse).collect::<Result<_, _>>()?;
        return sweep_device::run(&selectors, &functions, threads);
    }
    let paths = paths(only)?;
    let names: Vec<&str> = paths.iter().map(|path| path.name()).collect();
    eprintln!("paths: scalar, {}; {threads} threads", names.join(", "));
    for path in [Path::Avx2, Path::Avx512] {
        if !path.is_available() {
            eprintln!("skipped: no {path} on this machine");
        }
    }
    println!("| function | differing | on the scalar path | measured | error, ulp | at | stated | seconds |");
    println!("|---|---|---|---|---|---|---|---|");
    let mut failures = 0;
    for function in functions {
        let start = now();
        let found = sweep(function, &paths, threads, scalar_stride, error_stride);
        let seconds = start.elapsed().as_secs_f64();
        let bound = function.bound_ulp();
        println!(
            "| `{}` | {} | {} | {} | {:.3} | `{:08x}` | {bound} | {seconds:.0} |",
            function.name(),
            found.differing,
            found.scalar,
            found.measured,
            found.worst_ulp,
            found.worst_bits,
        );
        if let Some((argument, first, want, path, got)) = found.first_difference {
            eprintln!("{}({argument:08x}): {first} {want:08x}, {path} {got:08x}", function.name());
        }
        failures += usize::from(found.differing > 0 || found.worst_ulp > bound);
    }
    if failures == 0 { Ok(()) } else { Err(format!("{failures} functions differ between paths or miss their bound")) }
}

/// The vector paths to compare with the scalar one.
fn paths(only: Option<Path>) -> Result<Vec<Path>, String> {
    match only {
        None => Ok([Path::Avx2, Path::Avx512].into_iter().filter(|path| path.is_available()).collect()),
        Some(path) if path.is_available() => Ok(vec![path]),
        Some(path) => Err(format!("this machine has no {path}")),
    }
}

fn sweep(function: Function, paths: &[Path], threads: usize, scalar_stride: usize, error_stride: usize) -> Finding {
    let next = AtomicU64::new(0);
    let worker = || {
        let mut finding = Finding { worst_bits: u32::MAX, ..Finding::default() };
        loop {
            let first = next.fetch_add(STRETCH, Ordering::Relaxed);
            if first >= BLOCKS {
                return finding;
            }
            for block in first..(first + STRETCH).min(BLOCKS) {
                let scalar = paths.len() < 2 || mix64(block).is_multiple_of(scalar_stride as u64);
                check(&mut finding, function, paths, block, scalar, error_stride);
            }
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let found = workers.into_iter().map(|worker| worker.join().expect("a worker of the sweep"));
        found.fold(Finding { worst_bits: u32::MAX, ..Finding::default() }, |all, one| all.join(&one))
    })
}

/// Checks one block. Without the scalar path, the first vector path is the reference for the
/// others.
fn check(finding: &mut Finding, function: Function, paths: &[Path], block: u64, scalar: bool, error_stride: usize) {
    let first_argument = (block * BLOCK as u64) as u32;
    let (first, others) = if scalar { (Path::Scalar, paths) } else { (paths[0], &paths[1..]) };
    let mut want = [0; BLOCK];
    evaluate(first, function, first_argument, &mut want);
    finding.scalar += if scalar { BLOCK as u64 } else { 0 };
    for &path in others {
        let mut got = [0; BLOCK];
        evaluate(path, function, first_argument, &mut got);
        if want != got {
            for (index, (&want, &got)) in want.iter().zip(&got).enumerate().filter(|(_, (want, got))| want != got) {
                finding.differing += 1;
                finding.first_difference.get_or_insert((first_argument + index as u32, first, want, path, got));
            }
        }
    }
    for index in ((block as usize % error_stride)..BLOCK).step_by(error_stride) {
        let argument = first_argument + index as u32;
        let error = error_ulp(function, f32::from_bits(argument), f32::from_bits(want[index]));
        finding.measured += 1;
        if error > finding.worst_ulp {
            (finding.worst_ulp, finding.worst_bits) = (error, argument);
        }
    }
}

/// The bits of the function at `first`, `first + 1`, … on one path.
pub(crate) fn evaluate(path: Path, function: Function, first: u32, out: &mut [u32; BLOCK]) {
    #[inline(always)]
    fn body<F: Fma>(function: Function, first: u32, out: &mut [u32; BLOCK]) {
        for (block, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let mut x: Lanes = [0.0; LANES];
            for lane in 0..LANES {
                x[lane] = f32::from_bits(first + (block * LANES + lane) as u32);
            }
            *out = function.apply_lanes::<F>(&x).map(f32::to_bits);
        }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2")]
    fn avx2(function: Function, first: u32, out: &mut [u32; BLOCK]) {
        body::<HardFma>(function, first, out);
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vnni,avx2,fma,f16c,bmi1,bmi2")]
    fn avx512(function: Function, first: u32, out: &mut [u32; BLOCK]) {
        body::<HardFma>(function, first, out);
    }
    assert!(path.is_available(), "paths are checked before they are swept");
    match path {
        Path::Scalar => body::<SoftFma>(function, first, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: availability of the features was asserted above.
        Path::Avx2 => unsafe { avx2(function, first, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: both paths have AVX-512, and that the path is available was asserted above.
        Path::Avx512 | Path::Amx => unsafe { avx512(function, first, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("only the scalar path exists on this architecture"),
    }
}
