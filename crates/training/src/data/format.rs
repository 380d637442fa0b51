//! The formats of data rows: detected from the keys of a file, and how to parse each. A file holds
//! one format.

use super::conversation::{self, Conversation, field, missing};
use super::error::RowError;
use super::json::Json;
use super::tokens::Tokens;
use crate::config::nearest;
use std::fmt;

/// How the rows of a file are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowFormat {
    /// `messages`: a list of role and content.
    Messages,
    /// `conversations`: a list of from and value.
    ShareGpt,
    /// `prompt` and `completion`, both strings.
    PromptCompletion,
    /// `prompt` and `completion`, both lists of messages.
    PromptCompletionMessages,
    /// `instruction`, `output`, and optionally `input`, `system`, `history`.
    Instruction,
    /// `text`.
    Text,
    /// `input_ids`: already tokenised.
    Tokens,
    /// Two fields named in the config.
    Fields,
}

impl RowFormat {
    /// Whether rows are rendered by the chat template if the model has one.
    pub fn is_conversation(self) -> bool {
        match self {
            Self::Messages | Self::ShareGpt | Self::PromptCompletionMessages | Self::Instruction => true,
            Self::PromptCompletion | Self::Text | Self::Tokens | Self::Fields => false,
        }
    }
}

impl fmt::Display for RowFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str(match self {
            Self::Messages => "messages",
            Self::ShareGpt => "conversations (ShareGPT)",
            Self::PromptCompletion => "prompt+completion",
            Self::PromptCompletionMessages => "prompt+completion as messages",
            Self::Instruction => "instruction/input/output",
            Self::Text => "text",
            Self::Tokens => "input_ids",
            Self::Fields => "named fields",
        })
    }
}

/// The keys of a row that any format reads. Columns of other names are not decoded.
pub(super) const KEYS: [&str; 19] = [
    "messages",
    "conversations",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "text",
    "input_ids",
    "labels",
    "attention_mask",
    "completion_mask",
    "assistant_masks",
    "position_ids",
    "seq_lengths",
    "tools",
    "chat_template_kwargs",
];

/// Names of the two fields set in the config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FieldNames {
    pub(super) prompt: String,
    pub(super) completion: String,
}

/// The contents of a row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Example {
    /// A whole conversation.
    Chat(Conversation),
    /// A conversation whose first `prompt_count` messages are the prompt.
    ChatPair {
        conversation: Conversation,
        prompt_count: usize,
    },
    /// A completion directly after a prompt.
    Pair {
        prompt: String,
        completion: String,
    },
    Text(String),
    Tokens(Tokens),
}

/// The format indicated by the keys of a row, or `None`. More specific keys come first: instruction
/// rows often also have a rendered `text`, and chat data sets keep the first question as `prompt`.
pub(super) fn detect(row: &Json, names: Option<&FieldNames>) -> Option<RowFormat> {
    let has = |key: &str| row.get(key).is_some_and(|value| *value != Json::Null);
    if let Some(names) = names {
        return (row.get(&names.prompt).is_some() && row.get(&names.completion).is_some()).then_some(RowFormat::Fields);
    }
    if has("input_ids") {
        // The source text of tokenised rows is often kept beside the tokens.
        Some(RowFormat::Tokens)
    } else if has("messages") {
        Some(RowFormat::Messages)
    } else if has("conversations") {
        Some(RowFormat::ShareGpt)
    } else if has("prompt") && has("completion") {
        match row.get("prompt") {
            Some(Json::Array(_)) => Some(RowFormat::PromptCompletionMessages),
            _ => Some(RowFormat::PromptCompletion),
        }
    } else if has("instruction") && has("output") {
        Some(RowFormat::Instruction)
    } else if has("text") {
        Some(RowFormat::Text)
    } else {
        None
    }
}

/// What a row of no known format lacks, if that can be told: a key that is missing beside its
/// partner, or that looks misspelt.
pub(super) fn slip(keys: &[String], names: Option<&FieldNames>) -> Option<String> {
    const PAIRS: [[&str; 2]; 2] = [["prompt", "completion"], ["instruction", "output"]];
    const ALONE: [&str; 4] = ["messages", "conversations", "text", "input_ids"];
    let has = |wanted: &str| keys.iter().any(|key| key == wanted);
    let pairs = match names {
        Some(names) => vec![[names.prompt.as_str(), names.completion.as_str()]],
        None => PAIRS.to_vec(),
    };
    let alone = ALONE.into_iter().filter(|_| names.is_none());
    let wanted: Vec<&str> = pairs.iter().flatten().copied().chain(alone).collect();
    let missing: Vec<&str> = wanted.iter().copied().filter(|name| !has(name)).collect();
    for key in keys.iter().filter(|key| !wanted.contains(&key.as_str())) {
        if let Some(meant) = nearest(key, missing.iter().copied()) {
            return Some(format!("is `{}` meant to be `{meant}`?", key.escape_debug()));
        }
    }
    pairs.iter().find_map(|[first, second]| match (has(first), has(second)) {
        (true, false) => Some(format!("`{second}` is missing beside `{first}`")),
        (false, true) => Some(format!("`{first}` is missing beside `{second}`")),
        _ => None,
    })
}

/// Parses a row. Instructions become a conversation if there is a template, and plain text if not.
pub(super) fn parse(
    row: &Json,
    format: RowFormat,
    names: Option<&FieldNames>,
    has_template: bool,
) -> Result<Example, RowError> {
    if format != RowFormat::Tokens
        && let Some(field) = ["position_ids", "seq_lengths"].into_iter().find(|field| row.get(field).is_some())
    {
        let (field, found) = (field.to_string(), "there".to_string());
        return Err(RowError::Field { field, want: "beside `input_ids`", found });
    }
    match format {
        RowFormat::Messages => {
            let messages = conversation::messages("messages", required(row, "messages", "a list of messages")?)?;
            Ok(Example::Chat(Conversation::new(messages, row)?))
        }
        RowFormat::ShareGpt => share_gpt(row),
        RowFormat::PromptCompletion => {
            Ok(Example::Pair { prompt: text(row, "prompt")?.into(), completion: text(row, "completion")?.into() })
        }
        RowFormat::PromptCompletionMessages => {
            let mut messages = conversation::messages("prompt", required(row, "prompt", "a list of messages")?)?;
            let prompt_count = messages.len();
            messages.extend(conversation::messages("completion", required(row, "completion", "a list of messages")?)?);
            Ok(Example::ChatPair { conversation: Conversation::new(messages, row)?, prompt_count })
        }
        RowFormat::Instruction => instruction(row, has_template),
        RowFormat::Text => Ok(Example::Text(text(row, "text")?.into())),
        RowFormat::Tokens => Ok(Example::Tokens(Tokens::parse(row)?)),
        RowFormat::Fields => {
            let names = names.expect("the format is found only where fields are named");
            Ok(Example::Pair {
                prompt: text(row, &names.prompt)?.into(),
                completion: text(row, &names.completion)?.into(),
            })
        }
    }
}

fn required<'a>(row: &'a Json, name: &str, want: &'static str) -> Result<&'a Json, RowError> {
    row.get(name).ok_or_else(|| missing(name, want))
}

fn text<'a>(row: &'a Json, name: &str) -> Result<&'a str, RowError> {
    match required(row, name, "a string")? {
        Json::Text(text) => Ok(text),
        other => Err(field(name, "a string", other)),
    }
}

/// A string that may be missing or null.
fn optional<'a>(row: &'a Json, name: &str) -> Result<&'a str, RowError> {
    if matches!(row.get(name), None | Some(Json::Null)) { Ok("") } else { text(row, name) }
}

fn share_gpt(row: &Json) -> Result<Example, RowError> {
    let list = required(row, "conversations", "a list of turns")?;
    let Json::Array(turns) = list else { return Err(field("conversations", "a list of turns", list)) };
    let mut messages = Vec::with_capacity(turns.len() + 1);
    let system = optional(row, "system")?;
    if !system.is_empty() {
        messages.push(conversation::message("system", system));
    }
    for (index, turn) in turns.iter().enumerate() {
        let text = |name: &str| match turn.get(name) {
            Some(Json::Text(text)) => Ok(text.as_str()),
            Some(other) => Err(field(format!("conversations[{index}].{name}"), "a string", other)),
            None => Err(missing(format!("conversations[{index}].{name}"), "a string")),
        };
        // Some data sets under this name already use message roles.
        let old = turn.get("from").is_some();
        let (from, value) = if old { (text("from")?, text("value")?) } else { (text("role")?, text("content")?) };
        let role = match from {
            "system" => "system",
            "human" | "user" => "user",
            "gpt" | "assistant" => "assistant",
            "tool" | "observation" => "tool",
            other => return Err(RowError::Role { role: other.escape_debug().to_string() }),
        };
        messages.push(conversation::message(role, value));
    }
    if messages.is_empty() {
        let found = "empty".to_owned();
        return Err(RowError::Field { field: "conversations".into(), want: "a list of turns", found });
    }
    Ok(Example::Chat(Conversation::new(messages, row)?))
}

fn instruction(row: &Json, has_template: bool) -> Result<Example, RowError> {
    let (instruction, output) = (text(row, "instruction")?, text(row, "output")?);
    let (input, system) = (optional(row, "input")?, optional(row, "system")?);
    let history = history(row)?;
    if !has_template {
        return Ok(Example::Pair {
            prompt: plain_instruction(system, &history, instruction, input),
            completion: output.to_owned(),
        });
    }
    let mut messages = Vec::new();
    if !system.is_empty() {
        messages.push(conversation::message("system", system));
    }
    for (question, answer) in history {
        messages.push(conversation::message("user", question));
        messages.push(conversation::message("assistant", answer));
    }
    let separator = if instruction.is_empty() || input.is_empty() { "" } else { "\n\n" };
    messages.push(conversation::message("user", &format!("{instruction}{separator}{input}")));
    let prompt_count = messages.len();
    messages.push(conversation::message("assistant", output));
    Ok(Example::ChatPair { conversation: Conversation::new(messages, row)?, prompt_count })
}

/// `history`: earlier question and answer pairs.
fn history(row: &Json) -> Result<Vec<(&str, &str)>, RowError> {
    let want = "a list of [question, answer]";
    match row.get("history") {
        None | Some(Json::Null) => Ok(Vec::new()),
        Some(Json::Array(pairs)) => {
            pairs.iter().map(|pair| two_texts(pair).ok_or_else(|| field("history", want, pair))).collect()
        }
        Some(other) => Err(field("history", want, other)),
    }
}

fn two_texts(pair: &Json) -> Option<(&str, &str)> {
    match pair {
        Json::Array(items) => match items.as_slice() {
            [Json::Text(question), Json::Text(answer)] => Some((question, answer)),
            _ => None,
        },
        _ => None,
    }
}

fn plain_instruction(system: &str, history: &[(&str, &str)], instruction: &str, input: &str) -> String {
    let mut parts = Vec::new();
    if !system.is_empty() {
        parts.push(system.to_owned());
    }
    for (question, answer) in history {
        parts.push(format!("### Instruction:\n{question}"));
        parts.push(format!("### Response:\n{answer}"));
    }
    parts.push(format!("### Instruction:\n{instruction}"));
    if !input.is_empty() {
        parts.push(format!("### Input:\n{input}"));
    }
    parts.push("### Response:\n".to_owned());
    parts.join("\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(text: &str) -> Json {
        Json::parse(text).expect("JSON")
    }

    #[test]
    fn formats_are_seen_by_their_keys() {
        let cases = [
            (r#"{"messages":[],"prompt":"p"}"#, Some(RowFormat::Messages)),
            (r#"{"conversations":[]}"#, Some(RowFormat::ShareGpt)),
            (r#"{"prompt":"p","completion":"c"}"#, Some(RowFormat::PromptCompletion)),
            (r#"{"prompt":[],"completion":[]}"#, Some(RowFormat::PromptCompletionMessages)),
            (r#"{"instruction":"i","output":"o","text":"t"}"#, Some(RowFormat::Instruction)),
            (r#"{"text":"t","messages":null}"#, Some(RowFormat::Text)),
            (r#"{"text":"t","input_ids":[1,2]}"#, Some(RowFormat::Tokens)),
            (r#"{"question":"q","answer":"a"}"#, None),
            (r#"{"prompt":"p","chosen":"a"}"#, None),
        ];
        for (text, want) in cases {
            assert_eq!(detect(&row(text), None), want, "{text}");
        }
        let names = FieldNames { prompt: "question".into(), completion: "answer".into() };
        assert_eq!(detect(&row(r#"{"question":"q","answer":"a"}"#), Some(&names)), Some(RowFormat::Fields));
        assert_eq!(detect(&row(r#"{"prompt":"p","completion":"c"}"#), Some(&names)), None);
    }

    #[test]
    fn a_slip_is_named() {
        let slip = |keys: &[&str], names: Option<&FieldNames>| {
            super::slip(&keys.iter().map(ToString::to_string).collect::<Vec<_>>(), names)
        };
        assert_eq!(slip(&["prompt"], None).as_deref(), Some("`completion` is missing beside `prompt`"));
        assert_eq!(slip(&["output", "input"], None).as_deref(), Some("`instruction` is missing beside `output`"));
        let promt = slip(&["promt", "completion"], None);
        assert_eq!(promt.as_deref(), Some("is `promt` meant to be `prompt`?"));
        assert_eq!(slip(&["message"], None).as_deref(), Some("is `message` meant to be `messages`?"));
        assert_eq!(slip(&["question", "answer"], None), None);
        assert_eq!(slip(&["id", "note"], None), None);
        let names = FieldNames { prompt: "question".into(), completion: "answer".into() };
        assert_eq!(slip(&["question"], Some(&names)).as_deref(), Some("`answer` is missing beside `question`"));
    }

    #[test]
    fn share_gpt_roles_are_mapped() {
        let text = r#"{"system":"s","conversations":[{"from":"human","value":"q"},{"from":"gpt","value":"a"}]}"#;
        let Ok(Example::Chat(conversation)) = parse(&row(text), RowFormat::ShareGpt, None, true) else {
            panic!("a chat")
        };
        let roles: Vec<_> = conversation.messages.iter().map(|message| message.get("role").cloned()).collect();
        assert_eq!(roles, ["system", "user", "assistant"].map(|role| Some(Json::Text(role.into()))));
        let error = parse(&row(r#"{"conversations":[{"from":"alien","value":""}]}"#), RowFormat::ShareGpt, None, true);
        assert_eq!(error, Err(RowError::Role { role: "alien".into() }));
    }

    #[test]
    fn instructions_become_a_conversation_or_plain_text() {
        let row = row(r#"{"instruction":"I","input":"X","output":"O","history":[["q","a"]]}"#);
        let Ok(Example::ChatPair { conversation, prompt_count }) = parse(&row, RowFormat::Instruction, None, true)
        else {
            panic!("a conversation")
        };
        assert_eq!((conversation.messages.len(), prompt_count), (4, 3));
        assert_eq!(conversation.messages[2], conversation::message("user", "I\n\nX"));
        let prompt =
            "### Instruction:\nq\n\n### Response:\na\n\n### Instruction:\nI\n\n### Input:\nX\n\n### Response:\n";
        let want = Example::Pair { prompt: prompt.into(), completion: "O".into() };
        assert_eq!(parse(&row, RowFormat::Instruction, None, false), Ok(want));
    }
}
