//! The two format languages of Python's strings: `'%s of %d' % (…)` and `'{} of {:>3}'.format(…)`.

use super::arguments::Arguments;
use super::interpreter::Interpreter;
use super::methods::centre;
use super::value::{Dict, Value};
use super::{BYTE, CHARACTER, Meter, Result, fail, number, print};
use std::sync::Arc;

/// BOUND: decimals of a number; float64 has 1074 at most.
const PRECISION_MAX: usize = 2000;

pub(super) fn padding(fill: char, count: usize) -> String {
    std::iter::repeat_n(fill, count).collect()
}

/// The layout of one value.
#[derive(Debug)]
struct Spec {
    fill: char,
    align: Option<char>,
    sign: char,
    alternate: bool,
    zero: bool,
    comma: bool,
    width: usize,
    precision: Option<usize>,
    kind: char,
}

impl Default for Spec {
    fn default() -> Self {
        let (fill, sign, kind) = (' ', '-', 's');
        Self { fill, align: None, sign, alternate: false, zero: false, comma: false, width: 0, precision: None, kind }
    }
}

/// Reads a run of digits; numbers too large to be meant become the maximum, which the work limit
/// refuses.
fn digits(characters: &[char], at: &mut usize) -> Option<usize> {
    let from = *at;
    while characters.get(*at).is_some_and(char::is_ascii_digit) {
        *at += 1;
    }
    let text: String = characters[from..*at].iter().collect();
    (*at > from).then(|| text.parse().unwrap_or(usize::MAX))
}

/// `text % values`.
pub(super) fn percent(text: &str, values: &Value, meter: &Meter) -> Result<Value> {
    meter.charge(text.len(), CHARACTER)?;
    let given: Vec<Value> = match values {
        Value::Tuple(items) => items.items.clone(),
        one => vec![one.clone()],
    };
    let mapping = values.as_dict();
    let mut given = given.into_iter();
    let characters: Vec<char> = text.chars().collect();
    let mut out = String::new();
    let mut at = 0;
    while at < characters.len() {
        let character = characters[at];
        at += 1;
        if character != '%' {
            out.push(character);
            continue;
        }
        let key = percent_key(&characters, &mut at)?;
        let spec = percent_spec(&characters, &mut at, &mut given)?;
        if spec.kind == '%' {
            out.push('%');
            continue;
        }
        let value = match (key, mapping) {
            (Some(key), Some(dict)) => dict.get_text(&key).cloned(),
            (Some(_), None) => return fail("format requires a mapping"),
            (None, _) => given.next(),
        };
        let Some(value) = value else { return fail("not enough arguments for format string") };
        percent_value(&mut out, &value, spec, meter)?;
    }
    if mapping.is_none() && given.next().is_some() {
        return fail("not all arguments converted during string formatting");
    }
    meter.charge(out.len(), BYTE)?;
    Ok(Value::text(&out))
}

fn percent_key(characters: &[char], at: &mut usize) -> Result<Option<String>> {
    if characters.get(*at) != Some(&'(') {
        return Ok(None);
    }
    let Some(length) = characters[*at..].iter().position(|c| *c == ')') else { return fail("incomplete format key") };
    let key = characters[*at + 1..*at + length].iter().collect();
    *at += length + 1;
    Ok(Some(key))
}

fn percent_spec(characters: &[char], at: &mut usize, given: &mut impl Iterator<Item = Value>) -> Result<Spec> {
    let mut spec = Spec::default();
    while let Some(flag) = characters.get(*at).filter(|c| "-+ #0".contains(**c)) {
        match flag {
            '-' => spec.align = Some('<'),
            '#' => spec.alternate = true,
            '0' => spec.zero = true,
            '+' => spec.sign = '+',
            _ if spec.sign == '-' => spec.sign = ' ',
            _ => {}
        }
        *at += 1;
    }
    let mut star = |at: &mut usize, spec: &mut Spec| -> Result<Option<usize>> {
        if characters.get(*at) != Some(&'*') {
            return Ok(digits(characters, at));
        }
        *at += 1;
        let Some(width) = given.next().and_then(|value| value.as_int()) else { return fail("* wants int") };
        if width < 0 {
            spec.align = Some('<');
        }
        Ok(Some(usize::try_from(width.unsigned_abs()).unwrap_or(usize::MAX)))
    };
    spec.width = star(at, &mut spec)?.unwrap_or(0);
    if characters.get(*at) == Some(&'.') {
        *at += 1;
        spec.precision = Some(star(at, &mut spec)?.unwrap_or(0));
    }
    while characters.get(*at).is_some_and(|c| "hlL".contains(*c)) {
        *at += 1;
    }
    let Some(kind) = characters.get(*at) else { return fail("incomplete format") };
    *at += 1;
    spec.kind = *kind;
    Ok(spec)
}

fn percent_value(out: &mut String, value: &Value, mut spec: Spec, meter: &Meter) -> Result<()> {
    match spec.kind {
        's' | 'r' | 'a' => {
            let text = if spec.kind == 's' { print::text(value, meter)? } else { repr(value, meter)? };
            if spec.kind == 'a' && !text.is_ascii() {
                return fail("%a of text beyond ASCII is not supported");
            }
            let text: String = text.chars().take(spec.precision.unwrap_or(usize::MAX)).collect();
            spec.align = spec.align.or(Some('>'));
            lay_out(out, "", &text, &Spec { zero: false, ..spec }, meter)
        }
        'c' => {
            let text = match (value.as_text(), value.as_int()) {
                (Some(text), _) if text.chars().count() == 1 => text.to_owned(),
                (_, Some(code)) => match u32::try_from(code).ok().and_then(char::from_u32) {
                    Some(character) => character.to_string(),
                    None => return fail("%c arg not in range"),
                },
                _ => return fail("%c requires an int or a character"),
            };
            spec.align = spec.align.or(Some('>'));
            lay_out(out, "", &text, &Spec { zero: false, ..spec }, meter)
        }
        'd' | 'i' | 'u' => {
            let whole = match value {
                Value::Float(float) => number::truncate(*float)?,
                value => value.clone(),
            };
            spec.kind = 'd';
            number_text(out, &whole, &spec, meter)
        }
        'x' | 'X' | 'o' | 'e' | 'E' | 'f' | 'F' | 'g' | 'G' => number_text(out, value, &spec, meter),
        kind => fail(format!("unsupported format character '{}'", kind.escape_debug())),
    }
}

fn repr(value: &Value, meter: &Meter) -> Result<Arc<str>> {
    let mut text = String::new();
    print::repr(&mut text, value, meter)?;
    Ok(Arc::from(text))
}

/// Pads text to its width; `sign` stays before the zeros that fill it.
fn lay_out(out: &mut String, sign: &str, text: &str, spec: &Spec, meter: &Meter) -> Result<()> {
    let length = sign.chars().count() + text.chars().count();
    let missing = spec.width.saturating_sub(length);
    meter.charge(missing, 4 * BYTE)?;
    meter.charge(text.len(), BYTE)?;
    let (left, inside, right) = match spec.align {
        None if spec.zero => (0, missing, 0),
        Some('<') => (0, 0, missing),
        Some('=') => (0, missing, 0),
        Some('^') => (missing / 2, 0, missing - missing / 2),
        _ => (missing, 0, 0),
    };
    let fill = if spec.zero && spec.align.is_none() { '0' } else { spec.fill };
    out.extend(std::iter::repeat_n(fill, left));
    out.push_str(sign);
    out.extend(std::iter::repeat_n(fill, inside));
    out.push_str(text);
    out.extend(std::iter::repeat_n(fill, right));
    Ok(())
}

fn number_text(out: &mut String, value: &Value, spec: &Spec, meter: &Meter) -> Result<()> {
    if spec.precision.is_some_and(|precision| precision > PRECISION_MAX) {
        return super::limit(format!("a number of more than {PRECISION_MAX} decimals"));
    }
    let (negative, mut text) = match spec.kind {
        'd' | 'x' | 'X' | 'o' | 'b' => {
            let digits = match (value, spec.kind) {
                (Value::Big(digits), 'd') => digits.to_string(),
                (value, kind) => match value.as_int() {
                    Some(number) => in_base(number, kind),
                    None => return fail(format!("%{kind} format: an integer is required, not {}", value.type_name())),
                },
            };
            let magnitude = digits.trim_start_matches('-');
            let zeros = spec.precision.unwrap_or(0).saturating_sub(magnitude.len());
            let prefix = match spec.kind {
                'x' if spec.alternate => "0x",
                'X' if spec.alternate => "0X",
                'o' if spec.alternate => "0o",
                'b' if spec.alternate => "0b",
                _ => "",
            };
            (digits.starts_with('-'), format!("{prefix}{}{magnitude}", padding('0', zeros)))
        }
        _ => {
            let Some(float) = number::to_float(value)? else {
                return fail(format!("must be real number, not {}", value.type_name()));
            };
            (float.is_sign_negative() && !float.is_nan(), float_text(float.abs(), spec))
        }
    };
    if spec.comma {
        text = with_commas(&text);
    }
    let sign = match (negative, spec.sign) {
        (true, _) => "-",
        (false, '+') => "+",
        (false, ' ') => " ",
        _ => "",
    };
    lay_out(out, sign, &text, spec, meter)
}

fn in_base(number: i128, kind: char) -> String {
    let magnitude = number.unsigned_abs();
    let digits = match kind {
        'x' => format!("{magnitude:x}"),
        'X' => format!("{magnitude:X}"),
        'o' => format!("{magnitude:o}"),
        'b' => format!("{magnitude:b}"),
        _ => magnitude.to_string(),
    };
    if number < 0 { format!("-{digits}") } else { digits }
}

fn with_commas(text: &str) -> String {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let mut grouped = String::new();
    for (at, digit) in text[..end].chars().enumerate() {
        if at > 0 && (end - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped + &text[end..]
}

/// A non-negative float in one of Python's float formats.
fn float_text(float: f64, spec: &Spec) -> String {
    let upper = spec.kind.is_ascii_uppercase();
    if !float.is_finite() {
        let text = if float.is_nan() { "nan" } else { "inf" };
        return if upper { text.to_uppercase() } else { text.to_owned() };
    }
    let precision = spec.precision.unwrap_or(6);
    let text = match spec.kind.to_ascii_lowercase() {
        'e' => scientific(float, precision),
        'g' => general(float, precision.max(1), spec.alternate),
        _ => format!("{float:.precision$}"),
    };
    if upper { text.to_uppercase() } else { text }
}

fn scientific(float: f64, precision: usize) -> String {
    let text = format!("{float:.precision$e}");
    let (digits, exponent) = text.split_once('e').expect("the e format writes an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is a small integer");
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

fn general(float: f64, precision: usize, keep_zeros: bool) -> String {
    let text = scientific(float, precision - 1);
    let (digits, exponent) = text.split_once('e').expect("the e format writes an exponent");
    let exponent: i64 = exponent.parse().expect("the exponent is a small integer");
    let short = |text: &str| {
        let cut =
            if text.contains('.') && !keep_zeros { text.trim_end_matches('0').trim_end_matches('.') } else { text };
        cut.to_owned()
    };
    if exponent < -4 || exponent >= precision as i64 {
        return format!("{}e{}", short(digits), &text[digits.len() + 1..]);
    }
    let decimals = usize::try_from(precision as i64 - 1 - exponent).unwrap_or(0);
    short(&format!("{float:.decimals$}"))
}

impl Interpreter<'_> {
    /// `text.format(…)`.
    pub(super) fn format(&mut self, text: &str, given: &Arguments) -> Result<Value> {
        self.meter.charge(text.len(), CHARACTER)?;
        let mut named = Dict::default();
        for (name, value) in &given.named {
            named.insert(&self.meter, Value::Text(Arc::clone(name)), value.clone())?;
        }
        let mut out = String::new();
        let mut next = 0;
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            out.push_str(&rest[..at]);
            let mark = &rest[at..=at];
            rest = &rest[at + 1..];
            if rest.starts_with(mark) {
                out.push_str(mark);
                rest = &rest[1..];
                continue;
            }
            let end = rest.find(['{', '}']);
            let Some(end) = end.filter(|end| mark == "{" && rest[*end..].starts_with('}')) else {
                return fail("a format of nested or single braces is not supported");
            };
            self.replacement(&mut out, &rest[..end], &given.positional, &named, &mut next)?;
            rest = &rest[end + 1..];
        }
        out.push_str(rest);
        self.meter.charge(out.len(), BYTE)?;
        Ok(Value::text(&out))
    }

    /// `name.attribute[item]!r:spec`.
    fn replacement(
        &mut self,
        out: &mut String,
        field: &str,
        positional: &[Value],
        named: &Dict,
        next: &mut usize,
    ) -> Result<()> {
        let (field, spec) = field.split_once(':').unwrap_or((field, ""));
        let (path, conversion) = field.split_once('!').unwrap_or((field, ""));
        let end = path.find(['.', '[']).unwrap_or(path.len());
        let (name, mut path) = path.split_at(end);
        let mut value = if name.is_empty() || name.bytes().all(|byte| byte.is_ascii_digit()) {
            let index = if name.is_empty() { *next } else { name.parse().unwrap_or(usize::MAX) };
            *next += 1;
            positional.get(index).cloned()
        } else {
            named.get_text(name).cloned()
        };
        while let (Some(found), false) = (&value, path.is_empty()) {
            let key_end = path[1..].find(['.', '[', ']']).map_or(path.len(), |at| at + 1);
            let key = &path[1..key_end];
            let found = found.clone();
            value = Some(if path.starts_with('[') {
                let key = key.parse().map_or_else(|_| Value::text(key), Value::Int);
                self.item(&found, &key)?
            } else {
                self.attribute(&found, key)?
            });
            path = path[key_end..].strip_prefix(']').unwrap_or(&path[key_end..]);
        }
        let Some(value) = value else { return fail("a format names an argument that is not given") };
        let value = match conversion {
            "" => value,
            "r" => Value::Text(repr(&value, &self.meter)?),
            "s" => Value::Text(print::text(&value, &self.meter)?),
            other => return fail(format!("unknown conversion specifier '{}'", other.escape_debug())),
        };
        format_value(out, &value, spec, &self.meter)
    }
}

/// Parses a format specification (after the colon): the layout of a value, and the final letter.
fn parse_spec(text: &str) -> Result<(Spec, Option<char>)> {
    let characters: Vec<char> = text.chars().collect();
    let mut spec = Spec::default();
    let mut at = 0;
    let align = |at: usize| characters.get(at).copied().filter(|c| "<>=^".contains(*c));
    if let Some(found) = align(1) {
        (spec.fill, spec.align, at) = (characters[0], Some(found), 2);
    } else if let Some(found) = align(0) {
        (spec.align, at) = (Some(found), 1);
    }
    if let Some(sign) = characters.get(at).filter(|c| "+- ".contains(**c)) {
        (spec.sign, at) = (*sign, at + 1);
    }
    for (flag, place) in [('#', &mut spec.alternate), ('0', &mut spec.zero)] {
        *place = characters.get(at) == Some(&flag);
        at += usize::from(*place);
    }
    spec.width = digits(&characters, &mut at).unwrap_or(0);
    spec.comma = characters.get(at) == Some(&',');
    at += usize::from(spec.comma);
    if characters.get(at) == Some(&'.') {
        at += 1;
        let Some(precision) = digits(&characters, &mut at) else { return fail("Format specifier missing precision") };
        spec.precision = Some(precision);
    }
    let kind = characters.get(at).copied();
    if at + usize::from(kind.is_some()) != characters.len() {
        return fail("Invalid format specifier");
    }
    Ok((spec, kind))
}

/// Formats one value with a format specification (after the colon).
fn format_value(out: &mut String, value: &Value, text: &str, meter: &Meter) -> Result<()> {
    if text.is_empty() {
        let text = print::text(value, meter)?;
        meter.charge(text.len(), BYTE)?;
        out.push_str(&text);
        return Ok(());
    }
    let (mut spec, kind) = parse_spec(text)?;
    match (value, kind) {
        (Value::Text(content), None | Some('s')) => {
            let content: String = content.chars().take(spec.precision.unwrap_or(usize::MAX)).collect();
            if spec.align == Some('^') {
                meter.charge(spec.width, 4 * BYTE)?;
                let missing = spec.width.saturating_sub(content.chars().count());
                // Unlike the method, the format puts the odd one to the right.
                out.push_str(&centre(&content, 0, missing, spec.fill));
                return Ok(());
            }
            spec.align = spec.align.or(Some('<'));
            lay_out(out, "", &content, &spec, meter)
        }
        (Value::Int(_) | Value::Big(_), None | Some('d')) if spec.precision.is_none() => {
            number_text(out, value, &Spec { kind: 'd', ..spec }, meter)
        }
        (Value::Int(_), Some(kind @ ('x' | 'X' | 'o' | 'b'))) if spec.precision.is_none() => {
            number_text(out, value, &Spec { kind, ..spec }, meter)
        }
        (Value::Int(_) | Value::Float(_), Some(kind @ ('f' | 'F' | 'e' | 'E' | 'g' | 'G'))) => {
            number_text(out, value, &Spec { kind, ..spec }, meter)
        }
        (Value::Int(_) | Value::Float(_), Some('%')) => {
            let percent = number::calculate("*", value, &Value::Int(100))?.unwrap_or(Value::None);
            let mut text = String::new();
            number_text(
                &mut text,
                &percent,
                &Spec { kind: 'f', width: 0, sign: spec.sign, precision: spec.precision, ..Spec::default() },
                meter,
            )?;
            lay_out(out, "", &format!("{text}%"), &spec, meter)
        }
        _ => fail(format!("the format '{}' of a {} is not supported", text.escape_debug(), value.type_name())),
    }
}
