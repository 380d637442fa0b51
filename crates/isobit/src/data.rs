//! `isobit data check` and `isobit data show`: data files as training would see them. The first
//! validates and counts; the second prints a row with the tokens that the loss counts between ⟦ and
//! ⟧, green on a terminal.

use crate::Failure;
use crate::model::located;
use isobit_training::data::{
    self, Bad, DataConfig, DataError, DataErrorKind, Report, RowSource, Template, Tokenizer, Variables,
};
use isobit_training::hub_cache;
use isobit_training::prepare::model_config;
use isobit_training::row::Row;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

/// Rows of a list that are printed; `--json` has all of them.
const LISTED: usize = 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Validate every row and report counts, lengths, and truncated and dropped rows
    Check(Check),
    /// Print a row of tokens with the loss mask
    Show(Show),
}

#[derive(Debug, clap::Args)]
struct Check {
    #[command(flatten)]
    input: Input,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct Show {
    #[command(flatten)]
    input: Input,
    /// Row to print, counted from 0
    #[arg(long, default_value_t = 0)]
    row: usize,
    /// Rows to print: `0..20` prints the first twenty; either end may be omitted
    #[arg(long, value_name = "FROM..TO", conflicts_with = "row", value_parser = range)]
    rows: Option<std::ops::Range<usize>>,
    /// Print one line per token
    #[arg(long)]
    tokens: bool,
    /// Print one JSON object per row
    #[arg(long)]
    json: bool,
}

#[expect(clippy::struct_excessive_bools, reason = "each is an argument")]
#[derive(Debug, clap::Args)]
struct Input {
    /// Model folder with tokenizer.json and the chat template; rows of input_ids need no tokenizer
    #[arg(long, value_name = "FOLDER")]
    model: PathBuf,
    /// Data files: JSONL, JSON arrays, CSV, TSV or Parquet
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    data: Vec<PathBuf>,
    /// Truncate longer examples to this many tokens
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_seq_length: usize,
    /// Pack several examples into one row
    #[arg(long)]
    packing: bool,
    /// Name of the prompt field, for data with custom field names
    #[arg(long, value_name = "NAME", requires = "completion_field")]
    prompt_field: Option<String>,
    /// Name of the completion field
    #[arg(long, value_name = "NAME", requires = "prompt_field")]
    completion_field: Option<String>,
    /// In conversations, train only on the assistant's tokens
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    assistant_only_loss: bool,
    /// In rows with prompt and completion, train only on the completion (default: true)
    #[arg(long, value_name = "BOOL")]
    completion_only_loss: Option<bool>,
    /// Drop and list rows without a token to train on instead of refusing the data
    #[arg(long)]
    allow_untrainable_rows: bool,
    /// Drop and list rows whose text contains the text of a special token
    #[arg(long)]
    drop_special_token_rows: bool,
    /// Set a variable of the chat template: `--template-var enable_thinking=false`
    #[arg(long, value_name = "NAME=VALUE", value_parser = template_variable)]
    template_var: Vec<String>,
    /// Date that chat templates see
    #[arg(long, value_name = "YYYY-MM-DD", default_value = data::DATE_DEFAULT)]
    date: String,
    /// Tokenising threads; does not affect the result
    #[arg(long, value_name = "N", default_value_t = 1)]
    workers: usize,
}

impl Input {
    fn config(&self) -> DataConfig {
        // `train` refuses a model that cannot be trained; its data can still be inspected.
        let model = model_config(&located(&self.model)).ok();
        DataConfig {
            files: self.data.clone(),
            prompt_field: self.prompt_field.clone(),
            completion_field: self.completion_field.clone(),
            max_seq_length: self.max_seq_length.min(model.as_ref().map_or(usize::MAX, |model| model.max_positions)),
            sample_packing: self.packing,
            assistant_only_loss: self.assistant_only_loss,
            completion_only_loss: self.completion_only_loss,
            allow_untrainable_rows: self.allow_untrainable_rows,
            drop_special_token_rows: self.drop_special_token_rows,
            variables: variables(&self.template_var),
            vocabulary: model.map(|model| model.vocabulary),
            date: self.date.clone(),
            workers: self.workers,
        }
    }

    fn open(&self) -> Result<(Option<Tokenizer>, Option<Template>), Failure> {
        hub_cache::check(&self.model)?;
        Ok(data::open_if_there(&located(&self.model), &self.date)?)
    }

    fn place(&self, source: RowSource) -> String {
        format!("{}:{}", self.data[source.file].display(), source.line)
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        Self {
            code: error.kind().exit_code(),
            message: printable(&error.to_string()),
            hint: Some(printable(&error.hint())),
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match &arguments.command {
        Command::Check(check) => {
            let (tokenizer, template) = check.input.open()?;
            let (_, report) = data::check(&check.input.config(), tokenizer.as_ref(), template.as_ref())?;
            print_report(&mut out, check, &report).map_err(|error| Failure::output(&error))?;
            refuse_bad(&report).map_err(Failure::told)
        }
        Command::Show(show) => {
            let (tokenizer, template) = show.input.open()?;
            let (rows, _) = data::load(&show.input.config(), tokenizer.as_ref(), template.as_ref())?;
            print_rows(&mut out, show, &rows, tokenizer.as_ref()).map_err(|error| Failure::output(&error))?
        }
    }
}

/// Prints the existing rows of the requested range.
fn print_rows(
    out: &mut (impl Write + IsTerminal),
    show: &Show,
    rows: &[Row],
    tokenizer: Option<&Tokenizer>,
) -> std::io::Result<Result<(), Failure>> {
    let count = rows.len();
    let range = show.rows.clone().unwrap_or(show.row..show.row.saturating_add(1));
    if range.start >= count {
        let message = format!("there is no row {}", range.start);
        return Ok(Err(Failure::usage(message, format!("rows are 0 to {}", count.saturating_sub(1)))));
    }
    let colour = out.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    for index in range.start..range.end.min(count) {
        let shown = Shown { index, row: &rows[index], input: &show.input, tokenizer, colour };
        match (show.json, show.tokens || tokenizer.is_none()) {
            (true, _) => print_json(out, &shown)?,
            (false, true) => print_tokens(out, &shown)?,
            (false, false) => print_text(out, &shown)?,
        }
    }
    Ok(Ok(()))
}

/// A row to print.
struct Shown<'a> {
    index: usize,
    row: &'a Row,
    input: &'a Input,
    /// None if the data are tokens and the model folder has no tokenizer.
    tokenizer: Option<&'a Tokenizer>,
    colour: bool,
}

impl Shown<'_> {
    /// The sources of its documents, each once.
    fn places(&self) -> Vec<String> {
        let mut places: Vec<String> = self.row.sources().iter().map(|source| self.input.place(*source)).collect();
        places.dedup();
        places
    }

    fn decoded(&self, tokens: &[u32]) -> String {
        self.tokenizer.map_or_else(String::new, |tokenizer| tokenizer.decode(tokens))
    }
}

/// `0..20`, `5..` or `..5`.
fn range(text: &str) -> Result<std::ops::Range<usize>, String> {
    let (from, to) = text.split_once("..").ok_or("write it as 0..20")?;
    let number = |text: &str, default: usize| match text {
        "" => Ok(default),
        text => text.parse().map_err(|_| format!("`{text}` is not the number of a row")),
    };
    let (from, to) = (number(from, 0)?, number(to, usize::MAX)?);
    if from < to { Ok(from..to) } else { Err("the range is empty: its end is exclusive".into()) }
}

/// A checked argument of `--template-var`.
pub(crate) fn template_variable(argument: &str) -> Result<String, String> {
    Variables::default().add_argument(argument).map(|()| argument.to_owned())
}

/// The variables of checked arguments.
pub(crate) fn variables(arguments: &[String]) -> Variables {
    let mut variables = Variables::default();
    for argument in arguments {
        variables.add_argument(argument).expect("arguments are checked when they are parsed");
    }
    variables
}

/// Bad rows have been printed: fails with their number and the exit code.
fn refuse_bad(report: &Report) -> Result<(), Failure> {
    match report.bad.len() {
        0 => Ok(()),
        count => Err(Failure {
            code: DataErrorKind::Data.exit_code(),
            message: format!(
                "{count} of {} rows cannot be trained on",
                report.files.iter().map(|file| file.examples).sum::<usize>()
            ),
            hint: Some(if report.bad.iter().all(|row| row.reason == report.bad[0].reason) {
                printable(&report.bad[0].hint)
            } else {
                "fix or remove them; training stops at the first".into()
            }),
        }),
    }
}

#[derive(Serialize)]
struct CheckLine<'a> {
    schema: &'static str,
    #[serde(flatten)]
    report: &'a Report,
}

fn print_report(out: &mut impl Write, check: &Check, report: &Report) -> std::io::Result<()> {
    if check.json {
        let line = CheckLine { schema: "isobit.data-check/1", report };
        writeln!(out, "{}", serde_json::to_string(&line)?)?;
        return out.flush();
    }
    for file in &report.files {
        let loss = match file.loss {
            data::LossTokens::Assistant => "the assistant's",
            data::LossTokens::Completion => "the completion's",
            data::LossTokens::Labels => "as labelled",
            data::LossTokens::All => "all",
        };
        writeln!(
            out,
            "{}: {}, {} rows, {} tokens, {} trained on ({loss})",
            file.path.display(),
            file.format,
            file.examples,
            file.tokens,
            file.trainable_tokens
        )?;
    }
    writeln!(out, "rows       {}", rows_line(report))?;
    writeln!(out, "tokens     {}, {} trained on", report.tokens, report.trainable_tokens)?;
    let lengths = &report.lengths;
    writeln!(out, "lengths    {} to {}, median {}", lengths.shortest, lengths.longest, lengths.median)?;
    let most = lengths.histogram.iter().map(|bucket| bucket.count).max().unwrap_or(0).max(1);
    for bucket in &lengths.histogram {
        let bar = "▪".repeat((bucket.count * 40).div_ceil(most));
        writeln!(out, "  {:>8} to {:<8} {:>8} {bar}", bucket.from, bucket.to, bucket.count)?;
    }
    writeln!(out, "truncated  {} longer than {} tokens", report.truncated.len(), report.max_seq_length)?;
    let cut = report.truncated.iter().map(|cut| format!("{} has {} tokens", check.input.place(cut.source), cut.tokens));
    print_list(out, cut)?;
    print_bad(out, &report.bad)?;
    writeln!(out, "dropped    {}", report.dropped.len())?;
    let dropped = report.dropped.iter().map(|row| format!("{}: {}", check.input.place(row.source), row.reason));
    print_list(out, dropped)?;
    if report.boundary_merged > 0 {
        writeln!(out, "merged     {} with a token across prompt and completion, trained on", report.boundary_merged)?;
    }
    writeln!(out, "digest     {}", report.digest)?;
    out.flush()
}

/// The rows to train on, and what became of the others.
fn rows_line(report: &Report) -> String {
    let all: usize = report.files.iter().map(|file| file.examples).sum();
    let (bad, dropped) = (report.bad.len(), report.dropped.len());
    let used = all - bad - dropped;
    let of = if bad + dropped > 0 { format!(" of {all}: {bad} bad, {dropped} dropped") } else { String::new() };
    let packed = if report.sample_packing { format!(", packed from {used} examples") } else { String::new() };
    format!("{}{packed}{of}", report.rows)
}

/// The number of rows for each error, and the first bad rows.
fn print_bad(out: &mut impl Write, bad: &[Bad]) -> std::io::Result<()> {
    writeln!(out, "bad        {}", bad.len())?;
    let mut counts: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    for row in bad {
        counts.entry(row.reason).or_insert((0, &row.hint)).0 += 1;
    }
    for (reason, (count, hint)) in counts {
        writeln!(out, "  {count:>8} {reason} (hint: {})", printable(hint))?;
    }
    print_list(out, bad.iter().map(|row| printable(&row.message)))
}

fn print_list(out: &mut impl Write, lines: impl ExactSizeIterator<Item = String>) -> std::io::Result<()> {
    let more = lines.len().saturating_sub(LISTED);
    for line in lines.take(LISTED) {
        writeln!(out, "  {line}")?;
    }
    if more > 0 {
        writeln!(out, "  and {more} more: --json lists them all")?;
    }
    Ok(())
}

/// Tokens printed together: the bytes of one character may span several.
struct Piece {
    tokens: std::ops::Range<usize>,
    text: String,
    target: bool,
}

/// Splits a row where documents or the mask change, at character boundaries.
fn pieces(shown: &Shown<'_>) -> Vec<Piece> {
    // BOUND: a character has at most four bytes; if this many tokens do not form text, more will
    // not.
    const TOKENS_MAX: usize = 4;
    let row = shown.row;
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < row.tokens().len() {
        let target = row.targets()[start];
        let joins = |at: &usize| row.targets()[*at] == target && !row.document_starts().contains(at);
        let last = (start + 1..row.tokens().len().min(start + TOKENS_MAX)).take_while(joins).last().unwrap_or(start);
        let whole = (start..=last)
            .map(|end| (end + 1, shown.decoded(&row.tokens()[start..=end])))
            .find(|(_, text)| !text.contains('\u{fffd}'));
        let (end, text) = whole.unwrap_or_else(|| (start + 1, shown.decoded(&row.tokens()[start..=start])));
        pieces.push(Piece { tokens: start..end, text, target });
        start = end;
    }
    pieces
}

/// Text without control characters, which could control the terminal.
fn printable(text: &str) -> String {
    let mut printed = String::with_capacity(text.len());
    for character in text.chars() {
        let hidden = matches!(character, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if character != '\n' && (character.is_control() || hidden) {
            printed.extend(character.escape_default());
        } else {
            printed.push(character);
        }
    }
    printed
}

fn header(out: &mut impl Write, shown: &Shown<'_>) -> std::io::Result<()> {
    let trainable = shown.row.target_count();
    let (places, tokens) = (shown.places().join(", "), shown.row.tokens().len());
    writeln!(out, "row {} from {places}: {tokens} tokens, {trainable} trained on", shown.index)
}

fn print_text(out: &mut impl Write, shown: &Shown<'_>) -> std::io::Result<()> {
    header(out, shown)?;
    let row = shown.row;
    let (open, close) = if shown.colour { ("\x1b[32m⟦", "⟧\x1b[0m") } else { ("⟦", "⟧") };
    let mut inside = false;
    for piece in pieces(shown) {
        let new_document = piece.tokens.start > 0 && row.document_starts().contains(&piece.tokens.start);
        if inside && (!piece.target || new_document) {
            write!(out, "{close}")?;
            inside = false;
        }
        if new_document {
            writeln!(out, "\n--- next document")?;
        }
        if piece.target && !inside {
            write!(out, "{open}")?;
            inside = true;
        }
        write!(out, "{}", printable(&piece.text))?;
    }
    writeln!(out, "{}", if inside { close } else { "" })?;
    out.flush()
}

fn print_tokens(out: &mut impl Write, shown: &Shown<'_>) -> std::io::Result<()> {
    header(out, shown)?;
    let row = shown.row;
    for piece in pieces(shown) {
        for index in piece.tokens.clone() {
            let (mark, on, off) = match (row.targets()[index], shown.colour) {
                (true, true) => ('*', "\x1b[32m", "\x1b[0m"),
                (true, false) => ('*', "", ""),
                (false, _) => (' ', "", ""),
            };
            // The text is shown at the first token of a character; the other tokens continue it.
            let text = match shown.tokenizer {
                None => String::new(),
                Some(_) if index == piece.tokens.start => format!("{:?}", piece.text),
                Some(_) => "…".to_owned(),
            };
            writeln!(out, "{on}{index:>6} {:>7} {mark} {}{off}", row.tokens()[index], printable(&text))?;
        }
    }
    out.flush()
}

#[derive(Serialize)]
struct ShowLine<'a> {
    schema: &'static str,
    row: usize,
    sources: Vec<String>,
    tokens: &'a [u32],
    targets: &'a [bool],
    document_starts: &'a [usize],
    text: Option<String>,
}

fn print_json(out: &mut impl Write, shown: &Shown<'_>) -> std::io::Result<()> {
    let row = shown.row;
    let line = ShowLine {
        schema: "isobit.data-show/1",
        row: shown.index,
        sources: row.sources().iter().map(|source| shown.input.place(*source)).collect(),
        tokens: row.tokens(),
        targets: row.targets(),
        document_starts: row.document_starts(),
        text: shown.tokenizer.map(|tokenizer| tokenizer.decode(row.tokens())),
    };
    writeln!(out, "{}", serde_json::to_string(&line)?)?;
    out.flush()
}
