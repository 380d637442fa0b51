// Multiplication by a number (docs/numerics.md, "Residual").

KERNEL(GROUP) scale_elements(GLOBAL float *x, ulong length, float factor) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        x[i] = x[i] * factor;
    }
}
