// Attention (docs/numerics.md, "Attention").
//
// Rows of q, k, v and dO are sliced first, into planes over *places*: the positions of all spans
// one after another, each span padded to a multiple of PLACE_BLOCK with integers that are zero. A
// plane packs four neighbours along the width, [head, slice, word, place], for products over the
// width, or four along the places, [head, slice, place / 4, width], for products over positions. A
// group then owns a few rows (queries, or keys) and passes over tiles of TILE columns (keys, or
// queries): products over the width, weights of the tile, products over the tile. For AMD's matrix
// cores attention_mfma.cl stands before this file and brings its own products.

// Scores with and without a cap are different programs: PoCL 5.0 miscompiles a choice at run time.
#if defined(CAPPED)
#define CAP(z) soft_capped(z, cap, cap_inverse)
#define CAP_GRADIENT(g, z) ((g) * soft_cap_slope(z, cap_inverse))
#else
#define CAP(z) (z)
#define CAP_GRADIENT(g, z) (g)
#endif

#define TILE 128
#define TILE_WORDS (TILE / 4)
#define PLACE_BLOCK 32
// Words of the widest head.
#define WORDS_MAX 64
#define FORWARD_ROWS 16
#define BACKWARD_ROWS 16
#ifndef ATTENTION_MFMA
// Words from row to row of the sliced weights.
#define WEIGHT_PITCH TILE_WORDS
#endif
// Work items of a row in the softmax: half the lanes.
#define MEMBERS (GROUP / FORWARD_ROWS)
#define LOG2_E as_f32(0x3fb8aa3bu)

// The rows of a group, all of one span.
typedef struct {
    // Place of the first row.
    uint place;
    uint count;
    // Where the first row lies in the op's tensors.
    uint source;
    // Place of the span's first column.
    uint columns;
    // Position of the first row in its document, and the document's length.
    uint position;
    uint length;
} Rows;

FUNCTION Rows rows_of(GLOBAL const uint *table, uint index) {
    GLOBAL const uint *entry = table + (ulong)index * 6u;
    Rows rows;
    rows.place = entry[0];
    rows.count = entry[1];
    rows.source = entry[2];
    rows.columns = entry[3];
    rows.position = entry[4];
    rows.length = entry[5];
    return rows;
}

// Positions from `start` to before `end`.
typedef struct {
    uint start;
    uint end;
} Extent;

// Keys that the query at a position sees.
FUNCTION Extent seen_from(uint position, uint window) {
    Extent keys;
    keys.end = position + 1u;
    keys.start = keys.end > window ? keys.end - window : 0u;
    return keys;
}

// Queries of a document of `length` positions that see the key at a position.
FUNCTION Extent seeing(uint position, uint length, uint window) {
    Extent queries;
    queries.start = position;
    queries.end = length - position > window ? position + window : length;
    return queries;
}

FUNCTION Extent in_tile(Extent whole, uint tile) {
    Extent part;
    part.start = whole.start > tile ? whole.start : tile;
    part.end = whole.end < tile + TILE ? whole.end : tile + TILE;
    return part;
}

FUNCTION int holds(Extent extent, uint position) {
    return extent.start <= position && position < extent.end;
}

// Slices PLACE_BLOCK rows of one head. `blocks` holds first row and number of rows of every block
// of places.
KERNEL(GROUP) attention_slice(
    GLOBAL float *scales, GLOBAL int *by_width, GLOBAL int *by_place, GLOBAL const float *x,
    GLOBAL const uint *blocks, uint heads, uint width, uint places, uint wants_by_width, uint wants_by_place
) {
    LOCAL uint largest[PLACE_BLOCK * LANES];
    LOCAL float multipliers[PLACE_BLOCK];
    uint head = mod_u32(group_index(), heads);
    uint block = div_u32(group_index(), heads);
    uint count = blocks[2u * block + 1u];
    ulong step = (ulong)heads * width;
    GLOBAL const float *rows = x + (ulong)blocks[2u * block] * step + (ulong)head * width;
    uint place = block * PLACE_BLOCK;

    uint lane = local_index() % LANES;
    for (uint row = local_index() / LANES; row < PLACE_BLOCK; row += GROUP / LANES) {
        uint bits = 0u;
        for (uint d = lane; d < width && row < count; d += LANES) {
            uint here = magnitude_bits(rows[row * step + d]);
            bits = here > bits ? here : bits;
        }
        largest[row * LANES + lane] = bits;
    }
    barrier_local();
    if (local_index() < PLACE_BLOCK) {
        uint row = local_index();
        uint bits = 0u;
        for (uint n = 0u; n < LANES; n++) {
            // Starting at its own bank.
            uint here = largest[row * LANES + (n + row) % LANES];
            bits = here > bits ? here : bits;
        }
        multipliers[row] = group_multiplier(bits);
        scales[(ulong)head * places + place + row] = group_scale(bits);
    }
    barrier_local();

    uint words = (width + 3u) / 4u;
    if (wants_by_width != 0u) {
        for (uint i = local_index(); i < words * PLACE_BLOCK; i += GROUP) {
            uint row = i % PLACE_BLOCK;
            uint word = i / PLACE_BLOCK;
            int q[4];
            for (uint n = 0u; n < 4u; n++) {
                uint d = 4u * word + n;
                q[n] = row < count && d < width ? quantise(rows[row * step + d], multipliers[row]) : 0;
            }
            for (int s = 0; s < SLICES; s++) {
                ulong plane = ((ulong)head * SLICES + (ulong)s) * words + word;
                by_width[plane * places + place + row] = packed_slice(q, s);
            }
        }
    }
    if (wants_by_place != 0u) {
        for (uint i = local_index(); i < PLACE_BLOCK / 4u * width; i += GROUP) {
            uint d = mod_u32(i, width);
            uint word = div_u32(i, width);
            int q[4];
            for (uint n = 0u; n < 4u; n++) {
                uint row = 4u * word + n;
                q[n] = row < count ? quantise(rows[row * step + d], multipliers[row]) : 0;
            }
            for (int s = 0; s < SLICES; s++) {
                ulong plane = ((ulong)head * SLICES + (ulong)s) * (places / 4u) + place / 4u + word;
                by_place[plane * width + d] = packed_slice(q, s);
            }
        }
    }
}

// The rows of a group from planes packed by width: [slice, word, row].
FUNCTION void load_rows(
    LOCAL_POINTER int *rows, GLOBAL const int *planes, uint words, uint places, uint place, uint row_count
) {
    for (uint i = local_index(); i < SLICES * words * row_count; i += GROUP) {
        rows[i] = planes[(ulong)(i / row_count) * places + place + i % row_count];
    }
}

#ifndef ATTENTION_MFMA
// Words that a product takes at a time.
#define WORDS_TOGETHER 4u

// Scores of a work item: one column, half of the rows.
FUNCTION uint score_row(uint n, uint row_count) {
    return local_index() / TILE * (row_count / 2u) + n;
}

FUNCTION uint score_column(uint n) {
    return local_index() % TILE;
}

// Adds the products of one word of the width to a work item's scores; `offset` is its column's.
FUNCTION void add_word(
    Sums *sums, LOCAL_POINTER const int *rows, GLOBAL const int *columns, uint words, uint places, uint row_count,
    uint word, uint *offset
) {
    int column[SLICES];
    for (uint s = 0u; s < SLICES; s++) {
        column[s] = load_word(columns + (ulong)(s * words + word) * places, offset);
    }
    for (uint n = 0u; n < row_count / 2u; n += 4u) {
        int row[4][SLICES];
        for (uint s = 0u; s < SLICES; s++) {
            load_neighbours(row, s, rows + (s * words + word) * row_count + score_row(n, row_count));
        }
        for (uint i = 0u; i < 4u; i++) {
            sums[n + i] = add_products(sums[n + i], row[i], column);
        }
    }
}

// Products over the width of a work item's scores, if its column is one of those from `first` to
// before `end`. `columns` are the planes of the tile's columns.
FUNCTION void products_over_width(
    Sums *sums, LOCAL_POINTER const int *rows, GLOBAL const int *columns, uint words, uint places, uint row_count,
    uint first, uint end
) {
    uint at = score_column(0u);
    for (uint n = 0u; n < row_count / 2u; n++) {
        sums[n] = no_sums();
    }
    if (at < first || at >= end) {
        return;
    }
    uint word = 0u;
    uint offset = at * 4u;
    columns = uniform_pointer(columns);
    for (; word + WORDS_TOGETHER <= words; word += WORDS_TOGETHER) {
        #pragma unroll
        for (uint i = 0u; i < WORDS_TOGETHER; i++) {
            add_word(sums, rows, columns, words, places, row_count, word + i, &offset);
        }
    }
    for (; word < words; word++) {
        add_word(sums, rows, columns, words, places, row_count, word, &offset);
    }
}
#endif

// Slices the tile's weights, values[row, place], zero where nothing is visible, into weights[slice,
// row, word], and puts each row's scale into `scales`. Every work item calls it, after a barrier;
// the caller puts another one behind it.
FUNCTION void slice_weights(
    LOCAL_POINTER int *weights, LOCAL_POINTER float *scales, LOCAL_POINTER uint *largest,
    LOCAL_POINTER const float *values, uint row_count
) {
    uint per_row = GROUP / row_count;
    uint row = local_index() / per_row;
    uint member = local_index() % per_row;
    uint bits = 0u;
    for (uint i = member; i < TILE; i += per_row) {
        uint here = magnitude_bits(values[row * TILE + i]);
        bits = here > bits ? here : bits;
    }
    largest[local_index()] = bits;
    barrier_local();
    for (uint n = 0u; n < per_row; n++) {
        uint here = largest[row * per_row + n];
        bits = here > bits ? here : bits;
    }
    float multiplier = group_multiplier(bits);
    if (member == 0u) {
        scales[row] = group_scale(bits);
    }
    for (uint word = member; word < TILE_WORDS; word += per_row) {
        int q[4];
        for (uint n = 0u; n < 4u; n++) {
            q[n] = quantise(values[row * TILE + 4u * word + n], multiplier);
        }
        for (int s = 0; s < SLICES; s++) {
            weights[((uint)s * row_count + row) * WEIGHT_PITCH + word] = packed_slice(q, s);
        }
    }
}

#ifndef ATTENTION_MFMA
// Work items that share a row of results `width` wide: each has one column of every (GROUP /
// this)th row.
FUNCTION uint columns_at_once(uint width) {
    return width <= 64u ? 64u : width <= 128u ? 128u : 256u;
}

// Results of a work item, `width` columns in all.
FUNCTION uint result_row(uint n, uint width) {
    // Powers of two, written so that no compiler divides.
    uint step = width <= 64u ? 4u : width <= 128u ? 2u : 1u;
    return local_index() * step / GROUP + n * step;
}

FUNCTION uint result_column(uint n, uint width) {
    return local_index() & (columns_at_once(width) - 1u);
}

// What a tile adds to this work item's results: acc = fma(product over the tile, scale, acc *
// decay) for every row that sees something of the tile; a decay of 1 changes no bit. `step` is
// GROUP / columns_at_once.
FUNCTION void add_tile_by(
    float *acc, LOCAL_POINTER const int *weights, LOCAL_POINTER const float *scales,
    LOCAL_POINTER const float *decays, LOCAL_POINTER const uint *active, GLOBAL const int *planes, ulong slice_step,
    uint width, uint first_word, uint end_word, uint row_count, uint step
) {
    uint column = local_index() % (GROUP / step);
    uint first = local_index() / (GROUP / step);
    if (column >= width) {
        return;
    }
    Sums sums[FORWARD_ROWS];
    for (uint n = 0u; n < row_count / step; n++) {
        sums[n] = no_sums();
    }
    uint offset = column * 4u;
    planes = uniform_pointer(planes);
    // Four words at a time, which end within the places of a span: beyond what is seen, weights are
    // zero.
    end_word = uniform(end_word);
    for (uint word = uniform(first_word) / 4u * 4u; word < end_word; word += 4u) {
        int positions[4][SLICES];
        for (uint w = 0u; w < 4u; w++) {
            for (uint s = 0u; s < SLICES; s++) {
                positions[w][s] = load_word(planes + s * slice_step + (ulong)(word + w) * width, &offset);
            }
        }
        for (uint n = 0u; n < row_count / step; n++) {
            int weight[4][SLICES];
            for (uint s = 0u; s < SLICES; s++) {
                load_neighbours(weight, s, weights + (s * row_count + first + n * step) * WEIGHT_PITCH + word);
            }
            for (uint w = 0u; w < 4u; w++) {
                sums[n] = add_products(sums[n], weight[w], positions[w]);
            }
        }
    }
    for (uint n = 0u; n < row_count / step; n++) {
        uint row = first + n * step;
        if (active[row] != 0u) {
            acc[n] = fma_rn(chunk_value(sums[n]), scales[row], acc[n] * decays[row]);
        }
    }
}

// `planes` are packed by place, those of one head from the tile on; only the words from `first` to
// before `end` are read.
FUNCTION void add_tile(
    float *acc, LOCAL_POINTER const int *weights, LOCAL_POINTER const float *scales,
    LOCAL_POINTER const float *decays, LOCAL_POINTER const uint *active, GLOBAL const int *planes, ulong slice_step,
    uint width, uint first, uint end, uint row_count
) {
    switch (columns_at_once(width)) {
    case 64u:
        add_tile_by(acc, weights, scales, decays, active, planes, slice_step, width, first, end, row_count, 4u);
        break;
    case 128u:
        add_tile_by(acc, weights, scales, decays, active, planes, slice_step, width, first, end, row_count, 2u);
        break;
    default:
        add_tile_by(acc, weights, scales, decays, active, planes, slice_step, width, first, end, row_count, 1u);
        break;
    }
}
#endif

// A group per block of FORWARD_ROWS queries and head.
KERNEL(GROUP) attention_forward(
    GLOBAL float *o, GLOBAL float *lse, GLOBAL const int *q, GLOBAL const float *q_scales, GLOBAL const int *k,
    GLOBAL const float *k_scales, GLOBAL const int *v, GLOBAL const float *v_scales, GLOBAL const uint *table,
    uint heads, uint heads_per_key, uint key_width, uint value_width, uint query_places, uint key_places, uint window,
    float softmax_scale2, float cap, float cap_inverse
) {
    LOCAL ALIGNED int rows[SLICES * WORDS_MAX * FORWARD_ROWS];
    LOCAL float values[FORWARD_ROWS * TILE];
    LOCAL ALIGNED int weights[SLICES * FORWARD_ROWS * WEIGHT_PITCH];
    LOCAL float maxima[GROUP];
    LOCAL float sums[GROUP];
    LOCAL uint largest[GROUP];
    LOCAL float score_scales[FORWARD_ROWS];
    LOCAL float scales[FORWARD_ROWS];
    LOCAL float decays[FORWARD_ROWS];
    LOCAL uint active[FORWARD_ROWS];
    uint head = mod_u32(group_index(), heads);
    uint key_head = div_u32(head, heads_per_key);
    Rows block = rows_of(table, div_u32(group_index(), heads));
    uint key_words = (key_width + 3u) / 4u;
    ulong q_planes = (ulong)head * SLICES * key_words * query_places;
    load_rows(rows, q + q_planes, key_words, query_places, block.place, FORWARD_ROWS);
    if (local_index() < FORWARD_ROWS) {
        score_scales[local_index()] = q_scales[(ulong)head * query_places + block.place + local_index()] * softmax_scale2;
    }

    // Softmax: MEMBERS work items per row, each with the lanes `member` and `member + 16`.
    uint row = local_index() / MEMBERS;
    uint member = local_index() % MEMBERS;
    uint row_exists = row < block.count;
    Extent row_sees = seen_from(block.position + row, window);
    float m = as_f32(0xff800000u);
    float l = 0.0f;
    float acc[FORWARD_ROWS];
    for (uint n = 0u; n < FORWARD_ROWS; n++) {
        acc[n] = 0.0f;
    }

    // What any row of the block sees.
    Extent seen = seen_from(block.position, window);
    seen.end = block.position + block.count;
    GLOBAL const int *key_planes = k + (ulong)key_head * SLICES * key_words * key_places + block.columns;
    GLOBAL const float *key_scales = k_scales + (ulong)key_head * key_places + block.columns;
    GLOBAL const float *value_scales = v_scales + (ulong)key_head * key_places + block.columns;
    ulong value_step = (ulong)(key_places / 4u) * value_width;
    GLOBAL const int *value_planes =
        v + (ulong)key_head * SLICES * value_step + (ulong)(block.columns / 4u) * value_width;

    for (uint tile = seen.start / TILE * TILE; tile < seen.end; tile += TILE) {
        barrier_local();
        Extent tile_seen = in_tile(seen, tile);
        Sums products[FORWARD_ROWS / 2];
        products_over_width(
            products, rows, key_planes + tile, key_words, key_places, FORWARD_ROWS, tile_seen.start - tile,
            tile_seen.end - tile
        );
        for (uint n = 0u; n < FORWARD_ROWS / 2u; n++) {
            uint at = score_row(n, FORWARD_ROWS);
            uint key = tile + score_column(n);
            if (holds(tile_seen, key)) {
                float z = chunk_value(products[n]) * (score_scales[at] * key_scales[key]);
                values[at * TILE + key - tile] = CAP(z);
            }
        }
        barrier_local();

        Extent row_seen = in_tile(row_sees, tile);
        int sees = row_exists != 0u && row_seen.start < row_seen.end;
        float largest_score = m;
        for (uint i = member; i < TILE; i += MEMBERS) {
            if (sees && holds(row_seen, tile + i)) {
                float z = values[row * TILE + i];
                largest_score = largest_score > z ? largest_score : z;
            }
        }
        maxima[local_index()] = largest_score;
        barrier_local();
        for (uint n = 0u; n < MEMBERS; n++) {
            float other = maxima[row * MEMBERS + n];
            largest_score = largest_score > other ? largest_score : other;
        }
        float decay = isobit_exp2(m - largest_score);
        float halves[2];
        halves[0] = 0.0f;
        halves[1] = 0.0f;
        for (uint i = 0u; i < TILE / MEMBERS; i++) {
            uint at = row * TILE + i * MEMBERS + member;
            uint here = tile + i * MEMBERS + member;
            float folded = 0.0f;
            if (sees && holds(row_seen, here)) {
                float p = isobit_exp2(values[at] - largest_score);
                halves[i % 2u] = halves[i % 2u] + p;
                folded = p * value_scales[here];
            }
            values[at] = folded;
        }
        // The first step of the tree.
        sums[local_index()] = halves[0] + halves[1];
        barrier_local();
        float tree[8];
        for (uint n = 0u; n < 8u; n++) {
            tree[n] = sums[row * MEMBERS + n] + sums[row * MEMBERS + n + 8u];
        }
        for (uint n = 0u; n < 4u; n++) {
            tree[n] = tree[n] + tree[n + 4u];
        }
        float sum = (tree[0] + tree[2]) + (tree[1] + tree[3]);
        if (sees) {
            l = fma_rn(l, decay, sum);
            m = largest_score;
        }
        if (member == 0u) {
            decays[row] = decay;
            active[row] = sees ? 1u : 0u;
        }
        slice_weights(weights, scales, largest, values, FORWARD_ROWS);
        barrier_local();
        add_tile(
            acc, weights, scales, decays, active, value_planes + (ulong)(tile / 4u) * value_width, value_step,
            value_width, (tile_seen.start - tile) / 4u, (tile_seen.end - tile + 3u) / 4u, FORWARD_ROWS
        );
    }

    barrier_local();
    if (member == 0u && row_exists != 0u) {
        decays[row] = div_rn(1.0f, l);
        lse[(ulong)(block.source + row) * heads + head] = m + isobit_ln(l) * LOG2_E;
    }
    barrier_local();
    for (uint n = 0u; n < FORWARD_ROWS; n++) {
        uint to = result_row(n, value_width);
        uint d = result_column(n, value_width);
        if (to < block.count && d < value_width) {
            o[((ulong)(block.source + to) * heads + head) * value_width + d] = acc[n] * decays[to];
        }
    }
}

// Per query and head, over places: D and a copy of lse.
KERNEL(GROUP) attention_delta(
    GLOBAL float *delta, GLOBAL float *lse_by_place, GLOBAL const float *d_o, GLOBAL const float *o,
    GLOBAL const float *lse, GLOBAL const uint *blocks, uint heads, uint width, uint places
) {
    LOCAL float lanes[PLACE_BLOCK * LANES];
    uint head = mod_u32(group_index(), heads);
    uint block = div_u32(group_index(), heads);
    uint first = blocks[2u * block];
    uint count = blocks[2u * block + 1u];
    uint lane = local_index() % LANES;
    for (uint row = local_index() / LANES; row < PLACE_BLOCK; row += GROUP / LANES) {
        float sum = 0.0f;
        ulong at = ((ulong)(first + row) * heads + head) * width;
        for (uint d = lane; d < width && row < count; d += LANES) {
            sum = fma_rn(d_o[at + d], o[at + d], sum);
        }
        lanes[row * LANES + lane] = sum;
    }
    tree_sums(lanes, PLACE_BLOCK);
    uint row = local_index();
    if (row < PLACE_BLOCK) {
        ulong to = (ulong)head * places + block * PLACE_BLOCK + row;
        delta[to] = lanes[row * LANES];
        lse_by_place[to] = row < count ? lse[(ulong)(first + row) * heads + head] : 0.0f;
    }
}

// A group per block of BACKWARD_ROWS queries and head: the gradient of the queries.
KERNEL(GROUP) attention_grad_query(
    GLOBAL float *dq, GLOBAL const int *q, GLOBAL const float *q_scales, GLOBAL const int *k,
    GLOBAL const int *k_by_place, GLOBAL const float *k_scales, GLOBAL const int *v, GLOBAL const float *v_scales,
    GLOBAL const int *d_o, GLOBAL const float *d_o_scales, GLOBAL const float *delta, GLOBAL const float *lse,
    GLOBAL const uint *table, uint heads, uint heads_per_key, uint key_width, uint value_width, uint places,
    uint window, float softmax_scale, float softmax_scale2, float cap, float cap_inverse
) {
    LOCAL ALIGNED int q_rows[SLICES * WORDS_MAX * BACKWARD_ROWS];
    LOCAL ALIGNED int d_o_rows[SLICES * WORDS_MAX * BACKWARD_ROWS];
    LOCAL float values[BACKWARD_ROWS * TILE];
    LOCAL ALIGNED int weights[SLICES * BACKWARD_ROWS * WEIGHT_PITCH];
    LOCAL uint largest[GROUP];
    LOCAL float scales[BACKWARD_ROWS];
    LOCAL float decays[BACKWARD_ROWS];
    LOCAL uint active[BACKWARD_ROWS];
    LOCAL float row_q_scale[BACKWARD_ROWS];
    LOCAL float row_d_o_scale[BACKWARD_ROWS];
    LOCAL float row_delta[BACKWARD_ROWS];
    LOCAL float row_lse[BACKWARD_ROWS];
    uint head = mod_u32(group_index(), heads);
    uint key_head = div_u32(head, heads_per_key);
    Rows block = rows_of(table, div_u32(group_index(), heads));
    uint key_words = (key_width + 3u) / 4u;
    uint value_words = (value_width + 3u) / 4u;
    ulong q_planes = (ulong)head * SLICES * key_words * places;
    ulong d_o_planes = (ulong)head * SLICES * value_words * places;
    load_rows(q_rows, q + q_planes, key_words, places, block.place, BACKWARD_ROWS);
    load_rows(d_o_rows, d_o + d_o_planes, value_words, places, block.place, BACKWARD_ROWS);
    if (local_index() < BACKWARD_ROWS) {
        uint row = local_index();
        ulong at = (ulong)head * places + block.place + row;
        row_q_scale[row] = q_scales[at];
        row_d_o_scale[row] = d_o_scales[at];
        row_delta[row] = delta[at];
        row_lse[row] = lse[at];
        decays[row] = 1.0f;
    }

    float acc[BACKWARD_ROWS];
    for (uint n = 0u; n < BACKWARD_ROWS; n++) {
        acc[n] = 0.0f;
    }
    Extent seen = seen_from(block.position, window);
    seen.end = block.position + block.count;
    GLOBAL const int *key_planes = k + (ulong)key_head * SLICES * key_words * places + block.columns;
    GLOBAL const int *value_planes = v + (ulong)key_head * SLICES * value_words * places + block.columns;
    GLOBAL const float *key_scales = k_scales + (ulong)key_head * places + block.columns;
    GLOBAL const float *value_scales = v_scales + (ulong)key_head * places + block.columns;
    ulong key_step = (ulong)(places / 4u) * key_width;
    GLOBAL const int *keys_by_place =
        k_by_place + (ulong)key_head * SLICES * key_step + (ulong)(block.columns / 4u) * key_width;

    for (uint tile = seen.start / TILE * TILE; tile < seen.end; tile += TILE) {
        barrier_local();
        Extent tile_seen = in_tile(seen, tile);
        uint first = tile_seen.start - tile;
        uint end = tile_seen.end - tile;
        Sums scores[BACKWARD_ROWS / 2];
        Sums grads[BACKWARD_ROWS / 2];
        products_over_width(scores, q_rows, key_planes + tile, key_words, places, BACKWARD_ROWS, first, end);
        products_over_width(grads, d_o_rows, value_planes + tile, value_words, places, BACKWARD_ROWS, first, end);
        for (uint n = 0u; n < BACKWARD_ROWS / 2u; n++) {
            uint row = score_row(n, BACKWARD_ROWS);
            uint key = tile + score_column(n);
            float folded = 0.0f;
            if (holds(tile_seen, key) && row < block.count && holds(seen_from(block.position + row, window), key)) {
                float key_scale = key_scales[key];
                float value_scale = value_scales[key];
                float z = chunk_value(scores[n]) * ((row_q_scale[row] * softmax_scale2) * key_scale);
                z = CAP(z);
                float p = isobit_exp2(z - row_lse[row]);
                float g = p * fma_rn(chunk_value(grads[n]), row_d_o_scale[row] * value_scale, -row_delta[row]);
                g = CAP_GRADIENT(g, z);
                folded = g * (key_scale * softmax_scale);
            }
            values[row * TILE + key - tile] = folded;
        }
        if (local_index() < BACKWARD_ROWS) {
            uint row = local_index();
            Extent row_seen = in_tile(seen_from(block.position + row, window), tile);
            active[row] = row < block.count && row_seen.start < row_seen.end ? 1u : 0u;
        }
        barrier_local();
        slice_weights(weights, scales, largest, values, BACKWARD_ROWS);
        barrier_local();
        add_tile(
            acc, weights, scales, decays, active, keys_by_place + (ulong)(tile / 4u) * key_width, key_step, key_width,
            first / 4u, (end + 3u) / 4u, BACKWARD_ROWS
        );
    }

    for (uint n = 0u; n < BACKWARD_ROWS; n++) {
        uint to = result_row(n, key_width);
        uint d = result_column(n, key_width);
        if (to < block.count && d < key_width) {
            dq[((ulong)(block.source + to) * heads + head) * key_width + d] = acc[n];
        }
    }
}

// Adds one query head's gradient to that of its key head, or stores it if it is the first.
FUNCTION void add_head(GLOBAL float *into, const float *acc, uint count, ulong row_step, uint width, uint is_first) {
    for (uint n = 0u; n < BACKWARD_ROWS; n++) {
        uint to = result_row(n, width);
        uint d = result_column(n, width);
        if (to < count && d < width) {
            ulong at = to * row_step + d;
            into[at] = is_first != 0u ? acc[n] : into[at] + acc[n];
        }
    }
}

// A group per block of BACKWARD_ROWS keys and key head: the gradients of keys and values.
KERNEL(GROUP) attention_grad_key(
    GLOBAL float *dk, GLOBAL float *dv, GLOBAL const int *q, GLOBAL const int *q_by_place,
    GLOBAL const float *q_scales, GLOBAL const int *k, GLOBAL const float *k_scales, GLOBAL const int *v,
    GLOBAL const float *v_scales, GLOBAL const int *d_o, GLOBAL const int *d_o_by_place,
    GLOBAL const float *d_o_scales, GLOBAL const float *delta, GLOBAL const float *lse, GLOBAL const uint *table,
    uint key_heads, uint heads_per_key, uint key_width, uint value_width, uint places, uint window,
    float softmax_scale, float softmax_scale2, float cap, float cap_inverse
) {
    LOCAL ALIGNED int k_rows[SLICES * WORDS_MAX * BACKWARD_ROWS];
    LOCAL ALIGNED int v_rows[SLICES * WORDS_MAX * BACKWARD_ROWS];
    LOCAL float key_values[BACKWARD_ROWS * TILE];
    LOCAL float value_values[BACKWARD_ROWS * TILE];
    LOCAL ALIGNED int weights[SLICES * BACKWARD_ROWS * WEIGHT_PITCH];
    LOCAL uint largest[GROUP];
    LOCAL float scales[BACKWARD_ROWS];
    LOCAL float decays[BACKWARD_ROWS];
    LOCAL uint active[BACKWARD_ROWS];
    LOCAL float row_k_scale[BACKWARD_ROWS];
    LOCAL float row_v_scale[BACKWARD_ROWS];
    uint key_head = mod_u32(group_index(), key_heads);
    Rows block = rows_of(table, div_u32(group_index(), key_heads));
    uint key_words = (key_width + 3u) / 4u;
    uint value_words = (value_width + 3u) / 4u;
    ulong k_planes = (ulong)key_head * SLICES * key_words * places;
    ulong v_planes = (ulong)key_head * SLICES * value_words * places;
    load_rows(k_rows, k + k_planes, key_words, places, block.place, BACKWARD_ROWS);
    load_rows(v_rows, v + v_planes, value_words, places, block.place, BACKWARD_ROWS);
    if (local_index() < BACKWARD_ROWS) {
        uint row = local_index();
        ulong at = (ulong)key_head * places + block.place + row;
        row_k_scale[row] = k_scales[at];
        row_v_scale[row] = v_scales[at];
        decays[row] = 1.0f;
    }

    Extent seen = seeing(block.position + block.count - 1u, block.length, window);
    seen.start = block.position;
    ulong key_step = (ulong)(places / 4u) * key_width;
    ulong value_step = (ulong)(places / 4u) * value_width;
    ulong row = (ulong)block.source * key_heads + key_head;

    for (uint member = 0u; member < heads_per_key; member++) {
        uint head = key_head * heads_per_key + member;
        ulong per_place = (ulong)head * places + block.columns;
        GLOBAL const int *query_planes = q + (ulong)head * SLICES * key_words * places + block.columns;
        GLOBAL const int *d_o_planes = d_o + (ulong)head * SLICES * value_words * places + block.columns;
        GLOBAL const int *queries_by_place =
            q_by_place + (ulong)head * SLICES * key_step + (ulong)(block.columns / 4u) * key_width;
        GLOBAL const int *d_os_by_place =
            d_o_by_place + (ulong)head * SLICES * value_step + (ulong)(block.columns / 4u) * value_width;
        float key_acc[BACKWARD_ROWS];
        float value_acc[BACKWARD_ROWS];
        for (uint n = 0u; n < BACKWARD_ROWS; n++) {
            key_acc[n] = 0.0f;
            value_acc[n] = 0.0f;
        }
        for (uint tile = seen.start / TILE * TILE; tile < seen.end; tile += TILE) {
            barrier_local();
            Extent tile_seen = in_tile(seen, tile);
            uint first = tile_seen.start - tile;
            uint end = tile_seen.end - tile;
            Sums scores[BACKWARD_ROWS / 2];
            Sums grads[BACKWARD_ROWS / 2];
            products_over_width(scores, k_rows, query_planes + tile, key_words, places, BACKWARD_ROWS, first, end);
            products_over_width(grads, v_rows, d_o_planes + tile, value_words, places, BACKWARD_ROWS, first, end);
            for (uint n = 0u; n < BACKWARD_ROWS / 2u; n++) {
                uint at = score_row(n, BACKWARD_ROWS);
                uint query = tile + score_column(n);
                float key_folded = 0.0f;
                float value_folded = 0.0f;
                Extent seers = seeing(block.position + at, block.length, window);
                if (holds(tile_seen, query) && at < block.count && holds(seers, query)) {
                    float q_scale = q_scales[per_place + query];
                    float d_o_scale = d_o_scales[per_place + query];
                    float z = chunk_value(scores[n]) * ((q_scale * softmax_scale2) * row_k_scale[at]);
                    z = CAP(z);
                    float p = isobit_exp2(z - lse[per_place + query]);
                    float delta_here = delta[per_place + query];
                    float g = p * fma_rn(chunk_value(grads[n]), d_o_scale * row_v_scale[at], -delta_here);
                    g = CAP_GRADIENT(g, z);
                    key_folded = g * (q_scale * softmax_scale);
                    value_folded = p * d_o_scale;
                }
                key_values[at * TILE + query - tile] = key_folded;
                value_values[at * TILE + query - tile] = value_folded;
            }
            if (local_index() < BACKWARD_ROWS) {
                uint at = local_index();
                Extent seers = in_tile(seeing(block.position + at, block.length, window), tile);
                active[at] = at < block.count && seers.start < seers.end ? 1u : 0u;
            }
            barrier_local();
            slice_weights(weights, scales, largest, key_values, BACKWARD_ROWS);
            barrier_local();
            add_tile(
                key_acc, weights, scales, decays, active, queries_by_place + (ulong)(tile / 4u) * key_width, key_step,
                key_width, first / 4u, (end + 3u) / 4u, BACKWARD_ROWS
            );
            barrier_local();
            slice_weights(weights, scales, largest, value_values, BACKWARD_ROWS);
            barrier_local();
            add_tile(
                value_acc, weights, scales, decays, active, d_os_by_place + (ulong)(tile / 4u) * value_width, value_step,
                value_width, first / 4u, (end + 3u) / 4u, BACKWARD_ROWS
            );
        }
        uint is_first = member == 0u ? 1u : 0u;
        add_head(dk + row * key_width, key_acc, block.count, (ulong)key_heads * key_width, key_width, is_first);
        add_head(dv + row * value_width, value_acc, block.count, (ulong)key_heads * value_width, value_width, is_first);
    }
}
