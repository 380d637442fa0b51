//! Device memory of a card: ranges of addresses, reserved whole and given memory as they grow.
//! `heap.rs` says where buffers lie in them. A buffer that was released is taken again by later
//! commands only, and commands run in order.

use super::{Answer, Driver};
use crate::heap::{Heaps, Lifetime};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// What memory is asked for: `CUmemAllocationProp`.
#[repr(C)]
pub(in crate::gpu) struct Properties {
    kind: c_int,
    exported_as: c_int,
    location: Location,
    metadata: *mut c_void,
    flags: u64,
}

/// A device: `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::gpu) struct Location {
    kind: c_int,
    device: c_int,
}

/// Who may use it: `CUmemAccessDesc`.
#[repr(C)]
pub(in crate::gpu) struct Access {
    location: Location,
    flags: c_int,
}

/// The ranges of a card.
pub(super) struct Ranges {
    heaps: Heaps,
    location: Location,
    /// Addresses of the ranges.
    bases: [u64; Heaps::COUNT],
    reserved: usize,
    /// Bytes of each range that have memory.
    mapped: [usize; Heaps::COUNT],
    /// Address and length of every piece.
    pieces: Vec<(u64, usize)>,
    /// Pieces are multiples of this.
    granularity: usize,
}

impl Ranges {
    /// Reserves addresses for all memory of a device in each range.
    ///
    /// # Safety
    /// The device's context is current.
    pub(super) unsafe fn reserve(driver: &Driver, device: c_int) -> Answer<Self> {
        const ON_DEVICE: c_int = 1;
        let location = Location { kind: ON_DEVICE, device };
        let (mut granularity, mut memory) = (0, 0);
        // SAFETY: room for the numbers; the device exists.
        unsafe {
            let properties = properties(location);
            let status = (driver.granularity)(&raw mut granularity, &raw const properties, 0);
            driver.check("cuMemGetAllocationGranularity", status)?;
            driver.check("cuDeviceTotalMem", (driver.memory)(&raw mut memory, device))?;
        }
        let granularity = granularity.max(1);
        let reserved = memory.next_multiple_of(granularity);
        let mut ranges = Self {
            heaps: Heaps::default(),
            location,
            bases: [0; Heaps::COUNT],
            reserved,
            mapped: [0; Heaps::COUNT],
            pieces: Vec::new(),
            granularity,
        };
        for base in &mut ranges.bases {
            // SAFETY: `base` has room for the address.
            let status = unsafe { (driver.reserve)(base, reserved, 0, 0, 0) };
            driver.check("cuMemAddressReserve", status)?;
        }
        Ok(ranges)
    }

    /// The address of a new buffer.
    ///
    /// # Safety
    /// The device's context is current.
    pub(super) unsafe fn take(&mut self, driver: &Driver, bytes: usize, lifetime: Lifetime) -> Answer<u64> {
        let range = Heaps::range_of(bytes, lifetime);
        let heap = &mut self.heaps.ranges[range];
        let start = heap.take(bytes);
        let end = heap.end_max();
        // SAFETY: the context is current (the caller's promise).
        if let Err(what) = unsafe { self.grow(driver, range, end) } {
            self.heaps.ranges[range].give(start);
            return Err(what);
        }
        Ok(self.bases[range] + start as u64)
    }

    pub(super) fn give(&mut self, address: u64) {
        let places = self.bases.map(|base| address.wrapping_sub(base));
        let Some(range) = places.iter().position(|place| *place < self.reserved as u64) else { return };
        self.heaps.ranges[range].give(places[range] as usize);
    }

    /// Gives a range memory up to `end`.
    unsafe fn grow(&mut self, driver: &Driver, range: usize, end: usize) -> Answer<()> {
        let mapped = self.mapped[range];
        if end <= mapped {
            return Ok(());
        }
        let least = (end - mapped).next_multiple_of(self.granularity);
        let step = (end - mapped).next_multiple_of(Heaps::STEPS[range]).next_multiple_of(self.granularity);
        // The last bytes of a card are taken in smaller steps.
        // SAFETY: the context is current (the caller's promise).
        unsafe { self.map(driver, range, step).or_else(|_| self.map(driver, range, least)) }
    }

    unsafe fn map(&mut self, driver: &Driver, range: usize, bytes: usize) -> Answer<()> {
        const READ_AND_WRITE: c_int = 3;
        let address = self.bases[range] + self.mapped[range] as u64;
        if self.mapped[range] + bytes > self.reserved {
            return Err(format!("{bytes} more bytes are more than the memory of the card"));
        }
        let (mut memory, properties) = (0, properties(self.location));
        let access = Access { location: self.location, flags: READ_AND_WRITE };
        // SAFETY: `memory` has room for the handle. The addresses are reserved and have no memory
        // yet. The mapping keeps the memory, so its handle can be released at once.
        unsafe {
            let status = (driver.create_memory)(&raw mut memory, bytes, &raw const properties, 0);
            driver.check(&format!("cuMemCreate of {bytes} bytes"), status)?;
            let status = (driver.map_memory)(address, bytes, 0, memory, 0);
            (driver.release_memory)(memory);
            driver.check("cuMemMap", status)?;
            self.pieces.push((address, bytes));
            self.mapped[range] += bytes;
            driver.check("cuMemSetAccess", (driver.set_access)(address, bytes, &raw const access, 1))
        }
    }

    /// # Safety
    /// The context is current, has no commands left, and no buffer is used any more.
    pub(super) unsafe fn free(self, driver: &Driver) {
        // SAFETY: mapped and reserved here, and given back here alone.
        unsafe {
            for (address, bytes) in self.pieces {
                (driver.unmap_memory)(address, bytes);
            }
            for base in self.bases {
                (driver.unreserve)(base, self.reserved);
            }
        }
    }
}

fn properties(location: Location) -> Properties {
    /// Memory that stays where it is.
    const PINNED: c_int = 1;
    Properties { kind: PINNED, exported_as: 0, location, metadata: null_mut(), flags: 0 }
}
