// Rows cut into slices (docs/numerics.md, "Slices") and contracted with up to three groups of RANKS
// ranks ("Low-rank products") in one read. A warp has TOKENS rows, lane l the columns l, l + 32 and
// so on of a chunk, as the sums want them; bytes go through shared memory to be stored in wide
// words.

#define TOKENS 2
// Columns of a lane in a chunk, and those of a factor that are staged at once.
#define STEPS (CHUNK / LANES)
#define SEGMENT (CHUNK / 2)

// The byte of a slice, the highest slice first: what packed_slices() packs.
FUNCTION uchar slice_byte(uint q, int slice) {
    const int byte = SLICES - 1 - slice;
    const uint rounding = byte == 0 ? 0u : byte == 1 ? 0x80u : 0x8080u;
    return (uchar)((q + rounding) >> (8 * byte));
}

// Slices one chunk of a row that lies across the warp and stores it from `to` on: as many bytes of
// every plane as the row has left there.
FUNCTION void slice_chunk(
    const float (&values)[STEPS], uchar *bytes, char *to, ulong plane, uint left, float *scale, bool there
) {
    const uint lane = threadIdx.x % LANES;
    uint max_bits = 0u;
#pragma unroll
    for (int s = 0; s < STEPS; s++) max_bits = max(max_bits, magnitude_bits(values[s]));
    max_bits = __reduce_max_sync(0xffffffffu, max_bits);
    const float multiplier = group_multiplier(max_bits);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const uint q = integer(values[s], multiplier);
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) bytes[slice * CHUNK + s * LANES + lane] = slice_byte(q, slice);
    }
    __syncwarp();
    if (there && lane * 16u < left) {
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
            *(int4 *)(to + slice * plane + lane * 16u) = *(const int4 *)(bytes + slice * CHUNK + lane * 16u);
        }
    }
    if (there && lane == 0u) *scale = group_scale(max_bits);
    __syncwarp();
}

// With FOLDED, slices are those of x times the factor of each column; the contraction is that of x.
// These factors are staged as well, in twice as many places: they are read when a chunk is sliced,
// after the copies of a later segment have begun. The planes have `plane_rows` rows, of which the
// first `rows` are written.
template <int PARTS, bool BY_RANK, bool FOLDED>
FUNCTION void slice_and_contract(
    const Parts &parts, char *planes, float *scales, const float *x, const float *factors, uint rows, uint plane_rows,
    uint width
) {
    constexpr uint STAGE = PARTS * RANKS * SEGMENT, FOLDS = 4u;
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
    stage_segment(0u);
    for (uint chunk = 0u; chunk < chunks; chunk++) {
        const uint start = chunk * CHUNK + lane;
        float values[TOKENS][STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                values[t][s] = start + s * LANES < width ? __ldg(from[t] + start + s * LANES) : 0.0f;
            }
        }
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
                    const float pair[TOKENS] = {values[0][s], values[1][s]};
                    add<PARTS, TOKENS, SEGMENT, BY_RANK>(chains, staged + segment % 2u * STAGE, pair, i * LANES + lane);
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
            const ulong row = first + t;
            char *to = planes + row * padded + chunk * CHUNK;
            const ulong plane = (ulong)plane_rows * padded;
            slice_chunk(values[t], bytes, to, plane, padded - chunk * CHUNK, scales + row * chunks + chunk, row < rows);
        }
    }
    finish<0, TOKENS>(parts, chains, first, rows);
    if constexpr (PARTS > 1) finish<1, TOKENS>(parts, chains, first, rows);
    if constexpr (PARTS > 2) finish<2, TOKENS>(parts, chains, first, rows);
}

#define SLICE_AND_CONTRACT(name, PARTS, BY_RANK, FOLDED) \
    extern "C" __global__ __launch_bounds__(THREADS, 2) void name( \
        const __grid_constant__ Parts parts, char *planes, float *scales, const float *__restrict__ x, \
        const float *__restrict__ factors, uint rows, uint plane_rows, uint width \
    ) { \
        slice_and_contract<PARTS, BY_RANK, FOLDED>(parts, planes, scales, x, factors, rows, plane_rows, width); \
    }

SLICE_AND_CONTRACT(slice_contract_1, 1, true, false)
SLICE_AND_CONTRACT(slice_contract_2, 2, true, false)
SLICE_AND_CONTRACT(slice_contract_3, 3, true, false)
SLICE_AND_CONTRACT(slice_contract_folded, 1, false, true)
