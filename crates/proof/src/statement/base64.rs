//! Base64 of RFC 4648 with padding, for PEM files and DSSE envelopes.

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub(super) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |at: usize| u32::from(three.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= three.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

/// None if the text is not base64 with padding and without anything else.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let (fours, rest) = text.as_bytes().as_chunks::<4>();
    let mut bytes = Vec::with_capacity(fours.len() * 3);
    for (at, four) in fours.iter().enumerate() {
        let padding = four.iter().rev().take_while(|byte| **byte == b'=').count();
        if padding > 2 || (padding > 0 && at + 1 < fours.len()) {
            return None;
        }
        let mut bits = 0;
        for byte in &four[..4 - padding] {
            bits = bits << 6 | DIGITS.iter().position(|digit| digit == byte)? as u32;
        }
        bits <<= 6 * padding;
        let [_, three @ ..] = bits.to_be_bytes();
        if three[3 - padding..].iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend(&three[..3 - padding]);
    }
    rest.is_empty().then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vectors_of_the_standard() {
        let cases =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("fooba", "Zm9vYmE=")];
        for (plain, text) in cases {
            assert_eq!(encode(plain.as_bytes()), text);
            assert_eq!(decode(text).as_deref(), Some(plain.as_bytes()));
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all));
        for bad in ["Zg=", "Zg", "Z===", "Zg==Zg==", "Zh==", "Zm9*", " Zm9v", "====", "Zm9v\n"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }
}
