// Column copies (docs/numerics.md, "Column copies"): a work item per element of y, which sums the
// groups that meet there.

KERNEL(GROUP) columns(
    GLOBAL float *y,
    GLOBAL const float *x,
    ulong length,
    uint targets,
    uint width,
    uint summed,
    uint row,
    uint offset,
    uint stride,
    uint to_row,
    uint to_offset,
    uint to_stride,
    uint add
) {
    ulong i = (ulong)group_index() * GROUP + local_index();
    if (i >= length) {
        return;
    }
    uint items = targets * width;
    // Division of 32-bit numbers is several times faster.
    ulong token = i >> 32 == 0 ? div_u32((uint)i, items) : div_u64(i, items);
    uint item = (uint)(i - token * items);
    uint group = div_u32(item, width);
    uint column = item - group * width;
    ulong from = token * row + offset + (ulong)group * stride + column;
    ulong to = token * to_row + to_offset + (ulong)group * to_stride + column;
    float value = add != 0u ? y[to] + x[from] : x[from];
    for (uint g = 1u; g < summed; g++) {
        value = value + x[from + (ulong)g * stride];
    }
    y[to] = value;
}
