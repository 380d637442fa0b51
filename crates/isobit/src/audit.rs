//! `train --audit-every`: opens what computes micro-batches a second time.

use crate::Failure;
use crate::backend::{Chosen, HINT, open_cpu};
use isobit_autograd::Offload;
use isobit_kernels::{Backend, Gpu, Path};
use isobit_models::build_whole;
use isobit_training::audit::Auditor;
use isobit_training::config::Device;
use isobit_training::prepare::{Prepared, RunError, build_settings};
use isobit_training::ranks::Team;
use isobit_training::trainer::Trainer;

/// How often a run is audited, and by what.
pub(crate) struct Audit {
    pub(crate) every: u64,
    pub(crate) auditor: Box<dyn Auditor>,
}

/// The audit of a run, if there is to be one.
pub(crate) fn auditor(
    every: Option<u64>,
    device: Option<&str>,
    prepared: &Prepared,
    team: &Team<'_>,
) -> Result<Option<Audit>, Failure> {
    let Some(every) = every else { return Ok(None) };
    if !team.is_alone() {
        let hint = "leave it out: ranks compare their weights after every update";
        return Err(Failure::usage("--audit-every is for a single process", hint));
    }
    let chosen = match device {
        Some(name) => Chosen::parse(name, 0)?,
        None => other_than(prepared)?,
    };
    let auditor = match chosen {
        Chosen::Cpu { threads } => boxed(open_cpu(threads, Path::best())?, prepared),
        Chosen::Gpu(selector) => {
            let gpu = Gpu::open(selector).map_err(|failure| Failure::device(failure.to_string(), HINT))?;
            boxed(gpu, prepared)
        }
    };
    Ok(Some(Audit { every, auditor: auditor? }))
}

/// The CPU, with other threads than the run's if it computes there.
pub(crate) fn other_than(prepared: &Prepared) -> Result<Chosen, Failure> {
    let run = &prepared.run;
    let cpu = Chosen::parse("cpu", run.threads as usize)?;
    let on_cpu = run.devices.contains(&Device::Cpu);
    Ok(match cpu {
        Chosen::Cpu { threads } if on_cpu => Chosen::Cpu { threads: if threads == 1 { 2 } else { 1 } },
        other => other,
    })
}

fn boxed<B: Backend + 'static>(backend: B, prepared: &Prepared) -> Result<Box<dyn Auditor>, RunError> {
    let settings = build_settings(&prepared.run);
    let built = build_whole(&backend, &prepared.model, &prepared.weights, &settings, Offload::NONE)?;
    Ok(Box::new(Trainer::without_moments(backend, built)))
}
