//! The instruction sets of the machine. Detected once; a path can be forced only if the machine
//! supports it.

use std::fmt;
use std::str::FromStr;

/// A family of instruction sequences. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Path {
    /// Plain Rust for the baseline of the target, no fused multiply-add instruction.
    Scalar,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 (F, BW, DQ, VL, CD) with VNNI.
    Avx512,
    /// Like `Avx512`, with slice products on AMX int8 tiles.
    Amx,
}

impl Path {
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Amx];

    /// Every path this machine can run, slowest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|path| path.is_available()).collect()
    }

    /// The fastest path of this machine.
    pub fn best() -> Self {
        Self::available().last().copied().unwrap_or(Self::Scalar)
    }

    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        use std::arch::is_x86_feature_detected as has;
        let avx2 = has!("avx2") && has!("fma") && has!("f16c") && has!("bmi1") && has!("bmi2");
        let avx512 = avx2
            && has!("avx512f")
            && has!("avx512bw")
            && has!("avx512dq")
            && has!("avx512vl")
            && has!("avx512cd")
            && has!("avx512vnni");
        match self {
            Self::Scalar => true,
            Self::Avx2 => avx2,
            Self::Avx512 => avx512,
            Self::Amx => avx512 && super::amx::permitted(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Self::Scalar
    }

    /// The compilation of float code used on this path.
    pub fn vector(self) -> Vector {
        match self {
            Self::Scalar => Vector::Scalar,
            Self::Avx2 => Vector::Avx2,
            Self::Avx512 | Self::Amx => Vector::Avx512,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }
}

/// Compilations of float code: AMX adds nothing to AVX-512 here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vector {
    Scalar,
    Avx2,
    Avx512,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Path {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|path| path.name() == text)
            .ok_or_else(|| format!("unknown path `{text}`: scalar, avx2, avx512 or amx"))
    }
}

/// Prefetches the cache line of an address.
#[inline(always)]
pub(super) fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction; it is a hint, which may name any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    let _ = address;
}

/// Compiles one function per instruction set. The body is generic over `F: Fma`; the compiler
/// neither contracts nor reorders float arithmetic, so the copies agree on bits. The resulting
/// function takes the path as its first argument.
macro_rules! multiversion {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident<$fma:ident $(, const $konst:ident: $konst_type:ty)?>($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::extra_unused_type_parameters, reason = "a body without fused multiply-adds names it `_F`")]
        $visibility fn $name$(<const $konst: $konst_type>)?(path: $crate::cpu::Path, $($arg: $type),*) $(-> $ret)? {
            #[allow(clippy::extra_unused_type_parameters, reason = "a body without fused multiply-adds names it `_F`")]
            #[inline(always)]
            fn body<$fma: isobit_numerics::Fma $(, const $konst: $konst_type)?>($($arg: $type),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2")]
            fn avx2$(<const $konst: $konst_type>)?($($arg: $type),*) $(-> $ret)? {
                body::<isobit_numerics::HardFma $(, $konst)?>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vnni,avx2,fma,f16c,bmi1,bmi2")]
            fn avx512$(<const $konst: $konst_type>)?($($arg: $type),*) $(-> $ret)? {
                body::<isobit_numerics::HardFma $(, $konst)?>($($arg),*)
            }

            match path.vector() {
                $crate::cpu::path::Vector::Scalar => body::<isobit_numerics::SoftFma $(, $konst)?>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a `Cpu` holds this path only after checking AVX2 with all that is enabled
                // here.
                $crate::cpu::path::Vector::Avx2 => unsafe { avx2$(::<$konst>)?($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a `Cpu` holds this path only after checking AVX-512 with all that is
                // enabled here.
                $crate::cpu::path::Vector::Avx512 => unsafe { avx512$(::<$konst>)?($($arg),*) },
                #[cfg(not(target_arch = "x86_64"))]
                _ => unreachable!("only the scalar path exists on this architecture"),
            }
        }
    };
}
pub(crate) use multiversion;
