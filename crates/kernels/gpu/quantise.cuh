// Numbers to slices in few instructions, for the kernels of NVIDIA cards that only slice
// (docs/numerics.md, "Slices").

// The integer of a number, of which the bits below SLICES bytes count: those that quantise() gives,
// with two slices in one instruction less.
FUNCTION uint integer(float x, float multiplier) {
#if SLICES == 2
    return multiplier == 0.0f ? 0u : as_u32(__fadd_rn(__fmul_rn(x, multiplier), 12582912.0f));
#else
    return (uint)quantise(x, multiplier);
#endif
}

// What packed_slice() gives.
FUNCTION int packed_slices(const uint *q, int slice) {
    const int byte = SLICES - 1 - slice;
    const uint rounding = byte == 0 ? 0u : byte == 1 ? 0x80u : 0x8080u;
    const uint pair = (uint)byte | (uint)(byte + 4) << 4;
    const uint low = __byte_perm(q[0] + rounding, q[1] + rounding, pair);
    const uint high = __byte_perm(q[2] + rounding, q[3] + rounding, pair);
    return (int)__byte_perm(low, high, 0x5410);
}

