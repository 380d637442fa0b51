//! The conformance suite, in one binary: one module per op, and one per subject that concerns them
//! all.
//!
//! An op whose test is its cases on every CPU path and every device alone has a word in the table
//! below; an op with laws of its own has a file.

macro_rules! cases_on_every_backend {
    ($($op:ident)*) => {
        $(mod $op {
            #[test]
            fn $op() {
                isobit_conformance::on_every_backend(isobit_conformance::cases::$op::visit);
            }
        })*

        const IN_TABLE: &[&str] = &[$(stringify!($op)),*];
    };
}

cases_on_every_backend! {
    adamw
    add
    balance
    cast
    clamped_swiglu
    columns
    combine
    digest
    elementary
    gate
    geglu
    grouping
    l2_norm
    linear
    product
    product4
    rope
    scale
    sink
    swiglu
}

// Not made by a macro: rustfmt looks into modules that it sees.
mod attention;
mod attention_gradients;
mod bias;
mod central_differences;
mod conform;
mod conv1d;
mod decay;
mod delta_rule;
mod delta_rule_gradients;
mod dropout;
mod edited;
mod embedding;
mod emulated;
mod emulated_division;
mod emulated_lines;
mod exact_division;
mod float_state;
mod further;
mod gated_norm;
mod golden;
mod gradients;
mod head_loss;
mod head_loss_gradients;
mod hybrid_gradients;
mod low_rank;
mod negative_control;
mod page;
mod paths;
mod product4_accuracy;
mod product_accuracy;
mod rms_norm;
mod router;
mod soft_division;
mod source;
mod sum_squares;

use isobit_conformance::{Case, Visitor};
use std::collections::BTreeSet;

/// The ops with a file.
const IN_FILES: [&str; 13] = [
    "attention",
    "bias",
    "conv1d",
    "decay",
    "delta_rule",
    "dropout",
    "embedding",
    "gated_norm",
    "head_loss",
    "low_rank",
    "rms_norm",
    "router",
    "sum_squares",
];

/// Notes the ops whose cases are visited.
#[derive(Default)]
struct Ops(BTreeSet<&'static str>);

impl Visitor for Ops {
    fn case<C: Case>(&mut self, _: &C) {}

    fn op(&mut self, name: &'static str) {
        self.0.insert(name);
    }
}

#[test]
fn every_op_has_a_test() {
    let mut ops = Ops::default();
    isobit_conformance::cases::visit_all(&mut ops);
    let tested: BTreeSet<&str> = IN_TABLE.iter().chain(&IN_FILES).copied().collect();
    assert_eq!(ops.0, tested, "the ops of `cases::visit_all`, and those of the tables in this file");
}
