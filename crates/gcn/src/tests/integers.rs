//! Vector integer and bit operations.

use super::{Bench, Row, assert_covered, check};
use crate::instruction::{Binary, Carry, Compare, EXEC, LANES, Ternary, Unary, WideCompare, WideShift};

const PLAIN: &[Row] = &[
    ("v_mov_b32_e32 v0, v1", &[0x8000_0001], 0x8000_0001),
    ("v_mov_b32_e32 v0, -2.0", &[], 0xc000_0000),
    ("v_not_b32_e32 v0, v1", &[0x0f0f_0000], 0xf0f0_ffff),
    ("v_bfrev_b32_e32 v0, 1", &[], 0x8000_0000),
    ("v_ffbh_u32_e32 v0, v1", &[0x0001_0000], 15),
    ("v_ffbh_u32_e32 v0, v1", &[0], u32::MAX),
    ("v_accvgpr_write_b32 a4, v1\n v_accvgpr_read_b32 v0, a4", &[9], 9),
    ("v_accvgpr_read_b32 v0, v1", &[9], 9),
    ("v_and_b32_e32 v0, -2.0, v1", &[0x8fff_ffff], 0x8000_0000),
    ("v_or_b32_e32 v0, v1, v2", &[0xf0, 0x0f], 0xff),
    ("v_xor_b32_e32 v0, v1, v2", &[0xff, 0x0f], 0xf0),
    // The second source is shifted by the low five bits of the first.
    ("v_lshlrev_b32_e32 v0, v1, v2", &[33, 3], 6),
    ("v_lshrrev_b32_e32 v0, v1, v2", &[4, 0x8000_0000], 0x0800_0000),
    ("v_ashrrev_i32_e32 v0, v1, v2", &[36, 0x8000_0000], 0xf800_0000),
    ("v_add_u32_e32 v0, v1, v2", &[u32::MAX, 2], 1),
    ("v_sub_u32_e32 v0, v1, v2", &[1, 2], u32::MAX),
    ("v_subrev_u32_e32 v0, v1, v2", &[1, 3], 2),
    ("v_sub_u32_e64 v0, v1, v2 clamp", &[1, 2], 0),
    ("v_sub_u32_e64 v0, v1, v2 clamp", &[5, 2], 3),
    ("v_mul_lo_u32 v0, v1, v2", &[0x1_0001, 0x1_0001], 0x2_0001),
    ("v_mul_hi_u32 v0, v1, v2", &[u32::MAX, u32::MAX], 0xffff_fffe),
    ("v_mul_hi_i32 v0, v1, v2", &[u32::MAX, 2], u32::MAX),
    ("v_mul_u32_u24_e32 v0, v1, v2", &[0xff00_0003, 0x0100_0005], 15),
    ("v_mul_u32_u24_e32 v0, v1, v2", &[0x00ff_ffff, 0x00ff_ffff], 0xfe00_0001),
    ("v_mul_i32_i24_e32 v0, v1, v2", &[0x00ff_ffff, 5], (-5i32) as u32),
    ("v_mul_hi_u32_u24_e32 v0, v1, v2", &[0x00ff_ffff, 0x00ff_ffff], 0xffff),
    ("v_min_u32_e32 v0, v1, v2", &[u32::MAX, 1], 1),
    ("v_max_u32_e32 v0, v1, v2", &[u32::MAX, 1], u32::MAX),
    ("v_min_i32_e32 v0, v1, v2", &[u32::MAX, 1], u32::MAX),
    ("v_max_i32_e32 v0, v1, v2", &[u32::MAX, 1], 1),
    ("v_and_or_b32 v0, v1, v2, v3", &[0xff, 0xf0, 0x100], 0x1f0),
    ("v_or3_b32 v0, v1, v2, v3", &[1, 2, 4], 7),
    ("v_bfi_b32 v0, v1, v2, v3", &[0xffff_0000, 0x1234_5678, 0x9abc_def0], 0x1234_def0),
    ("v_bfe_u32 v0, v1, v2, v3", &[0xabcd_ef12, 8, 8], 0xef),
    ("v_bfe_u32 v0, v1, v2, v3", &[u32::MAX, 40, 32], 0),
    ("v_bfe_i32 v0, v1, v2, v3", &[0xabcd_ef12, 8, 8], 0xffff_ffef),
    ("v_bfe_i32 v0, v1, v2, v3", &[u32::MAX, 0, 0], 0),
    ("v_alignbit_b32 v0, v1, v2, v3", &[0x1234_5678, 0x9abc_def0, 40], 0x789a_bcde),
    ("v_alignbyte_b32 v0, v1, v2, v3", &[0x1234_5678, 0x9abc_def0, 5], 0x789a_bcde),
    // Bytes 0 to 3 are those of the second source.
    ("v_perm_b32 v0, v1, v2, v3", &[0x7766_5544, 0x3322_1100, 0x0700_0403], 0x7700_4433),
    ("v_perm_b32 v0, v1, v2, v3", &[0x8000_7f00, 0x8000_7f00, 0x0b0a_0908], 0xff00_ff00),
    ("v_perm_b32 v0, v1, v2, v3", &[0, 0, 0xff0d_0c0c], 0xffff_0000),
    ("v_lshl_add_u32 v0, v1, v2, v3", &[3, 34, 1], 13),
    ("v_add_lshl_u32 v0, v1, v2, v3", &[3, 4, 33], 14),
    ("v_lshl_or_b32 v0, v1, v2, v3", &[3, 4, 1], 0x31),
    ("v_add3_u32 v0, v1, v2, v3", &[u32::MAX, 1, 5], 5),
    ("v_xad_u32 v0, v1, v2, v3", &[6, 3, 10], 15),
    ("v_mad_u32_u24 v0, v1, v2, v3", &[0xff00_0003, 5, u32::MAX], 14),
    ("v_mad_i32_i24 v0, v1, v2, v3", &[0x00ff_ffff, 5, 7], 2),
    ("v_max3_u32 v0, v1, v2, v3", &[1, 9, 5], 9),
    ("v_min3_u32 v0, v1, v2, v3", &[7, 9, 5], 5),
    ("v_med3_u32 v0, v1, v2, v3", &[1, 9, 5], 5),
    ("v_med3_u32 v0, v1, v2, v3", &[9, 9, 5], 9),
    // -128 * -128 * 4, and a sum that wraps.
    ("v_dot4_i32_i8 v0, v1, v2, v3", &[0x8080_8080, 0x8080_8080, 1], 65537),
    ("v_dot4_i32_i8 v0, v1, v2, v3", &[0x0380_80ff, 0x8001_7f02, 0], (-0x4182i32) as u32),
    ("v_dot4_i32_i8 v0, v1, v2, v3", &[1, 1, 0x7fff_ffff], 0x8000_0000),
    (
        "v_and_b32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD",
        &[0xabcd_1234, 0xff0f],
        0xab0d,
    ),
    (
        "v_lshlrev_b32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_3",
        &[4, 0xab00_0000],
        0xab0,
    ),
];

#[test]
fn plain_operations() {
    check(PLAIN);
}

#[test]
fn the_destination_is_the_accumulator() {
    let mut bench = Bench::new(0);
    for (register, value) in [(0, 10), (1, 0x0102_0304), (2, 0x0101_0101)] {
        bench.fill(register, value);
    }
    bench.run("v_dot4c_i32_i8_e32 v0, v1, v2");
    assert_eq!(bench.lane(0, 63), 20);
}

/// Sources, and whether the comparison holds.
type Test = (&'static str, u32, u32, bool);

const COMPARISONS: &[Test] = &[
    ("v_cmp_eq_u32_e32 vcc, v1, v2", 5, 5, true),
    ("v_cmp_ne_u32_e32 vcc, v1, v2", 5, 5, false),
    ("v_cmp_lt_u32_e32 vcc, v1, v2", 1, u32::MAX, true),
    ("v_cmp_le_u32_e32 vcc, v1, v2", 5, 5, true),
    ("v_cmp_gt_u32_e32 vcc, v1, v2", 5, 5, false),
    ("v_cmp_gt_u32_e32 vcc, v1, v2", u32::MAX, 5, true),
    ("v_cmp_ge_u32_e32 vcc, v1, v2", 5, 5, true),
    ("v_cmp_ge_u32_e32 vcc, v1, v2", 4, 5, false),
    ("v_cmp_eq_i32_e32 vcc, v1, v2", 5, 4, false),
    ("v_cmp_ne_i32_e32 vcc, v1, v2", 5, 4, true),
    ("v_cmp_lt_i32_e32 vcc, v1, v2", u32::MAX, 0, true),
    ("v_cmp_le_i32_e32 vcc, v1, v2", 1, 0, false),
    ("v_cmp_gt_i32_e32 vcc, v1, v2", 0, u32::MAX, true),
    ("v_cmp_ge_i32_e32 vcc, v1, v2", 0x8000_0000, 0, false),
    ("v_cmp_eq_u16_e32 vcc, v1, v2", 0x1_0005, 5, true),
    ("v_cmp_ne_u16_e32 vcc, v1, v2", 0x1_0005, 5, false),
    ("v_cmp_lt_u16_e32 vcc, v1, v2", 0x1_0004, 5, true),
    ("v_cmp_gt_u16_e32 vcc, v1, v2", 0x1_0004, 5, false),
];

pub(super) fn compare(rows: &[Test]) {
    for (text, a, b, want) in rows {
        let mut bench = Bench::new(0);
        bench.fill(1, *a);
        bench.fill(2, *b);
        bench.wave.set_wide(EXEC, 0xff0);
        bench.run(text);
        let mask = if *want { 0xff0 } else { 0 };
        assert_eq!(bench.wave.get_wide(106), Ok(mask), "{text} of {a:08x} and {b:08x}; inactive lanes give 0");
    }
}

#[test]
fn comparisons_write_the_whole_mask() {
    compare(COMPARISONS);
    let tables: Vec<&str> = COMPARISONS.iter().map(|row| row.0).collect();
    let floats: Vec<&str> = super::floats::COMPARISONS.iter().map(|row| row.0).collect();
    assert_covered(Compare::MNEMONICS, &[tables, floats].concat());
}

#[test]
fn every_mnemonic_is_tested() {
    let mut tables: Vec<&str> = PLAIN.iter().map(|row| row.0).collect();
    tables.extend(super::floats::PLAIN.iter().map(|row| row.0));
    tables.extend(super::floats::APPROXIMATE);
    tables.extend(["v_div_fixup_f32"]);
    for group in [Unary::MNEMONICS, Binary::MNEMONICS, Ternary::MNEMONICS] {
        assert_covered(group, &tables);
    }
}

#[test]
fn wide_operations() {
    let wide = |text: &str, a: u64, b: u64| {
        let mut bench = Bench::new(0);
        for (register, value) in [(2, a), (4, b)] {
            bench.fill(register, value as u32);
            bench.fill(register + 1, (value >> 32) as u32);
        }
        bench.run(text);
        bench
    };
    let compared = |text, a, b| wide(text, a, b).wave.get_wide(106) == Ok(u64::MAX);
    let rows: &[(&str, u64, u64, bool)] = &[
        ("v_cmp_eq_u64_e32 vcc, v[2:3], v[4:5]", 1 << 32, 0, false),
        ("v_cmp_ne_u64_e32 vcc, v[2:3], v[4:5]", 1 << 32, 0, true),
        ("v_cmp_lt_u64_e32 vcc, v[2:3], v[4:5]", 5, 1 << 32, true),
        ("v_cmp_le_u64_e32 vcc, v[2:3], v[4:5]", 1 << 32, 1 << 32, true),
        ("v_cmp_gt_u64_e32 vcc, v[2:3], v[4:5]", 1 << 63, 1, true),
        ("v_cmp_ge_u64_e32 vcc, v[2:3], v[4:5]", 0, 1 << 63, false),
        ("v_cmp_lt_i64_e32 vcc, v[2:3], v[4:5]", 1 << 63, 1, true),
        ("v_cmp_gt_i64_e32 vcc, v[2:3], v[4:5]", 1 << 63, 1, false),
    ];
    for (text, a, b, want) in rows {
        assert_eq!(compared(*text, *a, *b), *want, "{text}");
    }
    assert_covered(WideCompare::MNEMONICS, &rows.iter().map(|row| row.0).collect::<Vec<_>>());
    let shifts: &[(&str, u64, u64)] = &[
        ("v_lshlrev_b64 v[0:1], v4, v[2:3]", 0x8000_0001, 0x1_0000_0002),
        ("v_lshrrev_b64 v[0:1], v4, v[2:3]", 1 << 63, 1 << 62),
        ("v_ashrrev_i64 v[0:1], v4, v[2:3]", 1 << 63, 3 << 62),
    ];
    for (text, a, want) in shifts {
        // A count of 65 is one of 1.
        let bench = wide(text, *a, 65);
        assert_eq!((bench.lane(1, 0) as u64) << 32 | bench.lane(0, 0) as u64, *want, "{text}");
    }
    assert_covered(WideShift::MNEMONICS, &shifts.iter().map(|row| row.0).collect::<Vec<_>>());
}

/// The instruction, its sources, and result and carry out for carry in 0 and 1.
type Sum = (&'static str, u32, u32, [(u32, bool); 2]);

#[test]
fn carries() {
    let rows: &[Sum] = &[
        ("v_add_co_u32_e32 v0, vcc, v1, v2", u32::MAX, 1, [(0, true); 2]),
        ("v_sub_co_u32_e32 v0, vcc, v1, v2", 1, 2, [(u32::MAX, true); 2]),
        ("v_subrev_co_u32_e32 v0, vcc, v1, v2", 1, 2, [(1, false); 2]),
        ("v_addc_co_u32_e32 v0, vcc, v1, v2, vcc", u32::MAX, 0, [(u32::MAX, false), (0, true)]),
        ("v_subb_co_u32_e32 v0, vcc, v1, v2, vcc", 2, 2, [(0, false), (u32::MAX, true)]),
        ("v_subbrev_co_u32_e32 v0, vcc, v1, v2, vcc", 2, 3, [(1, false), (0, false)]),
    ];
    for (text, a, b, want) in rows {
        let mut bench = Bench::new(0);
        bench.fill(1, *a);
        bench.fill(2, *b);
        bench.wave.set_wide(106, 0b10);
        bench.run(text);
        let carry = bench.wave.get_wide(106).expect("written");
        let got = [0, 1].map(|lane| (bench.lane(0, lane), carry >> lane & 1 == 1));
        assert_eq!(got, *want, "{text} of {a:x} and {b:x}");
    }
    assert_covered(Carry::MNEMONICS, &rows.iter().map(|row| row.0).collect::<Vec<_>>());
    // Other masks, in and out; constants for both sources.
    let mut bench = Bench::new(0);
    bench.wave.set_wide(4, 0b1);
    bench.run("v_addc_co_u32_e64 v0, s[6:7], -1, 0, s[4:5]");
    assert_eq!((bench.lane(0, 0), bench.lane(0, 1)), (0, u32::MAX));
    assert_eq!(bench.wave.get_wide(6), Ok(1));
}

#[test]
fn wide_multiply_add_may_overwrite_its_sources() {
    let mut bench = Bench::new(0);
    for (register, value) in [(1, u32::MAX), (2, u32::MAX), (3, 0)] {
        bench.fill(register, value);
    }
    bench.run("v_mad_u64_u32 v[2:3], s[0:1], v1, v2, v[2:3]");
    let want = u64::from(u32::MAX) * u64::from(u32::MAX) + u64::from(u32::MAX);
    assert_eq!((bench.lane(3, 9) as u64) << 32 | bench.lane(2, 9) as u64, want);
    assert_eq!(bench.wave.get_wide(0), Ok(0));
    bench.run("v_mad_u64_u32 v[2:3], s[0:1], v1, v1, -1");
    assert_eq!(bench.wave.get_wide(0), Ok(u64::MAX), "a carry out of 64 bits");
}

#[test]
fn selects_take_their_modifiers() {
    let mut bench = Bench::new(0);
    bench.fill(1, 0x4000_0000);
    bench.fill(2, 0x4080_0000);
    bench.wave.set_wide(106, 0b10);
    bench.run("v_cndmask_b32_e32 v0, v1, v2, vcc");
    assert_eq!((bench.lane(0, 0), bench.lane(0, 1)), (0x4000_0000, 0x4080_0000));
    bench.run("v_cndmask_b32_e64 v0, v1, -|v2|, vcc");
    assert_eq!((bench.lane(0, 0), bench.lane(0, 1)), (0x4000_0000, 0xc080_0000));
}

#[test]
fn inactive_lanes_keep_their_value() {
    let mut bench = Bench::new(0);
    bench.lanes(0, |lane| lane as u32);
    bench.fill(1, 100);
    bench.wave.set_wide(EXEC, 0b100);
    bench.run("v_add_u32_e32 v0, v0, v1");
    let got: Vec<u32> = (0..LANES).map(|lane| bench.lane(0, lane)).collect();
    let want: Vec<u32> = (0..64).map(|lane| if lane == 2 { 102 } else { lane }).collect();
    assert_eq!(got, want);
    bench.wave.set_wide(EXEC, 0);
    bench.run("v_add_u32_e32 v0, v0, v1\n v_cmp_eq_u32_e32 vcc, v0, v0");
    assert_eq!((bench.lane(0, 2), bench.wave.get_wide(106)), (102, Ok(0)));
}

#[test]
fn pairs_of_gfx90a_and_gfx942() {
    let mut bench = Bench::new(0);
    for (register, value) in [(2, 7), (3, 9), (4, 0xffff_ffff), (5, 1)] {
        bench.fill(register, value);
    }
    let mut pair = |text: &str| {
        bench.run(text);
        [bench.lane(0, 5), bench.lane(1, 5)]
    };
    // Low from the first source, high from the second; a mask chooses the halves.
    assert_eq!(pair("v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]"), [9, 0xffff_ffff]);
    assert_eq!(pair("v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[0,1]"), [7, 1]);
    assert_eq!(pair("v_pk_mov_b32 v[0:1], -1, 3"), [u32::MAX, 3]);
    assert_eq!(pair("v_mov_b64_e32 v[0:1], v[2:3]"), [7, 9]);
    assert_eq!(pair("v_mov_b64_e32 v[0:1], -2"), [0xffff_fffe, u32::MAX]);
    assert_eq!(pair("v_mov_b64_e32 v[0:1], 5"), [5, 0]);
    // (0x1ffffffff << 1) + 0x900000007, with a carry into the high half.
    assert_eq!(pair("v_lshl_add_u64 v[0:1], v[4:5], 1, v[2:3]"), [5, 13]);
    assert_eq!(pair("v_lshl_add_u64 v[0:1], v[2:3], 0, -1"), [6, 9]);
    assert!(bench.try_run("v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[2,0]").is_err());
}

#[test]
fn matrix_products_with_operands_in_pairs() {
    let mut bench = Bench::new(0);
    for (register, value) in [(0, 0x0101_0101), (1, 0x0202_0202), (2, 0x0101_0101), (3, 0xffff_ffff)] {
        bench.fill(register, value);
    }
    for register in 4..8 {
        bench.fill(register, 100);
    }
    // 32 products: 16 of 1 and 1, 16 of 2 and -1.
    bench.run("v_mfma_i32_16x16x32_i8 v[4:7], v[0:1], v[2:3], v[4:7]");
    assert_eq!([4, 5, 6, 7].map(|register| bench.lane(register, 5) as i32), [84; 4]);
}
