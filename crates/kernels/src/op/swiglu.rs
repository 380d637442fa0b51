//! SwiGLU (`docs/numerics.md`, "SwiGLU"): the gated activation of feed-forward layers, element by element.
//!
//! Forward: `h = silu(gate)·up`. Backward: `dup = dh·silu(gate)`, `dgate = (dh·up)·silu_grad(gate)`. Each product is rounded;
//! `silu` and `silu_grad` are the elementary functions and are computed anew in the backward pass.
