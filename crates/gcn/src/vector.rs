//! Vector operations on all 64 lanes: plain loops over arrays, which the compiler vectorises.

use crate::float;
use crate::instruction::{Binary, Carry, Compare, LANES, Ternary, Unary, WideCompare, WideShift};
use crate::integer::*;
use crate::{divide, instruction};
use isobit_numerics::Fma;

pub(crate) type Lanes = [u32; instruction::LANES];

/// `$out[i] = $body` for every lane, with the sources by name.
macro_rules! each {
    ($out:ident, |$($x:ident),+| $body:expr) => {
        for lane in 0..LANES {
            $(let $x = $x[lane];)+
            $out[lane] = $body;
        }
    };
}

/// The same on float32 values.
macro_rules! each_f32 {
    ($out:ident, |$($x:ident),+| $body:expr) => {
        for lane in 0..LANES {
            $(let $x = f32::from_bits($x[lane]);)+
            $out[lane] = f32::to_bits($body);
        }
    };
}

#[inline(always)]
pub(crate) fn unary(op: Unary, a: &Lanes, seed: u64) -> Lanes {
    let mut out = [0; LANES];
    match op {
        Unary::Move | Unary::AccumulatorRead | Unary::AccumulatorWrite => out = *a,
        Unary::Not => each!(out, |a| !a),
        Unary::Reverse => each!(out, |a| a.reverse_bits()),
        Unary::FirstBitHighU32 => each!(out, |a| if a == 0 { u32::MAX } else { a.leading_zeros() }),
        Unary::ConvertF32I32 => each!(out, |a| (a as i32 as f32).to_bits()),
        Unary::ConvertF32U32 => each!(out, |a| (a as f32).to_bits()),
        // Saturating, and 0 for NaN: what the instruction does is what `as` does.
        Unary::ConvertI32F32 => each!(out, |a| f32::from_bits(a) as i32 as u32),
        Unary::ConvertU32F32 => each!(out, |a| f32::from_bits(a) as u32),
        Unary::Truncate => each_f32!(out, |a| a.trunc()),
        Unary::Floor => each_f32!(out, |a| a.floor()),
        Unary::RoundEven => each_f32!(out, |a| a.round_ties_even()),
        Unary::Reciprocal | Unary::ReciprocalInteger => each!(out, |a| float::reciprocal(seed, a)),
        Unary::SquareRoot => each!(out, |a| float::square_root(seed, a)),
        Unary::ReciprocalRoot => each!(out, |a| float::reciprocal_root(seed, a)),
    }
    out
}

#[inline(always)]
pub(crate) fn binary(op: Binary, a: &Lanes, b: &Lanes) -> Lanes {
    use Binary as B;
    let mut out = [0; LANES];
    match op {
        B::And => each!(out, |a, b| a & b),
        B::Or => each!(out, |a, b| a | b),
        B::Xor => each!(out, |a, b| a ^ b),
        B::ShiftLeft => each!(out, |a, b| b << (a & 31)),
        B::ShiftRight => each!(out, |a, b| b >> (a & 31)),
        B::ShiftRightI32 => each!(out, |a, b| (b as i32 >> (a & 31)) as u32),
        B::AddU32 => each!(out, |a, b| a.wrapping_add(b)),
        B::SubU32 => each!(out, |a, b| a.wrapping_sub(b)),
        B::SubrevU32 => each!(out, |a, b| b.wrapping_sub(a)),
        B::SubU32Saturated => each!(out, |a, b| a.saturating_sub(b)),
        B::MulLow => each!(out, |a, b| a.wrapping_mul(b)),
        B::MulHighU32 => each!(out, |a, b| ((a as u64 * b as u64) >> 32) as u32),
        B::MulHighI32 => each!(out, |a, b| ((a as i32 as i64 * b as i32 as i64) >> 32) as u32),
        B::MulU24 => each!(out, |a, b| u24(a).wrapping_mul(u24(b))),
        B::MulI24 => each!(out, |a, b| i24(a).wrapping_mul(i24(b)) as u32),
        B::MulHighU24 => each!(out, |a, b| ((u24(a) as u64 * u24(b) as u64) >> 32) as u32),
        B::MinU32 => each!(out, |a, b| a.min(b)),
        B::MaxU32 => each!(out, |a, b| a.max(b)),
        B::MinI32 => each!(out, |a, b| (a as i32).min(b as i32) as u32),
        B::MaxI32 => each!(out, |a, b| (a as i32).max(b as i32) as u32),
        B::AddF32 => each_f32!(out, |a, b| a + b),
        B::SubF32 => each_f32!(out, |a, b| a - b),
        B::SubrevF32 => each_f32!(out, |a, b| b - a),
        B::MulF32 => each_f32!(out, |a, b| a * b),
        B::MaxF32 => each!(out, |a, b| float::max(a, b)),
        B::MinF32 => each!(out, |a, b| float::min(a, b)),
        B::ScaleByPower => each!(out, |a, b| float::scale(a, b)),
    }
    out
}

#[inline(always)]
pub(crate) fn ternary<F: Fma>(op: Ternary, a: &Lanes, b: &Lanes, c: &Lanes) -> Lanes {
    use Ternary as T;
    let mut out = [0; LANES];
    match op {
        T::AndOr => each!(out, |a, b, c| a & b | c),
        T::Or3 => each!(out, |a, b, c| a | b | c),
        T::Insert => each!(out, |a, b, c| a & b | !a & c),
        T::ExtractU32 => each!(out, |a, b, c| extract_u32(a, b, c)),
        T::ExtractI32 => each!(out, |a, b, c| extract_i32(a, b, c)),
        T::AlignBit => each!(out, |a, b, c| align(a, b, c & 31)),
        T::AlignByte => each!(out, |a, b, c| align(a, b, 8 * (c & 3))),
        T::Permute => each!(out, |a, b, c| permute(a, b, c)),
        T::ShiftLeftAdd => each!(out, |a, b, c| (a << (b & 31)).wrapping_add(c)),
        T::AddShiftLeft => each!(out, |a, b, c| a.wrapping_add(b) << (c & 31)),
        T::ShiftLeftOr => each!(out, |a, b, c| a << (b & 31) | c),
        T::Add3 => each!(out, |a, b, c| a.wrapping_add(b).wrapping_add(c)),
        T::XorAdd => each!(out, |a, b, c| (a ^ b).wrapping_add(c)),
        T::MadU24 => each!(out, |a, b, c| u24(a).wrapping_mul(u24(b)).wrapping_add(c)),
        T::MadI24 => each!(out, |a, b, c| (i24(a).wrapping_mul(i24(b)) as u32).wrapping_add(c)),
        T::Max3U32 => each!(out, |a, b, c| a.max(b).max(c)),
        T::Min3U32 => each!(out, |a, b, c| a.min(b).min(c)),
        T::Med3U32 => each!(out, |a, b, c| median_u32(a, b, c)),
        T::Dot4 => each!(out, |a, b, c| dot4(a, b, c)),
        T::Fma => each_f32!(out, |a, b, c| F::fma(a, b, c)),
        T::MultiplyThenAdd => each!(out, |a, b, c| float::multiply_then_add(a, b, c)),
        T::Med3F32 => each!(out, |a, b, c| float::median(a, b, c)),
        T::DivideFixup => each!(out, |a, b, c| divide::fixup(a, b, c)),
    }
    out
}

/// A bit per lane.
#[inline(always)]
fn mask(test: impl Fn(usize) -> bool) -> u64 {
    let mut bits = 0;
    for lane in 0..LANES {
        bits |= (test(lane) as u64) << lane;
    }
    bits
}

/// Less or greater: false for NaN, unlike `!=`.
fn differ(a: f32, b: f32) -> bool {
    a.partial_cmp(&b).is_some_and(std::cmp::Ordering::is_ne)
}

#[inline(always)]
pub(crate) fn compare(op: Compare, a: &Lanes, b: &Lanes) -> u64 {
    use Compare as C;
    let unsigned = |test: fn(u32, u32) -> bool| mask(|lane| test(a[lane], b[lane]));
    let signed = |test: fn(i32, i32) -> bool| mask(|lane| test(a[lane] as i32, b[lane] as i32));
    let short = |test: fn(u16, u16) -> bool| mask(|lane| test(a[lane] as u16, b[lane] as u16));
    let real = |test: fn(f32, f32) -> bool| mask(|lane| test(f32::from_bits(a[lane]), f32::from_bits(b[lane])));
    match op {
        C::EqualU32 | C::EqualI32 => unsigned(|a, b| a == b),
        C::NotEqualU32 | C::NotEqualI32 => unsigned(|a, b| a != b),
        C::LessU32 => unsigned(|a, b| a < b),
        C::LessEqualU32 => unsigned(|a, b| a <= b),
        C::GreaterU32 => unsigned(|a, b| a > b),
        C::GreaterEqualU32 => unsigned(|a, b| a >= b),
        C::LessI32 => signed(|a, b| a < b),
        C::LessEqualI32 => signed(|a, b| a <= b),
        C::GreaterI32 => signed(|a, b| a > b),
        C::GreaterEqualI32 => signed(|a, b| a >= b),
        C::EqualU16 => short(|a, b| a == b),
        C::NotEqualU16 => short(|a, b| a != b),
        C::LessU16 => short(|a, b| a < b),
        C::GreaterU16 => short(|a, b| a > b),
        C::LessF32 => real(|a, b| a < b),
        C::EqualF32 => real(|a, b| a == b),
        C::LessEqualF32 => real(|a, b| a <= b),
        C::GreaterF32 => real(|a, b| a > b),
        C::GreaterEqualF32 => real(|a, b| a >= b),
        C::LessGreaterF32 => real(differ),
        C::OrderedF32 => real(|a, b| !a.is_nan() && !b.is_nan()),
        C::UnorderedF32 => real(|a, b| a.is_nan() || b.is_nan()),
        // The negations are true if a NaN is present.
        C::NotLessF32 => !real(|a, b| a < b),
        C::NotEqualF32 => !real(|a, b| a == b),
        C::NotLessEqualF32 => !real(|a, b| a <= b),
        C::NotGreaterF32 => !real(|a, b| a > b),
        C::NotGreaterEqualF32 => !real(|a, b| a >= b),
        C::NotLessGreaterF32 => !real(differ),
        C::ClassF32 => unsigned(|a, b| b >> float::class(a) & 1 == 1),
    }
}

/// A 64-bit value per lane, as its two halves.
pub(crate) type WideLanes = (Lanes, Lanes);

#[inline(always)]
fn wide(a: &WideLanes, lane: usize) -> u64 {
    (a.1[lane] as u64) << 32 | a.0[lane] as u64
}

#[inline(always)]
pub(crate) fn wide_compare(op: WideCompare, a: &WideLanes, b: &WideLanes) -> u64 {
    let test = |test: fn(u64, u64) -> bool| mask(|lane| test(wide(a, lane), wide(b, lane)));
    match op {
        WideCompare::Equal => test(|a, b| a == b),
        WideCompare::NotEqual => test(|a, b| a != b),
        WideCompare::Less => test(|a, b| a < b),
        WideCompare::LessEqual => test(|a, b| a <= b),
        WideCompare::Greater => test(|a, b| a > b),
        WideCompare::GreaterEqual => test(|a, b| a >= b),
        WideCompare::LessI64 => test(|a, b| (a as i64) < b as i64),
        WideCompare::GreaterI64 => test(|a, b| a as i64 > b as i64),
    }
}

/// Both halves of 64-bit results.
#[inline(always)]
fn halves(value: impl Fn(usize) -> u64) -> WideLanes {
    let mut out = ([0; LANES], [0; LANES]);
    for lane in 0..LANES {
        let value = value(lane);
        (out.0[lane], out.1[lane]) = (value as u32, (value >> 32) as u32);
    }
    out
}

#[inline(always)]
pub(crate) fn wide_shift(op: WideShift, count: &Lanes, a: &WideLanes) -> WideLanes {
    match op {
        WideShift::Left => halves(|lane| wide(a, lane) << (count[lane] & 63)),
        WideShift::Right => halves(|lane| wide(a, lane) >> (count[lane] & 63)),
        WideShift::RightI64 => halves(|lane| (wide(a, lane) as i64 >> (count[lane] & 63)) as u64),
    }
}

/// `a * b + c` in 64 bits, and the carry out of them.
#[inline(always)]
pub(crate) fn wide_mad(a: &Lanes, b: &Lanes, c: &WideLanes) -> (WideLanes, u64) {
    let sum = |lane: usize| (a[lane] as u64 * b[lane] as u64).overflowing_add(wide(c, lane));
    (halves(|lane| sum(lane).0), mask(|lane| sum(lane).1))
}

/// The sum or difference, and the carry or borrow out of 32 bits.
#[inline(always)]
pub(crate) fn carry(op: Carry, a: &Lanes, b: &Lanes, carry: u64) -> (Lanes, u64) {
    let mut out = [0; LANES];
    let mut bits = 0;
    for lane in 0..LANES {
        let taken = if op.takes_carry() { carry >> lane & 1 } else { 0 };
        let (a, b) = (a[lane] as u64, b[lane] as u64);
        let result = match op {
            Carry::Add | Carry::AddIn => a + b + taken,
            Carry::Sub | Carry::SubIn => a.wrapping_sub(b).wrapping_sub(taken),
            Carry::Subrev | Carry::SubrevIn => b.wrapping_sub(a).wrapping_sub(taken),
        };
        out[lane] = result as u32;
        bits |= (result >> 32 & 1) << lane;
    }
    (out, bits)
}
