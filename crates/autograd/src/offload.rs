//! What a run keeps in host memory instead of the device's, and how the tape's activations go there
//! and come back. Bytes are moved, never changed.

use crate::TapeError;
use crate::arena::Lease;
use crate::gradients::Gradients;
use crate::op::Node;
use crate::stream::Direction;
use crate::tape::Tape;
use isobit_kernels::{Backend, DeviceFailure, Pass, Place};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::rc::Rc;

/// What is kept in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// Optimizer state and gradients; the update is computed there.
    pub optimizer: bool,
    /// What the tape keeps of a block until the block's backward pass.
    pub activations: bool,
    /// The matrices of layers, except while their layer or the one before it is computed.
    pub weights: bool,
}

impl Offload {
    pub const NONE: Self = Self { optimizer: false, activations: false, weights: false };
    pub const NAMES: [&'static str; 3] = ["optimizer", "activations", "weights"];

    pub fn is_none(self) -> bool {
        self == Self::NONE
    }

    /// With what is called `name` as well; None if nothing is.
    #[must_use]
    pub fn with(self, name: &str) -> Option<Self> {
        Some(match name {
            "optimizer" => Self { optimizer: true, ..self },
            "activations" => Self { activations: true, ..self },
            "weights" => Self { weights: true, ..self },
            _ => return None,
        })
    }

    pub fn names(self) -> Vec<&'static str> {
        let given = [self.optimizer, self.activations, self.weights];
        Self::NAMES.into_iter().zip(given).filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }
}

/// Tensors that replace others, by the address of the other, which lives until all are replaced.
type Moved<B> = BTreeMap<usize, (Rc<Lease<B>>, Rc<Lease<B>>)>;

/// Replaces tensors, those that are the same by the same.
fn replace<'t, B: Backend + 't>(
    tensors: impl IntoIterator<Item = &'t mut Rc<Lease<B>>>,
    mut make: impl FnMut(&Lease<B>) -> Result<Lease<B>, DeviceFailure>,
) -> Result<(), DeviceFailure> {
    let mut moved = Moved::new();
    for tensor in tensors {
        let (_, new) = match moved.entry(Rc::as_ptr(tensor).addr()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let new = Rc::new(make(tensor)?);
                place.insert((Rc::clone(tensor), new))
            }
        };
        *tensor = Rc::clone(new);
    }
    Ok(())
}

impl<B: Backend> Tape<'_, B> {
    /// Keeps activations in host memory between the forward and the backward pass of their block.
    #[must_use]
    pub fn with_activations_on_host(self, activations_on_host: bool) -> Self {
        Self { activations_on_host, ..self }
    }

    /// Moves tensors to host memory, if activations are to be there.
    pub(crate) fn offload<'t>(
        &self,
        tensors: impl IntoIterator<Item = &'t mut Rc<Lease<B>>>,
    ) -> Result<(), DeviceFailure>
    where
        B: 't,
    {
        if !self.activations_on_host {
            return Ok(());
        }
        replace(tensors, |tensor| self.arena.to_host(self.backend, tensor))
    }

    /// Moves tensors back to the device, if they are in host memory.
    pub(crate) fn restore<'t>(&self, tensors: impl IntoIterator<Item = &'t mut Rc<Lease<B>>>)
    where
        B: 't,
    {
        let away = tensors.into_iter().filter(|tensor| tensor.is_on_host());
        let restored = replace(away, |tensor| Ok(self.arena.to_device(self.backend, tensor)));
        restored.expect("a copy to the device is only enqueued");
    }

    /// A block was recorded from node `start` on. The last block of a model is needed next, so its
    /// activations stay.
    pub(crate) fn end_block(&mut self, layer: usize, start: usize, is_last: bool) -> Result<(), DeviceFailure> {
        if !is_last {
            let mut nodes = std::mem::take(&mut self.nodes);
            let offloaded = self.offload(nodes[start..].iter_mut().flat_map(Node::saved_mut));
            self.nodes = nodes;
            offloaded?;
        }
        self.nodes.push(Node::BlockEnd { layer, start });
        Ok(())
    }

    /// The backward pass reaches a block that was recorded from node `start` on.
    pub(crate) fn reenter_block(&mut self, layer: usize, start: usize) {
        self.enter_layer(layer, Direction::Backward);
        self.backend.enter(Place::Layer(layer, Pass::Backward));
        let mut nodes = std::mem::take(&mut self.nodes);
        self.restore(nodes[start..].iter_mut().flat_map(Node::saved_mut));
        self.nodes = nodes;
    }

    /// The backward pass leaves a block.
    pub(crate) fn leave_block(&mut self, gradients: &mut Gradients<B>) -> Result<(), TapeError> {
        gradients.leave_block(self.backend)?;
        self.backend.enter(Place::Embedding(Pass::Backward));
        Ok(())
    }

    /// The weights of a layer come to the device, if they are in host memory.
    pub(crate) fn enter_layer(&self, layer: usize, direction: Direction) {
        if self.parameters.has_streams() {
            self.parameters.enter_layer(self.backend, layer, direction);
        }
    }
}
