// LM head and cross-entropy (docs/numerics.md, "Head and loss") over logits z[token][column] of a
// stripe of the vocabulary. A team (lanes.h) takes a (token, block) or a token.

#define TEAMS (GROUP / LANES)
#define PER_LANE (CHUNK / LANES)
#define NOWHERE 0xffffffffu
#define NEGATIVE_INFINITY as_f32(0xff800000u)

// Maximum, sum and first maximum of every block of a stripe, and the labels' logits. A team per
// (token, block); results are [token][block of the whole vocabulary].
KERNEL(GROUP) head_blocks(
    GLOBAL float *maxima, GLOBAL float *sums, GLOBAL uint *firsts, GLOBAL float *label_logits, GLOBAL const float *z,
    GLOBAL const int *labels, uint base, uint tokens, uint first_column, uint columns, uint blocks
) {
    LOCAL float scratch[GROUP];
    LOCAL uint indices[GROUP];
    uint lane = local_index() % LANES;
    uint stripe_blocks = (columns + (CHUNK - 1u)) / CHUNK;
    uint pair = group_index() * TEAMS + local_index() / LANES;
    uint token = div_u32(pair, stripe_blocks);
    uint block = pair - token * stripe_blocks;
    int exists = token < tokens;
    uint start = block * CHUNK;
    uint length = !exists ? 0u : columns - start < CHUNK ? columns - start : CHUNK;
    GLOBAL const float *row = z + (ulong)(exists ? token : 0u) * columns + start;
    float values[PER_LANE];
    float m = NEGATIVE_INFINITY;
    for (uint i = 0u; i < PER_LANE; i++) {
        uint v = i * LANES + lane;
        values[i] = v < length ? row[v] : NEGATIVE_INFINITY;
        m = values[i] > m ? values[i] : m;
    }
    m = team_max(scratch, m);
    float sum = 0.0f;
    uint first = NOWHERE;
    // Beyond the end, exp(-inf - m) adds +0, or a NaN where the block's own numbers do.
    for (uint i = 0u; i < PER_LANE; i++) {
        uint v = i * LANES + lane;
        sum = sum + isobit_exp(values[i] - m);
        first = first == NOWHERE && v < length && values[i] == m ? first_column + start + v : first;
    }
    sum = team_sum(scratch, sum);
    first = team_min(indices, first);
    if (exists && lane == 0u) {
        ulong at = (ulong)token * blocks + first_column / CHUNK + block;
        maxima[at] = m;
        sums[at] = sum;
        firsts[at] = first;
        int label = labels[base + token];
        uint inside = (uint)label - first_column - start;
        if (label >= 0 && inside < length) {
            label_logits[token] = row[inside];
        }
    }
}

// A team per token.
KERNEL(GROUP) head_combine(
    GLOBAL float *loss, GLOBAL float *lse, GLOBAL uint *best, GLOBAL const float *maxima, GLOBAL const float *sums,
    GLOBAL const uint *firsts, GLOBAL const float *label_logits, GLOBAL const int *labels, uint base, uint tokens, uint blocks
) {
    LOCAL float scratch[GROUP];
    LOCAL uint indices[GROUP];
    uint lane = local_index() % LANES;
    uint token = group_index() * TEAMS + local_index() / LANES;
    int exists = token < tokens;
    uint count = exists ? blocks : 0u;
    ulong at = (ulong)token * blocks;
    float m = NEGATIVE_INFINITY;
    for (uint b = lane; b < count; b += LANES) {
        m = maxima[at + b] > m ? maxima[at + b] : m;
    }
    m = team_max(scratch, m);
    float sum = 0.0f;
    uint first = NOWHERE;
    for (uint b = lane; b < count; b += LANES) {
        sum = sum + sums[at + b] * isobit_exp(maxima[at + b] - m);
        if (maxima[at + b] == m) {
            first = firsts[at + b] < first ? firsts[at + b] : first;
        }
    }
    sum = team_sum(scratch, sum);
    first = team_min(indices, first);
    if (exists && lane == 0u) {
        float result = canonical(m + isobit_ln(sum));
        lse[base + token] = result;
        best[base + token] = first == NOWHERE ? 0u : first;
        loss[base + token] = labels[base + token] == IGNORED ? 0.0f : canonical(result - label_logits[token]);
    }
}

KERNEL(GROUP) head_cap(GLOBAL float *z, ulong length, float cap, float cap_inverse) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        z[i] = soft_capped(z[i], cap, cap_inverse);
    }
}

// Logits of a stripe become their gradients. `groups` groups per token.
KERNEL(GROUP) head_gradient(
    GLOBAL float *z, GLOBAL const int *labels, GLOBAL const float *lse, GLOBAL const float *weight, uint base,
    uint first_column, uint columns, uint groups, float cap, float cap_inverse
) {
    uint token = div_u32(group_index(), groups);
    uint column = mod_u32(group_index(), groups) * GROUP + local_index();
    if (column < columns) {
        ulong at = (ulong)token * columns + column;
        int label = labels[base + token];
        int is_label = (uint)label == first_column + column;
        float dz = logit_gradient(z[at], lse[base + token], is_label, weight[base + token], cap, cap_inverse);
        z[at] = label == IGNORED ? 0.0f : dz;
    }
}

// dh of an ignored token is zero, whatever the head holds.
KERNEL(GROUP) head_ignored(GLOBAL float *dh, GLOBAL const int *labels, ulong length, uint hidden) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length && labels[div_u64(i, hidden)] == IGNORED) {
        dh[i] = 0.0f;
    }
}
