// Attention sinks (docs/numerics.md, "Attention sinks"). Eight heads of tokens per group, a work
// item per lane.

#define HEADS (GROUP / LANES)
#define LOG2_E as_f32(0x3fb8aa3bu)
#define LN_2 as_f32(0x3f317218u)

KERNEL(GROUP) sink_forward(
    GLOBAL float *o, GLOBAL float *lse, GLOBAL const float *sink, ulong count, uint heads, uint width) {
    uint lane = local_index() % LANES;
    ulong at = (ulong)group_index() * HEADS + local_index() / LANES;
    uint here = at < count ? width : 0u;
    float before = at < count ? lse[at] : 0.0f;
    float s = at < count ? sink[(uint)mod_u64(at, (ulong)heads)] * LOG2_E : 0.0f;
    // Every work item has read the logarithm before one of them replaces it.
    barrier_local();
    float x = (before - s) * LN_2;
    float share = isobit_sigmoid(x);
    for (uint c = lane; c < here; c += LANES) {
        o[at * width + c] = o[at * width + c] * share;
    }
    if (lane == 0u && at < count) {
        lse[at] = before + isobit_softplus(-x) * LOG2_E;
    }
}

KERNEL(GROUP) sink_backward(
    GLOBAL float *terms,
    GLOBAL const float *d_o,
    GLOBAL const float *o,
    GLOBAL const float *lse,
    GLOBAL const float *sink,
    ulong count,
    uint heads,
    uint width
) {
    LOCAL float lanes[GROUP];
    uint lane = local_index() % LANES;
    ulong at = (ulong)group_index() * HEADS + local_index() / LANES;
    uint here = at < count ? width : 0u;
    float sum = 0.0f;
    for (uint c = lane; c < here; c += LANES) {
        sum = fma_rn(d_o[at * width + c], o[at * width + c], sum);
    }
    sum = team_sum(lanes, sum);
    if (lane == 0u && at < count) {
        float s = sink[(uint)mod_u64(at, (ulong)heads)] * LOG2_E;
        float p = isobit_exp2(s - lse[at]);
        terms[at] = -p * sum;
    }
}
