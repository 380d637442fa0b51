//! Would the suite notice? A backend whose norm adds up in another order must be reported by the comparison that all tests
//! use. If this fails, the green of every other test means nothing.
//!
//! The order is the only thing wrong: the sum runs over the same elements with the same roundings, left to right instead of
//! over lanes.
#![expect(clippy::float_arithmetic, reason = "the control computes a norm")]

use isobit_conformance::cases::rms_norm::RmsNormCase;
use isobit_conformance::data::Kind;
use isobit_conformance::{Case, Output, Visitor, first_difference};
use isobit_kernels::op::*;
use isobit_kernels::{Backend, Buffer, DeviceFailure, Element, Matrix, Reference, StoredMatrix};
use isobit_numerics::fma::fma;

/// The reference, except for the order of the sum in the forward norm.
struct Reordered;

/// Ops that a norm does not need.
macro_rules! absent {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        $(fn $name(&self, $(_: $argument),*) $(-> $result)? {
            unreachable!("a norm needs no other op")
        })*
    };
}

type F32 = Buffer<f32>;

impl Backend for Reordered {
    type Buffer<T: Element> = Buffer<T>;
    type Rows = <Reference as Backend>::Rows;
    type Weight = <Reference as Backend>::Weight;
    type QuantizedWeight = <Reference as Backend>::QuantizedWeight;

    fn name(&self) -> String {
        "reordered".to_string()
    }

    fn zeros<T: Element>(&self, length: usize) -> Buffer<T> {
        Reference.zeros(length)
    }

    fn upload<T: Element>(&self, host: &[T]) -> Buffer<T> {
        Reference.upload(host)
    }

    fn download<T: Element>(&self, device: &Buffer<T>) -> Result<Vec<T>, DeviceFailure> {
        Reference.download(device)
    }

    fn rms_norm_forward(&self, y: &mut F32, inverse: &mut F32, x: &F32, weight: &F32, p: &RmsNorm) {
        for t in 0..p.tokens {
            let x = &x[t * p.width..][..p.width];
            let mean = x.iter().fold(0.0, |acc, &x| fma(x, x, acc)) / p.width as f32;
            inverse[t] = 1.0 / (mean + p.eps).sqrt();
            for c in 0..p.width {
                let factor = if p.zero_centred { 1.0 + weight[c] } else { weight[c] };
                y[t * p.width + c] = (x[c] * inverse[t]) * factor;
            }
        }
    }

    fn rms_norm_backward(
        &self,
        dx: &mut F32,
        dweight: Option<&mut F32>,
        dy: &F32,
        x: &F32,
        inverse: &F32,
        weight: &F32,
        p: &RmsNorm,
        row_starts: &[usize],
    ) {
        Reference.rms_norm_backward(dx, dweight, dy, x, inverse, weight, p, row_starts);
    }

    fn quantized_weight<Q: AsQuantized, E>(
        &self,
        _: QuantizedShape,
        _: impl FnMut(usize) -> Result<Q, E>,
    ) -> Result<Self::QuantizedWeight, E> {
        unreachable!("a norm needs no other op")
    }

    fn digest<T: Element>(&self, x: &Buffer<T>) -> Result<isobit_numerics::digest::Digest, DeviceFailure> {
        Reference.digest(x)
    }

    absent! {
        rows(SliceShape) -> Self::Rows;
        slice_rows(&mut Self::Rows, &F32);
        slice_weight(StoredMatrix<Self>, usize, SliceShape) -> Self::Weight;
        product_workspace(&Product) -> usize;
        product_forward(&mut F32, &Self::Rows, Matrix<Self>, &Product, &mut Buffer<u8>);
        product_grad_input(&mut F32, &F32, Matrix<Self>, &Product, &mut Buffer<u8>);
        product_grad_weight(&mut F32, &F32, &F32, &Product, &[usize], &mut Buffer<u8>);
        product4_rows(&mut Self::Rows, &F32, &Self::QuantizedWeight, &Product);
        product4_workspace(QuantizedShape, &Product) -> usize;
        product4_forward(&mut F32, &Self::Rows, &Self::QuantizedWeight, &Product, &mut Buffer<u8>);
        product4_grad_input(&mut F32, &F32, &Self::QuantizedWeight, &Product, &mut Buffer<u8>);
        thin_workspace(&Thin) -> usize;
        thin_contract(&mut F32, &F32, &F32, &Thin, &mut Buffer<u8>);
        thin_expand(&mut F32, &F32, &F32, &Thin, &mut Buffer<u8>);
        thin_outer(&mut F32, &F32, &F32, &Thin, &[usize], &mut Buffer<u8>);
        bias_forward(&mut F32, &F32);
        bias_backward(&mut F32, &F32, &[usize]);
        add(&mut F32, &F32, &F32);
        scale(&mut F32, f32);
        swiglu_forward(&mut F32, &F32, &F32);
        swiglu_pairs_forward(&mut F32, &F32, usize);
        swiglu_pairs_backward(&mut F32, &F32, &F32, usize);
        swiglu_backward(&mut F32, &mut F32, &F32, &F32, &F32);
        dropout(&mut F32, &F32, &Dropout);
        elementary(&mut F32, &F32, isobit_numerics::elementary::Function);
        rope_forward(&mut F32, &F32, &F32, &Buffer<u32>, &Rope);
        rope_backward(&mut F32, &F32, &F32, &Buffer<u32>, &Rope);
        columns(&mut F32, &F32, &Columns);
        gate_forward(&mut F32, &F32, &F32, &Gate);
        gate_backward(&mut F32, &mut F32, &F32, &F32, &F32, &Gate);
        conv1d_forward(&mut F32, &F32, &F32, Option<&F32>, &Conv1d);
        conv1d_backward(&mut F32, Option<&mut F32>, &F32, &F32, &F32, &Conv1d, &[usize]);
        l2_norm_forward(&mut F32, &mut F32, &F32, &L2Norm);
        l2_norm_backward(&mut F32, &F32, &F32, &F32, &L2Norm);
        decay_forward(&mut F32, &mut F32, (&F32, &F32), &F32, &F32, &Decay);
        decay_backward((&mut F32, &mut F32), Option<(&mut F32, &mut F32)>, (&F32, &F32), (&F32, &F32), &F32, &F32, &Decay, &[usize]);
        gated_norm_forward(&mut F32, &mut F32, &F32, &F32, &F32, &GatedNorm);
        gated_norm_backward(&mut F32, &mut F32, Option<&mut F32>, &F32, (&F32, &F32), &F32, &F32, &GatedNorm, &[usize]);
        attention_workspace(&Attention) -> usize;
        attention_forward(&mut F32, &mut F32, &F32, &F32, &F32, &Attention, &mut Buffer<u8>);
        attention_backward((&mut F32, &mut F32, &mut F32), &F32, (&F32, &F32, &F32), &F32, &F32, &Attention, &mut Buffer<u8>);
        delta_rule_workspace(&DeltaRule) -> usize;
        delta_rule_forward(&mut F32, Option<&mut F32>, &F32, &F32, &F32, &F32, &F32, Option<&F32>, &DeltaRule, &mut Buffer<u8>);
        delta_rule_backward([&mut F32; 5], &F32, [&F32; 5], &DeltaRule, &mut Buffer<u8>);
        embedding_forward(&mut F32, StoredMatrix<Self>, &Buffer<u32>, usize);
        embedding_workspace(usize) -> usize;
        embedding_backward(&mut F32, &F32, &Buffer<u32>, usize, &mut Buffer<u8>);
        head_loss_workspace(&HeadLoss) -> usize;
        head_loss_forward(&mut F32, &mut F32, &mut Buffer<u32>, &Self::Rows, Matrix<Self>, &Buffer<i32>, &HeadLoss, &mut Buffer<u8>);
        head_loss_backward(&mut F32, Option<&mut F32>, (&Self::Rows, &F32), Matrix<Self>, &Buffer<i32>, &F32, &F32, &HeadLoss, &mut Buffer<u8>);
        router_choose(&mut Buffer<u32>, &F32, Option<&F32>, &Router);
        router_weights(&mut F32, &F32, &Buffer<u32>, &Router);
        router_backward(&mut F32, &F32, &F32, &Buffer<u32>, &Router);
        balance_workspace(&[usize], usize) -> usize;
        balance_forward(&mut F32, &F32, &[usize], usize, &mut Buffer<u8>);
        balance_backward(&mut F32, &F32, &F32, &[usize], usize);
        combine_forward(&mut F32, &F32, Option<&F32>, &Buffer<u32>, &Combine);
        combine_backward(&mut F32, &mut F32, &F32, &F32, &F32, &Buffer<u32>, &Combine);
        adamw(&mut F32, &mut F32, &mut F32, &F32, &isobit_numerics::adamw::Coefficients);
        sum_squares(&F32) -> Result<f32, DeviceFailure>;
        to_bf16(&mut Buffer<half::bf16>, &F32);
        to_f16(&mut Buffer<half::f16>, &F32);
        to_f32(&mut F32, StoredMatrix<Self>);
    }
}

/// Compares [`Reordered`] with the reference on every case of the suite.
#[derive(Default)]
struct Notices {
    differing: Vec<String>,
    equal: Vec<String>,
}

impl Visitor for Notices {
    fn case<C: Case>(&mut self, case: &C) {
        match first_difference(&case.run(&Reference), &case.run(&Reordered)) {
            Some(difference) => self.differing.push(difference),
            None => self.equal.push(case.name()),
        }
    }
}

#[test]
fn a_reordered_sum_is_reported() {
    let mut notices = Notices::default();
    notices.case(&RmsNormCase { row_starts: vec![0, 7], width: 1031, zero_centred: false, kind: Kind::Plain });
    assert_eq!(notices.equal, Vec::<String>::new(), "the suite did not notice");
    let report = notices.differing.join("\n");
    // The message names the tensor, the index, both values and how many differ.
    assert!(report.starts_with("y[") && report.contains("wanted") && report.contains(" differ"), "{report}");
}

#[test]
fn the_suite_holds_a_case_that_notices() {
    let mut notices = Notices::default();
    isobit_conformance::cases::rms_norm::visit(&mut notices);
    assert!(!notices.differing.is_empty(), "no case of the suite tells the orders apart");
    // A row of one element has one order only: the comparison does not cry wolf.
    assert!(notices.equal.iter().any(|name| name.contains("width: 1,")));
}

#[test]
fn one_bit_is_a_difference() {
    let want = [Output::new("x", &[1.0f32, 0.0, 2.0])];
    for got in [[1.0f32, -0.0, 2.0], [1.0, 0.0, 2.0000002], [1.0000001, 0.0, 2.0]] {
        assert!(first_difference(&want, &[Output::new("x", &got)]).is_some());
    }
    assert!(first_difference(&want, &[Output::new("x", &[1.0f32, 0.0])]).is_some(), "a missing element");
    assert!(first_difference(&want, &[]).is_some(), "a missing output");
    assert_eq!(first_difference(&want, &want), None);
}
