// Slice products (docs/numerics.md, "Slice product"). A group of 256 computes PRODUCT_TILE x
// PRODUCT_TILE outputs, 4 x 4 to a work item, from tiles of packed bytes in local memory:
// [word of the contraction][slice][row or column].

// Words of the contraction that are in local memory at a time.
#define DEPTH 16u
#define DEPTH_ELEMENTS (DEPTH * 4u)
// One more than PRODUCT_TILE: rows of the tile start in different banks.
#define PITCH (PRODUCT_TILE + 1)
#define TILE_WORDS (SLICES * DEPTH * PITCH)
// Work items along either side of the tile; a work item has the rows and columns a multiple of this
// apart.
#define SIDE 16u
#define EACH 4

// Where a word of a row or column lies in a tile. The slices of a word are neighbours: two words of
// all slices are within the offsets that one address register of a load from local memory allows.
FUNCTION uint place(uint slice, uint word, uint row) {
    return (word * SLICES + slice) * PITCH + row;
}

// Addresses are the sum of a pointer that all work items share and an offset of 32 bits in bytes,
// which AMD's loads take apart: a tile's rows lie within 2^32 bytes.
#define AT(pointer, offset) (*(GLOBAL const int *)((GLOBAL const uchar *)(pointer) + (offset)))

// A tile of an operand whose rows run along the contraction: `rows` rows, the first of them and the
// depth at `at`. The last row stands in for those beyond it: their products become outputs that are
// not stored. Everything is asked for before the first word is stored.
FUNCTION void load_along(
    LOCAL_POINTER int *tile, GLOBAL const int *planes, ulong plane, ulong at, uint words, uint rows
) {
    uint word = local_index() % DEPTH;
    uint first = local_index() / DEPTH;
    int packed[SLICES][EACH];
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = first + i * SIDE < rows ? first + i * SIDE : rows - 1u;
        #pragma unroll
        for (uint s = 0u; s < SLICES; s++) {
            packed[s][i] = AT(planes + (s * plane + at), (row * words + word) * 4u);
        }
    }
    #pragma unroll
    for (uint s = 0u; s < SLICES; s++) {
        #pragma unroll
        for (uint i = 0u; i < EACH; i++) {
            tile[place(s, word, first + i * SIDE)] = packed[s][i];
        }
    }
}

// A tile of an operand whose columns run along the contraction: PRODUCT_TILE columns from `at` on,
// of which row padding may be part, and the next `rows` rows. Each work item transposes four rows
// of four bytes; rows beyond the last are zeros.
FUNCTION void load_transposed(
    LOCAL_POINTER int *tile, GLOBAL const int *planes, ulong plane, ulong at, uint words, uint rows
) {
    uint column = local_index() % SIDE;
    uint word = local_index() / SIDE;
    uint packed[SLICES][4];
    #pragma unroll
    for (uint i = 0u; i < 4u; i++) {
        uint row = word * 4u + i;
        // All bits where there is a row, and none where the first row is read in its place.
        uint inside = row < rows ? 0xffffffffu : 0u;
        uint offset = ((row * words + column) * 4u) & inside;
        #pragma unroll
        for (uint s = 0u; s < SLICES; s++) {
            packed[s][i] = (uint)AT(planes + (s * plane + at), offset) & inside;
        }
    }
    #pragma unroll
    for (uint s = 0u; s < SLICES; s++) {
        transpose_bytes(packed[s]);
        LOCAL_POINTER int *to = tile + place(s, word, column * 4u);
        #pragma unroll
        for (uint i = 0u; i < 4u; i++) {
            to[i] = (int)packed[s][i];
        }
    }
}

FUNCTION void clear(Sums *sums) {
    #pragma unroll
    for (int i = 0; i < EACH * EACH; i++) {
        sums[i] = no_sums();
    }
}

// Adds the products of both tiles to a work item's sums; the contraction has `rest` elements left,
// and zeros behind them.
FUNCTION void multiply(Sums *sums, LOCAL_POINTER const int *left, LOCAL_POINTER const int *right, uint rest) {
    uint words = rest < DEPTH_ELEMENTS ? (rest + 3u) / 4u : DEPTH;
    left += local_index() / SIDE;
    right += local_index() % SIDE;
    for (uint word = 0u; word < words; word += 2u) {
        #pragma unroll
        for (uint w = 0u; w < 2u; w++) {
            int a[EACH][SLICES];
            int b[EACH][SLICES];
            #pragma unroll
            for (uint i = 0u; i < EACH; i++) {
                #pragma unroll
                for (uint s = 0u; s < SLICES; s++) {
                    a[i][s] = left[place(s, word + w, i * SIDE)];
                    b[i][s] = right[place(s, word + w, i * SIDE)];
                }
            }
            #pragma unroll
            for (uint i = 0u; i < EACH; i++) {
                #pragma unroll
                for (uint j = 0u; j < EACH; j++) {
                    sums[i * EACH + j] = add_products(sums[i * EACH + j], a[i], b[j]);
                }
            }
        }
    }
}

// acc = fma(value, scale of the row, acc) for every output of a work item.
FUNCTION void accumulate_rows(
    float *acc, const Sums *sums, GLOBAL const float *scales, ulong first, uint chunks, uint chunk, uint rows
) {
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = local_index() / SIDE + i * SIDE;
        float scale = row < rows ? scales[(first + row) * chunks + chunk] : 0.0f;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            acc[i * EACH + j] = fma_rn(chunk_value(sums[i * EACH + j]), scale, acc[i * EACH + j]);
        }
    }
}

// y[m, n] = sum over k of x[m, k] W[n, k]. Row m of x is row m - left_base of its planes and row
// m - y_base of y; the `columns` weight rows from `weight_first` on become the columns of y from
// `y_column` on.
KERNEL(GROUP) product_forward(
    GLOBAL float *y, ulong y_stride, uint y_base, uint y_column, GLOBAL const int *left, GLOBAL const float *left_scales,
    uint left_rows, uint left_base, GLOBAL const int *right, GLOBAL const float *right_scales, uint right_rows,
    uint first_weight, uint weight_rows, uint weight_first, uint columns, uint width, GLOBAL const uint *table, uint tabled,
    uint first_tile, uint tiles, uint first_row, uint end_row
) {
    LOCAL int left_tile[TILE_WORDS];
    LOCAL int right_tile[TILE_WORDS];
    // Neighbouring groups share weights: these are the larger operand.
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + mod_u32(group_index(), tiles));
    uint column_tile = div_u32(group_index(), tiles) * PRODUCT_TILE;
    uint rows = tile.end - tile.first;
    uint words = row_words(width);
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    ulong left_first = tile.first - left_base;
    ulong right_first = (ulong)(tile.weight - first_weight) * weight_rows + weight_first + column_tile;
    float acc[EACH * EACH];
    #pragma unroll
    for (int i = 0; i < EACH * EACH; i++) {
        acc[i] = 0.0f;
    }
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        uint end = width - chunk * CHUNK < CHUNK ? width : (chunk + 1u) * CHUNK;
        Sums sums[EACH * EACH];
        clear(sums);
        for (uint at = chunk * CHUNK; at < end; at += DEPTH_ELEMENTS) {
            barrier_local();
            load_along(left_tile, left, (ulong)left_rows * words, left_first * words + at / 4u, words, rows);
            load_along(
                right_tile, right, (ulong)right_rows * words, right_first * words + at / 4u, words, columns - column_tile
            );
            barrier_local();
            multiply(sums, left_tile, right_tile, end - at);
        }
        accumulate_rows(acc, sums, left_scales, left_first, chunks, chunk, rows);
    }
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = local_index() / SIDE + i * SIDE;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            uint column = local_index() % SIDE + j * SIDE;
            if (row < rows && column_tile + column < columns) {
                y[(ulong)(tile.first + row - y_base) * y_stride + y_column + column_tile + column] =
                    acc[i * EACH + j] * right_scales[right_first + column];
            }
        }
    }
}

// dx[m, k] = sum over n of d[m, n] W[n, k], d being dy with the scales of W folded in. Row m of d
// is row m - left_base of its planes; its `width` columns meet the weight rows from `weight_first`
// on. A `fresh` sum starts from zero, others from dx.
KERNEL(GROUP) product_input(
    GLOBAL float *dx, GLOBAL const int *left, GLOBAL const float *left_scales, uint left_rows, uint left_base,
    GLOBAL const int *right, uint right_rows, uint first_weight, uint weight_rows, uint weight_first, uint columns,
    uint width, uint fresh, GLOBAL const uint *table, uint tabled, uint first_tile, uint tiles, uint first_row, uint end_row
) {
    LOCAL int left_tile[TILE_WORDS];
    LOCAL int right_tile[TILE_WORDS];
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + mod_u32(group_index(), tiles));
    uint column_tile = div_u32(group_index(), tiles) * PRODUCT_TILE;
    uint rows = tile.end - tile.first;
    uint left_words = row_words(width);
    uint right_words = row_words(columns);
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    ulong left_first = tile.first - left_base;
    ulong right_first = (ulong)(tile.weight - first_weight) * weight_rows + weight_first;
    float acc[EACH * EACH];
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = local_index() / SIDE + i * SIDE;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            uint column = column_tile + local_index() % SIDE + j * SIDE;
            int old = !fresh && row < rows && column < columns;
            acc[i * EACH + j] = old ? dx[(ulong)(tile.first + row) * columns + column] : 0.0f;
        }
    }
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        uint end = width - chunk * CHUNK < CHUNK ? width : (chunk + 1u) * CHUNK;
        Sums sums[EACH * EACH];
        clear(sums);
        for (uint at = chunk * CHUNK; at < end; at += DEPTH_ELEMENTS) {
            barrier_local();
            load_along(left_tile, left, (ulong)left_rows * left_words, left_first * left_words + at / 4u, left_words, rows);
            load_transposed(
                right_tile, right, (ulong)right_rows * right_words, (right_first + at) * right_words + column_tile / 4u,
                right_words, end - at
            );
            barrier_local();
            multiply(sums, left_tile, right_tile, end - at);
        }
        accumulate_rows(acc, sums, left_scales, left_first, chunks, chunk, rows);
    }
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = local_index() / SIDE + i * SIDE;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            uint column = column_tile + local_index() % SIDE + j * SIDE;
            if (row < rows && column < columns) {
                dx[(ulong)(tile.first + row) * columns + column] = acc[i * EACH + j];
            }
        }
    }
}

// dW[n, k] += sum over tokens of dy[t, n] x[t, k], from dW's row `first_row` on, for chunks
// first_chunk..end_chunk of the table (start, length). Token `base` is the first row of both
// planes, chunk `base_chunk` has the first scales.
KERNEL(GROUP) product_weight(
    GLOBAL float *dw, ulong first_row, uint rows, uint columns, GLOBAL const int *left, GLOBAL const float *left_scales,
    GLOBAL const int *right, GLOBAL const float *right_scales, uint tokens, GLOBAL const uint *table, uint first_chunk,
    uint end_chunk, uint base_chunk, uint base
) {
    LOCAL int left_tile[TILE_WORDS];
    LOCAL int right_tile[TILE_WORDS];
    uint column_tiles = (columns + (PRODUCT_TILE - 1u)) / PRODUCT_TILE;
    uint row_first = div_u32(group_index(), column_tiles) * PRODUCT_TILE;
    uint column_first = mod_u32(group_index(), column_tiles) * PRODUCT_TILE;
    uint left_words = row_words(rows);
    uint right_words = row_words(columns);
    float acc[EACH * EACH];
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = row_first + local_index() / SIDE + i * SIDE;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            uint column = column_first + local_index() % SIDE + j * SIDE;
            acc[i * EACH + j] = row < rows && column < columns ? dw[(first_row + row) * columns + column] : 0.0f;
        }
    }
    for (uint chunk = first_chunk; chunk < end_chunk; chunk++) {
        uint start = table[(ulong)chunk * 2u] - base;
        uint length = table[(ulong)chunk * 2u + 1u];
        Sums sums[EACH * EACH];
        clear(sums);
        for (uint t = 0u; t < length; t += DEPTH_ELEMENTS) {
            ulong from = start + t;
            barrier_local();
            load_transposed(
                left_tile, left, (ulong)tokens * left_words, from * left_words + row_first / 4u, left_words, length - t
            );
            load_transposed(
                right_tile, right, (ulong)tokens * right_words, from * right_words + column_first / 4u, right_words,
                length - t
            );
            barrier_local();
            multiply(sums, left_tile, right_tile, length - t);
        }
        float row_scales[EACH];
        float column_scales[EACH];
        #pragma unroll
        for (uint i = 0u; i < EACH; i++) {
            uint row = row_first + local_index() / SIDE + i * SIDE;
            uint column = column_first + local_index() % SIDE + i * SIDE;
            row_scales[i] = row < rows ? left_scales[(ulong)(chunk - base_chunk) * rows + row] : 0.0f;
            column_scales[i] = column < columns ? right_scales[(ulong)(chunk - base_chunk) * columns + column] : 0.0f;
        }
        #pragma unroll
        for (uint i = 0u; i < EACH; i++) {
            #pragma unroll
            for (uint j = 0u; j < EACH; j++) {
                float scale = row_scales[i] * column_scales[j];
                acc[i * EACH + j] = fma_rn(chunk_value(sums[i * EACH + j]), scale, acc[i * EACH + j]);
            }
        }
    }
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = row_first + local_index() / SIDE + i * SIDE;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            uint column = column_first + local_index() % SIDE + j * SIDE;
            if (row < rows && column < columns) {
                dw[(first_row + row) * columns + column] = acc[i * EACH + j];
            }
        }
    }
}
