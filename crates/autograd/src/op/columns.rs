//! Moves columns of values into columns of others: splits a projection into its parts, and
//! assembles keys from several values.
//!
//! Every column of an input goes somewhere, and every column of an output comes from somewhere, so
//! both passes write each element once and need no zero fill. A block of an input may go to all
//! groups of an output; the groups' gradients are then added in ascending order.

use crate::op::Node;
use crate::tape::{Gradient, Tape, Variable};
use isobit_kernels::Backend;
use isobit_kernels::op::{ColumnMode, Columns, CopyColumns, Place};
use std::rc::Rc;

/// Blocks of columns within the tokens of one value: the first column, and the stride between
/// blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Index of the input or output.
    pub of: usize,
    pub offset: usize,
    /// 0, only for an input: one block for all groups.
    pub stride: usize,
}

/// `groups` blocks of `width` columns go from an input to an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    pub groups: usize,
    pub width: usize,
    pub from: Blocks,
    pub to: Blocks,
}

impl Move {
    /// Columns `offset .. offset + width` of the first input become the whole output `to`.
    pub fn cut(offset: usize, width: usize, to: usize) -> Self {
        let from = Blocks { of: 0, offset, stride: width };
        Self { groups: 1, width, from, to: Blocks { of: to, offset: 0, stride: width } }
    }

    fn shape(&self, tokens: usize, from: Place, to: Place) -> Columns {
        Columns { tokens, groups: self.groups, width: self.width, from, to, mode: ColumnMode::Overwrite }
    }

    /// Columns of its input, and of its output.
    fn columns(&self) -> [usize; 2] {
        [if self.from.stride == 0 { 1 } else { self.groups }, self.groups].map(|groups| groups * self.width)
    }
}

/// A value without its numbers.
#[derive(Clone, Copy)]
struct Shape {
    id: usize,
    width: usize,
    needs_gradient: bool,
}

impl Shape {
    fn place(self, blocks: Blocks) -> Place {
        Place { row: self.width, offset: blocks.offset, stride: blocks.stride }
    }
}

fn shape<B: Backend>(x: &Variable<B>) -> Shape {
    Shape { id: x.id, width: x.width, needs_gradient: x.needs_gradient }
}

pub(crate) struct Saved {
    inputs: Vec<Shape>,
    outputs: Vec<Shape>,
    moves: Vec<Move>,
}

impl<B: Backend> Tape<'_, B> {
    /// Values of the given widths, whose columns come from the inputs.
    pub fn rearrange<const N: usize>(
        &mut self,
        inputs: &[&Variable<B>],
        widths: [usize; N],
        moves: &[Move],
    ) -> [Variable<B>; N] {
        for (at, input) in inputs.iter().enumerate() {
            let moved = moves.iter().filter(|one| one.from.of == at).map(|one| one.columns()[0]);
            assert_eq!(moved.sum::<usize>(), input.width, "every column of input {at} goes somewhere");
        }
        let tokens = self.layout.tokens;
        let sources: Vec<Shape> = inputs.iter().map(|input| shape(input)).collect();
        let mut targets = Vec::new();
        let outputs = std::array::from_fn(|at| {
            let output = Shape { id: 0, width: widths[at], needs_gradient: false };
            let moves = || moves.iter().filter(|one| one.to.of == at);
            let filled = moves().map(|one| one.columns()[1]).sum::<usize>();
            assert_eq!(filled, output.width, "every column of output {at} comes from somewhere");
            let mut y = self.take(tokens * output.width);
            for one in moves() {
                let p = one.shape(tokens, sources[one.from.of].place(one.from), output.place(one.to));
                self.backend.run(CopyColumns { y: y.buffer_mut(), x: inputs[one.from.of].buffer(), p });
            }
            let needs_gradient = moves().any(|one| sources[one.from.of].needs_gradient);
            let y = self.variable(Rc::new(y), output.width, needs_gradient);
            targets.push(shape(&y));
            y
        });
        if targets.iter().any(|target| target.needs_gradient) {
            let saved = Saved { inputs: sources, outputs: targets, moves: moves.to_vec() };
            self.record("columns", &[], || Node::Columns(saved));
        }
        outputs
    }
}

impl Saved {
    pub(crate) fn backward<B: Backend>(self, tape: &Tape<B>, values: &mut [Gradient<B>]) {
        let tokens = tape.layout.tokens;
        let gradients: Vec<Gradient<B>> = self.outputs.iter().map(|output| values[output.id].take()).collect();
        for (at, input) in self.inputs.iter().enumerate().filter(|(_, input)| input.needs_gradient) {
            let moves = || self.moves.iter().filter(|one| one.from.of == at);
            if moves().all(|one| gradients[one.to.of].is_none()) {
                continue;
            }
            let mut dx = tape.take(tokens * input.width);
            for one in moves() {
                let output = self.outputs[one.to.of];
                let p = one.shape(tokens, output.place(one.to), input.place(one.from));
                let y = dx.buffer_mut();
                match &gradients[one.to.of] {
                    Some(gradient) => tape.backend.run(CopyColumns { y, x: gradient.buffer(), p }),
                    // An output that nothing uses.
                    None => tape.backend.run(CopyColumns { y, x: &tape.backend.zeros(tokens * output.width), p }),
                }
            }
            tape.contribute(values, input.id, Rc::new(dx));
        }
    }
}
