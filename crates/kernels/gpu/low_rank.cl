// Low-rank products (docs/numerics.md, "Low-rank products"). Factor element (j, l) lies at j *
// rank_step + l * width_step; factors lie one after another. Where there is more than one, `tiles`
// holds first token, end and factor of every tile of tokens; where there is one, tiles follow each
// other and the table is not read.

#define RANK_MAX 64
// Ranks that a work item keeps at once.
#define RANKS 8
// Tokens that a group expands, and that it contracts at once.
#define TOKENS (GROUP / LANES)

typedef struct {
    ulong first;
    ulong end;
    ulong factor;
} TokenTile;

// `size` is the number of tokens of a whole tile.
FUNCTION TokenTile token_tile(GLOBAL const uint *tiles, uint grouped, uint index, ulong tokens, uint size) {
    TokenTile tile;
    tile.first = grouped != 0u ? tiles[3u * index] : (ulong)index * size;
    tile.end = grouped != 0u ? tiles[3u * index + 1u] : tokens;
    tile.factor = grouped != 0u ? tiles[3u * index + 2u] : 0u;
    return tile;
}

// Columns of a factor that a group keeps at once, and the elements from one rank to the next there:
// one more, so that neither way of filling it meets one bank.
#define STAGED (STEPS * LANES)
#define STAGED_STEP (STAGED + 1)
// Steps of a lane through them: a work item asks for so many elements of a token before it uses the
// first.
#define STEPS 8

// Brings STAGED columns of RANKS ranks from `column` on.
FUNCTION void stage_factor(
    LOCAL_POINTER float *staged,
    GLOBAL const float *factor,
    uint first_rank,
    uint rank,
    uint column,
    uint width,
    uint rank_step,
    uint width_step
) {
    for (uint i = local_index(); i < RANKS * STAGED; i += GROUP) {
        // Neighbours in memory go to neighbouring work items.
        uint n = width_step == 1u ? i / STAGED : i % RANKS;
        uint l = width_step == 1u ? i % STAGED : i / RANKS;
        int there = first_rank + n < rank && column + l < width;
        staged[n * STAGED_STEP + l] =
            there ? factor[(ulong)(first_rank + n) * rank_step + (ulong)(column + l) * width_step] : 0.0f;
    }
}

// A work item per lane of PER_ITEM tokens: each element of x serves RANKS ranks, each of the factor
// PER_ITEM tokens.
#define CONTRACT(name, PER_ITEM) \
    KERNEL(GROUP) name( \
        GLOBAL float *u, \
        GLOBAL const float *x, \
        GLOBAL const float *factor, \
        GLOBAL const uint *tiles, \
        uint grouped, \
        ulong tokens, \
        uint rank, \
        uint width, \
        uint rank_step, \
        uint width_step \
    ) { \
        LOCAL float shared[RANKS * STAGED_STEP]; \
        uint rank_tiles = (rank + RANKS - 1u) / RANKS; \
        uint first_rank = mod_u32(group_index(), rank_tiles) * RANKS; \
        TokenTile tile = token_tile(tiles, grouped, div_u32(group_index(), rank_tiles), tokens, TOKENS * PER_ITEM); \
        GLOBAL const float *own = factor + tile.factor * rank * width; \
        uint lane = local_index() % LANES; \
        uint row = local_index() / LANES; \
        float sums[PER_ITEM][RANKS]; \
        ulong start[PER_ITEM]; \
        for (uint i = 0u; i < PER_ITEM; i++) { \
            ulong token = tile.first + row + i * TOKENS; \
            /* A token that is not there stands for the first one; its sums are not kept. */ \
            start[i] = (token < tile.end ? token : tile.first) * width; \
            for (uint n = 0u; n < RANKS; n++) { \
                sums[i][n] = 0.0f; \
            } \
        } \
        for (uint column = 0u; column < width; column += STAGED) { \
            float values[STEPS][PER_ITEM]; \
            for (uint s = 0u; s < STEPS; s++) { \
                uint l = column + s * LANES + lane; \
                for (uint i = 0u; i < PER_ITEM; i++) { \
                    values[s][i] = l < width ? x[start[i] + l] : 0.0f; \
                } \
            } \
            barrier_local(); \
            stage_factor(shared, own, first_rank, rank, column, width, rank_step, width_step); \
            barrier_local(); \
            for (uint s = 0u; s < STEPS; s++) { \
                if (column + s * LANES + lane < width) { \
                    for (uint n = 0u; n < RANKS; n++) { \
                        float element = shared[n * STAGED_STEP + s * LANES + lane]; \
                        for (uint i = 0u; i < PER_ITEM; i++) { \
                            sums[i][n] = fma_rn(values[s][i], element, sums[i][n]); \
                        } \
                    } \
                } \
            } \
        } \
        for (uint i = 0u; i < PER_ITEM; i++) { \
            barrier_local(); \
            for (uint n = 0u; n < RANKS; n++) { \
                shared[(row * RANKS + n) * LANES + lane] = sums[i][n]; \
            } \
            tree_sums(shared, TOKENS * RANKS); \
            uint at = local_index(); \
            ulong t = tile.first + at / RANKS + i * TOKENS; \
            uint j = first_rank + at % RANKS; \
            if (at < TOKENS * RANKS && t < tile.end && j < rank) { \
                u[t * rank + j] = shared[at * LANES]; \
            } \
        } \
    }

// For few tokens, and for many.
CONTRACT(low_rank_contract_1, 1)
CONTRACT(low_rank_contract_4, 4)

// A work item per column: each element of the factor serves TOKENS tokens.
KERNEL(GROUP) low_rank_expand(
    GLOBAL float *y,
    GLOBAL const float *u,
    GLOBAL const float *factor,
    GLOBAL const uint *tiles,
    uint grouped,
    ulong tokens,
    uint rank,
    uint width,
    uint rank_step,
    uint width_step,
    float alpha
) {
    LOCAL float rows[TOKENS * RANK_MAX];
    uint width_tiles = (width + GROUP - 1u) / GROUP;
    uint column = mod_u32(group_index(), width_tiles) * GROUP + local_index();
    TokenTile tile = token_tile(tiles, grouped, div_u32(group_index(), width_tiles), tokens, TOKENS);
    ulong first = tile.first;
    ulong origin = tile.factor * rank * width;
    uint here = tile.end - first < TOKENS ? (uint)(tile.end - first) : TOKENS;
    for (uint i = local_index(); i < here * rank; i += GROUP) {
        rows[i] = u[first * rank + i];
    }
    barrier_local();
    float sums[TOKENS];
    for (uint n = 0u; n < TOKENS; n++) {
        sums[n] = 0.0f;
    }
    if (column < width) {
        for (uint j = 0u; j < rank; j++) {
            float value = factor[origin + (ulong)j * rank_step + (ulong)column * width_step];
            for (uint n = 0u; n < TOKENS; n++) {
                if (n < here) {
                    sums[n] = fma_rn(rows[n * rank + j], value, sums[n]);
                }
            }
        }
        for (uint n = 0u; n < TOKENS; n++) {
            if (n < here) {
                ulong at = (first + n) * width + column;
                y[at] = fma_rn(alpha, sums[n], y[at]);
            }
        }
    }
}

// Tokens of a block of a sum over tokens, at most.
#define TOKEN_BLOCK 128
// Elements of x that a work item asks for before it uses the first.
#define AHEAD 16
// Columns of a group that sums up blocks: few, so that short inputs too give many groups.
#define OUTER_COLUMNS 128
// Elements of u that a work item asks for before it stores the first.
#define STAGED_TOGETHER 8u

// Sums of single blocks: OUTER_COLUMNS columns and RANKS ranks of one block per group, into
// partial[block, rank, width]. `blocks` holds first token and end of each; `first_block` is the
// first of this launch.
KERNEL(OUTER_COLUMNS) low_rank_outer_blocks(
    GLOBAL float *partial,
    GLOBAL const float *u,
    GLOBAL const float *x,
    GLOBAL const uint *blocks,
    uint first_block,
    uint rank,
    uint width,
    float alpha
) {
    LOCAL float scaled[TOKEN_BLOCK * RANKS];
    uint rank_tiles = (rank + RANKS - 1u) / RANKS;
    uint first_rank = mod_u32(group_index(), rank_tiles) * RANKS;
    uint width_tiles = (width + OUTER_COLUMNS - 1u) / OUTER_COLUMNS;
    uint column = mod_u32(div_u32(group_index(), rank_tiles), width_tiles) * OUTER_COLUMNS + local_index();
    uint block = div_u32(div_u32(group_index(), rank_tiles), width_tiles);
    uint first = blocks[2u * (first_block + block)];
    uint count = blocks[2u * (first_block + block) + 1u] - first;
    for (uint start = local_index(); start < count * RANKS; start += STAGED_TOGETHER * OUTER_COLUMNS) {
        float staged[STAGED_TOGETHER];
        for (uint n = 0u; n < STAGED_TOGETHER; n++) {
            uint i = start + n * OUTER_COLUMNS;
            uint j = first_rank + i % RANKS;
            staged[n] = i < count * RANKS && j < rank ? u[(ulong)(first + i / RANKS) * rank + j] : 0.0f;
        }
        for (uint n = 0u; n < STAGED_TOGETHER; n++) {
            uint i = start + n * OUTER_COLUMNS;
            if (i < count * RANKS) {
                scaled[i] = alpha * staged[n];
            }
        }
    }
    barrier_local();
    if (column >= width) {
        return;
    }
    float sums[RANKS];
    for (uint n = 0u; n < RANKS; n++) {
        sums[n] = 0.0f;
    }
    GLOBAL const float *from = x + (ulong)first * width + column;
    uint t = 0u;
    for (; t + AHEAD <= count; t += AHEAD) {
        float values[AHEAD];
        for (uint i = 0u; i < AHEAD; i++) {
            values[i] = from[(ulong)(t + i) * width];
        }
        for (uint i = 0u; i < AHEAD; i++) {
            for (uint n = 0u; n < RANKS; n++) {
                sums[n] = fma_rn(scaled[(t + i) * RANKS + n], values[i], sums[n]);
            }
        }
    }
    for (; t < count; t++) {
        float value = from[(ulong)t * width];
        for (uint n = 0u; n < RANKS; n++) {
            sums[n] = fma_rn(scaled[t * RANKS + n], value, sums[n]);
        }
    }
    for (uint n = 0u; n < RANKS; n++) {
        if (first_rank + n < rank) {
            partial[((ulong)block * rank + first_rank + n) * width + column] = sums[n];
        }
    }
}

// Adds the sums of the blocks `first_block .. end_block` to their factors in order, a work item per
// element. `starts` holds how many blocks there are before each factor's first, and in all.
KERNEL(GROUP) low_rank_outer_add(
    GLOBAL float *dfactor,
    GLOBAL const float *partial,
    GLOBAL const uint *starts,
    uint first_block,
    uint end_block,
    uint rank,
    uint width,
    uint rank_step,
    uint width_step
) {
    uint width_tiles = (width + GROUP - 1u) / GROUP;
    uint column = mod_u32(group_index(), width_tiles) * GROUP + local_index();
    uint j = mod_u32(div_u32(group_index(), width_tiles), rank);
    uint index = div_u32(div_u32(group_index(), width_tiles), rank);
    uint block = starts[index] > first_block ? starts[index] : first_block;
    uint end = starts[index + 1u] < end_block ? starts[index + 1u] : end_block;
    if (column >= width || block >= end) {
        return;
    }
    ulong step = (ulong)rank * width;
    ulong into = index * step + (ulong)j * rank_step + (ulong)column * width_step;
    GLOBAL const float *from = partial + (ulong)j * width + column;
    float total = dfactor[into];
    for (; block + AHEAD <= end; block += AHEAD) {
        float values[AHEAD];
        for (uint i = 0u; i < AHEAD; i++) {
            values[i] = from[(block - first_block + i) * step];
        }
        for (uint i = 0u; i < AHEAD; i++) {
            total = total + values[i];
        }
    }
    for (; block < end; block++) {
        total = total + from[(block - first_block) * step];
    }
    dfactor[into] = total;
}
