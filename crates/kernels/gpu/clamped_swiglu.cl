// Clamped SwiGLU (docs/numerics.md, "Clamped SwiGLU"): `crates/numerics/src/elementary/clamped.rs`
// line by line. Gate and up alternate in `both`.

FUNCTION float limited_gate(float gate, float limit) {
    return gate > limit ? limit : gate;
}

// NaN stays NaN.
FUNCTION float bounded_up(float up, float limit) {
    return up > limit ? limit : (up < -limit ? -limit : up);
}

KERNEL(GROUP) clamped_swiglu_forward(
    GLOBAL float *h, GLOBAL const float *both, ulong length, float alpha, float limit) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        float g = limited_gate(both[2u * i], limit);
        float u = bounded_up(both[2u * i + 1u], limit);
        h[i] = (u + 1.0f) * (g * isobit_sigmoid(alpha * g));
    }
}

KERNEL(GROUP) clamped_swiglu_backward(
    GLOBAL float *dboth,
    GLOBAL const float *dh,
    GLOBAL const float *both,
    ulong length,
    float alpha,
    float limit
) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        float d = dh[i];
        float gate = both[2u * i];
        float up = both[2u * i + 1u];
        float g = limited_gate(gate, limit);
        float inner = alpha * g;
        float s = isobit_sigmoid(inner);
        float complement = isobit_sigmoid(-inner);
        float dup = d * (g * s);
        float dgate = (d * (bounded_up(up, limit) + 1.0f)) * fma_rn(inner, s * complement, s);
        dboth[2u * i] = gate > limit ? 0.0f : dgate;
        dboth[2u * i + 1u] = up > limit || up < -limit ? 0.0f : dup;
    }
}
