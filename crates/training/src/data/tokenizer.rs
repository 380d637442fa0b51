//! The model's tokenizer: `tokenizer.json` loaded by the `tokenizers` crate, special tokens from
//! the files beside it. Anything that would make tokens depend on chance, or on truncation and
//! padding set in the file, is refused or disabled here.

use super::error::{DataError, RowError};
use super::files;
use super::normalizers;
use crate::quiet;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Tokens of a text, each with its byte range in the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoding {
    pub tokens: Vec<u32>,
    pub offsets: Vec<(usize, usize)>,
}

/// A loaded tokenizer. Encoding takes `&self` and returns the same tokens on any thread.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    special_tokens: BTreeMap<String, String>,
    end_of_text: Vec<u32>,
    id_limit: u32,
    /// Texts that are read as special tokens anywhere.
    special_texts: Vec<String>,
    digest: blake3::Hash,
    /// The largest factor by which normalising lengthens a text.
    growth: u64,
}

/// The parts of `tokenizer.json` that are checked before the crate sees them: sources of randomness
/// and of text growth.
#[derive(Deserialize)]
struct Probe {
    model: ModelProbe,
    normalizer: Option<serde_json::Value>,
    pre_tokenizer: Option<serde_json::Value>,
    decoder: Option<serde_json::Value>,
    #[serde(default)]
    added_tokens: Vec<normalizers::Added>,
}

#[derive(Deserialize)]
struct ModelProbe {
    dropout: Option<f64>,
}

const SPECIAL_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

impl Tokenizer {
    /// Reads `tokenizer.json` of a model folder, and special tokens from the files beside it.
    pub fn load(folder: &Path) -> Result<Self, DataError> {
        let path = folder.join("tokenizer.json");
        let bytes = files::read(&path, files::TOKENIZER_BYTES_MAX).map_err(of_model)?;
        let malformed = |why: String| DataError::ModelFile { path: path.clone(), why };
        let probe: Probe = serde_json::from_slice(&bytes).map_err(|error| malformed(error.to_string()))?;
        if probe.model.dropout.is_some_and(|dropout| dropout != 0.0) {
            return Err(malformed("model.dropout makes tokens random: set it to null".into()));
        }
        let chains = [&probe.normalizer, &probe.pre_tokenizer, &probe.decoder];
        let growth = normalizers::growth(chains, &probe.added_tokens).map_err(malformed)?;
        // The crate reports errors it expects, and panics on some that it does not.
        let parsed = quiet::catch(|| tokenizers::Tokenizer::from_bytes(&bytes));
        let mut inner = parsed
            .ok_or_else(|| malformed("the tokenizer cannot be built".into()))?
            .map_err(|error| malformed(error.to_string()))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| malformed(error.to_string()))?;
        let special_tokens = special_tokens(folder)?;
        let id_limit = inner.get_vocab(true).into_values().max().map_or(0, |largest| largest.saturating_add(1));
        let digest = blake3::hash(&bytes);
        let added = inner.get_added_tokens_decoder().into_values();
        let special = added.filter(|token| token.special && !token.content.is_empty());
        let special_texts = special.map(|token| token.content).collect();
        let end_of_text = Vec::new();
        let mut tokenizer = Self { inner, special_tokens, end_of_text, id_limit, special_texts, digest, growth };
        tokenizer.end_of_text = tokenizer.find_end_of_text(folder)?;
        Ok(tokenizer)
    }

    fn find_end_of_text(&self, folder: &Path) -> Result<Vec<u32>, DataError> {
        let mut found = Vec::new();
        if let Some(text) = self.special_tokens.get("eos_token") {
            let id = self.token_id(text).ok_or_else(|| DataError::ModelFile {
                path: folder.join("tokenizer_config.json"),
                why: format!("eos_token `{}` is not in tokenizer.json", text.escape_debug()),
            })?;
            found.push(id);
        }
        for name in ["generation_config.json", "config.json"] {
            let path = folder.join(name);
            let Some(config) = files::json_if_there(&path).map_err(of_model)? else { continue };
            let value = config.get("eos_token_id").or_else(|| config.get("text_config")?.get("eos_token_id"));
            found.extend(token_ids(value, &path)?);
        }
        let mut unique = Vec::new();
        for id in found {
            if !unique.contains(&id) {
                unique.push(id);
            }
        }
        Ok(unique)
    }

    /// Tokens of a text. `special` adds the tokens that surround a plain text, such as a first
    /// token; text from a chat template already has them. Special tokens spelled out in the text
    /// are recognised either way.
    pub fn encode(&self, text: &str, special: bool) -> Result<Encoding, RowError> {
        let grown = self.growth.saturating_mul(text.len() as u64);
        if grown > normalizers::NORMALISED_BYTES_MAX {
            let limit = normalizers::NORMALISED_BYTES_MAX;
            let why = format!("its normalizers can make {grown} bytes of this text, {limit} at most");
            return Err(RowError::Tokenizer { why });
        }
        let encoded = quiet::catch(|| self.inner.encode(text, special));
        let encoded = encoded
            .ok_or_else(|| RowError::Tokenizer { why: "it panics on this text".into() })?
            .map_err(|error| RowError::Tokenizer { why: error.to_string() })?;
        Ok(Encoding { tokens: encoded.get_ids().to_vec(), offsets: encoded.get_offsets().to_vec() })
    }

    /// The text of tokens, including special ones. Bytes that do not form a character become
    /// U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let decoded = quiet::catch(|| self.inner.decode(tokens, false));
        decoded.and_then(Result::ok).unwrap_or_default()
    }

    /// The id of a token, spelled as in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token that ends a plain text: `eos_token`, or the first `eos_token_id` of the model's
    /// config files.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text.first().copied()
    }

    /// All tokens that stop generation, [`Self::end_of_text`] first.
    pub fn end_of_text_all(&self) -> &[u32] {
        &self.end_of_text
    }

    /// `bos_token`, `eos_token` and any others that are set.
    pub fn special_tokens(&self) -> &BTreeMap<String, String> {
        &self.special_tokens
    }

    /// Whether a text contains the text of a special token.
    pub fn has_special_text(&self, text: &str) -> bool {
        self.special_texts.iter().any(|special| text.contains(special.as_str()))
    }

    /// All ids are below this.
    pub fn id_limit(&self) -> u32 {
        self.id_limit
    }

    /// BLAKE3 of `tokenizer.json`.
    pub fn digest(&self) -> blake3::Hash {
        self.digest
    }
}

/// A model file that is too large is malformed: unlike data, it cannot be split.
pub(super) fn of_model(error: DataError) -> DataError {
    match error {
        DataError::FileTooLarge { path, bytes, limit } => {
            DataError::ModelFile { path, why: format!("it has {bytes} bytes, {limit} at most") }
        }
        other => other,
    }
}

/// From `tokenizer_config.json`, with `special_tokens_map.json` for those it does not set.
fn special_tokens(folder: &Path) -> Result<BTreeMap<String, String>, DataError> {
    let mut tokens = BTreeMap::new();
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        let path = folder.join(file);
        let Some(config) = files::json_if_there(&path).map_err(of_model)? else { continue };
        for name in SPECIAL_NAMES {
            let Some(value) = config.get(name).filter(|value| !value.is_null()) else { continue };
            let text = value.as_str().or_else(|| value.get("content")?.as_str());
            let text = text.ok_or_else(|| DataError::ModelFile {
                path: path.clone(),
                why: format!("`{name}` is neither a string nor an object with `content`"),
            })?;
            tokens.entry(name.to_owned()).or_insert_with(|| text.to_owned());
        }
    }
    Ok(tokens)
}

/// `eos_token_id`: missing, null, a number or a list of numbers.
fn token_ids(value: Option<&serde_json::Value>, path: &Path) -> Result<Vec<u32>, DataError> {
    use serde_json::Value;
    let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = match value {
        None | Some(Value::Null) => Some(vec![]),
        Some(Value::Array(items)) => items.iter().map(one).collect(),
        Some(value) => one(value).map(|id| vec![id]),
    };
    ids.ok_or_else(|| DataError::ModelFile {
        path: PathBuf::from(path),
        why: "`eos_token_id` is neither a token id nor a list of them".into(),
    })
}
