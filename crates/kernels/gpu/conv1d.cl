// Causal convolution with SiLU (docs/numerics.md, "Causal convolution"). `seen` holds for each
// token how many tokens of its document stand before it, kernel - 1 at most. Loops over taps have a
// fixed length, so that windows stay in registers.

#define KERNEL_MAX 8u
// Tokens that a work item of the backward pass walks along.
#define STRETCH 32u
#define BLOCKS (GROUP / LANES)

KERNEL(GROUP) conv1d_forward(
    GLOBAL float *y,
    GLOBAL const float *x,
    GLOBAL const float *weight,
    GLOBAL const uint *seen,
    ulong length,
    uint channels,
    uint kernel_width
) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i >= length) {
        return;
    }
    ulong token = i >> 32 == 0 ? div_u32((uint)i, channels) : div_u64(i, channels);
    uint channel = (uint)(i - token * channels);
    uint before = seen[token];
    float sum = 0.0f;
    for (uint j = kernel_width - 1u - before; j < kernel_width; j++) {
        ulong row = token + j + 1u - kernel_width;
        sum = fma_rn(weight[(ulong)channel * kernel_width + j], x[row * channels + channel], sum);
    }
    y[i] = isobit_silu(sum);
}

// With the inputs before each document; `documents` says which one a token belongs to.
KERNEL(GROUP) conv1d_continue(
    GLOBAL float *y,
    GLOBAL const float *x,
    GLOBAL const float *weight,
    GLOBAL const float *history,
    GLOBAL const uint *seen,
    GLOBAL const uint *documents,
    ulong length,
    uint channels,
    uint kernel_width
) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i >= length) {
        return;
    }
    ulong token = i >> 32 == 0 ? div_u32((uint)i, channels) : div_u64(i, channels);
    uint channel = (uint)(i - token * channels);
    uint before = seen[token];
    uint absent = kernel_width - 1u - before;
    float sum = 0.0f;
    for (uint j = 0u; j < kernel_width; j++) {
        float tap;
        if (j >= absent) {
            tap = x[(token + j + 1u - kernel_width) * channels + channel];
        } else {
            ulong row = (ulong)documents[token] * (kernel_width - 1u) + before + j;
            tap = history[row * channels + channel];
        }
        sum = fma_rn(weight[(ulong)channel * kernel_width + j], tap, sum);
    }
    y[i] = isobit_silu(sum);
}

// dy * silu_grad of the sum over a window, whose first `absent` taps are left out. Tap j of a
// window stands in place KERNEL_MAX - kernel_width + j; weights lie the same way, and `absent`
// counts places.
FUNCTION float window_gradient(float dy, const float *window, const float *taps, uint absent) {
    float sum = 0.0f;
    for (uint j = 0u; j < KERNEL_MAX; j++) {
        if (j >= absent) {
            sum = fma_rn(taps[j], window[j], sum);
        }
    }
    return dy * isobit_silu_grad(sum);
}

FUNCTION void load_taps(float *taps, GLOBAL const float *weight, uint channel, uint kernel_width) {
    for (uint j = 0u; j < KERNEL_MAX; j++) {
        uint unused = KERNEL_MAX - kernel_width;
        taps[j] = j >= unused ? weight[(ulong)channel * kernel_width + (j - unused)] : 0.0f;
    }
}

// The inputs of the tokens before `token`, moved up by the next call of `next_input`.
FUNCTION void load_window(float *window, GLOBAL const float *x, ulong token, uint channel, uint channels) {
    for (uint j = 0u; j < KERNEL_MAX; j++) {
        ulong back = KERNEL_MAX - j;
        window[j] = token >= back ? x[(token - back) * channels + channel] : 0.0f;
    }
}

FUNCTION void next_input(float *window, float input) {
    for (uint j = 0u; j + 1u < KERNEL_MAX; j++) {
        window[j] = window[j + 1u];
    }
    window[KERNEL_MAX - 1u] = input;
}

// A work item has one channel and STRETCH tokens; the gradients of the last ones need kernel - 1
// tokens more. Place j of `later` is the growing gradient of the token whose input is in place j of
// the window.
KERNEL(GROUP) conv1d_backward(
    GLOBAL float *dx,
    GLOBAL const float *dy,
    GLOBAL const float *x,
    GLOBAL const float *weight,
    GLOBAL const uint *seen,
    uint tokens,
    uint channels,
    uint kernel_width,
    uint tiles
) {
    uint channel = mod_u32(group_index(), tiles) * GROUP + local_index();
    uint first = div_u32(group_index(), tiles) * STRETCH;
    if (channel >= channels) {
        return;
    }
    float taps[KERNEL_MAX];
    float window[KERNEL_MAX];
    float later[KERNEL_MAX];
    load_taps(taps, weight, channel, kernel_width);
    load_window(window, x, first, channel, channels);
    for (uint j = 0u; j < KERNEL_MAX; j++) {
        later[j] = 0.0f;
    }
    uint reach = kernel_width - 1u;
    uint end = tokens - first < STRETCH ? tokens : first + STRETCH;
    // Past the last token nothing is added; the sums only move out.
    for (uint t = first; t < end + reach; t++) {
        if (t < tokens) {
            ulong at = (ulong)t * channels + channel;
            uint absent = KERNEL_MAX - 1u - seen[t];
            next_input(window, x[at]);
            float gradient = window_gradient(dy[at], window, taps, absent);
            for (uint j = 0u; j < KERNEL_MAX; j++) {
                if (j >= absent) {
                    later[j] = fma_rn(taps[j], gradient, later[j]);
                }
            }
        }
        float done = 0.0f;
        for (uint j = 0u; j < KERNEL_MAX; j++) {
            done = j == KERNEL_MAX - kernel_width ? later[j] : done;
        }
        if (t >= first + reach) {
            dx[(ulong)(t - reach) * channels + channel] = done;
        }
        for (uint j = 0u; j + 1u < KERNEL_MAX; j++) {
            later[j] = later[j + 1u];
        }
        later[KERNEL_MAX - 1u] = 0.0f;
    }
}

// 32 channels per group; eight blocks of tokens are summed side by side and then added in order.
// `blocks` holds first token and end of each.
KERNEL(GROUP) conv1d_grad_weight(
    GLOBAL float *dweight,
    GLOBAL const float *dy,
    GLOBAL const float *x,
    GLOBAL const float *weight,
    GLOBAL const uint *seen,
    GLOBAL const uint *blocks,
    uint block_count,
    uint channels,
    uint kernel_width
) {
    LOCAL float block_sums[BLOCKS * KERNEL_MAX * LANES];
    uint lane = local_index() % LANES;
    uint slot = local_index() / LANES;
    uint channel = group_index() * LANES + lane;
    // KERNEL_MAX equals BLOCKS: the slot of a block while summing is the place of a tap while
    // adding.
    uint unused = KERNEL_MAX - kernel_width;
    int adds = channel < channels && slot >= unused;
    ulong into = (ulong)channel * kernel_width + (slot - unused);
    float total = adds ? dweight[into] : 0.0f;
    float taps[KERNEL_MAX];
    float window[KERNEL_MAX];
    float sums[KERNEL_MAX];
    if (channel < channels) {
        load_taps(taps, weight, channel, kernel_width);
    }
    for (uint first = 0u; first < block_count; first += BLOCKS) {
        uint block = first + slot;
        for (uint j = 0u; j < KERNEL_MAX; j++) {
            sums[j] = 0.0f;
        }
        if (block < block_count && channel < channels) {
            uint start = blocks[2u * block];
            uint end = blocks[2u * block + 1u];
            load_window(window, x, start, channel, channels);
            for (uint t = start; t < end; t++) {
                ulong at = (ulong)t * channels + channel;
                uint absent = KERNEL_MAX - 1u - seen[t];
                next_input(window, x[at]);
                float gradient = window_gradient(dy[at], window, taps, absent);
                for (uint j = 0u; j < KERNEL_MAX; j++) {
                    if (j >= absent) {
                        sums[j] = fma_rn(gradient, window[j], sums[j]);
                    }
                }
            }
        }
        for (uint j = 0u; j < KERNEL_MAX; j++) {
            block_sums[(slot * KERNEL_MAX + j) * LANES + lane] = sums[j];
        }
        barrier_local();
        if (adds) {
            for (uint n = 0u; n < BLOCKS && first + n < block_count; n++) {
                total = total + block_sums[(n * KERNEL_MAX + slot) * LANES + lane];
            }
        }
        barrier_local();
    }
    if (adds) {
        dweight[into] = total;
    }
}
