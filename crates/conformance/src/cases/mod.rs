//! One file per op; each `visit` hands all cases of its op to the visitor.

pub mod attention;
pub mod product;
