//! Linear layer (`docs/numerics.md`, "Composition"): a slice product and what follows it, in one
//! op.
//!
//! The bits are those of its component ops in sequence: `product_forward`, `bias_forward`,
//! `low_rank_expand`; backward `product_grad_input`, `low_rank_expand`. A backend may fuse them.

use crate::backend::{F32, Length, Matrix, Memory, Shaped, Workspaces};
use crate::op::low_rank::LowRank;
use crate::op::product::Product;
use crate::op::{Op, Output, lengths};

/// What an adapter adds to a linear layer: `alpha·u M`.
pub struct LowRankTerm<'a, M: Memory> {
    pub u: &'a F32<M>,
    pub factor: &'a F32<M>,
    pub p: LowRank<'a>,
}

impl<M: Memory> Clone for LowRankTerm<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<M: Memory> Copy for LowRankTerm<'_, M> {}

impl<M: Memory> LowRankTerm<'_, M> {
    /// Panics unless the term fits an output of `rows` rows and `width` columns.
    fn check(&self, op: &'static str, rows: usize, width: usize) {
        assert_eq!((self.p.segments, self.p.width), (&[0, rows][..], width), "{op}: one factor for all rows");
        self.p.check_lengths(op, [self.u.len(), rows * width, self.factor.len()]);
    }
}

/// `product_forward`, then `bias_forward`, then `low_rank_expand`.
pub struct LinearForward<'a, M: Memory> {
    pub y: &'a mut F32<M>,
    pub x: &'a M::Rows,
    pub w: Matrix<'a, M>,
    pub p: Product<'a>,
    pub bias: Option<&'a F32<M>>,
    pub adapter: Option<LowRankTerm<'a, M>>,
}

impl<M: Memory> Op<M> for LinearForward<'_, M> {
    const NAME: &'static str = "linear_forward";

    fn check(&self) {
        let p = &self.p;
        p.check_forward(Self::NAME, self.y.len(), self.x.shape(), self.w);
        assert!(p.weights() == 1 && p.k > 0, "a linear layer has one weight, and inputs");
        if let Some(bias) = self.bias {
            lengths(Self::NAME, &[("bias", bias.len(), p.n)]);
        }
        if let Some(adapter) = &self.adapter {
            adapter.check(Self::NAME, p.rows(), p.n);
        }
    }

    fn multiply_adds(&self) -> usize {
        self.p.multiply_adds() + self.adapter.as_ref().map_or(0, |adapter| adapter.p.multiply_adds())
    }

    fn size(&self) -> [usize; 3] {
        self.p.size()
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.linear(&self.p, self.adapter.as_ref().map(|adapter| &adapter.p))
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.y)]
    }
}

/// `product_grad_input`, then `low_rank_expand`.
pub struct LinearGradInput<'a, M: Memory> {
    pub dx: &'a mut F32<M>,
    pub dy: &'a F32<M>,
    pub w: Matrix<'a, M>,
    pub p: Product<'a>,
    pub adapter: Option<LowRankTerm<'a, M>>,
}

impl<M: Memory> Op<M> for LinearGradInput<'_, M> {
    const NAME: &'static str = "linear_grad_input";

    fn check(&self) {
        let p = &self.p;
        p.check_grad_input(Self::NAME, self.dx.len(), self.dy.len(), self.w);
        assert!(p.weights() == 1 && p.n > 0, "a linear layer has one weight, and outputs");
        if let Some(adapter) = &self.adapter {
            adapter.check(Self::NAME, p.rows(), p.k);
        }
    }

    fn multiply_adds(&self) -> usize {
        self.p.multiply_adds() + self.adapter.as_ref().map_or(0, |adapter| adapter.p.multiply_adds())
    }

    fn size(&self) -> [usize; 3] {
        self.p.size()
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        of.linear(&self.p, self.adapter.as_ref().map(|adapter| &adapter.p))
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        vec![Output::F32(self.dx)]
    }
}
