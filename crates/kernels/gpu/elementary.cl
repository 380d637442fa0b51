// Elementary functions over a buffer: one kernel each, so that a device's functions can be swept.

#define ELEMENTARY(name) \
    KERNEL(GROUP) elementary_##name(GLOBAL float *y, GLOBAL const float *x, ulong length) { \
        ulong i = (ulong)group_index() * GROUP + local_index(); \
        if (i < length) { \
            y[i] = isobit_##name(x[i]); \
        } \
    }

ELEMENTARY(exp)
ELEMENTARY(exp2)
ELEMENTARY(ln)
ELEMENTARY(sin)
ELEMENTARY(cos)
ELEMENTARY(tanh)
ELEMENTARY(sigmoid)
ELEMENTARY(silu)
ELEMENTARY(silu_grad)
ELEMENTARY(softplus)
ELEMENTARY(rsqrt)
