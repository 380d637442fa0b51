//! How this thread's processor rounds and what it does with subnormal numbers. A program starts
//! with the IEEE-754 defaults; a library that is preloaded or opened later may leave others behind
//! (`-ffast-math` links a start-up routine that flushes subnormal numbers to zero), and a new
//! thread inherits them. Every result would be off in its last bits, in silence.
//!
//! So the state is put back before it can matter: at the start of the program, after every call
//! into a vendor's library, and on every thread of a pool before every job. Reading it costs a few
//! cycles.

/// Puts the IEEE-754 defaults back: to nearest even, subnormal numbers kept, no traps. True where
/// they had been changed.
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

    /// All of MXCSR but the flags of past exceptions: rounding, both treatments of subnormal
    /// numbers, traps. The older x87 unit has a word of its own, but nothing here computes with it.
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

    /// All of FPCR: rounding, treatment of subnormal numbers and NaN, traps.
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

/// Elsewhere nothing is known of such a state.
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
