// Bias (docs/numerics.md, "Bias"). Backward is a sum over tokens; token_sums.cl adds the blocks.

// `tiles` groups for each token.
KERNEL(GROUP) bias_forward(GLOBAL float *y, GLOBAL const float *bias, uint width, uint tiles) {
    ulong token = div_u32(group_index(), tiles);
    uint column = mod_u32(group_index(), tiles) * GROUP + local_index();
    if (column < width) {
        ulong i = token * width + column;
        y[i] = y[i] + bias[column];
    }
}

// Values that a work item asks for before it uses the first.
#define AHEAD 8u

// Sums of single blocks of tokens from `first_block` on, `tiles` groups of columns for each;
// `blocks` holds first token and end of each.
KERNEL(GROUP) bias_backward(
    GLOBAL float *sums,
    GLOBAL const float *dy,
    GLOBAL const uint *blocks,
    uint first_block,
    uint width,
    uint tiles
) {
    uint block = div_u32(group_index(), tiles);
    uint column = mod_u32(group_index(), tiles) * GROUP + local_index();
    if (column >= width) {
        return;
    }
    uint t = blocks[2u * (first_block + block)];
    uint end = blocks[2u * (first_block + block) + 1u];
    float sum = 0.0f;
    for (; t + AHEAD <= end; t += AHEAD) {
        float values[AHEAD];
        for (uint n = 0u; n < AHEAD; n++) {
            values[n] = dy[(ulong)(t + n) * width + column];
        }
        for (uint n = 0u; n < AHEAD; n++) {
            sum = sum + values[n];
        }
    }
    for (; t < end; t++) {
        sum = sum + dy[(ulong)t * width + column];
    }
    sums[(ulong)block * width + column] = sum;
}
