// Sum of two tensors (docs/numerics.md, "Residual").

KERNEL(GROUP) add_elements(GLOBAL float *y, GLOBAL const float *a, GLOBAL const float *b, ulong length) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i < length) {
        y[i] = a[i] + b[i];
    }
}
