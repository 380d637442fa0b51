// Combine (docs/numerics.md, "Combine").

// Pairs of a group of the backward pass: each has a work item per lane.
#define PAIRS (GROUP / LANES)

// `tiles` groups for each token. A place outside the matrix gives NaN.
KERNEL(GROUP) combine_forward(
    GLOBAL float *y,
    GLOBAL const float *rows,
    GLOBAL const float *weights,
    GLOBAL const uint *places,
    uint row_count,
    uint slots,
    uint width,
    uint tiles,
    uint weighted,
    uint accumulate
) {
    ulong token = div_u32(group_index(), tiles);
    uint column = mod_u32(group_index(), tiles) * GROUP + local_index();
    if (column >= width) {
        return;
    }
    ulong at = token * width + column;
    float acc = accumulate != 0u ? y[at] : 0.0f;
    for (uint j = 0u; j < slots; j++) {
        uint place = places[token * slots + j];
        float row = place < row_count ? rows[(ulong)place * width + column] : as_f32(CANONICAL_NAN);
        acc = weighted != 0u ? fma_rn(weights[token * slots + j], row, acc) : acc + row;
    }
    y[at] = acc;
}

KERNEL(GROUP) combine_backward(
    GLOBAL float *drows,
    GLOBAL float *dweights,
    GLOBAL const float *dy,
    GLOBAL const float *rows,
    GLOBAL const float *weights,
    GLOBAL const uint *places,
    uint row_count,
    uint slots,
    uint width
) {
    LOCAL float lanes[GROUP];
    uint lane = local_index() % LANES;
    uint pair = group_index() * PAIRS + local_index() / LANES;
    uint place = pair < row_count ? places[pair] : row_count;
    uint here = place < row_count ? width : 0u;
    ulong at = (ulong)place * width;
    ulong from = (ulong)div_u32(pair, slots) * width;
    float weight = pair < row_count ? weights[pair] : 0.0f;
    float sum = 0.0f;
    for (uint c = lane; c < here; c += LANES) {
        float value = dy[from + c];
        sum = fma_rn(value, rows[at + c], sum);
        drows[at + c] = weight * value;
    }
    sum = team_sum(lanes, sum);
    if (lane == 0u && pair < row_count) {
        dweights[pair] = sum;
    }
}
