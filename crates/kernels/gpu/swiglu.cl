// SwiGLU (docs/numerics.md, "SwiGLU").

KERNEL(GROUP) swiglu_forward(GLOBAL float *h, GLOBAL const float *gate, GLOBAL const float *up, ulong length) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        h[i] = isobit_silu(gate[i]) * up[i];
    }
}

KERNEL(GROUP) swiglu_backward(
    GLOBAL float *dgate, GLOBAL float *dup, GLOBAL const float *dh, GLOBAL const float *gate, GLOBAL const float *up,
    ulong length) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        float d = dh[i];
        float g = gate[i];
        float u = up[i];
        dup[i] = d * isobit_silu(g);
        dgate[i] = (d * u) * isobit_silu_grad(g);
    }
}

// Pairs side by side: `both` is `[rows, 2·width]`, gate before up.

KERNEL(GROUP) swiglu_pairs_forward(GLOBAL float *h, GLOBAL const float *both, ulong length, ulong width) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        ulong at = i + i / width * width;
        h[i] = isobit_silu(both[at]) * both[at + width];
    }
}

KERNEL(GROUP) swiglu_pairs_backward(
    GLOBAL float *dboth, GLOBAL const float *dh, GLOBAL const float *both, ulong length, ulong width) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        ulong at = i + i / width * width;
        float d = dh[i];
        float g = both[at];
        float u = both[at + width];
        dboth[at + width] = d * isobit_silu(g);
        dboth[at] = (d * u) * isobit_silu_grad(g);
    }
}
