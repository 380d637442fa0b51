// Casts (docs/numerics.md, "Casts"), on bits: `isobit_numerics::cast` line by line. 16-bit formats
// are stored as ushort.

FUNCTION ushort narrow_bf16(uint bits) {
    uint even = bits + (0x7fffu + ((bits >> 16) & 1u));
    return (ushort)((bits & ~SIGN_BIT) > F32_INFINITY ? 0x7fc0u : even >> 16);
}

FUNCTION ushort narrow_f16(uint x) {
    uint sign = (x >> 16) & 0x8000u;
    uint bits = x & ~SIGN_BIT;
    uint normal = (bits - F16_REBIAS + (0x0fffu + ((bits >> 13) & 1u))) >> 13;
    // Rounding may carry into infinity; whatever is larger is infinity too.
    normal = normal < 0x7c00u ? normal : 0x7c00u;
    // The last place of 1/2 is one unit of a subnormal float16: the addition rounds, the low bits
    // are the result.
    uint subnormal = as_u32(as_f32(bits) + 0.5f) - 0x3f000000u;
    uint finite = bits < F16_NORMAL ? subnormal : normal;
    return (ushort)(bits > F32_INFINITY ? 0x7e00u : sign | finite);
}

#define CAST(name, to, from, value) \
    KERNEL(GROUP) cast_##name(GLOBAL to *y, GLOBAL const from *x, ulong length) { \
        ulong i = (ulong)group_index() * GROUP + local_index(); \
        if (i < length) { \
            y[i] = value(x[i]); \
        } \
    }

CAST(to_bf16, ushort, uint, narrow_bf16)
CAST(to_f16, ushort, uint, narrow_f16)
CAST(from_bf16, uint, ushort, widen_bf16)
CAST(from_f16, uint, ushort, widen_f16)
// A copy of the bits, NaN included.
CAST(from_f32, uint, uint, (uint))
