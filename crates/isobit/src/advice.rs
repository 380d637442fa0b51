//! What `plan` suggests: settings that would fit, or that would be faster and still fit, each with
//! its memory and whether it gives the same weights.

use crate::units::size;
use isobit_autograd::{Offload, Policy};
use isobit_training::config::{self, Adapter, Device, Run};
use std::io::Write;

/// What a run needs, as its plan says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    /// On the device; of several devices, on the one that needs most.
    pub(crate) bytes: u64,
    /// On the host, beside cards.
    pub(crate) host: Option<u64>,
    /// Whether there are several devices.
    pub(crate) is_list: bool,
    /// None if the memory of the device is unknown.
    pub(crate) fits: Option<bool>,
    /// Multiply-adds of one row of maximum length; zero if they were not counted.
    pub(crate) work_per_row: u64,
}

/// One suggestion.
pub(crate) struct Advice {
    /// `--set` options of the command line.
    sets: String,
    need: Need,
    /// Whether the weights stay the same, bit for bit.
    same_bits: bool,
    /// What else is to be said.
    effect: String,
    /// Whether it cuts rows: what follows cuts them shorter.
    cuts_rows: bool,
}

/// BOUND: suggestions of a plan; each is a plan of its own.
const ADVICE_MAX: usize = 4;
/// Rows are not cut below this.
const LENGTH_MIN: u32 = 64;
const OFFLOAD_ALL: Offload = Offload { optimizer: true, activations: true, weights: true };

/// A change of settings.
struct Change {
    sets: Vec<String>,
    run: Run,
    same_bits: bool,
    effect: &'static str,
    cuts_rows: bool,
}

impl Change {
    fn of(run: &Run) -> Self {
        Self { sets: Vec::new(), run: run.clone(), same_bits: true, effect: "", cuts_rows: false }
    }

    fn in_4bit(mut self) -> Self {
        self.run.load_in_4bit = Some(true);
        self.sets.push("load_in_4bit=true".to_string());
        self.same_bits = false;
        self
    }

    /// An adapter of the usual kind instead of the weights themselves.
    fn adapter(run: &Run) -> Option<Self> {
        let set = "adapter.type=lora".to_string();
        let run = config::parse("the config", &run.to_toml(), std::slice::from_ref(&set)).ok()?.run;
        Some(Self { sets: vec![set], same_bits: false, ..Self::of(&run) })
    }

    /// Both keys: the rows of an update stay the same, and with them the weights.
    fn micro_batch(mut self, rows: u64) -> Self {
        let times = self.run.rows_per_update() / rows;
        follow(&mut self.run, rows as u32);
        self.run.training.micro_batch_size = rows as u32;
        self.run.training.gradient_accumulation_steps = times as u32;
        self.sets.push(format!("training.micro_batch_size={rows}"));
        self.sets.push(format!("training.gradient_accumulation_steps={times}"));
        self
    }

    /// Rows that are evaluated at once, if they are more.
    fn evaluated(mut self, rows: u32) -> Self {
        if self.run.has_eval() && self.run.eval.micro_batch_size > rows {
            self.run.eval.micro_batch_size = rows;
            self.sets.push(format!("eval.micro_batch_size={rows}"));
        }
        self
    }

    fn policy(mut self, policy: Policy) -> Self {
        self.run.training.recomputation = policy;
        self.sets.push(format!("training.gradient_checkpointing={}", policy.name()));
        self
    }

    fn offload(mut self, offload: Offload) -> Self {
        self.run.offload = offload;
        let names = if offload.is_none() { "none".to_string() } else { offload.names().join(",") };
        self.sets.push(format!("offload={names}"));
        self
    }

    fn length(mut self, tokens: u32) -> Self {
        self.run.training.max_seq_length = tokens;
        self.sets.push(format!("max_seq_length={tokens}"));
        (self.same_bits, self.cuts_rows) = (false, true);
        self
    }

    fn without_samples(mut self) -> Self {
        self.run.generate_prompts.clear();
        self.sets.push("generate_prompts=[]".to_string());
        self
    }

    fn because(self, effect: &'static str) -> Self {
        Self { effect, ..self }
    }

    /// What a plan says of it, against that of the run as it is.
    fn advice(self, now: Need, then: Need) -> Advice {
        let sets: Vec<String> = self.sets.iter().map(|set| format!("--set {set}")).collect();
        let arithmetic = if self.same_bits { compared(now.work_per_row, then.work_per_row) } else { None };
        let effect = match (self.effect, arithmetic) {
            (LESS_RECOMPUTED | MORE_RECOMPUTED, Some(arithmetic)) => arithmetic,
            (effect, Some(arithmetic)) => format!("{arithmetic}; {effect}"),
            (effect, None) => effect.to_string(),
        };
        Advice { sets: sets.join(" "), need: then, same_bits: self.same_bits, effect, cuts_rows: self.cuts_rows }
    }
}

/// The arithmetic of a row against what it was, if both were counted and it differs.
fn compared(now: u64, then: u64) -> Option<String> {
    match (now, then) {
        (0, _) | (_, 0) => None,
        (now, then) if then < now => Some(format!("{} % less arithmetic", 100 - then.saturating_mul(100) / now)),
        (now, then) if then > now => Some(format!("{} % more arithmetic", then.saturating_mul(100) / now - 100)),
        _ => None,
    }
}

/// The rows that are evaluated at once are those of training unless the config says otherwise: they
/// change with them.
fn follow(run: &mut Run, rows: u32) {
    if run.eval.micro_batch_size == run.training.micro_batch_size {
        run.eval.micro_batch_size = rows;
    }
}

/// Suggestions for a run that fits or not, planned one by one as they are asked for: `need` plans a
/// changed run, or says that it cannot be planned. The first are those that keep the weights.
pub(crate) fn of(run: &Run, now: Need, need: impl Fn(&Run) -> Option<Need>) -> impl Iterator<Item = Advice> {
    let changes = match now.fits {
        Some(true) => faster(run),
        Some(false) => smaller(run),
        None => Vec::new(),
    };
    changes.into_iter().filter_map(move |change| {
        let then = need(&change.run).filter(|then| then.fits == Some(true))?;
        Some(change.advice(now, then))
    })
}

/// One thing to try with a run that does not fit: the first of its suggestions.
pub(crate) fn hint(first: Option<&Advice>) -> String {
    match first {
        Some(Advice { sets, same_bits: true, .. }) => format!("`{sets}` fits and gives the same weights"),
        Some(Advice { sets, effect, .. }) => format!("`{sets}` fits; {effect}"),
        None => NO_SETTING.to_string(),
    }
}

/// Settings that take less time: nothing recomputed, then larger micro-batches. A list of devices
/// needs many micro-batches to keep all of them busy, so it is left with those it has.
fn faster(run: &Run) -> Vec<Change> {
    let mut changes = Vec::new();
    let rows = run.rows_per_update();
    let together = u64::from(run.training.micro_batch_size);
    let policies = Policy::ALL.into_iter().take_while(|policy| *policy != run.training.recomputation);
    changes.extend(policies.map(|policy| Change::of(run).policy(policy).because(LESS_RECOMPUTED)));
    let larger = [rows, rows / 2, rows / 4];
    let divides = |size: &u64| *size > together && *size > 0 && rows.is_multiple_of(*size);
    let may_be_larger = run.training.gradient_groups == 1 && run.devices.len() == 1;
    if let Some(size) = larger.into_iter().find(divides).filter(|_| may_be_larger) {
        changes.push(Change::of(run).micro_batch(size).because("fewer, larger products: faster if rows are short"));
    }
    if !run.offload.is_none() && on_card(run) {
        changes.push(Change::of(run).offload(Offload::NONE).because("nothing is copied to the host"));
    }
    changes
}

/// In the order of memory, the most first.
fn place(policy: Policy) -> Option<usize> {
    Policy::ALL.iter().position(|other| *other == policy)
}

fn on_card(run: &Run) -> bool {
    run.devices.iter().any(|device| *device != Device::Cpu)
}

/// Everything that needs less memory and keeps the rows whole, together.
fn smallest(run: &Run) -> Change {
    let adapter = Change::adapter(run).filter(|_| !matches!(run.adapter, Adapter::Lora(_)));
    let change = full(one_row(adapter.unwrap_or_else(|| Change::of(run))));
    let change = if change.run.load_in_4bit == Some(true) { change } else { change.in_4bit() };
    if on_card(run) { change.offload(OFFLOAD_ALL) } else { change }
}

fn one_row(change: Change) -> Change {
    let has_more = change.run.training.micro_batch_size > 1;
    let change = change.evaluated(1);
    if has_more { change.micro_batch(1) } else { change }
}

fn full(change: Change) -> Change {
    if change.run.training.recomputation == Policy::Full { change } else { change.policy(Policy::Full) }
}

/// Settings that need less memory, those that cost least first.
fn smaller(run: &Run) -> Vec<Change> {
    let mut changes = Vec::new();
    if !run.generate_prompts.is_empty() {
        let effect = "no samples: `isobit generate` makes them afterwards";
        changes.push(Change::of(run).without_samples().because(effect));
    }
    let half = u64::from(run.training.micro_batch_size / 2);
    if half > 1 && run.rows_per_update().is_multiple_of(half) {
        changes.push(Change::of(run).evaluated(half as u32).micro_batch(half).because("smaller micro-batches"));
    }
    changes.push(one_row(Change::of(run)).because("smaller micro-batches"));
    for policy in [Policy::Selective, Policy::Full] {
        if place(policy) > place(run.training.recomputation) {
            changes.push(Change::of(run).policy(policy).because(MORE_RECOMPUTED));
            changes.push(one_row(Change::of(run)).policy(policy).because(MORE_RECOMPUTED));
        }
    }
    if on_card(run) {
        let optimizer = Offload { optimizer: true, ..run.offload };
        let two = Offload { activations: true, ..optimizer };
        for offload in [optimizer, two, OFFLOAD_ALL].into_iter().filter(|offload| *offload != run.offload) {
            let effect = "slower: copies over the bus";
            changes.push(Change::of(run).offload(offload).because(effect));
            changes.push(full(one_row(Change::of(run))).offload(offload).because(effect));
        }
    }
    match &run.adapter {
        Adapter::Lora(_) if run.load_in_4bit != Some(true) => {
            let effect = "other weights: the base is quantised to 4 bits";
            changes.push(Change::of(run).in_4bit().because(effect));
            changes.push(full(one_row(Change::of(run))).in_4bit().because(effect));
        }
        Adapter::Lora(_) => {}
        Adapter::Full | Adapter::LastBlocks(_) => {
            let effect = "other weights: an adapter is trained";
            changes.extend(Change::adapter(run).map(|change| change.because(effect)));
            changes.extend(Change::adapter(run).map(|change| full(one_row(change)).because(effect)));
        }
    }
    changes.push(smallest(run).because("other weights: an adapter on a base in 4 bits"));
    let mut tokens = run.training.max_seq_length;
    while tokens / 2 >= LENGTH_MIN {
        tokens /= 2;
        let effect = "other weights: longer rows are cut";
        changes.push(full(one_row(Change::of(run))).length(tokens).because(effect));
    }
    if tokens < run.training.max_seq_length {
        changes.push(smallest(run).length(tokens).because("other weights: longer rows are cut"));
    }
    // A part of a combination may change nothing.
    let mut seen: Vec<Vec<String>> = Vec::new();
    changes.retain(|change| {
        let is_new = !change.sets.is_empty() && !seen.contains(&change.sets);
        seen.push(change.sets.clone());
        is_new
    });
    changes
}

/// The effect of a policy whose arithmetic is not compared.
const LESS_RECOMPUTED: &str = "less is recomputed";
const MORE_RECOMPUTED: &str = "more is recomputed";

/// What to do where no setting helps.
const NO_SETTING: &str = "no setting makes it fit: take a smaller base model, or a device with more memory";

/// The suggestions for a run, to be printed.
pub(crate) struct Suggestions(Vec<Advice>);

impl Suggestions {
    /// The first few, and of those that cut rows only the one that leaves the longest.
    pub(crate) fn new(all: impl Iterator<Item = Advice>) -> Self {
        let mut first = Vec::new();
        for advice in all.take(ADVICE_MAX) {
            let is_last = advice.cuts_rows;
            first.push(advice);
            if is_last {
                break;
            }
        }
        Self(first)
    }

    pub(crate) fn first(&self) -> Option<&Advice> {
        self.0.first()
    }

    pub(crate) fn print(&self, out: &mut impl Write, fits: Option<bool>) -> std::io::Result<()> {
        match fits {
            Some(false) if self.0.is_empty() => {
                return writeln!(out, "{NO_SETTING}");
            }
            _ if self.0.is_empty() => return Ok(()),
            Some(false) => writeln!(out, "these settings fit:")?,
            _ => writeln!(out, "these settings also fit, and may be faster:")?,
        }
        for Advice { sets, need, same_bits, effect, .. } in &self.0 {
            let bits = if *same_bits { "same bits" } else { "" };
            let says = [bits, effect].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ");
            let each = if need.is_list { " on a device at most" } else { "" };
            let host = need.host.map_or(String::new(), |bytes| format!(", {} on the host", size(bytes)));
            writeln!(out, "  {sets}\n    {}{each}{host}, {says}", size(need.bytes))?;
        }
        Ok(())
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        let one = |advice: &Advice| {
            serde_json::json!({
                "set": advice.sets, "needed_bytes": advice.need.bytes, "host_needed_bytes": advice.need.host,
                "same_bits": advice.same_bits, "effect": advice.effect,
            })
        };
        self.0.iter().map(one).collect()
    }
}
