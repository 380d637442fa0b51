//! Python's numbers: integers of unlimited size (exact here up to 128 bits, kept as digits beyond),
//! floats that print with the fewest digits that round-trip, and exact comparisons between the two.
#![expect(
    clippy::float_arithmetic,
    reason = "templates calculate with float64, as Python does; each operation is exact IEEE"
)]

use super::value::Value;
use super::{Result, fail};
use std::cmp::Ordering;
use std::fmt::Write;
use std::sync::Arc;

/// BOUND: digits of an integer, as in Python.
pub(in crate::data) const DIGITS_MAX: usize = 4300;

/// An integer of decimal digits, optionally with a sign. The caller has checked the characters.
pub(in crate::data) fn integer(text: &str) -> Option<Value> {
    let digits = text.trim_start_matches(['-', '+']);
    if digits.len() > DIGITS_MAX {
        return None;
    }
    if let Ok(number) = text.parse::<i128>() {
        return Some(Value::Int(number));
    }
    let significant = digits.trim_start_matches('0');
    let sign = if text.starts_with('-') { "-" } else { "" };
    Some(Value::Big(Arc::from(format!("{sign}{significant}"))))
}

/// The order of two numbers; `None` if one of them is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Order(pub(super) Option<Ordering>);

/// Compares numbers; `None` if one of the values is not a number.
pub(super) fn compare(left: &Value, right: &Value) -> Option<Order> {
    if let (Some(left), Some(right)) = (left.as_int(), right.as_int()) {
        return Some(Order(Some(left.cmp(&right))));
    }
    match (left, right) {
        (Value::Float(left), Value::Float(right)) => Some(Order(left.partial_cmp(right))),
        (Value::Float(left), _) => {
            let right = Integer::of(right)?;
            Some(Order(compare_float(*left, &right)))
        }
        (_, Value::Float(right)) => {
            let left = Integer::of(left)?;
            Some(Order(compare_float(*right, &left).map(Ordering::reverse)))
        }
        (Value::Big(left), Value::Big(right)) => Some(Order(Some(compare_digits(left, right)))),
        (Value::Big(big), other) => {
            other.as_int()?;
            Some(Order(Some(if big.starts_with('-') { Ordering::Less } else { Ordering::Greater })))
        }
        (other, Value::Big(big)) => {
            other.as_int()?;
            Some(Order(Some(if big.starts_with('-') { Ordering::Greater } else { Ordering::Less })))
        }
        _ => None,
    }
}

enum Integer<'a> {
    Small(i128),
    Big(&'a str),
}

impl<'a> Integer<'a> {
    fn of(value: &'a Value) -> Option<Self> {
        match value {
            Value::Big(digits) => Some(Self::Big(digits)),
            other => other.as_int().map(Self::Small),
        }
    }
}

fn compare_float(float: f64, integer: &Integer) -> Option<Ordering> {
    if float.is_nan() {
        return None;
    }
    if float.is_infinite() {
        return Some(if float > 0.0 { Ordering::Greater } else { Ordering::Less });
    }
    match integer {
        Integer::Small(integer) if float.abs() < 1e38 => {
            let whole = float.trunc();
            let order = (whole as i128).cmp(integer);
            Some(order.then(float.partial_cmp(&whole)?))
        }
        // A float from 1e38 up is whole, and Rust prints all of its digits.
        Integer::Small(integer) => Some(compare_digits(&float.trunc().to_string(), &integer.to_string())),
        Integer::Big(digits) => Some(compare_digits(&float.trunc().to_string(), digits)),
    }
}

/// Compares integers written in decimal without leading zeros.
fn compare_digits(left: &str, right: &str) -> Ordering {
    let parts = |text: &str| (text.starts_with('-'), text.trim_start_matches('-').to_owned());
    let ((left_negative, left), (right_negative, right)) = (parts(left), parts(right));
    let size = left.len().cmp(&right.len()).then_with(|| left.cmp(&right));
    match (left_negative, right_negative) {
        (false, false) => size,
        (true, true) => size.reverse(),
        (true, false) => Ordering::Less,
        (false, true) => Ordering::Greater,
    }
}

/// Converts to a float, correctly rounded; `None` if it is not a number.
pub(super) fn to_float(value: &Value) -> Result<Option<f64>> {
    Ok(match value {
        Value::Float(float) => Some(*float),
        Value::Big(digits) => {
            let float: f64 = digits.parse().unwrap_or(f64::INFINITY);
            if float.is_infinite() {
                return fail("int too large to convert to float");
            }
            Some(float)
        }
        other => other.as_int().map(|number| number as f64),
    })
}

/// The whole part of a float.
pub(super) fn truncate(float: f64) -> Result<Value> {
    if float.is_nan() {
        return fail("cannot convert float NaN to integer");
    }
    if float.is_infinite() {
        return fail("cannot convert float infinity to integer");
    }
    if float.abs() < 1e38 {
        return Ok(Value::Int(float.trunc() as i128));
    }
    integer(&float.trunc().to_string()).map_or_else(|| fail("an integer is too large"), Ok)
}

/// Python's `float`: a decimal number, `inf`, `nan`, with optional surrounding spaces and single
/// underscores between digits.
pub(super) fn parse_float(text: &str) -> Option<f64> {
    let text = super::strings::strip(text, None, super::strings::Side::Both);
    let plain = without_underscores(text)?;
    let unsigned = plain.trim_start_matches(['+', '-']);
    if plain.len() - unsigned.len() > 1 {
        return None;
    }
    let word = unsigned.to_ascii_lowercase();
    let known = matches!(word.as_str(), "inf" | "infinity" | "nan");
    if !known && !unsigned.bytes().all(|byte| byte.is_ascii_digit() || b".eE+-".contains(&byte)) {
        return None;
    }
    plain.parse().ok()
}

/// Python's `int` in the given base.
pub(super) fn parse_integer(text: &str, base: u32) -> Option<Value> {
    let text = super::strings::strip(text, None, super::strings::Side::Both);
    let (sign, digits) = match text.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = digits.to_ascii_lowercase();
    let prefixed = match base {
        2 => lower.strip_prefix("0b"),
        8 => lower.strip_prefix("0o"),
        16 => lower.strip_prefix("0x"),
        _ => None,
    };
    let digits = without_underscores(prefixed.map_or(lower.as_str(), |rest| rest.strip_prefix('_').unwrap_or(rest)))?;
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(base)) {
        return None;
    }
    let text = format!("{sign}{digits}");
    if base == 10 { integer(&text) } else { i128::from_str_radix(&text, base).ok().map(Value::Int) }
}

fn without_underscores(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let sound = bytes.iter().enumerate().all(|(at, byte)| {
        let digit = |at: Option<usize>| at.and_then(|at| bytes.get(at)).is_some_and(u8::is_ascii_alphanumeric);
        *byte != b'_' || (digit(at.checked_sub(1)) && digit(at.checked_add(1)))
    });
    sound.then(|| text.replace('_', ""))
}

/// The shortest digits that round-trip, in Python's layout: plain from 1e-4 to 1e16, else `1e-05`.
pub(super) fn print_float(text: &mut String, float: f64) {
    if !float.is_finite() {
        text.push_str(if float.is_nan() {
            "nan"
        } else if float > 0.0 {
            "inf"
        } else {
            "-inf"
        });
        return;
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the e format writes an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is a small integer");
    if (-4..16).contains(&exponent) {
        let plain = float.to_string();
        text.push_str(&plain);
        text.push_str(if plain.contains('.') { "" } else { ".0" });
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        write!(text, "{digits}e{sign}{:02}", exponent.abs()).expect("a string takes any text");
    }
}

/// `+ - * / // %` of numbers; `None` if one side is not a number.
pub(super) fn calculate(operator: &str, left: &Value, right: &Value) -> Result<Option<Value>> {
    let whole = |value: &Value| matches!(value, Value::Int(_) | Value::Bool(_) | Value::Big(_));
    if whole(left) && whole(right) {
        return whole_numbers(operator, left, right).map(Some);
    }
    let (Some(left), Some(right)) = (to_float(left)?, to_float(right)?) else { return Ok(None) };
    floats(operator, left, right).map(|float| Some(Value::Float(float)))
}

fn whole_numbers(operator: &str, left: &Value, right: &Value) -> Result<Value> {
    if operator == "/" {
        let (left, right) = (to_float(left)?.unwrap_or(0.0), to_float(right)?.unwrap_or(0.0));
        // Above 2⁵³ the quotient of the rounded numbers is not always the rounded quotient.
        if left.abs().max(right.abs()) > 9007199254740992.0 {
            return fail("division of integers above 2⁵³ is not supported");
        }
        return floats("/", left, right).map(Value::Float);
    }
    let (Some(left), Some(right)) = (left.as_int(), right.as_int()) else {
        return fail("calculating with integers of more than 128 bits is not supported");
    };
    let result = match operator {
        "+" => left.checked_add(right),
        "-" => left.checked_sub(right),
        "*" => left.checked_mul(right),
        "//" | "%" if right == 0 => return fail("integer division or modulo by zero"),
        "//" => left.checked_div_euclid(right).and_then(|quotient| {
            // The Euclidean remainder is never negative; Python's has the sign of the divisor.
            let inexact = left.checked_rem_euclid(right)? != 0;
            if right < 0 && inexact { quotient.checked_sub(1) } else { Some(quotient) }
        }),
        "%" => left.checked_rem_euclid(right).map(|rest| if right < 0 && rest != 0 { rest + right } else { rest }),
        "**" => match u32::try_from(right) {
            Ok(exponent) => left.checked_pow(exponent),
            Err(_) if right < 0 => return fail("negative powers are not supported"),
            Err(_) => None,
        },
        _ => return fail(format!("unknown operator {operator}")),
    };
    result
        .map_or_else(|| fail("integers of more than 128 bits are not supported in calculations"), |n| Ok(Value::Int(n)))
}

fn floats(operator: &str, left: f64, right: f64) -> Result<f64> {
    if right == 0.0 && matches!(operator, "/" | "//" | "%") {
        return fail(match operator {
            "/" => "division by zero",
            "//" => "float floor division by zero",
            _ => "float modulo by zero",
        });
    }
    Ok(match operator {
        "+" => left + right,
        "-" => left - right,
        "*" => left * right,
        "/" => left / right,
        "%" => divide_floor(left, right).1,
        "//" => divide_floor(left, right).0,
        _ => return fail("powers of floats are not supported"),
    })
}

/// Quotient and remainder; the remainder has the sign of the divisor.
fn divide_floor(left: f64, right: f64) -> (f64, f64) {
    let mut rest = left % right;
    let mut quotient = (left - rest) / right;
    if rest == 0.0 {
        rest = rest.abs().copysign(right);
    } else if (right < 0.0) != (rest < 0.0) {
        rest += right;
        quotient -= 1.0;
    }
    let floor = quotient.floor();
    let whole = if quotient == 0.0 {
        (left / right).abs().min(0.0).copysign(left / right)
    } else if quotient - floor > 0.5 {
        floor + 1.0
    } else {
        floor
    };
    (whole, rest)
}

/// Rounds to `digits` decimals, like Python's `round`.
pub(super) fn round(float: f64, digits: usize) -> f64 {
    // The exact decimal, rounded half to even, and read back.
    if float.is_finite() { format!("{float:.digits$}").parse().unwrap_or(float) } else { float }
}

/// Rounds up or down at a decimal, with Jinja2's calculation.
pub(super) fn round_towards(float: f64, digits: u32, up: bool) -> f64 {
    let scale = 10_i128.pow(digits.min(30)) as f64;
    let scaled = float * scale;
    (if up { scaled.ceil() } else { scaled.floor() }) / scale
}

pub(super) fn negate(value: &Value) -> Result<Value> {
    match value {
        Value::Float(float) => Ok(Value::Float(-float)),
        Value::Undefined(why) => fail(why.as_ref()),
        Value::Big(digits) => {
            Ok(integer(&digits.strip_prefix('-').map_or_else(|| format!("-{digits}"), str::to_owned))
                .unwrap_or_else(|| value.clone()))
        }
        other => match other.as_int() {
            Some(number) => whole_numbers("-", &Value::Int(0), &Value::Int(number)),
            None => fail(format!("bad operand type for unary -: '{}'", other.type_name())),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn float(number: f64) -> String {
        let mut text = String::new();
        print_float(&mut text, number);
        text
    }

    #[test]
    fn floats_print_as_in_python() {
        let cases = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1e20, "1e+20"),
            (1e-7, "1e-07"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (123456.789, "123456.789"),
            (123.09510907566857, "123.09510907566857"),
            (5e-324, "5e-324"),
            (f64::INFINITY, "inf"),
        ];
        for (number, want) in cases {
            assert_eq!(float(number), want);
        }
    }

    #[test]
    fn integers_and_floats_compare_exactly() {
        let int = |text: &str| integer(text).expect("an integer");
        let cases = [
            (int("9007199254740993"), Value::Float(9007199254740992.0), Ordering::Greater),
            (int("100000000000000000000"), Value::Float(1e20), Ordering::Equal),
            (int("1"), Value::Bool(true), Ordering::Equal),
            (int("-1"), Value::Float(-1.5), Ordering::Greater),
            (int(&"9".repeat(60)), Value::Float(1e60), Ordering::Less),
            (int(&"9".repeat(60)), int(&"9".repeat(61)), Ordering::Less),
            (int(&format!("-{}", "9".repeat(60))), int("5"), Ordering::Less),
        ];
        for (left, right, want) in cases {
            assert_eq!(compare(&left, &right), Some(Order(Some(want))), "{left:?} {right:?}");
            assert_eq!(compare(&right, &left), Some(Order(Some(want.reverse()))), "{left:?} {right:?}");
        }
        assert_eq!(compare(&Value::Float(f64::NAN), &int("1")), Some(Order(None)));
        assert!(compare(&Value::None, &int("1")).is_none());
    }

    #[test]
    fn division_rounds_down() {
        let whole = |operator: &str, left: i128, right: i128| {
            let result = calculate(operator, &Value::Int(left), &Value::Int(right)).expect("a number");
            result.and_then(|value| value.as_int()).expect("an integer")
        };
        for (left, right, quotient, rest) in
            [(7, 2, 3, 1), (-7, 2, -4, 1), (7, -2, -4, -1), (-7, -2, 3, -1), (6, -2, -3, 0)]
        {
            assert_eq!((whole("//", left, right), whole("%", left, right)), (quotient, rest), "{left} {right}");
        }
        assert_eq!(floats("//", -7.5, 2.0), Ok(-4.0));
        assert_eq!(floats("%", -7.5, 2.0), Ok(0.5));
        assert!(calculate("%", &Value::Int(1), &Value::Int(0)).is_err());
        assert!(calculate("*", &Value::Int(i128::MAX), &Value::Int(2)).is_err());
    }
}
