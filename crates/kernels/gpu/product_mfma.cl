// The kernels of product.cl on AMD's matrix cores (gfx908, gfx90a, gfx942), with the same arguments
// and the same bits. A group of four waves computes PRODUCT_TILE x COLUMNS outputs; a wave computes
// 32 rows of the left operand by BLOCKS times 32 rows of the right one.
//
// Both operands lie in local memory as rows along the contraction. A lane reads 16 bytes of one
// row, which are the operands of several instructions. Left and right assign the bytes of the
// contraction to lanes alike, which is all that an exact sum needs.

// Bytes of the contraction that are in local memory at a time: two pieces of 16 for each half of a
// wave.
#define STEP 64u
#define STEP_WORDS (STEP / 4u)
#define WAVE 64u
#define SIDE 32u
#define BLOCKS 2u
#define COLUMNS (2u * BLOCKS * SIDE)
// Words from row to row. Rows start four banks apart; pieces swap places with every eighth row, so
// that transposed stores, which are four rows apart, hit distinct banks as well.
#define PITCH 20u
// Units of 16 bytes per work item and slice in each tile.
#define LEFT_UNITS 1u
#define RIGHT_UNITS 2u
// Results of a lane in each block.
#define EACH 16

// With two waves per SIMD one multiplies while the other waits for memory or a barrier. The sums of
// three slices leave registers for one wave only.
#define MFMA_KERNEL __attribute__((amdgpu_waves_per_eu(WAVES))) KERNEL(GROUP)
#if SLICES == 2
#define WAVES 2
#else
#define WAVES 1
#endif

typedef int INT4 __attribute__((ext_vector_type(4)));
typedef int INT16 __attribute__((ext_vector_type(16)));

// sums += the products of 32 bytes of the contraction, 16 in each half of the wave: row i of a with
// row j of b, by lane % 32. Lane l has column l % 32, and in element r row
// 8 * (r / 4) + 4 * (l / 32) + r % 4.
FUNCTION INT16 add_block(INT16 sums, INT4 a, INT4 b) {
#if defined(__gfx908__) || defined(__gfx90a__)
    sums = __builtin_amdgcn_mfma_i32_32x32x8i8(a[0], b[0], sums, 0, 0, 0);
    sums = __builtin_amdgcn_mfma_i32_32x32x8i8(a[1], b[1], sums, 0, 0, 0);
    sums = __builtin_amdgcn_mfma_i32_32x32x8i8(a[2], b[2], sums, 0, 0, 0);
    return __builtin_amdgcn_mfma_i32_32x32x8i8(a[3], b[3], sums, 0, 0, 0);
#elif defined(__gfx942__)
#define PAIR(x, i) ((long)(((ulong)(uint)(x)[(i) + 1] << 32) | (uint)(x)[i]))
    sums = __builtin_amdgcn_mfma_i32_32x32x16_i8(PAIR(a, 0), PAIR(b, 0), sums, 0, 0, 0);
    return __builtin_amdgcn_mfma_i32_32x32x16_i8(PAIR(a, 2), PAIR(b, 2), sums, 0, 0, 0);
#else
#error "no matrix instructions are known for this architecture"
#endif
}

// Word of a tile: the piece of 16 bytes `piece` of a row.
FUNCTION uint place(uint row, uint piece) {
    return row * PITCH + (piece ^ (row / 8u)) % 4u * 4u;
}

// Addresses are the sum of a pointer that all lanes share and a lane's offset of 32 bits in bytes,
// which is a form of the load instruction: a tile's rows lie within 2^32 bytes.
#define AT(type, pointer, offset) (*(GLOBAL const type *)((GLOBAL const uchar *)(pointer) + (offset)))

// A unit of an operand whose rows run along the contraction: 16 bytes of a row. The last row stands
// in for those beyond it: their products become outputs that are not stored.
FUNCTION void fetch_along(INT4 *to, uint units, GLOBAL const int *planes, ulong plane, ulong at, uint words, uint rows) {
    #pragma unroll
    for (uint i = 0u; i < units; i++) {
        uint row = local_index() / 4u + i * WAVE;
        row = row < rows ? row : rows - 1u;
        uint offset = (row * words + local_index() % 4u * 4u) * 4u;
        #pragma unroll
        for (uint s = 0u; s < SLICES; s++) {
            to[s * units + i] = AT(INT4, planes + (s * plane + at), offset);
        }
    }
}

FUNCTION void store_along(LOCAL_POINTER int *tile, const INT4 *from, uint units) {
    #pragma unroll
    for (uint s = 0u; s < SLICES; s++) {
        #pragma unroll
        for (uint i = 0u; i < units; i++) {
            uint row = local_index() / 4u + i * WAVE;
            *(LOCAL_POINTER INT4 *)(tile + s * units * WAVE * PITCH + place(row, local_index() % 4u)) =
                from[s * units + i];
        }
    }
}

// Four columns, and four rows, of unit number `unit` of a transposed operand. Neighbouring lanes
// have neighbouring columns in memory and distinct banks in the tile.
FUNCTION uint unit_columns(uint unit) {
    return (local_index() % 8u + (local_index() / 32u) % 2u * 8u + unit * 16u) * 4u;
}

FUNCTION uint unit_rows(void) {
    return ((local_index() / 8u) % 4u + local_index() / 64u * 4u) * 4u;
}

// A unit of an operand whose columns run along the contraction: four bytes of each of four rows, of
// which there are `rows`.
FUNCTION void fetch_transposed(
    INT4 *to, uint units, GLOBAL const int *planes, ulong plane, ulong at, uint words, uint rows
) {
    uint offset = unit_rows() * words * 4u + unit_columns(0u);
    #pragma unroll
    for (uint r = 0u; r < 4u; r++) {
        // All bits where there is a row, and none where the first lane's is read in its place.
        uint inside = unit_rows() + r < rows ? 0xffffffffu : 0u;
        #pragma unroll
        for (uint s = 0u; s < SLICES; s++) {
            #pragma unroll
            for (uint i = 0u; i < units; i++) {
                ulong from = s * plane + at + (r < rows ? r * words : 0u) + i * (WAVE / 4u);
                to[s * units + i][r] = AT(int, planes + from, offset & inside) & (int)inside;
            }
        }
    }
}

FUNCTION void store_transposed(LOCAL_POINTER int *tile, const INT4 *from, uint units) {
    #pragma unroll
    for (uint s = 0u; s < SLICES; s++) {
        #pragma unroll
        for (uint i = 0u; i < units; i++) {
            uint r[4];
            #pragma unroll
            for (uint n = 0u; n < 4u; n++) {
                r[n] = (uint)from[s * units + i][n];
            }
            transpose_bytes(r);
            // Four columns, and their pieces, lie alike.
            uint column = unit_columns(i);
            uint word = s * units * WAVE * PITCH + place(column, unit_rows() / 16u) + unit_rows() / 4u % 4u;
            #pragma unroll
            for (uint n = 0u; n < 4u; n++) {
                tile[word + n * PITCH] = (int)r[n];
            }
        }
    }
}

// Row of the group's outputs that a lane has, and the first of its columns: result i has the column
// element_column(i) further on.
FUNCTION uint output_row(void) {
    return local_index() / WAVE % 2u * SIDE + local_index() % SIDE;
}

FUNCTION uint output_column(void) {
    return local_index() / (2u * WAVE) * BLOCKS * SIDE + local_index() % WAVE / SIDE * 4u;
}

FUNCTION uint element_column(uint i) {
    return i / EACH * SIDE + i % EACH / 4u * 8u + i % 4u;
}

// Results of a lane that are inside: those whose element_column is below.
FUNCTION uint columns_inside(uint row, uint rows, uint column, uint columns) {
    return row < rows && column < columns ? columns - column : 0u;
}

FUNCTION void clear(INT16 *sums) {
    #pragma unroll
    for (uint i = 0u; i < BLOCKS * SLICES; i++) {
        sums[i] = 0;
    }
}

// Words of the tiles at which a wave's rows begin.
FUNCTION uint wave_left(void) {
    return local_index() / WAVE % 2u * SIDE * PITCH;
}

FUNCTION uint wave_right(void) {
    return local_index() / (2u * WAVE) * BLOCKS * SIDE * PITCH;
}

// Word of a wave's rows that a lane reads first of two pieces.
FUNCTION uint lane_place(uint piece) {
    uint row = local_index() % SIDE;
    uint half_wave = local_index() % WAVE / SIDE;
    return place(row, piece + half_wave);
}

// Adds the products of both tiles to the sums of a wave.
FUNCTION void multiply(INT16 *sums, LOCAL_POINTER const int *left, LOCAL_POINTER const int *right) {
    left += wave_left();
    right += wave_right();
    #pragma unroll
    for (uint piece = 0u; piece < 4u; piece += 2u) {
        uint word = lane_place(piece);
        INT4 b[SLICES];
        #pragma unroll
        for (uint s = 0u; s < SLICES; s++) {
            b[s] = *(LOCAL_POINTER const INT4 *)(left + s * LEFT_UNITS * WAVE * PITCH + word);
        }
        #pragma unroll
        for (uint block = 0u; block < BLOCKS; block++) {
            #pragma unroll
            for (uint i = 0u; i < SLICES; i++) {
                INT4 a = *(LOCAL_POINTER const INT4 *)(right + (i * RIGHT_UNITS * WAVE + block * SIDE) * PITCH + word);
                #pragma unroll
                for (uint j = 0u; i + j < SLICES; j++) {
                    sums[block * SLICES + i + j] = add_block(sums[block * SLICES + i + j], a, b[j]);
                }
            }
        }
    }
}

FUNCTION float value_of(const INT16 *sums, uint block, uint r) {
    Sums one;
    #pragma unroll
    for (uint s = 0u; s < SLICES; s++) {
        one.s[s] = sums[block * SLICES + s][r];
    }
    return chunk_value(one);
}

// acc = fma(value, scale of the row, acc) for every output of a lane.
FUNCTION void accumulate_rows(float *acc, const INT16 *sums, float scale) {
    #pragma unroll
    for (uint block = 0u; block < BLOCKS; block++) {
        #pragma unroll
        for (uint r = 0u; r < EACH; r++) {
            acc[block * EACH + r] = fma_rn(value_of(sums, block, r), scale, acc[block * EACH + r]);
        }
    }
}

// Results of a lane from and to memory: those that are inside.
FUNCTION void load_results(float *acc, GLOBAL const float *out, uint inside) {
    #pragma unroll
    for (uint i = 0u; i < BLOCKS * EACH; i++) {
        acc[i] = element_column(i) < inside ? out[element_column(i)] : 0.0f;
    }
}

FUNCTION void store_results(GLOBAL float *out, const float *acc, uint inside) {
    #pragma unroll
    for (uint i = 0u; i < BLOCKS * EACH; i++) {
        if (element_column(i) < inside) {
            out[element_column(i)] = acc[i];
        }
    }
}

// Arguments as in product.cl.
MFMA_KERNEL product_forward(
    GLOBAL float *y, ulong y_stride, uint y_base, uint y_column, GLOBAL const int *left, GLOBAL const float *left_scales,
    uint left_rows, uint left_base, GLOBAL const int *right, GLOBAL const float *right_scales, uint right_rows,
    uint first_weight, uint weight_rows, uint weight_first, uint columns, uint width, GLOBAL const uint *table, uint tabled,
    uint first_tile, uint tiles, uint first_row, uint end_row
) {
    LOCAL ALIGNED int left_tile[SLICES * LEFT_UNITS * WAVE * PITCH];
    LOCAL ALIGNED int right_tile[SLICES * RIGHT_UNITS * WAVE * PITCH];
    // Neighbouring groups share weights: these are the larger operand.
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + mod_u32(group_index(), tiles));
    uint column_tile = div_u32(group_index(), tiles) * COLUMNS;
    uint rows = tile.end - tile.first;
    uint words = row_words(width);
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    ulong left_first = tile.first - left_base;
    ulong right_first = (ulong)(tile.weight - first_weight) * weight_rows + weight_first + column_tile;
    ulong left_plane = (ulong)left_rows * words;
    ulong right_plane = (ulong)right_rows * words;
    INT4 from_left[SLICES * LEFT_UNITS];
    INT4 from_right[SLICES * RIGHT_UNITS];
    float acc[BLOCKS * EACH];
    #pragma unroll
    for (uint i = 0u; i < BLOCKS * EACH; i++) {
        acc[i] = 0.0f;
    }
    if (width > 0u) {
        fetch_along(from_left, LEFT_UNITS, left, left_plane, left_first * words, words, rows);
        fetch_along(from_right, RIGHT_UNITS, right, right_plane, right_first * words, words, columns - column_tile);
    }
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        uint end = width - chunk * CHUNK < CHUNK ? width : (chunk + 1u) * CHUNK;
        INT16 sums[BLOCKS * SLICES];
        clear(sums);
        for (uint at = chunk * CHUNK; at < end; at += STEP) {
            barrier_local();
            store_along(left_tile, from_left, LEFT_UNITS);
            store_along(right_tile, from_right, RIGHT_UNITS);
            barrier_local();
            if (at + STEP < width) {
                uint next = at / 4u + STEP_WORDS;
                fetch_along(from_left, LEFT_UNITS, left, left_plane, left_first * words + next, words, rows);
                fetch_along(
                    from_right, RIGHT_UNITS, right, right_plane, right_first * words + next, words, columns - column_tile
                );
            }
            multiply(sums, left_tile, right_tile);
        }
        uint row = output_row();
        accumulate_rows(acc, sums, row < rows ? left_scales[(left_first + row) * chunks + chunk] : 0.0f);
    }
    uint row = output_row();
    uint column = output_column();
    uint inside = columns_inside(row, rows, column_tile + column, columns);
    GLOBAL float *to = y + ((ulong)(tile.first + row - y_base) * y_stride + y_column + column_tile + column);
    GLOBAL const float *scales = right_scales + right_first + column;
    #pragma unroll
    for (uint i = 0u; i < BLOCKS * EACH; i++) {
        if (element_column(i) < inside) {
            to[element_column(i)] = acc[i] * scales[element_column(i)];
        }
    }
}

// Arguments as in product.cl.
MFMA_KERNEL product_input(
    GLOBAL float *dx, GLOBAL const int *left, GLOBAL const float *left_scales, uint left_rows, uint left_base,
    GLOBAL const int *right, uint right_rows, uint first_weight, uint weight_rows, uint weight_first, uint columns,
    uint width, uint fresh, GLOBAL const uint *table, uint tabled, uint first_tile, uint tiles, uint first_row, uint end_row
) {
    LOCAL ALIGNED int left_tile[SLICES * LEFT_UNITS * WAVE * PITCH];
    LOCAL ALIGNED int right_tile[SLICES * RIGHT_UNITS * WAVE * PITCH];
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + mod_u32(group_index(), tiles));
    uint column_tile = div_u32(group_index(), tiles) * COLUMNS;
    uint rows = tile.end - tile.first;
    uint left_words = row_words(width);
    uint right_words = row_words(columns);
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    ulong left_first = tile.first - left_base;
    ulong right_first = (ulong)(tile.weight - first_weight) * weight_rows + weight_first;
    ulong left_plane = (ulong)left_rows * left_words;
    ulong right_plane = (ulong)right_rows * right_words;
    ulong left_at = left_first * left_words;
    ulong right_at = right_first * right_words + column_tile / 4u;
    INT4 from_left[SLICES * LEFT_UNITS];
    INT4 from_right[SLICES * RIGHT_UNITS];
    uint row = output_row();
    uint column = column_tile + output_column();
    uint inside = columns_inside(row, rows, column, columns);
    GLOBAL float *out = dx + ((ulong)(tile.first + row) * columns + column);
    float acc[BLOCKS * EACH];
    load_results(acc, out, fresh ? 0u : inside);
    if (width > 0u) {
        fetch_along(from_left, LEFT_UNITS, left, left_plane, left_at, left_words, rows);
        fetch_transposed(from_right, RIGHT_UNITS, right, right_plane, right_at, right_words, width);
    }
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        uint end = width - chunk * CHUNK < CHUNK ? width : (chunk + 1u) * CHUNK;
        INT16 sums[BLOCKS * SLICES];
        clear(sums);
        for (uint at = chunk * CHUNK; at < end; at += STEP) {
            barrier_local();
            store_along(left_tile, from_left, LEFT_UNITS);
            store_transposed(right_tile, from_right, RIGHT_UNITS);
            barrier_local();
            uint next = at + STEP;
            if (next < width) {
                fetch_along(from_left, LEFT_UNITS, left, left_plane, left_at + next / 4u, left_words, rows);
                fetch_transposed(
                    from_right, RIGHT_UNITS, right, right_plane, right_at + (ulong)next * right_words, right_words,
                    width - next
                );
            }
            multiply(sums, left_tile, right_tile);
        }
        accumulate_rows(acc, sums, row < rows ? left_scales[(left_first + row) * chunks + chunk] : 0.0f);
    }
    store_results(out, acc, inside);
}

// Arguments as in product.cl.
MFMA_KERNEL product_weight(
    GLOBAL float *dw, ulong first_row, uint rows, uint columns, GLOBAL const int *left, GLOBAL const float *left_scales,
    GLOBAL const int *right, GLOBAL const float *right_scales, uint tokens, GLOBAL const uint *table, uint first_chunk,
    uint end_chunk, uint base_chunk, uint base
) {
    LOCAL ALIGNED int left_tile[SLICES * LEFT_UNITS * WAVE * PITCH];
    LOCAL ALIGNED int right_tile[SLICES * RIGHT_UNITS * WAVE * PITCH];
    LOCAL ALIGNED float column_scales[COLUMNS];
    uint column_tiles = (columns + (COLUMNS - 1u)) / COLUMNS;
    uint row_first = div_u32(group_index(), column_tiles) * PRODUCT_TILE;
    uint column_first = mod_u32(group_index(), column_tiles) * COLUMNS;
    uint left_words = row_words(rows);
    uint right_words = row_words(columns);
    ulong left_plane = (ulong)tokens * left_words;
    ulong right_plane = (ulong)tokens * right_words;
    INT4 from_left[SLICES * LEFT_UNITS];
    INT4 from_right[SLICES * RIGHT_UNITS];
    uint row = row_first + output_row();
    uint column = column_first + output_column();
    uint inside = columns_inside(row, rows, column, columns);
    GLOBAL float *out = dw + ((first_row + row) * columns + column);
    float acc[BLOCKS * EACH];
    load_results(acc, out, inside);
    for (uint chunk = first_chunk; chunk < end_chunk; chunk++) {
        ulong start = table[(ulong)chunk * 2u] - base;
        uint length = table[(ulong)chunk * 2u + 1u];
        ulong left_at = start * left_words + row_first / 4u;
        ulong right_at = start * right_words + column_first / 4u;
        INT16 sums[BLOCKS * SLICES];
        clear(sums);
        fetch_transposed(from_left, LEFT_UNITS, left, left_plane, left_at, left_words, length);
        fetch_transposed(from_right, RIGHT_UNITS, right, right_plane, right_at, right_words, length);
        for (uint t = 0u; t < length; t += STEP) {
            barrier_local();
            store_transposed(left_tile, from_left, LEFT_UNITS);
            store_transposed(right_tile, from_right, RIGHT_UNITS);
            barrier_local();
            uint next = t + STEP;
            if (next < length) {
                ulong left_next = left_at + (ulong)next * left_words;
                ulong right_next = right_at + (ulong)next * right_words;
                fetch_transposed(from_left, LEFT_UNITS, left, left_plane, left_next, left_words, length - next);
                fetch_transposed(from_right, RIGHT_UNITS, right, right_plane, right_next, right_words, length - next);
            }
            multiply(sums, left_tile, right_tile);
        }
        float row_scale = row < rows ? left_scales[(ulong)(chunk - base_chunk) * rows + row] : 0.0f;
        barrier_local();
        uint own = column_first + local_index();
        if (local_index() < COLUMNS) {
            column_scales[local_index()] =
                own < columns ? right_scales[(ulong)(chunk - base_chunk) * columns + own] : 0.0f;
        }
        barrier_local();
        #pragma unroll
        for (uint i = 0u; i < BLOCKS * EACH; i++) {
            float scale = row_scale * column_scales[output_column() + element_column(i)];
            acc[i] = fma_rn(value_of(sums, i / EACH, i % EACH), scale, acc[i]);
        }
    }
    store_results(out, acc, inside);
}
