// SwiGLU (docs/numerics.md, "SwiGLU").

// Elements of a work item, GROUP apart: it asks for all of them before it uses the first.
#define EACH 4

KERNEL(GROUP) swiglu_forward(GLOBAL float *h, GLOBAL const float *gate, GLOBAL const float *up, ulong length) {
    ulong first = (ulong)group_index() * (GROUP * EACH) + local_index();
    float g[EACH];
    float u[EACH];
    for (uint n = 0u; n < EACH; n++) {
        ulong i = first + n * GROUP;
        g[n] = i < length ? gate[i] : 0.0f;
        u[n] = i < length ? up[i] : 0.0f;
    }
    for (uint n = 0u; n < EACH; n++) {
        ulong i = first + n * GROUP;
        if (i < length) {
            h[i] = isobit_silu(g[n]) * u[n];
        }
    }
}

KERNEL(GROUP) swiglu_backward(
    GLOBAL float *dgate, GLOBAL float *dup, GLOBAL const float *dh, GLOBAL const float *gate, GLOBAL const float *up,
    ulong length) {
    ulong first = (ulong)group_index() * (GROUP * EACH) + local_index();
    float d[EACH];
    float g[EACH];
    float u[EACH];
    for (uint n = 0u; n < EACH; n++) {
        ulong i = first + n * GROUP;
        d[n] = i < length ? dh[i] : 0.0f;
        g[n] = i < length ? gate[i] : 0.0f;
        u[n] = i < length ? up[i] : 0.0f;
    }
    for (uint n = 0u; n < EACH; n++) {
        ulong i = first + n * GROUP;
        if (i < length) {
            dup[i] = d[n] * isobit_silu(g[n]);
            dgate[i] = (d[n] * u[n]) * isobit_silu_grad(g[n]);
        }
    }
}

// Pairs side by side: `both` is `[rows, 2·width]`, gate before up.

KERNEL(GROUP) swiglu_pairs_forward(GLOBAL float *h, GLOBAL const float *both, ulong length, ulong width) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        ulong at = i + div_u64(i, width) * width;
        h[i] = isobit_silu(both[at]) * both[at + width];
    }
}

KERNEL(GROUP) swiglu_pairs_backward(
    GLOBAL float *dboth, GLOBAL const float *dh, GLOBAL const float *both, ulong length, ulong width) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        ulong at = i + div_u64(i, width) * width;
        float d = dh[i];
        float g = both[at];
        float u = both[at + width];
        dboth[at + width] = d * isobit_silu(g);
        dboth[at] = (d * u) * isobit_silu_grad(g);
    }
}
