//! The course that a config gives a run: how many updates it has, at which learning rates, when it
//! is evaluated and when it stops. No weight is needed to compare a chain with it: `verify` does.

use crate::config::Run;
use crate::schedule::Schedule;
use isobit_kernels::float_state;
use isobit_proof::chain::Chain;
use isobit_proof::name::counted;

/// The first thing in a chain that is not what the config of its run gives, for that many training
/// rows.
pub fn departure(run: &Run, rows: u64, chain: &Chain, finished: bool) -> Option<String> {
    float_state::restore();
    let steps = run.steps(rows);
    let schedule = Schedule::new(run, steps);
    let (patience, mut without) = (run.training.early_stopping_patience, 0);
    let stops_early = |without: u32| patience > 0 && without >= patience;
    let done = chain.updates.len() as u64;
    let another_length = || format!("it has {}, but the config gives {}", counted(done, "update"), steps.total);
    for update in &chain.updates {
        let step = update.step;
        if stops_early(without) {
            return Some(format!("update {step}: the run stops before it, by early_stopping_patience"));
        }
        if step > steps.total {
            return Some(another_length());
        }
        if update.learning_rate != schedule.at(step - 1).to_bits() {
            return Some(format!("update {step}: its learning rate is not that of the schedule"));
        }
        let is_due = run.has_eval() && run.eval.every.is_due(step, steps);
        match update.evaluation {
            None if is_due => return Some(format!("update {step}: it has no evaluation, but one is due")),
            Some(_) if !is_due => return Some(format!("update {step}: it has an evaluation, but none is due")),
            Some(evaluation) if evaluation.best => without = 0,
            Some(_) => without = without.saturating_add(1),
            None => (),
        }
    }
    let is_short = finished && done < steps.total && !stops_early(without);
    is_short.then(another_length)
}
