//! Float32: rounding, denormals, NaN, and what seeds and MODE change.

use super::{Bench, Row, assert_covered, check, integers, result};
use crate::float::is_nan;
use crate::instruction::Packed;

const NAN: u32 = 0x7fc0_0000;
const SIGNALLING: u32 = 0x7f80_0001;
const INFINITY: u32 = 0x7f80_0000;
const ONE: u32 = 0x3f80_0000;
const TWO: u32 = 0x4000_0000;
const MINUS: u32 = 0x8000_0000;

pub(super) const PLAIN: &[Row] = &[
    ("v_add_f32_e32 v0, v1, v2", &[ONE, 0x3380_0000], ONE),
    ("v_add_f32_e32 v0, v1, v2", &[ONE, 0x3380_0001], 0x3f80_0001),
    ("v_add_f32_e32 v0, v1, v2", &[1, 2], 3),
    ("v_add_f32_e64 v0, |v1|, -v2", &[0xc000_0000, ONE], ONE),
    ("v_sub_f32_e32 v0, v1, v2", &[TWO, ONE], ONE),
    ("v_subrev_f32_e32 v0, v1, v2", &[ONE, TWO], ONE),
    ("v_mul_f32_e32 v0, v1, v2", &[0x0080_0000, 0x3f00_0000], 0x0040_0000),
    ("v_mul_f32_e32 v0, v1, v2", &[0x7f7f_ffff, TWO], INFINITY),
    ("v_max_f32_e32 v0, v1, v2", &[MINUS, 0], 0),
    ("v_max_f32_e32 v0, v1, v2", &[0, MINUS], 0),
    ("v_max_f32_e32 v0, v1, v2", &[NAN, ONE], ONE),
    ("v_max_f32_e32 v0, v1, v2", &[ONE, NAN], ONE),
    ("v_max_f32_e32 v0, v1, v2", &[ONE, SIGNALLING], 0x7fc0_0001),
    ("v_max_f32_e64 v0, -|v1|, -|v1|", &[ONE], 0xbf80_0000),
    ("v_min_f32_e32 v0, v1, v2", &[0, MINUS], MINUS),
    ("v_min_f32_e32 v0, v1, v2", &[NAN, 0xff80_0000], 0xff80_0000),
    ("v_ldexp_f32 v0, v1, v2", &[0x3f80_0001, (-149i32) as u32], 1),
    ("v_ldexp_f32 v0, v1, v2", &[ONE, 200], INFINITY),
    ("v_fma_f32 v0, v1, v2, v3", &[0x3f80_0001, 0x3f80_0001, 0xbf80_0002], 0x2880_0000),
    ("v_fma_f32 v0, v1, v2, v3", &[0x0080_0001, 0x3f00_0000, 3], 0x0040_0004),
    ("v_fma_f32 v0, -v1, v2, |v3|", &[ONE, TWO, 0xc040_0000], ONE),
    // Product and sum rounded one after the other; denormals are lost whatever MODE says.
    ("v_mad_f32 v0, v1, v2, v3", &[0x3f80_0001, 0x3f80_0001, 0xbf80_0002], 0),
    ("v_mad_f32 v0, v1, v2, v3", &[0x0080_0000, 0x3f00_0000, 0], 0),
    ("v_mad_f32 v0, v1, v2, v3", &[5, ONE, 0], 0),
    ("v_madmk_f32 v0, v1, 0x40000000, v2", &[TWO, ONE], 0x40a0_0000),
    ("v_madak_f32 v0, v1, v2, 0x40000000", &[TWO, ONE], 0x4080_0000),
    ("v_med3_f32 v0, v1, v2, v3", &[ONE, 0x4040_0000, TWO], TWO),
    ("v_med3_f32 v0, v1, v2, v3", &[0x4040_0000, ONE, TWO], TWO),
    ("v_med3_f32 v0, v1, v2, v3", &[ONE, NAN, TWO], ONE),
    ("v_trunc_f32_e32 v0, v1", &[0xbfff_ffff], 0xbf80_0000),
    ("v_trunc_f32_e32 v0, v1", &[0xbf00_0000], MINUS),
    ("v_floor_f32_e32 v0, v1", &[0xbf00_0000], 0xbf80_0000),
    ("v_rndne_f32_e32 v0, v1", &[0x4020_0000], TWO),
    ("v_cvt_f32_i32_e32 v0, v1", &[0xfeff_fffd], 0xcb80_0002),
    ("v_cvt_f32_u32_e32 v0, v1", &[0x0100_0003], 0x4b80_0002),
    ("v_cvt_f32_u32_e32 v0, v1", &[u32::MAX], 0x4f80_0000),
    ("v_cvt_i32_f32_e32 v0, v1", &[0xbfff_ffff], u32::MAX),
    ("v_cvt_i32_f32_e32 v0, v1", &[NAN], 0),
    ("v_cvt_i32_f32_e32 v0, v1", &[0x4f00_0000], 0x7fff_ffff),
    ("v_cvt_i32_f32_e32 v0, v1", &[0xff80_0000], 0x8000_0000),
    // From 2^31 on it must not saturate, from 2^32 on it must.
    ("v_cvt_u32_f32_e32 v0, v1", &[0x4f00_0001], 0x8000_0100),
    ("v_cvt_u32_f32_e32 v0, v1", &[0x4f80_0000], u32::MAX),
    ("v_cvt_u32_f32_e32 v0, v1", &[0xbf80_0000], 0),
    ("v_cvt_u32_f32_e32 v0, v1", &[NAN], 0),
];

#[test]
fn plain_operations() {
    check(PLAIN);
    for (a, b) in [(INFINITY, 0xff80_0000), (NAN, ONE)] {
        assert!(is_nan(result("v_add_f32_e32 v0, v1, v2", &[a, b])));
    }
    assert!(is_nan(result("v_mul_f32_e32 v0, v1, v2", &[INFINITY, 0])));
}

#[test]
fn accumulating_forms_round_once_or_twice() {
    let accumulated = |text: &str, sum: u32| {
        let mut bench = Bench::new(0);
        for (register, value) in [(0, sum), (1, 0x3f80_0001), (2, 0x3f80_0001)] {
            bench.fill(register, value);
        }
        bench.run(text);
        bench.lane(0, 0)
    };
    assert_eq!(accumulated("v_fmac_f32_e32 v0, v1, v2", 0xbf80_0002), 0x2880_0000);
    assert_eq!(accumulated("v_mac_f32_e32 v0, v1, v2", 0xbf80_0002), 0);
}

/// Functions that hardware approximates.
pub(super) const APPROXIMATE: [&str; 4] =
    ["v_rcp_f32_e32 v0, v1", "v_rcp_iflag_f32_e32 v0, v1", "v_sqrt_f32_e32 v0, v1", "v_rsq_f32_e32 v0, v1"];

#[test]
fn approximations_at_the_edges() {
    for text in &APPROXIMATE[..2] {
        let reciprocal = |x| result(text, &[x]);
        assert_eq!([0, MINUS, INFINITY, 0xff80_0000].map(reciprocal), [INFINITY, 0xff80_0000, 0, MINUS]);
        assert_eq!([ONE, 0x4040_0000].map(reciprocal), [ONE, 0x3eaa_aaab]);
        assert_eq!([1, 0x8000_0001].map(reciprocal), [INFINITY, 0xff80_0000], "a denormal is taken as zero");
        assert_eq!(reciprocal(0x7f00_0000), 0, "a denormal result is lost");
        assert!(is_nan(reciprocal(NAN)));
    }
    let root = |x| result(APPROXIMATE[2], &[x]);
    assert_eq!([0, MINUS, 5, INFINITY, 0x4080_0000, TWO].map(root), [0, MINUS, 0, INFINITY, TWO, 0x3fb5_04f3]);
    assert!(is_nan(root(0xbf80_0000)));
    let reciprocal_root = |x| result(APPROXIMATE[3], &[x]);
    assert_eq!([0x4080_0000, 0, INFINITY].map(reciprocal_root), [0x3f00_0000, INFINITY, 0]);
}

#[test]
fn seeds_move_approximations_by_one_unit_at_most() {
    for text in APPROXIMATE {
        let mut moved = [0; 3];
        for seed in 1..=5 {
            let (mut exact, mut bench) = (Bench::new(0), Bench::new(seed));
            for bench in [&mut exact, &mut bench] {
                bench.lanes(1, |lane| 0x3f80_0000 + 77_777 * lane as u32);
                bench.run(text);
            }
            for lane in 0..64 {
                let difference = bench.lane(0, lane) as i32 - exact.lane(0, lane) as i32;
                assert!(difference.abs() <= 1, "{text}, seed {seed}: {difference}");
                moved[(difference + 1) as usize] += 1;
            }
        }
        assert!(moved.iter().all(|count| *count > 50), "{text}: {moved:?}");
    }
}

#[test]
fn seeds_choose_the_bits_of_a_nan_and_nothing_else() {
    let run = |seed| {
        let mut bench = Bench::new(seed);
        bench.lanes(1, |lane| if lane % 2 == 0 { INFINITY } else { ONE });
        bench.fill(2, 0xff80_0000);
        bench.run("v_add_f32_e32 v0, v1, v2");
        (0..64).map(|lane| bench.lane(0, lane)).collect::<Vec<_>>()
    };
    let (first, second) = (run(1), run(2));
    assert_ne!(first, second);
    for (lane, bits) in first.iter().chain(&second).enumerate() {
        if lane % 2 == 0 {
            assert!(is_nan(*bits) && bits & 0x0040_0000 != 0, "{bits:08x}");
        } else {
            assert_eq!(*bits, 0xff80_0000);
        }
    }
}

#[test]
fn mode_decides_about_denormals() {
    // Sum of denormals; half of the smallest normal number.
    let run = |denormals: u8, text: &str, a: u32, b: u32| {
        let mut bench = Bench::new(0);
        bench.wave.mode.denormals = denormals;
        bench.fill(1, a);
        bench.fill(2, b);
        bench.run(text);
        bench.lane(0, 0)
    };
    let sum = |mode| run(mode, "v_add_f32_e32 v0, v1, v2", 1, 2);
    assert_eq!([0, 1, 2, 3].map(sum), [0, 0, 0, 3]);
    let to_normal = |mode| run(mode, "v_add_f32_e32 v0, v1, v2", 0x0060_0000, 0x0060_0000);
    assert_eq!([0, 1, 2, 3].map(to_normal), [0, 0x00c0_0000, 0, 0x00c0_0000], "sources");
    let product = |mode| run(mode, "v_mul_f32_e32 v0, v1, v2", 0x0080_0000, 0x3f00_0000);
    assert_eq!([0, 1, 2, 3].map(product), [0, 0, 0x0040_0000, 0x0040_0000], "results");
    let changed = |mode| {
        let set = format!("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), {mode}\n v_add_f32_e32 v0, v1, v2");
        run(3, &set, 1, 2)
    };
    assert_eq!([0, 3].map(changed), [0, 3]);
}

pub(super) const COMPARISONS: &[(&str, u32, u32, bool)] = &[
    ("v_cmp_lt_f32_e32 vcc, v1, v2", 0xbf80_0000, ONE, true),
    ("v_cmp_lt_f32_e32 vcc, v1, v2", 0, 1, true),
    ("v_cmp_lt_f32_e64 vcc, |v1|, v2", 0xc000_0000, ONE, false),
    ("v_cmp_eq_f32_e32 vcc, v1, v2", MINUS, 0, true),
    ("v_cmp_eq_f32_e32 vcc, v1, v2", NAN, NAN, false),
    ("v_cmp_le_f32_e32 vcc, v1, v2", ONE, ONE, true),
    ("v_cmp_le_f32_e32 vcc, v1, v2", ONE, NAN, false),
    ("v_cmp_gt_f32_e32 vcc, v1, v2", ONE, NAN, false),
    ("v_cmp_gt_f32_e32 vcc, v1, v2", TWO, ONE, true),
    ("v_cmp_ge_f32_e32 vcc, v1, v2", ONE, ONE, true),
    ("v_cmp_lg_f32_e32 vcc, v1, v2", ONE, TWO, true),
    ("v_cmp_lg_f32_e32 vcc, v1, v2", ONE, NAN, false),
    ("v_cmp_o_f32_e32 vcc, v1, v2", ONE, NAN, false),
    ("v_cmp_o_f32_e32 vcc, v1, v2", ONE, TWO, true),
    ("v_cmp_u_f32_e32 vcc, v1, v2", NAN, ONE, true),
    // The negations are true for NaN.
    ("v_cmp_neq_f32_e32 vcc, v1, v2", NAN, NAN, true),
    ("v_cmp_neq_f32_e32 vcc, v1, v2", MINUS, 0, false),
    ("v_cmp_nlt_f32_e32 vcc, v1, v2", ONE, NAN, true),
    ("v_cmp_nlt_f32_e32 vcc, v1, v2", ONE, TWO, false),
    ("v_cmp_nle_f32_e32 vcc, v1, v2", ONE, NAN, true),
    ("v_cmp_nle_f32_e32 vcc, v1, v2", ONE, ONE, false),
    ("v_cmp_ngt_f32_e32 vcc, v1, v2", ONE, NAN, true),
    ("v_cmp_ngt_f32_e32 vcc, v1, v2", TWO, ONE, false),
    ("v_cmp_nge_f32_e32 vcc, v1, v2", ONE, NAN, true),
    ("v_cmp_nge_f32_e32 vcc, v1, v2", ONE, ONE, false),
    ("v_cmp_nlg_f32_e32 vcc, v1, v2", ONE, NAN, true),
    ("v_cmp_nlg_f32_e32 vcc, v1, v2", ONE, TWO, false),
    // Zeros and +infinity; then each class with its own bit.
    ("v_cmp_class_f32_e32 vcc, v1, v2", INFINITY, 0x260, true),
    ("v_cmp_class_f32_e32 vcc, v1, v2", 0xff80_0000, 0x260, false),
    ("v_cmp_class_f32_e32 vcc, v1, v2", SIGNALLING, 1, true),
    ("v_cmp_class_f32_e32 vcc, v1, v2", NAN, 1 << 1, true),
    ("v_cmp_class_f32_e32 vcc, v1, v2", 0xff80_0000, 1 << 2, true),
    ("v_cmp_class_f32_e32 vcc, v1, v2", 0xbf80_0000, 1 << 3, true),
    ("v_cmp_class_f32_e32 vcc, v1, v2", 0x807f_ffff, 1 << 4, true),
    ("v_cmp_class_f32_e32 vcc, v1, v2", MINUS, 1 << 5, true),
    ("v_cmp_class_f32_e32 vcc, v1, v2", 0, 1 << 6, true),
    ("v_cmp_class_f32_e32 vcc, v1, v2", 1, 1 << 7, true),
    ("v_cmp_class_f32_e32 vcc, v1, v2", 0x0080_0000, 1 << 8, true),
    ("v_cmp_class_f32_e32 vcc, v1, v2", INFINITY, 1 << 9, true),
];

#[test]
fn comparisons() {
    integers::compare(COMPARISONS);
}

#[test]
fn packed_floats_and_literals() {
    let mut bench = Bench::new(0);
    let values = [(2, 2.0f32), (3, 3.0), (4, 10.0), (5, 20.0), (6, 0.5), (7, 0.25)];
    for (register, value) in values {
        bench.fill(register, value.to_bits());
    }
    // The move is among the integers.
    let mut tested = vec!["v_pk_mov_b32"];
    let mut pair = |text: &'static str| {
        tested.push(text);
        bench.run(text);
        [bench.lane(0, 5), bench.lane(1, 5)].map(f32::from_bits)
    };
    assert_eq!(pair("v_pk_add_f32 v[0:1], v[2:3], v[4:5]"), [12.0, 23.0]);
    assert_eq!(pair("v_pk_mul_f32 v[0:1], v[2:3], v[4:5]"), [20.0, 60.0]);
    // The high result takes the low half of the second source.
    assert_eq!(pair("v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel_hi:[1,0]"), [20.0, 30.0]);
    assert_eq!(pair("v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel:[1,0] neg_lo:[1,0] neg_hi:[0,1]"), [-30.0, -60.0]);
    assert_eq!(pair("v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]"), [20.5, 60.25]);
    assert_eq!(pair("v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7] op_sel_hi:[1,1,0] neg_lo:[0,0,1]"), [19.5, 60.5]);
    assert_eq!(pair("v_pk_mul_f32 v[0:1], v[2:3], 4.0"), [8.0, 12.0]);
    assert_covered(Packed::MNEMONICS, &tested);
    // Once rounded: (1 + 2^-12)^2 - 1 keeps its last bit.
    let square = 1.0f32 + f32::EPSILON * 2048.0;
    bench.fill(2, square.to_bits());
    bench.run("v_fmaak_f32 v0, v2, v2, 0xbf800000\n v_fmamk_f32 v1, v2, 0x40000000, v6");
    let want = [f32::EPSILON * 4096.5, 2.5 + f32::EPSILON * 4096.0];
    assert_eq!([bench.lane(0, 5), bench.lane(1, 5)].map(f32::from_bits), want);
}
