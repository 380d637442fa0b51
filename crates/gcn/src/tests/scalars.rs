//! Scalar arithmetic, moves between lanes and scalars, and SCC.

use super::{Bench, assert_covered};
use crate::instruction::{EXEC, ScalarBinary, ScalarCompare, ScalarUnary};

/// The instruction, s[2:3], s[4:5], SCC before; s[0:1] and SCC after. SCC is None where it stays.
type Row = (&'static str, u64, u64, bool, u64, Option<bool>);

const YES: Option<bool> = Some(true);
const NO: Option<bool> = Some(false);
const M: u64 = 0xffff_ffff;

const BINARY: &[Row] = &[
    ("s_add_u32 s0, s2, s4", M, 1, false, 0, YES),
    ("s_addc_u32 s0, s2, s4", M, 0, true, 0, YES),
    ("s_addc_u32 s0, s2, s4", 1, 1, true, 3, NO),
    ("s_sub_u32 s0, s2, s4", 1, 2, false, M, YES),
    ("s_sub_u32 s0, s2, s4", 2, 2, true, 0, NO),
    ("s_subb_u32 s0, s2, s4", 2, 2, true, M, YES),
    ("s_subb_u32 s0, s2, s4", 0, M, true, 0, YES),
    ("s_subb_u32 s0, s2, s4", 3, 1, true, 1, NO),
    ("s_add_i32 s0, s2, s4", 0x7fff_ffff, 1, false, 0x8000_0000, YES),
    ("s_add_i32 s0, s2, s4", M, 1, true, 0, NO),
    ("s_sub_i32 s0, s2, s4", 0x8000_0000, 1, false, 0x7fff_ffff, YES),
    ("s_mul_i32 s0, s2, s4", 0x1_0001, 0x1_0001, true, 0x2_0001, None),
    ("s_mul_hi_u32 s0, s2, s4", M, M, false, 0xffff_fffe, None),
    ("s_mul_hi_i32 s0, s2, s4", M, 2, false, M, None),
    ("s_and_b32 s0, s2, s4", 0xf0, 0x0f, true, 0, NO),
    ("s_or_b32 s0, s2, s4", 0xf0, 0x0f, false, 0xff, YES),
    ("s_xor_b32 s0, s2, s4", 0xff, 0xff, true, 0, NO),
    ("s_andn2_b32 s0, s2, s4", 0xff, 0x0f, false, 0xf0, YES),
    ("s_orn2_b32 s0, s2, s4", 0, M, true, 0, NO),
    ("s_and_b64 s[0:1], s[2:3], s[4:5]", 3 << 32, 1 << 32, false, 1 << 32, YES),
    ("s_or_b64 s[0:1], s[2:3], s[4:5]", 1 << 63, 1, false, 1 << 63 | 1, YES),
    ("s_xor_b64 s[0:1], s[2:3], -1", 1, 0, false, !1, YES),
    ("s_andn2_b64 s[0:1], s[2:3], s[4:5]", 3, 3, true, 0, NO),
    ("s_orn2_b64 s[0:1], s[2:3], s[4:5]", 0, !1, false, 1, YES),
    ("s_nand_b64 s[0:1], s[2:3], s[4:5]", u64::MAX, u64::MAX, true, 0, NO),
    ("s_nor_b64 s[0:1], s[2:3], s[4:5]", 0, 0, false, u64::MAX, YES),
    ("s_xnor_b64 s[0:1], s[2:3], s[4:5]", 5, 4, false, !1, YES),
    ("s_lshl_b32 s0, s2, s4", 3, 33, false, 6, YES),
    ("s_lshr_b32 s0, s2, s4", 1, 1, true, 0, NO),
    ("s_ashr_i32 s0, s2, s4", 0x8000_0000, 31, false, M, YES),
    ("s_lshl_b64 s[0:1], s[2:3], s4", 1, 97, false, 1 << 33, YES),
    ("s_lshr_b64 s[0:1], s[2:3], s4", 1 << 63, 63, false, 1, YES),
    ("s_ashr_i64 s[0:1], s[2:3], s4", 1 << 63, 63, false, u64::MAX, YES),
    ("s_bfe_u32 s0, s2, s4", 0xabcd_ef12, 0x8_0008, false, 0xef, YES),
    ("s_bfe_u32 s0, s2, s4", M, 0x20_0000, false, M, YES),
    ("s_bfe_i32 s0, s2, s4", 0xabcd_ef12, 0x8_0008, false, 0xffff_ffef, YES),
    ("s_min_u32 s0, s2, s4", 1, M, false, 1, YES),
    ("s_max_u32 s0, s2, s4", 1, M, true, M, NO),
    ("s_min_i32 s0, s2, s4", 1, M, true, M, NO),
    ("s_max_i32 s0, s2, s4", 1, M, false, 1, YES),
    ("s_cselect_b32 s0, s2, s4", 1, 2, true, 1, None),
    ("s_cselect_b32 s0, s2, s4", 1, 2, false, 2, None),
    ("s_cselect_b64 s[0:1], -1, 0", 0, 0, true, u64::MAX, None),
    ("s_bitset1_b32 s0, 23", 0, 0, true, 0x0080_0000, None),
    ("s_bitset0_b32 s0, s2", 32, 0, false, 0, None),
    ("s_addk_i32 s2, 0xff9c\n s_mov_b32 s0, s2", 1000, 0, true, 900, NO),
    ("s_mulk_i32 s2, 0xfffe\n s_mov_b32 s0, s2", 3, 0, true, M - 5, None),
];

const UNARY: &[Row] = &[
    ("s_mov_b32 s0, s2", 7, 0, true, 7, None),
    ("s_mov_b64 s[0:1], 0xffffffff", 0, 0, false, M, None),
    ("s_mov_b64 s[0:1], -1", 0, 0, false, u64::MAX, None),
    ("s_movk_i32 s0, 0xff9c", 0, 0, false, M - 99, None),
    ("s_not_b32 s0, s2", M, 0, true, 0, NO),
    ("s_not_b64 s[0:1], s[2:3]", 0, 0, false, u64::MAX, YES),
    ("s_brev_b32 s0, 1", 0, 0, false, 0x8000_0000, None),
    // EXEC is 0xff00 before.
    ("s_and_saveexec_b64 s[0:1], s[2:3]", 0xff, 0, true, 0xff00, NO),
    ("s_or_saveexec_b64 s[0:1], s[2:3]", 0xff, 0, false, 0xff00, YES),
    ("s_andn2_saveexec_b64 s[0:1], s[2:3]", 0xfff, 0, false, 0xff00, YES),
    ("s_xor_saveexec_b64 s[0:1], s[2:3]", 0xff00, 0, true, 0xff00, NO),
];

fn run(row: &Row) -> Bench {
    let (text, a, b, scc, ..) = *row;
    let mut bench = Bench::new(0);
    bench.wave.set_wide(0, 0);
    bench.wave.set_wide(2, a);
    bench.wave.set_wide(4, b);
    bench.wave.set_wide(EXEC, 0xff00);
    bench.wave.scc = Some(scc);
    bench.run(text);
    bench
}

#[test]
fn arithmetic_and_scc() {
    for row in BINARY.iter().chain(UNARY) {
        let (text, a, b, scc, want, set) = *row;
        let bench = run(row);
        assert_eq!(bench.wave.get_wide(0), Ok(want), "{text} of {a:x}, {b:x}, SCC {scc}");
        assert_eq!(bench.wave.scc, Some(set.unwrap_or(scc)), "SCC of {text} of {a:x}, {b:x}");
    }
    assert_covered(ScalarBinary::MNEMONICS, &BINARY.iter().map(|row| row.0).collect::<Vec<_>>());
    assert_covered(ScalarUnary::MNEMONICS, &UNARY.iter().map(|row| row.0).collect::<Vec<_>>());
}

#[test]
fn saving_exec_changes_it() {
    let exec = |row: &Row| run(row).wave.exec();
    let got: Vec<u64> = UNARY[UNARY.len() - 4..].iter().map(exec).collect();
    assert_eq!(got, [0, 0xffff, 0xff, 0], "0xff & 0xff00, 0xff | 0xff00, 0xfff & !0xff00, 0xff00 ^ 0xff00");
}

#[test]
fn comparisons() {
    let rows: &[(&str, u64, u64, bool)] = &[
        ("s_cmp_eq_i32 s2, s4", 5, 5, true),
        ("s_cmp_lg_i32 s2, s4", 5, 5, false),
        ("s_cmp_gt_i32 s2, s4", 0, M, true),
        ("s_cmp_ge_i32 s2, s4", M, 0, false),
        ("s_cmp_lt_i32 s2, s4", M, 0, true),
        ("s_cmp_le_i32 s2, s4", 1, 0, false),
        ("s_cmp_eq_u32 s2, s4", 5, 4, false),
        ("s_cmp_lg_u32 s2, s4", 5, 4, true),
        ("s_cmp_gt_u32 s2, s4", 0, M, false),
        ("s_cmp_ge_u32 s2, s4", M, 0, true),
        ("s_cmp_lt_u32 s2, s4", 0, M, true),
        ("s_cmp_le_u32 s2, s4", M, M, true),
        ("s_cmp_eq_u64 s[2:3], s[4:5]", 1 << 32, 0, false),
        ("s_cmp_lg_u64 s[2:3], 0", 1 << 32, 0, true),
        ("s_bitcmp1_b32 s2, 5", 0x20, 0, true),
        ("s_bitcmp0_b32 s2, 37", 0x20, 0, false),
        ("s_cmpk_lt_i32 s2, 0xff9c", M - 100, 0, true),
        ("s_cmpk_gt_u32 s2, 0xff9c", 0xff9d, 0, true),
        ("s_cmpk_gt_u32 s2, 0xff9c", 0xff9c, 0, false),
    ];
    for (text, a, b, want) in rows {
        for before in [true, false] {
            let bench = run(&(text, *a, *b, before, 0, None));
            assert_eq!(bench.wave.scc, Some(*want), "{text} of {a:x}, {b:x}");
        }
    }
    assert_covered(ScalarCompare::MNEMONICS, &rows.iter().map(|row| row.0).collect::<Vec<_>>());
}

#[test]
fn lanes_and_scalars() {
    let mut bench = Bench::new(0);
    bench.lanes(1, |lane| 100 + lane as u32);
    bench.wave.set_wide(EXEC, 0b1000);
    bench.run("v_readfirstlane_b32 s0, v1\n v_readlane_b32 s1, v1, 7\n v_writelane_b32 v1, s0, 9");
    assert_eq!((bench.wave.get(0), bench.wave.get(1)), (Ok(103), Ok(107)), "readlane ignores EXEC");
    assert_eq!((bench.lane(1, 9), bench.lane(1, 10)), (103, 110), "so does writelane");
    bench.wave.set_wide(EXEC, 0);
    bench.run("v_readfirstlane_b32 s0, v1");
    assert_eq!(bench.wave.get(0), Ok(100), "lane 0 if there is none");
}

#[test]
fn the_program_counter_is_the_next_instruction() {
    let mut bench = Bench::new(0);
    bench.run("s_getpc_b64 s[0:1]");
    assert_eq!(bench.wave.get_wide(0), Ok(0x1_0000_0100));
}
