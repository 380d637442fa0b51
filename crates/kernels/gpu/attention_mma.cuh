// Attention on the int8 tensor cores of NVIDIA devices from sm_80 on, profile x2 (docs/numerics.md,
// "Attention"): what the programs attention_forward.cu, attention_backward.cu and
// attention_slices.cu share.
//
// KEY_WIDTH and VALUE_WIDTH are the widths of the heads rounded up to 32; planes are padded with
// integers that are zero. A warp owns 16 rows (queries, or keys) and passes over tiles of 128
// columns (keys, or queries). Scores of a tile, 32 columns at a time, become weights in the same
// registers, and their slices are the left operand of the product over the tile. Columns stream
// through a ring of slots in shared memory that all warps of a block share.
//
// Positions lie at *places*: all spans one after another, each padded to blocks of 32. In a block,
// thread t of a quad has the columns 4 i + t, i < 8: those of its lanes of a lane sum. Numbers per
// place are stored in that order, 8 t + i, and so are the bytes of planes that are contracted over
// places: four bytes are i = 0..3 or 4..7 of one t.
//
// Planes lie in memory as they will in shared memory, where eight rows of 16 bytes are read at once
// and should lie in different banks: 16-byte pieces of a row change places with their neighbours,
// `swizzle` says how. By width [head, block, slice, place, width]; by place [head, block, width /
// 32, slice, width % 32, place].

#define TILE 128u
#define BLOCK 32u
#define BLOCKS 4
#define WARPS 4
#define THREADS (32u * WARPS)
#define ROWS (16u * WARPS)
// Columns of results that a block of threads keeps: wider heads are split.
#define PART_MAX 128
// Tiles whose numbers per column are kept: as many as the ring may run ahead, rounded up.
#define AHEAD 4u

#define MEMBER __device__ __forceinline__
// Whether copies are made by the copy engine, and whether shared memory is large.
#ifndef BULK
#define BULK (__CUDA_ARCH__ >= 900)
#endif
#define ROOMY (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)

extern __shared__ __align__(1024) uchar shared[];

// ---------------------------------------------------------------------------------------------------------------------
// Copies

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

// By all threads.
FUNCTION void copy_all(uint to, const uchar *from, uint bytes) {
    for (uint i = 16u * threadIdx.x; i < bytes; i += 16u * THREADS) {
        copy_16(to + i, from + i);
    }
}

#endif

// The same for all of a warp, and the compiler is told so.
FUNCTION uint warp_index(void) {
    return __shfl_sync(0xffffffffu, threadIdx.x / 32u, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic

#define START 12582912.0f
#define START_BITS 0x4b400000

// Whether converting an integer is as fast as adding two floats: otherwise sums below 2^22 start
// from the bits of the float START, so that their bits are those of START + sum.
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

#define EXP2_MIN -151.0f

// isobit_exp2 of numbers up to 100 (a score less the row's maximum or logarithm is at most about
// 0): below the limit the result is zero, and one power of two that keeps the number normal takes
// the place of two halves.
FUNCTION float exp2_of(float x) {
    const float shift = START + 154.0f;
    float c = larger_or_nan(x, EXP2_MIN);
    float shifted = c + shift;
    float p = exp2_polynomial(c - (shifted - shift));
    return (p * as_f32(as_u32(shifted) << 23)) * as_f32((127u - 27u) << 23);
}

// The same of numbers that are no NaN and not above zero: the power of two is added to the
// exponent.
FUNCTION float exp2_down(float x) {
    const float shift = START + 28.0f;
    float c = x > EXP2_MIN ? x : EXP2_MIN;
    float shifted = c + shift;
    float p = exp2_polynomial(c - (shifted - shift));
    return as_f32(as_u32(p) + (as_u32(shifted) << 23)) * as_f32((127u - 28u) << 23);
}

// Slices of four weights times a multiplier, as the bytes of two words. START + 128 leaves q + 128
// in the low bits: its second byte is the high slice, its first the low one with the highest bit
// flipped.
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

// Columns that the row at a position meets: keys that a query sees, or (TRANSPOSED) queries that
// see a key.
template <bool TRANSPOSED> FUNCTION Extent meets(uint position, uint length, uint window) {
    Extent columns;
    if (TRANSPOSED) {
        columns.start = position;
        columns.end = length - position > window ? position + window : length;
    } else {
        columns.end = position + 1u;
        columns.start = columns.end > window ? columns.end - window : 0u;
    }
    return columns;
}

// What any of some rows meets; `count` is not zero.
template <bool TRANSPOSED> FUNCTION Extent any_meets(uint position, uint count, uint length, uint window) {
    Extent first = meets<TRANSPOSED>(position, length, window), last = meets<TRANSPOSED>(position + count - 1u, length, window);
    Extent all = {first.start, last.end};
    return all;
}

FUNCTION bool overlap(Extent a, uint start, uint end) {
    return a.start < end && start < a.end;
}

// The rows of a warp: from row `first` of the block's, at position `start`. What any of them meets,
// and what this thread's two do, rows lane / 4 and lane / 4 + 8.
template <bool TRANSPOSED> struct WarpRows {
    uint first, count, start, length, window;
    Extent met, mine[2];

    MEMBER WarpRows(const Rows &rows, uint window, uint warp, uint lane)
        : first(16u * warp), count(0u), start(rows.position + first), length(rows.length), window(window), met{0u, 0u} {
        if (rows.count > first) {
            count = rows.count - first < 16u ? rows.count - first : 16u;
            met = any_meets<TRANSPOSED>(start, count, length, window);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            mine[r] = {0u, 0u};
            if (has(r, lane)) {
                mine[r] = meets<TRANSPOSED>(start + lane / 4u + 8u * r, length, window);
            }
        }
    }

    MEMBER bool has(int r, uint lane) const {
        return lane / 4u + 8u * r < count;
    }

    // Whether all rows meet all of a block of columns.
    MEMBER bool whole(uint column) const {
        bool met = TRANSPOSED ? start + 15u <= column && column + BLOCK - 1u - start < window && column + BLOCK <= length
                          : column + BLOCK <= start + 1u && start + 15u - column < window;
        return met && count == 16u;
    }

    // Whether the row of number i of a block meets its column.
    MEMBER bool meets_number(int i, uint column, uint lane) const {
        uint at = column + 4u * (i / 4 * 2 + i % 2) + lane % 4u;
        return mine[i / 2 % 2].start <= at && at < mine[i / 2 % 2].end;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The stream of columns

// Planes of one head from the span's first block on, and its numbers per place, [block, NUMBERS,
// 32].
struct Source {
    const uchar *wide, *wide2, *deep;
    const float *numbers;
};

// Bytes of a block of places by width, and of the part of it that makes 32 columns of a result.
#define WIDE_BYTES(width) (2u * BLOCK * (width))
#define DEEP_BYTES (2u * BLOCK * BLOCK)

// For every tile with a visible column: its columns, EACH blocks of 32 at a time, then the result's
// columns, 64 at a time. W2 may be 0.
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
    // What is copied next, into which slot, by which warp; the slot that is read, and the parity of
    // its barrier.
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
    // Whether a step of a tile holds a column that is seen.
    MEMBER bool has(uint tile, uint step) const {
        return first_step(tile) <= step && step < end_step(tile);
    }
    MEMBER uint numbers_at(uint tile, uint block) const {
        return base + SLOTS * SLOT_BYTES + (tile / TILE % AHEAD * BLOCKS + block) * NUMBER_BYTES;
    }

    // Starts the copies of the next step, if there is one: a thread of one warp after the other for
    // all, or every thread its part. Blocks that lie beyond the span are not copied: what a slot
    // holds there is masked or multiplied by zero.
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

    // Starts the ring, after copies of the rows: `count` rows from `rows` on, blocks of WIDE_BYTES.
    // Waits for the rows.
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

    // The slot of the step that is next, filled. The one before it is free for what comes SLOTS - 1
    // steps later.
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
            load_floats(to + 4 * half, address + 16u * half);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Products. Number 4 n + 2 r + e of a thread is column 8 n + 2 t + e of row lane / 4 + 8 r.

// Piece number `piece` of row `row` lies where piece ^ swizzle<WIDTH>(row) would: pieces of eight
// rows that differ in nothing but the row are in different banks.
template <uint WIDTH> FUNCTION uint swizzle(uint row) {
    return WIDTH % 128u == 0u ? row % 8u : WIDTH % 64u == 0u ? row / 2u % 4u : row / 4u % 2u;
}
// The same for widths known at run time.
FUNCTION uint swizzle_of(uint width, uint row) {
    return width % 128u == 0u ? row % 8u : width % 64u == 0u ? row / 2u % 4u : row / 4u % 2u;
}

// Address of piece 2 k + n of a row, from that of piece n: what the swizzle does not reach is
// added.
template <uint WIDTH> FUNCTION uint step_at(uint address, uint k) {
    return WIDTH % 128u == 0u ? (address ^ (k % 4u * 32u)) + k / 4u * 128u
           : WIDTH % 64u == 0u ? (address ^ (k % 2u * 32u)) + k / 2u * 64u
                               : address + 32u * k;
}

// Where a lane's row of matrices starts: of the left operand; of 16 columns in the order of the
// lanes; of 16 columns.
template <uint WIDTH> FUNCTION uint left_lane(uint lane) {
    return lane % 16u * WIDTH + (lane / 16u ^ swizzle<WIDTH>(lane % 16u)) * 16u;
}
template <uint WIDTH> FUNCTION uint column_lane(uint lane) {
    uint row = lane / 16u * 8u + lane % 2u * 4u + lane / 2u % 4u;
    return row * WIDTH + (lane / 8u % 2u ^ swizzle<WIDTH>(row)) * 16u;
}
FUNCTION uint deep_lane(uint lane) {
    uint row = lane / 16u * 8u + lane % 8u;
    return row * BLOCK + (lane / 8u % 2u ^ swizzle<BLOCK>(row)) * 16u;
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

// One step of 32 of a contraction, for 32 columns whose high and low slices lie at `columns` and
// `columns + low`.
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
            multiply_bytes(high + 8 * pair + 4 * n, left_high, right_high[2 * n], right_high[2 * n + 1]);
            multiply_bytes(cross + 8 * pair + 4 * n, left_high, right_low[2 * n], right_low[2 * n + 1]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            multiply_bytes(cross + 8 * pair + 4 * n, left_low, right_high[2 * n], right_high[2 * n + 1]);
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

// Products over the width of the warp's rows with EACH blocks of 32 columns. Both addresses are the
// lane's.
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
    float scales[2];

    // `most`: the row's largest magnitude among this thread's columns.
    MEMBER void slice(const float (&w)[64], const float (&most)[2], uint lane) {
        float largest[2] = {most_of_quad(most[0]), most_of_quad(most[1])};
        // Of the four divisions each thread of a quad does one: thread 2 r + 1 the scale of row r,
        // thread 2 r the multiplier.
        float mine = lane % 4u < 2u ? largest[0] : largest[1];
        bool is_scale = lane % 2u != 0u;
        uint bits = magnitude_bits(mine);
        float quotient = div_rn(is_scale ? mine : SLICE_LIMIT, is_scale ? SCALE_DIVISOR : mine);
        bool none = bits < (127u - 100u) << 23, all = bits >= F32_INFINITY;
        quotient = none ? 0.0f : all ? (is_scale ? as_f32(CANONICAL_NAN) : 0.0f) : quotient;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float multiplier = __shfl_sync(0xffffffffu, quotient, 2 * r, 4);
            scales[r] = __shfl_sync(0xffffffffu, quotient, 2 * r + 1, 4);
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

// Adds what a tile gives to the results: acc = fma(product over the tile, scale, acc * decay) where
// a row meets something of the tile. `sees`: some row does. A decay of 1 is one that is left out.
template <int PART, bool DECAYS, class Columns> FUNCTION void add_tile(
    float (&acc)[PART / 2], Columns &stream, const Weights &weights, const float (&decays)[2], const bool (&active)[2],
    bool sees, uint warp, uint lane
) {
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
                        float &sum = acc[16 * g + i];
                        if (active[r]) {
                            float before = DECAYS ? sum * decays[r] : sum;
                            sum = fma_rn(chunk_of<TILE>(high[i], cross[i]), weights.scales[r], before);
                        }
                    }
                }
            }
        }
    }
}

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
// Parts of results, and rings: blocks of columns per slot, and slots

// Columns of results that a block of threads makes.
__device__ constexpr int part_of(int width) {
    return width <= PART_MAX ? width : (width / 32 + 1) / 2 * 32;
}

#define FORWARD_EACH (KEY_WIDTH <= 128 ? 2 : 1)
#define FORWARD_SLOTS (KEY_WIDTH <= 128 ? 4 : 3)
#define QUERY_EACH (ROOMY && KEY_WIDTH + VALUE_WIDTH <= 256 ? 2 : 1)
#define QUERY_SLOTS (!ROOMY && KEY_WIDTH + VALUE_WIDTH <= 256 ? 3 : 2)
