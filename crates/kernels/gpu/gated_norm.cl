// Gated norm (docs/numerics.md, "Gated norm"). Eight tokens per group, a work item per lane;
// dweight by columns.

#define TOKENS (GROUP / LANES)

KERNEL(GROUP) gated_norm_forward(
    GLOBAL float *y,
    GLOBAL float *inverse,
    GLOBAL const float *h,
    GLOBAL const float *z,
    GLOBAL const float *weight,
    ulong tokens,
    uint width,
    float eps
) {
    LOCAL float lanes[GROUP];
    uint lane = local_index() % LANES;
    ulong token = (ulong)group_index() * TOKENS + local_index() / LANES;
    ulong at = token * width;
    uint here = token < tokens ? width : 0u;
    float sum = 0.0f;
    for (uint c = lane; c < here; c += LANES) {
        float value = h[at + c];
        sum = fma_rn(value, value, sum);
    }
    sum = team_sum(lanes, sum);
    float mean = div_rn(sum, (float)width);
    float inv = div_rn(1.0f, sqrt_rn(mean + eps));
    if (lane == 0u && token < tokens) {
        inverse[token] = inv;
    }
    for (uint c = lane; c < here; c += LANES) {
        y[at + c] = (weight[c] * (h[at + c] * inv)) * isobit_silu(z[at + c]);
    }
}

KERNEL(GROUP) gated_norm_backward(
    GLOBAL float *dh,
    GLOBAL float *dz,
    GLOBAL const float *dy,
    GLOBAL const float *h,
    GLOBAL const float *z,
    GLOBAL const float *inverse,
    GLOBAL const float *weight,
    ulong tokens,
    uint width
) {
    LOCAL float lanes[GROUP];
    uint lane = local_index() % LANES;
    ulong token = (ulong)group_index() * TOKENS + local_index() / LANES;
    ulong at = token * width;
    uint here = token < tokens ? width : 0u;
    float inv = token < tokens ? inverse[token] : 0.0f;
    float sum = 0.0f;
    for (uint c = lane; c < here; c += LANES) {
        float normal = h[at + c] * inv;
        float gate = z[at + c];
        float d = dy[at + c];
        float grad = (d * isobit_silu(gate)) * weight[c];
        dz[at + c] = (d * (weight[c] * normal)) * isobit_silu_grad(gate);
        // Waits there for the mean; the same work item takes it up again.
        dh[at + c] = grad;
        sum = fma_rn(grad, normal, sum);
    }
    sum = team_sum(lanes, sum);
    float mean = div_rn(sum, (float)width);
    for (uint c = lane; c < here; c += LANES) {
        dh[at + c] = fma_rn(-(h[at + c] * inv), mean, dh[at + c]) * inv;
    }
}

// 32 columns per group; eight blocks of tokens are summed side by side and then added in order.
// `blocks` holds first token and end of each.
KERNEL(GROUP) gated_norm_grad_weight(
    GLOBAL float *dweight,
    GLOBAL const float *dy,
    GLOBAL const float *h,
    GLOBAL const float *z,
    GLOBAL const float *inverse,
    GLOBAL const uint *blocks,
    uint block_count,
    uint width
) {
    LOCAL float sums[GROUP];
    uint lane = local_index() % LANES;
    uint slot = local_index() / LANES;
    uint column = group_index() * LANES + lane;
    int adds = slot == 0u && column < width;
    float total = adds ? dweight[column] : 0.0f;
    for (uint first = 0u; first < block_count; first += TOKENS) {
        uint block = first + slot;
        float sum = 0.0f;
        if (block < block_count && column < width) {
            uint end = blocks[2u * block + 1u];
            for (uint t = blocks[2u * block]; t < end; t++) {
                ulong at = (ulong)t * width + column;
                sum = sum + (dy[at] * isobit_silu(z[at])) * (h[at] * inverse[t]);
            }
        }
        sums[local_index()] = sum;
        barrier_local();
        if (adds) {
            for (uint n = 0u; n < TOKENS && first + n < block_count; n++) {
                total = total + sums[n * LANES + lane];
            }
        }
        barrier_local();
    }
    if (adds) {
        dweight[column] = total;
    }
}
