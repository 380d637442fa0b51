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
// Bytes from row to row in shared memory: an odd number of 16-byte pieces, so that eight rows lie in different banks.
#define STRIDE(width) ((width) + 16)
#define DEEP_STRIDE STRIDE(128)
// Tiles whose numbers per column are kept: as many as the ring may run ahead, rounded up.
#define AHEAD 4u
#define LOG2_E as_f32(0x3fb8aa3bu)

#define MEMBER __device__ __forceinline__

extern __shared__ __align__(16) uchar shared[];

// ---------------------------------------------------------------------------------------------------------------------
// Instructions

FUNCTION void copy16(uint to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

FUNCTION void copies_end(void) {
    asm volatile("cp.async.commit_group;");
}

template <int PENDING> FUNCTION void copies_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
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

// Sums below 2^22 start from the bits of this float, so that their bits are those of start + sum.
#define START_BITS 0x4b400000
#define START 12582912.0f

// Of sums over up to 128 products: |HH| and |X| are below 2^22. The conversions are exact, the value is rounded once.
FUNCTION float value_of(int high, int cross) {
    return fma_rn(as_f32((uint)high) - START, 256.0f, as_f32((uint)cross) - START);
}

template <int LENGTH> FUNCTION int start_of(void) {
    return LENGTH <= 128 ? START_BITS : 0;
}

template <int LENGTH> FUNCTION float chunk_of(int high, int cross) {
    return LENGTH <= 128 ? value_of(high, cross) : __int2float_rn(high * 256 + cross);
}

#define EXP2_LEAST -151.0f

// isobit_exp2 of numbers up to 100 (a score less the row's maximum or logarithm is at most about 0): below the limit the
// result is zero, and one power of two that keeps the number normal takes the place of two halves.
FUNCTION float exp2_of(float x) {
    const float shift = START + 154.0f;
    float c = larger_or_nan(x, EXP2_LEAST);
    float shifted = c + shift;
    float f = c - (shifted - shift);
    float p = as_f32(0x3920b5a9u);
    p = fma_rn(p, f, as_f32(0x3aaf8417u));
    p = fma_rn(p, f, as_f32(0x3c1d96f0u));
    p = fma_rn(p, f, as_f32(0x3d6357beu));
    p = fma_rn(p, f, as_f32(0x3e75fdeeu));
    p = fma_rn(p, f, as_f32(0x3f317218u));
    p = fma_rn(p, f, 1.0f);
    return (p * as_f32(as_u32(shifted) << 23)) * as_f32((127u - 27u) << 23);
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

// Where the number of a place lies in its block.
FUNCTION uint slot_of(uint place) {
    return (place & ~31u) | (place & 3u) << 3 | (place >> 2 & 7u);
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

// Planes of one head: by width [slice, place, WIDTH], by place [slice, block, deep width, 32].
struct Source {
    const uchar *wide, *wide2;
    ulong wide_step, wide2_step;
    const uchar *deep;
    ulong deep_step;
    uint deep_block;
    const float *numbers[4];
};

// For every tile with a visible column: its blocks of 32 columns, then groups of 32 columns of the result.
template <int W1, int W2, int NUMBERS, int SLOTS> struct Stream {
    static constexpr uint PART1 = 2u * BLOCK * STRIDE(W1);
    static constexpr uint WIDE_BYTES = PART1 + (W2 ? 2u * BLOCK * STRIDE(W2) : 0u);
    static constexpr uint DEEP_BYTES = 2u * BLOCK * DEEP_STRIDE;
    static constexpr uint SLOT_BYTES = WIDE_BYTES > DEEP_BYTES ? WIDE_BYTES : DEEP_BYTES;
    static constexpr uint NUMBER_BYTES = AHEAD * NUMBERS * TILE * 4u;
    static constexpr uint BYTES = SLOTS * SLOT_BYTES + NUMBER_BYTES;

    Source from;
    Extent seen;
    uint groups;
    // In shared memory: the slots, then the numbers per column.
    uint base;
    uint tile, step, into, out;

    MEMBER uint first_block(uint tile) const {
        return seen.start > tile ? (seen.start - tile) / BLOCK : 0u;
    }
    MEMBER uint end_block(uint tile) const {
        uint blocks = (seen.end - tile + BLOCK - 1u) / BLOCK;
        return blocks < BLOCKS ? blocks : BLOCKS;
    }
    MEMBER uint first_tile(void) const {
        return seen.start / TILE * TILE;
    }

    template <int WIDTH> MEMBER void load_wide(uint to, const uchar *plane, ulong slice_step, uint place) {
        constexpr uint pieces = BLOCK * WIDTH / 16u;
#pragma unroll
        for (uint i = threadIdx.x; i < 2u * pieces; i += THREADS) {
            uint slice = i / pieces, piece = i % pieces;
            copy16(to + slice * BLOCK * STRIDE(WIDTH) + 16u * (piece + piece / (WIDTH / 16u)),
                   plane + slice * slice_step + (ulong)place * WIDTH + 16u * piece);
        }
    }

    // Starts the copies of the next step, if there is one.
    MEMBER void load(void) {
        if (tile < seen.end) {
            uint to = base + into * SLOT_BYTES;
            if (step < BLOCKS) {
                uint place = tile + step * BLOCK;
                load_wide<W1>(to, from.wide, from.wide_step, place);
                if constexpr (W2 > 0) {
                    load_wide<W2>(to + PART1, from.wide2, from.wide2_step, place);
                }
                if (threadIdx.x < 8u * NUMBERS) {
                    uint n = threadIdx.x / 8u, piece = threadIdx.x % 8u;
                    const float *numbers = n == 0u ? from.numbers[0] : n == 1u ? from.numbers[1]
                                           : n == 2u ? from.numbers[2] : from.numbers[3];
                    uint at = ((tile / TILE % AHEAD * NUMBERS + n) * TILE + step * BLOCK) * 4u + 16u * piece;
                    copy16(base + SLOTS * SLOT_BYTES + at, numbers + place + 4u * piece);
                }
            } else {
                uint first = first_block(tile), end = end_block(tile);
                const uchar *planes = from.deep + (ulong)(tile / BLOCK) * from.deep_block + (step - BLOCKS) * BLOCK * BLOCK;
#pragma unroll
                for (uint i = threadIdx.x; i < 2u * BLOCKS * 64u; i += THREADS) {
                    uint slice = i / (BLOCKS * 64u), block = i / 64u % BLOCKS, piece = i % 64u;
                    if (first <= block && block < end) {
                        copy16(to + (slice * BLOCK + piece / 2u) * DEEP_STRIDE + block * BLOCK + 16u * (piece % 2u),
                               planes + slice * from.deep_step + block * from.deep_block + 16u * piece);
                    }
                }
            }
            step++;
            if (step == end_block(tile)) {
                step = BLOCKS;
            }
            if (step == BLOCKS + groups) {
                tile += TILE;
                step = first_block(tile);
            }
            into = into + 1u == SLOTS ? 0u : into + 1u;
        }
        copies_end();
    }

    MEMBER void begin(void) {
        tile = first_tile();
        step = first_block(tile);
        into = 0u;
        out = SLOTS - 1u;
#pragma unroll
        for (int i = 0; i < SLOTS - 1; i++) {
            load();
        }
    }

    // The slot of the step that is next, filled. The one before it is free for what comes SLOTS - 1 steps later.
    MEMBER uint next(void) {
        copies_wait<SLOTS - 2>();
        __syncthreads();
        load();
        out = out + 1u == SLOTS ? 0u : out + 1u;
        return base + out * SLOT_BYTES;
    }

    // Numbers of this thread's eight columns of a block.
    MEMBER void numbers(float (&to)[8], uint n, uint tile, uint block) const {
        uint at = ((tile / TILE % AHEAD * NUMBERS + n) * TILE + block * BLOCK + threadIdx.x % 4u * 8u) * 4u;
        uint address = base + SLOTS * SLOT_BYTES + at;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(to[4 * half]), "=f"(to[4 * half + 1]), "=f"(to[4 * half + 2]), "=f"(to[4 * half + 3])
                         : "r"(address + 16u * half)
                         : "memory");
        }
    }
};

// The rows of a block of threads, [slice, row, WIDTH], once. Rows beyond the end repeat the last.
template <int WIDTH> FUNCTION void load_rows(uint to, const uchar *plane, ulong slice_step, uint count) {
    constexpr uint pieces = ROWS * WIDTH / 16u;
    for (uint i = threadIdx.x; i < 2u * pieces; i += THREADS) {
        uint slice = i / pieces, row = i % pieces / (WIDTH / 16u), piece = i % (WIDTH / 16u);
        uint source = row < count ? row : count - 1u;
        copy16(to + (slice * ROWS + row) * STRIDE(WIDTH) + 16u * piece,
               plane + slice * slice_step + (ulong)source * WIDTH + 16u * piece);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Products. Number 4 n + 2 r + e of a thread is column 8 n + 2 t + e of row lane / 4 + 8 r.

// Where a lane's row of matrices starts: of the left operand; of 16 columns in the order of the lanes; of 16 columns.
template <int WIDTH> FUNCTION uint left_lane(uint lane) {
    return (lane % 16u) * STRIDE(WIDTH) + lane / 16u * 16u;
}
template <int WIDTH> FUNCTION uint column_lane(uint lane) {
    uint row = lane % 8u;
    return (lane / 16u * 8u + (row % 2u * 4u + row / 2u)) * STRIDE(WIDTH) + lane / 8u % 2u * 16u;
}
FUNCTION uint deep_lane(uint lane) {
    return (lane / 16u * 8u + lane % 8u) * DEEP_STRIDE + lane / 8u % 2u * 16u;
}

template <int WIDTH> FUNCTION void load_left(uint (&high)[4], uint (&low)[4], uint rows, int k) {
    load_matrices(high, rows + 32u * k);
    load_matrices(low, rows + ROWS * STRIDE(WIDTH) + 32u * k);
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

// Products over the width of the warp's rows with 32 columns. Both addresses are the lane's.
template <int WIDTH> FUNCTION void over_width(int (&high)[16], int (&cross)[16], uint rows, uint columns) {
    no_products<WIDTH>(high, cross);
#pragma unroll
    for (int k = 0; k < WIDTH / 32; k++) {
        uint left_high[4], left_low[4];
        load_left<WIDTH>(left_high, left_low, rows, k);
        add_step(high, cross, left_high, left_low, columns + 32u * k, STRIDE(WIDTH), BLOCK * STRIDE(WIDTH));
    }
}

// A tile's weights as left operands of the product over the tile.
struct Weights {
    uint high[BLOCKS][4], low[BLOCKS][4];
    float units[2];

    // `most`: the row's largest magnitude among this thread's columns.
    MEMBER void slice(const float (&w)[64], const float (&most)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint bits = magnitude_bits(most_of_quad(most[r]));
            float multiplier = scale_multiplier(bits);
            units[r] = scale_unit(bits);
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

    // Products over the blocks of the tile that the warp meets, with 32 columns at `columns`, the lane's address.
    MEMBER void over_tile(int (&sums)[16], int (&cross)[16], uint columns, Extent met, uint tile) const {
        no_products<128>(sums, cross);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if (overlap(met, tile + b * BLOCK, tile + (b + 1) * BLOCK)) {
                add_step(sums, cross, high[b], low[b], columns + b * BLOCK, DEEP_STRIDE, BLOCK * DEEP_STRIDE);
            }
        }
    }
};

// Results of the warp's rows: PART columns from `first` of rows [row, head, width].
template <int PART> FUNCTION void store(
    float *to, const float (&acc)[PART / 2], const float (&factors)[2], Rows rows, uint row, uint head, uint heads,
    uint width, uint first
) {
    bool even = width % 2u == 0u;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + 8u * r < rows.count) {
            float *line = to + ((ulong)(rows.source + row + 8u * r) * heads + head) * width;
#pragma unroll
            for (int n = 0; n < PART / 8; n++) {
                uint d = first + 8u * n + threadIdx.x % 4u * 2u;
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

#define FORWARD_SLOTS (KEY_WIDTH <= 128 ? 4 : 3)

// A block per ROWS queries, head and part of the value's width.
extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) attention_forward_mma(
    float *o, float *lse, const uchar *q, const float *q_units, const uchar *k, const float *k_units, const uchar *v,
    const float *v_units, const uint *table, uint heads, uint heads_per_key, uint value_width, uint query_places,
    uint key_places, uint window, float scale2
) {
    constexpr int PART = part_of(VALUE_WIDTH), PARTS = (VALUE_WIDTH + PART - 1) / PART;
    // Fragments of the queries stay in registers where there is room.
    constexpr bool KEPT = KEY_WIDTH <= 128;
    uint part = blockIdx.x % PARTS, head = blockIdx.x / PARTS % heads, key_head = head / heads_per_key;
    Rows rows = rows_of(table, blockIdx.x / (PARTS * heads));
    uint lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;

    uint row_base = (uint)__cvta_generic_to_shared(shared);
    load_rows<KEY_WIDTH>(row_base, q + ((ulong)head * 2u * query_places + rows.place) * KEY_WIDTH,
                         (ulong)query_places * KEY_WIDTH, rows.count);
    copies_end();

    Stream<KEY_WIDTH, 0, 2, FORWARD_SLOTS> stream;
    stream.base = row_base + 2u * ROWS * STRIDE(KEY_WIDTH);
    stream.seen = any_meets<false>(rows.position, rows.count, rows.length, window);
    stream.groups = (VALUE_WIDTH - part * PART < PART ? VALUE_WIDTH - part * PART : PART) / 32u;
    stream.from.wide = k + ((ulong)key_head * 2u * key_places + rows.columns) * KEY_WIDTH;
    stream.from.wide_step = (ulong)key_places * KEY_WIDTH;
    stream.from.deep = v + ((ulong)key_head * 2u * key_places + rows.columns) * VALUE_WIDTH + part * PART * BLOCK;
    stream.from.deep_step = (ulong)key_places * VALUE_WIDTH;
    stream.from.deep_block = VALUE_WIDTH * BLOCK;
    stream.from.numbers[0] = k_units + (ulong)key_head * key_places + rows.columns;
    stream.from.numbers[1] = v_units + (ulong)key_head * key_places + rows.columns;
    stream.begin();

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
            scales[r] = q_units[(ulong)head * query_places + slot_of(rows.place + first + row)] * scale2;
        }
        m[r] = as_f32(0xff800000u);
        l[r] = 0.0f;
    }
    float acc[PART / 2];
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
        acc[i] = 0.0f;
    }

    uint left_address = row_base + first * STRIDE(KEY_WIDTH) + left_lane<KEY_WIDTH>(lane);
    uint kept_high[KEPT ? KEY_WIDTH / 32 : 1][4], kept_low[KEPT ? KEY_WIDTH / 32 : 1][4];
    if constexpr (KEPT) {
        copies_wait<FORWARD_SLOTS - 1>();
        __syncthreads();
#pragma unroll
        for (int k = 0; k < KEY_WIDTH / 32; k++) {
            load_left<KEY_WIDTH>(kept_high[k], kept_low[k], left_address, k);
        }
    }

    for (uint tile = stream.first_tile(); tile < stream.seen.end; tile += TILE) {
        uint first_block = stream.first_block(tile), end_block = stream.end_block(tile);
        bool sees = overlap(met, tile, tile + TILE);
        float z[64];
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            uint column = tile + b * BLOCK;
            if (first_block <= b && b < end_block) {
                uint slot = stream.next();
                if (overlap(met, column, column + BLOCK)) {
                    int high[16], cross[16];
                    uint columns = slot + column_lane<KEY_WIDTH>(lane);
                    if constexpr (KEPT) {
                        no_products<KEY_WIDTH>(high, cross);
#pragma unroll
                        for (int k = 0; k < KEY_WIDTH / 32; k++) {
                            add_step(high, cross, kept_high[k], kept_low[k], columns + 32u * k, STRIDE(KEY_WIDTH),
                                     BLOCK * STRIDE(KEY_WIDTH));
                        }
                    } else {
                        over_width<KEY_WIDTH>(high, cross, left_address, columns);
                    }
                    float units[8];
                    stream.numbers(units, 0u, tile, b);
#pragma unroll
                    for (int i = 0; i < 16; i++) {
                        float unit = units[i / 4 * 2 + i % 2];
                        z[16 * b + i] = chunk_of<KEY_WIDTH>(high[i], cross[i]) * (scales[i / 2 % 2] * unit);
                    }
                    // All of the block is visible to all rows, or some of it to some.
                    bool whole = column + BLOCK <= start + 1u && start + 15u - column < window && count == 16u;
                    if (!whole) {
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            uint at = column + 4u * (i / 4 * 2 + i % 2) + lane % 4u;
                            Extent extent = mine[i / 2 % 2];
                            bool visible = extent.start <= at && at < extent.end;
                            z[16 * b + i] = visible ? z[16 * b + i] : as_f32(0xff800000u);
                        }
                    }
                    continue;
                }
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                z[16 * b + i] = as_f32(0xff800000u);
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
            for (int b = 0; b < BLOCKS; b++) {
                float units[8];
                stream.numbers(units, 1u, tile, b);
                // Places that no copy has filled hold anything.
                bool filled = first_block <= b && b < end_block;
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    int r = i / 2 % 2, c = i / 4 * 2 + i % 2;
                    float p = exp2_of(z[16 * b + i] - base[r]);
                    lanes[r][c] = b == 0 ? p : lanes[r][c] + p;
                    float w = filled ? p * units[c] : 0.0f;
                    largest[r] = larger_or_nan(largest[r], w);
                    z[16 * b + i] = w;
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
            weights.slice(z, largest);
        }

#pragma unroll
        for (int g = 0; g < PART / 32; g++) {
            if (g < stream.groups) {
                uint slot = stream.next();
                if (sees) {
                    int high[16], cross[16];
                    weights.over_tile(high, cross, slot + deep_lane(lane), met, tile);
#pragma unroll
                    for (int i = 0; i < 16; i++) {
                        int r = i / 2 % 2;
                        if (active[r]) {
                            acc[16 * g + i] =
                                fma_rn(value_of(high[i], cross[i]), weights.units[r], acc[16 * g + i] * decays[r]);
                        }
                    }
                }
            }
        }
    }

    float inverse[2] = {div_rn(1.0f, l[0]), div_rn(1.0f, l[1])};
    uint row = first + lane / 4u;
    store<PART>(o, acc, inverse, rows, row, head, heads, value_width, part * PART);
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

#define QUERY_SLOTS (KEY_WIDTH + VALUE_WIDTH <= 256 ? 3 : 2)
#define VALUE_SLOTS FORWARD_SLOTS

// What the three kernels take: rows and columns by width for the scores (1) and for the gradient of the weights (2, not
// for VALUE), columns by place, and numbers per place. `result_width` is that of the result as stored.
struct Gradient {
    float *result;
    const uchar *rows, *rows2, *columns, *columns2, *deep;
    const float *row_units, *row_units2, *column_units, *column_units2, *lse, *delta;
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
    constexpr int NUMBERS = KIND == QUERY ? 2 : KIND == KEY ? 4 : 3;
    constexpr int SLOTS = KIND == VALUE ? VALUE_SLOTS : QUERY_SLOTS;
    uint part = blockIdx.x % PARTS, head = blockIdx.x / PARTS % p.heads;
    uint row_head = head / p.row_heads_per, column_head = head / p.column_heads_per;
    Rows rows = rows_of(p.table, blockIdx.x / (PARTS * p.heads));
    uint lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
    ulong row_place = (ulong)row_head * 2u * p.places + rows.place;
    ulong column_place = (ulong)column_head * 2u * p.places + rows.columns;

    uint row_base = (uint)__cvta_generic_to_shared(shared), row_base2 = row_base + 2u * ROWS * STRIDE(W1);
    load_rows<W1>(row_base, p.rows + row_place * W1, (ulong)p.places * W1, rows.count);
    if constexpr (W2 > 0) {
        load_rows<W2>(row_base2, p.rows2 + row_place * W2, (ulong)p.places * W2, rows.count);
    }
    copies_end();

    Stream<W1, W2, NUMBERS, SLOTS> stream;
    stream.base = row_base2 + (W2 > 0 ? 2u * ROWS * STRIDE(W2) : 0u);
    stream.seen = any_meets<TURNED>(rows.position, rows.count, rows.length, p.window);
    stream.groups = (WIDTH - part * PART < PART ? WIDTH - part * PART : PART) / 32u;
    stream.from.wide = p.columns + column_place * W1;
    stream.from.wide_step = (ulong)p.places * W1;
    if constexpr (W2 > 0) {
        stream.from.wide2 = p.columns2 + column_place * W2;
        stream.from.wide2_step = (ulong)p.places * W2;
    }
    stream.from.deep = p.deep + column_place * WIDTH + part * PART * BLOCK;
    stream.from.deep_step = (ulong)p.places * WIDTH;
    stream.from.deep_block = WIDTH * BLOCK;
    ulong column_numbers = (ulong)column_head * p.places + rows.columns;
    stream.from.numbers[0] = p.column_units + column_numbers;
    stream.from.numbers[1] = p.column_units2 + column_numbers;
    if constexpr (TURNED) {
        stream.from.numbers[2] = p.lse + column_numbers;
        stream.from.numbers[3] = p.delta + column_numbers;
    }
    stream.begin();

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
            ulong at = (ulong)row_head * p.places + slot_of(rows.place + first + row);
            units[r] = TURNED ? p.row_units[at] : p.row_units[at] * p.scale2;
            if (KIND != VALUE) {
                units2[r] = p.row_units2[at];
            }
            if (!TURNED) {
                lse[r] = p.lse[at];
                delta[r] = p.delta[at];
            }
        }
    }
    float acc[PART / 2];
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
        acc[i] = 0.0f;
    }
    uint left_address = row_base + first * STRIDE(W1) + left_lane<W1>(lane);
    uint left_address2 = row_base2 + first * STRIDE(W2) + left_lane<W2>(lane);

    for (uint tile = stream.first_tile(); tile < stream.seen.end; tile += TILE) {
        uint first_block = stream.first_block(tile), end_block = stream.end_block(tile);
        bool sees = overlap(met, tile, tile + TILE);
        float w[64], largest[2] = {0.0f, 0.0f};
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            uint column = tile + b * BLOCK;
            if (first_block <= b && b < end_block) {
                uint slot = stream.next();
                if (overlap(met, column, column + BLOCK)) {
                    int high[16], cross[16];
                    over_width<W1>(high, cross, left_address, slot + column_lane<W1>(lane));
                    float near[8], far[8];
                    stream.numbers(near, 0u, tile, b);
                    if (TURNED) {
                        stream.numbers(far, 2u, tile, b);
                    }
                    float prob[16];
#pragma unroll
                    for (int i = 0; i < 16; i++) {
                        int r = i / 2 % 2, c = i / 4 * 2 + i % 2;
                        float scales = TURNED ? (near[c] * p.scale2) * units[r] : units[r] * near[c];
                        prob[i] = exp2_of(chunk_of<W1>(high[i], cross[i]) * scales - (TURNED ? far[c] : lse[r]));
                    }
                    stream.numbers(far, 1u, tile, b);
                    if constexpr (KIND == VALUE) {
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            w[16 * b + i] = prob[i] * far[i / 4 * 2 + i % 2];
                        }
                    } else {
                        over_width<W2>(high, cross, left_address2, slot + stream.PART1 + column_lane<W2>(lane));
                        float deltas[8];
                        if (TURNED) {
                            stream.numbers(deltas, 3u, tile, b);
                        }
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            int r = i / 2 % 2, c = i / 4 * 2 + i % 2;
                            float grad = fma_rn(
                                chunk_of<W2>(high[i], cross[i]), units2[r] * far[c], TURNED ? -deltas[c] : -delta[r]
                            );
                            w[16 * b + i] = (prob[i] * grad) * (near[c] * p.scale);
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
                    continue;
                }
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                w[16 * b + i] = 0.0f;
            }
        }

        Weights weights;
        bool active[2];
        if (sees) {
            weights.slice(w, largest);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            active[r] = overlap(mine[r], tile, tile + TILE);
        }
#pragma unroll
        for (int g = 0; g < PART / 32; g++) {
            if (g < stream.groups) {
                uint slot = stream.next();
                if (sees) {
                    int high[16], cross[16];
                    weights.over_tile(high, cross, slot + deep_lane(lane), met, tile);
#pragma unroll
                    for (int i = 0; i < 16; i++) {
                        int r = i / 2 % 2;
                        if (active[r]) {
                            acc[16 * g + i] = fma_rn(value_of(high[i], cross[i]), weights.units[r], acc[16 * g + i]);
                        }
                    }
                }
            }
        }
    }
    // Times 1 changes no bit.
    float one[2] = {1.0f, 1.0f};
    store<PART>(p.result, acc, one, rows, first + lane / 4u, head, p.heads, p.result_width, part * PART);
}

// A block per ROWS queries, head and part of the key's width.
extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) attention_grad_query_mma(
    float *dq, const uchar *q, const float *q_units, const uchar *k, const uchar *k_by_place, const float *k_units,
    const uchar *v, const float *v_units, const uchar *d_o, const float *d_o_units, const float *delta, const float *lse,
    const uint *table, uint heads, uint heads_per_key, uint key_width, uint places, uint window, float scale, float scale2
) {
    Gradient p = {dq, q, d_o, k, v, k_by_place, q_units, d_o_units, k_units, v_units, lse, delta, table,
                  heads, 1u, heads_per_key, key_width, places, window, scale, scale2};
    gradient<QUERY>(p);
}

// A block per ROWS keys, query head and part of the width: the head's share of the gradient of its key head.
extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) attention_grad_key_mma(
    float *dk, const uchar *q, const uchar *q_by_place, const float *q_units, const uchar *k, const float *k_units,
    const uchar *v, const float *v_units, const uchar *d_o, const float *d_o_units, const float *delta, const float *lse,
    const uint *table, uint heads, uint heads_per_key, uint key_width, uint places, uint window, float scale, float scale2
) {
    Gradient p = {dk, k, v, q, d_o, q_by_place, k_units, v_units, q_units, d_o_units, lse, delta, table,
                  heads, heads_per_key, 1u, key_width, places, window, scale, scale2};
    gradient<KEY>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) attention_grad_value_mma(
    float *dv, const uchar *q, const float *q_units, const uchar *k, const float *k_units, const uchar *d_o_by_place,
    const float *d_o_units, const float *lse, const uint *table, uint heads, uint heads_per_key, uint value_width,
    uint places, uint window, float scale, float scale2
) {
    Gradient p = {dv, k, nullptr, q, nullptr, d_o_by_place, k_units, nullptr, q_units, d_o_units, lse, lse, table,
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
    for (uint i = threadIdx.x; i < count * width; i += GROUP) {
        uint row = i / width, d = i % width;
        const float *from = shares + ((share + row) * key_heads * heads_per_key + key_head * heads_per_key) * width + d;
        float sum = from[0];
        for (uint n = 1u; n < heads_per_key; n++) {
            sum = sum + from[(ulong)n * width];
        }
        to[((first + row) * key_heads + key_head) * width + d] = sum;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Slices. WIDTH_MOST bounds the widths of all heads.

#define WIDTH_MOST (KEY_WIDTH > VALUE_WIDTH ? KEY_WIDTH : VALUE_WIDTH)

// A group per block of places and head: planes by width and by place (null: not wanted) of rows [row, head, width], and
// their units. `padded` is the width of the planes.
KERNEL(GROUP) attention_slice_mma(
    float *units, uint *by_width, uint *by_place, const float *x, const uint *blocks, uint heads, uint width, uint padded,
    uint places
) {
    constexpr uint STEPS = (WIDTH_MOST + 127) / 128, WORDS = WIDTH_MOST / 4 + 1;
    __shared__ uint rows[2][BLOCK][WORDS];
    uint head = blockIdx.x % heads, block = blockIdx.x / heads;
    uint count = blocks[2u * block + 1u], lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
    ulong line = (ulong)heads * width;
    const float *from = x + blocks[2u * block] * line + (ulong)head * width;
    ulong slice_step = (ulong)places * padded / 4u;
    ulong plane = 2u * head * slice_step;
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
            units[(ulong)head * places + slot_of(block * BLOCK + row)] = scale_unit(bits);
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
                    ulong at = plane + (ulong)(block * BLOCK + row) * (padded / 4u) + word;
                    by_width[at] = high;
                    by_width[at + slice_step] = low;
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
        uint *to = by_place + plane + slice * slice_step + ((ulong)block * padded + 4u * column) * 8u + word;
        to[0] = __byte_perm(ab, cd, 0x5410);
        to[8] = __byte_perm(ab, cd, 0x7632);
        to[16] = __byte_perm(ab2, cd2, 0x5410);
        to[24] = __byte_perm(ab2, cd2, 0x7632);
    }
}

// A group per block of places and head, a warp per row: D, and lse over places.
KERNEL(GROUP) attention_delta_mma(
    float *delta, float *lse_by_place, const float *d_o, const float *o, const float *lse, const uint *blocks, uint heads,
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
            ulong to = (ulong)head * places + slot_of(block * BLOCK + row);
            delta[to] = sum;
            lse_by_place[to] = row < count ? lse[at] : 0.0f;
        }
    }
}
