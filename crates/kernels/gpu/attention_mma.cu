// Attention on the int8 tensor cores of NVIDIA devices from sm_80 on, profile x2 (docs/numerics.md, "Attention").
//
// KEY_WIDTH and VALUE_WIDTH are the widths of the heads rounded up to 32; planes are padded with integers that are zero.
// A warp owns 16 rows (queries, or keys) and passes over tiles of 128 columns (keys, or queries). Scores of a tile, 32
// columns at a time, become weights in the same registers, and their slices are the left operand of the product over the
// tile. Columns stream through a ring of slots in shared memory that all warps of a block share.
//
// Positions lie at *places*: all spans one after another, each padded to blocks of 32. In a block, thread t of a quad
// has the columns 4 i + t, i < 8: those of its lanes of a lane sum. Numbers per place are stored in that order,
// 8 t + i, and so are the bytes of planes that are contracted over places: four bytes are i = 0..3 or 4..7 of one t.
//
// Planes lie in memory as they will in shared memory, where eight rows of 16 bytes are read at once and should lie in
// different banks: 16-byte pieces of a row change places with their neighbours, `turn` says how. By width
// [head, block, slice, place, width]; by place [head, block, width / 32, slice, width % 32, place].

#define TILE 128u
#define BLOCK 32u
#define BLOCKS 4
#ifndef WARPS
#define WARPS 4
#endif
#define THREADS (32u * WARPS)
#define ROWS (16u * WARPS)
// Columns of results that a block of threads keeps: wider heads are split.
#define PART_MOST 128
// Tiles whose numbers per column are kept: as many as the ring may run ahead, rounded up.
#define AHEAD 4u
#define LOG2_E as_f32(0x3fb8aa3bu)

#define MEMBER __device__ __forceinline__
// Whether copies are made by the copy engine, and whether shared memory is large.
#ifndef BULK
#define BULK (__CUDA_ARCH__ >= 900)
#endif
#define ROOMY (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)

extern __shared__ __align__(1024) uchar shared[];

// ---------------------------------------------------------------------------------------------------------------------
// Instructions

#if BULK

FUNCTION void barrier_init(uint barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

FUNCTION void barrier_expect(uint barrier, uint bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

FUNCTION void barrier_wait(uint barrier, uint parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier), "r"(parity) : "memory");
}

FUNCTION void copy_bulk(uint to, const void *from, uint bytes, uint barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

#else

FUNCTION void copy16(uint to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// By all threads.
FUNCTION void copy_all(uint to, const uchar *from, uint bytes) {
    for (uint i = 16u * threadIdx.x; i < bytes; i += 16u * THREADS) {
        copy16(to + i, from + i);
    }
}

FUNCTION void copies_end(void) {
    asm volatile("cp.async.commit_group;");
}

template <int PENDING> FUNCTION void copies_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#endif

FUNCTION uint lane_index(void) {
    uint lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// The same for all of a warp, and the compiler is told so.
FUNCTION uint warp_index(void) {
    return __shfl_sync(0xffffffffu, threadIdx.x / 32u, 0);
}

// Four matrices of 8 rows of 16 bytes; a thread gets four bytes of each.
FUNCTION void load_matrices(uint (&to)[4], uint address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// sums (16 x 8) += a (16 x 32) times b (32 x 8).
FUNCTION void multiply(int *sums, const uint (&a)[4], uint b0, uint b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

FUNCTION float larger_or_nan(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic

#define START 12582912.0f
#define START_BITS 0x4b400000

// Whether converting an integer is as fast as adding two floats: otherwise sums below 2^22 start from the bits of the
// float START, so that their bits are those of START + sum.
#ifndef CONVERTS
#define CONVERTS (__CUDA_ARCH__ >= 900)
#endif

// What sums over LENGTH products start from. For up to 128 of them |HH| and |X| are below 2^22.
template <int LENGTH> FUNCTION int start_of(void) {
    return !CONVERTS && LENGTH <= 128 ? START_BITS : 0;
}

// Their value, rounded once.
template <int LENGTH> FUNCTION float chunk_of(int high, int cross) {
    if (!CONVERTS && LENGTH <= 128) {
        return fma_rn(as_f32((uint)high) - START, 256.0f, as_f32((uint)cross) - START);
    }
    return __int2float_rn(high * 256 + cross);
}

#define EXP2_LEAST -151.0f

// 2^f as in isobit_exp2.
FUNCTION float exp2_polynomial(float f) {
    float p = as_f32(0x3920b5a9u);
    p = fma_rn(p, f, as_f32(0x3aaf8417u));
    p = fma_rn(p, f, as_f32(0x3c1d96f0u));
    p = fma_rn(p, f, as_f32(0x3d6357beu));
    p = fma_rn(p, f, as_f32(0x3e75fdeeu));
    p = fma_rn(p, f, as_f32(0x3f317218u));
    return fma_rn(p, f, 1.0f);
}

// isobit_exp2 of numbers up to 100 (a score less the row's maximum or logarithm is at most about 0): below the limit the
// result is zero, and one power of two that keeps the number normal takes the place of two halves.
FUNCTION float exp2_of(float x) {
    const float shift = START + 154.0f;
    float c = larger_or_nan(x, EXP2_LEAST);
    float shifted = c + shift;
    float p = exp2_polynomial(c - (shifted - shift));
    return (p * as_f32(as_u32(shifted) << 23)) * as_f32((127u - 27u) << 23);
}

// The same of numbers that are no NaN and not above zero: the power of two is added to the exponent.
FUNCTION float exp2_down(float x) {
    const float shift = START + 28.0f;
    float c = x > EXP2_LEAST ? x : EXP2_LEAST;
    float shifted = c + shift;
    float p = exp2_polynomial(c - (shifted - shift));
    return as_f32(as_u32(p) + (as_u32(shifted) << 23)) * as_f32((127u - 28u) << 23);
}

// Slices of four weights times a multiplier, as the bytes of two words. START + 128 leaves q + 128 in the low bits:
// its second byte is the high slice, its first the low one with the highest bit turned.
FUNCTION void slice4(uint &high, uint &low, float a, float b, float c, float d, float multiplier) {
    const float shift = START + 128.0f;
    uint ab = __byte_perm(as_u32(a * multiplier + shift), as_u32(b * multiplier + shift), 0x5140);
    uint cd = __byte_perm(as_u32(c * multiplier + shift), as_u32(d * multiplier + shift), 0x5140);
    low = __byte_perm(ab, cd, 0x5410) ^ 0x80808080u;
    high = __byte_perm(ab, cd, 0x7632);
}

template <class T> FUNCTION T from_lane(T x, uint other) {
    return __shfl_xor_sync(0xffffffffu, x, other);
}

FUNCTION float most_of_quad(float x) {
    x = larger_or_nan(x, from_lane(x, 1));
    return larger_or_nan(x, from_lane(x, 2));
}

// Number n of a place lies here, of `count` per place: [block, count, 32].
FUNCTION ulong number_at(ulong place, uint n, uint count) {
    return (place / BLOCK * count + n) * BLOCK + (place % 4u * 8u + place % BLOCK / 4u);
}

// ---------------------------------------------------------------------------------------------------------------------
// Positions

typedef struct {
    uint start;
    uint end;
} Extent;

// The rows of a block of threads, all of one span: as `rows_of` in attention.cl.
typedef struct {
    uint place;
    uint count;
    uint source;
    uint columns;
    uint position;
    uint length;
} Rows;

FUNCTION Rows rows_of(const uint *table, uint index) {
    const uint *entry = table + (ulong)index * 6u;
    Rows rows = {entry[0], entry[1], entry[2], entry[3], entry[4], entry[5]};
    return rows;
}

// Columns that the row at a position meets: keys that a query sees, or (TURNED) queries that see a key.
template <bool TURNED> FUNCTION Extent meets(uint position, uint length, uint window) {
    Extent columns;
    if (TURNED) {
        columns.start = position;
        columns.end = length - position > window ? position + window : length;
    } else {
        columns.end = position + 1u;
        columns.start = columns.end > window ? columns.end - window : 0u;
    }
    return columns;
}

// What any of some rows meets; `count` is not zero.
template <bool TURNED> FUNCTION Extent any_meets(uint position, uint count, uint length, uint window) {
    Extent first = meets<TURNED>(position, length, window), last = meets<TURNED>(position + count - 1u, length, window);
    Extent all = {first.start, last.end};
    return all;
}

FUNCTION bool overlap(Extent a, uint start, uint end) {
    return a.start < end && start < a.end;
}

// ---------------------------------------------------------------------------------------------------------------------
// The stream of columns

// Planes of one head from the span's first block on, and its numbers per place, [block, NUMBERS, 32].
struct Source {
    const uchar *wide, *wide2, *deep;
    const float *numbers;
};

// Bytes of a block of places by width, and of the part of it that makes 32 columns of a result.
#define WIDE_BYTES(width) (2u * BLOCK * (width))
#define DEEP_BYTES (2u * BLOCK * BLOCK)

// For every tile with a visible column: its columns, EACH blocks of 32 at a time, then the result's columns, 64 at a
// time. W2 may be 0.
template <int W1, int W2, int WIDTH, int NUMBERS, int EACH, int SLOTS> struct Stream {
    static constexpr uint STEPS = BLOCKS / EACH;
    static constexpr uint STEP_BYTES = EACH * (WIDE_BYTES(W1) + WIDE_BYTES(W2));
    static constexpr uint PAIR_BYTES = 2u * BLOCKS * DEEP_BYTES;
    static constexpr uint SLOT_BYTES = STEP_BYTES > PAIR_BYTES ? STEP_BYTES : PAIR_BYTES;
    static constexpr uint NUMBER_BYTES = NUMBERS * BLOCK * 4u;

    Source from;
    Extent seen;
    // Groups of 32 columns of the result.
    uint groups;
    // In shared memory: the slots, then the numbers per column; the barriers of the slots.
    uint base, barriers;
    // What is copied next, into which slot, by which warp; the slot that is read, and the parity of its barrier.
    uint tile, step, into, by, out, parity;

    MEMBER uint first_step(uint tile) const {
        return seen.start > tile ? (seen.start - tile) / (EACH * BLOCK) : 0u;
    }
    MEMBER uint end_step(uint tile) const {
        uint steps = (seen.end - tile + EACH * BLOCK - 1u) / (EACH * BLOCK);
        return steps < STEPS ? steps : STEPS;
    }
    MEMBER uint first_tile(void) const {
        return seen.start / TILE * TILE;
    }
    MEMBER uint numbers_at(uint tile, uint block) const {
        return base + SLOTS * SLOT_BYTES + (tile / TILE % AHEAD * BLOCKS + block) * NUMBER_BYTES;
    }

    // Starts the copies of the next step, if there is one: a thread of one warp after the other for all, or every thread
    // its part. Blocks that lie beyond the span are not copied: what a slot holds there is masked or multiplied by zero.
    MEMBER void load(uint warp, uint lane) {
        if (tile < seen.end) {
            uint to = base + into * SLOT_BYTES;
            uint block = tile / BLOCK, end = (seen.end + BLOCK - 1u) / BLOCK - block;
#if BULK
            uint barrier = barriers + 8u * into;
            if (warp == by && lane == 0u) {
#else
            {
#endif
                if (step < STEPS) {
                    uint first = step * EACH, count = end - first < EACH ? end - first : EACH;
                    uint numbers = numbers_at(tile, first);
                    block += first;
                    const uchar *wide = from.wide + (ulong)block * WIDE_BYTES(W1);
                    const uchar *wide2 = from.wide2 + (ulong)block * WIDE_BYTES(W2);
                    const uchar *more = (const uchar *)from.numbers + (ulong)block * NUMBER_BYTES;
#if BULK
                    barrier_expect(barrier, count * (WIDE_BYTES(W1) + WIDE_BYTES(W2) + NUMBER_BYTES));
                    copy_bulk(to, wide, count * WIDE_BYTES(W1), barrier);
                    if (W2 > 0) {
                        copy_bulk(to + EACH * WIDE_BYTES(W1), wide2, count * WIDE_BYTES(W2), barrier);
                    }
                    copy_bulk(numbers, more, count * NUMBER_BYTES, barrier);
#else
                    copy_all(to, wide, count * WIDE_BYTES(W1));
                    copy_all(to + EACH * WIDE_BYTES(W1), wide2, count * WIDE_BYTES(W2));
                    copy_all(numbers, more, count * NUMBER_BYTES);
#endif
                } else {
                    uint first = (step - STEPS) * 2u, count = groups - first < 2u ? groups - first : 2u;
                    const uchar *deep = from.deep + (ulong)block * WIDE_BYTES(WIDTH) + first * DEEP_BYTES;
                    uint start = first_step(tile) * EACH;
                    end = end < BLOCKS ? end : BLOCKS;
#if BULK
                    barrier_expect(barrier, (end - start) * count * DEEP_BYTES);
#endif
#pragma unroll 1
                    for (uint b = start; b < end; b++) {
#if BULK
                        copy_bulk(to + b * 2u * DEEP_BYTES, deep + b * WIDE_BYTES(WIDTH), count * DEEP_BYTES, barrier);
#else
                        copy_all(to + b * 2u * DEEP_BYTES, deep + b * WIDE_BYTES(WIDTH), count * DEEP_BYTES);
#endif
                    }
                }
            }
            step++;
            if (step == end_step(tile)) {
                step = STEPS;
            }
            if (step == STEPS + (groups + 1u) / 2u) {
                tile += TILE;
                step = first_step(tile);
            }
            into = into + 1u == SLOTS ? 0u : into + 1u;
            by = (by + 1u) % WARPS;
        }
#if !BULK
        copies_end();
#endif
    }

    // Starts the ring, after copies of the rows: `count` rows from `rows` on, blocks of WIDE_BYTES. Waits for the rows.
    MEMBER void begin(uint to, const uchar *rows, const uchar *rows2, uint count, uint warp, uint lane) {
        uint bytes = count > BLOCK ? 2u * WIDE_BYTES(W1) : WIDE_BYTES(W1);
        uint bytes2 = count > BLOCK ? 2u * WIDE_BYTES(W2) : WIDE_BYTES(W2);
        uint to2 = to + ROWS / BLOCK * WIDE_BYTES(W1);
#if BULK
        __shared__ ulong all_barriers[SLOTS + 1];
        barriers = (uint)__cvta_generic_to_shared(all_barriers);
        uint own = barriers + 8u * SLOTS;
        if (threadIdx.x == 0u) {
            for (uint i = 0u; i <= SLOTS; i++) {
                barrier_init(barriers + 8u * i);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            barrier_expect(own, bytes + bytes2);
            copy_bulk(to, rows, bytes, own);
            if (W2 > 0) {
                copy_bulk(to2, rows2, bytes2, own);
            }
        }
        __syncthreads();
#else
        copy_all(to, rows, bytes);
        copy_all(to2, rows2, bytes2);
        copies_end();
#endif
        tile = first_tile();
        step = first_step(tile);
        into = 0u;
        by = 0u;
        out = SLOTS - 1u;
        parity = 1u;
#pragma unroll 1
        for (int i = 0; i < SLOTS - 1; i++) {
            load(warp, lane);
        }
#if BULK
        barrier_wait(own, 0u);
#else
        copies_wait<SLOTS - 1>();
        __syncthreads();
#endif
    }

    // The slot of the step that is next, filled. The one before it is free for what comes SLOTS - 1 steps later.
    MEMBER uint next(uint warp, uint lane) {
#if !BULK
        copies_wait<SLOTS - 2>();
#endif
        __syncthreads();
        load(warp, lane);
        out++;
        if (out == SLOTS) {
            out = 0u;
            parity ^= 1u;
        }
#if BULK
        barrier_wait(barriers + 8u * out, parity);
#endif
        return base + out * SLOT_BYTES;
    }

    // Numbers of this thread's eight columns of a block.
    MEMBER void numbers(float (&to)[8], uint n, uint tile, uint block, uint lane) const {
        uint address = numbers_at(tile, block) + n * BLOCK * 4u + lane % 4u * 32u;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(to[4 * half]), "=f"(to[4 * half + 1]), "=f"(to[4 * half + 2]), "=f"(to[4 * half + 3])
                         : "r"(address + 16u * half)
                         : "memory");
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Products. Number 4 n + 2 r + e of a thread is column 8 n + 2 t + e of row lane / 4 + 8 r.

// Piece number `piece` of row `row` lies where piece ^ turn<WIDTH>(row) would: pieces of eight rows that differ in nothing
// but the row are in different banks.
template <uint WIDTH> FUNCTION uint turn(uint row) {
    return WIDTH % 128u == 0u ? row % 8u : WIDTH % 64u == 0u ? row / 2u % 4u : row / 4u % 2u;
}
// The same for widths known at run time.
FUNCTION uint turn_of(uint width, uint row) {
    return width % 128u == 0u ? row % 8u : width % 64u == 0u ? row / 2u % 4u : row / 4u % 2u;
}

// Address of piece 2 k + n of a row, from that of piece n: what the turn does not reach is added.
template <uint WIDTH> FUNCTION uint step_at(uint address, uint k) {
    return WIDTH % 128u == 0u ? (address ^ (k % 4u * 32u)) + k / 4u * 128u
           : WIDTH % 64u == 0u ? (address ^ (k % 2u * 32u)) + k / 2u * 64u
                               : address + 32u * k;
}

// Where a lane's row of matrices starts: of the left operand; of 16 columns in the order of the lanes; of 16 columns.
template <uint WIDTH> FUNCTION uint left_lane(uint lane) {
    return lane % 16u * WIDTH + (lane / 16u ^ turn<WIDTH>(lane % 16u)) * 16u;
}
template <uint WIDTH> FUNCTION uint column_lane(uint lane) {
    uint row = lane / 16u * 8u + lane % 2u * 4u + lane / 2u % 4u;
    return row * WIDTH + (lane / 8u % 2u ^ turn<WIDTH>(row)) * 16u;
}
FUNCTION uint deep_lane(uint lane) {
    uint row = lane / 16u * 8u + lane % 8u;
    return row * BLOCK + (lane / 8u % 2u ^ turn<BLOCK>(row)) * 16u;
}

// Where the rows of a warp start: two warps share a block.
template <uint WIDTH> FUNCTION uint warp_rows(uint warp) {
    return warp / 2u * WIDE_BYTES(WIDTH) + warp % 2u * 16u * WIDTH;
}

template <int WIDTH> FUNCTION void load_left(uint (&high)[4], uint (&low)[4], uint rows, int k) {
    uint address = step_at<WIDTH>(rows, k);
    load_matrices(high, address);
    load_matrices(low, address + BLOCK * WIDTH);
}

// One step of 32 of a contraction, for 32 columns whose high and low slices lie at `columns` and `columns + low`.
FUNCTION void add_step(
    int (&high)[16], int (&cross)[16], const uint (&left_high)[4], const uint (&left_low)[4], uint columns, uint stride,
    uint low
) {
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        uint right_high[4], right_low[4];
        load_matrices(right_high, columns + 16u * pair * stride);
        load_matrices(right_low, columns + 16u * pair * stride + low);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            multiply(high + 8 * pair + 4 * n, left_high, right_high[2 * n], right_high[2 * n + 1]);
            multiply(cross + 8 * pair + 4 * n, left_high, right_low[2 * n], right_low[2 * n + 1]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            multiply(cross + 8 * pair + 4 * n, left_low, right_high[2 * n], right_high[2 * n + 1]);
        }
    }
}

template <int LENGTH> FUNCTION void no_products(int (&high)[16], int (&cross)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        high[i] = start_of<LENGTH>();
        cross[i] = start_of<LENGTH>();
    }
}

// Products over the width of the warp's rows with EACH blocks of 32 columns. Both addresses are the lane's.
template <int WIDTH, int EACH> FUNCTION void over_width(int (&high)[EACH][16], int (&cross)[EACH][16], uint rows, uint columns) {
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        no_products<WIDTH>(high[n], cross[n]);
    }
#pragma unroll
    for (int k = 0; k < WIDTH / 32; k++) {
        uint left_high[4], left_low[4];
        load_left<WIDTH>(left_high, left_low, rows, k);
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            uint right = step_at<WIDTH>(columns, k) + n * WIDE_BYTES(WIDTH);
            add_step(high[n], cross[n], left_high, left_low, right, WIDTH, BLOCK * WIDTH);
        }
    }
}

// A tile's weights as left operands of the product over the tile.
struct Weights {
    uint high[BLOCKS][4], low[BLOCKS][4];
    float units[2];

    // `most`: the row's largest magnitude among this thread's columns.
    MEMBER void slice(const float (&w)[64], const float (&most)[2], uint lane) {
        float largest[2] = {most_of_quad(most[0]), most_of_quad(most[1])};
        // Of the four divisions each thread of a quad does one: thread 2 r + 1 the unit of row r, thread 2 r the multiplier.
        float mine = lane % 4u < 2u ? largest[0] : largest[1];
        bool is_unit = lane % 2u != 0u;
        uint bits = magnitude_bits(mine);
        float quotient = div_rn(is_unit ? mine : SLICE_LIMIT, is_unit ? UNIT_DIVISOR : mine);
        bool none = bits < (127u - 100u) << 23, all = bits >= F32_INFINITY;
        quotient = none ? 0.0f : all ? (is_unit ? as_f32(CANONICAL_NAN) : 0.0f) : quotient;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float multiplier = __shfl_sync(0xffffffffu, quotient, 2 * r, 4);
            units[r] = __shfl_sync(0xffffffffu, quotient, 2 * r + 1, 4);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float *x = w + 16 * b + 8 * half + 2 * r;
                    slice4(high[b][2 * half + r], low[b][2 * half + r], x[0], x[1], x[4], x[5], multiplier);
                }
            }
        }
    }

    // Products over the tile with 32 columns at `columns`, the lane's address.
    MEMBER void over_tile(int (&sums)[16], int (&cross)[16], uint columns) const {
        no_products<128>(sums, cross);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            add_step(sums, cross, high[b], low[b], columns + b * 2u * DEEP_BYTES, BLOCK, BLOCK * BLOCK);
        }
    }
};

// Results of the warp's rows: PART columns from `first` of rows [row, head, width].
template <int PART> FUNCTION void store(
    float *to, const float (&acc)[PART / 2], const float (&factors)[2], Rows rows, uint row, uint head, uint heads,
    uint width, uint first, uint lane
) {
    bool even = width % 2u == 0u;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + 8u * r < rows.count) {
            float *line = to + ((ulong)(rows.source + row + 8u * r) * heads + head) * width;
#pragma unroll
            for (int n = 0; n < PART / 8; n++) {
                uint d = first + 8u * n + lane % 4u * 2u;
                float x = acc[4 * n + 2 * r] * factors[r], y = acc[4 * n + 2 * r + 1] * factors[r];
                if (even && d < width) {
                    *(float2 *)(line + d) = make_float2(x, y);
                } else {
                    if (d < width) {
                        line[d] = x;
                    }
                    if (d + 1u < width) {
                        line[d + 1u] = y;
                    }
                }
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

__device__ constexpr int part_of(int width) {
    return width <= PART_MOST ? width : (width / 32 + 1) / 2 * 32;
}

#define FORWARD_EACH (KEY_WIDTH <= 128 ? 2 : 1)
#define FORWARD_SLOTS (KEY_WIDTH <= 128 ? 4 : 3)

// A block per ROWS queries, head and part of the value's width.
extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) attention_forward_mma(
    float *o, float *lse, const uchar *q, const float *q_units, const uchar *k, const uchar *v, const float *numbers,
    const uint *table, uint heads, uint heads_per_key, uint value_width, uint query_places,
    uint key_places, uint window, float scale2
) {
    constexpr int PART = part_of(VALUE_WIDTH), PARTS = (VALUE_WIDTH + PART - 1) / PART;
    // Fragments of the queries stay in registers where there is room.
    constexpr bool KEPT = KEY_WIDTH <= 128;
    uint part = blockIdx.x % PARTS, head = blockIdx.x / PARTS % heads, key_head = head / heads_per_key;
    Rows rows = rows_of(table, blockIdx.x / (PARTS * heads));
    uint lane = lane_index(), warp = warp_index();

    uint row_base = (uint)__cvta_generic_to_shared(shared);
    constexpr int EACH = FORWARD_EACH;
    Stream<KEY_WIDTH, 0, VALUE_WIDTH, 2, EACH, FORWARD_SLOTS> stream;
    stream.base = row_base + ROWS / BLOCK * WIDE_BYTES(KEY_WIDTH);
    stream.seen = any_meets<false>(rows.position, rows.count, rows.length, window);
    stream.groups = (VALUE_WIDTH - part * PART < PART ? VALUE_WIDTH - part * PART : PART) / 32u;
    // A place takes 2 * WIDTH bytes of planes.
    ulong columns = (ulong)key_head * key_places + rows.columns;
    stream.from.wide = k + columns * (2u * KEY_WIDTH);
    stream.from.wide2 = nullptr;
    stream.from.deep = v + columns * (2u * VALUE_WIDTH) + part * PART / 32u * DEEP_BYTES;
    stream.from.numbers = numbers + columns * 2u;
    stream.begin(row_base, q + ((ulong)head * query_places + rows.place) * (2u * KEY_WIDTH), nullptr, rows.count, warp, lane);

    // The warp's rows, and this thread's two.
    uint first = 16u * warp;
    uint count = rows.count > first ? (rows.count - first < 16u ? rows.count - first : 16u) : 0u;
    uint start = rows.position + first;
    Extent met = {0u, 0u};
    if (count > 0u) {
        met = any_meets<false>(start, count, rows.length, window);
    }
    float scales[2], m[2], l[2];
    Extent mine[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint row = lane / 4u + 8u * r;
        mine[r].start = 0u;
        mine[r].end = 0u;
        scales[r] = 0.0f;
        if (row < count) {
            mine[r] = meets<false>(start + row, rows.length, window);
            scales[r] = q_units[number_at((ulong)head * query_places + rows.place + first + row, 0u, 4u)] * scale2;
        }
        m[r] = as_f32(0xff800000u);
        l[r] = 0.0f;
    }
    float acc[PART / 2];
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
        acc[i] = 0.0f;
    }

    uint left_address = row_base + warp_rows<KEY_WIDTH>(warp) + left_lane<KEY_WIDTH>(lane);
    uint kept_high[KEPT ? KEY_WIDTH / 32 : 1][4], kept_low[KEPT ? KEY_WIDTH / 32 : 1][4];
    if constexpr (KEPT) {
#pragma unroll
        for (int k = 0; k < KEY_WIDTH / 32; k++) {
            load_left<KEY_WIDTH>(kept_high[k], kept_low[k], left_address, k);
        }
    }

    for (uint tile = stream.first_tile(); tile < stream.seen.end; tile += TILE) {
        uint first_step = stream.first_step(tile), end_step = stream.end_step(tile);
        bool sees = overlap(met, tile, tile + TILE);
        float z[64];
        // Blocks of which all is visible to all rows; of the others, which numbers are, 16 bits per block.
        uint whole = 0u, visible[BLOCKS / 2] = {0u, 0u};
#pragma unroll
        for (int step = 0; step < BLOCKS / EACH; step++) {
            if (first_step <= step && step < end_step) {
                uint slot = stream.next(warp, lane);
#pragma unroll
                for (int n = 0; n < EACH; n++) {
                    int b = step * EACH + n;
                    uint column = tile + b * BLOCK;
                    int high[16], cross[16];
                    uint columns = slot + n * WIDE_BYTES(KEY_WIDTH) + column_lane<KEY_WIDTH>(lane);
                    if constexpr (KEPT) {
                        no_products<KEY_WIDTH>(high, cross);
#pragma unroll
                        for (int k = 0; k < KEY_WIDTH / 32; k++) {
                            add_step(high, cross, kept_high[k], kept_low[k], step_at<KEY_WIDTH>(columns, k), KEY_WIDTH,
                                     BLOCK * KEY_WIDTH);
                        }
                    } else {
                        int alone_high[1][16], alone_cross[1][16];
                        over_width<KEY_WIDTH>(alone_high, alone_cross, left_address, columns);
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            high[i] = alone_high[0][i];
                            cross[i] = alone_cross[0][i];
                        }
                    }
                    float units[8];
                    stream.numbers(units, 0u, tile, b, lane);
#pragma unroll
                    for (int i = 0; i < 16; i++) {
                        float unit = units[i / 4 * 2 + i % 2];
                        z[16 * b + i] = chunk_of<KEY_WIDTH>(high[i], cross[i]) * (scales[i / 2 % 2] * unit);
                    }
                    if (column + BLOCK <= start + 1u && start + 15u - column < window && count == 16u) {
                        whole |= 1u << b;
                    } else {
                        uint bits = 0u;
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            uint at = column + 4u * (i / 4 * 2 + i % 2) + lane % 4u;
                            Extent extent = mine[i / 2 % 2];
                            bool here = extent.start <= at && at < extent.end;
                            z[16 * b + i] = here ? z[16 * b + i] : as_f32(0xff800000u);
                            bits |= here ? 1u << i : 0u;
                        }
                        visible[b / 2] |= bits << (16 * (b % 2));
                    }
                }
            } else {
#pragma unroll
                for (int i = 0; i < 16 * EACH; i++) {
                    z[16 * EACH * step + i] = as_f32(0xff800000u);
                }
            }
        }

        Weights weights;
        float decays[2];
        bool active[2] = {false, false};
        if (sees) {
            float most[2], base[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                active[r] = overlap(mine[r], tile, tile + TILE);
                most[r] = m[r];
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    most[r] = larger_or_nan(most[r], z[i / 2 * 4 + 2 * r + i % 2]);
                }
                most[r] = most_of_quad(most[r]);
                base[r] = active[r] ? most[r] : 0.0f;
                // Where the maximum is not finite some probability is NaN, and so is everything from here on.
                float decay = isobit_exp2(m[r] - most[r]);
                decays[r] = magnitude_bits(most[r]) < F32_INFINITY ? decay : as_f32(CANONICAL_NAN);
            }
            float lanes[2][8], largest[2] = {0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < 16; i++) {
                lanes[i / 8][i % 8] = 0.0f;
            }
#pragma unroll
            for (int step = 0; step < BLOCKS / EACH; step++) {
                if (first_step <= step && step < end_step) {
#pragma unroll
                    for (int b = step * EACH; b < (step + 1) * EACH; b++) {
                        float units[8];
                        stream.numbers(units, 1u, tile, b, lane);
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            int r = i / 2 % 2, c = i / 4 * 2 + i % 2;
                            float p = exp2_down(z[16 * b + i] - base[r]);
                            lanes[r][c] = lanes[r][c] + p;
                            z[16 * b + i] = p * units[c];
                        }
                        if ((whole >> b & 1u) == 0u) {
                            uint bits = visible[b / 2] >> (16 * (b % 2));
#pragma unroll
                            for (int i = 0; i < 16; i++) {
                                z[16 * b + i] = bits >> i & 1u ? z[16 * b + i] : 0.0f;
                            }
                        }
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            largest[i / 2 % 2] = larger_or_nan(largest[i / 2 % 2], z[16 * b + i]);
                        }
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < 16 * EACH; i++) {
                        z[16 * EACH * step + i] = 0.0f;
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
#pragma unroll
                for (int h = 4; h > 0; h /= 2) {
#pragma unroll
                    for (int c = 0; c < h; c++) {
                        lanes[r][c] = lanes[r][c] + lanes[r][c + h];
                    }
                }
                float sum = lanes[r][0] + from_lane(lanes[r][0], 2);
                sum = sum + from_lane(sum, 1);
                if (active[r]) {
                    l[r] = fma_rn(l[r], decays[r], sum);
                    m[r] = most[r];
                }
            }
            weights.slice(z, largest, lane);
        }

#pragma unroll
        for (int pair = 0; pair < PART / 32; pair += 2) {
            if (pair < stream.groups) {
                uint slot = stream.next(warp, lane);
                if (sees) {
#pragma unroll
                    for (int g = pair; g < pair + 2 && g < PART / 32; g++) {
                        int high[16], cross[16];
                        weights.over_tile(high, cross, slot + (g - pair) * DEEP_BYTES + deep_lane(lane));
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            int r = i / 2 % 2;
                            if (active[r]) {
                                acc[16 * g + i] = fma_rn(chunk_of<TILE>(high[i], cross[i]), weights.units[r], acc[16 * g + i] * decays[r]);
                            }
                        }
                    }
                }
            }
        }
    }

    float inverse[2] = {div_rn(1.0f, l[0]), div_rn(1.0f, l[1])};
    uint row = first + lane / 4u;
    store<PART>(o, acc, inverse, rows, row, head, heads, value_width, part * PART, lane);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (part == 0u && lane % 4u == 0u && row + 8u * r < rows.count) {
            lse[(ulong)(rows.source + row + 8u * r) * heads + head] = m[r] + isobit_ln(l[r]) * LOG2_E;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

enum Kind { QUERY, KEY, VALUE };

#define QUERY_EACH (ROOMY && KEY_WIDTH + VALUE_WIDTH <= 256 ? 2 : 1)
#define QUERY_SLOTS (!ROOMY && KEY_WIDTH + VALUE_WIDTH <= 256 ? 3 : 2)

// What the three kernels take: rows and columns by width for the scores (1) and for the gradient of the weights (2, not
// for VALUE), columns by place, and numbers per place: units of q and dO, lse and D, or units of k and v. `result_width`
// is that of the result as stored.
struct Gradient {
    float *result;
    const uchar *rows, *rows2, *columns, *columns2, *deep;
    const float *row_numbers, *column_numbers;
    const uint *table;
    uint heads, row_heads_per, column_heads_per, result_width, places, window;
    float scale, scale2;
};

// QUERY: rows are queries, columns keys. KEY and VALUE: rows are keys, columns the queries of one query head.
template <Kind KIND> FUNCTION void gradient(const Gradient &p) {
    constexpr bool TURNED = KIND != QUERY;
    constexpr int W1 = KEY_WIDTH, W2 = KIND == VALUE ? 0 : VALUE_WIDTH;
    constexpr int WIDTH = KIND == VALUE ? VALUE_WIDTH : KEY_WIDTH;
    constexpr int PART = part_of(WIDTH), PARTS = (WIDTH + PART - 1) / PART;
    constexpr int NUMBERS = TURNED ? 4 : 2, ROW_NUMBERS = TURNED ? 2 : 4;
    constexpr int EACH = KIND == VALUE ? FORWARD_EACH : QUERY_EACH;
    constexpr int SLOTS = KIND == VALUE ? FORWARD_SLOTS : QUERY_SLOTS;
    uint part = blockIdx.x % PARTS, head = blockIdx.x / PARTS % p.heads;
    uint row_head = head / p.row_heads_per, column_head = head / p.column_heads_per;
    Rows rows = rows_of(p.table, blockIdx.x / (PARTS * p.heads));
    uint lane = lane_index(), warp = warp_index();

    uint row_base = (uint)__cvta_generic_to_shared(shared), row_base2 = row_base + ROWS / BLOCK * WIDE_BYTES(W1);
    Stream<W1, W2, WIDTH, NUMBERS, EACH, SLOTS> stream;
    stream.base = row_base2 + ROWS / BLOCK * WIDE_BYTES(W2);
    stream.seen = any_meets<TURNED>(rows.position, rows.count, rows.length, p.window);
    stream.groups = (WIDTH - part * PART < PART ? WIDTH - part * PART : PART) / 32u;
    ulong columns = (ulong)column_head * p.places + rows.columns, row_place = (ulong)row_head * p.places + rows.place;
    stream.from.wide = p.columns + columns * (2u * W1);
    stream.from.wide2 = p.columns2 + columns * (2u * W2);
    stream.from.deep = p.deep + columns * (2u * WIDTH) + part * PART / 32u * DEEP_BYTES;
    stream.from.numbers = p.column_numbers + columns * NUMBERS;
    stream.begin(row_base, p.rows + row_place * (2u * W1), p.rows2 + row_place * (2u * W2), rows.count, warp, lane);

    uint first = 16u * warp;
    uint count = rows.count > first ? (rows.count - first < 16u ? rows.count - first : 16u) : 0u;
    uint start = rows.position + first;
    Extent met = {0u, 0u};
    if (count > 0u) {
        met = any_meets<TURNED>(start, count, rows.length, p.window);
    }
    float units[2], units2[2], lse[2], delta[2];
    Extent mine[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint row = lane / 4u + 8u * r;
        mine[r].start = 0u;
        mine[r].end = 0u;
        units[r] = units2[r] = lse[r] = delta[r] = 0.0f;
        if (row < count) {
            mine[r] = meets<TURNED>(start + row, rows.length, p.window);
            const float *own = p.row_numbers + number_at(row_place + first + row, 0u, ROW_NUMBERS);
            units[r] = TURNED ? own[0] : own[0] * p.scale2;
            units2[r] = own[BLOCK];
            if (!TURNED) {
                lse[r] = own[2u * BLOCK];
                delta[r] = own[3u * BLOCK];
            }
        }
    }
    float acc[PART / 2];
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
        acc[i] = 0.0f;
    }
    uint left_address = row_base + warp_rows<W1>(warp) + left_lane<W1>(lane);
    uint left_address2 = row_base2 + warp_rows<W2>(warp) + left_lane<W2>(lane);

    for (uint tile = stream.first_tile(); tile < stream.seen.end; tile += TILE) {
        uint first_step = stream.first_step(tile), end_step = stream.end_step(tile);
        bool sees = overlap(met, tile, tile + TILE);
        float w[64], largest[2] = {0.0f, 0.0f};
#pragma unroll
        for (int step = 0; step < BLOCKS / EACH; step++) {
            if (first_step <= step && step < end_step) {
                uint slot = stream.next(warp, lane);
                int high[EACH][16], cross[EACH][16];
                float prob[EACH][16];
                over_width<W1>(high, cross, left_address, slot + column_lane<W1>(lane));
#pragma unroll
                for (int n = 0; n < EACH; n++) {
                    float near[8], shifts[8];
                    stream.numbers(near, 0u, tile, step * EACH + n, lane);
                    if (TURNED) {
                        stream.numbers(shifts, 2u, tile, step * EACH + n, lane);
                    }
#pragma unroll
                    for (int i = 0; i < 16; i++) {
                        int r = i / 2 % 2, c = i / 4 * 2 + i % 2;
                        float scales = TURNED ? (near[c] * p.scale2) * units[r] : units[r] * near[c];
                        float z = chunk_of<W1>(high[n][i], cross[n][i]) * scales;
                        prob[n][i] = exp2_of(z - (TURNED ? shifts[c] : lse[r]));
                    }
                }
                if constexpr (W2 > 0) {
                    over_width<W2>(high, cross, left_address2, slot + EACH * WIDE_BYTES(W1) + column_lane<W2>(lane));
                }
#pragma unroll
                for (int n = 0; n < EACH; n++) {
                    int b = step * EACH + n;
                    uint column = tile + b * BLOCK;
                    float near[8], far[8], deltas[8];
                    stream.numbers(far, 1u, tile, b, lane);
                    if constexpr (KIND == VALUE) {
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            w[16 * b + i] = prob[n][i] * far[i / 4 * 2 + i % 2];
                        }
                    } else {
                        stream.numbers(near, 0u, tile, b, lane);
                        if (TURNED) {
                            stream.numbers(deltas, 3u, tile, b, lane);
                        }
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            int r = i / 2 % 2, c = i / 4 * 2 + i % 2;
                            float grad = fma_rn(
                                chunk_of<W2>(high[n][i], cross[n][i]), units2[r] * far[c], TURNED ? -deltas[c] : -delta[r]
                            );
                            w[16 * b + i] = (prob[n][i] * grad) * (near[c] * p.scale);
                        }
                    }
                    // All of the block is met by all rows, or some of it by some.
                    bool whole = TURNED ? start + 15u <= column && column + 31u - start < p.window &&
                                              column + BLOCK <= rows.length && count == 16u
                                        : column + BLOCK <= start + 1u && start + 15u - column < p.window && count == 16u;
                    if (!whole) {
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            uint at = column + 4u * (i / 4 * 2 + i % 2) + lane % 4u;
                            Extent extent = mine[i / 2 % 2];
                            bool visible = extent.start <= at && at < extent.end;
                            w[16 * b + i] = visible ? w[16 * b + i] : 0.0f;
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 16; i++) {
                        int r = i / 2 % 2;
                        largest[r] = larger_or_nan(largest[r], magnitude(w[16 * b + i]));
                    }
                }
            } else {
#pragma unroll
                for (int i = 0; i < 16 * EACH; i++) {
                    w[16 * EACH * step + i] = 0.0f;
                }
            }
        }

        Weights weights;
        bool active[2];
        if (sees) {
            weights.slice(w, largest, lane);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            active[r] = overlap(mine[r], tile, tile + TILE);
        }
#pragma unroll
        for (int pair = 0; pair < PART / 32; pair += 2) {
            if (pair < stream.groups) {
                uint slot = stream.next(warp, lane);
                if (sees) {
#pragma unroll
                    for (int g = pair; g < pair + 2 && g < PART / 32; g++) {
                        int high[16], cross[16];
                        weights.over_tile(high, cross, slot + (g - pair) * DEEP_BYTES + deep_lane(lane));
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            int r = i / 2 % 2;
                            if (active[r]) {
                                acc[16 * g + i] = fma_rn(chunk_of<TILE>(high[i], cross[i]), weights.units[r], acc[16 * g + i]);
                            }
                        }
                    }
                }
            }
        }
    }
    // Times 1 changes no bit.
    float one[2] = {1.0f, 1.0f};
    store<PART>(p.result, acc, one, rows, first + lane / 4u, head, p.heads, p.result_width, part * PART, lane);
}

// A block per ROWS queries, head and part of the key's width.
extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) attention_grad_query_mma(
    float *dq, const uchar *q, const uchar *d_o, const float *query_numbers, const uchar *k, const uchar *k_by_place,
    const uchar *v, const float *key_numbers, const uint *table, uint heads, uint heads_per_key, uint key_width,
    uint places, uint window, float scale, float scale2
) {
    Gradient p = {dq, q, d_o, k, v, k_by_place, query_numbers, key_numbers, table,
                  heads, 1u, heads_per_key, key_width, places, window, scale, scale2};
    gradient<QUERY>(p);
}

// A block per ROWS keys, query head and part of the width: the head's share of the gradient of its key head.
extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) attention_grad_key_mma(
    float *dk, const uchar *q, const uchar *q_by_place, const uchar *d_o, const float *query_numbers, const uchar *k,
    const uchar *v, const float *key_numbers, const uint *table, uint heads, uint heads_per_key, uint key_width,
    uint places, uint window, float scale, float scale2
) {
    Gradient p = {dk, k, v, q, d_o, q_by_place, key_numbers, query_numbers, table,
                  heads, heads_per_key, 1u, key_width, places, window, scale, scale2};
    gradient<KEY>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) attention_grad_value_mma(
    float *dv, const uchar *q, const uchar *d_o_by_place, const float *query_numbers, const uchar *k,
    const float *key_numbers, const uint *table, uint heads, uint heads_per_key, uint value_width, uint places,
    uint window, float scale, float scale2
) {
    Gradient p = {dv, k, nullptr, q, nullptr, d_o_by_place, key_numbers, query_numbers, table,
                  heads, heads_per_key, 1u, value_width, places, window, scale, scale2};
    gradient<VALUE>(p);
}

// A group per block of places and key head: the shares of its query heads added in ascending order. `blocks` and
// `share_blocks` hold first row and number of rows of every block, in the gradient and in the shares.
KERNEL(GROUP) attention_add_heads(
    float *to, const float *shares, const uint *blocks, const uint *share_blocks, uint key_heads, uint heads_per_key, uint width
) {
    uint key_head = blockIdx.x % key_heads, block = blockIdx.x / key_heads;
    ulong first = blocks[2u * block], share = share_blocks[2u * block];
    uint count = blocks[2u * block + 1u];
    ulong step = (ulong)key_heads * heads_per_key * width;
    shares += share * step + (ulong)key_head * heads_per_key * width;
    to += (first * key_heads + key_head) * width;
    if (width % 4u == 0u) {
        uint pieces = width / 4u;
#pragma unroll 4
        for (uint i = threadIdx.x; i < count * pieces; i += GROUP) {
            uint row = i / pieces, d = i % pieces * 4u;
            const float *from = shares + row * step + d;
            float4 sum = *(const float4 *)from;
#pragma unroll 4
            for (uint n = 1u; n < heads_per_key; n++) {
                float4 other = *(const float4 *)(from + n * width);
                sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
            }
            *(float4 *)(to + (ulong)row * key_heads * width + d) = sum;
        }
        return;
    }
    for (uint i = threadIdx.x; i < count * width; i += GROUP) {
        uint row = i / width, d = i % width;
        const float *from = shares + row * step + d;
        float sum = from[0];
        for (uint n = 1u; n < heads_per_key; n++) {
            sum = sum + from[n * width];
        }
        to[(ulong)row * key_heads * width + d] = sum;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Slices. WIDTH_MOST bounds the widths of all heads.

#define WIDTH_MOST (KEY_WIDTH > VALUE_WIDTH ? KEY_WIDTH : VALUE_WIDTH)

// A group per block of places and head: planes by width and by place (null: not wanted) of rows [row, head, width], and
// their units, number `n_units` of `count_units` per place. `padded` is the width of the planes.
KERNEL(GROUP) attention_slice_mma(
    float *numbers, uint n_units, uint count_units, uint *by_width, uint *by_place, const float *x, const uint *blocks,
    uint heads, uint width, uint padded, uint places
) {
    constexpr uint STEPS = (WIDTH_MOST + 127) / 128, WORDS = WIDTH_MOST / 4 + 1;
    __shared__ uint rows[2][BLOCK][WORDS];
    uint head = blockIdx.x % heads, block = blockIdx.x / heads;
    uint count = blocks[2u * block + 1u], lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
    ulong line = (ulong)heads * width;
    const float *from = x + blocks[2u * block] * line + (ulong)head * width;
    // Words of both slices.
    ulong plane = ((ulong)head * places + block * BLOCK) * (padded / 2u);
    bool whole = width % 4u == 0u && (ulong)from % 16u == 0u;

    for (uint row = warp; row < BLOCK; row += GROUP / 32u) {
        float value[STEPS][4];
        uint bits = 0u;
#pragma unroll
        for (uint s = 0u; s < STEPS; s++) {
            uint d = 128u * s + 4u * lane;
            float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row < count && whole && d < width) {
                four = *(const float4 *)(from + row * line + d);
            }
            value[s][0] = four.x;
            value[s][1] = four.y;
            value[s][2] = four.z;
            value[s][3] = four.w;
#pragma unroll
            for (uint n = 0u; n < 4u; n++) {
                if (!whole && row < count && d + n < width) {
                    value[s][n] = from[row * line + d + n];
                }
                uint here = magnitude_bits(value[s][n]);
                bits = here > bits ? here : bits;
            }
        }
#pragma unroll
        for (uint other = 16u; other > 0u; other /= 2u) {
            uint there = from_lane(bits, other);
            bits = there > bits ? there : bits;
        }
        float multiplier = scale_multiplier(bits);
        if (lane == 0u) {
            numbers[number_at((ulong)head * places + block * BLOCK + row, n_units, count_units)] = scale_unit(bits);
        }
#pragma unroll
        for (uint s = 0u; s < STEPS; s++) {
            uint word = 32u * s + lane;
            if (word < padded / 4u) {
                uint high, low;
                slice4(high, low, value[s][0], value[s][1], value[s][2], value[s][3], multiplier);
                // An infinite or NaN element has the multiplier zero; 0 times it is NaN, whose bits are no integer.
                high = multiplier == 0.0f ? 0u : high;
                low = multiplier == 0.0f ? 0u : low;
                rows[0][row][word] = high;
                rows[1][row][word] = low;
                if (by_width) {
                    uint at = row * (padded / 4u) + ((word / 4u ^ turn_of(padded, row)) * 4u | word % 4u);
                    by_width[plane + at] = high;
                    by_width[plane + BLOCK * (padded / 4u) + at] = low;
                }
            }
        }
    }
    if (!by_place) {
        return;
    }
    __syncthreads();
    // Four rows by four columns of bytes are turned: word t of half h of column d has the rows 16 h + 4 i + t.
    for (uint i = threadIdx.x; i < 2u * padded * 2u; i += GROUP) {
        uint slice = i / (padded * 2u), word = i % 8u, column = i / 8u % (padded / 4u);
        uint row = word / 4u * 16u + word % 4u;
        uint a = rows[slice][row][column], b = rows[slice][row + 4u][column];
        uint c = rows[slice][row + 8u][column], d = rows[slice][row + 12u][column];
        uint ab = __byte_perm(a, b, 0x5140), ab2 = __byte_perm(a, b, 0x7362);
        uint cd = __byte_perm(c, d, 0x5140), cd2 = __byte_perm(c, d, 0x7362);
        // The same turn for the four columns.
        uint at = (word / 4u ^ turn_of(BLOCK, 4u * column)) * 4u | word % 4u;
        uint *to = by_place + plane + ((column / 8u * 2u + slice) * BLOCK + column % 8u * 4u) * 8u + at;
        to[0] = __byte_perm(ab, cd, 0x5410);
        to[8] = __byte_perm(ab, cd, 0x7632);
        to[16] = __byte_perm(ab2, cd2, 0x5410);
        to[24] = __byte_perm(ab2, cd2, 0x7632);
    }
}

// A group per block of places and head, a warp per row: lse and D over places.
KERNEL(GROUP) attention_delta_mma(
    float *numbers, const float *d_o, const float *o, const float *lse, const uint *blocks, uint heads,
    uint width, uint places
) {
    uint head = blockIdx.x % heads, block = blockIdx.x / heads;
    uint first = blocks[2u * block], count = blocks[2u * block + 1u], lane = threadIdx.x % 32u;
    for (uint row = threadIdx.x / 32u; row < BLOCK; row += GROUP / 32u) {
        ulong at = (ulong)(first + row) * heads + head;
        float sum = 0.0f;
        for (uint d = lane; d < width && row < count; d += 32u) {
            sum = fma_rn(d_o[at * width + d], o[at * width + d], sum);
        }
#pragma unroll
        for (uint h = 16u; h > 0u; h /= 2u) {
            sum = sum + __shfl_down_sync(0xffffffffu, sum, h);
        }
        if (lane == 0u) {
            float *to = numbers + number_at((ulong)head * places + block * BLOCK + row, 2u, 4u);
            to[0] = row < count ? lse[at] : 0.0f;
            to[BLOCK] = sum;
        }
    }
}
