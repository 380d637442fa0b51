// Low-rank products, contract (docs/numerics.md, "Low-rank products"): one read of x for up to
// three groups of RANKS ranks, factors some segments ahead.

// This lane's elements of a segment; what lies beyond `width` is not used.
template <int STEPS, int TOKENS>
FUNCTION void load(float (&values)[STEPS][TOKENS], const float *const (&rows)[TOKENS], uint column, uint width) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        bool there = column + s * LANES < width;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) values[s][t] = there ? rows[t][column + s * LANES] : 0.0f;
    }
}

// A warp has TOKENS tokens, a segment STEPS elements for every lane; the factors of STAGES segments
// are staged or on their way.
template <int PARTS, int TOKENS, int STEPS, int STAGES, bool BY_RANK>
FUNCTION void contract(const Parts &parts, const float *x, uint tokens, uint width) {
    constexpr uint SEGMENT = STEPS * LANES, STAGE = PARTS * RANKS * SEGMENT;
    extern __shared__ float4 shared[];
    float *staged = (float *)shared;
    uint lane = threadIdx.x % LANES;
    uint first = (blockIdx.x * WARPS + threadIdx.x / LANES) * TOKENS;
    const float *rows[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        // A token that is not there stands for the last one; its sums are not kept.
        uint token = first + t < tokens ? first + t : tokens - 1u;
        rows[t] = x + (ulong)token * width;
    }
    float chains[PARTS * TOKENS * RANKS];
#pragma unroll
    for (int i = 0; i < PARTS * TOKENS * RANKS; i++) chains[i] = 0.0f;

    uint segments = (width + SEGMENT - 1u) / SEGMENT;
    auto stage_segment = [&](uint segment) {
        if (segment < segments) {
            float *to = staged + segment % STAGES * STAGE;
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                stage<SEGMENT, BY_RANK>(to + p * RANKS * SEGMENT, parts.part[p], width, segment * SEGMENT);
            }
        }
        copies_end();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) stage_segment(s);
    float values[STEPS][TOKENS], next[STEPS][TOKENS];
    load(values, rows, lane, width);
    for (uint segment = 0u; segment < segments; segment++) {
        uint column = segment * SEGMENT;
        // The segment has arrived, and everyone is done with the one before, whose place the next
        // copies take.
        copies_wait<STAGES - 2>();
        __syncthreads();
        stage_segment(segment + STAGES - 1u);
        load(next, rows, column + SEGMENT + lane, width);
        const float *from = staged + segment % STAGES * STAGE;
        // Whole segments apart: without conditions the compiler reads ahead.
        if (column + SEGMENT <= width) {
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                add<PARTS, TOKENS, SEGMENT, BY_RANK>(chains, from, values[s], s * LANES + lane);
            }
        } else {
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                if (column + s * LANES + lane < width) {
                    add<PARTS, TOKENS, SEGMENT, BY_RANK>(chains, from, values[s], s * LANES + lane);
                }
            }
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
#pragma unroll
            for (int t = 0; t < TOKENS; t++) values[s][t] = next[s][t];
        }
    }
    __syncwarp();
    finish<0, TOKENS>(parts, chains, first, tokens);
    if constexpr (PARTS > 1) finish<1, TOKENS>(parts, chains, first, tokens);
    if constexpr (PARTS > 2) finish<2, TOKENS>(parts, chains, first, tokens);
}

#define CONTRACT(name, PARTS, TOKENS, STEPS, STAGES, BY_RANK) \
    extern "C" __global__ __launch_bounds__(THREADS, 2) void name( \
        const __grid_constant__ Parts parts, const float *x, uint tokens, uint width) { \
        contract<PARTS, TOKENS, STEPS, STAGES, BY_RANK>(parts, x, tokens, width); \
    }

// For few tokens, and for many.
CONTRACT(contract_few_1, 1, 1, 16, 2, true)
CONTRACT(contract_few_2, 2, 1, 16, 2, true)
CONTRACT(contract_few_3, 3, 1, 16, 2, true)
CONTRACT(contract_many_1, 1, 4, 8, 2, true)
CONTRACT(contract_many_2, 2, 4, 4, 3, true)
CONTRACT(contract_many_3, 3, 2, 8, 2, true)
CONTRACT(contract_few_by_width, 1, 1, 16, 2, false)
CONTRACT(contract_many_by_width, 1, 4, 8, 2, false)
