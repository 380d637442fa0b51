//! Memory instructions, register indexing, and uses of what was never written.

use super::{Bench, assert_covered};
use crate::execute::Pause;
use crate::instruction::{Condition, EXEC, Matrix};

#[test]
fn global_memory() {
    let mut bench = Bench::new(0);
    let address = bench.memory.allocate(4096).expect("memory");
    bench.memory.write(address, &(0..=255).collect::<Vec<u8>>()).expect("inside");
    bench.wave.set_wide(2, address);
    bench.lanes(1, |lane| 4 * lane as u32);
    bench.run("global_load_dword v0, v1, s[2:3]");
    assert_eq!(bench.lane(0, 3), 0x0f0e_0d0c);
    bench.wave.set_wide(EXEC, 1);
    bench.run("global_load_dwordx3 v[4:6], v1, s[2:3] offset:16");
    assert_eq!([4, 5, 6].map(|register| bench.lane(register, 0)), [0x1312_1110, 0x1716_1514, 0x1b1a_1918]);
    bench.run("global_load_ubyte v0, v1, s[2:3] offset:5\n global_load_sshort v7, v1, s[2:3] offset:254");
    assert_eq!((bench.lane(0, 0), bench.lane(7, 0)), (5, 0xffff_fffe));
    bench.run("global_load_sbyte v0, v1, s[2:3] offset:253\n global_load_ushort v7, v1, s[2:3] offset:254");
    assert_eq!((bench.lane(0, 0), bench.lane(7, 0)), (0xffff_fffd, 0xfffe));
    // A 64-bit address in registers, and a negative offset.
    bench.fill(8, (address + 400) as u32);
    bench.fill(9, ((address + 400) >> 32) as u32);
    bench.run("global_store_dwordx2 v[8:9], v[4:5], off offset:-144\n global_store_short v[8:9], v6, off");
    let mut bytes = [0; 8];
    bench.memory.read(&mut bytes, address + 256).expect("inside");
    assert_eq!(bytes, [0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17]);
    bench.memory.read(&mut bytes[..2], address + 400).expect("inside");
    assert_eq!(bytes[..2], [0x18, 0x19]);
    let fault = bench.try_run("global_load_dword v0, v1, s[2:3] offset:4094").expect_err("past the end");
    assert!(fault.contains("out of bounds"), "{fault}");
    let fault = bench.try_run("global_load_dword v0, v1, s[2:3] offset:2").expect_err("not aligned");
    assert!(fault.contains("misaligned"), "{fault}");
}

/// A load and a store of `count` dwords, each with one lane.
#[test]
fn global_memory_in_every_width() {
    for (load, store, count) in [
        ("global_load_dword v4", "global_store_dword v1, v4", 1u16),
        ("global_load_dwordx2 v[4:5]", "global_store_dwordx2 v1, v[4:5]", 2),
        ("global_load_dwordx3 v[4:6]", "global_store_dwordx3 v1, v[4:6]", 3),
        ("global_load_dwordx4 v[4:7]", "global_store_dwordx4 v1, v[4:7]", 4),
    ] {
        let mut bench = Bench::new(0);
        let address = bench.memory.allocate(64).expect("memory");
        bench.memory.write(address, &(1..=64).collect::<Vec<u8>>()).expect("inside");
        bench.wave.set_wide(2, address);
        bench.wave.set_wide(EXEC, 1);
        bench.fill(1, 0);
        bench.run(&format!("{load}, v1, s[2:3] offset:4\n {store}, s[2:3] offset:32"));
        let mut bytes = [0; 64];
        bench.memory.read(&mut bytes, address).expect("inside");
        let moved = usize::from(4 * count);
        assert_eq!(bytes[32..32 + moved], (5..).take(moved).collect::<Vec<u8>>(), "{load}");
        assert_eq!(bytes[32 + moved], 33 + moved as u8, "{store} writes no more");
        assert_eq!(bench.lane(3 + count, 0), u32::from_le_bytes([0, 1, 2, 3].map(|byte| moved as u8 + 1 + byte)));
    }
}

#[test]
fn the_offset_register_is_not_signed() {
    let mut bench = Bench::new(0);
    let address = bench.memory.allocate(64).expect("memory");
    bench.memory.write(address, &[1; 64]).expect("inside");
    bench.wave.set_wide(2, address.wrapping_sub(0xffff_fff0));
    bench.fill(1, 0xffff_fff0);
    bench.run("global_load_dword v0, v1, s[2:3]");
    assert_eq!(bench.lane(0, 0), 0x0101_0101);
}

#[test]
fn scalar_loads_clear_two_bits_and_know_what_was_written() {
    let mut bench = Bench::new(0);
    let address = bench.memory.allocate(64).expect("memory");
    bench.memory.write(address, &(0..24).collect::<Vec<u8>>()).expect("inside");
    bench.wave.set_wide(2, address + 3);
    bench.run("s_load_dword s8, s[2:3], 0x2\n s_load_dwordx4 s[12:15], s[2:3], 0x10");
    assert_eq!((bench.wave.get(8), bench.wave.get(13)), (Ok(0x0706_0504), Ok(0x1716_1514)));
    assert!(bench.wave.get(14).is_err(), "the last bytes were never written");
    bench.memory.write(address, &(0..64).collect::<Vec<u8>>()).expect("inside");
    bench.wave.set_wide(2, address);
    for (text, last) in [
        ("s_load_dwordx2 s[8:9], s[2:3], 0x0", 9u8),
        ("s_load_dwordx8 s[8:15], s[2:3], 0x0", 15),
        ("s_load_dwordx16 s[8:23], s[2:3], 0x0", 23),
    ] {
        bench.run(text);
        let first = 4 * (last - 8);
        let want = u32::from_le_bytes([0, 1, 2, 3].map(|byte| first + byte));
        assert_eq!((bench.wave.get(8), bench.wave.get(last)), (Ok(0x0302_0100), Ok(want)), "{text}");
    }
}

#[test]
fn shared_memory() {
    let mut bench = Bench::new(0);
    bench.wave.set_wide(EXEC, 1);
    for (register, value) in [(1, 0), (2, 22), (3, 33), (4, 44), (5, 55)] {
        bench.fill(register, value);
    }
    bench.run("ds_write_b128 v1, v[2:5] offset:16\n ds_read_b96 v[6:8], v1 offset:20");
    assert_eq!([6, 7, 8].map(|register| bench.lane(register, 0)), [33, 44, 55]);
    bench.run("ds_write2_b32 v1, v2, v3 offset0:1 offset1:3\n ds_read2_b32 v[6:7], v1 offset0:3 offset1:1");
    assert_eq!([6, 7].map(|register| bench.lane(register, 0)), [33, 22]);
    bench.run("ds_write_b64 v1, v[4:5] offset:8\n ds_read2_b64 v[6:9], v1 offset0:1 offset1:2");
    assert_eq!([6, 7, 8, 9].map(|register| bench.lane(register, 0)), [44, 55, 22, 33]);
    bench.run("ds_write_b96 v1, v[3:5] offset:32\n ds_read_b64 v[6:7], v1 offset:36\n ds_read_b32 v8, v1 offset:32");
    assert_eq!([6, 7, 8].map(|register| bench.lane(register, 0)), [44, 55, 33]);
    bench.run("ds_write2_b64 v1, v[2:3], v[4:5] offset0:1 offset1:6\n ds_read2_b64 v[6:9], v1 offset0:6 offset1:1");
    assert_eq!([6, 7, 8, 9].map(|register| bench.lane(register, 0)), [44, 55, 22, 33]);
    bench.run("ds_read_b128 v[6:9], v1 offset:16");
    assert_eq!([6, 7, 8, 9].map(|register| bench.lane(register, 0)), [22, 33, 44, 55]);
    bench.run("ds_write_b32 v1, v2");
    for text in ["ds_read_b64 v[6:7], v1 offset:60", "ds_read2st64_b32 v[6:7], v1 offset1:1"] {
        let fault = bench.try_run(text).expect_err("past the end");
        assert!(fault.contains("out of bounds"), "{fault}");
    }
}

#[test]
fn strides_of_the_far_forms() {
    let mut bench = Bench::new(0);
    bench.shared = crate::shared::Shared::new(2048, 0);
    bench.wave.set_wide(EXEC, 1);
    for (register, value) in [(1, 4), (2, 22), (3, 33), (4, 44), (5, 55)] {
        bench.fill(register, value);
    }
    bench.run("ds_write2st64_b64 v1, v[2:3], v[4:5] offset0:1 offset1:3\n ds_read_b64 v[6:7], v1 offset:1536");
    assert_eq!([6, 7].map(|register| bench.lane(register, 0)), [44, 55]);
    bench.run("ds_read2st64_b64 v[6:9], v1 offset0:3 offset1:1");
    assert_eq!([6, 7, 8, 9].map(|register| bench.lane(register, 0)), [44, 55, 22, 33]);
    bench.run("ds_write2st64_b32 v1, v2, v3 offset1:2\n ds_read2st64_b32 v[6:7], v1 offset0:2");
    assert_eq!([6, 7].map(|register| bench.lane(register, 0)), [33, 22]);
}

#[test]
fn private_memory() {
    let mut bench = Bench::new(0);
    bench.lanes(1, |lane| if lane % 2 == 0 { 0 } else { 8 });
    bench.lanes(2, |lane| lane as u32);
    bench.run("buffer_store_dword v2, v1, s[0:3], 0 offen offset:4\n buffer_load_dword v3, off, s[0:3], 0 offset:4");
    assert_eq!(bench.lane(3, 6), 6);
    let (_, defined) = bench.wave.vector(3);
    assert_eq!(defined, 0x5555_5555_5555_5555, "odd lanes have written elsewhere");
    for (store, load, count) in [
        ("buffer_store_dwordx2 v[4:5]", "buffer_load_dwordx2 v[8:9]", 2u16),
        ("buffer_store_dwordx3 v[4:6]", "buffer_load_dwordx3 v[8:10]", 3),
        ("buffer_store_dwordx4 v[4:7]", "buffer_load_dwordx4 v[8:11]", 4),
    ] {
        for register in 4..8u16 {
            bench.lanes(register, |lane| 1000 * u32::from(count) + 100 * u32::from(register) + lane as u32);
        }
        bench.run(&format!("{store}, off, s[0:3], 0\n {load}, off, s[0:3], 0"));
        for register in 4..4 + count {
            assert_eq!(bench.lane(register + 4, 9), bench.lane(register, 9), "{load}");
        }
    }
    let fault = bench.try_run("buffer_load_dword v3, off, s[0:3], 0 offset:16").expect_err("past the end");
    assert!(fault.contains("out of bounds"), "{fault}");
}

#[test]
fn an_indexed_move_reads_another_register() {
    let mut bench = Bench::new(0);
    bench.wave.set(3, 2);
    for register in 4..8 {
        bench.fill(register, 10 * u32::from(register));
    }
    bench.run("s_set_gpr_idx_on s3, gpr_idx(SRC0)\n v_mov_b32_e32 v0, v4\n s_set_gpr_idx_off\n v_mov_b32_e32 v1, v4");
    assert_eq!((bench.lane(0, 0), bench.lane(1, 0)), (60, 40));
    let fault = bench.try_run("s_set_gpr_idx_on s3, gpr_idx(SRC0)\n v_not_b32_e32 v0, v4").expect_err("not a move");
    assert!(fault.contains("index"), "{fault}");
}

#[test]
fn what_was_never_written_may_be_moved_but_not_used() {
    let fault = |setup: &str, text: &str| {
        let mut bench = Bench::new(0);
        let address = bench.memory.allocate(64).expect("memory");
        bench.wave.set_wide(2, address);
        bench.fill(1, 0);
        bench.run(setup);
        bench.try_run(text).expect_err(text)
    };
    let moved = "v_mov_b32_e32 v5, v4\n v_add_u32_e32 v6, v5, v1";
    for text in [
        "global_store_dword v1, v6, s[2:3]",
        "global_store_dword v6, v1, s[2:3]",
        "global_load_dword v0, v6, s[2:3]",
        "ds_write_b32 v6, v1",
        "ds_read_b32 v0, v6",
        "v_cmp_eq_u32_e32 vcc, v6, v1\n s_and_saveexec_b64 s[0:1], vcc",
        "v_cmp_eq_u32_e32 vcc, v6, v1\n s_mov_b64 exec, vcc",
        "global_load_dword v0, v1, s[2:3]\n global_store_dword v1, v0, s[2:3]",
        "buffer_load_dword v0, off, s[0:3], 0\n global_store_dword v1, v0, s[2:3]",
        "v_readfirstlane_b32 s0, v6\n v_mov_b32_e32 v0, s0\n global_store_dword v1, v0, s[2:3]",
        "v_cndmask_b32_e64 v0, v1, v6, s[50:51]\n global_store_dword v1, v0, s[2:3]",
    ] {
        let fault = fault(moved, text);
        assert!(fault.contains("never written"), "{text}: {fault}");
    }
    for text in [
        "s_load_dword s0, s[50:51], 0x0",
        "global_load_dword v0, v1, s[50:51]",
        "v_readlane_b32 s0, v1, s50",
        "ds_read_b32 v0, v1",
    ] {
        let fault = fault("", text);
        assert!(fault.contains("before it is written"), "{text}: {fault}");
    }
    for text in [
        "s_cselect_b32 s0, 0, 1",
        "s_cmp_eq_u32 s50, 0\n s_cselect_b32 s0, 0, 1",
        "s_add_u32 s0, s50, 1\n s_addc_u32 s0, 0, 0",
    ] {
        let fault = fault("", text);
        assert!(fault.contains("SCC"), "{text}: {fault}");
    }
    // Only the chosen source of a selection counts.
    let mut bench = Bench::new(0);
    bench.fill(1, 5);
    bench.wave.set_wide(106, u64::MAX);
    bench.run("v_cndmask_b32_e32 v0, v4, v1, vcc");
    assert_eq!(bench.lane(0, 0), 5);
}

#[test]
fn masks_may_be_defined_for_some_lanes() {
    let mut bench = Bench::new(0);
    bench.wave.set_wide(2, 0xff);
    // Ones decide a disjunction, zeros a conjunction, whatever the unwritten s[4:5] holds.
    bench.run("s_or_b64 s[6:7], s[4:5], s[2:3]\n s_and_b64 s[8:9], s[6:7], s[2:3]\n s_mov_b64 exec, s[8:9]");
    assert_eq!(bench.wave.exec(), 0xff);
    bench.run("s_andn2_b64 s[8:9], s[2:3], s[6:7]\n s_mov_b64 exec, s[8:9]");
    assert_eq!(bench.wave.exec(), 0);
    assert!(bench.try_run("s_mov_b64 exec, s[6:7]").is_err());
    assert!(bench.try_run("s_xor_b64 s[8:9], s[6:7], s[6:7]\n s_mov_b64 exec, s[8:9]").is_err());
}

#[test]
fn branches_are_taken_when_their_condition_holds() {
    const SCC: [&str; 2] = ["s_cmp_eq_u32 0, 1", "s_cmp_eq_u32 0, 0"];
    const VCC: [&str; 2] = ["s_mov_b64 vcc, 0", "s_mov_b64 vcc, 4"];
    const LANES: [&str; 2] = ["s_mov_b64 exec, 0", "s_mov_b64 exec, 4"];
    // The mnemonic, what comes before it, and whether the branch is taken.
    let rows = [
        ("s_branch", SCC[0], true),
        ("s_cbranch_scc0", SCC[0], true),
        ("s_cbranch_scc0", SCC[1], false),
        ("s_cbranch_scc1", SCC[0], false),
        ("s_cbranch_scc1", SCC[1], true),
        ("s_cbranch_vccz", VCC[0], true),
        ("s_cbranch_vccz", VCC[1], false),
        ("s_cbranch_vccnz", VCC[0], false),
        ("s_cbranch_vccnz", VCC[1], true),
        ("s_cbranch_execz", LANES[0], true),
        ("s_cbranch_execz", LANES[1], false),
        ("s_cbranch_execnz", LANES[0], false),
        ("s_cbranch_execnz", LANES[1], true),
    ];
    for (mnemonic, before, taken) in rows {
        let mut bench = Bench::new(0);
        bench.run(&format!("s_mov_b32 s9, 1\n {before}\n {mnemonic} 4\n s_mov_b32 s9, 0"));
        assert_eq!(bench.wave.get(9), Ok(u32::from(taken)), "{mnemonic} after {before}");
    }
    assert_covered(Condition::MNEMONICS, &rows.map(|row| row.0));
}

#[test]
fn a_barrier_pauses_a_wave_and_waiting_does_nothing() {
    let mut bench = Bench::new(0);
    let lines = "s_mov_b32 s9, 1\n s_nop 3\n s_waitcnt vmcnt(0) lgkmcnt(0)\n s_barrier\n s_mov_b32 s9, 2";
    assert_eq!(bench.pause(lines), Ok(Pause::Barrier));
    assert_eq!((bench.wave.get(9), bench.wave.pc, bench.wave.ended), (Ok(1), 4, false));
    assert_eq!(bench.pause("s_nop 0"), Ok(Pause::End));
    assert!(bench.wave.ended);
}

#[test]
fn every_matrix_product_adds_its_products() {
    // The mnemonic, registers of an operand and of the sums, and products per sum.
    let rows = [
        ("v_mfma_i32_32x32x8i8", 1, 16, 8),
        ("v_mfma_i32_16x16x16i8", 1, 4, 16),
        ("v_mfma_i32_4x4x4i8", 1, 4, 4),
        ("v_mfma_i32_32x32x4i8", 1, 32, 4),
        ("v_mfma_i32_16x16x4i8", 1, 16, 4),
        ("v_mfma_i32_32x32x16_i8", 2, 16, 16),
        ("v_mfma_i32_16x16x32_i8", 2, 4, 32),
    ];
    for (mnemonic, words, sums, products) in rows {
        let mut bench = Bench::new(0);
        for (register, value) in [(0, 0x0202_0202), (1, 0x0202_0202), (2, 0xfdfd_fdfd), (3, 0xfdfd_fdfd)] {
            bench.fill(register, value);
        }
        for register in 0..sums {
            bench.fill(256 + register, 1000);
        }
        let operand = |first: u16| if words == 1 { format!("v{first}") } else { format!("v[{first}:{}]", first + 1) };
        let to = format!("a[0:{}]", sums - 1);
        bench.run(&format!("{mnemonic} {to}, {}, {}, {to}", operand(0), operand(2)));
        for register in 0..sums {
            assert_eq!(bench.lane(256 + register, 41) as i32, 1000 - 6 * products, "{mnemonic}");
        }
    }
    assert_covered(Matrix::MNEMONICS, &rows.map(|row| row.0));
}

#[test]
fn a_matrix_product_needs_all_lanes() {
    let mut bench = Bench::new(0);
    for register in [1, 2, 256, 257, 258, 259] {
        bench.fill(register, 0x0101_0101);
    }
    bench.run("v_mfma_i32_16x16x16i8 a[0:3], v1, v2, a[0:3]");
    assert_eq!(bench.lane(256, 17), 0x0101_0101 + 16);
    bench.wave.set_wide(EXEC, 1);
    assert!(bench.try_run("v_mfma_i32_16x16x16i8 a[0:3], v1, v2, a[0:3]").is_err());
}
