// Columns cut into slices along the tokens (docs/numerics.md, "Slices"), laid out as tensor cores
// want them: the tokens of a column one after another. Every chunk starts at a whole block of 128
// tokens; what is left of its last block is zero.

#define COLUMN_GROUP 512
#define COLUMN_WARPS (COLUMN_GROUP / 32)
// Tokens of a thread, all of one column.
#define COLUMN_TOKENS (CHUNK / COLUMN_WARPS)

// One group per (chunk, 32 columns); it reads its numbers once. The table holds start, length and
// first block of every chunk. Chunk `first_chunk` has the first scales [chunk, padded width], block
// `base_block` is the first of the planes [slice][width][pitch]; token `x_base` is the first row of
// x.
extern "C" __global__ void __launch_bounds__(COLUMN_GROUP, 2) slice_along_tokens(
    char *planes, float *scales, const float *__restrict__ x, const uint *__restrict__ table, uint first_chunk,
    uint base_block, uint x_base, uint width, ulong pitch
) {
    LOCAL uint maxima[COLUMN_WARPS][32];
    // One more than 32: rows start in different banks.
    LOCAL int4 staged[32][CHUNK / 16 + 1];
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
        scales[(ulong)chunk * padded_width + column] = group_scale(max_bits);
    }
    const float multiplier = group_multiplier(max_bits);
    uint q[COLUMN_TOKENS];
    #pragma unroll
    for (uint i = 0u; i < COLUMN_TOKENS; i++) {
        q[i] = integer(values[i], multiplier);
    }
    // By way of shared memory, so that a warp stores a whole column of the chunk at a time.
    const uint tokens = (length + 127u) / 128u * 128u;
    #pragma unroll
    for (int s = 0; s < SLICES; s++) {
        if (s > 0) {
            barrier_local();
        }
        #pragma unroll
        for (uint i = 0u; i < COLUMN_TOKENS / 16u; i++) {
            int4 words;
            words.x = packed_slices(q + 16u * i, s);
            words.y = packed_slices(q + 16u * i + 4u, s);
            words.z = packed_slices(q + 16u * i + 8u, s);
            words.w = packed_slices(q + 16u * i + 12u, s);
            staged[lane][warp * (COLUMN_TOKENS / 16u) + i] = words;
        }
        barrier_local();
        #pragma unroll
        for (uint i = 0u; i < 32u / COLUMN_WARPS; i++) {
            const uint row = warp * (32u / COLUMN_WARPS) + i;
            const uint at_column = column - lane + row;
            if (at_column < width && lane * 16u < tokens) {
                const ulong at = ((ulong)s * width + at_column) * pitch + (ulong)(block - base_block) * 128u;
                ((int4 *)(planes + at))[lane] = staged[row][lane];
            }
        }
    }
}
