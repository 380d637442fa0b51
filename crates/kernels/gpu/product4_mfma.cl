// The kernels of product4.cl on AMD's matrix cores, with the same arguments and the same bits.
// product_mfma.cl stands before this file: tiles, lanes and results are as there, but the right
// tile has one slice, whose int4 values become bytes on their way into local memory.

#define PLACES 8u
#define LINES (STEP / PLACES)
#define RIGHT_WORDS (RIGHT_UNITS * WAVE * PITCH)

typedef int INT2 __attribute__((ext_vector_type(2)));

// As fetch_along for left rows from a word on that need not be a multiple of four: two halves, each
// inside its row or replaced by the row's last one, which meets zeros.
FUNCTION void fetch_halves(INT4 *to, GLOBAL const int *planes, ulong plane, ulong at, uint words, uint rows, uint rest) {
    uint row = local_index() / 4u;
    row = row < rows ? row : rows - 1u;
    #pragma unroll
    for (uint half_piece = 0u; half_piece < 2u; half_piece++) {
        uint word = local_index() % 4u * 4u + half_piece * 2u;
        uint offset = (row * words + (word < rest ? word : rest - 2u)) * 4u;
        #pragma unroll
        for (uint s = 0u; s < SLICES; s++) {
            INT2 two = AT(INT2, planes + (s * plane + at), offset);
            to[s][half_piece * 2u] = two[0];
            to[s][half_piece * 2u + 1u] = two[1];
        }
    }
}

// Adds the products of both tiles to the sums of a wave.
FUNCTION void multiply4(INT16 *sums, LOCAL_POINTER const int *left, LOCAL_POINTER const int *right) {
    left += wave_left();
    right += wave_right();
    #pragma unroll
    for (uint piece = 0u; piece < 4u; piece += 2u) {
        uint word = lane_place(piece);
        INT4 a[BLOCKS];
        #pragma unroll
        for (uint block = 0u; block < BLOCKS; block++) {
            a[block] = *(LOCAL_POINTER const INT4 *)(right + block * SIDE * PITCH + word);
        }
        #pragma unroll
        for (uint s = 0u; s < SLICES; s++) {
            INT4 b = *(LOCAL_POINTER const INT4 *)(left + s * LEFT_UNITS * WAVE * PITCH + word);
            #pragma unroll
            for (uint block = 0u; block < BLOCKS; block++) {
                sums[block * SLICES + s] = add_block(sums[block * SLICES + s], a[block], b);
            }
        }
    }
}

// Arguments as in product4.cl.
MFMA_KERNEL product4_forward(
    GLOBAL float *y, GLOBAL const int *left, GLOBAL const float *left_scales, uint left_rows, GLOBAL const uint *lines,
    GLOBAL const uchar *zeros, GLOBAL const uchar *group_scales, uint format, GLOBAL const uint *starts, uint groups, uint columns,
    uint width, GLOBAL const uint *table, uint tabled, uint first_tile, uint tiles, uint first_row, uint end_row
) {
    LOCAL ALIGNED int left_tile[SLICES * LEFT_UNITS * WAVE * PITCH];
    LOCAL ALIGNED int right_tile[RIGHT_WORDS];
    LOCAL ALIGNED float sigmas[COLUMNS];
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + mod_u32(group_index(), tiles));
    uint column_tile = div_u32(group_index(), tiles) * COLUMNS;
    uint rows = tile.end - tile.first;
    uint words = row_words(width);
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    // What a work item loads of the right operand: every second line of one column.
    uint load_column = local_index() % COLUMNS;
    uint load_line = local_index() / COLUMNS;
    int load_inside = column_tile + load_column < columns;
    ulong right_first = (ulong)tile.weight * (width / PLACES) * columns + column_tile + load_column;
    ulong left_plane = (ulong)left_rows * words;
    ulong left_at = (ulong)tile.first * words;
    uint row = output_row();
    float acc[BLOCKS * EACH];
    #pragma unroll
    for (uint i = 0u; i < BLOCKS * EACH; i++) {
        acc[i] = 0.0f;
    }
    for (uint group = 0u; group < groups; group++) {
        ulong group_first = ((ulong)tile.weight * groups + group) * columns + column_tile;
        uint start = starts[(ulong)tile.weight * (groups + 1u) + group];
        uint group_end = starts[(ulong)tile.weight * (groups + 1u) + group + 1u];
        uint zero = load_inside ? zeros[group_first + load_column] * 0x01010101u : 0u;
        // The results of the group before have used its sigmas.
        barrier_local();
        if (local_index() < COLUMNS) {
            sigmas[local_index()] =
                load_inside ? load_stored(group_scales, format, group_first + local_index()) * SIGMA_FACTOR : 0.0f;
        }
        while (start < group_end) {
            uint chunk = start / CHUNK;
            uint end = group_end < (chunk + 1u) * CHUNK ? group_end : (chunk + 1u) * CHUNK;
            INT16 sums[BLOCKS * SLICES];
            clear(sums);
            for (uint at = start; at < end; at += STEP) {
                INT4 from_left[SLICES];
                uint packed[LINES / 2u];
                fetch_halves(from_left, left, left_plane, left_at + at / 4u, words, rows, words - at / 4u);
                #pragma unroll
                for (uint i = 0u; i < LINES / 2u; i++) {
                    uint line = load_line + i * 2u;
                    int inside = load_inside && at + line * PLACES < end;
                    packed[i] = inside ? lines[right_first + (ulong)(at / PLACES + line) * columns] : 0u;
                }
                barrier_local();
                store_along(left_tile, from_left, LEFT_UNITS);
                #pragma unroll
                for (uint i = 0u; i < LINES / 2u; i++) {
                    uint line = load_line + i * 2u;
                    int inside = at + line * PLACES < end;
                    INT2 two;
                    two[0] = inside ? (int)without_zeros(packed[i] & 0x0f0f0f0fu, zero) : 0;
                    two[1] = inside ? (int)without_zeros((packed[i] >> 4) & 0x0f0f0f0fu, zero) : 0;
                    *(LOCAL_POINTER INT2 *)(right_tile + place(load_column, line / 2u) + line % 2u * 2u) = two;
                }
                barrier_local();
                multiply4(sums, left_tile, right_tile);
            }
            float scale = row < rows ? left_scales[(ulong)(tile.first + row) * chunks + chunk] : 0.0f;
            #pragma unroll
            for (uint i = 0u; i < BLOCKS * EACH; i++) {
                float sigma = sigmas[output_column() + element_column(i)];
                acc[i] = fma_rn(value_of(sums, i / EACH, i % EACH), scale * sigma, acc[i]);
            }
            start = end;
        }
    }
    uint column = column_tile + output_column();
    uint inside = columns_inside(row, rows, column, columns);
    GLOBAL float *out = y + ((ulong)(tile.first + row) * columns + column);
    store_results(out, acc, inside);
}

// Arguments as in product4.cl.
MFMA_KERNEL product4_input(
    GLOBAL float *dx, GLOBAL const int *left, GLOBAL const float *left_scales, uint left_rows, GLOBAL const uint *lines,
    GLOBAL const uchar *zeros, GLOBAL const uint *starts, GLOBAL const uint *order, uint ordered, uint groups, uint group,
    uint outputs, uint channels, uint first_output, uint width, uint fresh, GLOBAL const uint *table, uint tabled,
    uint first_tile, uint tiles, uint first_row, uint end_row
) {
    LOCAL ALIGNED int left_tile[SLICES * LEFT_UNITS * WAVE * PITCH];
    LOCAL ALIGNED int right_tile[RIGHT_WORDS];
    RowTile tile = row_tile(table, tabled, first_row, end_row, first_tile + mod_u32(group_index(), tiles));
    uint first = starts[(ulong)tile.weight * (groups + 1u) + group] + div_u32(group_index(), tiles) * COLUMNS;
    uint group_end = starts[(ulong)tile.weight * (groups + 1u) + group + 1u];
    // Groups of other weights may be longer.
    uint columns = first < group_end ? group_end - first : 0u;
    uint rows = tile.end - tile.first;
    uint words = row_words(width);
    uint chunks = (width + (CHUNK - 1u)) / CHUNK;
    // What a work item loads of the right operand: four outputs of one line.
    uint load_quad = local_index() % (STEP / 4u);
    uint load_line = local_index() / (STEP / 4u);
    ulong right_line = ((ulong)tile.weight * (channels / PLACES) + first / PLACES + load_line) * outputs + first_output;
    ulong zero_first = ((ulong)tile.weight * groups + group) * outputs + first_output;
    uint row = output_row();
    uint column = output_column();
    uint inside = columns_inside(row, rows, column, columns);
    GLOBAL float *out = dx + (ulong)(tile.first + row) * channels;
    GLOBAL const uint *channel = order + ((ulong)tile.weight * channels + first + column);
    float acc[BLOCKS * EACH];
    #pragma unroll
    for (uint i = 0u; i < BLOCKS * EACH; i++) {
        uint at = element_column(i);
        acc[i] = 0.0f;
        if (!fresh && at < inside) {
            acc[i] = out[ordered ? channel[at] : first + column + at];
        }
    }
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        uint end = width - chunk * CHUNK < CHUNK ? width : (chunk + 1u) * CHUNK;
        INT16 sums[BLOCKS * SLICES];
        clear(sums);
        for (uint at = chunk * CHUNK; at < end; at += STEP) {
            INT4 from_left[SLICES * LEFT_UNITS];
            uint r[4];
            uint zero = 0u;
            fetch_along(
                from_left, LEFT_UNITS, left, (ulong)left_rows * words, (ulong)tile.first * words + at / 4u, words, rows
            );
            #pragma unroll
            for (uint i = 0u; i < 4u; i++) {
                uint output = at + load_quad * 4u + i;
                int exists = output < end && load_line * PLACES < columns;
                r[i] = exists ? lines[right_line + output] : 0u;
                zero |= (exists ? (uint)zeros[zero_first + output] : 0u) << (8u * i);
            }
            barrier_local();
            store_along(left_tile, from_left, LEFT_UNITS);
            // Eight rows whose pieces lie alike.
            LOCAL_POINTER int *to = right_tile + place(load_line * PLACES, load_quad / 4u) + load_quad % 4u;
            uint numbers[PLACES];
            bytes_of_places(numbers, r);
            #pragma unroll
            for (uint c = 0u; c < PLACES; c++) {
                to[c * PITCH] = (int)without_zeros(numbers[c], zero);
            }
            barrier_local();
            multiply4(sums, left_tile, right_tile);
        }
        accumulate_rows(acc, sums, row < rows ? left_scales[(ulong)(tile.first + row) * chunks + chunk] : 0.0f);
    }
    #pragma unroll
    for (uint i = 0u; i < BLOCKS * EACH; i++) {
        uint at = element_column(i);
        if (at < inside) {
            out[ordered ? channel[at] : first + column + at] = acc[i];
        }
    }
}
