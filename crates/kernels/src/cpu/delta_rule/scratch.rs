//! Per-thread scratch for one chunk of one head, and the memory a key head of a document keeps
//! across its chunks.
//!
//! Rows are padded with zeros to whole panels and to whole chunks, so tiles need no edge cases; a
//! chain never includes padding.

use super::tile::PANEL;
use crate::buffer::Workspace;
use crate::cpu::path::Path;
use crate::cpu::pool::SharedMut;
use crate::op::DeltaRule;
use crate::op::delta_rule::CHUNK;
use std::ops::Range;

/// Head widths, plain and rounded up to whole panels, and the compute path.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) path: Path,
    pub(super) key: usize,
    pub(super) value: usize,
    pub(super) key_padded: usize,
    pub(super) value_padded: usize,
}

impl Shape {
    pub(super) fn new(path: Path, p: &DeltaRule) -> Self {
        let [key_padded, value_padded] = [p.key_width, p.value_width].map(|width| width.next_multiple_of(PANEL));
        Self { path, key: p.key_width, value: p.value_width, key_padded, value_padded }
    }

    pub(super) fn panels(&self) -> usize {
        self.value_padded / PANEL
    }

    /// Floats of one panel of a state, `[key_padded, PANEL]`.
    pub(super) fn panel(&self) -> usize {
        self.key_padded * PANEL
    }
}

macro_rules! scratch {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: |$shape:ident| $length:expr,)* }) => {
        $(#[$meta])*
        pub(super) struct $name<'a> {
            $($(#[$doc])* pub(super) $field: &'a mut [f32],)*
        }

        impl<'a> $name<'a> {
            /// Floats, with each part aligned to a cache line.
            pub(super) fn length(shape: Shape) -> usize {
                [$({ let $shape = shape; let _ = $shape; $length }),*].into_iter().map(|x: usize| x.next_multiple_of(16)).sum()
            }

            pub(super) fn new(mut scratch: &'a mut [f32], shape: Shape) -> Self {
                let mut take = |length: usize| {
                    let (part, rest) = std::mem::take(&mut scratch).split_at_mut(length.next_multiple_of(16));
                    scratch = rest;
                    &mut part[..length]
                };
                Self { $($field: { let $shape = shape; let _ = $shape; take($length) }),* }
            }
        }
    };
}

scratch! {
    /// Matrices of one chunk. Squares are `[CHUNK, CHUNK]`, rows of heads `[CHUNK, padded width]`.
    Scratch {
        q: |s| CHUNK * s.key_padded,
        k: |s| CHUNK * s.key_padded,
        /// `[key_padded, CHUNK]`.
        k_transposed: |s| CHUNK * s.key_padded,
        kk: |s| CHUNK * CHUNK,
        qk: |s| CHUNK * CHUNK,
        /// `Γ`.
        between: |s| CHUNK * CHUNK,
        /// `-M`.
        minus_m: |s| CHUNK * CHUNK,
        p: |s| CHUNK * CHUNK,
        /// `A`.
        decay: |s| CHUNK,
        /// `Γ` of the last row.
        rest: |s| CHUNK,
        beta: |s| CHUNK,
        /// `Γ·k` of the last row.
        k_rest: |s| CHUNK * s.key_padded,
        /// `v`, or the gradient of `o`.
        values: |s| CHUNK * s.value_padded,
        y: |s| CHUNK * s.value_padded,
        delta: |s| CHUNK * s.value_padded,
    }
}

scratch! {
    /// Additional scratch of the backward pass.
    GradScratch {
        /// `A·q` and `-(A·k)`.
        q_decayed: |s| CHUNK * s.key_padded,
        k_decayed: |s| CHUNK * s.key_padded,
        d_delta: |s| CHUNK * s.value_padded,
        dy: |s| CHUNK * s.value_padded,
        /// `[value_padded, CHUNK]`.
        delta_transposed: |s| CHUNK * s.value_padded,
        /// Panels `[value_padded, PANEL]` of the transposed state and of its gradient.
        state_transposed: |s| s.key_padded * s.value_padded,
        grad_transposed: |s| s.key_padded * s.value_padded,
        wq: |s| CHUNK * CHUNK,
        /// `-W`, symmetric.
        wk: |s| CHUNK * CHUNK,
        from_q: |s| CHUNK * s.key_padded,
        from_k: |s| CHUNK * s.key_padded,
        from_end: |s| CHUNK * s.key_padded,
        reads: |s| CHUNK,
        ends: |s| CHUNK,
        crossing: |s| CHUNK,
    }
}

/// Data that the value heads of one key head keep for a document, in panels, so that tasks may own
/// one panel each.
#[derive(Clone, Copy)]
pub(super) struct Kept<'a> {
    floats: &'a SharedMut<'a, f32>,
    at: usize,
    shape: Shape,
    sizes: Sizes,
}

/// Sizes of that data.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) heads: usize,
    /// States kept; later ones replace earlier ones.
    pub(super) states: usize,
    /// The same for gradients of states.
    pub(super) grads: usize,
    /// Rows of `Y` and of the gradient of `δ`.
    pub(super) rows: usize,
}

impl Sizes {
    pub(super) fn length(&self, shape: Shape) -> usize {
        self.heads * shape.panels() * self.panel(shape)
    }

    fn panel(&self, shape: Shape) -> usize {
        (self.states + self.grads) * shape.panel() + 2 * self.rows * PANEL
    }

    pub(super) fn bytes(&self, shape: Shape) -> usize {
        Workspace::bytes::<f32>(self.length(shape))
    }
}

impl<'a> Kept<'a> {
    pub(super) fn new(floats: &'a SharedMut<'a, f32>, index: usize, shape: Shape, sizes: Sizes) -> Self {
        Self { floats, at: index * sizes.length(shape), shape, sizes }
    }

    /// # Safety
    /// No one else uses this part of this panel while the result is alive.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    unsafe fn part(&self, head: usize, panel: usize, part: Range<usize>) -> &mut [f32] {
        let at = self.at + (head * self.shape.panels() + panel) * self.sizes.panel(self.shape);
        // SAFETY: the caller has this part of this panel for itself, and parts of different heads
        // and panels do not overlap.
        unsafe { self.floats.slice(at + part.start..at + part.end) }
    }

    /// The state before chunk `chunk`.
    ///
    /// # Safety
    /// No one else uses this state of this panel while the result is alive.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub(super) unsafe fn state(&self, head: usize, panel: usize, chunk: usize) -> &mut [f32] {
        let (at, length) = (chunk % self.sizes.states * self.shape.panel(), self.shape.panel());
        // SAFETY: the caller has this slot, one of `states` in a row, for itself.
        unsafe { self.part(head, panel, at..at + length) }
    }

    /// The gradient of the state after chunk `chunk`.
    ///
    /// # Safety
    /// No one else uses this gradient of this panel while the result is alive.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub(super) unsafe fn grad(&self, head: usize, panel: usize, chunk: usize) -> &mut [f32] {
        let (at, length) = ((self.sizes.states + chunk % self.sizes.grads) * self.shape.panel(), self.shape.panel());
        // SAFETY: the caller has this slot, one of `grads` after the states, for itself.
        unsafe { self.part(head, panel, at..at + length) }
    }

    /// `Y` (0) or the gradient of `δ` (1) of the document's tokens `rows`.
    ///
    /// # Safety
    /// No one else uses these rows of this panel while the result is alive.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub(super) unsafe fn rows(&self, which: usize, head: usize, panel: usize, rows: Range<usize>) -> &mut [f32] {
        let at = (self.sizes.states + self.sizes.grads) * self.shape.panel() + which * self.sizes.rows * PANEL;
        // SAFETY: the caller has these rows, which lie after states and gradients, for itself.
        unsafe { self.part(head, panel, at + rows.start * PANEL..at + rows.end * PANEL) }
    }
}
