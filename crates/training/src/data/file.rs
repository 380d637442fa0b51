//! Loads one data file: cuts it into records, detects its format, and turns every record into a row
//! on as many threads as configured. Rows keep the order of the file, and of several errors the
//! first in the file is always reported, whichever thread found it.

use super::error::{DataError, DataErrorKind, RowError};
use super::example::{self, Loss, Problem, Tokenised, Tools};
use super::format::{self, Example, FieldNames, RowFormat};
use super::json::Json;
use super::records::{self, Record};
use super::report::{FileReport, LossTokens};
use super::{DataConfig, csv, files, parquet};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Scope, ScopedJoinHandle};

/// Rows as JSON, each with its line or number.
type TableRows = Vec<(usize, Vec<u8>)>;

/// Rows a worker takes at a time. Does not affect the result.
const CHUNK: usize = 128;
/// Templates, rows and values have limits on their nesting, so that a main thread, which has as
/// much, can render them too (`generate`).
pub const STACK_BYTES: usize = 8 << 20;
/// What the standard library and the system map when a thread starts.
const BESIDE_STACK_BYTES: usize = 1 << 20;

/// Loads one file.
pub(super) struct FileLoader<'a> {
    pub(super) config: &'a DataConfig,
    pub(super) tools: Tools<'a>,
    pub(super) variables: &'a [(String, Json)],
    pub(super) path: &'a Path,
    /// Continue after rows that cannot be read.
    pub(super) list_bad: bool,
}

/// Rows of a file with their lines, in order: an example, or the reason there is none.
pub(super) type Examples = Vec<(usize, Result<Tokenised, DataError>)>;

/// What the first row of a file determines for the others.
struct FileFormat {
    format: RowFormat,
    first_line: usize,
    names: Option<FieldNames>,
}

/// Starts a thread that begins to `work` when `all_run` is free, and waits until it runs. A new
/// thread maps its signal stack by itself, and the standard library aborts the process where that
/// is refused; so the address space must be there before, and no other thread takes it meanwhile.
fn start_reader<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    all_run: &'scope Mutex<()>,
    work: &'scope (impl Fn() -> T + Sync),
) -> std::io::Result<ScopedJoinHandle<'scope, T>> {
    drop(memmap2::MmapMut::map_anon(STACK_BYTES + BESIDE_STACK_BYTES)?);
    let (runs, running) = std::sync::mpsc::sync_channel(1);
    let wait_and_work = move || {
        // Nobody waits only if the loader failed; then there is nothing to say.
        let _ = runs.send(());
        drop(all_run.lock());
        work()
    };
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, wait_and_work)?;
    // An error means that the thread ended, which joining it reports.
    let _ = running.recv();
    Ok(thread)
}

impl FileLoader<'_> {
    pub(super) fn load(&self) -> Result<(FileReport, Examples), DataError> {
        let bytes = files::read(self.path, files::DATA_BYTES_MAX)?;
        let located = |(line, why)| self.row_error(line, why, false);
        let table = self.table(&bytes)?;
        let records = match &table {
            Some(rows) => rows.iter().map(|(line, bytes)| Record { line: *line, bytes }).collect(),
            None => records::split(&bytes).map_err(located)?,
        };
        let shape = self.shape(&records)?;
        let examples = self.tokenise_all(&records, &shape)?;
        let chat = matches!(shape.format, RowFormat::Messages | RowFormat::ShareGpt);
        let loss = match self.tools.loss {
            _ if shape.format == RowFormat::Tokens => LossTokens::Labels,
            Loss { assistant_only: true, .. } if chat => LossTokens::Assistant,
            Loss { completion_only: true, .. } if !chat && shape.format != RowFormat::Text => LossTokens::Completion,
            Loss { assistant_only: true, .. } if shape.format == RowFormat::PromptCompletionMessages => {
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

    /// The rows of a table; `None` for JSON files.
    fn table(&self, bytes: &[u8]) -> Result<Option<TableRows>, DataError> {
        if parquet::is_parquet(self.path, bytes) {
            let named = [&self.config.prompt_field, &self.config.completion_field];
            let is_read =
                |name: &str| format::KEYS.contains(&name) || named.into_iter().flatten().any(|field| field == name);
            return parquet::objects(bytes, is_read).map(Some).map_err(|(row, why)| match row {
                0 => DataError::Parquet { file: self.path.to_owned(), why },
                row => self.row_error(row, RowError::Parquet { why }, false),
            });
        }
        let table = csv::delimiter(self.path).map(|delimiter| csv::objects(bytes, delimiter));
        table.transpose().map_err(|(line, why)| self.row_error(line, why, false))
    }

    /// The format of the file: that of its first row, or of the first row that has one if bad rows
    /// are listed.
    fn shape(&self, records: &[Record]) -> Result<FileFormat, DataError> {
        let config = self.config;
        let names = (config.prompt_field.is_some() || config.completion_field.is_some()).then(|| FieldNames {
            prompt: config.prompt_field.clone().unwrap_or_else(|| "prompt".into()),
            completion: config.completion_field.clone().unwrap_or_else(|| "completion".into()),
        });
        let mut problem = DataError::Empty { file: self.path.to_owned() };
        for (index, record) in records.iter().enumerate() {
            let format = self.parse(record).and_then(|row| {
                let found = format::detect(&row, names.as_ref());
                found.ok_or_else(|| self.unknown_format(record, &row, names.as_ref()))
            });
            match format {
                Ok(format) => return Ok(FileFormat { format, first_line: record.line, names }),
                Err(error) if index == 0 => problem = error,
                Err(_) => {}
            }
            if !self.list_bad {
                break;
            }
        }
        Err(problem)
    }

    fn unknown_format(&self, record: &Record, row: &Json, names: Option<&FieldNames>) -> DataError {
        let keys = keys(row);
        let slip = format::slip(&keys, names);
        DataError::UnknownFormat { file: self.path.to_owned(), line: record.line, keys, slip }
    }

    /// Workers take chunks of rows as they become free; results are assembled in row order.
    fn tokenise_all(&self, records: &[Record], shape: &FileFormat) -> Result<Examples, DataError> {
        let next = AtomicUsize::new(0);
        // The first chunk known to fail. Later chunks are skipped; earlier ones still run, so that
        // the error reported is the first in the file, whichever worker finds it.
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
        let all_run = Mutex::new(());
        let mut done = std::thread::scope(|scope| {
            let starting = all_run.lock();
            let workers = self.config.workers.min(chunks.len());
            let workers = (0..workers).map(|_| start_reader(scope, &all_run, &work)).collect::<Result<Vec<_>, _>>();
            drop(starting);
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

    /// Whether an error stops loading: all do, unless bad rows are listed and the row itself is at
    /// fault.
    fn ends(&self, error: &DataError) -> bool {
        !self.list_bad || error.kind() != DataErrorKind::Data
    }

    fn tokenise(&self, record: &Record, shape: &FileFormat) -> Result<Tokenised, DataError> {
        let (file, line) = (self.path.to_owned(), record.line);
        let row = self.parse(record)?;
        let found = format::detect(&row, shape.names.as_ref());
        let names = shape.names.as_ref();
        if found.is_none() && (record.line < shape.first_line || format::slip(&keys(&row), names).is_some()) {
            return Err(self.unknown_format(record, &row, names));
        }
        if found.is_none()
            && has_null(&row)
            && let Err(why) = format::parse(&row, shape.format, names, self.tools.template.is_some())
        {
            return Err(self.row_error(line, why, false));
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

/// Whether a field of a row is null: a table has every column in every row.
fn has_null(row: &Json) -> bool {
    matches!(row, Json::Object(entries) if entries.iter().any(|(_, value)| *value == Json::Null))
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
