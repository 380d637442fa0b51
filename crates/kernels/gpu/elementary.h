// Elementary functions: `crates/numerics/src/elementary` line by line (docs/numerics.md,
// "Elementary functions").

FUNCTION float canonical(float x) {
    uint bits = as_u32(x);
    return as_f32((bits & ~SIGN_BIT) > F32_INFINITY ? CANONICAL_NAN : bits);
}

FUNCTION float canonical_if_nan(float x, float result) {
    return (as_u32(x) & ~SIGN_BIT) > F32_INFINITY ? as_f32(CANONICAL_NAN) : result;
}

FUNCTION float magnitude(float x) {
    return as_f32(as_u32(x) & ~SIGN_BIT);
}

FUNCTION float clamped(float x, float limit) {
    float raised = x > -limit ? x : -limit;
    return raised < limit ? raised : limit;
}

#define EXP_SHIFT 12583166.0f
#define LN2_HIGH as_f32(0x3f317200u)
#define LN2_LOW as_f32(0x35bfbe8eu)

typedef struct {
    float near_part;
    float far_part;
} Scaled;

FUNCTION Scaled scaled_power(float p, float shifted) {
    uint bits = as_u32(shifted);
    uint half_bits = bits >> 1;
    uint rest = bits - half_bits;
    Scaled s;
    s.near_part = p * as_f32(half_bits << 23);
    s.far_part = as_f32(rest << 23);
    return s;
}

FUNCTION float scaled_value(Scaled s) {
    return s.near_part * s.far_part;
}

FUNCTION Scaled exp_scaled(float x) {
    x = clamped(x, 150.0f);
    float shifted = fma_rn(x, as_f32(0x3fb8aa3bu), EXP_SHIFT);
    float n = shifted - EXP_SHIFT;
    float r = fma_rn(n, -LN2_LOW, fma_rn(n, -LN2_HIGH, x));
    float p = as_f32(0x3ab526b0u);
    p = fma_rn(p, r, as_f32(0x3c091cc7u));
    p = fma_rn(p, r, as_f32(0x3d2aac58u));
    p = fma_rn(p, r, as_f32(0x3e2aaa49u));
    p = fma_rn(p, r, as_f32(0x3efffffeu));
    p = fma_rn(p, r, 1.0f);
    p = fma_rn(p, r, 1.0f);
    return scaled_power(p, shifted);
}

FUNCTION float isobit_exp(float x) {
    return canonical_if_nan(x, scaled_value(exp_scaled(x)));
}

// 2^f of a fraction.
FUNCTION float exp2_polynomial(float f) {
    float p = as_f32(0x3920b5a9u);
    p = fma_rn(p, f, as_f32(0x3aaf8417u));
    p = fma_rn(p, f, as_f32(0x3c1d96f0u));
    p = fma_rn(p, f, as_f32(0x3d6357beu));
    p = fma_rn(p, f, as_f32(0x3e75fdeeu));
    p = fma_rn(p, f, as_f32(0x3f317218u));
    return fma_rn(p, f, 1.0f);
}

FUNCTION float isobit_exp2(float x) {
    float c = clamped(x, 200.0f);
    float shifted = c + EXP_SHIFT;
    float p = exp2_polynomial(c - (shifted - EXP_SHIFT));
    return canonical_if_nan(x, scaled_value(scaled_power(p, shifted)));
}

FUNCTION float ln_normal(float x, int exponent, float tail) {
    uint offset = as_u32(x) - 0x3f2aaaabu;
    float k = (float)(((int)offset >> 23) + exponent);
    float f = as_f32((offset & 0x007fffffu) + 0x3f2aaaabu) - 1.0f;
    float p = as_f32(0x3df4e8c5u);
    p = fma_rn(p, f, as_f32(0xbe03615du));
    p = fma_rn(p, f, as_f32(0x3ddc8f7du));
    p = fma_rn(p, f, as_f32(0xbdf9d816u));
    p = fma_rn(p, f, as_f32(0x3e1275b7u));
    p = fma_rn(p, f, as_f32(0xbe2acbc6u));
    p = fma_rn(p, f, as_f32(0x3e4ccbf7u));
    p = fma_rn(p, f, as_f32(0xbe7fff8cu));
    p = fma_rn(p, f, as_f32(0x3eaaaaabu));
    float curve = (f * f) * fma_rn(p, f, -0.5f);
    float base = k * LN2_HIGH;
    float sum = base + f;
    float lost = f - (sum - base);
    return sum + (fma_rn(k, LN2_LOW, curve) + (lost + tail));
}

FUNCTION float isobit_ln(float x) {
    int subnormal = x < as_f32(0x00800000u);
    float scaled = subnormal ? x * 8388608.0f : x;
    float y = ln_normal(scaled, subnormal ? -23 : 0, 0.0f);
    y = as_u32(x) == F32_INFINITY ? x : y;
    y = x == 0.0f ? as_f32(SIGN_BIT | F32_INFINITY) : y;
    return canonical(x >= 0.0f ? y : as_f32(CANONICAL_NAN));
}

TABLE uint TWO_OVER_PI[8] = {0x00000000u, 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u,
                             0xf534ddc0u, 0xdb629599u, 0x3c439041u, 0xfe5163abu};

// Sine of |x| + quarter_turns * pi/2, as bits, without the canonical NaN. `bits` are those of |x|.
FUNCTION uint sine_bits(uint bits, uint quarter_turns) {
    uint exponent = bits >> 23;
    uint position = exponent > 120u ? exponent - 120u : 0u;
    uint first = position >> 5;
    uint shift = position & 31u;
    uint w0 = (TWO_OVER_PI[first] << shift) | ((TWO_OVER_PI[first + 1] >> 1) >> (31u - shift));
    uint w1 = (TWO_OVER_PI[first + 1] << shift) | ((TWO_OVER_PI[first + 2] >> 1) >> (31u - shift));
    uint w2 = (TWO_OVER_PI[first + 2] << shift) | ((TWO_OVER_PI[first + 3] >> 1) >> (31u - shift));
    ulong mantissa = (bits & 0x007fffffu) | 0x00800000u;
    ulong turns = ((mantissa * (ulong)w0) << 32) + mantissa * (ulong)w1 + ((mantissa * (ulong)w2) >> 32);
    uint quadrant = (uint)((turns + ((ulong)1 << 61)) >> 62);
    ulong rest = turns - ((ulong)quadrant << 62);
    float upper = (float)((int)(uint)(rest >> 32) >> 8) * as_f32((127u - 22u) << 23);
    float middle = (float)(int)((uint)(rest >> 18) & 0x003fffffu) * as_f32((127u - 44u) << 23);
    float lower = (float)(int)((uint)rest & 0x0003ffffu) * as_f32((127u - 62u) << 23);
    float turn = upper + middle;
    float lost_turn = (middle - (turn - upper)) + lower;
    float product = turn * as_f32(0x3fc90fdbu);
    float tail = fma_rn(turn, as_f32(0x3fc90fdbu), -product);
    tail = fma_rn(turn, as_f32(0xb33bbd2eu), tail);
    tail = fma_rn(lost_turn, as_f32(0x3fc90fdbu), tail);
    float r = product + tail;
    float low = tail - (r - product);
    int own = bits <= 0x3f490fdau;
    quadrant = (own ? 0u : quadrant) + quarter_turns;
    r = own ? as_f32(bits) : r;
    low = own ? 0.0f : low;

    float z = r * r;
    float s = as_f32(0x363e17a6u);
    s = fma_rn(s, z, as_f32(0xb9502cacu));
    s = fma_rn(s, z, as_f32(0x3c0888bau));
    s = fma_rn(s, z, as_f32(0xbe2aaaabu));
    float sine = r + fma_rn(r * z, s, low);
    float c = as_f32(0x37ccf482u);
    c = fma_rn(c, z, as_f32(0xbab60615u));
    c = fma_rn(c, z, as_f32(0x3d2aaaa5u));
    float error = fma_rn(r, r, -z);
    float half_z = 0.5f * z;
    float top = 1.0f - half_z;
    float lost = (1.0f - top) - half_z;
    float slope = fma_rn(r, low, 0.5f * error);
    float cosine = top + (fma_rn(z * z, c, lost) - slope);
    float value = (quadrant & 1u) == 0u ? sine : cosine;
    return as_u32(value) ^ ((quadrant & 2u) << 30);
}

FUNCTION float isobit_sin(float x) {
    uint bits = as_u32(x) & ~SIGN_BIT;
    uint sine = sine_bits(bits, 0u) ^ (as_u32(x) & SIGN_BIT);
    return as_f32(bits >= F32_INFINITY ? CANONICAL_NAN : sine);
}

FUNCTION float isobit_cos(float x) {
    uint bits = as_u32(x) & ~SIGN_BIT;
    uint cosine = sine_bits(bits, 1u);
    return as_f32(bits >= F32_INFINITY ? CANONICAL_NAN : cosine);
}

FUNCTION float isobit_tanh(float x) {
    float a = magnitude(x);
    float z = a * a;
    float p = as_f32(0x3b0d140bu);
    p = fma_rn(p, z, as_f32(0xbc062f68u));
    p = fma_rn(p, z, as_f32(0x3cb1d2a8u));
    p = fma_rn(p, z, as_f32(0xbd5cf8c4u));
    p = fma_rn(p, z, as_f32(0x3e08883du));
    p = fma_rn(p, z, as_f32(0xbeaaaaaau));
    float small = fma_rn(a * z, p, a);
    float large = 1.0f - div_rn(2.0f, scaled_value(exp_scaled(a + a)) + 1.0f);
    float t = a < 0.625f ? small : large;
    return canonical_if_nan(x, as_f32(as_u32(t) | (as_u32(x) & SIGN_BIT)));
}

// (high + low) / (1 + e)
FUNCTION float over_one_plus(float high, float low, float e) {
    float d = 1.0f + e;
    float dropped = e - (d - 1.0f);
    float q = div_rn(high, d);
    float remainder = fma_rn(-q, dropped, fma_rn(-q, d, high) + low);
    return fma_rn(remainder, fma_rn(d, -0.5f, as_f32(0x3fba827au)), q);
}

FUNCTION float isobit_sigmoid(float x) {
    Scaled e = exp_scaled(-magnitude(x));
    int negative = x < 0.0f;
    float near_part = negative ? e.near_part : 1.0f;
    float far_part = negative ? e.far_part : 1.0f;
    return canonical_if_nan(x, over_one_plus(near_part, 0.0f, scaled_value(e)) * far_part);
}

FUNCTION float isobit_silu(float x) {
    float bounded = clamped(x, 128.0f);
    Scaled e = exp_scaled(-magnitude(bounded));
    int negative = x < 0.0f;
    float near_part = negative ? e.near_part : 1.0f;
    float far_part = negative ? e.far_part : 1.0f;
    float high = bounded * near_part;
    float low = fma_rn(bounded, near_part, -high);
    float y = over_one_plus(high, low, scaled_value(e)) * far_part;
    y = x > 128.0f ? x : y;
    return canonical_if_nan(x, as_f32(as_u32(y) | (as_u32(x) & SIGN_BIT)));
}

FUNCTION float isobit_silu_grad(float x) {
    float bounded = clamped(x, 128.0f);
    Scaled e = exp_scaled(-magnitude(bounded));
    float value = scaled_value(e);
    int negative = x < 0.0f;
    float near_part = negative ? e.near_part : 1.0f;
    float far_part = negative ? e.far_part : 1.0f;
    float sigmoid = over_one_plus(near_part, 0.0f, value);
    float complement = over_one_plus(negative ? 1.0f : value, 0.0f, value);
    float slope = fma_rn(bounded, complement, 1.0f);
    return canonical_if_nan(x, (sigmoid * slope) * far_part);
}

FUNCTION float soft_capped(float x, float limit, float inverse) {
    return isobit_tanh(x * inverse) * limit;
}

// The derivative, from the capped number.
FUNCTION float soft_cap_slope(float capped, float inverse) {
    float t = capped * inverse;
    return fma_rn(-t, t, 1.0f);
}

FUNCTION float isobit_softplus(float x) {
    float e = scaled_value(exp_scaled(-magnitude(x)));
    float d = 1.0f + e;
    float lost = e - (d - 1.0f);
    float log_part = ln_normal(d, 0, div_rn(lost, d));
    float positive = x > 0.0f ? x : 0.0f;
    return canonical_if_nan(x, positive + log_part);
}

FUNCTION float isobit_rsqrt(float x) {
    return canonical(div_rn(1.0f, sqrt_rn(x)));
}
