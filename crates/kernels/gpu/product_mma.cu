// Slice products on the int8 tensor cores of sm_80 and later, for both profiles and for several
// weights (experts) at once: y[m, n] = sum over k of x[m, k] * W[n, k] with the bits of
// docs/numerics.md, "Slice product". Per chunk of 512 along k
//     acc = fma(value, scale of the row's chunk, acc)        chunks ascending
// and at the end y = acc * scale of the column where there is one. A linear layer's bias and
// low-rank adapter are added before y is stored: y = y + bias[n], y = fma(alpha, sum over j of
// u[m, j] * M[j, n], y). Rows of x that meet one weight are cut into tiles.

#define STEPS_PER_CHUNK (CHUNK / STEP)
// Ranks of an adapter that are in shared memory at a time; RANK_STEP floats from row to row and
// from column to column, so that few of those that are read at once share a bank.
#define RANKS 16u
#define RANK_STEP (RANKS + 4u)

// The short side u [row, rank] of an adapter, and its factor, whose element (j, n) lies at j *
// rank_step + n * width_step.
struct LowRank {
    const float *u, *factor;
    ulong rank_step, width_step;
    uint rank;
    float alpha;
};

// Brings ranks `first` and up of the tile's rows and columns; those beyond the end stand for the
// last one, whose results are not stored.
FUNCTION void stage_ranks(float *staged, const LowRank &low, uint first, uint rows, uint columns) {
    uint ranks = low.rank - first < RANKS ? low.rank - first : RANKS;
    for (uint i = threadIdx.x; i < ROWS * RANKS; i += THREADS) {
        uint at = i / RANKS, r = i % RANKS, row = at < rows ? at : rows - 1u;
        if (r < ranks) {
            staged[at * RANK_STEP + r] = low.u[(ulong)row * low.rank + first + r];
        }
    }
    // Neighbouring threads read neighbours in memory, whichever way the factor lies.
    bool by_rank = low.rank_step == 1u;
    for (uint i = threadIdx.x; i < COLUMNS * RANKS; i += THREADS) {
        uint at = by_rank ? i / RANKS : i % COLUMNS, r = by_rank ? i % RANKS : i / COLUMNS;
        uint column = at < columns ? at : columns - 1u;
        if (r < ranks) {
            staged[(ROWS + at) * RANK_STEP + r] = low.factor[(first + r) * low.rank_step + column * low.width_step];
        }
    }
}

// One rank of all chains. `left` and `right` are this thread's first row and column.
FUNCTION void add_rank(TileResults &chains, const float *left, const float *right) {
    float u[2 * ROW_TILES];
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; i++) {
        u[i] = left[8 * i * RANK_STEP];
    }
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
        float x = right[8 * n * RANK_STEP], y = right[(8 * n + 1) * RANK_STEP];
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; i++) {
            float *chain = chains.v[i / 2] + 4 * n + 2 * (i % 2);
            chain[0] = fma_rn(u[i], x, chain[0]);
            chain[1] = fma_rn(u[i], y, chain[1]);
        }
    }
}

FUNCTION void add_adapter(TileResults &results, const LowRank &low, const Place &place, uint rows, uint columns) {
    float *staged = (float *)shared;
    TileResults chains;
    chains.clear();
    for (uint first = 0u; first < low.rank; first += RANKS) {
        // Of the ring, or of the ranks before.
        __syncthreads();
        stage_ranks(staged, low, first, rows, columns);
        __syncthreads();
        uint ranks = low.rank - first < RANKS ? low.rank - first : RANKS;
#pragma unroll 1
        for (uint r = 0u; r < ranks; r++) {
            add_rank(chains, staged + place.row * RANK_STEP + r, staged + (ROWS + place.column) * RANK_STEP + r);
        }
    }
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int i = 0; i < 4 * COLUMN_TILES; i++) {
            results.v[m][i] = fma_rn(low.alpha, chains.v[m][i], results.v[m][i]);
        }
    }
}

// Calls `act` with each number and that of its column.
template <class Act> FUNCTION void with_columns(TileResults &results, const Place &place, const float *numbers, uint columns, Act act) {
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint column = place.column + 8u * n + e;
            float number = column < columns ? __ldg(numbers + column) : 0.0f;
#pragma unroll
            for (int i = 0; i < 2 * ROW_TILES; i++) {
                float &x = results.v[i / 2][4 * n + 2 * (i % 2) + e];
                x = act(x, number);
            }
        }
    }
}

// left, right: [slice][row][width rounded up to 128], padded with zeros; row m of x is row m -
// left_base of the left planes and of left_scales [row, ceil(width / 512)], row n of weight e is
// row (e - first_weight) * weight_rows + weight_first + n of the right planes and of right_scales,
// which may be null. Row m of the result is row m - y_base of y, whose first column is that of
// weight row weight_first. table: first row, end and weight of each tile; null: first_row ..
// end_row and the first weight. bias: one per column, or null. u starts at first_row. width > 0.
extern "C" __global__ void __launch_bounds__(THREADS, 1) product_mma(
    float *y, ulong y_stride, uint y_base, uint accumulate, const uchar *left, const float *left_scales, uint left_rows,
    uint left_base, const uchar *right, const float *right_scales, uint right_rows, uint first_weight, uint weight_rows,
    uint weight_first, uint columns, uint width, const uint *table, uint tiles, uint first_row, uint end_row,
    const float *bias, const float *u, const float *factor, ulong rank_step, ulong width_step, uint rank, float alpha
) {
    uint row_tile, column_tile;
    tile_of(blockIdx.x, tiles, (columns + COLUMNS - 1u) / COLUMNS, row_tile, column_tile);
    uint first = first_row + row_tile * ROWS, end = end_row - first < ROWS ? end_row : first + ROWS, weight = first_weight;
    if (table) {
        first = table[3u * row_tile];
        end = table[3u * row_tile + 1u];
        weight = table[3u * row_tile + 2u];
    }
    uint column = column_tile * COLUMNS, rows = end - first;
    uint right_row = (weight - first_weight) * weight_rows + weight_first + column;
    ulong pitch = row_words(width) * 4u;
    columns -= column;
    const Planes left_planes = {left + (first - left_base) * pitch, pitch, left_rows * pitch, rows};
    const Planes right_planes = {right + right_row * pitch, pitch, right_rows * pitch, columns < COLUMNS ? columns : COLUMNS};
    const Output out = {y + (ulong)(first - y_base) * y_stride + column, y_stride, rows, columns};
    uint steps = (width + STEP - 1u) / STEP, chunks = (width + CHUNK - 1u) / CHUNK;

    Ring<RightCopies> ring(left_planes, right_planes, steps);
    const Place place;
    TileResults results;
    if (accumulate) {
        out.load(results, place);
    } else {
        results.clear();
    }
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        TileSums sums;
        uint here = steps < STEPS_PER_CHUNK ? steps : STEPS_PER_CHUNK;
        sum_steps(sums, ring, place, here);
        steps -= here;
        // Not before the products, which need the registers; the line is in L1 from the second
        // chunk on.
        float scales[2 * ROW_TILES];
#pragma unroll
        for (uint i = 0u; i < 2u * ROW_TILES; i++) {
            uint row = place.row + 8u * i < rows ? place.row + 8u * i : rows - 1u;
            scales[i] = __ldg(left_scales + (ulong)(first - left_base + row) * chunks + chunk);
        }
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
            for (int i = 0; i < 4 * COLUMN_TILES; i++) {
                results.v[m][i] = fma_rn(sums.value(m, i), scales[2 * m + i / 2 % 2], results.v[m][i]);
            }
        }
    }
    if (right_scales) {
        with_columns(results, place, right_scales + right_row, columns, [](float x, float scale) { return x * scale; });
    }
    if (bias) {
        with_columns(results, place, bias + column, columns, [](float x, float bias) { return x + bias; });
    }
    if (rank > 0u) {
        const LowRank low = {u + (ulong)(first - first_row) * rank, factor + column * width_step, rank_step, width_step, rank, alpha};
        add_adapter(results, low, place, rows, columns);
    }
    out.store(results, place);
}
