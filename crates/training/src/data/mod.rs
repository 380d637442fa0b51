//! Data: files become rows of tokens with a loss mask. Each file (`file`) is cut into records
//! (`records`, `csv`, `parquet`), which are parsed (`json`), interpreted (`format`), rendered
//! (`template`) and tokenised (`example`); rows may then be packed (`packing`), and `order`
//! determines the order of an epoch. The result is a function of files, tokenizer, template and
//! config, never of the number of workers.

mod conversation;
mod csv;
mod date;
mod error;
mod example;
mod extent;
mod file;
mod files;
mod format;
mod generation;
mod jinja;
mod json;
mod normalizers;
mod order;
mod packing;
mod parquet;
mod records;
mod report;
mod spans;
mod template;
mod tokenizer;
mod tokens;
mod turns;
mod variables;

pub use error::{DataError, DataErrorKind, RowError, Untrainable};
pub use extent::{Extent, extent};
pub use file::STACK_BYTES as READER_STACK_BYTES;
pub use format::RowFormat;
pub use order::{EpochOrder, order};
pub use report::{Bad, Bucket, Dropped, FileReport, Lengths, LossTokens, Report, RowSource, Truncated};
pub use template::{Rendered, Template};
pub use tokenizer::{Encoding, Tokenizer};
pub use variables::{Variables, check_name};

use crate::row::{self, Row};
use example::{Loss, Tokenised, Tools};
use file::FileLoader;
use std::path::{Path, PathBuf};

/// The date that chat templates see unless the config sets one: no clock may affect the tokens.
pub const DATE_DEFAULT: &str = "2025-01-01";

/// BOUND: workers, files, and tokens of all rows together.
const WORKERS_MAX: usize = 1024;
const FILES_MAX: usize = 4096;
const TOKENS_MAX: u64 = 1 << 36;

/// What to load, and how. Everything is decided here: nothing below looks elsewhere.
#[expect(clippy::struct_excessive_bools, reason = "each is a key of the config that people know as true or false")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataConfig {
    pub files: Vec<PathBuf>,
    /// The two fields that hold prompt and completion, for data with custom names.
    pub prompt_field: Option<String>,
    pub completion_field: Option<String>,
    /// Longer examples are truncated and listed.
    pub max_seq_length: usize,
    /// Pack several examples into one row.
    pub sample_packing: bool,
    /// In conversations, count only the assistant's tokens.
    pub assistant_only_loss: bool,
    /// In rows with prompt and completion, count only the completion; `None` means yes.
    pub completion_only_loss: Option<bool>,
    /// Drop rows without a token to train on instead of refusing the data. They are listed.
    pub allow_untrainable_rows: bool,
    /// Drop rows whose text contains the text of a special token. They are listed.
    pub drop_special_token_rows: bool,
    /// Variables of the chat template; rows may override them.
    pub variables: Variables,
    /// Number of tokens of the model, if known: rows with others are refused.
    pub vocabulary: Option<usize>,
    /// The date of `strftime_now` in templates, as `YYYY-MM-DD`.
    pub date: String,
    /// Number of tokenising threads.
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

/// Tokenizer and chat template of a model folder.
pub fn open(model: &Path, date: &str) -> Result<(Tokenizer, Option<Template>), DataError> {
    // Check the folder first: a missing tokenizer would only be a symptom.
    if !model.exists() {
        return Err(DataError::Missing { path: model.to_owned() });
    }
    let tokenizer = Tokenizer::load(model)?;
    let template = Template::load(model, date, tokenizer.special_tokens())?;
    Ok((tokenizer, template))
}

/// Like [`open`], but None if the folder has no `tokenizer.json`: rows of tokens need none.
pub fn open_if_there(model: &Path, date: &str) -> Result<(Option<Tokenizer>, Option<Template>), DataError> {
    match open(model, date) {
        Ok((tokenizer, template)) => Ok((Some(tokenizer), template)),
        Err(DataError::Missing { path }) if path.ends_with("tokenizer.json") => Ok((None, None)),
        Err(error) => Err(error),
    }
}

/// Loads every file, tokenises every row and packs. `template` must have been made with the date of
/// the config. Stops at the first row that cannot be read.
pub fn load<'t>(
    config: &DataConfig,
    tokenizer: impl Into<Option<&'t Tokenizer>>,
    template: Option<&Template>,
) -> Result<(Vec<Row>, Report), DataError> {
    load_rows(config, tokenizer.into(), template, false)
}

/// Like [`load`], but lists rows that cannot be read in the report.
pub fn check<'t>(
    config: &DataConfig,
    tokenizer: impl Into<Option<&'t Tokenizer>>,
    template: Option<&Template>,
) -> Result<(Vec<Row>, Report), DataError> {
    load_rows(config, tokenizer.into(), template, true)
}

fn load_rows(
    config: &DataConfig,
    tokenizer: Option<&Tokenizer>,
    template: Option<&Template>,
    list_bad: bool,
) -> Result<(Vec<Row>, Report), DataError> {
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
    let mut examples: Vec<(RowSource, Tokenised)> = Vec::new();
    let mut bad = Vec::new();
    let mut reports = Vec::with_capacity(config.files.len());
    for (file, path) in config.files.iter().enumerate() {
        let loader = FileLoader { config, tools, variables: &variables, path, list_bad };
        let (report, loaded) = loader.load()?;
        reports.push(report);
        for (line, row) in loaded {
            let source = RowSource { file, line };
            match row {
                Ok(tokenised) => examples.push((source, tokenised)),
                Err(error) => {
                    bad.push(Bad { source, reason: error.reason(), message: error.to_string(), hint: error.hint() });
                }
            }
        }
        let tokens: u64 = examples.iter().map(|(_, example)| example.row.tokens().len() as u64).sum();
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
    let rows = if config.sample_packing { packed(kept, config.max_seq_length) } else { kept };
    report.rows = rows.len();
    report.digest = row::digest(&rows).to_string();
    Ok((rows, report))
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

/// Drops or refuses untrainable rows, and counts.
fn keep(
    config: &DataConfig,
    examples: Vec<(RowSource, Tokenised)>,
    report: &mut Report,
    list_bad: bool,
) -> Result<Vec<Row>, DataError> {
    let mut kept = Vec::with_capacity(examples.len());
    for (source, example) in examples {
        let special = example.untrainable == Some(Untrainable::SpecialToken);
        if example.length > example.row.tokens().len().min(config.max_seq_length) && !special {
            report.truncated.push(Truncated { source, tokens: example.length });
        }
        if let Some(reason) = example.untrainable {
            report.dropped.push(Dropped { source, reason });
            continue;
        }
        let tokens = example.row.tokens().len() as u64;
        let trainable = example.row.target_count() as u64;
        report.tokens += tokens;
        report.trainable_tokens += trainable;
        report.files[source.file].tokens += tokens;
        report.files[source.file].trainable_tokens += trainable;
        report.boundary_merged += usize::from(example.boundary_merged);
        kept.push(example.row.with_source(source));
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

/// Packs several examples into each row.
fn packed(examples: Vec<Row>, length_max: usize) -> Vec<Row> {
    let lengths: Vec<usize> = examples.iter().map(|row| row.tokens().len()).collect();
    let mut examples: Vec<_> = examples.into_iter().map(Some).collect();
    let mut take = |index: usize| examples[index].take().expect("packing uses every example once");
    let joined = |mut row: Row, next: Row| {
        row.append(next);
        row
    };
    let packed = packing::pack(&lengths, length_max).into_iter();
    packed.filter_map(|indices| indices.into_iter().map(&mut take).reduce(joined)).collect()
}
