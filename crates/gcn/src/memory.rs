//! Global memory: buffers at addresses far apart, every access checked for bounds, alignment,
//! definedness and races between waves and groups of a launch.

use crate::instruction::Width;
use crate::race::{Accessor, Cell};
use crate::random::mix;

/// Bytes of address space per buffer; an index error of less than this hits no other buffer.
const WINDOW_BITS: u32 = 36;
/// Addresses of buffers are multiples of this.
pub(crate) const ALIGNMENT: usize = 256;
/// BOUND: total bytes of live buffers, so that a wrong size fails cleanly.
const BYTES_MAX: usize = 8 << 30;

struct Buffer {
    base: u64,
    bytes: usize,
    words: Vec<u32>,
    /// Bit `n` of an entry: byte `n` of the word was written.
    defined: Vec<u8>,
    /// Two per word.
    cells: Vec<Cell>,
    writable: bool,
}

/// All buffers of a card.
#[derive(Default)]
pub(crate) struct Memory {
    buffers: Vec<Option<Buffer>>,
    live: usize,
    seed: u64,
}

/// A loaded value and whether all of its bytes were written before.
pub(crate) type Loaded = (u32, bool);

impl Memory {
    pub(crate) fn new(seed: u64) -> Self {
        Self { buffers: vec![None], live: 0, seed }
    }

    /// An uninitialised buffer; its address. Contents are poisoned by the seed.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Result<u64, String> {
        if bytes > BYTES_MAX - self.live {
            return Err(format!("{bytes} bytes are more than the emulated card has left"));
        }
        let id = self.buffers.len() as u64;
        if id >= 1 << (63 - WINDOW_BITS) {
            return Err("more buffers than addresses".to_string());
        }
        // A multiple of 2³² lies in the first KiB: kernels must carry into the high half.
        let skew = if self.seed == 0 { 0 } else { mix(self.seed, id) % 4 * ALIGNMENT as u64 };
        let base = (id << WINDOW_BITS) + (1 << 32) - 4 * ALIGNMENT as u64 + skew;
        let words = bytes.div_ceil(4);
        let poison = if self.seed == 0 { 0 } else { mix(self.seed, id) as u32 };
        let contents = (0..words as u32).map(|word| poison.wrapping_mul(word | 1)).collect();
        self.buffers.push(Some(Buffer {
            base,
            bytes,
            words: contents,
            defined: vec![0; words],
            cells: vec![Cell::default(); 2 * words],
            writable: true,
        }));
        self.live += bytes;
        Ok(base)
    }

    pub(crate) fn release(&mut self, address: u64) {
        if let Some(slot) = self.buffers.get_mut((address >> WINDOW_BITS) as usize) {
            self.live -= slot.take().map_or(0, |buffer| buffer.bytes);
        }
    }

    /// From now on, kernels may only read.
    pub(crate) fn protect(&mut self, address: u64) {
        if let Ok((buffer, _)) = self.find(address, 0) {
            buffer.writable = false;
        }
    }

    fn find(&mut self, address: u64, bytes: u64) -> Result<(&mut Buffer, usize), String> {
        let buffer = self.buffers.get_mut((address >> WINDOW_BITS) as usize).and_then(Option::as_mut);
        let Some(buffer) = buffer else {
            return Err(format!("{address:#x} is in no buffer"));
        };
        let offset = address.wrapping_sub(buffer.base);
        if offset > buffer.bytes as u64 || bytes > buffer.bytes as u64 - offset {
            let signed = offset as i64;
            return Err(format!("out of bounds: {bytes} bytes at byte {signed} of a buffer of {}", buffer.bytes));
        }
        Ok((buffer, offset as usize))
    }

    /// The host writes.
    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), String> {
        let (buffer, offset) = self.find(address, bytes.len() as u64)?;
        for (at, byte) in (offset..).zip(bytes) {
            let shift = 8 * (at % 4);
            let word = &mut buffer.words[at / 4];
            *word = *word & !(0xff << shift) | u32::from(*byte) << shift;
            buffer.defined[at / 4] |= 1 << (at % 4);
        }
        Ok(())
    }

    /// The host reads.
    pub(crate) fn read(&mut self, bytes: &mut [u8], address: u64) -> Result<(), String> {
        let (buffer, offset) = self.find(address, bytes.len() as u64)?;
        for (at, byte) in (offset..).zip(bytes) {
            *byte = (buffer.words[at / 4] >> (8 * (at % 4))) as u8;
        }
        Ok(())
    }

    /// A kernel reads `count` dwords into `to`.
    #[inline(always)]
    pub(crate) fn load(&mut self, address: u64, to: &mut [Loaded], by: Accessor) -> Result<(), String> {
        let (buffer, offset) = self.find(address, 4 * to.len() as u64)?;
        if !offset.is_multiple_of(4) {
            return Err(misaligned(address, 4));
        }
        for (word, to) in (offset / 4..).zip(to) {
            buffer.cells[2 * word].read(by)?;
            buffer.cells[2 * word + 1].read(by)?;
            *to = (buffer.words[word], buffer.defined[word] == 15);
        }
        Ok(())
    }

    /// A kernel reads less than a dword; extended to a dword.
    pub(crate) fn load_part(&mut self, address: u64, width: Width, by: Accessor) -> Result<Loaded, String> {
        let bytes = width.bytes();
        let (buffer, offset) = self.find(address, bytes)?;
        if !(offset as u64).is_multiple_of(bytes) {
            return Err(misaligned(address, bytes));
        }
        buffer.cells[offset / 2].read(by)?;
        let bits = buffer.words[offset / 4] >> (8 * (offset % 4));
        let value = match width {
            Width::U8 => bits as u8 as u32,
            Width::I8 => bits as i8 as u32,
            Width::U16 => bits as u16 as u32,
            Width::I16 => bits as i16 as u32,
            Width::Dwords(_) => return Err("a dword is not part of one".to_string()),
        };
        let mask = ((1u8 << bytes) - 1) << (offset % 4);
        Ok((value, buffer.defined[offset / 4] & mask == mask))
    }

    /// A kernel writes dwords.
    #[inline(always)]
    pub(crate) fn store(&mut self, address: u64, from: &[u32], by: Accessor) -> Result<(), String> {
        let (buffer, offset) = self.find(address, 4 * from.len() as u64)?;
        if !offset.is_multiple_of(4) {
            return Err(misaligned(address, 4));
        }
        if !buffer.writable {
            return Err("a write to constant memory".to_string());
        }
        for (word, from) in (offset / 4..).zip(from) {
            buffer.cells[2 * word].write(by)?;
            buffer.cells[2 * word + 1].write(by)?;
            buffer.words[word] = *from;
            buffer.defined[word] = 15;
        }
        Ok(())
    }

    /// A kernel writes two bytes.
    pub(crate) fn store_short(&mut self, address: u64, value: u32, by: Accessor) -> Result<(), String> {
        let (buffer, offset) = self.find(address, 2)?;
        if !offset.is_multiple_of(2) {
            return Err(misaligned(address, 2));
        }
        if !buffer.writable {
            return Err("a write to constant memory".to_string());
        }
        buffer.cells[offset / 2].write(by)?;
        let shift = 8 * (offset % 4);
        let word = &mut buffer.words[offset / 4];
        *word = *word & !(0xffff << shift) | (value & 0xffff) << shift;
        buffer.defined[offset / 4] |= 3 << (offset % 4);
        Ok(())
    }
}

#[cold]
fn misaligned(address: u64, bytes: u64) -> String {
    format!("misaligned: {address:#x} is not a multiple of {bytes}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(memory: &mut Memory, address: u64, count: usize, by: Accessor) -> Result<Vec<Loaded>, String> {
        let mut to = vec![(0, false); count];
        memory.load(address, &mut to, by).map(|()| to)
    }

    #[test]
    fn accesses_outside_a_buffer_are_errors() {
        let mut memory = Memory::new(0);
        let (a, by) = (memory.allocate(10).expect("memory"), Accessor::new(1, 0, 0, 0));
        assert!(memory.store(a + 4, &[1], by).is_ok());
        for (address, count) in [(a + 8, 1), (a + 12, 1), (a - 4, 1), (a, 3), (a + (1 << 40), 1), (0, 1)] {
            assert!(words(&mut memory, address, count, by).is_err(), "{address:#x}");
        }
        assert!(words(&mut memory, a + 2, 1, by).expect_err("not aligned").contains("misaligned"));
        assert!(memory.store_short(a + 1, 0, by).expect_err("not aligned").contains("misaligned"));
        memory.protect(a);
        assert!(memory.store(a, &[1], by).expect_err("constant").contains("constant"));
        memory.release(a);
        assert!(words(&mut memory, a, 1, by).expect_err("released").contains("no buffer"));
    }

    #[test]
    fn a_multiple_of_2_to_the_32_lies_in_the_first_kibibyte_of_a_buffer() {
        let mut before = std::collections::BTreeSet::new();
        for seed in 0..6 {
            let mut memory = Memory::new(seed);
            for _ in 0..20 {
                let base = memory.allocate(1028).expect("memory");
                assert_ne!(base >> 32, (base + 1027) >> 32, "{base:#x}, seed {seed}");
                assert!(base.is_multiple_of(ALIGNMENT as u64), "{base:#x}");
                before.insert(base.wrapping_neg() as u32);
            }
        }
        assert_eq!(before.into_iter().collect::<Vec<_>>(), [256, 512, 768, 1024], "bytes before the multiple");
    }

    #[test]
    fn undefined_bytes_are_known() {
        let mut memory = Memory::new(3);
        let (a, by) = (memory.allocate(16).expect("memory"), Accessor::new(1, 0, 0, 0));
        memory.write(a, &[1, 2, 3, 4, 5]).expect("inside");
        memory.store_short(a + 8, 0x1_2345, by).expect("inside");
        let got = words(&mut memory, a, 3, by).expect("inside");
        assert_eq!((got[0], got[1].1, got[2].1), ((0x0403_0201, true), false, false));
        assert_eq!(memory.load_part(a + 8, Width::U16, by), Ok((0x2345, true)));
        assert_eq!(memory.load_part(a + 4, Width::U8, by), Ok((5, true)));
        assert!(!memory.load_part(a + 4, Width::U16, by).expect("inside").1);
    }

    #[test]
    fn small_loads_extend() {
        let mut memory = Memory::new(0);
        let (a, by) = (memory.allocate(4).expect("memory"), Accessor::new(1, 0, 0, 0));
        memory.write(a, &[0x80, 0xff, 0x00, 0x80]).expect("inside");
        let mut load = |at, width| memory.load_part(a + at, width, by).expect("inside").0;
        assert_eq!((load(0, Width::U8), load(0, Width::I8)), (0x80, 0xffff_ff80));
        assert_eq!((load(2, Width::U16), load(2, Width::I16)), (0x8000, 0xffff_8000));
    }

    #[test]
    fn races_between_waves_and_groups() {
        let by = Accessor::new;
        let ordered = |first: (bool, Accessor), second: (bool, Accessor)| {
            let mut memory = Memory::new(0);
            let a = memory.allocate(4).expect("memory");
            let mut access = |(write, by)| {
                if write { memory.store(a, &[0], by) } else { words(&mut memory, a, 1, by).map(drop) }
            };
            access(first).expect("the first access");
            access(second).is_ok()
        };
        let (read, write) = (false, true);
        assert!(!ordered((write, by(1, 0, 0, 0)), (read, by(1, 0, 0, 1))), "no barrier between waves");
        assert!(!ordered((read, by(1, 0, 0, 0)), (write, by(1, 0, 0, 1))));
        assert!(!ordered((write, by(1, 0, 0, 0)), (write, by(1, 0, 0, 1))));
        assert!(ordered((read, by(1, 0, 0, 0)), (read, by(1, 0, 0, 1))), "two readers");
        assert!(ordered((write, by(1, 0, 0, 0)), (read, by(1, 0, 1, 1))), "a barrier between");
        assert!(ordered((write, by(1, 0, 0, 0)), (write, by(1, 0, 0, 0))), "one wave is in order");
        assert!(!ordered((write, by(1, 0, 0, 0)), (read, by(1, 1, 3, 0))), "groups are never ordered");
        assert!(!ordered((read, by(1, 1, 0, 0)), (write, by(1, 0, 3, 0))));
        assert!(ordered((write, by(1, 0, 0, 0)), (read, by(2, 1, 0, 0))), "launches are");
    }

    #[test]
    fn several_readers_are_remembered() {
        let mut memory = Memory::new(0);
        let a = memory.allocate(4).expect("memory");
        for wave in 0..2 {
            words(&mut memory, a, 1, Accessor::new(1, 0, 0, wave)).expect("a read");
        }
        assert!(memory.store(a, &[0], Accessor::new(1, 0, 0, 1)).is_err(), "wave 0 still reads");
        assert!(memory.store(a, &[0], Accessor::new(1, 0, 1, 1)).is_ok());
        for group in 0..2 {
            words(&mut memory, a, 1, Accessor::new(2, group, 0, 0)).expect("a read");
        }
        assert!(memory.store(a, &[0], Accessor::new(2, 1, 9, 0)).expect_err("a race").contains("several groups"));
    }
}
