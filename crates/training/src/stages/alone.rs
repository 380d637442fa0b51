//! A stage without its neighbours, for `plan`: zeros enter it from both sides. It runs the schedule
//! of the real stage, so it holds what that holds.

use super::link::{Backward, End, Forward, Links, Shelf};
use super::schedule::{self, Group};
use crate::engine::{Engine, Stored};
use crate::row::Row;
use crate::step::{Evaluated, Losses, StepError, StepSettings, Update};
use crate::trainer::{Trainer, micro_batches};
use isobit_autograd::Gradients;
use isobit_kernels::{Backend, Parcel};
use isobit_models::TrainedTensor;
use isobit_models::config::MlpKind;
use isobit_numerics::slices::Profile;
use isobit_proof::chain::TensorDigests;
use std::ops::Range;
use std::sync::mpsc::{Receiver, sync_channel};

pub(crate) struct Alone<B: Backend> {
    pub(crate) trainer: Trainer<B>,
    /// Stages behind this one.
    pub(crate) stages_after: usize,
    /// Whether a stage before this one trains anything.
    pub(crate) trained_before: bool,
}

/// What computes, in messages.
const PLANNED: &str = "a planned device";

/// The far ends of the links, which take what the stage sends.
type Ends = (Option<Receiver<Backward>>, Option<Receiver<Forward>>);

impl<B: Backend> Alone<B> {
    /// Links with the zeros of every micro-batch in them. Memory that is never touched.
    fn links(&self, rows: &[&Row], micro_batch_size: usize) -> (Links, Ends) {
        let config = &self.trainer.model.config;
        let micro: Vec<Range<usize>> = micro_batches(0..rows.len(), micro_batch_size).collect();
        let (mut links, mut ends) = (Links::default(), (None, None));
        let experts = config.layers.iter().find_map(|layer| match &layer.mlp {
            MlpKind::Experts(experts) => Some(experts.experts),
            MlpKind::Dense { .. } => None,
        });
        let tokens = |rows: &[&Row]| rows.iter().map(|row| row.tokens().len()).sum::<usize>();
        let zeros = |micro: &Range<usize>| Parcel::new(tokens(&rows[micro.clone()]) * config.hidden);
        let full = "as many places as messages";
        if !self.trainer.model.part.is_first() {
            let (send, receive) = sync_channel(micro.len());
            let (back, end) = sync_channel(micro.len());
            for (at, micro) in micro.iter().enumerate() {
                let needs_gradient = self.trained_before;
                let message = Forward { at, values: zeros(micro), needs_gradient, balance: None };
                send.try_send(message).expect(full);
            }
            (links.before, ends.0) = (Some(End { receive, send: back, shelf: Shelf::default() }), Some(end));
        }
        if !self.trainer.model.part.is_last() {
            let (send, end) = sync_channel(micro.len());
            let (back, receive) = sync_channel(micro.len());
            for (at, micro) in micro.iter().enumerate() {
                let share = config.balance.and(experts).map(|experts| vec![0.0; micro.len() * experts]);
                back.try_send(Backward { at, values: zeros(micro), share }).expect(full);
            }
            (links.after, ends.1) = (Some(End { receive, send, shelf: Shelf::default() }), Some(end));
        }
        (links, ends)
    }
}

impl<B: Backend> Engine for Alone<B> {
    type Gradients = Gradients<B>;

    fn tensors(&self) -> &[TrainedTensor] {
        self.trainer.tensors()
    }

    fn group_gradients(
        &self,
        update: &Update<'_>,
        group: Range<usize>,
        settings: &StepSettings,
    ) -> Result<(Gradients<B>, Losses), StepError> {
        let first_row = group.start;
        let update = Update { rows: &update.rows[group], ..*update };
        let (links, _ends) = self.links(update.rows, settings.micro_batch_size);
        let group = Group { update, first_row, settings };
        schedule::group_gradients(&self.trainer, &group, &links, self.stages_after).map_err(|stop| stop.on(PLANNED))
    }

    fn add(&self, left: Gradients<B>, right: Gradients<B>) -> Result<Gradients<B>, StepError> {
        self.trainer.add(left, right)
    }

    fn combine(&self, gradients: &mut Gradients<B>) -> Result<(), StepError> {
        let Trainer { backend, model, parameters, .. } = &self.trainer;
        let table = parameters.iter().next().filter(|_| model.has_split_table());
        if let Some((id, parameter)) = table {
            gradients.combine_with(backend, id, &vec![0.0; parameter.length()]);
        }
        Ok(())
    }

    fn download(&self, gradients: &Gradients<B>) -> Result<Vec<Vec<f32>>, StepError> {
        self.trainer.download(gradients)
    }

    fn upload(&self, parts: Vec<Vec<f32>>) -> Result<Gradients<B>, StepError> {
        self.trainer.upload(parts)
    }

    fn sums_of_squares(&self, gradients: &Gradients<B>) -> Result<Vec<f32>, StepError> {
        self.trainer.sums_of_squares(gradients)
    }

    fn scale(&self, gradients: &mut Gradients<B>, factor: f32) -> Result<(), StepError> {
        self.trainer.scale(gradients, factor)
    }

    fn apply(
        &mut self,
        gradients: &Gradients<B>,
        step: u64,
        learning_rate: f64,
        settings: &StepSettings,
    ) -> Result<Vec<f32>, StepError> {
        let squares = self.trainer.apply(gradients, step, learning_rate, settings)?;
        if let Some(id) = self.trainer.model.table_copy {
            let zeros = vec![0.0; self.trainer.parameters.get(id).length()];
            self.trainer.write_table(&zeros);
        }
        Ok(squares)
    }

    fn update_digests(&self, gradients: &Gradients<B>) -> Result<Vec<TensorDigests>, StepError> {
        self.trainer.update_digests(gradients)
    }

    fn evaluate_rows(
        &self,
        rows: &[&Row],
        range: Range<usize>,
        profile: Profile,
        micro_batch_size: usize,
    ) -> Result<Evaluated, StepError> {
        let first_row = range.start;
        let (links, _ends) = self.links(&rows[range.clone()], micro_batch_size);
        let how = (profile, micro_batch_size);
        schedule::evaluate(&self.trainer, &rows[range], first_row, how, &links).map_err(|stop| stop.on(PLANNED))
    }

    fn device_peaks(&self) -> Result<Vec<Option<u64>>, StepError> {
        self.trainer.device_peaks()
    }

    fn read(&self, tensor: usize, which: Stored) -> Result<Vec<f32>, StepError> {
        self.trainer.read(tensor, which)
    }

    fn write(&mut self, tensor: usize, which: Stored, values: Vec<f32>) -> Result<(), StepError> {
        self.trainer.write(tensor, which, values)
    }
}
