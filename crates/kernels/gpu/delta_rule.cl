// Gated delta rule (docs/numerics.md, "Gated delta rule").
//
// Scores of key heads and decays of value heads are made for all chunks at once. Then a group owns
// COLUMNS columns of one value head's state, which never meet others, and passes over the chunks of
// its document. What adds over the value's width comes last, again for all chunks at once. A work
// item of a state kernel has one column and ROWS rows of the chunk.

// Places of a chunk.
#define PLACES 64
#define SQUARE (PLACES * PLACES)
#define WIDTH_MOST 256
#define COLUMNS 16
// Rows of a work item, and work items of a column.
#define ROWS 4
#define BANDS (PLACES / ROWS)
// SLICE is two depths for each work item of a column. Depth that is brought into shared memory at a
// time, and floats from one depth to the next: the rows of a work item lie side by side, and stores
// of neighbouring work items go to different banks.
#define SLICE 32
#define PITCH (PLACES + 4)

// For PoCL 5, loops end in their barrier and no branch of some work items leads straight to one
// (docs/add-an-op.md).

// Rows of one key head, depths `first` to `first + SLICE`, of the n tokens from `token` on, as
// slice[depth][row]; zeros outside. Neighbouring work items take 8 depths of 4 rows.
FUNCTION void load_slice(
    LOCAL_POINTER float *slice, GLOBAL const float *x, ulong token, uint n, uint first, uint heads, uint head, uint width
) {
    for (uint at = local_index(); at < PLACES * SLICE; at += GROUP) {
        uint i = at / 8u % 4u + at / 128u * 4u;
        uint depth = at % 8u + at / 32u % 4u * 8u;
        uint d = first + depth;
        slice[depth * PITCH + i] = i < n && d < width ? x[((token + i) * heads + head) * width + d] : 0.0f;
    }
}

// kk and qk of one chunk and key head, up to the diagonal: scores[chunk, key head, 2, PLACES,
// PLACES].
KERNEL(GROUP) delta_rule_scores(
    GLOBAL float *scores, GLOBAL const float *q, GLOBAL const float *k, GLOBAL const uint *chunks, uint key_heads, uint key_width
) {
    LOCAL ALIGNED float q_slice[PITCH * SLICE];
    LOCAL ALIGNED float k_slice[PITCH * SLICE];
    uint chunk = group_index() / key_heads;
    uint head = group_index() % key_heads;
    ulong token = chunks[2u * chunk];
    uint n = chunks[2u * chunk + 1u];
    uint row = local_index() / 16u * 4u;
    uint column = local_index() % 16u * 4u;
    float kk[16];
    float qk[16];
    for (uint at = 0u; at < 16u; at++) {
        kk[at] = 0.0f;
        qk[at] = 0.0f;
    }
    for (uint first = 0u; first < key_width; first += SLICE) {
        load_slice(q_slice, q, token, n, first, key_heads, head, key_width);
        load_slice(k_slice, k, token, n, first, key_heads, head, key_width);
        barrier_local();
        uint end = key_width - first < SLICE ? key_width - first : SLICE;
        if (column <= row + 3u) {
            for (uint d = 0u; d < end; d++) {
                float left_k[4];
                float left_q[4];
                float right[4];
                load4(left_k, k_slice + d * PITCH + row);
                load4(left_q, q_slice + d * PITCH + row);
                load4(right, k_slice + d * PITCH + column);
                for (uint r = 0u; r < 4u; r++) {
                    for (uint c = 0u; c < 4u; c++) {
                        kk[r * 4u + c] = fma_rn(left_k[r], right[c], kk[r * 4u + c]);
                        qk[r * 4u + c] = fma_rn(left_q[r], right[c], qk[r * 4u + c]);
                    }
                }
            }
        }
        barrier_local();
    }
    ulong at = (ulong)group_index() * 2u * SQUARE;
    for (uint r = 0u; r < 4u; r++) {
        for (uint c = 0u; c < 4u; c++) {
            scores[at + (row + r) * PLACES + column + c] = kk[r * 4u + c];
            scores[at + SQUARE + (row + r) * PLACES + column + c] = qk[r * 4u + c];
        }
    }
}

// Decays of one chunk and value head, decays[chunk, value head, 3, PLACES] (a, A, the last row of
// the decays between tokens), and the matrices that they weigh, mixed[chunk, value head, 2, PLACES,
// PLACES] (M, P). A work item per column.
KERNEL(PLACES) delta_rule_decays(
    GLOBAL float *decays,
    GLOBAL float *mixed,
    GLOBAL const float *scores,
    GLOBAL const float *g,
    GLOBAL const uint *chunks,
    uint key_heads,
    uint value_heads
) {
    LOCAL float steps[PLACES];
    uint chunk = group_index() / value_heads;
    uint head = group_index() % value_heads;
    ulong token = chunks[2u * chunk];
    uint n = chunks[2u * chunk + 1u];
    uint j = local_index();
    steps[j] = j < n ? isobit_exp(g[(token + j) * value_heads + head]) : 0.0f;
    barrier_local();
    GLOBAL float *own = decays + (ulong)group_index() * 3u * PLACES;
    if (j == 0u) {
        float decay = steps[0];
        own[PLACES] = decay;
        for (uint i = 1u; i < n; i++) {
            decay = decay * steps[i];
            own[PLACES + i] = decay;
        }
    }
    ulong score = ((ulong)chunk * key_heads + head / (value_heads / key_heads)) * 2u * SQUARE;
    ulong at = (ulong)group_index() * 2u * SQUARE;
    if (j < n) {
        own[j] = steps[j];
        float between = 1.0f;
        for (uint i = j; i < n; i++) {
            between = i > j ? between * steps[i] : between;
            mixed[at + i * PLACES + j] = scores[score + i * PLACES + j] * between;
            mixed[at + SQUARE + i * PLACES + j] = scores[score + SQUARE + i * PLACES + j] * between;
        }
        own[2u * PLACES + j] = between;
    }
}

// s[e] + sign * sum over the n rows of factor * value of the row * element of a column, rows
// ascending, for the values of two depths that lie BANDS apart.
FUNCTION void add_rows(
    float *s, float sign, GLOBAL const float *factors, LOCAL_POINTER const float *values, LOCAL_POINTER const float *column, uint n
) {
    uint whole = n / 4u * 4u;
    for (uint i = 0u; i < whole; i += 4u) {
        float factor[4];
        float value[2][4];
        load4(factor, factors + i);
        load4(value[0], values + i);
        load4(value[1], values + BANDS * PITCH + i);
        for (uint r = 0u; r < 4u; r++) {
            float other = column[(i + r) * COLUMNS];
            s[0] = fma_rn(sign * (factor[r] * value[0][r]), other, s[0]);
            s[1] = fma_rn(sign * (factor[r] * value[1][r]), other, s[1]);
        }
    }
    for (uint i = whole; i < n; i++) {
        float other = column[i * COLUMNS];
        s[0] = fma_rn(sign * (factors[i] * values[i]), other, s[0]);
        s[1] = fma_rn(sign * (factors[i] * values[BANDS * PITCH + i]), other, s[1]);
    }
}

// Wanted of delta_rule_forward.
#define WANT_OUTPUT 1u
#define WANT_STATES 2u
#define WANT_LAST 4u
#define HAS_FIRST 8u

// A document's chunks for COLUMNS columns of one value head. Writes o, or the states before every
// chunk and y, and the last state.
KERNEL(GROUP) delta_rule_forward(
    GLOBAL float *o,
    GLOBAL float *states,
    GLOBAL float *y,
    GLOBAL float *last_state,
    GLOBAL const float *first_state,
    GLOBAL const float *q,
    GLOBAL const float *k,
    GLOBAL const float *v,
    GLOBAL const float *beta,
    GLOBAL const float *decays,
    GLOBAL const float *mixed,
    GLOBAL const uint *chunks,
    GLOBAL const uint *documents,
    uint key_heads,
    uint value_heads,
    uint key_width,
    uint value_width,
    uint wanted
) {
    LOCAL float state[WIDTH_MOST * COLUMNS];
    LOCAL ALIGNED float q_slice[PITCH * SLICE];
    LOCAL ALIGNED float k_slice[PITCH * SLICE];
    LOCAL float delta[PLACES * COLUMNS];
    uint blocks = (value_width + COLUMNS - 1u) / COLUMNS;
    uint head = group_index() / blocks % value_heads;
    uint document = group_index() / blocks / value_heads;
    uint key_head = head / (value_heads / key_heads);
    uint x = local_index() % COLUMNS;
    uint band = local_index() / COLUMNS;
    uint column = group_index() % blocks * COLUMNS + x;
    uint here = column < value_width;
    ulong state_at = ((ulong)document * value_heads + head) * key_width * value_width + column;
    for (uint d = band; d < key_width; d += BANDS) {
        float value = 0.0f;
        if ((wanted & HAS_FIRST) != 0u && here) {
            value = first_state[state_at + (ulong)d * value_width];
        }
        state[d * COLUMNS + x] = value;
    }
    barrier_local();
    uint first_chunk = documents[2u * document];
    uint count = documents[2u * document + 1u];
    for (uint chunk = first_chunk; chunk < first_chunk + count; chunk++) {
        ulong token = chunks[2u * chunk];
        uint n = chunks[2u * chunk + 1u];
        ulong pair = (ulong)chunk * value_heads + head;
        GLOBAL const float *decay = decays + pair * 3u * PLACES + PLACES;
        GLOBAL const float *rest = decay + PLACES;
        GLOBAL const float *m = mixed + pair * 2u * SQUARE;
        GLOBAL const float *p = m + SQUARE;
        float rows_y[ROWS];
        float rows_o[ROWS];
        for (uint r = 0u; r < ROWS; r++) {
            rows_y[r] = 0.0f;
            rows_o[r] = 0.0f;
        }
        for (uint first = 0u; first < key_width; first += SLICE) {
            load_slice(q_slice, q, token, n, first, key_heads, key_head, key_width);
            load_slice(k_slice, k, token, n, first, key_heads, key_head, key_width);
            barrier_local();
            uint end = key_width - first < SLICE ? key_width - first : SLICE;
            for (uint d = 0u; d < end; d++) {
                float s = state[(first + d) * COLUMNS + x];
                float keys[ROWS];
                float queries[ROWS];
                load4(keys, k_slice + d * PITCH + band * ROWS);
                load4(queries, q_slice + d * PITCH + band * ROWS);
                for (uint r = 0u; r < ROWS; r++) {
                    rows_y[r] = fma_rn(keys[r], s, rows_y[r]);
                    rows_o[r] = fma_rn(queries[r], s, rows_o[r]);
                }
            }
            barrier_local();
        }
        for (uint r = 0u; r < ROWS; r++) {
            uint i = band * ROWS + r;
            if (i < n && here) {
                rows_y[r] = fma_rn(-decay[i], rows_y[r], v[((token + i) * value_heads + head) * value_width + column]);
                rows_o[r] = decay[i] * rows_o[r];
            }
        }
        // ORDER: bands ascend, so every row takes the rows before it in ascending order.
        float strength[ROWS];
        for (uint r = 0u; r < ROWS; r++) {
            uint i = band * ROWS + r;
            strength[r] = i < n ? beta[(token + i) * value_heads + head] : 0.0f;
        }
        for (uint b = 0u; b * ROWS < n; b++) {
            // Rows that do not exist hold whatever was there; what they meet is not stored.
            float from_m[ROWS][ROWS];
            float from_p[ROWS][ROWS];
            for (uint r = 0u; r < ROWS; r++) {
                if (band >= b) {
                    load4(from_m[r], m + (band * ROWS + r) * PLACES + b * ROWS);
                    load4(from_p[r], p + (band * ROWS + r) * PLACES + b * ROWS);
                }
            }
            if (band == b) {
                float own[ROWS];
                for (uint r = 0u; r < ROWS; r++) {
                    uint i = b * ROWS + r;
                    own[r] = 0.0f;
                    if (i < n) {
                        for (uint before = 0u; before < r; before++) {
                            rows_y[r] = fma_rn(-from_m[r][before], own[before], rows_y[r]);
                        }
                        own[r] = strength[r] * rows_y[r];
                    }
                    delta[i * COLUMNS + x] = own[r];
                }
            }
            barrier_local();
            if (band >= b) {
                for (uint at = 0u; at < ROWS; at++) {
                    uint j = b * ROWS + at;
                    float value = delta[j * COLUMNS + x];
                    for (uint r = 0u; r < ROWS; r++) {
                        uint i = band * ROWS + r;
                        if (band > b && i < n) {
                            rows_y[r] = fma_rn(-from_m[r][at], value, rows_y[r]);
                        }
                        if (j <= i && i < n) {
                            rows_o[r] = fma_rn(from_p[r][at], value, rows_o[r]);
                        }
                    }
                }
            }
        }
        for (uint r = 0u; r < ROWS; r++) {
            uint i = band * ROWS + r;
            if (i < n && here) {
                ulong at = ((token + i) * value_heads + head) * value_width + column;
                if ((wanted & WANT_OUTPUT) != 0u) {
                    o[at] = rows_o[r];
                }
                if ((wanted & WANT_STATES) != 0u) {
                    y[at] = rows_y[r];
                }
            }
        }
        if ((wanted & WANT_STATES) != 0u && here) {
            for (uint d = band; d < key_width; d += BANDS) {
                states[(pair * key_width + d) * value_width + column] = state[d * COLUMNS + x];
            }
        }
        barrier_local();
        float whole = decay[n - 1u];
        for (uint first = 0u; first < key_width; first += SLICE) {
            load_slice(k_slice, k, token, n, first, key_heads, key_head, key_width);
            barrier_local();
            float s[2];
            for (uint e = 0u; e < 2u; e++) {
                uint d = first + band + e * BANDS;
                s[e] = d < key_width ? whole * state[d * COLUMNS + x] : 0.0f;
            }
            add_rows(s, 1.0f, rest, k_slice + band * PITCH, delta + x, n);
            for (uint e = 0u; e < 2u; e++) {
                uint d = first + band + e * BANDS;
                if (d < key_width) {
                    state[d * COLUMNS + x] = s[e];
                }
            }
            barrier_local();
        }
    }
    if ((wanted & WANT_LAST) != 0u && here) {
        for (uint d = band; d < key_width; d += BANDS) {
            last_state[state_at + (ulong)d * value_width] = state[d * COLUMNS + x];
        }
    }
}

// A document's chunks backwards for COLUMNS columns: gradients of the state after every chunk, of
// delta and of v.
KERNEL(GROUP) delta_rule_backward(
    GLOBAL float *grads,
    GLOBAL float *d_delta,
    GLOBAL float *dv,
    GLOBAL const float *d_o,
    GLOBAL const float *q,
    GLOBAL const float *k,
    GLOBAL const float *beta,
    GLOBAL const float *decays,
    GLOBAL const float *mixed,
    GLOBAL const uint *chunks,
    GLOBAL const uint *documents,
    uint key_heads,
    uint value_heads,
    uint key_width,
    uint value_width
) {
    LOCAL float grad[WIDTH_MOST * COLUMNS];
    LOCAL ALIGNED float q_slice[PITCH * SLICE];
    LOCAL ALIGNED float k_slice[PITCH * SLICE];
    LOCAL float outputs[PLACES * COLUMNS];
    LOCAL float dy[PLACES * COLUMNS];
    uint blocks = (value_width + COLUMNS - 1u) / COLUMNS;
    uint head = group_index() / blocks % value_heads;
    uint document = group_index() / blocks / value_heads;
    uint key_head = head / (value_heads / key_heads);
    uint x = local_index() % COLUMNS;
    uint band = local_index() / COLUMNS;
    uint column = group_index() % blocks * COLUMNS + x;
    uint here = column < value_width;
    for (uint d = band; d < key_width; d += BANDS) {
        grad[d * COLUMNS + x] = 0.0f;
    }
    barrier_local();
    uint first_chunk = documents[2u * document];
    uint count = documents[2u * document + 1u];
    for (uint left = count; left > 0u; left--) {
        uint chunk = first_chunk + left - 1u;
        ulong token = chunks[2u * chunk];
        uint n = chunks[2u * chunk + 1u];
        ulong pair = (ulong)chunk * value_heads + head;
        GLOBAL const float *decay = decays + pair * 3u * PLACES + PLACES;
        GLOBAL const float *rest = decay + PLACES;
        GLOBAL const float *m = mixed + pair * 2u * SQUARE;
        GLOBAL const float *p = m + SQUARE;
        float rows[ROWS];
        for (uint r = 0u; r < ROWS; r++) {
            uint i = band * ROWS + r;
            ulong at = ((token + i) * value_heads + head) * value_width + column;
            outputs[i * COLUMNS + x] = i < n && here ? d_o[at] : 0.0f;
            rows[r] = 0.0f;
        }
        if (here) {
            for (uint d = band; d < key_width; d += BANDS) {
                grads[(pair * key_width + d) * value_width + column] = grad[d * COLUMNS + x];
            }
        }
        barrier_local();
        for (uint first = 0u; first < key_width; first += SLICE) {
            load_slice(k_slice, k, token, n, first, key_heads, key_head, key_width);
            barrier_local();
            uint end = key_width - first < SLICE ? key_width - first : SLICE;
            for (uint d = 0u; d < end; d++) {
                float s = grad[(first + d) * COLUMNS + x];
                float keys[ROWS];
                load4(keys, k_slice + d * PITCH + band * ROWS);
                for (uint r = 0u; r < ROWS; r++) {
                    rows[r] = fma_rn(keys[r], s, rows[r]);
                }
            }
            barrier_local();
        }
        float strength[ROWS];
        for (uint r = 0u; r < ROWS; r++) {
            uint j = band * ROWS + r;
            strength[r] = j < n ? beta[(token + j) * value_heads + head] : 0.0f;
            rows[r] = j < n ? rest[j] * rows[r] : rows[r];
        }
        #pragma unroll 4
        for (uint i = band * ROWS; i < n; i++) {
            float from_p[ROWS];
            load4(from_p, p + i * PLACES + band * ROWS);
            float value = outputs[i * COLUMNS + x];
            for (uint r = 0u; r < ROWS; r++) {
                rows[r] = band * ROWS + r <= i ? fma_rn(from_p[r], value, rows[r]) : rows[r];
            }
        }
        // ORDER: bands descend, so every row takes the rows after it in descending order.
        float from_m[ROWS][ROWS];
        for (uint bands = (n + ROWS - 1u) / ROWS; bands > 0u; bands--) {
            uint b = bands - 1u;
            // Rows of band b: for its own rows now, for those before it in the next round.
            float next_m[ROWS][ROWS];
            for (uint r = 0u; r < ROWS; r++) {
                if (band <= b) {
                    load4(next_m[r], m + (b * ROWS + r) * PLACES + band * ROWS);
                }
            }
            if (band <= b && bands * ROWS < n) {
                for (uint back = 0u; back < ROWS; back++) {
                    uint row = ROWS - 1u - back;
                    uint i = bands * ROWS + row;
                    if (i < n) {
                        float value = dy[i * COLUMNS + x];
                        for (uint r = 0u; r < ROWS; r++) {
                            rows[r] = fma_rn(-from_m[row][r], value, rows[r]);
                        }
                    }
                }
            }
            if (band == b) {
                float own[ROWS];
                for (uint back = 0u; back < ROWS; back++) {
                    uint r = ROWS - 1u - back;
                    uint j = b * ROWS + r;
                    own[r] = 0.0f;
                    if (j < n) {
                        for (uint after = ROWS - 1u; after > r; after--) {
                            if (b * ROWS + after < n) {
                                rows[r] = fma_rn(-next_m[after][r], own[after], rows[r]);
                            }
                        }
                        own[r] = strength[r] * rows[r];
                        if (here) {
                            ulong at = ((token + j) * value_heads + head) * value_width + column;
                            d_delta[at] = rows[r];
                            dv[at] = own[r];
                        }
                    }
                    dy[j * COLUMNS + x] = own[r];
                }
            }
            for (uint r = 0u; r < ROWS; r++) {
                for (uint c = 0u; c < ROWS; c++) {
                    from_m[r][c] = next_m[r][c];
                }
            }
            barrier_local();
        }
        float whole = decay[n - 1u];
        for (uint first = 0u; first < key_width; first += SLICE) {
            load_slice(q_slice, q, token, n, first, key_heads, key_head, key_width);
            load_slice(k_slice, k, token, n, first, key_heads, key_head, key_width);
            barrier_local();
            float s[2];
            for (uint e = 0u; e < 2u; e++) {
                uint d = first + band + e * BANDS;
                s[e] = d < key_width ? whole * grad[d * COLUMNS + x] : 0.0f;
            }
            add_rows(s, 1.0f, decay, q_slice + band * PITCH, outputs + x, n);
            add_rows(s, -1.0f, decay, k_slice + band * PITCH, dy + x, n);
            for (uint e = 0u; e < 2u; e++) {
                uint d = first + band + e * BANDS;
                if (d < key_width) {
                    grad[d * COLUMNS + x] = s[e];
                }
            }
            barrier_local();
        }
    }
}

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
    uint chunk = group_index() / value_heads;
    uint head = group_index() % value_heads;
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
    uint chunk = group_index() / key_heads;
    uint key_head = group_index() % key_heads;
    uint group = value_heads / key_heads;
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
    LOCAL float columns[WIDTH_MOST];
    uint chunk = group_index() / value_heads;
    uint head = group_index() % value_heads;
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
    ulong score = ((ulong)chunk * key_heads + head / (value_heads / key_heads)) * 2u * SQUARE;
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
