//! How much a tokenizer can lengthen a text. Each `Replace` in a chain multiplies the length, and a
//! file of a few kilobytes can demand more memory than there is, so the product is bounded before
//! the file is used. The size that a SentencePiece table claims is bounded too.

use serde::Deserialize;
use serde_json::Value;

/// BOUND: growth of a text by one of the tokenizer's chains. Published ones stay below 100.
const GROWTH_MAX: u64 = 4096;
/// BOUND: a normalised text, as far as its size is known in advance.
pub(super) const NORMALISED_BYTES_MAX: u64 = 1 << 30;

#[derive(Deserialize)]
pub(super) struct Added {
    #[serde(default)]
    content: Value,
}

/// The largest factor by which normalising lengthens a text, or why it is too much. The chains are
/// the normalizer, the pre-tokenizer and the decoder.
pub(super) fn growth(chains: [&Option<Value>; 3], added_tokens: &[Added]) -> Result<u64, String> {
    let mut growth = 1;
    for (name, part) in ["normalizer", "pre_tokenizer", "decoder"].into_iter().zip(chains) {
        let factor =
            part.as_ref().map_or(Some(1), factor).ok_or_else(|| format!("the {name} has a table that is cut off"))?;
        if factor > GROWTH_MAX {
            return Err(format!("the {name} can make text more than {GROWTH_MAX} times as long"));
        }
        growth = if name == "decoder" { growth } else { u64::saturating_mul(growth, factor) };
    }
    // The contents of added tokens are normalised when the tokenizer is built.
    let added = added_tokens.iter().map(|token| token.content.as_str().map_or(0, str::len) as u64);
    if added.sum::<u64>().saturating_mul(growth) > NORMALISED_BYTES_MAX {
        return Err(format!("its added tokens can become more than {NORMALISED_BYTES_MAX} bytes"));
    }
    Ok(growth)
}

/// The product over everything inside: chains may be nested. `None` for a table larger than its
/// file.
fn factor(part: &Value) -> Option<u64> {
    let own = match part.get("type").and_then(Value::as_str) {
        Some("Replace") => {
            let content = part.get("content").and_then(Value::as_str).map_or(0, str::len) as u64;
            let pattern = part.get("pattern");
            match pattern.and_then(|pattern| pattern.get("String")).and_then(Value::as_str) {
                Some(text) if !text.is_empty() => content.div_ceil(text.len() as u64).max(1),
                // A regular expression may match a single character, or the position before one.
                _ => content.saturating_add(1),
            }
        }
        Some("Precompiled") => {
            table_factor(part.get("precompiled_charsmap").and_then(Value::as_str).unwrap_or_default())?
        }
        Some("Prepend") => 1 + part.get("prepend").and_then(Value::as_str).map_or(0, str::len) as u64,
        _ => 1,
    };
    let inside: Vec<&Value> = match part {
        Value::Array(items) => items.iter().collect(),
        Value::Object(entries) => entries.values().collect(),
        _ => Vec::new(),
    };
    inside.into_iter().try_fold(own, |product, child| Some(product.saturating_mul(factor(child)?)))
}

/// A SentencePiece table: the length of a trie, the trie, and zero-terminated texts. The longest
/// text bounds what one character can become.
fn table_factor(table: &str) -> Option<u64> {
    let bytes = from_base64(table)?;
    let (length, rest) = bytes.split_at_checked(4)?;
    let length = length.iter().rev().fold(0, |size, byte| size * 256 + usize::from(*byte));
    let (_, texts) = rest.split_at_checked(length)?;
    Some(texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0).max(1) as u64)
}

fn from_base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    for byte in text.trim_end_matches('=').bytes() {
        let digit = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(digit);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn growth(text: &str) -> Result<u64, String> {
        let mut parts: Value = serde_json::from_str(text).expect("JSON");
        let chains = ["normalizer", "pre_tokenizer", "decoder"].map(|name| parts.get(name).cloned());
        let added = parts.get_mut("added_tokens").map_or(Value::Array(Vec::new()), Value::take);
        let added: Vec<Added> = serde_json::from_value(added).expect("tokens");
        super::growth([&chains[0], &chains[1], &chains[2]], &added)
    }

    #[test]
    fn tables_are_as_long_as_they_say() {
        let table = |text: &str| {
            growth(&format!(r#"{{"normalizer":{{"type":"Precompiled","precompiled_charsmap":"{text}"}}}}"#))
        };
        // Four bytes of trie, then "abc", 0, "de", 0.
        assert_eq!(table("BAAAAAAAAABhYmMAZGUA"), Ok(3));
        for text in ["/////w==", "", "AQ==", "BQAAAAAAAAA=", "!"] {
            assert_eq!(table(text), Err("the normalizer has a table that is cut off".into()), "{text}");
        }
    }

    #[test]
    fn chains_multiply() {
        let replace =
            |content: &str| format!(r#"{{"type":"Replace","pattern":{{"String":" "}},"content":"{content}"}}"#);
        assert_eq!(growth("{}"), Ok(1));
        assert_eq!(growth(&format!(r#"{{"normalizer":{}}}"#, replace("▁"))), Ok(3));
        let nested = format!(r#"{{"type":"Sequence","normalizers":[{},{}]}}"#, replace("▁"), replace("aaaa"));
        assert_eq!(growth(&format!(r#"{{"normalizer":{nested},"pre_tokenizer":{}}}"#, replace("ab"))), Ok(24));
        let long = "a".repeat(1200);
        let six = vec![replace(&long); 6].join(",");
        for part in ["normalizer", "pre_tokenizer", "decoder"] {
            let error = growth(&format!(r#"{{"{part}":{{"type":"Sequence","x":[{six}]}}}}"#)).expect_err("too much");
            assert!(error.starts_with(&format!("the {part} can make text more than 4096 times")), "{error}");
        }
        let added = format!(
            r#"{{"normalizer":{},"added_tokens":[{{"content":"{}"}}]}}"#,
            replace(&long),
            "x".repeat(1_000_000)
        );
        assert!(growth(&added).is_err());
    }
}
