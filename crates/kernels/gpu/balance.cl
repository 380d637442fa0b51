// Load balancing of a router (docs/numerics.md, "Load balance"): sums of blocks of tokens side by
// side, then added in order.

#define TOKENS (GROUP / LANES)
// Experts of a work item: at most 1024 in all.
#define EXPERTS_EACH 4

// One block of tokens per group, eight tokens at a time; `blocks` holds first token and end of
// each.
KERNEL(GROUP) balance_blocks(GLOBAL float *block_sums, GLOBAL const float *logits, GLOBAL const uint *blocks, uint experts) {
    LOCAL float lanes[GROUP];
    LOCAL float scales[2 * TOKENS];
    uint lane = local_index() % LANES;
    uint slot = local_index() / LANES;
    uint end = blocks[2u * group_index() + 1u];
    float sums[EXPERTS_EACH];
    for (uint n = 0u; n < EXPERTS_EACH; n++) {
        sums[n] = 0.0f;
    }
    for (uint first = blocks[2u * group_index()]; first < end; first += TOKENS) {
        uint token = first + slot < end ? first + slot : first;
        float most;
        float sum;
        softmax_scales(lanes, logits + (ulong)token * experts, experts, &most, &sum);
        if (lane == 0u) {
            scales[2u * slot] = most;
            scales[2u * slot + 1u] = sum;
        }
        barrier_local();
        for (uint n = 0u; n < EXPERTS_EACH; n++) {
            uint e = n * GROUP + local_index();
            for (uint i = 0u; e < experts && i < TOKENS && first + i < end; i++) {
                float power = isobit_exp(logits[(ulong)(first + i) * experts + e] - scales[2u * i]);
                sums[n] = sums[n] + div_rn(power, scales[2u * i + 1u]);
            }
        }
        barrier_local();
    }
    for (uint n = 0u; n < EXPERTS_EACH; n++) {
        uint e = n * GROUP + local_index();
        if (e < experts) {
            block_sums[(ulong)group_index() * experts + e] = sums[n];
        }
    }
}

// A work item per (row of data, expert); `firsts` holds how many blocks there are before each row,
// and in all.
KERNEL(GROUP) balance_rows(
    GLOBAL float *sums, GLOBAL const float *block_sums, GLOBAL const uint *firsts, ulong length, uint experts) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        ulong row = div_u64(i, experts);
        ulong e = mod_u64(i, experts);
        float sum = 0.0f;
        for (uint block = firsts[row]; block < firsts[row + 1]; block++) {
            sum = sum + block_sums[(ulong)block * experts + e];
        }
        sums[i] = sum;
    }
}

KERNEL(GROUP) balance_backward(
    GLOBAL float *dlogits,
    GLOBAL const float *share,
    GLOBAL const float *logits,
    GLOBAL const uint *row_starts,
    ulong tokens,
    uint experts
) {
    LOCAL float lanes[GROUP];
    uint lane = local_index() % LANES;
    ulong token = (ulong)group_index() * TOKENS + local_index() / LANES;
    uint here = token < tokens ? experts : 0u;
    ulong at = here != 0u ? token * experts : (ulong)0;
    ulong row = 0;
    while (here != 0u && row_starts[row + 1] <= token) {
        row++;
    }
    ulong from = row * experts;
    float most;
    float sum;
    softmax_scales(lanes, logits + at, here, &most, &sum);
    float mean = 0.0f;
    for (uint e = lane; e < here; e += LANES) {
        mean = fma_rn(div_rn(isobit_exp(logits[at + e] - most), sum), share[from + e], mean);
    }
    mean = team_sum(lanes, mean);
    for (uint e = lane; e < here; e += LANES) {
        float probability = div_rn(isobit_exp(logits[at + e] - most), sum);
        dlogits[at + e] = fma_rn(probability, share[from + e] - mean, dlogits[at + e]);
    }
}
