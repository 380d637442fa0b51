//! `isobit diff`: the differences between two files, adapters, checkpoints, models or runs, from
//! this or any other tool.
//!
//! A summary comes first: `max=0 nonzero=0` when nothing differs, and only then. For two runs the
//! step at which they diverge and what could explain it follow, then a line for each of the first
//! differing tensors. The exit code is 0 or 1.

use crate::Failure;
use crate::stderr::tell;
use isobit_proof::difference::{
    self, ChainDifference, Difference, KeyDifference, MetricDifference, RunDifference, Shown, Tally, TensorDifference,
    TensorMismatch, Values, decimal,
};
use isobit_proof::name::harmless;
use isobit_proof::receipt::{self, Receipt};
use isobit_proof::safetensors::Dtype;
use isobit_proof::{Manifest, chain};
use isobit_training::checkpoint::{FINAL, RESOLVED};
use isobit_training::config::{self, KeyOfRuns};
use serde::Serialize;
use serde_json::{Value, json};
use std::cmp::Ordering;
use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Characters printed of a tensor's name or a JSON value.
const NAME_MAX: usize = 4096;
const VALUE_MAX: usize = 160;
/// Tensors printed by default.
const TENSORS_MAX: usize = 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// A safetensors file, or a folder: an adapter, a checkpoint, a model or a run; or a receipt
    a: PathBuf,
    /// The file or folder to compare it with
    b: PathBuf,
    /// Print a line for every differing tensor, not only the first 20
    #[arg(long)]
    all: bool,
    /// Print one JSON object with every differing tensor
    #[arg(long)]
    json: bool,
    /// Reading threads; does not affect the result
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let sides = [&arguments.a, &arguments.b];
    if sides.iter().any(|path| is_receipt(path)) {
        let [a, b] = sides.map(|path| receipt_of(path));
        return of_receipts(arguments, &a?, &b?);
    }
    if let Some(path) = sides.into_iter().find(|path| path.is_file() && path.ends_with(chain::NAME)) {
        let message = format!("{} is the chain of a run, not a file of tensors", path.display());
        return Err(Failure::usage(message, "name the run folders: their chains are compared too"));
    }
    for (side, path) in ["A", "B"].into_iter().zip(sides) {
        for folder in [path, &path.join(FINAL)] {
            if let Err(error) = Manifest::check(folder) {
                tell(&format!("note: {side} is not as it was written: {error}"));
            }
        }
    }
    let difference = difference::compare(&arguments.a, &arguments.b, usize::from(arguments.threads))?;
    let config = if difference.run.is_some() { differing_keys(&arguments.a, &arguments.b) } else { Vec::new() };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let printed = if arguments.json {
        print_json(&mut out, arguments, &difference, &config)
    } else {
        print_text(&mut out, &difference, &config, if arguments.all { usize::MAX } else { TENSORS_MAX })
    };
    printed.and_then(|()| out.flush()).map_err(|error| Failure::output(&error))?;
    if difference.is_none() { Ok(()) } else { Err(Failure::difference()) }
}

fn is_receipt(path: &Path) -> bool {
    path.is_file() && path.file_name().is_some_and(|name| name == receipt::NAME)
}

/// A receipt, or that of a folder, with its path.
fn receipt_of(path: &Path) -> Result<(PathBuf, Receipt), Failure> {
    let path = if is_receipt(path) { path.to_path_buf() } else { path.join(receipt::NAME) };
    if !path.is_file() {
        let message = format!("{} does not exist: a receipt is compared with a receipt", path.display());
        return Err(Failure::usage(message, "name two receipts, or two folders"));
    }
    let receipt = Receipt::read_file(&path)?;
    Ok((path, receipt))
}

/// What differs between two receipts.
fn of_receipts(
    arguments: &Arguments,
    (a_path, a): &(PathBuf, Receipt),
    (b_path, b): &(PathBuf, Receipt),
) -> Result<(), Failure> {
    let lines = difference::receipts((a_path, a), (b_path, b));
    let mut out = std::io::stdout().lock();
    let printed = if arguments.json {
        let object = json!({ "schema": "isobit.diff/1", "a": arguments.a.display().to_string(),
            "b": arguments.b.display().to_string(), "kinds": ["receipt", "receipt"], "equal": lines.is_empty(),
            "digest_a": a.digest, "digest_b": b.digest, "receipts": lines });
        writeln!(out, "{object}")
    } else if lines.is_empty() {
        writeln!(out, "the same receipt: {}", a.digest)
    } else {
        lines.iter().try_for_each(|line| writeln!(out, "{line}"))
    };
    printed.map_err(|error| Failure::output(&error))?;
    if lines.is_empty() { Ok(()) } else { Err(Failure::difference()) }
}

/// The config keys in which two runs differ, those that can affect the weights first. A config that
/// is missing or cannot be read has none: the weights are compared all the same.
pub(crate) fn differing_keys(a: &Path, b: &Path) -> Vec<KeyOfRuns> {
    let read = |run: &Path| config::read(&run.join(RESOLVED), &[]).ok().map(|settled| settled.run);
    let (Some(a), Some(b)) = (read(a), read(b)) else { return Vec::new() };
    let mut keys = a.all_differences(&b);
    // Two runs never share it.
    keys.retain(|difference| difference.key != "output_dir");
    keys.sort_by_key(|difference| !difference.influences);
    keys
}

/// Whether a key names a folder or a file whose contents influence the weights.
pub(crate) fn names_contents(key: &str) -> bool {
    key == "base_model" || key == "adapter.resume_from" || key.ends_with("path")
}

fn kind(kind: &str) -> &str {
    match kind {
        "adapter" => "an adapter",
        "model" => "a model",
        other => other,
    }
}

pub(crate) fn print_text(
    out: &mut impl Write,
    difference: &Difference,
    config: &[KeyOfRuns],
    most: usize,
) -> std::io::Result<()> {
    writeln!(out, "{}", summary(difference))?;
    if let Some(run) = &difference.run {
        print_run(out, run)?;
    }
    if !difference.is_none() {
        for KeyOfRuns { key, values: [a, b], influences } in config {
            let note = match (influences, names_contents(key)) {
                (true, _) => "",
                (false, true) => " (the contents count, not the path)",
                (false, false) => " (does not affect the weights)",
            };
            let [a, b] = [a, b].map(|value| harmless(value, VALUE_MAX));
            writeln!(out, "config {key}: {a} against {b}{note}")?;
        }
    }
    // Equal results of other inputs are worth knowing too.
    for line in difference.run.iter().flat_map(|run| &run.inputs) {
        writeln!(out, "{line}")?;
    }
    for what in difference.run.iter().flat_map(|run| &run.damaged) {
        writeln!(out, "note: not compared: {what}; `isobit verify` says more")?;
    }
    let [a, b] = difference.kinds;
    if a != b {
        writeln!(out, "A holds {}, B {}", kind(a), kind(b))?;
    }
    for (side, files) in ["A", "B"].into_iter().zip(&difference.left_out).filter(|(_, files)| !files.is_empty()) {
        writeln!(out, "note: {side} is a checkpoint, compared without {}", files.join(" and "))?;
    }
    for (side, files) in [("A", &difference.only_in_first), ("B", &difference.only_in_second)] {
        for file in files {
            writeln!(out, "{}: only in {side}", harmless(file, NAME_MAX))?;
        }
    }
    for (file, document) in &difference.documents {
        for KeyDifference { key, values } in &document.keys {
            let [a, b] = values.each_ref().map(|value| shown(value.as_ref()));
            writeln!(out, "{} {}: {a} against {b}", harmless(file, NAME_MAX), harmless(key, NAME_MAX))?;
        }
        let more = document.count - document.keys.len() as u64;
        if more > 0 {
            writeln!(out, "{}: {more} more", harmless(file, NAME_MAX))?;
        }
    }
    print_tensors(out, difference, most)
}

/// Prints the first `most` of them, layer 2 before layer 10, and how many more there are.
fn print_tensors(out: &mut impl Write, difference: &Difference, most: usize) -> std::io::Result<()> {
    let mut all: Vec<(&String, &TensorDifference)> =
        difference.sets.iter().flat_map(|(set, tensors)| tensors.iter().map(move |tensor| (set, tensor))).collect();
    all.sort_by(|(a_set, a), (b_set, b)| a_set.cmp(b_set).then_with(|| natural(&a.name, &b.name)));
    for (set, tensor) in all.iter().take(most) {
        // The file matters only if there are several.
        if difference.sets.len() > 1 {
            write!(out, "{} ", harmless(set, NAME_MAX))?;
        }
        writeln!(out, "{}: {}", harmless(&tensor.name, NAME_MAX), describe(&tensor.kind))?;
    }
    match all.len().saturating_sub(most) {
        0 => Ok(()),
        more => writeln!(out, "{more} more tensors: `isobit diff --all` prints them"),
    }
}

/// Natural order: numbers inside names by value, everything else by bytes.
fn natural(a: &str, b: &str) -> Ordering {
    let (mut x, mut y) = (a.as_bytes(), b.as_bytes());
    while let (Some(&first), Some(&second)) = (x.first(), y.first()) {
        if first.is_ascii_digit() && second.is_ascii_digit() {
            let (number, after) = leading_number(x);
            let (other, after_other) = leading_number(y);
            let order = number.len().cmp(&other.len()).then_with(|| number.cmp(other));
            if order.is_ne() {
                return order;
            }
            (x, y) = (after, after_other);
        } else if first == second {
            (x, y) = (&x[1..], &y[1..]);
        } else {
            return first.cmp(&second);
        }
    }
    // Names that differ only in leading zeros need an order too.
    x.len().cmp(&y.len()).then_with(|| a.cmp(b))
}

/// The leading digits of a name without leading zeros, and the rest.
fn leading_number(name: &[u8]) -> (&[u8], &[u8]) {
    let end = name.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(name.len());
    let start = name[..end].iter().position(|byte| *byte != b'0').unwrap_or(end);
    (&name[start..end], &name[end..])
}

fn print_run(out: &mut impl Write, run: &RunDifference) -> std::io::Result<()> {
    if let Some(MetricDifference { step, same_until, field, values }) = &run.first {
        let [a, b] = values.each_ref().map(|value| shown(value.as_ref()));
        let (from, field) = (same_until + 1, harmless(field, NAME_MAX));
        if from < *step {
            let every = step - same_until;
            writeln!(
                out,
                "first difference between steps {from} and {step} (logged every {every}): {field} {a} against {b}"
            )?;
        } else {
            writeln!(out, "first differing step {step}: {field} {a} against {b}")?;
        }
    }
    if let Some(chain) = &run.chain {
        writeln!(out, "{chain}")?;
    }
    let [a, b] = run.steps;
    if a != b {
        let same = if run.first.is_none() && run.compared > 0 { ", the same as far as both go" } else { "" };
        writeln!(out, "steps: {a} against {b}{same}")?;
    }
    match run.tensors.as_deref() {
        Some(FINAL) => Ok(()),
        Some(folder) => writeln!(out, "tensors of {}: one of the runs has no final ones", harmless(folder, NAME_MAX)),
        None => writeln!(out, "no tensors compared: the runs share no checkpoint"),
    }
}

fn shown(value: Option<&Value>) -> String {
    value.map_or("absent".to_string(), |value| harmless(&value.to_string(), VALUE_MAX))
}

fn describe(kind: &TensorMismatch) -> String {
    match kind {
        TensorMismatch::OnlyInFirst => "only in A".to_string(),
        TensorMismatch::OnlyInSecond => "only in B".to_string(),
        TensorMismatch::Shape { first, second } => format!("shape {first:?} against {second:?}"),
        TensorMismatch::Dtype { first, second } => format!("{first} against {second}, not compared"),
        TensorMismatch::Values(values) => describe_values(values),
    }
}

fn describe_values(Values { dtypes: [a, b], shape, count, tally, first }: &Values) -> String {
    let note = if a == b { String::new() } else { format!(" ({a} against {b}, by value)") };
    let mut text = format!("max={} nonzero={} of {count}", decimal(tally.max), tally.nonzero);
    if let Some(ulps) = tally.ulps {
        let _ = write!(text, " ulps={ulps}");
    }
    if tally.nan > 0 {
        let _ = write!(text, " nan={}", tally.nan);
    }
    if let (Some(index), Some([x, y])) = (tally.first, first) {
        let _ = write!(text, " first={:?} {} against {}", coordinates(index, shape), element(x), element(y));
    }
    text + &note
}

fn element(shown: &Shown) -> String {
    match &shown.value {
        Some(value) => format!("{value} ({})", shown.hex),
        None => shown.hex.clone(),
    }
}

/// Row-major position as coordinates.
pub(crate) fn coordinates(index: u64, shape: &[usize]) -> Vec<u64> {
    let mut rest = index;
    let mut place: Vec<u64> = Vec::with_capacity(shape.len());
    for &dimension in shape.iter().rev() {
        place.push(rest % dimension as u64);
        rest /= dimension as u64;
    }
    place.reverse();
    place
}

/// Exactly `max=0 nonzero=0` when nothing differs, and only then: where no element differs, but
/// something else does, it begins with how many tensors were compared.
fn summary(difference: &Difference) -> String {
    let Tally { max, nonzero, ulps, .. } = difference.total();
    let mut words = Vec::new();
    if nonzero > 0 || difference.is_none() {
        words.push(format!("max={} nonzero={nonzero}", decimal(max)));
    }
    if difference.is_none() {
        return words.concat();
    }
    words.extend(ulps.map(|ulps| format!("ulps={ulps}")));
    let (compared, count) = (difference.compared_count(), difference.tensor_count);
    if nonzero == 0 || compared < count {
        words.push(format!("compared={compared} of {count}"));
    }
    let differing = difference.tensors().filter(|tensor| tensor.kind.is_difference()).count();
    words.push(format!("tensors={differing} of {count}"));
    if let Some(first) = difference.run.as_ref().and_then(|run| run.first.as_ref()) {
        let from = first.same_until + 1;
        words.push(if from < first.step {
            format!("first_step={from}..{}", first.step)
        } else {
            format!("first_step={}", first.step)
        });
    }
    let files = difference.only_in_first.len() + difference.only_in_second.len() + difference.documents.len();
    if files > 0 {
        words.push(format!("files={files}"));
    }
    words.join(" ")
}

/// The object printed by `--json`. Numbers that JSON cannot represent become the string `inf`.
#[derive(Serialize)]
struct Report<'a> {
    schema: &'static str,
    a: String,
    b: String,
    equal: bool,
    max: Value,
    nonzero: u64,
    ulps: Option<u64>,
    kinds: [&'static str; 2],
    tensor_count: u64,
    tensors_compared: u64,
    tensors: Vec<Value>,
    json: Vec<Value>,
    only_in_a: &'a [String],
    only_in_b: &'a [String],
    /// For two runs.
    run: Option<Value>,
}

fn print_json(
    out: &mut impl Write,
    arguments: &Arguments,
    difference: &Difference,
    config: &[KeyOfRuns],
) -> std::io::Result<()> {
    let total = difference.total();
    let tensors = difference.sets.iter().flat_map(|(set, tensors)| tensors.iter().map(move |tensor| line(set, tensor)));
    let keys = difference.documents.iter().flat_map(|(file, document)| {
        document.keys.iter().map(move |KeyDifference { key, values: [a, b] }| {
            json!({ "file": file, "key": key, "in_a": a.is_some(), "in_b": b.is_some(), "a": a, "b": b })
        })
    });
    let report = Report {
        schema: "isobit.diff/1",
        a: arguments.a.display().to_string(),
        b: arguments.b.display().to_string(),
        equal: difference.is_none(),
        max: number(total.max),
        nonzero: total.nonzero,
        ulps: total.ulps,
        kinds: difference.kinds,
        tensor_count: difference.tensor_count,
        tensors_compared: difference.compared_count(),
        tensors: tensors.collect(),
        json: keys.collect(),
        only_in_a: &difference.only_in_first,
        only_in_b: &difference.only_in_second,
        run: difference.run.as_ref().map(|run| run_object(run, config)),
    };
    writeln!(out, "{}", serde_json::to_string(&report)?)
}

fn run_object(run: &RunDifference, config: &[KeyOfRuns]) -> Value {
    let first = run.first.as_ref().map(|MetricDifference { step, same_until, field, values: [a, b] }| {
        json!({ "step": step, "same_until": same_until, "field": field, "a": a, "b": b })
    });
    let config = config.iter().map(|KeyOfRuns { key, values: [a, b], influences }| {
        json!({ "key": key, "a": a, "b": b, "affects_weights": influences })
    });
    let config: Vec<Value> = config.collect();
    let chain = run.chain.as_ref().map(
        |ChainDifference { step, item, tensors }| json!({ "step": step, "item": item.name(), "tensors": tensors }),
    );
    let [a, b] = run.steps;
    json!({ "chain": chain, "inputs": run.inputs, "damaged": run.damaged, "steps_a": a, "steps_b": b, "lines_compared": run.compared, "first_difference": first,
        "tensors": run.tensors, "config": config })
}

fn number(value: f64) -> Value {
    serde_json::Number::from_f64(value).map_or_else(|| Value::from(decimal(value)), Value::Number)
}

fn line(set: &str, TensorDifference { name, kind }: &TensorDifference) -> Value {
    match kind {
        TensorMismatch::OnlyInFirst => json!({ "file": set, "name": name, "kind": "only_in_a" }),
        TensorMismatch::OnlyInSecond => json!({ "file": set, "name": name, "kind": "only_in_b" }),
        TensorMismatch::Shape { first, second } => {
            json!({ "file": set, "name": name, "kind": "shape", "a": first, "b": second })
        }
        TensorMismatch::Dtype { first, second } => {
            json!({ "file": set, "name": name, "kind": "dtype", "a": first.name(), "b": second.name() })
        }
        TensorMismatch::Values(Values { dtypes, shape, count, tally, first }) => {
            let element = |Shown { hex, value }: &Shown| json!({ "hex": hex, "value": value });
            let first = tally
                .first
                .zip(first.as_ref())
                .map(|(index, [a, b])| json!({ "index": coordinates(index, shape), "a": element(a), "b": element(b) }));
            json!({
                "file": set, "name": name, "kind": "values", "shape": shape, "count": count, "dtypes": dtypes.map(Dtype::name),
                "max": number(tally.max), "nonzero": tally.nonzero, "ulps": tally.ulps, "nan": tally.nan, "first": first,
            })
        }
    }
}
