//! How much longer a tokenizer can make a text. Each `Replace` in a chain multiplies the length, and a file of a few
//! kilobytes can ask for more memory than there is, so the product is bounded before the file is used.

use serde::Deserialize;
use serde_json::Value;

/// BOUND: growth of a text by one of the tokenizer's chains. Published ones stay below 10.
const GROWTH_MAX: u64 = 4096;
/// BOUND: a normalised text, as far as can be told before it is made.
pub(super) const NORMALISED_BYTES_MAX: u64 = 256 << 20;

#[derive(Deserialize)]
pub(super) struct Added {
    #[serde(default)]
    content: Value,
}

/// How many times as long as its text a normalised text can be; otherwise why that is too much. The chains are the
/// normalizer, the pre-tokenizer and the decoder.
pub(super) fn growth(chains: [&Option<Value>; 3], added_tokens: &[Added]) -> Result<u64, String> {
    let mut growth = 1;
    for (name, part) in ["normalizer", "pre_tokenizer", "decoder"].into_iter().zip(chains) {
        let factor = part.as_ref().map_or(1, factor);
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

/// The product over everything inside: chains may be nested.
fn factor(part: &Value) -> u64 {
    let own = match part.get("type").and_then(Value::as_str) {
        Some("Replace") => {
            let content = part.get("content").and_then(Value::as_str).map_or(0, str::len) as u64;
            let pattern = part.get("pattern");
            match pattern.and_then(|pattern| pattern.get("String")).and_then(Value::as_str) {
                Some("") => content.saturating_add(1),
                Some(text) => content.div_ceil(text.len() as u64).max(1),
                // A regular expression may match a single character, or the place before one.
                None => content.saturating_add(1),
            }
        }
        Some("Prepend") => 1 + part.get("prepend").and_then(Value::as_str).map_or(0, str::len) as u64,
        _ => 1,
    };
    let inside: Vec<&Value> = match part {
        Value::Array(items) => items.iter().collect(),
        Value::Object(entries) => entries.values().collect(),
        _ => Vec::new(),
    };
    inside.into_iter().fold(own, |product, child| product.saturating_mul(factor(child)))
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
        let added =
            format!(r#"{{"normalizer":{},"added_tokens":[{{"content":"{}"}}]}}"#, replace(&long), "x".repeat(300_000));
        assert!(growth(&added).is_err());
    }
}
