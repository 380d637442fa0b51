//! `cargo xtask sweep --device opencl:0,cuda:0`: every elementary function over all 2³² arguments
//! on devices, compared with the fastest CPU path, which the plain sweep compares with the scalar
//! one.
//!
//! Results are compared by digest, batch by batch; a batch whose digest differs is downloaded and
//! its first difference reported.

use crate::repository::now;
use crate::sweep::{BLOCK, evaluate};
use isobit_kernels::backend::BegunDigests;
use isobit_kernels::gpu::Selector;
use isobit_kernels::op::{AnyBuffer, Elementary};
use isobit_kernels::{Device, DeviceFailure, Gpu, Path};
use isobit_numerics::digest::Digest;
use isobit_numerics::elementary::Function;

/// Arguments sent to a device at once: 64 MiB.
const BATCH: usize = 1 << 24;

/// A device with its buffers and its findings per function.
struct Swept {
    gpu: Gpu,
    arguments: isobit_kernels::gpu::GpuBuffer<f32>,
    results: isobit_kernels::gpu::GpuBuffer<f32>,
    differing: Vec<u64>,
}

pub(crate) fn run(selectors: &[Selector], functions: &[Function], threads: usize) -> Result<(), String> {
    let open = |&selector: &Selector| {
        let gpu = Gpu::open(selector)?;
        let (arguments, results) = (gpu.zeros(0), gpu.zeros(BATCH));
        Ok(Swept { gpu, arguments, results, differing: vec![0; functions.len()] })
    };
    let mut devices: Vec<Swept> = selectors.iter().map(open).collect::<Result<_, DeviceFailure>>().map_err(message)?;
    let names: Vec<_> = devices.iter().map(|device| device.gpu.name()).collect();
    eprintln!("{} against {}, {threads} threads", names.join(", "), Path::best());
    let start = now();
    let mut arguments = vec![0.0; BATCH];
    let mut want = vec![0.0; BATCH];
    for first in (0..=u32::MAX).step_by(BATCH) {
        for (argument, bits) in arguments.iter_mut().zip(first..) {
            *argument = f32::from_bits(bits);
        }
        for device in &mut devices {
            device.arguments = device.gpu.upload(&arguments);
        }
        for (index, &function) in functions.iter().enumerate() {
            for device in &mut devices {
                device.gpu.run(Elementary { y: &mut device.results, x: &device.arguments, function });
            }
            on_cpu(function, first, &mut want, threads);
            let digest = Digest::of_f32(&want);
            for device in &mut devices {
                let begun = BegunDigests::new(&device.gpu, &[AnyBuffer::F32(&device.results)]);
                if begun.finish(&device.gpu).map_err(message)? != [digest] {
                    let got = device.gpu.download(&device.results).map_err(message)?;
                    device.differing[index] += differences(&device.gpu.name(), function, first, &want, &got);
                }
            }
        }
    }
    println!("| function | {} |", names.join(" | "));
    println!("|---|{}", "---|".repeat(names.len()));
    for (index, function) in functions.iter().enumerate() {
        let counts: Vec<_> = devices.iter().map(|device| device.differing[index].to_string()).collect();
        println!("| `{}` | {} |", function.name(), counts.join(" | "));
    }
    println!("\nDiffering results of 2³²; {:.0} s.", start.elapsed().as_secs_f64());
    let failures: u64 = devices.iter().flat_map(|device| &device.differing).sum();
    if failures == 0 { Ok(()) } else { Err(format!("{failures} results differ")) }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn message(failure: DeviceFailure) -> String {
    failure.to_string()
}

/// The function at `first`, `first + 1`, … on the fastest path.
fn on_cpu(function: Function, first: u32, out: &mut [f32], threads: usize) {
    let share = (out.len() / BLOCK).div_ceil(threads) * BLOCK;
    std::thread::scope(|scope| {
        for (part, out) in out.chunks_mut(share).enumerate() {
            scope.spawn(move || {
                let first = first + (part * share) as u32;
                let mut bits = [0; BLOCK];
                for (index, out) in out.chunks_exact_mut(BLOCK).enumerate() {
                    evaluate(Path::best(), function, first + (index * BLOCK) as u32, &mut bits);
                    out.iter_mut().zip(bits).for_each(|(out, bits)| *out = f32::from_bits(bits));
                }
            });
        }
    });
}

/// The number of differing results; reports the first.
fn differences(device: &str, function: Function, first: u32, want: &[f32], got: &[f32]) -> u64 {
    let pairs = (first..).zip(want.iter().zip(got));
    let mut wrong = pairs.filter(|(_, (want, got))| want.to_bits() != got.to_bits()).peekable();
    if let Some((argument, (want, got))) = wrong.peek() {
        let (want, got) = (want.to_bits(), got.to_bits());
        eprintln!("{}({argument:08x}) on {device}: {want:08x} wanted, {got:08x} given", function.name());
    }
    // Equal numbers with different digests mean a wrong digest: that counts too.
    wrong.count().max(1) as u64
}
