//! `isobit report`: a run, or several over each other, as one HTML page that needs nothing else.
//! `report_to = "html"` in a config rewrites the page of a run at every save.

mod axis;
mod chart;
mod html;
mod metrics;
mod page;
mod run;

use crate::Failure;
use crate::diff;
use crate::output_path::{check_parent, is_foreign_in};
use crate::stderr::tell;
use isobit_proof::atomic::{write_atomically, write_new};
use isobit_proof::difference;
use isobit_proof::layout::REPORT as NAME;
use isobit_training::config::Run;
use isobit_training::sealed;
use page::{Compared, RUNS_MAX, START};
use run::{DeviceMemory, ShownRun};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// Threads that compare the tensors of two runs.
const THREADS: usize = 2;
/// Tensors that a page shows of a difference; `isobit diff` shows more.
const TENSORS_MAX: usize = 6;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Run folders; several are drawn over each other and compared with the first
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The page to write; only a page of `isobit report` is overwritten
    #[arg(short, long, value_name = "FILE", default_value = NAME)]
    output: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.runs.len() > RUNS_MAX {
        let message = format!("{} runs are named; a page shows at most {RUNS_MAX}", arguments.runs.len());
        return Err(Failure::usage(message, "name fewer runs"));
    }
    sealed::check_target(&arguments.output)?;
    check_folder(&arguments.output)?;
    check_target(&arguments.output)?;
    if let Some(run) = arguments.runs.iter().find(|run| is_foreign_in(run, &arguments.output, NAME)) {
        let message = format!("{} is inside {}, which has no such file", arguments.output.display(), run.display());
        return Err(Failure::usage(message, format!("name {NAME} there, or a file elsewhere")));
    }
    let mut notes = Vec::new();
    let runs = arguments.runs.iter().map(|folder| ShownRun::read(folder, &mut notes));
    let runs = runs.collect::<Result<Vec<_>, _>>()?;
    for note in &notes {
        tell(&format!("note: {note}"));
    }
    let compared = runs[1..].iter().map(|other| compare(&runs[0].folder, &other.folder));
    let compared = compared.collect::<Result<Vec<_>, _>>()?;
    let page = page::page(&runs, &compared);
    write_page(&arguments.output, &page)?;
    let mut out = std::io::stdout().lock();
    let written = if arguments.json {
        writeln!(out, "{}", object(arguments, &runs, &compared, page.len()))
    } else {
        writeln!(out, "{}", arguments.output.display())
    };
    written.and_then(|()| out.flush()).map_err(|error| Failure::output(&error))
}

fn object(arguments: &Arguments, runs: &[ShownRun], compared: &[Compared], bytes: usize) -> serde_json::Value {
    let finite = |value: Option<f64>| value.filter(|value| value.is_finite());
    let one = |(index, run): (usize, &ShownRun)| {
        let other = index.checked_sub(1).and_then(|index| compared.get(index));
        serde_json::json!({
            "run": run.folder.display().to_string(), "steps": run.curves.step,
            "last_loss": finite(run.curves.loss.last().map(|(_, loss)| *loss)),
            "best_eval_loss": run.curves.best().map(|(_, loss)| loss), "hash": run.hash,
            "same_as_first": other.map(|other| other.is_same),
            "first_difference": other.and_then(|other| other.step),
        })
    };
    let runs: Vec<_> = runs.iter().enumerate().map(one).collect();
    serde_json::json!({"schema": "isobit.report/1", "page": arguments.output.display().to_string(), "bytes": bytes, "runs": runs})
}

/// The difference of a run from the first, in the words of `isobit diff`.
fn compare(first: &Path, other: &Path) -> Result<Compared, Failure> {
    let found = difference::compare(first, other, THREADS)?;
    let mut text = Vec::new();
    diff::print_text(&mut text, &found, &diff::differing_keys(first, other), TENSORS_MAX)
        .map_err(|error| Failure::output(&error))?;
    Ok(Compared {
        step: found.run.as_ref().and_then(|run| {
            let logged = run.first.as_ref().map(|first| first.step);
            // Runs that log at other steps have only the chain in common.
            logged.or_else(|| run.chain.as_ref().map(|part| part.step))
        }),
        text: String::from_utf8_lossy(&text).into_owned(),
        is_same: found.is_none(),
    })
}

fn write_page(path: &Path, page: &str) -> Result<(), Failure> {
    // Again: it may have appeared meanwhile.
    let put = if check_target(path)? { write_atomically } else { write_new };
    put(path, page.as_bytes()).map_err(Failure::from)
}

/// Refuses a name that is none, and one in a folder that does not exist.
fn check_folder(path: &Path) -> Result<(), Failure> {
    if path == Path::new("-") {
        return Err(Failure::usage("a page is not written to standard output", "name a file with `-o`"));
    }
    check_parent(path)
}

/// Refuses to overwrite anything but a page of ours; says whether there is one.
fn check_target(path: &Path) -> Result<bool, Failure> {
    let failed = |what: String, hint: &str| Failure { code: 7, message: what, hint: Some(hint.to_string()) };
    let other = "move this file away, or name another one with `-o`";
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(failed(format!("cannot write {}: {error}", path.display()), other)),
        Ok(found) if !found.is_file() => {
            return Err(failed(format!("cannot write {}: it is not a regular file", path.display()), other));
        }
        Ok(_) => {}
    }
    let mut begun = Vec::new();
    let read = File::open(path).and_then(|file| file.take(START.len() as u64).read_to_end(&mut begun));
    read.map_err(|error| failed(format!("cannot read {}: {error}", path.display()), other))?;
    if begun == START.as_bytes() {
        return Ok(true);
    }
    Err(failed(format!("{} is not a page of `isobit report` and is not overwritten", path.display()), other))
}

/// Refuses a run that would have to overwrite a file that is not ours, before its first update.
pub(crate) fn check(run: &Run) -> Result<(), Failure> {
    if run.report_to_html { check_target(&run.output_dir.join(NAME)).map(drop) } else { Ok(()) }
}

/// The page of a run in progress.
pub(crate) struct LivePage {
    memory: Vec<DeviceMemory>,
    warned: bool,
}

impl LivePage {
    /// None unless the config asks for it.
    pub(crate) fn of(run: &Run) -> Option<Self> {
        run.report_to_html.then(|| Self { memory: run::memory_by_item(run).unwrap_or_default(), warned: false })
    }

    /// Writes the page. A failure is returned once, to be told, and does not stop the training.
    pub(crate) fn rewrite(&mut self, run: &Run) -> Option<String> {
        let shown = ShownRun::of(run, &self.memory);
        let path = run.output_dir.join(NAME);
        let written = shown.and_then(|shown| write_page(&path, &page::page(&[shown], &[])));
        let failure = written.err().filter(|_| !self.warned)?;
        self.warned = true;
        Some(format!("warning: no page is written, training goes on: {}", failure.message))
    }
}
