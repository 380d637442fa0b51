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
pub mod product4;
pub mod residual;
pub mod rms_norm;
pub mod rope;
pub mod sum_squares;
pub mod swiglu;
pub mod thin;

use crate::Visitor;

/// Every case of every op.
pub fn visit_all(visitor: &mut impl Visitor) {
    visitor.op("product");
    product::visit(visitor);
    visitor.op("product4");
    product4::visit(visitor);
    visitor.op("thin");
    thin::visit(visitor);
    visitor.op("bias");
    bias::visit(visitor);
    visitor.op("residual");
    residual::visit(visitor);
    visitor.op("swiglu");
    swiglu::visit(visitor);
    visitor.op("rms_norm");
    rms_norm::visit(visitor);
    visitor.op("rope");
    rope::visit(visitor);
    visitor.op("attention");
    attention::visit(visitor);
    visitor.op("embedding");
    embedding::visit(visitor);
    visitor.op("head_loss");
    head_loss::visit(visitor);
    visitor.op("dropout");
    dropout::visit(visitor);
    visitor.op("elementary");
    elementary::visit(visitor);
    visitor.op("adamw");
    adamw::visit(visitor);
    visitor.op("sum_squares");
    sum_squares::visit(visitor);
    visitor.op("cast");
    cast::visit(visitor);
    visitor.op("digest");
    digest::visit(visitor);
}
