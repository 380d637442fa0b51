//! Bias (`docs/numerics.md`, "Bias"). Both functions take the width from the bias's own length.
//!
//! Forward, in place: `y[t, n] = y[t, n] + bias[n]`. Backward: `dbias[n]` gets the sum over tokens of `dy[t, n]`: inside each
//! block of [`super::TOKEN_BLOCK`] tokens (blocks restart at row starts) a chain of additions from +0 in ascending `t`; the
//! block's sum is then added to `dbias[n]`, blocks in order. The gradient of `y` passes through.
