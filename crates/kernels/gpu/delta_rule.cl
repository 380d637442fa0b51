// Gated delta rule (docs/numerics.md, "Gated delta rule").
//
// Scores of key heads and decays of value heads are made for all chunks at once. Then a group owns COLUMNS columns of one value
// head's state, which never meet others, and passes over the chunks of its document. What adds over the value's width comes
// last, again for all chunks at once. A work item of a state kernel has one column and ROWS rows of the chunk.

// Places of a chunk.
#define PLACES 64
#define SQUARE (PLACES * PLACES)
#define WIDTH_MOST 256
#define COLUMNS 16
// Rows of a work item, and work items of a column.
#define ROWS 4
#define BANDS (PLACES / ROWS)
// Depth that is brought into shared memory at a time.
#define SLICE 32

// For PoCL 5, loops end in their barrier and no branch of some work items leads straight to one (docs/add-an-op.md).

// Rows of one key head, depths `first` to `first + SLICE`, of the n tokens from `token` on; zeros outside.
FUNCTION void load_slice(
    LOCAL_POINTER float *slice, GLOBAL const float *x, ulong token, uint n, uint first, uint heads, uint head, uint width
) {
    for (uint at = local_index(); at < PLACES * SLICE; at += GROUP) {
        uint i = at / SLICE;
        uint d = first + at % SLICE;
        slice[at] = i < n && d < width ? x[((token + i) * heads + head) * width + d] : 0.0f;
    }
}

// kk and qk of one chunk and key head, up to the diagonal: scores[chunk, key head, 2, PLACES, PLACES].
KERNEL(GROUP) delta_rule_scores(
    GLOBAL float *scores, GLOBAL const float *q, GLOBAL const float *k, GLOBAL const uint *chunks, uint key_heads, uint key_width
) {
    LOCAL float q_slice[PLACES * SLICE];
    LOCAL float k_slice[PLACES * SLICE];
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
                for (uint r = 0u; r < 4u; r++) {
                    float left_k = k_slice[(row + r) * SLICE + d];
                    float left_q = q_slice[(row + r) * SLICE + d];
                    for (uint c = 0u; c < 4u; c++) {
                        float right = k_slice[(column + c) * SLICE + d];
                        kk[r * 4u + c] = fma_rn(left_k, right, kk[r * 4u + c]);
                        qk[r * 4u + c] = fma_rn(left_q, right, qk[r * 4u + c]);
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

// Decays of one chunk and value head, decays[chunk, value head, 3, PLACES] (a, A, the last row of the decays between tokens), and
// the matrices that they weigh, mixed[chunk, value head, 2, PLACES, PLACES] (M, P). A work item per column.
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

// Wanted of delta_rule_forward.
#define WANT_OUTPUT 1u
#define WANT_STATES 2u
#define WANT_LAST 4u
#define HAS_FIRST 8u

// A document's chunks for COLUMNS columns of one value head. Writes o, or the states before every chunk and y, and the last state.
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
    LOCAL float q_slice[PLACES * SLICE];
    LOCAL float k_slice[PLACES * SLICE];
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
                for (uint r = 0u; r < ROWS; r++) {
                    uint at = (band * ROWS + r) * SLICE + d;
                    rows_y[r] = fma_rn(k_slice[at], s, rows_y[r]);
                    rows_o[r] = fma_rn(q_slice[at], s, rows_o[r]);
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
        for (uint b = 0u; b * ROWS < n; b++) {
            if (band == b) {
                float own[ROWS];
                for (uint r = 0u; r < ROWS; r++) {
                    uint i = b * ROWS + r;
                    own[r] = 0.0f;
                    if (i < n) {
                        for (uint before = 0u; before < r; before++) {
                            rows_y[r] = fma_rn(-m[i * PLACES + b * ROWS + before], own[before], rows_y[r]);
                        }
                        own[r] = beta[(token + i) * value_heads + head] * rows_y[r];
                    }
                    delta[i * COLUMNS + x] = own[r];
                }
            }
            barrier_local();
            for (uint at = 0u; at < ROWS; at++) {
                uint j = b * ROWS + at;
                if (j < n) {
                    float value = delta[j * COLUMNS + x];
                    for (uint r = 0u; r < ROWS; r++) {
                        uint i = band * ROWS + r;
                        if (band > b && i < n) {
                            rows_y[r] = fma_rn(-m[i * PLACES + j], value, rows_y[r]);
                        }
                        if (j <= i && i < n) {
                            rows_o[r] = fma_rn(p[i * PLACES + j], value, rows_o[r]);
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
            for (uint d = band; d < SLICE && first + d < key_width; d += BANDS) {
                float s = whole * state[(first + d) * COLUMNS + x];
                for (uint i = 0u; i < n; i++) {
                    s = fma_rn(rest[i] * k_slice[i * SLICE + d], delta[i * COLUMNS + x], s);
                }
                state[(first + d) * COLUMNS + x] = s;
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

// A document's chunks backwards for COLUMNS columns: gradients of the state after every chunk, of delta and of v.
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
    LOCAL float q_slice[PLACES * SLICE];
    LOCAL float k_slice[PLACES * SLICE];
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
                for (uint r = 0u; r < ROWS; r++) {
                    rows[r] = fma_rn(k_slice[(band * ROWS + r) * SLICE + d], s, rows[r]);
                }
            }
            barrier_local();
        }
        for (uint r = 0u; r < ROWS; r++) {
            uint j = band * ROWS + r;
            if (j < n) {
                rows[r] = rest[j] * rows[r];
                for (uint i = j; i < n; i++) {
                    rows[r] = fma_rn(p[i * PLACES + j], outputs[i * COLUMNS + x], rows[r]);
                }
            }
        }
        // ORDER: bands descend, so every row takes the rows after it in descending order.
        for (uint bands = (n + ROWS - 1u) / ROWS; bands > 0u; bands--) {
            uint b = bands - 1u;
            if (band <= b) {
                for (uint back = 0u; back < ROWS; back++) {
                    uint i = bands * ROWS + ROWS - 1u - back;
                    if (i < n) {
                        float value = dy[i * COLUMNS + x];
                        for (uint r = 0u; r < ROWS; r++) {
                            rows[r] = fma_rn(-m[i * PLACES + band * ROWS + r], value, rows[r]);
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
                                rows[r] = fma_rn(-m[(b * ROWS + after) * PLACES + j], own[after], rows[r]);
                            }
                        }
                        own[r] = beta[(token + j) * value_heads + head] * rows[r];
                        if (here) {
                            ulong at = ((token + j) * value_heads + head) * value_width + column;
                            d_delta[at] = rows[r];
                            dv[at] = own[r];
                        }
                    }
                    dy[j * COLUMNS + x] = own[r];
                }
            }
            barrier_local();
        }
        float whole = decay[n - 1u];
        for (uint first = 0u; first < key_width; first += SLICE) {
            load_slice(q_slice, q, token, n, first, key_heads, key_head, key_width);
            load_slice(k_slice, k, token, n, first, key_heads, key_head, key_width);
            barrier_local();
            for (uint d = band; d < SLICE && first + d < key_width; d += BANDS) {
                float s = whole * grad[(first + d) * COLUMNS + x];
                for (uint i = 0u; i < n; i++) {
                    s = fma_rn(decay[i] * q_slice[i * SLICE + d], outputs[i * COLUMNS + x], s);
                }
                for (uint i = 0u; i < n; i++) {
                    s = fma_rn(-(decay[i] * k_slice[i * SLICE + d]), dy[i * COLUMNS + x], s);
                }
                grad[(first + d) * COLUMNS + x] = s;
            }
            barrier_local();
        }
    }
}

// Rows of one value head, columns `first` to `first + COLUMNS`, times a factor per row where there is one.
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
        uint i = at / COLUMNS;
        uint c = first + at % COLUMNS;
        float value = 0.0f;
        if (i < n && c < width) {
            value = x[((token + i) * heads + head) * width + c];
            value = scaled != 0u ? factors[(token + i) * heads + head] * value : value;
        }
        slice[at] = value;
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
    LOCAL float outputs[PLACES * COLUMNS];
    LOCAL float dy[PLACES * COLUMNS];
    LOCAL float delta[PLACES * COLUMNS];
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
            for (uint r = 0u; r < 4u; r++) {
                float left_q = outputs[(row + r) * COLUMNS + x];
                float left_k = dy[(row + r) * COLUMNS + x];
                for (uint c = 0u; c < 4u; c++) {
                    float right = delta[(column + c) * COLUMNS + x];
                    wq[r * 4u + c] = fma_rn(left_q, right, wq[r * 4u + c]);
                    wk[r * 4u + c] = fma_rn(left_k, right, wk[r * 4u + c]);
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
        for (uint i = j; i < n && i < row + 4u; i++) {
            between = i > j ? between * steps[i] : between;
            if (i >= row) {
                mixed[at + i * PLACES + j] = wk[(i - row) * 4u + c] * between;
                mixed[at + SQUARE + i * PLACES + j] = wq[(i - row) * 4u + c] * between;
            }
        }
    }
}

// Gradients of q and k of one chunk and key head, its value heads ascending; for each value head also what the decays need.
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
    LOCAL float outputs[PLACES * COLUMNS];
    LOCAL float dy[PLACES * COLUMNS];
    LOCAL float delta[PLACES * COLUMNS];
    LOCAL float before[COLUMNS * (COLUMNS + 1)];
    LOCAL float after[COLUMNS * (COLUMNS + 1)];
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
        // Lanes x and x + 16 of the sums over the key's width: q with its gradient, k with both of its parts.
        float sums[3][2][ROWS];
        for (uint r = 0u; r < ROWS; r++) {
            for (uint s = 0u; s < 3u; s++) {
                sums[s][0][r] = 0.0f;
                sums[s][1][r] = 0.0f;
            }
        }
        for (uint first = 0u; first < key_width; first += COLUMNS) {
            uint d = first + x;
            float from_q[ROWS];
            float from_k[ROWS];
            float from_end[ROWS];
            for (uint r = 0u; r < ROWS; r++) {
                from_q[r] = 0.0f;
                from_k[r] = 0.0f;
                from_end[r] = 0.0f;
            }
            for (uint start = 0u; start < value_width; start += COLUMNS) {
                load_columns(outputs, d_o, beta, 0u, token, n, start, value_heads, head, value_width);
                load_columns(dy, dv, beta, 0u, token, n, start, value_heads, head, value_width);
                load_columns(delta, y, beta, 1u, token, n, start, value_heads, head, value_width);
                uint inside = first + band < key_width && start + x < value_width;
                ulong at = (pair * key_width + first + band) * value_width + start + x;
                before[band * (COLUMNS + 1u) + x] = inside ? states[at] : 0.0f;
                after[band * (COLUMNS + 1u) + x] = inside ? grads[at] : 0.0f;
                barrier_local();
                uint end = value_width - start < COLUMNS ? value_width - start : COLUMNS;
                for (uint c = 0u; c < end; c++) {
                    float s = before[x * (COLUMNS + 1u) + c];
                    float ds = after[x * (COLUMNS + 1u) + c];
                    for (uint r = 0u; r < ROWS; r++) {
                        uint row = (band * ROWS + r) * COLUMNS + c;
                        from_q[r] = fma_rn(outputs[row], s, from_q[r]);
                        from_k[r] = fma_rn(dy[row], s, from_k[r]);
                        from_end[r] = fma_rn(delta[row], ds, from_end[r]);
                    }
                }
                barrier_local();
            }
            for (uint r = 0u; r < ROWS; r++) {
                uint i = band * ROWS + r;
                if (i >= n || d >= key_width) {
                    continue;
                }
                uint odd = first / COLUMNS % 2u;
                ulong row = ((token + i) * key_heads + key_head) * key_width + d;
                float part_q = decay[i] * from_q[r];
                float part_k = -(decay[i] * from_k[r]);
                float part_end = rest[i] * from_end[r];
                sums[0][odd][r] = fma_rn(q[row], part_q, sums[0][odd][r]);
                sums[1][odd][r] = fma_rn(k[row], part_k, sums[1][odd][r]);
                sums[2][odd][r] = fma_rn(k[row], part_end, sums[2][odd][r]);
                ulong column = (token * key_heads + key_head) * key_width + d;
                ulong step = (ulong)key_heads * key_width;
                for (uint j = 0u; j <= i; j++) {
                    part_q = fma_rn(wq[i * PLACES + j], k[column + j * step], part_q);
                }
                part_k = part_k + part_end;
                for (uint l = i; l < n; l++) {
                    part_k = fma_rn(wq[l * PLACES + i], q[column + l * step], part_k);
                }
                for (uint j = 0u; j < n; j++) {
                    float weight = j < i ? wk[i * PLACES + j] : (j > i ? wk[j * PLACES + i] : 0.0f);
                    part_k = fma_rn(-weight, k[column + j * step], part_k);
                }
                // ORDER: value heads ascend; the first one's value is the start of the sum.
                dq[row] = within == 0u ? part_q : dq[row] + part_q;
                dk[row] = within == 0u ? part_k : dk[row] + part_k;
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
