// Slice product, profile x2, on the tensor cores of Hopper (sm_90a): y[m, n] = sum over k of
// x[m, k] * W[n, k] from planes of slices, with the bits of docs/numerics.md, "Slice product".
//
// Per chunk of 512 along k: HH = sum Ah*Bh and X = sum (Ah*Bl + Al*Bh), exact in int32, then
//     acc = fma(float(256*HH + X), ux[m, chunk], acc)        chunks ascending
// and at the end y = acc * uw[n]. A linear layer's bias and low-rank adapter are added before y is
// stored ("Bias", "Low-rank products"): y = y + bias[n],
//     y = fma(alpha, sum over j of u[m, j] * M[j, n], y)
// CUDA C++ without headers, as NVRTC takes it.
//
// Shape of the kernel
//   - persistent pairs of blocks (clusters); each block makes 128x128 tiles of y, a pair's tiles
//     lie one below the other;
//   - warpgroup 0: one thread feeds a ring of STAGES slots in shared memory by bulk copies. A tile
//     of B serves both blocks of the pair: each copies half of it and sends it to both, or reading
//     L2 would bind;
//   - warpgroups 1 and 2: 64 rows of the tile each, wgmma from shared memory, sums and epilogue in
//     registers. During the epilogue of one, the other keeps the tensor cores busy.
//
// One slot holds [Ah 128 rows][Al 128][Bl 128][Bh 128], each row 128 bytes, swizzled. Bl and Bh lie
// next to each other so that they are one matrix of 256 columns: m64n256 with A = Ah gives Ah*Bl in
// sums[0..63] and HH in sums[64..127] while Ah is read once, and m64n128 with A = Al, B = Bh adds
// Al*Bh to sums[0..63]. Reading shared memory is what binds next after the tensor cores, so every
// operand read saved counts. Bl comes first because ptxas keeps the products asynchronous only if
// the narrow one's registers begin where the wide one's do; with the halves swapped it serialises
// them (C7511).

namespace slice_product {

using namespace hopper;

constexpr int TILE = 128;                       // rows and columns of a block's tile of y
constexpr int CHUNK = 512;                      // elements of k that share a scale: part of the arithmetic
constexpr int STAGES = 3;
constexpr int BLOCKS_PER_CHUNK = CHUNK / KBLOCK;
constexpr int GROUP = 16;                       // tiles along m that are walked together, for reuse in L2

constexpr u32 PLANE_BYTES = TILE * KBLOCK;      // one operand plane in a slot
constexpr u32 SLOT_BYTES = 4 * PLANE_BYTES;
constexpr u32 A_LO = PLANE_BYTES, B_LO = 2 * PLANE_BYTES, B_HI = 3 * PLANE_BYTES;
constexpr u32 BARRIERS = STAGES * SLOT_BYTES;   // offset of full[STAGES], empty[STAGES]
// What the epilogue reads, once per consumer warpgroup: STAGED_RANKS ranks of 64 rows of u and of
// 128 columns of the factor, the columns' scales and biases. RANK_STEP floats from row to row and
// from column to column: whole vectors of four, and no two threads that read other rows or columns
// meet in a bank.
constexpr int STAGED_RANKS = 16, RANK_STEP = STAGED_RANKS + 4;
constexpr u32 STAGED_U = 0, STAGED_FACTOR = STAGED_U + 64 * RANK_STEP, STAGED_SCALES = STAGED_FACTOR + TILE * RANK_STEP;
constexpr u32 STAGED_BIAS = STAGED_SCALES + TILE, STAGED_FLOATS = STAGED_BIAS + TILE;
constexpr u32 STAGED = BARRIERS + 64;           // offset of the first warpgroup's
// The swizzle pattern is a function of address bits, so slots start at multiples of 1024; the slack
// is for rounding up.
constexpr u32 SHARED_BYTES = STAGED + 2 * STAGED_FLOATS * 4 + 1024;

constexpr int THREADS = 384;                    // producer warpgroup, two consumer warpgroups
constexpr int CONSUMER_WARPS = 8;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;   // (40 + 2*232) * 128 <= 65536

static_assert(GROUP % CLUSTER == 0, "a group is whole pairs");
static_assert(TILE / CLUSTER % 8 == 0, "multicast parts are whole swizzle groups of 8 rows");
static_assert(2 * STAGES * 8 <= STAGED - BARRIERS, "barriers lie before what is staged");
static_assert(SHARED_BYTES <= 232448, "one block's shared memory on Hopper");

// ---------------------------------------------------------------------------------------------------------------------
// mbarriers. Who arrives where, per use of a slot:
//
//   full[s]   count 1. The block's own producer arrives once, with expect_tx(SLOT_BYTES); the four
//             planes' bytes, whether sent by this block or by its peer, complete the transaction.
//             Bytes of the peer may come before the own producer's arrive: the count of 1 keeps the
//             phase open meanwhile.
//   empty[s]  count 16: one arrival of each of the 8 consumer warps of both blocks, which both get
//             bytes from this block's producer. So a consumer warp arrives at both blocks.
//
// Fill number i of a slot (from 0) completes phase i of full[s]; consumers wait for parity i & 1.
// Releasing it completes phase i of empty[s]; the producer waits before fill i for phase i - 1,
// parity (i & 1) ^ 1, which for i = 0 is the phase "before the first" and passes at once.
//
// Nothing can arrive a phase early: a warp's arrival i+1 on P.empty[s] follows fill i+1 of its own
// slot, part of which P itself sends, after having seen phase i of P.empty[s] complete. Bytes of
// fill i+1 for X.full[s] follow the release of fill i by X's consumers, who had seen phase i of
// X.full[s] complete.

struct Ring {
    u32 base;      // shared address of slot 0
    u32 stage;     // next slot
    u32 parity;    // of the number of the fill it is about to get (producer) or to give (consumer)

    __device__ inline u32 slot() const { return base + stage * SLOT_BYTES; }
    __device__ inline u32 full() const { return base + BARRIERS + stage * 8; }
    __device__ inline u32 empty() const { return base + BARRIERS + (STAGES + stage) * 8; }
    __device__ inline void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// wgmma

// sums[0..127] = a (64 x 32) times b (256 x 32, transposed), or += that. The first form is one of
// its own, with outputs only, so that the compiler knows the sums to be dead during epilogue and
// epilogue.
__device__ inline void start_256(int (&sums)[128], u64 a, u64 b) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.ne.u32 add, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {" OPERANDS_128 "}, %128, %129, add;\n"
                 "}"
                 : BIND_64("=r", sums, 0), BIND_64("=r", sums, 64)
                 : "l"(a), "l"(b));
}
__device__ inline void multiply_256(int (&sums)[128], u64 a, u64 b) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.eq.u32 add, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {" OPERANDS_128 "}, %128, %129, add;\n"
                 "}"
                 : BIND_64("+r", sums, 0), BIND_64("+r", sums, 64)
                 : "l"(a), "l"(b));
}

// sums[0..63] += a (64 x 32) times b (128 x 32, transposed).
__device__ inline void multiply_128(int (&sums)[128], u64 a, u64 b) {
    asm volatile("{\n"
                 ".reg .pred add;\n"
                 "setp.eq.u32 add, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" OPERANDS_64 "}, %64, %65, add;\n"
                 "}"
                 : BIND_64("+r", sums, 0)
                 : "l"(a), "l"(b));
}

// No instructions: keep the compiler from moving uses of these registers across (wgmma writes them
// behind its back).
__device__ inline void pin(int (&sums)[128]) {
    asm volatile("" : BIND_64("+r", sums, 0), BIND_64("+r", sums, 64)::"memory");
}
__device__ inline void pin(float (&acc)[64]) { asm volatile("" : BIND_64("+f", acc, 0)::"memory"); }

// ---------------------------------------------------------------------------------------------------------------------
// The walk over tiles: the pair's p-th piece of work. GROUP tiles of m by all of n, m fastest.

// The first row and column of a tile.
struct Place {
    int row, column;
};

struct Walk {
    int rows, columns;   // of y, in pairs and in tiles

    __device__ inline Walk(int m, int n) : rows((m + TILE * CLUSTER - 1) / (TILE * CLUSTER)), columns((n + TILE - 1) / TILE) {}
    __device__ inline int count() const { return rows * columns; }

    // This block's tile; may lie beyond the end of y (the block then works for its peer).
    __device__ inline Place tile(int p, u32 rank) const {
        constexpr int height = GROUP / CLUSTER;
        int group = p / (height * columns), rest = p % (height * columns);
        int first = group * height;
        int here = rows - first < height ? rows - first : height;
        return {((first + rest % here) * CLUSTER + (int)rank) * TILE, rest / here * TILE};
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Producer: one thread.

__device__ inline void produce(Ring ring, const Walk &walk, u32 rank, int kblocks, const TensorMap &a_hi, const TensorMap &a_lo,
                               const TensorMap &b_hi, const TensorMap &b_lo) {
    constexpr int part = TILE / CLUSTER;   // rows of a tile of B that this block sends to both
    const u32 b_row = rank * part;

    for (int p = blockIdx.x / CLUSTER; p < walk.count(); p += gridDim.x / CLUSTER) {
        const Place tile = walk.tile(p, rank);
        const int row = tile.row, column = tile.column + b_row;
        for (int block = 0; block < kblocks; block++) {
            const u32 a = ring.slot(), b = ring.slot() + b_row * KBLOCK, full = ring.full();
            const int k = block * KBLOCK;
            barrier_wait(ring.empty(), ring.parity ^ 1);
            barrier_arrive_expect(full, SLOT_BYTES);
            load_box(a_hi, a, full, k, row);
            load_box_for_all(b_hi, b + B_HI, full, k, column);
            load_box_for_all(b_lo, b + B_LO, full, k, column);
            load_box(a_lo, a + A_LO, full, k, row);
            ring.advance();
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Consumers

// One arrival per warp at both blocks that send data to this slot.
__device__ inline void release(u32 empty, u32 lane) {
    if (lane < CLUSTER) barrier_arrive_at(empty, lane);
}

// Issues the products of one slot for this warpgroup's 64 rows, as GROUPS_PER_SLOT groups; FIRST of
// a chunk: sums from zero.
//
// PTX gives an order between wgmmas on the same accumulators only if they have the same shape, and
// asks for a fence otherwise. ptxas ends a group at a fence, so the group is ended openly, for
// wgmma_wait to count right.
template <bool FIRST>
__device__ inline void multiply_slot(int (&sums)[128], u32 slot, u32 warpgroup) {
    const u32 rows = warpgroup * 64 * KBLOCK;
    const u64 a_hi = matrix(slot + rows), a_lo = matrix(slot + A_LO + rows);
    const u64 b_both = matrix(slot + B_LO), b_hi = matrix(slot + B_HI);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KBLOCK / 32; i++) {
        if (FIRST && i == 0) start_256(sums, a_hi, b_both);
        else multiply_256(sums, a_hi + i * NEXT_K, b_both + i * NEXT_K);
    }
    wgmma_commit();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KBLOCK / 32; i++) multiply_128(sums, a_lo + i * NEXT_K, b_hi + i * NEXT_K);
    wgmma_commit();
}
constexpr int GROUPS_PER_SLOT = 2;

// Registers 4j .. 4j+3 of a thread are columns 8j + 2*(lane % 4) + {0, 1} of row lane / 4, then of
// row lane / 4 + 8.

// y: m by n, `stride` elements from row to row. Wide accesses where every row allows them.
struct Output {
    float *y;
    u64 stride;
    int m, n;

    __device__ inline bool aligned(int elements) const {
        return n % elements == 0 && stride % elements == 0 && (u64)y % (4 * elements) == 0;
    }
};

__device__ inline void load_tile(float (&acc)[64], const Output &out, int row, int column) {
    const bool even = out.aligned(2);
    const int m = out.m, n = out.n;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row + 8 * half;
        const float *line = out.y + r * out.stride;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const int c = column + 8 * j;
            float2 v = make_float2(0.f, 0.f);
            if (r < m && c < n) {
                if (even) {
                    v = *(const float2 *)(line + c);
                } else {
                    v.x = line[c];
                    if (c + 1 < n) v.y = line[c + 1];
                }
            }
            acc[4 * j + 2 * half] = v.x;
            acc[4 * j + 2 * half + 1] = v.y;
        }
    }
}

// The short side u [m, rank] of an adapter, its factor, whose element (j, n) lies at j *
// rank_step + n * width_step, and its scale.
struct LowRank {
    const float *u, *factor;
    u64 rank_step, width_step;
    int rank;
    float alpha;
};

// BYTES bytes to shared memory, which arrive some time before staged_wait returns.
template <int BYTES>
__device__ inline void stage(float *target, const float *source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((u32)__cvta_generic_to_shared(target)), "l"(source), "n"(BYTES)
                 : "memory");
}
__device__ inline void staged_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The 128 threads of a consumer warpgroup.
__device__ inline void warpgroup_sync(u32 warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// Ranks `first` and up of the adapter, for 64 rows from `row` and 128 columns from `column`. What
// lies beyond the end borrows the last one's; it is not stored.
__device__ inline void stage_ranks(float *staged, const LowRank &low, int first, int m, int n, int row, int column) {
    const int thread = threadIdx.x % 128;
    const int ranks = low.rank - first < STAGED_RANKS ? low.rank - first : STAGED_RANKS;
    // Whole vectors where they may be read as such. Neighbours in memory go to neighbouring
    // threads.
    if (low.rank % 4 == 0 && (u64)low.u % 16 == 0) {
#pragma unroll
        for (int i = thread; i < 64 * STAGED_RANKS / 4; i += 128) {
            const int r = i % (STAGED_RANKS / 4) * 4, at = i / (STAGED_RANKS / 4), t = row + at < m ? row + at : m - 1;
            if (r < ranks) stage<16>(staged + STAGED_U + at * RANK_STEP + r, low.u + (u64)t * low.rank + first + r);
        }
    } else {
        for (int i = thread; i < 64 * STAGED_RANKS; i += 128) {
            const int r = i % STAGED_RANKS, at = i / STAGED_RANKS, t = row + at < m ? row + at : m - 1;
            if (r < ranks) stage<4>(staged + STAGED_U + at * RANK_STEP + r, low.u + (u64)t * low.rank + first + r);
        }
    }
    float *factor = staged + STAGED_FACTOR;
    if (low.rank_step != 1) {
        const int c = column + thread < n ? column + thread : n - 1;
        const float *from = low.factor + first * low.rank_step + c * low.width_step;
        for (int r = 0; r < ranks; r++) stage<4>(factor + thread * RANK_STEP + r, from + r * low.rank_step);
    } else if (low.width_step % 4 == 0 && low.rank % 4 == 0 && (u64)low.factor % 16 == 0) {
#pragma unroll
        for (int i = thread; i < TILE * STAGED_RANKS / 4; i += 128) {
            const int r = i % (STAGED_RANKS / 4) * 4, at = i / (STAGED_RANKS / 4), c = column + at < n ? column + at : n - 1;
            if (r < ranks) stage<16>(factor + at * RANK_STEP + r, low.factor + c * low.width_step + first + r);
        }
    } else {
        for (int i = thread; i < TILE * STAGED_RANKS; i += 128) {
            const int r = i % STAGED_RANKS, at = i / STAGED_RANKS, c = column + at < n ? column + at : n - 1;
            if (r < ranks) stage<4>(factor + at * RANK_STEP + r, low.factor + c * low.width_step + first + r);
        }
    }
}

// One number per column, for 128 columns from `column`.
__device__ inline void stage_columns(float *staged, const float *numbers, int n, int column) {
    const int at = threadIdx.x % 128, c = column + at;
    stage<4>(staged + at, numbers + (c < n ? c : n - 1));
}

// y[m, n] *= scale[n]; `staged` starts at this thread's first column.
__device__ inline void scale(float (&acc)[64], const float *staged) {
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const float2 u = *(const float2 *)(staged + 8 * j);
        acc[4 * j] = __fmul_rn(acc[4 * j], u.x);
        acc[4 * j + 1] = __fmul_rn(acc[4 * j + 1], u.y);
        acc[4 * j + 2] = __fmul_rn(acc[4 * j + 2], u.x);
        acc[4 * j + 3] = __fmul_rn(acc[4 * j + 3], u.y);
    }
}

// y[m, n] += bias[n].
__device__ inline void add_bias(float (&acc)[64], const float *staged) {
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const float2 b = *(const float2 *)(staged + 8 * j);
        acc[4 * j] = __fadd_rn(acc[4 * j], b.x);
        acc[4 * j + 1] = __fadd_rn(acc[4 * j + 1], b.y);
        acc[4 * j + 2] = __fadd_rn(acc[4 * j + 2], b.x);
        acc[4 * j + 3] = __fadd_rn(acc[4 * j + 3], b.y);
    }
}

// RANKS ranks of all chains, in ascending order. `left` and `right` start at this thread's first
// row and column.
template <int RANKS>
__device__ inline void add_ranks(float (&chains)[64], const float *left, const float *right) {
    float left_0[RANKS], left_8[RANKS];
    if (RANKS == 4) {
        *(float4 *)left_0 = *(const float4 *)left;
        *(float4 *)left_8 = *(const float4 *)(left + 8 * RANK_STEP);
    } else {
        left_0[0] = left[0];
        left_8[0] = left[8 * RANK_STEP];
    }
#pragma unroll
    for (int j = 0; j < 16; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float *from = right + (8 * j + e) * RANK_STEP;
            float values[RANKS];
            if (RANKS == 4) *(float4 *)values = *(const float4 *)from;
            else values[0] = from[0];
#pragma unroll
            for (int r = 0; r < RANKS; r++) {
                chains[4 * j + e] = __fmaf_rn(left_0[r], values[r], chains[4 * j + e]);
                chains[4 * j + 2 + e] = __fmaf_rn(left_8[r], values[r], chains[4 * j + 2 + e]);
            }
        }
    }
}

// Adds the adapter's part. The first ranks are staged; further ones are staged here. `row` and
// `column` are those of the warpgroup's part of the tile, `own_row` and `own_column` this thread's
// first ones in it.
__device__ inline void expand(float (&acc)[64], float *staged, const LowRank &low, int m, int n, int row, int column,
                              u32 own_row, u32 own_column, u32 warpgroup) {
    float chains[64];
#pragma unroll
    for (int i = 0; i < 64; i++) chains[i] = 0.f;
    const float *left = staged + STAGED_U + own_row * RANK_STEP, *right = staged + STAGED_FACTOR + own_column * RANK_STEP;
#pragma unroll 1
    for (int first = 0;;) {
        const int ranks = low.rank - first < STAGED_RANKS ? low.rank - first : STAGED_RANKS;
        int r = 0;
#pragma unroll 1
        for (; r + 4 <= ranks; r += 4) add_ranks<4>(chains, left + r, right + r);
#pragma unroll 1
        for (; r < ranks; r++) add_ranks<1>(chains, left + r, right + r);
        first += STAGED_RANKS;
        if (first >= low.rank) break;
        warpgroup_sync(warpgroup);   // all have read the ranks before
        stage_ranks(staged, low, first, m, n, row, column);
        staged_wait();
        warpgroup_sync(warpgroup);
    }
#pragma unroll
    for (int i = 0; i < 64; i++) acc[i] = __fmaf_rn(low.alpha, chains[i], acc[i]);
}

// Neighbouring lanes trade pairs so that each holds four consecutive columns: of columns 8j.. the
// even lane, of columns 8(j+1).. the odd one. A store then covers 8 rows of 64 bytes instead of 32.
// WHOLE: the tile ends inside of y. `row` and `column` are this thread's first ones.
template <bool WHOLE>
__device__ inline void store_wide(const float (&acc)[64], const Output &out, int row, int column, u32 lane) {
    const bool odd = lane & 1;
    const int c = odd ? column + 8 - 2 : column;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row + 8 * half;
        float *line = out.y + r * out.stride + c;
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            const int i = 4 * j + 2 * half;
            const float own_x = odd ? acc[i + 4] : acc[i], own_y = odd ? acc[i + 5] : acc[i + 1];
            const float give_x = odd ? acc[i] : acc[i + 4], give_y = odd ? acc[i + 1] : acc[i + 5];
            const float got_x = __shfl_xor_sync(0xffffffff, give_x, 1), got_y = __shfl_xor_sync(0xffffffff, give_y, 1);
            const float4 v = odd ? make_float4(got_x, got_y, own_x, own_y) : make_float4(own_x, own_y, got_x, got_y);
            // .cs: y is not read again here and should not push the operands out of L2.
            if (WHOLE || (r < out.m && c + 8 * j < out.n)) __stcs((float4 *)(line + 8 * j), v);
        }
    }
}

// `tile` is this warpgroup's part of the tile.
__device__ inline void store_tile(const float (&acc)[64], const Output &out, Place tile, int row, int column, u32 lane) {
    if (out.aligned(4)) {
        if (tile.row + 64 <= out.m && tile.column + TILE <= out.n) store_wide<true>(acc, out, row, column, lane);
        else store_wide<false>(acc, out, row, column, lane);
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row + 8 * half;
        float *line = out.y + r * out.stride;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const int c = column + 8 * j;
            if (r < out.m && c < out.n) __stcs(line + c, acc[4 * j + 2 * half]);
            if (r < out.m && c + 1 < out.n) __stcs(line + c + 1, acc[4 * j + 2 * half + 1]);
        }
    }
}

// ONTO: sums start from y.
template <bool ONTO>
__device__ inline void consume(Ring ring, const Walk &walk, u32 rank, int kblocks, u32 warpgroup, float *staged,
                               const float *ux, const float *uw, const float *bias, const LowRank &low, const Output &out) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const u32 own_row = warp * 16 + lane / 4, own_column = lane % 4 * 2;
    const int m = out.m, n = out.n, step = gridDim.x / CLUSTER;
    const int chunks = (kblocks + BLOCKS_PER_CHUNK - 1) / BLOCKS_PER_CHUNK;

    Place next = walk.tile(blockIdx.x / CLUSTER, rank);
    for (int p = blockIdx.x / CLUSTER; p < walk.count(); p += step) {
        const Place tile = {next.row + (int)warpgroup * 64, next.column};
        const int row = tile.row + own_row, column = tile.column + own_column;

        // Rows beyond the end borrow the last one's scales; they are not stored.
        const float *scales_0 = ux + (u64)(row < m ? row : m - 1) * chunks;
        const float *scales_8 = ux + (u64)(row + 8 < m ? row + 8 : m - 1) * chunks;

        float acc[64];
#pragma unroll
        for (int i = 0; i < 64; i++) acc[i] = 0.f;
        pin(acc);   // or the compiler gives the first chunk a loop of its own and runs out of registers

        for (int chunk = 0; chunk < chunks; chunk++) {
            // Scales first: they arrive while the products run.
            const float scale_0 = __ldg(scales_0 + chunk), scale_8 = __ldg(scales_8 + chunk);

            const int left = kblocks - chunk * BLOCKS_PER_CHUNK;
            const int blocks = left < BLOCKS_PER_CHUNK ? left : BLOCKS_PER_CHUNK;
            int sums[128];   // X, then HH
            barrier_wait(ring.full(), ring.parity);
            multiply_slot<true>(sums, ring.slot(), warpgroup);
            if (chunk == 0) {
                // So does what the epilogue reads, and what this product continues from. The next
                // tile is found meanwhile, too.
                warpgroup_sync(warpgroup);   // all have read what was staged for the tile before
                if (uw) stage_columns(staged + STAGED_SCALES, uw, n, tile.column);
                if (bias) stage_columns(staged + STAGED_BIAS, bias, n, tile.column);
                if (low.rank > 0) stage_ranks(staged, low, 0, m, n, tile.row, tile.column);
                if (ONTO) load_tile(acc, out, row, column);
                next = walk.tile(p + step < walk.count() ? p + step : p, rank);
            }
            u32 previous = ring.empty();
            ring.advance();
#pragma unroll 1
            for (int block = 1; block < blocks; block++) {
                barrier_wait(ring.full(), ring.parity);
                multiply_slot<false>(sums, ring.slot(), warpgroup);
                wgmma_wait<GROUPS_PER_SLOT>();   // the slot before has been read; this one is in flight
                release(previous, lane);
                previous = ring.empty();
                ring.advance();
            }
            wgmma_wait<0>();
            release(previous, lane);
            pin(sums);

#pragma unroll
            for (int i = 0; i < 64; i++) {
                const float v = __int2float_rn(sums[64 + i] * 256 + sums[i]);
                acc[i] = __fmaf_rn(v, i % 4 < 2 ? scale_0 : scale_8, acc[i]);
            }
            pin(acc);   // add before the next products overwrite the sums
        }

        staged_wait();
        warpgroup_sync(warpgroup);
        if (uw) scale(acc, staged + STAGED_SCALES + own_column);
        if (bias) add_bias(acc, staged + STAGED_BIAS + own_column);
        if (low.rank > 0) expand(acc, staged, low, m, n, tile.row, tile.column, own_row, own_column, warpgroup);
        store_tile(acc, out, tile, row, column, lane);
    }
}

// The operands of the kernels below, where their meaning stands.
struct Operands {
    const TensorMap &a_hi, &a_lo, &b_hi, &b_lo;
    const float *ux, *uw, *bias;
    int k;
};

template <bool ONTO>
__device__ inline void product(const Operands &operands, const LowRank &low, const Output &out) {
    extern __shared__ unsigned char shared[];

    Ring ring;
    ring.base = ((u32)__cvta_generic_to_shared(shared) + 1023) & ~1023u;
    ring.stage = 0;
    ring.parity = 0;
    const Walk walk(out.m, out.n);
    const u32 rank = cluster_rank();
    const int kblocks = (operands.k + KBLOCK - 1) / KBLOCK;

    if (threadIdx.x == 0) {
        prefetch_map(operands.a_hi);
        prefetch_map(operands.a_lo);
        prefetch_map(operands.b_hi);
        prefetch_map(operands.b_lo);
        for (Ring r = ring; r.parity == 0; r.advance()) {
            barrier_init(r.full(), 1);
            barrier_init(r.empty(), CONSUMER_WARPS * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();   // barriers are ready, in the peer too

    // Uniform over the warp, and the compiler is told so.
    const u32 warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) produce(ring, walk, rank, kblocks, operands.a_hi, operands.a_lo, operands.b_hi, operands.b_lo);
        __syncwarp();
        cluster_sync();   // no block leaves while its peer may still arrive on its barriers
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        const u32 consumer = warpgroup - 1;
        float *staged = (float *)(shared + (ring.base - (u32)__cvta_generic_to_shared(shared)) + STAGED) + consumer * STAGED_FLOATS;
        consume<ONTO>(ring, walk, rank, kblocks, consumer, staged, operands.ux, operands.uw, operands.bias, low, out);
        cluster_sync();
    }
}

}   // namespace slice_product

// a_hi, a_lo: tensor maps of int8 [m, kp], boxes of 128 rows; b_hi, b_lo: of int8 [n, kp], boxes of
// 64 rows; all 128 bytes wide in the 128-byte swizzle, zeros outside; kp = k rounded up to 128,
// padded with zeros. ux: [m, ceil(k / 512)]. uw: [n], or null for y = acc. y: [m, n], `stride`
// elements from row to row. bias: [n] or null. u: [m, low_rank] and the factor of an adapter,
// unless low_rank is 0. k > 0. Grid: an even number of blocks, one per multiprocessor.
#define SLICE_PRODUCT(name, ONTO) \
    extern "C" __global__ void __launch_bounds__(slice_product::THREADS, 1) __cluster_dims__(2, 1, 1) name( \
        const __grid_constant__ hopper::TensorMap a_hi, const __grid_constant__ hopper::TensorMap a_lo, \
        const __grid_constant__ hopper::TensorMap b_hi, const __grid_constant__ hopper::TensorMap b_lo, \
        const float *__restrict__ ux, const float *__restrict__ uw, float *y, hopper::u64 stride, int m, int n, int k, \
        const float *__restrict__ bias, const float *__restrict__ u, const float *__restrict__ factor, \
        hopper::u64 rank_step, hopper::u64 width_step, int low_rank, float alpha) { \
        using namespace slice_product; \
        const LowRank low = {u, factor, rank_step, width_step, low_rank, alpha}; \
        product<ONTO>({a_hi, a_lo, b_hi, b_lo, ux, uw, bias, k}, low, {y, stride, m, n}); \
    }

SLICE_PRODUCT(slice_product_x2, false)
// The same added to what y holds.
SLICE_PRODUCT(slice_product_x2_onto, true)
