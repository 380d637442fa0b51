// Embedding (docs/numerics.md, "Embedding"). Backward adds to each table row its tokens in
// ascending order: tokens of one id are a list, walked by whoever has the first of them, so nothing
// is scattered and there are no atomics.

// `tiles` groups for each token. An id outside the table gives NaN.
#define EMBEDDING_FORWARD(name, stored, value) \
    KERNEL(GROUP) embedding_forward_##name( \
        GLOBAL uint *y, GLOBAL const stored *table, GLOBAL const uint *ids, uint rows, uint width, uint tiles) { \
        uint token = div_u32(group_index(), tiles); \
        uint column = mod_u32(group_index(), tiles) * GROUP + local_index(); \
        if (column < width) { \
            uint id = ids[token]; \
            uint found = id < rows ? value(table[(ulong)id * width + column]) : CANONICAL_NAN; \
            y[(ulong)token * width + column] = found; \
        } \
    }

EMBEDDING_FORWARD(f32, uint, (uint))
EMBEDDING_FORWARD(bf16, ushort, widen_bf16)
EMBEDDING_FORWARD(f16, ushort, widen_f16)

// For every token the next one of the same id, `tokens` where there is none, and whether an earlier
// one has it. Each token is compared with all: quadratic, but 16384 tokens are 2^28 integer
// comparisons, little beside the additions.
KERNEL(GROUP) embedding_links(GLOBAL uint *next, GLOBAL uint *later, GLOBAL const uint *ids, uint tokens) {
    LOCAL uint others[GROUP];
    uint l = local_index();
    uint token = group_index() * GROUP + l;
    uint id = token < tokens ? ids[token] : 0u;
    uint found = tokens;
    uint earlier = 0u;
    for (uint first = 0u; first < tokens; first += GROUP) {
        others[l] = first + l < tokens ? ids[first + l] : 0u;
        barrier_local();
        uint count = tokens - first < GROUP ? tokens - first : GROUP;
        for (uint i = 0u; i < count; i++) {
            int same = others[i] == id;
            uint other = first + i;
            earlier |= same && other < token ? 1u : 0u;
            found = same && other > token && other < found ? other : found;
        }
        barrier_local();
    }
    if (token < tokens) {
        next[token] = found;
        later[token] = earlier;
    }
}

// `tiles` groups for each token; those of a token that is not the first of its id have nothing to
// do.
KERNEL(GROUP) embedding_backward(
    GLOBAL float *dtable, GLOBAL const float *dy, GLOBAL const uint *ids, GLOBAL const uint *next,
    GLOBAL const uint *later, uint tokens, uint rows, uint width, uint tiles) {
    uint token = div_u32(group_index(), tiles);
    uint column = mod_u32(group_index(), tiles) * GROUP + local_index();
    uint id = ids[token];
    if (later[token] != 0u || id >= rows || column >= width) {
        return;
    }
    ulong at = (ulong)id * width + column;
    float total = dtable[at];
    while (token < tokens) {
        total = total + dy[(ulong)token * width + column];
        token = next[token];
    }
    dtable[at] = total;
}
