// Thin products (docs/numerics.md, "Thin products"). Factor element (j, l) lies at j * rank_step + l * width_step; factors
// lie one after another. Where there is more than one, `tiles` holds first token, end and factor of every tile of tokens;
// where there is one, tiles follow each other and the table is not read.

#define RANK_MOST 64
// Ranks that a work item keeps at once.
#define RANKS 8
// Tokens of a group that contracts or expands; blocks of tokens of a group of the outer product.
#define TOKENS (GROUP / LANES)

typedef struct {
    ulong first;
    ulong end;
    ulong factor;
} TokenTile;

FUNCTION TokenTile token_tile(GLOBAL const uint *tiles, uint grouped, uint index, ulong tokens) {
    TokenTile tile;
    tile.first = grouped != 0u ? tiles[3u * index] : (ulong)index * TOKENS;
    tile.end = grouped != 0u ? tiles[3u * index + 1u] : tokens;
    tile.factor = grouped != 0u ? tiles[3u * index + 2u] : 0u;
    return tile;
}

// A work item per (token, lane): each element of x serves RANKS ranks.
KERNEL(GROUP) thin_contract(
    GLOBAL float *u,
    GLOBAL const float *x,
    GLOBAL const float *factor,
    GLOBAL const uint *tiles,
    uint grouped,
    ulong tokens,
    uint rank,
    uint width,
    uint rank_step,
    uint width_step
) {
    LOCAL float lanes[TOKENS * RANKS * LANES];
    uint rank_tiles = (rank + RANKS - 1u) / RANKS;
    uint first_rank = group_index() % rank_tiles * RANKS;
    TokenTile tile = token_tile(tiles, grouped, group_index() / rank_tiles, tokens);
    ulong origin = tile.factor * rank * width;
    uint lane = local_index() % LANES;
    uint row = local_index() / LANES;
    ulong token = tile.first + row;
    float sums[RANKS];
    for (uint n = 0u; n < RANKS; n++) {
        sums[n] = 0.0f;
    }
    if (token < tile.end) {
        for (uint l = lane; l < width; l += LANES) {
            float value = x[token * width + l];
            ulong at = origin + (ulong)first_rank * rank_step + (ulong)l * width_step;
            for (uint n = 0u; n < RANKS; n++) {
                if (first_rank + n < rank) {
                    sums[n] = fma_rn(value, factor[at + (ulong)n * rank_step], sums[n]);
                }
            }
        }
    }
    for (uint n = 0u; n < RANKS; n++) {
        lanes[(row * RANKS + n) * LANES + lane] = sums[n];
    }
    tree_sums(lanes, TOKENS * RANKS);
    uint i = local_index();
    ulong t = tile.first + i / RANKS;
    uint j = first_rank + i % RANKS;
    if (i < TOKENS * RANKS && t < tile.end && j < rank) {
        u[t * rank + j] = lanes[i * LANES];
    }
}

// A work item per column: each element of the factor serves TOKENS tokens.
KERNEL(GROUP) thin_expand(
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
    LOCAL float rows[TOKENS * RANK_MOST];
    uint width_tiles = (width + GROUP - 1u) / GROUP;
    uint column = group_index() % width_tiles * GROUP + local_index();
    TokenTile tile = token_tile(tiles, grouped, group_index() / width_tiles, tokens);
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

// 32 columns and RANKS ranks of one factor per group; TOKENS blocks are summed side by side and then added in order, a
// work item per (rank, column). `blocks` holds how many blocks there are before each factor's first and in all, then first
// token and end of each block.
KERNEL(GROUP) thin_outer(
    GLOBAL float *dfactor,
    GLOBAL const float *u,
    GLOBAL const float *x,
    GLOBAL const uint *blocks,
    uint factors,
    uint rank,
    uint width,
    uint rank_step,
    uint width_step,
    float alpha
) {
    LOCAL float block_sums[TOKENS * RANKS * LANES];
    uint rank_tiles = (rank + RANKS - 1u) / RANKS;
    uint first_rank = group_index() % rank_tiles * RANKS;
    uint lane = local_index() % LANES;
    uint slot = local_index() / LANES;
    uint width_tiles = (width + LANES - 1u) / LANES;
    uint column = group_index() / rank_tiles % width_tiles * LANES + lane;
    uint index = group_index() / rank_tiles / width_tiles;
    uint block_end = blocks[index + 1u];
    GLOBAL const uint *tokens_of = blocks + factors + 1u;
    // RANKS equals TOKENS: the slot of a block while summing is the place of a rank while adding.
    int adds = column < width && first_rank + slot < rank;
    ulong into = (ulong)index * rank * width + (ulong)(first_rank + slot) * rank_step + (ulong)column * width_step;
    float total = adds ? dfactor[into] : 0.0f;
    for (uint first = blocks[index]; first < block_end; first += TOKENS) {
        uint block = first + slot;
        float sums[RANKS];
        for (uint n = 0u; n < RANKS; n++) {
            sums[n] = 0.0f;
        }
        if (block < block_end && column < width) {
            uint end = tokens_of[2u * block + 1u];
            for (uint t = tokens_of[2u * block]; t < end; t++) {
                float value = x[(ulong)t * width + column];
                ulong at = (ulong)t * rank + first_rank;
                for (uint n = 0u; n < RANKS; n++) {
                    if (first_rank + n < rank) {
                        sums[n] = fma_rn(alpha * u[at + n], value, sums[n]);
                    }
                }
            }
        }
        for (uint n = 0u; n < RANKS; n++) {
            block_sums[(slot * RANKS + n) * LANES + lane] = sums[n];
        }
        barrier_local();
        if (adds) {
            for (uint n = 0u; n < TOKENS && first + n < block_end; n++) {
                total = total + block_sums[(n * RANKS + slot) * LANES + lane];
            }
        }
        barrier_local();
    }
    if (adds) {
        dfactor[into] = total;
    }
}
