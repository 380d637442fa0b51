//! digest: not written yet.

use crate::Cpu;
use crate::Element;
use isobit_numerics::digest::Digest;

pub(super) fn apply<T: Element>(_cpu: &Cpu, _x: &[T]) -> Digest {
    todo!()
}
