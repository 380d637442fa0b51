//! One file per op; each `visit` hands all cases of its op to the visitor.

pub mod adamw;
pub mod attention;
pub mod bias;
pub mod cast;
pub mod digest;
pub mod dropout;
pub mod elementary;
pub mod embedding;
pub mod head_loss;
pub mod product;
pub mod residual;
pub mod rms_norm;
pub mod rope;
pub mod sum_squares;
pub mod swiglu;
pub mod thin;

use crate::Visitor;

/// Every case of every op.
pub fn visit_all(visitor: &mut impl Visitor) {
    product::visit(visitor);
    thin::visit(visitor);
    bias::visit(visitor);
    residual::visit(visitor);
    swiglu::visit(visitor);
    rms_norm::visit(visitor);
    rope::visit(visitor);
    attention::visit(visitor);
    embedding::visit(visitor);
    head_loss::visit(visitor);
    dropout::visit(visitor);
    elementary::visit(visitor);
    adamw::visit(visitor);
    sum_squares::visit(visitor);
    cast::visit(visitor);
    digest::visit(visitor);
}
