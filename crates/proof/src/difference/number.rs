//! Compares two sequences of elements: how many differ, by how much, and how many representable
//! numbers lie between.
//!
//! Elements differ if their bits do. Bytes are compared first, in blocks, because equal files are
//! the common case and comparing bytes runs at memory speed. Every figure is a sum or a maximum, so
//! the order of the blocks does not matter.
#![expect(clippy::float_arithmetic, reason = "differences are shown, never trained on")]

use crate::safetensors::Dtype;
use isobit_numerics::cast::{bf16_to_f32, f16_to_f32};

/// Bytes compared at once before looking at single elements: a multiple of every element size.
const BLOCK_BYTES: usize = 4096;

/// Statistics of the differing elements of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Elements that differ.
    pub nonzero: u64,
    /// Largest absolute difference; infinite if a number is compared with a NaN, or the format has
    /// no numbers to subtract.
    pub max: f64,
    /// Largest number of steps from one representable number to the other, counting both zeros as
    /// one; None if the format has no such steps.
    pub ulps: Option<u64>,
    /// Differing elements with a NaN on at least one side.
    pub nan: u64,
    /// Position of the first differing element.
    pub first: Option<u64>,
}

impl Tally {
    /// Combines both. Commutative, so threads may finish in any order.
    pub(crate) fn join(self, other: Self) -> Self {
        Self {
            nonzero: self.nonzero + other.nonzero,
            max: self.max.max(other.max),
            ulps: self.ulps.max(other.ulps),
            nan: self.nan + other.nan,
            first: self.first.into_iter().chain(other.first).min(),
        }
    }

    fn add(&mut self, index: usize, a: f64, b: f64) {
        self.nonzero += 1;
        self.first.get_or_insert(index as u64);
        if a.is_nan() || b.is_nan() {
            self.nan += 1;
            if a.is_nan() != b.is_nan() {
                self.max = f64::INFINITY;
            }
        } else {
            // Equal infinities never get here, so this is not NaN.
            self.max = self.max.max((a - b).abs());
        }
    }
}

/// Compares elements of one format; `index` is the position of the first of them in the tensor.
pub(crate) fn compare(dtype: Dtype, a: &[u8], b: &[u8], index: usize) -> Tally {
    match dtype {
        Dtype::F64 => floats(a, b, index, |x| f64::from_bits(u64::from_le_bytes(x)), |x| signed(u64::from_le_bytes(x))),
        Dtype::F32 => floats(a, b, index, f32_value, |x| signed((u32::from_le_bytes(x) as u64) << 32) >> 32),
        Dtype::Bf16 => floats(a, b, index, bf16_value, signed16),
        Dtype::F16 => floats(a, b, index, f16_value, signed16),
        Dtype::F8E5M2 => floats(a, b, index, |x| small(Dtype::F8E5M2, x), signed8),
        Dtype::F8E4M3 => floats(a, b, index, |x| small(Dtype::F8E4M3, x), signed8),
        Dtype::F8E4M3Fnuz => floats(a, b, index, |x| small(Dtype::F8E4M3Fnuz, x), signed8),
        Dtype::F8E5M2Fnuz => floats(a, b, index, |x| small(Dtype::F8E5M2Fnuz, x), signed8),
        Dtype::F8E8M0 => floats(a, b, index, |x| small(Dtype::F8E8M0, x), |[x]| x as i64),
        Dtype::Bool | Dtype::U8 => integers(a, b, index, |[x]| x as i128),
        Dtype::I8 => integers(a, b, index, |x| i8::from_le_bytes(x) as i128),
        Dtype::I16 => integers(a, b, index, |x| i16::from_le_bytes(x) as i128),
        Dtype::U16 => integers(a, b, index, |x| u16::from_le_bytes(x) as i128),
        Dtype::I32 => integers(a, b, index, |x| i32::from_le_bytes(x) as i128),
        Dtype::U32 => integers(a, b, index, |x| u32::from_le_bytes(x) as i128),
        Dtype::I64 => integers(a, b, index, |x| i64::from_le_bytes(x) as i128),
        Dtype::U64 => integers(a, b, index, |x| u64::from_le_bytes(x) as i128),
        Dtype::C64 => complex(a, b, index),
        Dtype::F4 | Dtype::F6E2M3 | Dtype::F6E3M2 => packed(dtype, a, b, index),
    }
}

/// Compares elements of two formats by value; None if the two have no common numbers.
pub(crate) fn compare_values(types: [Dtype; 2], a: &[u8], b: &[u8], index: usize) -> Option<Tally> {
    let (a, b) = (values(types[0], a)?, values(types[1], b)?);
    let mut tally = Tally::default();
    for (position, (&x, &y)) in a.iter().zip(&b).enumerate() {
        if x != y && !(x.is_nan() && y.is_nan()) {
            tally.add(index + position, x, y);
        }
    }
    Some(tally)
}

/// Whether `compare_values` supports this format.
pub(crate) fn has_values(dtype: Dtype) -> bool {
    values(dtype, &[]).is_some()
}

fn values(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f64>> {
    fn all<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks::<N>().0.iter().map(|&x| value(x)).collect()
    }
    Some(match dtype {
        Dtype::F64 => all(bytes, |x| f64::from_bits(u64::from_le_bytes(x))),
        Dtype::F32 => all(bytes, f32_value),
        Dtype::Bf16 => all(bytes, bf16_value),
        Dtype::F16 => all(bytes, f16_value),
        Dtype::F8E5M2 | Dtype::F8E4M3 | Dtype::F8E8M0 | Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz => {
            all(bytes, |x| small(dtype, x))
        }
        _ => return None,
    })
}

/// An element in decimal, for display; None for a format of less than a byte.
pub(crate) fn show(dtype: Dtype, bytes: &[u8]) -> Option<String> {
    fn integer<const N: usize, T: ToString>(bytes: &[u8], value: impl Fn([u8; N]) -> T) -> Option<String> {
        bytes.first_chunk().map(|&x| value(x).to_string())
    }
    match dtype {
        Dtype::Bool | Dtype::U8 => integer(bytes, u8::from_le_bytes),
        Dtype::I8 => integer(bytes, i8::from_le_bytes),
        Dtype::I16 => integer(bytes, i16::from_le_bytes),
        Dtype::U16 => integer(bytes, u16::from_le_bytes),
        Dtype::I32 => integer(bytes, i32::from_le_bytes),
        Dtype::U32 => integer(bytes, u32::from_le_bytes),
        Dtype::I64 => integer(bytes, i64::from_le_bytes),
        Dtype::U64 => integer(bytes, u64::from_le_bytes),
        Dtype::C64 => bytes.first_chunk().map(|&x| format!("({}, {})", decimal(parts(x)[0]), decimal(parts(x)[1]))),
        _ => values(dtype, bytes)?.first().map(|&value| decimal(value)),
    }
}

/// The shortest decimal that round-trips; with an exponent if that is shorter.
pub fn decimal(value: f64) -> String {
    let (plain, scientific) = (value.to_string(), format!("{value:e}"));
    if plain.len() <= scientific.len() { plain } else { scientific }
}

/// Calls `look` for every pair of elements whose bytes differ.
fn differing<const N: usize>(a: &[u8], b: &[u8], index: usize, mut look: impl FnMut(usize, [u8; N], [u8; N])) {
    const { assert!(BLOCK_BYTES.is_multiple_of(N)) };
    for (block, (a, b)) in a.chunks(BLOCK_BYTES).zip(b.chunks(BLOCK_BYTES)).enumerate() {
        if a == b {
            continue;
        }
        let start = index + block * (BLOCK_BYTES / N);
        for (position, (x, y)) in a.as_chunks::<N>().0.iter().zip(b.as_chunks::<N>().0).enumerate() {
            if x != y {
                look(start + position, *x, *y);
            }
        }
    }
}

fn floats<const N: usize>(
    a: &[u8],
    b: &[u8],
    index: usize,
    value: impl Fn([u8; N]) -> f64,
    rank: impl Fn([u8; N]) -> i64,
) -> Tally {
    const { assert!(BLOCK_BYTES.is_multiple_of(N)) };
    let mut tally = Tally { ulps: Some(0), ..Tally::default() };
    for (block, (a, b)) in a.chunks(BLOCK_BYTES).zip(b.chunks(BLOCK_BYTES)).enumerate() {
        if a == b {
            continue;
        }
        let pairs = || a.as_chunks::<N>().0.iter().zip(b.as_chunks::<N>().0);
        if tally.first.is_none() {
            let position = pairs().position(|(x, y)| x != y).expect("the blocks differ");
            tally.first = Some((index + block * (BLOCK_BYTES / N) + position) as u64);
        }
        // Branch-free: in two unrelated files every element differs, and no branch is predictable.
        let (mut nonzero, mut nan, mut max, mut ulps) = (0_u64, 0_u64, 0.0_f64, 0_u64);
        for (&x, &y) in pairs() {
            let (v, w) = (value(x), value(y));
            let differ = x != y;
            let (either, both) = (v.is_nan() | w.is_nan(), v.is_nan() & w.is_nan());
            nonzero += u64::from(differ);
            nan += u64::from(differ & either);
            // Equal infinities subtract to a NaN, but do not differ.
            let gap = if either { f64::INFINITY } else { (v - w).abs() };
            let gap = if differ && !both { gap } else { 0.0 };
            max = if gap > max { gap } else { max };
            let steps = rank(x).abs_diff(rank(y));
            ulps = ulps.max(if either { 0 } else { steps });
        }
        tally = tally.join(Tally { nonzero, max, ulps: Some(ulps), nan, first: None });
    }
    tally
}

fn integers<const N: usize>(a: &[u8], b: &[u8], index: usize, value: impl Fn([u8; N]) -> i128) -> Tally {
    let mut tally = Tally::default();
    let mut most = 0;
    differing(a, b, index, |index, x, y| {
        tally.nonzero += 1;
        tally.first.get_or_insert(index as u64);
        most = most.max(value(x).abs_diff(value(y)));
    });
    tally.max = most as f64;
    tally
}

/// Pairs of float32: an element differs if either part does.
fn complex(a: &[u8], b: &[u8], index: usize) -> Tally {
    let mut tally = Tally::default();
    differing::<8>(a, b, index, |index, x, y| {
        let ([p, q], [r, s]) = (parts(x), parts(y));
        let mut element = Tally::default();
        for (part, other) in [(p, r), (q, s)] {
            if part.to_bits() != other.to_bits() {
                element.add(index, part, other);
            }
        }
        tally = tally.join(Tally { nonzero: 1, nan: element.nan.min(1), ..element });
    });
    tally
}

fn parts(bytes: [u8; 8]) -> [f64; 2] {
    let [a, b, c, d, e, f, g, h] = bytes;
    [f32_value([a, b, c, d]), f32_value([e, f, g, h])]
}

/// Formats of less than a byte: differing bytes are counted, values are not decoded.
fn packed(dtype: Dtype, a: &[u8], b: &[u8], index: usize) -> Tally {
    let mut tally = Tally::default();
    differing::<1>(a, b, 0, |byte, _, _| {
        tally.nonzero += 1;
        tally.max = f64::INFINITY;
        tally.first.get_or_insert((index + byte * 8 / dtype.bits()) as u64);
    });
    tally
}

fn f32_value(bytes: [u8; 4]) -> f64 {
    f32::from_le_bytes(bytes) as f64
}

fn bf16_value(bytes: [u8; 2]) -> f64 {
    bf16_to_f32(u16::from_le_bytes(bytes)) as f64
}

fn f16_value(bytes: [u8; 2]) -> f64 {
    f16_to_f32(u16::from_le_bytes(bytes)) as f64
}

/// Rank of a number within its format: the bits of the magnitude with the sign applied. Both zeros
/// have rank 0.
fn signed(bits: u64) -> i64 {
    let magnitude = (bits & (u64::MAX >> 1)) as i64;
    if bits >> 63 == 1 { -magnitude } else { magnitude }
}

fn signed16(bytes: [u8; 2]) -> i64 {
    signed((u16::from_le_bytes(bytes) as u64) << 48) >> 48
}

fn signed8([byte]: [u8; 1]) -> i64 {
    signed((byte as u64) << 56) >> 56
}

/// Value of an 8-bit number.
fn small(dtype: Dtype, [byte]: [u8; 1]) -> f64 {
    let magnitude = byte & 0x7f;
    // Bits of the mantissa, bias of the exponent, whether this is a NaN.
    let (mantissa, bias, nan) = match dtype {
        Dtype::F8E5M2 => return f16_to_f32((byte as u16) << 8) as f64,
        Dtype::F8E8M0 => return if byte == 255 { f64::NAN } else { power(byte as i32 - 127) },
        Dtype::F8E4M3 => (3, 7, magnitude == 0x7f),
        Dtype::F8E4M3Fnuz => (3, 8, byte == 0x80),
        _ => (2, 16, byte == 0x80),
    };
    if nan {
        return f64::NAN;
    }
    let exponent = (magnitude >> mantissa) as i32;
    let fraction = (magnitude & ((1 << mantissa) - 1)) as i32;
    let whole = if exponent == 0 { fraction } else { fraction + (1 << mantissa) };
    let value = whole as f64 * power(exponent.max(1) - bias - mantissa);
    if byte & 0x80 == 0 { value } else { -value }
}

/// 2 to a small power.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(dtype: Dtype, a: &[u8], b: &[u8]) -> Tally {
        let tally = compare(dtype, a, b, 0);
        let other = compare(dtype, b, a, 0);
        assert_eq!(format!("{tally:?}"), format!("{other:?}"), "the order of the two does not matter");
        tally
    }

    fn f32s(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn float_edges() {
        let pair = |x: f32, y: f32| of(Dtype::F32, &f32s(&[x]), &f32s(&[y]));
        let tiny = f32::from_bits(1);
        assert_eq!(pair(1.0, 1.0), Tally { ulps: Some(0), ..Tally::default() });
        assert_eq!(pair(0.0, -0.0), Tally { nonzero: 1, ulps: Some(0), first: Some(0), ..Tally::default() });
        assert_eq!((pair(tiny, -tiny).ulps, pair(tiny, -tiny).max), (Some(2), 2.0 * tiny as f64));
        assert_eq!(pair(1.0, 1.0 + f32::EPSILON).ulps, Some(1));
        assert_eq!(pair(1.0, 1.0 + f32::EPSILON).max, f32::EPSILON as f64);
        assert_eq!(
            pair(f32::INFINITY, f32::MAX),
            Tally { nonzero: 1, max: f64::INFINITY, ulps: Some(1), nan: 0, first: Some(0) }
        );
        assert_eq!(pair(f32::INFINITY, f32::NEG_INFINITY).ulps, Some(2 * 0x7f80_0000));
        assert_eq!(pair(f32::NAN, f32::NAN).nonzero, 0);
        assert_eq!(
            pair(f32::NAN, 1.0),
            Tally { nonzero: 1, max: f64::INFINITY, ulps: Some(0), nan: 1, first: Some(0) }
        );
        let other = f32::from_bits(0x7fc0_0001);
        assert_eq!(pair(f32::NAN, other), Tally { nonzero: 1, max: 0.0, ulps: Some(0), nan: 1, first: Some(0) });
    }

    #[test]
    fn every_float_format_counts_steps() {
        let bytes = |bits: u64, size: usize| bits.to_le_bytes()[..size].to_vec();
        for (dtype, one, size) in [
            (Dtype::F64, 1.0_f64.to_bits(), 8),
            (Dtype::F32, 1.0_f32.to_bits() as u64, 4),
            (Dtype::Bf16, 0x3f80, 2),
            (Dtype::F16, 0x3c00, 2),
            (Dtype::F8E5M2, 0x3c, 1),
            (Dtype::F8E4M3, 0x38, 1),
            (Dtype::F8E4M3Fnuz, 0x40, 1),
            (Dtype::F8E5M2Fnuz, 0x40, 1),
        ] {
            assert_eq!(values(dtype, &bytes(one, size)).expect("float"), [1.0], "{dtype}");
            let sign = 1 << (size * 8 - 1);
            assert_eq!(of(dtype, &bytes(one, size), &bytes(one + 3, size)).ulps, Some(3), "{dtype}");
            let across = of(dtype, &bytes(one, size), &bytes(one | sign, size));
            assert_eq!((across.ulps, across.max), (Some(2 * one), 2.0), "{dtype}");
        }
        assert_eq!(small(Dtype::F8E8M0, [127]), 1.0);
        assert_eq!(small(Dtype::F8E4M3, [0x7e]), 448.0);
        assert_eq!(small(Dtype::F8E4M3, [0x81]), -power(-9));
        assert!(small(Dtype::F8E4M3, [0xff]).is_nan() && small(Dtype::F8E5M2Fnuz, [0x80]).is_nan());
    }

    #[test]
    fn integers_and_others() {
        let tally = of(Dtype::U64, &u64::MAX.to_le_bytes(), &0_u64.to_le_bytes());
        assert_eq!((tally.nonzero, tally.max, tally.ulps), (1, u64::MAX as f64, None));
        assert_eq!(of(Dtype::I8, &[127, 0], &[128, 0]).max, 255.0);
        assert_eq!(of(Dtype::Bool, &[1, 0, 1], &[1, 0, 0]).first, Some(2));
        let tally = of(Dtype::C64, &f32s(&[1.0, 2.0, 3.0, f32::NAN]), &f32s(&[1.0, 4.0, 0.0, 0.0]));
        assert_eq!(tally, Tally { nonzero: 2, max: f64::INFINITY, ulps: None, nan: 1, first: Some(0) });
        let tally = of(Dtype::F4, &[0, 1], &[0, 2]);
        assert_eq!((tally.nonzero, tally.max, tally.first), (1, f64::INFINITY, Some(2)));
    }

    #[test]
    fn first_and_counts_hold_across_blocks() {
        let count = 5000;
        let a = vec![0; count * 4];
        let mut b = a.clone();
        for index in [1023, 1024, 4999] {
            b[index * 4] = 1;
        }
        let tally = compare(Dtype::F32, &a, &b, 100);
        assert_eq!((tally.nonzero, tally.first, tally.ulps), (3, Some(1123), Some(1)));
    }

    #[test]
    fn formats_are_compared_by_value() {
        let wide = f32s(&[1.0, -0.0, f32::NAN, 1.001]);
        let narrow = [0x80, 0x3f, 0, 0, 0xc1, 0x7f, 0x80, 0x3f];
        let tally = compare_values([Dtype::F32, Dtype::Bf16], &wide, &narrow, 10).expect("both float");
        assert_eq!((tally.nonzero, tally.first, tally.nan, tally.ulps), (1, Some(13), 0, None));
        assert_eq!(tally.max, 1.001_f32 as f64 - 1.0);
        assert!(compare_values([Dtype::F32, Dtype::I32], &wide, &wide, 0).is_none());
    }
}
