// Slices of chunks of rows that a warp has in its registers, four numbers to a load
// (docs/numerics.md, "Slices"): what row_slices.cu and head_slices.cu share.

#define WARPS (GROUP / 32)
// Loads of a lane for one chunk.
#define LOADS (CHUNK / 128)

FUNCTION uint max_of_4(uint max_bits, float4 v) {
    const uint xy = max(magnitude_bits(v.x), magnitude_bits(v.y));
    return max(max_bits, max(xy, max(magnitude_bits(v.z), magnitude_bits(v.w))));
}

// One word of every plane.
FUNCTION void store_4(int *__restrict__ planes, ulong plane, ulong at, float4 v, float multiplier) {
    const uint q[4] = {integer(v.x, multiplier), integer(v.y, multiplier), integer(v.z, multiplier),
                       integer(v.w, multiplier)};
    #pragma unroll
    for (int s = 0; s < SLICES; s++) {
        planes[s * plane + at] = packed_slices(q, s);
    }
}

// The chunk of a row that a warp slices.
typedef struct {
    uint row;
    uint chunk;
    uint chunks;
    uint words;
} RowChunk;

FUNCTION RowChunk row_chunk(uint width) {
    const ulong task = (ulong)group_index() * WARPS + threadIdx.x / 32u;
    RowChunk at;
    at.chunks = (width + (CHUNK - 1u)) / CHUNK;
    at.words = row_words(width);
    at.row = (uint)(task / at.chunks);
    at.chunk = (uint)(task % at.chunks);
    return at;
}

// The first of the four columns of load i.
FUNCTION uint load_column(const RowChunk &at, uint i) {
    return at.chunk * CHUNK + i * 128u + threadIdx.x % 32u * 4u;
}

FUNCTION float4 times_4(float4 v, float4 f) {
    return make_float4(__fmul_rn(v.x, f.x), __fmul_rn(v.y, f.y), __fmul_rn(v.z, f.z), __fmul_rn(v.w, f.w));
}

// Slices the chunk: its numbers are zero where the row has ended.
FUNCTION void slice_values(
    int *__restrict__ planes, float *__restrict__ scales, const RowChunk &at, uint plane_rows, const float4 (&values)[LOADS]
) {
    uint max_bits = 0u;
    #pragma unroll
    for (uint i = 0u; i < LOADS; i++) {
        max_bits = max_of_4(max_bits, values[i]);
    }
    max_bits = __reduce_max_sync(0xffffffffu, max_bits);
    const float multiplier = group_multiplier(max_bits);
    #pragma unroll
    for (uint i = 0u; i < LOADS; i++) {
        const uint word = load_column(at, i) / 4u;
        if (word < at.words) {
            store_4(planes, (ulong)plane_rows * at.words, (ulong)at.row * at.words + word, values[i], multiplier);
        }
    }
    if (threadIdx.x % 32u == 0u) {
        scales[(ulong)at.row * at.chunks + at.chunk] = group_scale(max_bits);
    }
}
