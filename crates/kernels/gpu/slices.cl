// Cutting numbers into slices (docs/numerics.md, "Slices"): planes of bytes [slice][row][padded
// width], four to a word.

// Work items for one chunk, four elements each.
#define CHUNK_GROUP (CHUNK / 4)
// Columns that a group slices along the tokens, four to a work item.
#define COLUMNS 64
#define COLUMN_WORDS (COLUMNS / 4)
#define TOKENS_TOGETHER (GROUP / COLUMN_WORDS)
// Side of the square of bytes that a group turns.
#define TRANSPOSE 64

FUNCTION uint larger(uint a, uint b) {
    return a > b ? a : b;
}

// The largest value of the group, which has `size` work items and as many words of scratch.
FUNCTION uint group_max(LOCAL_POINTER uint *scratch, uint size, uint value) {
    uint l = local_index();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    value = __reduce_max_sync(0xffffffffu, value);
    if (l % 32u == 0u) {
        scratch[l / 32u] = value;
    }
    barrier_local();
    for (uint i = 0u; i < size / 32u; i++) {
        value = larger(value, scratch[i]);
    }
    return value;
#else
    scratch[l] = value;
    barrier_local();
    if (l < 16u) {
        for (uint i = l + 16u; i < size; i += 16u) {
            value = larger(value, scratch[i]);
        }
        scratch[l] = value;
    }
    barrier_local();
    uint result = 0u;
    for (uint i = 0u; i < 16u; i++) {
        result = larger(result, scratch[i]);
    }
    return result;
#endif
}

// One word of every plane from four numbers.
FUNCTION void store_slices(GLOBAL int *planes, ulong plane, ulong at, const float *x, const float *multiplier) {
    int q[4];
    for (int i = 0; i < 4; i++) {
        q[i] = quantise(x[i], multiplier[i]);
    }
    for (int s = 0; s < SLICES; s++) {
        planes[(ulong)s * plane + at] = packed_slice(q, s);
    }
}

// Slices chunk `chunk` of a row, four elements x to a work item; nothing is stored where the row
// does not exist.
FUNCTION void slice_chunk(
    GLOBAL int *planes, GLOBAL float *scales, LOCAL_POINTER uint *scratch, const float *x, ulong plane, ulong row, uint width,
    uint chunk, int exists
) {
    uint l = local_index();
    uint max_bits = 0u;
    for (int i = 0; i < 4; i++) {
        max_bits = larger(max_bits, magnitude_bits(x[i]));
    }
    max_bits = group_max(scratch, CHUNK_GROUP, max_bits);
    float multiplier = group_multiplier(max_bits);
    float multipliers[4];
    for (int i = 0; i < 4; i++) {
        multipliers[i] = multiplier;
    }
    uint words = row_words(width);
    uint word = chunk * CHUNK_GROUP + l;
    if (exists && word < words) {
        store_slices(planes, plane, row * words + word, x, multipliers);
    }
    if (exists && l == 0u) {
        scales[row * ((width + (CHUNK - 1u)) / CHUNK) + chunk] = group_scale(max_bits);
    }
}

// Four numbers from an address that is a multiple of 16 bytes.
FUNCTION void load4_global(float *to, GLOBAL const float *from) {
    FLOAT4 four = *(GLOBAL const FLOAT4 *)from;
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
}

// One group per (row, chunk).
KERNEL(CHUNK_GROUP) slice_rows(GLOBAL int *planes, GLOBAL float *scales, GLOBAL const float *x, uint rows, uint width) {
    LOCAL uint scratch[CHUNK_GROUP];
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    uint row = div_u32(group_index(), chunks);
    uint chunk = mod_u32(group_index(), chunks);
    uint column = chunk * CHUNK + local_index() * 4u;
    int exists = row < rows;
    float values[4];
    if (exists && width % 4u == 0u && column < width) {
        load4_global(values, x + (ulong)row * width + column);
    } else {
        for (uint i = 0u; i < 4u; i++) {
            values[i] = exists && column + i < width ? x[(ulong)row * width + column + i] : 0.0f;
        }
    }
    slice_chunk(planes, scales, scratch, values, (ulong)rows * row_words(width), row, width, chunk, exists);
}

// As slice_rows, the channels of a row in the order of the weight that it meets. One group per
// (tile, row of the tile, chunk).
KERNEL(CHUNK_GROUP) slice_ordered(
    GLOBAL int *planes, GLOBAL float *scales, GLOBAL const float *x, GLOBAL const uint *order, GLOBAL const uint *table,
    uint tabled, uint first_tile, uint first_row, uint end_row, uint rows, uint width
) {
    LOCAL uint scratch[CHUNK_GROUP];
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    uint chunk = mod_u32(group_index(), chunks);
    uint place = div_u32(group_index(), chunks);
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + place / PRODUCT_TILE);
    uint row = tile.first + place % PRODUCT_TILE;
    int exists = row < tile.end;
    GLOBAL const uint *channels = order + (ulong)tile.weight * width;
    uint column = chunk * CHUNK + local_index() * 4u;
    float values[4];
    for (uint i = 0u; i < 4u; i++) {
        values[i] = exists && column + i < width ? x[(ulong)row * width + channels[column + i]] : 0.0f;
    }
    slice_chunk(planes, scales, scratch, values, (ulong)rows * row_words(width), row, width, chunk, exists);
}

// The left operand of an input gradient: `width` columns of dy from `first_column` on, each times
// its weight row's scale. One group per (tile, row of the tile, chunk); row numbers start at `base`
// in dy and in the planes.
KERNEL(CHUNK_GROUP) slice_folded(
    GLOBAL int *planes, GLOBAL float *scales, GLOBAL const float *dy, GLOBAL const float *weight_scales,
    GLOBAL const uint *table, uint tabled, uint first_tile, uint first_row, uint end_row, uint base, uint rows, uint width,
    ulong dy_stride, uint first_column, uint first_weight, uint weight_rows, uint weight_first
) {
    LOCAL uint scratch[CHUNK_GROUP];
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    uint chunk = mod_u32(group_index(), chunks);
    uint place = div_u32(group_index(), chunks);
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + place / PRODUCT_TILE);
    uint row = tile.first + place % PRODUCT_TILE;
    int exists = row < tile.end;
    GLOBAL const float *scale = weight_scales + (ulong)(tile.weight - first_weight) * weight_rows + weight_first;
    uint column = chunk * CHUNK + local_index() * 4u;
    float values[4];
    // Whether four neighbours start at multiples of 16 bytes in both.
    int aligned = ((width | (uint)dy_stride | first_column | weight_rows | weight_first) & 3u) == 0u;
    if (exists && aligned && column < width) {
        float factors[4];
        load4_global(values, dy + (ulong)(row - base) * dy_stride + first_column + column);
        load4_global(factors, scale + column);
        for (uint i = 0u; i < 4u; i++) {
            values[i] = values[i] * factors[i];
        }
    } else {
        for (uint i = 0u; i < 4u; i++) {
            uint c = column + i;
            values[i] = exists && c < width ? dy[(ulong)(row - base) * dy_stride + first_column + c] * scale[c] : 0.0f;
        }
    }
    slice_chunk(planes, scales, scratch, values, (ulong)rows * row_words(width), row - base, width, chunk, exists);
}

// The left operand of an input gradient with 4-bit weights: `width` columns of dy from
// `first_column` on, each times the sigma of its output in one group; the scales of weight e and
// this group start at e * scales_per_weight + first_scale.
KERNEL(CHUNK_GROUP) slice_scaled(
    GLOBAL int *planes, GLOBAL float *scales, GLOBAL const float *dy, GLOBAL const uchar *group_scales, uint format,
    GLOBAL const uint *table, uint tabled, uint first_tile, uint first_row, uint end_row, uint rows, uint width,
    ulong dy_stride, uint first_column, ulong scales_per_weight, ulong first_scale
) {
    LOCAL uint scratch[CHUNK_GROUP];
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    uint chunk = mod_u32(group_index(), chunks);
    uint place = div_u32(group_index(), chunks);
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + place / PRODUCT_TILE);
    uint row = tile.first + place % PRODUCT_TILE;
    int exists = row < tile.end;
    ulong first = tile.weight * scales_per_weight + first_scale + first_column;
    uint column = chunk * CHUNK + local_index() * 4u;
    float values[4];
    for (uint i = 0u; i < 4u; i++) {
        uint c = column + i;
        int inside = exists && c < width;
        float sigma = inside ? load_stored(group_scales, format, first + c) * SIGMA_FACTOR : 0.0f;
        values[i] = inside ? dy[(ulong)row * dy_stride + first_column + c] * sigma : 0.0f;
    }
    slice_chunk(planes, scales, scratch, values, (ulong)rows * row_words(width), row, width, chunk, exists);
}

// One group per row: one scale over its whole width. Rows from `first` on become the rows of the
// planes.
KERNEL(GROUP) slice_weight(
    GLOBAL int *planes, GLOBAL float *scales, GLOBAL const uchar *w, uint format, ulong first, uint rows, uint width
) {
    LOCAL uint scratch[GROUP];
    uint l = local_index();
    uint row = group_index();
    ulong from = (first + row) * width;
    uint max_bits = 0u;
    for (uint i = l; i < width; i += GROUP) {
        max_bits = larger(max_bits, magnitude_bits(load_stored(w, format, from + i)));
    }
    max_bits = group_max(scratch, GROUP, max_bits);
    float multipliers[4];
    for (int i = 0; i < 4; i++) {
        multipliers[i] = group_multiplier(max_bits);
    }
    uint words = row_words(width);
    for (uint word = l; word < words; word += GROUP) {
        float values[4];
        for (uint i = 0u; i < 4u; i++) {
            uint column = word * 4u + i;
            values[i] = column < width ? load_stored(w, format, from + column) : 0.0f;
        }
        store_slices(planes, (ulong)rows * words, (ulong)row * words + word, values, multipliers);
    }
    if (l == 0u) {
        scales[row] = group_scale(max_bits);
    }
}

// Activations contracted over tokens: one scale per (token chunk, column). One group per (chunk,
// COLUMNS columns); the table holds start and length of every chunk. Chunk `first_chunk` has the
// first scales, token `base` the first row of the planes [slice][token][padded width]; in x that
// row has the number `x_base`.
KERNEL(GROUP) slice_columns(
    GLOBAL int *planes, GLOBAL float *scales, GLOBAL const float *x, GLOBAL const uint *table, uint first_chunk, uint base,
    uint x_base, uint tokens, uint width
) {
    LOCAL uint maxima[TOKENS_TOGETHER * COLUMNS];
    uint words = row_words(width);
    uint blocks = words / COLUMN_WORDS;
    uint chunk = div_u32(group_index(), blocks);
    uint start = table[(ulong)(first_chunk + chunk) * 2u];
    uint length = table[(ulong)(first_chunk + chunk) * 2u + 1u];
    uint word = local_index() % COLUMN_WORDS;
    uint phase = local_index() / COLUMN_WORDS;
    uint column = mod_u32(group_index(), blocks) * COLUMNS + word * 4u;
    GLOBAL const float *from = x + (ulong)(start - x_base) * width;
    uint max_bits[4];
    for (uint i = 0u; i < 4u; i++) {
        max_bits[i] = 0u;
    }
    for (uint t = phase; t < length; t += TOKENS_TOGETHER) {
        for (uint i = 0u; i < 4u; i++) {
            float value = column + i < width ? from[(ulong)t * width + column + i] : 0.0f;
            max_bits[i] = larger(max_bits[i], magnitude_bits(value));
        }
    }
    for (uint i = 0u; i < 4u; i++) {
        maxima[phase * COLUMNS + word * 4u + i] = max_bits[i];
    }
    barrier_local();
    float multipliers[4];
    for (uint i = 0u; i < 4u; i++) {
        for (uint other = 0u; other < TOKENS_TOGETHER; other++) {
            max_bits[i] = larger(max_bits[i], maxima[other * COLUMNS + word * 4u + i]);
        }
        multipliers[i] = group_multiplier(max_bits[i]);
        if (phase == 0u && column + i < width) {
            scales[(ulong)chunk * width + column + i] = group_scale(max_bits[i]);
        }
    }
    for (uint t = phase; t < length; t += TOKENS_TOGETHER) {
        float values[4];
        for (uint i = 0u; i < 4u; i++) {
            values[i] = column + i < width ? from[(ulong)t * width + column + i] : 0.0f;
        }
        ulong at = (ulong)(start - base + t) * words + column / 4u;
        store_slices(planes, (ulong)tokens * words, at, values, multipliers);
    }
}

// Exchanges rows and columns of every plane: `rows` rows from `first` on, of planes with
// `plane_rows` rows of `width` bytes, become `width` rows of as many bytes. One group per square of
// TRANSPOSE by TRANSPOSE bytes, a work item turns 4 by 4 of them; what lies beyond is padded with
// zeros.
KERNEL(GROUP) transpose_planes(
    GLOBAL int *transposed, GLOBAL const int *planes, uint plane_rows, ulong first, uint rows, uint width
) {
    LOCAL int square[TRANSPOSE * (TRANSPOSE / 4 + 1)];
    uint row_length = row_words(rows);
    ulong column_length = row_words(width);
    uint across = row_length / (TRANSPOSE / 4);
    uint row_first = mod_u32(group_index(), across) * TRANSPOSE;
    uint column_first = div_u32(group_index(), across) * TRANSPOSE;
    uint fast = local_index() % (TRANSPOSE / 4);
    uint slow = local_index() / (TRANSPOSE / 4);
    for (uint s = 0u; s < SLICES; s++) {
        uint r[4];
        for (uint i = 0u; i < 4u; i++) {
            uint row = row_first + slow * 4u + i;
            int inside = row < rows && column_first + fast * 4u < column_length * 4u;
            ulong at = (first + row + (ulong)s * plane_rows) * column_length + column_first / 4u + fast;
            r[i] = inside ? (uint)planes[at] : 0u;
        }
        barrier_local();
        for (uint i = 0u; i < 4u; i++) {
            uint shift = 8u * i;
            square[(fast * 4u + i) * (TRANSPOSE / 4 + 1) + slow] =
                pack4((int)(r[0] >> shift), (int)(r[1] >> shift), (int)(r[2] >> shift), (int)(r[3] >> shift));
        }
        barrier_local();
        for (uint i = 0u; i < 4u; i++) {
            uint column = slow * 4u + i;
            if (column_first + column < width) {
                transposed[((ulong)s * width + column_first + column) * row_length + row_first / 4u + fast] =
                    square[column * (TRANSPOSE / 4 + 1) + fast];
            }
        }
    }
}
