//! What the program observes ops with: a stopwatch (`bench step --breakdown`) or a tracer
//! (`replay --against`). One type, so that the training code is compiled once for both.

use crate::bench::Stopwatch;
use isobit_kernels::backend::Bytes;
use isobit_kernels::observe::{Call, Observer};
use isobit_kernels::op::Output;
use isobit_kernels::{Device, Place};
use isobit_training::trace::Tracer;

pub(crate) enum Watcher {
    Times(Stopwatch),
    Trace(Tracer),
}

impl<D: Device> Observer<D> for Watcher {
    fn enter(&self, place: Place) {
        match self {
            Self::Times(stopwatch) => Observer::<D>::enter(stopwatch, place),
            Self::Trace(tracer) => Observer::<D>::enter(tracer, place),
        }
    }

    fn before(&self, device: &D, call: Call, workspace: &mut Bytes<D::Memory>) {
        match self {
            Self::Times(stopwatch) => stopwatch.before(device, call, workspace),
            Self::Trace(tracer) => tracer.before(device, call, workspace),
        }
    }

    fn after(&self, device: &D, call: Call, outputs: Vec<Output<'_, D::Memory>>) {
        match self {
            Self::Times(stopwatch) => stopwatch.after(device, call, outputs),
            Self::Trace(tracer) => tracer.after(device, call, outputs),
        }
    }
}
