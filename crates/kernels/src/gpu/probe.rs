//! Single operations with known results: a device that gets one wrong is refused before it touches
//! a weight.

use super::device::{Gpu, Groups, arguments};
use super::program::{Program, program};
use super::runtime::failure;
use crate::backend::{Device, DeviceFailure};

static PROBE: Program = program!("probe");

/// Arguments by their index in `probe.cl`.
const ARGUMENTS: [u32; 12] = [
    0x3f80_0001, // 1 + 2⁻²³
    0x3f80_0002, // 1 + 2⁻²², its square rounded
    0x0080_0001, // a little more than the smallest normal number
    0x3f00_0000, // 1/2
    0x0000_0003, // a subnormal
    0x4b00_0000, // 2²³
    0x4049_0fdb, // π
    0x402d_f854, // e
    0x4000_0000, // 2
    0x0100_0003, // 16777219 as an integer
    0x8001_7f02,
    0x0380_80ff,
];

const EXPECTED: [(u32, &str); 12] = [
    (0x2880_0000, "fused multiply-add does not round once"),
    (0x0000_0000, "a product and a sum are contracted"),
    (0x0040_0000, "a subnormal result is lost"),
    (0x0140_0000, "a subnormal argument is lost"),
    (0x3f93_eee0, "division is not correctly rounded"),
    (0x0000_0001, "a subnormal quotient is wrong"),
    (0x3fb5_04f3, "the square root is not correctly rounded"),
    (0x1a9c_c471, "the square root of a subnormal number is wrong"),
    (0x4b80_0002, "an integer is not rounded to nearest even"),
    (0xffff_be77, "the integer dot product is wrong"),
    (0x0000_0006, "a subnormal sum is lost"),
    (0x0040_0004, "a subnormal fused multiply-add is wrong"),
];

pub(super) fn check(gpu: &Gpu) -> Result<(), DeviceFailure> {
    let arguments = gpu.upload(&ARGUMENTS.map(f32::from_bits));
    let mut results = gpu.zeros::<u32>(EXPECTED.len());
    gpu.launch(&PROBE, "probe", Groups::of(1, 1), arguments![&mut results, &arguments]);
    for (got, (want, what)) in gpu.download(&results)?.into_iter().zip(EXPECTED) {
        if got != want {
            return Err(failure(&gpu.name(), format!("it cannot give the bits: {what} ({got:08x}, not {want:08x})")));
        }
    }
    Ok(())
}
