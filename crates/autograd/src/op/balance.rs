//! The load-balancing loss of a model's routers (`docs/numerics.md`, "Load balance"): one value per
//! row of data, pooled over layers.
//!
//! The forward pass collects how often and how probably every expert was chosen; before the
//! backward pass, the host computes the loss and its gradient with respect to the probabilities.
//! Each router adds that to the gradient of its logits.
#![expect(clippy::float_arithmetic, reason = "a loss of a few numbers, on the host as numerics.md defines it")]

use crate::TapeError;
use crate::arena::Lease;
use crate::op::router::{Grouping, Router};
use crate::tape::Tape;
use isobit_kernels::Backend;
use isobit_kernels::op::BalanceForward;
use isobit_kernels::tensor::F32;
use std::rc::Rc;

/// The weight of each row's balance loss in the step.
#[derive(Clone, Debug, PartialEq)]
pub struct Balance {
    pub coefficient: f64,
    /// Number of targets in each row of the micro-batch.
    pub targets: Vec<usize>,
    /// Number of targets in the whole step.
    pub step_targets: usize,
}

/// What layers have contributed to the loss of a micro-batch, on the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BalanceSums {
    experts: usize,
    /// Layers with a router.
    layers: usize,
    /// `[rows, experts]`: how often each expert was chosen.
    counts: Vec<u64>,
    /// `[rows, experts]`: the sum of its probabilities.
    pooled: Vec<f64>,
}

/// What the layers of a tape have contributed so far.
pub(crate) struct Collected<B: Backend> {
    pub(crate) balance: Balance,
    experts: usize,
    /// The choices of each layer.
    groupings: Vec<Rc<Grouping<B>>>,
    /// `[rows, experts]` per layer.
    sums: Vec<F32<B>>,
    /// The gradient of the sums, the same for every layer.
    pub(crate) share: Option<Rc<F32<B>>>,
}

impl<B: Backend> Collected<B> {
    pub(crate) fn new(balance: Balance) -> Self {
        Self { balance, experts: 0, groupings: Vec::new(), sums: Vec::new(), share: None }
    }

    /// For the tape of a recomputation, which only plays backward.
    pub(crate) fn of_backward(&self) -> Self {
        Self { share: self.share.clone(), ..Self::new(self.balance.clone()) }
    }
}

impl<B: Backend> Tape<'_, B> {
    /// Enables the load-balancing loss: [`Tape::balance_loss`] must follow the forward pass.
    #[must_use]
    pub fn with_balance(mut self, balance: Balance) -> Self {
        assert_eq!(balance.targets.len() + 1, self.layout.row_starts.len(), "targets of every row");
        self.collected = Some(Collected::new(balance));
        self
    }

    pub(crate) fn note_balance(&mut self, logits: &Lease<B>, grouping: &Rc<Grouping<B>>, router: &Router<B>) {
        let Some(collected) = &mut self.collected else { return };
        let (row_starts, experts) = (&self.layout.row_starts, router.experts);
        collected.experts = experts;
        collected.groupings.push(Rc::clone(grouping));
        let mut sums = self.backend.zeros((row_starts.len() - 1) * experts);
        self.backend.run(BalanceForward { sums: &mut sums, logits: logits.buffer(), row_starts, experts });
        collected.sums.push(sums);
    }

    /// The loss of every row times its number of targets, summed over the rows, on the scale of the
    /// tokens' losses in the step. Each row's term is passed to `add` in turn. After this call the
    /// backward pass has the gradient.
    pub fn balance_loss(&mut self, add: impl FnMut(f64)) -> Result<(), TapeError> {
        if let Some(share) = self.balance_sums(None)?.and_then(|sums| self.balance_loss_of(&sums, add)) {
            self.set_balance_share(&share);
        }
        Ok(())
    }

    /// What the layers of this tape have contributed, after the layers of earlier parts of the
    /// model; None if the loss is off.
    pub fn balance_sums(&self, before: Option<BalanceSums>) -> Result<Option<BalanceSums>, TapeError> {
        let Some(collected) = &self.collected else { return Ok(None) };
        let mut all = before.unwrap_or_default();
        if collected.experts > 0 {
            let length = (self.layout.row_starts.len() - 1) * collected.experts;
            all.experts = collected.experts;
            all.counts.resize(length, 0);
            all.pooled.resize(length, 0.0);
        }
        for grouping in &collected.groupings {
            for (sum, count) in all.counts.iter_mut().zip(&grouping.wait(self)?.counts) {
                *sum += u64::from(*count);
            }
        }
        // ORDER: layer after layer.
        for sums in &collected.sums {
            for (pooled, sum) in all.pooled.iter_mut().zip(self.backend.download(sums)?) {
                *pooled += f64::from(sum);
            }
        }
        all.layers += collected.sums.len();
        Ok(Some(all))
    }

    /// The loss from what all layers have contributed. Returns its gradient, for the tape of every
    /// part of the model; None if the loss is off.
    pub fn balance_loss_of(&self, all: &BalanceSums, mut add: impl FnMut(f64)) -> Option<Vec<f32>> {
        let balance = &self.collected.as_ref()?.balance;
        let mut share = Vec::with_capacity(all.pooled.len());
        for (row, range) in self.layout.row_starts.windows(2).enumerate() {
            let tokens = (all.layers * (range[1] - range[0])) as f64;
            let weight = balance.coefficient * balance.targets[row] as f64;
            let mut sum = 0.0;
            for at in row * all.experts..(row + 1) * all.experts {
                let frequency = all.counts[at] as f64 / tokens;
                sum += frequency * (all.pooled[at] / tokens);
                share.push((weight / balance.step_targets as f64 * all.experts as f64 * frequency / tokens) as f32);
            }
            add(weight * (all.experts as f64 * sum));
        }
        Some(share)
    }

    /// The gradient of the loss, for the backward pass.
    pub fn set_balance_share(&mut self, share: &[f32]) {
        if let Some(collected) = &mut self.collected {
            collected.share = Some(Rc::new(self.backend.upload(share)));
        }
    }

    pub(crate) fn balance_share(&self) -> Option<&F32<B>> {
        let collected = self.collected.as_ref()?;
        Some(collected.share.as_ref().expect("the balance loss is known before the backward pass"))
    }
}
