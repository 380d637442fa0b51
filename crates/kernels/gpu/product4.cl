// Products with 4-bit weights (docs/numerics.md, "Product with 4-bit weights"). A group of 256
// computes PRODUCT_TILE x PRODUCT_TILE outputs, 4 x 4 to a work item, as in product.cl; packed
// int4 values become bytes on their way into local memory. A packed word holds eight places of one
// output: byte c has place c in its low and place c + 4 in its high bits.

// Words of the contraction that are in local memory at a time, four elements each.
#define DEPTH 16u
#define DEPTH_ELEMENTS (DEPTH * 4u)
// One more than PRODUCT_TILE: rows of the tile start in different banks.
#define PITCH (PRODUCT_TILE + 1)
// Work items along either side of the tile; a work item has the rows and columns a multiple of this
// apart.
#define SIDE 16u
#define EACH 4
#define PLACES 8u

// A tile of the left operand: `rows` rows of `depth` words. The last row stands in for those beyond
// it, whose outputs are not stored, and the first word for those beyond the depth, which meet no
// other. Everything is asked for before the first word is stored.
FUNCTION void load_left(
    LOCAL_POINTER int *tile, GLOBAL const int *planes, ulong plane, ulong at, uint words, uint rows, uint depth
) {
    uint word = local_index() % DEPTH;
    uint first = local_index() / DEPTH;
    int packed[SLICES][EACH];
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = first + i * SIDE < rows ? first + i * SIDE : rows - 1u;
        // A tile's rows lie within 2^32 bytes.
        uint offset = row * words + (word < depth ? word : 0u);
        #pragma unroll
        for (uint s = 0u; s < SLICES; s++) {
            packed[s][i] = (planes + (s * plane + at))[offset];
        }
    }
    #pragma unroll
    for (uint s = 0u; s < SLICES; s++) {
        #pragma unroll
        for (uint i = 0u; i < EACH; i++) {
            tile[(s * DEPTH + word) * PITCH + first + i * SIDE] = packed[s][i];
        }
    }
}

FUNCTION void clear(Sums *sums) {
    #pragma unroll
    for (int i = 0; i < EACH * EACH; i++) {
        sums[i] = no_sums();
    }
}

// Adds the products of both tiles to a work item's sums.
FUNCTION void multiply(Sums *sums, LOCAL_POINTER const int *left, LOCAL_POINTER const int *right, uint depth) {
    uint row = local_index() / SIDE;
    uint column = local_index() % SIDE;
    for (uint word = 0u; word < depth; word++) {
        int b[EACH];
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            b[j] = right[word * PITCH + column + j * SIDE];
        }
        #pragma unroll
        for (uint i = 0u; i < EACH; i++) {
            #pragma unroll
            for (uint s = 0u; s < SLICES; s++) {
                int a = left[(s * DEPTH + word) * PITCH + row + i * SIDE];
                #pragma unroll
                for (uint j = 0u; j < EACH; j++) {
                    sums[i * EACH + j].s[s] = dot4(a, b[j], sums[i * EACH + j].s[s]);
                }
            }
        }
    }
}

// y[m, n] = sum over k of x[m, k] W[n, k], for `lines` [weight][width / 8][columns] and starts of
// groups [weight][groups + 1].
KERNEL(GROUP) product4_forward(
    GLOBAL float *y, GLOBAL const int *left, GLOBAL const float *left_scales, uint left_rows, GLOBAL const uint *lines,
    GLOBAL const uchar *zeros, GLOBAL const uchar *group_scales, uint format, GLOBAL const uint *starts, uint groups, uint columns,
    uint width, GLOBAL const uint *table, uint tabled, uint first_tile, uint tiles, uint first_row, uint end_row
) {
    LOCAL int left_tile[SLICES * DEPTH * PITCH];
    LOCAL int right_tile[DEPTH * PITCH];
    // Neighbouring groups share weights: these are the larger operand.
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + mod_u32(group_index(), tiles));
    uint column_tile = div_u32(group_index(), tiles) * PRODUCT_TILE;
    uint rows = tile.end - tile.first;
    uint words = row_words(width);
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    // What a work item loads of the right operand: one column.
    uint load_column = local_index() % PRODUCT_TILE;
    uint load_line = local_index() / PRODUCT_TILE;
    int load_inside = column_tile + load_column < columns;
    ulong right_first = (ulong)tile.weight * (width / PLACES) * columns + column_tile + load_column;
    float acc[EACH * EACH];
    #pragma unroll
    for (int i = 0; i < EACH * EACH; i++) {
        acc[i] = 0.0f;
    }
    for (uint group = 0u; group < groups; group++) {
        ulong group_first = ((ulong)tile.weight * groups + group) * columns + column_tile;
        uint start = starts[(ulong)tile.weight * (groups + 1u) + group];
        uint group_end = starts[(ulong)tile.weight * (groups + 1u) + group + 1u];
        uint zero = load_inside ? zeros[group_first + load_column] * 0x01010101u : 0u;
        while (start < group_end) {
            uint chunk = start / CHUNK;
            uint end = group_end < (chunk + 1u) * CHUNK ? group_end : (chunk + 1u) * CHUNK;
            Sums sums[EACH * EACH];
            clear(sums);
            for (uint at = start; at < end; at += DEPTH_ELEMENTS) {
                uint depth = end - at < DEPTH_ELEMENTS ? (end - at) / 4u : DEPTH;
                barrier_local();
                load_left(
                    left_tile, left, (ulong)left_rows * words, (ulong)tile.first * words + at / 4u, words, rows, depth
                );
                for (uint line = load_line; line < depth / 2u; line += GROUP / PRODUCT_TILE) {
                    uint packed = load_inside ? lines[right_first + (ulong)(at / PLACES + line) * columns] : 0u;
                    LOCAL_POINTER int *to = right_tile + line * 2u * PITCH + load_column;
                    to[0] = (int)without_zeros(packed & 0x0f0f0f0fu, zero);
                    to[PITCH] = (int)without_zeros((packed >> 4) & 0x0f0f0f0fu, zero);
                }
                barrier_local();
                multiply(sums, left_tile, right_tile, depth);
            }
            float sigma[EACH];
            #pragma unroll
            for (uint j = 0u; j < EACH; j++) {
                uint column = local_index() % SIDE + j * SIDE;
                int inside = column_tile + column < columns;
                sigma[j] = inside ? load_stored(group_scales, format, group_first + column) * SIGMA_FACTOR : 0.0f;
            }
            #pragma unroll
            for (uint i = 0u; i < EACH; i++) {
                uint row = local_index() / SIDE + i * SIDE;
                float scale = row < rows ? left_scales[(ulong)(tile.first + row) * chunks + chunk] : 0.0f;
                #pragma unroll
                for (uint j = 0u; j < EACH; j++) {
                    acc[i * EACH + j] = fma_rn(chunk_value(sums[i * EACH + j]), scale * sigma[j], acc[i * EACH + j]);
                }
            }
            start = end;
        }
    }
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = local_index() / SIDE + i * SIDE;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            uint column = column_tile + local_index() % SIDE + j * SIDE;
            if (row < rows && column < columns) {
                y[(ulong)(tile.first + row) * columns + column] = acc[i * EACH + j];
            }
        }
    }
}

// dx[m, k] = sum over n of d[m, n] W'[n, k] for the places of one group: d is dy with sigma folded
// in, `width` of its columns from output `first_output` on, W' the whole numbers. A `fresh` sum
// starts from zero, others from dx. Place p is channel order[p] of dx where the weights are
// `ordered`.
KERNEL(GROUP) product4_input(
    GLOBAL float *dx, GLOBAL const int *left, GLOBAL const float *left_scales, uint left_rows, GLOBAL const uint *lines,
    GLOBAL const uchar *zeros, GLOBAL const uint *starts, GLOBAL const uint *order, uint ordered, uint groups, uint group,
    uint outputs, uint channels, uint first_output, uint width, uint fresh, GLOBAL const uint *table, uint tabled,
    uint first_tile, uint tiles, uint first_row, uint end_row
) {
    LOCAL int left_tile[SLICES * DEPTH * PITCH];
    LOCAL int right_tile[DEPTH * PITCH];
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + mod_u32(group_index(), tiles));
    uint first = starts[(ulong)tile.weight * (groups + 1u) + group] + div_u32(group_index(), tiles) * PRODUCT_TILE;
    uint group_end = starts[(ulong)tile.weight * (groups + 1u) + group + 1u];
    // Groups of other weights may be longer.
    uint columns = first < group_end ? group_end - first : 0u;
    uint rows = tile.end - tile.first;
    uint words = row_words(width);
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    uint load_word = local_index() % DEPTH;
    uint load_line = local_index() / DEPTH;
    ulong right_line = ((ulong)tile.weight * (channels / PLACES) + first / PLACES + load_line) * outputs + first_output;
    ulong zero_first = ((ulong)tile.weight * groups + group) * outputs + first_output;
    ulong to_column[EACH];
    float acc[EACH * EACH];
    #pragma unroll
    for (uint j = 0u; j < EACH; j++) {
        uint column = local_index() % SIDE + j * SIDE;
        int inside = column < columns;
        to_column[j] = inside && ordered ? order[(ulong)tile.weight * channels + first + column] : first + column;
        #pragma unroll
        for (uint i = 0u; i < EACH; i++) {
            uint row = local_index() / SIDE + i * SIDE;
            int old = !fresh && row < rows && inside;
            acc[i * EACH + j] = old ? dx[(ulong)(tile.first + row) * channels + to_column[j]] : 0.0f;
        }
    }
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        uint end = width - chunk * CHUNK < CHUNK ? width : (chunk + 1u) * CHUNK;
        Sums sums[EACH * EACH];
        clear(sums);
        for (uint at = chunk * CHUNK; at < end; at += DEPTH_ELEMENTS) {
            uint depth = end - at < DEPTH_ELEMENTS ? (end - at + 3u) / 4u : DEPTH;
            barrier_local();
            load_left(
                left_tile, left, (ulong)left_rows * words, (ulong)tile.first * words + at / 4u, words, rows, depth
            );
            if (load_line < PRODUCT_TILE / PLACES) {
                uint r[4];
                uint zero = 0u;
                #pragma unroll
                for (uint i = 0u; i < 4u; i++) {
                    uint output = at + load_word * 4u + i;
                    int inside = output < end && load_line * PLACES < columns;
                    r[i] = inside ? lines[right_line + output] : 0u;
                    zero |= (inside ? (uint)zeros[zero_first + output] : 0u) << (8u * i);
                }
                LOCAL_POINTER int *to = right_tile + load_word * PITCH + load_line * PLACES;
                uint numbers[PLACES];
                bytes_of_places(numbers, r);
                #pragma unroll
                for (uint c = 0u; c < PLACES; c++) {
                    to[c] = (int)without_zeros(numbers[c], zero);
                }
            }
            barrier_local();
            multiply(sums, left_tile, right_tile, depth);
        }
        #pragma unroll
        for (uint i = 0u; i < EACH; i++) {
            uint row = local_index() / SIDE + i * SIDE;
            float scale = row < rows ? left_scales[(ulong)(tile.first + row) * chunks + chunk] : 0.0f;
            #pragma unroll
            for (uint j = 0u; j < EACH; j++) {
                acc[i * EACH + j] = fma_rn(chunk_value(sums[i * EACH + j]), scale, acc[i * EACH + j]);
            }
        }
    }
    #pragma unroll
    for (uint i = 0u; i < EACH; i++) {
        uint row = local_index() / SIDE + i * SIDE;
        #pragma unroll
        for (uint j = 0u; j < EACH; j++) {
            if (row < rows && local_index() % SIDE + j * SIDE < columns) {
                dx[(ulong)(tile.first + row) * channels + to_column[j]] = acc[i * EACH + j];
            }
        }
    }
}
