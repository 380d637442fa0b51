//! AMX int8 tiles through inline assembly: permission, tile state, and the three-product block.
//!
//! Stable Rust has no AMX intrinsics, so every tile instruction is an `asm!` line. Tile state is
//! per thread: [`Session`] configures it and releases it when dropped, so nothing outlives a kernel
//! call.
#![cfg(target_arch = "x86_64")]

// Why tile registers keep their values between `asm!` blocks (`zero`, `multiply_*`, `store*`),
// which the language alone does not guarantee:
// - A compiler touches them only in a function that enables an AMX target feature, for values of a
//   tile type. No function of this crate or of its dependencies enables one, and Rust has no such
//   type.
// - A called function may change them (they are caller-saved), so nothing is called between the
//   first block and the last: their callers run loops and inlined vector instructions
//   (`epilogue::Whole`), and these functions are inlined too. The compiled program shows it: from
//   `tilezero` to `tilestored`, only panics are called.
// - No block is `pure`, so none is left out, repeated or moved across another.
// - The kernel saves them with the other registers, on context switches and for signal handlers.
//   Every block still declares all eight as changed (`tile_asm!`): a compiler that did keep values
//   there would have to save them.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// `asm!` with the options first and every tile register declared as clobbered.
macro_rules! tile_asm {
    (options $options:tt, $($rest:tt)*) => {
        asm!(
            $($rest)*
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options $options
        )
    };
}

/// Whether the processor has int8 tiles and the kernel lets this process use them. Checked once.
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
    // SAFETY: a system call that takes two integers and touches no memory of ours; the registers
    // that it changes are declared.
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

/// The calling thread's tile state, set to eight tiles of 16 rows × 64 bytes. It stays on its
/// thread, and a thread has at most one: dropping a session releases the state.
pub(super) struct Session(PhantomData<*mut ()>);

impl Session {
    pub(super) fn start() -> Self {
        assert!(permitted(), "AMX is used only where the system permits it");
        let mut config = TileConfig([0; 64]);
        config.0[0] = 1; // palette 1
        for tile in 0..8 {
            config.0[16 + 2 * tile] = 64; // bytes per row
            config.0[48 + tile] = 16; // rows
        }
        // SAFETY: reads the 64 bytes of `config`, a valid configuration of palette 1; the processor
        // has tiles and permission was granted (asserted).
        unsafe { tile_asm!(options(nostack, readonly), "ldtilecfg [{config}]", config = in(reg) config.0.as_ptr(),) }
        Self(PhantomData)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: takes this thread's tile state back to its initial one; a session does not leave
        // the thread that started it.
        unsafe { tile_asm!(options(nostack, nomem), "tilerelease",) }
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
/// This thread holds a [`Session`], as for all functions below.
#[inline(always)]
pub(super) unsafe fn zero() {
    // SAFETY: only tile registers are touched, which the caller's session has configured.
    unsafe {
        tile_asm!(options(nostack, nomem), "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",);
    }
}

/// 32 rows by 32 columns.
///
/// # Safety
/// This thread holds a [`Session`]. There is at least one column, and for every column 2048 bytes
/// of left tiles and 1024 bytes at each right tile are readable.
#[inline(always)]
pub(super) unsafe fn multiply_tall(pass: Pass) {
    // SAFETY: reads two left tiles and two right ones a column and nothing else; they are readable
    // and the count is not zero, by the caller's promise. Configured tiles have 16 rows of 64
    // bytes.
    unsafe {
        tile_asm!(
            options(nostack, readonly),
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
        );
    }
}

/// The upper 16 rows only.
///
/// # Safety
/// As [`multiply_tall`], with 1024 bytes of left tiles a column.
#[inline(always)]
pub(super) unsafe fn multiply_flat(pass: Pass) {
    // SAFETY: reads one left tile and two right ones a column and nothing else; they are readable
    // and the count is not zero, by the caller's promise. Configured tiles have 16 rows of 64
    // bytes.
    unsafe {
        tile_asm!(
            options(nostack, readonly),
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
        );
    }
}

/// Writes the accumulators to a plane of 32-bit sums with `width` columns.
///
/// # Safety
/// This thread holds a [`Session`]; 16 (or, when tall, 32) rows of `width ≥ 32` sums are writable.
#[inline(always)]
pub(super) unsafe fn store(plane: *mut i32, width: usize, tall: bool) {
    // SAFETY: each instruction writes 16 rows of 64 bytes, `width` sums apart: columns 0 to 31 of
    // 16 rows, and of the next 16 when tall, all writable by the caller's promise.
    unsafe {
        tile_asm!(
            options(nostack),
            "tilestored [{p} + {row}*1], tmm0",
            "tilestored [{p} + {row}*1 + 64], tmm1",
            p = in(reg) plane, row = in(reg) width * 4,
        );
        if tall {
            tile_asm!(
                options(nostack),
                "tilestored [{p} + {row}*1], tmm2",
                "tilestored [{p} + {row}*1 + 64], tmm3",
                p = in(reg) plane.add(16 * width), row = in(reg) width * 4,
            );
        }
    }
}

/// Two planes of sums with `width` columns, from one left tile column and two right ones: 16 rows,
/// or 32 where they are `tall`, by 32 columns. Left tiles are loaded once for both.
///
/// # Safety
/// This thread holds a [`Session`]. Two left tiles (one if not tall) and two tiles at each of
/// `right` are readable, and 16 (when tall 32) rows of `width ≥ 32` sums of both planes writable.
pub(super) unsafe fn multiply_packed(
    planes: [*mut i32; 2],
    width: usize,
    left: *const i8,
    right: [*const i8; 2],
    tall: bool,
) {
    // SAFETY: loads read tiles of 1024 bytes: the left ones (the first one twice if not tall) and
    // both of each of `right`; stores write the rows of the planes. All by the caller's promise.
    unsafe {
        tile_asm!(
            options(nostack, readonly),
            "tileloadd tmm4, [{left} + {row}*1]",
            "tileloadd tmm5, [{lower} + {row}*1]",
            left = in(reg) left, lower = in(reg) left.add(if tall { 1024 } else { 0 }), row = in(reg) 64usize,
        );
        for (plane, offset) in planes.into_iter().zip([0, 1024]) {
            zero();
            tile_asm!(
                options(nostack, readonly),
                "tileloadd tmm6, [{first} + {row}*1]",
                "tileloadd tmm7, [{second} + {row}*1]",
                "tdpbssd tmm0, tmm4, tmm6",
                "tdpbssd tmm1, tmm4, tmm7",
                first = in(reg) right[0].add(offset), second = in(reg) right[1].add(offset), row = in(reg) 64usize,
            );
            if tall {
                tile_asm!(options(nostack, nomem), "tdpbssd tmm2, tmm5, tmm6", "tdpbssd tmm3, tmm5, tmm7",);
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

/// Work to do while the tile unit is busy.
pub(super) trait Pause {
    fn pause(&mut self);
}

/// Pauses per strip.
pub(super) const PAUSES: usize = 2;

/// Tiles 0 and 1 += `high·high`, tiles 2 and 3 += `high·low + low·high`, with [`PAUSES`] for other
/// instructions. Loads are grouped and products are grouped: on a core whose neighbour is busy,
/// alternating between them costs time. Left tiles are used once and need not be kept in the L1
/// cache (`t1`).
///
/// # Safety
/// This thread holds a [`Session`]; the strip's tiles are readable. [`Pause::pause`] calls no
/// function that is not inlined and no tile instruction.
#[inline(always)]
pub(super) unsafe fn multiply_strip(strip: Strip, between: &mut impl Pause) {
    let Strip { high, low, right: [first, second] } = strip;
    // SAFETY: reads the two left tiles, and two tiles at each right address; all are readable by
    // the caller's promise. `tmm4` and `tmm5` stay in place over the first pause.
    unsafe {
        tile_asm!(
            options(nostack, readonly),
            "tileloaddt1 tmm4, [{high} + {row}*1]",
            "tileloadd tmm6, [{right} + {row}*1]",
            "tileloadd tmm7, [{right} + {row}*1 + 1024]",
            "tileloaddt1 tmm5, [{low} + {row}*1]",
            "tdpbssd tmm0, tmm4, tmm6",
            "tdpbssd tmm2, tmm4, tmm7",
            "tdpbssd tmm2, tmm5, tmm6",
            high = in(reg) high, low = in(reg) low, right = in(reg) first, row = in(reg) 64usize,
        );
        between.pause();
        tile_asm!(
            options(nostack, readonly),
            "tileloadd tmm6, [{right} + {row}*1]",
            "tileloadd tmm7, [{right} + {row}*1 + 1024]",
            "tdpbssd tmm1, tmm4, tmm6",
            "tdpbssd tmm3, tmm4, tmm7",
            "tdpbssd tmm3, tmm5, tmm6",
            right = in(reg) second, row = in(reg) 64usize,
        );
        between.pause();
    }
}

/// Writes a strip's sums to rows of two planes with `width` columns.
///
/// # Safety
/// This thread holds a [`Session`]; 16 rows of `width ≥ 32` sums are writable in each.
#[inline(always)]
pub(super) unsafe fn store_strip(first: *mut i32, second: *mut i32, width: usize) {
    // SAFETY: each instruction writes 16 rows of 64 bytes, `width` sums apart: columns 0 to 31 of
    // 16 rows of both planes, writable by the caller's promise.
    unsafe {
        tile_asm!(
            options(nostack),
            "tilestored [{p} + {row}*1], tmm0", "tilestored [{p} + {row}*1 + 64], tmm1",
            "tilestored [{q} + {row}*1], tmm2", "tilestored [{q} + {row}*1 + 64], tmm3",
            p = in(reg) first, q = in(reg) second, row = in(reg) width * 4,
        );
    }
}

/// int8 multiply-adds per round of [`spin`].
pub(super) const SPIN_MULTIPLY_ADDS: usize = 8 * 16 * 16 * 64;

/// Eight tile products per round, on registers only.
///
/// # Safety
/// This thread holds a [`Session`].
pub(super) unsafe fn spin(iterations: usize) {
    if iterations == 0 {
        return;
    }
    // Zeros would draw less power and run at a higher clock than any real product.
    let operand: [u8; 1024] = std::array::from_fn(|i| (i * 37 % 251) as u8);
    // SAFETY: the 1024 bytes of `operand` are read as one tile; all else is tile registers, and a
    // count that is not zero.
    unsafe {
        zero();
        tile_asm!(
            options(nostack, readonly),
            "tileloadd tmm6, [{p} + {row}*1]",
            "tileloadd tmm7, [{p} + {row}*1]",
            "2:",
            "tdpbssd tmm0, tmm6, tmm7", "tdpbssd tmm1, tmm6, tmm7", "tdpbssd tmm2, tmm6, tmm7", "tdpbssd tmm3, tmm6, tmm7",
            "tdpbssd tmm0, tmm6, tmm7", "tdpbssd tmm1, tmm6, tmm7", "tdpbssd tmm2, tmm6, tmm7", "tdpbssd tmm3, tmm6, tmm7",
            "dec {n}",
            "jnz 2b",
            n = inout(reg) iterations => _, p = in(reg) operand.as_ptr(), row = in(reg) 64usize,
        );
    }
}
