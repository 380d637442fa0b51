//! Decay on a GPU (`op/decay.rs`).

use super::GpuMemory;
use super::device::{Gpu, Groups, arguments, dimension};
use super::memory::GpuBuffer;
use super::program::{Program, program};
use crate::backend::Run;
use crate::op::{Decay, DecayBackward, DecayForward};
use isobit_numerics::lanes::LANES;

impl Run<DecayForward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut DecayForward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        forward(self, op.g, op.beta, (op.a, op.b), op.a_log, op.dt_bias, &op.p);
    }
}

impl Run<DecayBackward<'_, GpuMemory>> for Gpu {
    fn execute(&self, op: &mut DecayBackward<'_, GpuMemory>, _: &mut GpuBuffer<u8>) {
        backward(
            self,
            (&mut *op.da, &mut *op.db),
            op.dparameters.as_mut().map(|(a, b)| (&mut **a, &mut **b)),
            (op.dg, op.dbeta),
            (op.a, op.b),
            op.a_log,
            op.dt_bias,
            &op.p,
            op.row_starts,
        );
    }
}

static DECAY: Program = program!("decay");

type Pair<'a> = (&'a GpuBuffer<f32>, &'a GpuBuffer<f32>);

pub(super) fn forward(
    gpu: &Gpu,
    g: &mut GpuBuffer<f32>,
    beta: &mut GpuBuffer<f32>,
    (a, b): Pair,
    a_log: &GpuBuffer<f32>,
    dt_bias: &GpuBuffer<f32>,
    p: &Decay,
) {
    let length = p.tokens * p.heads;
    assert_eq!([g.len(), beta.len(), a.len(), b.len()], [length; 4], "heads of all tokens");
    assert_eq!([a_log.len(), dt_bias.len()], [p.heads; 2], "parameters of all heads");
    let arguments = arguments![g, beta, a, b, a_log, dt_bias, length, dimension(p.heads)];
    gpu.launch(&DECAY, "decay_forward", Groups::over(length), arguments);
}

pub(super) fn backward(
    gpu: &Gpu,
    (da, db): (&mut GpuBuffer<f32>, &mut GpuBuffer<f32>),
    parameters: Option<(&mut GpuBuffer<f32>, &mut GpuBuffer<f32>)>,
    (dg, dbeta): Pair,
    (a, b): Pair,
    a_log: &GpuBuffer<f32>,
    dt_bias: &GpuBuffer<f32>,
    p: &Decay,
    row_starts: &[usize],
) {
    let (length, heads) = (p.tokens * p.heads, dimension(p.heads));
    assert_eq!([da.len(), db.len(), dg.len(), dbeta.len(), a.len(), b.len()], [length; 6], "heads of all tokens");
    assert_eq!([a_log.len(), dt_bias.len()], [p.heads; 2], "parameters of all heads");
    let arguments = arguments![&*da, db, dg, dbeta, a, b, a_log, dt_bias, length, heads];
    gpu.launch(&DECAY, "decay_backward", Groups::over(length), arguments);
    let Some((da_log, ddt_bias)) = parameters else { return };
    assert_eq!([da_log.len(), ddt_bias.len()], [p.heads; 2], "gradients of all heads");
    assert_eq!(row_starts[row_starts.len() - 1], p.tokens, "rows of data end with the tokens");
    let blocks = gpu.token_blocks(row_starts);
    let count = dimension(blocks.len() / 2);
    let arguments = arguments![da_log, ddt_bias, dg, &*da, a, a_log, dt_bias, &blocks, count, heads];
    gpu.launch(&DECAY, "decay_grad_parameters", Groups::each(p.heads.div_ceil(LANES)), arguments);
}
