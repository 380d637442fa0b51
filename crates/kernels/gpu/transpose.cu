// Rows and columns of the planes of several weights exchanged, for input gradients on tensor cores,
// which contract over the rows.

// Side of the square of bytes that a group transposes, a work item 4 by 4 of them.
#define SQUARE 64

// `rows` rows of each of `weights` weights, the first at row `first` of planes with `plane_rows`
// rows, the next `weight_rows` further on, of `width` bytes each, become
// [slice][weight][width][padded rows]. One group per weight and square; what lies beyond is zero.
KERNEL(GROUP) transpose_weights(
    int *__restrict__ to, const int *__restrict__ planes, uint plane_rows, ulong first, uint weight_rows, uint weights, uint rows,
    uint width
) {
    LOCAL int square[SQUARE * (SQUARE / 4 + 1)];
    const uint row_length = row_words(rows), column_length = row_words(width);
    const uint across = row_length / (SQUARE / 4), squares = across * ((width + (SQUARE - 1u)) / SQUARE);
    const uint weight = group_index() / squares, place = group_index() % squares;
    const uint row_first = place % across * SQUARE, column_first = place / across * SQUARE;
    const uint fast = local_index() % (SQUARE / 4), slow = local_index() / (SQUARE / 4);
    for (uint s = 0u; s < SLICES; s++) {
        const ulong base = (ulong)s * plane_rows + first + (ulong)weight * weight_rows;
        uint r[4];
        #pragma unroll
        for (uint i = 0u; i < 4u; i++) {
            const uint row = row_first + slow * 4u + i, word = column_first / 4u + fast;
            r[i] = row < rows && word < column_length ? (uint)planes[(base + row) * column_length + word] : 0u;
        }
        barrier_local();
        #pragma unroll
        for (uint i = 0u; i < 4u; i++) {
            // Byte i of four rows.
            const uint low = __byte_perm(r[0], r[1], i | ((4u + i) << 4)), high = __byte_perm(r[2], r[3], i | ((4u + i) << 4));
            square[(fast * 4u + i) * (SQUARE / 4 + 1) + slow] = (int)__byte_perm(low, high, 0x5410);
        }
        barrier_local();
        #pragma unroll
        for (uint i = 0u; i < 4u; i++) {
            const uint column = slow * 4u + i;
            if (column_first + column < width) {
                const ulong row = ((ulong)s * weights + weight) * width + column_first + column;
                to[row * row_length + row_first / 4u + fast] = square[column * (SQUARE / 4 + 1) + fast];
            }
        }
    }
}
