//! One file per op; each `visit` hands all cases of its op to the visitor.

pub mod head_loss;
pub mod product;
