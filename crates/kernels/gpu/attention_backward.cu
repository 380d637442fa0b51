// The gradients of attention_mma.cuh: of queries, of keys and of values, a kernel each.

enum Kind { QUERY, KEY, VALUE };

// What the three kernels take: rows and columns by width for the scores (1) and for the gradient of
// the weights (2, not for VALUE), columns by place, and numbers per place: scales of q and dO, lse
// and D, or scales of k and v. `result_width` is that of the result as stored.
struct Gradient {
    float *result;
    const uchar *rows, *rows2, *columns, *columns2, *deep;
    const float *row_numbers, *column_numbers;
    const uint *table;
    uint heads, row_heads_per, column_heads_per, result_width, places, window;
    float softmax_scale, softmax_scale2;
};

// QUERY: rows are queries, columns keys. KEY and VALUE: rows are keys, columns the queries of one
// query head.
template <Kind KIND> FUNCTION void gradient(const Gradient &p) {
    constexpr bool TRANSPOSED = KIND != QUERY;
    constexpr int W1 = KEY_WIDTH, W2 = KIND == VALUE ? 0 : VALUE_WIDTH;
    constexpr int WIDTH = KIND == VALUE ? VALUE_WIDTH : KEY_WIDTH;
    constexpr int PART = part_of(WIDTH), PARTS = (WIDTH + PART - 1) / PART;
    constexpr int NUMBERS = TRANSPOSED ? 4 : 2, ROW_NUMBERS = TRANSPOSED ? 2 : 4;
    constexpr int EACH = KIND == VALUE ? FORWARD_EACH : QUERY_EACH;
    constexpr int SLOTS = KIND == VALUE ? FORWARD_SLOTS : QUERY_SLOTS;
    uint part = blockIdx.x % PARTS, head = blockIdx.x / PARTS % p.heads;
    uint row_head = head / p.row_heads_per, column_head = head / p.column_heads_per;
    Rows rows = rows_of(p.table, blockIdx.x / (PARTS * p.heads));
    uint lane = lane_index(), warp = warp_index();

    uint row_base = (uint)__cvta_generic_to_shared(shared), row_base2 = row_base + ROWS / BLOCK * WIDE_BYTES(W1);
    Stream<W1, W2, WIDTH, NUMBERS, EACH, SLOTS> stream;
    stream.base = row_base2 + ROWS / BLOCK * WIDE_BYTES(W2);
    stream.seen = any_meets<TRANSPOSED>(rows.position, rows.count, rows.length, p.window);
    stream.groups = (WIDTH - part * PART < PART ? WIDTH - part * PART : PART) / 32u;
    ulong columns = (ulong)column_head * p.places + rows.columns, row_place = (ulong)row_head * p.places + rows.place;
    stream.from.wide = p.columns + columns * (2u * W1);
    stream.from.wide2 = p.columns2 + columns * (2u * W2);
    stream.from.deep = p.deep + columns * (2u * WIDTH) + part * PART / 32u * DEEP_BYTES;
    stream.from.numbers = p.column_numbers + columns * NUMBERS;
    stream.begin(row_base, p.rows + row_place * (2u * W1), p.rows2 + row_place * (2u * W2), rows.count, warp, lane);

    WarpRows<TRANSPOSED> own(rows, p.window, warp, lane);
    float scales[2], scales2[2], lse[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        scales[r] = scales2[r] = lse[r] = delta[r] = 0.0f;
        if (own.has(r, lane)) {
            ulong place = row_place + own.first + lane / 4u + 8u * r;
            const float *numbers = p.row_numbers + number_at(place, 0u, ROW_NUMBERS);
            scales[r] = TRANSPOSED ? numbers[0] : numbers[0] * p.softmax_scale2;
            scales2[r] = numbers[BLOCK];
            if (!TRANSPOSED) {
                lse[r] = numbers[2u * BLOCK];
                delta[r] = numbers[3u * BLOCK];
            }
        }
    }
    // Times 1 changes no bit.
    const float one[2] = {1.0f, 1.0f};
    float acc[PART / 2];
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
        acc[i] = 0.0f;
    }
    uint left_address = row_base + warp_rows<W1>(warp) + left_lane<W1>(lane);
    uint left_address2 = row_base2 + warp_rows<W2>(warp) + left_lane<W2>(lane);

    for (uint tile = stream.first_tile(); tile < stream.seen.end; tile += TILE) {
        bool sees = overlap(own.met, tile, tile + TILE);
        float w[64], largest[2] = {0.0f, 0.0f};
#pragma unroll
        for (int step = 0; step < BLOCKS / EACH; step++) {
            if (stream.has(tile, step)) {
                uint slot = stream.next(warp, lane);
                int high[EACH][16], cross[EACH][16];
                float prob[EACH][16];
                over_width<W1>(high, cross, left_address, slot + column_lane<W1>(lane));
#pragma unroll
                for (int n = 0; n < EACH; n++) {
                    float near[8], shifts[8];
                    stream.numbers(near, 0u, tile, step * EACH + n, lane);
                    if (TRANSPOSED) {
                        stream.numbers(shifts, 2u, tile, step * EACH + n, lane);
                    }
#pragma unroll
                    for (int i = 0; i < 16; i++) {
                        int r = i / 2 % 2, c = i / 4 * 2 + i % 2;
                        float score_scale = TRANSPOSED ? (near[c] * p.softmax_scale2) * scales[r] : scales[r] * near[c];
                        float z = chunk_of<W1>(high[n][i], cross[n][i]) * score_scale;
                        prob[n][i] = exp2_of(z - (TRANSPOSED ? shifts[c] : lse[r]));
                    }
                }
                if constexpr (W2 > 0) {
                    over_width<W2>(high, cross, left_address2, slot + EACH * WIDE_BYTES(W1) + column_lane<W2>(lane));
                }
#pragma unroll
                for (int n = 0; n < EACH; n++) {
                    int b = step * EACH + n;
                    uint column = tile + b * BLOCK;
                    float near[8], far[8], deltas[8];
                    stream.numbers(far, 1u, tile, b, lane);
                    if constexpr (KIND == VALUE) {
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            w[16 * b + i] = prob[n][i] * far[i / 4 * 2 + i % 2];
                        }
                    } else {
                        stream.numbers(near, 0u, tile, b, lane);
                        if (TRANSPOSED) {
                            stream.numbers(deltas, 3u, tile, b, lane);
                        }
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            int r = i / 2 % 2, c = i / 4 * 2 + i % 2;
                            float grad = fma_rn(
                                chunk_of<W2>(high[n][i], cross[n][i]), scales2[r] * far[c], TRANSPOSED ? -deltas[c] : -delta[r]
                            );
                            w[16 * b + i] = (prob[n][i] * grad) * (near[c] * p.softmax_scale);
                        }
                    }
                    if (!own.whole(column)) {
#pragma unroll
                        for (int i = 0; i < 16; i++) {
                            w[16 * b + i] = own.meets_number(i, column, lane) ? w[16 * b + i] : 0.0f;
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 16; i++) {
                        int r = i / 2 % 2;
                        largest[r] = larger_or_nan(largest[r], magnitude(w[16 * b + i]));
                    }
                }
            } else {
#pragma unroll
                for (int i = 0; i < 16 * EACH; i++) {
                    w[16 * EACH * step + i] = 0.0f;
                }
            }
        }

        Weights weights;
        if (sees) {
            weights.slice(w, largest, lane);
        }
        bool active[2] = {overlap(own.mine[0], tile, tile + TILE), overlap(own.mine[1], tile, tile + TILE)};
        add_tile<PART, false>(acc, stream, weights, one, active, sees, warp, lane);
    }
    store<PART>(p.result, acc, one, rows, own.first + lane / 4u, head, p.heads, p.result_width, part * PART, lane);
}

// A block per ROWS queries, head and part of the key's width.
extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) attention_grad_query_mma(
    float *dq, const uchar *q, const uchar *d_o, const float *query_numbers, const uchar *k, const uchar *k_by_place,
    const uchar *v, const float *key_numbers, const uint *table, uint heads, uint heads_per_key, uint key_width,
    uint places, uint window, float softmax_scale, float softmax_scale2
) {
    Gradient p = {dq, q, d_o, k, v, k_by_place, query_numbers, key_numbers, table,
                  heads, 1u, heads_per_key, key_width, places, window, softmax_scale, softmax_scale2};
    gradient<QUERY>(p);
}

// A block per ROWS keys, query head and part of the width: the head's share of the gradient of its
// key head.
extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) attention_grad_key_mma(
    float *dk, const uchar *q, const uchar *q_by_place, const uchar *d_o, const float *query_numbers, const uchar *k,
    const uchar *v, const float *key_numbers, const uint *table, uint heads, uint heads_per_key, uint key_width,
    uint places, uint window, float softmax_scale, float softmax_scale2
) {
    Gradient p = {dk, k, v, q, d_o, q_by_place, key_numbers, query_numbers, table,
                  heads, heads_per_key, 1u, key_width, places, window, softmax_scale, softmax_scale2};
    gradient<KEY>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS) attention_grad_value_mma(
    float *dv, const uchar *q, const uchar *d_o_by_place, const float *query_numbers, const uchar *k,
    const float *key_numbers, const uint *table, uint heads, uint heads_per_key, uint value_width, uint places,
    uint window, float softmax_scale, float softmax_scale2
) {
    Gradient p = {dv, k, nullptr, q, nullptr, d_o_by_place, key_numbers, query_numbers, table,
                  heads, heads_per_key, 1u, value_width, places, window, softmax_scale, softmax_scale2};
    gradient<VALUE>(p);
}
