//! Sum of squares (`docs/numerics.md`, "Sum of squares and clipping"), level by level.
//!
//! Level 0: blocks of [`BLOCK`] elements, the last one shorter, each a lane sum of `fma(x, x, ·)`. Every further level: lane
//! sums of blocks of [`BLOCK`] values of the level before, until one value is left. Nothing at all sums to +0.

/// Elements of one block on every level.
pub const BLOCK: usize = 4096;
