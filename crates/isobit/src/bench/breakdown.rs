//! Where the time of a training step goes: every op timed from outside, by name and, for products,
//! by shape.

use isobit_kernels::Device;
use isobit_kernels::backend::Bytes;
use isobit_kernels::observe::{Call, Observer};
use isobit_kernels::op::Output;
use serde::Serialize;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;

#[expect(clippy::disallowed_types, reason = "a benchmark reads the clock")]
type Instant = std::time::Instant;

/// Calls and seconds of every op, shared by the stopwatch and the report.
#[derive(Clone, Default)]
pub(super) struct Times(Rc<RefCell<BTreeMap<Call, (u32, f64)>>>);

impl Times {
    pub(super) fn forget(&self) {
        self.0.borrow_mut().clear();
    }

    /// Per step, largest first.
    pub(super) fn shares(&self, steps: u32) -> Vec<Share> {
        let times = self.0.borrow();
        let all: f64 = times.values().map(|(_, seconds)| seconds).sum();
        let mut shares: Vec<Share> = times
            .iter()
            .map(|(&call, &(calls, seconds))| Share {
                op: call.op,
                size: (call.size != [0; 3]).then_some(call.size),
                calls: f64::from(calls) / f64::from(steps),
                step_s: seconds / f64::from(steps),
                part: seconds / all,
            })
            .collect();
        shares.sort_by(|a, b| b.step_s.total_cmp(&a.step_s));
        shares
    }
}

/// One line of the breakdown.
#[derive(Debug, Serialize)]
pub(super) struct Share {
    op: &'static str,
    /// Rows, outputs and inputs of a product.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<[usize; 3]>,
    calls: f64,
    step_s: f64,
    /// Share of the time spent in ops.
    part: f64,
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.size.map_or(String::new(), |[m, n, k]| {
            let rate = 2e-9 * (m * n * k) as f64 * self.calls / self.step_s;
            format!("  {m}x{n}x{k}, {rate:.0} GFLOP/s")
        });
        let (share, milliseconds) = (100.0 * self.part, 1e3 * self.step_s);
        write!(f, "{share:5.1} %  {milliseconds:9.2} ms  {:6.1} calls  {}{size}", self.calls, self.op)
    }
}

/// Times each op separately.
pub(crate) struct Stopwatch {
    times: Times,
    started: Cell<Option<Instant>>,
}

impl Stopwatch {
    pub(super) fn new(times: Times) -> Self {
        Self { times, started: Cell::new(None) }
    }
}

impl<D: Device> Observer<D> for Stopwatch {
    fn before(&self, _device: &D, _call: Call, _workspace: &mut Bytes<D::Memory>) {
        self.started.set(Some(Instant::now()));
    }

    fn after(&self, device: &D, call: Call, _outputs: Vec<Output<'_, D::Memory>>) {
        // A device works in order: this download completes after everything enqueued before it.
        let _finished = device.download(&device.upload(&[0f32]));
        let seconds = self.started.take().map_or(0.0, |start| start.elapsed().as_secs_f64());
        let mut times = self.times.0.borrow_mut();
        let entry = times.entry(call).or_insert((0, 0.0));
        *entry = (entry.0 + 1, entry.1 + seconds);
    }
}
