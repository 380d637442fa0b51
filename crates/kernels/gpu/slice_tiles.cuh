// The main loop of slice products on the tensor cores of Hopper, for both profiles (SLICES is 2 or
// 3): exact sums of a chunk of k for a tile of the output, from planes of slices ("Slice product"
// in docs/numerics.md). What a chunk is worth and where it goes is up to the kernels that include
// this.
//
// Shape of a kernel
//   - persistent pairs of blocks (clusters). A pair shares ROWS rows of the left operand; each
//     block has COLUMNS columns of its own, side by side. Experts with few rows waste less this way
//     than with tiles one below the other;
//   - warpgroup 0: one thread feeds a ring of STAGES slots in shared memory by bulk copies. Each
//     block copies half of the left rows and sends them to both;
//   - warpgroups 1 and 2: 64 rows of the tile each, wgmma from shared memory, sums in registers.
//
// One slot holds the planes of the left operand, highest slice first, then those of the right one,
// lowest first, rows of KBLOCK bytes in the 128-byte swizzle. The right planes lie next to each
// other, so that left plane i times right planes i, i+1, ... is one wide product whose sums begin
// at register 0: with two slices hi*(lo, hi) gives (X, HH) and lo*(hi) adds to X; with three
// hi*(lo, mid, hi) gives (S3, S2, S1), mid*(mid, hi) adds to (S3, S2) and lo*(hi) to S3. ptxas
// keeps products asynchronous only if the narrow one's registers begin where the wide one's do.

namespace slice_tiles {

using namespace hopper;

constexpr int ROWS = 128;
constexpr int COLUMNS = SLICES == 2 ? 128 : 64;   // three sums of 128 columns would not fit the registers
constexpr int STAGES = 3;
constexpr int WALK_ROWS = 16;                     // tiles along the rows that are walked together, for reuse in L2

constexpr u32 LEFT_PLANE = ROWS * KBLOCK, RIGHT_PLANE = COLUMNS * KBLOCK;
constexpr u32 RIGHT = SLICES * LEFT_PLANE;
constexpr u32 SLOT_BYTES = RIGHT + SLICES * RIGHT_PLANE;
// Scales of a chunk, of the rows and of the columns, for kernels that copy them. One place more
// than slots: a warp has added a chunk before it releases a slot of the next, so the place that
// the copy of the fourth chunk ahead overwrites is no longer read.
constexpr u32 SCALES = STAGES * SLOT_BYTES;
constexpr u32 SCALE_PLACES = STAGES + 1;
constexpr u32 SCALE_BYTES = (ROWS + COLUMNS) * 4;
constexpr u32 BARRIERS = SCALES + SCALE_PLACES * SCALE_BYTES;   // offset of full[STAGES], empty[STAGES]
// Slots start at multiples of 1024, as the swizzle asks; the slack is for rounding up.
constexpr u32 SHARED_BYTES = BARRIERS + 2 * STAGES * 8 + 1024;

constexpr int THREADS = 384;
constexpr int CONSUMER_WARPS = 8;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

constexpr int EACH = COLUMNS / 2;        // outputs of a thread, and registers of one sum
constexpr int SUMS = SLICES * EACH;

static_assert(SHARED_BYTES <= 232448, "one block's shared memory on Hopper");
static_assert(ROWS / CLUSTER % 8 == 0, "multicast parts are whole swizzle groups of 8 rows");

// Who arrives where, per use of a slot:
//
//   full[s]   count 1. The block's own producer arrives once, expecting the bytes of a fill; bytes
//             of the peer may come before that, the count of 1 keeps the phase open meanwhile.
//   empty[s]  count 16: one arrival of each of the 8 consumer warps of both blocks, which both get
//             bytes from this block's producer.
//
// Fill i of a slot (from 0) completes phase i of full[s], and its release phase i of empty[s]; the
// producer waits before fill i for phase i - 1, which for i = 0 passes at once.
struct Ring {
    u32 base;      // shared address of slot 0
    u32 stage;     // next slot
    u32 parity;    // of the number of the fill it is about to get (producer) or to give (consumer)
    u32 place;     // of the next chunk's scales

    __device__ inline u32 slot() const { return base + stage * SLOT_BYTES; }
    __device__ inline u32 full() const { return base + BARRIERS + stage * 8; }
    __device__ inline u32 empty() const { return base + BARRIERS + (STAGES + stage) * 8; }
    __device__ inline u32 scales() const { return base + SCALES + place * SCALE_BYTES; }
    __device__ inline void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ inline void next_scales() { place = place + 1 == SCALE_PLACES ? 0 : place + 1; }
};

// The ring of this block, its barriers ready in both blocks of the pair.
__device__ inline Ring open_ring(unsigned char *shared) {
    Ring ring;
    ring.base = ((u32)__cvta_generic_to_shared(shared) + 1023) & ~1023u;
    ring.stage = 0;
    ring.parity = 0;
    ring.place = 0;
    if (threadIdx.x == 0) {
        for (Ring r = ring; r.parity == 0; r.advance()) {
            barrier_init(r.full(), 1);
            barrier_init(r.empty(), CONSUMER_WARPS * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    return ring;
}

// The order of tiles: WALK_ROWS tiles of rows by all pairs of columns, rows fastest.
struct Walk {
    int rows, pairs;

    __device__ inline int count() const { return rows * pairs; }
    __device__ inline void tile(int p, int &row, int &pair) const {
        const int group = p / (WALK_ROWS * pairs), rest = p % (WALK_ROWS * pairs);
        const int first = group * WALK_ROWS;
        const int here = rows - first < WALK_ROWS ? rows - first : WALK_ROWS;
        row = first + rest % here;
        pair = rest / here;
    }
};

__device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Planes of an operand as one matrix of bytes: row r of plane s is row s * plane_rows + r.
struct Operand {
    const TensorMap *map;
    int plane_rows;
};

// Fills the next slot from byte k of the rows on; `more` bytes are copied to its barrier besides.
__device__ inline void fill_slot(const Ring &ring, const Operand &left, int row, const Operand &right, int column, int k,
                                 u32 rank, u32 more) {
    constexpr int part = ROWS / CLUSTER;
    const u32 full = ring.full(), slot = ring.slot();
    barrier_arrive_expect(full, SLOT_BYTES + more);
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
        load_box_for_all(*left.map, slot + s * LEFT_PLANE + rank * part * KBLOCK, full, k,
                         s * left.plane_rows + row + (int)rank * part);
        load_box(*right.map, slot + RIGHT + (SLICES - 1 - s) * RIGHT_PLANE, full, k, s * right.plane_rows + column);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// wgmma

// sums[0 .. N/2] += a (64 x 32) times b (N x 32, transposed); starting forms overwrite.
#define MULTIPLY(name, n, constraint, add, operands, bound, a_index, b_index)                                         \
    __device__ inline void name(int (&sums)[SUMS], u64 a, u64 b) {                                                   \
        asm volatile("{\n"                                                                                            \
                     ".reg .pred add;\n"                                                                              \
                     "setp." add ".u32 add, 0, 0;\n"                                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" n "k32.s32.s8.s8 {" operands "}, " a_index ", " b_index      \
                     ", add;\n"                                                                                       \
                     "}"                                                                                              \
                     : bound                                                                                          \
                     : "l"(a), "l"(b));                                                                               \
    }
#define ARGUMENTS(...) __VA_ARGS__

#if SLICES == 2
#define BIND_SUMS(c) BIND_64(c, sums, 0), BIND_64(c, sums, 64)
MULTIPLY(start_0, "256", "=r", "ne", OPERANDS_128, ARGUMENTS(BIND_SUMS("=r")), "%128", "%129")
MULTIPLY(multiply_0, "256", "+r", "eq", OPERANDS_128, ARGUMENTS(BIND_SUMS("+r")), "%128", "%129")
MULTIPLY(multiply_1, "128", "+r", "eq", OPERANDS_64, ARGUMENTS(BIND_64("+r", sums, 0)), "%64", "%65")
#else
#define BIND_SUMS(c) BIND_64(c, sums, 0), BIND_32(c, sums, 64)
MULTIPLY(start_0, "192", "=r", "ne", OPERANDS_96, ARGUMENTS(BIND_SUMS("=r")), "%96", "%97")
MULTIPLY(multiply_0, "192", "+r", "eq", OPERANDS_96, ARGUMENTS(BIND_SUMS("+r")), "%96", "%97")
MULTIPLY(multiply_1, "128", "+r", "eq", OPERANDS_64, ARGUMENTS(BIND_64("+r", sums, 0)), "%64", "%65")
MULTIPLY(multiply_2, "64", "+r", "eq", OPERANDS_32, ARGUMENTS(BIND_32("+r", sums, 0)), "%32", "%33")
#endif

// No instructions: keep the compiler from moving uses of these registers across (wgmma writes them
// behind its back).
__device__ inline void pin(int (&sums)[SUMS]) { asm volatile("" : BIND_SUMS("+r")::"memory"); }
__device__ inline void pin(float (&acc)[EACH]) {
#if SLICES == 2
    asm volatile("" : BIND_64("+f", acc, 0)::"memory");
#else
    asm volatile("" : BIND_32("+f", acc, 0)::"memory");
#endif
}

// Issues the products of one slot for this warpgroup's 64 rows, one group of wgmma per plane of the
// left operand: between shapes PTX asks for a fence, at which ptxas ends a group.
template <bool FIRST>
__device__ inline void multiply_slot(int (&sums)[SUMS], u32 slot, u32 warpgroup) {
    const u64 left = matrix(slot + warpgroup * 64 * KBLOCK), right = matrix(slot + RIGHT);
    constexpr u64 next_left = LEFT_PLANE >> 4, next_right = RIGHT_PLANE >> 4;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KBLOCK / 32; i++) {
        if (FIRST && i == 0) start_0(sums, left, right);
        else multiply_0(sums, left + i * NEXT_K, right + i * NEXT_K);
    }
    wgmma_commit();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KBLOCK / 32; i++) multiply_1(sums, left + next_left + i * NEXT_K, right + next_right + i * NEXT_K);
    wgmma_commit();
#if SLICES == 3
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KBLOCK / 32; i++)
        multiply_2(sums, left + 2 * next_left + i * NEXT_K, right + 2 * next_right + i * NEXT_K);
    wgmma_commit();
#endif
}

// One arrival per warp at both blocks that send data to this slot.
__device__ inline void release(u32 empty, u32 lane) {
    if (lane < CLUSTER) barrier_arrive_at(empty, lane);
}

// The exact sums of a chunk of `blocks` slots, one at least.
__device__ inline void sum_chunk(int (&sums)[SUMS], Ring &ring, int blocks, u32 warpgroup, u32 lane) {
    barrier_wait(ring.full(), ring.parity);
    multiply_slot<true>(sums, ring.slot(), warpgroup);
    u32 previous = ring.empty();
    ring.advance();
#pragma unroll 1
    for (int block = 1; block < blocks; block++) {
        barrier_wait(ring.full(), ring.parity);
        multiply_slot<false>(sums, ring.slot(), warpgroup);
        wgmma_wait<SLICES>();   // the slot before has been read; this one is in flight
        release(previous, lane);
        previous = ring.empty();
        ring.advance();
    }
    wgmma_wait<0>();
    pin(sums);
    release(previous, lane);
}

// The value of a chunk for output i of this thread.
__device__ inline float chunk_value(const int (&sums)[SUMS], int i) {
#if SLICES == 2
    return __int2float_rn(sums[EACH + i] * 256 + sums[i]);
#else
    return __fmaf_rn(__int2float_rn(sums[2 * EACH + i]), 65536.f,
                     __fmaf_rn(__int2float_rn(sums[EACH + i]), 256.f, __int2float_rn(sums[i])));
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Outputs: registers 4j .. 4j+3 of a thread are columns 8j + 2*(lane % 4) + {0, 1} of row lane / 4,
// then of row lane / 4 + 8.

// Rows up to `rows` and columns up to `columns` of y, `stride` elements from row to row.
struct Output {
    float *y;
    u64 stride;
    int rows, columns;

    __device__ inline bool even() const { return columns % 2 == 0 && stride % 2 == 0 && (u64)y % 8 == 0; }
};

__device__ inline void load_tile(float (&acc)[EACH], const Output &out, int row, int column) {
    const bool even = out.even();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row + 8 * half;
        const float *line = out.y + r * out.stride;
#pragma unroll
        for (int j = 0; j < EACH / 4; j++) {
            const int c = column + 8 * j;
            float2 v = make_float2(0.f, 0.f);
            if (r < out.rows && c < out.columns) {
                if (even) {
                    v = *(const float2 *)(line + c);
                } else {
                    v.x = line[c];
                    if (c + 1 < out.columns) v.y = line[c + 1];
                }
            }
            acc[4 * j + 2 * half] = v.x;
            acc[4 * j + 2 * half + 1] = v.y;
        }
    }
}

// .cs: y is not read again here and should not push the operands out of L2.
__device__ inline void store_tile(const float (&acc)[EACH], const Output &out, int row, int column) {
    const bool even = out.even();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row + 8 * half;
        float *line = out.y + r * out.stride;
        if (r >= out.rows) continue;
#pragma unroll
        for (int j = 0; j < EACH / 4; j++) {
            const int c = column + 8 * j;
            const float2 v = make_float2(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
            if (even) {
                if (c < out.columns) __stcs((float2 *)(line + c), v);
            } else {
                if (c < out.columns) __stcs(line + c, v.x);
                if (c + 1 < out.columns) __stcs(line + c + 1, v.y);
            }
        }
    }
}

// The parts of a block: `produce` runs in one thread, `consume` in two warpgroups (0 and 1).
template <class Produce, class Consume>
__device__ inline void run_parts(Produce produce, Consume consume) {
    // Uniform over the warp, and the compiler is told so.
    const u32 warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) produce();
        __syncwarp();
        cluster_sync();   // no block leaves while its peer may still arrive on its barriers
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(warpgroup - 1);
        cluster_sync();
    }
}

}   // namespace slice_tiles
