// Sum of squares (docs/numerics.md, "Sum of squares and clipping"): one level, whose blocks are
// lane sums of 32 work items.

#define SQUARES_BLOCK 4096u

// Work items 32b .. 32b + 31 of a group have one block; the tree is that of "Lane sums", eight of
// them side by side.
#define LEVEL(name, step) \
    KERNEL(GROUP) sum_squares_##name(GLOBAL float *out, ulong first, GLOBAL const float *x, ulong length) { \
        LOCAL float lanes[GROUP]; \
        uint l = local_index(); \
        uint lane = l % LANES; \
        ulong block = (ulong)group_index() * (GROUP / LANES) + l / LANES; \
        ulong start = block * SQUARES_BLOCK; \
        ulong rest = start < length ? length - start : 0; \
        uint count = rest < SQUARES_BLOCK ? (uint)rest : SQUARES_BLOCK; \
        float sum = 0.0f; \
        for (uint i = lane; i < count; i += LANES) { \
            float e = x[start + i]; \
            sum = step; \
        } \
        lanes[l] = sum; \
        barrier_local(); \
        for (uint h = LANES / 2; h > 0u; h /= 2u) { \
            if (lane < h) { \
                lanes[l] = lanes[l] + lanes[l + h]; \
            } \
            barrier_local(); \
        } \
        if (lane == 0u && start < length) { \
            out[first + block] = lanes[l]; \
        } \
    }

LEVEL(first, fma_rn(e, e, sum))
LEVEL(further, sum + e)
