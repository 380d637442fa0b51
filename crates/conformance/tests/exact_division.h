// The dialect of opencl.h for a host's C compiler, as far as exact.h needs it, with estimates that
// are `moved` ULP away from the correctly rounded ones.

#include <stdio.h>
#include <string.h>

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long long ulong;
typedef struct {
    float x, y, z, w;
} FLOAT4;

#define SOFT_DIVISION
#define FUNCTION static inline __attribute__((unused))
#define GLOBAL
#define fma_rn(a, b, c) __builtin_fmaf(a, b, c)
#define mul_high(a, b) ((uint)(((ulong)(a) * (ulong)(b)) >> 32))

static inline uint as_u32(float value) {
    uint bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float as_f32(uint bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int moved;

static inline float reciprocal_estimate(float x) {
    return as_f32(as_u32(1.0f / x) + (uint)moved);
}

static inline float root_estimate(float x) {
    return as_f32(as_u32(__builtin_sqrtf(x)) + (uint)moved);
}
