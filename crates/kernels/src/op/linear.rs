//! Linear layer (`docs/numerics.md`, "Composition"): a slice product and what follows it, in one
//! op.
//!
//! The bits are those of its component ops in sequence: `slice_rows`, `low_rank_contract` of the
//! input; `product_forward`, `bias_forward`, `low_rank_expand`; backward `low_rank_contract`,
//! `product_grad_input`, `low_rank_expand`. A backend may fuse them.

use crate::backend::{F32, Length, Matrix, Memory, Shaped, Workspaces};
use crate::op::low_rank::{Contraction, LowRank};
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

/// What an adapter does in the backward pass: `low = dy·B`, then `dx += alpha·low A`.
pub struct LowRankGradient<'a, M: Memory> {
    pub low: &'a mut F32<M>,
    pub contract: (&'a F32<M>, LowRank<'a>),
    pub expand: (&'a F32<M>, LowRank<'a>),
}

impl<M: Memory> LowRankGradient<'_, M> {
    pub fn contraction(&mut self) -> Contraction<'_, M> {
        let (factor, p) = self.contract;
        Contraction { u: self.low, factor, p }
    }

    pub fn term(&self) -> LowRankTerm<'_, M> {
        let (factor, p) = self.expand;
        LowRankTerm { u: self.low, factor, p }
    }
}

/// What linear layers need of the input they share: `slice_rows`, then `low_rank_contract` with
/// their adapters.
pub struct LinearInput<'a, M: Memory> {
    pub rows: &'a mut M::Rows,
    pub x: &'a F32<M>,
    pub parts: Vec<Contraction<'a, M>>,
}

impl<M: Memory> Op<M> for LinearInput<'_, M> {
    const NAME: &'static str = "linear_input";

    fn check(&self) {
        let shape = self.rows.shape();
        lengths(Self::NAME, &[("x", self.x.len(), shape.rows * shape.width)]);
        for Contraction { u, factor, p } in &self.parts {
            assert_eq!((p.segments, p.width), (&[0, shape.rows][..], shape.width), "one factor for all rows");
            p.check_lengths(Self::NAME, [u.len(), self.x.len(), factor.len()]);
        }
    }

    fn multiply_adds(&self) -> usize {
        self.parts.iter().map(|part| part.p.multiply_adds()).sum()
    }

    /// Rows, ranks of all factors, width.
    fn size(&self) -> [usize; 3] {
        let shape = self.rows.shape();
        [shape.rows, self.parts.iter().map(|part| part.p.rank).sum(), shape.width]
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        self.parts.iter().map(|part| of.low_rank(&part.p)).max().unwrap_or(0)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        let lows = self.parts.iter_mut().map(|part| Output::F32(&mut *part.u));
        lows.chain([Output::Rows(self.rows)]).collect()
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

/// `low_rank_contract`, then `product_grad_input`, then `low_rank_expand`.
pub struct LinearGradInput<'a, M: Memory> {
    pub dx: &'a mut F32<M>,
    pub dy: &'a F32<M>,
    pub w: Matrix<'a, M>,
    pub p: Product<'a>,
    pub adapter: Option<LowRankGradient<'a, M>>,
}

impl<M: Memory> Op<M> for LinearGradInput<'_, M> {
    const NAME: &'static str = "linear_grad_input";

    fn check(&self) {
        let p = &self.p;
        p.check_grad_input(Self::NAME, self.dx.len(), self.dy.len(), self.w);
        assert!(p.weights() == 1 && p.n > 0, "a linear layer has one weight, and outputs");
        if let Some(adapter) = &self.adapter {
            adapter.term().check(Self::NAME, p.rows(), p.k);
            let (factor, contract) = &adapter.contract;
            assert_eq!(contract.segments, &[0, p.rows()], "one factor for all rows");
            contract.check_lengths(Self::NAME, [adapter.low.len(), self.dy.len(), factor.len()]);
        }
    }

    fn multiply_adds(&self) -> usize {
        let of_adapter = |adapter: &LowRankGradient<M>| {
            [adapter.contract.1, adapter.expand.1].iter().map(LowRank::multiply_adds).sum()
        };
        self.p.multiply_adds() + self.adapter.as_ref().map_or(0, of_adapter)
    }

    fn size(&self) -> [usize; 3] {
        self.p.size()
    }

    fn workspace(&self, of: &dyn Workspaces) -> usize {
        let product = of.linear(&self.p, self.adapter.as_ref().map(|adapter| &adapter.expand.1));
        self.adapter.as_ref().map_or(0, |adapter| of.low_rank(&adapter.contract.1)).max(product)
    }

    fn outputs(&mut self) -> Vec<Output<'_, M>> {
        let low = self.adapter.as_mut().map(|adapter| Output::F32(&mut *adapter.low));
        std::iter::once(Output::F32(self.dx)).chain(low).collect()
    }
}
