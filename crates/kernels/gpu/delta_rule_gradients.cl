// Gated delta rule, backward (docs/numerics.md, "Gated delta rule"): what adds over the value's
// width, for all chunks at once, after the state kernels of delta_rule.cl.

// As in delta_rule.cl.
#define PLACES 64
#define SQUARE (PLACES * PLACES)
#define WIDTH_MAX 256
#define COLUMNS 16
#define ROWS 4
#define PITCH (PLACES + 4)

// For PoCL 5, loops end in their barrier and no branch of some work items leads straight to one
// (docs/add-an-op.md).

// Rows of one value head, columns `first` to `first + COLUMNS`, times a factor per row where there
// is one, as slice[column][row].
FUNCTION void load_columns(
    LOCAL_POINTER float *slice,
    GLOBAL const float *x,
    GLOBAL const float *factors,
    uint scaled,
    ulong token,
    uint n,
    uint first,
    uint heads,
    uint head,
    uint width
) {
    for (uint at = local_index(); at < PLACES * COLUMNS; at += GROUP) {
        uint i = at / 8u % 4u + at / 64u * 4u;
        uint inside = at % 8u + at / 32u % 2u * 8u;
        uint c = first + inside;
        float value = 0.0f;
        if (i < n && c < width) {
            value = x[((token + i) * heads + head) * width + c];
            value = scaled != 0u ? factors[(token + i) * heads + head] * value : value;
        }
        slice[inside * PITCH + i] = value;
    }
}

// Weights of one chunk and value head: Wk in place of M and Wq in place of P.
KERNEL(GROUP) delta_rule_weights(
    GLOBAL float *mixed,
    GLOBAL const float *d_o,
    GLOBAL const float *dv,
    GLOBAL const float *y,
    GLOBAL const float *beta,
    GLOBAL const float *decays,
    GLOBAL const uint *chunks,
    uint value_heads,
    uint value_width
) {
    LOCAL ALIGNED float outputs[PITCH * COLUMNS];
    LOCAL ALIGNED float dy[PITCH * COLUMNS];
    LOCAL ALIGNED float delta[PITCH * COLUMNS];
    uint chunk = div_u32(group_index(), value_heads);
    uint head = mod_u32(group_index(), value_heads);
    ulong token = chunks[2u * chunk];
    uint n = chunks[2u * chunk + 1u];
    uint row = local_index() / 16u * 4u;
    uint column = local_index() % 16u * 4u;
    float wq[16];
    float wk[16];
    for (uint at = 0u; at < 16u; at++) {
        wq[at] = 0.0f;
        wk[at] = 0.0f;
    }
    for (uint first = 0u; first < value_width; first += COLUMNS) {
        load_columns(outputs, d_o, beta, 0u, token, n, first, value_heads, head, value_width);
        load_columns(dy, dv, beta, 0u, token, n, first, value_heads, head, value_width);
        load_columns(delta, y, beta, 1u, token, n, first, value_heads, head, value_width);
        barrier_local();
        uint end = value_width - first < COLUMNS ? value_width - first : COLUMNS;
        for (uint x = 0u; x < end; x++) {
            float left_q[4];
            float left_k[4];
            float right[4];
            load4(left_q, outputs + x * PITCH + row);
            load4(left_k, dy + x * PITCH + row);
            load4(right, delta + x * PITCH + column);
            for (uint r = 0u; r < 4u; r++) {
                for (uint c = 0u; c < 4u; c++) {
                    wq[r * 4u + c] = fma_rn(left_q[r], right[c], wq[r * 4u + c]);
                    wk[r * 4u + c] = fma_rn(left_k[r], right[c], wk[r * 4u + c]);
                }
            }
        }
        barrier_local();
    }
    GLOBAL const float *steps = decays + (ulong)group_index() * 3u * PLACES;
    ulong at = (ulong)group_index() * 2u * SQUARE;
    for (uint c = 0u; c < 4u; c++) {
        uint j = column + c;
        float between = 1.0f;
        for (uint i = j + 1u; i < n && i < row; i++) {
            between = between * steps[i];
        }
        for (uint r = 0u; r < 4u; r++) {
            uint i = row + r;
            if (i >= j && i < n) {
                between = i > j ? between * steps[i] : between;
                mixed[at + i * PLACES + j] = wk[r * 4u + c] * between;
                mixed[at + SQUARE + i * PLACES + j] = wq[r * 4u + c] * between;
            }
        }
    }
}

// What pairs of tokens add to the gradients of q and k at ROWS rows from `first` on and one depth,
// whose elements lie `step` apart: Wq with k up to the row, Wq with q from the row on, Wk with k of
// all others. Every row takes its pairs in ascending order; rows from n on get numbers that nobody
// reads.
FUNCTION void add_pairs(
    float *part_q,
    float *part_k,
    GLOBAL const float *q,
    GLOBAL const float *k,
    ulong step,
    GLOBAL const float *wq,
    GLOBAL const float *wk,
    uint first,
    uint n
) {
    for (uint l = first; l < n; l++) {
        float weight[ROWS];
        load4(weight, wq + l * PLACES + first);
        float query = q[l * step];
        for (uint r = 0u; r < ROWS; r++) {
            part_k[r] = first + r <= l ? fma_rn(weight[r], query, part_k[r]) : part_k[r];
        }
    }
    for (uint j = 0u; j < first; j += ROWS) {
        float keys[ROWS];
        for (uint e = 0u; e < ROWS; e++) {
            keys[e] = k[(j + e) * step];
        }
        for (uint r = 0u; r < ROWS; r++) {
            float weight_q[ROWS];
            float weight_k[ROWS];
            load4(weight_q, wq + (first + r) * PLACES + j);
            load4(weight_k, wk + (first + r) * PLACES + j);
            for (uint e = 0u; e < ROWS; e++) {
                part_q[r] = fma_rn(weight_q[e], keys[e], part_q[r]);
                part_k[r] = fma_rn(-weight_k[e], keys[e], part_k[r]);
            }
        }
    }
    for (uint e = 0u; e < ROWS; e++) {
        uint j = first + e;
        if (j < n) {
            float key = k[j * step];
            for (uint r = 0u; r < ROWS; r++) {
                uint i = first + r;
                part_q[r] = e <= r ? fma_rn(wq[i * PLACES + j], key, part_q[r]) : part_q[r];
                float weight = e < r ? wk[i * PLACES + j] : (e > r ? wk[j * PLACES + i] : 0.0f);
                part_k[r] = fma_rn(-weight, key, part_k[r]);
            }
        }
    }
    for (uint j = first + ROWS; j < n; j++) {
        float weight[ROWS];
        load4(weight, wk + j * PLACES + first);
        float key = k[j * step];
        for (uint r = 0u; r < ROWS; r++) {
            part_k[r] = fma_rn(-weight[r], key, part_k[r]);
        }
    }
}

// Gradients of q and k of one chunk and key head, its value heads ascending; for each value head
// also what the decays need.
KERNEL(GROUP) delta_rule_sums(
    GLOBAL float *dq,
    GLOBAL float *dk,
    GLOBAL float *reads,
    GLOBAL float *ends,
    GLOBAL const float *d_o,
    GLOBAL const float *dv,
    GLOBAL const float *y,
    GLOBAL const float *beta,
    GLOBAL const float *q,
    GLOBAL const float *k,
    GLOBAL const float *states,
    GLOBAL const float *grads,
    GLOBAL const float *decays,
    GLOBAL const float *mixed,
    GLOBAL const uint *chunks,
    uint key_heads,
    uint value_heads,
    uint key_width,
    uint value_width
) {
    LOCAL ALIGNED float outputs[PITCH * COLUMNS];
    LOCAL ALIGNED float dy[PITCH * COLUMNS];
    LOCAL ALIGNED float delta[PITCH * COLUMNS];
    LOCAL float before[2 * COLUMNS * (COLUMNS + 1)];
    LOCAL float after[2 * COLUMNS * (COLUMNS + 1)];
    LOCAL float lanes[PLACES * LANES];
    uint chunk = div_u32(group_index(), key_heads);
    uint key_head = mod_u32(group_index(), key_heads);
    uint group = div_u32(value_heads, key_heads);
    ulong token = chunks[2u * chunk];
    uint n = chunks[2u * chunk + 1u];
    uint x = local_index() % COLUMNS;
    uint band = local_index() / COLUMNS;
    for (uint within = 0u; within < group; within++) {
        uint head = key_head * group + within;
        ulong pair = (ulong)chunk * value_heads + head;
        GLOBAL const float *decay = decays + pair * 3u * PLACES + PLACES;
        GLOBAL const float *rest = decay + PLACES;
        GLOBAL const float *wk = mixed + pair * 2u * SQUARE;
        GLOBAL const float *wq = wk + SQUARE;
        // Lanes x and x + 16 of the sums over the key's width: q with its gradient, k with both of
        // its parts.
        float sums[3][2][ROWS];
        for (uint r = 0u; r < ROWS; r++) {
            for (uint s = 0u; s < 3u; s++) {
                sums[s][0][r] = 0.0f;
                sums[s][1][r] = 0.0f;
            }
        }
        for (uint first = 0u; first < key_width; first += 2u * COLUMNS) {
            float from_q[2][ROWS];
            float from_k[2][ROWS];
            float from_end[2][ROWS];
            for (uint side = 0u; side < 2u; side++) {
                for (uint r = 0u; r < ROWS; r++) {
                    from_q[side][r] = 0.0f;
                    from_k[side][r] = 0.0f;
                    from_end[side][r] = 0.0f;
                }
            }
            for (uint start = 0u; start < value_width; start += COLUMNS) {
                load_columns(outputs, d_o, beta, 0u, token, n, start, value_heads, head, value_width);
                load_columns(dy, dv, beta, 0u, token, n, start, value_heads, head, value_width);
                load_columns(delta, y, beta, 1u, token, n, start, value_heads, head, value_width);
                for (uint side = 0u; side < 2u; side++) {
                    uint depth = first + side * COLUMNS + band;
                    uint inside = depth < key_width && start + x < value_width;
                    ulong at = (pair * key_width + depth) * value_width + start + x;
                    before[(side * COLUMNS + band) * (COLUMNS + 1u) + x] = inside ? states[at] : 0.0f;
                    after[(side * COLUMNS + band) * (COLUMNS + 1u) + x] = inside ? grads[at] : 0.0f;
                }
                barrier_local();
                uint end = value_width - start < COLUMNS ? value_width - start : COLUMNS;
                for (uint c = 0u; c < end; c++) {
                    float row_o[ROWS];
                    float row_dy[ROWS];
                    float row_delta[ROWS];
                    load4(row_o, outputs + c * PITCH + band * ROWS);
                    load4(row_dy, dy + c * PITCH + band * ROWS);
                    load4(row_delta, delta + c * PITCH + band * ROWS);
                    for (uint side = 0u; side < 2u; side++) {
                        float s = before[(side * COLUMNS + x) * (COLUMNS + 1u) + c];
                        float ds = after[(side * COLUMNS + x) * (COLUMNS + 1u) + c];
                        for (uint r = 0u; r < ROWS; r++) {
                            from_q[side][r] = fma_rn(row_o[r], s, from_q[side][r]);
                            from_k[side][r] = fma_rn(row_dy[r], s, from_k[side][r]);
                            from_end[side][r] = fma_rn(row_delta[r], ds, from_end[side][r]);
                        }
                    }
                }
                barrier_local();
            }
            #pragma unroll
            for (uint side = 0u; side < 2u; side++) {
                uint d = first + side * COLUMNS + x;
                ulong column = (token * key_heads + key_head) * key_width + d;
                ulong step = (ulong)key_heads * key_width;
                if (d < key_width && band * ROWS < n) {
                    float part_q[ROWS];
                    float part_k[ROWS];
                    for (uint r = 0u; r < ROWS; r++) {
                        uint i = band * ROWS + r;
                        part_q[r] = 0.0f;
                        part_k[r] = 0.0f;
                        if (i < n) {
                            float part_end = rest[i] * from_end[side][r];
                            part_q[r] = decay[i] * from_q[side][r];
                            part_k[r] = -(decay[i] * from_k[side][r]);
                            float key = k[column + i * step];
                            sums[0][side][r] = fma_rn(q[column + i * step], part_q[r], sums[0][side][r]);
                            sums[1][side][r] = fma_rn(key, part_k[r], sums[1][side][r]);
                            sums[2][side][r] = fma_rn(key, part_end, sums[2][side][r]);
                            part_k[r] = part_k[r] + part_end;
                        }
                    }
                    add_pairs(part_q, part_k, q + column, k + column, step, wq, wk, band * ROWS, n);
                    // ORDER: value heads ascend; the first one's value is the start of the sum.
                    for (uint r = 0u; r < ROWS; r++) {
                        if (band * ROWS + r < n) {
                            ulong row = column + (band * ROWS + r) * step;
                            dq[row] = within == 0u ? part_q[r] : dq[row] + part_q[r];
                            dk[row] = within == 0u ? part_k[r] : dk[row] + part_k[r];
                        }
                    }
                }
            }
            barrier_local();
        }
        float totals[3];
        for (uint s = 0u; s < 3u; s++) {
            for (uint r = 0u; r < ROWS; r++) {
                lanes[(band * ROWS + r) * LANES + x] = sums[s][0][r];
                lanes[(band * ROWS + r) * LANES + x + COLUMNS] = sums[s][1][r];
            }
            tree_sums(lanes, PLACES);
            totals[s] = local_index() < PLACES ? lanes[local_index() * LANES] : 0.0f;
            barrier_local();
        }
        if (local_index() < n) {
            ulong at = (token + local_index()) * value_heads + head;
            reads[at] = totals[0] + totals[1];
            ends[at] = totals[2];
        }
        barrier_local();
    }
}

// Gradients of g and beta of one chunk and value head.
KERNEL(GROUP) delta_rule_scalars(
    GLOBAL float *dg,
    GLOBAL float *dbeta,
    GLOBAL const float *reads,
    GLOBAL const float *ends,
    GLOBAL const float *y,
    GLOBAL const float *d_delta,
    GLOBAL const float *states,
    GLOBAL const float *grads,
    GLOBAL const float *scores,
    GLOBAL const float *decays,
    GLOBAL const float *mixed,
    GLOBAL const uint *chunks,
    uint key_heads,
    uint value_heads,
    uint key_width,
    uint value_width
) {
    LOCAL float crossing[SQUARE];
    LOCAL float lanes[PLACES * LANES];
    LOCAL float columns[WIDTH_MAX];
    uint chunk = div_u32(group_index(), value_heads);
    uint head = mod_u32(group_index(), value_heads);
    ulong token = chunks[2u * chunk];
    uint n = chunks[2u * chunk + 1u];
    uint at = local_index();
    // Both states, column by column, then over lanes.
    if (at < value_width) {
        ulong state = (ulong)group_index() * key_width * value_width + at;
        float sum = 0.0f;
        for (uint d = 0u; d < key_width; d++) {
            sum = fma_rn(grads[state + (ulong)d * value_width], states[state + (ulong)d * value_width], sum);
        }
        columns[at] = sum;
    }
    barrier_local();
    if (at < LANES) {
        float sum = 0.0f;
        for (uint c = at; c < value_width; c += LANES) {
            sum = sum + columns[c];
        }
        lanes[at] = sum;
    }
    tree_sums(lanes, 1u);
    float products = lanes[0];
    barrier_local();
    // dbeta.
    for (uint lane = at; lane < PLACES * LANES; lane += GROUP) {
        float sum = 0.0f;
        if (lane / LANES < n) {
            ulong row = ((token + lane / LANES) * value_heads + head) * value_width;
            for (uint c = lane % LANES; c < value_width; c += LANES) {
                sum = fma_rn(d_delta[row + c], y[row + c], sum);
            }
        }
        lanes[lane] = sum;
    }
    tree_sums(lanes, PLACES);
    if (at < n) {
        dbeta[(token + at) * value_heads + head] = lanes[at * LANES];
    }
    // Pairs of tokens on both sides of a step: crossing[m, j] adds the rows from the last to m.
    ulong score = ((ulong)chunk * key_heads + div_u32(head, div_u32(value_heads, key_heads))) * 2u * SQUARE;
    GLOBAL const float *wk = mixed + (ulong)group_index() * 2u * SQUARE;
    if (at < PLACES) {
        float sum = 0.0f;
        for (uint m = n; m > at + 1u; m--) {
            uint pair = (m - 1u) * PLACES + at;
            sum = sum + fma_rn(wk[SQUARE + pair], scores[score + SQUARE + pair], -(wk[pair] * scores[score + pair]));
            crossing[pair] = sum;
        }
    }
    barrier_local();
    for (uint lane = at; lane < PLACES * LANES; lane += GROUP) {
        uint m = lane / LANES;
        float sum = 0.0f;
        if (m < n) {
            for (uint j = lane % LANES; j < m; j += LANES) {
                sum = sum + crossing[m * PLACES + j];
            }
        }
        lanes[lane] = sum;
    }
    tree_sums(lanes, PLACES);
    if (at == 0u) {
        ulong row = token * value_heads + head;
        float later = decays[((ulong)group_index() * 3u + 1u) * PLACES + n - 1u] * products;
        for (uint m = n; m > 0u; m--) {
            later = later + reads[row + (ulong)(m - 1u) * value_heads];
            crossing[m - 1u] = lanes[(m - 1u) * LANES] + later;
        }
        float earlier = 0.0f;
        for (uint m = 0u; m < n; m++) {
            dg[row + (ulong)m * value_heads] = crossing[m] + earlier;
            earlier = earlier + ends[row + (ulong)m * value_heads];
        }
    }
}
