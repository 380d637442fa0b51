//! Splits the source into tokens. White space around tags is handled as in Jinja2 with
//! `trim_blocks` and `lstrip_blocks`: the line break after a block is removed, and so is the indent
//! of a line that begins with one.

use super::number;
use super::strings::is_space;
use super::value::Value;
use super::{Fault, Result};

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Data(String),
    OpenVariable,
    CloseVariable,
    OpenBlock,
    CloseBlock,
    Name(String),
    Text(String),
    Integer(String),
    Float(f64),
    Operator(&'static str),
    End,
}

const OPERATORS: [&str; 25] = [
    "**", "//", "==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",",
];

pub(super) struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: usize,
    counted: usize,
    at_line_start: bool,
    tokens: Vec<(Token, usize)>,
}

/// Tokens with their lines; the last one is [`Token::End`]. The source has `\n` for line breaks.
pub(super) fn tokens(source: &str) -> Result<Vec<(Token, usize)>> {
    let mut lexer = Lexer { source, at: 0, line: 1, counted: 0, at_line_start: true, tokens: Vec::new() };
    while lexer.at < source.len() {
        lexer.data()?;
    }
    lexer.push(Token::End);
    Ok(lexer.tokens)
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    fn push(&mut self, token: Token) {
        let at = self.at.max(self.counted);
        self.line += self.source[self.counted..at].bytes().filter(|byte| *byte == b'\n').count();
        self.counted = at;
        self.tokens.push((token, self.line));
    }

    fn fail<T>(&mut self, why: impl Into<String>) -> Result<T> {
        self.push(Token::End);
        Err(Fault::Error { line: self.line, why: why.into() })
    }

    /// Text up to a tag, and the tag.
    fn data(&mut self) -> Result<()> {
        let rest = self.rest();
        let start =
            rest.match_indices('{').find(|(at, _)| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')));
        let Some((at, _)) = start else {
            self.push(Token::Data(rest.to_owned()));
            self.at = self.source.len();
            return Ok(());
        };
        let kind = rest.as_bytes()[at + 1];
        let sign = rest.as_bytes().get(at + 2).copied().filter(|byte| b"-+".contains(byte));
        let text = self.trimmed(&rest[..at], sign, kind == b'{');
        self.push(Token::Data(text));
        self.at += at + 2 + usize::from(sign.is_some());
        match kind {
            b'#' => self.comment(),
            b'%' if self.raw_begins() => self.raw(),
            b'%' => self.tag(Token::OpenBlock, Token::CloseBlock, "%}"),
            _ => self.tag(Token::OpenVariable, Token::CloseVariable, "}}"),
        }
    }

    /// The text before a tag, without the white space that the tag removes.
    fn trimmed(&self, text: &str, sign: Option<u8>, variable: bool) -> String {
        if sign == Some(b'-') {
            return text.trim_end_matches(is_space).to_owned();
        }
        let line = text.rfind('\n').map_or(0, |at| at + 1);
        let strips = sign.is_none() && !variable && (line > 0 || self.at_line_start);
        let blank = text[line..].chars().all(is_space);
        (if strips && blank { &text[..line] } else { text }).to_owned()
    }

    /// Moves past the end of a tag at `length` bytes from here; `sign` precedes it.
    fn close(&mut self, length: usize, sign: Option<u8>, block: bool) {
        let from = self.at;
        self.at += length;
        if sign == Some(b'-') {
            self.at += self.rest().len() - self.rest().trim_start_matches(is_space).len();
        } else if block && sign.is_none() && self.rest().starts_with('\n') {
            self.at += 1;
        }
        self.at_line_start = self.source[from..self.at].ends_with('\n');
    }

    fn comment(&mut self) -> Result<()> {
        let Some(end) = self.rest().find("#}") else { return self.fail("Missing end of comment tag") };
        let sign = self.rest().as_bytes()[..end].last().copied().filter(|byte| b"-+".contains(byte));
        self.close(end + 2, sign, true);
        Ok(())
    }

    /// Whether the block opened here is `raw`; moves past it if so.
    fn raw_begins(&mut self) -> bool {
        let Some(rest) = self.rest().trim_start_matches(is_space).strip_prefix("raw") else { return false };
        let rest = rest.trim_start_matches(is_space);
        let end = self.rest().len() - rest.len();
        if rest.starts_with("-%}") {
            self.close(end + 3, Some(b'-'), true);
        } else if rest.starts_with("%}") {
            self.close(end + 2, Some(b'+'), true);
        } else {
            return false;
        }
        true
    }

    fn raw(&mut self) -> Result<()> {
        let rest = self.rest();
        let mut from = 0;
        while let Some(at) = rest[from..].find("{%").map(|at| at + from) {
            from = at + 2;
            let sign = rest.as_bytes().get(from).copied().filter(|byte| b"-+".contains(byte));
            let inside = rest[from + usize::from(sign.is_some())..].trim_start_matches(is_space);
            let Some(inside) = inside.strip_prefix("endraw") else { continue };
            let inside = inside.trim_start_matches(is_space);
            let closing = inside.as_bytes().first().copied().filter(|byte| b"-+".contains(byte));
            let inside = &inside[usize::from(closing.is_some())..];
            if inside.starts_with("%}") {
                let text = self.trimmed(&rest[..at], sign, false);
                self.push(Token::Data(text));
                self.close(rest.len() - inside.len() + 2, closing, true);
                return Ok(());
            }
        }
        self.fail("Missing end of raw directive")
    }

    fn tag(&mut self, open: Token, close: Token, end: &str) -> Result<()> {
        self.push(open);
        let mut brackets = Vec::new();
        loop {
            self.at += self.rest().len() - self.rest().trim_start_matches(is_space).len();
            let rest = self.rest();
            let block = end == "%}";
            let sign = rest.as_bytes().first().copied().filter(|byte| *byte == b'-' || (block && *byte == b'+'));
            if brackets.is_empty() && rest[usize::from(sign.is_some())..].starts_with(end) {
                self.push(close);
                self.close(2 + usize::from(sign.is_some()), sign, block);
                return Ok(());
            }
            let Some(first) = rest.chars().next() else { return self.fail("unexpected end of template") };
            if first.is_ascii_digit() {
                self.number()?;
            } else if first.is_alphanumeric() || first == '_' {
                let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
                self.push(Token::Name(rest[..length].to_owned()));
                self.at += length;
            } else if first == '"' || first == '\'' {
                self.text(first)?;
            } else if let Some(operator) = OPERATORS.iter().find(|operator| rest.starts_with(**operator)) {
                self.bracket(operator, &mut brackets)?;
                self.push(Token::Operator(operator));
                self.at += operator.len();
            } else {
                return self.fail(format!("unexpected char '{}'", first.escape_debug()));
            }
        }
    }

    fn bracket(&mut self, operator: &str, brackets: &mut Vec<&'static str>) -> Result<()> {
        match operator {
            "(" => brackets.push(")"),
            "[" => brackets.push("]"),
            "{" => brackets.push("}"),
            ")" | "]" | "}" if brackets.pop() != Some(operator) => {
                return self.fail(format!("unexpected '{operator}'"));
            }
            _ => {}
        }
        Ok(())
    }

    fn number(&mut self) -> Result<()> {
        let rest = self.rest();
        let bytes = rest.as_bytes();
        let digits = |from: usize| {
            let is = |byte: &u8| byte.is_ascii_digit() || *byte == b'_';
            from + bytes[from.min(bytes.len())..].iter().take_while(|byte| is(byte)).count()
        };
        let prefix = rest.get(..2).map(str::to_ascii_lowercase);
        let base = match prefix.as_deref() {
            Some("0x") => 16,
            Some("0o") => 8,
            Some("0b") => 2,
            _ => 10,
        };
        if base != 10 {
            let length = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            let Some(Value::Int(number)) = number::parse_integer(&rest[..length], base) else {
                return self.fail("a number that is too large, or none");
            };
            self.push(Token::Integer(number.to_string()));
            self.at += length;
            return Ok(());
        }
        let whole = digits(0);
        let mut end = whole;
        let follows = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
        // After a dot, as in `messages.0.role`, a number has no fraction.
        let attribute = self.source[..self.at].ends_with('.');
        if !attribute && bytes.get(end) == Some(&b'.') && follows(end + 1) {
            end = digits(end + 1);
        }
        if !attribute && bytes.get(end).is_some_and(|byte| byte.eq_ignore_ascii_case(&b'e')) {
            let signed = end + 1 + usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
            end = if follows(signed) { digits(signed) } else { end };
        }
        let token = if end == whole {
            Token::Integer(rest[..end].replace('_', ""))
        } else {
            match rest[..end].replace('_', "").parse() {
                Ok(float) => Token::Float(float),
                Err(_) => return self.fail("not a number"),
            }
        };
        self.push(token);
        self.at += end;
        Ok(())
    }

    fn text(&mut self, quote: char) -> Result<()> {
        let rest = self.rest();
        let mut text = String::new();
        let mut characters = rest[1..].char_indices();
        while let Some((at, character)) = characters.next() {
            if character == quote {
                self.push(Token::Text(text));
                self.at += at + 2;
                return Ok(());
            }
            if character != '\\' {
                text.push(character);
                continue;
            }
            let Some((at, escaped)) = characters.next() else { break };
            let simple = match escaped {
                '\n' => None,
                '\\' | '\'' | '"' => Some(escaped),
                'n' => Some('\n'),
                't' => Some('\t'),
                'r' => Some('\r'),
                'a' => Some('\x07'),
                'b' => Some('\x08'),
                'f' => Some('\x0c'),
                'v' => Some('\x0b'),
                'x' | 'u' | 'U' | '0'..='7' => {
                    let (code, length) = code_point(&rest[1 + at..]);
                    let Some(decoded) = code.and_then(char::from_u32) else { return self.fail("a malformed escape") };
                    for _ in 1..length {
                        characters.next();
                    }
                    Some(decoded)
                }
                'N' => return self.fail("escapes of named characters are not supported"),
                other => {
                    text.push('\\');
                    Some(other)
                }
            };
            text.extend(simple);
        }
        self.fail("unexpected char: a string does not end")
    }
}

/// The number of an escape such as `x41`, `u00e4` or `101`, and its length.
fn code_point(escape: &str) -> (Option<u32>, usize) {
    let (skip, most, least, base) = match escape.as_bytes()[0] {
        b'x' => (1, 2, 2, 16),
        b'u' => (1, 4, 4, 16),
        b'U' => (1, 8, 8, 16),
        _ => (0, 3, 1, 8),
    };
    let count = escape[skip..].chars().take(most).take_while(|digit| digit.is_digit(base)).count();
    let digits = &escape[skip..skip + count];
    ((count >= least).then(|| u32::from_str_radix(digits, base).ok()).flatten(), skip + count.max(1 - skip))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(source: &str) -> String {
        let pieces = tokens(source).expect("tokens").into_iter();
        let show = |(token, _)| match token {
            Token::Data(text) => text,
            Token::CloseBlock => "%".into(),
            Token::CloseVariable => "v".into(),
            _ => String::new(),
        };
        pieces.map(show).collect()
    }

    #[test]
    fn white_space_goes_as_jinja_has_it() {
        for (source, want) in [
            ("  {% if x %}\n  a\n  {% endif %}\nb", "%  a\n%b"),
            ("a  {%- if x -%}  \n b", "a%b"),
            ("  {%+ if x +%}\nb", "  %\nb"),
            ("  {{ x }}\n", "  v\n"),
            ("a  {{- x -}}  b", "avb"),
            ("  {# c #}\nb {#- c -#} c", "bc"),
            ("{% raw %}{{ x }}{% endraw %}\nb", "{{ x }}b"),
            ("{% raw -%}  {% x %} {%- endraw %}\nb", "{% x %}b"),
            ("{{ {'a': {}} }}", "v"),
            ("a { b } {x", "a { b } {x"),
        ] {
            assert_eq!(data(source), want, "{source:?}");
        }
    }

    #[test]
    fn literals() {
        let one = |source: &str| tokens(&format!("{{{{{source}}}}}")).map(|mut tokens| tokens.swap_remove(2).0);
        assert_eq!(one("'a\\n\\x41\\u00e4\\101\\q\\''"), Ok(Token::Text("a\nAäA\\q'".into())));
        assert_eq!(one("1_000"), Ok(Token::Integer("1000".into())));
        assert_eq!(one("0xff"), Ok(Token::Integer("255".into())));
        assert_eq!(one("1.5e-3"), Ok(Token::Float(0.0015)));
        for source in ["'a", "'\\x4'", "'\\ud800'", "$", "(]", "'\\"] {
            assert!(one(source).is_err(), "{source}");
        }
    }
}
