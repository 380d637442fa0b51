// Many tensors in one launch: sums of squares, scaling, AdamW (docs/numerics.md, sections of these
// names). CUDA C++ behind cuda.h: tables hold addresses, which the portable dialect does not know.
//
// `starts[i]` is how many blocks of BLOCK elements the tensors before number i have.

#define BLOCK 4096u

struct SummedTensor {
    const float *from;
    float *to;
    ulong length;
};

struct ScaledTensor {
    float *x;
    ulong length;
};

struct UpdatedTensor {
    float *parameter, *first_moment, *second_moment;
    const float *gradient;
    ulong length;
    float decay, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_c2, eps, unused;
};

// The tensor that a block belongs to.
FUNCTION uint tensor_of(const uint *starts, uint count, uint block) {
    uint low = 0u, high = count;
    while (high - low > 1u) {
        uint middle = (low + high) / 2u;
        if (starts[middle] <= block) low = middle;
        else high = middle;
    }
    return low;
}

// One level of the sums: a warp per block, a thread per lane, as in "Lane sums".
#define LEVEL(name, step) \
    KERNEL(GROUP) sums_of_squares_##name(const SummedTensor *sources, const uint *starts, uint count, uint blocks) { \
        uint block = group_index() * (GROUP / LANES) + local_index() / LANES; \
        uint lane = local_index() % LANES; \
        if (block >= blocks) return; \
        uint tensor = tensor_of(starts, count, block); \
        SummedTensor source = sources[tensor]; \
        uint own = block - starts[tensor]; \
        const float *from = source.from + (ulong)own * BLOCK; \
        ulong rest = source.length - (ulong)own * BLOCK; \
        uint length = rest < BLOCK ? (uint)rest : BLOCK; \
        float sum = 0.0f; \
        uint i = lane; \
        for (; i + 15u * LANES < length; i += 16u * LANES) { \
            float values[16]; \
            _Pragma("unroll") for (uint n = 0u; n < 16u; n++) values[n] = from[i + n * LANES]; \
            _Pragma("unroll") for (uint n = 0u; n < 16u; n++) { \
                float e = values[n]; \
                sum = step; \
            } \
        } \
        for (; i < length; i += LANES) { \
            float e = from[i]; \
            sum = step; \
        } \
        for (uint h = LANES / 2u; h > 0u; h /= 2u) { \
            sum = sum + __shfl_down_sync(0xffffffffu, sum, h); \
        } \
        if (lane == 0u) source.to[own] = sum; \
    }

LEVEL(first, fma_rn(e, e, sum))
LEVEL(further, sum + e)

// Every thread has four neighbouring elements of a block at a time.
KERNEL(GROUP) scale_all(const ScaledTensor *tensors, const uint *starts, uint count, float factor) {
    uint tensor = tensor_of(starts, count, group_index());
    ScaledTensor own = tensors[tensor];
    ulong first = (ulong)(group_index() - starts[tensor]) * BLOCK;
    uint length = own.length - first < BLOCK ? (uint)(own.length - first) : BLOCK;
    float *x = own.x + first;
#pragma unroll
    for (uint step = 0u; step < BLOCK; step += 4u * GROUP) {
        uint i = step + 4u * local_index();
        if (i + 4u <= length) {
            float4 v = *(float4 *)(x + i);
            *(float4 *)(x + i) = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
        } else {
            for (; i < length; i++) x[i] = x[i] * factor;
        }
    }
}

FUNCTION void update(const UpdatedTensor &own, float g, float &m, float &v, float &p) {
    float decayed = p * own.decay;
    m = fma_rn(own.one_minus_beta1, g - m, m);
    v = fma_rn(own.one_minus_beta2, g * g, own.beta2 * v);
    float d = fma_rn(sqrt_rn(v), own.inv_sqrt_c2, own.eps);
    p = fma_rn(-own.step_size, div_rn(m, d), decayed);
}

KERNEL(GROUP) adamw_all(const UpdatedTensor *tensors, const uint *starts, uint count) {
    uint tensor = tensor_of(starts, count, group_index());
    const UpdatedTensor own = tensors[tensor];
    ulong first = (ulong)(group_index() - starts[tensor]) * BLOCK;
    uint length = own.length - first < BLOCK ? (uint)(own.length - first) : BLOCK;
    float *parameter = own.parameter + first, *first_moment = own.first_moment + first;
    float *second_moment = own.second_moment + first;
    const float *gradient = own.gradient + first;
    for (uint step = 0u; step < BLOCK; step += 4u * GROUP) {
        uint i = step + 4u * local_index();
        if (i + 4u <= length) {
            float4 g = *(const float4 *)(gradient + i), m = *(float4 *)(first_moment + i);
            float4 v = *(float4 *)(second_moment + i), p = *(float4 *)(parameter + i);
            update(own, g.x, m.x, v.x, p.x);
            update(own, g.y, m.y, v.y, p.y);
            update(own, g.z, m.z, v.z, p.z);
            update(own, g.w, m.w, v.w, p.w);
            *(float4 *)(parameter + i) = p;
            *(float4 *)(first_moment + i) = m;
            *(float4 *)(second_moment + i) = v;
        } else {
            for (; i < length; i++) update(own, gradient[i], first_moment[i], second_moment[i], parameter[i]);
        }
    }
}
