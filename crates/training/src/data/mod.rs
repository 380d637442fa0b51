//! Data: files of rows become rows of tokens with the loss mask. Files are cut into rows (`records`), read (`format`),
//! rendered (`template`), tokenised (`example`) and perhaps packed (`packing`); `order` says in which order an epoch visits
//! them. The result is a function of files, tokenizer, template and config: never of the number of workers.

mod conversation;
mod date;
mod error;
mod example;
mod files;
mod format;
mod generation;
mod jinja;
mod json;
mod normalizers;
mod order;
mod packing;
mod records;
mod report;
mod spans;
mod template;
mod tokenizer;
mod tokens;
mod turns;
mod variables;

pub use error::{DataError, Kind, RowError, Untrainable};
pub use format::Format;
pub use order::order;
pub use report::{Bad, Bucket, Dropped, FileReport, Lengths, LossTokens, Report, Source, Truncated};
pub use template::{Rendered, Template};
pub use tokenizer::{Encoding, Tokenizer};
pub use variables::{Variables, check_name};

use example::{Loss, Problem, Tokenised, Tools};
use format::{Example, FieldNames};
use json::Json;
use records::Record;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The date templates see where the config names none.
pub const DATE_DEFAULT: &str = "2025-01-01";

/// Rows a worker takes at a time. The result does not depend on it.
const CHUNK: usize = 128;
/// BOUND: workers, files, and tokens of all rows together.
const WORKERS_MAX: usize = 1024;
const FILES_MAX: usize = 4096;
const TOKENS_MAX: u64 = 1 << 36;
/// Values that a template nests deeply are taken apart recursively; the stack holds what the template's fuel can build.
const STACK_BYTES: usize = 256 << 20;

/// What to load, and how. Everything is decided here: nothing below looks elsewhere.
#[expect(clippy::struct_excessive_bools, reason = "each is a key of the config that people know as true or false")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataConfig {
    pub files: Vec<PathBuf>,
    /// Two fields that hold prompt and completion, for data with names of its own.
    pub prompt_field: Option<String>,
    pub completion_field: Option<String>,
    /// Longer examples lose their end, and are listed.
    pub max_seq_length: usize,
    /// Put several examples into one row.
    pub sample_packing: bool,
    /// In conversations, count the assistant's tokens only.
    pub assistant_only_loss: bool,
    /// In rows with prompt and completion, count the completion only; `None` means yes.
    pub completion_only_loss: Option<bool>,
    /// Drop rows without a token to train on instead of refusing the data. They are listed.
    pub allow_untrainable_rows: bool,
    /// Drop rows whose text contains the text of a special token. They are listed.
    pub drop_special_token_rows: bool,
    /// Variables of the chat template; rows may set their own.
    pub variables: Variables,
    /// Tokens that the model knows, where it is known: rows with others are refused.
    pub vocabulary: Option<usize>,
    /// What `strftime_now` of templates says, as `YYYY-MM-DD`.
    pub date: String,
    /// Threads that tokenise.
    pub workers: usize,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            files: Vec::new(),
            prompt_field: None,
            completion_field: None,
            max_seq_length: 1024,
            sample_packing: false,
            assistant_only_loss: true,
            completion_only_loss: None,
            allow_untrainable_rows: false,
            drop_special_token_rows: false,
            variables: Variables::default(),
            vocabulary: None,
            date: DATE_DEFAULT.to_owned(),
            workers: 1,
        }
    }
}

/// One row of training.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub tokens: Vec<u32>,
    /// `targets[t]`: token `t` is predicted from those before it, and the loss counts it. The first token of a document
    /// is never a target.
    pub targets: Vec<bool>,
    /// Where documents start: 0 first, the number of tokens last.
    pub document_starts: Vec<usize>,
    /// Where each document came from.
    pub sources: Vec<Source>,
}

/// The rows, in the order of files and lines, or of packing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dataset {
    pub rows: Vec<Row>,
}

impl Dataset {
    /// BLAKE3 of everything training sees: tokens, targets and documents of the rows in their order.
    pub fn digest(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"isobit.rows/1");
        hasher.update(&(self.rows.len() as u64).to_le_bytes());
        for row in &self.rows {
            hasher.update(&(row.tokens.len() as u64).to_le_bytes());
            let tokens: Vec<u8> = row.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            hasher.update(&tokens);
            let targets: Vec<u8> = row.targets.iter().map(|target| u8::from(*target)).collect();
            hasher.update(&targets);
            hasher.update(&(row.document_starts.len() as u64).to_le_bytes());
            for start in &row.document_starts {
                hasher.update(&(*start as u64).to_le_bytes());
            }
        }
        hasher.finalize()
    }
}

/// Tokenizer and chat template of a model folder.
pub fn open(model: &Path, date: &str) -> Result<(Tokenizer, Option<Template>), DataError> {
    // The folder itself first: that its tokenizer is not there would only be half of it.
    if !model.exists() {
        return Err(DataError::Missing { path: model.to_owned() });
    }
    let tokenizer = Tokenizer::load(model)?;
    let template = Template::load(model, date, tokenizer.special_tokens())?;
    Ok((tokenizer, template))
}

/// As [`open`], with nothing where the folder has no `tokenizer.json`: rows of tokens need none.
pub fn open_if_there(model: &Path, date: &str) -> Result<(Option<Tokenizer>, Option<Template>), DataError> {
    match open(model, date) {
        Ok((tokenizer, template)) => Ok((Some(tokenizer), template)),
        Err(DataError::Missing { path }) if path.ends_with("tokenizer.json") => Ok((None, None)),
        Err(error) => Err(error),
    }
}

/// Loads every file, tokenises every row, packs. `template` must have been made with the date of the config. The first row
/// that cannot be read ends it.
pub fn load<'t>(
    config: &DataConfig,
    tokenizer: impl Into<Option<&'t Tokenizer>>,
    template: Option<&Template>,
) -> Result<(Dataset, Report), DataError> {
    load_rows(config, tokenizer.into(), template, false)
}

/// As [`load`], with rows that cannot be read listed in the report.
pub fn check<'t>(
    config: &DataConfig,
    tokenizer: impl Into<Option<&'t Tokenizer>>,
    template: Option<&Template>,
) -> Result<(Dataset, Report), DataError> {
    load_rows(config, tokenizer.into(), template, true)
}

fn load_rows(
    config: &DataConfig,
    tokenizer: Option<&Tokenizer>,
    template: Option<&Template>,
    list_bad: bool,
) -> Result<(Dataset, Report), DataError> {
    check_settings(config)?;
    let variables = config.variables.values();
    let variables =
        variables.map_err(|why| DataError::Setting { setting: "chat_template_kwargs", why: why.to_string() })?;
    let tools = Tools {
        tokenizer,
        template,
        vocabulary: config.vocabulary,
        loss: Loss {
            assistant_only: config.assistant_only_loss,
            completion_only: config.completion_only_loss.unwrap_or(true),
        },
        length_max: config.max_seq_length,
        drop_special: config.drop_special_token_rows,
    };
    let mut examples: Vec<(Source, Tokenised)> = Vec::new();
    let mut bad = Vec::new();
    let mut reports = Vec::with_capacity(config.files.len());
    for (file, path) in config.files.iter().enumerate() {
        let loader = Loader { config, tools, variables: &variables, path, list_bad };
        let (report, loaded) = loader.load()?;
        reports.push(report);
        for (line, row) in loaded {
            let source = Source { file, line };
            match row {
                Ok(tokenised) => examples.push((source, tokenised)),
                Err(error) => {
                    bad.push(Bad { source, reason: error.reason(), message: error.to_string(), hint: error.hint() });
                }
            }
        }
        let tokens: u64 = examples.iter().map(|(_, example)| example.tokens.len() as u64).sum();
        if tokens > TOKENS_MAX {
            return Err(DataError::TooManyTokens { tokens, limit: TOKENS_MAX });
        }
    }
    let counted = examples.iter().filter(|(_, example)| example.untrainable != Some(Untrainable::SpecialToken));
    let mut report = Report {
        files: reports,
        max_seq_length: config.max_seq_length,
        sample_packing: config.sample_packing,
        examples: examples.len(),
        rows: 0,
        tokens: 0,
        trainable_tokens: 0,
        boundary_merged: 0,
        truncated: Vec::new(),
        dropped: Vec::new(),
        bad,
        lengths: Lengths::new(counted.map(|(_, example)| example.length).collect()),
        digest: String::new(),
    };
    let kept = keep(config, examples, &mut report, list_bad)?;
    let dataset = Dataset { rows: rows(config, kept) };
    report.rows = dataset.rows.len();
    report.digest = dataset.digest().to_hex().to_string();
    Ok((dataset, report))
}

fn check_settings(config: &DataConfig) -> Result<(), DataError> {
    let wrong = |setting, why: String| Err(DataError::Setting { setting, why });
    date::Date::parse(&config.date)?;
    if config.files.is_empty() || config.files.len() > FILES_MAX {
        return wrong("files", format!("{} files; 1 to {FILES_MAX} are possible", config.files.len()));
    }
    if config.max_seq_length < 2 {
        return wrong("max_seq_length", format!("{}: two tokens are needed to predict one", config.max_seq_length));
    }
    if config.workers == 0 || config.workers > WORKERS_MAX {
        return wrong("workers", format!("{}: from 1 to {WORKERS_MAX}", config.workers));
    }
    Ok(())
}

/// Drops what cannot be trained on, or refuses it, and counts.
fn keep(
    config: &DataConfig,
    examples: Vec<(Source, Tokenised)>,
    report: &mut Report,
    list_bad: bool,
) -> Result<Vec<(Source, Tokenised)>, DataError> {
    let mut kept = Vec::with_capacity(examples.len());
    for (source, example) in examples {
        if let Some(reason) = example.untrainable {
            report.dropped.push(Dropped { source, reason });
            continue;
        }
        if example.length > example.tokens.len() {
            report.truncated.push(Truncated { source, tokens: example.length });
        }
        let tokens = example.tokens.len() as u64;
        let trainable = example.targets.iter().filter(|target| **target).count() as u64;
        report.tokens += tokens;
        report.trainable_tokens += trainable;
        report.files[source.file].tokens += tokens;
        report.files[source.file].trainable_tokens += trainable;
        report.boundary_merged += usize::from(example.boundary_merged);
        kept.push((source, example));
    }
    if !config.allow_untrainable_rows {
        let by_choice = |row: &Dropped| row.reason == Untrainable::SpecialToken;
        let (dropped, refused): (Vec<_>, Vec<_>) = std::mem::take(&mut report.dropped).into_iter().partition(by_choice);
        report.dropped = dropped;
        let error = |Dropped { source, reason }: Dropped, count: usize| {
            let file = config.files[source.file].clone();
            DataError::Untrainable { file, line: source.line, why: reason, count }
        };
        match refused.first() {
            Some(first) if !list_bad => return Err(error(*first, refused.len())),
            _ => {}
        }
        report.bad.extend(refused.into_iter().map(|row| {
            let error = error(row, 1);
            Bad { source: row.source, reason: error.reason(), message: error.to_string(), hint: error.hint() }
        }));
        report.bad.sort_by_key(|row| row.source);
    }
    if kept.is_empty() && report.bad.is_empty() {
        return Err(DataError::NothingLeft { rows: report.examples, dropped: report.dropped.len() });
    }
    Ok(kept)
}

fn rows(config: &DataConfig, examples: Vec<(Source, Tokenised)>) -> Vec<Row> {
    if !config.sample_packing {
        return examples.into_iter().map(|example| row(vec![example])).collect();
    }
    let lengths: Vec<usize> = examples.iter().map(|(_, example)| example.tokens.len()).collect();
    let mut examples: Vec<_> = examples.into_iter().map(Some).collect();
    let mut take = |index: usize| examples[index].take().expect("packing uses every example once");
    let packed = packing::pack(&lengths, config.max_seq_length);
    packed.into_iter().map(|bin| row(bin.into_iter().map(&mut take).collect())).collect()
}

fn row(examples: Vec<(Source, Tokenised)>) -> Row {
    let mut row = Row { tokens: Vec::new(), targets: Vec::new(), document_starts: vec![0], sources: Vec::new() };
    for (source, example) in examples {
        let first = row.tokens.len();
        row.tokens.extend(example.tokens);
        row.targets.extend(example.targets);
        for start in example.later_starts {
            row.document_starts.push(first + start);
            row.sources.push(source);
        }
        row.document_starts.push(row.tokens.len());
        row.sources.push(source);
    }
    row
}

/// Loads one file.
struct Loader<'a> {
    config: &'a DataConfig,
    tools: Tools<'a>,
    variables: &'a [(String, Json)],
    path: &'a Path,
    /// Go on after rows that cannot be read.
    list_bad: bool,
}

/// Rows of a file with their lines, in order: an example, or why there is none.
type Examples = Vec<(usize, Result<Tokenised, DataError>)>;

/// What the first row of a file settles for the others.
struct Shape {
    format: Format,
    first_line: usize,
    names: Option<FieldNames>,
}

impl Loader<'_> {
    fn load(&self) -> Result<(FileReport, Examples), DataError> {
        let bytes = files::read(self.path, files::DATA_BYTES_MAX)?;
        let records = records::split(&bytes).map_err(|(line, why)| self.row_error(line, why, false))?;
        let shape = self.shape(&records)?;
        let examples = self.tokenise_all(&records, &shape)?;
        let chat = matches!(shape.format, Format::Messages | Format::ShareGpt);
        let loss = match self.tools.loss {
            _ if shape.format == Format::Tokens => LossTokens::Labels,
            Loss { assistant_only: true, .. } if chat => LossTokens::Assistant,
            Loss { completion_only: true, .. } if !chat && shape.format != Format::Text => LossTokens::Completion,
            Loss { assistant_only: true, .. } if shape.format == Format::PromptCompletionMessages => {
                LossTokens::Assistant
            }
            _ => LossTokens::All,
        };
        let report = FileReport {
            path: self.path.to_owned(),
            bytes: bytes.len() as u64,
            blake3: blake3::hash(&bytes).to_hex().to_string(),
            format: shape.format,
            loss,
            examples: examples.len(),
            tokens: 0,
            trainable_tokens: 0,
        };
        Ok((report, examples))
    }

    /// The format of the file: that of its first row, or of the first that has one where bad rows are listed.
    fn shape(&self, records: &[Record]) -> Result<Shape, DataError> {
        let config = self.config;
        let names = (config.prompt_field.is_some() || config.completion_field.is_some()).then(|| FieldNames {
            prompt: config.prompt_field.clone().unwrap_or_else(|| "prompt".into()),
            completion: config.completion_field.clone().unwrap_or_else(|| "completion".into()),
        });
        let mut problem = DataError::Empty { file: self.path.to_owned() };
        for (index, record) in records.iter().enumerate() {
            let format = self
                .parse(record)
                .and_then(|row| format::detect(&row, names.as_ref()).ok_or_else(|| self.unknown_format(record, &row)));
            match format {
                Ok(format) => return Ok(Shape { format, first_line: record.line, names }),
                Err(error) if index == 0 => problem = error,
                Err(_) => {}
            }
            if !self.list_bad {
                break;
            }
        }
        Err(problem)
    }

    fn unknown_format(&self, record: &Record, row: &Json) -> DataError {
        DataError::UnknownFormat { file: self.path.to_owned(), line: record.line, keys: keys(row) }
    }

    /// Workers take chunks of rows as they come; what they make of them is put together in the order of rows.
    fn tokenise_all(&self, records: &[Record], shape: &Shape) -> Result<Examples, DataError> {
        let next = AtomicUsize::new(0);
        // The first chunk known to fail. Those after it need not be done; those before it are, so that the error
        // reported is the first one of the file, whoever finds it.
        let failed = AtomicUsize::new(usize::MAX);
        let chunks: Vec<&[Record]> = records.chunks(CHUNK).collect();
        let work = || {
            let mut done = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= chunks.len() || index > failed.load(Ordering::Relaxed) {
                    return done;
                }
                let mut rows: Examples = Vec::with_capacity(chunks[index].len());
                for record in chunks[index] {
                    let row = self.tokenise(record, shape);
                    let ends = row.as_ref().is_err_and(|error| self.ends(error));
                    rows.push((record.line, row));
                    if ends {
                        failed.fetch_min(index, Ordering::Relaxed);
                        break;
                    }
                }
                done.push((index, rows));
            }
        };
        let mut done = std::thread::scope(|scope| {
            let workers = self.config.workers.min(chunks.len());
            let start = || std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, work);
            let workers = (0..workers).map(|_| start()).collect::<Result<Vec<_>, _>>();
            let workers = workers.map_err(|source| DataError::Threads { source })?;
            let join = |worker: std::thread::ScopedJoinHandle<'_, Vec<_>>| {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            Ok(workers.into_iter().flat_map(join).collect::<Vec<_>>())
        })?;
        done.sort_by_key(|(index, _)| *index);
        let mut examples = Vec::with_capacity(records.len());
        for (line, row) in done.into_iter().flat_map(|(_, rows)| rows) {
            match row {
                Err(error) if self.ends(&error) => return Err(error),
                row => examples.push((line, row)),
            }
        }
        Ok(examples)
    }

    /// Whether an error ends the loading: all do, unless bad rows are listed and it is the row's own fault.
    fn ends(&self, error: &DataError) -> bool {
        !self.list_bad || error.kind() != Kind::Data
    }

    fn tokenise(&self, record: &Record, shape: &Shape) -> Result<Tokenised, DataError> {
        let (file, line) = (self.path.to_owned(), record.line);
        let row = self.parse(record)?;
        let found = format::detect(&row, shape.names.as_ref());
        if found.is_none() && record.line < shape.first_line {
            return Err(self.unknown_format(record, &row));
        }
        if found != Some(shape.format) {
            let found = found.map_or_else(
                || format!("a row with the keys {}", keys(&row).join(", ").escape_debug()),
                |format| format.to_string(),
            );
            let (first, first_line) = (shape.format, shape.first_line);
            return Err(DataError::Mixed { file, line, found, first, first_line });
        }
        let mut example = format::parse(&row, shape.format, shape.names.as_ref(), self.tools.template.is_some())
            .map_err(|why| self.row_error(line, why, has_calls(&row)))?;
        if let Example::Chat(conversation) | Example::ChatPair { conversation, .. } = &mut example {
            conversation.add_variables(self.variables);
        }
        example::tokenise(&example, self.tools).map_err(|problem| match problem {
            Problem::Row(why) => self.row_error(line, why, has_calls(&row)),
            Problem::NoTokenizer => DataError::NoTokenizer { file, line, format: shape.format },
            Problem::NoTemplate => DataError::NoTemplate { file, line, format: shape.format },
            Problem::NoEndOfText => DataError::NoEndOfText { file, line },
            Problem::NoAssistantMask { template, why } => DataError::NoAssistantMask { file, line, template, why },
            Problem::Vocabulary { token, vocabulary } => DataError::Vocabulary { file, line, token, vocabulary },
        })
    }

    fn parse(&self, record: &Record) -> Result<Json, DataError> {
        let row = record.text().and_then(Json::parse).map_err(|why| self.row_error(record.line, why, false))?;
        match row {
            Json::Object(_) => Ok(row),
            other => Err(self.row_error(record.line, RowError::NotObject { found: other.what() }, false)),
        }
    }

    fn row_error(&self, line: usize, why: RowError, calls: bool) -> DataError {
        DataError::Row { file: self.path.to_owned(), line, why, calls }
    }
}

/// Whether any message of the row calls a tool.
fn has_calls(row: &Json) -> bool {
    let calls = |message: &Json| message.get("tool_calls").is_some_and(|calls| *calls != Json::Null);
    let list = |key: &str| matches!(row.get(key), Some(Json::Array(messages)) if messages.iter().any(calls));
    ["messages", "prompt", "completion"].into_iter().any(list)
}

fn keys(row: &Json) -> Vec<String> {
    match row {
        Json::Object(entries) => entries.iter().map(|(key, _)| key.clone()).collect(),
        _ => Vec::new(),
    }
}
