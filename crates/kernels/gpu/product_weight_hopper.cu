// Weight gradient of the slice product on the tensor cores of Hopper: dW[n, k] += sum over tokens
// of dy[t, n] * x[t, k], from planes of columns cut along the tokens (column_slices.cu), with the
// bits of docs/numerics.md, "Slice product". Per token chunk
//     acc = fma(value, scale of dy's column * scale of x's column, acc)        chunks ascending
// starting from dW. The gradients of several weights (experts) are one launch.

using namespace slice_tiles;

namespace {

// Chunks first .. end give the rows of dw from `row` on.
struct Group {
    int first, end;
    u64 row;
};

// All groups have tiles of the same walk.
struct Work {
    const u32 *chunks;   // start, length, place in blocks of the planes
    const u32 *groups;   // first chunk, end, first row of dw; null: the one below
    Group single;
    int count;
    int base_chunk, base_block;
    Walk walk;

    __device__ inline int tiles() const { return count * walk.count(); }
    __device__ inline Group group(int p) const {
        if (!groups) return single;
        const u32 *entry = groups + 3 * (p / walk.count());
        return {(int)__ldg(entry), (int)__ldg(entry + 1), __ldg(entry + 2)};
    }
    __device__ inline void tile(int p, u32 rank, int &row, int &column) const {
        int pair;
        walk.tile(p % walk.count(), row, pair);
        row *= ROWS;
        column = (pair * CLUSTER + (int)rank) * COLUMNS;
    }
    __device__ inline int blocks(int chunk) const { return ceil_div((int)__ldg(chunks + 3 * chunk + 1), KBLOCK); }
    __device__ inline int first_block(int chunk) const { return (int)__ldg(chunks + 3 * chunk + 2) - base_block; }
};

// Scales [chunk, pitch]; a column beyond the end borrows the last tile's, nothing of it is stored.
struct Scales {
    const float *rows, *columns;
    int row_pitch, column_pitch;

    __device__ inline void load(u32 target, u32 barrier, int chunk, int row, int column) const {
        const int c = column < column_pitch ? column : column_pitch - COLUMNS;
        load_bytes(rows + (u64)chunk * row_pitch + row, target, barrier, ROWS * 4);
        load_bytes(columns + (u64)chunk * column_pitch + c, target + ROWS * 4, barrier, COLUMNS * 4);
    }
};

__device__ inline void produce(Ring ring, const Work &work, u32 rank, const Operand &left, const Operand &right,
                               const Scales &scales) {
    for (int p = blockIdx.x / CLUSTER; p < work.tiles(); p += gridDim.x / CLUSTER) {
        const Group group = work.group(p);
        int row, column;
        work.tile(p, rank, row, column);
        for (int chunk = group.first; chunk < group.end; chunk++) {
            const int first = work.first_block(chunk), blocks = work.blocks(chunk);
            for (int block = 0; block < blocks; block++) {
                barrier_wait(ring.empty(), ring.parity ^ 1);
                fill_slot(ring, left, row, right, column, (first + block) * KBLOCK, rank, block == 0 ? SCALE_BYTES : 0);
                if (block == 0) scales.load(ring.scales(), ring.full(), chunk - work.base_chunk, row, column);
                ring.advance();
            }
            ring.next_scales();
        }
    }
}

// acc = fma(value, row scale * column scale, acc), the scales from shared memory.
__device__ inline void accumulate(float (&acc)[EACH], const int (&sums)[SUMS], const float *scales, int row, int column) {
    const float row_0 = scales[row], row_8 = scales[row + 8];
#pragma unroll
    for (int j = 0; j < EACH / 4; j++) {
        const float2 c = *(const float2 *)(scales + ROWS + column + 8 * j);
        acc[4 * j] = __fmaf_rn(chunk_value(sums, 4 * j), __fmul_rn(row_0, c.x), acc[4 * j]);
        acc[4 * j + 1] = __fmaf_rn(chunk_value(sums, 4 * j + 1), __fmul_rn(row_0, c.y), acc[4 * j + 1]);
        acc[4 * j + 2] = __fmaf_rn(chunk_value(sums, 4 * j + 2), __fmul_rn(row_8, c.x), acc[4 * j + 2]);
        acc[4 * j + 3] = __fmaf_rn(chunk_value(sums, 4 * j + 3), __fmul_rn(row_8, c.y), acc[4 * j + 3]);
    }
    pin(acc);   // before the next products overwrite the sums, and the next copy the scales
}

__device__ inline void consume(Ring ring, const Work &work, u32 rank, u32 warpgroup, const unsigned char *shared, float *dw,
                               int n, int k) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row_inside = warpgroup * 64 + warp * 16 + lane / 4, column_inside = lane % 4 * 2;
    const u32 shared_start = (u32)__cvta_generic_to_shared(shared);
    for (int p = blockIdx.x / CLUSTER; p < work.tiles(); p += gridDim.x / CLUSTER) {
        const Group group = work.group(p);
        int row, column;
        work.tile(p, rank, row, column);
        const Output out = {dw + group.row * k, (u64)k, n, k};
        float acc[EACH];
        load_tile(acc, out, row + row_inside, column + column_inside);
        for (int chunk = group.first; chunk < group.end; chunk++) {
            int sums[SUMS];
            sum_chunk(sums, ring, work.blocks(chunk), warpgroup, lane);
            accumulate(acc, sums, (const float *)(shared + (ring.scales() - shared_start)), row_inside, column_inside);
            ring.next_scales();
        }
        store_tile(acc, out, row + row_inside, column + column_inside);
    }
}

}   // namespace

// left: int8 [slice][n][pitch], right: int8 [slice][k][pitch], zeros outside; boxes of KBLOCK bytes
// by ROWS / 2 and COLUMNS rows. Scales: [chunk, n or k rounded up to 128], chunk `base_chunk`
// first. Block `base_block` of the chunk table is the first of the planes.
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(2, 1, 1)
    product_weight_hopper(const __grid_constant__ TensorMap left, const __grid_constant__ TensorMap right,
                          const float *__restrict__ row_scales, const float *__restrict__ column_scales, float *dw, int n, int k,
                          const unsigned int *__restrict__ chunks, const unsigned int *__restrict__ groups, int group_count,
                          int first_chunk, int end_chunk, u64 first_row, int base_chunk, int base_block) {
    extern __shared__ unsigned char shared[];
    if (threadIdx.x == 0) {
        prefetch_map(left);
        prefetch_map(right);
    }
    const Ring ring = open_ring(shared);
    const u32 rank = cluster_rank();
    const Walk walk = {ceil_div(n, ROWS), ceil_div(k, COLUMNS * CLUSTER)};
    const Group single = {first_chunk, end_chunk, first_row};
    const Work work = {chunks, groups, single, group_count, base_chunk, base_block, walk};
    const Scales scales = {row_scales, column_scales, ceil_div(n, 128) * 128, ceil_div(k, 128) * 128};
    run_parts([&] { produce(ring, work, rank, {&left, n}, {&right, k}, scales); },
              [&](u32 warpgroup) { consume(ring, work, rank, warpgroup, shared, dw, n, k); });
}
