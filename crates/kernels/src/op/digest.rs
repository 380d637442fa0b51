//! Digest (`docs/numerics.md`, "Tensor digest") of a buffer: its elements as little-endian bytes, in order.
//!
//! Contributions of blocks of 4,096 bytes are added modulo 2⁶⁴, so threads may take blocks in any order.
