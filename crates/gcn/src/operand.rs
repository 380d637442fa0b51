//! Operands in the notation of LLVM's assembler: registers, register tuples, constants and source
//! modifiers.

use crate::instruction::{ACCUMULATORS, EXEC, M0, Operand, ScalarSource, Select, Source, VCC, WideSource};

/// A register or a tuple: index of the first, and how many.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tuple {
    first: u16,
    count: u16,
}

/// `5` or `[4:7]` after the letter.
fn tuple(text: &str) -> Option<Tuple> {
    if let Some(range) = text.strip_prefix('[') {
        let (first, last) = range.strip_suffix(']')?.split_once(':')?;
        let (first, last) = (first.parse::<u16>().ok()?, last.parse::<u16>().ok()?);
        return (first <= last).then(|| Tuple { first, count: last - first + 1 });
    }
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    Some(Tuple { first: text.parse().ok().filter(|_| digits)?, count: 1 })
}

fn scalar_tuple(text: &str) -> Option<Tuple> {
    let (first, count) = match text {
        "vcc" => (VCC as u16, 2),
        "vcc_lo" => (VCC as u16, 1),
        "vcc_hi" => (VCC as u16 + 1, 1),
        "exec" => (EXEC as u16, 2),
        "exec_lo" => (EXEC as u16, 1),
        "exec_hi" => (EXEC as u16 + 1, 1),
        "m0" => (M0 as u16, 1),
        "flat_scratch" => (102, 2),
        "flat_scratch_lo" => (102, 1),
        "flat_scratch_hi" => (103, 1),
        _ => {
            let found = tuple(text.strip_prefix('s')?)?;
            return (found.first + found.count <= 102).then_some(found);
        }
    };
    Some(Tuple { first, count })
}

fn vector_tuple(text: &str) -> Option<Tuple> {
    let (found, base) = match text.strip_prefix('v') {
        Some(rest) => (tuple(rest)?, 0),
        None => (tuple(text.strip_prefix('a')?)?, ACCUMULATORS),
    };
    (found.first + found.count <= 256).then(|| Tuple { first: found.first + base, ..found })
}

fn wrong(text: &str, want: &str) -> String {
    format!("`{text}` is not {want}")
}

/// A tuple of `count` scalar registers.
pub(crate) fn scalar(text: &str, count: u16) -> Result<u8, String> {
    let found = scalar_tuple(text).filter(|tuple| tuple.count == count);
    found.map(|tuple| tuple.first as u8).ok_or_else(|| wrong(text, &format!("{count} scalar registers")))
}

/// A tuple of `count` vector registers.
pub(crate) fn vector(text: &str, count: u16) -> Result<u16, String> {
    let found = vector_tuple(text).filter(|tuple| tuple.count == count);
    found.map(|tuple| tuple.first).ok_or_else(|| wrong(text, &format!("{count} vector registers")))
}

/// Bits of the inline floats, which a 32-bit operation takes as they are.
fn inline_float(text: &str) -> Option<u32> {
    Some(match text {
        "0.5" => 0x3f00_0000,
        "-0.5" => 0xbf00_0000,
        "1.0" => 0x3f80_0000,
        "-1.0" => 0xbf80_0000,
        "2.0" => 0x4000_0000,
        "-2.0" => 0xc000_0000,
        "4.0" => 0x4080_0000,
        "-4.0" => 0xc080_0000,
        "0.15915494" | "0.15915494309189532" => 0x3e22_f983,
        _ => return None,
    })
}

/// A hexadecimal literal, or an inline integer, which is sign-extended.
fn integer(text: &str) -> Option<i64> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok().map(i64::from),
        None => text.parse::<i32>().ok().map(i64::from),
    }
}

pub(crate) fn constant(text: &str) -> Option<u32> {
    inline_float(text).or_else(|| integer(text).map(|value| value as u32))
}

/// A constant of a 64-bit operation: literals are zero-extended, inline integers sign-extended.
fn wide_constant(text: &str) -> Option<u64> {
    integer(text).map(|value| value as u64)
}

/// A plain number of a field: an offset, a count, a mode.
pub(crate) fn number(text: &str) -> Result<i64, String> {
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let value = match digits.strip_prefix("0x") {
        Some(digits) => i64::from_str_radix(digits, 16).ok(),
        None => digits.parse().ok(),
    };
    let value = value.ok_or_else(|| wrong(text, "a number"))?;
    Ok(if negative { -value } else { value })
}

/// A source of a scalar instruction of 32 or 64 bits.
pub(crate) fn scalar_source(text: &str, wide: bool) -> Result<ScalarSource, String> {
    let found = scalar_tuple(text).filter(|tuple| tuple.count == if wide { 2 } else { 1 });
    if let Some(register) = found {
        return Ok(ScalarSource::Register(register.first as u8));
    }
    let value = if wide { wide_constant(text) } else { constant(text).map(u64::from) };
    value.map(ScalarSource::Constant).ok_or_else(|| wrong(text, "a scalar source"))
}

/// A 32-bit source of a vector instruction, with `|x|`, `-x` and `-|x|`.
pub(crate) fn operand(text: &str) -> Result<Operand, String> {
    if let Some(value) = constant(text) {
        return Ok(Operand::plain(Source::Constant(value)));
    }
    let (negate, rest) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let inside = rest.strip_prefix('|').and_then(|rest| rest.strip_suffix('|'));
    let register = inside.unwrap_or(rest);
    let source = match (scalar_tuple(register), vector_tuple(register)) {
        (Some(Tuple { first, count: 1 }), _) => Source::Scalar(first as u8),
        (_, Some(Tuple { first, count: 1 })) => Source::Vector(first),
        _ => return Err(wrong(text, "a 32-bit source")),
    };
    Ok(Operand { source, absolute: inside.is_some(), negate, select: Select::Dword })
}

/// A 64-bit source of a vector instruction.
pub(crate) fn wide_source(text: &str) -> Result<WideSource, String> {
    match (scalar_tuple(text), vector_tuple(text)) {
        (Some(Tuple { first, count: 2 }), _) => Ok(WideSource::Scalar(first as u8)),
        (_, Some(Tuple { first, count: 2 })) => Ok(WideSource::Vector(first)),
        _ => wide_constant(text).map(WideSource::Constant).ok_or_else(|| wrong(text, "a 64-bit source")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_and_tuples() {
        assert_eq!(scalar("s101", 1), Ok(101));
        assert_eq!(scalar("s[4:7]", 4), Ok(4));
        assert_eq!(scalar("vcc", 2), Ok(106));
        assert_eq!(scalar("exec", 2), Ok(126));
        assert_eq!(vector("v[37:38]", 2), Ok(37));
        assert_eq!(vector("a3", 1), Ok(259));
        for wrong in ["s102", "s[4:7]", "v1", "s", "s[3:2]", "s[100:103]", "s-1", "s+1", ""] {
            assert!(scalar(wrong, 1).is_err(), "{wrong}");
        }
        for wrong in ["v256", "v[255:256]", "s1", "v", "x1"] {
            assert!(vector(wrong, 1).is_err() && vector(wrong, 2).is_err(), "{wrong}");
        }
    }

    #[test]
    fn constants_are_bits() {
        assert_eq!(constant("-2.0"), Some(0xc000_0000));
        assert_eq!(constant("-16"), Some(0xffff_fff0));
        assert_eq!(constant("0x80000001"), Some(0x8000_0001));
        assert_eq!(wide_constant("0xffffffff"), Some(0xffff_ffff), "literals are zero-extended");
        assert_eq!(wide_constant("-1"), Some(u64::MAX), "inline integers are sign-extended");
        assert_eq!(wide_constant("1.0"), None);
    }

    #[test]
    fn modifiers() {
        let both = operand("-|v1|").expect("an operand");
        assert_eq!((both.source, both.absolute, both.negate), (Source::Vector(1), true, true));
        let negated = operand("-s3").expect("an operand");
        assert_eq!((negated.source, negated.absolute, negated.negate), (Source::Scalar(3), false, true));
        assert!(operand("v[1:2]").is_err() && operand("sext(v1)").is_err() && operand("|v1").is_err());
    }
}
