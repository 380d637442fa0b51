//! The tape of a part of a model, whose layers are divided among devices. Activations enter it from
//! the part before and leave it for the part after; gradients travel the other way.
//!
//! Every reader of a value that enters lies in this part, so its gradient is complete when the tape
//! has been played: the sum is the one a tape of the whole model would form.

use crate::TapeError;
use crate::gradients::Gradients;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use std::rc::Rc;

impl<B: Backend> Tape<'_, B> {
    /// The activations that enter the part: `[tokens, width]`. With `needs_gradient`,
    /// [`Tape::backward_part`] returns their gradient.
    pub fn enter(&mut self, numbers: &[f32], width: usize, needs_gradient: bool) -> Variable<B> {
        assert_eq!(numbers.len(), self.layout.tokens * width, "an activation of every token");
        let data = self.lease_of(numbers);
        let x = self.variable(Rc::new(data), width, needs_gradient);
        self.input = needs_gradient.then_some(x.id);
        x
    }

    /// The activations that leave the part, and whether it wants their gradient.
    pub fn leave(&mut self, x: &Variable<B>) -> Result<(Vec<f32>, bool), TapeError> {
        self.output = x.needs_gradient.then_some(x.id);
        Ok((self.backend.download(x.buffer())?, x.needs_gradient))
    }

    /// Plays the part backward: from the gradient of what left it, or from its loss if nothing
    /// left. Returns the gradient of what entered, if that was wanted.
    pub fn backward_part(
        mut self,
        gradient: Option<&[f32]>,
        gradients: &mut Gradients<B>,
    ) -> Result<Option<Vec<f32>>, TapeError> {
        let mut values: Vec<Gradient<B>> = (0..self.next).map(|_| None).collect();
        if let (Some(output), Some(gradient)) = (self.output, gradient) {
            values[output] = Some(Rc::new(self.lease_of(gradient)));
        }
        self.play(&mut values, gradients)?;
        gradients.check_reached(self.parameters)?;
        let entered = self.input.and_then(|input| values[input].take());
        entered.map(|gradient| Ok(self.backend.download(gradient.buffer())?)).transpose()
    }
}
