// Dropout (docs/numerics.md, "Dropout"): a work item has one Philox block, which is four elements
// of a row of data.

#define GROUP_ELEMENTS (4 * GROUP)

// `group_starts[r]` is the first group of row `r`; a row has as many groups as its elements need.
KERNEL(GROUP) dropout(
    GLOBAL float *y, GLOBAL const float *x, GLOBAL const uint *row_starts, GLOBAL const uint *group_starts, uint rows,
    uint width, uint first_row, uint tensor, uint step, uint key_low, uint key_high, uint threshold, float keep_scale) {
    // The last row that starts at this group or before: empty rows start where the next one does.
    uint row = 0u;
    uint end = rows;
    while (end - row > 1u) {
        uint middle = row + (end - row) / 2u;
        if (group_starts[middle] <= group_index()) {
            row = middle;
        } else {
            end = middle;
        }
    }
    ulong start = (ulong)row_starts[row] * width;
    ulong length = (ulong)row_starts[row + 1u] * width - start;
    ulong element = (ulong)(group_index() - group_starts[row]) * GROUP_ELEMENTS + 4u * local_index();
    if (element >= length) {
        return;
    }
    Words words = philox((uint)(element / 4u), first_row + row, tensor, step, key_low, key_high);
    for (uint i = 0u; i < 4u; i++) {
        if (element + i < length) {
            ulong at = start + element + i;
            float kept = x[at] * keep_scale;
            y[at] = words.w[i] >= threshold ? kept : 0.0f;
        }
    }
}
