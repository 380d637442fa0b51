// Sigmoid gates (docs/numerics.md, "Gates").

#define TOKENS (GROUP / LANES)

// A gate serves `shared_by` elements in a row.
KERNEL(GROUP) gate_forward(
    GLOBAL float *y, GLOBAL const float *x, GLOBAL const float *g, ulong length, uint shared_by) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        ulong gate = i >> 32 == 0 ? div_u32((uint)i, shared_by) : div_u64(i, shared_by);
        y[i] = x[i] * isobit_sigmoid(g[gate]);
    }
}

KERNEL(GROUP) gate_backward(
    GLOBAL float *dx, GLOBAL float *dg, GLOBAL const float *dy, GLOBAL const float *x, GLOBAL const float *g, ulong length) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        float d = dy[i];
        float s = isobit_sigmoid(g[i]);
        dx[i] = d * s;
        dg[i] = (d * x[i]) * (s * (1.0f - s));
    }
}

// One gate per token: eight tokens per group, a work item per lane.
KERNEL(GROUP) gate_backward_tokens(
    GLOBAL float *dx,
    GLOBAL float *dg,
    GLOBAL const float *dy,
    GLOBAL const float *x,
    GLOBAL const float *g,
    ulong tokens,
    uint width
) {
    LOCAL float lanes[GROUP];
    uint lane = local_index() % LANES;
    ulong token = (ulong)group_index() * TOKENS + local_index() / LANES;
    ulong at = token * width;
    uint here = token < tokens ? width : 0u;
    float s = isobit_sigmoid(token < tokens ? g[token] : 0.0f);
    float sum = 0.0f;
    for (uint c = lane; c < here; c += LANES) {
        float d = dy[at + c];
        sum = fma_rn(d, x[at + c], sum);
        dx[at + c] = d * s;
    }
    sum = team_sum(lanes, sum);
    if (lane == 0u && token < tokens) {
        dg[token] = sum * (s * (1.0f - s));
    }
}
