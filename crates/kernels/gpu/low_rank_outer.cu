// Outer products of several factors in one launch (docs/numerics.md, "Low-rank products"): the two
// kernels of low_rank.cl for factors without groups, each with its own input, so that the small
// ones fill the card together. CUDA C++ behind cuda.h.

// Tokens of a block of a sum over tokens, at most.
#define TOKEN_BLOCK 128
// A group sums RANKS ranks by COLUMNS columns of a block; a thread has EACH adjacent columns, a
// pair. A group that adds up these sums has SUM_COLUMNS.
#define RANKS 8
#define THREADS 128
#define EACH 2
#define COLUMNS (THREADS * EACH)
#define SUM_COLUMNS THREADS
// Tokens of x, and sums of blocks, that a thread asks for before it uses the first.
#define AHEAD 16
#define SUMS_AHEAD 16

// A factor: where the sums of its blocks go [block, rank, width], what they are of, the gradient
// they are added to, and the group that begins with it in either kernel.
struct alignas(64) Outer {
    float *partial;
    const float *u, *x;
    float *dfactor;
    uint rank, width, first_tile, first_sum;
    ulong rank_step, width_step;
    float alpha;
    uint unused[13];
};

// The last of `count` factors that begins at `group` or before.
#define OWN(first) \
    Outer own = o0; \
    if (count > 1u && group_index() >= o1.first) own = o1; \
    if (count > 2u && group_index() >= o2.first) own = o2; \
    if (count > 3u && group_index() >= o3.first) own = o3; \
    if (count > 4u && group_index() >= o4.first) own = o4; \
    if (count > 5u && group_index() >= o5.first) own = o5; \
    const uint index = group_index() - own.first

#define OUTERS \
    const __grid_constant__ Outer o0, const __grid_constant__ Outer o1, const __grid_constant__ Outer o2, \
        const __grid_constant__ Outer o3, const __grid_constant__ Outer o4, const __grid_constant__ Outer o5, uint count

// A pair of numbers of a token from `column` on; zero beyond the end. WHOLE_PAIRS: rows are.
template <bool WHOLE_PAIRS>
FUNCTION float2 load_pair(const float *row, uint column, uint width) {
    if (WHOLE_PAIRS) return __ldg((const float2 *)(row + column));
    return make_float2(__ldg(row + column), column + 1u < width ? __ldg(row + column + 1u) : 0.0f);
}

// The products of AHEAD tokens from `t` on, or of as many as there are.
template <bool WHOLE, bool WHOLE_PAIRS>
FUNCTION void add_tokens(
    float (&sums)[EACH][RANKS], const float *from, const float *scaled, uint t, uint tokens, uint column, uint width
) {
    float2 values[AHEAD];
#pragma unroll
    for (uint i = 0u; i < AHEAD; i++) {
        values[i] = make_float2(0.0f, 0.0f);
        if (WHOLE || t + i < tokens) values[i] = load_pair<WHOLE_PAIRS>(from + (ulong)(t + i) * width, column, width);
    }
#pragma unroll
    for (uint i = 0u; i < AHEAD; i++) {
        if (WHOLE || t + i < tokens) {
#pragma unroll
            for (uint n = 0u; n < RANKS; n++) {
                const float factor = scaled[(t + i) * RANKS + n];
                sums[0][n] = fma_rn(factor, values[i].x, sums[0][n]);
                sums[1][n] = fma_rn(factor, values[i].y, sums[1][n]);
            }
        }
    }
}

template <bool WHOLE_PAIRS>
FUNCTION void add_block(
    float (&sums)[EACH][RANKS], const float *from, const float *scaled, uint tokens, uint column, uint width
) {
    uint t = 0u;
    for (; t + AHEAD <= tokens; t += AHEAD) add_tokens<true, WHOLE_PAIRS>(sums, from, scaled, t, tokens, column, width);
    if (t < tokens) add_tokens<false, WHOLE_PAIRS>(sums, from, scaled, t, tokens, column, width);
}

// Sums of single blocks: COLUMNS columns and RANKS ranks of one block per group. `blocks` holds
// first token and end of each; `first_block` is the first of this launch.
extern "C" __global__ __launch_bounds__(THREADS) void outer_blocks(OUTERS, const uint *blocks, uint first_block) {
    __shared__ __align__(16) float scaled[TOKEN_BLOCK * RANKS];
    OWN(first_tile);
    const uint rank_tiles = (own.rank + RANKS - 1u) / RANKS, width_tiles = (own.width + COLUMNS - 1u) / COLUMNS;
    const uint first_rank = index % rank_tiles * RANKS, block = index / rank_tiles / width_tiles;
    const uint column = index / rank_tiles % width_tiles * COLUMNS + threadIdx.x * EACH;
    const uint first = blocks[2u * (first_block + block)], tokens = blocks[2u * (first_block + block) + 1u] - first;
#pragma unroll
    for (uint i = threadIdx.x; i < TOKEN_BLOCK * RANKS; i += THREADS) {
        const uint j = first_rank + i % RANKS;
        const bool there = i < tokens * RANKS && j < own.rank;
        scaled[i] = there ? own.alpha * own.u[(ulong)(first + i / RANKS) * own.rank + j] : 0.0f;
    }
    __syncthreads();
    if (column >= own.width) return;
    float sums[EACH][RANKS] = {};
    const float *from = own.x + (ulong)first * own.width;
    if (own.width % EACH == 0u) add_block<true>(sums, from, scaled, tokens, column, own.width);
    else add_block<false>(sums, from, scaled, tokens, column, own.width);
#pragma unroll
    for (uint n = 0u; n < RANKS; n++) {
        if (first_rank + n < own.rank) {
            float *to = own.partial + ((ulong)block * own.rank + first_rank + n) * own.width + column;
            to[0] = sums[0][n];
            if (column + 1u < own.width) to[1] = sums[1][n];
        }
    }
}

// Adds the sums of `blocks` blocks to the gradients in order, a thread per element.
extern "C" __global__ __launch_bounds__(SUM_COLUMNS) void outer_sums(OUTERS, uint blocks) {
    OWN(first_sum);
    const uint width_tiles = (own.width + SUM_COLUMNS - 1u) / SUM_COLUMNS;
    const uint column = index % width_tiles * SUM_COLUMNS + threadIdx.x, j = index / width_tiles;
    if (column >= own.width) return;
    const ulong step = (ulong)own.rank * own.width;
    const float *from = own.partial + (ulong)j * own.width + column;
    float *into = own.dfactor + (ulong)j * own.rank_step + (ulong)column * own.width_step;
    float total = *into;
    for (uint first = 0u; first < blocks; first += SUMS_AHEAD) {
        float values[SUMS_AHEAD];
#pragma unroll
        for (uint i = 0u; i < SUMS_AHEAD; i++) values[i] = first + i < blocks ? from[(first + i) * step] : 0.0f;
#pragma unroll
        for (uint i = 0u; i < SUMS_AHEAD; i++) {
            if (first + i < blocks) total = total + values[i];
        }
    }
    *into = total;
}
