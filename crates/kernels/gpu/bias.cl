// Bias (docs/numerics.md, "Bias"). Backward is a sum over tokens in blocks of 128
// (docs/numerics.md, "Sums over tokens").

// `tiles` groups for each token.
KERNEL(GROUP) bias_forward(GLOBAL float *y, GLOBAL const float *bias, uint width, uint tiles) {
    ulong token = div_u32(group_index(), tiles);
    uint column = mod_u32(group_index(), tiles) * GROUP + local_index();
    if (column < width) {
        ulong i = token * width + column;
        y[i] = y[i] + bias[column];
    }
}

#define COLUMNS 32
#define BLOCKS (GROUP / COLUMNS)

// A group has 32 columns and sums eight token blocks at a time, each by one work item per column;
// the first 32 work items then add the sums in order. Blocks are without gaps: each ends where the
// next one starts.
KERNEL(GROUP) bias_backward(
    GLOBAL float *dbias, GLOBAL const float *dy, GLOBAL const uint *block_starts, uint blocks, uint width) {
    LOCAL float sums[GROUP];
    uint l = local_index();
    uint own = l / COLUMNS;
    uint column = group_index() * COLUMNS + l % COLUMNS;
    int owns = l < COLUMNS && column < width;
    float total = owns ? dbias[column] : 0.0f;
    for (uint first = 0u; first < blocks; first += BLOCKS) {
        float sum = 0.0f;
        if (first + own < blocks && column < width) {
            uint end = block_starts[first + own + 1u];
            for (uint t = block_starts[first + own]; t < end; t++) {
                sum = sum + dy[(ulong)t * width + column];
            }
        }
        sums[l] = sum;
        barrier_local();
        if (owns) {
            for (uint b = 0u; b < BLOCKS && first + b < blocks; b++) {
                total = total + sums[b * COLUMNS + l];
            }
        }
        barrier_local();
    }
    if (owns) {
        dbias[column] = total;
    }
}
