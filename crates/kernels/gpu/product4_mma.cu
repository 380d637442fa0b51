// Products with 4-bit weights on the int8 tensor cores of sm_80 and later (docs/numerics.md,
// "Product with 4-bit weights"), on the main loop of product_mma.cuh with one plane on the right:
// packed int4 values become bytes on their way into shared memory. A packed word holds eight places
// of one output: byte c has place c in its low and place c + 4 in its high bits.

#define PLACES 8u

// Where byte `byte` of a row lies in a slot's right plane.
FUNCTION uint right_byte(uint row, uint byte) {
    return row * STEP + (byte / 16u ^ row / 2u % 4u) * 16u + byte % 16u;
}

// `slot` as an address of CUDA C++.
FUNCTION uchar *slot_pointer(uint slot) {
    return shared + (slot - (uint)__cvta_generic_to_shared(shared));
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward: rows are outputs, their bytes places

// Words of a thread per step, all of one output and neighbours along the places, which are of one
// group: groups are multiples of 32.
#define LINES (COLUMNS * STEP / PLACES / THREADS)

struct PackedRight {
    const uint *lines;           // this thread's next word
    const uchar *zeros;          // of its output, in that word's group
    uint columns;                // of the weight: from word to word, and from group to group
    uint place, places;          // the next word's first place, and how many its output has
    uint group_size, group_end;  // the first place after the group
    // Read ahead.
    uint words[LINES], zero;

    MEMBER PackedRight(const uint *lines, const uchar *zeros, uint columns, uint first_column, uint places, uint group_size)
        : lines(lines), zeros(zeros), columns(columns), places(places), group_size(group_size), group_end(group_size) {
        uint column = first_column + threadIdx.x % COLUMNS, line = threadIdx.x / COLUMNS * LINES;
        if (column >= columns) {
            this->places = 0u;
        }
        place = line * PLACES;
        this->lines += (ulong)line * columns + column;
        this->zeros += column;
        read();
    }

    MEMBER void read(void) {
        for (; place >= group_end; group_end += group_size) {
            zeros += columns;
        }
        zero = place < places ? zeros[0] * 0x01010101u : 0u;
#pragma unroll
        for (uint i = 0u; i < LINES; i++) {
            words[i] = place + PLACES * i < places ? lines[(ulong)i * columns] : 0u;
        }
    }

    MEMBER void fill(uint to) {
        uint row = threadIdx.x % COLUMNS, byte = threadIdx.x / COLUMNS * LINES * PLACES;
#pragma unroll
        for (uint i = 0u; i < LINES; i += 2u) {
            uint x = words[i], y = words[i + 1u];
            uint4 bytes = make_uint4(
                without_zeros(x & 0x0f0f0f0fu, zero), without_zeros(x >> 4 & 0x0f0f0f0fu, zero),
                without_zeros(y & 0x0f0f0f0fu, zero), without_zeros(y >> 4 & 0x0f0f0f0fu, zero)
            );
            *(uint4 *)(slot_pointer(to) + right_byte(row, byte + PLACES * i)) = bytes;
        }
        lines += (ulong)(STEP / PLACES) * columns;
        place += STEP;
        read();
    }
};

// acc = fma(value, scale of the row's chunk * sigma, acc) for the part of a group that lies in one
// chunk. `scales` and `sigmas` start at the tile's first row and column.
FUNCTION void add_part(
    TileResults &results, const TileSums &sums, const Place &place, const float *scales, uint chunks, uint rows,
    const uchar *sigmas, uint format, ulong first, uint columns
) {
    float row_scales[2 * ROW_TILES];
#pragma unroll
    for (uint i = 0u; i < 2u * ROW_TILES; i++) {
        uint row = place.row + 8u * i < rows ? place.row + 8u * i : rows - 1u;
        row_scales[i] = __ldg(scales + (ulong)row * chunks);
    }
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint column = place.column + 8u * n + e;
            float sigma = load_stored(sigmas, format, first + (column < columns ? column : columns - 1u)) * SIGMA_FACTOR;
#pragma unroll
            for (int i = 0; i < 2 * ROW_TILES; i++) {
                int at = 4 * n + 2 * (i % 2) + e;
                results.v[i / 2][at] = fma_rn(sums.value(i / 2, at), row_scales[i] * sigma, results.v[i / 2][at]);
            }
        }
    }
}

// As product4_forward in product4.cl. table may be null: first_row .. end_row and weight 0. The
// size of groups is a multiple of 32, or there is one group. width > 0.
extern "C" __global__ void __launch_bounds__(THREADS, 1) product4_forward_mma(
    float *y, const uchar *left, const float *left_scales, uint left_rows, const uint *lines, const uchar *zeros,
    const uchar *group_scales, uint format, uint groups, uint group_size, uint columns, uint width, const uint *table, uint tiles,
    uint first_row, uint end_row
) {
    uint row_tile, column_tile;
    tile_of(blockIdx.x, tiles, (columns + COLUMNS - 1u) / COLUMNS, row_tile, column_tile);
    uint first = first_row + row_tile * ROWS, end = end_row - first < ROWS ? end_row : first + ROWS, weight = 0u;
    if (table) {
        first = table[3u * row_tile];
        end = table[3u * row_tile + 1u];
        weight = table[3u * row_tile + 2u];
    }
    uint column = column_tile * COLUMNS, rows = end - first, chunks = (width + CHUNK - 1u) / CHUNK;
    ulong pitch = row_words(width) * 4u, group_first = (ulong)weight * groups * columns;
    const Planes left_planes = {left + first * pitch, pitch, left_rows * pitch, rows};
    const PackedRight right(
        lines + (ulong)weight * (width / PLACES) * columns, zeros + group_first, columns, column, width, group_size
    );
    const Output out = {y + (ulong)first * columns + column, columns, rows, columns - column};

    Ring<PackedRight> ring(left_planes, right, (width + STEP - 1u) / STEP);
    const Place place;
    TileResults results;
    results.clear();
    uint slot = 0u;
    for (uint at = 0u; at < width;) {
        uint group = at / group_size, chunk = at / CHUNK;
        uint group_end = (group + 1u) * group_size, chunk_end = (chunk + 1u) * CHUNK;
        uint part_end = group_end < chunk_end ? group_end : chunk_end;
        part_end = part_end < width ? part_end : width;
        TileSums sums;
        sums.clear();
#pragma unroll 1
        for (; at < part_end; at += 32u) {
            if (at % STEP == 0u) {
                slot = ring.next();
            }
            sums.add(slot, place.left, place.right, at % STEP / 32u);
            if (at % STEP == 0u) {
                ring.fill();
            }
        }
        add_part(
            results, sums, place, left_scales + (ulong)first * chunks + chunk, chunks, rows, group_scales, format,
            group_first + (ulong)group * columns + column, columns - column
        );
    }
    out.store(results, place);
}

// ---------------------------------------------------------------------------------------------------------------------
// Input gradient: rows are places of one group, their bytes outputs

// A thread unpacks a line of eight places for four outputs; with few columns some threads have
// none.
struct PackedColumns {
    const uint *lines;     // this thread's line, at its next output
    const uchar *zeros;    // the same
    uint output, outputs;  // its next output of those that take part
    bool inside;
    uint words[4], zero;

    MEMBER PackedColumns(const uint *lines, ulong stride, const uchar *zeros, uint outputs, uint columns)
        : lines(lines), zeros(zeros), output(threadIdx.x % 16u * 4u), outputs(outputs) {
        uint line = threadIdx.x / 16u;
        inside = line < COLUMNS / PLACES && line * PLACES < columns;
        this->lines += line * stride + output;
        this->zeros += output;
        read();
    }

    MEMBER void read(void) {
        zero = 0u;
#pragma unroll
        for (uint i = 0u; i < 4u; i++) {
            bool there = inside && output + i < outputs;
            words[i] = there ? lines[i] : 0u;
            zero |= (there ? (uint)zeros[i] : 0u) << 8u * i;
        }
    }

    MEMBER void fill(uint to) {
        uint line = threadIdx.x / 16u, byte = threadIdx.x % 16u * 4u;
        if (line < COLUMNS / PLACES) {
            // Byte c of all four words, then its low and its high half.
#pragma unroll
            for (uint c = 0u; c < 4u; c++) {
                uint low = __byte_perm(words[0], words[1], c | (4u + c) << 4), high = __byte_perm(words[2], words[3], c | (4u + c) << 4);
                uint both = __byte_perm(low, high, 0x5410);
                uchar *at = slot_pointer(to);
                *(uint *)(at + right_byte(line * PLACES + c, byte)) = without_zeros(both & 0x0f0f0f0fu, zero);
                *(uint *)(at + right_byte(line * PLACES + c + 4u, byte)) = without_zeros(both >> 4 & 0x0f0f0f0fu, zero);
            }
        }
        lines += STEP;
        zeros += STEP;
        output += STEP;
        read();
    }
};

// As product4_input in product4.cl, for the places of group `group`; `order` may be null, and the
// width is positive.
extern "C" __global__ void __launch_bounds__(THREADS, 1) product4_input_mma(
    float *dx, const uchar *left, const float *left_scales, uint left_rows, const uint *lines, const uchar *zeros,
    const uint *order, uint groups, uint group, uint group_size, uint outputs, uint channels, uint first_output, uint width,
    uint fresh, const uint *table, uint tiles, uint first_row, uint end_row
) {
    uint start = group * group_size, group_end = channels - start < group_size ? channels : start + group_size;
    uint row_tile, column_tile;
    tile_of(blockIdx.x, tiles, (group_end - start + COLUMNS - 1u) / COLUMNS, row_tile, column_tile);
    uint first = first_row + row_tile * ROWS, end = end_row - first < ROWS ? end_row : first + ROWS, weight = 0u;
    if (table) {
        first = table[3u * row_tile];
        end = table[3u * row_tile + 1u];
        weight = table[3u * row_tile + 2u];
    }
    uint place_first = start + column_tile * COLUMNS, columns = group_end - place_first, rows = end - first;
    uint chunks = (width + CHUNK - 1u) / CHUNK, steps = (width + STEP - 1u) / STEP;
    ulong pitch = row_words(width) * 4u;
    const Planes left_planes = {left + first * pitch, pitch, left_rows * pitch, rows};
    const PackedColumns right(
        lines + ((ulong)weight * (channels / PLACES) + place_first / PLACES) * outputs + first_output, outputs,
        zeros + ((ulong)weight * groups + group) * outputs + first_output, width, columns
    );

    Ring<PackedColumns> ring(left_planes, right, steps);
    const Place place;
    TileResults results;
    // The element of dx, where the pair's first or second number has one.
    auto element = [&](uint row, uint column) {
        ulong channel = order ? order[(ulong)weight * channels + place_first + column] : place_first + column;
        return dx + (ulong)(first + row) * channels + channel;
    };
    results.each_pair(place, [&](uint row, uint column, float &x, float &y) {
        bool old = !fresh && row < rows;
        x = old && column < columns ? *element(row, column) : 0.0f;
        y = old && column + 1u < columns ? *element(row, column + 1u) : 0.0f;
    });
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        TileSums sums;
        uint here = steps < CHUNK / STEP ? steps : CHUNK / STEP;
        sum_steps(sums, ring, place, here);
        steps -= here;
#pragma unroll
        for (uint i = 0u; i < 2u * ROW_TILES; i++) {
            uint row = place.row + 8u * i < rows ? place.row + 8u * i : rows - 1u;
            float scale = __ldg(left_scales + (ulong)(first + row) * chunks + chunk);
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int at = 4 * n + 2 * (i % 2) + e;
                    results.v[i / 2][at] = fma_rn(sums.value(i / 2, at), scale, results.v[i / 2][at]);
                }
            }
        }
    }
    results.each_pair(place, [&](uint row, uint column, float &x, float &y) {
        if (row < rows && column < columns) {
            *element(row, column) = x;
        }
        if (row < rows && column + 1u < columns) {
            *element(row, column + 1u) = y;
        }
    });
}
