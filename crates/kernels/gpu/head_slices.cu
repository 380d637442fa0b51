// The gradients of the logits of a frozen head (docs/numerics.md, "Head and loss"), straight into
// the slices of the input gradient: what head_gradient and slice_rows_4 give, without storing them.

// A warp per (token, chunk of a stripe of the vocabulary). `factors` are the scales of the head's
// rows.
extern "C" __global__ void __launch_bounds__(GROUP) head_gradient_slices(
    int *__restrict__ planes, float *__restrict__ scales, const float *__restrict__ z, const float *__restrict__ factors,
    const int *__restrict__ labels, const float *__restrict__ lse, const float *__restrict__ weight, uint base, uint rows,
    uint plane_rows, uint first_column, uint columns, float cap, float cap_inverse
) {
    const RowChunk at = row_chunk(columns);
    if (at.row >= rows) {
        return;
    }
    const float *from = z + (ulong)at.row * columns;
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
    const int label = labels[base + at.row];
    const float token_lse = lse[base + at.row], token_weight = weight[base + at.row];
    // The column of the label; one that the stripe does not have where the label is elsewhere or
    // the token is ignored.
    const uint labelled = (uint)label - first_column;
    float4 values[LOADS], scaling[LOADS];
    #pragma unroll
    for (uint i = 0u; i < LOADS; i++) {
        const uint column = load_column(at, i);
        values[i] = column < columns ? __ldg((const float4 *)(from + column)) : none;
        scaling[i] = column < columns ? __ldg((const float4 *)(factors + column)) : none;
    }
    #pragma unroll
    for (uint i = 0u; i < LOADS; i++) {
        const uint column = load_column(at, i);
        float dz[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
        #pragma unroll
        for (uint n = 0u; n < 4u; n++) {
            dz[n] = logit_gradient(dz[n], token_lse, labelled == column + n, token_weight, cap, cap_inverse);
        }
        const bool counts = column < columns && label != IGNORED;
        values[i] = counts ? times_4(make_float4(dz[0], dz[1], dz[2], dz[3]), scaling[i]) : none;
    }
    slice_values(planes, scales, at, plane_rows, values);
}
