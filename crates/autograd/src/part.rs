//! The tape of a part of a model, whose layers are divided among devices. Activations enter it from
//! the part before and leave it for the part after; gradients travel the other way, both in
//! [`Parcel`]s.
//!
//! Every reader of a value that enters lies in this part, so its gradient is complete when the tape
//! has been played: the sum is the one a tape of the whole model would form.

use crate::TapeError;
use crate::arena::Lease;
use crate::gradients::Gradients;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::{Backend, DeviceFailure, Parcel};
use std::rc::Rc;

impl<B: Backend> Tape<'_, B> {
    /// The activations that enter the part: `[tokens, width]`. With `needs_gradient`,
    /// [`Tape::backward_part`] returns their gradient.
    pub fn enter(&mut self, parcel: &mut Parcel, width: usize, needs_gradient: bool) -> Result<Variable<B>, TapeError> {
        assert_eq!(parcel.len(), self.layout.tokens * width, "an activation of every token");
        let data = self.arrived(parcel)?;
        let x = self.variable(Rc::new(data), width, needs_gradient);
        self.input = needs_gradient.then_some(x.id);
        Ok(x)
    }

    /// The activations that leave the part; returns whether it wants their gradient.
    pub fn leave(&mut self, x: &Variable<B>, parcel: &mut Parcel) -> Result<bool, TapeError> {
        self.output = x.needs_gradient.then_some(x.id);
        self.backend.pack(parcel, x.buffer())?;
        Ok(x.needs_gradient)
    }

    /// Plays the part backward: from the gradient of what left it, or from its loss if nothing
    /// left. Returns the gradient of what entered, if that was wanted, in the parcel of its length
    /// that `parcel` gives; what arrived goes to `done`.
    pub fn backward_part(
        mut self,
        gradient: Option<Parcel>,
        gradients: &mut Gradients<B>,
        parcel: impl FnOnce(usize) -> Parcel,
        done: impl FnOnce(Parcel),
    ) -> Result<Option<Parcel>, TapeError> {
        let mut values: Vec<Gradient<B>> = (0..self.next).map(|_| None).collect();
        if let (Some(output), Some(mut gradient)) = (self.output, gradient) {
            values[output] = Some(Rc::new(self.arrived(&mut gradient)?));
            done(gradient);
        }
        self.play(&mut values, gradients)?;
        gradients.check_reached(self.parameters)?;
        let Some(entered) = self.input.and_then(|input| values[input].take()) else { return Ok(None) };
        let mut parcel = parcel(entered.length());
        self.backend.pack(&mut parcel, entered.buffer())?;
        Ok(Some(parcel))
    }

    fn arrived(&self, parcel: &mut Parcel) -> Result<Lease<B>, DeviceFailure> {
        let mut data = self.take(parcel.len());
        self.backend.unpack(data.buffer_mut(), parcel)?;
        Ok(data)
    }
}
