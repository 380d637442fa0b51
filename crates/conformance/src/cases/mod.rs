//! One file per op; each `visit` hands all cases of its op to the visitor.

pub mod product;

use crate::Visitor;

/// Every case of every op.
pub fn visit_all(visitor: &mut impl Visitor) {
    product::visit(visitor);
}
