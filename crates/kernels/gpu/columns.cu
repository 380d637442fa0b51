// Columns cut into slices along the tokens (docs/numerics.md, "Slices"), laid out as tensor cores want
// them: the tokens of a column one after another. Every chunk starts at a whole block of 128 tokens;
// what is left of its last block is zero.

#define COLUMN_GROUP 512
#define COLUMN_WARPS (COLUMN_GROUP / 32)
// Tokens of a thread, all of one column.
#define COLUMN_TOKENS (CHUNK / COLUMN_WARPS)

// One group per (chunk, 32 columns); it reads its numbers once. The table holds start, length and first
// block of every chunk. Chunk `first_chunk` has the first scales [chunk, padded width], block
// `base_block` is the first of the planes [slice][width][pitch]; token `x_base` is the first row of x.
KERNEL(COLUMN_GROUP) slice_along_tokens(
    char *planes, float *scales, const float *__restrict__ x, const uint *__restrict__ table, uint first_chunk,
    uint base_block, uint x_base, uint width, ulong pitch
) {
    LOCAL uint maxima[COLUMN_WARPS][32];
    const uint lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
    const uint padded_width = row_words(width) * 4u;
    const uint chunk = group_index() / (padded_width / 32u);
    const uint column = group_index() % (padded_width / 32u) * 32u + lane;
    const uint *entry = table + (ulong)(first_chunk + chunk) * 3u;
    const uint start = entry[0], length = entry[1], block = entry[2];
    const float *from = x + (ulong)(start - x_base) * width + column;
    float values[COLUMN_TOKENS];
    uint max_bits = 0u;
    #pragma unroll
    for (uint i = 0u; i < COLUMN_TOKENS; i++) {
        const uint t = warp * COLUMN_TOKENS + i;
        values[i] = column < width && t < length ? __ldg(from + (ulong)t * width) : 0.0f;
    }
    #pragma unroll
    for (uint i = 0u; i < COLUMN_TOKENS; i++) {
        max_bits = max(max_bits, magnitude_bits(values[i]));
    }
    maxima[warp][lane] = max_bits;
    barrier_local();
    #pragma unroll
    for (uint other = 0u; other < COLUMN_WARPS; other++) {
        max_bits = max(max_bits, maxima[other][lane]);
    }
    if (warp == 0u) {
        scales[(ulong)chunk * padded_width + column] = scale_unit(max_bits);
    }
    if (column >= width || warp * COLUMN_TOKENS >= (length + 127u) / 128u * 128u) {
        return;
    }
    const float multiplier = scale_multiplier(max_bits);
    const ulong at = (ulong)(block - base_block) * 128u + warp * COLUMN_TOKENS;
    int q[COLUMN_TOKENS];
    #pragma unroll
    for (uint i = 0u; i < COLUMN_TOKENS; i++) {
        q[i] = quantise(values[i], multiplier);
    }
    #pragma unroll
    for (int s = 0; s < SLICES; s++) {
        int4 *to = (int4 *)(planes + ((ulong)s * width + column) * pitch + at);
        int words[COLUMN_TOKENS / 4];
        #pragma unroll
        for (uint i = 0u; i < COLUMN_TOKENS / 4u; i++) {
            words[i] = pack4(
                slice_of(q[4u * i], s), slice_of(q[4u * i + 1u], s), slice_of(q[4u * i + 2u], s), slice_of(q[4u * i + 3u], s)
            );
        }
        #pragma unroll
        for (uint i = 0u; i < COLUMN_TOKENS / 16u; i++) {
            to[i] = make_int4(words[4u * i], words[4u * i + 1u], words[4u * i + 2u], words[4u * i + 3u]);
        }
    }
}
