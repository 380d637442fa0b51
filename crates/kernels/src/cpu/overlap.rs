//! AMX, profile x2: the epilogue of a block runs while the next one is multiplied.
//!
//! Tile instructions are few and slow. Between any two of them a core has time for vector
//! instructions of an epilogue, so each step of a product is followed by a few steps of the
//! previous block's epilogue. Epilogues keep their order: one block after the other.

use super::block::{LeftView, RightView, Sums};
use super::epilogue::Target;
#[cfg(target_arch = "x86_64")]
use super::{
    amx,
    epilogue::{ANY_RANK, Whole, epilogue_whole, for_rank},
    slices::{BLOCK, TILE_BYTES, TILE_DEPTH, TILE_ROWS},
};

/// A thread's blocks in flight: one being multiplied, one waiting for its epilogue.
pub(super) struct Overlap<'a> {
    sums: &'a mut [Sums; 2],
    turn: usize,
    waiting: Option<Target<'a>>,
}

impl<'a> Overlap<'a> {
    pub(super) fn new(sums: &'a mut [Sums; 2]) -> Self {
        Self { sums, turn: 0, waiting: None }
    }

    /// Multiplies a block of up to 32 rows and 32 columns; its epilogue runs later. The caller
    /// holds an AMX session.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn block(&mut self, left: LeftView, right: RightView, columns: usize, target: Target<'a>) {
        target.check_whole();
        assert!(columns > 0, "at least one tile column");
        let tiles = target.rows.div_ceil(TILE_ROWS);
        let left_end = (columns - 1) * left.column_stride + left.slice_stride + tiles * TILE_ROWS * TILE_DEPTH;
        assert!(left_end <= left.bytes.len(), "left block in bounds");
        let right_end = right.block_stride + columns * 2 * TILE_BYTES;
        assert!(right.blocks == 2 && right_end <= right.tiles.len(), "right block in bounds");
        let [even, odd] = &mut *self.sums;
        let (now, before) = if self.turn == 0 { (even, odd) } else { (odd, even) };
        // SAFETY: all tiles of both operands are inside (asserted above); the target that waits
        // passed `check_whole` when it came in, and `before` holds its sums, which nobody writes
        // meanwhile. Only the AMX path comes here, within the caller's session, and it has AVX-512.
        unsafe {
            let waiting = self.waiting.as_ref().map(|target| (&*before, target));
            let rank = self.waiting.as_ref().map_or(0, Target::rank);
            for_rank!(rank, multiply(now, left, tiles, right, columns, waiting));
        }
        self.waiting = Some(target);
        self.turn = 1 - self.turn;
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn block(&mut self, _left: LeftView, _right: RightView, _columns: usize, _target: Target<'a>) {
        unreachable!("AMX exists on x86-64 alone");
    }

    /// Runs the epilogue of the remaining block. The sums are then free.
    pub(super) fn finish(&mut self) -> &mut Sums {
        #[cfg(target_arch = "x86_64")]
        if let Some(target) = self.waiting.take() {
            // SAFETY: the target passed `check_whole` when it came in (`block`), and the AMX path,
            // which alone makes targets wait, has AVX-512.
            unsafe { for_rank!(target.rank(), epilogue_whole::<2>(&self.sums[1 - self.turn], &target)) };
        }
        &mut self.sums[0]
    }
}

/// The epilogue of the previous block, a few rows in each pause of a product. Created only in
/// [`multiply`].
#[cfg(target_arch = "x86_64")]
struct PendingEpilogue<const RANK: usize, const HELD: usize> {
    whole: Option<Whole<2, RANK, HELD>>,
    each: usize,
}

#[cfg(target_arch = "x86_64")]
impl<const RANK: usize, const HELD: usize> amx::Pause for PendingEpilogue<RANK, HELD> {
    #[inline(always)]
    fn pause(&mut self) {
        if let Some(whole) = &mut self.whole {
            // SAFETY: `multiply` made it of sums and a target that outlive it, by its caller's
            // promise checked and of this rank, and enables AVX-512 where this is inlined.
            unsafe { whole.some(self.each) };
        }
    }
}

/// `tiles` blocks of 16 rows by 32 columns, interleaved with rows of an epilogue.
///
/// # Safety
/// The machine has AVX-512 and this thread an AMX session. There are one or two `tiles` and at
/// least one column; the tiles of all columns are inside both operands. What waits passed
/// [`Target::check_whole`], and its adapter has the rank `RANK`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn multiply<const RANK: usize, const HELD: usize>(
    sums: &mut Sums,
    left: LeftView,
    tiles: usize,
    right: RightView,
    columns: usize,
    waiting: Option<(&Sums, &Target)>,
) {
    // SAFETY: addresses of tiles are those of the operands, all inside by the caller's promise. A
    // strip's 16 rows of sums lie in both planes: `tile` is 0 or 1, and the slices check it; their
    // pointers are made of the exclusive borrow. The pending epilogue keeps the promise of
    // `Whole::new`.
    unsafe {
        let whole = waiting.map(|(sums, target)| Whole::new(sums, target));
        let rows = whole.as_ref().map_or(0, Whole::rows);
        let mut pending = PendingEpilogue::<RANK, HELD> { whole, each: rows.div_ceil(tiles * columns * amx::PAUSES) };
        for tile in 0..tiles {
            amx::zero();
            for column in 0..columns {
                let high = left.bytes.as_ptr().add(column * left.column_stride + tile * TILE_ROWS * TILE_DEPTH);
                let first = right.tiles.as_ptr().add(column * 2 * TILE_BYTES);
                let strip = amx::Strip {
                    high,
                    low: high.add(left.slice_stride),
                    right: [first, first.add(right.block_stride)],
                };
                amx::multiply_strip(strip, &mut pending);
            }
            let [first, second] = [0, 1].map(|plane| sums.0[plane][tile * TILE_ROWS..][..TILE_ROWS].as_mut_ptr());
            amx::store_strip(first.cast(), second.cast(), BLOCK);
        }
    }
}
