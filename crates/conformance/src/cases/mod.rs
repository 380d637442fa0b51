//! One file per op; each `visit` passes all cases of its op to the visitor.

pub mod adamw;
pub mod add;
pub mod attention;
pub mod balance;
pub mod bias;
pub mod cast;
pub mod clamped_swiglu;
pub mod columns;
pub mod combine;
pub mod conv1d;
pub mod decay;
pub mod delta_rule;
pub mod digest;
pub mod dropout;
pub mod elementary;
pub mod embedding;
pub mod gate;
pub mod gated_norm;
pub mod geglu;
pub mod grouping;
pub mod head_loss;
pub mod l2_norm;
pub mod linear;
pub mod low_rank;
pub mod product;
pub mod product4;
pub mod rms_norm;
pub mod rope;
pub mod router;
pub mod scale;
pub mod sink;
pub mod sum_squares;
pub mod swiglu;

use crate::Visitor;

macro_rules! ops {
    ($($stem:ident)+) => {
        /// Every case of every op.
        pub fn visit_all(visitor: &mut impl Visitor) {
            $(
                visitor.op(stringify!($stem));
                $stem::visit(visitor);
            )+
        }
    };
}

ops! {
    linear
    product
    product4
    low_rank
    bias
    add
    scale
    swiglu
    geglu
    clamped_swiglu
    rms_norm
    rope
    columns
    gate
    conv1d
    l2_norm
    decay
    gated_norm
    attention
    sink
    delta_rule
    embedding
    head_loss
    router
    grouping
    balance
    combine
    dropout
    elementary
    adamw
    sum_squares
    cast
    digest
}

/// Cases beyond those with golden digests: shapes that only some devices' kernels distinguish.
pub fn visit_further(visitor: &mut impl Visitor) {
    visitor.op("linear");
    linear::visit_many_tiles(visitor);
    linear::visit_aligned(visitor);
    visitor.op("product");
    product::visit_tile_borders(visitor);
    visitor.op("low_rank");
    low_rank::visit_aligned(visitor);
}
