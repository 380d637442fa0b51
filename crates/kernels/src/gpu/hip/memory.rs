//! Released device memory, kept for the next buffer of its size: `hipFree` waits for the device,
//! and a step asks for the same sizes as the one before.

use std::collections::BTreeMap;

/// The driver hands out whole pages.
const PAGE: usize = 4096;

/// Bytes to ask for.
pub(super) fn rounded(bytes: usize) -> usize {
    bytes.checked_next_multiple_of(PAGE).unwrap_or(bytes)
}

#[derive(Default)]
pub(super) struct Freed {
    /// Sizes of all blocks, in use or not, by address.
    sizes: BTreeMap<u64, usize>,
    /// Addresses of unused blocks by size.
    unused: BTreeMap<usize, Vec<u64>>,
}

impl Freed {
    pub(super) fn register(&mut self, pointer: u64, bytes: usize) {
        self.sizes.insert(pointer, bytes);
    }

    /// A block is no longer used.
    pub(super) fn give(&mut self, pointer: u64) {
        if let Some(bytes) = self.sizes.get(&pointer) {
            self.unused.entry(*bytes).or_default().push(pointer);
        }
    }

    /// An unused block of at least that size, and at most an eighth more.
    pub(super) fn take(&mut self, bytes: usize) -> Option<u64> {
        let fits = bytes..=bytes.saturating_add(bytes / 8);
        let (_, blocks) = self.unused.range_mut(fits).find(|(_, blocks)| !blocks.is_empty())?;
        blocks.pop()
    }

    /// All unused blocks, to be returned to the driver.
    pub(super) fn take_all(&mut self) -> Vec<u64> {
        let blocks: Vec<u64> = std::mem::take(&mut self.unused).into_values().flatten().collect();
        for pointer in &blocks {
            self.sizes.remove(pointer);
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_used_again_by_size() {
        let mut freed = Freed::default();
        freed.register(1, 8192);
        freed.register(2, 16 * PAGE);
        assert_eq!(freed.take(8192), None, "in use");
        freed.give(1);
        freed.give(2);
        assert_eq!(freed.take(4096), None, "twice the size");
        assert_eq!(freed.take(8192), Some(1));
        assert_eq!(freed.take(8192), None, "taken");
        assert_eq!(freed.take(15 * PAGE), Some(2), "a fifteenth more");
        freed.give(1);
        assert_eq!(freed.take_all(), [1]);
        freed.give(1);
        assert_eq!(freed.take(8192), None, "returned to the driver");
    }

    #[test]
    fn sizes_are_whole_pages() {
        assert_eq!([1, 4096, 4097].map(rounded), [4096, 4096, 8192]);
        assert_eq!(rounded(usize::MAX), usize::MAX);
    }
}
