//! What can be wrong with data, tokenizer or chat template. A variant holds the facts: file, line,
//! what was found. [`DataError::hint`] suggests a way out, [`DataError::kind`] gives the program's
//! exit code.

use super::format::RowFormat;
use std::path::PathBuf;

/// The exit code that an error maps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataErrorKind {
    /// Usage or config: exit code 2.
    Config,
    /// The data: exit code 3.
    Data,
    /// Exceeds memory: exit code 4.
    Memory,
    /// Disk or I/O: exit code 7.
    Io,
    /// A malformed file of the model: exit code 8.
    Malformed,
}

impl DataErrorKind {
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Config => 2,
            Self::Data => 3,
            Self::Memory => 4,
            Self::Io => 7,
            Self::Malformed => 8,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("data setting `{setting}`: {why}")]
    Setting { setting: &'static str, why: String },
    #[error("cannot start a thread to read data: {source}")]
    Threads { source: std::io::Error },
    #[error("{} does not exist", path.display())]
    Missing { path: PathBuf },
    #[error("{} is a folder, not a file", path.display())]
    Folder { path: PathBuf },
    #[error("{} is {found}, not a regular file", path.display())]
    NotRegular { path: PathBuf, found: &'static str },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} has {bytes} bytes, {limit} at most", path.display())]
    FileTooLarge { path: PathBuf, bytes: u64, limit: u64 },
    #[error("{}: {why}", path.display())]
    ModelFile { path: PathBuf, why: String },
    #[error("chat template {name}: {why}")]
    Template { name: String, why: String },
    #[error("{}:{line}: {format} data needs the tokenizer, but the model folder has no tokenizer.json", file.display())]
    NoTokenizer { file: PathBuf, line: usize, format: RowFormat },
    #[error("the tokenizer produces token {token}, but the model has {vocabulary} tokens ({}:{line})", file.display())]
    Vocabulary { file: PathBuf, line: usize, token: u32, vocabulary: usize },
    #[error("{}:{line}: {format} data needs a chat template, but the model has none", file.display())]
    NoTemplate { file: PathBuf, line: usize, format: RowFormat },
    #[error("{}:{line}: chat template {template} marks no assistant text: {why}", file.display())]
    NoAssistantMask { file: PathBuf, line: usize, template: String, why: String },
    #[error("{}:{line}: plain text ends with an end-of-text token, but the tokenizer has none", file.display())]
    NoEndOfText { file: PathBuf, line: usize },
    #[error("cannot read {} as Parquet: {why}", file.display())]
    Parquet { file: PathBuf, why: String },
    #[error("{} holds no row", file.display())]
    Empty { file: PathBuf },
    #[error("no row is left to train on: {dropped} dropped of {rows}")]
    NothingLeft { rows: usize, dropped: usize },
    #[error(
        "{}:{line}: the keys {} match no known format{}",
        file.display(),
        list(keys),
        slip.as_ref().map_or(String::new(), |slip| format!(": {slip}"))
    )]
    UnknownFormat {
        file: PathBuf,
        line: usize,
        keys: Vec<String>,
        /// What is missing or misspelt, if that can be told.
        slip: Option<String>,
    },
    #[error(
        "{}:{line}: {found} in a file of {first} (since line {first_line}): one file holds one format",
        file.display()
    )]
    Mixed { file: PathBuf, line: usize, found: String, first: RowFormat, first_line: usize },
    #[error("{}:{line}: {why}", file.display())]
    Row {
        file: PathBuf,
        line: usize,
        why: RowError,
        /// Whether the row has tool calls.
        calls: bool,
    },
    #[error(
        "{}:{line}: no token to train on: {why}{}",
        file.display(),
        match count { 0 | 1 => String::new(), more => format!(" ({more} such rows)") }
    )]
    Untrainable { file: PathBuf, line: usize, why: Untrainable, count: usize },
    #[error("the rows hold {tokens} tokens, {limit} at most")]
    TooManyTokens { tokens: u64, limit: u64 },
}

/// What is wrong with one row.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    #[error("not UTF-8: byte {byte:#04x} at column {column}")]
    NotUtf8 { byte: u8, column: usize },
    #[error("a NUL byte at column {column}")]
    Nul { column: usize },
    #[error("not JSON: {why}")]
    Json { why: String },
    #[error("not a table: {why}")]
    Csv { why: String },
    #[error("{why}")]
    Parquet { why: String },
    #[error("{bytes} bytes in one row, {limit} at most")]
    TooLong { bytes: usize, limit: usize },
    #[error("a row must be a JSON object, but this is {found}")]
    NotObject { found: &'static str },
    #[error("`{field}` must be {want}, but is {found}")]
    Field { field: String, want: &'static str, found: String },
    #[error("`{field}` has {count} items, {limit} at most")]
    TooMany { field: String, count: usize, limit: usize },
    #[error("the number {number} in a conversation cannot be kept exactly")]
    Number { number: String },
    #[error(
        "`{field}` is {id}, but token ids are {}",
        match limit { Some(limit) => format!("below {limit} here"), None => "not negative and below 2³²".into() }
    )]
    Id { field: String, id: i64, limit: Option<u32> },
    #[error("labels[{index}] is {label}, but the token there is {id}: a label must equal its token")]
    Label { index: usize, label: i64, id: u32 },
    #[error("role `{role}` is unknown")]
    Role { role: String },
    #[error("`{field}` has `from` where messages have `role`")]
    FromAndValue { field: String },
    #[error("messages[{turn}]: cannot tell which text is the assistant's: {why}")]
    Turn { turn: usize, why: String },
    #[error("chat template {template}: {why}")]
    Render { template: String, why: String },
    /// The template demands more than any conversation needs: its fault, not the row's.
    #[error("chat template {template}: {why}")]
    Limit { template: String, why: String },
    #[error("chat template {template} refuses the conversation: {message}")]
    Refused { template: String, message: String },
    #[error("the text contains U+{code:04X}, which marks the spans of assistant text")]
    Reserved { code: u32 },
    #[error("the text contains `{token}`, so the end of an assistant turn is ambiguous")]
    Ambiguous { token: String },
    #[error("the tokenizer fails: {why}")]
    Tokenizer { why: String },
}

/// Why a row has no token to train on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Untrainable {
    #[error("the row is empty")]
    Empty,
    #[error("the conversation has no assistant text")]
    NoAssistant,
    #[error("the completion is empty")]
    NoCompletion,
    #[error("no token is labelled")]
    NoLabel,
    #[error("truncation to max_seq_length cuts all of it off")]
    Truncated,
    #[error("its text contains a special token")]
    SpecialToken,
}

impl DataError {
    pub fn kind(&self) -> DataErrorKind {
        match self {
            Self::Setting { .. }
            | Self::Missing { .. }
            | Self::Folder { .. }
            | Self::NoTokenizer { .. }
            | Self::Vocabulary { .. }
            | Self::NoTemplate { .. }
            | Self::NoAssistantMask { .. }
            | Self::NoEndOfText { .. } => DataErrorKind::Config,
            Self::Threads { .. } => DataErrorKind::Memory,
            Self::Read { source, .. } if source.kind() == std::io::ErrorKind::OutOfMemory => DataErrorKind::Memory,
            Self::Read { .. } => DataErrorKind::Io,
            Self::NotRegular { .. } | Self::ModelFile { .. } | Self::Template { .. } => DataErrorKind::Malformed,
            Self::Row { why, .. } => why.kind(),
            _ => DataErrorKind::Data,
        }
    }

    /// One thing to try.
    pub fn hint(&self) -> String {
        match self {
            Self::Setting { .. } => "correct the setting".into(),
            Self::Threads { .. } => "free memory or raise the limit on it; `data_workers = 1` needs the least".into(),
            Self::Missing { path } if path.ends_with("tokenizer.json") => {
                "a model folder holds config.json, tokenizer.json and *.safetensors: fetch what is missing".into()
            }
            Self::Missing { .. } => "check the path; paths are relative to the current folder".into(),
            Self::NotRegular { .. } => "put a regular file, or a link to one, in its place".into(),
            Self::NoTokenizer { .. } => {
                "a model folder holds config.json, tokenizer.json and *.safetensors; only rows of input_ids need no tokenizer".into()
            }
            Self::Vocabulary { .. } => "use the tokenizer that belongs to the model".into(),
            Self::Folder { .. } => "name files in it; several are allowed".into(),
            Self::Read { .. } => "check the disk and the permissions of the file".into(),
            Self::FileTooLarge { .. } => "split the file; several files are allowed".into(),
            Self::ModelFile { .. } => "fetch the model's files again".into(),
            Self::Template { name, .. } => format!("compare {name} with the one the model was published with"),
            Self::NoTemplate { .. } => "put chat_template.jinja into the model folder, or use prompt/completion".into(),
            Self::NoAssistantMask { .. } => {
                "put {% generation %} … {% endgeneration %} around the assistant's text, or set assistant_only_loss = false"
                    .into()
            }
            Self::NoEndOfText { .. } => "set eos_token in tokenizer_config.json".into(),
            Self::Parquet { .. } => "write the file again, or convert it to JSONL".into(),
            Self::Empty { .. } => "remove the file from the list, or check what wrote it".into(),
            Self::NothingLeft { .. } => "raise max_seq_length, or check the rows with `isobit data check`".into(),
            Self::UnknownFormat { slip: Some(_), .. } => "correct the row, or remove it".into(),
            Self::UnknownFormat { .. } => "rows have messages, conversations, prompt and completion, instruction and \
                 output, text, or input_ids; other names: prompt_field and completion_field"
                .into(),
            Self::Mixed { .. } => "put the rows of each format into a file of their own".into(),
            Self::Row {
                why: RowError::Render { .. } | RowError::Refused { .. } | RowError::Turn { .. },
                calls: true,
                ..
            } => {
                "the row has tool calls, and not every template takes them: `content` null, `arguments` as an object, \
                 an answer of role `tool` after each call and `tools` in the row are what most expect"
                    .into()
            }
            Self::Row { why, .. } => why.hint().into(),
            Self::Untrainable { why: Untrainable::Truncated, .. } => {
                "raise max_seq_length, or set allow_untrainable_rows = true to drop such rows".into()
            }
            Self::Untrainable { .. } => "fix the row, or set allow_untrainable_rows = true to drop such rows".into(),
            Self::TooManyTokens { .. } => "train on fewer files at a time".into(),
        }
    }

    /// What rows with the same error have in common.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Row { why, .. } => why.reason(),
            Self::Mixed { .. } => "a different format from the rows before",
            Self::UnknownFormat { slip: Some(_), .. } => "a key that is missing or misspelt",
            Self::UnknownFormat { .. } => "no known format",
            Self::Untrainable { .. } => "no token to train on",
            _ => "cannot be read",
        }
    }
}

impl RowError {
    pub fn kind(&self) -> DataErrorKind {
        if matches!(self, Self::Limit { .. }) { DataErrorKind::Malformed } else { DataErrorKind::Data }
    }

    /// What rows with the same error have in common.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotUtf8 { .. } => "not UTF-8",
            Self::Nul { .. } => "a NUL byte",
            Self::Json { .. } => "not JSON",
            Self::NotObject { .. } => "not a JSON object",
            Self::TooLong { .. } | Self::TooMany { .. } => "too long",
            Self::Field { .. } | Self::FromAndValue { .. } => "a field that is missing or wrong",
            Self::Id { .. } => "a token id out of range",
            Self::Label { .. } => "a label that is not its token",
            Self::Role { .. } => "an unknown role",
            Self::Render { .. } | Self::Refused { .. } => "refused by the chat template",
            Self::Reserved { .. } => "a reserved character",
            Self::Ambiguous { .. } => "a special token in the text",
            Self::Turn { .. } => "an assistant turn that cannot be found",
            _ => "cannot be read",
        }
    }

    pub fn hint(&self) -> &'static str {
        match self {
            Self::Limit { .. } => "compare the template with the one the model was published with",
            Self::Id { .. } => "tokenise the data with the tokenizer of this model",
            Self::Label { .. } => "each label stands at its own token, without a shift; -100 leaves a token out",
            Self::NotUtf8 { .. } => "convert the file to UTF-8",
            Self::Nul { .. } => "the file was probably cut off while it was written: write it again",
            Self::Json { .. } | Self::NotObject { .. } => "one JSON object a line, or one array of objects",
            Self::Csv { .. } => {
                "name the columns in the first line, and put cells with commas, quotes or line breaks in quotes"
            }
            Self::Parquet { .. } => "write the file again, or convert it to JSONL",
            Self::TooLong { .. } | Self::TooMany { .. } => "split the row, or remove it",
            Self::Number { .. } => "write the number as a string",
            Self::Role { role } => match role.as_str() {
                "human" => "call it `user`; `human` goes with `conversations`, `from` and `value`",
                "gpt" => "call it `assistant`; `gpt` goes with `conversations`, `from` and `value`",
                "function_call" => "write the call as `tool_calls` of an assistant message, under `messages`",
                _ => "use system, user, assistant or tool",
            },
            Self::FromAndValue { .. } => "name the list `conversations`, or use `role` and `content`",
            Self::Turn { .. } => {
                "put {% generation %} … {% endgeneration %} around the assistant's text, or set assistant_only_loss = false"
            }
            Self::Render { .. } | Self::Refused { .. } => "order the messages as the template expects",
            Self::Reserved { .. } => "remove the character; Unicode reserves it",
            Self::Ambiguous { .. } => {
                "remove the token from the text, or set drop_special_token_rows = true to drop such rows"
            }
            Self::Field { .. } | Self::Tokenizer { .. } => "fix the row, or remove it",
        }
    }
}

fn list(keys: &[String]) -> String {
    if keys.is_empty() {
        return "(none)".into();
    }
    let quoted: Vec<_> = keys.iter().take(12).map(|key| format!("`{}`", key.escape_debug())).collect();
    let more = if keys.len() > 12 { ", …" } else { "" };
    format!("{}{more}", quoted.join(", "))
}
