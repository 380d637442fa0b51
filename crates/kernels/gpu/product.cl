// Slice products (docs/numerics.md, "Slice product"). A group of 256 computes PRODUCT_TILE x
// PRODUCT_TILE outputs, 4 x 4 neighbours to a work item, from tiles of packed bytes in local
// memory: [word of the contraction][slice][row or column]. While a tile is multiplied, the words of
// the next one are on their way: each kernel spells this loop for its own pair of operands.

// Words of the contraction that are in local memory at a time.
#define DEPTH 16u
#define DEPTH_ELEMENTS (DEPTH * 4u)
#define TILE_WORDS (SLICES * DEPTH * PRODUCT_TILE)
// Work items along either side of the tile, and the rows and columns of each.
#define SIDE 16u
#define EACH 4

// Where four neighbouring rows or columns of a word lie in a tile. The order of the fours is
// permuted by word, so that work items which store words of one row, or load several rows, hit
// different banks.
FUNCTION uint tile_index(uint slice, uint word, uint four) {
    return ((word * SLICES + slice) * SIDE + (four ^ (word / 4u * 2u))) * 4u;
}

// The first of the rows of a work item in its tile, and the first of its columns.
FUNCTION uint item_row(void) {
    return local_index() / SIDE * EACH;
}

FUNCTION uint item_column(void) {
    return local_index() % SIDE * EACH;
}

// What a work item loads of a tile: four words of every slice.
typedef struct {
    uint words[SLICES][4];
} Fetched;

// Addresses are the sum of a pointer that all work items share and an offset of 32 bits in bytes,
// which AMD's loads take apart: a tile's rows lie within 2^32 bytes.
#define AT(type, pointer, offset) (*(GLOBAL const type *)((GLOBAL const uchar *)(pointer) + (offset)))

// Of an operand whose rows run along the contraction: `rows` rows, the first of them and the depth
// at `at`; a work item has four words of a row. The last row stands in for those beyond it: their
// products become outputs that are not stored.
FUNCTION void fetch_along(Fetched *to, GLOBAL const int *planes, ulong plane, ulong at, uint words, uint rows) {
    uint word = local_index() % 4u * 4u;
    uint row = local_index() / 4u;
    row = row < rows ? row : rows - 1u;
    #pragma unroll
    for (uint s = 0u; s < SLICES; s++) {
        UINT4 four = AT(UINT4, planes + (s * plane + at), (row * words + word) * 4u);
        to->words[s][0] = four.x;
        to->words[s][1] = four.y;
        to->words[s][2] = four.z;
        to->words[s][3] = four.w;
    }
}

FUNCTION void put_along(LOCAL_POINTER int *tile, const Fetched *from) {
    uint word = local_index() % 4u * 4u;
    uint row = local_index() / 4u;
    #pragma unroll
    for (uint s = 0u; s < SLICES; s++) {
        #pragma unroll
        for (uint i = 0u; i < 4u; i++) {
            tile[tile_index(s, word, row / 4u) + i * (SLICES * PRODUCT_TILE) + row % 4u] = (int)from->words[s][i];
        }
    }
}

// Of an operand whose columns run along the contraction: PRODUCT_TILE columns from `at` on, of
// which row padding may be part, and the next `rows` rows; a work item has four bytes of four rows.
// Rows beyond the last are zeros.
FUNCTION void fetch_transposed(Fetched *to, GLOBAL const int *planes, ulong plane, ulong at, uint words, uint rows) {
    uint column = local_index() % SIDE;
    uint word = local_index() / SIDE;
    #pragma unroll
    for (uint i = 0u; i < 4u; i++) {
        uint row = word * 4u + i;
        // All bits where there is a row, and none where the first row is read in its place.
        uint inside = row < rows ? 0xffffffffu : 0u;
        uint offset = ((row * words + column) * 4u) & inside;
        #pragma unroll
        for (uint s = 0u; s < SLICES; s++) {
            to->words[s][i] = AT(uint, planes + (s * plane + at), offset) & inside;
        }
    }
}

FUNCTION void put_transposed(LOCAL_POINTER int *tile, Fetched *from) {
    uint column = local_index() % SIDE;
    uint word = local_index() / SIDE;
    #pragma unroll
    for (uint s = 0u; s < SLICES; s++) {
        transpose_bytes(from->words[s]);
        LOCAL_POINTER int *to = tile + tile_index(s, word, column);
        #pragma unroll
        for (uint i = 0u; i < 4u; i++) {
            to[i] = (int)from->words[s][i];
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
    for (uint word = 0u; word < words; word += 4u) {
        LOCAL_POINTER const int *a_from = left + tile_index(0u, word, local_index() / SIDE);
        LOCAL_POINTER const int *b_from = right + tile_index(0u, word, local_index() % SIDE);
        #pragma unroll
        for (uint w = 0u; w < 4u; w++) {
            int a[EACH][SLICES];
            int b[EACH][SLICES];
            #pragma unroll
            for (uint s = 0u; s < SLICES; s++) {
                load_neighbours(a, s, a_from + (w * SLICES + s) * PRODUCT_TILE);
                load_neighbours(b, s, b_from + (w * SLICES + s) * PRODUCT_TILE);
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
        uint row = item_row() + i;
        float scale = row < rows ? scales[(first + row) * chunks + chunk] : 0.0f;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            acc[i * EACH + j] = fma_rn(chunk_value(sums[i * EACH + j]), scale, acc[i * EACH + j]);
        }
    }
}

// y[m, n] = sum over k of x[m, k] W[n, k]. Row m of x is row m - left_base of its planes and row
// m - y_base of y; the `columns` weight rows from `weight_row` on become the columns of y from
// `y_column` on.
KERNEL(GROUP) product_forward(
    GLOBAL float *y, ulong y_stride, uint y_base, uint y_column, GLOBAL const int *left, GLOBAL const float *left_scales,
    uint left_rows, uint left_base, GLOBAL const int *right, GLOBAL const float *right_scales, uint right_rows,
    uint weight_base, uint weight_rows, uint weight_row, uint columns, uint width, GLOBAL const uint *table, uint tabled,
    uint first_tile, uint tiles, uint first_row, uint end_row
) {
    LOCAL ALIGNED int left_tile[TILE_WORDS];
    LOCAL ALIGNED int right_tile[TILE_WORDS];
    Fetched left_next, right_next;
    // Neighbouring groups share weights: these are the larger operand.
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + mod_u32(group_index(), tiles));
    uint column_tile = div_u32(group_index(), tiles) * PRODUCT_TILE;
    uint rows = tile.end - tile.first;
    uint words = row_words(width);
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    ulong left_first = tile.first - left_base;
    ulong right_first = (ulong)(tile.weight - weight_base) * weight_rows + weight_row + column_tile;
    float acc[EACH * EACH];
    #pragma unroll
    for (int i = 0; i < EACH * EACH; i++) {
        acc[i] = 0.0f;
    }
    left += left_first * words;
    right += right_first * words;
    ulong left_plane = (ulong)left_rows * words;
    ulong right_plane = (ulong)right_rows * words;
    uint right_count = columns - column_tile;
    if (width > 0u) {
        fetch_along(&left_next, left, left_plane, 0u, words, rows);
        fetch_along(&right_next, right, right_plane, 0u, words, right_count);
    }
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        uint end = width - chunk * CHUNK < CHUNK ? width : (chunk + 1u) * CHUNK;
        Sums sums[EACH * EACH];
        clear(sums);
        for (uint at = chunk * CHUNK; at < end; at += DEPTH_ELEMENTS) {
            barrier_local();
            put_along(left_tile, &left_next);
            put_along(right_tile, &right_next);
            barrier_local();
            uint next = at + DEPTH_ELEMENTS;
            if (next < width) {
                fetch_along(&left_next, left, left_plane, next / 4u, words, rows);
                fetch_along(&right_next, right, right_plane, next / 4u, words, right_count);
            }
            multiply(sums, left_tile, right_tile, end - at);
        }
        accumulate_rows(acc, sums, left_scales, left_first, chunks, chunk, rows);
    }
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = item_row() + i;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            uint column = item_column() + j;
            if (row < rows && column_tile + column < columns) {
                y[(ulong)(tile.first + row - y_base) * y_stride + y_column + column_tile + column] =
                    acc[i * EACH + j] * right_scales[right_first + column];
            }
        }
    }
}

// dx[m, k] = sum over n of d[m, n] W[n, k], d being dy with the scales of W folded in. Row m of d
// is row m - left_base of its planes; its `width` columns meet the weight rows from `weight_row`
// on. A `fresh` sum starts from zero, others from dx.
KERNEL(GROUP) product_input(
    GLOBAL float *dx, GLOBAL const int *left, GLOBAL const float *left_scales, uint left_rows, uint left_base,
    GLOBAL const int *right, uint right_rows, uint weight_base, uint weight_rows, uint weight_row, uint columns,
    uint width, uint fresh, GLOBAL const uint *table, uint tabled, uint first_tile, uint tiles, uint first_row, uint end_row
) {
    LOCAL ALIGNED int left_tile[TILE_WORDS];
    LOCAL ALIGNED int right_tile[TILE_WORDS];
    Fetched left_next, right_next;
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + mod_u32(group_index(), tiles));
    uint column_tile = div_u32(group_index(), tiles) * PRODUCT_TILE;
    uint rows = tile.end - tile.first;
    uint left_words = row_words(width);
    uint right_words = row_words(columns);
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    ulong left_first = tile.first - left_base;
    ulong right_first = (ulong)(tile.weight - weight_base) * weight_rows + weight_row;
    float acc[EACH * EACH];
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = item_row() + i;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            uint column = column_tile + item_column() + j;
            int old = !fresh && row < rows && column < columns;
            acc[i * EACH + j] = old ? dx[(ulong)(tile.first + row) * columns + column] : 0.0f;
        }
    }
    left += left_first * left_words;
    right += right_first * right_words + column_tile / 4u;
    ulong left_plane = (ulong)left_rows * left_words;
    ulong right_plane = (ulong)right_rows * right_words;
    if (width > 0u) {
        fetch_along(&left_next, left, left_plane, 0u, left_words, rows);
        fetch_transposed(&right_next, right, right_plane, 0u, right_words, width);
    }
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        uint end = width - chunk * CHUNK < CHUNK ? width : (chunk + 1u) * CHUNK;
        Sums sums[EACH * EACH];
        clear(sums);
        for (uint at = chunk * CHUNK; at < end; at += DEPTH_ELEMENTS) {
            barrier_local();
            put_along(left_tile, &left_next);
            put_transposed(right_tile, &right_next);
            barrier_local();
            uint next = at + DEPTH_ELEMENTS;
            if (next < width) {
                fetch_along(&left_next, left, left_plane, next / 4u, left_words, rows);
                fetch_transposed(&right_next, right, right_plane, (ulong)next * right_words, right_words, width - next);
            }
            multiply(sums, left_tile, right_tile, end - at);
        }
        accumulate_rows(acc, sums, left_scales, left_first, chunks, chunk, rows);
    }
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = item_row() + i;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            uint column = column_tile + item_column() + j;
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
    LOCAL ALIGNED int left_tile[TILE_WORDS];
    LOCAL ALIGNED int right_tile[TILE_WORDS];
    Fetched left_next, right_next;
    uint column_tiles = (columns + (PRODUCT_TILE - 1u)) / PRODUCT_TILE;
    uint row_first = div_u32(group_index(), column_tiles) * PRODUCT_TILE;
    uint column_first = mod_u32(group_index(), column_tiles) * PRODUCT_TILE;
    uint left_words = row_words(rows);
    uint right_words = row_words(columns);
    ulong left_plane = (ulong)tokens * left_words;
    ulong right_plane = (ulong)tokens * right_words;
    left += row_first / 4u;
    right += column_first / 4u;
    float acc[EACH * EACH];
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = row_first + item_row() + i;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            uint column = column_first + item_column() + j;
            acc[i * EACH + j] = row < rows && column < columns ? dw[(first_row + row) * columns + column] : 0.0f;
        }
    }
    for (uint chunk = first_chunk; chunk < end_chunk; chunk++) {
        uint start = table[(ulong)chunk * 2u] - base;
        uint length = table[(ulong)chunk * 2u + 1u];
        Sums sums[EACH * EACH];
        clear(sums);
        fetch_transposed(&left_next, left, left_plane, (ulong)start * left_words, left_words, length);
        fetch_transposed(&right_next, right, right_plane, (ulong)start * right_words, right_words, length);
        for (uint t = 0u; t < length; t += DEPTH_ELEMENTS) {
            barrier_local();
            put_transposed(left_tile, &left_next);
            put_transposed(right_tile, &right_next);
            barrier_local();
            uint next = t + DEPTH_ELEMENTS;
            if (next < length) {
                ulong from = start + next;
                fetch_transposed(&left_next, left, left_plane, from * left_words, left_words, length - next);
                fetch_transposed(&right_next, right, right_plane, from * right_words, right_words, length - next);
            }
            multiply(sums, left_tile, right_tile, length - t);
        }
        float row_scales[EACH];
        float column_scales[EACH];
        #pragma unroll
        for (uint i = 0u; i < EACH; i++) {
            uint row = row_first + item_row() + i;
            uint column = column_first + item_column() + i;
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
        uint row = row_first + item_row() + i;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            uint column = column_first + item_column() + j;
            if (row < rows && column < columns) {
                dw[(first_row + row) * columns + column] = acc[i * EACH + j];
            }
        }
    }
}
