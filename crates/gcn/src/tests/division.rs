//! The compiler's division and square root, step by step, against correctly rounded results.

use super::Bench;
use crate::float::is_nan;
use crate::random::mix;

/// Quotients of lane pairs by the sequence that compilers emit for `v1 / v2`.
const DIVISION: &str = "
    v_div_scale_f32 v3, s[4:5], v2, v2, v1
    v_div_scale_f32 v4, vcc, v1, v2, v1
    v_rcp_f32_e32 v5, v3
    v_fma_f32 v6, -v3, v5, 1.0
    v_fma_f32 v5, v6, v5, v5
    v_mul_f32_e32 v6, v4, v5
    v_fma_f32 v7, -v3, v6, v4
    v_fma_f32 v6, v7, v5, v6
    v_fma_f32 v3, -v3, v6, v4
    v_div_fmas_f32 v3, v3, v5, v6
    v_div_fixup_f32 v0, v3, v2, v1";

/// The square root of `v1` as clang 19 emits it: a root of one unit's error, corrected.
const ROOT: &str = "
    v_mul_f32_e32 v2, 0x4f800000, v1
    s_mov_b32 s0, 0xf800000
    v_cmp_gt_f32_e32 vcc, s0, v1
    v_cndmask_b32_e32 v1, v1, v2, vcc
    v_sqrt_f32_e32 v2, v1
    v_add_u32_e32 v3, -1, v2
    v_fma_f32 v4, -v3, v2, v1
    v_cmp_ge_f32_e64 s[2:3], 0, v4
    v_add_u32_e32 v4, 1, v2
    v_cndmask_b32_e64 v3, v2, v3, s[2:3]
    v_fma_f32 v2, -v4, v2, v1
    v_cmp_lt_f32_e64 s[2:3], 0, v2
    v_cndmask_b32_e64 v2, v3, v4, s[2:3]
    v_mul_f32_e32 v3, 0x37800000, v2
    v_cndmask_b32_e32 v2, v2, v3, vcc
    v_mov_b32_e32 v3, 0x260
    v_cmp_class_f32_e32 vcc, v1, v3
    v_cndmask_b32_e32 v0, v2, v1, vcc";

fn same(got: u32, want: f32) -> bool {
    got == want.to_bits() || is_nan(got) && want.is_nan()
}

/// Random bits with many edge values among them.
fn bits(seed: u64, index: u64) -> u32 {
    const EDGES: [u32; 12] = [
        0,
        1,
        2,
        0x007f_ffff,
        0x0080_0000,
        0x0080_0001,
        0x3f80_0000,
        0x3fff_ffff,
        0x7f00_0000,
        0x7f7f_ffff,
        0x7f80_0000,
        0x7fc0_0000,
    ];
    let random = mix(seed, index);
    if random >> 60 == 0 { EDGES[(random >> 32) as usize % 12] | random as u32 & 0x8000_0000 } else { random as u32 }
}

fn quotients(bench: &mut Bench, pairs: impl Fn(usize) -> (u32, u32)) -> Vec<(u32, u32, u32)> {
    bench.lanes(1, |lane| pairs(lane).0);
    bench.lanes(2, |lane| pairs(lane).1);
    bench.run(DIVISION);
    (0..64).map(|lane| (pairs(lane).0, pairs(lane).1, bench.lane(0, lane))).collect()
}

#[test]
fn known_quotients() {
    let known = [
        (0x3f80_0000, 0x7f00_0000, 0x0040_0000),
        (0x7f7f_ffff, 0x0000_0001, 0x7f80_0000),
        (0x0040_0000, 0x0000_0003, 0x49aa_aaab),
        (0x3f80_0000, 0x7e80_0001, 0x007f_ffff),
        (0x8000_0001, 0x3462_9005, 0x8048_50c9),
        (0x8558_6b6d, 0x448e_814e, 0x8061_320d),
        (0, 0, 0xffc0_0000),
        (0x7f80_0000, 0xff80_0000, 0xffc0_0000),
        (0x3f80_0000, 0x8000_0000, 0xff80_0000),
        (0xff80_0000, 0x3f80_0000, 0xff80_0000),
        (0x3f80_0000, 0xff80_0000, 0x8000_0000),
        (0x0000_0001, 0x7f7f_ffff, 0),
    ];
    for (numerator, denominator, want) in known {
        let (_, _, got) = quotients(&mut Bench::new(0), |_| (numerator, denominator))[0];
        assert_eq!(got, want, "{numerator:08x} / {denominator:08x}: {got:08x}");
    }
}

#[test]
fn scaling_is_as_tabulated() {
    use crate::divide::scale;
    let up = |x: f32| (x * 18446744073709551616.0).to_bits();
    let (one, tiny, huge) = (1f32.to_bits(), 1e-44f32, 2e38f32);
    assert_eq!(scale(tiny.to_bits(), tiny.to_bits(), one), (up(tiny), true), "exponents 96 or more apart");
    assert_eq!(scale(one, tiny.to_bits(), one), (one, true));
    assert_eq!(scale(one, huge.to_bits(), one), (one, true), "both would be denormal");
    assert!(!scale(0x7f00_0000, 0x7f00_0000, 0x7e00_0000).1);
    assert_eq!(scale(0x0080_0000, one, 0x0080_0000), (up(f32::from_bits(0x0080_0000)), true), "a denormal quotient");
    assert_eq!(
        scale(0x0100_0000, 0x0200_0000, 0x0100_0000),
        (up(f32::from_bits(0x0100_0000)), false),
        "a small numerator"
    );
    assert_eq!(scale(one, one, TWO), (one, false));
    assert!(is_nan(scale(0, 0, one).0) && is_nan(scale(0, one, 0).0));
}

const TWO: u32 = 0x4000_0000;

#[test]
fn division_is_exact_with_an_exact_reciprocal() {
    let mut bench = Bench::new(0);
    for batch in 0..40_000 {
        for (a, b, got) in quotients(&mut bench, |lane| {
            let index = 128 * batch + 2 * lane as u64;
            (bits(1, index), bits(1, index + 1))
        }) {
            let want = f32::from_bits(a) / f32::from_bits(b);
            assert!(same(got, want), "{a:08x} / {b:08x}: {got:08x}, not {:08x}", want.to_bits());
        }
    }
}

/// The families of operands where one unit of error in the reciprocal shows: kernels must not use
/// this sequence.
#[test]
fn the_compilers_division_depends_on_the_last_bit_of_the_reciprocal() {
    let wrong = (1..200).any(|seed| {
        let pair = (0x3f80_0000, 0x3fff_ffff);
        let (_, _, got) = quotients(&mut Bench::new(seed), |_| pair)[0];
        got != 0x3f00_0001
    });
    assert!(wrong, "no seed moves the reciprocal of 0x3fffffff");
}

#[test]
fn the_corrected_root_is_exact_with_any_seed() {
    for seed in 0..6 {
        let mut bench = Bench::new(seed);
        for batch in 0..4_000 {
            let x = |lane: usize| bits(2, 64 * batch + lane as u64 + (seed << 32));
            bench.lanes(1, x);
            bench.run(ROOT);
            for lane in 0..64 {
                let (got, want) = (bench.lane(0, lane), f32::from_bits(x(lane)).sqrt());
                assert!(same(got, want), "root of {:08x}, seed {seed}: {got:08x}", x(lane));
            }
        }
    }
}
