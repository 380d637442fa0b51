//! The learning rate of every update, in float64 with the pinned `libm`: a pure function of the
//! number of the update.
//!
//! Surprising: with a warm-up the first update has learning rate 0, as in other trainers.
#![expect(clippy::float_arithmetic, reason = "host arithmetic: schedules are float64 by the numerics contract")]

use crate::config::{Run, Scheduler, Steps, Warmup};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    pub learning_rate: f64,
    pub scheduler: Scheduler,
    pub warmup_steps: u64,
    pub total_steps: u64,
}

impl Schedule {
    pub fn new(run: &Run, steps: Steps) -> Self {
        Self {
            learning_rate: run.training.learning_rate,
            scheduler: run.training.scheduler,
            warmup_steps: warmup_steps(run.training.warmup, steps.total),
            total_steps: steps.total,
        }
    }

    /// Learning rate of the update that follows `completed` updates: the first is `at(0)`.
    pub fn at(&self, completed: u64) -> f64 {
        self.learning_rate * self.multiplier(completed)
    }

    fn multiplier(&self, completed: u64) -> f64 {
        if self.scheduler == Scheduler::Constant {
            return 1.0;
        }
        if completed < self.warmup_steps {
            return completed as f64 / self.warmup_steps as f64;
        }
        // BOUND: never zero, so that a warm-up as long as the run divides by one.
        let decay_steps = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        match self.scheduler {
            Scheduler::Constant | Scheduler::ConstantWithWarmup => 1.0,
            Scheduler::Linear => self.total_steps.saturating_sub(completed) as f64 / decay_steps,
            Scheduler::Cosine => self.cosine(completed, decay_steps).max(0.0),
            Scheduler::CosineWithMinLr { rate } => (self.cosine(completed, decay_steps) * (1.0 - rate) + rate).max(0.0),
        }
    }

    /// Half a wave from one to zero.
    fn cosine(&self, completed: u64, decay_steps: f64) -> f64 {
        let progress = (completed - self.warmup_steps) as f64 / decay_steps;
        0.5 * (1.0 + libm::cos(core::f64::consts::PI * progress))
    }
}

/// A share refers to all updates and is rounded up.
fn warmup_steps(warmup: Warmup, total_steps: u64) -> u64 {
    match warmup {
        Warmup::Steps(steps) => steps,
        Warmup::Share(share) => libm::ceil(total_steps as f64 * share) as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(scheduler: Scheduler, warmup_steps: u64, total_steps: u64, expected: &[f64]) {
        let schedule = Schedule { learning_rate: 1.0, scheduler, warmup_steps, total_steps };
        let found: Vec<f64> = (0..expected.len() as u64).map(|completed| schedule.at(completed)).collect();
        let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&found), bits(expected), "{scheduler:?}\n{found:?}\n{expected:?}");
    }

    #[test]
    fn tables_of_the_hand() {
        check(Scheduler::Constant, 3, 4, &[1.0; 6]);
        check(Scheduler::ConstantWithWarmup, 4, 8, &[0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]);
        check(Scheduler::Linear, 0, 4, &[1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
        check(Scheduler::Linear, 2, 6, &[0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]);
    }

    /// Cosines known in closed form; the bound is the rounding error of π and of the cosine near a
    /// zero crossing.
    fn check_near(scheduler: Scheduler, warmup_steps: u64, total_steps: u64, expected: &[f64]) {
        let schedule = Schedule { learning_rate: 2.0, scheduler, warmup_steps, total_steps };
        for (completed, &multiplier) in expected.iter().enumerate() {
            let found = schedule.at(completed as u64);
            assert!((found - 2.0 * multiplier).abs() <= 1e-15, "{completed}: {found} {multiplier}");
        }
    }

    #[test]
    fn cosine_passes_through_the_known_angles() {
        let half_root = core::f64::consts::FRAC_1_SQRT_2;
        let quarter = [1.0, 0.5 + 0.5 * half_root, 0.5, 0.5 - 0.5 * half_root, 0.0];
        check_near(Scheduler::Cosine, 0, 4, &quarter);
        check_near(Scheduler::Cosine, 2, 8, &[0.0, 0.5, 1.0, 0.5 + 0.25 * 3_f64.sqrt(), 0.75, 0.5, 0.25]);
        let raised = quarter.map(|value| 0.9 * value + 0.1);
        check_near(Scheduler::CosineWithMinLr { rate: 0.1 }, 0, 4, &raised);
        check(Scheduler::Cosine, 0, 1, &[1.0, 0.0]);
    }

    #[test]
    fn cosine_bits_are_pinned() {
        let schedule =
            Schedule { learning_rate: 2e-4, scheduler: Scheduler::Cosine, warmup_steps: 3, total_steps: 100 };
        let found: Vec<String> = [1, 10, 50, 99].map(|at| format!("{:016x}", schedule.at(at).to_bits())).to_vec();
        assert_eq!(found, ["3f1179ec9cbd821e", "3f29e105b9f8741b", "3f1b7cc82e43bc38", "3e6c27b9623d7732"]);
    }

    #[test]
    fn odd_lengths_stay_finite() {
        for (warmup_steps, total_steps) in [(0, 0), (5, 5), (9, 5), (1, 1), (0, u64::MAX)] {
            for scheduler in [Scheduler::Linear, Scheduler::Cosine, Scheduler::CosineWithMinLr { rate: 0.5 }] {
                let schedule = Schedule { learning_rate: 1.0, scheduler, warmup_steps, total_steps };
                for completed in [0, 1, 4, 5, 8, 9, 10, u64::MAX] {
                    let found = schedule.at(completed);
                    assert!((0.0..=1.0).contains(&found), "{schedule:?} {completed} {found}");
                }
            }
        }
    }

    #[test]
    fn a_share_of_the_updates_is_rounded_up() {
        for (share, total, steps) in [(0.03, 100, 3), (0.03, 101, 4), (0.1, 1, 1), (0.5, 0, 0)] {
            assert_eq!(warmup_steps(Warmup::Share(share), total), steps, "{share} {total}");
        }
        assert_eq!(warmup_steps(Warmup::Steps(7), 3), 7);
    }
}
