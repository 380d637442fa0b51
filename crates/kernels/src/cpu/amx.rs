//! AMX int8 tiles through inline assembly: permission, tile state, and the three-product block.
//!
//! Stable Rust has no AMX intrinsics, so every tile instruction is an `asm!` line. Tile state belongs to a thread:
//! [`Session`] configures it and releases it when dropped, so nothing outlives a kernel call.
#![cfg(target_arch = "x86_64")]

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// Whether the processor has int8 tiles and the kernel lets this process use them. Asked once.
pub(super) fn permitted() -> bool {
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    *PERMITTED.get_or_init(|| {
        // Leaf 7: bit 24 AMX-TILE, bit 25 AMX-INT8.
        let leaf = __cpuid_count(7, 0);
        let has_tiles = __cpuid_count(0, 0).eax >= 7 && leaf.edx & (1 << 24) != 0 && leaf.edx & (1 << 25) != 0;
        has_tiles && request_permission()
    })
}

/// `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: a system call that takes two integers and touches no memory of ours.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") XFEATURE_XTILEDATA,
             out("rcx") _, out("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}

#[repr(C, align(64))]
struct TileConfig([u8; 64]);

/// The calling thread's tile state, set to eight tiles of 16 rows × 64 bytes.
pub(super) struct Session(());

impl Session {
    pub(super) fn start() -> Self {
        debug_assert!(permitted(), "AMX is used only after asking for it");
        let mut config = TileConfig([0; 64]);
        config.0[0] = 1; // palette 1
        for tile in 0..8 {
            config.0[16 + 2 * tile] = 64; // bytes per row
            config.0[48 + tile] = 16; // rows
        }
        // SAFETY: a valid configuration of palette 1; permission was granted.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config.0.as_ptr(), options(nostack)) }
        Self(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: gives the tile state back.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}

/// One slice product over a chunk: accumulators (tiles 0 to 3, a 32×32 block) += left × right.
#[derive(Clone, Copy)]
pub(super) struct Pass {
    pub(super) left: *const i8,
    pub(super) left_stride: usize,
    pub(super) right: *const i8,
    pub(super) right_stride: usize,
    /// Distance of the second block of 16 columns.
    pub(super) right_second: usize,
    pub(super) columns: usize,
}

/// Clears the accumulators.
///
/// # Safety
/// Within a [`Session`], as for all functions below.
pub(super) unsafe fn zero() {
    // SAFETY: only tile registers are touched.
    unsafe { asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem)) }
}

/// 32 rows by 32 columns.
///
/// # Safety
/// All tiles named by the pass are readable, 32 left rows among them.
pub(super) unsafe fn multiply_tall(pass: Pass) {
    // SAFETY: reads only; the caller vouches for the addresses.
    unsafe {
        asm!(
            "2:",
            "tileloadd tmm4, [{a0} + {row}*1]",
            "tileloadd tmm6, [{b0} + {row}*1]",
            "tileloadd tmm7, [{b1} + {row}*1]",
            "tileloadd tmm5, [{a1} + {row}*1]",
            "add {a0}, {left_stride}",
            "add {b0}, {right_stride}",
            "tdpbssd tmm0, tmm4, tmm6",
            "tdpbssd tmm1, tmm4, tmm7",
            "add {a1}, {left_stride}",
            "add {b1}, {right_stride}",
            "tdpbssd tmm2, tmm5, tmm6",
            "tdpbssd tmm3, tmm5, tmm7",
            "dec {n}",
            "jnz 2b",
            a0 = inout(reg) pass.left => _,
            a1 = inout(reg) pass.left.add(1024) => _,
            b0 = inout(reg) pass.right => _,
            b1 = inout(reg) pass.right.add(pass.right_second) => _,
            n = inout(reg) pass.columns => _,
            row = in(reg) 64usize,
            left_stride = in(reg) pass.left_stride,
            right_stride = in(reg) pass.right_stride,
            options(nostack, readonly),
        );
    }
}

/// The upper 16 rows only.
///
/// # Safety
/// As [`multiply_tall`], with 16 left rows.
pub(super) unsafe fn multiply_flat(pass: Pass) {
    // SAFETY: reads only; the caller vouches for the addresses.
    unsafe {
        asm!(
            "2:",
            "tileloadd tmm4, [{a0} + {row}*1]",
            "tileloadd tmm6, [{b0} + {row}*1]",
            "tileloadd tmm7, [{b1} + {row}*1]",
            "tdpbssd tmm0, tmm4, tmm6",
            "tdpbssd tmm1, tmm4, tmm7",
            "add {a0}, {left_stride}",
            "add {b0}, {right_stride}",
            "add {b1}, {right_stride}",
            "dec {n}",
            "jnz 2b",
            a0 = inout(reg) pass.left => _,
            b0 = inout(reg) pass.right => _,
            b1 = inout(reg) pass.right.add(pass.right_second) => _,
            n = inout(reg) pass.columns => _,
            row = in(reg) 64usize,
            left_stride = in(reg) pass.left_stride,
            right_stride = in(reg) pass.right_stride,
            options(nostack, readonly),
        );
    }
}

/// Writes the accumulators to a plane of 32-bit sums with `width` columns.
///
/// # Safety
/// 16 (or, when tall, 32) rows of `width ≥ 32` sums are writable.
pub(super) unsafe fn store(plane: *mut i32, width: usize, tall: bool) {
    // SAFETY: the caller vouches for the addresses.
    unsafe {
        asm!(
            "tilestored [{p} + {row}*1], tmm0",
            "tilestored [{p} + {row}*1 + 64], tmm1",
            p = in(reg) plane, row = in(reg) width * 4, options(nostack),
        );
        if tall {
            asm!(
                "tilestored [{p} + {row}*1], tmm2",
                "tilestored [{p} + {row}*1 + 64], tmm3",
                p = in(reg) plane.add(16 * width), row = in(reg) width * 4, options(nostack),
            );
        }
    }
}

/// Two planes of sums with `width` columns, from one left tile column and two right ones: 16 rows, or 32 where they are `tall`, by 32 columns. Left tiles are
/// loaded once for both.
///
/// # Safety
/// Two left tiles (one if not tall) and two tiles at each of `right` are readable, the rows of both planes writable.
pub(super) unsafe fn multiply_packed(
    planes: [*mut i32; 2],
    width: usize,
    left: *const i8,
    right: [*const i8; 2],
    tall: bool,
) {
    // SAFETY: the caller vouches for the addresses.
    unsafe {
        asm!(
            "tileloadd tmm4, [{left} + {row}*1]",
            "tileloadd tmm5, [{lower} + {row}*1]",
            left = in(reg) left, lower = in(reg) left.add(if tall { 1024 } else { 0 }), row = in(reg) 64usize,
            options(nostack, readonly),
        );
        for (plane, offset) in planes.into_iter().zip([0, 1024]) {
            zero();
            asm!(
                "tileloadd tmm6, [{first} + {row}*1]",
                "tileloadd tmm7, [{second} + {row}*1]",
                "tdpbssd tmm0, tmm4, tmm6",
                "tdpbssd tmm1, tmm4, tmm7",
                first = in(reg) right[0].add(offset), second = in(reg) right[1].add(offset), row = in(reg) 64usize,
                options(nostack, readonly),
            );
            if tall {
                asm!("tdpbssd tmm2, tmm5, tmm6", "tdpbssd tmm3, tmm5, tmm7", options(nostack, nomem));
            }
            store(plane, width, tall);
        }
    }
}

/// One tile column of a 16×32 block, both slices.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub(super) high: *const i8,
    pub(super) low: *const i8,
    /// Blocks of 16 columns: a tile of high bytes, then one of low bytes.
    pub(super) right: [*const i8; 2],
}

/// What is done while tiles are busy.
pub(super) trait Pause {
    fn pause(&mut self);
}

/// Pauses in a strip.
pub(super) const PAUSES: usize = 2;

/// Tiles 0 and 1 += `high·high`, tiles 2 and 3 += `high·low + low·high`, with [`PAUSES`] for other instructions. Loads come together and products come together:
/// on a core whose neighbour is busy, changing from one to the other takes time. Left tiles are used once and need no place in the first-level cache
/// (`t1`).
///
/// # Safety
/// The strip's tiles are readable.
#[inline(always)]
pub(super) unsafe fn multiply_strip(strip: Strip, between: &mut impl Pause) {
    let Strip { high, low, right: [first, second] } = strip;
    // SAFETY: reads only; the caller vouches for the addresses.
    unsafe {
        asm!(
            "tileloaddt1 tmm4, [{high} + {row}*1]",
            "tileloadd tmm6, [{right} + {row}*1]",
            "tileloadd tmm7, [{right} + {row}*1 + 1024]",
            "tileloaddt1 tmm5, [{low} + {row}*1]",
            "tdpbssd tmm0, tmm4, tmm6",
            "tdpbssd tmm2, tmm4, tmm7",
            "tdpbssd tmm2, tmm5, tmm6",
            high = in(reg) high, low = in(reg) low, right = in(reg) first, row = in(reg) 64usize, options(nostack, readonly),
        );
        between.pause();
        asm!(
            "tileloadd tmm6, [{right} + {row}*1]",
            "tileloadd tmm7, [{right} + {row}*1 + 1024]",
            "tdpbssd tmm1, tmm4, tmm6",
            "tdpbssd tmm3, tmm4, tmm7",
            "tdpbssd tmm3, tmm5, tmm6",
            right = in(reg) second, row = in(reg) 64usize, options(nostack, readonly),
        );
        between.pause();
    }
}

/// Writes a strip's sums to rows of two planes with `width` columns.
///
/// # Safety
/// 16 rows of `width ≥ 32` sums are writable in each.
pub(super) unsafe fn store_strip(first: *mut i32, second: *mut i32, width: usize) {
    // SAFETY: the caller vouches for the addresses.
    unsafe {
        asm!(
            "tilestored [{p} + {row}*1], tmm0", "tilestored [{p} + {row}*1 + 64], tmm1",
            "tilestored [{q} + {row}*1], tmm2", "tilestored [{q} + {row}*1 + 64], tmm3",
            p = in(reg) first, q = in(reg) second, row = in(reg) width * 4, options(nostack),
        );
    }
}

/// int8 multiply-adds of one round of [`spin`].
pub(super) const SPIN_MULTIPLY_ADDS: usize = 8 * 16 * 16 * 64;

/// Eight tile products a round on registers alone.
///
/// # Safety
/// Within a [`Session`].
pub(super) unsafe fn spin(iterations: usize) {
    if iterations == 0 {
        return;
    }
    // Zeros would draw less power and run at a higher clock than any real product.
    let operand: [u8; 1024] = std::array::from_fn(|i| (i * 37 % 251) as u8);
    // SAFETY: one tile is read; all else is tile registers.
    unsafe {
        zero();
        asm!(
            "tileloadd tmm6, [{p} + {row}*1]",
            "tileloadd tmm7, [{p} + {row}*1]",
            "2:",
            "tdpbssd tmm0, tmm6, tmm7", "tdpbssd tmm1, tmm6, tmm7", "tdpbssd tmm2, tmm6, tmm7", "tdpbssd tmm3, tmm6, tmm7",
            "tdpbssd tmm0, tmm6, tmm7", "tdpbssd tmm1, tmm6, tmm7", "tdpbssd tmm2, tmm6, tmm7", "tdpbssd tmm3, tmm6, tmm7",
            "dec {n}",
            "jnz 2b",
            n = inout(reg) iterations => _, p = in(reg) operand.as_ptr(), row = in(reg) 64usize, options(nostack, readonly),
        );
    }
}
