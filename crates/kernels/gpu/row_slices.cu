// Rows cut into slices (docs/numerics.md, "Slices"), four numbers to a load: slice_rows,
// slice_folded with one weight, and slice_weight of slices.cl where widths are multiples of four.

// Loads of a work item of slice_weight_4 whose numbers stay in registers.
#define KEPT 9

// A warp per (row, chunk). `factors`, one per column, may be null; a row of x has `stride` numbers.
extern "C" __global__ void __launch_bounds__(GROUP) slice_rows_4(
    int *__restrict__ planes, float *__restrict__ scales, const float *__restrict__ x, const float *__restrict__ factors,
    uint rows, uint plane_rows, uint width, ulong stride
) {
    const RowChunk at = row_chunk(width);
    if (at.row >= rows) {
        return;
    }
    const float *from = x + at.row * stride;
    float4 values[LOADS];
    #pragma unroll
    for (uint i = 0u; i < LOADS; i++) {
        const uint column = load_column(at, i);
        values[i] = column < width ? __ldg((const float4 *)(from + column)) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    if (factors) {
        #pragma unroll
        for (uint i = 0u; i < LOADS; i++) {
            const uint column = load_column(at, i);
            if (column < width) {
                values[i] = times_4(values[i], __ldg((const float4 *)(factors + column)));
            }
        }
    }
    slice_values(planes, scales, at, plane_rows, values);
}

// Numbers 4 * i .. 4 * i + 3 of a stored weight.
FUNCTION float4 load_stored_4(const uchar *__restrict__ w, uint format, ulong i) {
    if (format == 0u) {
        return __ldg((const float4 *)w + i);
    }
    const uint2 pairs = __ldg((const uint2 *)w + i);
    const ushort bits[4] = {(ushort)pairs.x, (ushort)(pairs.x >> 16), (ushort)pairs.y, (ushort)(pairs.y >> 16)};
    float v[4];
    #pragma unroll
    for (uint n = 0u; n < 4u; n++) {
        v[n] = as_f32(format == 1u ? widen_bf16(bits[n]) : widen_f16(bits[n]));
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

// As slice_weight of slices.cl; the width is a multiple of four.
extern "C" __global__ void __launch_bounds__(GROUP) slice_weight_4(
    int *__restrict__ planes, float *__restrict__ scales, const uchar *__restrict__ w, uint format, ulong first, uint rows,
    uint width
) {
    LOCAL uint maxima[WARPS];
    const uint row = group_index(), loads = width / 4u, words = row_words(width);
    const ulong from = (first + row) * loads;
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
    float4 kept[KEPT];
    #pragma unroll
    for (uint i = 0u; i < KEPT; i++) {
        const uint at = i * GROUP + threadIdx.x;
        kept[i] = at < loads ? load_stored_4(w, format, from + at) : none;
    }
    uint max_bits = 0u;
    #pragma unroll
    for (uint i = 0u; i < KEPT; i++) {
        max_bits = max_of_4(max_bits, kept[i]);
    }
    for (uint at = KEPT * GROUP + threadIdx.x; at < loads; at += GROUP) {
        max_bits = max_of_4(max_bits, load_stored_4(w, format, from + at));
    }
    max_bits = __reduce_max_sync(0xffffffffu, max_bits);
    if (threadIdx.x % 32u == 0u) {
        maxima[threadIdx.x / 32u] = max_bits;
    }
    barrier_local();
    #pragma unroll
    for (uint i = 0u; i < WARPS; i++) {
        max_bits = max(max_bits, maxima[i]);
    }
    const float multiplier = group_multiplier(max_bits);
    const ulong plane = (ulong)rows * words, into = (ulong)row * words;
    #pragma unroll
    for (uint i = 0u; i < KEPT; i++) {
        const uint at = i * GROUP + threadIdx.x;
        if (at < words) {
            store_4(planes, plane, into + at, kept[i], multiplier);
        }
    }
    for (uint at = KEPT * GROUP + threadIdx.x; at < words; at += GROUP) {
        store_4(planes, plane, into + at, at < loads ? load_stored_4(w, format, from + at) : none, multiplier);
    }
    if (threadIdx.x == 0u) {
        scales[row] = group_scale(max_bits);
    }
}
