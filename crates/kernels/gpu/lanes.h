// Lane sums (docs/numerics.md, "Lane sums"), the 32 lanes in memory that the group shares.

#define LANES 32

// Adds the 32 numbers by halves. Every work item of the group calls it; `lanes` is complete on return and the result is
// lanes[0]. Barriers on both sides.
FUNCTION void tree_sum(LOCAL_POINTER float *lanes) {
    uint l = local_index();
    barrier_local();
    for (uint h = LANES / 2; h > 0u; h /= 2u) {
        float other = l < h ? lanes[l + h] : 0.0f;
        if (l < h) {
            lanes[l] = lanes[l] + other;
        }
        barrier_local();
    }
}

// The same for `count` sums at once, lanes[count][32], by a group of GROUP work items: sum n is lanes[32 * n].
FUNCTION void tree_sums(LOCAL_POINTER float *lanes, uint count) {
    barrier_local();
    for (int shift = 4; shift >= 0; shift--) {
        uint h = 1u << shift;
        for (uint i = local_index(); i < count * h; i += GROUP) {
            uint l = (i >> shift) * LANES + (i & (h - 1u));
            lanes[l] = lanes[l] + lanes[l + h];
        }
        barrier_local();
    }
}
