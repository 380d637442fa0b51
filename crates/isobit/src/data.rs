//! `isobit data check` and `isobit data show`: what training would see of data files, before anything is trained. The first
//! validates and counts, the second prints a row with the tokens the loss counts between ⟦ and ⟧, green on a terminal.

use crate::Failure;
use isobit_training::data::{self, DataConfig, DataError, Dataset, Kind, Report, Row, Source, Tokenizer};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

/// Rows of a list that are printed; `--json` has them all.
const LISTED: usize = 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Validate every row and report counts, lengths, truncated and dropped rows
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
    /// Row to print, from 0
    #[arg(long, default_value_t = 0)]
    row: usize,
    /// Print one line for every token
    #[arg(long)]
    tokens: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct Input {
    /// Model folder with tokenizer.json and the chat template
    #[arg(long, value_name = "FOLDER")]
    model: PathBuf,
    /// Data files: JSONL or JSON arrays
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    data: Vec<PathBuf>,
    /// Longer examples lose their end
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_seq_length: usize,
    /// Put several examples into one row
    #[arg(long)]
    packing: bool,
    /// Field that holds the prompt, for data with names of its own
    #[arg(long, value_name = "NAME")]
    prompt_field: Option<String>,
    /// Field that holds the completion
    #[arg(long, value_name = "NAME")]
    completion_field: Option<String>,
    /// In conversations, train on the assistant's tokens only
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    assistant_only_loss: bool,
    /// In rows of prompt and completion, train on the completion only (default: true)
    #[arg(long, value_name = "BOOL")]
    completion_only_loss: Option<bool>,
    /// Drop and list rows without a token to train on instead of refusing them
    #[arg(long)]
    allow_untrainable_rows: bool,
    /// Date that templates see
    #[arg(long, value_name = "YYYY-MM-DD", default_value = data::DATE_DEFAULT)]
    date: String,
    /// Threads that tokenise; the result does not depend on it
    #[arg(long, value_name = "N", default_value_t = 1)]
    workers: usize,
}

impl Input {
    fn load(&self) -> Result<(Tokenizer, Dataset, Report), DataError> {
        let config = DataConfig {
            files: self.data.clone(),
            prompt_field: self.prompt_field.clone(),
            completion_field: self.completion_field.clone(),
            max_seq_length: self.max_seq_length,
            sample_packing: self.packing,
            assistant_only_loss: self.assistant_only_loss,
            completion_only_loss: self.completion_only_loss,
            allow_untrainable_rows: self.allow_untrainable_rows,
            date: self.date.clone(),
            workers: self.workers,
        };
        let (tokenizer, template) = data::open(&self.model, &self.date)?;
        let (dataset, report) = data::load(&config, &tokenizer, template.as_ref())?;
        Ok((tokenizer, dataset, report))
    }

    fn place(&self, source: Source) -> String {
        format!("{}:{}", self.data[source.file].display(), source.line)
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        Self {
            code: code_of(error.kind()),
            message: printable(&error.to_string()),
            hint: Some(printable(&error.hint())),
        }
    }
}

pub(crate) fn code_of(kind: Kind) -> u8 {
    match kind {
        Kind::Config => 2,
        Kind::Data => 3,
        Kind::Io => 7,
        Kind::Malformed => 8,
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match &arguments.command {
        Command::Check(check) => {
            let (_, _, report) = check.input.load()?;
            print_report(&mut out, check, &report).map_err(|error| Failure::output(&error))
        }
        Command::Show(show) => {
            let (tokenizer, dataset, _) = show.input.load()?;
            let count = dataset.rows.len();
            let Some(row) = dataset.rows.get(show.row) else {
                return Err(Failure::usage(
                    format!("there is no row {}", show.row),
                    format!("rows are 0 to {}", count - 1),
                ));
            };
            let colour = out.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
            let printed = match (show.json, show.tokens) {
                (true, _) => print_json(&mut out, show, row, &tokenizer),
                (false, true) => print_tokens(&mut out, show, row, &tokenizer, colour),
                (false, false) => print_text(&mut out, show, row, &tokenizer, colour),
            };
            printed.map_err(|error| Failure::output(&error))
        }
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
            "{}: {}, {} examples, {} tokens, {} trained on ({loss})",
            file.path.display(),
            file.format,
            file.examples,
            file.tokens,
            file.trainable_tokens
        )?;
    }
    let packed = if report.sample_packing { " (packed)" } else { "" };
    writeln!(out, "rows       {}{packed}", report.rows)?;
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
    writeln!(out, "dropped    {}", report.dropped.len())?;
    let dropped = report.dropped.iter().map(|row| format!("{}: {}", check.input.place(row.source), row.reason));
    print_list(out, dropped)?;
    if report.boundary_merged > 0 {
        writeln!(out, "merged     {} with a token across prompt and completion, trained on", report.boundary_merged)?;
    }
    writeln!(out, "digest     {}", report.digest)?;
    out.flush()
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

/// Tokens that print together: the bytes of one character may be spread over several.
struct Piece {
    tokens: std::ops::Range<usize>,
    text: String,
    target: bool,
}

/// Cuts a row where documents and the mask change, and where a character ends.
fn pieces(row: &Row, tokenizer: &Tokenizer) -> Vec<Piece> {
    // BOUND: a character has at most four bytes; what is still no text after that many tokens never will be.
    const TOKENS_MAX: usize = 4;
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < row.tokens.len() {
        let target = row.targets[start];
        let joins = |at: &usize| row.targets[*at] == target && !row.document_starts.contains(at);
        let last = (start + 1..row.tokens.len().min(start + TOKENS_MAX)).take_while(joins).last().unwrap_or(start);
        let whole = (start..=last)
            .map(|end| (end + 1, tokenizer.decode(&row.tokens[start..=end])))
            .find(|(_, text)| !text.contains('\u{fffd}'));
        let (end, text) = whole.unwrap_or_else(|| (start + 1, tokenizer.decode(&row.tokens[start..=start])));
        pieces.push(Piece { tokens: start..end, text, target });
        start = end;
    }
    pieces
}

/// Text without control characters, which could take over a terminal.
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

fn header(out: &mut impl Write, show: &Show, row: &Row) -> std::io::Result<()> {
    let trainable = row.targets.iter().filter(|target| **target).count();
    let places: Vec<_> = row.sources.iter().map(|source| show.input.place(*source)).collect();
    writeln!(out, "row {} from {}: {} tokens, {trainable} trained on", show.row, places.join(", "), row.tokens.len())
}

fn print_text(
    out: &mut impl Write,
    show: &Show,
    row: &Row,
    tokenizer: &Tokenizer,
    colour: bool,
) -> std::io::Result<()> {
    header(out, show, row)?;
    let (open, close) = if colour { ("\x1b[32m⟦", "⟧\x1b[0m") } else { ("⟦", "⟧") };
    let mut inside = false;
    for piece in pieces(row, tokenizer) {
        let new_document = piece.tokens.start > 0 && row.document_starts.contains(&piece.tokens.start);
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

fn print_tokens(
    out: &mut impl Write,
    show: &Show,
    row: &Row,
    tokenizer: &Tokenizer,
    colour: bool,
) -> std::io::Result<()> {
    header(out, show, row)?;
    for piece in pieces(row, tokenizer) {
        for index in piece.tokens.clone() {
            let (mark, on, off) = match (row.targets[index], colour) {
                (true, true) => ('*', "\x1b[32m", "\x1b[0m"),
                (true, false) => ('*', "", ""),
                (false, _) => (' ', "", ""),
            };
            // The text stands at the first token of a character, the others continue it.
            let text = if index == piece.tokens.start { format!("{:?}", piece.text) } else { "…".to_owned() };
            writeln!(out, "{on}{index:>6} {:>7} {mark} {}{off}", row.tokens[index], printable(&text))?;
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
    text: String,
}

fn print_json(out: &mut impl Write, show: &Show, row: &Row, tokenizer: &Tokenizer) -> std::io::Result<()> {
    let line = ShowLine {
        schema: "isobit.data-show/1",
        row: show.row,
        sources: row.sources.iter().map(|source| show.input.place(*source)).collect(),
        tokens: &row.tokens,
        targets: &row.targets,
        document_starts: &row.document_starts,
        text: tokenizer.decode(&row.tokens),
    };
    writeln!(out, "{}", serde_json::to_string(&line)?)?;
    out.flush()
}
