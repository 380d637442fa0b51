//! Slices: a row chunk of float32 as scaled integers that int8 units multiply exactly
//! (`docs/numerics.md`, "Slices").

/// Elements of the contraction axis that share one scale and one exact integer sum.
pub const CHUNK: usize = 512;

/// The number of 8-bit slices per number, which sets how many of their products are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Profile {
    /// Two slices, three products (`hi·hi`, `hi·lo`, `lo·hi`): the default.
    X2,
    /// Three slices, the six leading products: float32 accuracy.
    X3,
}

impl Profile {
    pub const ALL: [Self; 2] = [Self::X2, Self::X3];

    /// Largest magnitude of the integer a number becomes: 127·256 or 127·65536.
    pub const fn limit(self) -> i32 {
        match self {
            Self::X2 => 127 << 8,
            Self::X3 => 127 << 16,
        }
    }

    /// The largest magnitude divided by this gives the scale: the limit, less this operand's half
    /// of the place that the kept products leave out (256 for x2, 65536 for x3): 16 and 256, powers
    /// of two that cost no bit.
    pub const fn scale_divisor(self) -> f32 {
        match self {
            Self::X2 => 2032.0,
            Self::X3 => 32512.0,
        }
    }

    pub const fn slice_count(self) -> usize {
        match self {
            Self::X2 => 2,
            Self::X3 => 3,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::X2 => "x2",
            Self::X3 => "x3",
        }
    }
}

/// Bits of `|x|`: ordered as integers like the magnitudes, with infinities and NaN on top. The
/// maximum of these over a chunk is exact in any order.
#[inline(always)]
pub fn magnitude_bits(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

/// Magnitudes below 2⁻¹⁰⁰ count as zero for the choice of a scale (its reciprocal would overflow).
const TINY_BITS: u32 = (127 - 100) << 23;
const INFINITY_BITS: u32 = 0x7f80_0000;

/// The factor on one (row, chunk) before rounding, and the factor that scales the integers back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantiser {
    /// `limit / max`, rounded once; zero when the chunk counts as zero or holds a non-finite
    /// number.
    pub multiplier: f32,
    /// `max / scale_divisor`, rounded once: this operand's factor on the value of a chunk. Zero
    /// when the chunk counts as zero, NaN when it holds a non-finite number.
    pub scale: f32,
}

impl Quantiser {
    /// From the largest [`magnitude_bits`] of the chunk.
    #[inline(always)]
    pub fn of(profile: Profile, max_bits: u32) -> Self {
        if max_bits < TINY_BITS {
            return Self { multiplier: 0.0, scale: 0.0 };
        }
        if max_bits >= INFINITY_BITS {
            return Self { multiplier: 0.0, scale: f32::NAN };
        }
        let max = f32::from_bits(max_bits);
        let limit = profile.limit() as f32;
        Self { multiplier: limit / max, scale: max / profile.scale_divisor() }
    }

    /// The integer of one element: `round_half_even(x · multiplier)`, clamped to the limit. An
    /// element of a poisoned chunk (multiplier zero, `x` possibly NaN or infinite) is zero.
    #[inline(always)]
    pub fn quantise(self, profile: Profile, x: f32) -> i32 {
        let scaled = x * self.multiplier;
        let limit = profile.limit() as f32;
        let rounded = round_half_even(scaled);
        let clamped = if rounded > limit {
            limit
        } else if rounded < -limit {
            -limit
        } else {
            rounded
        };
        // NaN converts to zero.
        if clamped.is_nan() { 0 } else { clamped as i32 }
    }
}

/// Nearest integer, ties to even, for any magnitude, from additions only.
#[inline(always)]
pub fn round_half_even(x: f32) -> f32 {
    const SHIFT: f32 = 8388608.0; // 2²³: from here on every float32 is an integer.
    let magnitude = f32::from_bits(magnitude_bits(x));
    let sign = x.to_bits() & 0x8000_0000;
    let rounded = (magnitude + SHIFT) - SHIFT;
    let result = if magnitude < SHIFT { rounded } else { magnitude };
    f32::from_bits(result.to_bits() | sign)
}

/// `q = 256·hi + lo`, `lo` in −128..=127; `hi` is within ±127 for `|q| ≤ 32512`.
#[inline(always)]
pub fn split2(q: i32) -> [i8; 2] {
    let hi = (q + 128) >> 8;
    [hi as i8, (q - (hi << 8)) as i8]
}

/// `q = 65536·hi + 256·mid + lo`, `mid` and `lo` in −128..=127.
#[inline(always)]
pub fn split3(q: i32) -> [i8; 3] {
    let upper = (q + 128) >> 8;
    let lo = q - (upper << 8);
    let [hi, mid] = split2(upper);
    [hi, mid, lo as i8]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_recompose() {
        for q in -32512..=32512 {
            let [hi, lo] = split2(q);
            assert_eq!(256 * i32::from(hi) + i32::from(lo), q);
            assert!(hi >= -127);
        }
        for q in (-8323072..=8323072).step_by(7).chain([8323072, -8323072]) {
            let [hi, mid, lo] = split3(q);
            assert_eq!(65536 * i32::from(hi) + 256 * i32::from(mid) + i32::from(lo), q);
            assert!(hi >= -127);
        }
    }

    #[test]
    fn rounding_is_half_to_even() {
        for (x, want) in
            [(0.5, 0.0), (1.5, 2.0), (2.5, 2.0), (-0.5, -0.0), (-1.5, -2.0), (0.49999997, 0.0), (8388607.5, 8388608.0)]
        {
            assert_eq!(round_half_even(x).to_bits(), f32::to_bits(want), "{x}");
        }
        assert_eq!(round_half_even(1e30), 1e30);
        assert_eq!(round_half_even(f32::NEG_INFINITY), f32::NEG_INFINITY);
    }

    #[test]
    fn scale_edges() {
        for profile in Profile::ALL {
            let zero = Quantiser::of(profile, 0);
            assert_eq!((zero.multiplier, zero.scale), (0.0, 0.0));
            assert_eq!(Quantiser::of(profile, 1), zero, "a subnormal chunk counts as zero");
            let poisoned = Quantiser::of(profile, f32::INFINITY.to_bits());
            assert!(poisoned.scale.is_nan());
            for x in [f32::NAN, f32::INFINITY, 1.0] {
                assert_eq!(poisoned.quantise(profile, x), 0);
            }
            for max in [f32::MAX, 1.0, 3.0, 7.9e-31, 1.17e-7] {
                let quantiser = Quantiser::of(profile, max.to_bits());
                assert_eq!(quantiser.quantise(profile, max), profile.limit());
                assert_eq!(quantiser.quantise(profile, -max), -profile.limit());
            }
        }
    }
}
