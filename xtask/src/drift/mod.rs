//! `cargo xtask drift`: one bit of one result of one op goes wrong in an update, and what notices.
//!
//! For every call of every op of an update: of every array that it writes the first, the middle and
//! the last element, of each the lowest, the highest and the sign bit. Once in one call, as a
//! particle does it, and in every call of the op, as a broken unit does it.

mod bench;
mod flip;

use crate::arguments::Arguments;
use crate::repository::now;
use bench::{Bench, Verdict};
use flip::{Bit, Fault, Position, Seen, When};
use isobit_kernels::Pass;
use isobit_models::{LoraConfig, Trained};
use std::collections::BTreeMap;

const ELEMENTS: [Position; 3] = [Position::First, Position::Middle, Position::Last];
const BITS: [Bit; 3] = [Bit::Low, Bit::High, Bit::Sign];

/// A fixture, and what of it is trained.
type Model = (&'static str, fn() -> Trained);

/// Models that together use nearly every op of an update.
const MODELS: [Model; 7] = [
    ("qwen2-base", || lora(&["q_proj", "v_proj", "down_proj"], 0.1)),
    ("qwen2-bf16", || Trained::Full),
    ("gemma3-base", || Trained::Full),
    ("qwen3moe-aux", || Trained::Full),
    ("qwen3_5moe-hybrid", || Trained::Full),
    ("deepseek-base", || lora(&["q_b_proj", "kv_b_proj", "o_proj"], 0.0)),
    ("gptq-moe", || lora(&["q_proj", "o_proj"], 0.0)),
];

fn lora(targets: &[&str], dropout: f64) -> Trained {
    Trained::Lora(LoraConfig { dropout, ..LoraConfig::new(3, 6.0, targets) })
}

type Counts = BTreeMap<Verdict, usize>;

#[derive(Default)]
struct Table {
    /// Once in a call, by op and pass; no pass is the update after the micro-batches.
    once: BTreeMap<(&'static str, Option<Pass>), Counts>,
    /// In every call of an op: what a step and replay notice, and how many of those that change
    /// something an audit does.
    always: BTreeMap<&'static str, (Counts, usize)>,
}

pub(crate) fn run(arguments: &mut Arguments) -> Result<(), String> {
    let every = arguments.number("--every", 1)?.max(1);
    let only = arguments.option("--model")?;
    arguments.finish()?;
    let begun = now();
    let mut table = Table::default();
    // Faults may lead to panics, which are counted.
    std::panic::set_hook(Box::new(|_| ()));
    for (name, trained) in MODELS.iter().filter(|(name, _)| only.as_ref().is_none_or(|only| only == name)) {
        table.try_model(name, &trained(), every)?;
        eprintln!("{name}: {:.0} s", begun.elapsed().as_secs_f64());
    }
    let _ = std::panic::take_hook();
    let missed = table.print();
    println!("\n{:.0} s", begun.elapsed().as_secs_f64());
    if missed == 0 { Ok(()) } else { Err(format!("{missed} faults change a result and are not found")) }
}

fn named(pass: Option<Pass>) -> String {
    pass.map_or("update".to_string(), |pass| pass.to_string())
}

/// Every fault of a call.
fn faults(when: When, call: &Seen) -> impl Iterator<Item = Fault> {
    let arrays: Vec<usize> = (0..call.lengths.len()).filter(|array| call.lengths[*array] > 0).collect();
    let of_array = move |array: usize| {
        let of_element = move |element| BITS.map(|bit| Fault { when, array, element, bit });
        ELEMENTS.into_iter().flat_map(of_element)
    };
    arrays.into_iter().flat_map(of_array)
}

impl Table {
    fn try_model(&mut self, fixture: &str, trained: &Trained, every: usize) -> Result<(), String> {
        let mut bench = Bench::new(fixture, trained)?;
        let calls = bench.calls()?;
        for (number, call) in calls.iter().enumerate().step_by(every) {
            let pass = call.pass();
            for fault in faults(When::Once(number), call) {
                let verdict = bench.verdict(fault);
                *self.once.entry((call.op, pass)).or_default().entry(verdict).or_default() += 1;
                if verdict == Verdict::Missed {
                    eprintln!("{fixture}: {}, {}: {fault:?}: not found", call.op, named(pass));
                }
                if verdict == Verdict::Impossible {
                    bench = Bench::new(fixture, trained)?;
                }
            }
        }
        let ops: BTreeMap<&str, &Seen> = calls.iter().map(|call| (call.op, call)).collect();
        for (op, call) in ops {
            for fault in faults(When::Always(call.op), call) {
                let verdict = bench.verdict(fault);
                if verdict == Verdict::Impossible {
                    bench = Bench::new(fixture, trained)?;
                }
                let audited = verdict != Verdict::Nothing && bench.is_audited(fault);
                let (counts, by_audit) = self.always.entry(call.op).or_default();
                *counts.entry(verdict).or_default() += 1;
                *by_audit += usize::from(audited);
                if verdict == Verdict::Missed {
                    eprintln!("{fixture}: {op}, every call: {fault:?}: not found");
                }
            }
        }
        Ok(())
    }

    /// Prints both tables in Markdown; returns how many faults were missed.
    fn print(&self) -> usize {
        use Verdict::{Gradient, Impossible, Loss, Missed, NotFinite, Nothing, Recomputation, Record, State};
        let of = |counts: &Counts, kinds: &[Verdict]| kinds.iter().filter_map(|kind| counts.get(kind)).sum::<usize>();
        let mut missed = 0;
        let mut row = |start: String, counts: &Counts, end: String| {
            missed += of(counts, &[Missed]);
            let columns = [
                of(counts, &[Nothing]),
                of(counts, &[Recomputation]),
                of(counts, &[NotFinite, Impossible]),
                of(counts, &[Loss]),
                of(counts, &[Gradient]),
                of(counts, &[State]),
                of(counts, &[Record]),
                of(counts, &[Missed]),
            ];
            let columns = columns.map(|count| if count == 0 { "·".to_string() } else { count.to_string() });
            println!("| {start} | {} | {}{end} |", counts.values().sum::<usize>(), columns.join(" | "));
        };
        let names = "faults | no effect | recomputation check | impossible number | replay: loss | replay: gradient | \
                     replay: weights, state | replay: record | missed";
        println!("| op | pass | {names} |\n|---|---|---|---|---|---|---|---|---|---|---|");
        let mut all = Counts::new();
        for ((op, pass), counts) in &self.once {
            row(format!("`{op}` | {}", named(*pass)), counts, String::new());
            for (verdict, count) in counts {
                *all.entry(*verdict).or_default() += count;
            }
        }
        row("all | ".to_string(), &all, String::new());
        println!("\n| op, in every call | {names} | of those with an effect, the audit |");
        println!("|---|---|---|---|---|---|---|---|---|---|---|");
        let (mut all, mut audited) = (Counts::new(), 0);
        for (op, (counts, by_audit)) in &self.always {
            row(format!("`{op}`"), counts, format!(" | {by_audit}"));
            for (verdict, count) in counts {
                *all.entry(*verdict).or_default() += count;
            }
            audited += by_audit;
        }
        row("all".to_string(), &all, format!(" | {audited}"));
        missed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sample of `cargo xtask drift`: what changes a result is found and named, and the passes of
    /// an update are told apart.
    #[test]
    fn a_flipped_bit_that_changes_a_result_is_found() {
        let mut table = Table::default();
        let (name, trained) = MODELS[0];
        table.try_model(name, &trained(), 9).expect("tried");
        let count = |verdict| table.once.values().filter_map(|counts| counts.get(&verdict)).sum::<usize>();
        assert_eq!(count(Verdict::Missed), 0);
        for verdict in [Verdict::Nothing, Verdict::Recomputation, Verdict::Loss, Verdict::Gradient] {
            assert!(count(verdict) > 0, "{verdict:?}");
        }
        let passes: std::collections::BTreeSet<Option<Pass>> = table.once.keys().map(|(_, pass)| *pass).collect();
        assert_eq!(passes.len(), 4, "{passes:?}");
        let is_of_gradients = |op: &str| op.contains("_grad_") || op.ends_with("_backward");
        let forward = [Some(Pass::Forward), Some(Pass::Recomputation)];
        for (op, pass) in table.once.keys() {
            assert!(!(is_of_gradients(op) && forward.contains(pass)), "{op}, {}", named(*pass));
        }
        assert!(table.always.values().any(|(_, audited)| *audited > 0));
    }
}
