// Decay (docs/numerics.md, "Decay"): a work item per token and head; gradients of parameters by
// heads.

#define BLOCKS (GROUP / LANES)

FUNCTION float log_decay(float a, float a_log, float dt_bias) {
    return -(isobit_exp(a_log) * isobit_softplus(a + dt_bias));
}

KERNEL(GROUP) decay_forward(
    GLOBAL float *g,
    GLOBAL float *beta,
    GLOBAL const float *a,
    GLOBAL const float *b,
    GLOBAL const float *a_log,
    GLOBAL const float *dt_bias,
    ulong length,
    uint heads
) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        uint head = (uint)mod_u64(i, heads);
        g[i] = log_decay(a[i], a_log[head], dt_bias[head]);
        beta[i] = isobit_sigmoid(b[i]);
    }
}

KERNEL(GROUP) decay_backward(
    GLOBAL float *da,
    GLOBAL float *db,
    GLOBAL const float *dg,
    GLOBAL const float *dbeta,
    GLOBAL const float *a,
    GLOBAL const float *b,
    GLOBAL const float *a_log,
    GLOBAL const float *dt_bias,
    ulong length,
    uint heads
) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        uint head = (uint)mod_u64(i, heads);
        da[i] = -((dg[i] * isobit_exp(a_log[head])) * isobit_sigmoid(a[i] + dt_bias[head]));
        float s = isobit_sigmoid(b[i]);
        db[i] = dbeta[i] * (s * (1.0f - s));
    }
}

// 32 heads per group; eight blocks of tokens are summed side by side and then added in order.
// `blocks` holds first token and end of each.
KERNEL(GROUP) decay_grad_parameters(
    GLOBAL float *da_log,
    GLOBAL float *ddt_bias,
    GLOBAL const float *dg,
    GLOBAL const float *da,
    GLOBAL const float *a,
    GLOBAL const float *a_log,
    GLOBAL const float *dt_bias,
    GLOBAL const uint *blocks,
    uint block_count,
    uint heads
) {
    LOCAL float rates[GROUP];
    LOCAL float biases[GROUP];
    uint lane = local_index() % LANES;
    uint slot = local_index() / LANES;
    uint head = group_index() * LANES + lane;
    // The first slot adds up the one, the second the other.
    int adds = slot < 2u && head < heads;
    float total = adds ? (slot == 0u ? da_log[head] : ddt_bias[head]) : 0.0f;
    for (uint first = 0u; first < block_count; first += BLOCKS) {
        uint block = first + slot;
        float rate = 0.0f;
        float bias = 0.0f;
        if (block < block_count && head < heads) {
            uint end = blocks[2u * block + 1u];
            for (uint t = blocks[2u * block]; t < end; t++) {
                ulong at = (ulong)t * heads + head;
                rate = fma_rn(dg[at], log_decay(a[at], a_log[head], dt_bias[head]), rate);
                bias = bias + da[at];
            }
        }
        rates[local_index()] = rate;
        biases[local_index()] = bias;
        barrier_local();
        if (adds) {
            for (uint n = 0u; n < BLOCKS && first + n < block_count; n++) {
                total = total + (slot == 0u ? rates[n * LANES + lane] : biases[n * LANES + lane]);
            }
        }
        barrier_local();
    }
    if (adds && slot == 0u) {
        da_log[head] = total;
    }
    if (adds && slot == 1u) {
        ddt_bias[head] = total;
    }
}
