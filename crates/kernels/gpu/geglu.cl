// GeGLU (docs/numerics.md, "GeGLU"): `crates/numerics/src/elementary/gelu.rs` line by line.

// Elements of a work item, GROUP apart: it asks for all of them before it uses the first.
#define EACH 4
#define GELU_LIMIT 16.0f
#define GELU_SLOPE as_f32(0x3fcc422au)

FUNCTION float gelu_twice_inner(float x) {
    return (GELU_SLOPE * x) * fma_rn(as_f32(0x3d372713u), x * x, 1.0f);
}

FUNCTION float gelu(float x) {
    float bounded = clamped(x, GELU_LIMIT);
    float y = bounded * isobit_sigmoid(gelu_twice_inner(bounded));
    return canonical_if_nan(x, x > GELU_LIMIT ? x : y);
}

FUNCTION float gelu_grad(float x) {
    float bounded = clamped(x, GELU_LIMIT);
    float inner = gelu_twice_inner(bounded);
    float s = isobit_sigmoid(inner);
    float complement = isobit_sigmoid(-inner);
    float slope = GELU_SLOPE * fma_rn(as_f32(0x3e095d4fu), bounded * bounded, 1.0f);
    return canonical_if_nan(x, fma_rn(bounded * (s * complement), slope, s));
}

KERNEL(GROUP) geglu_forward(GLOBAL float *h, GLOBAL const float *gate, GLOBAL const float *up, ulong length) {
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
            h[i] = gelu(g[n]) * u[n];
        }
    }
}

KERNEL(GROUP) geglu_backward(
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
            dup[i] = d[n] * gelu(g[n]);
            dgate[i] = (d[n] * u[n]) * gelu_grad(g[n]);
        }
    }
}
