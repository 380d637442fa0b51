// Gated delta rule (docs/numerics.md, "Gated delta rule").
//
// Scores of key heads and decays of value heads are made for all chunks at once. Then a group owns
// COLUMNS columns of one value head's state, which never meet others, and passes over the chunks of
// its document. A work item of a state kernel has one column and ROWS rows of the chunk. What adds
// over the value's width comes last (delta_rule_gradients.cl).

// Places of a chunk.
#define PLACES 64
#define SQUARE (PLACES * PLACES)
#define WIDTH_MAX 256
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
    uint chunk = div_u32(group_index(), key_heads);
    uint head = mod_u32(group_index(), key_heads);
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
    uint chunk = div_u32(group_index(), value_heads);
    uint head = mod_u32(group_index(), value_heads);
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
    ulong score = ((ulong)chunk * key_heads + div_u32(head, div_u32(value_heads, key_heads))) * 2u * SQUARE;
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
    LOCAL float state[WIDTH_MAX * COLUMNS];
    LOCAL ALIGNED float q_slice[PITCH * SLICE];
    LOCAL ALIGNED float k_slice[PITCH * SLICE];
    LOCAL float delta[PLACES * COLUMNS];
    uint blocks = (value_width + COLUMNS - 1u) / COLUMNS;
    uint head = mod_u32(div_u32(group_index(), blocks), value_heads);
    uint document = div_u32(div_u32(group_index(), blocks), value_heads);
    uint key_head = div_u32(head, div_u32(value_heads, key_heads));
    uint x = local_index() % COLUMNS;
    uint band = local_index() / COLUMNS;
    uint column = mod_u32(group_index(), blocks) * COLUMNS + x;
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
    LOCAL float grad[WIDTH_MAX * COLUMNS];
    LOCAL ALIGNED float q_slice[PITCH * SLICE];
    LOCAL ALIGNED float k_slice[PITCH * SLICE];
    LOCAL float outputs[PLACES * COLUMNS];
    LOCAL float dy[PLACES * COLUMNS];
    uint blocks = (value_width + COLUMNS - 1u) / COLUMNS;
    uint head = mod_u32(div_u32(group_index(), blocks), value_heads);
    uint document = div_u32(div_u32(group_index(), blocks), value_heads);
    uint key_head = div_u32(head, div_u32(value_heads, key_heads));
    uint x = local_index() % COLUMNS;
    uint band = local_index() / COLUMNS;
    uint column = mod_u32(group_index(), blocks) * COLUMNS + x;
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
