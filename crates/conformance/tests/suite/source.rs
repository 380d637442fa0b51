//! The CUDA source of the kernels on the CPU, as a card with the tensor cores of sm_80 would run
//! it: a sample of the cases (`conform --on sm80` runs the rest), and mistakes that must be found.

use crate::edited::Edited;
use isobit_conformance::emulated::{Emulated, Emulation};
use isobit_conformance::{Absent, Case, Visitor, cases, skip};
use isobit_kernels::DeviceFailure;
use isobit_kernels::gpu::{Api, Gpu, Selector};
use isobit_simt::{Card, Settings, objection};
use std::rc::Rc;

/// BOUND: multiply-adds and outputs of a case, so that the samples take a minute together.
const WORK_MAX: u64 = 20_000;
/// The same of the cases that reach tensor cores.
const TENSOR_WORK_MAX: u64 = 300_000;

/// Whether there is a compiler; a missing one is a skip, and a failure where `clang` is required.
fn available(test: &str) -> bool {
    let objection = objection();
    skip(test, &objection.iter().map(|why| ("clang".to_string(), why.clone())).collect::<Vec<_>>());
    objection.is_none()
}

fn opened<S: Emulation>(settings: S, work_max: u64) -> Emulated<S> {
    Emulated::new(settings, work_max).unwrap_or_else(|absent| match absent {
        Absent::Missing(why) | Absent::Broken(why) => panic!("{why}"),
    })
}

fn sample(seed: u64, work_max: u64, visit: fn(&mut Emulated<Settings>)) {
    let mut emulated = opened(Settings { seed, ..Settings::default() }, work_max);
    visit(&mut emulated);
    assert!(emulated.compared > 0, "no case was compared");
    assert!(emulated.differences.is_empty(), "{}", emulated.differences.join("\n"));
}

fn tensor_ops<V: Visitor>(visitor: &mut V) {
    cases::attention::visit(visitor);
    cases::product::visit(visitor);
    cases::product4::visit(visitor);
    cases::linear::visit(visitor);
    cases::head_loss::visit(visitor);
}

#[test]
fn all_ops() {
    if available("source::all_ops") {
        sample(1, WORK_MAX, cases::visit_all);
    }
}

#[test]
fn ops_on_tensor_cores() {
    if available("source::ops_on_tensor_cores") {
        sample(2, TENSOR_WORK_MAX, tensor_ops);
    }
}

/// A card whose sources have `from` replaced by `to`.
struct Mistake {
    seed: u64,
    from: &'static str,
    to: &'static str,
}

impl Emulation for Mistake {
    type Card = ();

    fn unavailable_because(&self) -> Option<String> {
        objection()
    }

    fn open(&self) -> Result<(Gpu, Rc<()>), DeviceFailure> {
        let card = Card::new(Settings { seed: self.seed, ..Settings::default() });
        let edited = Edited { card, from: self.from, to: self.to };
        let gpu = Gpu::with_runtime(Rc::new(edited), Selector { api: Api::Cuda, index: 0 })?;
        Ok((gpu, Rc::new(())))
    }

    fn work((): &()) -> u64 {
        0
    }
}

/// Runs cases until one differs.
struct UntilFound(Emulated<Mistake>);

impl Visitor for UntilFound {
    fn case<C: Case>(&mut self, case: &C) {
        if self.0.differences.is_empty() {
            self.0.case(case);
        }
    }
}

/// What the first case finds that finds something, with each of some seeds.
fn found(from: &'static str, to: &'static str, work_max: u64, visit: fn(&mut UntilFound)) -> [String; 2] {
    [0, 1].map(|seed| {
        let mut cases = UntilFound(opened(Mistake { seed, from, to }, work_max));
        visit(&mut cases);
        cases.0.differences.into_iter().next().expect("a finding")
    })
}

#[test]
fn a_missing_barrier_is_found() {
    if available("source::a_missing_barrier_is_found") {
        for found in found("barrier_local() __syncthreads()", "barrier_local()", 5000, cases::digest::visit) {
            assert!(found.contains("race in shared memory"), "{found}");
            assert!(found.contains(", at digest.cl:") && found.ends_with('`'), "{found}");
        }
    }
}

#[test]
fn a_barrier_that_not_all_reach_is_found() {
    if available("source::a_barrier_that_not_all_reach_is_found") {
        let to = "barrier_local() if (threadIdx.x != 7u) __syncthreads()";
        for found in found("barrier_local() __syncthreads()", to, 5000, cases::digest::visit) {
            assert!(found.contains("ended before a barrier") || found.contains("race"), "{found}");
        }
    }
}

#[test]
fn an_index_too_far_is_found() {
    if available("source::an_index_too_far_is_found") {
        for found in found("i < length", "i <= length", 1000, cases::add::visit) {
            assert!(found.contains("out of bounds") && found.contains("add_elements"), "{found}");
        }
    }
}

#[test]
fn a_copy_that_nobody_waits_for_is_found() {
    if available("source::a_copy_that_nobody_waits_for_is_found") {
        for found in found("copies_wait<SLOTS - 2>();", "", TENSOR_WORK_MAX, cases::attention::visit) {
            assert!(found.contains("has not been waited for"), "{found}");
        }
    }
}

/// Every kernel on tensor cores: a case that finds nothing has not reached it.
#[test]
fn a_wrong_lane_is_found() {
    if available("source::a_wrong_lane_is_found") {
        let (from, to) = ("lane / 16u * 8u + lane % 8u;", "lane / 16u * 8u + (lane % 8u ^ 1u);");
        let attention = found(from, to, TENSOR_WORK_MAX, cases::attention::visit);
        let (from, to) = ("(lane / 8u % 2u ^ b", "((lane / 8u % 2u ^ 1u) ^ b");
        let product = found(from, to, TENSOR_WORK_MAX, cases::product::visit);
        let product4 = found(from, to, TENSOR_WORK_MAX, cases::product4::visit);
        let linear = found(from, to, TENSOR_WORK_MAX, cases::linear::visit);
        for found in [attention, product, product4, linear].concat() {
            assert!(found.contains(" wanted, "), "{found}");
        }
    }
}
