//! Scalar arithmetic: results and SCC of the operations, on values of the operation's width.

use crate::instruction::{ScalarBinary, ScalarCompare};

/// The result, and the new SCC if the operation sets it.
pub(crate) fn binary(op: ScalarBinary, a: u64, b: u64, scc: bool) -> (u64, Option<bool>) {
    use ScalarBinary as B;
    let (x, y) = (a as u32, b as u32);
    let (i, j) = (x as i32, y as i32);
    let carry = |sum: u64| (sum & 0xffff_ffff, Some(sum >> 32 != 0));
    let signed = |(result, overflow): (i32, bool)| (result as u32 as u64, Some(overflow));
    let logic = |result: u64| (result, Some(result != 0));
    let logic32 = |result: u32| (result as u64, Some(result != 0));
    match op {
        B::AddU32 => carry(x as u64 + y as u64),
        B::AddcU32 => carry(x as u64 + y as u64 + scc as u64),
        B::SubU32 => (x.wrapping_sub(y) as u64, Some(y > x)),
        B::SubbU32 => {
            let taken = y as u64 + scc as u64;
            ((x as u64).wrapping_sub(taken) & 0xffff_ffff, Some(taken > x as u64))
        }
        B::AddI32 => signed(i.overflowing_add(j)),
        B::SubI32 => signed(i.overflowing_sub(j)),
        B::MulI32 => (x.wrapping_mul(y) as u64, None),
        B::MulHiU32 => ((x as u64 * y as u64) >> 32, None),
        B::MulHiI32 => (((i as i64 * j as i64) >> 32) as u32 as u64, None),
        B::And32 => logic32(x & y),
        B::Or32 => logic32(x | y),
        B::Xor32 => logic32(x ^ y),
        B::AndNot32 => logic32(x & !y),
        B::OrNot32 => logic32(x | !y),
        B::And64 => logic(a & b),
        B::Or64 => logic(a | b),
        B::Xor64 => logic(a ^ b),
        B::AndNot64 => logic(a & !b),
        B::OrNot64 => logic(a | !b),
        B::Nand64 => logic(!(a & b)),
        B::Nor64 => logic(!(a | b)),
        B::Xnor64 => logic(!(a ^ b)),
        B::ShiftLeft32 => logic32(x << (y & 31)),
        B::ShiftRight32 => logic32(x >> (y & 31)),
        B::ShiftRightI32 => logic32((i >> (y & 31)) as u32),
        B::ShiftLeft64 => logic(a << (b & 63)),
        B::ShiftRight64 => logic(a >> (b & 63)),
        B::ShiftRightI64 => logic((a as i64 >> (b & 63)) as u64),
        B::ExtractU32 => logic32(extract(x, y & 31, y >> 16 & 127)),
        B::ExtractI32 => {
            let width = y >> 16 & 127;
            let field = extract(x, y & 31, width);
            let unused = 32 - width.min(32);
            logic32(if width == 0 { 0 } else { ((field << unused) as i32 >> unused) as u32 })
        }
        B::MinU32 => (x.min(y) as u64, Some(x < y)),
        B::MaxU32 => (x.max(y) as u64, Some(x >= y)),
        B::MinI32 => (i.min(j) as u32 as u64, Some(i < j)),
        B::MaxI32 => (i.max(j) as u32 as u64, Some(i >= j)),
        B::Select32 | B::Select64 => (if scc { a } else { b }, None),
        B::ClearBit => ((x & !(1 << (y & 31))) as u64, None),
        B::SetBit => ((x | 1 << (y & 31)) as u64, None),
    }
}

/// Defined bits of the result. Logic is followed bit by bit, since masks may be defined for some
/// lanes only; other results are defined as a whole or not at all.
pub(crate) fn defined(op: ScalarBinary, (a, known_a): (u64, u64), (b, known_b): (u64, u64), scc: bool) -> u64 {
    use ScalarBinary as B;
    let both = known_a & known_b;
    // A zero decides a conjunction, a one a disjunction, whatever the other bit is.
    match op {
        B::And32 | B::And64 | B::Nand64 => both | known_a & !a | known_b & !b,
        B::AndNot32 | B::AndNot64 => both | known_a & !a | known_b & b,
        B::Or32 | B::Or64 | B::Nor64 => both | known_a & a | known_b & b,
        B::OrNot32 | B::OrNot64 => both | known_a & a | known_b & !b,
        B::Xor32 | B::Xor64 | B::Xnor64 => both,
        B::Select32 | B::Select64 if scc => known_a,
        B::Select32 | B::Select64 => known_b,
        _ if both == u64::MAX => u64::MAX,
        _ => 0,
    }
}

/// `width` bits from bit `first` on.
fn extract(x: u32, first: u32, width: u32) -> u32 {
    let mask = 1u64.wrapping_shl(width).wrapping_sub(1);
    ((x >> first) as u64 & if width >= 64 { u64::MAX } else { mask }) as u32
}

pub(crate) fn compare(op: ScalarCompare, a: u64, b: u64) -> bool {
    use ScalarCompare as C;
    let (x, y) = (a as u32, b as u32);
    let (i, j) = (x as i32, y as i32);
    match op {
        C::EqualI32 | C::EqualU32 => x == y,
        C::NotEqualI32 | C::NotEqualU32 => x != y,
        C::GreaterI32 => i > j,
        C::GreaterEqualI32 => i >= j,
        C::LessI32 => i < j,
        C::LessEqualI32 => i <= j,
        C::GreaterU32 => x > y,
        C::GreaterEqualU32 => x >= y,
        C::LessU32 => x < y,
        C::LessEqualU32 => x <= y,
        C::EqualU64 => a == b,
        C::NotEqualU64 => a != b,
        C::BitSet => x >> (y & 31) & 1 == 1,
        C::BitClear => x >> (y & 31) & 1 == 0,
    }
}
