//! Lines of standard input, with a limit: a line that is not text, or never ends, is a data error,
//! not a disk error.

use crate::Failure;
use std::io::{BufRead, Read};

/// BOUND: bytes of a line, far more than any model has positions for.
const LINE_BYTES_MAX: u64 = 1 << 24;

/// The next line without its line break; None after the last.
pub(crate) fn line(reader: &mut impl BufRead) -> Result<Option<String>, Failure> {
    let mut bytes = Vec::new();
    let read = reader.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut bytes);
    read.map_err(|error| Failure { code: 7, message: format!("cannot read standard input: {error}"), hint: None })?;
    if bytes.is_empty() {
        return Ok(None);
    }
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
    }
    if bytes.len() as u64 > LINE_BYTES_MAX {
        let message = format!("a line of standard input is longer than {LINE_BYTES_MAX} bytes");
        return Err(Failure { code: 3, message, hint: Some("give one prompt per line".to_string()) });
    }
    String::from_utf8(bytes).map(Some).map_err(|_| Failure {
        code: 3,
        message: "a line of standard input is not UTF-8".to_string(),
        hint: Some("convert it, for example with `iconv -t UTF-8`".to_string()),
    })
}

/// All lines.
pub(crate) fn lines(reader: &mut impl BufRead) -> Result<Vec<String>, Failure> {
    let mut all = Vec::new();
    while let Some(next) = line(reader)? {
        all.push(next);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_as_they_may() {
        let of = |text: &[u8]| lines(&mut &text[..]).expect("text");
        assert_eq!(of(b""), Vec::<String>::new());
        assert_eq!(of(b"a\r\n\nb"), ["a", "", "b"]);
        assert_eq!(of(b"a\rb\n"), ["a\rb"]);
    }

    #[test]
    fn what_is_no_text_or_has_no_end() {
        assert_eq!(lines(&mut &b"a\n\xff\n"[..]).expect_err("no text").code, 3);
        let endless = lines(&mut std::io::BufReader::new(std::io::repeat(b'x')));
        assert_eq!(endless.expect_err("no end").code, 3);
    }
}
