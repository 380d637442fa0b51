//! `config.json` of a written model: the base's text, unchanged but for what no longer applies.
//! Edited as text, since not every number would survive parsing and printing.

/// What differs from the base's config, in nested configs too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Edits {
    /// The dtype of the weights, unless it is the base's.
    pub(super) dtype: Option<&'static str>,
    /// Whether the quantisation no longer applies.
    pub(super) expanded: bool,
    /// Whether the head is no longer the embedding table.
    pub(super) untied: bool,
}

impl Edits {
    /// `config.json` of the folder; None if the text is not a JSON object.
    pub(super) fn of(self, text: &str) -> Option<String> {
        const KEYS: [&str; 2] = ["torch_dtype", "dtype"];
        let names_dtype = fields(text)?.iter().any(|(key, _)| KEYS.contains(&key.as_str()));
        Some(self.object(text, self.dtype.filter(|_| !names_dtype))? + "\n")
    }

    fn object(self, text: &str, added: Option<&str>) -> Option<String> {
        let mut lines = Vec::new();
        for (key, value) in fields(text)? {
            let value = match (key.as_str(), self.dtype) {
                ("torch_dtype" | "dtype", Some(dtype)) => format!("\"{dtype}\""),
                ("tie_word_embeddings", _) if self.untied => "false".to_string(),
                ("quantization_config", _) if self.expanded => continue,
                (other, _)
                    if other.ends_with("_config") && other != "quantization_config" && value.starts_with('{') =>
                {
                    self.object(value, None)?
                }
                _ => value.to_string(),
            };
            lines.push(format!("  {}: {value}", serde_json::Value::from(key)));
        }
        if let Some(dtype) = added {
            lines.push(format!("  \"torch_dtype\": \"{dtype}\""));
        }
        Some(format!("{{\n{}\n}}", lines.join(",\n")))
    }
}

/// Keys of a JSON object and the unchanged text of their values: not every number would survive
/// parsing and printing.
fn fields(text: &str) -> Option<Vec<(String, &str)>> {
    serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text).ok()?;
    let inner = text.trim().strip_prefix('{')?.strip_suffix('}')?;
    let mut fields = Vec::new();
    // BOUND: the text is JSON, so quotes and brackets close.
    let (mut key, mut begin, mut depth, mut quoted, mut escaped) = (None, 0, 0usize, false, false);
    for (at, byte) in inner.bytes().chain([b',']).enumerate() {
        match byte {
            _ if quoted => {
                (quoted, escaped) = (byte != b'"' || escaped, byte == b'\\' && !escaped);
            }
            b'"' => quoted = true,
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.checked_sub(1)?,
            b':' if depth == 0 => {
                key = serde_json::from_str::<String>(inner[begin..at].trim()).ok();
                begin = at + 1;
            }
            b',' if depth == 0 => {
                if let Some(key) = key.take() {
                    fields.push((key, inner[begin..at].trim()));
                }
                begin = at + 1;
            }
            _ => {}
        }
    }
    Some(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_dtype(text: &str, dtype: &'static str, expanded: bool) -> Option<String> {
        Edits { dtype: Some(dtype), expanded, untied: false }.of(text)
    }

    #[test]
    fn a_config_keeps_every_letter_but_its_dtype() {
        let text = r#"{ "architectures": ["A,{\""], "rope_theta": 1000000.0000000001, "torch_dtype":"bfloat16",
            "text_config": {"dtype": "bfloat16", "eps": 1e-06}, "quantization_config": {"bits": 4, "dtype": "x"}, "e": {} }"#;
        let kept = with_dtype(text, "float32", false).expect("an object");
        assert_eq!(
            kept,
            "{\n  \"architectures\": [\"A,{\\\"\"],\n  \"rope_theta\": 1000000.0000000001,\n  \"torch_dtype\": \"float32\",\n  \
             \"text_config\": {\n  \"dtype\": \"float32\",\n  \"eps\": 1e-06\n},\n  \
             \"quantization_config\": {\"bits\": 4, \"dtype\": \"x\"},\n  \"e\": {}\n}\n"
        );
        let expanded = with_dtype(text, "bfloat16", true).expect("an object");
        assert!(!expanded.contains("quantization_config") && expanded.contains("\"torch_dtype\": \"bfloat16\""));
        assert_eq!(with_dtype("{}", "float16", false).expect("an object"), "{\n  \"torch_dtype\": \"float16\"\n}\n");
        for bad in ["", "[]", "{", "{\"a\":}", "7"] {
            assert_eq!(with_dtype(bad, "float32", false), None, "{bad}");
        }
    }

    #[test]
    fn a_tie_is_cut_wherever_it_is_stated() {
        let text = r#"{"tie_word_embeddings": true, "dtype": "x", "text_config": {"tie_word_embeddings": true}}"#;
        let untied = Edits { untied: true, ..Edits::default() }.of(text).expect("an object");
        assert_eq!(untied.matches("\"tie_word_embeddings\": false").count(), 2, "{untied}");
        assert!(untied.contains("\"dtype\": \"x\"") && !untied.contains("torch_dtype"), "{untied}");
    }
}
