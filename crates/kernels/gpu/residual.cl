// Residual addition and scaling (docs/numerics.md, "Residual").

KERNEL(GROUP) residual_add(GLOBAL float *y, GLOBAL const float *a, GLOBAL const float *b, ulong length) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        y[i] = a[i] + b[i];
    }
}

KERNEL(GROUP) residual_scale(GLOBAL float *x, ulong length, float factor) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        x[i] = x[i] * factor;
    }
}
