// The last step of a sum over tokens (docs/numerics.md, "Sums over tokens"): the sums of blocks, in
// order.

// Values that a work item asks for before it uses the first.
#define AHEAD 8u

KERNEL(GROUP) token_sums(GLOBAL float *result, GLOBAL const float *sums, uint blocks, uint width) {
    uint column = group_index() * GROUP + local_index();
    if (column >= width) {
        return;
    }
    float total = result[column];
    uint block = 0u;
    for (; block + AHEAD <= blocks; block += AHEAD) {
        float values[AHEAD];
        for (uint n = 0u; n < AHEAD; n++) {
            values[n] = sums[(ulong)(block + n) * width + column];
        }
        for (uint n = 0u; n < AHEAD; n++) {
            total = total + values[n];
        }
    }
    for (; block < blocks; block++) {
        total = total + sums[(ulong)block * width + column];
    }
    result[column] = total;
}
