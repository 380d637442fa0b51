//! The vocabulary of a model folder as the keys of a GGUF file: tokens, their types, merges,
//! special tokens and the chat template, from `tokenizer.json` and the files beside it.
//!
//! Byte-level BPE here, SentencePiece in `sentencepiece.rs`. llama.cpp knows how text is cut before
//! merging by a name (`tokenizer.ggml.pre`), not by an expression; the expressions that have a name
//! are listed here.

use super::sentencepiece;
use crate::data::Template;
use crate::prepare::{CONFIG_BYTES_MAX, RunError};
use isobit_models::GgufValue;
use isobit_proof::name::{harmless, quoted};
use isobit_proof::{FileError, regular};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// BOUND: bytes of `tokenizer.json`.
const TOKENIZER_BYTES_MAX: u64 = 512 << 20;

/// BOUND: characters of a message about an untrusted file.
const WHAT_MAX: usize = 200;

/// Types of tokens.
pub(super) const NORMAL: i32 = 1;
pub(super) const CONTROL: i32 = 3;
pub(super) const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Expressions of `Split`, one or several before `ByteLevel`, and llama.cpp's names for them.
const EXPRESSIONS: [(&[&str], &str); 5] = [
    (
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        "qwen2",
    ),
    (
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        "llama-bpe",
    ),
    (
        &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        "gpt-4o",
    ),
    (
        &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        "tekken",
    ),
    (
        &[
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ],
        "deepseek-v3",
    ),
];

/// The files of a model folder that describe its vocabulary.
pub(super) struct Files {
    pub(super) path: PathBuf,
    pub(super) tokenizer: Value,
    pub(super) settings: Value,
    pub(super) config: Value,
}

/// The keys of a vocabulary of `rows` tokens. `pre` overrides the name of how text is cut.
pub(super) fn keys(folder: &Path, rows: usize, pre: Option<&str>) -> Result<Vec<(String, GgufValue)>, RunError> {
    let path = folder.join("tokenizer.json");
    let json = |name: &str, limit: u64| -> Result<Value, RunError> {
        let path = folder.join(name);
        let Some(text) = regular::if_there(regular::read_text(&path, limit))? else { return Ok(Value::Null) };
        Ok(serde_json::from_str(&text).map_err(|error| malformed(&path, &error.to_string()))?)
    };
    let files = Files {
        tokenizer: json("tokenizer.json", TOKENIZER_BYTES_MAX)?,
        settings: json("tokenizer_config.json", CONFIG_BYTES_MAX)?,
        config: json("config.json", CONFIG_BYTES_MAX)?,
        path,
    };
    if files.tokenizer.is_null() {
        return Err(FileError::Missing { path: files.path }.into());
    }
    let is_sentencepiece = sentencepiece::is(&files);
    let pre = match pre {
        Some(pre) => pre,
        None if is_sentencepiece => "default",
        None => files.pre()?,
    };
    let mut tokens = files.tokens(rows)?;
    let own = if is_sentencepiece {
        sentencepiece::keys(&files, &mut tokens)?
    } else {
        // A space inside a part would look like the one between them.
        let merge = |pair: [String; 2]| pair.map(|part| part.replace(' ', "Ġ")).join(" ");
        let merges = files.pairs()?.into_iter().map(merge).collect();
        vec![("tokenizer.ggml.merges".to_string(), GgufValue::Texts(merges))]
    };
    let text = |name: &str, value: &str| (format!("tokenizer.ggml.{name}"), GgufValue::Text(value.to_string()));
    let mut keys = vec![text("model", if is_sentencepiece { "llama" } else { "gpt2" }), text("pre", pre)];
    keys.push((
        "tokenizer.ggml.tokens".to_string(),
        GgufValue::Texts(tokens.iter().map(|(text, _)| text.clone()).collect()),
    ));
    keys.push((
        "tokenizer.ggml.token_type".to_string(),
        GgufValue::I32s(tokens.iter().map(|(_, kind)| *kind).collect()),
    ));
    keys.extend(own);
    for (name, key) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
        if let Some(id) = files.special(name, &tokens) {
            keys.push((format!("tokenizer.ggml.{key}_token_id"), GgufValue::U32(id)));
        }
    }
    let bos = files.special("bos", &tokens).and_then(|id| tokens.get(id as usize));
    keys.push(("tokenizer.ggml.add_bos_token".to_string(), GgufValue::Bool(files.adds_bos(bos.map(|(text, _)| text)))));
    if let Some((_, source)) = Template::find(folder)? {
        keys.push(("tokenizer.chat_template".to_string(), GgufValue::Text(source)));
    }
    Ok(keys)
}

fn malformed(path: &Path, what: &str) -> FileError {
    FileError::Malformed { path: path.to_path_buf(), what: harmless(what, WHAT_MAX) }
}

impl Files {
    fn malformed(&self, what: impl Into<String>) -> RunError {
        malformed(&self.path, &what.into()).into()
    }

    /// llama.cpp's name for how text is cut.
    fn pre(&self) -> Result<&'static str, RunError> {
        let cutter = &self.tokenizer["pre_tokenizer"];
        let all = match cutter["pretokenizers"].as_array() {
            Some(all) if cutter["type"] == "Sequence" => all.iter().collect(),
            _ => vec![cutter],
        };
        let kinds: Vec<&str> = all.iter().map(|one| one["type"].as_str().unwrap_or_default()).collect();
        let own_expression = |one: &Value| one["use_regex"] != false;
        let found = match (&kinds[..], &all[..]) {
            ([.., "ByteLevel"], [splits @ .., bytes])
                if !own_expression(bytes) && splits.iter().all(|part| part["type"] == "Split") =>
            {
                let expressions: Vec<_> = splits.iter().map(|split| split["pattern"]["Regex"].as_str()).collect();
                let is = |known: &[&str]| known.iter().copied().map(Some).eq(expressions.iter().copied());
                EXPRESSIONS.iter().find(|(known, _)| is(known)).map(|(_, name)| *name)
            }
            (["Digits", "ByteLevel"], [digits, bytes]) if own_expression(bytes) => {
                (digits["individual_digits"] == true).then_some("smollm")
            }
            (["ByteLevel"], [bytes]) if own_expression(bytes) => Some("gpt-2"),
            _ => None,
        };
        let found = found.filter(|_| all.iter().all(|one| one["add_prefix_space"] != true));
        found.ok_or_else(|| RunError::Target {
            what: format!(
                "{}: its pre_tokenizer is not one that llama.cpp is known to have a name for",
                self.path.display()
            ),
            hint: "if you know the name, give it with `--pre NAME`: `kimi-k2`, `chatglm-bpe`, `dbrx`, ...".to_string(),
        })
    }

    /// Text and type of every token; rows without one are unused.
    pub(super) fn tokens(&self, rows: usize) -> Result<Vec<(String, i32)>, RunError> {
        let model = &self.tokenizer["model"];
        let Some(vocabulary) = model["vocab"].as_object().filter(|_| model["type"] == "BPE") else {
            return Err(RunError::Target {
                what: format!("{} is not a BPE vocabulary", self.path.display()),
                hint: "only such vocabularies are written as GGUF yet; `isobit export merge` writes a model folder"
                    .to_string(),
            });
        };
        let mut tokens: Vec<(String, i32)> = (0..rows).map(|row| (format!("[PAD{row}]"), UNUSED)).collect();
        let mut set = |id: Option<u64>, text: &str, kind: i32| -> Result<(), RunError> {
            let place = id
                .and_then(|id| tokens.get_mut(usize::try_from(id).ok()?))
                .ok_or_else(|| self.malformed(format!("token {} is not one of the model's {rows}", quoted(text))))?;
            if kind == NORMAL && place.1 == NORMAL {
                return Err(self.malformed(format!(
                    "tokens {} and {} have one number",
                    quoted(&place.0),
                    quoted(text)
                )));
            }
            *place = (text.to_string(), kind);
            Ok(())
        };
        for (text, id) in vocabulary {
            set(id.as_u64(), text, NORMAL)?;
        }
        for added in self.tokenizer["added_tokens"].as_array().into_iter().flatten() {
            let text = added["content"].as_str().ok_or_else(|| self.malformed("an added token has no `content`"))?;
            set(added["id"].as_u64(), text, if added["special"] == true { CONTROL } else { USER_DEFINED })?;
        }
        self.make_distinct(&mut tokens)?;
        Ok(tokens)
    }

    /// llama.cpp stops at two tokens with the same text: unused ones get another name, others are
    /// refused.
    fn make_distinct(&self, tokens: &mut [(String, i32)]) -> Result<(), RunError> {
        let mut known = BTreeSet::new();
        for (text, _) in tokens.iter().filter(|(_, kind)| *kind != UNUSED) {
            if !known.insert(text.clone()) {
                return Err(self.malformed(format!("two tokens have the text {}", quoted(text))));
            }
        }
        for (text, _) in tokens.iter_mut().filter(|(_, kind)| *kind == UNUSED) {
            while !known.insert(text.clone()) {
                text.push('_');
            }
        }
        Ok(())
    }

    /// The pairs that are joined, in order.
    pub(super) fn pairs(&self) -> Result<Vec<[String; 2]>, RunError> {
        let malformed = || self.malformed("`merges` is not a list of pairs");
        let pair = |merge: &Value| match merge {
            Value::String(text) => text.split_once(' ').map(|(left, right)| [left.to_string(), right.to_string()]),
            Value::Array(pair) => match &pair[..] {
                [Value::String(left), Value::String(right)] => Some([left.clone(), right.clone()]),
                _ => None,
            },
            _ => None,
        };
        let all = self.tokenizer["model"]["merges"].as_array().ok_or_else(malformed)?;
        all.iter().map(|one| pair(one).ok_or_else(malformed)).collect()
    }

    /// The id of a special token: by its text in `tokenizer_config.json`, else by `config.json`.
    fn special(&self, name: &str, tokens: &[(String, i32)]) -> Option<u32> {
        let named = &self.settings[format!("{name}_token")];
        let text = named.as_str().or_else(|| named["content"].as_str());
        let by_text = text.and_then(|text| tokens.iter().position(|(token, _)| token == text));
        let by_number = || {
            let value = &self.config[format!("{name}_token_id")];
            let id = value.as_u64().or_else(|| value.get(0)?.as_u64())?;
            usize::try_from(id).ok().filter(|id| *id < tokens.len())
        };
        // BOUND: ids are rows of a table with fewer than 2³².
        by_text.or_else(by_number).map(|id| id as u32)
    }

    /// Whether a plain text gets a first token: by the settings, else by the post-processor.
    fn adds_bos(&self, bos: Option<&String>) -> bool {
        if let Some(adds) = self.settings["add_bos_token"].as_bool() {
            return adds;
        }
        let Some(bos) = bos else { return false };
        let outer = &self.tokenizer["post_processor"];
        let parts = std::iter::once(outer).chain(outer["processors"].as_array().into_iter().flatten());
        parts
            .filter(|part| part["type"] == "TemplateProcessing")
            .any(|part| part["single"][0]["SpecialToken"]["id"] == **bos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn files(tokenizer: Value, settings: Value) -> Files {
        Files { path: PathBuf::from("tokenizer.json"), tokenizer, settings, config: json!({"eos_token_id": [1, 2]}) }
    }

    #[test]
    fn tokens_have_texts_of_their_own() {
        let of = |vocabulary: Value, added: Value| {
            let model = json!({"type": "BPE", "vocab": vocabulary});
            files(json!({"model": model, "added_tokens": added}), json!({})).tokens(4)
        };
        let texts = |tokens: Vec<(String, i32)>| tokens.into_iter().map(|(text, _)| text).collect::<Vec<_>>();
        let tokens = of(json!({"a": 0, "[PAD2]": 1}), json!([{"id": 3, "content": "<s>", "special": true}]));
        assert_eq!(texts(tokens.expect("tokens")), ["a", "[PAD2]", "[PAD2]_", "<s>"]);
        assert!(of(json!({"a": 0, "b": 0}), json!([])).is_err());
        assert!(of(json!({"a": 0}), json!([{"id": 1, "content": "a"}])).is_err());
    }

    #[test]
    fn how_text_is_cut_has_a_name() {
        let of = |cutter: Value| files(json!({"pre_tokenizer": cutter}), json!({})).pre().ok();
        let bytes = |own: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": own});
        let sequence = |first: Value, own: bool| json!({"type": "Sequence", "pretokenizers": [first, bytes(own)]});
        let split =
            |expression: &str| json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"});
        for (expressions, name) in EXPRESSIONS {
            let parts: Vec<Value> = expressions.iter().map(|one| split(one)).chain([bytes(false)]).collect();
            assert_eq!(of(json!({"type": "Sequence", "pretokenizers": parts})), Some(name));
            assert_eq!(of(json!({"type": "Sequence", "pretokenizers": parts[..parts.len() - 1]})), None);
        }
        assert_eq!(of(sequence(json!({"type": "Digits", "individual_digits": true}), true)), Some("smollm"));
        assert_eq!(of(bytes(true)), Some("gpt-2"));
        assert_eq!(of(sequence(split("x"), false)), None);
        assert_eq!(of(json!({"type": "Metaspace"})), None);
        assert_eq!(of(json!({"type": "ByteLevel", "add_prefix_space": true})), None);
        assert_eq!(of(Value::Null), None);
    }

    #[test]
    fn tokens_types_merges_and_special_ones() {
        let tokenizer = json!({
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
            "added_tokens": [{"id": 3, "content": "<s>", "special": true}, {"id": 4, "content": "x y", "special": false}],
            "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]},
        });
        let found = files(tokenizer.clone(), json!({"bos_token": {"content": "<s>"}}));
        let tokens = found.tokens(6).expect("a vocabulary");
        let kinds: Vec<i32> = tokens.iter().map(|(_, kind)| *kind).collect();
        assert_eq!(kinds, [NORMAL, NORMAL, NORMAL, CONTROL, USER_DEFINED, UNUSED]);
        assert_eq!((tokens[3].0.as_str(), tokens[5].0.as_str()), ("<s>", "[PAD5]"));
        assert_eq!(found.pairs().expect("merges"), [["a", "b"]]);
        assert_eq!((found.special("bos", &tokens), found.special("eos", &tokens)), (Some(3), Some(1)));
        assert!(found.adds_bos(Some(&"<s>".to_string())) && !found.adds_bos(Some(&"a".to_string())));
        assert!(!files(tokenizer.clone(), json!({"add_bos_token": false})).adds_bos(Some(&"<s>".to_string())));
        assert!(files(tokenizer, json!({})).tokens(4).is_err(), "a token without a row");
        let other = json!({"model": {"type": "Unigram", "vocab": []}});
        assert_eq!(files(other, json!({})).tokens(4).expect_err("not BPE").exit_code(), 2);
    }
}
