// L2 norm (docs/numerics.md, "L2 norm"). Eight tokens per group, a work item per lane.

#define TOKENS (GROUP / LANES)

KERNEL(GROUP) l2_norm_forward(
    GLOBAL float *y, GLOBAL float *inverse, GLOBAL const float *x, ulong tokens, uint width, float eps, float factor) {
    LOCAL float lanes[GROUP];
    uint lane = local_index() % LANES;
    ulong token = (ulong)group_index() * TOKENS + local_index() / LANES;
    ulong at = token * width;
    uint here = token < tokens ? width : 0u;
    float sum = 0.0f;
    for (uint c = lane; c < here; c += LANES) {
        float value = x[at + c];
        sum = fma_rn(value, value, sum);
    }
    sum = team_sum(lanes, sum);
    float inv = isobit_rsqrt(sum + eps);
    if (lane == 0u && token < tokens) {
        inverse[token] = inv;
    }
    for (uint c = lane; c < here; c += LANES) {
        y[at + c] = (x[at + c] * inv) * factor;
    }
}

KERNEL(GROUP) l2_norm_backward(
    GLOBAL float *dx,
    GLOBAL const float *dy,
    GLOBAL const float *x,
    GLOBAL const float *inverse,
    ulong tokens,
    uint width,
    float factor
) {
    LOCAL float lanes[GROUP];
    uint lane = local_index() % LANES;
    ulong token = (ulong)group_index() * TOKENS + local_index() / LANES;
    ulong at = token * width;
    uint here = token < tokens ? width : 0u;
    float inv = token < tokens ? inverse[token] : 0.0f;
    float sum = 0.0f;
    for (uint c = lane; c < here; c += LANES) {
        sum = fma_rn(dy[at + c] * factor, x[at + c] * inv, sum);
    }
    float along = team_sum(lanes, sum);
    for (uint c = lane; c < here; c += LANES) {
        dx[at + c] = fma_rn(-(x[at + c] * inv), along, dy[at + c] * factor) * inv;
    }
}
