//! The rounding mode and subnormal handling of this thread's processor. A program starts with the
//! IEEE-754 defaults; a library that is preloaded or opened later may change them (`-ffast-math`
//! links a start-up routine that flushes subnormal numbers to zero), and new threads inherit the
//! change. Every result would silently be off in its last bits.
//!
//! So the state is restored before it can matter: at program start, after every call into a vendor
//! library, and on every pool thread before every job. Reading it costs a few cycles.

/// Restores the IEEE-754 defaults: round to nearest even, subnormals kept, no traps. Returns true
/// if they had been changed.
#[inline]
pub fn restore() -> bool {
    let state = machine::read();
    let changed = state & machine::CONTROL != machine::STANDARD;
    if changed {
        machine::write(state & !machine::CONTROL | machine::STANDARD);
    }
    changed
}

#[cfg(target_arch = "x86_64")]
mod machine {
    use std::arch::asm;

    /// All of MXCSR except the sticky exception flags: rounding, both subnormal modes, traps. The
    /// x87 unit has its own control word, but nothing here uses it.
    pub(super) const CONTROL: u32 = 0xffc0;
    /// All traps off, everything else zero.
    pub(super) const STANDARD: u32 = 0x1f80;

    #[inline]
    pub(super) fn read() -> u32 {
        let mut state = 0_u32;
        // SAFETY: `stmxcsr` writes four bytes, those of `state`, and changes nothing else.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut state, options(nostack, preserves_flags)) };
        state
    }

    pub(super) fn write(state: u32) {
        // SAFETY: `ldmxcsr` reads the four bytes of `state`. Compiled code takes the default state
        // for granted, and `restore`, the only caller, sets that.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const state, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod machine {
    use std::arch::asm;

    /// All of FPCR: rounding, handling of subnormals and NaN, traps.
    pub(super) const CONTROL: u64 = u64::MAX;
    pub(super) const STANDARD: u64 = 0;

    #[inline]
    pub(super) fn read() -> u64 {
        let state: u64;
        // SAFETY: reads a register that every program may read, and nothing else.
        unsafe { asm!("mrs {}, fpcr", out(reg) state, options(nomem, nostack, preserves_flags)) };
        state
    }

    pub(super) fn write(state: u64) {
        // SAFETY: compiled code takes the default state for granted, and `restore`, the only
        // caller, sets that; no memory is touched.
        unsafe { asm!("msr fpcr, {}", in(reg) state, options(nostack, preserves_flags)) };
    }
}

/// On other architectures there is no known state to restore.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod machine {
    pub(super) const CONTROL: u32 = 0;
    pub(super) const STANDARD: u32 = 0;

    #[inline]
    pub(super) fn read() -> u32 {
        STANDARD
    }

    pub(super) fn write(_state: u32) {}
}
