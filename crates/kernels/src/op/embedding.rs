//! Embedding (`docs/numerics.md`, "Embedding"): rows of a table `[ids, width]`, one per token.
//!
//! Forward: `y[t] = table[id(t)]`, exact. Backward: `dtable[id]` is a chain of additions that starts from what `dtable`
//! holds and takes `dy[t]` for the tokens with that id in ascending `t`. It knows no blocks and no rows of data, so
//! consecutive calls over consecutive tokens equal one call. Rows whose id does not occur are not touched.
