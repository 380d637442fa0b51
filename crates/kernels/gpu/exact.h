// Division and square root, correctly rounded, and the casts that are exact. Devices that promise
// to divide so use their own division; for the others (SOFT_DIVISION) quotient and root are formed
// in integers, sticky bit included, and rounded once.

#define GROUP 256
#define F32_INFINITY 0x7f800000u
#define CANONICAL_NAN 0x7fc00000u
#define SIGN_BIT 0x80000000u

#ifdef SOFT_DIVISION

// significand (24 bits or fewer) and exponent of a finite, nonzero magnitude, normalised: value =
// s * 2^(e - 150), s in [2^23, 2^24).
FUNCTION uint normalised(uint bits, int *exponent) {
    uint s = bits & 0x007fffffu;
    int e = (int)(bits >> 23);
    if (e > 0) {
        s |= 0x00800000u;
    } else {
        e = 1;
        while (s < 0x00800000u) {
            s <<= 1;
            e -= 1;
        }
    }
    *exponent = e;
    return s;
}

// Rounds s * 2^(e - 150 - 3) to nearest even, s in [2^26, 2^27) with its lowest bit sticky.
FUNCTION uint rounded(uint s, int e) {
    if (e >= 255) {
        return F32_INFINITY;
    }
    if (e < 1) {
        int shift = 1 - e;
        shift = shift > 31 ? 31 : shift;
        uint lost = s & ((1u << shift) - 1u);
        s = (s >> shift) | (lost != 0u ? 1u : 0u);
        e = 0;
    }
    uint low = s & 7u;
    uint q = s >> 3;
    uint result = e > 0 ? ((uint)e << 23) + (q - 0x00800000u) : q;
    // A carry out of the significand moves into the exponent, as it should.
    return result + ((low > 4u || (low == 4u && (q & 1u))) ? 1u : 0u);
}

FUNCTION float div_rn(float a, float b) {
    uint sign = (as_u32(a) ^ as_u32(b)) & SIGN_BIT;
    uint x = as_u32(a) & ~SIGN_BIT;
    uint y = as_u32(b) & ~SIGN_BIT;
    if (x > F32_INFINITY || y > F32_INFINITY || (x == y && (x == 0u || x == F32_INFINITY))) {
        return as_f32(CANONICAL_NAN);
    }
    if (x == F32_INFINITY || y == 0u) {
        return as_f32(sign | F32_INFINITY);
    }
    if (y == F32_INFINITY || x == 0u) {
        return as_f32(sign);
    }
    int ex, ey;
    ulong sx = normalised(x, &ex);
    ulong sy = normalised(y, &ey);
    int e = ex - ey + 127;
    if (sx < sy) {
        sx <<= 1;
        e -= 1;
    }
    ulong n = sx << 26;
    ulong q = n / sy;
    return as_f32(sign | rounded((uint)q | (q * sy != n ? 1u : 0u), e));
}

FUNCTION float sqrt_rn(float a) {
    uint x = as_u32(a);
    if ((x & ~SIGN_BIT) == 0u || x == F32_INFINITY) {
        return a;
    }
    if (x > F32_INFINITY) {
        return as_f32(CANONICAL_NAN);
    }
    int e;
    ulong s = normalised(x, &e);
    // value = s * 2^(e - 150); make the exponent of the radicand even, then root = sqrt(s * 2^29 or
    // 2^30) * 2^...
    int odd = (e & 1) == 0;
    ulong n = s << (29 + odd);
    // Digit by digit: the root of a number below 2^54 has 27 bits.
    ulong root = 0;
    for (int bit = 26; bit >= 0; bit--) {
        ulong trial = root | ((ulong)1 << bit);
        if (trial * trial <= n) {
            root = trial;
        }
    }
    return as_f32(rounded((uint)root | (root * root != n ? 1u : 0u), (e + 127 - odd) / 2));
}

#elif defined(AUDIT)
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

#else
#define div_rn(a, b) ((float)(a) / (float)(b))
#define sqrt_rn(x) hardware_sqrt(x)
#endif

// Four numbers from an address that is a multiple of 16 bytes.
FUNCTION void load4_global(float *to, GLOBAL const float *from) {
    FLOAT4 four = *(GLOBAL const FLOAT4 *)from;
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
}

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
