//! The end of `isobit train`: the result in a few lines for people and in one event for programs,
//! and the next command to type.

use crate::Failure;
use crate::audit::Agreed;
use crate::progress::Console;
use crate::stderr::tell;
use crate::units::{size, time};
use isobit_numerics::slices::Profile;
use isobit_proof::hash::Hash;
use isobit_proof::name::counted;
use isobit_proof::{FileError, Manifest};
use isobit_training::checkpoint::{self, ADAPTER, FINAL};
use isobit_training::config::{Adapter, Run};
use isobit_training::data_record;
use isobit_training::prepare::{Prepared, RunError};
use isobit_training::summary::{Measured, Summary, Verdict, even_loss};
use serde_json::json;
use std::path::Path;

/// The result of a finished run.
struct Ending {
    step: u64,
    early: bool,
    /// The checkpoint whose weights `final` holds, and whether its evaluation was the best.
    final_step: u64,
    is_best: bool,
    /// Hash of the weights in `final`, as shown by `demo`.
    hash: String,
    seconds: f64,
    tokens: usize,
    /// Tokens and seconds of updates alone.
    updates: (f64, f64),
    from_step: u64,
    peak_bytes: u64,
    /// The peak of the own memory of each device, by name, where it has any.
    devices: Vec<(String, Option<u64>)>,
    summary: Summary,
    vocabulary: usize,
    ranks: usize,
    /// Seconds of rank 0 spent waiting for the others.
    communication: f64,
    /// What audits of this process found to agree.
    agreed: Option<Agreed>,
}

/// Reports how the run ended.
pub(crate) fn finished(
    prepared: &Prepared,
    console: &Console,
    (step, early): (u64, bool),
    ranks: usize,
    quiet: bool,
) -> Result<(), Failure> {
    let run = &prepared.run;
    let ending = ending(prepared, console, step, early)?;
    let ending = Ending { ranks, ..ending };
    console.event(event(run, &ending));
    if let Some(warning) = warning(&ending) {
        tell(&warning);
    }
    if !quiet {
        for line in lines(run, &ending) {
            tell(&line);
        }
    }
    Ok(())
}

fn ending(prepared: &Prepared, console: &Console, step: u64, early: bool) -> Result<Ending, RunError> {
    let (run, vocabulary) = (&prepared.run, prepared.model.vocabulary);
    let best = checkpoint::best(&run.output_dir)?;
    let final_step = best.filter(|_| run.training.load_best_model_at_end).map_or(step, |best| best.step);
    Ok(Ending {
        step,
        early,
        final_step,
        is_best: best.is_some_and(|best| best.step == final_step),
        hash: hash(&run.output_dir.join(FINAL))?,
        seconds: console.seconds_of_training(),
        tokens: console.tokens,
        updates: console.logged,
        from_step: console.from_step,
        peak_bytes: crate::bench::peak_resident_bytes(),
        devices: console.devices(),
        summary: Summary::of(&run.output_dir, vocabulary)?,
        vocabulary,
        ranks: 1,
        communication: console.communication,
        agreed: console.agreed().cloned(),
    })
}

/// The first half of BLAKE3 of the weights, from the manifest, which was computed when they were
/// written. Weights in several files have the hash of their hashes.
pub(crate) fn hash(folder: &Path) -> Result<String, FileError> {
    let manifest = Manifest::read(folder)?;
    let is_weights = |name: &str| Path::new(name).extension().is_some_and(|kind| kind == "safetensors");
    let hashes: Vec<Hash> = if let Some(adapter) = manifest.files.get(ADAPTER) {
        vec![adapter.blake3]
    } else {
        manifest.files.iter().filter(|(name, _)| is_weights(name)).map(|(_, file)| file.blake3).collect()
    };
    let hash = match hashes[..] {
        [hash] => hash,
        _ => Hash::of_bytes(hashes.iter().map(Hash::to_string).collect::<String>().as_bytes()),
    };
    Ok(hash.to_string()[..32].to_string())
}

impl Ending {
    /// Of updates, without evaluations and saves; None if this process did none.
    fn tokens_per_second(&self) -> Option<f64> {
        let (tokens, seconds) = self.updates;
        (tokens > 0.0).then(|| tokens / seconds.max(1e-9))
    }
}

fn lines(run: &Run, ending: &Ending) -> Vec<String> {
    let Ending { step, from_step, summary, .. } = ending;
    let output = run.output_dir.display();
    let mut lines = Vec::new();
    let early = if ending.early { ", stopped early" } else { "" };
    let resumed = if *from_step > 0 { format!(" ({from_step} before resuming)") } else { String::new() };
    let speed = ending.tokens_per_second().map_or(String::new(), |speed| format!(", {speed:.0} tokens/s in updates"));
    let device = on_devices(&ending.devices);
    lines.push(format!(
        "finished after {}{early}{resumed} in {}{speed}; peak memory {}, with pages of weight files{device}",
        counted(*step, "update"),
        seconds(ending.seconds),
        size(ending.peak_bytes)
    ));
    if ending.ranks > 1 {
        let share = 100.0 * ending.communication / ending.seconds.max(1e-9);
        let seconds = seconds(ending.communication);
        lines.push(format!("  {} ranks, {seconds} in communication ({share:.0}%)", ending.ranks));
    }
    if let Some(agreed) = &ending.agreed {
        lines.push(format!("  {}", agreed.line()));
    }
    if let (Some(first), Some(last)) = (summary.first, summary.last) {
        let eval = summary
            .best_eval
            .map_or(String::new(), |Measured { step, loss }| format!("; best evaluation {loss:.4} at step {step}"));
        let mean = if run.training.logging_steps > 1 { " (means of the updates between two lines)" } else { "" };
        let then =
            if first.step == last.step { String::new() } else { format!(", {:.4} at step {}", last.loss, last.step) };
        lines.push(format!("  loss {:.4} at step {}{then}{mean}{eval}", first.loss, first.step));
    }
    let which = match (ending.is_best, ending.final_step == *step) {
        (true, true) => "the last and the best",
        (true, false) => "the best",
        (false, _) => "the last",
    };
    lines.push(format!("  weights in {output}/{FINAL}: those of checkpoint-{}, {which}", ending.final_step));
    let what = if matches!(run.adapter, Adapter::Lora(_)) { "adapter" } else { "weights" };
    lines.push(format!("  {what} {}", ending.hash));
    lines.push(format!("next: {}", next(run)));
    lines
}

/// `, 1.20 GiB on cuda:0` of each device that has memory of its own.
fn on_devices(devices: &[(String, Option<u64>)]) -> String {
    let one = |(name, bytes): &(String, Option<u64>)| Some(format!(", {} on {name}", size((*bytes)?)));
    devices.iter().filter_map(one).collect()
}

/// `12 ms`, `4.2s`, `2m 05s`
fn seconds(seconds: f64) -> String {
    match seconds {
        ..1.0 => format!("{:.0} ms", 1e3 * seconds),
        ..60.0 => format!("{seconds:.1}s"),
        _ => time(seconds),
    }
}

/// What is wrong with a run that ended without an error.
fn warning(Ending { summary, vocabulary, .. }: &Ending) -> Option<String> {
    let (first, last) = (summary.first?.loss, summary.last?.loss);
    let what = match summary.verdict {
        Verdict::Ok => return None,
        Verdict::Dead => format!("this run is dead: its last gradient is zero, at a loss of {last:.4}"),
        Verdict::Exploded => format!("this run exploded: its loss went from {first:.4} to {last:.4}"),
    };
    let even = even_loss(*vocabulary);
    Some(format!(
        "warning: {what}; uniform guessing over {vocabulary} tokens gives {even:.4}\n\
         hint: lower `learning_rate` and keep `max_grad_norm` above 0; if the loss hardly moved, train longer"
    ))
}

/// The commands to try after training.
fn next(run: &Run) -> String {
    let result = quoted(&run.output_dir.join(FINAL));
    let profile = match run.profile {
        Profile::X2 => String::new(),
        other @ Profile::X3 => format!(" --profile {}", other.name()),
    };
    let command = match run.adapter {
        Adapter::Lora(_) => format!("--model {} --adapter {result}{profile}", quoted(&run.base_model)),
        Adapter::Full | Adapter::LastBlocks(_) => format!("--model {result}{profile}"),
    };
    if data_record::conversations(&run.output_dir).is_some() {
        format!("isobit chat {command}")
    } else {
        let compare = if matches!(run.adapter, Adapter::Lora(_)) { " --compare" } else { "" };
        format!("isobit generate {command}{compare} --prompt \"...\"")
    }
}

/// A path quoted for a shell.
pub(crate) fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |character: char| character.is_ascii_alphanumeric() || "-_./+:@%,=".contains(character);
    if !text.is_empty() && text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

fn event(run: &Run, ending: &Ending) -> serde_json::Value {
    let summary = &ending.summary;
    let mut event = json!({
        "event": "finished", "step": ending.step, "stopped_early": ending.early, "hash": ending.hash,
        "folder": run.output_dir.join(FINAL).display().to_string(),
        "checkpoint": format!("checkpoint-{}", ending.final_step), "is_best": ending.is_best,
        "seconds": ending.seconds, "tokens": ending.tokens, "tokens_per_s": ending.tokens_per_second(),
        "peak_memory_bytes": ending.peak_bytes,
        "losses_are_means_of": run.training.logging_steps.max(1),
        "first_loss": summary.first.map(|measured| measured.loss),
        "last_loss": summary.last.map(|measured| measured.loss),
        "best_eval_loss": summary.best_eval.map(|measured| measured.loss),
        "best_eval_step": summary.best_eval.map(|measured| measured.step),
        "verdict": summary.verdict.name(),
    });
    match &ending.devices[..] {
        [(_, bytes)] => {
            if let Some(bytes) = bytes {
                event["device_peak_bytes"] = (*bytes).into();
            }
        }
        [] => {}
        several => {
            let one = |(name, bytes): &(String, Option<u64>)| json!({"device": name, "peak_bytes": bytes});
            event["devices"] = several.iter().map(one).collect();
        }
    }
    if ending.ranks > 1 {
        event["ranks"] = ending.ranks.into();
        event["communication_s"] = ending.communication.into();
    }
    if let Some(agreed) = &ending.agreed {
        event["audits"] = agreed.json();
    }
    event
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_each_device_is_named() {
        let all = |peaks: &[(&str, Option<u64>)]| -> Vec<(String, Option<u64>)> {
            peaks.iter().map(|(name, bytes)| ((*name).to_string(), *bytes)).collect()
        };
        assert_eq!(on_devices(&all(&[("cpu", None)])), "");
        assert_eq!(on_devices(&all(&[("cuda:0", Some(3 << 29))])), ", 1.50 GiB on cuda:0");
        let list = all(&[("cuda:0", Some(1 << 30)), ("cpu", None), ("cuda:1", Some(2 << 30))]);
        assert_eq!(on_devices(&list), ", 1.00 GiB on cuda:0, 2.00 GiB on cuda:1");
    }

    #[test]
    fn paths_as_a_shell_takes_them() {
        let said = ["out/run-a", "my runs/a", "it's", ""].map(|path| quoted(Path::new(path)));
        assert_eq!(said, ["out/run-a", "'my runs/a'", r"'it'\''s'", "''"]);
    }
}
