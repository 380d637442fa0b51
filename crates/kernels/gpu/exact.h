// Division and square root, correctly rounded, integer division, and the casts that are exact. A
// device that promises correct rounding uses its own division. On AMD, whose reciprocal and root
// are off by up to a ULP, and where a driver promises nothing (SOFT_DIVISION), the device gives
// only an estimate; integers correct it and round once, so that the bits do not depend on the
// estimate.

#define F32_INFINITY 0x7f800000u
#define CANONICAL_NAN 0x7fc00000u
#define SIGN_BIT 0x80000000u

#ifdef AUDIT
// For `cargo xtask amd-audit`, which reads the compiler's assembly: each wanted operation is a
// comment there, so whatever else fuses, divides or takes a root is the compiler's own doing.
#undef fma_rn
FUNCTION float fma_rn(float a, float b, float c) {
    float result;
    __asm__("; audit fma" : "=v"(result) : "v"(a), "v"(b), "v"(c));
    return result;
}

FUNCTION float div_rn(float a, float b) {
    float result;
    __asm__("; audit div" : "=v"(result) : "v"(a), "v"(b));
    return result;
}

FUNCTION float sqrt_rn(float x) {
    float result;
    __asm__("; audit sqrt" : "=v"(result) : "v"(x));
    return result;
}

#undef dot4
FUNCTION int dot4(int a, int b, int acc) {
    int result;
    __asm__("; audit dot4" : "=v"(result) : "v"(a), "v"(b), "v"(acc));
    return result;
}

FUNCTION uint div_u32(uint a, uint b) {
    uint result;
    __asm__("; audit int_div" : "=v"(result) : "v"(a), "v"(b));
    return result;
}

FUNCTION ulong div_u64(ulong a, ulong b) {
    ulong result;
    __asm__("; audit int_div" : "=v"(result) : "v"(a), "v"(b));
    return result;
}

#elif defined(SOFT_DIVISION) || defined(__AMDGCN__)

// Significand and exponent of a finite, nonzero magnitude: value = s * 2^(e - 150), s in [2^23,
// 2^24).
FUNCTION uint normalised(uint bits, int *exponent) {
    int lift = bits < 0x00800000u ? 24 : 0;
    // Exact: a power of two.
    bits = lift != 0 ? as_u32(as_f32(bits) * 16777216.0f) : bits;
    *exponent = (int)(bits >> 23) - lift;
    return (bits & 0x007fffffu) | 0x00800000u;
}

// Rounds s * 2^(e - 150 - 3) to nearest even, s in [2^26, 2^27) with its lowest bit sticky, where
// the result is not normal: e is not in 1 to 254.
FUNCTION uint rounded(uint s, int e) {
    int shift = e < -30 ? 31 : 1 - e;
    shift = e > 0 ? 0 : shift;
    uint lost = s & ((1u << shift) - 1u);
    s = (s >> shift) | (lost != 0u ? 1u : 0u);
    uint low = s & 7u;
    uint q = s >> 3;
    // A carry out of the significand moves into the exponent, as it should.
    q += (low > 4u || (low == 4u && (q & 1u))) ? 1u : 0u;
    return e > 0 ? F32_INFINITY : q;
}

// No return before the end, and what is rare in two branches: a wavefront jumps over them.
FUNCTION float div_rn(float a, float b) {
    uint sign = (as_u32(a) ^ as_u32(b)) & SIGN_BIT;
    uint x = as_u32(a) & ~SIGN_BIT;
    uint y = as_u32(b) & ~SIGN_BIT;
    int ex = (int)(x >> 23);
    int ey = (int)(y >> 23);
    uint sx = (x & 0x007fffffu) | 0x00800000u;
    uint sy = (y & 0x007fffffu) | 0x00800000u;
    // Zero, subnormal, infinite or NaN.
    int special = (uint)(ex - 1) >= 254u || (uint)(ey - 1) >= 254u;
    if (special) {
        sx = normalised(x, &ex);
        sy = normalised(y, &ey);
    }
    int e = ex - ey + 127 - (sx < sy ? 1 : 0);
    sx = sx < sy ? sx << 1 : sx;
    // The quotient of the significands is in [1, 2); both convert without rounding.
    float top = (float)sx;
    float bottom = (float)sy;
    float reciprocal = reciprocal_estimate(bottom);
    float estimate = top * reciprocal;
    estimate = fma_rn(fma_rn(-bottom, estimate, top), reciprocal, estimate);
    // BOUND: with a reciprocal off by d, the estimate is off by 2 d^2 and half a ULP of 2^-23. Up
    // to d = 2^-13, which is a thousand ULP, q is the integer below the quotient or the one above,
    // and the remainder is within one divisor of zero: 32 bits hold it.
    uint q = (uint)(estimate * 8388608.0f);
    int rest = (int)((sx << 23) - q * sy);
    q -= rest < 0 ? 1u : 0u;
    uint twice = (uint)(rest < 0 ? rest + (int)sy : rest) * 2u;
    // A quotient of 24 bits is never a tie.
    uint bits = ((uint)e << 23) + (q - 0x00800000u) + (twice > sy ? 1u : 0u);
    int abnormal = (uint)(e - 1) >= 254u;
    if (special || abnormal) {
        uint guard = twice >= sy ? 4u : 0u;
        uint sticky = twice != (guard != 0u ? sy : 0u) ? 1u : 0u;
        bits = abnormal ? rounded((q << 3) | guard | sticky, e) : bits;
        bits = x == F32_INFINITY || y == 0u ? F32_INFINITY : bits;
        bits = y == F32_INFINITY || x == 0u ? 0u : bits;
        int nan = x > F32_INFINITY || y > F32_INFINITY || (x == y && (x == 0u || x == F32_INFINITY));
        bits = nan ? CANONICAL_NAN : bits;
        sign = nan ? 0u : sign;
    }
    return as_f32(sign | bits);
}

FUNCTION float sqrt_rn(float a) {
    uint x = as_u32(a);
    int e;
    uint s = normalised(x & ~SIGN_BIT, &e);
    // With an even exponent the root of s * 2^23 or 2^24 is in [2^23, 2^24).
    int odd = (e & 1) == 0 ? 1 : 0;
    uint root = (uint)(root_estimate((float)(s << (1 + odd))) * 2048.0f);
    // BOUND: 32 bits hold the remainder for any estimate within 30 ULP.
    int rest = (int)((s << (23 + odd)) - root * root);
    while (rest < 0) {
        root -= 1u;
        rest += (int)(2u * root + 1u);
    }
    while (rest > (int)(2u * root)) {
        rest -= (int)(2u * root + 1u);
        root += 1u;
    }
    // Never a tie: (root + 1/2)^2 is no integer.
    uint up = rest > (int)root ? 1u : 0u;
    uint bits = ((uint)((e + 127 - odd) / 2) << 23) + (root - 0x00800000u) + up;
    bits = x > F32_INFINITY ? CANONICAL_NAN : bits;
    return as_f32((x & ~SIGN_BIT) == 0u || x == F32_INFINITY ? x : bits);
}

// The compilers' own division of integers takes a reciprocal that is at most 3/4 ULP too large.
FUNCTION uint div_u32(uint a, uint b) {
    // BOUND: the reciprocal may be off by 2.5 ULP, OpenCL's limit. Conversion and product round by
    // 2^-24 each, so together they are off by at most 3.5 * 2^-23; the factor is 2^32 (1 - 2^-21),
    // which is 4 * 2^-23 less: r is at most 2^32 / b, and short of it by less than 3840 / b + 1.
    // The Newton step squares the relative error, at most 2^-32 (3840 + b), and never exceeds
    // 2^32 / b either: r is then short by less than 2 + 2^-19, so q is at most two too small, and
    // at most one where b is so large that the quotient is 0 or 1.
    uint r = (uint)(reciprocal_estimate((float)b) * 4294965248.0f);
    r += mul_high(r, 0u - r * b);
    uint q = mul_high(a, r);
    uint rest = a - q * b;
    q += rest >= b ? 1u : 0u;
    rest -= rest >= b ? b : 0u;
    return q + (rest >= b ? 1u : 0u);
}

// b is below 2^63.
FUNCTION ulong div_u64(ulong a, ulong b) {
    if (((a | b) >> 32) == 0) {
        return div_u32((uint)a, (uint)b);
    }
    // Bit by bit: such lengths are rare.
    ulong q = 0;
    ulong rest = 0;
    for (int bit = 63; bit >= 0; bit--) {
        rest = (rest << 1) | ((a >> bit) & 1u);
        q <<= 1;
        if (rest >= b) {
            rest -= b;
            q |= 1u;
        }
    }
    return q;
}

#else
#define div_rn(a, b) ((float)(a) / (float)(b))
#define sqrt_rn(x) hardware_sqrt(x)
#define div_u32(a, b) ((a) / (b))
#define mod_u32(a, b) ((a) % (b))
#define div_u64(a, b) ((a) / (b))
#define mod_u64(a, b) ((a) % (b))
#endif

#ifndef mod_u32
#define mod_u32(a, b) ((uint)(a) - div_u32(a, b) * (uint)(b))
#define mod_u64(a, b) ((ulong)(a) - div_u64(a, b) * (ulong)(b))
#endif

// Difference of the exponent biases, 127 - 15, and 2^-14, the smallest normal float16, as float32
// bits.
#define F16_REBIAS ((127u - 15u) << 23)
#define F16_NORMAL ((127u - 14u) << 23)

// Bits of a float32 from those of a 16-bit format (docs/numerics.md, "Casts"); every NaN becomes
// the canonical one.
FUNCTION uint widen_bf16(ushort x) {
    uint bits = (uint)x << 16;
    return (bits & ~SIGN_BIT) > F32_INFINITY ? CANONICAL_NAN : bits;
}

FUNCTION uint widen_f16(ushort x) {
    uint sign = ((uint)x & 0x8000u) << 16;
    uint bits = ((uint)x & 0x7fffu) << 13;
    // Infinity needs the rebias twice, a subnormal is the difference of two normal numbers.
    uint normal = bits + F16_REBIAS;
    uint infinite = normal + F16_REBIAS;
    uint subnormal = as_u32(as_f32(bits + F16_NORMAL) - as_f32(F16_NORMAL));
    uint finite = bits < 0x00800000u ? subnormal : normal;
    uint value = bits < 0x0f800000u ? finite : infinite;
    return bits > 0x0f800000u ? CANONICAL_NAN : sign | value;
}
