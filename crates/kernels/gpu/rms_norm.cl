// RMS norm (docs/numerics.md, "RMS norm"). Eight tokens per group, a work item per lane;
// dweight by columns.

#define TOKENS (GROUP / LANES)
// Elements that a work item asks for before it uses the first.
#define AHEAD 8u

FUNCTION float norm_factor(float weight, uint zero_centred) {
    return zero_centred != 0u ? 1.0f + weight : weight;
}

KERNEL(GROUP) rms_norm_forward(
    GLOBAL float *y,
    GLOBAL float *inverse,
    GLOBAL const float *x,
    GLOBAL const float *weight,
    ulong tokens,
    uint width,
    uint zero_centred,
    float eps
) {
    LOCAL float lanes[GROUP];
    uint lane = local_index() % LANES;
    ulong token = (ulong)group_index() * TOKENS + local_index() / LANES;
    ulong at = token * width;
    uint here = token < tokens ? width : 0u;
    float sum = 0.0f;
    uint c = lane;
    for (; c + (AHEAD - 1u) * LANES < here; c += AHEAD * LANES) {
        float values[AHEAD];
        for (uint n = 0u; n < AHEAD; n++) {
            values[n] = x[at + c + n * LANES];
        }
        for (uint n = 0u; n < AHEAD; n++) {
            sum = fma_rn(values[n], values[n], sum);
        }
    }
    for (; c < here; c += LANES) {
        float value = x[at + c];
        sum = fma_rn(value, value, sum);
    }
    sum = team_sum(lanes, sum);
    float mean = div_rn(sum, (float)width);
    float inv = div_rn(1.0f, sqrt_rn(mean + eps));
    if (lane == 0u && token < tokens) {
        inverse[token] = inv;
    }
    c = lane;
    for (; c + (AHEAD - 1u) * LANES < here; c += AHEAD * LANES) {
        float values[AHEAD];
        float factors[AHEAD];
        for (uint n = 0u; n < AHEAD; n++) {
            values[n] = x[at + c + n * LANES];
            factors[n] = norm_factor(weight[c + n * LANES], zero_centred);
        }
        for (uint n = 0u; n < AHEAD; n++) {
            y[at + c + n * LANES] = (values[n] * inv) * factors[n];
        }
    }
    for (; c < here; c += LANES) {
        y[at + c] = (x[at + c] * inv) * norm_factor(weight[c], zero_centred);
    }
}

KERNEL(GROUP) rms_norm_backward(
    GLOBAL float *dx,
    GLOBAL const float *dy,
    GLOBAL const float *x,
    GLOBAL const float *inverse,
    GLOBAL const float *weight,
    ulong tokens,
    uint width,
    uint zero_centred,
    uint accumulate
) {
    LOCAL float lanes[GROUP];
    uint lane = local_index() % LANES;
    ulong token = (ulong)group_index() * TOKENS + local_index() / LANES;
    ulong at = token * width;
    uint here = token < tokens ? width : 0u;
    float inv = token < tokens ? inverse[token] : 0.0f;
    float sum = 0.0f;
    uint c = lane;
    for (; c + (AHEAD - 1u) * LANES < here; c += AHEAD * LANES) {
        float left[AHEAD];
        float right[AHEAD];
        for (uint n = 0u; n < AHEAD; n++) {
            left[n] = dy[at + c + n * LANES] * norm_factor(weight[c + n * LANES], zero_centred);
            right[n] = x[at + c + n * LANES] * inv;
        }
        for (uint n = 0u; n < AHEAD; n++) {
            sum = fma_rn(left[n], right[n], sum);
        }
    }
    for (; c < here; c += LANES) {
        sum = fma_rn(dy[at + c] * norm_factor(weight[c], zero_centred), x[at + c] * inv, sum);
    }
    sum = team_sum(lanes, sum);
    float mean = div_rn(sum, (float)width);
    c = lane;
    for (; c + (AHEAD - 1u) * LANES < here; c += AHEAD * LANES) {
        float results[AHEAD];
        float old[AHEAD];
        for (uint n = 0u; n < AHEAD; n++) {
            uint i = c + n * LANES;
            float normal = x[at + i] * inv;
            results[n] = fma_rn(-normal, mean, dy[at + i] * norm_factor(weight[i], zero_centred)) * inv;
            old[n] = accumulate != 0u ? dx[at + i] : 0.0f;
        }
        for (uint n = 0u; n < AHEAD; n++) {
            dx[at + c + n * LANES] = accumulate != 0u ? old[n] + results[n] : results[n];
        }
    }
    for (; c < here; c += LANES) {
        float normal = x[at + c] * inv;
        float value = fma_rn(-normal, mean, dy[at + c] * norm_factor(weight[c], zero_centred)) * inv;
        dx[at + c] = accumulate != 0u ? dx[at + c] + value : value;
    }
}

// Sums of single blocks of tokens from `first_block` on, `tiles` groups of columns for each;
// `blocks` holds first token and end of each. token_sums.cl adds them.
KERNEL(GROUP) rms_norm_grad_weight(
    GLOBAL float *sums,
    GLOBAL const float *dy,
    GLOBAL const float *x,
    GLOBAL const float *inverse,
    GLOBAL const uint *blocks,
    uint first_block,
    uint width,
    uint tiles
) {
    uint block = div_u32(group_index(), tiles);
    uint column = mod_u32(group_index(), tiles) * GROUP + local_index();
    if (column >= width) {
        return;
    }
    uint t = blocks[2u * (first_block + block)];
    uint end = blocks[2u * (first_block + block) + 1u];
    float sum = 0.0f;
    for (; t + AHEAD <= end; t += AHEAD) {
        float left[AHEAD];
        float right[AHEAD];
        for (uint n = 0u; n < AHEAD; n++) {
            ulong at = (ulong)(t + n) * width + column;
            left[n] = dy[at];
            right[n] = x[at];
        }
        for (uint n = 0u; n < AHEAD; n++) {
            sum = sum + left[n] * (right[n] * inverse[t + n]);
        }
    }
    for (; t < end; t++) {
        ulong at = (ulong)t * width + column;
        sum = sum + dy[at] * (x[at] * inverse[t]);
    }
    sums[(ulong)block * width + column] = sum;
}
