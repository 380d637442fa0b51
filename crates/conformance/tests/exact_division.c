// Runs the divisions and the root of kernels/gpu/exact.h on the host, with the device's estimates
// moved by a few ULP, against the host's own. The header's text stands above this file; the test
// that compiles it is suite/exact_division.rs. Exit status 1: a difference, or a control that fails.

static uint state = 1u;

static uint random_bits(void) {
    // xorshift32
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

static ulong checked;
static ulong wrong;

// NaN payloads are free.
static int same(float got, float want) {
    return as_u32(got) == as_u32(want) || (got != got && want != want);
}

static void division(uint a, uint b) {
    float got = div_rn(as_f32(a), as_f32(b));
    float want = as_f32(a) / as_f32(b);
    checked += 1;
    if (!same(got, want) && ++wrong < 20) {
        printf("%08x / %08x = %08x, not %08x (moved %d)\n", a, b, as_u32(got), as_u32(want), moved);
    }
}

static void root(uint a) {
    float got = sqrt_rn(as_f32(a));
    float want = __builtin_sqrtf(as_f32(a));
    checked += 1;
    if (!same(got, want) && ++wrong < 20) {
        printf("sqrt(%08x) = %08x, not %08x (moved %d)\n", a, as_u32(got), as_u32(want), moved);
    }
}

static void integers(ulong a, ulong b) {
    checked += 1;
    int differs = div_u64(a, b) != a / b || mod_u64(a, b) != a % b;
    if (((a | b) >> 32) == 0) {
        differs |= div_u32((uint)a, (uint)b) != (uint)a / (uint)b || mod_u32((uint)a, (uint)b) != (uint)a % (uint)b;
    }
    if (differs && ++wrong < 20) {
        printf("%llu / %llu is wrong (moved %d)\n", a, b, moved);
    }
}

static const uint MANTISSAS[] = {0u,        1u,        2u,        3u,        0x7fffffu, 0x7ffffeu, 0x7ffffdu, 0x7ffffcu,
                                 0x555553u, 0x555554u, 0x555555u, 0x2aaaaau, 0x2aaaabu, 0x400000u, 0x3fffffu, 0x400001u,
                                 0x3504f3u, 0x3504f4u, 0x12d687u};
#define MANTISSA_COUNT (sizeof MANTISSAS / sizeof MANTISSAS[0])

// Every exponent with every mantissa of the list, zeros, infinities and NaN among them; then random
// operands, and quotients that are subnormal.
static void all_divisions(uint seed) {
    state = seed;
    for (uint i = 0; i < 256u; i++) {
        for (uint j = 0; j < 256u; j++) {
            uint n = random_bits() % MANTISSA_COUNT;
            uint a = (i << 23) | MANTISSAS[n];
            uint b = (j << 23) | MANTISSAS[random_bits() % MANTISSA_COUNT];
            division(a, b);
            division(a | SIGN_BIT, (j << 23) | MANTISSAS[n]);
            division(i << 23, b | SIGN_BIT);
            division((i << 23) | 0x555553u, (j << 23) | 0x7ffffdu);
            division(i << 23, (j << 23) | 0x7fffffu);
            division((i << 23) | (random_bits() >> 9), (j << 23) | (random_bits() >> 9));
        }
    }
    for (uint n = 0; n < 1000000u; n++) {
        division(random_bits(), random_bits());
        // The numerator's exponent is 120 to 152 below the denominator's.
        uint b = random_bits() | 0x60000000u;
        division((b & 0x7f800000u) - ((120u + random_bits() % 33u) << 23) + (random_bits() >> 9), b);
        division(random_bits() >> (9 + random_bits() % 20u), random_bits());
    }
}

// 1 / b for every significand of b.
static void all_denominators(void) {
    for (uint m = 0; m < 0x800000u; m++) {
        division(0x3f800000u, 0x3f800000u | m);
    }
}

static void all_roots(void) {
    // Two binades: every significand with both parities of the exponent.
    for (uint a = 0x3f800000u; a < 0x40800000u; a++) {
        root(a);
    }
    for (uint i = 0; i < 512u; i++) {
        for (uint n = 0; n < MANTISSA_COUNT; n++) {
            root((i << 23) | MANTISSAS[n]);
        }
    }
    for (uint n = 0; n < 300000u; n++) {
        root(random_bits() >> (random_bits() % 24u));
    }
}

static void all_integers(void) {
    for (uint n = 0; n < 2000000u; n++) {
        uint a = random_bits() >> (random_bits() % 32u);
        uint b = random_bits() >> (random_bits() % 32u);
        b = b == 0u ? 1u : b;
        integers(a, b);
        // Beside multiples of the divisor.
        uint multiple = a / b * b;
        integers(multiple, b);
        integers(multiple - 1u, b);
    }
    for (uint n = 0; n < 20000u; n++) {
        ulong a = (((ulong)random_bits() << 32) | random_bits()) >> (random_bits() % 32u);
        ulong b = ((((ulong)random_bits() << 32) | random_bits()) >> (1u + random_bits() % 63u)) | 1u;
        integers(a, b);
        integers(a / b * b, b);
        integers(a / b * b - 1u, b);
    }
    integers(634431842u, 49941481u);
    integers(0xffffffffu, 1u);
    integers(0xffffffffu, 0xffffffffu);
    integers(0xfffffffeu, 0xffffffffu);
}

// What the compilers emit for a / b where nothing needs scaling.
static float compiler_division(float a, float b) {
    float r = reciprocal_estimate(b);
    r = fma_rn(fma_rn(-b, r, 1.0f), r, r);
    float q = a * r;
    q = fma_rn(fma_rn(-b, q, a), r, q);
    return fma_rn(fma_rn(-b, q, a), r, q);
}

static uint compiler_integers(uint a, uint b) {
    uint r = (uint)(reciprocal_estimate((float)b) * 4294966784.0f);
    r += mul_high(r, 0u - r * b);
    uint q = mul_high(a, r);
    uint rest = a - q * b;
    q += rest >= b ? 1u : 0u;
    rest -= rest >= b ? b : 0u;
    return q + (rest >= b ? 1u : 0u);
}

static int control(const char *what, int holds) {
    if (!holds) {
        printf("a control fails: %s\n", what);
    }
    return !holds;
}

// The estimates of this file do move the results of code that trusts them.
static int controls(void) {
    int failed = 0;
    float below_two = as_f32(0x3fffffffu);
    float third_below_two = as_f32(0x3ffffffdu);
    float five_thirds = as_f32(0x3fd55553u);
    moved = 0;
    failed += control("1 / 0x3fffffff by an exact reciprocal", compiler_division(1.0f, below_two) == 1.0f / below_two);
    failed += control("0x3fd55553 / 0x3ffffffd by an exact reciprocal", compiler_division(five_thirds, third_below_two) == five_thirds / third_below_two);
    moved = 1;
    failed += control("1 / 0x3fffffff differs", compiler_division(1.0f, below_two) != 1.0f / below_two);
    failed += control("0x3fd55553 / 0x3ffffffd differs", compiler_division(five_thirds, third_below_two) != five_thirds / third_below_two);
    failed += control("the root of 2 differs", root_estimate(2.0f) != __builtin_sqrtf(2.0f));
    failed += control("a quotient of integers differs", compiler_integers(634431842u, 49941481u) != 634431842u / 49941481u);
    return failed;
}

int main(void) {
    for (moved = -1; moved <= 1; moved++) {
        all_divisions(7u + (uint)moved);
        all_denominators();
        all_roots();
        all_integers();
    }
    // What the bounds in the header allow. Two ULP from the rounded reciprocal are up to 2.5 from
    // the true one.
    for (moved = -1000; moved <= 1000; moved += 2000) {
        all_divisions(11u);
    }
    for (moved = -2; moved <= 2; moved += 4) {
        all_integers();
    }
    for (moved = -30; moved <= 30; moved += 60) {
        for (uint n = 0; n < 1000000u; n++) {
            root(random_bits());
        }
    }
    int failed = controls();
    printf("%llu results, %llu wrong, %d controls that fail\n", checked, wrong, failed);
    return wrong != 0 || failed != 0;
}
