//! A changed rounding mode, flushed subnormal numbers: what a preloaded library or a driver may
//! leave behind. Every op is called with the state changed, by a pool whose threads were started in
//! it, and gives the bits that it gives otherwise.
#![cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#![expect(clippy::float_arithmetic, reason = "the arithmetic is what is tested")]

use isobit_conformance::cases::visit_all;
use isobit_conformance::{Case, Visitor, fastest, first_difference};
use isobit_kernels::backend::Bytes;
use isobit_kernels::observe::{Call, Observed, Observer};
use isobit_kernels::op::Output;
use isobit_kernels::{Cpu, Device, Path, float_state};
use std::arch::asm;
use std::hint::black_box;

/// Upwards, and subnormal numbers are zeros.
#[cfg(target_arch = "x86_64")]
fn disturb() {
    let state = 0x1f80_u32 | 0x8040 | 0x4000;
    // SAFETY: reads four bytes; code that computes before the state is put back is what this file
    // looks for.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const state, options(nostack)) };
}

#[cfg(target_arch = "aarch64")]
fn disturb() {
    let state = (1_u64 << 24) | (1 << 22);
    // SAFETY: code that computes before the state is put back is what this file looks for.
    unsafe { asm!("msr fpcr, {}", in(reg) state, options(nostack)) };
}

/// A sum that rounds and a product that is subnormal, as this thread computes them now. Inlined, it
/// could be moved over a change of the state, which the compiler knows nothing of.
#[inline(never)]
fn computed() -> [u32; 2] {
    let sum = black_box(1.0_f32) + black_box(f32::from_bits(0x3300_0000));
    let product = black_box(f32::MIN_POSITIVE) * black_box(0.5_f32);
    [sum.to_bits(), product.to_bits()]
}

/// Changes the state of the calling thread before every op.
struct Disturbing;

impl<D: Device> Observer<D> for Disturbing {
    fn before(&self, _: &D, _: Call, _: &mut Bytes<D::Memory>) {
        disturb();
    }

    fn after(&self, _: &D, _: Call, _: Vec<Output<'_, D::Memory>>) {
        float_state::restore();
    }
}

struct Disturbed {
    plain: Cpu,
    backends: Vec<Observed<Cpu, Disturbing>>,
    compared: usize,
}

impl Visitor for Disturbed {
    fn case<C: Case>(&mut self, case: &C) {
        let want = case.run(&self.plain);
        for backend in &self.backends {
            self.compared += 1;
            let difference = first_difference(&want, &case.run(backend));
            assert!(difference.is_none(), "{} on {}: {difference:?}", case.name(), backend.name());
        }
    }
}

#[test]
fn every_op_puts_the_state_back() {
    let standard = computed();
    disturb();
    let disturbed = computed();
    // Threads inherit the state of the one that starts them.
    let started = [1, 2].map(|threads| Cpu::new(threads, Path::best()));
    assert!(float_state::restore() && !float_state::restore());
    assert_eq!((standard, disturbed), ([0x3f80_0000, 0x0040_0000], [0x3f80_0001, 0]), "the state matters");
    let backends = started.map(|cpu| Observed { inner: cpu.expect("the best path"), observer: Disturbing });
    let mut visitor = Disturbed { plain: fastest(), backends: backends.into(), compared: 0 };
    visit_all(&mut visitor);
    assert!(visitor.compared > 100);
}
