// Sum of two tensors (docs/numerics.md, "Residual").

// Elements of a work item, GROUP apart: it asks for all of them before it uses the first.
#define EACH 4

KERNEL(GROUP) add_elements(GLOBAL float *y, GLOBAL const float *a, GLOBAL const float *b, ulong length) {
    ulong first = (ulong)group_index() * (GROUP * EACH) + local_index();
    float left[EACH];
    float right[EACH];
    for (uint n = 0u; n < EACH; n++) {
        ulong i = first + n * GROUP;
        left[n] = i < length ? a[i] : 0.0f;
        right[n] = i < length ? b[i] : 0.0f;
    }
    for (uint n = 0u; n < EACH; n++) {
        ulong i = first + n * GROUP;
        if (i < length) {
            y[i] = left[n] + right[n];
        }
    }
}
