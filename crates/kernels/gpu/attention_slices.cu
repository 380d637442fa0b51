// What attention_mma.cuh takes and leaves: slices of rows, D, and sums over heads. Any widths.

// Rows [row, head, width] and where their slices go: planes by width and by place (null: not
// wanted) of `padded` columns, and scales, number `n` of `count` per place. `groups` counts blocks
// of places and heads, with those of operands before.
struct __align__(64) Operand {
    const float *x;
    const uint *blocks;
    uint *by_width, *by_place;
    float *numbers;
    uint n, count, heads, width, padded, places, groups;
};

// One operand, whose rows are at most 128 * STEPS wide.
template <uint STEPS> FUNCTION void slice_rows(const Operand &operand, uint group) {
    constexpr uint WORDS = 32u * STEPS + 1u;
    __shared__ uint rows[2][BLOCK][WORDS];
    uint heads = operand.heads, width = operand.width, padded = operand.padded, places = operand.places;
    uint *by_width = operand.by_width, *by_place = operand.by_place;
    const uint *blocks = operand.blocks;
    uint head = group % heads, block = group / heads;
    uint count = blocks[2u * block + 1u], lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
    ulong line = (ulong)heads * width;
    const float *from = operand.x + blocks[2u * block] * line + (ulong)head * width;
    // Words of both slices.
    ulong plane = ((ulong)head * places + block * BLOCK) * (padded / 2u);
    bool whole = width % 4u == 0u && (ulong)from % 16u == 0u;

    for (uint row = warp; row < BLOCK; row += GROUP / 32u) {
        float value[STEPS][4];
        uint bits = 0u;
#pragma unroll
        for (uint s = 0u; s < STEPS; s++) {
            uint d = 128u * s + 4u * lane;
            float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row < count && whole && d < width) {
                four = *(const float4 *)(from + row * line + d);
            }
            value[s][0] = four.x;
            value[s][1] = four.y;
            value[s][2] = four.z;
            value[s][3] = four.w;
#pragma unroll
            for (uint n = 0u; n < 4u; n++) {
                if (!whole && row < count && d + n < width) {
                    value[s][n] = from[row * line + d + n];
                }
                uint here = magnitude_bits(value[s][n]);
                bits = here > bits ? here : bits;
            }
        }
#pragma unroll
        for (uint other = 16u; other > 0u; other /= 2u) {
            uint there = from_lane(bits, other);
            bits = there > bits ? there : bits;
        }
        float multiplier = group_multiplier(bits);
        if (lane == 0u) {
            ulong place = (ulong)head * places + block * BLOCK + row;
            operand.numbers[number_at(place, operand.n, operand.count)] = group_scale(bits);
        }
#pragma unroll
        for (uint s = 0u; s < STEPS; s++) {
            uint word = 32u * s + lane;
            if (word < padded / 4u) {
                uint high, low;
                slice4(high, low, value[s][0], value[s][1], value[s][2], value[s][3], multiplier);
                // An infinite or NaN element has the multiplier zero; 0 times it is NaN, whose bits
                // are no integer.
                high = multiplier == 0.0f ? 0u : high;
                low = multiplier == 0.0f ? 0u : low;
                rows[0][row][word] = high;
                rows[1][row][word] = low;
                if (by_width) {
                    uint at = row * (padded / 4u) + ((word / 4u ^ swizzle_of(padded, row)) * 4u | word % 4u);
                    by_width[plane + at] = high;
                    by_width[plane + BLOCK * (padded / 4u) + at] = low;
                }
            }
        }
    }
    if (!by_place) {
        return;
    }
    __syncthreads();
    // Four rows by four columns of bytes are transposed: word t of half h of column d has the rows
    // 16 h + 4 i + t.
    for (uint i = threadIdx.x; i < 2u * padded * 2u; i += GROUP) {
        uint slice = i / (padded * 2u), word = i % 8u, column = i / 8u % (padded / 4u);
        uint row = word / 4u * 16u + word % 4u;
        uint a = rows[slice][row][column], b = rows[slice][row + 4u][column];
        uint c = rows[slice][row + 8u][column], d = rows[slice][row + 12u][column];
        uint ab = __byte_perm(a, b, 0x5140), ab2 = __byte_perm(a, b, 0x7362);
        uint cd = __byte_perm(c, d, 0x5140), cd2 = __byte_perm(c, d, 0x7362);
        // The same swizzle for the four columns.
        uint at = (word / 4u ^ swizzle_of(BLOCK, 4u * column)) * 4u | word % 4u;
        uint *to = by_place + plane + ((column / 8u * 2u + slice) * BLOCK + column % 8u * 4u) * 8u + at;
        to[0] = __byte_perm(ab, cd, 0x5410);
        to[8] = __byte_perm(ab, cd, 0x7632);
        to[16] = __byte_perm(ab2, cd2, 0x5410);
        to[24] = __byte_perm(ab2, cd2, 0x7632);
    }
}

// A group per operand, block of places and head. An operand that is not there repeats the count of
// the one before.
KERNEL(GROUP) attention_slice_mma(
    const __grid_constant__ Operand first, const __grid_constant__ Operand second, const __grid_constant__ Operand third,
    const __grid_constant__ Operand fourth
) {
    uint group = blockIdx.x;
    Operand operand = group < first.groups ? first : group < second.groups ? second : group < third.groups ? third : fourth;
    group -= group < first.groups ? 0u : group < second.groups ? first.groups
             : group < third.groups ? second.groups : third.groups;
    if (operand.padded <= 128u) {
        slice_rows<1>(operand, group);
    } else {
        slice_rows<2>(operand, group);
    }
}

// A group per block of places and head, a warp per row: lse and D over places.
KERNEL(GROUP) attention_delta_mma(
    float *numbers, const float *d_o, const float *o, const float *lse, const uint *blocks, uint heads,
    uint width, uint places
) {
    uint head = blockIdx.x % heads, block = blockIdx.x / heads;
    uint first = blocks[2u * block], count = blocks[2u * block + 1u], lane = threadIdx.x % 32u;
    for (uint row = threadIdx.x / 32u; row < BLOCK; row += GROUP / 32u) {
        ulong at = (ulong)(first + row) * heads + head;
        float sum = 0.0f;
        for (uint d = lane; d < width && row < count; d += 32u) {
            sum = fma_rn(d_o[at * width + d], o[at * width + d], sum);
        }
#pragma unroll
        for (uint h = 16u; h > 0u; h /= 2u) {
            sum = sum + __shfl_down_sync(0xffffffffu, sum, h);
        }
        if (lane == 0u) {
            float *to = numbers + number_at((ulong)head * places + block * BLOCK + row, 2u, 4u);
            to[0] = row < count ? lse[at] : 0.0f;
            to[BLOCK] = sum;
        }
    }
}

// A group per block of places and key head: the shares of its query heads added in ascending order.
// `blocks` and `share_blocks` hold first row and number of rows of every block, in the gradient and
// in the shares.
KERNEL(GROUP) attention_add_heads(
    float *to, const float *shares, const uint *blocks, const uint *share_blocks, uint key_heads, uint heads_per_key, uint width
) {
    uint key_head = blockIdx.x % key_heads, block = blockIdx.x / key_heads;
    ulong first = blocks[2u * block], share = share_blocks[2u * block];
    uint count = blocks[2u * block + 1u];
    ulong step = (ulong)key_heads * heads_per_key * width;
    shares += share * step + (ulong)key_head * heads_per_key * width;
    to += (first * key_heads + key_head) * width;
    if (width % 4u == 0u) {
        uint pieces = width / 4u;
#pragma unroll 4
        for (uint i = threadIdx.x; i < count * pieces; i += GROUP) {
            uint row = i / pieces, d = i % pieces * 4u;
            const float *from = shares + row * step + d;
            float4 sum = *(const float4 *)from;
#pragma unroll 4
            for (uint n = 1u; n < heads_per_key; n++) {
                float4 other = *(const float4 *)(from + n * width);
                sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
            }
            *(float4 *)(to + (ulong)row * key_heads * width + d) = sum;
        }
        return;
    }
    for (uint i = threadIdx.x; i < count * width; i += GROUP) {
        uint row = i / width, d = i % width;
        const float *from = shares + row * step + d;
        float sum = from[0];
        for (uint n = 1u; n < heads_per_key; n++) {
            sum = sum + from[n * width];
        }
        to[(ulong)row * key_heads * width + d] = sum;
    }
}
