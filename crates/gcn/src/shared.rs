//! Memory that a group shares (LDS), and the private memory of its lanes.

use crate::instruction::LANES;
use crate::race::{Accessor, Cell};

/// The shared memory of one group.
pub(crate) struct Shared {
    words: Vec<u32>,
    defined: Vec<bool>,
    cells: Vec<Cell>,
    bytes: usize,
}

impl Shared {
    pub(crate) fn new(bytes: usize, poison: u32) -> Self {
        let words = bytes.div_ceil(4);
        let contents = (0..words as u32).map(|word| poison.wrapping_mul(word | 1)).collect();
        Self { words: contents, defined: vec![false; words], cells: vec![Cell::default(); words], bytes }
    }

    /// For the next group: contents stay as garbage.
    pub(crate) fn forget(&mut self) {
        self.defined.fill(false);
        self.cells.fill(Cell::default());
    }

    fn index(&self, address: u32, dwords: usize) -> Result<usize, String> {
        let bytes = 4 * dwords;
        if address as usize > self.bytes || bytes > self.bytes - address as usize {
            return Err(format!("out of bounds: {bytes} bytes at byte {address} of {} shared bytes", self.bytes));
        }
        // Enough for every width: AMD's driver runs gfx9 in its mode for unaligned access.
        if !address.is_multiple_of(4) {
            return Err(format!("misaligned: shared byte {address} is not a multiple of 4"));
        }
        Ok(address as usize / 4)
    }

    #[inline(always)]
    pub(crate) fn load(&mut self, address: u32, to: &mut [(u32, bool)], by: Accessor) -> Result<(), String> {
        let first = self.index(address, to.len())?;
        for (word, to) in (first..).zip(to) {
            self.cells[word].read(by)?;
            *to = (self.words[word], self.defined[word]);
        }
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn store(&mut self, address: u32, from: &[(u32, bool)], by: Accessor) -> Result<(), String> {
        let first = self.index(address, from.len())?;
        for (word, (value, defined)) in (first..).zip(from) {
            self.cells[word].write(by)?;
            self.words[word] = *value;
            self.defined[word] = *defined;
        }
        Ok(())
    }
}

/// The private memory of a wave's lanes: each has its own bytes.
pub(crate) struct Private {
    words: Vec<[u32; LANES]>,
    defined: Vec<u64>,
}

impl Private {
    pub(crate) fn new(bytes: usize, poison: u32) -> Self {
        let words = bytes.div_ceil(4);
        Self { words: vec![[poison; LANES]; words], defined: vec![0; words] }
    }

    fn index(&self, address: u32) -> Result<usize, String> {
        let word = address as usize / 4;
        if word >= self.words.len() {
            return Err(format!("out of bounds: byte {address} of {} private bytes", 4 * self.words.len()));
        }
        if !address.is_multiple_of(4) {
            return Err(format!("misaligned: private byte {address} is not a multiple of 4"));
        }
        Ok(word)
    }

    pub(crate) fn load(&self, lane: usize, address: u32) -> Result<(u32, bool), String> {
        let word = self.index(address)?;
        Ok((self.words[word][lane], self.defined[word] >> lane & 1 == 1))
    }

    pub(crate) fn store(&mut self, lane: usize, address: u32, value: (u32, bool)) -> Result<(), String> {
        let word = self.index(address)?;
        self.words[word][lane] = value.0;
        self.defined[word] = self.defined[word] & !(1 << lane) | u64::from(value.1) << lane;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by(epoch: usize, wave: usize) -> Accessor {
        Accessor::new(1, 0, epoch, wave)
    }

    #[test]
    fn shared_memory_is_checked() {
        let mut shared = Shared::new(16, 7);
        shared.store(4, &[(1, true), (2, true)], by(1, 0)).expect("inside");
        let mut to = [(0, false); 3];
        shared.load(4, &mut to, by(1, 0)).expect("inside");
        assert_eq!((to[0], to[1], to[2].1), ((1, true), (2, true), false));
        assert!(shared.load(8, &mut to, by(1, 0)).expect_err("too far").contains("out of bounds"));
        assert!(shared.load(2, &mut to, by(1, 0)).expect_err("not aligned").contains("misaligned"));
        assert!(shared.load(u32::MAX, &mut to, by(1, 0)).is_err());
    }

    #[test]
    fn races_need_a_barrier() {
        let mut shared = Shared::new(4, 0);
        let mut to = [(0, false)];
        shared.store(0, &[(1, true)], by(1, 0)).expect("the first");
        assert!(shared.load(0, &mut to, by(1, 1)).expect_err("no barrier").contains("race"));
        assert!(shared.store(0, &[(1, true)], by(1, 1)).is_err());
        shared.load(0, &mut to, by(2, 1)).expect("a barrier between");
        shared.load(0, &mut to, by(2, 0)).expect("two readers");
        assert!(shared.store(0, &[(1, true)], by(2, 1)).expect_err("no barrier").contains("several waves"));
        shared.store(0, &[(1, true)], by(3, 1)).expect("a barrier between");
    }

    #[test]
    fn lanes_have_memory_of_their_own() {
        let mut private = Private::new(8, 9);
        private.store(3, 4, (5, true)).expect("inside");
        assert_eq!(private.load(3, 4), Ok((5, true)));
        assert_eq!(private.load(4, 4).map(|(_, defined)| defined), Ok(false));
        assert!(private.load(0, 8).is_err() && private.load(0, 2).is_err() && private.store(0, 9, (0, true)).is_err());
    }
}
