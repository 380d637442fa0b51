// Rows cut into slices (docs/numerics.md, "Slices") and contracted with up to three groups of
// RANKS ranks ("Low-rank products") in one read. A warp has two or four rows, lane l the columns
// l, l + 32 and so on of a chunk, as the sums want them; bytes go through shared memory to be
// stored in wide words.

// Columns of a lane in a chunk, and those of a factor that are staged at once.
#define STEPS (CHUNK / LANES)
#define SEGMENT (CHUNK / 2)

// The bytes of one chunk of a row, which lie across the warp, as many of every plane as the row has
// left from `to` on.
#if SLICES == 2
// Both bytes of a number go through shared memory together and part when they are read again, eight
// numbers at a time.
FUNCTION void store_bytes(const uint (&q)[STEPS], uchar *bytes, char *to, ulong plane, uint left) {
    const uint lane = threadIdx.x % LANES;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        ((ushort *)bytes)[s * LANES + lane] = (ushort)__byte_perm(q[s] + 0x80u, q[s], 0x0041);
    }
    __syncwarp();
#pragma unroll
    for (uint half = 0u; half < 2u; half++) {
        const uint at = half * (CHUNK / 2u) + lane * 8u;
        const uint4 pairs = *(const uint4 *)(bytes + 2u * at);
        if (at < left) {
            *(uint2 *)(to + at) = make_uint2(__byte_perm(pairs.x, pairs.y, 0x6420), __byte_perm(pairs.z, pairs.w, 0x6420));
            *(uint2 *)(to + plane + at) =
                make_uint2(__byte_perm(pairs.x, pairs.y, 0x7531), __byte_perm(pairs.z, pairs.w, 0x7531));
        }
    }
    __syncwarp();
}
#else
FUNCTION void store_bytes(const uint (&q)[STEPS], uchar *bytes, char *to, ulong plane, uint left) {
    const uint lane = threadIdx.x % LANES;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
            // What packed_slices() packs.
            const int byte = SLICES - 1 - slice;
            const uint rounding = byte == 0 ? 0u : byte == 1 ? 0x80u : 0x8080u;
            bytes[slice * CHUNK + s * LANES + lane] = (uchar)((q[s] + rounding) >> (8 * byte));
        }
    }
    __syncwarp();
    if (lane * 16u < left) {
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
            *(int4 *)(to + slice * plane + lane * 16u) = *(const int4 *)(bytes + slice * CHUNK + lane * 16u);
        }
    }
    __syncwarp();
}
#endif

// Slices one chunk of a row that lies across the warp; nothing is stored if `left` is zero.
FUNCTION void slice_chunk(const float (&values)[STEPS], uchar *bytes, char *to, ulong plane, uint left, float *scale) {
    uint max_bits = 0u;
#pragma unroll
    for (int s = 0; s < STEPS; s++) max_bits = max(max_bits, magnitude_bits(values[s]));
    max_bits = __reduce_max_sync(0xffffffffu, max_bits);
    const float multiplier = group_multiplier(max_bits);
    uint q[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++) q[s] = integer(values[s], multiplier);
    store_bytes(q, bytes, to, plane, left);
    if (left > 0u && threadIdx.x % LANES == 0u) *scale = group_scale(max_bits);
}

// With FOLDED, slices are those of x times the factor of each column; the contraction is that of x.
// These factors are staged as well, in twice as many places: they are read when a chunk is sliced,
// after the copies of a later segment have begun. The planes have `plane_rows` rows, of which the
// first `rows` are written.
template <int PARTS, int TOKENS, bool BY_RANK, bool FOLDED>
FUNCTION void slice_and_contract(
    const Parts &parts, char *planes, float *scales, const float *x, const float *factors, uint rows, uint plane_rows,
    uint width
) {
    constexpr uint STAGE = PARTS * RANKS * SEGMENT, FOLDS = 4u;
    // Whether a chunk is on its way while the one before is computed: more parts or tokens leave no
    // registers for it.
    constexpr bool AHEAD = PARTS == 1 && TOKENS == 2;
    extern __shared__ float4 shared[];
    float *staged = (float *)shared, *folds = staged + 2u * STAGE;
    uchar *bytes = (uchar *)(folds + (FOLDED ? FOLDS * SEGMENT : 0u)) + threadIdx.x / LANES * (SLICES * CHUNK);
    const uint lane = threadIdx.x % LANES, first = (blockIdx.x * WARPS + threadIdx.x / LANES) * TOKENS;
    const uint chunks = (width + (CHUNK - 1u)) / CHUNK, segments = (width + (SEGMENT - 1u)) / SEGMENT;
    const uint padded = row_words(width) * 4u;
    const float *from[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        // A row that is not there stands for the last one; nothing of it is kept.
        from[t] = x + (ulong)(first + t < rows ? first + t : rows - 1u) * width;
    }
    float chains[PARTS * TOKENS * RANKS];
#pragma unroll
    for (int i = 0; i < PARTS * TOKENS * RANKS; i++) chains[i] = 0.0f;
    auto stage_segment = [&](uint segment) {
        if (segment < segments) {
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                float *to = staged + segment % 2u * STAGE + p * RANKS * SEGMENT;
                stage<SEGMENT, BY_RANK>(to, parts.part[p], width, segment * SEGMENT);
            }
            if (FOLDED && threadIdx.x < SEGMENT / 4u) {
                const uint at = threadIdx.x * 4u, column = segment * SEGMENT + at;
                const bool there = column < width;
                stage_4(folds + segment % FOLDS * SEGMENT + at, factors + (there ? column : 0u), there);
            }
        }
        copies_end();
    };
    float next[TOKENS][STEPS];
    auto load_chunk = [&](uint chunk) {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const uint column = chunk * CHUNK + s * LANES + lane;
#pragma unroll
            for (int t = 0; t < TOKENS; t++) next[t][s] = column < width ? __ldg(from[t] + column) : 0.0f;
        }
    };
    stage_segment(0u);
    if (AHEAD) load_chunk(0u);
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        const uint start = chunk * CHUNK + lane;
        if (!AHEAD) load_chunk(chunk);
        float values[TOKENS][STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
#pragma unroll
            for (int t = 0; t < TOKENS; t++) values[t][s] = next[t][s];
        }
        if (AHEAD) load_chunk(chunk + 1u);
#pragma unroll
        for (uint half = 0u; half < 2u; half++) {
            const uint segment = 2u * chunk + half;
            if (segment >= segments) break;
            // The segment has arrived, and everyone is done with the one before, whose place the
            // next copies take.
            copies_wait<0>();
            __syncthreads();
            stage_segment(segment + 1u);
#pragma unroll
            for (int i = 0; i < STEPS / 2; i++) {
                const int s = half * (STEPS / 2) + i;
                if (start + s * LANES < width) {
                    float column[TOKENS];
#pragma unroll
                    for (int t = 0; t < TOKENS; t++) column[t] = values[t][s];
                    add<PARTS, TOKENS, SEGMENT, BY_RANK>(chains, staged + segment % 2u * STAGE, column, i * LANES + lane);
                }
            }
        }
        if (FOLDED) {
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const bool there = start + s * LANES < width;
                const float factor = there ? folds[2u * chunk % FOLDS * SEGMENT + s * LANES + lane] : 0.0f;
#pragma unroll
                for (int t = 0; t < TOKENS; t++) values[t][s] = __fmul_rn(values[t][s], factor);
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const ulong row = first + t, plane = (ulong)plane_rows * padded;
            const uint left = row < rows ? padded - chunk * CHUNK : 0u;
            char *to = planes + row * padded + chunk * CHUNK;
            slice_chunk(values[t], bytes, to, plane, left, scales + row * chunks + chunk);
        }
    }
    finish<0, TOKENS>(parts, chains, first, rows);
    if constexpr (PARTS > 1) finish<1, TOKENS>(parts, chains, first, rows);
    if constexpr (PARTS > 2) finish<2, TOKENS>(parts, chains, first, rows);
}

#define SLICE_AND_CONTRACT(name, PARTS, TOKENS, BY_RANK, FOLDED) \
    extern "C" __global__ __launch_bounds__(THREADS, 2) void name( \
        const __grid_constant__ Parts parts, char *planes, float *scales, const float *__restrict__ x, \
        const float *__restrict__ factors, uint rows, uint plane_rows, uint width \
    ) { \
        slice_and_contract<PARTS, TOKENS, BY_RANK, FOLDED>(parts, planes, scales, x, factors, rows, plane_rows, width); \
    }

SLICE_AND_CONTRACT(slice_contract_1, 1, 2, true, false)
SLICE_AND_CONTRACT(slice_contract_2, 2, 2, true, false)
SLICE_AND_CONTRACT(slice_contract_3, 3, 2, true, false)
SLICE_AND_CONTRACT(slice_contract_folded, 1, 4, false, true)
