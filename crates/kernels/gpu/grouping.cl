// Groups the pairs (token, slot) of a router by expert (docs/numerics.md, "Grouped rows"): a stable
// counting sort. A group has a block of tokens of one row of data, a work item up to EACH experts;
// every work item looks at all pairs of its block in order, so that no atomics are needed.

// Experts of a work item: EACH * GROUP is the largest number of experts.
#define EACH 4u
// Pairs that are in local memory at a time.
#define PAIRS 1024u
// Blocks whose counts are read together.
#define AHEAD 8u

// counts[block, expert]: pairs of each block.
KERNEL(GROUP) grouping_count(
    GLOBAL uint *counts, GLOBAL const uint *indices, GLOBAL const uint *blocks, uint slots, uint experts) {
    LOCAL uint pairs[PAIRS];
    uint l = local_index();
    uint first = blocks[2u * group_index()] * slots;
    uint end = blocks[2u * group_index() + 1u] * slots;
    uint own[EACH];
    for (uint n = 0u; n < EACH; n++) {
        own[n] = 0u;
    }
    for (uint start = first; start < end; start += PAIRS) {
        uint count = end - start < PAIRS ? end - start : PAIRS;
        for (uint i = l; i < count; i += GROUP) {
            pairs[i] = indices[start + i];
        }
        barrier_local();
        for (uint i = 0u; i < count; i++) {
            uint expert = pairs[i];
            for (uint n = 0u; n < EACH; n++) {
                own[n] += expert == l + n * GROUP ? 1u : 0u;
            }
        }
        barrier_local();
    }
    for (uint n = 0u; n < EACH; n++) {
        if (l + n * GROUP < experts) {
            counts[group_index() * experts + l + n * GROUP] = own[n];
        }
    }
}

// One group. offsets[block, expert]: pairs of the expert in earlier blocks; row_counts[row,
// expert]; starts[expert]: the expert's first row. Row r of data has the blocks firsts[r] ..
// firsts[r + 1].
KERNEL(GROUP) grouping_starts(
    GLOBAL uint *row_counts, GLOBAL uint *offsets, GLOBAL uint *starts, GLOBAL const uint *counts,
    GLOBAL const uint *firsts, uint rows, uint experts) {
    LOCAL uint totals[EACH * GROUP];
    LOCAL uint sums[GROUP];
    uint l = local_index();
    for (uint n = 0u; n < EACH; n++) {
        uint expert = l + n * GROUP;
        uint sum = 0u;
        for (uint r = 0u; r < rows && expert < experts; r++) {
            uint before = sum;
            uint end = firsts[r + 1u];
            for (uint start = firsts[r]; start < end; start += AHEAD) {
                uint read[AHEAD];
                for (uint i = 0u; i < AHEAD; i++) {
                    read[i] = start + i < end ? counts[(start + i) * experts + expert] : 0u;
                }
                for (uint i = 0u; i < AHEAD; i++) {
                    if (start + i < end) {
                        offsets[(start + i) * experts + expert] = sum;
                    }
                    sum += read[i];
                }
            }
            row_counts[r * experts + expert] = sum - before;
        }
        totals[expert] = sum;
    }
    barrier_local();
    // Sums of EACH neighbours, then of all before them.
    uint own = 0u;
    for (uint n = 0u; n < EACH; n++) {
        own += totals[EACH * l + n];
    }
    sums[l] = own;
    barrier_local();
    for (uint step = 1u; step < GROUP; step *= 2u) {
        uint earlier = l >= step ? sums[l - step] : 0u;
        barrier_local();
        sums[l] += earlier;
        barrier_local();
    }
    uint start = sums[l] - own;
    for (uint n = 0u; n < EACH; n++) {
        uint expert = EACH * l + n;
        if (expert < experts) {
            starts[expert] = start;
        }
        start += totals[expert];
    }
}

// The row of each pair, and the token of each row.
KERNEL(GROUP) grouping_place(
    GLOBAL uint *tokens, GLOBAL uint *places, GLOBAL const uint *indices, GLOBAL const uint *blocks,
    GLOBAL const uint *offsets, GLOBAL const uint *starts, uint slots, uint experts) {
    LOCAL uint pairs[PAIRS];
    uint l = local_index();
    uint first = blocks[2u * group_index()] * slots;
    uint end = blocks[2u * group_index() + 1u] * slots;
    uint next[EACH];
    for (uint n = 0u; n < EACH; n++) {
        uint expert = l + n * GROUP;
        next[n] = expert < experts ? starts[expert] + offsets[group_index() * experts + expert] : 0u;
    }
    for (uint start = first; start < end; start += PAIRS) {
        uint count = end - start < PAIRS ? end - start : PAIRS;
        for (uint i = l; i < count; i += GROUP) {
            pairs[i] = indices[start + i];
        }
        barrier_local();
        for (uint i = 0u; i < count; i++) {
            uint expert = pairs[i];
            for (uint n = 0u; n < EACH; n++) {
                if (expert == l + n * GROUP) {
                    places[start + i] = next[n];
                    tokens[next[n]] = div_u32(start + i, slots);
                    next[n]++;
                }
            }
        }
        barrier_local();
    }
}
