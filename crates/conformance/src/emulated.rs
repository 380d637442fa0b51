//! Cases on emulated cards: AMD's (`isobit-gcn`), and CUDA source on the CPU (`isobit-simt`).
//! Emulation is slow, so cases with much work are left out, by name.

use crate::{Absent, Case, DirtyWorkspace, Visitor, first_difference, work_of};
use isobit_gcn::{Card, Settings};
use isobit_kernels::DeviceFailure;
use isobit_kernels::gpu::Gpu;
use isobit_kernels::observe::Observed;
use isobit_kernels::{Counting, Cpu, Device, Path, Reference};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

/// The settings of an emulated card.
pub trait Emulation {
    type Card;

    /// Why no card can be opened here, if so.
    fn unavailable_because(&self) -> Option<String>;
    fn open(&self) -> Result<(Gpu, Rc<Self::Card>), DeviceFailure>;
    /// What a card has done: instructions of waves, or how often a thread was continued.
    fn work(card: &Self::Card) -> u64;
}

impl Emulation for Settings {
    type Card = Card;

    fn unavailable_because(&self) -> Option<String> {
        self.toolchain.unavailable_because()
    }

    fn open(&self) -> Result<(Gpu, Rc<Card>), DeviceFailure> {
        Card::new(self.clone()).into_gpu()
    }

    fn work(card: &Card) -> u64 {
        card.steps()
    }
}

impl Emulation for isobit_simt::Settings {
    type Card = isobit_simt::Card;

    fn unavailable_because(&self) -> Option<String> {
        isobit_simt::objection()
    }

    fn open(&self) -> Result<(Gpu, Rc<isobit_simt::Card>), DeviceFailure> {
        isobit_simt::Card::new(self.clone()).into_gpu()
    }

    fn work(card: &isobit_simt::Card) -> u64 {
        card.switches()
    }
}

/// Compares an emulated card with the reference.
pub struct Emulated<S: Emulation = Settings> {
    settings: S,
    gpu: Observed<Gpu, DirtyWorkspace>,
    card: Rc<S::Card>,
    counting: Counting<Cpu>,
    /// Work of the largest case to run.
    work_max: u64,
    pub compared: usize,
    pub differences: Vec<String>,
    /// Cases with more work.
    pub left_out: Vec<String>,
    /// Of cards that failed and were replaced.
    earlier: u64,
}

/// BOUND: multiply-adds and outputs of a case in source on the CPU, which is faster than machine
/// code.
pub const SOURCE_WORK_MAX: u64 = 1_000_000;

impl<S: Emulation> Emulated<S> {
    pub fn new(settings: S, work_max: u64) -> Result<Self, Absent> {
        if let Some(why) = settings.unavailable_because() {
            return Err(Absent::Missing(why));
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
            earlier: 0,
        })
    }

    /// The card, or the last one if others failed before it.
    pub fn card(&self) -> &S::Card {
        &self.card
    }

    /// What the card has done.
    pub fn work(&self) -> u64 {
        self.earlier + S::work(&self.card)
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

/// A device, and the card that it is on.
type Opened<S> = (Observed<Gpu, DirtyWorkspace>, Rc<<S as Emulation>::Card>);

fn opened<S: Emulation>(settings: &S) -> Result<Opened<S>, Absent> {
    let (inner, card) = settings.open().map_err(|failure| Absent::Broken(failure.to_string()))?;
    Ok((Observed { inner, observer: DirtyWorkspace }, card))
}

impl<S: Emulation> Visitor for Emulated<S> {
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
