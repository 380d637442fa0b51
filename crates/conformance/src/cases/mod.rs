//! One file per op; each `visit` hands all cases of its op to the visitor.

pub mod adamw;
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
