//! Rotary embedding, half-rotation, in place (`docs/numerics.md`, "Rotary embedding").
//!
//! With `h = rotary_width / 2` and pairs `(a, b) = (x[i], x[i+h])` of each head, `c`, `s` from the tables at the token's
//! position: `a' = fma(a, c, −(b·s))`, `b' = fma(b, c, a·s)`. Channels from `rotary_width` on pass through. Backward is the
//! inverse rotation: `a' = fma(a, c, b·s)`, `b' = fma(b, c, −(a·s))`.
//!
//! Tables are `[position, h]`, made on the host in float64 (`isobit_numerics::rope`).

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    pub tokens: usize,
    pub heads: usize,
    pub head_width: usize,
    pub rotary_width: usize,
}
