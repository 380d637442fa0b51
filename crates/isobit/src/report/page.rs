//! The page as a whole: one HTML file that needs nothing else, no script and no network. Everything
//! that comes from a file is escaped where it is put in.

use super::axis::{Base, grouped, short};
use super::chart::{Chart, Point, Series};
use super::html::{escaped, escaped_lines, put};
use super::metrics::Curves;
use super::run::{DeviceMemory, ShownConfig, ShownRun};
use crate::diff;
use crate::samples::Sample;
use crate::units::{size, time};
use std::collections::BTreeSet;
use std::iter;

const STYLE: &str = include_str!("page.css");
/// How a page of ours begins: no other file is overwritten.
pub(super) const START: &str = "<!doctype html>\n<!-- isobit.report/1 -->\n";
/// Colours there are.
const COLOURS: usize = 6;
/// Letters for runs that are shown together.
const LETTERS: [&str; 26] = [
    "A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K", "L", "M", "N", "O", "P", "Q", "R", "S", "T", "U", "V", "W",
    "X", "Y", "Z",
];
/// BOUND: runs of a page.
pub(super) const RUNS_MAX: usize = LETTERS.len();

/// How a run differs from the first one.
pub(super) struct Compared {
    /// The first step that differs: of the metrics, or of the chain if the runs log at other steps.
    pub(super) step: Option<u64>,
    /// As `isobit diff` prints it.
    pub(super) text: String,
    pub(super) is_same: bool,
}

/// The page of one run, or of several and their differences from the first.
pub(super) fn page(runs: &[ShownRun], compared: &[Compared]) -> String {
    let title = runs.iter().map(|run| escaped(&run.name)).collect::<Vec<_>>().join(" · ");
    let mut out = String::from(START);
    put!(
        out,
        "<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>{title} – Isobit</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
    );
    if let [run] = runs {
        put_header(&mut out, run);
    } else {
        put_runs(&mut out, runs);
        put_differences(&mut out, runs, compared);
    }
    put_charts(&mut out, runs, compared);
    put_samples(&mut out, runs);
    put_memory(&mut out, runs);
    put_config(&mut out, runs);
    put!(out, "<footer>Isobit {}</footer>\n</body>\n</html>\n", env!("CARGO_PKG_VERSION"));
    out
}

/// The name of a run, and its figures at a glance.
fn put_header(out: &mut String, run: &ShownRun) {
    let curves = &run.curves;
    put!(out, "<header><h1>{}</h1>", escaped(&run.name));
    if let Some(ShownConfig { model, adapter, .. }) = &run.config {
        put!(out, "<p class=\"soft\">{} · {}</p>", escaped(model), escaped(adapter));
    }
    put!(out, "</header>\n<dl class=\"tiles\">\n");
    let mut tile = |name: &str, value: &str, note: &str, class: &str| {
        put!(out, "<div><dt>{name}</dt><dd{class}>{value}");
        if !note.is_empty() {
            put!(out, "<small>{note}</small>");
        }
        put!(out, "</dd></div>\n");
    };
    if let (Some((_, first)), Some((_, last))) = (curves.loss.first(), curves.loss.last()) {
        tile("Loss", &short(*last), &format!("from {}", short(*first)), "");
    }
    if let Some((step, loss)) = curves.best() {
        tile("Held-out loss", &short(loss), &format!("best, at step {}", count(step)), "");
    }
    let unfinished = run.receipt.as_ref().is_some_and(|receipt| !receipt.made.finished);
    let end = if unfinished { ", not finished" } else { "" };
    tile("Updates", &count(curves.step), &format!("{} epochs{end}", grouped(curves.epoch, 2)), "");
    tile("Tokens", &count(curves.tokens), "", "");
    if let Some(rate) = curves.typical_rate() {
        tile("Tokens/s", &short(rate), "median", "");
    }
    tile("Time", &duration(curves.seconds), "of updates and evaluations", "");
    match &run.hash {
        Some(hash) => tile("Weights", &escaped(hash), "BLAKE3 of the final weights", " class=\"mono\""),
        None => tile("Weights", "–", "no final weights", ""),
    }
    if let Some(receipt) = &run.receipt {
        let digest = receipt.digest.to_string();
        let note = match receipt.made.updates {
            1 => "of 1 update; isobit verify checks it".to_string(),
            updates => format!("of {} updates; isobit verify checks it", count(updates)),
        };
        tile("Receipt", &digest[..32], &note, " class=\"mono\"");
    }
    put!(out, "</dl>\n");
}

/// Several runs side by side.
fn put_runs(out: &mut String, runs: &[ShownRun]) {
    put!(
        out,
        "<header><h1>{} runs</h1></header>\n<section class=\"card scroll\"><table class=\"runs\">\n<thead><tr>",
        runs.len()
    );
    put!(out, "<th></th><th>run</th><th>model</th>");
    for name in ["updates", "first loss", "last loss", "best held-out", "tokens/s", "time"] {
        put!(out, "<th class=\"num\">{name}</th>");
    }
    put!(out, "<th>weights</th><th>receipt</th></tr></thead>\n");
    for (index, ShownRun { name, curves, config, hash, receipt, .. }) in runs.iter().enumerate() {
        let loss = |point: Option<&Point>| point.map_or("–".to_string(), |(_, value)| short(*value));
        let model = config.as_ref().map_or(String::new(), |config| escaped(&config.model));
        put!(
            out,
            "<tr><td class=\"s{}\"><b>{}</b></td><td>{}</td><td>{model}</td>",
            index % COLOURS,
            LETTERS[index],
            escaped(name)
        );
        let cells = [
            count(curves.step),
            loss(curves.loss.first()),
            loss(curves.loss.last()),
            loss(curves.best().as_ref()),
            curves.typical_rate().map_or("–".to_string(), short),
            duration(curves.seconds),
        ];
        for cell in cells {
            put!(out, "<td class=\"num\">{cell}</td>");
        }
        let receipt = receipt.as_ref().map(|receipt| receipt.digest.to_string()[..32].to_string());
        for digest in [hash, &receipt] {
            put!(out, "<td class=\"mono\">{}</td>", digest.as_deref().map_or("–".to_string(), escaped));
        }
        put!(out, "</tr>\n");
    }
    put!(out, "</table></section>\n");
}

fn put_differences(out: &mut String, runs: &[ShownRun], compared: &[Compared]) {
    put!(out, "<section class=\"card\"><h2>First difference</h2>\n");
    for (index, Compared { text, is_same, .. }) in compared.iter().enumerate() {
        let (a, b) = (LETTERS[0], LETTERS[index + 1]);
        let mut lines = text.lines();
        let first =
            if *is_same { "the same bits in every step and every tensor" } else { lines.next().unwrap_or_default() };
        put!(
            out,
            "<p><b class=\"s0\">{a}</b> and <b class=\"s{}\">{b}</b>: {}</p>\n",
            (index + 1) % COLOURS,
            escaped(first)
        );
        let rest: Vec<&str> = lines.collect();
        if !is_same && !rest.is_empty() {
            let open = if runs.len() == 2 { " open" } else { "" };
            put!(
                out,
                "<details{open}><summary>isobit diff {} {}</summary>",
                escaped(&runs[0].name),
                escaped(&runs[index + 1].name)
            );
            put!(out, "<pre>{}</pre></details>\n", escaped_lines(&rest.join("\n")));
        }
    }
    put!(out, "</section>\n");
}

fn put_charts(out: &mut String, runs: &[ShownRun], compared: &[Compared]) {
    let first = compared.iter().filter_map(|compared| compared.step).min();
    let mark = || first.map(|step| (step, format!("first difference, step {}", count(step))));
    let of = |pick: fn(&Curves) -> &Vec<Point>, held_out: bool| -> Vec<Series> {
        let one = |(index, run): (usize, &ShownRun)| Series {
            colour: if runs.len() == 1 && held_out { 1 } else { index % COLOURS },
            label: label(runs.len(), index, held_out),
            name: match (runs.len(), held_out) {
                (1, false) => "last".to_string(),
                (1, true) => "held-out".to_string(),
                (_, false) => format!("{} {}", LETTERS[index], run.name),
                (_, true) => format!("{} held-out", LETTERS[index]),
            },
            dashed: held_out && runs.len() > 1,
            points: pick(&run.curves).clone(),
        };
        runs.iter().enumerate().map(one).collect()
    };
    let mut loss = of(|curves| &curves.loss, false);
    if let [only] = &mut loss[..] {
        only.name = "train".to_string();
        only.label = "train".to_string();
    }
    loss.extend(of(|curves| &curves.eval_loss, true));
    let chart = |title, base, tall, series, mark| Chart { title, base, tall, series, mark }.html();
    put!(out, "<section>{}</section>\n", chart("Loss", Base::Free, true, loss, mark()));
    put!(out, "<section class=\"grid\">");
    out.push_str(&chart("Learning rate", Base::Linear, false, of(|curves| &curves.learning_rate, false), None));
    out.push_str(&chart("Gradient norm", Base::Zero, false, of(|curves| &curves.grad_norm, false), None));
    out.push_str(&chart("Tokens/s", Base::Linear, false, of(|curves| &curves.tokens_per_s, false), None));
    put!(out, "</section>\n");
    if runs.iter().all(|run| run.curves.loss.is_empty() && run.curves.eval_loss.is_empty()) {
        put!(out, "<p class=\"note\">Nothing is logged yet.</p>\n");
    }
}

/// The text at the end of a curve; a single curve needs none.
fn label(runs: usize, index: usize, held_out: bool) -> String {
    match (runs, held_out) {
        (1, false) => String::new(),
        (1, true) => "held-out".to_string(),
        (_, false) => LETTERS[index].to_string(),
        (_, true) => format!("{} held-out", LETTERS[index]),
    }
}

/// Prompts with the texts before and after training.
fn put_samples(out: &mut String, runs: &[ShownRun]) {
    if runs.iter().all(|run| run.samples.is_empty()) {
        return;
    }
    put!(out, "<section class=\"card\"><h2>Samples</h2>\n<p class=\"note\">greedy, before and after training</p>\n");
    for (index, run) in runs.iter().enumerate() {
        for Sample { prompt, before, after } in &run.samples {
            let letter = format!("<b class=\"s{}\">{}</b> ", index % COLOURS, LETTERS[index]);
            let letter = if runs.len() > 1 { letter } else { String::new() };
            put!(out, "<div class=\"sample\"><h3>{letter}{}</h3>\n<div class=\"pair\">", escaped_lines(prompt));
            for (name, text) in [("before", before), ("after", after)] {
                let text = if text.is_empty() { "(ended at once)" } else { text.as_str() };
                put!(out, "<div><h4>{name}</h4><pre>{}</pre></div>", escaped_lines(text));
            }
            put!(out, "</div></div>\n");
        }
    }
    put!(out, "</section>\n");
}

fn put_memory(out: &mut String, runs: &[ShownRun]) {
    if runs.iter().all(|run| run.memory.is_empty()) {
        return;
    }
    put!(out, "<section class=\"grid\">");
    for (index, run) in runs.iter().enumerate() {
        let letter = if runs.len() > 1 { format!(" of {}", LETTERS[index]) } else { String::new() };
        for DeviceMemory { device, items, bytes_peak, beyond_step } in &run.memory {
            let most = items.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0).max(1);
            put!(
                out,
                "<div class=\"card\"><h2>Planned memory{letter} on {}</h2>\n<table class=\"memory\">",
                escaped(device)
            );
            for (item, bytes) in items {
                let width = *bytes as f64 / most as f64 * 100.0;
                put!(
                    out,
                    "<tr><th>{item}</th><td><div class=\"bar\" style=\"width:{width:.2}%\"></div></td>\
                     <td class=\"num\">{}</td></tr>\n",
                    size(*bytes)
                );
            }
            for (name, bytes) in iter::once(&("peak of a step", *bytes_peak)).chain(beyond_step) {
                let class = if ["peak of a step", "needed"].contains(name) { " class=\"sum\"" } else { "" };
                put!(out, "<tr{class}><th>{name}</th><td></td><td class=\"num\">{}</td></tr>\n", size(*bytes));
            }
            put!(out, "</table></div>");
        }
    }
    put!(out, "</section>\n");
}

/// Every key with its value in each run.
fn put_config(out: &mut String, runs: &[ShownRun]) {
    let configs: Vec<Option<&ShownConfig>> = runs.iter().map(|run| run.config.as_ref()).collect();
    let all = configs.iter().flatten().flat_map(|config| &config.keys);
    let keys: BTreeSet<(bool, &str, bool)> =
        all.map(|key| (key.name.contains('.'), key.name.as_str(), key.influences)).collect();
    if keys.is_empty() {
        return;
    }
    put!(
        out,
        "<section class=\"card\"><h2>Config</h2>\n<p class=\"note\"><span class=\"dot\">●</span> can influence the weights, <span class=\"dot\">◐</span> by its contents"
    );
    if runs.len() > 1 {
        put!(out, "; values that differ are highlighted");
    }
    put!(out, "</p>\n<div class=\"{}\">", if runs.len() > 1 { "scroll" } else { "columns" });
    let keys: Vec<(bool, &str, bool)> = keys.into_iter().collect();
    for section in keys.chunk_by(|a, b| heading(a.1) == heading(b.1)) {
        put_section_start(out, heading(section[0].1), runs.len());
        for (_, name, influences) in section {
            put_key(out, name, *influences, &configs);
        }
        put!(out, "</table></div>");
    }
    put!(out, "</div></section>\n");
}

/// The section of a key.
fn heading(name: &str) -> &str {
    name.rsplit_once('.').map_or("run", |(heading, _)| heading)
}

fn put_key(out: &mut String, name: &str, influences: bool, configs: &[Option<&ShownConfig>]) {
    let values: Vec<Option<&str>> = configs.iter().map(|config| value(*config, name)).collect();
    let row = if values.windows(2).any(|pair| pair[0] != pair[1]) { " class=\"differs\"" } else { "" };
    let (dot, mark) = match (influences, diff::names_contents(name)) {
        (true, _) => ("dot", '●'),
        (false, true) => ("dot", '◐'),
        (false, false) => ("none", '●'),
    };
    let short_name = name.rsplit('.').next().unwrap_or(name);
    // Long names break between words on a narrow screen.
    let short_name = escaped(short_name).replace('_', "_<wbr>");
    put!(out, "<tr{row}><th><span class=\"{dot}\">{mark}</span> {short_name}</th>");
    for value in values {
        put!(out, "<td><code>{}</code></td>", value.map_or("–".to_string(), escaped));
    }
    put!(out, "</tr>\n");
}

fn put_section_start(out: &mut String, heading: &str, runs: usize) {
    put!(out, "<div><h3>{}</h3><table class=\"config\">", escaped(heading));
    if runs > 1 {
        put!(out, "<thead><tr><th></th>");
        for letter in &LETTERS[..runs] {
            put!(out, "<th>{letter}</th>");
        }
        put!(out, "</tr></thead>");
    }
}

fn value<'a>(config: Option<&'a ShownConfig>, name: &str) -> Option<&'a str> {
    config?.keys.iter().find(|key| key.name == name).map(|key| key.value.as_str())
}

/// Seconds; short runs need tenths, or thousandths.
fn duration(seconds: f64) -> String {
    match seconds {
        0.0..1.0 => format!("{:.0} ms", seconds * 1000.0),
        1.0..60.0 => format!("{seconds:.1}s"),
        _ => time(seconds),
    }
}

fn count(number: u64) -> String {
    grouped(number as f64, 0)
}
