// Contracting with a factor (docs/numerics.md, "Low-rank products"), with a warp as the 32 lanes
// of a sum: groups of RANKS ranks share what a warp has read. The factor comes through shared
// memory, a segment of columns at a time. CUDA C++ behind cuda.h.

#define RANKS 8
#define WARPS 8
#define THREADS (WARPS * LANES)

// RANKS ranks of a factor: where the first of them lies, where its results go, and the rank of the
// whole factor.
struct Part {
    const float *factor;
    float *u;
    ulong rank;
};

struct alignas(64) Parts {
    Part part[5];
    ulong unused;
};

// Sixteen bytes to shared memory, or as many zeros.
FUNCTION void stage_4(float *to, const float *from, bool there) {
    copy_16_or_zeros((uint)__cvta_generic_to_shared(to), from, there);
}

// Brings RANKS ranks of SEGMENT columns from `first` on. By rank, element (j, l) of a factor lies
// at j * width + l and goes to [rank][column]; otherwise it lies at l * rank + j and goes to [half
// of the ranks][column][4].
template <int SEGMENT, bool BY_RANK>
FUNCTION void stage(float *staged, const Part &part, uint width, uint first) {
#pragma unroll
    for (uint i = threadIdx.x; i < RANKS * SEGMENT / 4; i += THREADS) {
        if (BY_RANK) {
            uint n = i / (SEGMENT / 4), c = i % (SEGMENT / 4) * 4u;
            bool there = first + c < width;
            stage_4(staged + n * SEGMENT + c, part.factor + (there ? (ulong)n * width + first + c : 0), there);
        } else {
            uint half = i % 2u, c = i / 2u;
            bool there = first + c < width;
            stage_4(staged + (half * SEGMENT + c) * 4u, part.factor + (there ? (first + c) * part.rank + half * 4u : 0), there);
        }
    }
}

// The RANKS elements of a column that was staged.
template <int SEGMENT, bool BY_RANK>
FUNCTION void load_factor(float (&values)[RANKS], const float *staged, uint column) {
#pragma unroll
    for (int n = 0; n < RANKS; n++) {
        if (BY_RANK) values[n] = staged[n * SEGMENT + column];
        else if (n % 4 == 0) *(float4 *)(values + n) = *(const float4 *)(staged + (n / 4 * SEGMENT + column) * 4);
    }
}

// One halving of the lanes: H of them add to H others. Where the upper lanes would add the same
// numbers once more they add those of other chains instead.
template <int H, int COUNT>
FUNCTION void halve(float (&chains)[COUNT]) {
    bool upper = threadIdx.x & H;
    if constexpr (H < COUNT) {
#pragma unroll
        for (int i = 0; i < H; i++) {
            float low = chains[i], high = chains[i + H];
            float given = __shfl_xor_sync(0xffffffffu, upper ? low : high, H);
            chains[i] = (upper ? high : low) + given;
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) chains[i] = chains[i] + __shfl_xor_sync(0xffffffffu, chains[i], H);
    }
}

// Lane sums of COUNT chains at once: lane l is left with the sum of chain l % COUNT.
template <int COUNT>
FUNCTION float lane_sums(float (&chains)[COUNT]) {
    halve<16>(chains);
    halve<8>(chains);
    halve<4>(chains);
    halve<2>(chains);
    halve<1>(chains);
    return chains[0];
}

// Stores the sums of part PART of TOKENS tokens from `first` on.
template <int PART, int TOKENS, int ALL>
FUNCTION void finish(const Parts &parts, const float (&chains)[ALL], uint first, uint tokens) {
    float own[TOKENS * RANKS];
#pragma unroll
    for (int i = 0; i < TOKENS * RANKS; i++) own[i] = chains[PART * TOKENS * RANKS + i];
    float sum = lane_sums<TOKENS * RANKS>(own);
    uint lane = threadIdx.x % LANES;
    uint token = first + lane / RANKS;
    const Part &part = parts.part[PART];
    if (lane < TOKENS * RANKS && token < tokens) part.u[token * part.rank + lane % RANKS] = sum;
}

// The products of one column of a segment.
template <int PARTS, int TOKENS, int SEGMENT, bool BY_RANK>
FUNCTION void add(float (&chains)[PARTS * TOKENS * RANKS], const float *staged, const float (&values)[TOKENS], uint column) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        float factor[RANKS];
        load_factor<SEGMENT, BY_RANK>(factor, staged + p * RANKS * SEGMENT, column);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
#pragma unroll
            for (int n = 0; n < RANKS; n++) {
                float &chain = chains[(p * TOKENS + t) * RANKS + n];
                chain = fma_rn(values[t], factor[n], chain);
            }
        }
    }
}
