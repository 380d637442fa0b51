//! A SentencePiece vocabulary, as `tokenizer.json` files of Gemma, Phi-3, Llama 2 and Mistral hold
//! it: BPE over characters with a fallback to bytes, spaces written as `▁`.
//!
//! llama.cpp joins the two neighbours whose token has the highest score, whatever they are; the
//! file lists the pairs that are joined, in order. Both agree if every pair that makes a token is
//! listed, and the pairs of a token stand together: then the place of the first is the token's
//! score, less than zero. That is how such files are made, and it is checked.

use super::vocabulary::{CONTROL, Files, NORMAL, USER_DEFINED};
use crate::prepare::RunError;
use isobit_models::GgufValue;
use isobit_proof::name::quoted;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Types of tokens that only these vocabularies have.
const UNKNOWN: i32 = 2;
const BYTE: i32 = 6;

/// What a space is written as.
const SPACE: &str = "▁";
/// The score of tokens that are found before any are joined, as llama.cpp's own converter has it.
const ADDED: f32 = -1000.0;

/// Whether a vocabulary is one of these.
pub(super) fn is(files: &Files) -> bool {
    let model = &files.tokenizer["model"];
    model["type"] == "BPE" && model["byte_fallback"] == true
}

/// The keys that it has in place of merges, and changed texts and types of tokens.
pub(super) fn keys(files: &Files, tokens: &mut [(String, i32)]) -> Result<Vec<(String, GgufValue)>, RunError> {
    let scores = scores(files, tokens)?;
    let unknown = files.tokenizer["model"]["unk_token"].as_str();
    for (text, kind) in tokens.iter_mut() {
        match *kind {
            NORMAL | CONTROL if unknown == Some(text) => *kind = UNKNOWN,
            NORMAL if is_byte(text) => *kind = BYTE,
            // They are compared with the text before its spaces are replaced.
            USER_DEFINED => *text = text.replace(SPACE, " "),
            _ => {}
        }
    }
    let key = |name: &str, value: GgufValue| (format!("tokenizer.ggml.{name}"), value);
    Ok(vec![key("scores", GgufValue::F32s(scores)), key("add_space_prefix", GgufValue::Bool(adds_space(files)?))])
}

fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// The score of every token.
fn scores(files: &Files, tokens: &[(String, i32)]) -> Result<Vec<f32>, RunError> {
    let ids: BTreeMap<&str, usize> = tokens
        .iter()
        .enumerate()
        .filter(|(_, (_, kind))| *kind == NORMAL)
        .map(|(id, (text, _))| (&**text, id))
        .collect();
    let mut scores: Vec<f32> =
        tokens.iter().map(|(_, kind)| if [CONTROL, USER_DEFINED].contains(kind) { ADDED } else { 0.0 }).collect();
    let mut pairs: BTreeSet<(usize, usize)> = BTreeSet::new();
    let mut last = None;
    for (rank, pair) in files.pairs()?.iter().enumerate() {
        let [left, right] = pair;
        let found = (ids.get(&**left), ids.get(&**right), ids.get(&*format!("{left}{right}")));
        // Of added tokens, which llama.cpp finds first.
        let (Some(left), Some(right), Some(id)) = found else { continue };
        if last != Some(*id) && scores[*id] != 0.0 {
            return Err(other(files, &format!("the merges of {} do not stand together", quoted(&tokens[*id].0))));
        }
        if last != Some(*id) {
            // BOUND: places below 2²⁴ are exact in float32; a file of 512 MiB lists fewer.
            scores[*id] = (-1 - rank as i64) as f32;
        }
        last = Some(*id);
        pairs.insert((*left, *right));
    }
    for (text, _) in tokens.iter().filter(|(text, kind)| *kind == NORMAL && !is_byte(text)) {
        let is_missing = |at: usize| match (ids.get(&text[..at]), ids.get(&text[at..])) {
            (Some(left), Some(right)) => !pairs.contains(&(*left, *right)),
            _ => false,
        };
        if text.char_indices().skip(1).any(|(at, _)| is_missing(at)) {
            return Err(other(files, &format!("a pair that makes {} is missing in `merges`", quoted(text))));
        }
    }
    Ok(scores)
}

/// Whether a text gets a space in front.
fn adds_space(files: &Files) -> Result<bool, RunError> {
    let parts = |outer: &Value, inner: &str| -> Vec<Value> {
        let inner = outer[inner].as_array().cloned();
        inner.unwrap_or_else(|| if outer.is_null() { Vec::new() } else { vec![outer.clone()] })
    };
    let normalisers = parts(&files.tokenizer["normalizer"], "normalizers");
    let cutters = parts(&files.tokenizer["pre_tokenizer"], "pretokenizers");
    let metaspace = cutters.iter().find(|part| part["type"] == "Metaspace");
    let replaces = normalisers.iter().any(|part| part["type"] == "Replace" && part["content"] == SPACE);
    let is_known = |part: &Value| part["type"] == "Replace" || part["type"] == "Prepend" && part["prepend"] == SPACE;
    if !normalisers.iter().all(is_known) || !replaces && metaspace.is_none() {
        return Err(other(files, "its normalizer is not the one of such a vocabulary"));
    }
    let prepends = normalisers.iter().any(|part| part["type"] == "Prepend");
    let leads = |part: &Value| part["prepend_scheme"] != "never" && part["add_prefix_space"] != false;
    Ok(prepends || metaspace.is_some_and(leads))
}

fn other(files: &Files, what: &str) -> RunError {
    RunError::Target {
        what: format!("{}: {what}, and llama.cpp would cut text differently", files.path.display()),
        hint: "`isobit export merge` writes a model folder instead".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::PathBuf;

    fn files(merges: &Value, normaliser: &Value) -> Files {
        let vocabulary = json!({"<unk>": 0, "<0x0A>": 1, "▁": 2, "a": 3, "b": 4, "ab": 5, "▁ab": 6, "▁▁": 7, "▁a": 8});
        let tokenizer = json!({
            "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "vocab": vocabulary, "merges": merges},
            "added_tokens": [{"id": 0, "content": "<unk>", "special": true}, {"id": 7, "content": "▁▁", "special": false}],
            "normalizer": normaliser,
        });
        Files { path: PathBuf::from("tokenizer.json"), tokenizer, settings: json!({}), config: json!({}) }
    }

    type Tokens = Vec<(String, i32)>;
    type Keys = Vec<(String, GgufValue)>;

    fn made(merges: &Value, normaliser: &Value) -> Result<(Tokens, Keys), RunError> {
        let files = files(merges, normaliser);
        let mut tokens = files.tokens(9)?;
        let keys = keys(&files, &mut tokens)?;
        Ok((tokens, keys))
    }

    #[test]
    fn scores_follow_from_the_places_of_merges() {
        let merges = json!([["a", "b"], ["▁", "a"], "▁ ab", ["▁a", "b"]]);
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let (tokens, found) = made(&merges, &replace).expect("such a vocabulary");
        let kinds: Vec<i32> = tokens.iter().map(|(_, kind)| *kind).collect();
        assert_eq!(kinds, [UNKNOWN, BYTE, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL, USER_DEFINED, NORMAL]);
        assert_eq!(tokens[7].0, "  ");
        let scores = GgufValue::F32s(vec![ADDED, 0.0, 0.0, 0.0, 0.0, -1.0, -3.0, ADDED, -2.0]);
        assert_eq!(found[0].1, scores);
        assert_eq!(found[1].1, GgufValue::Bool(false));
        let both = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]});
        assert_eq!(made(&merges, &both).expect("another").1[1].1, GgufValue::Bool(true));
    }

    #[test]
    fn what_llama_cpp_would_cut_differently_is_refused() {
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        for (merges, normaliser, wanted) in [
            (json!([["a", "b"], ["▁", "a"], ["▁", "ab"]]), &replace, "is missing"),
            (json!([["▁", "ab"], ["a", "b"], ["▁", "a"], ["▁a", "b"]]), &replace, "do not stand together"),
            (json!([["a", "b"], ["▁", "a"], "▁ ab", ["▁a", "b"]]), &json!({"type": "NFC"}), "its normalizer"),
        ] {
            let error = made(&merges, normaliser).expect_err(wanted);
            assert!(error.to_string().contains(wanted), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
    }
}
