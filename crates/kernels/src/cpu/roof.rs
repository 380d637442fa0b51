//! The roof a slice product is measured against: int8 multiply-adds on registers only, without
//! loads or stores.

use super::{Cpu, Path};

/// Total int8 multiply-adds of `iterations` rounds on all threads, or None if the path has no int8
/// unit. The caller times the call.
pub(super) fn run(cpu: &Cpu, iterations: usize) -> Option<f64> {
    let per_round = match cpu.path {
        #[cfg(target_arch = "x86_64")]
        Path::Amx => {
            cpu.pool.run(|_| {
                let _session = super::amx::Session::start();
                // SAFETY: a session is open; only tile registers are touched.
                unsafe { super::amx::spin(iterations) }
            });
            super::amx::SPIN_MULTIPLY_ADDS
        }
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 => {
            // SAFETY: the path has VNNI.
            cpu.pool.run(|_| unsafe { spin_vnni(iterations) });
            SPIN_VNNI_MULTIPLY_ADDS
        }
        _ => return None,
    };
    Some((per_round * iterations * cpu.threads()) as f64)
}

#[cfg(target_arch = "x86_64")]
const SPIN_VNNI_MULTIPLY_ADDS: usize = 16 * 64;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn spin_vnni(iterations: usize) {
    use std::arch::x86_64::*;
    let mut acc = [_mm512_setzero_si512(); 16];
    let (mut a, b) = (_mm512_set1_epi8(3), _mm512_set1_epi8(5));
    for _ in 0..iterations {
        // Hides from the compiler that rounds are identical.
        a = std::hint::black_box(a);
        for acc in &mut acc {
            *acc = _mm512_dpbusd_epi32(*acc, a, b);
        }
    }
    std::hint::black_box(acc);
}
