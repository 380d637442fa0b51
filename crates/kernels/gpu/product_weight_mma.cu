// Weight gradient of the slice product on the int8 tensor cores of sm_80 and later: dW[n, k] += sum
// over tokens of dy[t, n] * x[t, k], from planes of columns cut along the tokens
// (column_slices.cu), with the bits of docs/numerics.md, "Slice product". Per token chunk
//     acc = fma(value, scale of dy's column * scale of x's column, acc)        chunks ascending
// starting from dW. The gradients of several weights (experts) are one launch.

// Tokens of a block: every chunk has whole ones.
#define BLOCK_TOKENS 128u
#define STEPS_PER_BLOCK (BLOCK_TOKENS / STEP)

// left: [slice][n][pitch], right: [slice][k][pitch]. Scales: [chunk, n or k rounded up to 128],
// chunk base_chunk first. chunks: start, length and first block of each, the planes starting at
// block base_block. runs: first chunk, end and first row of dw; null: the one given.
extern "C" __global__ void __launch_bounds__(THREADS, 1) product_weight_mma(
    float *dw, const uchar *left, const float *left_scales, const uchar *right, const float *right_scales, uint n, uint k,
    ulong pitch, const uint *chunks, const uint *runs, uint first_chunk, uint end_chunk, ulong first_row, uint base_chunk,
    uint base_block
) {
    uint row_tiles = (n + ROWS - 1u) / ROWS, column_tiles = (k + COLUMNS - 1u) / COLUMNS;
    if (runs) {
        const uint *run = runs + 3u * (blockIdx.x / (row_tiles * column_tiles));
        first_chunk = run[0];
        end_chunk = run[1];
        first_row = run[2];
    }
    uint row_tile, column_tile;
    tile_of(blockIdx.x % (row_tiles * column_tiles), row_tiles, column_tiles, row_tile, column_tile);
    uint row = row_tile * ROWS, column = column_tile * COLUMNS;
    // The chunks of a run lie one after another.
    const uint *first = chunks + 3u * first_chunk, *last = chunks + 3u * (end_chunk - 1u);
    uint end_block = last[2] + (last[1] + BLOCK_TOKENS - 1u) / BLOCK_TOKENS;
    ulong start = (ulong)(first[2] - base_block) * BLOCK_TOKENS;
    const Planes left_planes = {left + row * pitch + start, pitch, n * pitch, n - row};
    const Planes right_planes = {right + column * pitch + start, pitch, k * pitch, k - column};
    const Output out = {dw + (first_row + row) * k + column, k, n - row, k - column};
    uint row_pitch = row_words(n) * 4u, column_pitch = row_words(k) * 4u;

    Ring<RightCopies> ring(left_planes, right_planes, (end_block - first[2]) * STEPS_PER_BLOCK);
    const Place place;
    TileResults results;
    out.load(results, place);
    for (uint chunk = first_chunk; chunk < end_chunk; chunk++) {
        TileSums sums;
        sum_steps(sums, ring, place, (chunks[3u * chunk + 1u] + BLOCK_TOKENS - 1u) / BLOCK_TOKENS * STEPS_PER_BLOCK);
        // Both are padded to whole tiles.
        const float *row_scales = left_scales + (ulong)(chunk - base_chunk) * row_pitch + row + place.row;
        const float *column_scales = right_scales + (ulong)(chunk - base_chunk) * column_pitch + column + place.column;
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; i++) {
            float scale = __ldg(row_scales + 8 * i);
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) {
                float2 own = __ldg((const float2 *)(column_scales + 8 * n));
                int at = 4 * n + 2 * (i % 2);
                float *x = results.v[i / 2] + at;
                x[0] = fma_rn(sums.value(i / 2, at), scale * own.x, x[0]);
                x[1] = fma_rn(sums.value(i / 2, at + 1), scale * own.y, x[1]);
            }
        }
    }
    out.store(results, place);
}
