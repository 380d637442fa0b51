// The forward pass of attention_mma.cuh.

#define LOG2_E as_f32(0x3fb8aa3bu)
#define MINUS_INFINITY as_f32(0xff800000u)

// Numbers of a step of EACH blocks.
template <int EACH> FUNCTION void fill(float (&z)[64], int step, float value) {
#pragma unroll
    for (int i = 0; i < 16 * EACH; i++) {
        z[16 * EACH * step + i] = value;
    }
}

// Blocks of a tile of which all is visible to all rows; of the others, which numbers are, 16 bits
// per block.
struct Visible {
    uint whole, bits[BLOCKS / 2];

    // Scores of a block that are not visible are no maximum.
    MEMBER void mask(float (&z)[64], int b, const WarpRows<false> &own, uint tile, uint lane) {
        uint column = tile + b * BLOCK;
        if (own.whole(column)) {
            whole |= 1u << b;
            return;
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            bool here = own.meets_number(i, column, lane);
            z[16 * b + i] = here ? z[16 * b + i] : MINUS_INFINITY;
            bits[b / 2] |= here ? 1u << (16 * (b % 2) + i) : 0u;
        }
    }

    // Weights of a block that are not visible are zero, even where their scale is NaN.
    MEMBER void clear(float (&w)[64], int b) const {
        if ((whole >> b & 1u) == 0u) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                w[16 * b + i] = bits[b / 2] >> (16 * (b % 2) + i) & 1u ? w[16 * b + i] : 0.0f;
            }
        }
    }
};

// Running maximum and denominator of this thread's two rows.
struct Running {
    float m[2], l[2];

    // Adds a tile's scores and turns them into weights.
    template <int EACH, class Columns> MEMBER void add(
        Weights &weights, float (&decays)[2], float (&z)[64], const bool (&active)[2], const Visible &visible,
        const Columns &stream, uint tile, uint lane
    ) {
        float most[2], base[2], lanes[2][8], largest[2] = {0.0f, 0.0f};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            most[r] = m[r];
#pragma unroll
            for (int i = 0; i < 32; i++) {
                most[r] = larger_or_nan(most[r], z[i / 2 * 4 + 2 * r + i % 2]);
            }
            most[r] = most_of_quad(most[r]);
            base[r] = active[r] ? most[r] : 0.0f;
            // Where the maximum is not finite some probability is NaN, and so is everything from
            // here on.
            float decay = isobit_exp2(m[r] - most[r]);
            decays[r] = magnitude_bits(most[r]) < F32_INFINITY ? decay : as_f32(CANONICAL_NAN);
#pragma unroll
            for (int c = 0; c < 8; c++) {
                lanes[r][c] = 0.0f;
            }
        }
#pragma unroll
        for (int step = 0; step < BLOCKS / EACH; step++) {
            if (!stream.has(tile, step)) {
                fill<EACH>(z, step, 0.0f);
                continue;
            }
#pragma unroll
            for (int b = step * EACH; b < (step + 1) * EACH; b++) {
                float scales[8];
                stream.numbers(scales, 1u, tile, b, lane);
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    int r = i / 2 % 2, c = i / 4 * 2 + i % 2;
                    float p = exp2_down(z[16 * b + i] - base[r]);
                    lanes[r][c] = lanes[r][c] + p;
                    z[16 * b + i] = p * scales[c];
                }
                visible.clear(z, b);
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    largest[i / 2 % 2] = larger_or_nan(largest[i / 2 % 2], z[16 * b + i]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = sum_of_quad(lanes[r]);
            if (active[r]) {
                l[r] = fma_rn(l[r], decays[r], sum);
                m[r] = most[r];
            }
        }
        weights.slice(z, largest, lane);
    }

    // The tree of a lane sum: this thread has the lanes 4 c + t.
    MEMBER float sum_of_quad(float (&lanes)[8]) const {
#pragma unroll
        for (int h = 4; h > 0; h /= 2) {
#pragma unroll
            for (int c = 0; c < h; c++) {
                lanes[c] = lanes[c] + lanes[c + h];
            }
        }
        float sum = lanes[0] + from_lane(lanes[0], 2);
        return sum + from_lane(sum, 1);
    }
};

// A block per ROWS queries, head and part of the value's width.
extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) attention_forward_mma(
    float *o, float *lse, const uchar *q, const float *q_scales, const uchar *k, const uchar *v, const float *numbers,
    const uint *table, uint heads, uint heads_per_key, uint value_width, uint query_places,
    uint key_places, uint window, float softmax_scale2
) {
    constexpr int PART = part_of(VALUE_WIDTH), PARTS = (VALUE_WIDTH + PART - 1) / PART;
    // Fragments of the queries stay in registers where there is room.
    constexpr bool KEPT = KEY_WIDTH <= 128;
    uint part = blockIdx.x % PARTS, head = blockIdx.x / PARTS % heads, key_head = head / heads_per_key;
    Rows rows = rows_of(table, blockIdx.x / (PARTS * heads));
    uint lane = lane_index(), warp = warp_index();

    uint row_base = (uint)__cvta_generic_to_shared(shared);
    constexpr int EACH = FORWARD_EACH;
    Stream<KEY_WIDTH, 0, VALUE_WIDTH, 2, EACH, FORWARD_SLOTS> stream;
    stream.base = row_base + ROWS / BLOCK * WIDE_BYTES(KEY_WIDTH);
    stream.seen = any_meets<false>(rows.position, rows.count, rows.length, window);
    stream.groups = (VALUE_WIDTH - part * PART < PART ? VALUE_WIDTH - part * PART : PART) / 32u;
    // A place takes 2 * WIDTH bytes of planes.
    ulong columns = (ulong)key_head * key_places + rows.columns;
    stream.from.wide = k + columns * (2u * KEY_WIDTH);
    stream.from.wide2 = nullptr;
    stream.from.deep = v + columns * (2u * VALUE_WIDTH) + part * PART / 32u * DEEP_BYTES;
    stream.from.numbers = numbers + columns * 2u;
    stream.begin(row_base, q + ((ulong)head * query_places + rows.place) * (2u * KEY_WIDTH), nullptr, rows.count, warp, lane);

    WarpRows<false> own(rows, window, warp, lane);
    Running running;
    float score_scales[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        ulong place = (ulong)head * query_places + rows.place + own.first + lane / 4u + 8u * r;
        score_scales[r] = own.has(r, lane) ? q_scales[number_at(place, 0u, 4u)] * softmax_scale2 : 0.0f;
        running.m[r] = MINUS_INFINITY;
        running.l[r] = 0.0f;
    }
    float acc[PART / 2];
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
        acc[i] = 0.0f;
    }

    uint left_address = row_base + warp_rows<KEY_WIDTH>(warp) + left_lane<KEY_WIDTH>(lane);
    uint kept_high[KEPT ? KEY_WIDTH / 32 : 1][4], kept_low[KEPT ? KEY_WIDTH / 32 : 1][4];
    if constexpr (KEPT) {
#pragma unroll
        for (int k = 0; k < KEY_WIDTH / 32; k++) {
            load_left<KEY_WIDTH>(kept_high[k], kept_low[k], left_address, k);
        }
    }

    for (uint tile = stream.first_tile(); tile < stream.seen.end; tile += TILE) {
        bool sees = overlap(own.met, tile, tile + TILE);
        float z[64];
        Visible visible = {0u, {0u, 0u}};
#pragma unroll
        for (int step = 0; step < BLOCKS / EACH; step++) {
            if (!stream.has(tile, step)) {
                fill<EACH>(z, step, MINUS_INFINITY);
                continue;
            }
            uint slot = stream.next(warp, lane);
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                int b = step * EACH + n;
                int high[1][16], cross[1][16];
                uint columns = slot + n * WIDE_BYTES(KEY_WIDTH) + column_lane<KEY_WIDTH>(lane);
                if constexpr (KEPT) {
                    no_products<KEY_WIDTH>(high[0], cross[0]);
#pragma unroll
                    for (int k = 0; k < KEY_WIDTH / 32; k++) {
                        uint right = step_at<KEY_WIDTH>(columns, k);
                        add_step(high[0], cross[0], kept_high[k], kept_low[k], right, KEY_WIDTH, BLOCK * KEY_WIDTH);
                    }
                } else {
                    over_width<KEY_WIDTH>(high, cross, left_address, columns);
                }
                float scales[8];
                stream.numbers(scales, 0u, tile, b, lane);
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    float scale = score_scales[i / 2 % 2] * scales[i / 4 * 2 + i % 2];
                    z[16 * b + i] = chunk_of<KEY_WIDTH>(high[0][i], cross[0][i]) * scale;
                }
                visible.mask(z, b, own, tile, lane);
            }
        }

        Weights weights;
        float decays[2];
        bool active[2] = {false, false};
        if (sees) {
            active[0] = overlap(own.mine[0], tile, tile + TILE);
            active[1] = overlap(own.mine[1], tile, tile + TILE);
            running.add<EACH>(weights, decays, z, active, visible, stream, tile, lane);
        }
        add_tile<PART, true>(acc, stream, weights, decays, active, sees, warp, lane);
    }

    float inverse[2] = {div_rn(1.0f, running.l[0]), div_rn(1.0f, running.l[1])};
    uint row = own.first + lane / 4u;
    store<PART>(o, acc, inverse, rows, row, head, heads, value_width, part * PART, lane);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (part == 0u && lane % 4u == 0u && row + 8u * r < rows.count) {
            lse[(ulong)(rows.source + row + 8u * r) * heads + head] = running.m[r] + isobit_ln(running.l[r]) * LOG2_E;
        }
    }
}
