//! Would the suite notice? Every op in turn goes wrong by one bit of one element, and the
//! comparison that all tests use must say so. If this fails, the green of every other test means
//! nothing.

use isobit_conformance::{Case, Visitor, cases, first_difference};
use isobit_kernels::backend::{Bytes, OPS};
use isobit_kernels::observe::{Call, Observed, Observer};
use isobit_kernels::op::Output;
use isobit_kernels::reference::ReferenceMemory;
use isobit_kernels::{Buffer, Reference};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Notes the ops that run, and spoils what one of them writes.
#[derive(Default)]
struct Drift {
    op: Option<&'static str>,
    seen: RefCell<BTreeSet<&'static str>>,
}

impl Observer<Reference> for Drift {
    fn before(&self, _: &Reference, _: Call, _: &mut Bytes<ReferenceMemory>) {}

    fn after(&self, _: &Reference, call: Call, outputs: Vec<Output<'_, ReferenceMemory>>) {
        self.seen.borrow_mut().insert(call.op);
        if self.op == Some(call.op) {
            outputs.into_iter().for_each(spoil);
        }
    }
}

/// Flips the lowest bit of the first element that says something: no zero, no infinity, no NaN.
fn spoil(output: Output<'_, ReferenceMemory>) {
    fn first<T: isobit_kernels::Element>(x: &mut Buffer<T>) -> Option<&mut T> {
        x.iter_mut().find(|x| x.to_f32() != 0.0 && x.to_f32().is_finite())
    }
    match output {
        Output::F32(x) | Output::Kept(x) => {
            if let Some(x) = first(x) {
                *x = f32::from_bits(x.to_bits() ^ 1);
            }
        }
        Output::Bf16(x) => {
            if let Some(x) = first(x) {
                *x = half::bf16::from_bits(x.to_bits() ^ 1);
            }
        }
        Output::F16(x) => {
            if let Some(x) = first(x) {
                *x = half::f16::from_bits(x.to_bits() ^ 1);
            }
        }
        Output::U32(x) => x.iter_mut().take(1).for_each(|x| *x ^= 1),
        Output::Rows(rows) => rows.integers.iter_mut().find(|x| **x != 0).into_iter().for_each(|x| *x ^= 1),
        Output::Weight(weight) => weight.integers.iter_mut().find(|x| **x != 0).into_iter().for_each(|x| *x ^= 1),
    }
}

/// Ops whose drift some case noticed.
#[derive(Default)]
struct Noticed(BTreeSet<&'static str>);

impl Visitor for Noticed {
    fn case<C: Case>(&mut self, case: &C) {
        let watched = Observed { inner: Reference, observer: Drift::default() };
        let want = case.run(&watched);
        for op in watched.observer.seen.take().difference(&self.0.clone()) {
            let observer = Drift { op: Some(op), ..Drift::default() };
            // A case that compares two ways on its own panics: that is a notice, too.
            let got = catch_unwind(AssertUnwindSafe(|| case.run(&Observed { inner: Reference, observer })));
            if !got.is_ok_and(|got| first_difference(&want, &got).is_none()) {
                self.0.insert(op);
            }
        }
    }
}

#[test]
fn one_bit_of_any_op_is_noticed() {
    let mut noticed = Noticed::default();
    cases::visit_all(&mut noticed);
    let missed: Vec<_> = OPS.iter().filter(|(_, op)| !noticed.0.contains(op)).collect();
    assert!(missed.is_empty(), "no case notices a wrong result of {missed:?}");
}
