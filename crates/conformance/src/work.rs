//! How much work a case is: devices that are slow, or that should answer quickly, run small cases
//! only.

use crate::Case;
use isobit_kernels::{Counting, Cpu};

/// BOUND: multiply-adds and outputs of a small case.
pub const SMALL_WORK_MAX: u64 = 100_000;

/// Multiply-adds and outputs of a case.
pub fn work_of(counting: &Counting<Cpu>, case: &impl Case) -> u64 {
    counting.forget();
    case.run(counting);
    counting.work().values().map(|work| work.multiply_adds + work.outputs).sum()
}
