// Slice products on the tensor cores of Hopper without an epilogue, for both profiles and for
// several weights (experts) at once: y[m, n] = sum over k of x[m, k] * W[n, k] with the bits of
// docs/numerics.md, "Slice product". Per chunk of 512 along k
//     acc = fma(value, scale of the row's chunk, acc)        chunks ascending
// and at the end y = acc * scale of the column where there is one. Rows of x that meet one weight
// are cut into tiles; a tile reads rows of its neighbours beyond its end and does not store them.

using namespace slice_tiles;

namespace {

constexpr int CHUNK = 512;
constexpr int BLOCKS_PER_CHUNK = CHUNK / KBLOCK;

// Rows first .. end of x meet weight number `weight`.
struct Tile {
    int first, end, weight;
};

struct Work {
    const u32 *table;   // first row, end, weight of each tile; null: the rows below, weight 0
    int first_row, end_row;
    Walk walk;

    // Volatile: what is read again after the sums shall not be kept in registers during them.
    __device__ inline int read(int i) const {
        int value;
        asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(value) : "l"(table + i));
        return value;
    }
    __device__ inline Tile tile(int p, u32 rank, int &column) const {
        int row, pair;
        walk.tile(p, row, pair);
        column = (pair * CLUSTER + (int)rank) * COLUMNS;
        if (table) return {read(3 * row), read(3 * row + 1), read(3 * row + 2)};
        const int first = first_row + row * ROWS;
        return {first, end_row - first < ROWS ? end_row : first + ROWS, 0};
    }
};

// Where rows of x and of the weights are: row m of x is row m - left_base of its planes and scales,
// row n of weight e is row (e - first_weight) * weight_rows + first of theirs.
struct Rows {
    int left_base, first_weight, weight_rows, first;

    __device__ inline int left(const Tile &tile) const { return tile.first - left_base; }
    __device__ inline int right(const Tile &tile) const { return (tile.weight - first_weight) * weight_rows + first; }
};

__device__ inline void produce(Ring ring, const Work &work, u32 rank, const Operand &left, const Operand &right,
                               const Rows &rows, int kblocks) {
    for (int p = blockIdx.x / CLUSTER; p < work.walk.count(); p += gridDim.x / CLUSTER) {
        int column;
        const Tile tile = work.tile(p, rank, column);
        for (int block = 0; block < kblocks; block++) {
            barrier_wait(ring.empty(), ring.parity ^ 1);
            fill_slot(ring, left, rows.left(tile), right, rows.right(tile) + column, block * KBLOCK, rank, 0);
            ring.advance();
        }
    }
}

__device__ inline void scale_columns(float (&acc)[EACH], const float *scales, int column, int columns) {
#pragma unroll
    for (int j = 0; j < EACH / 4; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int c = column + 8 * j + e;
            const float scale = c < columns ? __ldg(scales + c) : 0.f;
            acc[4 * j + e] = __fmul_rn(acc[4 * j + e], scale);
            acc[4 * j + 2 + e] = __fmul_rn(acc[4 * j + 2 + e], scale);
        }
    }
}

// y: row m of the product is row m - y_base.
struct Target {
    float *y;
    u64 stride;
    int y_base, columns;
    bool accumulate;

    __device__ inline Output output(const Tile &tile) const {
        return {y + (tile.first - y_base) * stride, stride, tile.end - tile.first, columns};
    }
};

__device__ inline void consume(Ring ring, const Work &work, u32 rank, u32 warpgroup, const Rows &rows, const Target &target,
                               const float *row_scales, const float *column_scales, int kblocks) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int inside = warpgroup * 64 + warp * 16 + lane / 4;
    const int chunks = ceil_div(kblocks, BLOCKS_PER_CHUNK);
    for (int p = blockIdx.x / CLUSTER; p < work.walk.count(); p += gridDim.x / CLUSTER) {
        float acc[EACH];
        u32 scales_0, scales_8;   // of the row's first chunk
        {
            int column;
            const Tile tile = work.tile(p, rank, column);
            // Rows beyond the end borrow the last one's scales; they are not stored.
            const int last = tile.end - tile.first - 1, left = rows.left(tile);
            scales_0 = (left + (inside < last ? inside : last)) * chunks;
            scales_8 = (left + (inside + 8 < last ? inside + 8 : last)) * chunks;
            if (target.accumulate) {
                load_tile(acc, target.output(tile), inside, column + (int)lane % 4 * 2);
            } else {
#pragma unroll
                for (int i = 0; i < EACH; i++) acc[i] = 0.f;
            }
        }
        for (int chunk = 0; chunk < chunks; chunk++) {
            const int left = kblocks - chunk * BLOCKS_PER_CHUNK;
            int sums[SUMS];
            sum_chunk(sums, ring, left < BLOCKS_PER_CHUNK ? left : BLOCKS_PER_CHUNK, warpgroup, lane);
            // Not before the products: they would take registers that wgmma needs. The other
            // warpgroup multiplies meanwhile.
            const float scale_0 = __ldg(row_scales + scales_0 + chunk), scale_8 = __ldg(row_scales + scales_8 + chunk);
#pragma unroll
            for (int i = 0; i < EACH; i++) acc[i] = __fmaf_rn(chunk_value(sums, i), i % 4 < 2 ? scale_0 : scale_8, acc[i]);
            pin(acc);   // before the next products overwrite the sums
        }
        // Once more, so that it takes no registers beside the sums.
        int column;
        const Tile tile = work.tile(p, rank, column);
        column += lane % 4 * 2;
        if (column_scales) scale_columns(acc, column_scales + rows.right(tile), column, target.columns);
        store_tile(acc, target.output(tile), inside, column);
    }
}

}   // namespace

// left, right: int8 [slice][row][k rounded up to 128], padded with zeros; boxes of KBLOCK bytes by
// ROWS / 2 and COLUMNS rows. row_scales: [row, ceil(k / 512)]. column_scales: one per row of the
// right planes, or null for y = acc. y starts at the column of the weights' row `first`; acc starts
// from it if `accumulate`. k > 0.
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(2, 1, 1)
    product_groups_hopper(const __grid_constant__ TensorMap left, const __grid_constant__ TensorMap right, int left_rows,
                          int right_rows, const float *__restrict__ row_scales, const float *__restrict__ column_scales, float *y,
                          u64 stride, int y_base, int n, int k, int accumulate, int left_base, int first_weight, int weight_rows,
                          int first, const unsigned int *__restrict__ table, int tiles, int first_row, int end_row) {
    extern __shared__ unsigned char shared[];
    if (threadIdx.x == 0) {
        prefetch_map(left);
        prefetch_map(right);
    }
    const Ring ring = open_ring(shared);
    const u32 rank = cluster_rank();
    const Walk walk = {tiles, ceil_div(n, COLUMNS * CLUSTER)};
    const Work work = {table, first_row, end_row, walk};
    const Rows rows = {left_base, first_weight, weight_rows, first};
    const Target target = {y, stride, y_base, n, accumulate != 0};
    const int kblocks = ceil_div(k, KBLOCK);
    run_parts([&] { produce(ring, work, rank, {&left, left_rows}, {&right, right_rows}, rows, kblocks); },
              [&](u32 warpgroup) {
                  consume(ring, work, rank, warpgroup, rows, target, row_scales, column_scales, kblocks);
              });
}
