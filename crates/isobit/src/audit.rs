//! `train --audit-every`: opens what computes micro-batches a second time.

use crate::Failure;
use crate::audit_fit::AuditFit;
use crate::backend::{Chosen, HINT, open_cpu};
use crate::fits::Given;
use crate::stderr::tell;
use isobit_autograd::Offload;
use isobit_kernels::{Backend, Gpu, Path};
use isobit_models::build_whole;
use isobit_training::audit::Auditor;
use isobit_training::config::Run;
use isobit_training::prepare::{Prepared, RunError, build_settings};
use isobit_training::trainer::Trainer;
use serde_json::{Value, json};

/// How often a run is audited, by what, and what has agreed so far.
pub(crate) struct Audit {
    pub(crate) every: u64,
    pub(crate) auditor: Box<dyn Auditor>,
    pub(crate) agreed: Agreed,
}

/// Micro-batches that were computed twice by this process. One that differs ends the run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Agreed {
    pub(crate) every: u64,
    /// What computed them the second time.
    pub(crate) on: String,
    pub(crate) micro_batches: u64,
    pub(crate) tokens: usize,
}

impl Agreed {
    pub(crate) fn line(&self) -> String {
        let Self { every, on, micro_batches, tokens } = self;
        let each = interval(*every);
        match micro_batches {
            0 => format!("audited nothing: a micro-batch {each} was to be computed again on {on}"),
            1 => format!("audited {each} on {on}: 1 micro-batch, {tokens} tokens, every bit agreed"),
            count => format!("audited {each} on {on}: {count} micro-batches, {tokens} tokens, every bit agreed"),
        }
    }

    pub(crate) fn json(&self) -> Value {
        let Self { every, on, micro_batches, tokens } = self;
        json!({"every": every, "on": on, "micro_batches": micro_batches, "tokens": tokens})
    }
}

pub(crate) fn interval(updates: u64) -> String {
    if updates == 1 { "every update".to_string() } else { format!("every {updates} updates") }
}

/// The audit of a run, if there is to be one.
pub(crate) fn auditor(every: Option<u64>, device: Option<&str>, prepared: &Prepared) -> Result<Option<Audit>, Failure> {
    let Some(every) = every else { return Ok(None) };
    let chosen = auditing(&prepared.run, device)?;
    if Chosen::all_of(&prepared.run)?.contains(&chosen) {
        let name = chosen.name();
        tell(&format!(
            "warning: audits on {name} repeat what the run does there: what it gets wrong every time agrees"
        ));
    }
    let auditor = match chosen {
        Chosen::Cpu { threads } => boxed(open_cpu(threads, Path::best())?, prepared),
        Chosen::Gpu(selector) => {
            let gpu = Gpu::open(selector).map_err(|failure| Failure::device(failure.to_string(), HINT))?;
            boxed(gpu, prepared)
        }
    };
    let on = match chosen {
        Chosen::Cpu { threads: 1 } => "the CPU with 1 thread".to_string(),
        Chosen::Cpu { threads } => format!("the CPU with {threads} threads"),
        Chosen::Gpu(selector) => selector.to_string(),
    };
    let agreed = Agreed { every, on, ..Agreed::default() };
    Ok(Some(Audit { every, auditor: auditor?, agreed }))
}

/// Refuses audits that do not fit beside their run.
pub(crate) fn check(run: &Run, device: Option<&str>, memories: &[u64]) -> Result<(), Failure> {
    let fit = AuditFit::of(run, auditing(run, device)?, &Given::of_run(memories)).map_err(Failure::with_way_out)?;
    fit.refusal().map_or(Ok(()), |refusal| Err(refusal.with_way_out()))
}

pub(crate) fn not_for_ranks() -> Failure {
    let hint = "leave it out: ranks compare their weights after every update";
    Failure::usage("--audit-every is for a single process", hint)
}

/// The device that is named, or else the CPU, with other threads than each of the run's devices has
/// there.
pub(crate) fn auditing(run: &Run, named: Option<&str>) -> Result<Chosen, Failure> {
    if let Some(name) = named.filter(|name| *name != "cpu") {
        return Chosen::parse(name, 0);
    }
    let of_run = Chosen::all_of(run)?;
    let on_cpu: Vec<usize> = of_run.iter().filter(|one| one.is_cpu()).map(Chosen::threads).collect();
    if on_cpu.is_empty() {
        return Chosen::parse("cpu", run.threads as usize);
    }
    let other = (1..=on_cpu.len() + 1).find(|threads| !on_cpu.contains(threads));
    Ok(Chosen::Cpu { threads: other.expect("one number more than devices") })
}

fn boxed<B: Backend + 'static>(backend: B, prepared: &Prepared) -> Result<Box<dyn Auditor>, RunError> {
    let settings = build_settings(&prepared.run);
    let built = build_whole(&backend, &prepared.model, &prepared.weights, &settings, Offload::NONE)?;
    Ok(Box::new(Trainer::without_moments(backend, built)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_agreed_in_words() {
        let agreed = |every, micro_batches, tokens| {
            Agreed { every, on: "the CPU with 1 thread".to_string(), micro_batches, tokens }.line()
        };
        assert_eq!(
            agreed(50, 4, 4096),
            "audited every 50 updates on the CPU with 1 thread: 4 micro-batches, 4096 tokens, every bit agreed"
        );
        assert_eq!(
            agreed(1, 1, 7),
            "audited every update on the CPU with 1 thread: 1 micro-batch, 7 tokens, every bit agreed"
        );
        assert_eq!(
            agreed(50, 0, 0),
            "audited nothing: a micro-batch every 50 updates was to be computed again on the CPU with 1 thread"
        );
    }
}
