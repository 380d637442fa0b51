//! Chat templates turn conversations into text, with the spans the assistant wrote. The variables
//! are those of the library that templates are written for; the date is pinned, and work and output
//! are bounded.

use super::conversation::Conversation;
use super::date::Date;
use super::error::{DataError, RowError};
use super::format::{self, Example, RowFormat};
use super::jinja::{Fault, Interpreter, Program, Value};
use super::json::Json;
use super::tokenizer::of_model;
use super::{files, generation};
use crate::allocator;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// BOUND: memory of a running template, besides the conversation.
const MEMORY_BYTES_MAX: usize = 512 << 20;

/// A parsed chat template.
#[derive(Debug)]
pub struct Template {
    name: String,
    source: String,
    program: Program,
    date: Date,
    special_tokens: BTreeMap<String, String>,
}

/// A conversation rendered as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// Byte ranges inside `{% generation %}` blocks, in order, without empty ones.
    pub spans: Vec<(usize, usize)>,
}

impl Template {
    /// The template of a model folder: `chat_template.jinja`, else `tokenizer_config.json`, else
    /// `chat_template.json`. `None` if there is none. `date` is the result of `strftime_now`, as
    /// `YYYY-MM-DD`.
    pub fn load(
        folder: &Path,
        date: &str,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<Option<Self>, DataError> {
        let found = Self::find(folder)?;
        found.map(|(path, source)| Self::new(&path.display().to_string(), &source, date, special_tokens)).transpose()
    }

    /// The file and the source of that template.
    pub fn find(folder: &Path) -> Result<Option<(PathBuf, String)>, DataError> {
        let path = folder.join("chat_template.jinja");
        if let Some(bytes) = files::read_if_there(&path, files::TEMPLATE_BYTES_MAX).map_err(of_model)? {
            let source = String::from_utf8(bytes)
                .map_err(|error| DataError::ModelFile { path: path.clone(), why: error.to_string() })?;
            return Ok(Some((path, source)));
        }
        for file in ["tokenizer_config.json", "chat_template.json"] {
            let path = folder.join(file);
            let Some(config) = files::json_if_there(&path).map_err(of_model)? else { continue };
            let Some(value) = config.get("chat_template").filter(|value| !value.is_null()) else { continue };
            let source = default_template(value).ok_or_else(|| DataError::ModelFile {
                path: path.clone(),
                why: "`chat_template` is neither a string nor a list with a template named `default`".into(),
            })?;
            return Ok(Some((path, source.to_string())));
        }
        Ok(None)
    }

    /// A template from its source; `name` is for messages.
    pub fn new(
        name: &str,
        source: &str,
        date: &str,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<Self, DataError> {
        let failed = |why: String| DataError::Template { name: name.to_owned(), why };
        if source.len() as u64 > files::TEMPLATE_BYTES_MAX {
            return Err(failed(format!("{} bytes, {} at most", source.len(), files::TEMPLATE_BYTES_MAX)));
        }
        let date = Date::parse(date)?;
        let program = Program::parse(source).map_err(|fault| failed(explain(&fault)))?;
        Ok(Self {
            name: name.to_owned(),
            source: source.to_owned(),
            program,
            date,
            special_tokens: special_tokens.clone(),
        })
    }

    /// The source it was loaded from.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it has `{% generation %}` blocks.
    pub fn marked(&self) -> bool {
        self.program.marked()
    }

    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// BLAKE3 of the source.
    pub fn digest(&self) -> blake3::Hash {
        blake3::hash(self.source.as_bytes())
    }

    /// Renders a conversation given as JSON: `{"messages": […]}`, optionally with `tools` and
    /// `chat_template_kwargs`. `prompt` adds the header that precedes the assistant's answer.
    pub fn render_row(&self, row: &str, prompt: bool) -> Result<Rendered, RowError> {
        match format::parse(&Json::parse(row)?, RowFormat::Messages, None, true)? {
            Example::Chat(conversation) => self.render(&conversation, prompt),
            _ => unreachable!("rows of messages are conversations"),
        }
    }

    /// Renders a conversation; `prompt` adds the header that precedes the assistant's answer.
    pub(super) fn render(&self, conversation: &Conversation, prompt: bool) -> Result<Rendered, RowError> {
        if self.marked() {
            refuse_marks(conversation)?;
        }
        let bytes = conversation.messages.iter().chain(&conversation.tools).map(Json::size).sum::<usize>();
        let bytes = bytes + conversation.extra.iter().map(|(_, value)| value.size()).sum::<usize>();
        let last_words = format!(
            "error: chat template {}: it takes more than {} MiB of memory\nhint: {}\n",
            self.name.escape_debug(),
            MEMORY_BYTES_MAX >> 20,
            RowError::Limit { template: String::new(), why: String::new() }.hint(),
        );
        let text = allocator::within(MEMORY_BYTES_MAX, &last_words, || {
            let mut interpreter = Interpreter::new(&self.program, self.date, bytes);
            self.define(&mut interpreter, conversation, prompt)?;
            interpreter.run().map_err(|fault| self.row_error(fault))
        })?;
        let (text, spans) = if self.marked() { generation::unmark(&text) } else { (text, Vec::new()) };
        Ok(Rendered { text, spans })
    }

    fn define(&self, interpreter: &mut Interpreter, conversation: &Conversation, prompt: bool) -> Result<(), RowError> {
        for (name, text) in &self.special_tokens {
            interpreter.define(name, Value::text(text));
        }
        for (name, value) in &conversation.extra {
            interpreter.define(name, value.to_value()?);
        }
        let messages = conversation.messages.iter().map(Json::to_value).collect::<Result<Vec<_>, _>>()?;
        interpreter.define("messages", Value::list_from_row(messages));
        interpreter.define("tools", conversation.tools.as_ref().map_or(Ok(Value::None), Json::to_value)?);
        interpreter.define("documents", Value::None);
        interpreter.define("add_generation_prompt", Value::Bool(prompt));
        Ok(())
    }

    fn row_error(&self, fault: Fault) -> RowError {
        let template = self.name.clone();
        match fault {
            Fault::Raised(message) => RowError::Refused { template, message },
            Fault::Limit(why) => RowError::Limit { template, why },
            error @ Fault::Error { .. } => RowError::Render { template, why: explain(&error) },
        }
    }
}

fn refuse_marks(conversation: &Conversation) -> Result<(), RowError> {
    let mut found = None;
    conversation.visit_text(&mut |text| found = found.or_else(|| text.chars().find(|c| generation::MARKS.contains(c))));
    found.map_or(Ok(()), |mark| Err(RowError::Reserved { code: mark as u32 }))
}

/// A string, or the entry named `default` in a list of named templates.
fn default_template(value: &serde_json::Value) -> Option<&str> {
    value.as_str().or_else(|| {
        let named = value.as_array()?.iter().find(|entry| entry.get("name").is_some_and(|name| name == "default"));
        named?.get("template")?.as_str()
    })
}

fn explain(fault: &Fault) -> String {
    match fault {
        Fault::Error { line: 0, why } | Fault::Limit(why) | Fault::Raised(why) => why.clone(),
        Fault::Error { line, why } => format!("line {line}: {why}"),
    }
}
