//! Linear layers on a GPU: where tensor cores form the product, bias and adapter are added before it is stored; elsewhere one
//! op follows the other. The bits are the same.

use super::device::{Gpu, dimension};
use super::hopper::{self, Epilogue, LowRank};
use super::memory::{GpuBuffer, Place};
use super::slices::SlicedRows;
use super::{bias, product, thin};
use crate::Matrix;
use crate::op::{Product, Thin};

/// The short side of an adapter, its factor, its shape.
type Low<'a> = (&'a GpuBuffer<f32>, &'a GpuBuffer<f32>, &'a Thin<'a>);

/// An adapter as the end of a product. `None` if several factors meet several rows.
fn low_rank((u, factor, p): Low) -> Option<LowRank> {
    let (rank_step, width_step) = thin::steps(p);
    let [u, factor] = [u, factor].map(|buffer| (Place::from(buffer), 0));
    (p.factors() == 1).then(|| LowRank { u, factor, rank: dimension(p.rank), rank_step, width_step, alpha: p.alpha })
}

pub(super) fn forward(
    gpu: &Gpu,
    y: &mut GpuBuffer<f32>,
    x: &SlicedRows,
    w: Matrix<Gpu>,
    p: &Product,
    bias: Option<&GpuBuffer<f32>>,
    low: Option<Low>,
    workspace: &mut GpuBuffer<u8>,
) {
    let adapter = low.and_then(low_rank);
    if p.weights() == 1 && hopper::serves(gpu, p.profile, p.k) && adapter.is_some() == low.is_some() {
        if let Some(bias) = bias {
            assert_eq!(bias.len(), p.n, "bias");
        }
        if let Some((u, factor, thin)) = low {
            thin::check(u, y, factor, thin);
        }
        let end = Epilogue { bias: bias.map(|bias| (Place::from(bias), 0)), low: adapter };
        return product::forward(gpu, y, x, w, p, end, workspace);
    }
    product::forward(gpu, y, x, w, p, Epilogue::default(), workspace);
    if let Some(bias) = bias {
        bias::forward(gpu, y, bias);
    }
    if let Some((u, factor, thin)) = low {
        thin::expand(gpu, y, u, factor, thin, workspace);
    }
}

pub(super) fn grad_input(
    gpu: &Gpu,
    dx: &mut GpuBuffer<f32>,
    dy: &GpuBuffer<f32>,
    w: Matrix<Gpu>,
    p: &Product,
    low: Option<Low>,
    workspace: &mut GpuBuffer<u8>,
) {
    let adapter = low.and_then(low_rank);
    if p.weights() == 1 && hopper::serves(gpu, p.profile, p.n) && adapter.is_some() == low.is_some() {
        if let Some((u, factor, thin)) = low {
            thin::check(u, dx, factor, thin);
        }
        let end = Epilogue { bias: None, low: adapter };
        return product::grad_input(gpu, dx, dy, w, p, end, workspace);
    }
    product::grad_input(gpu, dx, dy, w, p, Epilogue::default(), workspace);
    if let Some((u, factor, thin)) = low {
        thin::expand(gpu, dx, u, factor, thin, workspace);
    }
}
