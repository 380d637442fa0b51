//! Cases on emulated AMD cards. Emulation is slow, so cases with much work are left out, by name.

use crate::{Absent, Case, DirtyWorkspace, Visitor, first_difference};
use isobit_gcn::{Card, Settings, Work};
use isobit_kernels::gpu::Gpu;
use isobit_kernels::observe::Observed;
use isobit_kernels::{Counting, Cpu, Device, Path, Reference};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

/// Multiply-adds and outputs of a case.
pub fn work_of(counting: &Counting<Cpu>, case: &impl Case) -> u64 {
    counting.forget();
    case.run(counting);
    counting.work().values().map(|work| work.multiply_adds + work.outputs).sum()
}

/// Compares an emulated card with the reference.
pub struct Emulated {
    settings: Settings,
    gpu: Observed<Gpu, DirtyWorkspace>,
    card: Rc<Card>,
    counting: Counting<Cpu>,
    /// Work of the largest case to run.
    work_max: u64,
    pub compared: usize,
    pub differences: Vec<String>,
    /// Cases with more work.
    pub left_out: Vec<String>,
    /// Of cards that failed and were replaced.
    earlier: Work,
}

impl Emulated {
    /// BOUND: multiply-adds and outputs of a case, unless a caller says otherwise.
    pub const WORK_MAX: u64 = 100_000;

    pub fn new(settings: Settings, work_max: u64) -> Result<Self, Absent> {
        if let Some(objection) = settings.toolchain.objection() {
            return Err(Absent::Missing(objection));
        }
        let (gpu, card) = opened(&settings)?;
        let cpu = Cpu::new(1, Path::Scalar).map_err(|error| Absent::Broken(error.to_string()))?;
        Ok(Self {
            settings,
            gpu,
            card,
            counting: Counting::new(cpu),
            work_max,
            compared: 0,
            differences: Vec::new(),
            left_out: Vec::new(),
            earlier: Work::default(),
        })
    }

    /// Instructions that the card executed.
    pub fn work(&self) -> Work {
        let now = self.card.work();
        Work { steps: self.earlier.steps + now.steps, lane_steps: self.earlier.lane_steps + now.lane_steps }
    }

    fn difference(&self, case: &impl Case) -> Option<String> {
        self.gpu.scratch().clear();
        let want = case.run(&Reference);
        // A fault of the card arrives as the panic of a failed download.
        match catch_unwind(AssertUnwindSafe(|| case.run(&self.gpu))) {
            Ok(got) => first_difference(&want, &got),
            Err(panic) => Some(match panic.downcast::<String>() {
                Ok(message) => *message,
                Err(_) => "the case panicked".to_string(),
            }),
        }
    }
}

fn opened(settings: &Settings) -> Result<(Observed<Gpu, DirtyWorkspace>, Rc<Card>), Absent> {
    let opened = Card::new(settings.clone()).into_gpu();
    let (inner, card) = opened.map_err(|failure| Absent::Broken(failure.to_string()))?;
    Ok((Observed { inner, observer: DirtyWorkspace }, card))
}

impl Visitor for Emulated {
    fn case<C: Case>(&mut self, case: &C) {
        if work_of(&self.counting, case) > self.work_max {
            self.left_out.push(case.name());
            return;
        }
        self.compared += 1;
        if let Some(difference) = self.difference(case) {
            self.differences.push(format!("{} on {}: {difference}", case.name(), self.gpu.name()));
            // A failed card does nothing more.
            if let Ok((gpu, card)) = opened(&self.settings) {
                self.earlier = self.work();
                (self.gpu, self.card) = (gpu, card);
            }
        }
    }
}
