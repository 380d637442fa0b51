//! Whether the audits of a run (`train --audit-every`) fit beside it: they hold the model a second
//! time, without moments.

use crate::Failure;
use crate::backend::Chosen;
use crate::fits::{Available, Given, MemoryFit, Ranks, memory_fit};
use crate::split::split_fit;
use crate::units::size;
use isobit_autograd::Offload;
use isobit_training::config::Run;
use isobit_training::plan::Item;

/// What audits need, and the memory that must hold them and the run.
pub(crate) struct AuditFit {
    /// Where they compute.
    on: String,
    /// The memory that they are in.
    memory: String,
    /// What the run itself takes of it.
    own: u64,
    pub(crate) bytes: u64,
    available: Option<Available>,
}

const HINT: &str = "leave out --audit-every, or audit on another device (`--audit-on`)";

impl AuditFit {
    /// Of a run that can be planned itself.
    pub(crate) fn of(run: &Run, on: Chosen, given: &Given) -> Result<Self, Failure> {
        let name = on.name();
        let on_host = on.is_cpu();
        let shares_card = !on_host && Chosen::all_of(run)?.contains(&on);
        if shares_card && !given.memories.is_empty() {
            let message = format!("--memory limits what the run takes on {name}, where its audits would be beside it");
            return Err(Failure::usage(message, "audit on the CPU or another card (`--audit-on`)"));
        }
        let again = Run {
            devices: vec![on.in_config()],
            threads: on.threads() as u32,
            offload: Offload::NONE,
            generate_prompts: Vec::new(),
            ..run.clone()
        };
        let fit = memory_fit(&again, &Given::default(), Ranks::ALONE)?;
        let MemoryFit { plan: Some(plan), available, overhead, .. } = fit else {
            let message = format!("audits need at least {} on {name}, more than there is", size(fit.needed));
            return Err(Failure { code: 4, message, hint: Some(HINT.to_string()) });
        };
        let (own, available) = of_run(run, on, shares_card, given)?.unwrap_or((0, available));
        // A process is counted with the run; a driver too, on a card of the run's.
        let overhead = if shares_card || on_host { 0 } else { overhead };
        let bytes = (plan.bytes_peak - plan.items[&Item::Optimizer]) as u64 + overhead;
        let memory = if on_host { "host memory".to_string() } else { name.clone() };
        let on = if on_host { "the CPU".to_string() } else { name };
        Ok(Self { on, memory, own, bytes, available })
    }

    /// None if nothing says how much there is.
    pub(crate) fn fits(&self) -> Option<bool> {
        let available = self.available.as_ref()?;
        Some(self.own.saturating_add(self.bytes) <= available.bytes)
    }

    /// For people.
    pub(crate) fn line(&self) -> String {
        let answer = match self.fits() {
            Some(true) => "fit",
            Some(false) => "do not fit",
            None => "fit where there is memory for them, how much is unknown",
        };
        match self.own {
            0 => format!("audits {answer}: {} on {}", size(self.bytes), self.on),
            own => {
                format!("audits {answer}: {} more on {}, on top of the run's {}", size(self.bytes), self.on, size(own))
            }
        }
    }

    pub(crate) fn refusal(&self) -> Option<Failure> {
        let available = self.available.as_ref().filter(|_| self.fits() == Some(false))?;
        let (memory, audits, there) = (&self.memory, size(self.bytes), size(available.bytes));
        let needed = match self.own {
            0 => format!("the audits of this run need {audits} of {memory}"),
            own => format!("this run needs {} of {memory} and its audits {audits}", size(own)),
        };
        let message = format!("{needed}, {there} is available ({})", available.of);
        Some(Failure { code: 4, message, hint: Some(HINT.to_string()) })
    }
}

/// What a run takes of the memory that a device computes in, and what there is of it; None on a
/// card that is not the run's.
fn of_run(
    run: &Run,
    device: Chosen,
    is_of_run: bool,
    given: &Given,
) -> Result<Option<(u64, Option<Available>)>, Failure> {
    let on_host = device.is_cpu();
    if !on_host && !is_of_run {
        return Ok(None);
    }
    if run.devices.len() > 1 {
        return Ok(split_fit(run, given, Ranks::ALONE)?.memory_of(device));
    }
    let fit = memory_fit(run, given, Ranks::ALONE)?;
    Ok(Some(match fit.host.filter(|_| on_host) {
        Some(host) => (host.needed, host.available),
        None => (fit.needed, fit.available),
    }))
}
