//! Chat templates: conversations become text, with the spans the assistant wrote. The engine is set up to answer as Jinja2
//! does in the library that templates are written for; the date is pinned, and work and output are bounded.

use super::conversation::Conversation;
use super::date::Date;
use super::error::{DataError, RowError};
use super::format::{self, Example, Format};
use super::json::Json;
use super::{files, generation, python};
use crate::memory;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// BOUND: instructions for one conversation. A conversation of 10000 messages needs about two million.
const FUEL: u64 = 8_000_000;
/// BOUND: text of one conversation.
const RENDERED_BYTES_MAX: usize = 64 << 20;
/// BOUND: memory of a template at work, beside the conversation.
const MEMORY_BYTES_MAX: usize = 512 << 20;
const MAIN: &str = "chat";

/// A chat template, parsed.
#[derive(Debug)]
pub struct Template {
    name: String,
    source: String,
    marked: bool,
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
}

/// A conversation as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// Byte ranges inside `{% generation %}` blocks, in order; empty ones are left out.
    pub spans: Vec<(usize, usize)>,
}

/// What `raise_exception` was called with.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl Template {
    /// The template of a model folder: `chat_template.jinja`, else `tokenizer_config.json`, else `chat_template.json`.
    /// `None` where there is none. `date` is what `strftime_now` says, as `YYYY-MM-DD`.
    pub fn load(
        folder: &Path,
        date: &str,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<Option<Self>, DataError> {
        let path = folder.join("chat_template.jinja");
        if let Some(bytes) = files::read_if_there(&path, files::TEMPLATE_BYTES_MAX)? {
            let source = String::from_utf8(bytes)
                .map_err(|error| DataError::ModelFile { path: path.clone(), why: error.to_string() })?;
            return Self::new(&path.display().to_string(), &source, date, special_tokens).map(Some);
        }
        for file in ["tokenizer_config.json", "chat_template.json"] {
            let path = folder.join(file);
            let Some(config) = files::json_if_there(&path)? else { continue };
            let Some(value) = config.get("chat_template").filter(|value| !value.is_null()) else { continue };
            let source = default_template(value).ok_or_else(|| DataError::ModelFile {
                path: path.clone(),
                why: "`chat_template` is neither a string nor a list with a template named `default`".into(),
            })?;
            return Self::new(&path.display().to_string(), source, date, special_tokens).map(Some);
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
        let (rewritten, marked) = generation::rewrite(source);
        let mut environment = environment(Date::parse(date)?);
        environment.add_template_owned(MAIN, rewritten).map_err(|error| failed(explain(&error)))?;
        Ok(Self {
            name: name.to_owned(),
            source: source.to_owned(),
            marked,
            environment,
            special_tokens: special_tokens.clone(),
        })
    }

    /// Where it comes from.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it has `{% generation %}` blocks.
    pub fn marked(&self) -> bool {
        self.marked
    }

    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// BLAKE3 of the source.
    pub fn digest(&self) -> blake3::Hash {
        blake3::hash(self.source.as_bytes())
    }

    /// The text of a conversation given as JSON: `{"messages": […]}`, and perhaps `tools` and `chat_template_kwargs`.
    /// `prompt` adds the header after which the assistant would begin to write.
    pub fn render_row(&self, row: &str, prompt: bool) -> Result<Rendered, RowError> {
        match format::parse(&Json::parse(row)?, Format::Messages, None, true)? {
            Example::Chat(conversation) => self.render(&conversation, prompt),
            _ => unreachable!("rows of messages are conversations"),
        }
    }

    /// The text of a conversation; `prompt` adds the header after which the assistant would begin to write.
    pub(super) fn render(&self, conversation: &Conversation, prompt: bool) -> Result<Rendered, RowError> {
        if self.marked {
            refuse_marks(conversation)?;
        }
        let mut variables: Vec<(String, Value)> = Vec::new();
        let tokens = self.special_tokens.iter();
        variables.extend(tokens.map(|(name, text)| (name.clone(), Value::from(text.as_str()))));
        for (name, value) in &conversation.extra {
            variables.push((name.clone(), value.to_value()?));
        }
        let messages = conversation.messages.iter().map(Json::to_value);
        variables.push(("messages".into(), Value::from(messages.collect::<Result<Vec<_>, _>>()?)));
        let tools = conversation.tools.as_ref().map_or(Ok(Value::from(())), Json::to_value)?;
        variables.push(("tools".into(), tools));
        variables.push(("documents".into(), Value::from(())));
        variables.push(("add_generation_prompt".into(), Value::from(prompt)));
        let context: Value = variables.into_iter().collect();

        let template = self.environment.get_template(MAIN).expect("the template was added when it was parsed");
        let mut output = Bounded(Vec::new());
        let last_words = format!(
            "error: chat template {}: it takes more than {} MiB of memory\nhint: {}\n",
            self.name.escape_debug(),
            MEMORY_BYTES_MAX >> 20,
            RowError::Limit { template: String::new(), why: String::new() }.hint(),
        );
        let rendered = memory::within(MEMORY_BYTES_MAX, &last_words, || {
            template.render_captured_to(context, &mut output).map(drop)
        });
        rendered.map_err(|error| self.row_error(&error))?;
        let text = String::from_utf8(output.0).expect("templates print strings");
        let (text, spans) = if self.marked { generation::unmark(&text) } else { (text, Vec::new()) };
        Ok(Rendered { text, spans })
    }

    fn row_error(&self, error: &Error) -> RowError {
        let template = self.name.clone();
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(current) = cause {
            if let Some(Raised(message)) = current.downcast_ref() {
                return RowError::Refused { template, message: message.clone() };
            }
            cause = current.source();
        }
        let too_large = error.detail().is_some_and(|detail| detail.ends_with("is too large"));
        if too_large || matches!(error.kind(), ErrorKind::OutOfFuel | ErrorKind::WriteFailure) {
            return RowError::Limit { template, why: explain(error) };
        }
        RowError::Render { template, why: explain(error) }
    }
}

fn refuse_marks(conversation: &Conversation) -> Result<(), RowError> {
    let mut found = None;
    conversation.visit_text(&mut |text| found = found.or_else(|| text.chars().find(|c| generation::MARKS.contains(c))));
    found.map_or(Ok(()), |mark| Err(RowError::Reserved { code: mark as u32 }))
}

/// A string, or the entry named `default` of a list of named ones.
fn default_template(value: &serde_json::Value) -> Option<&str> {
    value.as_str().or_else(|| {
        let named = value.as_array()?.iter().find(|entry| entry.get("name").is_some_and(|name| name == "default"));
        named?.get("template")?.as_str()
    })
}

fn explain(error: &Error) -> String {
    if error.kind() == ErrorKind::OutOfFuel {
        return format!("it does not end within {FUEL} instructions");
    }
    if error.kind() == ErrorKind::WriteFailure {
        return format!("it writes more than {RENDERED_BYTES_MAX} bytes");
    }
    let why = error.detail().map_or_else(|| error.kind().to_string(), ToOwned::to_owned);
    let line = error.line().map_or_else(String::new, |line| format!("line {line}: "));
    format!("{line}{why}")
}

fn environment(date: Date) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_formatter(python::format);
    environment.set_unknown_method_callback(python::method);
    environment.add_filter("tojson", |value: &Value, more: Rest<Value>, options: Kwargs| {
        python::tojson(value, more, &options)
    });
    environment.add_filter("string", |value: &Value| python::to_text(value));
    environment.add_filter("trim", |value: &Value, characters: Option<&str>| -> Result<String, Error> {
        Ok(python::strip(&python::to_text(value)?, characters, python::Side::Both).to_owned())
    });
    // In Jinja2 whatever has a length and can be indexed is a sequence, strings and maps included.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
    });
    environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let message = python::to_text(message)?;
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
    });
    environment.add_function("strftime_now", move |format: &str| -> Result<String, Error> {
        let unknown =
            || Error::new(ErrorKind::InvalidOperation, format!("strftime_now: unknown directive in `{format}`"));
        date.strftime(format).ok_or_else(unknown)
    });
    environment
        .add_function(generation::FUNCTION, |state: &State, options: Kwargs| generation::function(state, &options));
    environment
}

/// Output that refuses to grow past the limit.
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.len() > RENDERED_BYTES_MAX - self.0.len() {
            return Err(std::io::Error::other(format!("the text has more than {RENDERED_BYTES_MAX} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
